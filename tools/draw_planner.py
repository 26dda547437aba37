"""The picture of the planner's page in README.md: docs/plots/planner.png, of 4 x 80 GB.

python -m tools.draw_planner          needs a Chromium, and Pyodide as `make docs` does
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools import planner_page

DOCS = planner_page.ROOT / "docs"
PICTURE = DOCS / "plots" / "planner.png"
STYLE = "body { font: 15px/1.5 sans-serif; margin: 24px; color: #1a1a2e; background: #fff }"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Puts the page alone into a folder, as the site has it, and its address for as long."""
    shutil.copytree(DOCS / "_static" / "planner", root / "_static" / "planner")
    planner_page.write(root / "_static" / "planner" / "python")
    fragment = (DOCS / "planner" / "page.html").read_text("utf-8")
    head = f"<!doctype html><meta charset=utf-8><style>{STYLE}</style>"
    text = f'{head}<body data-theme="auto">{fragment}'
    (root / "planner.html").write_text(text, encoding="utf-8")
    handler = partial(Quiet, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def draw(picture: Path) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as address,
        sync_playwright() as started,
    ):
        browser = started.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        tab = browser.new_page(viewport={"width": 860, "height": 700}, device_scale_factor=1.5)
        tab.goto(f"{address}/planner.html")
        ready = "#planner[aria-busy=false]"
        tab.wait_for_selector(ready, timeout=300_000)
        for name, value in (("memory", 80), ("count", 3), ("host", 5)):
            tab.locator(f"#planner-{name}").fill(str(value))
        tab.locator("#planner-command").get_by_text("1024GB").wait_for(timeout=300_000)
        tab.wait_for_selector(ready, timeout=300_000)
        box = tab.locator("figure").last.bounding_box()
        assert box is not None
        clip = {"x": 0, "y": 0, "width": 860, "height": box["y"] + box["height"]}
        tab.screenshot(path=picture, clip=clip, full_page=True)
        browser.close()


if __name__ == "__main__":
    draw(PICTURE)
