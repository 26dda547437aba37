"""Records in plain PyTorch: vectors to bytes and back, exact by the specification.

What no specification fixes is fixed here: ±inf behaves as the largest bf16 number of its sign. A
NaN makes the scale of its tile NaN, and with it the whole tile, because kernels multiply by scales
but do not look for NaN codes. In E4M3 all codes of the tile become NaN too.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dsv4.cache.records import ELEMENT_MAX, RecordFormat, TileCode, ValueDtype
from dsv4.errors import InvalidInput
from dsv4.ops.constants import BF16_MAX
from dsv4.reference.numerics import divide, to_bf16

VALUE_TYPES: dict[ValueDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
E4M3_NAN = 0x7F
UE8M0_NAN = 0xFF
E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# (midpoint, whether a value on it goes up): ties go to the even code
E2M1_STEPS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


def encode(record: RecordFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., width] of the format's value type → data rows uint8 [..., data_row_bytes], scale rows
    uint8 [..., scale_row_bytes]. Padding bytes are 0. Raises InvalidInput for another type."""
    if x.dtype != VALUE_TYPES[record.value_dtype] or x.dim() == 0 or x.shape[-1] != record.width:
        raise InvalidInput(
            f"{record.name} encodes {record.value_dtype} vectors of {record.width} channels, got "
            f"{x.dtype} of shape {list(x.shape)}"
        )
    data, scales = [], []
    for part in record.parts:
        channels = x[..., part.start : part.start + part.width]
        if part.code is None:
            data.append(channels.contiguous().view(torch.uint8))
            continue
        codes, scale = _encode_tiles(part.code, channels)
        data.append(codes)
        scales.append(scale)
    scales.append(x.new_zeros((*x.shape[:-1], record.scale_pad_bytes), dtype=torch.uint8))
    return torch.cat(data, dim=-1), torch.cat(scales, dim=-1)


def decode(record: RecordFormat, data: Tensor, scales: Tensor) -> Tensor:
    """Data and scale rows → vectors of the format's value type: exact for power-of-two scales.
    Raises InvalidInput."""
    rows = (("data", data, record.data_row_bytes), ("scale", scales, record.scale_row_bytes))
    for name, tensor, width in rows:
        if tensor.dtype != torch.uint8 or tensor.dim() == 0 or tensor.shape[-1] != width:
            raise InvalidInput(
                f"{record.name} has {name} rows of {width} bytes, got {tensor.dtype} of shape "
                f"{list(tensor.shape)}"
            )
    channels = []
    data_at = scale_at = 0
    for part in record.parts:
        piece = data[..., data_at : data_at + part.bytes].contiguous()
        data_at += part.bytes
        code = part.code
        if code is None:
            channels.append(piece.view(VALUE_TYPES[part.value_dtype]))
            continue
        scale = scales[..., scale_at : scale_at + part.scale_bytes].contiguous()
        scale_at += part.scale_bytes
        if code.element == "e4m3":
            elements = piece.view(torch.float8_e4m3fn).float()
        else:
            elements = _e2m1_pairs(piece.device)[piece.int()]
        if code.scale == "ue8m0":
            factor = _powers(piece.device)[scale.int()]
        elif code.scale == "e4m3":
            factor = scale.view(torch.float8_e4m3fn).float() * code.global_scale
        else:
            factor = scale.view(torch.float32)
        tiles = elements.view(*piece.shape[:-1], part.tiles, code.tile) * factor.unsqueeze(-1)
        channels.append(to_bf16(tiles.flatten(-2)))
    return torch.cat(channels, dim=-1)


def _encode_tiles(code: TileCode, x: Tensor) -> tuple[Tensor, Tensor]:
    tiles = x.float().reshape(*x.shape[:-1], x.shape[-1] // code.tile, code.tile)
    nan = torch.isnan(tiles)
    tile_nan = nan.any(dim=-1, keepdim=True)
    tiles = torch.where(nan, 0.0, tiles).clamp(-BF16_MAX, BF16_MAX)
    floor = code.amax_floor * code.global_scale
    amax = tiles.abs().amax(dim=-1, keepdim=True).clamp_min(floor)
    largest = ELEMENT_MAX[code.element]
    if code.scale == "ue8m0":
        inverse = torch.full((), 1 / largest, dtype=torch.float32, device=x.device)
        # the biased exponent of the smallest power of two that is not less
        bits = (amax * inverse).view(torch.int32)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
        scaled = tiles * _inverse_powers(x.device)[exponent]
        scale = exponent.to(torch.uint8)
    elif code.scale == "e4m3":
        ratio = divide(amax, largest * code.global_scale)
        rounded = ratio.clamp_max(ELEMENT_MAX["e4m3"]).to(torch.float8_e4m3fn)
        scaled = tiles / (rounded.float() * code.global_scale)
        scale = rounded.view(torch.uint8)
    else:
        ratio = torch.where(tile_nan, torch.nan, divide(amax, largest))
        scaled = tiles / ratio
        shifts = torch.tensor((0, 8, 16, 24), dtype=torch.int32, device=x.device)
        scale = ((ratio.view(torch.int32) >> shifts) & 0xFF).to(torch.uint8)
    if code.scale != "fp32":
        scale = torch.where(tile_nan, UE8M0_NAN if code.scale == "ue8m0" else E4M3_NAN, scale)
    scaled = scaled.clamp(-largest, largest)
    if code.element == "e4m3":
        codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        codes = torch.where(tile_nan, E4M3_NAN, codes)
        return codes.flatten(-2), scale.flatten(-2)
    codes = _e2m1_codes(scaled).flatten(-2)
    # even channel in the low nibble
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scale.flatten(-2)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^(exponent - 127) as fp32 for a biased exponent; 0 gives 2^-127 and 255 gives NaN."""
    bits = exponent << 23
    bits = torch.where(exponent == 0, 0x00400000, bits)
    bits = torch.where(exponent == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


@cache
def _powers(device: torch.device) -> Tensor:
    """fp32 [256]: what each UE8M0 code stands for."""
    return _power_of_two(torch.arange(256, dtype=torch.int32, device=device))


@cache
def _inverse_powers(device: torch.device) -> Tensor:
    """fp32 [255]: the inverse of each, for the codes of numbers."""
    return _power_of_two(torch.arange(254, -1, -1, dtype=torch.int32, device=device))


def _e2m1_codes(x: Tensor) -> Tensor:
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for midpoint, tie_goes_up in E2M1_STEPS:
        above = magnitude >= midpoint if tie_goes_up else magnitude > midpoint
        code += above.to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


@cache
def _e2m1_pairs(device: torch.device) -> Tensor:
    """fp32 [256, 2]: the two numbers of each byte, the one in the low nibble first."""
    grid = torch.tensor((*E2M1_GRID, *(-v for v in E2M1_GRID)), device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((grid[byte & 0xF], grid[byte >> 4]), dim=-1)
