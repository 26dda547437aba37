"""Interpreted scores against the reference: the whole tensor, poison everywhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.errors import InvalidInput
from dsv4.kernels import index_scores as kernel
from dsv4.ops.calls import EntrySource, Scoring
from dsv4.reference import index_scores as reference
from tests.oracles.indexer import (
    QUERY_POWERS,
    UNTOUCHED,
    make_keys,
    make_tokens,
    round_trip,
    same_bits,
    sizes_far_apart,
)
from tests.support.formats import BF16_INDEX_FORMATS
from tests.support.numbers import Numbers

ENTRIES = (150, 0, 40, 9)
ROWS = [(0, 599), (0, 598), None, (3, 35), (2, 150), (2, 151), (2, 152), (1, 2), None, (0, 255)]
COLUMNS = 152


def case(
    name: str, *, heads: int = 8, width: int = 64, seed: int = 0
) -> tuple[EntrySource, Tensor, Tensor, Tensor]:
    record = records.index_format(name, index_dim=width)
    numbers = Numbers(seed)

    def random(*shape: int) -> Tensor:
        return numbers.heavy(*shape).to(torch.bfloat16)

    keys = make_keys(record, [random(n, width) for n in ENTRIES], seed=seed)
    q = round_trip(record, random(len(ROWS), heads, width))
    q[2], q[8] = torch.nan, torch.nan
    return keys, make_tokens(ROWS), q, random(len(ROWS), heads)


def both(
    keys: EntrySource,
    tokens: Tensor,
    q: Tensor,
    weights: Tensor,
    *,
    columns: int = COLUMNS,
    round_bf16: bool = True,
    skip_visible: int = 0,
    tokens_per_request: int = 1,
) -> tuple[Tensor, Tensor]:
    results = []
    for function in (kernel.index_scores, reference.index_scores):
        scores = torch.full((len(tokens), columns), UNTOUCHED)
        function(
            Scoring(
                q=q,
                weights=weights,
                tokens=tokens,
                keys=keys,
                scores=scores,
                round_bf16=round_bf16,
                skip_visible=skip_visible,
                tokens_per_request=tokens_per_request,
            )
        )
        results.append(scores)
    return results[0], results[1]


@pytest.mark.parametrize("round_bf16", [True, False])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_four_bit_keys_give_the_bits_of_the_reference(name: str, round_bf16: bool):
    found, expected = both(*case(name), round_bf16=round_bf16)
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_wider_keys_give_the_numbers_of_the_reference(name: str):
    found, expected = both(*case(name), round_bf16=False)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    found, expected = both(*case(name))
    assert (found == expected).float().mean() > 0.995
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("heads", "width"), [(5, 64), (32, 128), (64, 128)])
def test_other_shapes(heads: int, width: int):
    found, expected = both(*case("mxfp4", heads=heads, width=width, seed=1), tokens_per_request=2)
    assert same_bits(found, expected)


@pytest.mark.parametrize("tokens_per_request", [2, 3, 16])
def test_sharing_keys_between_tokens_changes_nothing(tokens_per_request: int):
    found, expected = both(*case("mxfp4"), tokens_per_request=tokens_per_request)
    assert same_bits(found, expected)


@pytest.mark.parametrize("tokens_per_request", [1, 4])
@pytest.mark.parametrize("columns", [5, 17, 64, 115])
def test_part_of_the_entries(columns: int, tokens_per_request: int):
    found, expected = both(
        *case("mxfp4"),
        columns=columns,
        tokens_per_request=tokens_per_request,
    )
    assert same_bits(found, expected)


def test_tokens_that_see_few_entries_are_skipped():
    found, expected = both(*case("mxfp4"), skip_visible=38)
    assert same_bits(found, expected)
    assert (found[3] == UNTOUCHED).all()


@pytest.mark.parametrize("tokens_per_request", [1, 4])
def test_permuting_the_batch_permutes_the_scores(tokens_per_request: int):
    keys, tokens, q, weights = case("mxfp4")
    plain, _ = both(keys, tokens, q, weights)
    order = Numbers(4).permutation(len(tokens))
    shuffled = torch.full((len(tokens), COLUMNS), UNTOUCHED)
    kernel.index_scores(
        Scoring(
            q=q[order],
            weights=weights[order],
            tokens=tokens[order],
            keys=keys,
            scores=shuffled,
            tokens_per_request=tokens_per_request,
        )
    )
    assert same_bits(shuffled, plain[order])
    alone = torch.full((1, COLUMNS), UNTOUCHED)
    kernel.index_scores(
        Scoring(q=q[4:5], weights=weights[4:5], tokens=tokens[4:5], keys=keys, scores=alone)
    )
    assert same_bits(alone, plain[4:5])


def test_nan_and_negative_weights():
    keys, tokens, q, weights = case("mxfp4")
    q[0, 3, 7] = torch.nan
    weights[1] = -weights[1].abs()
    weights[3] = 0
    weights[4, 0] = torch.inf
    found, expected = both(keys, tokens, q, weights)
    assert same_bits(found, expected)
    assert torch.isnan(found[0, :150]).all()
    assert (found[1, :149] <= 0).all()
    assert same_bits(found[3, :9], torch.zeros(9))


@pytest.mark.parametrize("powers", [QUERY_POWERS, (-126, -124, -120)], ids=["far", "denormal"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_tiny_and_large_queries(name: str, powers: tuple[int, ...]):
    record = records.index_format(name, index_dim=64)
    values, q, weights = sizes_far_apart(record, ENTRIES, len(ROWS), 8, 0, powers)
    found, expected = both(make_keys(record, values), make_tokens(ROWS), q, weights)
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", BF16_INDEX_FORMATS)
def test_a_key_with_a_nan_scores_nan(name: str):
    """And no other key does: it is below every number when entries are selected."""
    record, numbers = records.index_format(name, index_dim=64), Numbers(3)
    values = [numbers.normal(n, 64).to(torch.bfloat16) for n in ENTRIES]
    values[0][5, 40] = torch.nan
    q = round_trip(record, numbers.normal(len(ROWS), 8, 64).to(torch.bfloat16))
    weights = numbers.normal(len(ROWS), 8).to(torch.bfloat16)
    found, expected = both(make_keys(record, values), make_tokens(ROWS), q, weights)
    assert torch.equal(found.isnan(), expected.isnan())
    nan = torch.zeros_like(found, dtype=torch.bool)
    nan[[0, 1, 9], 5] = True  # tokens of the first request
    assert torch.equal(found.isnan(), nan)


def test_many_tokens_take_several_launches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel, "MAX_TOKENS", 4)
    found, expected = both(*case("mxfp4"))
    assert same_bits(found, expected)


def test_a_width_that_cannot_be_quartered_is_refused():
    keys, tokens, q, weights = case("mxfp4")
    narrow = replace(keys.page, format=records.mxfp4(32))
    with pytest.raises(InvalidInput, match="32 channels"):
        both(replace(keys, page=narrow), tokens, q[..., :32], weights)
