"""Record formats: how one vector of channels becomes bytes. Torch-free descriptions.

A *record* is one stored vector (an entry, a window row, an indexer key). A *page* is B records:
B data rows first, then B scale rows (FlashMLA's V4 layout and DeepGEMM's index layout alike).

    page   | data row 0 | data row 1 | ... | data row B-1 | scale row 0 | ... | scale row B-1 |

Entries and window rows of V4.1 may be whole records instead (`page_form="records"`, FlashMLA's
layout since 2026-09-30):

    page   | data row 0 | scale row 0 | data row 1 | scale row 1 | ... | scale row B-1 |

A format is a list of parts; a part is a run of channels with one code. New formats are new data:
encoder, decoder, views and byte counts follow from the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dsv4.errors import SchemaError

Element = Literal["e4m3", "e2m1"]
ScaleType = Literal["ue8m0", "e4m3", "fp32"]
ValueDtype = Literal["bfloat16", "float32"]

ELEMENT_BITS: dict[Element, int] = {"e4m3": 8, "e2m1": 4}
ELEMENT_MAX: dict[Element, float] = {"e4m3": 448.0, "e2m1": 6.0}
SCALE_BYTES: dict[ScaleType, int] = {"ue8m0": 1, "e4m3": 1, "fp32": 4}
VALUE_BITS: dict[ValueDtype, int] = {"bfloat16": 16, "float32": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCode:
    """Channels coded in tiles that share one scale: value = element × scale.

    amax is floored at `amax_floor`. ue8m0: scale is the power of two at or above amax / max.
    e4m3: scale = E4M3(amax / (max × global_scale)), and value = element × scale × global_scale.
    fp32: scale = amax / max.
    """

    element: Element
    tile: int
    scale: ScaleType
    amax_floor: float
    global_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)  # no slots: sizes are computed once
class Part:
    """Channels [start, start + width) of a record. `code` None keeps them unchanged, in
    `value_dtype`; coded channels are bf16 before and after."""

    name: str
    start: int
    width: int
    code: TileCode | None = None
    value_dtype: ValueDtype = "bfloat16"

    @cached_property
    def bytes(self) -> int:
        bits = (
            VALUE_BITS[self.value_dtype] if self.code is None else ELEMENT_BITS[self.code.element]
        )
        return self.width * bits // 8

    @cached_property
    def tiles(self) -> int:
        return 0 if self.code is None else self.width // self.code.tile

    @cached_property
    def scale_bytes(self) -> int:
        return 0 if self.code is None else self.tiles * SCALE_BYTES[self.code.scale]


@dataclass(frozen=True, kw_only=True)  # no slots: sizes are computed once
class RecordFormat:
    """A vector of `width` channels as one data row and one scale row.

    `value_dtype` is what it encodes from and decodes to, the same in all parts. `scale_pad_bytes`
    follow the scales of each row; writers set them to 0.
    """

    name: str
    width: int
    parts: tuple[Part, ...]
    scale_pad_bytes: int = 0

    def __post_init__(self) -> None:
        start = 0
        for part in self.parts:
            if part.start != start:
                raise SchemaError(
                    f"{self.name}: part {part.name} starts at {part.start}, not {start}"
                )
            if part.code is not None and part.width % part.code.tile:
                raise SchemaError(
                    f"{self.name}: {part.width} channels of {part.name} are not whole tiles of "
                    f"{part.code.tile}"
                )
            if part.code is not None and part.width * ELEMENT_BITS[part.code.element] % 8:
                raise SchemaError(
                    f"{self.name}: {part.width} channels of {part.name} do not fill whole bytes; "
                    f"choose an even width"
                )
            if part.value_dtype != self.value_dtype or (
                part.code and part.value_dtype == "float32"
            ):
                raise SchemaError(
                    f"{self.name}: part {part.name} is of {part.value_dtype} values next to "
                    f"{self.parts[0].name} of {self.value_dtype}: a vector has one type, and coded "
                    f"channels are bfloat16"
                )
            start += part.width
        if start != self.width:
            raise SchemaError(f"{self.name}: parts cover {start} channels of {self.width}")

    @cached_property
    def value_dtype(self) -> ValueDtype:
        return self.parts[0].value_dtype

    @cached_property
    def data_row_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @cached_property
    def scale_row_bytes(self) -> int:
        return sum(part.scale_bytes for part in self.parts) + self.scale_pad_bytes

    @cached_property
    def record_bytes(self) -> int:
        return self.data_row_bytes + self.scale_row_bytes


def _tile(width: int, largest: int) -> int:
    """The largest power of two up to `largest` that divides `width`: V4's widths get V4's tiles,
    and a toy model with narrow heads still has whole ones."""
    return min(largest, width & -width)


def fp8_ds(head_dim: int, rope_dim: int) -> RecordFormat:
    """What DeepSeek-V4 was trained with: FP8 tiles of 64 with UE8M0 scales, RoPE channels bf16."""
    nope = head_dim - rope_dim
    code = TileCode(element="e4m3", tile=_tile(nope, 64), scale="ue8m0", amax_floor=1e-4)
    return RecordFormat(
        name="fp8_ds",
        width=head_dim,
        parts=(
            Part(name="fp8", start=0, width=nope, code=code),
            Part(name="rope", start=nope, width=rope_dim),
        ),
        scale_pad_bytes=-(nope // code.tile) % 8,
    )


def fp8_row(head_dim: int, rope_dim: int) -> RecordFormat:
    """The original design's: one fp32 scale for all non-RoPE channels of an entry."""
    nope = head_dim - rope_dim
    code = TileCode(element="e4m3", tile=nope, scale="fp32", amax_floor=1e-4)
    return RecordFormat(
        name="fp8_row",
        width=head_dim,
        parts=(
            Part(name="fp8", start=0, width=nope, code=code),
            Part(name="rope", start=nope, width=rope_dim),
        ),
    )


def v41_fp8(head_dim: int, rope_dim: int) -> RecordFormat:
    """Window rows of DeepSeek-V4.1: FP8 tiles of 32 with UE8M0 scales, RoPE channels too; 528 bytes
    for 512 channels."""
    code = TileCode(element="e4m3", tile=_tile(head_dim, 32), scale="ue8m0", amax_floor=1e-4)
    part = Part(name="fp8", start=0, width=head_dim, code=code)
    return RecordFormat(name="v41_fp8", width=head_dim, parts=(part,))


def v41_fp4(head_dim: int, rope_dim: int) -> RecordFormat:
    """Entries of DeepSeek-V4.1: E2M1 in groups of 16 with E4M3 scales, RoPE channels too; 288 bytes
    for 512 channels."""
    code = TileCode(element="e2m1", tile=_tile(head_dim, 16), scale="e4m3", amax_floor=6 * 2.0**-9)
    part = Part(name="fp4", start=0, width=head_dim, code=code)
    return RecordFormat(name="v41_fp4", width=head_dim, parts=(part,))


def bf16(head_dim: int, rope_dim: int) -> RecordFormat:
    """No quantisation: for exactness tests and parity with transformers."""
    return _plain("bf16", head_dim, rope_dim, "bfloat16")


def fp32(head_dim: int, rope_dim: int) -> RecordFormat:
    """No quantisation of fp32 models: for parity with transformers on a CPU. Reference only."""
    return _plain("fp32", head_dim, rope_dim, "float32")


def _plain(name: str, head_dim: int, rope_dim: int, value_dtype: ValueDtype) -> RecordFormat:
    nope = head_dim - rope_dim
    return RecordFormat(
        name=name,
        width=head_dim,
        parts=(
            Part(name="nope", start=0, width=nope, value_dtype=value_dtype),
            Part(name="rope", start=nope, width=rope_dim, value_dtype=value_dtype),
        ),
    )


def mxfp4(index_dim: int) -> RecordFormat:
    """Indexer keys as trained: E2M1 in groups of 32 with UE8M0 scales, 68 bytes for 128."""
    code = TileCode(
        element="e2m1", tile=_tile(index_dim, 32), scale="ue8m0", amax_floor=6 * 2.0**-126
    )
    part = Part(name="fp4", start=0, width=index_dim, code=code)
    return RecordFormat(name="mxfp4", width=index_dim, parts=(part,))


def nvfp4(index_dim: int) -> RecordFormat:
    """Indexer keys in groups of 16 with E4M3 scales: the original design's, 72 bytes for 128."""
    code = TileCode(element="e2m1", tile=_tile(index_dim, 16), scale="e4m3", amax_floor=6 * 2.0**-9)
    part = Part(name="fp4", start=0, width=index_dim, code=code)
    return RecordFormat(name="nvfp4", width=index_dim, parts=(part,))


def index_fp8(index_dim: int) -> RecordFormat:
    """Indexer keys as Hopper engines keep them: E4M3 with one fp32 scale, 132 bytes for 128."""
    code = TileCode(element="e4m3", tile=index_dim, scale="fp32", amax_floor=1e-4)
    part = Part(name="fp8", start=0, width=index_dim, code=code)
    return RecordFormat(name="fp8", width=index_dim, parts=(part,))


def index_bf16(index_dim: int) -> RecordFormat:
    """Indexer keys without quantisation, for parity with transformers."""
    return RecordFormat(
        name="bf16", width=index_dim, parts=(Part(name="bf16", start=0, width=index_dim),)
    )


def index_fp32(index_dim: int) -> RecordFormat:
    """Indexer keys of fp32 models without quantisation. Reference only."""
    part = Part(name="fp32", start=0, width=index_dim, value_dtype="float32")
    return RecordFormat(name="fp32", width=index_dim, parts=(part,))


ENTRY_FORMATS: dict[str, Callable[[int, int], RecordFormat]] = {
    "fp8_ds": fp8_ds,
    "fp8_row": fp8_row,
    "v41_fp8": v41_fp8,
    "v41_fp4": v41_fp4,
    "bf16": bf16,
    "fp32": fp32,
}
INDEX_FORMATS: dict[str, Callable[[int], RecordFormat]] = {
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "fp8": index_fp8,
    "bf16": index_bf16,
    "fp32": index_fp32,
}


# formats whose records FlashMLA reads whole; pages of others are planes
WHOLE_FORMATS = ("v41_fp8", "v41_fp4")


def entry_format(name: str, *, head_dim: int, rope_dim: int) -> RecordFormat:
    """The format of entries and window rows by name. Raises SchemaError for an unknown one."""
    if name not in ENTRY_FORMATS:
        raise SchemaError(f"unknown record format {name!r}: choose {', '.join(ENTRY_FORMATS)}")
    return ENTRY_FORMATS[name](head_dim, rope_dim)


def index_format(name: str, *, index_dim: int) -> RecordFormat:
    """The format of indexer keys by name. Raises SchemaError for an unknown one."""
    if name not in INDEX_FORMATS:
        raise SchemaError(f"unknown index format {name!r}: choose {', '.join(INDEX_FORMATS)}")
    return INDEX_FORMATS[name](index_dim)
