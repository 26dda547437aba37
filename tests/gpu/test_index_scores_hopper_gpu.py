"""Scores of the Hopper kernel against the reference, bit for bit, and the rest untouched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.kernels.hopper import index_scores as hopper
from dsv4.ops.calls import EntrySource, Scoring
from dsv4.reference import index_scores as reference
from tests.oracles.indexer import (
    UNTOUCHED,
    make_keys,
    make_tokens,
    round_trip,
    same_bits,
    sizes_far_apart,
)
from tests.support.numbers import Numbers

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

RECORD = records.index_format("mxfp4", index_dim=hopper.WIDTH)
ENTRIES = (1500, 0, 64, 65, 9, 300)
ROWS = [
    (0, 5999), (0, 3000), None, (3, 259), (2, 255), (2, 254), (1, 2), None, (4, 35), (5, 1199),
    (5, 3), (0, 255),
]  # fmt: skip
COLUMNS = 1536


def case(
    page_rows: int, *, seed: int = 0, heads: int = hopper.HEADS
) -> tuple[EntrySource, Tensor, Tensor, Tensor]:
    numbers = Numbers(seed)

    def random(*shape: int) -> Tensor:
        return numbers.heavy(*shape).to(torch.bfloat16)

    values = [random(n, hopper.WIDTH) for n in ENTRIES]
    values[0][7, 5] = torch.nan  # one key with a NaN, and one of zeros
    values[0][8] = 0
    keys = make_keys(RECORD, values, page_rows=page_rows, seed=seed)
    q = round_trip(RECORD, random(len(ROWS), heads, hopper.WIDTH))
    q[2], q[7] = torch.nan, torch.nan
    return keys, make_tokens(ROWS), q, random(len(ROWS), heads)


def on_gpu(keys: EntrySource) -> EntrySource:
    return replace(keys, arena=keys.arena.cuda(), block_table=keys.block_table.cuda())


def wanted(
    keys: EntrySource, tokens: Tensor, q: Tensor, weights: Tensor, skip_visible: int = 0
) -> Tensor:
    scores = torch.full((len(tokens), COLUMNS), UNTOUCHED)
    reference.index_scores(
        Scoring(
            q=q, weights=weights, tokens=tokens, keys=keys, scores=scores, skip_visible=skip_visible
        )
    )
    return scores


def found(
    keys: EntrySource,
    tokens: Tensor,
    q: Tensor,
    weights: Tensor,
    *,
    skip_visible: int = 0,
    tokens_per_request: int = 1,
) -> Tensor:
    scores = torch.full((len(tokens), COLUMNS), UNTOUCHED, device="cuda")
    call = Scoring(
        q=q.cuda(),
        weights=weights.cuda(),
        tokens=tokens.cuda(),
        keys=on_gpu(keys),
        scores=scores,
        skip_visible=skip_visible,
        tokens_per_request=tokens_per_request,
    )
    assert hopper.supports(call)
    hopper.index_scores(call)
    return scores.cpu()


@pytest.mark.parametrize("skip_visible", [0, 64])
@pytest.mark.parametrize("page_rows", [32, 64, 128])
@pytest.mark.parametrize("heads", hopper.HEAD_COUNTS)
def test_ragged_batch_equals_the_reference(heads: int, page_rows: int, skip_visible: int) -> None:
    keys, tokens, q, weights = case(page_rows, heads=heads)
    expected = wanted(keys, tokens, q, weights, skip_visible)
    assert torch.isnan(expected[0, 7])
    assert same_bits(found(keys, tokens, q, weights, skip_visible=skip_visible), expected)


@pytest.mark.parametrize("heads", hopper.HEAD_COUNTS)
def test_tiny_and_large_queries(heads: int) -> None:
    values, q, weights = sizes_far_apart(RECORD, ENTRIES, len(ROWS), heads, 0)
    given = make_keys(RECORD, values, page_rows=32), make_tokens(ROWS), q, weights
    assert same_bits(found(*given), wanted(*given))


def test_several_tokens_a_request_are_scored_one_by_one() -> None:
    keys, tokens, q, weights = case(32, seed=3)
    scores = found(keys, tokens, q, weights, tokens_per_request=4)
    assert same_bits(scores, wanted(keys, tokens, q, weights))


@pytest.mark.parametrize("heads", hopper.HEAD_COUNTS)
def test_a_score_does_not_depend_on_its_batch(heads: int) -> None:
    keys, tokens, q, weights = case(32, seed=1, heads=heads)
    order = Numbers(2).permutation(len(tokens))
    whole = found(keys, tokens, q, weights)
    for rows in (order, order[:3]):
        assert same_bits(found(keys, tokens[rows], q[rows], weights[rows]), whole[rows])


def test_many_tokens_of_a_launch_and_of_several() -> None:
    """256 tokens fill a launch; 300 take two."""
    keys, _, _, _ = case(32)
    numbers = Numbers(5)
    tokens = make_tokens([(0, int(p)) for p in numbers.integers(0, 6000, 300)])
    q = round_trip(RECORD, numbers.normal(300, hopper.HEADS, hopper.WIDTH).bfloat16())
    weights = numbers.normal(300, hopper.HEADS).bfloat16()
    assert same_bits(found(keys, tokens, q, weights), wanted(keys, tokens, q, weights))


def test_a_nan_in_a_query_makes_its_scores_nan() -> None:
    keys, tokens, q, weights = case(32)
    q[0, 3, 32:64] = torch.nan
    scores = found(keys, tokens, q, weights)
    assert torch.isnan(scores[0, :1500]).all()
    assert same_bits(scores, wanted(keys, tokens, q, weights))


def scaled_case(exponents: tuple[int, ...], key_exponent: int) -> tuple[Tensor, Tensor]:
    """Raw queries whose scale groups lie at powers of two drawn from `exponents`, and raw keys."""
    numbers = Numbers(4)
    q = numbers.normal(len(ROWS), hopper.HEADS, 4, 32)
    drawn = torch.tensor(exponents)[numbers.integers(0, len(exponents), *q.shape[:3])]
    keys = numbers.normal(1500, hopper.WIDTH) * 2.0**key_exponent
    return torch.ldexp(q, drawn[..., None]).flatten(2).bfloat16(), keys.bfloat16()


@pytest.mark.parametrize("exponents", [(0, -3, -6), (-40, -45), (33, 34)])
@pytest.mark.parametrize("key_exponent", [-35, 30])
def test_scales_of_any_size(exponents: tuple[int, ...], key_exponent: int) -> None:
    _, tokens, _, weights = case(32)
    raw_q, raw_keys = scaled_case(exponents, key_exponent)
    keys = make_keys(RECORD, [raw_keys[:n] for n in ENTRIES], page_rows=32)
    q = round_trip(RECORD, raw_q)
    assert same_bits(found(keys, tokens, q, weights), wanted(keys, tokens, q, weights))


@pytest.mark.parametrize("key_exponent", [-35, 30])
@pytest.mark.parametrize("group", [0, 2])
def test_keys_with_a_group_of_zeros(group: int, key_exponent: int) -> None:
    """Its scale is the least there is."""
    _, tokens, _, weights = case(32)
    raw_q, raw_keys = scaled_case((0, -3), key_exponent)
    raw_keys[::2, 32 * group : 32 * group + 32] = 0
    keys = make_keys(RECORD, [raw_keys[:n] for n in ENTRIES], page_rows=32)
    q = round_trip(RECORD, raw_q)
    assert same_bits(found(keys, tokens, q, weights), wanted(keys, tokens, q, weights))


def test_queries_with_scales_far_apart_are_off_by_little() -> None:
    """Keys without the first group, where queries are largest, see nothing but what is rounded."""
    _, tokens, _, weights = case(32)
    raw_q, raw_keys = scaled_case((-17, -20), 0)
    raw_q[:, :, :32] = 1.0
    raw_keys[:, :32] = 0
    keys = make_keys(RECORD, [raw_keys[:n] for n in ENTRIES], page_rows=32)
    q = round_trip(RECORD, raw_q)
    key_sum = round_trip(RECORD, raw_keys[:COLUMNS]).float().abs().sum(1)
    bound = weights[0].float().abs().sum() * key_sum * 2.0**-18 * 1.05
    off = (found(keys, tokens, q, weights) - wanted(keys, tokens, q, weights))[0, :1500].abs()
    assert (off <= bound).all()
