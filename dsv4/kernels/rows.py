"""Rows of a step's index tensors in kernels, by name: the counterpart of dsv4/ops/columns.py.

`at` points to the first column of one row or of a block of rows. Columns that a kernel does not use
are not loaded: the compiler drops the loads. Gluon kernels call the same functions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.ops.columns import (
    ITEM_COLUMNS,
    REQUEST_COLUMNS,
    TOKEN_COLUMNS,
    ItemColumns,
    RequestColumns,
    TokenColumns,
)

_ITEM_COLUMNS = tl.constexpr(ITEM_COLUMNS)
_REQUEST_COLUMNS = tl.constexpr(REQUEST_COLUMNS)
_TOKEN_COLUMNS = tl.constexpr(TOKEN_COLUMNS)


@triton.jit
def request_at(batch, row):
    return batch + row * _REQUEST_COLUMNS


@triton.jit
def token_at(tokens, row):
    return tokens + row * _TOKEN_COLUMNS


@triton.jit
def item_at(items, row):
    return items + row * _ITEM_COLUMNS


@triton.jit
def load_request(at, mask=None, other=None):
    return RequestColumns(
        tl.load(at, mask=mask, other=other),
        tl.load(at + 1, mask=mask, other=other),
        tl.load(at + 2, mask=mask, other=other),
        tl.load(at + 3, mask=mask, other=other),
    )


@triton.jit
def load_token(at, mask=None, other=None):
    return TokenColumns(
        tl.load(at, mask=mask, other=other),
        tl.load(at + 1, mask=mask, other=other),
        tl.load(at + 2, mask=mask, other=other),
        tl.load(at + 3, mask=mask, other=other),
    )


@triton.jit
def load_item(at, mask=None, other=None):
    return ItemColumns(
        tl.load(at, mask=mask, other=other),
        tl.load(at + 1, mask=mask, other=other),
        tl.load(at + 2, mask=mask, other=other),
        tl.load(at + 3, mask=mask, other=other),
        tl.load(at + 4, mask=mask, other=other),
        tl.load(at + 5, mask=mask, other=other),
        tl.load(at + 6, mask=mask, other=other),
    )


@triton.jit
def load_item_or_request(items, batch, row, is_request):
    """One item, or one request as an item without entries. The columns that both tensors have are
    in the same places, so one load serves either."""
    at = tl.where(is_request, request_at(batch, row), item_at(items, row))
    is_item = is_request == 0
    slot = tl.load(at)
    start = tl.load(at + 1)
    end_or_count = tl.load(at + 2)
    first_row = tl.load(at + 3)
    return ItemColumns(
        slot,
        start,
        tl.where(is_request, start + end_or_count, end_or_count),
        first_row,
        tl.load(at + 4, mask=is_item, other=0),
        tl.load(at + 5, mask=is_item, other=0),
        tl.load(at + 6, mask=is_item, other=0),
    )


@triton.jit
def staged_row(first_row, start, batch_row, position, WINDOW: tl.constexpr):
    """The row of the staging page for `position` in a request of a prefill step. Rows follow
    positions: a kernel that reads many adds the positions to the row of position 0."""
    before = WINDOW - 1
    return first_row + before * batch_row + (position - (start - before))


@triton.jit
def score_columns(visible, SPAN: tl.constexpr, BLOCKS: tl.constexpr):
    """How many columns a row of scores has for this many visible entries: one per entry, or one per
    block of SPAN entries, or one per entry of BLOCKS candidate blocks. All candidates are whole but
    the last, which has the newest entry."""
    if SPAN == 1:
        return visible
    else:
        blocks = (visible + SPAN - 1) // SPAN
        if BLOCKS == 0:
            return blocks
        else:
            listed = (BLOCKS - 1) * SPAN + (visible - 1) % SPAN + 1
            return tl.where(blocks <= BLOCKS, visible, listed)
