"""Records the slow way, written from the specification and sharing nothing with `dsv4`.

Every code is found by searching an explicit grid for the nearest value, ties to the even code.
Two versions of each step: one channel at a time in exact fractions, and the same over numpy
arrays for sweeps. Formats are described here a second time, so that a wrong constant in the
library cannot hide.
"""

from __future__ import annotations

import bisect
import math
import struct
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]
F64 = NDArray[np.float64]

BF16_NAN = 0x7FC0
BF16_INF = 0x7F80
BF16_LARGEST = 0x7F7F


def _e4m3_magnitude(code: int) -> float:
    """Value of codes 0..126: 4 exponent bits with bias 7, 3 mantissa bits, no infinity."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return mantissa * 2.0**-9
    return (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_GRID = [_e4m3_magnitude(code) for code in range(127)]
E2M1_GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
GRIDS = {"e4m3": E4M3_GRID, "e2m1": E2M1_GRID}
SIGN_BIT = {"e4m3": 0x80, "e2m1": 0x8}
FRACTION_GRIDS = {name: [Fraction(v) for v in grid] for name, grid in GRIDS.items()}


@dataclass(frozen=True)
class Tiles:
    """`width` channels in tiles that share a scale: value = element × scale."""

    width: int
    element: str
    tile: int
    scale: str
    floor: float


@dataclass(frozen=True)
class Plain:
    """`width` channels kept as bf16."""

    width: int


@dataclass(frozen=True)
class Layout:
    parts: tuple[Tiles | Plain, ...]
    pad: int = 0

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)


LAYOUTS = {
    "fp8_ds": Layout((Tiles(448, "e4m3", 64, "ue8m0", 1e-4), Plain(64)), pad=1),
    "fp8_row": Layout((Tiles(448, "e4m3", 448, "fp32", 1e-4), Plain(64))),
    "bf16": Layout((Plain(512),)),
    "mxfp4": Layout((Tiles(128, "e2m1", 32, "ue8m0", 6 * 2.0**-126),)),
    "nvfp4": Layout((Tiles(128, "e2m1", 16, "e4m3", 6 * 2.0**-9),)),
    "index_fp8": Layout((Tiles(128, "e4m3", 128, "fp32", 1e-4),)),
    "index_bf16": Layout((Plain(128),)),
    "v41_window": Layout((Tiles(512, "e4m3", 32, "ue8m0", 1e-4),)),
    "v41_entry": Layout((Tiles(512, "e2m1", 16, "e4m3", 6 * 2.0**-9),)),
}
RECORD_BYTES = {
    "fp8_ds": (576, 8),
    "fp8_row": (576, 4),
    "bf16": (1024, 0),
    "mxfp4": (64, 4),
    "nvfp4": (64, 8),
    "index_fp8": (128, 4),
    "index_bf16": (256, 0),
    "v41_window": (512, 16),
    "v41_entry": (256, 32),
}


def coded(layout: Layout) -> list[Tiles]:
    return [part for part in layout.parts if isinstance(part, Tiles)]


# ---- one channel at a time ---------------------------------------------------------------------


def fp32(value: float) -> float:
    """A double rounded to fp32, nearest even; past the largest number it is infinite."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def bf16_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def bf16_bits(value: float) -> int:
    """An fp32 number to bf16, nearest even, by comparing the two neighbours exactly."""
    if math.isnan(value):
        return BF16_NAN
    sign = 0x8000 if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign | BF16_INF
    (bits,) = struct.unpack("<I", struct.pack("<f", abs(value)))
    below = bits >> 16
    low = Fraction(bf16_value(below))
    # one step past the largest number counts as 2^128: what rounds there is infinite
    high = Fraction(2) ** 128 if below == BF16_LARGEST else Fraction(bf16_value(below + 1))
    return sign | _closer(Fraction(abs(value)), low, high, below)


def _closer(x: Fraction, low: Fraction, high: Fraction, low_code: int) -> int:
    if x - low != high - x:
        return low_code if x - low < high - x else low_code + 1
    return low_code + (low_code & 1)


def nearest_code(element: str, value: float) -> int:
    """The code of the grid value nearest to a finite number; ties to even, clamped to the grid."""
    grid = FRACTION_GRIDS[element]
    sign = SIGN_BIT[element] if math.copysign(1.0, value) < 0 else 0
    x = abs(Fraction(value))
    if x >= grid[-1]:
        return sign | (len(grid) - 1)
    low = bisect.bisect_right(grid, x) - 1
    return sign | _closer(x, grid[low], grid[low + 1], low)


def code_value(element: str, code: int) -> float:
    """The number behind a code; E4M3's 0x7F and 0xFF are NaN."""
    magnitude = code & (SIGN_BIT[element] - 1)
    if magnitude == len(GRIDS[element]):
        return math.nan
    return math.copysign(GRIDS[element][magnitude], -1.0 if code & SIGN_BIT[element] else 1.0)


def power_of_two_byte(amax: float, largest: float) -> int:
    """E8M0 byte of the smallest power of two at or above amax / largest, where the quotient is
    what fp32 makes of amax × fp32(1/largest)."""
    mantissa, exponent = math.frexp(fp32(amax * fp32(1.0 / largest)))
    return (exponent - 1 if mantissa == 0.5 else exponent) + 127


def encode_tile(tiles: Tiles, bits: list[int]) -> tuple[list[int], bytes]:
    """Codes and scale bytes of one tile of bf16 bit patterns."""
    values = [bf16_value(b) for b in bits]
    missing = [math.isnan(v) for v in values]
    largest_bf16 = bf16_value(BF16_LARGEST)
    finite = [
        0.0 if math.isnan(v) else max(-largest_bf16, min(largest_bf16, v)) if math.isinf(v) else v
        for v in values
    ]
    amax = max(fp32(tiles.floor), *(abs(v) for v in finite))
    largest = GRIDS[tiles.element][-1]
    if tiles.scale == "ue8m0":
        byte = power_of_two_byte(amax, largest)
        scale, scale_bytes = 2.0 ** (byte - 127), bytes([byte])
    elif tiles.scale == "e4m3":
        code = nearest_code("e4m3", fp32(amax / largest))
        scale, scale_bytes = code_value("e4m3", code), bytes([code])
    else:
        scale = fp32(amax / largest)
        scale_bytes = struct.pack("<f", scale)
    codes = [nearest_code(tiles.element, fp32(v / scale)) for v in finite]
    if any(missing):
        nan = {"ue8m0": b"\xff", "e4m3": b"\x7f", "fp32": struct.pack("<I", 0x7FC00000)}
        scale_bytes = nan[tiles.scale]
        if tiles.element == "e4m3":
            codes = [0x7F] * len(codes)
    return codes, scale_bytes


def encode(layout: Layout, bits: list[int]) -> tuple[bytes, bytes]:
    """bf16 bit patterns of one vector → data row, scale row."""
    data, scales, at = b"", b"", 0
    for part in layout.parts:
        channels = bits[at : at + part.width]
        at += part.width
        if isinstance(part, Plain):
            data += struct.pack(f"<{part.width}H", *channels)
            continue
        codes: list[int] = []
        for start in range(0, part.width, part.tile):
            tile_codes, scale = encode_tile(part, channels[start : start + part.tile])
            codes += tile_codes
            scales += scale
        if part.element == "e2m1":  # even channel in the low nibble
            codes = [low + 16 * high for low, high in zip(codes[::2], codes[1::2], strict=True)]
        data += bytes(codes)
    return data, scales + b"\0" * layout.pad


def scale_value(kind: str, raw: bytes) -> float:
    if kind == "ue8m0":
        return math.nan if raw[0] == 255 else 2.0 ** (raw[0] - 127)
    if kind == "e4m3":
        return code_value("e4m3", raw[0])
    return struct.unpack("<f", raw)[0]


def decode(layout: Layout, data: bytes, scales: bytes) -> list[int]:
    """Data row, scale row → bf16 bit patterns."""
    bits: list[int] = []
    data_at = scale_at = 0
    for part in layout.parts:
        if isinstance(part, Plain):
            bits += struct.unpack_from(f"<{part.width}H", data, data_at)
            data_at += 2 * part.width
            continue
        per_scale = 4 if part.scale == "fp32" else 1
        for channel in range(part.width):
            at = scale_at + channel // part.tile * per_scale
            scale = scale_value(part.scale, scales[at : at + per_scale])
            if part.element == "e4m3":
                code = data[data_at + channel]
            else:
                code = data[data_at + channel // 2] >> (4 * (channel % 2)) & 0xF
            bits.append(bf16_bits(fp32(code_value(part.element, code) * scale)))
        data_at += part.width if part.element == "e4m3" else part.width // 2
        scale_at += part.width // part.tile * per_scale
    return bits


# ---- whole arrays ------------------------------------------------------------------------------


def bf16_values(bits: U16) -> F64:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def nearest_codes(element: str, values: F64) -> U8:
    """`nearest_code` of every number: counts the midpoints below it, then settles ties. Exact,
    because grids, midpoints and fp32 numbers are all doubles."""
    grid = np.array(GRIDS[element])
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = np.abs(values)
    code = np.searchsorted(middle, magnitude, side="left")
    on_tie = (code < len(middle)) & (magnitude == middle[np.minimum(code, len(middle) - 1)])
    code = code + (on_tie & (code % 2 == 1))
    return (code + np.where(np.signbit(values), SIGN_BIT[element], 0)).astype(np.uint8)


def encode_tiles(tiles: Tiles, bits: U16) -> tuple[U8, U8]:
    """`encode_tile` of finite bf16 patterns [n, tile] → codes [n, tile], scale bytes [n, bytes]."""
    values = bf16_values(bits)
    assert np.isfinite(values).all()
    amax = np.maximum(
        np.abs(values).max(axis=1, keepdims=True), np.float64(np.float32(tiles.floor))
    )
    largest = GRIDS[tiles.element][-1]
    if tiles.scale == "ue8m0":
        quotient = (amax * np.float64(np.float32(1.0 / largest))).astype(np.float32)
        mantissa, exponent = np.frexp(quotient.astype(np.float64))
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        scale = np.ldexp(1.0, exponent)
        raw = (exponent + 127).astype(np.uint8)
    elif tiles.scale == "e4m3":
        raw = nearest_codes("e4m3", (amax / largest).astype(np.float32).astype(np.float64))
        scale = np.array(E4M3_GRID)[raw]
    else:
        narrow = (amax / largest).astype(np.float32)
        scale, raw = narrow.astype(np.float64), narrow.view(np.uint8)
    scaled = (values / scale).astype(np.float32).astype(np.float64)
    return nearest_codes(tiles.element, scaled), raw
