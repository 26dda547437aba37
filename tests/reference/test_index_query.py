"""Query preparation against matrices in float64."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import records
from dsv4.reference.codec import VALUE_TYPES
from dsv4.reference.index_query import prepare_index_queries
from tests.oracles.indexer import make_tokens, round_trip, same_bits
from tests.support.numbers import Numbers

WIDTH, ROPE = 128, 64


def rotated_and_transformed(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """RoPE by complex numbers and the Sylvester matrix, float64; rounded after each, as specified,
    to the type of `x`."""
    head, tail = x[:-ROPE].double(), x[-ROPE:].double()
    turned = torch.view_as_complex(tail.view(-1, 2)) * torch.polar(
        torch.ones_like(angles).double(), angles.double()
    )
    y = torch.cat((head, torch.view_as_real(turned).flatten())).to(x.dtype).double()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < WIDTH:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix @ y * WIDTH**-0.5).to(x.dtype)


@pytest.mark.parametrize("name", records.INDEX_FORMATS)
def test_queries_are_rotated_transformed_and_rounded_like_keys(name: str):
    record = records.index_format(name, index_dim=WIDTH)
    numbers = Numbers(1)
    q = numbers.normal(3, 2, WIDTH).to(VALUE_TYPES[record.value_dtype])
    angles = numbers.uniform(20, ROPE // 2) * 6
    rope = torch.cat((angles.cos(), angles.sin()), dim=-1)
    tokens = make_tokens([(0, 19), None, (2, 0)])
    out = torch.full_like(q, 7.0)
    prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=out)
    assert same_bits(out[1], torch.full_like(out[1], 7.0))
    for token, position in ((0, 19), (2, 0)):
        for head in range(2):
            x = rotated_and_transformed(q[token, head], angles[position])
            expected = round_trip(record, x).float()
            found = out[token, head].float()
            if record.value_dtype == "float32":
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
                continue
            # fp32 angles may move a value across a rounding boundary
            assert (found != expected).float().mean() <= 0.05
            torch.testing.assert_close(found, expected, rtol=0.5, atol=0.3)


def test_mxfp4_queries_hold_only_values_of_the_grid():
    q = Numbers(2).normal(1, 4, WIDTH).to(torch.bfloat16)
    out = torch.empty_like(q)
    rope = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), dim=-1)
    prepare_index_queries(
        q, tokens=make_tokens([(0, 0)]), rope=rope, record=records.mxfp4(WIDTH), out=out
    )
    tiles = out.float().unflatten(-1, (-1, 32))
    # the power of two that is not below: from the bits, for log2 is the machine's
    part, exponent = torch.frexp(tiles.abs().amax(-1, keepdim=True) / 6)
    scale = ((exponent - (part == 0.5).int() + 127) << 23).view(torch.float32)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert torch.isin((tiles / scale).abs(), torch.cat((grid, grid * 2))).all()


def test_queries_do_not_depend_on_how_many_are_taken_at_once(monkeypatch: pytest.MonkeyPatch):
    record, numbers = records.mxfp4(WIDTH), Numbers(3)
    q = numbers.normal(9, 2, WIDTH).bfloat16()
    q[4, 1, 5] = torch.inf
    rope = numbers.normal(20, ROPE)
    tokens = make_tokens([None if n == 3 else (0, 2 * n) for n in range(9)])
    found = torch.full((2, *q.shape), 7.0).bfloat16()
    for out, at_once in zip(found, (5 * WIDTH, 1 << 20), strict=True):
        monkeypatch.setattr("dsv4.reference.index_query.MAX_CHANNELS", at_once)
        prepare_index_queries(q, tokens=tokens, rope=rope, record=record, out=out)
    assert same_bits(found[0], found[1])
    assert found[0, 4].isnan().any(dim=-1).tolist() == [False, True]
