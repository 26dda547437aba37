"""Interpreted launches on tensors beside which nobody may read: a load or store that leaves the
memory of its tensor ends the process, instead of meeting what happens to lie there.

Poisoned memory shows what a kernel uses; this shows what it touches. On a GPU such an access may
end in an illegal address, or not, by what is mapped.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from mmap import PAGESIZE

import pytest
import torch
from torch import Tensor

from dsv4.kernels import launch as launching
from dsv4.kernels.launch import Launch

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_C.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_C.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NOTHING, _READ_AND_WRITE, _PRIVATE_ANONYMOUS = 0, 3, 0x22
_ALIGNMENT = 16  # of a tensor's first byte, as kernels are told


class _Walled:
    """A copy of a storage that ends where nobody may read, or begins there."""

    def __init__(self, storage: torch.UntypedStorage, *, at_the_end: bool) -> None:
        self.storage, self.size = storage, storage.nbytes()
        room = -(-self.size // PAGESIZE) * PAGESIZE
        self._mapped = room + 2 * PAGESIZE
        self._base = _C.mmap(None, self._mapped, _READ_AND_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
        assert self._base != ctypes.c_void_p(-1).value, "no memory"
        for page in (self._base, self._base + PAGESIZE + room):
            assert _C.mprotect(page, PAGESIZE, _NOTHING) == 0
        self.first = self._base + PAGESIZE
        if at_the_end:
            self.first += (room - self.size) // _ALIGNMENT * _ALIGNMENT
        ctypes.memmove(self.first, storage.data_ptr(), self.size)
        buffer = (ctypes.c_uint8 * self.size).from_address(self.first)
        self._copy = torch.frombuffer(buffer, dtype=torch.uint8)

    def view_like(self, view: Tensor) -> Tensor:
        behind = view.data_ptr() - self.storage.data_ptr()
        return launching._view_like(view, self._copy, behind)

    def close(self) -> None:
        """What was written goes where it belongs."""
        ctypes.memmove(self.storage.data_ptr(), self.first, self.size)
        _C.munmap(self._base, self._mapped)


@contextmanager
def _walled(launch: Launch, *, at_the_end: bool) -> Iterator[Launch]:
    copies: dict[int, _Walled] = {}
    arguments = []
    for argument in launch.arguments:
        if isinstance(argument, Tensor) and argument.numel():
            storage = argument.untyped_storage()
            copy = copies.get(storage.data_ptr())
            if copy is None:
                copy = _Walled(storage, at_the_end=at_the_end)
                copies[storage.data_ptr()] = copy
            argument = copy.view_like(argument)
        arguments.append(argument)
    try:
        yield launch._replace(arguments=tuple(arguments))
    finally:
        for copy in copies.values():
            copy.close()


def wall_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every other interpreted launch has walls behind its tensors, the others
    before them."""
    run, sides = Launch._run, itertools.cycle((True, False))

    def walled(launch: Launch) -> None:
        if not launching.INTERPRETED.value:
            run(launch)
            return
        with _walled(launch, at_the_end=next(sides)) as moved:
            run(moved)

    monkeypatch.setattr(Launch, "_run", walled)
