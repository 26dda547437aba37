"""Who runs in a step, and with how many tokens: all of a plan that no position changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.requests import Request

I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
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


def _unwritable(values: I64) -> I64:
    values.setflags(write=False)
    return values


def spread(counts: I64) -> tuple[I64, I64]:
    """For `counts[row]` items per row, laid out row after row: the row of each item, and its index
    within that row."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]
