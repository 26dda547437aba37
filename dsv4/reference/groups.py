"""Which groups a step closes, in plain PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dsv4.ops.calls import CompressorWrite
from dsv4.ops.columns import item_columns


class ClosedGroups(NamedTuple):
    """Groups that end inside a step, one per row: `entry` of the request in `slot`, whose tokens
    start at position `start` and in row `first_row` of the step's; `item` is the work item."""

    item: Tensor
    entry: Tensor
    slot: Tensor
    start: Tensor
    first_row: Tensor


def closed_groups(write: CompressorWrite) -> ClosedGroups:
    items = item_columns(write.items.long())
    nth = torch.arange(2, device=write.items.device)
    entry = items.entry[:, None] + nth
    closed = (entry + 1) * write.layout.ratio <= items.end[:, None]
    closed &= (nth < items.entries[:, None]) & (items.slot >= 0)[:, None]
    item, which = torch.nonzero(closed, as_tuple=True)
    return ClosedGroups(
        item, entry[item, which], items.slot[item], items.start[item], items.first_row[item]
    )
