"""CONTRIBUTING.md names files: each must be there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = ("dsv4", "tests", "tools", "benchmarks", "docs", "examples", ".github")
# stand for any operation, or for a file that a run writes
PATTERNS = re.compile(r"OP|GPU|TARGET|BEFORE|AFTER|[*…]")


@cache
def files() -> list[str]:
    found = [
        str(path.relative_to(ROOT))
        for part in PARTS
        for path in (ROOT / part).rglob("*")
        if "__pycache__" not in path.parts
    ]
    return [f"/{name}" for name in (*found, *(path.name for path in ROOT.iterdir()))]


def named() -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    spans = re.findall(r"`([\w./-]+(?:\.(?:py|md|toml|html|json|yml|txt|jsonl)|/))`", text)
    return [name for name in dict.fromkeys(spans) if not PATTERNS.search(name)]


def test_it_names_only_files_that_exist() -> None:
    """A name without its folder belongs to a folder that the line has named."""
    names = named()
    assert len(names) > 100
    lacking = [
        name for name in names if not any(each.endswith(f"/{name.rstrip('/')}") for each in files())
    ]
    assert not lacking
