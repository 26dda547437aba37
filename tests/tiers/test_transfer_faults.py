"""Errors of the device and interrupts while bytes go up and down: nothing changed, or `recover`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dsv4.cache.requests import Request
from dsv4.errors import RecoveryNeeded
from dsv4.tiers.host import HostTier
from dsv4.tiers.tier import Tier
from tests.support.faults import DeviceFault, Faults, Interrupts, everything
from tests.support.lives import Text, assert_cold, run_to
from tests.support.tiered import TIMEOUT_S, assert_like_cold, disk, empty, keep, stack_with


class Scene:
    """A prompt that only tiers have, a request that was suspended, one that is live."""

    def __init__(self, tiers: list[Tier]) -> None:
        self.tiers = tiers
        self.stack = stack_with(tiers, num_blocks=14, max_requests=3)
        self.manager = self.stack.manager
        self.text, self.away, self.live = (Text.random(self.stack, seed, 900) for seed in (1, 2, 3))
        keep(self.stack, self.text, 400)
        request = self.manager.admit_request(self.away.ids[:150])
        run_to(self.stack, request, self.away, 170)
        self.manager.tiers.suspend(request)
        assert self.manager.tiers.drain(TIMEOUT_S)
        empty(self.stack)
        self.request = self.manager.admit_request(self.live.ids[:140])
        run_to(self.stack, self.request, self.live, 140)
        assert self.manager.tiers.drain(TIMEOUT_S)

    # ---- the calls

    def fetch(self) -> Request | None:
        return self.manager.tiers.admit(self.text.ids[:400], timeout_s=TIMEOUT_S)

    def resume(self) -> Request | None:
        return self.manager.tiers.resume(self.away.ids[:170], timeout_s=TIMEOUT_S)

    def suspend(self) -> Request | None:
        self.manager.tiers.suspend(self.request)
        return None

    # ---- afterwards

    def go_on(self, made: Request | None) -> None:
        """Everything is there again with the right bytes; then nothing is left."""
        manager, stack = self.manager, self.stack
        manager.check_invariants()
        for request in manager.requests:
            if request not in (self.request, made):  # interrupted on its way to the caller
                manager.release_request(request)
        if made is not None:
            manager.release_request(made)
        if not self.request.released:
            run_to(stack, self.request, self.live, 200)
            assert_cold(stack, self.request, self.live.stream)
            manager.release_request(self.request)
        for text, tokens, call in (
            (self.text, 400, self.fetch),
            (self.away, 170, self.resume),
        ):
            request = call()
            assert request is not None
            run_to(stack, request, text, tokens + 30)
            assert_like_cold(stack, request, text)
            manager.release_request(request)
        assert manager.tiers.drain(TIMEOUT_S)
        manager.check_invariants()
        manager.prefix.evict()
        stats = manager.stats()
        assert (stats.blocks_free, stats.blocks_in_flight) == (stats.blocks_total, 0)
        assert stats.slots_free == stats.slots_total
        for tier in self.tiers:
            tier.close(TIMEOUT_S)


CALLS: tuple[Callable[[Scene], Request | None], ...] = (Scene.fetch, Scene.resume, Scene.suspend)


def fail_each(call: Callable[[Scene], Request | None], step: int) -> int:
    """Fails every so many-th operation of the device; how many there are."""
    at = 0
    while True:
        made, result = Scene([HostTier(8 << 20)]), None
        before, faults = everything(made.manager), Faults(at)
        raised = False
        with faults.injected():
            try:
                result = call(made)
            except DeviceFault:
                raised = True
        made.manager.check_invariants()
        if raised:
            after = everything(made.manager)
            for name in ("slots", "requests", "table", "free slots", "pins", "plans"):
                assert after[name] == before[name], f"{name}, operation {at}"
            assert made.manager.stats().blocks_in_flight == 0
        made.go_on(result)
        if faults.count <= at:
            return faults.count
        at += step


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_error_of_the_device_changes_nothing_or_is_a_miss(
    call: Callable[[Scene], Request | None],
):
    assert fail_each(call, 3) >= 2


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_error_at_each_operation_of_the_device(call: Callable[[Scene], Request | None]):
    fail_each(call, 1)


def interrupt(made: Scene, call: Callable[[Scene], Request | None], at: int) -> bool:
    """Whether it came to that."""
    result = None
    interrupts = Interrupts(at)
    with suppress(KeyboardInterrupt), interrupts.injected():
        result = call(made)
    try:
        made.manager.prefix.evict(0)
    except RecoveryNeeded:
        made.manager.recover()
    made.go_on(result)
    return interrupts.count > at


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_is_recovered_from(call: Callable[[Scene], Request | None], tmp_path: Path):
    counted = Interrupts()
    made = Scene([HostTier(8 << 20), disk(tmp_path)])
    with counted.injected():
        result = call(made)
    made.go_on(result)
    assert not counted.python_locks
    hits = 0
    for nth in range(4):
        tiers: list[Tier] = [HostTier(8 << 20), disk(tmp_path / str(nth))]
        hits += interrupt(Scene(tiers), call, nth * counted.count // 5)
    assert hits >= 2


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_at_many_lines_is_recovered_from(call: Callable[[Scene], Request | None]):
    at = 0
    while interrupt(Scene([HostTier(8 << 20)]), call, at) or at < 100:
        at += 41
