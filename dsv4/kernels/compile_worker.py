"""A process that compiles: reads jobs from its input and leaves binaries in Triton's cache.

It has no GPU. A driver that knows only which target to compile for replaces Triton's own. So
kernels take the same path through Triton as when they are launched, and their binaries lie where a
launch looks for them.
"""

from __future__ import annotations

import os
import pickle
import sys
from importlib import import_module
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from dsv4.kernels.cache_key import cache_key
from dsv4.kernels.target import LAUNCHERS_ARE_COMPILED, TARGETS


class Tiles(NamedTuple):
    """A tensor descriptor without its tensor."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: list[int]
    layout: Any

    def descriptor(self) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        base = MockTensor(self.dtype, self.shape)
        return TensorDescriptor(base, [*self.shape], [*self.strides], self.block_shape, self.layout)


class Job(NamedTuple):
    """One binary. Among the arguments, a type stands for an aligned tensor of that type."""

    module: str
    name: str
    target: str
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


class NoDevice:
    """A driver for a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_job(job: Job) -> str | None:
    """Returns where the binary lies; None if Triton does not say."""
    target = TARGETS[job.target]
    driver.set_active(NoDevice(target.triton_target))
    kernel = getattr(import_module(job.module), job.name)
    cache_key(kernel)  # before Triton makes it
    options = target.options(**job.options)
    arguments = [a.descriptor() if isinstance(a, Tiles) else a for a in job.arguments]
    binary = kernel.warmup(*arguments, grid=(1,), **job.constants, **options)
    if LAUNCHERS_ARE_COMPILED and target.backend == "cuda":
        _compile_launcher(binary)
    files = getattr(binary, "metadata_group", {})
    return next((path for name, path in files.items() if name.endswith(".json")), None)


def _compile_launcher(binary: Any) -> None:
    """The C function that starts a binary. Triton compiles one for each signature and caches it
    too. Without the CUDA driver it cannot be linked; then the first launch tries again and reports
    it."""
    from triton.backends.nvidia.driver import CudaLauncher

    try:
        CudaLauncher(binary.src, binary.metadata)
    except Exception:
        return


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what compilers print must not end up among the answers
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            path = compile_job(job)
        except Exception:
            path = None
        pickle.dump(path, answers)
        answers.flush()


if __name__ == "__main__":
    # pickled classes must belong to the module, not to the `__main__` that it is here
    from dsv4.kernels import compile_worker

    compile_worker.main()
