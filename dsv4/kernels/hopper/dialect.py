"""Gluon under the names that its versions have for things; kernels/target.py knows which."""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin

from dsv4.kernels.target import GLUON_BARRIER, GLUON_REINTERPRET

thread_barrier = getattr(gl, GLUON_BARRIER)


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory read as another type and shape; no bytes move."""
    return getattr(memory, GLUON_REINTERPRET)(dtype, shape, layout, _semantic=_semantic)
