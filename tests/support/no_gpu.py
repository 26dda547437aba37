"""A GPU that starts nothing and writes down what it was told to start: the host's side of launches
without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl

from dsv4.cache import assembly
from dsv4.kernels import backend, index_scores, launch
from dsv4.kernels.backend import TritonBackend
from dsv4.kernels.target import processors

PROCESSORS = 132


class Started(NamedTuple):
    """A launch as a binary was told of it; tensors as addresses."""

    kernel: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    stream: int


class NoGpu:
    """Stands for Triton's driver and, as `active`, for its device."""

    def __init__(self) -> None:
        self.started: list[Started] = []
        self.asked: list[launch.Launch] = []  # what was compiled
        self.active = self
        self.device = 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 1000 + device

    def compiled(self, asked: launch.Launch) -> Binary:
        self.asked.append(asked)
        return Binary(self, asked)


class Binary:
    """What Triton's CompiledKernel offers."""

    packed_metadata = ("metadata",)

    def __init__(self, gpu: NoGpu, asked: launch.Launch) -> None:
        self._gpu, self.name = gpu, asked.kernel.fn.__name__
        self.function = id(self)

    def run(self, x: int, y: int, z: int, stream: int, *told: Any) -> None:
        function, metadata, _, enter, leave, *arguments = told
        assert stream == self._gpu.get_current_stream(self._gpu.device)
        assert (function, metadata) == (self.function, self.packed_metadata)
        assert enter is leave is None
        self._gpu.started.append(Started(self.name, (x, y, z), tuple(arguments), stream))

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        stream = self._gpu.get_current_stream(self._gpu.device)

        def start(*arguments: Any) -> None:
            places = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            self.run(*grid, stream, self.function, self.packed_metadata, *[None] * 3, *places)

        return start


def _backend(device: torch.device, *, hopper: bool, batch_invariant: bool) -> TritonBackend:
    found = TritonBackend(device, batch_invariant=batch_invariant)
    if hopper:
        found._attend, found._index_scores = (
            backend._SpecialKernel("attend"),
            backend._SpecialKernel("index_scores"),
        )
        found._wide_attend = backend._SpecialKernel("attend", "wide")
        found._whole_attend = backend._SpecialKernel("attend", "whole")
        found._wide_scores = backend._SpecialKernel("index_scores", "wide")
    return found


@contextmanager
def no_gpu(*, hopper: bool = False) -> Iterator[NoGpu]:
    """Inside, managers on the CPU have the Triton backend, whose launches only are written down.
    With `hopper` it has that GPU's own kernels."""
    gpu = NoGpu()
    properties = SimpleNamespace(multi_processor_count=PROCESSORS)
    processors.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(backend, "INTERPRETED", tl.constexpr(False))
        patch.setattr(launch, "INTERPRETED", tl.constexpr(False))
        patch.setattr(launch, "compiled", gpu.compiled)
        patch.setattr(launch, "driver", gpu)
        patch.setattr(launch, "_binaries", {})
        patch.setattr(torch.cuda, "current_device", gpu.get_current_device)
        patch.setattr(index_scores, "_programs", lambda device: 4 * PROCESSORS)
        patch.setattr(
            assembly,
            "load_backend",
            lambda name, device, **options: _backend(device, hopper=hopper, **options),
        )
        yield gpu
    processors.cache_clear()
