"""Keys of kernels in Triton's cache, the same in every process.

A kernel's key is made of its source, the keys of the functions it calls, and the constants that
all of these use. Triton before 3.8 leaves out the constants of a function that has no key yet: then
it depends on what the process has compiled before, and binaries that others have left on the disk
are not found. So functions get their keys before those that call them.

No Triton looks into what a body uses besides: fields of tuples, and functions that pass for its
own, as those do that know the target. A key without them finds binaries of an earlier version of
this library, for which they were others. So they are mixed into the keys here, and nothing is to be
compiled before `cache_key` was asked.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator
from functools import cache
from threading import RLock
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

from dsv4.kernels import target

_done: set[int] = set()  # functions of modules, which stay; hashing one would make its key
_lock = RLock()


def cache_key(kernel: Any) -> str:
    """The key of a kernel that is to be compiled or looked for."""
    with _lock:
        if id(kernel) not in _done:
            _done.add(id(kernel))  # here already, for a function may call itself
            used = list(_used(kernel))
            for _, value in used:
                if isinstance(value, JITCallable):
                    cache_key(value)
            kernel.hash = None  # one may have been made before those of the functions
            unseen = sorted({text for name, value in used if (text := _unseen(name, value))})
            told = repr((kernel.cache_key, unseen))
            kernel.hash = hashlib.sha256(told.encode()).hexdigest()
        key: str = kernel.cache_key
        return key


def _used(kernel: Any) -> Iterator[tuple[str, Any]]:
    """What a kernel's source names, by itself or behind a module's name."""
    code, known = kernel.fn.__code__, kernel.fn.__globals__
    for name in code.co_names:
        value = known.get(name)
        if isinstance(value, ModuleType):
            for attribute in code.co_names:
                yield f"{name}.{attribute}", getattr(value, attribute, None)
        else:
            yield name, value


def _unseen(name: str, value: Any) -> str:
    """What a binary depends on in a thing that Triton does not look into; nothing of others."""
    if not isinstance(value, type) and not getattr(value, "__triton_builtin__", False):
        return ""
    if isinstance(value, type) and hasattr(value, "_fields"):
        return f"{name}: {value._fields} {value._field_defaults}"  # type: ignore[attr-defined]
    home = value.__module__
    if home.partition(".")[0] == "triton":  # whose version is part of every key
        return f"{name}: {home}.{value.__qualname__}"
    # what such a function asks is in its own module or in that of the targets
    return f"{name}: {_source(home)} {_source(target.__name__)} {target.TARGETS!r}"


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


_source(target.__name__)  # now, while the file is the one that was imported
