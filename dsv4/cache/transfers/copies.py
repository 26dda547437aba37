"""Copies rows of the device to host memory and back, in the background; where those of blocks
are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsv4.tiers.record import address

if TYPE_CHECKING:
    from dsv4.tiers.host import HostTier
    from dsv4.tiers.loan import Loan

# copies that are begun together, and the driver's call for it
AT_ONCE = 32
_BATCH = "cuMemcpyBatchAsync_v2"
# what a record is of: a row, or what follows each other in several of them, of which one may be in
# host memory
Rows = Tensor | tuple[Tensor, ...]
# torch leaves these types untyped; None stands for a copy that is finished when the call returns
_Event = Any


class HasPayload(Protocol):
    """Pieces of host memory that follow each other: of a record, or of a row."""

    @property
    def payload(self) -> tuple[memoryview, ...]: ...


class Row(NamedTuple):
    """A row of host memory."""

    payload: tuple[memoryview, ...]


class Mark:
    """The position of a stream when the mark was made."""

    __slots__ = ("_event",)

    def __init__(self, event: _Event = None) -> None:
        self._event = event

    @property
    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Blocks the host."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self) -> None:
        """Makes what is launched on its device's current stream from now on wait for it; the host
        does not wait."""
        if self._event is not None and not self.passed:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)


class Copies:
    """Copies between rows on a device and pieces of one host memory.

    On a GPU each direction has a stream of its own, which first waits for what is on the current
    stream now: the step that wrote a row, or the last one that read it. Elsewhere a copy is
    finished when the call returns.
    """

    def __init__(self, device: torch.device, memory: memoryview) -> None:
        self._host = torch.frombuffer(memory, dtype=torch.uint8)
        self._start = address(memory)
        self._device = device
        on_gpu = device.type == "cuda"
        self._down: Any = torch.cuda.Stream(device) if on_gpu else None
        self._up: Any = torch.cuda.Stream(device) if on_gpu else None

    def down(self, rows: Iterable[tuple[Rows, HasPayload]]) -> Mark:
        """Copies rows of the device into the payloads of records, or into rows."""
        return self._copy(self._down, [(pieces, row, True) for row, pieces in rows])

    def down_into(self, rows: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        """Copies rows of the device into other host memory, from `host_bytes`."""
        if self._down is None:
            for row, host in rows:
                host.copy_(row)
            return Mark()
        self._down.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._down):
            for row, host in rows:
                if row.device.type == "cpu":  # torch copies within the host at once
                    self._down.synchronize()
                host.copy_(row, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._down)
        return Mark(event)

    def host_bytes(self, count: int) -> Tensor:
        """Host memory that a GPU can copy to directly."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=self._down is not None)

    def up(self, rows: Iterable[tuple[Rows, HasPayload]]) -> Mark:
        """Copies payloads of records into rows of the device."""
        return self._copy(self._up, [(pieces, row, False) for row, pieces in rows])

    def _copy(self, stream: Any, rows: list[tuple[HasPayload, Any, bool]]) -> Mark:
        if any(isinstance(row, tuple) for _, row, _ in rows):
            rows = list(_split(rows))
        if stream is None:
            self._launch(rows)
            return Mark()
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            if (driver := _driver()) is not None:
                _launch_by_driver(driver, stream.cuda_stream, rows)
            else:
                self._launch(rows)
            event = torch.cuda.Event()
            event.record(stream)
        return Mark(event)

    def _launch(self, rows: list[tuple[HasPayload, Tensor, bool]]) -> None:
        for parts, row, down in rows:
            at = 0
            for piece in filter(len, parts.payload):
                start = address(piece) - self._start
                host = self._host[start : start + piece.nbytes]
                device = row[at : at + piece.nbytes]
                target, source = (host, device) if down else (device, host)
                target.copy_(source, non_blocking=True)
                at += piece.nbytes

    def mark(self) -> Mark:
        """A mark at the current position of the current stream."""
        if self._down is None:
            return Mark()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return Mark(event)

    def finish(self) -> None:
        """Waits until no copy is running. Blocks the host."""
        for stream in (self._down, self._up):
            if stream is not None:
                stream.synchronize()


@cache
def _driver() -> Any:
    """CUDA's driver, or None on a GPU of another maker."""
    if torch.version.cuda is None:
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    where, size, many = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
    driver.cuMemcpyAsync.argtypes = (where, where, size, ctypes.c_void_p)
    if hasattr(driver, _BATCH):  # from CUDA 13 on
        getattr(driver, _BATCH).argtypes = (many, many, many, size, many, many, size, many)
    return driver


def _launch_by_driver(
    driver: Any, stream: int, rows: list[tuple[HasPayload, Tensor, bool]]
) -> None:
    """A copy of a block takes 8 µs, and torch's call that begins one takes as long. So one call of
    the driver begins AT_ONCE of them, and these are copied while the next ones are prepared."""
    copies: list[tuple[int, int, int]] = []
    for parts, row, down in rows:
        device = row.data_ptr()
        for piece in parts.payload:
            if count := piece.nbytes:
                host = ctypes.addressof(ctypes.c_char.from_buffer(piece))
                copies.append((host, device, count) if down else (device, host, count))
                device += count
        if len(copies) >= AT_ONCE:
            _begin(driver, stream, copies)
            copies.clear()
    if copies:
        _begin(driver, stream, copies)


def _split(
    rows: list[tuple[HasPayload, Rows, bool]],
) -> Iterator[tuple[HasPayload, Tensor, bool]]:
    """The same with one row each: the pieces that belong to it."""
    for parts, row, down in rows:
        pieces = [*reversed(parts.payload)]
        for tensor in row if isinstance(row, tuple) else (row,):
            found, left = list[memoryview](), tensor.numel()
            while left and pieces:
                piece = pieces.pop()
                found.append(piece[:left])
                if piece.nbytes > left:
                    pieces.append(piece[left:])
                left -= found[-1].nbytes
            yield Row(tuple(found)), tensor, down


def _begin(driver: Any, stream: int, copies: list[tuple[int, int, int]]) -> None:
    """With one call, or with one each where the driver has no such call or refuses it."""
    if len(copies) > 1 and hasattr(driver, _BATCH):
        targets, sources, counts = (
            (ctypes.c_uint64 * len(copies))(*column) for column in zip(*copies, strict=True)
        )
        # in stream order; no location hints, no flags
        attributes, first = (ctypes.c_int32 * 6)(1), ctypes.c_size_t(0)
        where = ctypes.addressof(first)
        batch = getattr(driver, _BATCH)
        if not batch(targets, sources, counts, len(copies), attributes, where, 1, stream):
            return
    for target, source, count in copies:
        if code := driver.cuMemcpyAsync(target, source, count, stream):
            raise RuntimeError(f"CUDA error {code}: {count} bytes cannot be copied")


class Landing(Protocol):
    """A block in flight the end of whose record stays where it arrives, in host memory."""

    @property
    def waits(self) -> bool:
        """Whether there may be memory for it soon."""

    def lend(self) -> Loan | None:
        """Memory for the end of a record that is brought from below; None if there is none now."""

    def take_over(self, loan: Loan) -> bool:
        """A record is there, and what is not its loan is about to be copied. Whether there is
        memory for the loan, if a block in flight of the same tokens has its own already."""

    def whole(self) -> Rows | None:
        """Where a record without a loan arrives; None without memory for it."""


class BlockMemory:
    """Blocks that are one row of the device each."""

    shares = False  # whether records of blocks have loans
    loan_bytes = 0  # of each

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def share(self, host: HostTier) -> tuple[memoryview, ...]:
        """Records of this tier may have their loans in memory of blocks, which is returned."""
        return ()

    def whole(self, block_id: int) -> Rows:
        """All bytes of a block."""
        return self._rows[block_id]

    def source(self, block_id: int) -> Rows | None:
        """What must be copied for a record of the block; None if it has to wait."""
        return self.whole(block_id)

    def loan(self, block_id: int) -> Loan | None:
        """The rest of the record, in memory where it is already."""
        return None

    def target(self, block_id: int) -> Rows:
        """Where what is copied for a record arrives."""
        return self.whole(block_id)

    def landing(self, block_id: int, owner: bytes) -> Landing | None:
        """A block in flight, for a prompt of this owner."""
        return None

    def pump(self) -> None:
        """Advances what `source` waits for."""
