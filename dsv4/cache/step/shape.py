"""Who runs in a step, and with how many tokens: all of a plan that no position changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.requests import Request

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepShape:
    """`counts[row]` new tokens of `requests[row]`. The tokens of a step lie one after the other:
    those of a request begin at `first_rows[row]`. Plans share a shape, so nobody writes to it."""

    requests: tuple[Request, ...]
    slots: I64
    counts: I64
    num_tokens: int
    most_tokens: int
    first_rows: I64

    @classmethod
    def build(
        cls, slots: Sequence[int], counts: Sequence[int], requests: tuple[Request, ...] = ()
    ) -> StepShape:
        tokens = np.array(counts, dtype=np.int64)
        return cls(
            requests=requests,
            slots=_unwritable(np.array(slots, dtype=np.int64)),
            counts=_unwritable(tokens),
            num_tokens=sum(counts),
            most_tokens=max(counts, default=0),
            first_rows=_unwritable(tokens.cumsum() - tokens),
        )

    @cached_property
    def token_rows(self) -> tuple[I64, I64, I64]:
        """The row and the slot of each token's request, and which of its tokens it is."""
        row, nth = spread(self.counts)
        return row, self.slots[row], nth

    def split(self, count: int) -> tuple[StepShape, StepShape]:
        """The first so many requests, and the others: two shapes with rows of their own."""
        return self._part(slice(0, count)), self._part(slice(count, None))

    def _part(self, rows: slice) -> StepShape:
        counts = self.counts[rows]
        return StepShape(
            requests=self.requests[rows],
            slots=self.slots[rows],
            counts=counts,
            num_tokens=int(counts.sum()),
            most_tokens=int(counts.max(initial=0)),
            first_rows=_unwritable(counts.cumsum() - counts),
        )


def _unwritable(values: I64) -> I64:
    values.setflags(write=False)
    return values


def spread(counts: I64) -> tuple[I64, I64]:
    """For `counts[row]` items per row, laid out row after row: the row of each item, and its index
    within that row."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]
