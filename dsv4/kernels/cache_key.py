"""Keys of kernels in Triton's cache, the same in every process.

A kernel's key is made of its source, the keys of the functions it calls, and the constants that
all of these use. Triton before 3.8 leaves out the constants of a function that has no key yet. The
key then depends on what the process has compiled before, and binaries that other processes left on
disk are not found. So here functions get their keys before the functions that call them.

No version of Triton looks into two other things that a body uses: the fields of tuples, and
functions that it takes for its own, like those that ask for the target. A key without them would
find binaries of an earlier version of this library in which they were different. So they are mixed
into the keys here, and `cache_key` must be called before anything is compiled.
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

_done: set[int] = set()  # functions of modules, which live as long; hashing one would make its key
_lock = RLock()


def cache_key(kernel: Any) -> str:
    """The key of a kernel that is about to be compiled or looked up."""
    with _lock:
        if id(kernel) not in _done:
            _done.add(id(kernel))  # recorded now, because a function may call itself
            used = list(_used(kernel))
            for _, value in used:
                if isinstance(value, JITCallable):
                    cache_key(value)
            kernel.hash = None  # may have been made before the keys of the functions it calls
            unseen = sorted({text for name, value in used if (text := _unseen(name, value))})
            facts = repr((kernel.cache_key, unseen))
            kernel.hash = hashlib.sha256(facts.encode()).hexdigest()
        key: str = kernel.cache_key
        return key


def _used(kernel: Any) -> Iterator[tuple[str, Any]]:
    """What a kernel's source names, directly or as an attribute of a module."""
    code, known = kernel.fn.__code__, kernel.fn.__globals__
    for name in code.co_names:
        value = known.get(name)
        if isinstance(value, ModuleType):
            for attribute in code.co_names:
                yield f"{name}.{attribute}", getattr(value, attribute, None)
        else:
            yield name, value


def _unseen(name: str, value: Any) -> str:
    """What a binary depends on in an object that Triton does not look into; else nothing."""
    if not isinstance(value, type) and not getattr(value, "__triton_builtin__", False):
        return ""
    if isinstance(value, type) and hasattr(value, "_fields"):
        return f"{name}: {value._fields} {value._field_defaults}"  # type: ignore[attr-defined]
    home = value.__module__
    if home.partition(".")[0] == "triton":  # Triton's version is part of every key
        return f"{name}: {home}.{value.__qualname__}"
    # such a function asks only its own module and the module of the targets
    return f"{name}: {_source(home)} {_source(target.__name__)} {target.TARGETS!r}"


@cache
def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


_source(target.__name__)  # now, while the file still is the one that was imported
