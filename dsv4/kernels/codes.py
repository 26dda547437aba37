"""Codes of elements (E4M3, E2M1) and of scales (UE8M0) to numbers and back, in registers.

A UE8M0 byte e is 2^(e - 127); 0 is 2^-127, a denormal, and 255 is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.cache.records import ELEMENT_MAX
from dsv4.kernels.numerics import INTERPRETED, round_bf16
from dsv4.kernels.target import converts_e4m3
from dsv4.ops.constants import BF16_MAX

_BF16_MAX = tl.constexpr(BF16_MAX)
_E4M3_MAX = tl.constexpr(ELEMENT_MAX["e4m3"])
_E2M1_MAX = tl.constexpr(ELEMENT_MAX["e2m1"])


def e4m3_times_bf16(low_power: str, high_power: str, *, unit: int = 120) -> str:
    """PTX: four E4M3 codes ($2) times two bf16 powers of two in each of these operands, into $0 and
    $1. The bits of a code, shifted by four in a bf16, are its value times 2^-120, denormals
    included; both products are exact. The hardware's conversion goes through fp16 and fp32, one
    number at a time. With a smaller `unit` results are times 2^(unit - 120)."""
    up = (unit + 127 << 7) * 0x10001
    return f"""{{
    .reg .b32 low, high, sign, up;
    mov.b32 up, 0x{up:X};
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    and.b32 sign, low, 0x80008000;
    shr.b32 low, low, 4;
    lop3.b32 low, low, 0x07F007F0, sign, 0xEA;
    and.b32 sign, high, 0x80008000;
    shr.b32 high, high, 4;
    lop3.b32 high, high, 0x07F007F0, sign, 0xEA;
    mul.rn.bf16x2 low, low, up;
    mul.rn.bf16x2 high, high, up;
    mul.rn.bf16x2 $0, low, {low_power};
    mul.rn.bf16x2 $1, high, {high_power};
}}"""


# PTX: the E2M1 codes in four bytes ($2) times the bf16 scales in $3 and $4, into $0 and $1. A
# code's three magnitude bits, placed where bf16 has the end of its exponent and the start of its
# mantissa, are its value times 2^-126.
E2M1_TIMES_BF16 = """{
    .reg .b32 low, high, sign, unit;
    mov.b32 unit, 0x7E807E80;
    prmt.b32 low, $2, 0, 0x1404;
    prmt.b32 high, $2, 0, 0x3424;
    shl.b32 low, low, 4;
    and.b32 sign, low, 0x80008000;
    shr.b32 low, low, 6;
    lop3.b32 low, low, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 low, low, unit;
    mul.rn.bf16x2 $0, low, $3;
    shl.b32 high, high, 4;
    and.b32 sign, high, 0x80008000;
    shr.b32 high, high, 6;
    lop3.b32 high, high, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 high, high, unit;
    mul.rn.bf16x2 $1, high, $4;
}"""


def e2m1_pairs_times_bf16() -> str:
    """PTX: eight E2M1 codes ($4), the even channel in the low half of a byte, times the bf16 scale
    that $5 holds twice, into $0 to $3, two channels each; all of them times 2^-126, see above. A
    byte's two codes end up at the upper ends of a word's halves."""
    pairs = "\n".join(
        f"""    prmt.b32 word, up, $4, {(4 + byte) << 12 | byte << 4:#x};
    and.b32 sign, word, 0x80008000;
    shr.b32 word, word, 6;
    lop3.b32 word, word, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 ${byte}, word, $5;"""
        for byte in range(4)
    )
    return f"""{{
    .reg .b32 up, word, sign;
    shl.b32 up, $4, 4;
{pairs}
}}"""


@triton.jit
def e4m3_bits(x):
    """fp32 → E4M3 code, nearest even; ±448 beyond that range, and 0x7F for a positive NaN."""
    if INTERPRETED or not converts_e4m3():
        nan = x != x
        x = tl.minimum(tl.maximum(x, -_E4M3_MAX), _E4M3_MAX)
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
        return tl.where(nan, 0x7F, code | sign).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(code):
    """E4M3 code (not NaN) → fp32."""
    if converts_e4m3():
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # exponent and mantissa, placed as in fp32, are the value times 2^-120, denormals included
        bits = ((code & 0x7F).to(tl.uint32) << 20) | ((code & 0x80).to(tl.uint32) << 24)
        return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
def e4m3_or_nan(code):
    """E4M3 code → fp32. Scales may be NaN; codes under a NaN scale are NaN too."""
    value = e4m3_value(code)
    if INTERPRETED or not converts_e4m3():
        value = tl.where((code & 0x7F) == 0x7F, float("nan"), value)
    return value


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
def e2m1_value(code):
    """E2M1 code (int32, low nibble) → fp32."""
    magnitude = code & 7
    # codes from 2 on are exponent and mantissa of a normal number; below they are 0 and a half
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, (magnitude + (126 << 1)) << 22)
    # by bits, because Triton's -x is 0 - x and loses the sign of zero
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def nearest_e2m1(x):
    """fp32 in ±6 → the nearest E2M1 number, ties to the even code."""
    bits = x.to(tl.int32, bitcast=True)
    # E2M1 numbers are spaced by half of their power of two, and never by less than a half: adding
    # 1.5·2^22 times that power rounds to them
    power = tl.maximum(bits & 0x7F800000, 127 << 23)
    magic = (power + ((22 << 23) | (1 << 22))).to(tl.float32, bitcast=True)
    nearest = ((x + magic) - magic).to(tl.int32, bitcast=True)
    return (nearest | (bits & ~0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exponent_at_least(x):
    """The biased exponent of the smallest power of two ≥ x, for a positive fp32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)


@triton.jit
def power_of_two(exponent):
    """2^(exponent - 127) as fp32 for a UE8M0 byte (int32)."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bf16_power_bits(exponent):
    """The bf16 bits of 2^(exponent - 127) for a UE8M0 byte, in 16 bits or more; the result has
    the type of `exponent`."""
    bits = tl.where(exponent == 0, 0x0040, exponent << 7).to(exponent.dtype)
    return tl.where(exponent == 255, 0x7FC0, bits).to(exponent.dtype)


@triton.jit
def bf16_power_of_two(exponent):
    """2^(exponent - 127) as bf16 for a UE8M0 byte, in 16 bits or more. Compiled only."""
    return bf16_power_bits(exponent).to(tl.int16).to(tl.bfloat16, bitcast=True)


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
