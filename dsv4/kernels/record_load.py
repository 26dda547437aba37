"""Loading records into registers: the decoder of dsv4/reference/codec.py inside a kernel.

Values are bf16 numbers: in bf16 when compiled, in fp32 when interpreted (kernels/dot.py says why).
A masked row is not read and gives zeros, whatever its pointers say. NaN codes are the caller's
concern: records that were written from numbers hold none.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.numerics import INTERPRETED, e4m3_value, round_bf16


def e4m3_times_bf16(low_power: str, high_power: str) -> str:
    """PTX: four E4M3 codes ($2) times two bf16 powers of two in each of these operands, into $0 and
    $1. The bits of a code, four places up in a bf16, are its value times 2^-120, denormals
    included; both products are exact. The hardware's conversion goes through fp16 and fp32, one
    number at a time."""
    return f"""{{
    .reg .b32 low, high, sign, up;
    mov.b32 up, 0x7B807B80;
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


_E4M3_TIMES_BF16 = tl.constexpr(e4m3_times_bf16("$3", "$4"))


@triton.jit
def load_record_rows(data_ptrs, scale_ptrs, mask, WIDTH: tl.constexpr, RECORD: tl.constexpr):
    """Decodes [N] records, given by uint8 pointers to their data and scale rows, into [N, WIDTH].

    Reads only rows where `mask` [N] holds.
    """
    return load_record_chunk(data_ptrs, scale_ptrs, mask, 0, WIDTH, RECORD)


@triton.jit
def load_record_chunk(
    data_ptrs, scale_ptrs, mask, START: tl.constexpr, CHUNK: tl.constexpr, RECORD: tl.constexpr
):
    """Channels [START, START + CHUNK) of [N] records; CHUNK, a power of two, divides START."""
    CODED: tl.constexpr = RECORD.CODED
    # channels that share a scale and a kind: the largest power of two in tile and coded part
    COMMON: tl.constexpr = RECORD.TILE | CODED if CODED > 0 else CHUNK
    SPAN: tl.constexpr = min(CHUNK, COMMON & -COMMON)
    N: tl.constexpr = mask.shape[0]
    span = START // SPAN + tl.arange(0, CHUNK // SPAN)
    channel = span[None, :, None] * SPAN + tl.arange(0, SPAN)[None, None, :]
    rows = data_ptrs[:, None, None]
    live = mask[:, None, None]
    if CODED <= START:
        values = _bf16_values(rows, channel, live, RECORD)
    else:
        coded = span * SPAN < CODED
        codes = tl.load(_aligned(rows, RECORD) + channel, mask=live & coded[None, :, None], other=0)
        tile = (span * SPAN // RECORD.TILE)[None, :]
        if RECORD.SCALE == "ue8m0" and RECORD.SCALE_BYTES == 8:
            # all scales of a row in one word; those of masked rows do not matter
            word = tl.load(scale_ptrs.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)
            scale = ((word[:, None] >> (tile * 8).to(tl.uint64)) & 0xFF).to(tl.uint8)
        elif RECORD.SCALE == "ue8m0":
            scaled = mask[:, None] & coded[None, :]
            scale = tl.load(scale_ptrs[:, None] + tile, mask=scaled, other=127)
        else:
            at = scale_ptrs.to(tl.pointer_type(tl.float32))[:, None] + tile
            scale = tl.load(at, mask=mask[:, None] & coded[None, :], other=1.0)
        values = _scaled(codes, scale[:, :, None], RECORD)
        if START + CHUNK > CODED:
            plain = (span * SPAN >= CODED)[None, :, None]
            values = tl.where(plain, _bf16_values(rows, channel, live & plain, RECORD), values)
    return tl.reshape(values, [N, CHUNK])


@triton.jit
def _aligned(rows, RECORD: tl.constexpr):
    """Pages start on 16 bytes (schema.align_bytes), so rows of whole 16 bytes do too."""
    if RECORD.DATA_BYTES % 16 == 0:
        return tl.multiple_of(rows, [16, 16, 16])
    else:
        return rows


@triton.jit
def _bf16_values(rows, channel, mask, RECORD: tl.constexpr):
    """Channels behind the coded ones, where `mask` holds."""
    ptrs = _aligned((rows + RECORD.CODED).to(tl.pointer_type(tl.uint16)), RECORD)
    bits = tl.load(ptrs + (channel - RECORD.CODED), mask=mask, other=0)
    if INTERPRETED:
        return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _scaled(codes, scale, RECORD: tl.constexpr):
    """E4M3 codes times their scales: exact in bf16 for powers of two, else rounded once."""
    if RECORD.SCALE == "ue8m0":
        if INTERPRETED:
            return e4m3_value(codes) * _power_of_two(scale)
        else:
            exponent = scale.to(tl.uint16)
            bits = tl.where(exponent == 0, 0x0040, exponent << 7).to(tl.uint16)
            bits = tl.where(exponent == 255, 0x7FC0, bits).to(tl.uint16)
            power = tl.broadcast_to(bits.to(tl.bfloat16, bitcast=True), codes.shape)
            return tl.inline_asm_elementwise(
                _E4M3_TIMES_BF16, "=r,=r,r,r,r", [codes, power], tl.bfloat16, True, 4
            )
    else:
        product = e4m3_value(codes) * scale
        if INTERPRETED:
            return round_bf16(product)
        else:
            return product.to(tl.bfloat16)


@triton.jit
def _power_of_two(exponent):
    """2^(exponent - 127) as fp32; 0 gives 2^-127 and 255 gives NaN."""
    wide = exponent.to(tl.uint32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23).to(tl.uint32)
    bits = tl.where(wide == 255, 0x7FC00000, bits).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)
