"""A GPU whose side streams do everything as late as they may: what is launched there is done when
somebody waits for it, or at a moment that is drawn. The current stream does everything at once.

What reads something before it waited, or writes what is still to be read, has other bits then. What
a side stream is given must come after a wait for the current stream, which is checked.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.transfers.copies import Copies
from dsv4.ops.calls import Staging

VIEWS = ("view", "select", "slice", "as_strided", "alias", "detach", "unsqueeze", "expand")


class Stream:
    """A queue of calls."""

    def __init__(self, gpu: LateGpu, name: str) -> None:
        self.gpu, self.name = gpu, name
        self.launched = self.done = 0
        self.has_waited = True  # for the current stream, since something was launched here last
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, call: Callable[[], None]) -> None:
        self.launched += 1
        self._queue.append(call)
        if self is self.gpu.main:
            self.run()
        else:
            self.gpu.put_off += 1
            self.gpu.come_along()

    def run(self, until: int | None = None) -> None:
        """Does what was launched, up to a number."""
        while self._queue and self.done < (self.launched if until is None else until):
            self.done += 1
            call = self._queue.popleft()
            with self.gpu.doing():
                call()

    def wait_event(self, event: Event) -> None:
        if event.stream is self:
            return
        if event.stream is self.gpu.main:
            self.has_waited = True
        self.launch(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.run()


class Event:
    """A position of a stream."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self.device = "late"

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, stream.launched

    def query(self) -> bool:
        self._gpu.come_along()
        return self.stream.done >= self.at

    def synchronize(self) -> None:
        self.stream.run(self.at)


class LateGpu:
    """`early` is how often a side stream does something before it must, 0 to 1."""

    def __init__(self, seed: int = 0, early: float = 0.0) -> None:
        self._random, self._early = random.Random(seed), early
        self._is_doing = False
        self.put_off = 0  # what was launched on side streams
        self.main = self.current = Stream(self, "main")
        self._sides: list[Stream] = []

    def make_late(self, manager: KVCacheManager) -> None:
        """All copies of this manager that run beside its steps: to and from host memory, of tiers,
        and what comes up for chunks."""
        residency, backend = manager._parts.residency, manager._parts.backend
        assert residency is not None
        self._make_copies_late(residency.copies.host._copies)
        if manager.tiers:
            self._make_copies_late(manager.tiers.route.copies)
        for lane in manager.memory.lanes:
            assert lane.entries is not None
            lane.entries.chunks.side._stream = self._side("chunks")
        stage = backend.stage

        def launched(call: Staging) -> None:
            self.current.launch(partial(stage, call))

        backend.stage = launched  # type: ignore[method-assign]

    def _make_copies_late(self, copies: Copies) -> None:
        copies._down, copies._up = self._side("down"), self._side("up")

    def _side(self, name: str) -> Stream:
        self._sides.append(Stream(self, name))
        return self._sides[-1]

    def come_along(self) -> None:
        """Side streams may do something now."""
        if self._is_doing:
            return
        for stream in self._sides:
            while stream.done < stream.launched and self._random.random() < self._early:
                stream.run(stream.done + 1)

    @contextmanager
    def doing(self) -> Iterator[None]:
        before, self._is_doing = self._is_doing, True
        try:
            yield
        finally:
            self._is_doing = before

    @property
    def is_doing(self) -> bool:
        return self._is_doing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """What is launched inside goes to a side stream."""
        assert stream.has_waited, f"{stream.name} does not wait for what was launched before"
        before, self.current = self.current, stream
        try:
            with _PutOff(self):
                yield
        finally:
            self.current, stream.has_waited = before, False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In place of torch's streams and events."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
            patch.setattr(torch.cuda, "stream", self.stream)
            patch.setattr(torch.cuda, "Event", lambda: Event(self))
            patch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
            patch.setattr("dsv4.cache.transfers.copies._driver", lambda: None)
            yield


class _PutOff(TorchDispatchMode):
    """Copies go to the current stream's queue. Anything else than views would be done at once."""

    def __init__(self, gpu: LateGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if self._gpu.is_doing or name in VIEWS:
            return call()
        assert name == "copy_", f"{name} on a side stream"
        self._gpu.current.launch(call)
        return args[0]
