"""The planner in a browser: Python of the page answers what the command line does, and asks no
other machine. Pyodide is fetched as `make docs` does; where it cannot be had the test is
skipped."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsv4.cli import app
from dsv4.planning import page as asked_page
from tests.support.browser import chromium
from tools import planner_page
from tools.draw_planner import served

playwright = pytest.importorskip("playwright.sync_api")
DOCS = Path(__file__).parents[2] / "docs"
FRAGMENT = (DOCS / "planner" / "page.html").read_text("utf-8")
STATIC = DOCS / "_static" / "planner"
MOST_MS = 120_000.0


def answered(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    parsed = json.loads(result.stdout)
    assert isinstance(parsed, dict)
    return parsed


def ask(**question: Any) -> dict[str, Any]:
    parsed = json.loads(asked_page.ask(json.dumps(question)))
    assert isinstance(parsed, dict)
    return parsed


# ---- without a browser ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "question",
    [
        {"model": "v4-flash", "count": 4, "gpu": "80GB", "context": 131_072},
        {"model": "v4-pro", "count": 16, "gpu": "H200", "context": 8192, "tp": 2, "pp": 2},
        {"model": "v4-flash", "count": 8, "gpu": "H200", "context": 1 << 20, "host_memory": "2TB"},
        {"model": "v4-flash", "count": 1, "gpu": "80GB", "context": 8192, "activations": "4GB"},
    ],
)
def test_the_page_asks_what_its_command_asks(question: dict[str, Any]) -> None:
    found = ask(**question)
    program, plan, *arguments = found["command"].split()
    assert (program, plan) == ("dsv4", "plan")
    expected = answered(*arguments)
    assert found["answer"] == expected["answer"]
    assert found["fits"] == expected["fits"]
    (fit,) = expected["chosen"]["fits"]
    (point,) = (each for each in found["curve"] if each["context"] == question["context"])
    assert point["dsv4"] == fit["requests"]
    assert point["with host memory"] == fit["with_host_memory"]
    assert {name: point[name] for name in fit["peers"]} == fit["peers"]
    whole = sum(part["bytes"] for part in found["memory"])
    assert whole == found["memory_bytes"] or not found["fits"]


def test_what_cannot_be_answered_is_an_error() -> None:
    assert "heads" in ask(model="v4-flash", count=12, gpu="H200", tp=12, context=1024)["error"]


def test_only_what_the_planner_loads_is_packed() -> None:
    names = {path.relative_to(planner_page.ROOT).as_posix() for path in planner_page.modules()}
    assert "dsv4/planning/page.py" in names
    assert not any(name.startswith(("dsv4/cli", "dsv4/reference", "dsv4/serve")) for name in names)
    assert planner_page.package() == planner_page.package()


def test_another_file_is_not_taken_for_pyodide() -> None:
    with pytest.raises(planner_page.WrongFile, match="sha512"):
        planner_page.checked(b"something else", "here")


def test_the_script_and_the_page_name_the_same_elements() -> None:
    script = (STATIC / "planner.js").read_text("utf-8")
    named = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert len(named) > 15
    assert {f"planner-{name}" for name in named} <= set(re.findall(r'id="([\w-]+)"', FRAGMENT))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)
    for path in (*STATIC.iterdir(), DOCS / "planner" / "page.html"):
        outside = set(re.findall(r"https?://[^\"' ]+", path.read_text("utf-8")))
        assert outside <= {"http://www.w3.org/2000/svg"}, path


# ---- in one --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page alone, as the site has it, on a free port."""
    try:
        planner_page.archive()
    except OSError as error:
        pytest.skip(f"Pyodide cannot be had: {error}")
    with served(tmp_path_factory.mktemp("site")) as address:
        yield address


def test_opened_as_a_file_it_says_what_to_do(browser: Any, tmp_path: Path) -> None:
    """Browsers load no modules from files."""
    shutil.copytree(STATIC, tmp_path / "_static" / "planner")
    (tmp_path / "planner.html").write_text(f"<meta charset=utf-8>{FRAGMENT}", "utf-8")
    tab = browser.new_page()
    tab.goto((tmp_path / "planner.html").as_uri())
    playwright.expect(tab.locator("#planner-answer")).to_contain_text("python -m http.server")
    tab.close()


def test_the_planner_answers_in_a_browser(browser: Any, site: str, tmp_path: Path) -> None:
    """As the command does; again when a slider moves; and nobody else is asked for anything."""
    expect, foreign, errors = playwright.expect, list[str](), list[str]()
    expect.set_options(timeout=MOST_MS)
    context = browser.new_context(viewport={"width": 900, "height": 1100})

    def pass_on(route: Any) -> None:
        if route.request.url.startswith(site):
            return route.continue_()
        foreign.append(route.request.url)
        return route.abort()

    context.route("**/*", pass_on)
    tab = context.new_page()
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(f"{site}/planner.html")
    ready = tab.locator("#planner[aria-busy=false]")
    answer = tab.locator("#planner-answer")
    expect(answer).to_have_text(
        answered("v4-flash", "--gpus", "4xH200", "--context", "128k")["answer"]
    )
    expect(ready).to_be_visible()
    assert tab.locator("#planner-curve polyline").count() == 3  # ours, vLLM, SGLang
    assert tab.locator("#planner-bar rect").count() >= 6

    slide(tab, "host", 5)  # 1024 GB
    expect(tab.locator("#planner-curve polyline")).to_have_count(4)
    slide(tab, "context", 10)  # 1M
    slide(tab, "count", 5)  # 8 GPUs
    command = "dsv4 plan v4-flash --gpus 8xH200 --context 1M --host-memory 1024GB"
    expect(tab.locator("#planner-command")).to_have_text(command)
    expect(answer).to_have_text(answered(*command.split()[2:])["answer"])

    tab.screenshot(path=tmp_path / "planner.png")
    slide(tab, "count", 0)
    slide(tab, "memory", 80)
    expect(answer).to_have_class("wrong")
    expect(answer).to_contain_text("3 x 80GB would")
    assert not tab.locator("#planner-curve").is_visible()
    context.close()
    assert (foreign, errors) == ([], [])


def slide(tab: Any, name: str, value: int) -> None:
    tab.locator(f"#planner-{name}").fill(str(value))
