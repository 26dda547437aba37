"""Index queries prepared on a GPU against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import records
from dsv4.kernels import index_query
from dsv4.reference import index_query as reference_query
from tests.oracles.indexer import make_tokens, same_bits
from tests.support.formats import BF16_INDEX_FORMATS
from tests.support.numbers import Numbers

pytestmark = pytest.mark.gpu

HEADS, WIDTH, ROPE, POSITIONS = 64, 128, 64, 40


@pytest.mark.parametrize("name", BF16_INDEX_FORMATS)
def test_index_queries(name: str) -> None:
    numbers = Numbers(5)
    spreads = (0.0, 1.0, 3.0, 3.0, 20.0, 3.0)
    q = torch.stack([numbers.heavy(HEADS, WIDTH, spread=s) for s in spreads]).to(torch.bfloat16)
    q[0, 1], q[0, 2] = 0.0, -0.0
    q[3, 0, 100], q[3, 1, 2], q[3, 2, 70] = torch.nan, torch.inf, -torch.inf
    rope = numbers.uniform(POSITIONS, ROPE) * 2 - 1
    tokens = make_tokens([(0, 39), None, (1, 0), (2, 17), (3, 5), (4, 6)])
    record = records.index_format(name, index_dim=WIDTH)
    expected, found = torch.full_like(q, 7.0), torch.full_like(q, 7.0).cuda()
    reference_query.prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=expected)
    index_query.prepare_index_queries(
        q.cuda(), tokens=tokens.cuda(), rope=rope.cuda(), record=record, out=found
    )
    assert same_bits(found.cpu(), expected)


@pytest.mark.parametrize("power", [-100, -120, -126, -130, -133])
@pytest.mark.parametrize("name", BF16_INDEX_FORMATS)
def test_tiny_queries(name: str, power: int) -> None:
    """Down to scales and numbers that are denormal."""
    numbers = Numbers(power)
    q = (numbers.normal(3, HEADS, WIDTH) * 2.0**power).to(torch.bfloat16)
    rope = numbers.uniform(POSITIONS, ROPE) * 2 - 1
    tokens = make_tokens([(0, 0), (1, 17), (2, 39)])
    record = records.index_format(name, index_dim=WIDTH)
    expected, found = torch.full_like(q, 7.0), torch.full_like(q, 7.0).cuda()
    reference_query.prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=expected)
    index_query.prepare_index_queries(
        q.cuda(), tokens=tokens.cuda(), rope=rope.cuda(), record=record, out=found
    )
    assert same_bits(found.cpu(), expected)
