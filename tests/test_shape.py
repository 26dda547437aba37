"""How large things may become, and which words they use, read from the sources: ratchets.

What exceeds a rule today is listed with its number, which may fall and must not grow. (Complexity
of functions is ruff's: C901 in pyproject.toml.)
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_NAMES = 25  # that completion shows on an object: methods, properties and fields
LARGER: dict[str, int] = {}

# words that need a second reading, and what an English-speaking engineer writes
WORDS = {
    "behind": "after, past, below",
    "in front of": "before",
    "so many|so long|so much|so far as": "this many, n, up to",
    "told|tells": "given, passed; says only of texts",
    "nobody|somebody": "no caller, another process, …",
    "whoever": "the process or call that is meant",
    "is no|are no": "is not a",
    "but for": "except",
    "beside|besides": "next to, in addition",
    "as ever": "as usual",
    "paid for|pays for": "reserved, reserves",
    "narrow step|wide step|narrow half|wide half": "decode batch, prefill batch",
    "under way": "running, being loaded",
}
LEFT: dict[str, int] = {
    "dsv4/tiers": 1,  # part of the names of stored objects
}


@cache
def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((ROOT / "dsv4").rglob("*.py"))}


# ---- names of a class ----------------------------------------------------------------------------


def public_names(found: ast.ClassDef) -> set[str]:
    names: set[str] = set()
    for each in found.body:
        match each:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(each.name)
                names |= attributes(each)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.startswith("_")}


def attributes(method: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """What a method sets on its own object."""
    own = method.args.args[0].arg if method.args.args else ""
    return {
        each.attr
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and isinstance(each.value, ast.Name)
        and each.value.id == own
    }


def test_no_class_has_more_names_than_one_remembers():
    """A protocol is a list of what others must do, and may be longer."""
    large = {
        f"{path.relative_to(ROOT)}: {each.name}": len(public_names(each))
        for path, text in sources().items()
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.ClassDef)
        and "Protocol" not in map(ast.unparse, each.bases)
        and len(public_names(each)) > MOST_NAMES
    }
    grown = {name: count for name, count in large.items() if count > LARGER.get(name, MOST_NAMES)}
    assert not grown, f"more than {MOST_NAMES}: give some of them to an object of their own"


# ---- words ---------------------------------------------------------------------------------------


def prose(text: str) -> Iterator[str]:
    """Comments, docstrings and messages, each in one line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            yield " ".join(token.string.replace("#", " ").split())


def words_left() -> Counter[str]:
    """By directory."""
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    found: Counter[str] = Counter()
    for path, text in sources().items():
        for each in prose(text):
            found[str(path.parent.relative_to(ROOT))] += len(pattern.findall(each))
    return +found


def test_no_new_place_uses_words_that_need_a_second_reading():
    more = {name: count for name, count in words_left().items() if count > LEFT.get(name, 0)}
    assert not more, f"say it in other words: {WORDS}"


# ---- a trap ------------------------------------------------------------------------------------


def test_what_is_bounded_forgets_its_oldest_in_constant_time():
    """`next(iter(a_dict))` walks over every entry that was deleted before it: a dict that always
    loses its first entry takes longer with each one, up to its whole size."""
    pattern = re.compile(r"(\.pop\(|\[)next\(iter\(")
    found = {
        str(path.relative_to(ROOT)) for path, text in sources().items() if pattern.search(text)
    }
    assert not found, "use an OrderedDict and popitem(last=False)"
