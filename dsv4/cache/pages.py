"""How the bytes of an arena's row are cut: pages of records, planes, and the rings of compressors.
Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from dsv4.cache.records import ELEMENT_BITS, RecordFormat, ScaleType

ArenaName = Literal["block", "slot", "entries"]
PageKind = Literal["entries", "index_keys", "window"]
CompressorKind = Literal["main", "index"]
PageForm = Literal["planes", "records"]
PlaneDtype = Literal["uint8", "float8_e4m3fn", "bfloat16", "float32"]

ITEM_BYTES: dict[PlaneDtype, int] = {
    "uint8": 1,
    "float8_e4m3fn": 1,
    "bfloat16": 2,
    "float32": 4,
}
_SCALE_DTYPE: dict[ScaleType, PlaneDtype] = {
    "ue8m0": "uint8",
    "e4m3": "float8_e4m3fn",
    "fp32": "float32",
}
RECORD_ALIGN_BYTES = 16  # of whole records
# page kind -> (arena, prefix of the data planes, name of the scale plane); the inventory's names
_PAGE_NAMES: dict[PageKind, tuple[ArenaName, str, str]] = {
    "entries": ("block", "entries", "inv_scale"),
    "index_keys": ("block", "indexer_keys", "indexer_scale"),
    "window": ("slot", "swa", "swa_inv"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """One tensor inside every row of an arena. Offsets and strides are bytes within the row."""

    name: str
    layer: int
    kind: str
    arena: ArenaName
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    dtype: PlaneDtype

    @property
    def payload_bytes(self) -> int:
        count = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, kw_only=True)
class Page:
    """`rows` records of one layer. `form` "planes" is all data rows, then all scale rows;
    "records" is each record whole, its data row and then its scale row, one after the other.
    Entries that are kept `apart` lie in an arena of their own, whose rows have the entries of one
    block, and are whole in either form: what is read from host memory comes in one piece. Whole
    records start at multiples of 16 bytes; zeros fill the scale row up to there."""

    kind: PageKind
    layer: int
    offset_bytes: int
    rows: int
    format: RecordFormat
    apart: bool = False
    form: PageForm = "planes"

    @cached_property
    def arena(self) -> ArenaName:
        return "entries" if self.apart else _PAGE_NAMES[self.kind][0]

    @cached_property
    def whole(self) -> bool:
        """Whether a record is one piece."""
        return self.apart or self.form == "records"

    @cached_property
    def data_row_bytes(self) -> int:
        return self.format.data_row_bytes

    @cached_property
    def scale_row_bytes(self) -> int:
        """With the zeros after the last scale."""
        record = self.format
        if not self.whole or not record.scale_row_bytes:
            return record.scale_row_bytes
        return record.scale_row_bytes + -record.record_bytes % RECORD_ALIGN_BYTES

    @cached_property
    def record_bytes(self) -> int:
        return self.data_row_bytes + self.scale_row_bytes

    @cached_property
    def data_stride_bytes(self) -> int:
        """From one data row to the next."""
        return self.record_bytes if self.whole else self.data_row_bytes

    @cached_property
    def scale_stride_bytes(self) -> int:
        return self.record_bytes if self.whole else self.scale_row_bytes

    @cached_property
    def scale_offset_bytes(self) -> int:
        rows = 1 if self.whole else self.rows
        return self.offset_bytes + rows * self.data_row_bytes

    @cached_property
    def payload_bytes(self) -> int:
        return self.rows * self.record_bytes

    def planes(self) -> Iterator[Plane]:
        """The page cut into named tensors. Formats with several coded parts number their scales."""
        _, prefix, scale_name = _PAGE_NAMES[self.kind]
        data_offset, scale_offset = self.offset_bytes, self.scale_offset_bytes
        coded_parts = 0
        for part in self.format.parts:
            dtype: PlaneDtype = part.value_dtype
            columns = part.width
            if part.code is not None and part.code.element == "e4m3":
                dtype = "float8_e4m3fn"
            elif part.code is not None:
                dtype, columns = "uint8", part.width * ELEMENT_BITS[part.code.element] // 8
            yield Plane(
                name=f"{prefix}_{part.name}",
                layer=self.layer,
                kind=self.kind,
                arena=self.arena,
                offset_bytes=data_offset,
                shape=(self.rows, columns),
                strides_bytes=(self.data_stride_bytes, ITEM_BYTES[dtype]),
                dtype=dtype,
            )
            data_offset += part.bytes
            if part.code is None:
                continue
            scale_dtype = _SCALE_DTYPE[part.code.scale]
            yield Plane(
                name=scale_name + (f"_{coded_parts}" if coded_parts else ""),
                layer=self.layer,
                kind=self.kind,
                arena=self.arena,
                offset_bytes=scale_offset,
                shape=(self.rows, part.tiles),
                strides_bytes=(self.scale_stride_bytes, ITEM_BYTES[scale_dtype]),
                dtype=scale_dtype,
            )
            scale_offset += part.scale_bytes
            coded_parts += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """`rows` rows of a slot from `offset_bytes` on; token position p has row p modulo `rows`. Where
    the last token of each group is not kept (`CompressorLayout.skips_last`), those tokens are not
    counted."""

    offset_bytes: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorLayout:
    """Where one compressor, a layer's main one or its index keys', reads and writes: its rings in a
    slot, its page in a block.

    Rings of values (k) and gates (z) have rows of fp32 [width]: `ka`, `za` of the current stream,
    `kb`, `zb` of the previous one, with `overlap`. Instead of these, `online` layers have one ring
    of states, whose rows are fp32 [3, width]. A layer whose groups have one token has no ring.

    Without `gated` a group is one token, and its values are the unchanged projection, without a
    `z`. With `skips_last` the last token of a group is in no ring, so groups close in the step that
    contains it. With `key_page` the latent, the entry before its rotation, gives the index key too.
    """

    kind: CompressorKind
    ratio: int
    overlap: bool
    width: int
    rope_dim: int
    hadamard: bool
    page: Page
    ka: Ring | None = None
    za: Ring | None = None
    kb: Ring | None = None
    zb: Ring | None = None
    state: Ring | None = None
    gated: bool = True
    skips_last: bool = False
    key_page: Page | None = None
    # of the projections: [previous | current] with overlap, else [current]
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", self.width * (2 if self.overlap else 1))

    @property
    def online(self) -> bool:
        """Whether the unfinished group is kept folded and not token by token."""
        return self.state is not None

    @property
    def tokens_pooled(self) -> int:
        """Tokens that one entry pools."""
        return self.ratio * (2 if self.overlap else 1)
