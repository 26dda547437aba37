"""Objects with threads and memory of one process do not work in a fork of it: they say so there.
Torch-free."""

from __future__ import annotations

import os
from typing import Any, NoReturn
from weakref import WeakSet

from dsv4.errors import CopyError


class _LeftBehind:
    """Replaces a lock in a child of the process that made it: the thread that held it is not here,
    and waiting for it would never end."""

    def __init__(self, what: str, made_by: int) -> None:
        self._what, self._made_by = what, made_by

    def __enter__(self) -> NoReturn:
        raise CopyError(
            f"{self._what} belongs to process {self._made_by}, and its threads stayed there when "
            f"os.fork made process {os.getpid()}: make one after the fork, or start the process "
            f"with 'spawn'"
        )

    def __exit__(self, *_: object) -> None: ...

    def acquire(self, *_: object, **__: object) -> NoReturn:
        self.__enter__()


_owners: WeakSet[Any] = WeakSet()


def refuse_after_fork(owner: Any) -> None:
    """In a child made by os.fork, calls that enter `owner._lock` raise CopyError."""
    _owners.add(owner)


def _leave_behind() -> None:
    for owner in _owners:
        owner._lock = _LeftBehind(repr(owner), os.getppid())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_behind)
