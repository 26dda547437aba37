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
    items = item_columns(write.items.long()[:, None])  # columns [items, 1]
    nth = torch.arange(2, device=write.items.device)
    entry = items.entry + nth
    closed = (nth < items.entries) & ((entry + 1) * write.layout.ratio <= items.end)
    item, which = torch.nonzero(closed & (items.slot >= 0), as_tuple=True)
    of = item_columns(write.items[item].long())
    return ClosedGroups(item, entry[item, which], of.slot, of.start, of.first_row)
