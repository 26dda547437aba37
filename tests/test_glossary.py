"""docs/glossary.md: one word, one meaning, and every word that the API uses."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import dsv4
from dsv4.cache.handoff.handoff import Handoff
from dsv4.cache.layout import CacheBytes, Layout
from dsv4.cache.memory import CacheMemory
from dsv4.cache.prefix.prefixes import Prefixes
from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS
from dsv4.cache.room import CacheRoom
from dsv4.cache.transfers.tiers import Tiers

TEXT = (Path(__file__).parents[1] / "docs" / "glossary.md").read_text("utf-8")
CELLS = [line.split("|")[1].strip() for line in TEXT.splitlines() if line.startswith("| ")]
# English, or Python's: they mean what they say
PLAIN = set(
    re.findall(
        r"\w+",
        """
        accepted acquire advance after align all allocate allow alone appended asked asker at
        attention before bf16 build by byte cache call can check clamped closed cls collect
        collector compressed compression compute config content continue copy count deferred detach
        device
        dict dim
        direct disk done drop dsv end error extra for format forward free from get gpu head
        hidden hold host http id input invalid invariant keep kind last later latest length like
        limit lost manager map mark max memory message metadata minimum mismatch missing model
        mooncake name needed note num number object of open option order other out overflow own
        pad padded parent passing per period prepare preset progress prometheus prompt protocol
        publish read readable reason recent register released remove request require restart
        reuse root round run self serial set shape size small source start stat step sync table
        take tensor text thread to token too total type unsupported unused unwritten url use
        used wait waiting want weight what where whole write written
        """,
    )
)
_SINGULAR = {
    "batches": "batch",
    "miss": "miss",
    "misses": "miss",
    "prometheus": "prometheus",
    "cls": "cls",
    "progress": "progress",
    "prefixes": "prefix",
}


# what public objects have for some of their calls
PARTS = (CacheMemory, CacheRoom, Prefixes, Tiers, Handoff, CacheBytes, Layout)


def own_names(name: str, value: object) -> Iterator[str]:
    """A public name, its own public members and their parameters; nothing inherited from Python."""
    yield name
    if not inspect.isclass(value):
        yield from inspect.signature(value).parameters if callable(value) else ()
        return
    for cls in value.__mro__:
        if not cls.__module__.startswith("dsv4"):
            continue
        yield from cls.__annotations__
        yield from (name for name in getattr(cls, "__slots__", ()))
        internal = getattr(cls, "_internal", frozenset[str]())
        for member, found in vars(cls).items():
            if (member.startswith("_") and member != "__init__") or member in internal:
                continue
            yield member
            function = found.__func__ if isinstance(found, classmethod) else found
            if inspect.isfunction(function):
                yield from inspect.signature(function).parameters


def words(name: str) -> set[str]:
    """Lower case, singular: max_step_tokens is max, step and token."""
    pieces = re.findall(r"bf16|[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {_singular(piece.lower()) for piece in pieces}


def _singular(word: str) -> str:
    if word.endswith("ies"):
        return word[:-3] + "y"
    return _SINGULAR.get(word) or re.sub(r"(?<=..)s$", "", word)


def test_every_word_of_the_api_is_defined():
    defined = {_singular(word) for cell in CELLS for word in re.findall(r"[a-z0-9]+", cell.lower())}
    marked = re.findall(r"[*`]([a-z_]+)[*`]", TEXT.lower())
    defined |= {word for name in marked for word in words(name)}
    unknown = {
        word: name
        for public, value in {
            **{public: getattr(dsv4, public) for public in dsv4.__all__ if public != "__version__"},
            **{part.__name__: part for part in PARTS},
        }.items()
        for name in own_names(public, value)
        if not name.startswith("_")
        for word in words(name) - defined - PLAIN
    }
    assert not unknown, f"neither defined in docs/glossary.md nor plain English: {unknown}"


def test_no_word_is_defined_twice():
    """Where a word has two meanings, each says of what."""
    bold = [
        word + cell.rpartition("**")[2]
        for cell in CELLS
        for word in re.findall(r"\*\*(.+?)\*\*", cell)
    ]
    assert len(bold) > 100
    assert sorted(bold) == sorted(set(bold))


def test_formats_are_those_that_exist():
    (line,) = (line for line in TEXT.splitlines() if line.startswith("| **record format**"))
    entries, _, keys = line.partition("for index keys")
    assert re.findall(r"`(\w+)`", entries) == list(ENTRY_FORMATS)
    assert re.findall(r"`(\w+)`", keys) == list(INDEX_FORMATS)
