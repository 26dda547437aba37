"""The site of docs/: every page is in its menu, every public name on a page, drawings are current.

Dead links and the notebooks are `make docs`', which CI runs.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest

import dsv4
from tools import drawings

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
    } | {"reference/commands"}  # generated
    assert named == found


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_explained_and_in_the_reference(name: str) -> None:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    assert re.search(rf"^\.\. auto\w+:: dsv4\.{name}$", pages, re.MULTILINE)
    value = getattr(dsv4, name)
    assert inspect.getdoc(value), name
    if inspect.isclass(value):
        for member, found in vars(value).items():
            callable_or_property = inspect.isfunction(found) or isinstance(
                found, property | classmethod | staticmethod
            )
            if not member.startswith("_") and callable_or_property:
                assert inspect.getdoc(found), f"{name}.{member}"


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
