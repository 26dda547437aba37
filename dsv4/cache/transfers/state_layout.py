"""The state of a request at any length as one row of bytes that no ring size enters. Torch-free.

    [window and tail rows of each layer, by position | the rows of the unfinished block]

At length L a later step reads, of each layer, the window rows of L - window + 1 … L - 1, the tail
rows of the unfinished group and, where groups overlap, of the one before it, and the entries of
the unfinished block. Draft layers are in it too: a request comes back as it went. Where they draft
several tokens at once they read the row of L - window as well, if the ring still has it. What is at
no position of the request is zero, whatever the slot had there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.pages import CompressorKind
from dsv4.cache.prefix.snapshot_layout import window_slices
from dsv4.cache.schema import CacheSchema

if TYPE_CHECKING:
    from dsv4.tiers.record import Parts

Bytes = NDArray[np.uint8]
# where the rows of a run start: before the end, at the unfinished group, or one group before it
Anchor = Literal["newest", "group", "previous"]
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """`rows` rows of one ring, of the tokens from an anchor on. With `skips_last` the ring has no
    row of the last token of a group, which none of these is."""

    anchor: Anchor
    ratio: int
    rows: int
    width_bytes: int
    ring_rows: int
    slot_offset_bytes: int
    offset_bytes: int
    skips_last: bool = False

    def ring_rows_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.skips_last:
            positions = positions - positions // self.ratio
        return positions % self.ring_rows

    def positions(self, length: int) -> NDArray[np.int64]:
        first = length - self.rows
        if self.anchor != "newest":
            first = length - length % self.ratio
            first -= self.ratio if self.anchor == "previous" else 0
        return np.arange(first, first + self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRun:
    """The records of one page of a block: `width_bytes` of each of its `rows`."""

    ratio: int
    width_bytes: int
    rows: int
    offset_bytes: int


@dataclass(frozen=True)
class StateLayout:
    schema: CacheSchema

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        placed, at = [], 0
        for anchor, ratio, rows, width, ring_rows, offset, skips_last in self._rings():
            placed.append(
                Run(
                    anchor=anchor,
                    ratio=ratio,
                    rows=rows,
                    width_bytes=width,
                    ring_rows=ring_rows,
                    slot_offset_bytes=offset,
                    offset_bytes=at,
                    skips_last=skips_last,
                )
            )
            at += rows * width
        return tuple(placed)

    @cached_property
    def block_offset_bytes(self) -> int:
        """Where the unfinished block starts."""
        return sum(run.rows * run.width_bytes for run in self.runs)

    @cached_property
    def block_runs(self) -> tuple[BlockRun, ...]:
        runs = []
        for page in self.schema.pages:
            if page.kind == "window":
                continue
            ratio = self.schema.model.layers[page.layer].ratio
            for width, offset in (
                (page.format.data_row_bytes, page.offset_bytes),
                (page.format.scale_row_bytes, page.scale_offset_bytes),
            ):
                if width:
                    runs.append(
                        BlockRun(
                            ratio=ratio, width_bytes=width, rows=page.rows, offset_bytes=offset
                        )
                    )
        return tuple(runs)

    @cached_property
    def payload_bytes(self) -> int:
        return self.block_offset_bytes + self.schema.block_bytes

    def gather(
        self, slot: Bytes, block: Bytes, length: int, payload: Bytes, *, written: int
    ) -> None:
        """A slot and the unfinished block (anything, if there is none) into a payload. The slot may
        hold tokens up to `written`, which have taken the place of older ones."""
        payload[:] = 0
        for run in self.runs:
            target = payload[run.offset_bytes :][: run.rows * run.width_bytes]
            positions = run.positions(length)
            real = (positions >= 0) & (positions < length)
            if run.anchor == "newest":
                real &= positions >= written - run.ring_rows
            rows = _ring(slot, run)[run.ring_rows_of(positions[real])]
            target.reshape(run.rows, run.width_bytes)[real] = rows
        target = payload[self.block_offset_bytes :]
        for part, span in self._unfinished(length):
            target[part.offset_bytes :][:span] = block[part.offset_bytes :][:span]

    def scatter(self, payload: Bytes, length: int, slot: Bytes) -> None:
        """A payload into a slot that is all zeros."""
        for run in self.runs:
            source = payload[run.offset_bytes :][: run.rows * run.width_bytes]
            positions = run.positions(length)
            real = (positions >= 0) & (positions < length)
            rows = source.reshape(run.rows, run.width_bytes)[real]
            _ring(slot, run)[run.ring_rows_of(positions[real])] = rows

    def used_spans(self, length: int) -> list[tuple[int, int]]:
        """Start and end of all that is not zero in every payload of so many tokens, in order."""
        spans = []
        for run in self.runs:
            positions = run.positions(length)
            real = np.flatnonzero((positions >= 0) & (positions < length))
            if real.size:  # they lie one after the other
                spans.append((int(real[0]), int(real[-1]) + 1, run.offset_bytes, run.width_bytes))
        used = [(at + first * width, at + last * width) for first, last, at, width in spans]
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

    def _unfinished(self, length: int) -> Iterator[tuple[BlockRun, int]]:
        """Runs of the unfinished block, and how many bytes of each are written."""
        inside = length % self.schema.block_tokens
        for part in self.block_runs:
            if inside >= part.ratio:
                yield part, inside // part.ratio * part.width_bytes

    def _rings(self) -> Iterator[tuple[Anchor, int, int, int, int, int, bool]]:
        schema = self.schema
        for layer in range(len(schema.layers)):
            page = schema.page("window", layer)
            assert page is not None
            for _, width, offset in window_slices(page):
                rows = schema.model.window - 1
                if layer in schema.draft_layers and schema.model.draft_block:
                    rows += 1
                if width and rows:
                    yield "newest", 1, rows, width, page.rows, offset, False
            for kind in get_args(CompressorKind):
                found = schema.compressor(layer, kind)
                if found is None:
                    continue
                width, ratio = found.width * _FP32_BYTES, found.ratio
                skips = found.skips_last
                for ring in (found.ka, found.za):
                    if ring is not None:
                        at, rows = ring.offset_bytes, ratio - skips
                        yield "group", ratio, rows, width, ring.rows, at, skips
                for ring in (found.kb, found.zb):
                    if ring is not None:
                        at = ring.offset_bytes
                        yield "previous", ratio, 2 * ratio, width, ring.rows, at, False
                if found.state is not None:
                    ring = found.state
                    yield "newest", 1, 1, 3 * width, ring.rows, ring.offset_bytes, False


def spread(payload: Bytes, parts: Parts) -> None:
    """A payload into the pieces of a record."""
    at = 0
    for piece in parts.payload:
        np.frombuffer(piece, np.uint8)[:] = payload[at : at + piece.nbytes]
        at += piece.nbytes


def _ring(slot: Bytes, run: Run) -> Bytes:
    span = slot[run.slot_offset_bytes :][: run.ring_rows * run.width_bytes]
    return span.reshape(run.ring_rows, run.width_bytes)
