"""Two threads at one manager, stopped wherever one of them can be: never two inside."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.cache.changes import Turn
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.recover import recover_books
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import PlanError, RecoveryNeeded, ThreadError
from dsv4.model import ModelSpec
from tests.support.faults import Interrupts
from tests.support.lives import Text, tiny_stack

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=2048)
PATIENT_S = 120.0


def build(num_blocks: int = 16, **options: Any) -> KVCacheManager:
    return KVCacheManager(SCHEMA, num_blocks=num_blocks, max_requests=4, **options)


class Stopped:
    """A call in another thread, which stops before its n-th instruction in the guard."""

    def __init__(self, call: Callable[[], object], at: int) -> None:
        self._call, self._at, self._count = call, at, 0
        self._here, self._go_on = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.stopped = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._here.wait(PATIENT_S)

    def _run(self) -> None:
        sys.settrace(self._trace)
        try:
            self._call()
        except BaseException as error:
            self.error = error
        finally:
            sys.settrace(None)
            self._here.set()

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith("/dsv4/cache/changes.py"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._count += 1
            if self._count - 1 == self._at:
                self.stopped = True
                self._here.set()
                assert self._go_on.wait(PATIENT_S)
        return self._trace

    def finish(self) -> BaseException | None:
        self._go_on.set()
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive()
        return self.error


def outcome(call: Callable[[], object]) -> type[BaseException] | None:
    try:
        call()
    except BaseException as error:
        return type(error)
    return None


@pytest.mark.parametrize("second", ["extend", "can_admit", "acquire", "recover", "recover, extend"])
def test_a_thread_that_stops_anywhere_in_the_guard_is_inside_or_not(second: str):
    """The second thread gets in, and then the first one is refused or has left; or it is told that
    somebody is inside. Nobody is told to recover, and recover never gets in beside a call."""
    manager = build(prefix=PrefixOptions())
    request = manager.admit_request(np.arange(200))
    calls: dict[str, Callable[[], object]] = {
        "extend": lambda: manager.room.extend(request, 0),
        "can_admit": lambda: manager.room.can_admit(1),
        "acquire": lambda: manager.acquire(0),
        "recover": manager.recover,
    }
    at, found = 0, set()
    while True:
        first = Stopped(lambda: manager.release_request(manager.admit_request(300)), at)
        outcomes = [outcome(calls[name]) for name in second.split(", ")]
        assert set(outcomes) <= {None, ThreadError}, at
        assert first.finish() is None, at
        manager.check_invariants()
        assert manager.requests == (request,)
        assert outcome(calls["extend"]) is None
        if not first.stopped:
            break
        found.update(outcomes)
        at += 1
    assert found == {None, ThreadError}
    assert at > 60


@pytest.mark.parametrize("second", ["extend", "recover"])
def test_a_thread_that_stops_anywhere_in_recover_is_inside_or_not(second: str):
    at, found = 0, set()
    while True:
        manager = build()
        request = manager.admit_request(200)
        with pytest.raises(KeyboardInterrupt), Interrupts(25).injected():
            manager.fork(request, 1)
        first = Stopped(manager.recover, at)
        extend = partial(manager.room.extend, request, 0)
        error = outcome({"extend": extend, "recover": manager.recover}[second])
        # before the first one is inside an interrupted call is what there is
        assert error in (None, ThreadError, RecoveryNeeded), at
        assert first.finish() is None, at
        assert outcome(extend) is None
        manager.check_invariants()
        assert manager.requests == (request,)
        if not first.stopped:
            break
        found.add(error)
        at += 1
    wanted = {ThreadError, None, *([RecoveryNeeded] if second == "extend" else [])}
    assert found == wanted


def test_of_many_threads_one_recovers_at_a_time(monkeypatch: pytest.MonkeyPatch):
    """More than two at once, many times: whoever is inside is alone."""
    manager, inside, errors = build(), [], []
    request = manager.admit_request(100)

    def alone(*given: Any, **books: Any) -> list[Any]:
        inside.append(threading.get_ident())
        still_open = recover_books(*given, **books)
        if len(inside) != 1:
            errors.append(list(inside))
        inside.remove(threading.get_ident())
        return still_open

    monkeypatch.setattr("dsv4.cache.recover.recover_books", alone)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt), Interrupts(25).injected():
                manager.fork(request, 1)
            gone = threading.Barrier(4)

            def recover(gone: threading.Barrier = gone) -> None:
                gone.wait(PATIENT_S)
                for call in (manager.recover, lambda: manager.room.extend(request, 0)) * 3:
                    error = outcome(call)
                    if error not in (None, ThreadError, RecoveryNeeded):
                        errors.append(error)

            threads = [threading.Thread(target=recover) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            manager.recover()
            manager.check_invariants()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_an_interrupted_call_of_a_thread_that_is_gone_is_recovered_from():
    manager = build()
    request = manager.admit_request(100)

    def interrupted() -> None:
        with Interrupts(25).injected():
            manager.fork(request, 1)

    thread = Stopped(interrupted, -1)
    assert isinstance(thread.finish(), KeyboardInterrupt)
    assert outcome(lambda: manager.room.extend(request, 0)) is RecoveryNeeded
    manager.recover()
    manager.check_invariants()
    assert manager.requests == (request,)


def test_a_call_from_the_middle_of_another_one_is_told_so(monkeypatch: pytest.MonkeyPatch):
    """A finalizer or a signal handler, in the thread that is inside: nothing is to be recovered."""
    manager = build()
    request, found = manager.admit_request(10), []
    send = manager.memory.buffers.send

    def collecting(*given: Any) -> None:
        for call in (lambda: manager.room.extend(request, 0), manager.recover):
            with pytest.raises(ThreadError, match="from the middle of prepare_forward") as caught:
                call()
            found.append(caught)
        send(*given)

    monkeypatch.setattr(manager.memory.buffers, "send", collecting)
    plan = manager.prepare_forward([(request, 1)])
    assert len(found) == 2
    manager.commit(plan, partial=True)


def test_a_call_of_a_handle_keeps_nothing_that_it_was_given():
    """Not even until it is collected: it may be the largest tensor of a step."""
    stack = tiny_stack(max_requests=2)
    request = stack.manager.admit_request(8)
    plan = stack.manager.prepare_forward([(request, 8)])
    handle = stack.manager.acquire(0, plan.batch)
    kv = torch.zeros((8, stack.schema.model.head_dim), dtype=torch.bfloat16)
    gone = weakref.ref(kv)
    gc.disable()
    try:
        handle.append(kv, weights=stack.weights[0])
        del kv
        assert gone() is None
    finally:
        gc.enable()
    stack.manager.fail(plan)


def test_nobody_recovers_while_a_handle_is_used(monkeypatch: pytest.MonkeyPatch):
    stack = tiny_stack(max_requests=2)
    manager, text = stack.manager, Text.random(stack, 0, 200)
    request = manager.admit_request(8)
    plan = manager.prepare_forward([(request, 8)])
    found: list[type[BaseException] | None] = []
    append = manager._parts.backend.append

    def slow(*given: Any) -> None:
        recovering = threading.Thread(target=lambda: found.append(outcome(manager.recover)))
        recovering.start()
        recovering.join()
        append(*given)

    monkeypatch.setattr(manager._parts.backend, "append", slow, raising=False)
    stack.write(plan, [text.stream])
    assert set(found) == {ThreadError}
    assert len(found) == len(stack.layers)
    manager.commit(plan)
    manager.recover()
    manager.check_invariants()


@pytest.mark.parametrize("inside", [False, True], ids=["lines", "calls"])
def test_after_an_interrupt_in_a_handle_another_thread_may_use_the_plan(inside: bool):
    """Wherever it was, at `acquire` too: the thread that was interrupted keeps nobody out."""
    stack = tiny_stack(max_requests=2)
    manager, text = stack.manager, Text.random(stack, 0, 200)
    at = 0
    while True:
        request = manager.admit_request(8)
        plan = manager.prepare_forward([(request, 8)])
        kv, projections = stack.inputs(plan, [text.stream], 0)
        files = ("/cache/changes.py", "/cache/handle.py")
        interrupts, caught = Interrupts(at, files, inside=inside), False
        try:
            with interrupts.injected():
                handle = manager.acquire(0, plan.batch)
                handle.append(kv, *projections, weights=stack.weights[0])
        except KeyboardInterrupt:
            caught = True
        other = Stopped(partial(manager.fail, plan), -1)
        assert other.finish() is None, at
        assert Stopped(manager.recover, -1).finish() is None, at
        manager.release_request(request)
        manager.check_invariants()
        if not caught:
            break
        at += 1
    assert at > 15


def test_a_turn_that_many_were_interrupted_in_keeps_nothing_alive():
    turn = Turn()

    def interrupted(marked: object) -> None:
        turn.enter("append")

    kept = Request  # anything
    for _ in range(100):
        interrupted(kept)
    turn.enter("append")
    turn.leave()
    assert {visit[0] for visit in turn.visits.values()} == {None}
    gc.collect()


def test_to_release_later_never_gets_in_the_way():
    """A finalizer in another thread, stopped wherever it can be, while the engine makes calls."""
    manager = build()
    at = 0
    while True:
        request = manager.admit_request(100)
        first = Stopped(partial(manager.room.release_later, request), at)
        assert outcome(lambda: manager.release_request(manager.admit_request(10))) is None, at
        assert first.finish() is None
        assert manager.room.can_admit(16 * 128)  # what was to go has gone
        assert manager.stats().slots_free == 4
        if not first.stopped:
            break
        at += 1
    assert manager.requests == ()
    manager.check_invariants()


def test_what_is_released_later_counts_as_released():
    """By the statistics too, so that who decides by them waits for nothing."""
    manager = build(prefix=PrefixOptions())
    request = manager.admit_request(np.arange(300))
    plan = manager.prepare_forward([(request, 300)])
    plan.mark_appended()
    manager.commit(plan)
    forks = manager.fork(request, 2)
    for leaving in ([request], forks[:1], forks[1:]):
        for each in leaving:
            manager.room.release_later(each)
        before, requests = manager.stats(), manager.requests
        assert manager.room.can_admit(1)
        after = manager.stats()
        assert all(each.released for each in leaving)
        assert after == before
        assert manager.requests == requests
        manager.check_invariants()
    assert (manager.requests, manager.stats().blocks_cached) == ((), 2)
    waiting = manager.admit_request(14 * 128)
    assert not manager.room.can_admit(3 * 128)
    manager.room.release_later(waiting)
    assert manager.room.can_admit(16 * 128)
    busy = manager.admit_request(100)
    plan = manager.prepare_forward([(busy, 1)])
    manager.room.release_later(busy)
    assert manager.requests == (busy,)  # until its plan is over
    manager.abandon(plan)
    assert manager.requests == ()
    assert manager.stats().slots_free == 4


@pytest.mark.parametrize("end", ["commit", "abandon", "fail"])
def test_no_handle_is_used_while_its_plan_ends(end: str):
    """Wherever the call that ends the plan has got to: a handle gets in before it, is kept out, or
    finds the plan over. It never works beside it."""
    stack = tiny_stack(max_requests=2)
    manager, text = stack.manager, Text.random(stack, 0, 200)
    request = manager.admit_request(8)
    plan = manager.prepare_forward([(request, 1)])
    stack.write(plan, [text.stream])
    handle = manager.acquire(0, plan.batch)
    kv, projections = stack.inputs(plan, [text.stream], 0)
    found: list[type[BaseException] | None] = []
    close = manager._parts.steps._close

    def slow(ending: Any) -> None:
        """As if the other thread came here, where the plan has been looked at and is not over."""
        append = partial(handle.append, kv, *projections, weights=stack.weights[0])
        handle.thread = None
        other = threading.Thread(target=lambda: found.append(outcome(append)))
        other.start()
        other.join(PATIENT_S)
        close(ending)
        other = threading.Thread(target=lambda: found.append(outcome(append)))
        other.start()
        other.join(PATIENT_S)

    manager._parts.steps._close = slow  # type: ignore[method-assign]
    getattr(manager, end)(plan)
    assert found == [ThreadError, ThreadError]
    assert outcome(partial(handle.append, kv, *projections, weights=stack.weights[0])) is PlanError
    manager.check_invariants()
