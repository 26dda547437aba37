"""Scores of the Hopper kernel against the reference, bit for bit, and the rest untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.cache.reads import EntrySource
from dsv4.kernels import index_scores as kernel
from dsv4.kernels import index_scores_hopper as hopper
from dsv4.reference import index_scores as reference
from tests.oracles.indexer import UNTOUCHED, make_keys, make_tokens, round_trip, same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]

RECORD = records.index_format("mxfp4", index_dim=hopper.WIDTH)
ENTRIES = (1500, 0, 64, 65, 9, 300)
ROWS = [
    (0, 5999), (0, 3000), None, (3, 259), (2, 255), (2, 254), (1, 2), None, (4, 35), (5, 1199),
    (5, 3), (0, 255),
]  # fmt: skip
COLUMNS = 1536


def case(page_rows: int, *, seed: int = 0) -> tuple[EntrySource, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator)
        return (x * torch.exp(torch.randn(*shape, generator=generator))).to(torch.bfloat16)

    values = [random(n, hopper.WIDTH) for n in ENTRIES]
    values[0][7, 5] = torch.nan  # one key with a NaN, and one of zeros
    values[0][8] = 0
    keys = make_keys(RECORD, values, page_rows=page_rows, seed=seed)
    q = round_trip(RECORD, random(len(ROWS), hopper.HEADS, hopper.WIDTH))
    q[2], q[7] = torch.nan, torch.nan
    return keys, make_tokens(ROWS), q, random(len(ROWS), hopper.HEADS)


def on_gpu(keys: EntrySource) -> EntrySource:
    return replace(keys, arena=keys.arena.cuda(), block_table=keys.block_table.cuda())


def wanted(
    keys: EntrySource, tokens: Tensor, q: Tensor, weights: Tensor, skip_visible: int
) -> Tensor:
    scores = torch.full((len(tokens), COLUMNS), UNTOUCHED)
    reference.index_scores(
        q, weights, tokens=tokens, keys=keys, first_entry=0, scores=scores,
        skip_visible=skip_visible,
    )  # fmt: skip
    return scores


@pytest.mark.parametrize("skip_visible", [0, 64])
@pytest.mark.parametrize("page_rows", [32, 64, 128])
def test_ragged_batch_equals_the_reference(page_rows: int, skip_visible: int) -> None:
    keys, tokens, q, weights = case(page_rows)
    assert hopper.supports(q, keys, 0, True, 1)
    scores = torch.full((len(tokens), COLUMNS), UNTOUCHED, device="cuda")
    kernel.index_scores(
        q.cuda(), weights.cuda(), tokens=tokens.cuda(), keys=on_gpu(keys), first_entry=0,
        scores=scores, skip_visible=skip_visible,
    )  # fmt: skip
    expected = wanted(keys, tokens, q, weights, skip_visible)
    assert torch.isnan(expected[0, 7])
    assert same_bits(scores.cpu(), expected)


def test_a_score_does_not_depend_on_its_batch() -> None:
    keys, tokens, q, weights = case(32, seed=1)
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(2))
    results = []
    for rows in (torch.arange(len(tokens)), order, order[:3]):
        scores = torch.full((len(rows), COLUMNS), UNTOUCHED, device="cuda")
        kernel.index_scores(
            q[rows].cuda(), weights[rows].cuda(), tokens=tokens[rows].cuda(), keys=on_gpu(keys),
            first_entry=0, scores=scores,
        )  # fmt: skip
        results.append(scores)
    assert same_bits(results[0][order.cuda()], results[1])
    assert same_bits(results[1][:3], results[2])


def test_many_tokens_of_a_launch_and_of_several() -> None:
    """256 tokens fill a launch; 300 take two."""
    keys, _, _, _ = case(32)
    generator = torch.Generator().manual_seed(5)
    tokens = make_tokens([(0, int(p)) for p in torch.randint(6000, (300,), generator=generator)])
    q = round_trip(
        RECORD, torch.randn(300, hopper.HEADS, hopper.WIDTH, generator=generator).bfloat16()
    )
    weights = torch.randn(300, hopper.HEADS, generator=generator).bfloat16()
    scores = torch.full((300, COLUMNS), UNTOUCHED, device="cuda")
    kernel.index_scores(
        q.cuda(), weights.cuda(), tokens=tokens.cuda(), keys=on_gpu(keys), first_entry=0,
        scores=scores,
    )  # fmt: skip
    assert same_bits(scores.cpu(), wanted(keys, tokens, q, weights, 0))
