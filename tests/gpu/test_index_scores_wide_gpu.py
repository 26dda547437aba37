"""Scores of many tokens against the reference and the kernel of few, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.kernels.hopper import index_scores as narrow
from dsv4.kernels.hopper import index_scores_wide as wide
from dsv4.kernels.hopper.scores_common import WIDTH
from dsv4.ops.calls import EntrySource, Scoring
from dsv4.reference import index_scores as reference
from tests.oracles.indexer import UNTOUCHED, make_keys, make_tokens, round_trip, same_bits
from tests.support.numbers import Numbers

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

RECORD = records.index_format("mxfp4", index_dim=WIDTH)
GUARD = 0xA5
# runs that begin and end anywhere in a band, one token alone, tokens without enough entries
RUNS = [(0, 700, 133), (1, 2_000, 1), (2, 0, 70), (1, 900, 45), (None, 0, 3), (0, 5_000, 129)]


def rows() -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for slot, start, count in RUNS:
        found += [None if slot is None else (slot, start + nth) for nth in range(count)]
    return found


def case(
    page_rows: int, *, far: bool = False, seed: int = 0, heads: int = wide.HEADS
) -> tuple[EntrySource, Scoring]:
    """With `far`, spans of keys and queries differ so much that one sum would lose bits."""
    numbers = Numbers(seed)

    def spans(*shape: int) -> Tensor:
        x = numbers.normal(*shape).view(*shape[:-1], 4, 32)
        exponent = numbers.integers(0, 6 if far else 2, *shape[:-1], 4, 1)
        return (x * torch.exp2(exponent.float())).view(shape).to(torch.bfloat16)

    values = [spans(count, WIDTH) for count in (1_283, 512, 18)]
    values[0][7, 5] = torch.nan
    values[0][8] = 0
    values[0][9, 32:96] = 0
    keys = make_keys(RECORD, values, page_rows=page_rows, seed=seed)
    tokens = make_tokens(rows())
    q = round_trip(RECORD, spans(len(tokens), heads, WIDTH))
    q[3, 5], q[4] = 0, 0
    q[6, 1, 3] = torch.nan
    weights = numbers.normal(len(tokens), heads).to(torch.bfloat16)
    return keys, Scoring(
        q=q,
        weights=weights,
        tokens=tokens,
        keys=keys,
        scores=torch.full((len(tokens), 1_312), UNTOUCHED),
        tokens_per_request=129,
    )


def on_gpu(call: Scoring) -> Scoring:
    keys = replace(
        call.keys, arena=call.keys.arena.cuda(), block_table=call.keys.block_table.cuda()
    )
    return replace(
        call,
        q=call.q.cuda(),
        weights=call.weights.cuda(),
        tokens=call.tokens.cuda(),
        keys=keys,
        scores=torch.full_like(call.scores, UNTOUCHED, device="cuda"),
    )


def found(call: Scoring) -> Tensor:
    needed = wide.workspace_bytes(call.q.shape[0])
    workspace = torch.full((needed + 64,), GUARD, dtype=torch.uint8, device="cuda")
    call = replace(on_gpu(call), workspace=workspace[:needed])
    assert wide.supports(call)
    wide.index_scores(call)
    assert (workspace[needed:] == GUARD).all()
    return call.scores.cpu()


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize(("page_rows", "skip_visible"), [(32, 0), (64, 300), (128, 0)])
@pytest.mark.parametrize("heads", narrow.HEAD_COUNTS)
def test_runs_equal_the_reference(heads: int, page_rows: int, skip_visible: int, far: bool) -> None:
    _, call = case(page_rows, far=far, heads=heads)
    call = replace(call, skip_visible=skip_visible)
    reference.index_scores(call)
    assert torch.isnan(call.scores[-1, 7])
    assert same_bits(found(call), call.scores)


@pytest.mark.parametrize("heads", narrow.HEAD_COUNTS)
def test_many_tokens_equal_the_kernel_of_few(heads: int) -> None:
    numbers = Numbers(5)
    entries, count = 6_000, 2_050
    key = numbers.normal(entries, WIDTH).to(torch.bfloat16)
    keys = make_keys(RECORD, [key], page_rows=32)
    q = round_trip(RECORD, numbers.normal(count, heads, WIDTH).to(torch.bfloat16))
    call = Scoring(
        q=q,
        weights=numbers.normal(count, heads).to(torch.bfloat16),
        tokens=make_tokens([(0, 4 * entries - count + nth) for nth in range(count)]),
        keys=keys,
        scores=torch.full((count, keys.capacity), UNTOUCHED),
        skip_visible=512,
        tokens_per_request=count,
    )
    few = on_gpu(call)
    narrow.index_scores(few)
    assert same_bits(found(call), few.scores.cpu())
