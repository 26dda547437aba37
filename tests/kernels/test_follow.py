"""Where requests start behind a step under way, interpreted, against the reference: whole
buffers."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from dsv4.kernels.follow import follow
from dsv4.ops.calls import FollowedDrafts, FollowedItems, Following
from dsv4.ops.columns import FOLLOW_COLUMNS, ITEM_COLUMNS, most_items
from dsv4.reference.follow import follow as reference_follow

RATIOS = {2: False, 4: True, 128: False}
REQUESTS, TOKENS, ITEMS = 7, 40, 40


def buffers() -> tuple[Tensor, dict[str, Tensor]]:
    """One storage, as a step's index tensors have, all of it poisoned."""
    sizes = {"follows": (REQUESTS, FOLLOW_COLUMNS + len(RATIOS)), "batch": (REQUESTS, 4)}
    sizes |= {"draft_batch": (2 * REQUESTS, 4), "draft_tokens": (2 * REQUESTS, 4)}
    sizes |= {"tokens": (TOKENS, 4)} | {f"items_{r}": (ITEMS, ITEM_COLUMNS) for r in RATIOS}
    storage = torch.full((sum(a * b for a, b in sizes.values()),), -7, dtype=torch.int32)
    named, at = {}, 0
    for name, (rows, columns) in sizes.items():
        named[name] = storage[at : at + rows * columns].view(rows, columns)
        at += rows * columns
    return storage, named


def random_call(seed: int, *, narrow: bool, dtype: torch.dtype | None) -> tuple[Tensor, Following]:
    draw, (storage, named) = Random(seed), buffers()
    most = draw.choice((1, 3, 4, 6))
    before = torch.tensor(
        [[r, draw.randint(0, 300), draw.randint(0, most), 3 * r] for r in range(REQUESTS)],
        dtype=torch.int32,
    )
    rows = draw.sample(range(REQUESTS), draw.randint(1, REQUESTS))
    taken, first_items = 0, dict.fromkeys(RATIOS, 0)
    for batch_row in range(REQUESTS):
        count = draw.randint(0, most)
        named["batch"][batch_row] = torch.tensor([batch_row + 2, 999, count, taken])
        if batch_row in rows:
            nth = rows.index(batch_row)
            row_before = draw.randrange(REQUESTS)
            reused = draw.choice((0, 0, int(before[row_before, 1]) + draw.randint(0, 12)))
            own = [batch_row, row_before, reused, *first_items.values()]
            named["follows"][nth] = torch.tensor(own)
            for ratio, overlap in RATIOS.items():
                first_items[ratio] += int(most_items(count, ratio, overlap=overlap, narrow=narrow))
        taken += count
    accepted = None
    if dtype is not None:  # some of them out of range
        accepted = torch.tensor([draw.randint(-2, most + 2) for _ in before], dtype=dtype)
    drafts = FollowedDrafts(
        batch=named["draft_batch"], tokens=named["draft_tokens"], steps=min(2, most), rows=REQUESTS
    )
    call = Following(
        follows=named["follows"][: len(rows)],
        batch=named["batch"],
        tokens=named["tokens"],
        items=tuple(
            FollowedItems(ratio=ratio, overlap=overlap, items=named[f"items_{ratio}"])
            for ratio, overlap in RATIOS.items()
        ),
        batch_before=before,
        accepted=accepted,
        narrow=narrow,
        most_tokens=most,
        drafts=drafts if seed % 2 else None,
    )
    return storage, call


@pytest.mark.parametrize("narrow", [True, False], ids=["narrow", "wide"])
@pytest.mark.parametrize("dtype", [None, torch.int32, torch.int64], ids=["all", "i32", "i64"])
def test_equals_the_reference(narrow: bool, dtype: torch.dtype | None):
    for seed in range(8):
        (expected, first), (found, second) = (
            random_call(seed, narrow=narrow, dtype=dtype) for _ in range(2)
        )
        assert torch.equal(expected, found)
        reference_follow(first)
        follow(second)
        assert torch.equal(expected, found), f"seed {seed}"
        starts = first.batch[first.follows[:, 0].long(), 1]
        assert (starts != 999).all()


def test_no_requests_at_all():
    storage, call = random_call(0, narrow=True, dtype=None)
    before = storage.clone()
    for each in (reference_follow, follow):
        each(
            Following(
                follows=call.follows[:0],
                batch=call.batch,
                tokens=call.tokens,
                items=call.items,
                batch_before=call.batch_before,
                accepted=None,
                narrow=True,
                most_tokens=4,
            )
        )
        assert torch.equal(storage, before)
