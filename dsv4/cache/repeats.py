"""Calls of a layer that are repeated with the same shapes: checked once, then only repeated.

An engine calls a layer with the same shapes step after step, and checks and launch arguments cost
the host more than the launch. A call is known by its key: its arguments other than tensors, and of
every tensor the type, shape, strides and device. What passed the checks once passes them again, so
a call with a known key goes to its repetition; any other goes the checked way.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from torch import Tensor

from dsv4.ops.backend import Backend, Repetition

# How many keys a layer remembers. Beyond that all are forgotten: frequent ones soon return.
MOST_KEYS = 256

Key = tuple[Hashable, ...]


class Repeats:
    """The repeated calls of one layer. `fixed` are the tensors that its calls use in
    addition to their arguments."""

    __slots__ = ("_backend", "_fixed", "_known")

    def __init__(self, backend: Backend, fixed: Sequence[Tensor]) -> None:
        self._backend = backend
        self._fixed = tuple(fixed)
        self._known: dict[Key, Repetition | None] = {}

    def find(
        self, call_key: Key, tensors: Sequence[Tensor | None]
    ) -> tuple[Key | None, Repetition | None]:
        """The key of a call, and how to repeat it once it has been made twice. An argument that is
        not a tensor, or cannot be compared, has no key: the checks report what is wrong with it."""
        try:
            # Python calls would be most of the cost of a lookup
            forms: list[Hashable] = [*call_key]
            for t in tensors:
                forms.append(t if t is None else (t.shape, t.dtype, t.device, t.stride()))
            key = tuple(forms)
            return key, self._known.get(key)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without strides
            return None, None

    def make(
        self,
        key: Key | None,
        tensors: Sequence[Tensor],
        calls: Sequence[partial[None]],
        step: Tensor,
    ) -> None:
        """Makes a call that has passed all checks: `calls` of the backend. One that is made a
        second time is remembered, so shapes that occur only once cost nothing. `step` is one of the
        step's index tensors, which lie in buffers that never move."""
        if key is not None and key in self._known:
            self._known[key] = self._backend.repeatable(calls, tensors, (*self._fixed, step))
            return
        for call in calls:
            call()
        if key is not None:
            if len(self._known) >= MOST_KEYS:
                self._known.clear()
            self._known[key] = None
