"""How Sphinx makes the site of these pages: `make docs`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from posixpath import join, normpath
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import typer  # noqa: E402
from typer.cli import get_docs_for_click  # noqa: E402

from dsv4 import __version__  # noqa: E402
from dsv4.cli import app as command  # noqa: E402
from tools import planner_page  # noqa: E402
from tools.reference_pages import is_internal  # noqa: E402

project = "dsv4"
author = copyright = "the dsv4 authors"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode", "sphinx_copybutton"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

# pages are plain Markdown that GitHub shows as well
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]

# notebooks run anew with every build, and an error in a cell fails it
nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

default_role = "code"  # `a name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
python_maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"  # light and dark, nothing from other machines
html_title = "dsv4"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

# `make docs-links` asks the addresses of other sites
linkcheck_ignore = [r"http://127\.0\.0\.1.*", r"http://localhost.*"]
linkcheck_timeout = 20


def commands() -> str:
    """What `--help` prints, of every command."""
    click = typer.main.get_command(command)
    with typer.Context(click, info_name="dsv4") as context:
        return get_docs_for_click(obj=click, ctx=context, name="dsv4", title="The `dsv4` command")


# ---- links to files that are not pages --------------------------------------------------------

_PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = _PROJECT["urls"]["Source"] + "/blob/main/"


def elsewhere(folder: str, text: str) -> str:
    """A link that leaves docs/ leads to the repository, one that comes back into it to the page."""

    def link(found: re.Match[str]) -> str:
        path = normpath(join(folder, found[1]))
        if not (HERE.parent / path).exists() or path.startswith("docs/"):
            return f"]({found[1].removeprefix('docs/')}{found[2] or ''})"
        return f"]({SOURCE}{path}{found[2] or ''})"

    return re.sub(r"\]\(((?:\.\./|docs/|[A-Z]+\.md)[^)#]*)(#[^)]*)?\)", link, text)


def setup(app: Any) -> None:
    def page(_: Any, name: str, content: list[str]) -> None:
        content[0] = elsewhere(join("docs", name, ".."), content[0])
        if name == "reference/commands":
            content[0] = commands()

    def included(_: Any, path: Path, name: str, content: list[str]) -> None:
        content[0] = elsewhere("", content[0])

    def with_python(app: Any, error: Exception | None) -> None:
        if error is None and app.builder.name == "html":
            planner_page.write(Path(app.outdir) / "_static" / "planner" / "python")

    def skipped(_: Any, what: str, name: str, member: Any, skip: bool, options: Any) -> bool | None:
        return True if is_internal(member) else None

    app.connect("autodoc-skip-member", skipped)
    app.connect("build-finished", with_python)
    app.connect("source-read", page)
    app.connect("include-read", included)
