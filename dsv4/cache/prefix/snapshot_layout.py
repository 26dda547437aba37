"""What a request must have to go on at a block boundary, and where it lies in a snapshot.

At position P, a multiple of block_tokens, every group is closed. A later step reads the window rows
of P - window + 1 … P - 1 and, where groups overlap, the previous stream of the last group. Nothing
else of a slot is alive. Draft layers (MTP, DSpark) are left out: not every engine runs them, and a
row of theirs belongs to one continuation; their windows fill again as tokens run. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import Literal

from dsv4.cache.pages import CompressorKind, Page
from dsv4.cache.schema import CacheSchema

_FP32_BYTES = 4
SliceKind = Literal[
    "window_data", "window_scales", "tail_k", "tail_z", "index_tail_k", "index_tail_z"
]
# values and gates of the previous stream of each compressor
TAIL_SLICES: dict[CompressorKind, tuple[SliceKind, SliceKind]] = {
    "main": ("tail_k", "tail_z"),
    "index": ("index_tail_k", "index_tail_z"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSlice:
    """The newest `rows` rows of one ring of a slot: of the tokens P - rows … P - 1.

    Token p lies at `slot_offset_bytes` + (p mod ring_rows) · width_bytes of the slot; the slice
    starts at `offset_bytes` of the snapshot.
    """

    layer: int
    kind: SliceKind
    rows: int
    width_bytes: int
    ring_rows: int
    slot_offset_bytes: int
    offset_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.rows * self.width_bytes


@dataclass(frozen=True)
class SnapshotLayout:
    """Slices of equal width lie together in a section, so that one gather copies them all. Where
    they lie does not depend on the lengths of the rings."""

    schema: CacheSchema

    @cached_property
    def sections(self) -> tuple[tuple[RingSlice, ...], ...]:
        placed: list[tuple[RingSlice, ...]] = []
        at, align = 0, self.schema.align_bytes
        slices = sorted(self._slices(), key=lambda each: -each.width_bytes)
        for _, equal in groupby(slices, key=lambda each: each.width_bytes):
            section = []
            for each in equal:
                section.append(replace(each, offset_bytes=at))
                at += each.bytes
            placed.append(tuple(section))
            at = -(-at // align) * align
        return tuple(placed)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one snapshot, alignment between sections included."""
        if not self.sections:
            return 0
        last, align = self.sections[-1][-1], self.schema.align_bytes
        return -(-(last.offset_bytes + last.bytes) // align) * align

    @cached_property
    def payload_bytes(self) -> int:
        return sum(each.bytes for section in self.sections for each in section)

    @cached_property
    def unit_bytes(self) -> int:
        """The largest power of two that divides every place and width."""
        unit = gcd(8, self.schema.slot_bytes, self.row_bytes)
        for section in self.sections:
            for each in section:
                unit = gcd(unit, each.width_bytes, each.slot_offset_bytes, each.offset_bytes)
        return unit

    @cached_property
    def _by_layer(self) -> dict[tuple[int, SliceKind], RingSlice]:
        return {(each.layer, each.kind): each for section in self.sections for each in section}

    def ring_slice(self, layer: int, kind: SliceKind) -> RingSlice | None:
        return self._by_layer.get((layer, kind))

    def _slices(self) -> Iterator[RingSlice]:
        schema = self.schema
        before = schema.model.window - 1
        for layer, spec in enumerate(schema.model.layers):
            if spec.draft:
                continue
            page = schema.page("window", layer)
            assert page is not None
            for kind, width, offset in window_slices(page):
                if before and width:
                    yield RingSlice(
                        layer=layer,
                        kind=kind,
                        rows=before,
                        width_bytes=width,
                        ring_rows=page.rows,
                        slot_offset_bytes=offset,
                    )
            yield from self._tail_slices(layer, "main")
            yield from self._tail_slices(layer, "index")

    def _tail_slices(self, layer: int, kind: CompressorKind) -> Iterator[RingSlice]:
        found = self.schema.compressor(layer, kind)
        if found is None:
            return
        for name, ring in zip(TAIL_SLICES[kind], (found.kb, found.zb), strict=True):
            if ring is not None:
                yield RingSlice(
                    layer=layer,
                    kind=name,
                    rows=found.ratio,
                    width_bytes=found.width * _FP32_BYTES,
                    ring_rows=ring.rows,
                    slot_offset_bytes=ring.offset_bytes,
                )


def window_slices(page: Page) -> tuple[tuple[SliceKind, int, int], ...]:
    """The two halves of a page of window rows: kind, bytes per row, offset."""
    return (
        ("window_data", page.format.data_row_bytes, page.offset_bytes),
        ("window_scales", page.format.scale_row_bytes, page.scale_offset_bytes),
    )
