"""What the device's tables say of where each request's blocks are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.residency.host_rows import NO_ROW
from dsv4.cache.residency.places import EntryPlaces


class EntryTables:
    """`tables` of `EntriesMemory`: of each block of each slot's request its row on the device and,
    where host memory is shared with a tier, its row there. `publish` writes at once; what `note`
    and `note_left` are given is written by `send`."""

    def __init__(self, tables: Sequence[Tensor], places: EntryPlaces) -> None:
        self._tables, self._places = tables, places
        self._device, self._most_blocks = tables[0].device, tables[0].shape[1]
        self._is_cuda = self._device.type == "cuda"
        # by place in the flattened tables: rows that they do not have yet
        self._unsent: dict[int, tuple[int, int]] = {}

    def at(self, slot: int, depth: int) -> int:
        """The place of a request's block number `depth` in the flattened tables."""
        return slot * self._most_blocks + depth

    def rows_of(self, block_id: int) -> tuple[int, int]:
        """A block's rows, on the device and in host memory, as the books have them."""
        return int(self._places.row_of[block_id]), int(self._places.hosts.row_of[block_id])

    def publish(
        self, slot: int, first: int, block_ids: Sequence[int], rows: Sequence[int] = ()
    ) -> None:
        """Writes where these blocks of a slot's request are, from its block number `first` on. The
        last of them have `rows`, which were lent to them; the books have those of the others."""
        on_device = self._places.row_of[list(block_ids)].astype(np.int32)
        if rows:
            on_device[-len(rows) :] = rows
        in_host = self._places.hosts.row_of[list(block_ids)]
        for table, numbers in zip(self._tables, (on_device, in_host), strict=False):
            host = torch.from_numpy(numbers)
            if self._is_cuda:
                host = host.pin_memory()
            row = table[slot, first : first + len(block_ids)]
            row.copy_(host, non_blocking=True)
        self._forget(self.at(slot, first), self.at(slot, first + len(block_ids)))

    def note(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """The next `send` writes where these blocks of a slot's request are."""
        for at, block_id in enumerate(block_ids, self.at(slot, first)):
            self._unsent[at] = self.rows_of(block_id)

    def note_left(self, slot: int, depth: int, block_id: int) -> None:
        """The next `send` writes that this block is only in host memory."""
        self._unsent[self.at(slot, depth)] = NO_ROW, int(self._places.hosts.row_of[block_id])

    def note_rows(self, rows: dict[int, tuple[int, int]]) -> None:
        """The next `send` writes these rows, on the device and in host memory, by place."""
        self._unsent |= rows

    def send(self) -> None:
        """Writes what was noted."""
        if not self._unsent:
            return
        at = torch.tensor([*self._unsent], dtype=torch.int64, pin_memory=self._is_cuda)
        for table, numbers in zip(
            self._tables, zip(*self._unsent.values(), strict=True), strict=False
        ):
            rows = torch.tensor(numbers, dtype=torch.int32, pin_memory=self._is_cuda)
            table.view(-1).index_copy_(
                0, at.to(self._device, non_blocking=True), rows.to(self._device, non_blocking=True)
            )
        self._unsent.clear()

    def forget_slot(self, slot: int) -> None:
        """What was noted of a slot was of its previous request."""
        self._forget(self.at(slot, 0), self.at(slot + 1, 0))

    def forget(self) -> None:
        """Forgets what was noted, after an interrupt."""
        self._unsent.clear()

    def _forget(self, first: int, last: int) -> None:
        for at in [*self._unsent]:
            if first <= at < last:
                del self._unsent[at]
