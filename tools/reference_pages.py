"""What the reference pages have from the code: `python -m tools.reference_pages`.

docs/reference/options.md has the options of `Cache` and `KVCacheManager`, written here; a test
holds it. When the site is built, `is_internal` leaves names out that are not for callers.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsv4.cache.build import SchemaOptions
from dsv4.cache.options import ManagerOptions
from dsv4.cache.schema import CacheSchema

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "options.md"
TABLES = {"manager": ManagerOptions, "schema": SchemaOptions}


def options(kind: Any) -> Iterator[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each, as they are written in the code."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    defaults = inspect.signature(CacheSchema.build).parameters
    for field in tree.body:
        if isinstance(field, ast.AnnAssign):
            name, annotation = ast.unparse(field.target), field.annotation
            assert isinstance(annotation, ast.Subscript), name
            assert isinstance(annotation.slice, ast.Tuple), name
            of, *middle, meaning = annotation.slice.elts
            default = ast.unparse(middle[0]) if middle else repr(defaults[name].default)
            yield name, ast.unparse(of).replace("'", ""), default, ast.literal_eval(meaning)


def table(kind: Any) -> str:
    lines = ["| option | type | default | |", "| --- | --- | --- | --- |"]
    for name, of, default, meaning in options(kind):
        of = of.replace("|", "\\|")
        lines.append(f"| `{name}` | `{of}` | `{default}` | {meaning} |")
    return "\n".join(lines) + "\n"


def with_tables(text: str) -> str:
    for name, kind in TABLES.items():
        begin = text.index(f"<!-- {name} -->\n") + len(f"<!-- {name} -->\n")
        text = text[:begin] + table(kind) + text[text.index("<!-- end -->", begin) :]
    return text


def is_internal(member: object) -> bool:
    """Whether its class keeps it for the other files of the cache (`_internal`)."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    owner: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    *path, name = getattr(function, "__qualname__", "").split(".")
    for each in path:
        owner = getattr(owner, each, None)
    return bool(path) and name in getattr(owner, "_internal", ())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
