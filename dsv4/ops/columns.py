"""A step's index tensors, int32: which column holds what, and where window rows are staged.

The fields of a bundle have the order of the columns. A bundle holds columns of a tensor or of a
NumPy array, the numbers of one row, or what a kernel has loaded. Rows of -1 are padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

REQUEST_COLUMNS = 4
TOKEN_COLUMNS = 4
ITEM_COLUMNS = 8
FOLLOW_COLUMNS = 3  # and one per ratio


class RequestColumns(NamedTuple):
    """The tensor `batch`, one row per request: `count` tokens from position `start` on, the first
    of them in row `first_row` of the step's token tensors."""

    slot: Any
    start: Any
    count: Any
    first_row: Any


class TokenColumns(NamedTuple):
    """The tensor `tokens`, one row per token: row `batch_row` of `batch` is its request; `kept` is
    1 if its window row is still in the ring after the step, as all rows of a decode step are."""

    slot: Any
    position: Any
    batch_row: Any
    kept: Any


class ItemColumns(NamedTuple):
    """The tensor `items` of a ratio, one row per work item (step/shape.py): `entries` entries from
    `entry` on, of a request whose tokens have positions [start, end); whether it writes the
    tails."""

    slot: Any
    start: Any
    end: Any
    first_row: Any
    entry: Any
    entries: Any
    writes_tails: Any


class FollowColumns(NamedTuple):
    """The first columns of the tensor `follows`, one row per request that starts where a step that
    is still running will leave it: its row in `batch`, its row in the `batch` of that step, and the
    number of tokens whose entries exist. Then, per ratio, the first of the rows of `items` that are
    its own."""

    batch_row: Any
    row_before: Any
    reused: Any


def request_columns(batch: Any) -> RequestColumns:
    """The columns of a tensor or an array [..., REQUEST_COLUMNS], as views [...]."""
    return RequestColumns(batch[..., 0], batch[..., 1], batch[..., 2], batch[..., 3])


def token_columns(tokens: Any) -> TokenColumns:
    """The columns of a tensor or an array [..., TOKEN_COLUMNS], as views [...]."""
    return TokenColumns(tokens[..., 0], tokens[..., 1], tokens[..., 2], tokens[..., 3])


def item_columns(items: Any) -> ItemColumns:
    """The columns of a tensor or an array [..., ITEM_COLUMNS], as views [...]."""
    return ItemColumns._make([items[..., nth] for nth in range(len(ItemColumns._fields))])


def follow_columns(follows: Any) -> FollowColumns:
    """The first columns of a tensor or an array [..., columns], as views [...]."""
    return FollowColumns(*(follows[..., nth] for nth in range(FOLLOW_COLUMNS)))


def most_items(count: Any, ratio: int, *, overlap: bool, narrow: bool) -> Any:
    """The most work items that `count` > 0 tokens of a request can have, wherever they start. For
    numbers, arrays and tensors alike."""
    closed = (count + ratio - 1) // ratio
    if narrow or not overlap:
        return closed
    return closed - 1 * (closed > 1)


def staged_row(first_row: Any, start: Any, batch_row: Any, position: Any, window: int) -> Any:
    """The row of the staging page for `position` in a request of a prefill step. The request has
    `first_row` and `start` in row `batch_row` of `batch`.

    The rows of a request follow those of the previous request: first the window - 1 rows before its
    tokens, from position start - (window - 1) on (those below position 0 stay unused), then its
    tokens'. `first_row` and `start` may be those of any token of the request: only their difference
    matters. For numbers, arrays and tensors alike.
    """
    before = window - 1
    return first_row + before * batch_row + (position - (start - before))
