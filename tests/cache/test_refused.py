"""Copies, pickles, threads: what would give wrong tensors is refused with a typed error."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pytest

from dsv4 import errors
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import CopyError, OutOfBlocks, PlanError, ThreadError
from dsv4.model import ModelSpec
from tests.support.faults import Interrupts
from tests.support.lives import Text, assert_cold, run_to, tiny_stack

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=2048)


def build(num_blocks: int = 16, **options: Any) -> KVCacheManager:
    return KVCacheManager(SCHEMA, num_blocks=num_blocks, max_requests=4, **options)


@dataclass
class Row:
    """What an engine keeps of a request."""

    request: object


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda each: asdict(Row(each))],
    ids=["copy", "deepcopy", "pickle", "asdict"],
)
def test_nothing_that_stands_for_memory_is_copied(copied: Callable[[object], object]):
    manager = build()
    request = manager.admit_request(10)
    plan = manager.prepare_forward([(request, 1)])
    for each, advice in (
        (manager, "build another one"),
        (request, r"fork\(request, 1\)"),
        (plan, "prepare_forward|fork"),  # asdict goes on to its requests
        (manager.acquire(0, plan.batch), "acquire"),
    ):
        with pytest.raises(CopyError, match=advice):
            copied(each)


def test_a_length_is_the_manager_s_to_change():
    request = build().admit_request(10)
    with pytest.raises(AttributeError):
        request.length = 5  # type: ignore[misc]


def test_a_released_request_keeps_nothing_alive():
    manager = build(prefix=PrefixOptions())
    request = manager.admit_request(np.arange(300))
    trail = weakref.ref(request.trail._ids)  # type: ignore[union-attr]
    manager.release_request(request)
    gc.collect()
    assert trail() is None
    assert request._row.base is None


def test_the_last_step_keeps_no_request_alive():
    manager = build(prefix=PrefixOptions())
    request, other = manager.admit_request(np.arange(30)), manager.admit_request(np.arange(30))
    plan = manager.prepare_forward([(request, 30), (other, 30)])
    plan.mark_appended()
    manager.commit(plan)
    gone = weakref.ref(request)
    manager.release_request(request)
    del request, plan
    gc.collect()
    assert gone() is None
    assert manager.requests == (other,)


# ---- errors go from process to process -----------------------------------------------------------

ERRORS = (
    OutOfBlocks(needed=3, free=1, total=9, asker_blocks=9, cached=1, pinned=2),
    errors.OutOfSlots(total=4, needed=2, free=1),
    errors.ContextOverflow(asked_tokens=9, max_context_tokens=8),
    errors.PoolTooSmall("too small", minimum_bytes=99),
    errors.InvalidInput("so"),
)


def raise_nth(nth: int) -> None:
    raise ERRORS[nth]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: errors.Dsv4Error):
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_worker_that_raises_one_does_not_break_its_pool():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        for nth, error in enumerate(ERRORS):
            with pytest.raises(type(error), match=str(error)[:10]):
                pool.apply_async(raise_nth, (nth,)).get(timeout=60)


# ---- pins ----------------------------------------------------------------------------------------


def cached(manager: KVCacheManager, ids: np.ndarray) -> None:
    request = manager.admit_request(ids)
    while request.length < len(ids):
        plan = manager.prepare_forward([(request, min(512, len(ids) - request.length))])
        plan.mark_appended()
        manager.commit(plan)
    manager.release_request(request)


def test_what_does_not_fit_beside_pins_never_will():
    manager = build(num_blocks=8, max_step_tokens=512, prefix=PrefixOptions())
    ids = np.arange(3 * 128)
    cached(manager, ids)
    pinned = manager.prefix.pin(ids)
    with pytest.raises(OutOfBlocks, match=r"5 of 8 .* 3 pinned.*unpin") as caught:
        manager.admit_request(6 * 128)
    assert (caught.value.never, caught.value.pinned) == (True, 3)
    assert not manager.room.can_admit(6 * 128)
    shared = manager.admit_request(np.arange(8 * 128))  # the pinned blocks are its own beginning
    assert len(shared.block_ids) == 8
    manager.release_request(shared)
    busy = manager.admit_request(2 * 128)
    with pytest.raises(OutOfBlocks, match="wait") as caught:
        manager.admit_request(5 * 128)
    assert not caught.value.never
    manager.release_request(busy)
    manager.prefix.unpin(pinned)
    assert manager.room.can_admit(6 * 128)
    manager.admit_request(6 * 128)


# ---- threads -------------------------------------------------------------------------------------


def in_thread(call: Callable[[], object]) -> BaseException | None:
    caught: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def test_a_call_while_another_thread_is_inside_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    manager = build(prefix=PrefixOptions(events=True))
    a, b = manager.admit_request(10), manager.admit_request(10)
    found: list[BaseException | None] = []
    send = manager.memory.buffers.send

    def slow(*given: Any) -> None:
        calls: tuple[Callable[[], object], ...] = (
            lambda: manager.prepare_forward([(b, 1)]),
            lambda: manager.admit_request(1),
            lambda: manager.release_request(b),
            lambda: manager.room.can_admit(1),
            lambda: manager.acquire(0),
            manager.prefix.take_events,
            manager.recover,
        )
        found.extend(in_thread(call) for call in calls)
        found.append(in_thread(lambda: manager.stats()))
        found.append(in_thread(lambda: manager.memory.memory_bytes()))
        send(*given)

    monkeypatch.setattr(manager.memory.buffers, "send", slow)
    plan = manager.prepare_forward([(a, 1)])
    assert [type(error) for error in found[:7]] == [ThreadError] * 7
    assert found[7:] == [None, None]
    assert plan.requests == (a,)
    other = in_thread(lambda: manager.prepare_forward([(b, 1)]))
    assert isinstance(other, PlanError)
    plan.mark_appended()
    assert in_thread(lambda: manager.commit(plan)) is None  # another thread may go on
    manager.check_invariants()


def test_two_threads_in_the_handles_of_one_plan_are_refused(monkeypatch: pytest.MonkeyPatch):
    """One is inside `append` when the other comes: with the same step, or to end it."""
    stack = tiny_stack(max_requests=2)
    manager, text = stack.manager, Text.random(stack, 0, 200)
    request = manager.admit_request(8)
    plan = manager.prepare_forward([(request, 8)])
    kv, projections = stack.inputs(plan, [text.stream], 1)
    handle = manager.acquire(1, plan.batch)
    found: list[BaseException | None] = []
    append = manager._parts.backend.append

    def slow(*given: Any) -> None:
        calls: tuple[Callable[[], object], ...] = (
            lambda: manager.acquire(0, plan.batch),
            lambda: manager.acquire(1, plan.batch),
            lambda: handle.append(kv, *projections, weights=stack.weights[1]),
            lambda: manager.commit(plan),
            lambda: manager.abandon(plan),
            lambda: manager.fail(plan),
        )
        found.extend(in_thread(call) for call in calls)
        append(*given)

    monkeypatch.setattr(manager._parts.backend, "append", slow, raising=False)
    handle.append(kv, *projections, weights=stack.weights[1])
    assert [type(error) for error in found] == [ThreadError] * 6
    monkeypatch.undo()
    for layer in (0, 2, 3, 4):
        stack.write(plan, [text.stream], layers=[layer])
    manager.commit(plan)
    assert_cold(stack, request, text.stream)


def test_a_handle_belongs_to_the_thread_that_acquired_it():
    """It is one object per layer: who held it from an earlier plan would write into another's."""
    stack = tiny_stack(max_requests=2)
    manager, text = stack.manager, Text.random(stack, 0, 200)
    request = manager.admit_request(8)
    plan = manager.prepare_forward([(request, 8)])
    kv, projections = stack.inputs(plan, [text.stream], 0)
    handle = manager.acquire(0, plan.batch)

    def use() -> None:
        handle.append(kv, *projections, weights=stack.weights[0])

    error = in_thread(use)
    assert isinstance(error, ThreadError)
    assert "manager.acquire(layer, batch) in the thread that uses it" in str(error)
    assert not plan.batch.written.touched

    def take_over() -> None:
        manager.acquire(0, plan.batch)
        use()

    assert in_thread(take_over) is None
    with pytest.raises(ThreadError):
        use()
    stack.write(plan, [text.stream], layers=(1, 2, 3, 4))  # acquired here again
    assert in_thread(lambda: manager.commit(plan)) is None
    assert_cold(stack, request, text.stream)


def test_an_interrupted_handle_call_shuts_nobody_out():
    stack = tiny_stack(max_requests=2)
    manager, text = stack.manager, Text.random(stack, 0, 200)
    request = manager.admit_request(8)
    plan = manager.prepare_forward([(request, 8)])
    for at in range(0, 60, 3):
        with pytest.raises(KeyboardInterrupt), Interrupts(at).injected():
            stack.write(plan, [text.stream])
    manager.fail(plan)
    manager.rewind(request, 0)
    run_to(stack, request, text, 150)
    assert_cold(stack, request, text.stream)


def test_statistics_are_safe_while_requests_come_and_go():
    manager = build(num_blocks=64)
    stop, seen = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            seen.append(manager.stats())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(500):
            requests: list[Request] = [manager.admit_request(20) for _ in range(4)]
            for request in requests:
                manager.release_request(request)
    finally:
        stop.set()
        thread.join()
    assert seen
    assert all(stats.blocks_total == 64 for stats in seen)


def test_a_finalizer_in_the_middle_of_a_call_releases_later(monkeypatch: pytest.MonkeyPatch):
    manager = build()
    gone, going, busy = (manager.admit_request(10) for _ in range(3))
    send = manager.memory.buffers.send

    def collecting(*given: Any) -> None:
        manager.room.release_later(going)
        assert in_thread(lambda: manager.room.release_later(busy)) is None
        send(*given)

    manager.room.release_later(gone)
    assert (gone.released, manager.requests) == (False, (going, busy))
    monkeypatch.setattr(manager.memory.buffers, "send", collecting)
    plan = manager.prepare_forward([(busy, 1)])
    assert (gone.released, going.released, manager.requests) == (True, False, (busy,))
    manager.commit(plan, partial=True)
    assert (going.released, busy.released, manager.requests) == (True, False, ())
    manager.room.release_later(gone)
    manager.room.extend(manager.admit_request(0), 0)
    assert busy.released
    manager.release_request(manager.requests[0])
    manager.check_invariants()
    assert manager.requests == ()
