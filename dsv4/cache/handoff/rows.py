"""Host memory of offers and arrivals: rows for states, and cells for pledges. Torch-free."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from dsv4.cache.handoff.offer import PLEDGE_BYTES
from dsv4.errors import OfferError
from dsv4.tiers.record import Label, Parts, address


class _Pool:
    """Numbered pieces of equal size of one memory. Without a lock: a manager's calls come one at a
    time. An interrupted call may lose a number, which `recover` finds again."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self.count = count
        self.memory = memoryview(mmap.mmap(-1, count * size_bytes))
        self._size_bytes = size_bytes
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def _take(self, what: str) -> int:
        if not self._free:
            raise OfferError("busy", f"{what} are taken, by offers and arrivals: wait for some")
        return self._free.pop()

    def give_back(self, number: int) -> None:
        self._free.append(number)

    def _piece(self, number: int) -> memoryview:
        start = number * self._size_bytes
        return self.memory[start : start + self._size_bytes]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StateRow:
    """Memory of one state's record."""

    number: int
    label: Label
    parts: Parts


class StateRows(_Pool):
    """Rows for states of one schema, each a record in whole units."""

    def take(self, label: Label) -> StateRow:
        """Raises OfferError if there is none."""
        number = self._take(f"all HandoffOptions(states={self.count}) states in host memory")
        parts = Parts.of_units([self._piece(number)], label.payload_bytes)
        return StateRow(number=number, label=label, parts=parts)


class Pledges(_Pool):
    """Cells that others may read; an empty cell is all zeros."""

    def __init__(self, cells: int) -> None:
        super().__init__(cells, PLEDGE_BYTES)
        self._cells = np.frombuffer(self.memory, np.uint8).reshape(cells, PLEDGE_BYTES)
        self._start = address(self.memory)

    def take(self) -> int:
        """An empty cell. Raises OfferError if there is none."""
        return self._take(f"all HandoffOptions(offers={self.count}) offers")

    def give_back(self, number: int) -> None:
        self.wipe(number)
        super().give_back(number)

    def put(self, cell: int, pledge: bytes) -> None:
        self._cells[cell] = np.frombuffer(pledge, np.uint8)

    def wipe(self, cell: int) -> None:
        self._cells[cell] = 0

    def get(self, cell: int) -> bytes:
        return bytes(self._piece(cell))

    def at(self, cell: int) -> int:
        """The address of a cell."""
        return self._start + cell * PLEDGE_BYTES
