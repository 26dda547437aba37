"""Every narrowing cast and every rounding-sensitive formula of the kernels.

Triton's interpreter converts to bf16 and FP8 wrongly, so interpreted kernels round by integer
arithmetic on the bits; compiled ones use the hardware's conversions. Both give the bytes of
dsv4/reference. Kernels that call into this file are launched with enable_fp_fusion=False: the
reference rounds every product and every sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.cache.records import ELEMENT_MAX
from dsv4.reference import numerics as reference

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_BF16_MAX = tl.constexpr(reference.BF16_MAX)
_LOG2_E = tl.constexpr(reference.LOG2_E)
_LN2_HIGH = tl.constexpr(reference.LN2_HIGH)
_LN2_LOW = tl.constexpr(reference.LN2_LOW)
_P0 = tl.constexpr(reference.EXP_POLY[0])
_P1 = tl.constexpr(reference.EXP_POLY[1])
_P2 = tl.constexpr(reference.EXP_POLY[2])
_P3 = tl.constexpr(reference.EXP_POLY[3])
_P4 = tl.constexpr(reference.EXP_POLY[4])
_P5 = tl.constexpr(reference.EXP_POLY[5])
_EXP_UNDERFLOW = tl.constexpr(reference.EXP_UNDERFLOW)
_ROUND_MAGIC = tl.constexpr(reference.ROUND_MAGIC)
_E4M3_MAX = tl.constexpr(ELEMENT_MAX["e4m3"])


@triton.jit
def exp_nonpositive(x):
    """e^x for fp32 x ≤ 0; the polynomial of reference.numerics."""
    clamped = tl.where(x < _EXP_UNDERFLOW, _EXP_UNDERFLOW, x)
    n = (clamped * _LOG2_E + _ROUND_MAGIC) - _ROUND_MAGIC
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    p = _P0 * r + _P1
    p = p * r + _P2
    p = p * r + _P3
    p = p * r + _P4
    p = p * r + _P5
    y = (p * (r * r) + r) + 1.0
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < _EXP_UNDERFLOW, 0.0, y * power)


@triton.jit
def round_bf16(x):
    """fp32 → the nearest bf16, still as fp32; every NaN becomes the same NaN."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    else:
        rounded = x.to(tl.bfloat16).to(tl.float32).to(tl.uint32, bitcast=True)
    rounded = tl.where(x != x, 0x7FC00000, rounded)
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x):
    """The 16 bits of an fp32 that holds a bf16 value."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def e4m3_bits(x):
    """fp32 in ±448 → E4M3 code, nearest even."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & 0x7FFFFFFF
        # normal codes: drop 20 bits of mantissa, rebias the exponent from 127 to 7
        rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
        normal = (rounded >> 20) - (120 << 3)
        # subnormal codes count in steps of 2^-9; adding 1.5·2^14 rounds to such a step
        absolute = magnitude.to(tl.float32, bitcast=True)
        aligned = (absolute + 24576.0).to(tl.uint32, bitcast=True)
        subnormal = aligned - 0x46C00000
        code = tl.where(absolute < 0.015625, subnormal, normal)
        return (code | sign).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(code):
    """E4M3 code (not NaN) → fp32."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def e2m1_code(x):
    """fp32 in ±6 → E2M1 code, ties to the even code."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    sign = (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)
    return code | (sign << 3)


@triton.jit
def exponent_at_least(x):
    """The biased exponent of the smallest power of two ≥ x, for a positive fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def finite(x):
    """NaN → 0, ±inf → ±largest bf16."""
    x = tl.where(x != x, 0.0, x)
    return tl.minimum(tl.maximum(x, -_BF16_MAX), _BF16_MAX)


# The instructions that convert between fp32 and fp64 have an eighth of the rate of the others on
# Hopper (15 lanes a clock and SM, measured); integer instructions do the same.


@triton.jit
def to_f64(x):
    """fp32 → fp64, exact."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF).to(tl.uint64)
    wide = (magnitude << 29) + (896 << 52)
    wide = tl.where(magnitude >= 0x7F800000, wide + (896 << 52), wide)  # infinity and NaN
    # a denormal counts units of 2^-149: put it into the mantissa of 2^-97 and take that away
    base = (magnitude * 0) + (926 << 52)
    denormal = (base | magnitude).to(tl.float64, bitcast=True) - base.to(tl.float64, bitcast=True)
    wide = tl.where(magnitude < 0x00800000, denormal.to(tl.uint64, bitcast=True), wide)
    wide = wide | ((bits >> 31).to(tl.uint64) << 63)
    return wide.to(tl.float64, bitcast=True)


@triton.jit
def to_f32(x):
    """fp64 → fp32, nearest even; every NaN becomes the same NaN."""
    bits = x.to(tl.uint64, bitcast=True)
    magnitude = bits & 0x7FFFFFFFFFFFFFFF
    rounded = ((magnitude + 0x0FFFFFFF + ((magnitude >> 29) & 1)) >> 29) - (896 << 23)
    rounded = tl.where(rounded > 0x7F800000, 0x7F800000, rounded)
    # below the smallest normal: adding 2^-97 rounds to units of 2^-149
    base = (magnitude * 0) + (926 << 52)
    shifted = magnitude.to(tl.float64, bitcast=True) + base.to(tl.float64, bitcast=True)
    units = shifted.to(tl.uint64, bitcast=True) - base
    narrow = tl.where(magnitude < (897 << 52), units, rounded).to(tl.uint32)
    narrow = narrow | ((bits >> 63).to(tl.uint32) << 31)
    narrow = tl.where(x != x, 0x7FC00000, narrow).to(tl.uint32)
    return narrow.to(tl.float32, bitcast=True)


@triton.jit
def rms_norm(x, weight, eps, WIDTH: tl.constexpr):
    """weight · x / rms(x) of one vector, rounded once to bf16 (as fp32)."""
    total = to_f32(tl.sum(to_f64(x * x)))
    mean_square = total * (1.0 / WIDTH)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    return round_bf16(weight * (x * inverse))


@triton.jit
def load_rope(rope_row_ptr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """cos and sin of one position for every pair of a vector: 1 and 0 for unrotated pairs."""
    pair = tl.arange(0, WIDTH // 2) - (WIDTH - ROPE) // 2
    cos = tl.load(rope_row_ptr + pair, mask=pair >= 0, other=1.0)
    sin = tl.load(rope_row_ptr + ROPE // 2 + pair, mask=pair >= 0, other=0.0)
    return cos, sin


@triton.jit
def rotate(x, cos, sin, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """RoPE on the last ROPE channels of a vector, pairs interleaved; bf16 values as fp32."""
    turned = tl.arange(0, WIDTH // 2) >= (WIDTH - ROPE) // 2
    even, odd = tl.split(tl.reshape(x, [WIDTH // 2, 2]))
    new_even = round_bf16(even * cos - odd * sin)
    new_odd = round_bf16(even * sin + odd * cos)
    even = tl.where(turned, new_even, even)
    odd = tl.where(turned, new_odd, odd)
    return tl.reshape(tl.join(even, odd), [WIDTH])


@triton.jit
def _negative(i, j):
    """Whether the Sylvester matrix has -1 at (i, j), for indices below 32."""
    bits = i & j
    bits = bits ^ (bits >> 4)
    bits = bits ^ (bits >> 2)
    return ((bits ^ (bits >> 1)) & 1) != 0


@triton.jit
def hadamard(x, scale, WIDTH: tl.constexpr):
    """H·x·scale in natural order. H of 128 is H of 16 over H of 8; the sums are exact in fp64."""
    INNER: tl.constexpr = 8 if WIDTH >= 64 else 2
    OUTER: tl.constexpr = WIDTH // INNER
    inner = tl.arange(0, INNER)
    outer = tl.arange(0, OUTER)
    grid = to_f64(tl.reshape(x, [OUTER, INNER]))[:, :, None]
    flip = _negative(inner[:, None], inner[None, :])[None, :, :]
    grid = tl.sum(tl.where(flip, -grid, grid), axis=1)[:, None, :]
    flip = _negative(outer[:, None], outer[None, :])[:, :, None]
    grid = tl.sum(tl.where(flip, -grid, grid), axis=0)
    return round_bf16(to_f32(tl.reshape(grid, [WIDTH])) * scale)
