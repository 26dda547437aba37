"""Names of the columns of a step's index tensors, and the rows of the staging page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.ops.columns import (
    RequestColumns,
    TokenColumns,
    item_columns,
    request_columns,
    staged_row,
    token_columns,
)

WINDOW = 5
# slot, start, count, first row: a request without tokens, and one near its begin
BATCH = [[4, 9, 3, 0], [1, 20, 0, 3], [2, 1, 6, 3]]


def staged_by_counting() -> dict[tuple[int, int], int]:
    """(batch row, position) → row, by laying one row behind the other."""
    rows: dict[tuple[int, int], int] = {}
    for batch_row, (_, start, count, _) in enumerate(BATCH):
        for position in range(start - (WINDOW - 1), start + count):
            rows[batch_row, position] = len(rows)
    return rows


def test_staged_rows_lie_one_behind_the_other():
    for (batch_row, position), row in staged_by_counting().items():
        request = RequestColumns(*BATCH[batch_row])
        assert staged_row(request.first_row, request.start, batch_row, position, WINDOW) == row


def test_any_token_of_a_request_may_stand_for_its_first():
    rows = staged_by_counting()
    for batch_row, (_, start, count, first_row) in enumerate(BATCH):
        for nth in range(count):
            position = start + nth
            found = staged_row(first_row + nth, position, batch_row, position, WINDOW)
            assert found == rows[batch_row, position]


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_arrays_and_tensors_have_the_same_columns(array: Callable[[object], Any]):
    request = request_columns(array(BATCH))
    assert [column.tolist() for column in request] == [list(c) for c in zip(*BATCH, strict=True)]
    rows = staged_by_counting()
    batch_row, position = (array(column) for column in zip(*rows, strict=True))
    found = staged_row(
        request.first_row[batch_row], request.start[batch_row], batch_row, position, WINDOW
    )
    assert found.tolist() == list(rows.values())


def test_columns_are_views():
    tokens = torch.full((3, 4), -1)
    token_columns(tokens).position[:2] = torch.tensor([7, 8])
    assert tokens.tolist() == [[-1, 7, -1, -1], [-1, 8, -1, -1], [-1] * 4]
    assert TokenColumns._fields[:2] == ("slot", "position")


def test_an_item_begins_with_the_columns_of_its_request():
    """fill_items copies them, and the kernel for folded groups loads either as the other."""
    items = item_columns(np.arange(16).reshape(2, 8))
    requests = request_columns(np.arange(16).reshape(2, 8))
    assert items.slot.tolist() == requests.slot.tolist()
    assert items.start.tolist() == requests.start.tolist()
    assert items.first_row.tolist() == requests.first_row.tolist()


def test_neither_torch_nor_triton_is_needed():
    code = "import sys, dsv4.ops.columns; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
