"""Loading records into registers: the decoder of dsv4/reference/codec.py inside a kernel.

Values are bf16 numbers: in bf16 when compiled, in fp32 when interpreted (kernels/dot.py says why).
A masked row is not read and gives zeros, whatever its pointers are. A tile that contained a NaN has
a NaN scale, and all of it reads as NaN; element codes are always read as numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.codes import (
    E2M1_TIMES_BF16,
    bf16_power_of_two,
    e2m1_value,
    e4m3_or_nan,
    e4m3_times_bf16,
    e4m3_value,
    power_of_two,
)
from dsv4.kernels.numerics import INTERPRETED, round_bf16
from dsv4.kernels.target import bf16_products, speaks_ptx

_E4M3_TIMES_BF16 = tl.constexpr(e4m3_times_bf16("$3", "$4"))
_E2M1_TIMES_BF16 = tl.constexpr(E2M1_TIMES_BF16)


@triton.jit
def load_record_rows(data_ptrs, scale_ptrs, mask, WIDTH: tl.constexpr, RECORD: tl.constexpr):
    """Decodes [N] records, given by uint8 pointers to their data and scale rows, into [N, WIDTH].

    Reads only rows where `mask` [N] holds.
    """
    return load_record_span(data_ptrs, scale_ptrs, mask, 0, WIDTH, RECORD)


@triton.jit
def load_record_span(
    data_ptrs, scale_ptrs, mask, START: tl.constexpr, SPAN: tl.constexpr, RECORD: tl.constexpr
):
    """Channels [START, START + SPAN) of [N] records, as [N, SPAN]. SPAN is a power of two and
    divides START."""
    CODED: tl.constexpr = RECORD.CODED
    # channels of a unit share a scale and a kind: the largest power of two in tile and coded part
    COMMON: tl.constexpr = RECORD.TILE | CODED if CODED > 0 else SPAN
    UNIT: tl.constexpr = min(SPAN, COMMON & -COMMON)
    N: tl.constexpr = mask.shape[0]
    unit = START // UNIT + tl.arange(0, SPAN // UNIT)
    channel = unit[None, :, None] * UNIT + tl.arange(0, UNIT)[None, None, :]
    rows = data_ptrs[:, None, None]
    live = mask[:, None, None]
    if CODED <= START:
        values = _bf16_values(rows, channel, live, RECORD)
    else:
        coded = unit * UNIT < CODED
        if RECORD.ELEMENT == "e2m1":
            pair = unit[None, :, None] * (UNIT // 2) + tl.arange(0, UNIT // 2)[None, None, :]
            both = tl.load(_aligned(rows, RECORD) + pair, mask=live, other=0)
            codes = tl.reshape(tl.join(both & 15, both >> 4), [N, SPAN // UNIT, UNIT])
        else:
            at = _aligned(rows, RECORD) + channel
            codes = tl.load(at, mask=live & coded[None, :, None], other=0)
        tile = (unit * UNIT // RECORD.TILE)[None, :]
        if RECORD.SCALE_WORD:
            # all scales of a row in one word; those of masked rows do not matter
            word = tl.load(scale_ptrs.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)
            scale = ((word[:, None] >> (tile * 8).to(tl.uint64)) & 0xFF).to(tl.uint8)
        elif RECORD.SCALE == "ue8m0":
            scaled = mask[:, None] & coded[None, :]
            scale = tl.load(scale_ptrs[:, None] + tile, mask=scaled, other=127)
        elif RECORD.SCALE == "e4m3":
            scaled = mask[:, None] & coded[None, :]
            scale = tl.load(scale_ptrs[:, None] + tile, mask=scaled, other=0)
            scale = e4m3_or_nan(scale) * RECORD.GLOBAL_SCALE
        else:
            at = scale_ptrs.to(tl.pointer_type(tl.float32))[:, None] + tile
            scale = tl.load(at, mask=mask[:, None] & coded[None, :], other=1.0)
        values = _scaled(codes, scale[:, :, None], RECORD)
        if START + SPAN > CODED:
            plain = (unit * UNIT >= CODED)[None, :, None]
            values = tl.where(plain, _bf16_values(rows, channel, live & plain, RECORD), values)
    return tl.reshape(values, [N, SPAN])


@triton.jit
def _aligned(rows, RECORD: tl.constexpr):
    """Pages start at multiples of 16 bytes (schema.align_bytes), so rows of whole 16 bytes do
    too."""
    if RECORD.DATA_STRIDE % 16 == 0:
        return tl.multiple_of(rows, [16, 16, 16])
    else:
        return rows


@triton.jit
def _bf16_values(rows, channel, mask, RECORD: tl.constexpr):
    """Channels after the coded ones, where `mask` holds."""
    ptrs = _aligned((rows + RECORD.CODED).to(tl.pointer_type(tl.uint16)), RECORD)
    bits = tl.load(ptrs + (channel - RECORD.CODED), mask=mask, other=0)
    if INTERPRETED:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled(codes, scale, RECORD: tl.constexpr):
    """Codes times their scales: exact in bf16 for powers of two and for E2M1 codes with E4M3
    scales, otherwise rounded once."""
    if RECORD.ELEMENT == "e2m1":
        factor = power_of_two(scale.to(tl.int32)) if RECORD.SCALE == "ue8m0" else scale
        if INTERPRETED:
            return round_bf16(e2m1_value(codes.to(tl.int32)) * factor)
        elif not speaks_ptx():
            return (e2m1_value(codes.to(tl.int32)) * factor).to(tl.bfloat16)
        else:
            return tl.inline_asm_elementwise(
                bf16_products(_E2M1_TIMES_BF16),
                "=&r,=&r,r,r,r",
                [codes, tl.broadcast_to(factor.to(tl.bfloat16), codes.shape)],
                tl.bfloat16,
                True,
                4,
            )
    elif RECORD.SCALE == "ue8m0":
        if INTERPRETED:
            return e4m3_value(codes) * power_of_two(scale.to(tl.int32))
        elif not speaks_ptx():
            return (e4m3_value(codes) * power_of_two(scale.to(tl.int32))).to(tl.bfloat16)
        else:
            power = tl.broadcast_to(bf16_power_of_two(scale.to(tl.uint16)), codes.shape)
            return tl.inline_asm_elementwise(
                bf16_products(_E4M3_TIMES_BF16),
                "=r,=r,r,r,r",
                [codes, power],
                tl.bfloat16,
                True,
                4,
            )
    else:
        product = e4m3_value(codes) * scale
        if INTERPRETED:
            return round_bf16(product)
        else:
            return product.to(tl.bfloat16)
