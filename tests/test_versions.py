"""pyproject.toml allows what `make test-oldest` and `make test-tritons` install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
Version = tuple[int, ...]
EXTRAS = ("torch", "transformers", "plot", "metrics", "tiers", "object")
NAMES = ["torch", "triton", "numpy", "transformers", "typer", "rich", "safetensors", "matplotlib"]
NAMES += ["prometheus-client", "xxhash", "obstore"]


def numbers(text: str) -> Version:
    """2.11.0 → (2, 11): zeros at the end say nothing."""
    found = [int(part) for part in re.findall(r"\d+", text)]
    while found and not found[-1]:
        found.pop()
    return tuple(found)


def bounds() -> dict[str, tuple[Version, Version | None]]:
    """The lowest version that is allowed and the first that is not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (project["optional-dependencies"][name] for name in EXTRAS)
    asked = [*project["dependencies"], *(each for extra in extras for each in extra)]
    found = {}
    for requirement in asked:
        if requirement.startswith("dsv4["):
            continue
        name, ranges = re.fullmatch(r"([a-z-]+)([^;]*)(?:;.*)?", requirement).groups()
        low = re.search(r">=([\d.]+)", ranges)
        high = re.search(r"<([\d.]+)", ranges)
        assert low, f"{requirement} has no lower bound"
        found[name] = (numbers(low[1]), numbers(high[1]) if high else None)
    return found


def test_all_of_them_are_named():
    assert sorted(bounds()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_oldest_versions_are_tested(name: str):
    recipe = MAKEFILE.split("\ntest-oldest:")[1].split("\n\n")[0]
    pinned = re.search(rf"\b{name}==([\d.]+)", recipe)
    assert pinned
    assert numbers(pinned[1]) == bounds()[name][0]


def test_every_triton_that_is_allowed_is_tested():
    low, high = bounds()["triton"]
    assert high is not None
    listed = re.search(r"^TRITONS := (.*)$", MAKEFILE, re.MULTILINE)
    assert listed
    tested = [numbers(version)[:2] for version in listed[1].split()]
    assert tested == [(low[0], minor) for minor in range(low[1], high[1])]


def test_the_pinned_versions_are_allowed():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    for name, (low, high) in bounds().items():
        spelt = name.replace("-", "[-_]")
        pinned = re.search(rf"^{spelt}==([\d.]+)", text, re.MULTILINE)
        assert pinned, name
        assert low <= numbers(pinned[1]), name
        assert high is None or numbers(pinned[1]) < high, name
