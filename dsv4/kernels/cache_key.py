"""Keys of kernels in Triton's cache, the same in every process.

A kernel's key is made of its source, the keys of the functions it calls, and the constants that
all of these use. Triton before 3.8 leaves out the constants of a function that has no key yet: then
it depends on what the process has compiled before, and binaries that others have left on the disk
are not found. So functions get their keys before those that call them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

_done: set[int] = set()  # functions of modules, which stay; hashing one would make its key


def cache_key(kernel: Any) -> str:
    """The key of a kernel that is to be compiled or looked for."""
    if id(kernel) not in _done:
        _done.add(id(kernel))  # here already, for a function may call itself
        for function in _called(kernel):
            cache_key(function)
    key: str = kernel.cache_key
    return key


def _called(kernel: Any) -> Iterator[Any]:
    """The functions whose names a kernel's source has, by themselves or behind a module's."""
    code, known = kernel.fn.__code__, kernel.fn.__globals__
    for name in code.co_names:
        value = known.get(name)
        if isinstance(value, JITCallable):
            yield value
        elif isinstance(value, ModuleType):
            for attribute in code.co_names:
                function = getattr(value, attribute, None)
                if isinstance(function, JITCallable):
                    yield function
