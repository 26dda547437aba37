"""Rounding to bf16 and every rounding-sensitive formula of the kernels; codes.py has the codes.

Triton's interpreter converts to bf16 and FP8 wrongly, so interpreted kernels round by integer
arithmetic on the bits; compiled ones use the hardware's conversions. Both give the bytes of
dsv4/reference. Kernels that call into this file are launched with enable_fp_fusion=False: the
reference rounds every product and every sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.target import speaks_ptx
from dsv4.ops import constants

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_BF16_MAX = tl.constexpr(constants.BF16_MAX)
_LOG2_E = tl.constexpr(constants.LOG2_E)
_LN2_HIGH = tl.constexpr(constants.LN2_HIGH)
_LN2_LOW = tl.constexpr(constants.LN2_LOW)
_P0 = tl.constexpr(constants.EXP_POLY[0])
_P1 = tl.constexpr(constants.EXP_POLY[1])
_P2 = tl.constexpr(constants.EXP_POLY[2])
_P3 = tl.constexpr(constants.EXP_POLY[3])
_P4 = tl.constexpr(constants.EXP_POLY[4])
_P5 = tl.constexpr(constants.EXP_POLY[5])
_EXP_UNDERFLOW = tl.constexpr(constants.EXP_UNDERFLOW)
_ROUND_MAGIC = tl.constexpr(constants.ROUND_MAGIC)


@triton.jit
def exp_nonpositive(x):
    """e^x for fp32 x ≤ 0, as dsv4/reference/numerics.py computes it."""
    shifted = x * _LOG2_E + _ROUND_MAGIC  # its low bits are n
    n = shifted - _ROUND_MAGIC
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = _P0 * r + _P1
    p = p * r + _P2
    p = p * r + _P3
    p = p * r + _P4
    p = p * r + _P5
    y = (p * (r * r) + r) + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return tl.where(x < _EXP_UNDERFLOW, 0.0, y * power)


@triton.jit
def round_bf16(x):
    """fp32 → the nearest bf16, still as fp32; every NaN becomes the same NaN."""
    if INTERPRETED or not speaks_ptx():
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        rounded = tl.where(x != x, 0x7FC00000, rounded)
    else:
        # two at a time: the instruction for one has an eighth of the throughput
        narrow = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
        # this instruction makes every NaN 0x7FFF, the highest of all patterns
        rounded = tl.minimum(narrow.to(tl.float32).to(tl.int32, bitcast=True), 0x7FC00000)
    return rounded.to(tl.float32, bitcast=True)


@triton.jit
def wide(x):
    """bf16 numbers as fp32. Triton's interpreter converts subnormal ones wrongly, so there it is
    done on the bits."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def bf16_bits(x):
    """The 16 bits of an fp32 that holds a bf16 value."""
    return (x.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16)


@triton.jit
def finite(x):
    """NaN → 0, ±inf → ±largest bf16."""
    x = tl.where(x != x, 0.0, x)
    return tl.minimum(tl.maximum(x, -_BF16_MAX), _BF16_MAX)


@triton.jit
def bounded(x):
    """±inf → ±largest bf16; every NaN becomes the same positive one."""
    x = tl.minimum(x, _BF16_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, -_BF16_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rms_norm(x, weight, eps, WIDTH: tl.constexpr):
    """weight · x / rms(x) of vectors [n, WIDTH], rounded once to bf16 (as fp32)."""
    total = tl.sum((x * x).to(tl.float64), axis=1).to(tl.float32)
    mean_square = total * (1.0 / WIDTH)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    return round_bf16(weight * (x * inverse[:, None]))


@triton.jit
def load_rope(rope_row_ptr, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """cos and sin of one position, or of several [n, 1], for every pair of a vector: 1 and 0 for
    unrotated pairs."""
    pair = tl.arange(0, WIDTH // 2) - (WIDTH - ROPE) // 2
    at = rope_row_ptr + pair
    turned = pair + tl.zeros(at.shape, dtype=tl.int32) >= 0
    cos = tl.load(at, mask=turned, other=1.0)
    sin = tl.load(at + ROPE // 2, mask=turned, other=0.0)
    return cos, sin


@triton.jit
def rotate(x, cos, sin, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """RoPE on the last ROPE channels of vectors of WIDTH, pairs interleaved, all rotated by the
    same angles; bf16 values as fp32."""
    turned = (tl.arange(0, WIDTH // 2) >= (WIDTH - ROPE) // 2)[None, :]
    even, odd = tl.split(tl.reshape(x, [x.numel // WIDTH, WIDTH // 2, 2]))
    new_even = round_bf16(even * cos - odd * sin)
    new_odd = round_bf16(even * sin + odd * cos)
    even = tl.where(turned, new_even, even)
    odd = tl.where(turned, new_odd, odd)
    return tl.reshape(tl.join(even, odd), x.shape)


# A bf16 number, shifted past the wider exponent of fp64 and read as the upper half of an fp64, is
# its value times 2^-_UNIT, denormals included.
_UNIT = tl.constexpr(1023 - 127)


@triton.jit
def _to_f64_units(x):
    """bf16 values (as fp32) → fp64, times 2^-_UNIT."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 3) & ~0x70000000  # shifting right has copied the sign four times
    high = tl.where((bits & 0x7F800000) == 0x7F800000, high | 0x7FF00000, high)
    high = high.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32).to(tl.float64, bitcast=True)


@triton.jit
def _butterflies(x):
    """H of N, at most 32, over the first axis of [N, M]. Every step finds its pairs in registers as
    long as M fills the lanes."""
    N: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    for step in tl.static_range(5):
        if (2 << step) <= N:
            x = tl.reshape(x, [N >> (step + 1), 2, 1 << step, M])
            top, bottom = tl.split(tl.permute(x, (0, 2, 3, 1)))
            x = tl.permute(tl.join(top + bottom, top - bottom), (0, 3, 1, 2))
    return tl.reshape(x, [N, M])


@triton.jit
def hadamard(x, scale, WIDTH: tl.constexpr):
    """H·x·scale in natural order for vectors of WIDTH bf16 values (as fp32). Sums are formed in
    fp64, in the reference's order."""
    # A thread loads 8 channels; one exchange brings it the others.
    INNER: tl.constexpr = 8
    OUTER: tl.constexpr = WIDTH // INNER
    ROWS: tl.constexpr = x.numel // WIDTH
    y = tl.reshape(_to_f64_units(x), [ROWS * OUTER, INNER])
    y = tl.permute(_butterflies(tl.permute(y, (1, 0))), (1, 0))
    y = tl.permute(tl.reshape(y, [ROWS, OUTER, INNER]), (1, 0, 2))
    y = _butterflies(tl.reshape(y, [OUTER, ROWS * INNER]))
    y = round_bf16((y * 2.0**_UNIT).to(tl.float32) * scale)
    y = tl.permute(tl.reshape(y, [OUTER, ROWS, INNER]), (1, 0, 2))
    return tl.reshape(y, x.shape)


@triton.jit
def hadamard_across_lanes(x, scale, WIDTH: tl.constexpr):
    """As hadamard, where a thread has 4 channels and a warp whole vectors: the others come from
    lane to lane, without a barrier. With more channels per thread this takes longer."""
    INNER: tl.constexpr = 4
    OUTER: tl.constexpr = WIDTH // INNER
    ROWS: tl.constexpr = x.numel // WIDTH
    y = tl.reshape(_to_f64_units(x), [ROWS * OUTER, INNER])
    y = tl.permute(_butterflies(tl.permute(y, (1, 0))), (1, 0))
    y = tl.reshape(y, [ROWS, OUTER, INNER])
    lane = tl.broadcast_to(tl.arange(0, OUTER)[None, :, None], y.shape)
    for step in tl.static_range(10):
        if (1 << step) < OUTER:
            other = tl.gather(y, lane ^ (1 << step), axis=1)
            y = tl.where((lane & (1 << step)) != 0, other - y, y + other)
    return round_bf16((tl.reshape(y, x.shape) * 2.0**_UNIT).to(tl.float32) * scale)
