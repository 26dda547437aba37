"""Each helper of kernels/numerics.py and codes.py, interpreted, against reference/numerics and the
codec."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels import numerics as kernels
from dsv4.kernels.codes import e2m1_code, e4m3_bits, e4m3_value, exponent_at_least
from dsv4.model import ModelSpec
from dsv4.ops.constants import BF16_MAX
from dsv4.reference import codec
from dsv4.reference import numerics as reference
from dsv4.rope import rope_table
from tests.support.numbers import Numbers

BLOCK = 8192
NAN, INF = math.nan, math.inf


@triton.jit
def _elementwise_kernel(x_ptr, out_ptr, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, OP(x), mask=at < n)


@triton.jit
def _rms_norm_kernel(x_ptr, weight_ptr, out_ptr, eps, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)[None, :]
    row = tl.program_id(0) * WIDTH
    x = tl.load(x_ptr + row + at)
    tl.store(out_ptr + row + at, kernels.rms_norm(x, tl.load(weight_ptr + at), eps, WIDTH))


@triton.jit
def _rotate_kernel(x_ptr, rope_ptr, out_ptr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    at = tl.arange(0, WIDTH)
    row = tl.program_id(0)
    cos, sin = kernels.load_rope(rope_ptr + row * ROPE, WIDTH, ROPE)
    x = tl.load(x_ptr + row * WIDTH + at)
    tl.store(out_ptr + row * WIDTH + at, kernels.rotate(x, cos, sin, WIDTH, ROPE))


@triton.jit
def _hadamard_kernel(x_ptr, out_ptr, OP: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, WIDTH)
    row = tl.program_id(0) * WIDTH
    x = tl.load(x_ptr + row + at)
    tl.store(out_ptr + row + at, OP(x, WIDTH**-0.5, WIDTH))


def elementwise(op: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=dtype)
    _elementwise_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), OP=op, BLOCK=BLOCK)
    return out


def from_bits(bits: Tensor) -> Tensor:
    """int64 bit patterns → fp32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.element_size()]
    wrong = torch.nonzero(found.view(kind).flatten() != expected.view(kind).flatten()).flatten()
    some = [(found.flatten()[i].item(), expected.flatten()[i].item()) for i in wrong[:4]]
    assert not len(wrong), f"{len(wrong)} differ, (found, expected): {some}"


def every_bf16() -> Tensor:
    return from_bits(torch.arange(65536) << 16)


# ---- element by element -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_exp():
    edges = torch.tensor([0.0, -0.0, -1e-30, -86.999, -87.0, -87.00001, -88.0, -1e30, -INF, NAN])
    x = torch.cat((edges, Numbers(1).uniform(40_000) * -90))
    found = elementwise(kernels.exp_nonpositive, x, torch.float32)
    expected = reference.exp_nonpositive(x)
    assert_same_bits(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    live = x > -86
    relative = (found[live].double() / x[live].double().exp() - 1).abs().max().item()
    assert relative < 2 * 2**-23


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_round_bf16_at_every_upper_half(low: int):
    x = from_bits((torch.arange(65536) << 16) | low)
    found = elementwise(kernels.round_bf16, x, torch.float32)
    assert_same_bits(found, reference.to_bf16(x).float())


def test_bf16_bits():
    x = every_bf16()
    found = elementwise(kernels.bf16_bits, x, torch.int16)
    assert torch.equal(found.view(torch.int16).long() & 0xFFFF, torch.arange(65536))


def test_e4m3_bits_of_every_bf16_and_every_tie():
    values = every_bf16()
    values = values[values.abs() <= 448]
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[:-1] + codes[1:]) / 2
    beside = [torch.nextafter(ties, torch.tensor(to)) for to in (0.0, 448.0)]
    x = torch.cat((values, *(part for t in (ties, *beside) for part in (t, -t))))
    found = elementwise(e4m3_bits, x, torch.uint8)
    assert_same_bits(found, x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_e4m3_bits_beyond_the_largest_and_of_nan():
    x = torch.tensor([449.0, 1e30, INF, -449.0, -INF, NAN])
    found = elementwise(e4m3_bits, x, torch.uint8)
    assert found.tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0xFE, 0x7F]


def test_e4m3_values():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != codec.E4M3_NAN]
    found = elementwise(e4m3_value, codes, torch.float32)
    assert_same_bits(found, codes.view(torch.float8_e4m3fn).float())


def test_e2m1_codes_of_every_bf16_and_every_tie():
    values = every_bf16()
    values = values[values.abs() <= 6]
    ties = torch.tensor([midpoint for midpoint, _ in codec.E2M1_STEPS])
    beside = [torch.nextafter(ties, torch.tensor(to)) for to in (0.0, 6.0)]
    x = torch.cat((values, *(part for t in (ties, *beside) for part in (t, -t))))
    found = elementwise(e2m1_code, x, torch.int32)
    assert torch.equal(found, codec._e2m1_codes(x).int())


def test_exponent_at_least():
    powers = torch.tensor([2.0**exponent for exponent in range(-126, 127)])
    x = torch.cat([torch.nextafter(powers, torch.tensor(to)) for to in (0.0, INF)] + [powers])
    x = x[x >= 2.0**-126]
    found = elementwise(exponent_at_least, x, torch.int32)
    mantissa, exponent = torch.frexp(x)  # from 0.5 to 1
    assert torch.equal(found, exponent - (mantissa == 0.5).int() + 127)


def test_finite():
    x = every_bf16()
    found = elementwise(kernels.finite, x, torch.float32)
    expected = torch.where(x.isnan(), torch.zeros_like(x), x)
    assert torch.equal(found, expected.clamp(-BF16_MAX, BF16_MAX))


def test_bounded():
    x = every_bf16()
    found = elementwise(kernels.bounded, x, torch.float32)
    assert torch.equal(found.isnan(), x.isnan())
    rest = ~x.isnan()
    assert torch.equal(found[rest], x[rest].clamp(-BF16_MAX, BF16_MAX))


# ---- vector by vector ---------------------------------------------------------------------------


def rows_of(kind: str, rows: int, width: int) -> Tensor:
    """bf16 rows, as fp32."""
    numbers = Numbers(rows + width)
    x = numbers.normal(rows, width)
    if kind == "outliers":
        x = numbers.heavy(rows, width, spread=3.0)
    elif kind == "tiny":
        x = x * 1e-12
    elif kind == "huge":
        x = x * 1e15
    elif kind == "not finite":
        for row, value in enumerate((NAN, INF, -INF, 3e38, 1e20)):
            x[row, row + 3 :: 7] = value
        x[5] = 0.0
    return reference.to_bf16(x).float()


KINDS = ("normal", "outliers", "tiny", "huge", "not finite")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "eps"), [(128, 1e-6), (512, 1e-6), (512, 1e-20)])
def test_rms_norm(width: int, eps: float, kind: str):
    x = rows_of(kind, 16, width)
    weight = Numbers(9).normal(width)
    found = torch.empty_like(x)
    _rms_norm_kernel[(16,)](x, weight, found, eps, WIDTH=width)
    assert_same_bits(found, reference.rms_norm(reference.to_bf16(x), weight, eps).float())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [128, 512])
def test_rotate(width: int, kind: str):
    x = rows_of(kind, 16, width)
    table = rope_table(ModelSpec.preset("v4-flash"), yarn=True, tokens=16)
    found = torch.empty_like(x)
    _rotate_kernel[(16,)](x, table, found, WIDTH=width, ROPE=64)
    expected = reference.rotate(reference.to_bf16(x), table[:, :32], table[:, 32:]).float()
    assert_same_bits(found, expected)
    assert_same_bits(found[:, : width - 64], x[:, : width - 64])


HADAMARDS = [
    pytest.param(kernels.hadamard, id="exchanged"),
    pytest.param(kernels.hadamard_across_lanes, id="across lanes"),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("op", HADAMARDS)
def test_hadamard(width: int, kind: str, op: Any):
    x = rows_of(kind, 8, width)
    found = torch.empty_like(x)
    _hadamard_kernel[(8,)](x, found, OP=op, WIDTH=width)
    assert_same_bits(found, reference.hadamard(reference.to_bf16(x)).float())


@pytest.mark.parametrize("op", HADAMARDS)
def test_hadamard_of_unit_vectors_is_the_sylvester_matrix(op: Any):
    x = torch.eye(128)
    found = torch.empty_like(x)
    _hadamard_kernel[(128,)](x, found, OP=op, WIDTH=128)
    matrix = torch.ones(1, 1)
    while len(matrix) < 128:
        top, bottom = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
        matrix = torch.cat((top, bottom), 0)
    assert torch.equal(found, (matrix * 128**-0.5).bfloat16().float())
