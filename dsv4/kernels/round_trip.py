"""What encoding and decoding leaves of a vector, in registers: the codec without its bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.cache.records import ELEMENT_MAX
from dsv4.kernels.numerics import (
    e4m3_bits,
    e4m3_value,
    exponent_at_least,
    round_bf16,
)
from dsv4.reference.numerics import BF16_MAX

_BF16_MAX = tl.constexpr(BF16_MAX)
_E4M3_MAX = tl.constexpr(ELEMENT_MAX["e4m3"])
_E2M1_MAX = tl.constexpr(ELEMENT_MAX["e2m1"])


@triton.jit
def e2m1_value(code):
    """E2M1 code (int32, low nibble) → fp32."""
    magnitude = code & 7
    # codes from 2 on are exponent and mantissa of a normal number; below they are 0 and a half
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + (126 << 1)) << 22)
    # by bits, because Triton's -x is 0 - x and loses the sign of zero
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) for a biased exponent; 0 gives 2^-127 and 255 gives NaN."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def nearest_e2m1(x):
    """fp32 in ±6 → the nearest E2M1 number, ties to the even code."""
    bits = x.to(tl.int32, bitcast=True)
    # E2M1 numbers are half of their power of two apart, and never less than half of 1: to add
    # 1.5·2^22 times that power rounds to them
    power = tl.maximum(bits & 0x7F800000, 127 << 23)
    magic = (power + ((22 << 23) | (1 << 22))).to(tl.float32, bitcast=True)
    nearest = ((x + magic) - magic).to(tl.int32, bitcast=True)
    return (nearest | (bits & ~0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def round_trip(x, WIDTH: tl.constexpr, R: tl.constexpr):
    """Vectors of WIDTH bf16 values (as fp32), none of them NaN → decode(encode(x)) of
    dsv4/reference/codec.py, as fp32."""
    ELEMENT: tl.constexpr = R.ELEMENT
    SCALE: tl.constexpr = R.SCALE
    if ELEMENT == "none":
        return x
    else:
        tl.static_assert(R.CODED == WIDTH, "index formats have one coded part")
        LARGEST: tl.constexpr = _E4M3_MAX if ELEMENT == "e4m3" else _E2M1_MAX
        x = tl.minimum(tl.maximum(x, -_BF16_MAX), _BF16_MAX)
        tiles = tl.reshape(x, [x.numel // R.TILE, R.TILE])
        amax = tl.maximum(tl.max(tl.abs(tiles), axis=1), R.FLOOR)
        if SCALE == "ue8m0":
            exponent = exponent_at_least(amax * (1.0 / LARGEST))
            factor = power_of_two(exponent)[:, None]
            scaled = tiles * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
        else:
            if SCALE == "e4m3":
                ratio = tl.div_rn(amax, LARGEST * R.GLOBAL_SCALE)
                factor = e4m3_value(e4m3_bits(tl.minimum(ratio, _E4M3_MAX))) * R.GLOBAL_SCALE
            else:
                factor = tl.div_rn(amax, LARGEST)
            factor = factor[:, None]
            scaled = tl.div_rn(tiles, tl.broadcast_to(factor, tiles.shape))
            scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        if ELEMENT == "e4m3":
            decoded = round_bf16(e4m3_value(e4m3_bits(scaled)) * factor)
        else:
            decoded = nearest_e2m1(scaled) * factor
            if SCALE != "ue8m0":  # else that is a bf16 number
                decoded = round_bf16(decoded)
        return tl.reshape(decoded, x.shape)
