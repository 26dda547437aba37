"""Neighbouring tokens of one request: what they all read is read once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Tokens in neighbouring rows of a step, whose positions span less than a run's length.

    Run i is the rows [firsts[i], ends[i]) of the step, of the request in `slots[i]`, which is row
    `batch_rows[i]` of the batch. `positions` has all rows of the step.
    """

    firsts: list[int]
    ends: list[int]
    slots: list[int]
    batch_rows: list[int]
    positions: list[int]


def runs(tokens: Tensor, most: int) -> Runs:
    """The live tokens of a step in runs of limited length."""
    slots, positions, batch_rows, _ = tokens.T.tolist()
    run_slots, run_rows, firsts, ends = [], [], [], []
    first, count = 0, len(slots)
    while first < count:
        slot, batch_row, position, end = (
            slots[first],
            batch_rows[first],
            positions[first],
            first + 1,
        )
        if slot >= 0:
            while (
                end < count
                and end - first < most
                and slots[end] == slot
                and batch_rows[end] == batch_row
                and abs(positions[end] - position) < most
            ):
                end += 1
            firsts.append(first)
            ends.append(end)
            run_slots.append(slot)
            run_rows.append(batch_row)
        first = end
    return Runs(
        firsts=firsts,
        ends=ends,
        slots=run_slots,
        batch_rows=run_rows,
        positions=positions,
    )
