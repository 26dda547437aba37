"""Where entries of blocks may be but on the device: one row each, in the form of the device's rows.
Host memory is the only such place."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from dsv4.cache.transfers.copies import Copies, Mark, Row
from dsv4.errors import InvalidInput
from dsv4.ops.device import on_device
from dsv4.tiers import pin
from dsv4.units import format_bytes


class EntryRows(Protocol):
    """All that is asked of such a place. `bytes` uint8 [rows, row_bytes] is memory that kernels on
    the device read and that torch copies to the device. What uses it orders its work with marks."""

    bytes: Tensor

    def down(self, rows: Iterable[tuple[Tensor, int]]) -> Mark:
        """Begins to copy rows of the device to rows with these numbers, after what is on the
        current stream. The mark is passed when they have arrived. Raises RuntimeError; some copies
        may be running then."""

    def mark(self) -> Mark:
        """A mark at the current position of the current stream."""

    def finish(self) -> None:
        """Waits until no copy is running. Blocks the host."""

    def memory_bytes(self) -> int: ...


class HostPool:
    """Host memory as such a place. The host itself reads and writes it too (`memory`, `piece`).
    Where the device is a GPU it is pinned: kernels read it, and copies run in the background.

    Raises InvalidInput if the system does not give or pin this much memory.
    """

    def __init__(self, blocks: int, row_bytes: int, device: torch.device) -> None:
        size_bytes = blocks * row_bytes
        try:
            memory = mmap.mmap(-1, size_bytes)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to pin, which can save minutes
                with suppress(OSError):  # the system has none
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self.memory = memoryview(memory)
        except (OSError, OverflowError, ValueError) as error:
            has_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            raise InvalidInput(
                f"host_memory: the system gives no piece of {format_bytes(size_bytes)} for the "
                f"entries of {blocks:,} blocks ({error}); the machine has {has_bytes:,} bytes: "
                f"ask for less"
            ) from error
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8).view(blocks, row_bytes)
        if device.type == "cuda":
            try:
                with on_device(device):
                    unpin = pin.pin(self.memory)
            except InvalidInput as error:
                raise InvalidInput(
                    f"host_memory: {format_bytes(size_bytes)} for the entries of {blocks:,} blocks "
                    f"cannot be pinned ({error}): ask for less, raise the limit of locked memory "
                    f"(ulimit -l), or build the manager without host_memory"
                ) from error
            # the driver must forget the memory before the system does, when the process ends too
            weakref.finalize(self, _let_go, unpin, device)
        self._copies = Copies(device, self.memory)
        self.mark, self.finish = self._copies.mark, self._copies.finish

    def down(self, rows: Iterable[tuple[Tensor, int]]) -> Mark:
        return self._copies.down((row, Row((self.piece(number),))) for row, number in rows)

    def piece(self, row: int) -> memoryview:
        width = self.bytes.shape[1]
        return self.memory[row * width : (row + 1) * width]

    def memory_bytes(self) -> int:
        return self.bytes.numel()


def _let_go(unpin: Callable[[], None], device: torch.device) -> None:
    """Kernels and copies that were launched may still use the memory."""
    with suppress(RuntimeError):  # after an error of the device nothing runs any more
        torch.cuda.synchronize(device)
    unpin()
