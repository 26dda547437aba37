"""Gluon under the names that its versions use; kernels/target.py knows which version has which."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from dsv4.kernels.target import (
    GLUON_ASYNC_LOAD,
    GLUON_BARRIER,
    GLUON_BULK_LOAD,
    GLUON_REINTERPRET,
)

async_load = getattr(async_copy, GLUON_ASYNC_LOAD)
bulk_load = getattr(tma, GLUON_BULK_LOAD)
thread_barrier = getattr(gl, GLUON_BARRIER)


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory read as another type and shape; no bytes move."""
    return getattr(memory, GLUON_REINTERPRET)(dtype, shape, layout, _semantic=_semantic)
