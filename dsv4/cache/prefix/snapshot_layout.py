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

from dsv4.cache.schema import CacheSchema, CompressorKind

_FP32_BYTES = 4
RunKind = Literal[
    "window_data", "window_scales", "tail_k", "tail_z", "index_tail_k", "index_tail_z"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The newest `rows` rows of one ring of a slot: of the tokens P - rows … P - 1.

    Token p lies at `slot_offset_bytes` + (p mod ring_rows) · width_bytes of the slot; the run
    starts at `offset_bytes` of the snapshot.
    """

    layer: int
    kind: RunKind
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
    """Runs of equal width lie together, so that one gather copies them all."""

    schema: CacheSchema

    @cached_property
    def sections(self) -> tuple[tuple[Run, ...], ...]:
        placed: list[tuple[Run, ...]] = []
        at, align = 0, self.schema.align_bytes
        runs = sorted(self._runs(), key=lambda run: -run.width_bytes)
        for _, equal in groupby(runs, key=lambda run: run.width_bytes):
            section = []
            for run in equal:
                section.append(replace(run, offset_bytes=at))
                at += run.bytes
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
        return sum(run.bytes for section in self.sections for run in section)

    @cached_property
    def unit_bytes(self) -> int:
        """The largest power of two that divides every place and width."""
        unit = gcd(8, self.schema.slot_bytes, self.row_bytes)
        for section in self.sections:
            for run in section:
                unit = gcd(unit, run.width_bytes, run.slot_offset_bytes, run.offset_bytes)
        return unit

    @cached_property
    def _by_layer(self) -> dict[tuple[int, RunKind], Run]:
        return {(run.layer, run.kind): run for section in self.sections for run in section}

    def run(self, layer: int, kind: RunKind) -> Run | None:
        return self._by_layer.get((layer, kind))

    def _runs(self) -> Iterator[Run]:
        schema = self.schema
        before = schema.model.window - 1
        for layer, spec in enumerate(schema.model.layers):
            if spec.draft:
                continue
            page = schema.page("window", layer)
            assert page is not None
            for kind, width, offset in (
                ("window_data", page.format.data_row_bytes, page.offset_bytes),
                ("window_scales", page.format.scale_row_bytes, page.scale_offset_bytes),
            ):
                if before and width:
                    yield Run(
                        layer=layer,
                        kind=kind,  # type: ignore[arg-type]
                        rows=before,
                        width_bytes=width,
                        ring_rows=page.rows,
                        slot_offset_bytes=offset,
                    )
            yield from self._tail_runs(layer, "tail")
            yield from self._tail_runs(layer, "index_tail")

    def _tail_runs(self, layer: int, kind: CompressorKind) -> Iterator[Run]:
        found = self.schema.compressor(layer, kind)
        if found is None or not found.overlap:
            return
        for value, offset in (("k", found.kb_offset_bytes), ("z", found.zb_offset_bytes)):
            yield Run(
                layer=layer,
                kind=f"{kind}_{value}",  # type: ignore[arg-type]
                rows=found.ratio,
                width_bytes=found.width * _FP32_BYTES,
                ring_rows=found.b_rows,
                slot_offset_bytes=offset,
            )
