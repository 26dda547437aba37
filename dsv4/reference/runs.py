"""Neighbouring tokens of one request: what they read is read once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dsv4.ops.columns import token_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Tokens in neighbouring rows of a step, at positions less than the run's length apart."""

    slot: int
    batch_row: int
    rows: range
    positions: list[int]


def runs(tokens: Tensor, most: int) -> Iterator[Run]:
    """The live tokens of a step in runs of at most so many."""
    columns = token_columns(tokens.cpu().numpy())
    slots, positions, batch_rows = (
        column.tolist() for column in (columns.slot, columns.position, columns.batch_row)
    )
    first = 0
    while first < len(slots):
        end = first + 1
        while (
            end < len(slots)
            and end - first < most
            and (slots[end], batch_rows[end]) == (slots[first], batch_rows[first])
            and abs(positions[end] - positions[first]) < most
        ):
            end += 1
        if slots[first] >= 0:
            yield Run(
                slot=slots[first],
                batch_row=batch_rows[first],
                rows=range(first, end),
                positions=positions[first:end],
            )
        first = end
