"""How the compressors of a layer share the work of a step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dsv4.cache.step.shape import I64, spread


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
    read them; it is there even if nothing closes.

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
    """Of each request the first `existing` entries are there and are left out."""
    entries = np.ones_like(items.row) if items.entries is None else items.entries
    tails = np.zeros_like(items.row) if items.writes_tails is None else items.writes_tails
    skipped = np.clip(existing[items.row] - items.entry, 0, entries)
    entries = entries - skipped
    left = (entries > 0) | (tails > 0)
    return WorkItems(items.row[left], (items.entry + skipped)[left], entries[left], tails[left])
