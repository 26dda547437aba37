"""Where requests start behind a step under way: what the host would have planned, had it known."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from dsv4.cache.step.shape import chunk_groups, closing_groups, without_existing
from dsv4.ops.calls import FollowedItems, Following
from dsv4.ops.columns import most_items
from dsv4.reference.follow import follow


@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, True), (4, False), (128, False), (1, False)])
def test_items_and_positions_are_those_of_a_step_whose_start_is_known(
    ratio: int, overlap: bool, narrow: bool
):
    draw = Random(ratio + narrow)
    for _ in range(60):
        count, counts_before = draw.randint(0, 6), draw.randint(0, 6)
        begin, kept = draw.randint(0, 300), draw.randint(0, counts_before)
        start = begin + kept
        reused = draw.choice((0, start + draw.randint(-5, 9)))
        batch = torch.tensor([[3, -1, count, 2]], dtype=torch.int32)
        tokens = torch.full((10, 4), -7, dtype=torch.int32)
        items = torch.full((10, 8), -7, dtype=torch.int32)
        call = Following(
            follows=torch.tensor([[0, 1, reused, 1]], dtype=torch.int32),
            batch=batch,
            tokens=tokens,
            items=(FollowedItems(ratio=ratio, overlap=overlap, items=items),),
            batch_before=torch.tensor([[9, 9, 9, 9], [3, begin, counts_before, 0]]).int(),
            accepted=torch.tensor([99, kept]),
            narrow=narrow,
            most_tokens=6,
        )
        follow(call)
        assert batch.tolist() == [[3, start, count, 2]]
        assert tokens[2 : 2 + count, 1].tolist() == list(range(start, start + count))
        tokens[2 : 2 + count, 1] = -7
        assert (tokens == -7).all()
        starts, ends = np.array([start]), np.array([start + count])
        if narrow:
            expected = closing_groups(ratio, starts, ends, most_tokens=6)
        else:
            expected = chunk_groups(ratio, starts, ends, overlap=overlap)
        expected = without_existing(expected, np.array([reused]) // ratio)
        own = int(most_items(count, ratio, overlap=overlap, narrow=narrow))
        rows = items[1 : 1 + own, :7]
        live = rows[rows[:, 0] >= 0]
        assert (rows[rows[:, 0] < 0] == -1).all()
        assert live[:, :4].tolist() == [[3, start, start + count, 2]] * len(expected.row)
        assert live[:, 4].tolist() == expected.entry.tolist()
        entries, tails = (
            np.broadcast_to(value, expected.row.shape).tolist()
            for value in (expected.entries, expected.writes_tails)
        )
        assert live[:, 5].tolist() == entries
        assert live[:, 6].tolist() == tails
        items[1 : 1 + own, :7] = -7
        assert (items == -7).all()


@pytest.mark.parametrize(("given", "start"), [(-3, 50), (0, 50), (2, 52), (4, 54), (9, 54)])
def test_counts_out_of_range_are_taken_for_the_nearest(given: int, start: int):
    batch = torch.tensor([[0, -1, 1, 0]], dtype=torch.int32)
    tokens = torch.zeros((1, 4), dtype=torch.int32)
    follow(
        Following(
            follows=torch.tensor([[0, 0, 0]], dtype=torch.int32),
            batch=batch,
            tokens=tokens,
            items=(),
            batch_before=torch.tensor([[0, 50, 4, 0]], dtype=torch.int32),
            accepted=torch.tensor([given], dtype=torch.int32),
            narrow=True,
            most_tokens=4,
        )
    )
    assert int(batch[0, 1]) == int(tokens[0, 1]) == start
