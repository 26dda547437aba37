"""Which record goes first: the one that was used longest ago, and none before what leans on it.
Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from dsv4.tiers.record import Key, Kind, Label

V = TypeVar("V")


@dataclass(slots=True)
class Entry(Generic[V]):
    """A record that is held. Its tokens and what it leans on are unknown until a label told."""

    size_bytes: int
    value: V
    tokens: int = 0
    leans_on: Key | None = None


class Lru(Generic[V]):
    """Entries in the order of their last use. The caller has the lock."""

    def __init__(self) -> None:
        self._entries: OrderedDict[Key, Entry[V]] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def get(self, key: Key) -> Entry[V] | None:
        return self._entries.get(key)

    def add(self, key: Key, size_bytes: int, value: V, label: Label | None = None) -> None:
        """The newest entry. One that is there already is replaced."""
        self.remove(key)
        entry = self._entries[key] = Entry(size_bytes, value)
        if label is not None:
            entry.tokens, entry.leans_on = label.tokens, label.leans_on
        self.used_bytes += size_bytes

    def remove(self, key: Key) -> Entry[V] | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.size_bytes
        return entry

    def oldest(self) -> Iterator[Key]:
        """From the longest unused on, as far as the caller goes. It may remove what it is given."""
        seen: set[Key] = set()
        while (key := next((key for key in self._entries if key not in seen), None)) is not None:
            seen.add(key)
            yield key

    def touch(self, labels: Iterable[Label]) -> list[Key]:
        """Marks records as used now, and the blocks that they lean on: a block is always newer than
        what leans on it. Answers with what was marked, the newest last. Give all labels of a prompt
        at once, for each call walks up to the first block."""
        used: dict[Key, None] = {}  # in the order given, which decides between strangers
        for label in labels:
            entry = self._entries.get(label.key)
            if entry is not None:
                entry.tokens, entry.leans_on = label.tokens, label.leans_on
            at: Key | None = label.key if entry is not None else label.leans_on
            while at is not None and at not in used and (found := self._entries.get(at)):
                used[at] = None
                at = found.leans_on
        order = sorted(used, key=self._depth, reverse=True)
        for key in order:
            self._entries.move_to_end(key)
        return order

    def _depth(self, key: Key) -> tuple[int, Kind]:
        return self._entries[key].tokens, key.kind
