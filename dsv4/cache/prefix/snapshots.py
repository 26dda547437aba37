"""The pool of snapshots: states of requests at block boundaries, in a bounded arena of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import LiveRows, SnapshotLayout
from dsv4.errors import InvalidInput, require_count

Where = Literal["device", "host"]
_UNIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Group:
    """Rings of one width, of `rows` rows each in rings of `ring` rows; all in units of the layout.

    `places` [rings, 2 · ring]: where the rows of each ring start in a slot, twice around, so
    that the newest ones up to any boundary lie side by side. `kept` is where they are stored,
    [rows, width] of each snapshot, or of the one that is staged.
    """

    rows: int
    ring: int
    width: int
    places: Tensor
    kept: tuple[Tensor, ...]

    def places_at(self, boundary: int) -> Tensor:
        """Where the rows of a state at `boundary` start in a slot."""
        end = self.ring + boundary % self.ring
        return self.places[:, end - self.rows : end].reshape(-1)

    def slot_rows(self, units: Tensor) -> Tensor:
        """A slot as rows of the group's width, one starting at every unit."""
        if self.width == 1:
            return units.unsqueeze(1)
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
        self._unit = _UNIT_DTYPES[self.layout.unit_bytes]
        self._groups = tuple(self._make_groups()) if rows else ()

    @classmethod
    def bytes_on_device(
        cls, schema: CacheSchema, options: PrefixOptions, device: torch.device
    ) -> int:
        """What `memory_bytes` of a pool with these options would be. Allocates nothing."""
        layout = SnapshotLayout(schema)
        rows = options.rows
        if not rows:
            return 0 if options.where == "device" or device.type != "cuda" else layout.row_bytes
        apart = options.where == "host" and device.type == "cuda"
        indices = sum(2 * part.ring_rows for section in layout.sections for part in section)
        return 8 * indices + layout.row_bytes * (1 if apart else rows)

    def memory_bytes(self) -> int:
        """Bytes on the device."""
        indices = sum(group.places.numel() for group in self._groups)
        pool = 0 if self._staged is not None else self.bytes.numel()
        return pool + 8 * indices + (0 if self._staged is None else self._staged.numel())

    def capture(self, slot: Tensor, row: int, boundary: int) -> None:
        """Copies the state at `boundary` from a slot (uint8 [slot_bytes]) whose rings still have
        it."""
        units, at = slot.view(self._unit), row if self._staged is None else 0
        for group in self._groups:
            places = group.places_at(boundary)
            torch.index_select(group.slot_rows(units), 0, places, out=group.kept[at])
        if self._staged is not None:
            self.bytes[row].copy_(self._staged, non_blocking=True)

    def restore(self, slot: Tensor, row: int, boundary: int) -> None:
        """Copies a snapshot of `boundary` into a slot; other bytes of the slot stay."""
        if self._staged is not None:
            self._staged.copy_(self.bytes[row], non_blocking=True)
        units, at = slot.view(self._unit), row if self._staged is None else 0
        for group in self._groups:
            group.slot_rows(units)[group.places_at(boundary)] = group.kept[at]

    def rows_of(self, part: LiveRows) -> Tensor:
        """One ring's rows in every snapshot: uint8 [snapshots, rows, width]."""
        return self.bytes.as_strided(
            (self.rows, part.rows, part.width_bytes),
            (self.layout.row_bytes, part.width_bytes, 1),
            part.offset_bytes,
        )

    def _make_groups(self) -> Iterator[_Group]:
        """One for all rings of a section that lie side by side and are alike."""
        unit = self.layout.unit_bytes
        snapshots = self.bytes if self._staged is None else self._staged[None]
        for section in self.layout.sections:
            for (rows, ring), alike in groupby(section, lambda part: (part.rows, part.ring_rows)):
                parts = list(alike)
                at, width = parts[0].offset_bytes, parts[0].width_bytes // unit
                count = len(parts) * rows
                span = snapshots[:, at : at + count * width * unit].view(self._unit)
                base = torch.tensor([part.slot_offset_bytes // unit for part in parts])
                places = base[:, None] + torch.arange(2 * ring) % ring * width
                kept = span.unflatten(1, (count, width)).unbind()
                yield _Group(rows, ring, width, places.to(self.device), kept)
