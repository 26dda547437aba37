"""Rows of the device to host memory and back, while the host goes on."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from dsv4.tiers.record import Parts, address

# streams of a direction
LANES = 2
# torch has these types untyped; None stands for a copy that is over when the call returns
_Event = Any


class Mark:
    """How far a stream was when the mark was made."""

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
        """What is launched on the current stream from now on waits for it; the host does not."""
        if self._event is not None and not self.passed:
            torch.cuda.current_stream().wait_event(self._event)


class Copies:
    """Copies between rows on a device and pieces of one host memory.

    On a GPU each direction has streams of its own, which first wait for what is on the current
    stream now: the step that wrote a row, or the last one that read it. There are two, so that one
    copy begins while another ends. Elsewhere a copy is over when the call returns.
    """

    def __init__(self, device: torch.device, memory: memoryview) -> None:
        self._host = torch.frombuffer(memory, dtype=torch.uint8)
        self._start = address(memory)
        self._device = device
        lanes = LANES if device.type == "cuda" else 0
        self._down = [torch.cuda.Stream(device) for _ in range(lanes)]
        self._up = [torch.cuda.Stream(device) for _ in range(lanes)]

    def down(self, rows: Iterable[tuple[Tensor, Parts]]) -> Mark:
        """Rows of the device into the payloads of records."""
        return self._copy(self._down, [(pieces, row, True) for row, pieces in rows])

    def down_into(self, rows: Iterable[tuple[Tensor, Tensor]]) -> Mark:
        """Rows of the device into other host memory, from `host_bytes`."""
        if not self._down:
            for row, host in rows:
                host.copy_(row)
            return Mark()
        first = self._down[0]
        first.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(first):
            for row, host in rows:
                host.copy_(row, non_blocking=True)
            event = torch.cuda.Event()
            event.record(first)
        return Mark(event)

    def host_bytes(self, count: int) -> Tensor:
        """Host memory that a GPU copies to by itself."""
        return torch.empty(count, dtype=torch.uint8, pin_memory=bool(self._down))

    def up(self, rows: Iterable[tuple[Tensor, Parts]]) -> Mark:
        """Payloads of records into rows of the device."""
        return self._copy(self._up, [(pieces, row, False) for row, pieces in rows])

    def _copy(self, streams: list[Any], rows: list[tuple[Parts, Tensor, bool]]) -> Mark:
        if not streams:
            self._launch(rows)
            return Mark()
        first, current = streams[0], torch.cuda.current_stream(self._device)
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(first):
            if (driver := _driver()) is not None:
                _launch_by_driver(driver, [stream.cuda_stream for stream in streams], rows)
            else:
                self._launch(rows)
            for stream in streams[1:]:
                first.wait_stream(stream)
            event = torch.cuda.Event()
            event.record(first)
        return Mark(event)

    def _launch(self, rows: list[tuple[Parts, Tensor, bool]]) -> None:
        for parts, row, down in rows:
            at = 0
            for piece in parts.payload:
                if not piece.nbytes:
                    continue
                start = address(piece) - self._start
                host = self._host[start : start + piece.nbytes]
                device = row[at : at + piece.nbytes]
                target, source = (host, device) if down else (device, host)
                target.copy_(source, non_blocking=True)
                at += piece.nbytes

    def mark(self) -> Mark:
        """How far the current stream is."""
        if self._down is None:
            return Mark()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return Mark(event)

    def finish(self) -> None:
        """Waits until no copy is on its way. Blocks the host."""
        for stream in (*self._down, *self._up):
            stream.synchronize()


@cache
def _driver() -> Any:
    """CUDA's driver, or None on a GPU of another maker."""
    if torch.version.cuda is None:
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    address_type = ctypes.c_uint64
    driver.cuMemcpyAsync.argtypes = (address_type, address_type, ctypes.c_size_t, ctypes.c_void_p)
    return driver


def _launch_by_driver(
    driver: Any, streams: list[int], rows: list[tuple[Parts, Tensor, bool]]
) -> None:
    """A copy of a block takes 8 µs, and torch's own call as long to begin it: so this one is the
    driver's, with addresses. Row after row goes to the next stream."""
    copy = driver.cuMemcpyAsync
    for (parts, row, down), stream in zip(rows, cycle(streams), strict=False):
        device = row.data_ptr()
        for piece in parts.payload:
            count = piece.nbytes
            if not count:
                continue
            host = ctypes.addressof(ctypes.c_char.from_buffer(piece))
            target, source = (host, device) if down else (device, host)
            if code := copy(target, source, count, stream):
                raise RuntimeError(f"CUDA error {code}: {count} bytes cannot be copied")
            device += count
