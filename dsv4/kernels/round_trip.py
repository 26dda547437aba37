"""What encoding and decoding leaves of a vector, in registers: the codec without its bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.cache.records import ELEMENT_MAX
from dsv4.kernels.numerics import (
    e2m1_code,
    e4m3_bits,
    e4m3_value,
    exponent_at_least,
    finite,
    round_bf16,
)

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
def round_trip(x, WIDTH: tl.constexpr, R: tl.constexpr):
    """WIDTH bf16 values (as fp32) → decode(encode(x)) of dsv4/reference/codec.py, as fp32."""
    ELEMENT: tl.constexpr = R.ELEMENT
    SCALE: tl.constexpr = R.SCALE
    CODED: tl.constexpr = R.CODED
    TILE: tl.constexpr = R.TILE
    if ELEMENT == "none":
        return x
    else:
        LARGEST: tl.constexpr = _E4M3_MAX if ELEMENT == "e4m3" else _E2M1_MAX
        SPAN: tl.constexpr = TILE if (TILE & (TILE - 1)) == 0 else WIDTH
        channel = tl.arange(0, WIDTH)
        value = tl.where(channel < CODED, x, 0.0)
        nan = tl.reshape(value != value, [WIDTH // SPAN, SPAN])
        tiles = tl.reshape(finite(value), [WIDTH // SPAN, SPAN])
        amax = tl.maximum(tl.max(tl.abs(tiles), axis=1), R.FLOOR)
        if SCALE == "ue8m0":
            exponent = exponent_at_least(amax * (1.0 / LARGEST))
            scaled = tiles * ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
            factor = power_of_two(exponent)
        elif SCALE == "e4m3":
            ratio = tl.div_rn(amax, LARGEST * R.GLOBAL_SCALE)
            factor = e4m3_value(e4m3_bits(tl.minimum(ratio, _E4M3_MAX))) * R.GLOBAL_SCALE
            scaled = tl.div_rn(tiles, tl.broadcast_to(factor[:, None], tiles.shape))
        else:
            factor = tl.div_rn(amax, LARGEST)
            scaled = tl.div_rn(tiles, tl.broadcast_to(factor[:, None], tiles.shape))
        scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
        if ELEMENT == "e4m3":
            element = e4m3_value(e4m3_bits(scaled))
        else:
            element = e2m1_value(e2m1_code(scaled))
            # E2M1 has no NaN: one in a tile makes the scale NaN
            nan = tl.broadcast_to((tl.max(nan.to(tl.int32), axis=1) != 0)[:, None], nan.shape)
        decoded = tl.where(nan, float("nan"), element * factor[:, None])
        return tl.where(channel < CODED, round_bf16(tl.reshape(decoded, [WIDTH])), x)
