"""Who may call what, and when: one call at a time changes a manager, and one that was interrupted
is noticed. Torch-free.

A call enters, changes things, and leaves. Errors leave too, for a call that raises has undone what
it did. What is no `Exception` (Ctrl-C, the exit of the interpreter) can come at any line, in the
middle of an undo too: then nobody leaves, and the next call is told to `recover`.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from dsv4.errors import CopyError, Dsv4Error, RecoveryNeeded, ThreadError

LOGGER = logging.getLogger("dsv4")
P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """The door of one manager. `arriving` is what the call inside is about to hand out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held while a call is inside
        self._thread: int | None = None
        self._interrupted = False
        self.call: str | None = None
        self.arriving: list[object] = []
        self.leaving: deque[tuple[object, bool]] = deque()  # what `release_later` was told

    def enter(self, call: str) -> None:
        """Raises ThreadError or RecoveryNeeded unless nobody is inside."""
        if not self.lock.acquire(blocking=False):
            self.refuse(call)
        self._thread = threading.get_ident()
        self.call = call

    def leave(self) -> None:
        self.arriving = []
        self.call = self._thread = None
        self.lock.release()

    def require_free(self, call: str) -> None:
        """For calls that change nothing but read what others change."""
        if self.lock.locked():
            self.refuse(call)

    def note_interrupt(self) -> None:
        self._interrupted = True

    def refuse(self, call: str) -> NoReturn:
        inside = self.call or "a call"
        if self._is_running_elsewhere():
            raise ThreadError(
                f"{call} came while thread {self._thread} is inside {inside}: calls that change a "
                f"manager come one at a time, from whatever thread; only stats and memory_bytes "
                f"may be asked meanwhile"
            )
        raise RecoveryNeeded(
            f"{inside} was interrupted before it was done: call manager.recover() before {call}"
        )

    def take_over(self) -> str | None:
        """For `recover`: inside, whoever was. Returns the call that was interrupted, if any.
        Raises ThreadError while another thread is inside."""
        if not self.lock.acquire(blocking=False) and self._is_running_elsewhere():
            self.refuse("recover")
        interrupted, self.call = self.call, "recover"
        self._thread = threading.get_ident()
        return interrupted

    def give_way(self) -> None:
        """`recover` is done."""
        self._interrupted = False
        self.leave()

    def _is_running_elsewhere(self) -> bool:
        if self._interrupted or self._thread in (None, threading.get_ident()):
            return False
        return any(thread.ident == self._thread for thread in threading.enumerate())


class Guarded(Protocol):
    @property
    def guard(self) -> Guard: ...

    def release_waiting(self) -> None:
        """Lets go of what was told to go while a call was running."""


G = TypeVar("G", bound=Guarded)


def changes(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
    """A call that changes its manager: nobody else is inside while it runs."""
    name = method.__name__

    def guarded(self: G, /, *args: P.args, **options: P.kwargs) -> R:
        guard = self.guard
        guard.enter(name)
        try:
            if guard.leaving:
                self.release_waiting()
            result = method(self, *args, **options)
        except Exception as error:
            guard.leave()
            log_refusal(name, error)
            raise
        except BaseException:
            guard.note_interrupt()
            raise
        guard.leave()
        return result

    functools.update_wrapper(guarded, method)
    return guarded


def log_refusal(call: str, error: Exception) -> None:
    """Refusals belong to the day of an engine; other errors, of the device, do not."""
    if isinstance(error, Dsv4Error):
        LOGGER.debug("%s refused: %s: %s", call, type(error).__name__, error)
    else:
        LOGGER.warning("%s failed: %s: %s", call, type(error).__name__, error)


class Turn:
    """One thread at a time uses what the handles of a plan share. A thread may enter again, so that
    one that was interrupted goes on."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # held by who is inside

    def require_free(self, call: str) -> None:
        """Raises ThreadError while another thread is inside."""
        if not self.lock.acquire(blocking=False):
            self.refuse(call)
        self.lock.release()

    def refuse(self, call: str) -> NoReturn:
        raise ThreadError(
            f"{call} came while another thread is inside a call of the same plan: the handles of "
            f"a plan are used by one thread at a time"
        )


class Bound(Protocol):
    """A handle: bound to a plan by one thread."""

    @property
    def turn(self) -> Turn: ...

    @property
    def thread(self) -> int | None: ...


B = TypeVar("B", bound=Bound)


def in_turn(method: Callable[Concatenate[B, P], R]) -> Callable[Concatenate[B, P], R]:
    """A call of a handle: by the thread that acquired it, and no other is inside meanwhile."""
    name = method.__name__

    def guarded(self: B, /, *args: P.args, **options: P.kwargs) -> R:
        if self.thread != threading.get_ident() and self.thread is not None:
            raise ThreadError(
                f"{name} came from another thread than the one that acquired this handle: call "
                f"manager.acquire(layer, plan) in the thread that uses it"
            )
        lock = self.turn.lock
        if not lock.acquire(blocking=False):
            self.turn.refuse(name)
        try:
            return method(self, *args, **options)
        finally:
            lock.release()

    functools.update_wrapper(guarded, method)
    return guarded


class Uncopied:
    """What stands for device memory: a copy of it would be a second owner of the same bytes."""

    __slots__ = ()
    _instead: ClassVar[str] = "build another one"

    def _refuse_copy(self) -> NoReturn:
        raise CopyError(
            f"a {type(self).__name__} cannot be copied or pickled, for it stands for memory on the "
            f"device: {self._instead}"
        )

    def __copy__(self) -> NoReturn:
        self._refuse_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copy()
