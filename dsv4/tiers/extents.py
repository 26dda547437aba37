"""Room for records of many sizes in one piece of memory. Torch-free."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

MOST_PIECES = 16  # of one record


class Extent(NamedTuple):
    """Units [first, first + units)."""

    first: int
    units: int


class Extents:
    """Which units are free. A record gets one run of units where there is one, else several.

    Holes that touch are merged. The smallest hole that is large enough is cut.
    """

    def __init__(self, units: int) -> None:
        self.free_units = units
        self._by_size: list[tuple[int, int]] = []  # (count, first), sorted
        self._count_at: dict[int, int] = {}  # first -> count
        self._first_before: dict[int, int] = {}  # end -> first
        if units:
            self._add(Extent(0, units))

    def take(self, units: int) -> tuple[Extent, ...] | None:
        """`units` units; None if they are not free, or lie in too many pieces."""
        if units > self.free_units:
            return None
        at = bisect_left(self._by_size, (units, 0))
        if at < len(self._by_size):
            holes = [self._by_size[at]]
        else:
            holes, left = [], units
            for count, first in reversed(self._by_size[-MOST_PIECES:]):
                if left <= 0:
                    break
                holes.append((count, first))
                left -= count
            if left > 0:
                return None
        taken, left = [], units
        for count, first in holes:
            self._remove(Extent(first, count))
            used = min(count, left)
            taken.append(Extent(first, used))
            if used < count:
                self._add(Extent(first + used, count - used))
            left -= used
        self.free_units -= units
        return tuple(taken)

    def give(self, extents: tuple[Extent, ...]) -> None:
        """Takes back what `take` gave."""
        for first, count in extents:
            self.free_units += count
            before = self._first_before.get(first)
            if before is not None:
                self._remove(Extent(before, first - before))
                first, count = before, count + first - before
            behind = self._count_at.get(first + count)
            if behind is not None:
                self._remove(Extent(first + count, behind))
                count += behind
            self._add(Extent(first, count))

    def _add(self, hole: Extent) -> None:
        insort(self._by_size, (hole.units, hole.first))
        self._count_at[hole.first] = hole.units
        self._first_before[hole.first + hole.units] = hole.first

    def _remove(self, hole: Extent) -> None:
        del self._by_size[bisect_left(self._by_size, (hole.units, hole.first))]
        del self._count_at[hole.first]
        del self._first_before[hole.first + hole.units]
