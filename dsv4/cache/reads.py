"""Where a layer's keys are read from, as both backends take it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.schema import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSource:
    """The window rows of a step's requests: records of `page` in `arena` (uint8 [rows, bytes]).

    A narrow step reads the ring: position p of slot s is row p % page.rows of arena row s. A wide
    one (`chunk`) reads staged rows, because its own tokens have overwritten the ring: all in arena
    row 0, position p of batch row b at page row
        first_row[b] + (window - 1) * b + p - (start[b] - (window - 1))
    for p from start[b] - (window - 1), where not negative, to the newest token. `window` tokens,
    the query's own included, are visible.
    """

    arena: Tensor
    page: Page
    window: int
    chunk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySource:
    """Compressed entries or indexer keys: entry e of slot s is row e % page.rows of `page` in
    arena row block_table[s, e // page.rows]. Visible to the query at t: e < (t + 1) // ratio."""

    arena: Tensor
    page: Page
    block_table: Tensor
    ratio: int
