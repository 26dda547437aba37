"""What a request still needs from its slot, and where that lies when it is kept somewhere else.

At position P a later step reads, of each layer, the window rows of P - window + 1 … P - 1, the tail
rows of the unfinished group and, where groups overlap, those of the group before it. Nothing else
in a slot is needed. `live_rows` lists these rows; two layouts say where they lie in a run of bytes:

    SnapshotLayout   at a block boundary, for another request that begins with the same tokens.
                     Every group is closed there, so of the tails only the previous group is left.
                     Draft layers (MTP, DSpark) are left out: not every engine runs them, and a row
                     of theirs belongs to one continuation; their windows fill again as tokens run.
    StateLayout      at any position, for the same request: everything, draft layers too, and the
                     unfinished block after it.

Neither depends on ring sizes, so caches with other draft settings can read them. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING, Literal, get_args

from dsv4.cache.pages import CompressorKind, Page, Ring
from dsv4.cache.schema import CacheSchema

if TYPE_CHECKING:  # sizes need no numpy: the planner runs in a browser without it
    import numpy as np
    from numpy.typing import NDArray

    from dsv4.tiers.record import Parts

    Bytes = NDArray[np.uint8]
# where live rows start: `rows` before the end, at the unfinished group, or one group before it
Anchor = Literal["newest", "group", "previous"]
RowKind = Literal[
    "window",
    "window_data",
    "window_scales",
    "tail_ka",
    "tail_za",
    "tail_kb",
    "tail_zb",
    "tail_state",
    "index_tail_ka",
    "index_tail_za",
    "index_tail_kb",
    "index_tail_zb",
    "index_tail_state",
]
# of each compressor: values and gates of the current stream, of the previous one, folded states
_TAILS: dict[CompressorKind, tuple[RowKind, RowKind, RowKind, RowKind, RowKind]] = {
    "main": ("tail_ka", "tail_za", "tail_kb", "tail_zb", "tail_state"),
    "index": (
        "index_tail_ka",
        "index_tail_za",
        "index_tail_kb",
        "index_tail_zb",
        "index_tail_state",
    ),
}
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRows:
    """`rows` rows of one ring of a slot, of the tokens from an anchor on; positions before the
    first token or from the length on have none.

    Token p lies at `slot_offset_bytes` + (p mod ring_rows) · width_bytes of the slot. With
    `skips_last` the ring has no row for the last token of a group, and those tokens are not
    counted. In a layout the rows start at `offset_bytes`.
    """

    layer: int
    kind: RowKind
    anchor: Anchor
    rows: int
    width_bytes: int
    ring_rows: int
    slot_offset_bytes: int
    ratio: int = 1
    skips_last: bool = False
    offset_bytes: int = 0

    @property
    def bytes(self) -> int:
        return self.rows * self.width_bytes

    def positions(self, length: int) -> NDArray[np.int64]:
        import numpy as np

        first = length - self.rows
        if self.anchor != "newest":
            first = length - length % self.ratio
            first -= self.ratio if self.anchor == "previous" else 0
        return np.arange(first, first + self.rows)

    def ring_rows_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.skips_last:
            positions = positions - positions // self.ratio
        return positions % self.ring_rows

    def at_boundary(self) -> LiveRows | None:
        """Those that are needed where all groups are closed."""
        if self.kind in ("window", "window_data", "window_scales"):
            return self
        if self.anchor == "previous":
            return replace(self, anchor="newest", rows=self.ratio)
        return None


def live_rows(schema: CacheSchema, layer: int) -> Iterator[LiveRows]:
    """What a step reads of one layer's part of a slot. Layers that draft several tokens at once
    read the row of P - window as well, if the ring still has it."""
    page = schema.layout.page("window", layer)
    assert page is not None
    rows = schema.model.window - 1
    if layer in schema.draft_layers and schema.model.draft_block:
        rows += 1
    for kind, width, offset in window_parts(page):
        if width and rows:
            yield LiveRows(
                layer=layer,
                kind=kind,
                anchor="newest",
                rows=rows,
                width_bytes=width,
                ring_rows=page.rows,
                slot_offset_bytes=offset,
            )
    for compressor in get_args(CompressorKind):
        yield from _live_tails(schema, layer, compressor)


def _live_tails(schema: CacheSchema, layer: int, compressor: CompressorKind) -> Iterator[LiveRows]:
    found = schema.layout.compressor(layer, compressor)
    if found is None:
        return
    ratio, width, skips = found.ratio, found.width * _FP32_BYTES, found.skips_last
    ka, za, kb, zb, state = _TAILS[compressor]
    tails: tuple[tuple[RowKind, Ring | None, Anchor, int, int], ...] = (
        (ka, found.ka, "group", ratio - skips, width),
        (za, found.za, "group", ratio - skips, width),
        (kb, found.kb, "previous", 2 * ratio, width),
        (zb, found.zb, "previous", 2 * ratio, width),
        (state, found.state, "newest", 1, 3 * width),
    )
    for kind, ring, anchor, rows, row_bytes in tails:
        if ring is not None:
            yield LiveRows(
                layer=layer,
                kind=kind,
                anchor=anchor,
                rows=rows,
                width_bytes=row_bytes,
                ring_rows=ring.rows,
                slot_offset_bytes=ring.offset_bytes,
                ratio=ratio,
                skips_last=skips and anchor == "group",
            )


def window_parts(page: Page) -> tuple[tuple[RowKind, int, int], ...]:
    """A page of window rows, whole or its two halves: kind, bytes per row, offset."""
    if page.whole:
        return (("window", page.record_bytes, page.offset_bytes),)
    return (
        ("window_data", page.format.data_row_bytes, page.offset_bytes),
        ("window_scales", page.format.scale_row_bytes, page.scale_offset_bytes),
    )


def previous_kinds(compressor: CompressorKind) -> tuple[RowKind, RowKind]:
    """Values and gates of the previous stream of a compressor."""
    _, _, kb, zb, _ = _TAILS[compressor]
    return kb, zb


@dataclass(frozen=True)
class SnapshotLayout:
    """Rows of equal width lie together in a section, so that one gather copies them all."""

    schema: CacheSchema

    @cached_property
    def sections(self) -> tuple[tuple[LiveRows, ...], ...]:
        placed: list[tuple[LiveRows, ...]] = []
        at, align = 0, self.schema.align_bytes
        widest_first = sorted(self._alive(), key=lambda each: -each.width_bytes)
        for _, equal in groupby(widest_first, key=lambda each: each.width_bytes):
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
        unit = gcd(8, self.schema.bytes.slot, self.row_bytes)
        for section in self.sections:
            for each in section:
                unit = gcd(unit, each.width_bytes, each.slot_offset_bytes, each.offset_bytes)
        return unit

    @cached_property
    def _by_layer(self) -> dict[tuple[int, RowKind], LiveRows]:
        return {(each.layer, each.kind): each for section in self.sections for each in section}

    def rows_of(self, layer: int, kind: RowKind) -> LiveRows | None:
        return self._by_layer.get((layer, kind))

    def _alive(self) -> Iterator[LiveRows]:
        for layer, spec in enumerate(self.schema.model.layers):
            if not spec.draft:
                for rows in live_rows(self.schema, layer):
                    kept = rows.at_boundary()
                    if kept is not None:
                        yield kept


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """The records of one page of a block: `width_bytes` of each of its `rows`."""

    ratio: int
    width_bytes: int
    rows: int
    offset_bytes: int


@dataclass(frozen=True)
class StateLayout:
    """One run of bytes, zero wherever the request has no token, whatever the slot had there.

    [window and tail rows of each layer, by position | the rows of the unfinished block]
    """

    schema: CacheSchema

    @cached_property
    def rings(self) -> tuple[LiveRows, ...]:
        placed, at = [], 0
        for layer in range(len(self.schema.layers)):
            for rows in live_rows(self.schema, layer):
                placed.append(replace(rows, offset_bytes=at))
                at += rows.bytes
        return tuple(placed)

    @cached_property
    def block_offset_bytes(self) -> int:
        """Where the unfinished block starts."""
        return sum(rows.bytes for rows in self.rings)

    @cached_property
    def block_rows(self) -> tuple[BlockRows, ...]:
        found = []
        for page in self.schema.layout.pages:
            if page.kind == "window":
                continue
            ratio = self.schema.model.layers[page.layer].ratio
            apart = self.schema.bytes.block if page.apart else 0  # what stays comes first
            whole = ((page.record_bytes, apart + page.offset_bytes),)
            halves = (
                (page.data_row_bytes, page.offset_bytes),
                (page.scale_row_bytes, page.scale_offset_bytes),
            )
            for width, offset in whole if page.whole else halves:
                if width:
                    found.append(
                        BlockRows(
                            ratio=ratio, width_bytes=width, rows=page.rows, offset_bytes=offset
                        )
                    )
        return tuple(found)

    @cached_property
    def payload_bytes(self) -> int:
        return self.block_offset_bytes + self.schema.bytes.block + self.schema.bytes.entries

    def gather(
        self, slot: Bytes, block: Bytes, length: int, payload: Bytes, *, written: int
    ) -> None:
        """Copies a slot and the unfinished block (ignored if there is none) into a payload. The
        slot may hold tokens up to `written`, which have replaced older ones."""
        payload[:] = 0
        for rows in self.rings:
            target = payload[rows.offset_bytes :][: rows.bytes]
            positions = rows.positions(length)
            real = (positions >= 0) & (positions < length)
            if rows.anchor == "newest":
                real &= positions >= written - rows.ring_rows
            found = _ring(slot, rows)[rows.ring_rows_of(positions[real])]
            target.reshape(rows.rows, rows.width_bytes)[real] = found
        target = payload[self.block_offset_bytes :]
        for part, span in self._unfinished(length):
            target[part.offset_bytes :][:span] = block[part.offset_bytes :][:span]

    def scatter(self, payload: Bytes, length: int, slot: Bytes) -> None:
        """Copies a payload into a slot that is all zeros."""
        for rows in self.rings:
            source = payload[rows.offset_bytes :][: rows.bytes]
            positions = rows.positions(length)
            real = (positions >= 0) & (positions < length)
            found = source.reshape(rows.rows, rows.width_bytes)[real]
            _ring(slot, rows)[rows.ring_rows_of(positions[real])] = found

    def used_spans(self, length: int) -> list[tuple[int, int]]:
        """Start and end of all that may be other than zero in a payload of `length` tokens, in
        order."""
        import numpy as np

        used = []
        for rows in self.rings:
            positions = rows.positions(length)
            real = np.flatnonzero((positions >= 0) & (positions < length))
            if real.size:  # they are contiguous
                at, width = rows.offset_bytes, rows.width_bytes
                used.append((at + int(real[0]) * width, at + (int(real[-1]) + 1) * width))
        for part, span in self._unfinished(length):
            start = self.block_offset_bytes + part.offset_bytes
            used.append((start, start + span))
        joined: list[tuple[int, int]] = []
        for start, end in sorted(used):
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
        return joined

    def block_of(self, payload: Bytes) -> Bytes:
        """The unfinished block in a payload."""
        return payload[self.block_offset_bytes :]

    def _unfinished(self, length: int) -> Iterator[tuple[BlockRows, int]]:
        """Rows of the unfinished block, and how many bytes of each are written."""
        inside = length % self.schema.block_tokens
        for part in self.block_rows:
            if inside >= part.ratio:
                yield part, inside // part.ratio * part.width_bytes


def copy_payload(payload: Bytes, parts: Parts) -> None:
    """Copies a payload into the pieces of a record."""
    import numpy as np

    at = 0
    for piece in parts.payload:
        np.frombuffer(piece, np.uint8)[:] = payload[at : at + piece.nbytes]
        at += piece.nbytes


def _ring(slot: Bytes, rows: LiveRows) -> Bytes:
    span = slot[rows.slot_offset_bytes :][: rows.ring_rows * rows.width_bytes]
    return span.reshape(rows.ring_rows, rows.width_bytes)
