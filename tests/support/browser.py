"""Debian's Chromium, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser of Playwright's. Without Chromium the test is skipped, or fails if
    DSV4_REQUIRE_BROWSER is set."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        why = "there is no Chromium: install it with apt-get install chromium"
        if os.environ.get("DSV4_REQUIRE_BROWSER", "0") not in ("", "0"):
            pytest.fail(f"DSV4_REQUIRE_BROWSER is set, and {why}", pytrace=False)
        pytest.skip(why)
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield found
        found.close()
