"""Interpreted query preparation equals the reference bit for bit."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import records
from dsv4.kernels import index_query as kernel
from dsv4.reference import index_query as reference
from tests.oracles.indexer import make_tokens, same_bits
from tests.support.formats import BF16_INDEX_FORMATS
from tests.support.numbers import Numbers

WIDTH, ROPE, POSITIONS = 128, 64, 40


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("spread", [0.0, 3.0, 20.0])
@pytest.mark.parametrize("name", BF16_INDEX_FORMATS)
def test_equals_the_reference(name: str, spread: float):
    numbers = Numbers(5)
    q = numbers.heavy(4, 3, WIDTH, spread=spread).to(torch.bfloat16)
    q[0, 1] = -0.0
    q[3, 0, 100], q[3, 1, 2], q[3, 2, 70] = torch.nan, torch.inf, -torch.inf
    rope = numbers.uniform(POSITIONS, ROPE) * 2 - 1
    record = records.index_format(name, index_dim=WIDTH)
    tokens = make_tokens([(2, POSITIONS - 1), None, (0, 0), (1, 17)])
    found, expected = torch.full_like(q, 7.0), torch.full_like(q, 7.0)
    kernel.prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=found)
    reference.prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=expected)
    assert same_bits(found, expected)


def test_strided_queries():
    numbers = Numbers(6)
    wide = numbers.normal(2, 5, 2 * WIDTH).to(torch.bfloat16)
    q = wide[:, 1:3, WIDTH:]
    rope = numbers.uniform(POSITIONS, ROPE)
    record = records.mxfp4(WIDTH)
    tokens = make_tokens([(0, 3), (1, 30)])
    found, expected = torch.zeros(2, 2, WIDTH).bfloat16(), torch.zeros(2, 2, WIDTH).bfloat16()
    kernel.prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=found)
    reference.prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=expected)
    assert same_bits(found, expected)


@pytest.mark.parametrize("transform", [True, False])
@pytest.mark.parametrize("power", [-100, -120, -126, -130, -133])
@pytest.mark.parametrize("name", BF16_INDEX_FORMATS)
def test_tiny_queries(name: str, power: int, transform: bool):
    """Down to scales and numbers that are denormal."""
    numbers = Numbers(power)
    q = (numbers.normal(3, 4, WIDTH) * 2.0**power).to(torch.bfloat16)
    rope = numbers.uniform(POSITIONS, ROPE) * 2 - 1
    record = records.index_format(name, index_dim=WIDTH)
    tokens = make_tokens([(0, 0), (1, 17), (2, POSITIONS - 1)])
    results = []
    for backend in (kernel, reference):
        results.append(torch.full_like(q, 7.0))
        backend.prepare_index_queries(
            q, tokens=tokens, rope=rope, record=record, out=results[-1], transform=transform
        )
    assert same_bits(*results)
