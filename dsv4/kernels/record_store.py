"""Storing one record from registers: the codec of dsv4/reference/codec.py inside a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import triton
import triton.language as tl

from dsv4.cache.pages import Page
from dsv4.cache.records import ELEMENT_MAX, RecordFormat
from dsv4.errors import SchemaError
from dsv4.kernels.codes import e2m1_code, e4m3_bits, e4m3_value, exponent_at_least
from dsv4.kernels.numerics import bf16_bits, bounded, finite

_E4M3_MAX = tl.constexpr(ELEMENT_MAX["e4m3"])
_E2M1_MAX = tl.constexpr(ELEMENT_MAX["e2m1"])


@dataclass(frozen=True, slots=True)
class RecordConstants:
    """A record format as compile-time constants: CODED channels in tiles, the rest bf16. A scale
    row has SCALE_BYTES, of which the last PAD are zeros; with SCALE_WORD its scales fill 8 bytes.
    Rows of a page are DATA_STRIDE and SCALE_STRIDE bytes apart."""

    ELEMENT: str
    SCALE: str
    CODED: int
    TILE: int
    FLOOR: float
    GLOBAL_SCALE: float
    PAD: int
    DATA_BYTES: int
    SCALE_BYTES: int
    SCALE_WORD: bool
    DATA_STRIDE: int
    SCALE_STRIDE: int


@cache
def page_constants(page: Page) -> RecordConstants:
    """The records of a page. Raises as `record_constants` does."""
    found = record_constants(page.format)
    return replace(
        found,
        PAD=found.PAD + page.scale_row_bytes - found.SCALE_BYTES,
        SCALE_BYTES=page.scale_row_bytes,
        DATA_STRIDE=page.data_stride_bytes,
        SCALE_STRIDE=page.scale_stride_bytes,
    )


@cache
def record_constants(record: RecordFormat) -> RecordConstants:
    """Records as they lie in pages without whole ones. Raises SchemaError for a format that is not
    [one coded part][bf16 part]."""
    coded = [part for part in record.parts if part.code is not None]
    if len(coded) > 1 or (coded and coded[0].start != 0):
        raise SchemaError(
            f"the kernels store one coded part followed by bf16 channels; {record.name} has "
            f"{len(coded)} coded parts"
        )
    if not coded:
        data_bytes = record.data_row_bytes
        return RecordConstants(
            "none", "none", 0, 1, 0.0, 1.0, 0, data_bytes, 0, False, data_bytes, 0
        )
    code = coded[0].code
    assert code is not None
    return RecordConstants(
        ELEMENT=code.element,
        SCALE=code.scale,
        CODED=coded[0].width,
        TILE=code.tile,
        FLOOR=code.amax_floor * code.global_scale,
        GLOBAL_SCALE=code.global_scale,
        PAD=record.scale_pad_bytes,
        DATA_BYTES=record.data_row_bytes,
        SCALE_BYTES=record.scale_row_bytes,
        SCALE_WORD=code.scale == "ue8m0" and record.scale_row_bytes == 8,
        DATA_STRIDE=record.data_row_bytes,
        SCALE_STRIDE=record.scale_row_bytes,
    )


@triton.jit
def store_records(x, live, data_ptr, scale_ptr, WIDTH: tl.constexpr, R: tl.constexpr):
    """Encodes vectors [n, WIDTH] of bf16 values (as fp32) into a data row and a scale row of uint8
    each, at pointers [n]; vectors that are not `live` [n] are skipped."""
    ELEMENT: tl.constexpr = R.ELEMENT
    SCALE: tl.constexpr = R.SCALE
    CODED: tl.constexpr = R.CODED
    TILE: tl.constexpr = R.TILE
    FLOOR: tl.constexpr = R.FLOOR
    GLOBAL_SCALE: tl.constexpr = R.GLOBAL_SCALE
    PAD: tl.constexpr = R.PAD
    ROWS: tl.constexpr = x.shape[0]
    channel = tl.arange(0, WIDTH)[None, :]
    live = live[:, None]
    data_ptr = data_ptr[:, None]
    scale_ptr = scale_ptr[:, None]
    if ELEMENT == "none":
        tl.store(data_ptr.to(tl.pointer_type(tl.uint16)) + channel, bf16_bits(x), mask=live)
    else:
        LARGEST: tl.constexpr = _E4M3_MAX if ELEMENT == "e4m3" else _E2M1_MAX
        # a tile that is not a power of two is the whole coded part (fp8_row): one tile, masked
        SPAN: tl.constexpr = TILE if (TILE & (TILE - 1)) == 0 else WIDTH
        TILES: tl.constexpr = WIDTH // SPAN
        value = tl.where(channel < CODED, x, 0.0)
        nan = tl.reshape(value != value, [ROWS, TILES, SPAN])
        if ELEMENT == "e4m3":
            tiles = tl.reshape(bounded(value), [ROWS, TILES, SPAN])
            # compared as integers, where NaN is the largest: then the scale and all codes become
            # NaN too
            size = tl.max(tl.abs(tiles).to(tl.int32, bitcast=True), axis=2)
            amax = size.to(tl.float32, bitcast=True)
            amax = tl.where(amax < FLOOR, FLOOR, amax)
        else:
            tiles = tl.reshape(finite(value), [ROWS, TILES, SPAN])
            amax = tl.max(tl.abs(tiles), axis=2)
            amax = tl.where(amax > FLOOR, amax, FLOOR)
        tile = tl.arange(0, TILES)[None, :]
        tile_live = (tile * SPAN < CODED) & live
        if SCALE == "ue8m0":
            exponent = exponent_at_least(amax * (1.0 / LARGEST))
            inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
            if ELEMENT == "e4m3":
                exponent = tl.where(amax != amax, 0xFF, exponent)
                inverse = tl.where(amax != amax, float("nan"), inverse)
            scaled = tiles * inverse[:, :, None]
            if ELEMENT == "e2m1":
                tile_nan = tl.max(nan.to(tl.int32), axis=2)
                exponent = tl.where(tile_nan != 0, 0xFF, exponent)
            tl.store(scale_ptr + tile, exponent.to(tl.uint8), mask=tile_live)
        elif SCALE == "e4m3":
            ratio = tl.div_rn(amax, LARGEST * GLOBAL_SCALE)
            code = e4m3_bits(tl.minimum(ratio, _E4M3_MAX))
            scaled = tl.div_rn(
                tiles, tl.broadcast_to((e4m3_value(code) * GLOBAL_SCALE)[:, :, None], tiles.shape)
            )
            if ELEMENT == "e2m1":
                tile_nan = tl.max(nan.to(tl.int32), axis=2)
                code = tl.where(tile_nan != 0, 0x7F, code).to(tl.uint8)
            tl.store(scale_ptr + tile, code, mask=tile_live)
        else:
            ratio = tl.where(amax != amax, float("nan"), tl.div_rn(amax, LARGEST))
            scaled = tl.div_rn(tiles, tl.broadcast_to(ratio[:, :, None], tiles.shape))
            tl.store(scale_ptr.to(tl.pointer_type(tl.float32)) + tile, ratio, mask=tile_live)
        if PAD > 0:
            MOST: tl.constexpr = 8 if PAD <= 8 else 32
            pad = tl.arange(0, MOST)[None, :]
            zeros = tl.zeros([ROWS, MOST], dtype=tl.uint8)
            tl.store(scale_ptr + R.SCALE_BYTES - PAD + pad, zeros, mask=(pad < PAD) & live)
        if ELEMENT == "e4m3":
            codes = tl.reshape(e4m3_bits(scaled), [ROWS, WIDTH])
            tl.store(data_ptr + channel, codes, mask=(channel < CODED) & live)
            if CODED < WIDTH:
                tl.store(
                    (data_ptr + CODED).to(tl.pointer_type(tl.uint16)) + channel - CODED,
                    bf16_bits(x),
                    mask=(channel >= CODED) & live,
                )
        else:
            scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
            pairs = tl.reshape(e2m1_code(scaled), [ROWS, WIDTH // 2, 2])
            low, high = tl.split(pairs)
            packed = (low | (high << 4)).to(tl.uint8)
            tl.store(data_ptr + tl.arange(0, WIDTH // 2)[None, :], packed, mask=live)
