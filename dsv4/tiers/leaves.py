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
    owner: bytes = b""
    last_use: int = 0
    queued: int = 0  # the number of its entry in the heaps; 0: it is in none


Heap = list[tuple[int, int, Entry[V]]]


class Leaves(Generic[V]):
    """Records as a tree: a block stays while something leans on it. The caller has the lock.

    A use marks one record. A record that goes passes its last use to the block that it leans on, so
    a use counts for all blocks before, and costs the same whatever their number.

    Owners that are kept apart have a heap of their own in addition. An entry of a heap counts
    as long as its number is the record's: what is popped from one heap is void in the other.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, Entry[V]] = {}
        self._leaning: dict[Key, int] = {}  # on a block, whether or not it is held
        self._heap: Heap[V] = []  # leaves; stamps may be out of date
        self._apart: dict[bytes, Heap[V]] = {}  # those of some owners
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

    def add(self, label: Leaning, size_bytes: int, value: V, owner: bytes = b"") -> None:
        """The newest entry. Its key must not be held."""
        entry = Entry(label.key, label.leans_on, size_bytes, value, owner)
        self._entries[label.key] = entry
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
            entry.queued = 0
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
        self._pushes += 1
        entry.queued = self._pushes
        self._push(self._heap, entry)
        if self._apart and entry.owner in self._apart:
            self._push(self._apart[entry.owner], entry)

    def _push(self, heap: Heap[V], entry: Entry[V]) -> None:
        if len(heap) > 2 * len(self._entries) + 64:  # most are void
            heap[:] = [each for each in heap if each[2].queued == each[1]]
            heapq.heapify(heap)
        heapq.heappush(heap, (entry.last_use, entry.queued, entry))

    def keep_apart(self, owner: bytes) -> None:
        """From now on `pop` finds the records of this owner without a look at others."""
        if owner not in self._apart:
            own = [each for each in self._heap if each[2].owner == owner]
            self._apart[owner] = [each for each in own if each[2].queued == each[1]]
            heapq.heapify(self._apart[owner])

    def keep_apart_no_more(self, owner: bytes) -> None:
        self._apart.pop(owner, None)

    def pop(self, may_go: Callable[[V], bool], *, owner: bytes | None = None) -> Entry[V] | None:
        """Removes the leaf that was used longest ago, of those that may go; of an `owner` that is
        kept apart, or of all. One that may not is skipped until it is queued again."""
        heap = self._heap if owner is None else self._apart[owner]
        while heap:
            stamp, number, entry = heapq.heappop(heap)
            if entry.queued != number:
                continue
            entry.queued = 0
            if entry.key in self._leaning or not may_go(entry.value):
                continue
            if stamp < entry.last_use:
                self.queue(entry.key)
                continue
            return self.remove(entry.key)
        return None
