"""The page: what it may load, and, in a browser, a chat beside its cache."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from dsv4.serve.demo import ServedDemo
from tests.serve.serving import Running, running
from tests.support.browser import chromium

playwright = pytest.importorskip("playwright.sync_api")
STATIC = files("dsv4.serve") / "static"
PATHS = ("/", "/static/page.css", "/static/page.js", "/static/introduction.json")
MOST_MS = 120_000.0


@pytest.fixture(scope="module")
def demo() -> Iterator[Running]:
    with running(ServedDemo()) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with chromium() as found:
        yield found


def test_it_loads_nothing_from_elsewhere_and_needs_no_key():
    with running(api_key="secret") as server, server.http() as client:
        for path in PATHS:
            answer = client.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert not re.search(r"https?://", answer.text)
        assert client.get("/cache/state").status_code == 401
        assert client.get("/static/../cache/state").status_code == 401
        assert client.get("/static/%2e%2e/cache/state").status_code in (401, 404)
        assert client.get("/static/nothing").status_code == 404


def test_what_is_said_is_never_read_as_html():
    script = (STATIC / "page.js").read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


def test_every_element_that_the_script_names_is_there():
    script, page = (
        (STATIC / name).read_text(encoding="utf-8") for name in ("page.js", "index.html")
    )
    named = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert len(named) > 15
    assert named <= set(re.findall(r'id="([\w-]+)"', page))


def test_two_tabs_share_what_both_begin_with(demo: Running, browser, tmp_path: Path):
    """A question, its answer, the blocks of it; in another tab the same beginning is reused."""
    expect = playwright.expect
    expect.set_options(timeout=MOST_MS)
    errors: list[str] = []
    tabs = []
    for scheme, size in (("light", (1280, 900)), ("dark", (390, 844))):
        tab = browser.new_page(color_scheme=scheme, viewport={"width": size[0], "height": size[1]})
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.goto(demo.url)
        expect(tab.locator("#connection")).to_have_text("live")
        expect(tab.locator("#send")).to_be_enabled()
        tabs.append(tab)
    first, second = tabs
    assert first.locator(".block.free").count() > 100  # the legend's apart
    first.fill("#prompt", "What is a ring?")
    first.press("#prompt", "Enter")
    expect(first.locator("#messages .assistant")).to_contain_text("A ring is a set of rows")
    expect(first.locator("#messages small")).to_contain_text("0 of 414 prompt tokens")
    expect(first.locator("#blocks .block.cached").nth(2)).to_be_visible()
    expect(second.locator("#tree .block").nth(2)).to_be_visible()  # all see all blocks
    second.fill("#prompt", "<b>What is a fork?</b>")
    second.click("#send")
    expect(second.locator("#messages small")).to_contain_text("384 of ")
    assert second.locator("#messages b").count() == 0
    expect(second.locator("#turns tbody tr")).to_have_count(2)
    expect(second.locator("#turns tbody tr").first).to_contain_text("384")
    shown = tmp_path / "page.png"
    first.screenshot(path=shown, full_page=True)
    assert shown.stat().st_size > 10_000
    assert errors == []
    wide = second.evaluate("document.documentElement.scrollWidth")
    assert wide <= 390  # a phone scrolls in one direction


def test_a_new_conversation_forgets_an_answer_that_still_comes(demo: Running, browser):
    """Nothing of it is in the next prompt, and what was never answered is not asked again."""
    tab, sent = browser.new_page(), []
    tab.on("request", lambda asked: sent.append(asked.post_data))
    tab.goto(demo.url)
    playwright.expect(tab.locator("#send")).to_be_enabled(timeout=MOST_MS)
    tab.uncheck("#introduction")
    for way in ("anew", "stop"):
        tab.fill("#prompt", f"What is a snapshot? ({way})")
        tab.press("#prompt", "Enter")
        tab.click(f"#{way}")
        playwright.expect(tab.locator("#send")).to_be_enabled(timeout=MOST_MS)
    tab.click("#anew")
    tab.fill("#prompt", "What is a block?")
    tab.press("#prompt", "Enter")
    said = tab.locator("#messages .assistant")
    playwright.expect(said).to_contain_text("A block is the unit", timeout=MOST_MS)
    bodies = [json.loads(body)["messages"] for body in sent if body]
    assert len(bodies) == 3
    assert bodies[1:] == [
        [{"role": "user", "content": text}]
        for text in ("What is a snapshot? (stop)", "What is a block?")
    ]
    tab.close()


def test_a_key_is_asked_for(browser):
    with running(api_key="secret") as server:
        tab = browser.new_page()
        tab.goto(server.url)
        playwright.expect(tab.locator("#unlock")).to_be_visible(timeout=MOST_MS)
        tab.fill("#key", "secret")
        tab.press("#key", "Enter")
        playwright.expect(tab.locator("#connection")).to_have_text("live", timeout=MOST_MS)
        playwright.expect(tab.locator("#send")).to_be_enabled()
        assert "secret" not in tab.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
        tab.close()
