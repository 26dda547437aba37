"""Host memory as a tier: the rows that everything below the device passes through. Torch-free."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv4.errors import InvalidInput
from dsv4.tiers.extents import Extent, Extents
from dsv4.tiers.lru import Lru
from dsv4.tiers.record import Key, Label, Parts, Record, Refusal, Region
from dsv4.tiers.sizes import UNIT_BYTES
from dsv4.tiers.tier import DONE, DROPPED, MISSING, Limits, Outcome, QueuedTier


@dataclass(slots=True, eq=False)
class HostRow:
    """Memory of one record in a host tier. It stays as it is while it is held."""

    label: Label
    parts: Parts
    extents: tuple[Extent, ...]
    holds: int = 1
    published: bool = False

    @property
    def record(self) -> Record:
        return Record(label=self.label, parts=self.parts, sealed=self.published)


class HostTier(QueuedTier):
    """Records in one piece of host memory of a fixed size; what was used longest ago makes room.

    Beside the calls of every tier there are rows: `take` one, fill it, `publish` it; `hold` one to
    copy from it or to store it in another tier; `release` each. Rows need no copy in between.
    """

    chunk = 8
    keeps_order = True

    def __init__(
        self, capacity_bytes: int, *, name: str = "host", limits: Limits | None = None
    ) -> None:
        units = capacity_bytes // UNIT_BYTES
        if units < 1:
            raise InvalidInput(
                f"capacity_bytes={capacity_bytes}: a host tier needs at least {UNIT_BYTES}"
            )
        super().__init__(name, limits or Limits(threads=1))
        self._memory = memoryview(mmap.mmap(-1, units * UNIT_BYTES))
        self._extents = Extents(units)
        self._rows: Lru[HostRow] = Lru()
        self._unpin: weakref.finalize[[], HostTier] | None = None

    @property
    def region(self) -> Region:
        """All rows: what tiers that move bytes by address register."""
        return Region(name=self.name, memory=self._memory)

    def pin(self) -> None:
        """Makes the memory one that a GPU copies by itself, until the tier is closed or gone. Needs
        torch and a GPU."""
        if self._unpin is None:
            from dsv4.tiers.pin import pin

            # The driver must forget the memory before the system does: it would take the addresses
            # for used, and fail where it gives them to something else.
            self._unpin = weakref.finalize(self, pin(self._memory))

    # ---- rows ------------------------------------------------------------------------------------

    def take(self, label: Label) -> HostRow | None:
        """A row for a record that is not there yet, held once and seen by nobody. None if the
        record is there, or everything else is held."""
        with self._lock:
            if self._closed or label.key in self._rows:
                return None
            extents = self._room(label.padded_bytes // UNIT_BYTES)
            if extents is None:
                return None
            whole = [
                self._memory[first * UNIT_BYTES : (first + count) * UNIT_BYTES]
                for first, count in extents
            ]
            return HostRow(label, Parts.of_units(whole, label.payload_bytes), extents)

    def publish(self, row: HostRow) -> None:
        """Lets a row be found. Its header must be in place. It stays held."""
        with self._lock:
            if row.published or row.label.key in self._rows:
                return  # somebody else was first: this row goes when it is released
            row.published = True
            self._rows.add(row.label.key, row.label.padded_bytes, row, row.label)

    def hold(self, labels: Sequence[Label]) -> list[HostRow | None]:
        """The rows of records, until they are released; None where there is none. Counts as use."""
        with self._lock:
            self._rows.touch(labels)
            return [self._hold(label) for label in labels]

    def _hold(self, label: Label) -> HostRow | None:
        entry = self._rows.get(label.key)
        if entry is None:
            return None
        entry.value.holds += 1
        return entry.value

    def release(self, row: HostRow) -> None:
        """Undoes one `take` or `hold`. Memory of a row that cannot be found is free then."""
        with self._lock:
            row.holds -= 1
            if not row.holds and not row.published:
                self._extents.give(row.extents)

    def holds(self, key: Key) -> bool:
        """Whether a record can be found."""
        with self._lock:
            return key in self._rows

    def note_loads(self, labels: Sequence[Label], refusals: Sequence[Refusal | None]) -> None:
        """Rows that were held, checked and used where they lie: counted as loads. What was refused
        is forgotten."""
        with self._lock:
            for label, refusal in zip(labels, refusals, strict=True):
                if refusal is None:
                    self._counters.hits += 1
                    self._counters.loaded_bytes += label.record_bytes
                else:
                    self._note_refusal(label.key, refusal)
                    self._forget(label.key)

    def _room(self, units: int) -> tuple[Extent, ...] | None:
        if units * UNIT_BYTES > self._memory.nbytes:
            return None
        extents = self._extents.take(units)
        if extents is None:
            for key in self._rows.oldest():
                entry = self._rows.get(key)
                if entry is None or entry.value.holds:
                    continue
                self._forget(key)
                extents = self._extents.take(units)
                if extents is not None:
                    break
        return extents

    def _forget(self, key: Key) -> None:
        entry = self._rows.remove(key)
        if entry is not None:
            entry.value.published = False
            if not entry.value.holds:
                self._extents.give(entry.value.extents)

    # ---- as a tier -------------------------------------------------------------------------------

    def _glance(self, label: Label) -> bool | None:
        return label.key in self._rows

    def _held(self) -> tuple[int | None, int | None, int | None]:
        return len(self._rows), self._rows.used_bytes, self._memory.nbytes

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        with self._lock:
            return [label.key in self._rows for label in labels]

    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        outcomes = []
        for record in records:
            with self._lock:
                row = self._hold(record.label)
            if row is None:
                outcomes.append(MISSING)
                continue
            try:
                outcomes.append(_copied(row.parts, record.parts))
            finally:
                self.release(row)
        return outcomes

    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]:
        outcomes = []
        for record in records:
            row = self.take(record.label)
            if row is None:
                outcomes.append(DONE if record.key in self._rows else DROPPED)
                continue
            try:
                outcomes.append(_copied(record.parts, row.parts))
                self.publish(row)
            finally:
                self.release(row)
        return outcomes

    def _use(self, labels: Sequence[Label]) -> None:
        with self._lock:
            self._rows.touch(labels)

    def _drop(self, keys: Sequence[Key]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)

    def _close(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None


def _copied(source: Parts, target: Parts) -> Outcome:
    """Copies a record from pieces to pieces that are cut elsewhere. Of a record of another size
    only the header, for which it is refused. numpy lets other threads run meanwhile."""
    if source.payload_bytes != target.payload_bytes:
        target.header[:] = source.header
        return DONE
    pieces, at = list(reversed(target.pieces)), 0
    for piece in source.pieces:
        start = 0
        while start < piece.nbytes:
            room = pieces[-1][at:]
            count = min(room.nbytes, piece.nbytes - start)
            np.copyto(
                np.frombuffer(room[:count], np.uint8),
                np.frombuffer(piece[start : start + count], np.uint8),
            )
            start, at = start + count, at + count
            if at == pieces[-1].nbytes:
                pieces.pop()
                at = 0
    return DONE
