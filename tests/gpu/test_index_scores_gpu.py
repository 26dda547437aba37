"""The portable scores on whatever GPU this is, against the reference: what runs on every GPU but
Hopper, and there for what Hopper's own do not do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.kernels import index_scores as kernel
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

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
ENTRIES = (1500, 0, 64, 65, 9, 300)
ROWS = [
    (0, 5999), (0, 5998), (0, 3000), None, (3, 259), (2, 254), (2, 255), (1, 2), None, (4, 35),
    (5, 1199), (5, 3), (0, 255),
]  # fmt: skip
COLUMNS, WIDTH = 1536, 128


def case(name: str, heads: int) -> tuple[EntrySource, Tensor, Tensor, Tensor]:
    record, numbers = records.index_format(name, index_dim=WIDTH), Numbers(heads)

    def random(*shape: int) -> Tensor:
        return numbers.heavy(*shape).to(torch.bfloat16)

    values = [random(n, WIDTH) for n in ENTRIES]
    values[0][8] = 0
    keys = make_keys(record, values, page_rows=32)
    q = round_trip(record, random(len(ROWS), heads, WIDTH))
    q[3], q[8] = torch.nan, torch.nan
    return keys, make_tokens(ROWS), q, random(len(ROWS), heads)


def scored(
    keys: EntrySource,
    tokens: Tensor,
    q: Tensor,
    weights: Tensor,
    *,
    device: torch.device,
    **options: int,
) -> Tensor:
    """By the kernel on a GPU, by the reference on the CPU."""
    scores = torch.full((len(tokens), COLUMNS), UNTOUCHED, device=device)
    there = replace(keys, arena=keys.arena.to(device), block_table=keys.block_table.to(device))
    run = kernel.index_scores if device == DEVICE else reference.index_scores
    run(
        Scoring(
            q=q.to(device), weights=weights.to(device), tokens=tokens.to(device), keys=there,
            scores=scores, **options,
        )
    )  # fmt: skip
    return scores.cpu()


def both(
    given: tuple[EntrySource, Tensor, Tensor, Tensor], **options: int
) -> tuple[Tensor, Tensor]:
    found, expected = (
        scored(*given, device=device, **options) for device in (DEVICE, torch.device("cpu"))
    )
    return found, expected


@pytest.mark.parametrize("tokens_per_request", [1, 2, 16])
@pytest.mark.parametrize("heads", [5, 16, 64])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_four_bit_keys_give_the_bits_of_the_reference(
    name: str, heads: int, tokens_per_request: int
) -> None:
    found, expected = both(case(name, heads), tokens_per_request=tokens_per_request)
    assert same_bits(found, expected)


@pytest.mark.parametrize("tokens_per_request", [1, 16])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_tiny_and_large_queries(name: str, tokens_per_request: int) -> None:
    record = records.index_format(name, index_dim=WIDTH)
    values, q, weights = sizes_far_apart(record, ENTRIES, len(ROWS), 64, 0)
    given = make_keys(record, values, page_rows=32), make_tokens(ROWS), q, weights
    found, expected = both(given, tokens_per_request=tokens_per_request)
    assert same_bits(found, expected)


@pytest.mark.parametrize("tokens_per_request", [1, 16])
def test_scores_that_are_not_rounded(tokens_per_request: int) -> None:
    given = case("mxfp4", 64)
    found, expected = both(given, tokens_per_request=tokens_per_request, round_bf16=False)
    assert same_bits(found, expected)


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_wider_keys_give_the_numbers_of_the_reference(name: str) -> None:
    found, expected = both(case(name, 64), round_bf16=False)
    written = expected != UNTOUCHED
    assert torch.equal(found != UNTOUCHED, written)
    found, expected = found[written], expected[written]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("tokens_per_request", [1, 16])
def test_a_score_does_not_depend_on_its_batch(tokens_per_request: int) -> None:
    keys, tokens, q, weights = case("mxfp4", 64)
    options = {"device": DEVICE, "tokens_per_request": tokens_per_request}
    whole = scored(keys, tokens, q, weights, **options)
    for rows in (Numbers(2).permutation(len(tokens)), torch.tensor([5])):
        part = scored(keys, tokens[rows], q[rows], weights[rows], **options)
        assert same_bits(part, whole[rows])
