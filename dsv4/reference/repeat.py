"""Calls of the reference that are made again with other tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import setitem
from typing import Any

from torch import Tensor

Place = tuple[Callable[[Any, Any, Any], None], Any, Any, int]  # setter, target, name, tensor

_set_field = object.__setattr__


class Repetition:
    """Calls whose arguments are copies of its own; the tensors that may be others are put into them
    for a run and taken out after it, so that nothing is built and no tensor is kept."""

    __slots__ = ("_calls", "_places")

    def __init__(self, calls: Sequence[partial[None]], tensors: Sequence[Tensor]) -> None:
        self._places: list[Place] = []
        number = {id(tensor): nth for nth, tensor in enumerate(tensors)}
        self._calls = [
            (call.func, self._copied([*call.args], number), self._copied(call.keywords, number))
            for call in calls
        ]
        for put, target, name, _ in self._places:
            put(target, name, None)

    def _copied(self, value: Any, number: dict[int, int]) -> Any:
        """A copy of what holds some of the tensors, and anything else as it is."""
        before = len(self._places)
        put: Callable[[Any, Any, Any], None] = setitem
        if isinstance(value, list | tuple):
            copy: Any = [*value]
            parts: Any = enumerate(copy)
        elif isinstance(value, dict):
            copy = dict(value)
            parts = copy.items()
        elif is_dataclass(value) and not isinstance(value, type):
            copy, put = replace(value), _set_field
            parts = [(field.name, getattr(value, field.name)) for field in fields(value)]
        else:
            return value
        for name, part in [*parts]:
            if id(part) in number:
                self._places.append((put, copy, name, number[id(part)]))
            elif not isinstance(part, Tensor):
                put(copy, name, self._copied(part, number))
        return copy if len(self._places) > before else value

    def places(self, tensors: Sequence[Tensor]) -> list[int]:
        """Any will do."""
        return []

    def run(self, places: list[int], tensors: Sequence[Tensor]) -> None:
        for put, target, name, nth in self._places:
            put(target, name, tensors[nth])
        try:
            for function, args, options in self._calls:
                function(*args, **options)
        finally:
            for put, target, name, _ in self._places:
                put(target, name, None)


def repeatable(
    calls: Sequence[partial[None]], tensors: Sequence[Tensor], fixed: Sequence[Tensor]
) -> Repetition | None:
    """Makes the calls. None where it is unclear which of `tensors` an argument is."""
    for call in calls:
        call()
    known = {id(tensor) for tensor in (*tensors, *fixed)}
    if len(known) < len(tensors) + len({id(tensor) for tensor in fixed}):
        return None
    return Repetition(calls, tensors)
