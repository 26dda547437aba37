"""Takes the picture of the server's page for docs/serve.md.

    python tools/draw_page.py [OUT] [--dark] [--phone]

Needs Playwright and a Chromium (`apt-get install chromium`). Two tabs ask the demo model; the
picture is of the first, while the second is being answered.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from playwright.sync_api import sync_playwright

from dsv4.serve import process
from dsv4.serve.app import make_state
from dsv4.serve.demo import ServedDemo
from dsv4.serve.options import ServerOptions

OUT = Path(__file__).parents[1] / "docs" / "plots" / "serve.png"
MOST_MS = 120_000.0


def ask(tab: Any, text: str) -> None:
    tab.fill("#prompt", text)
    tab.press("#prompt", "Enter")


def settled(tab: Any) -> None:
    tab.wait_for_selector("#send:not([disabled])", timeout=MOST_MS)


def draw(url: str, out: Path, *, dark: bool, phone: bool) -> None:
    size = {"width": 390, "height": 844} if phone else {"width": 1280, "height": 900}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium") or shutil.which("google-chrome"),
            args=["--no-sandbox", "--disable-dev-shm-usage"],
        )
        scheme = "dark" if dark else "light"
        first, second = (browser.new_page(color_scheme=scheme, viewport=size) for _ in range(2))
        for tab in (first, second):
            tab.goto(url)
            settled(tab)
        for text in ("What is a ring?", "What is a fork?"):
            ask(first, text)
            settled(first)
        ask(second, "What is a snapshot?")
        first.wait_for_selector("#requests .request", timeout=MOST_MS)
        first.screenshot(path=out, full_page=True)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=OUT)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--host-memory", type=int)
    given = parser.parse_args()
    options = ServerOptions(host_memory_bytes=given.host_memory, max_requests=4)
    state = make_state(ServedDemo(), options)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(process.config(state))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        draw(process.address(listener), given.out, dark=given.dark, phone=given.phone)
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
