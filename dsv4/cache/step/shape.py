"""The arithmetic of a step: which requests run, with which tokens, and which groups close.
Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.requests import Request

if TYPE_CHECKING:
    from dsv4.cache.prepare_forward import ForwardPlan

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepShape:
    """`counts[row]` new tokens of `requests[row]`. The tokens of a step are contiguous: those of a
    request begin at `first_rows[row]`. Plans share a shape, so it must not be written to."""

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
        """The first `count` requests, and the others: two shapes with rows of their own."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Before:
    """The plan that a new one comes after. `rows` are the rows there of the new plan's requests, or
    -1; `counted_rows` says for which of them the device reads how many tokens are kept there,
    `unknown_starts` for which only the device knows the length (None: for none)."""

    plan: ForwardPlan
    rows: I64
    counted_rows: NDArray[np.bool_]
    unknown_starts: NDArray[np.bool_] | None

    def first(self, count: int) -> Before:
        """The same for the first `count` requests."""
        unknown = None if self.unknown_starts is None else self.unknown_starts[:count]
        return Before(
            plan=self.plan,
            rows=self.rows[:count],
            counted_rows=self.counted_rows[:count],
            unknown_starts=unknown,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepTokens:
    """Where the new tokens of a step lie: those of request i at positions `starts[i]` to `ends[i]`.
    Entries of the first `reused[i]` tokens exist and are not written again. After another plan,
    `before`, starts are the latest that can be. A step of cut replays (`window_cut`) has no other
    part and comes after no other."""

    shape: StepShape
    starts: I64
    ends: I64
    reused: I64
    before: Before | None = None
    window_cut: bool = False

    def split(self, count: int) -> tuple[StepTokens, StepTokens]:
        """The first `count` requests, and the others, whose starts are known."""
        few, others = self.shape.split(count)
        return (
            StepTokens(
                shape=few,
                starts=self.starts[:count],
                ends=self.ends[:count],
                reused=self.reused[:count],
                before=None if self.before is None else self.before.first(count),
            ),
            StepTokens(
                shape=others,
                starts=self.starts[count:],
                ends=self.ends[count:],
                reused=self.reused[count:],
            ),
        )


class WorkItems(NamedTuple):
    """One element per item: its request's row, its first entry, how many entries it takes, and 1
    if it writes the tails; None where all take one and none writes them."""

    row: I64
    entry: I64
    entries: I64 | None = None
    writes_tails: I64 | None = None


def closing_groups(ratio: int, starts: I64, ends: I64, *, most_tokens: int) -> WorkItems:
    """The items of a decode batch: the groups that close."""
    if most_tokens <= ratio:  # a request closes one group at most
        if ratio & (ratio - 1):
            row = (starts // ratio != ends // ratio).nonzero()[0]
        else:  # a power of two: the higher bits differ
            row = ((starts ^ ends) >= ratio).nonzero()[0]
        return WorkItems(row, starts.take(row) // ratio)
    first = starts // ratio
    row, nth = spread(ends // ratio - first)
    return WorkItems(row, first[row] + nth)


def chunk_groups(ratio: int, starts: I64, ends: I64, *, overlap: bool) -> WorkItems:
    """The items of a prefill batch. The first one of each request writes the tails, so no other may
    read them; it exists even if nothing closes.

        group       7          8          9         10        11
                [ o o o o ][ o o x x ][ x x x x ][ x x x x ][ x x      o old, in the tails; x new
        tails   read by 8: its own o and, with overlap, those of 7;
                with overlap also by 9, which pools 8 too
        items   8 | 9 | 10, with overlap 8 and 9 | 10; 11 does not close
    """
    first = starts // ratio
    items = np.where(ends > starts, np.maximum(ends // ratio - first - overlap, 1), 0)
    row, nth = spread(items)
    is_first = nth == 0
    entry = first[row] + nth + (overlap & ~is_first)
    return WorkItems(row, entry, 1 + (overlap & is_first), is_first.astype(np.int64))


def without_existing(items: WorkItems, existing: I64) -> WorkItems:
    """The items without the first `existing` entries of each request, which exist already."""
    entries = np.ones_like(items.row) if items.entries is None else items.entries
    tails = np.zeros_like(items.row) if items.writes_tails is None else items.writes_tails
    skipped = np.clip(existing[items.row] - items.entry, 0, entries)
    entries = entries - skipped
    left = (entries > 0) | (tails > 0)
    return WorkItems(items.row[left], (items.entry + skipped)[left], entries[left], tails[left])


def _unwritable(values: I64) -> I64:
    values.setflags(write=False)
    return values


def spread(counts: I64) -> tuple[I64, I64]:
    """For `counts[row]` items per row, laid out row after row: the row of each item, and its index
    within that row."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]
