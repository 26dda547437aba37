"""Fills in where requests start that were planned after a step still running, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import FollowedDrafts, FollowedItems, Following
from dsv4.ops.columns import (
    FOLLOW_COLUMNS,
    RequestColumns,
    follow_columns,
    item_columns,
    most_items,
    request_columns,
    token_columns,
)


def follow(call: Following) -> None:
    if not len(call.follows):
        return
    follows = call.follows.long()
    named = follow_columns(follows)
    before = request_columns(call.batch_before[named.row_before].long())
    kept = before.count
    if call.accepted is not None:
        given = call.accepted[named.row_before].long()
        kept = torch.minimum(given.clamp_min(0), before.count)
    start = before.start + kept
    request_columns(call.batch).start[named.batch_row] = start.int()
    request = request_columns(call.batch[named.batch_row].long())
    nth = torch.arange(call.most_tokens, device=follows.device)
    valid = nth < request.count[:, None]
    rows = (request.first_row[:, None] + nth)[valid]
    token_columns(call.tokens).position[rows] = (start[:, None] + nth)[valid].int()
    if call.drafts is not None:
        _fill_drafts(call.drafts, named.batch_row, start, request.count)
    for of_ratio, each in enumerate(call.items):
        first_item = follows[:, FOLLOW_COLUMNS + of_ratio]
        _fill_items(each, call.narrow, request, named.reused, first_item, nth)


def _fill_drafts(drafts: FollowedDrafts, batch_row: Tensor, start: Tensor, count: Tensor) -> None:
    """The nth draft step has the nth token of each request that has one."""
    nth = torch.arange(drafts.steps, device=start.device)
    has_one = nth < count[:, None]
    rows = (batch_row[:, None] + drafts.rows * nth)[has_one]
    position = (start[:, None] + nth)[has_one].int()
    request_columns(drafts.batch).start[rows] = position
    token_columns(drafts.tokens).position[rows] = position


def _fill_items(
    each: FollowedItems,
    narrow: bool,
    request: RequestColumns,
    reused: Tensor,
    first_item: Tensor,
    nth: Tensor,
) -> None:
    """All items that are reserved for the requests: columns [requests, items]."""
    ratio, overlap = each.ratio, each.overlap and not narrow
    start, count = request.start[:, None], request.count[:, None]
    first, closed = start // ratio, (start + count) // ratio - start // ratio
    is_first = (nth == 0).expand(len(start), -1)
    if narrow:
        live, writes_tails = nth < closed, torch.zeros_like(is_first)
    else:
        live = (nth < (closed - int(overlap)).clamp_min(1)) & (count > 0)
        writes_tails = is_first
    entry = first + nth + (overlap & ~is_first)
    entries = 1 + (overlap & is_first).long()
    skipped = torch.minimum((reused[:, None] // ratio - entry).clamp_min(0), entries)
    entry, entries = entry + skipped, entries - skipped
    live = live & ((entries > 0) | writes_tails)
    columns = (
        request.slot[:, None].expand_as(entry),
        start.expand_as(entry),
        (start + count).expand_as(entry),
        request.first_row[:, None].expand_as(entry),
        entry,
        entries,
        writes_tails.long(),
    )
    own = nth < most_items(count, ratio, overlap=overlap, narrow=narrow)
    rows = (first_item[:, None] + nth)[own]
    for target, values in zip(item_columns(each.items), columns, strict=True):
        target[rows] = torch.where(live, values, -1)[own].int()
