"""Snapshots: the state of requests at block boundaries, in a bounded arena of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsv4.cache.prefix.snapshot_layout import Run, SnapshotLayout
from dsv4.cache.schema import CacheSchema, CompressorLayout, Page
from dsv4.errors import InvalidInput
from dsv4.ops.calls import CompressorWrite

Where = Literal["device", "host"]
_UNIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Section:
    """Runs of one width as index tensors: row i is token P - `back[i]` of a ring of `ring[i]` rows
    that starts at `base[i]`. All in units of the layout."""

    first: int
    rows: int
    width: int
    base: Tensor
    back: Tensor
    ring: Tensor

    def places(self, boundary: int, unit_bytes: int) -> Tensor:
        width = self.width // unit_bytes
        return self.base + torch.remainder(boundary - self.back, self.ring) * width


class SnapshotPool:
    """uint8 [rows, row_bytes], on the device or in pinned host memory.

    Copies are ordered like kernels on the current stream and wait for nothing.
    """

    def __init__(
        self, schema: CacheSchema, rows: int, *, where: Where, device: torch.device
    ) -> None:
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise InvalidInput(f"{rows!r} snapshots: must be a whole number, 0 or more")
        if where not in ("device", "host"):
            raise InvalidInput(f"snapshots cannot be kept in {where!r}: use 'device' or 'host'")
        self.layout = SnapshotLayout(schema)
        self.rows, self.where, self.device = rows, where, device
        apart = where == "host" and device.type == "cuda"
        self.bytes = torch.empty(
            (rows, self.layout.row_bytes),
            dtype=torch.uint8,
            device="cpu" if where == "host" else device,
            pin_memory=apart,
        )
        self._staged = (
            torch.empty((self.layout.row_bytes,), dtype=torch.uint8, device=device)
            if apart
            else None
        )
        self._sections = tuple(map(self._section, self.layout.sections)) if rows else ()

    def memory_bytes(self) -> int:
        """Bytes on the device."""
        indices = sum(s.base.numel() + s.back.numel() + s.ring.numel() for s in self._sections)
        pool = 0 if self._staged is not None else self.bytes.numel()
        return pool + 8 * indices + (0 if self._staged is None else self._staged.numel())

    def capture(self, slot: Tensor, row: int, boundary: int) -> None:
        """The state at `boundary` out of a slot (uint8 [slot_bytes]) whose rings still have it."""
        target = self.bytes[row] if self._staged is None else self._staged
        for section in self._sections:
            torch.index_select(
                self._row_view(slot, section),
                0,
                section.places(boundary, self.layout.unit_bytes),
                out=self._rows(target, section),
            )
        if self._staged is not None:
            self.bytes[row].copy_(self._staged, non_blocking=True)

    def restore(self, slot: Tensor, row: int, boundary: int) -> None:
        """A snapshot of `boundary` into a slot; other bytes of the slot stay."""
        source = self.bytes[row]
        if self._staged is not None:
            source = self._staged.copy_(source, non_blocking=True)
        for section in self._sections:
            places = section.places(boundary, self.layout.unit_bytes)
            self._row_view(slot, section)[places] = self._rows(source, section)

    def runs(self, run: Run) -> Tensor:
        """One run in every snapshot: uint8 [snapshots, rows, width]."""
        return self.bytes.as_strided(
            (self.rows, run.rows, run.width_bytes),
            (self.layout.row_bytes, run.width_bytes, 1),
            run.offset_bytes,
        )

    def _section(self, runs: tuple[Run, ...]) -> _Section:
        unit = self.layout.unit_bytes
        base = [run.slot_offset_bytes // unit for run in runs for _ in range(run.rows)]
        back = [run.rows - nth for run in runs for nth in range(run.rows)]
        ring = [run.ring_rows for run in runs for _ in range(run.rows)]
        return _Section(
            runs[0].offset_bytes,
            len(base),
            runs[0].width_bytes,
            *(torch.tensor(column, device=self.device) for column in (base, back, ring)),
        )

    def _row_view(self, slot: Tensor, section: _Section) -> Tensor:
        """The slot as rows of the section's width, one starting at every unit."""
        unit = self.layout.unit_bytes
        units, width = slot.view(_UNIT_DTYPES[unit]), section.width // unit
        return units.as_strided((len(units) - width + 1, width), (1, 1))

    def _rows(self, snapshot: Tensor, section: _Section) -> Tensor:
        span = snapshot[section.first : section.first + section.rows * section.width]
        return span.view(_UNIT_DTYPES[self.layout.unit_bytes]).view(section.rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A boundary that a wide step crosses: of batch row `batch_row`, into snapshot `row`."""

    batch_row: int
    boundary: int
    row: int


class WideCaptures:
    """Snapshots taken while a chunk runs: it crosses boundaries whose state is in no ring once it
    is over. Each layer hands over its part around its `append`."""

    def __init__(
        self,
        pool: SnapshotPool,
        captures: Sequence[Capture],
        *,
        slots: Sequence[int],
        starts: Sequence[int],
        first_rows: Sequence[int],
    ) -> None:
        self.captures = tuple(captures)
        self.layers: set[int] = set()
        self._pool = pool
        device, before = pool.device, pool.layout.schema.model.window - 1

        def column(values: list[int]) -> Tensor:
            host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
            return host.to(device, non_blocking=True)

        batch = [c.batch_row for c in captures]
        self._rows = column([c.row for c in captures])
        self._slots = column([slots[b] for b in batch])
        self._boundaries = column([c.boundary for c in captures])
        # token row of the boundary: the first token that is not in the snapshot
        self._ends = column(
            [first_rows[b] + c.boundary - starts[b] for b, c in zip(batch, captures, strict=True)]
        )
        self._first_tokens = column([first_rows[b] for b in batch])
        chunk_end = self._ends + before * (column(batch) + 1)
        self._chunk_rows = chunk_end[:, None] + torch.arange(-before, 0, device=device)

    def take_tails(self, layer: int, slot_arena: Tensor, writes: Sequence[CompressorWrite]) -> None:
        """The previous stream of the last group of each boundary; before the tails are written."""
        self.layers.add(layer)
        for write in writes:
            if write.layout.overlap:
                kind = "index_tail" if write.layout.hadamard else "tail"
                values, gates = self._last_groups(slot_arena, write)
                for value, rows in (("k", values), ("z", gates)):
                    self._store(self._pool.layout.run(layer, f"{kind}_{value}"), rows)  # type: ignore[arg-type]

    def take_window(self, layer: int, chunk: Tensor, page: Page) -> None:
        """The window rows of each boundary, from the staged chunk; after the window is written."""
        self.layers.add(layer)
        for kind, width, offset in (
            ("window_data", page.format.data_row_bytes, page.offset_bytes),
            ("window_scales", page.format.scale_row_bytes, page.scale_offset_bytes),
        ):
            run = self._pool.layout.run(layer, kind)  # type: ignore[arg-type]
            if run is not None:
                rows = chunk.as_strided((page.rows, width), (width, 1), offset)
                self._store(run, rows[self._chunk_rows])

    def _last_groups(self, slot_arena: Tensor, write: CompressorWrite) -> tuple[Tensor, Tensor]:
        """Values and biased gates fp32 [captures, ratio, width]: what the tails would hold."""
        layout, c, z = write.layout, write.c, write.z
        assert c is not None
        assert z is not None
        nth = torch.arange(-layout.ratio, 0, device=slot_arena.device)
        token = self._ends[:, None] + nth
        is_new = (token >= self._first_tokens[:, None])[..., None]
        token = token.clamp_min(0)
        ring_row = (self._boundaries[:, None] + nth) % layout.b_rows
        at = (self._slots[:, None], ring_row)
        old_k, old_z = (
            _ring(slot_arena, layout, offset)[at]
            for offset in (layout.kb_offset_bytes, layout.zb_offset_bytes)
        )
        width = layout.width
        new_z = z[:, :width][token] + write.ape[:, :width]  # the group starts at row 0 of ape
        return torch.where(is_new, c[:, :width][token], old_k), torch.where(is_new, new_z, old_z)

    def _store(self, run: Run | None, rows: Tensor) -> None:
        assert run is not None
        target = self._pool.runs(run)
        data = rows.contiguous().view(torch.uint8).view(len(self.captures), run.rows, -1)
        if target.device == data.device:
            target[self._rows] = data
        else:
            for capture, taken in zip(self.captures, data, strict=True):
                target[capture.row].copy_(taken, non_blocking=True)


def _ring(slot_arena: Tensor, layout: CompressorLayout, offset_bytes: int) -> Tensor:
    return slot_arena.view(torch.float32).as_strided(
        (slot_arena.shape[0], layout.b_rows, layout.width),
        (slot_arena.stride(0) // 4, layout.width, 1),
        offset_bytes // 4,
    )
