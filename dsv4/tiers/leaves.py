"""Which record of a host tier goes first: one that none leans on, longest unused. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dsv4.tiers.key import Key

V = TypeVar("V")


class Leaning(Protocol):
    """What a record says of itself here: a `Label`, or as much of one as books need."""

    @property
    def key(self) -> Key: ...

    @property
    def leans_on(self) -> Key: ...


@dataclass(slots=True, eq=False)
class Entry(Generic[V]):
    """A record that is held, and the block without which it is useless."""

    key: Key
    leans_on: Key
    size_bytes: int
    value: V
    last_use: int = 0
    queued: bool = False


class Leaves(Generic[V]):
    """Records as a tree: a block stays while something leans on it. The caller has the lock.

    A use marks one record. A record that goes passes its last use to the block that it leans on, so
    a use counts for all blocks before, and costs the same whatever their number.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, Entry[V]] = {}
        self._leaning: dict[Key, int] = {}  # on a block, whether or not it is held
        self._heap: list[tuple[int, int, Entry[V]]] = []  # leaves; stamps may be out of date
        self._clock = self._pushes = 0
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Key]:
        return iter(self._entries)

    def get(self, key: Key) -> Entry[V] | None:
        return self._entries.get(key)

    def add(self, label: Leaning, size_bytes: int, value: V) -> None:
        """The newest entry. Its key must not be held."""
        entry = self._entries[label.key] = Entry(label.key, label.leans_on, size_bytes, value)
        self.used_bytes += size_bytes
        self.lean(entry.leans_on)
        self.touch(entry.key)
        self.queue(entry.key)

    def touch(self, key: Key) -> None:
        """Marks a record as used now; one that is not held is ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            self._clock += 1
            entry.last_use = self._clock

    def remove(self, key: Key) -> Entry[V] | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.size_bytes
            before = self._entries.get(entry.leans_on)
            if before is not None:
                before.last_use = max(before.last_use, entry.last_use)
            self.lean_no_more(entry.leans_on)
        return entry

    def lean(self, key: Key) -> None:
        """Keeps a block: something that leans on it is here, or is being written."""
        self._leaning[key] = self._leaning.get(key, 0) + 1

    def lean_no_more(self, key: Key) -> None:
        left = self._leaning[key] - 1
        if left:
            self._leaning[key] = left
        else:
            del self._leaning[key]
            self.queue(key)

    def queue(self, key: Key) -> None:
        """Allows a record to go when its turn comes. A record that a `pop` skipped must be queued
        again."""
        entry = self._entries.get(key)
        if entry is None or entry.queued:
            return
        if len(self._heap) > 2 * len(self._entries) + 64:  # most are of records long removed
            self._heap = [each for each in self._heap if self._is_held(each[2])]
            heapq.heapify(self._heap)
        entry.queued = True
        self._pushes += 1
        heapq.heappush(self._heap, (entry.last_use, self._pushes, entry))

    def pop(self, may_go: Callable[[V], bool]) -> Entry[V] | None:
        """Removes the leaf that was used longest ago, of those that may go. One that may not is
        skipped until it is queued again."""
        while self._heap:
            stamp, _, entry = heapq.heappop(self._heap)
            entry.queued = False
            if not self._is_held(entry) or entry.key in self._leaning or not may_go(entry.value):
                continue
            if stamp < entry.last_use:
                self.queue(entry.key)
                continue
            return self.remove(entry.key)
        return None

    def _is_held(self, entry: Entry[V]) -> bool:
        return self._entries.get(entry.key) is entry
