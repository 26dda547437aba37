"""Snapshots: the state of requests at block boundaries, in a bounded arena of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsv4.cache.pages import Page
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.snapshot_layout import (
    TAIL_SLICES,
    RingSlice,
    SnapshotLayout,
    window_slices,
)
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, require_count
from dsv4.ops.calls import CompressorWrite
from dsv4.ops.columns import staged_row
from dsv4.reference.pages import ring_rows

Where = Literal["device", "host"]
_UNIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Section:
    """Slices of one width, in units of the layout: its rows are `span` of all rows of a snapshot,
    and lie at multiples of `width` behind `base`. `kept` is where they are stored, [snapshots,
    rows, width], or [rows, width] of the one that is staged."""

    span: slice
    width: int
    base: Tensor
    kept: Tensor

    def places(self, nth: Tensor) -> Tensor:
        """Where the rows start in a slot, given which row of its ring each is."""
        return torch.add(self.base, nth[self.span], alpha=self.width)

    def slot_rows(self, units: Tensor) -> Tensor:
        """A slot as rows of the section's width, one starting at every unit."""
        return units.as_strided((units.shape[0] - self.width + 1, self.width), (1, 1))


class SnapshotPool:
    """uint8 [rows, row_bytes], zeroed, on the device or in pinned host memory.

    Copies are ordered like kernels on the current stream and wait for nothing.
    """

    def __init__(
        self, schema: CacheSchema, rows: int, *, where: Where, device: torch.device
    ) -> None:
        require_count("snapshots", rows, at_least=0)
        if where not in ("device", "host"):
            raise InvalidInput(f"snapshots cannot be kept in {where!r}: use 'device' or 'host'")
        self.layout = SnapshotLayout(schema)
        self.rows, self.where, self.device = rows, where, device
        apart = where == "host" and device.type == "cuda"
        self.bytes = torch.zeros(
            (rows, self.layout.row_bytes),
            dtype=torch.uint8,
            device="cpu" if where == "host" else device,
            pin_memory=apart,
        )
        self._staged = (
            torch.zeros((self.layout.row_bytes,), dtype=torch.uint8, device=device)
            if apart
            else None
        )
        parts = [part for section in self.layout.sections for part in section] if rows else []
        # row i is token P - `back[i]`, in a ring of `ring[i]` rows
        self._back, self._ring = (
            torch.tensor(column, dtype=torch.int64, device=device)
            for column in (
                [part.rows - nth for part in parts for nth in range(part.rows)],
                [part.ring_rows for part in parts for _ in range(part.rows)],
            )
        )
        self._unit = _UNIT_DTYPES[self.layout.unit_bytes]
        self._sections = tuple(self._make_sections()) if rows else ()

    @classmethod
    def bytes_on_device(
        cls, schema: CacheSchema, options: PrefixOptions, device: torch.device
    ) -> int:
        """What `memory_bytes` of a pool with these options says. Allocates nothing."""
        layout = SnapshotLayout(schema)
        rows = options.rows
        if not rows:
            return 0 if options.where == "device" or device.type != "cuda" else layout.row_bytes
        apart = options.where == "host" and device.type == "cuda"
        indices = 3 * sum(part.rows for section in layout.sections for part in section)
        return 8 * indices + layout.row_bytes * (1 if apart else rows)

    def memory_bytes(self) -> int:
        """Bytes on the device."""
        indices = 3 * self._ring.numel()
        pool = 0 if self._staged is not None else self.bytes.numel()
        return pool + 8 * indices + (0 if self._staged is None else self._staged.numel())

    def capture(self, slot: Tensor, row: int, boundary: int) -> None:
        """The state at `boundary` out of a slot (uint8 [slot_bytes]) whose rings still have it."""
        units, nth = slot.view(self._unit), self._ring_rows(boundary)
        for section in self._sections:
            kept = section.kept if self._staged is not None else section.kept[row]
            torch.index_select(section.slot_rows(units), 0, section.places(nth), out=kept)
        if self._staged is not None:
            self.bytes[row].copy_(self._staged, non_blocking=True)

    def restore(self, slot: Tensor, row: int, boundary: int) -> None:
        """A snapshot of `boundary` into a slot; other bytes of the slot stay."""
        if self._staged is not None:
            self._staged.copy_(self.bytes[row], non_blocking=True)
        units, nth = slot.view(self._unit), self._ring_rows(boundary)
        for section in self._sections:
            kept = section.kept if self._staged is not None else section.kept[row]
            section.slot_rows(units)[section.places(nth)] = kept

    def _ring_rows(self, boundary: int) -> Tensor:
        """Which row of its ring each row of a snapshot at `boundary` is."""
        return torch.rsub(self._back, boundary).remainder_(self._ring)

    def rows_of(self, part: RingSlice) -> Tensor:
        """One slice in every snapshot: uint8 [snapshots, rows, width]."""
        return self.bytes.as_strided(
            (self.rows, part.rows, part.width_bytes),
            (self.layout.row_bytes, part.width_bytes, 1),
            part.offset_bytes,
        )

    def _make_sections(self) -> Iterator[_Section]:
        unit, first = self.layout.unit_bytes, 0
        rows = self.bytes if self._staged is None else self._staged
        for parts in self.layout.sections:
            base = [part.slot_offset_bytes // unit for part in parts for _ in range(part.rows)]
            at, width = parts[0].offset_bytes, parts[0].width_bytes
            span = rows[..., at : at + len(base) * width].view(self._unit)
            yield _Section(
                slice(first, first + len(base)),
                width // unit,
                torch.tensor(base, device=self.device),
                span.unflatten(-1, (len(base), width // unit)),
            )
            first += len(base)


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
        device, window = pool.device, pool.layout.schema.model.window

        def column(values: list[int]) -> Tensor:
            host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
            return host.to(device, non_blocking=True)

        batch_rows = [c.batch_row for c in captures]
        self._rows = column([c.row for c in captures])
        self._slots = column([slots[b] for b in batch_rows])
        self._boundaries = column([c.boundary for c in captures])
        self._first_tokens = column([first_rows[b] for b in batch_rows])
        begins = column([starts[b] for b in batch_rows])
        # token row of the boundary: the first token that is not in the snapshot
        self._ends = self._first_tokens + self._boundaries - begins
        # the last window - 1 rows in front of the boundary, [captures, window - 1]
        self._staged_rows = staged_row(
            self._first_tokens[:, None],
            begins[:, None],
            column(batch_rows)[:, None],
            self._boundaries[:, None] + torch.arange(1 - window, 0, device=device),
            window,
        )

    def take_tails(self, layer: int, slot_arena: Tensor, writes: Sequence[CompressorWrite]) -> None:
        """The previous stream of the last group of each boundary; before the tails are written."""
        self.layers.add(layer)
        for write in writes:
            if write.layout.overlap:
                kinds = TAIL_SLICES["index" if write.layout.hadamard else "main"]
                for kind, rows in zip(kinds, self._last_groups(slot_arena, write), strict=True):
                    self._store(self._pool.layout.ring_slice(layer, kind), rows)

    def take_window(self, layer: int, staging: Tensor, page: Page) -> None:
        """The window rows of each boundary, from the staging; after the window is written."""
        self.layers.add(layer)
        for kind, width, offset in window_slices(page):
            part = self._pool.layout.ring_slice(layer, kind)
            if part is not None:
                rows = staging.as_strided((page.rows, width), (width, 1), offset)
                self._store(part, rows[self._staged_rows])

    def _last_groups(self, slot_arena: Tensor, write: CompressorWrite) -> tuple[Tensor, Tensor]:
        """Values and biased gates fp32 [captures, ratio, width]: what the tails would hold."""
        layout, c, z = write.layout, write.c, write.z
        assert c is not None
        assert z is not None
        assert write.ape is not None
        assert layout.kb is not None
        assert layout.zb is not None
        nth = torch.arange(-layout.ratio, 0, device=slot_arena.device)
        token = self._ends[:, None] + nth
        is_new = (token >= self._first_tokens[:, None])[..., None]
        token = token.clamp_min(0)
        width = layout.width
        ring_row = (self._boundaries[:, None] + nth) % layout.kb.rows
        at = (self._slots[:, None], ring_row)
        old_k, old_z = (ring_rows(slot_arena, ring, width)[at] for ring in (layout.kb, layout.zb))
        new_z = z[:, :width][token] + write.ape[:, :width]  # the group starts at row 0 of ape
        return torch.where(is_new, c[:, :width][token], old_k), torch.where(is_new, new_z, old_z)

    def _store(self, part: RingSlice | None, rows: Tensor) -> None:
        assert part is not None
        target = self._pool.rows_of(part)
        data = rows.contiguous().view(torch.uint8).view(len(self.captures), part.rows, -1)
        if target.device == data.device:
            target[self._rows] = data
        else:
            for capture, taken in zip(self.captures, data, strict=True):
                target[capture.row].copy_(taken, non_blocking=True)
