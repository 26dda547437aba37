"""The columns of a batch: grown in place, cut, taken by rows, in every mode."""

from __future__ import annotations

import torch

from dsv4.integrations.transformers.rows import UNKNOWN_ID, History
from tests.support.numbers import Numbers


def test_columns_are_what_was_added_and_room_grows_by_doubling() -> None:
    numbers = Numbers(1)
    ids = numbers.integers(0, 99, 2, 700)
    mask = numbers.uniform(2, 700) < 0.7
    history, moved = History(2), set()
    for column in range(700):
        history.add(ids[:, column : column + 1], mask[:, column : column + 1])
        moved.add(history.ids.data_ptr())
    assert torch.equal(history.ids, ids)
    assert torch.equal(history.mask, mask)
    assert len(moved) == 3, "256, 512 and 1024 columns"


def test_cut_columns_are_written_again_and_embeddings_have_no_ids() -> None:
    history = History(1)
    history.add(torch.arange(5)[None], torch.ones((1, 5)))
    history.cut(2)
    history.add(None, torch.tensor([[1, 0]]))
    assert history.ids.tolist() == [[0, 1, UNKNOWN_ID, UNKNOWN_ID]]
    assert history.mask.tolist() == [[True, True, True, False]]


def test_taken_rows_go_on_by_themselves() -> None:
    history = History(2)
    history.add(torch.tensor([[1], [2]]), torch.ones((2, 1)))
    taken = history.take([1, 1, 0])
    taken.add(torch.tensor([[3], [4], [5]]), torch.ones((3, 1)))
    assert taken.ids.tolist() == [[2, 3], [2, 4], [1, 5]]
    assert history.ids.tolist() == [[1], [2]]


def test_inference_mode_may_come_and_go() -> None:
    history = History(1)
    with torch.inference_mode():
        history.add(torch.tensor([[1]]), torch.ones((1, 1)))
        history = history.take([0])
    history.add(torch.tensor([[2]]), torch.ones((1, 1)))
    with torch.inference_mode():
        history.add(torch.tensor([[3]]), torch.ones((1, 1)))
    assert history.ids.tolist() == [[1, 2, 3]]
