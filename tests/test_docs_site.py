"""The site of docs/: every page is in its menu, every public name on a page, drawings are current.

Dead links and the notebooks are `make docs`', which CI runs.
"""

from __future__ import annotations

import inspect
import json
import re
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import dsv4
from dsv4.cache.build import CacheOptions
from dsv4.cache.handoff.handoff import Handoff
from dsv4.cache.requests import Request
from dsv4.cache.transfers.tiers import Tiers
from tools import drawings, reference_pages
from tools.reference_pages import is_internal

DOCS = Path(__file__).parents[1] / "docs"
PUBLIC = [name for name in dsv4.__all__ if name != "__version__"]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def test_every_page_is_in_a_menu() -> None:
    named = {"index"}
    for page in DOCS.rglob("*.md"):
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
            for line in tree.splitlines():
                if line and not line.startswith(":"):
                    named.add((page.parent / line).relative_to(DOCS).as_posix())
    found = {
        path.relative_to(DOCS).with_suffix("").as_posix()
        for path in [*DOCS.rglob("*.md"), *NOTEBOOKS]
        if "_build" not in path.parts
    }
    assert named == found


# what public objects have for some of their calls
PARTS = [
    *("cache.room.CacheRoom", "cache.prefix.prefixes.Prefixes"),
    *("cache.layout.CacheBytes", "cache.layout.Layout"),
]


@pytest.mark.parametrize("name", [*PUBLIC, *PARTS])
def test_every_public_name_is_explained_and_in_the_reference(name: str) -> None:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    assert re.search(rf"^\.\. auto\w+:: dsv4\.{name}$", pages, re.MULTILINE)
    value = attrgetter(name)(dsv4)
    assert inspect.getdoc(value), name
    if inspect.isclass(value):
        for member, found in vars(value).items():
            callable_or_property = inspect.isfunction(found) or isinstance(
                found, property | classmethod | staticmethod
            )
            if not member.startswith("_") and callable_or_property:
                assert inspect.getdoc(found), f"{name}.{member}"


# made by the manager, and by nobody else
GIVEN = {
    "Arrival", "Batch", "ForwardPlan", "LayerCacheHandle", "PinnedPrefix", "Prompt", "Request",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in GIVEN])
def test_what_one_gives_to_a_public_name_is_explained(name: str) -> None:
    """By name, in the docstring of the class or function."""
    value = getattr(dsv4, name)
    if isinstance(value, type) and issubclass(value, Exception | Enum):
        return
    text = f"{inspect.getdoc(value)} {inspect.getdoc(value.__init__)}"
    for argument, found in inspect.signature(value).parameters.items():
        if found.kind is not found.VAR_POSITIONAL:
            family = argument.partition("_")[0] + "_"  # `blocks_` in total, free and live
            assert re.search(rf"\b{argument}\b|`{family}`", text), argument


def test_the_page_of_options_is_made_of_the_code() -> None:
    """`python -m tools.reference_pages` puts it right."""
    text = reference_pages.PAGE.read_text("utf-8")
    assert reference_pages.with_tables(text) == text
    for name in CacheOptions.__annotations__:
        assert f"| `{name}` |" in text


@pytest.mark.parametrize("cls", [Tiers, Handoff])
def test_the_calls_of_a_part_of_the_manager_are_explained_and_in_the_reference(cls: type) -> None:
    page = (DOCS / "reference" / "tiers.md").read_text("utf-8")
    assert f".. autoclass:: {cls.__module__}.{cls.__name__}\n" in page
    shown = [name for name in calls(cls) if not is_internal(vars(cls)[name])]
    assert "close" in shown
    for name in shown:
        assert inspect.getdoc(vars(cls)[name]), name


@pytest.mark.parametrize("cls", [Request, Tiers, Handoff])
def test_internal_calls_are_left_out_of_the_reference(cls: Any) -> None:
    left_out = {name for name in calls(cls) if is_internal(vars(cls)[name])}
    assert left_out == cls._internal & {*calls(cls)} != set()


def calls(cls: type) -> list[str]:
    return [
        name
        for name, found in vars(cls).items()
        if not name.startswith("_") and (callable(found) or isinstance(found, property))
    ]


@pytest.mark.parametrize("drawing", drawings.drawings(), ids=lambda drawing: drawing.name)
def test_a_drawing_is_what_its_program_draws(drawing: drawings.Drawing) -> None:
    """`python -m tools.drawings` puts it right."""
    assert (drawings.FOLDER / f"{drawing.name}.svg").read_text("utf-8") == drawing.svg()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_of_its_author(path: Path) -> None:
    """They are made when it is run, so they cannot be of another version."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    for cell in code:
        compile("".join(cell["source"]), path.name, "exec", dont_inherit=True)
        assert not cell["outputs"]
