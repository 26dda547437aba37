"""Changes of a manager: one call at a time makes one, and an interrupted call is detected.
Torch-free.

A call enters, changes things, and leaves. Errors leave too, because a call that raises has undone
what it did. An interrupt that is not an `Exception` (Ctrl-C, the exit of the interpreter) can come
at any line, even in the middle of an undo: then the call does not leave, and the next call raises
RecoveryNeeded. What the interrupted call had begun is in its `Change`, for `recover` to read.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from dsv4.errors import CopyError, Dsv4Error, RecoveryNeeded, ThreadError

LOGGER = logging.getLogger("dsv4")
P = ParamSpec("P")
R = TypeVar("R")


class Change:
    """What a call has begun and not finished. Only `recover` reads it, after an interrupt.

    It frees the statements of a call from a fixed order for the sake of interrupts: free lists,
    counts and the device's table are derived from requests, index and holders, and the two facts
    that cannot be derived are recorded here before they become true.
    """

    # class attributes: most calls hand out one object and rewrite none, so lists are made only on
    # demand
    handed_out: tuple[object, ...] = ()
    rewritten: tuple[object, ...] = ()

    def hand_out(self, *items: object) -> None:
        """The call is about to return these. If it is interrupted, the caller never gets them:
        `recover` releases requests and pins, and ends plans."""
        self.handed_out += items

    @contextmanager
    def rewriting(self, request: object) -> Iterator[None]:
        """Inside, slot and position of a live request are replaced. If that is interrupted, the
        rings hold neither the old state nor the new one: `recover` finds the request torn.

        An error must come before anything was replaced, so that the request is unchanged."""
        self.rewritten += (request,)
        try:
            yield
        except Exception:
            self.rewritten = ()
            raise
        self.rewritten = ()


NOTHING_BEGUN = Change()  # of calls that hand out and rewrite nothing; never written to
# the frame of a call, its name, its thread, and what it has begun
Visit = tuple[FrameType | None, str, int, Change]
_OVER: Visit = (None, "", 0, NOTHING_BEGUN)


def _is_on(visit: Visit) -> bool:
    """Whether the call still runs, in whatever thread."""
    frame = visit[0]
    if frame is None:
        return False
    try:
        frame.clear()
    except RuntimeError:  # "cannot clear an executing frame"
        return True
    return False


class Door:
    """Lets one call in at a time.

    A call stores its visit, with the frame that it runs in, under the door's number if nothing is
    stored there. This is one operation, so the call inside is known from the first moment to the
    last. A call that leaves removes its visit. An interrupted call does not, wherever it was, but
    its frame has ended, and Python can check that. Nothing is recorded on the way out, so no
    interrupt can come before such a record.

    The visit of an interrupted call stays. A call that may pass it stores its own visit under the
    next number: of several that try, one succeeds.
    """

    def __init__(self) -> None:
        self.visits: dict[int, Visit] = {}
        self.number = 0

    def leave(self) -> None:
        del self.visits[self.number]

    def _come_past(self, visit: Visit) -> tuple[Visit | None, int, list[Visit]]:
        """Enters past calls that were interrupted. Returns the call that runs inside, if there is
        one and the visit was not stored; otherwise the number that the visit is stored under, and
        the interrupted calls."""
        number, interrupted = self.number, list[Visit]()
        while (found := self.visits.setdefault(number, visit)) is not visit:
            if _is_on(found):
                return found, number, []
            if self.visits.get(number) is found:  # otherwise it has left, and the number is free
                interrupted += [found] if found[0] else []
                number += 1
        return None, number, interrupted

    def _settle(self, number: int) -> None:
        """The visit inside is stored under this number, and later ones will be; those before are
        forgotten, and none can be stored there."""
        first, self.number = self.number, number
        for each in range(first, number):
            self.visits[each] = _OVER


class Guard(Door):
    """The door of one manager. Only `recover` passes a call that was interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred: deque[tuple[object, bool]] = deque()  # by `defer`, the oldest first

    @property
    def is_shut(self) -> bool:
        """Whether a call is inside, or was interrupted there."""
        return self.number in self.visits

    @property
    def call(self) -> str | None:
        """What is inside, or was interrupted there."""
        visit = self.visits.get(self.number)
        return None if visit is None else visit[1]

    @property
    def change(self) -> Change:
        """The change of the call inside, which asks for it."""
        return self.visits[self.number][3]

    def defer(self, item: object, *, suspend: bool = False) -> None:
        """The next call releases this (a request, a fetch, a hand-off) before it does anything
        else; with `suspend` it suspends the request if it can. May be called at any time and from
        any thread."""
        self.deferred.append((item, suspend))

    def enter(self, call: str) -> None:
        """The caller is inside until it leaves. Raises ThreadError while another call is inside,
        RecoveryNeeded after one was interrupted there."""
        visit: Visit = (sys._getframe(1), call, threading.get_ident(), Change())
        while self.visits.setdefault(self.number, visit) is not visit:
            self.refuse(call)

    def require_free(self, call: str) -> None:
        """For calls that change nothing but read what others change."""
        if self.number in self.visits:
            self.refuse(call)

    def refuse(self, call: str) -> None:
        """Raises ThreadError if a call is inside, RecoveryNeeded if one was interrupted there;
        returns if it has left meanwhile."""
        first = number = self.number
        interrupted = None
        while (found := self.visits.get(number)) is not None:
            if _is_on(found):
                _refuse_second(call, found)
            if self.visits.get(number) is found:
                interrupted, number = found, number + 1
        if interrupted is not None and self.number == first:
            raise RecoveryNeeded(
                f"{interrupted[1]} was interrupted before it was done: call manager.recover() "
                f"before {call}"
            )

    def take_over(self) -> tuple[int, list[Visit]]:
        """For `recover`: enters past the calls that were interrupted. Returns the number of its
        visit, for `give_way` or `step_back`, and those calls. Raises ThreadError while a call
        runs."""
        visit: Visit = (sys._getframe(1), "recover", threading.get_ident(), Change())
        inside, number, interrupted = self._come_past(visit)
        if inside is not None:
            _refuse_second("recover", inside)
        return number, interrupted

    def give_way(self, number: int) -> None:
        """`recover` has finished."""
        self._settle(number)
        self.leave()

    def step_back(self, number: int) -> None:
        """`recover` has done nothing."""
        del self.visits[number]


def _refuse_second(call: str, inside: Visit) -> NoReturn:
    _, name, thread, _ = inside
    if thread == threading.get_ident():
        raise ThreadError(
            f"{call} came from the middle of {name}, in the same thread (from a finalizer, a "
            f"signal handler or something that {name} calls): call it when {name} has returned; "
            f"manager.room.release_later may be called anywhere"
        )
    raise ThreadError(
        f"{call} came while thread {thread} is inside {name}: calls that change a manager come one "
        f"at a time, from any thread; only stats and memory.memory_bytes may be asked meanwhile"
    )


class Guarded(Protocol):
    """What has calls of a manager: the manager itself, and what it hands out for the others."""

    @property
    def _guard(self) -> Guard: ...

    def _release_deferred(self) -> None:
        """Releases what `Guard.defer` was given."""


G = TypeVar("G", bound=Guarded)


def changes(method: Callable[Concatenate[G, P], R]) -> Callable[Concatenate[G, P], R]:
    """A call that changes its manager: it has a `Change`, and no other call is inside at the same
    time.

    Not a `with` block in each call: a `with` ends by a call, after which Python handles signals,
    and a finished result would be lost. Here one instruction leaves, and the next one returns.
    """
    name = method.__name__

    def guarded(self: G, /, *args: P.args, **options: P.kwargs) -> R:
        guard = self._guard
        guard.enter(name)
        try:
            if guard.deferred:
                self._release_deferred()
            result = method(self, *args, **options)
        except Exception as error:
            guard.leave()
            log_refusal(name, error)
            raise
        del guard.visits[guard.number]  # leave, without a call: no signal is handled from here on
        return result

    functools.update_wrapper(guarded, method)
    return guarded


@changes
def release_now(owner: Guarded) -> None:
    """Every call that changes something releases what is deferred; this does nothing else."""


def require_free(owner: Guarded, call: str) -> None:
    """For calls that change nothing but read what others change. Deferred releases have been
    done."""
    guard = owner._guard
    guard.require_free(call)
    if guard.deferred:
        release_now(owner)


def log_refusal(call: str, error: Exception) -> None:
    """Library errors are routine for an engine (debug); anything else, e.g. from the device, is a
    warning."""
    if isinstance(error, Dsv4Error):
        LOGGER.debug("%s refused: %s: %s", call, type(error).__name__, error)
    else:
        LOGGER.warning("%s failed: %s: %s", call, type(error).__name__, error)


class Turn(Door):
    """One call at a time uses what the handles of a plan share. One that was interrupted blocks no
    other: what it has left undone is recorded in the plan."""

    def enter(self, call: str) -> None:
        """The caller is inside until it leaves. Raises ThreadError while another call is."""
        visit: Visit = (sys._getframe(1), call, 0, NOTHING_BEGUN)
        if self.visits.setdefault(self.number, visit) is not visit:
            self.come_past(visit)

    def come_past(self, visit: Visit) -> None:
        """Enters past calls that were interrupted. Raises ThreadError while another one runs."""
        inside, number, _ = self._come_past(visit)
        if inside is not None:
            self._refuse(visit[1])
        self._settle(number)

    def _refuse(self, call: str) -> NoReturn:
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
    """A call of a handle: by the thread that acquired it, and no other is inside at the same
    time."""
    name = method.__name__

    def guarded(self: B, /, *args: P.args, **options: P.kwargs) -> R:
        if self.thread != threading.get_ident() and self.thread is not None:
            _refuse_thread(name)
        turn = self.turn
        visit: Visit = (sys._getframe(), name, 0, NOTHING_BEGUN)
        if turn.visits.setdefault(turn.number, visit) is not visit:  # turn.enter, without a call
            turn.come_past(visit)
        del visit  # otherwise the frame would hold itself, and all arguments, until it is collected
        try:
            return method(self, *args, **options)
        finally:
            del turn.visits[turn.number]

    functools.update_wrapper(guarded, method)
    return guarded


def _refuse_thread(call: str) -> NoReturn:
    raise ThreadError(
        f"{call} came from another thread than the one that acquired this handle: call "
        f"manager.acquire(layer, batch) in the thread that uses it"
    )


class Uncopied:
    """An object that stands for device memory: a copy would be a second owner of the same bytes.

    Names in `_internal` are for the other files of the cache; completion leaves them out."""

    __slots__ = ()
    _instead: ClassVar[str] = "build another one"
    _internal: ClassVar[frozenset[str]] = frozenset()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._internal]

    def _refuse_copy(self) -> NoReturn:
        raise CopyError(
            f"a {type(self).__name__} cannot be copied or pickled, because it stands for memory on "
            f"the device: {self._instead}"
        )

    def __copy__(self) -> NoReturn:
        self._refuse_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copy()
