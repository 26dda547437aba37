"""Errors of the device and interrupts while a request is offered and arrives: nothing changed, or
`recover`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dsv4.cache.changes import release_now
from dsv4.errors import Dsv4Error, OfferError, RecoveryNeeded
from tests.support.faults import DeviceFault, Faults, Interrupts, everything
from tests.support.handoff import assert_nothing_left, close, grown, handing, side, until
from tests.support.lives import Text, assert_cold
from tests.support.stack import Stack

TEXT = 1
LENGTH = 300


class Scene:
    def __init__(self, owner: Stack, taker: Stack) -> None:
        self.owner, self.taker = owner, taker
        self.text, self.live = (Text.random(owner, seed, 400) for seed in (TEXT, 2))
        self.request = grown(owner, self.text, LENGTH)
        self.given = owner.manager.handoff.offer(self.request, takers=100)
        self.other = grown(taker, self.live, 140)

    def offer(self) -> None:
        self.owner.manager.handoff.offer(self.request)

    def withdraw(self) -> None:
        self.owner.manager.handoff.withdraw(self.given)

    def accept(self) -> None:
        self.taker.manager.handoff.accept(self.given).wait()

    def cancel(self) -> None:
        self.taker.manager.handoff.accept(self.given).cancel()

    def go_on(self) -> None:
        """All that was live is what it was, and the request can be handed over."""
        for stack in (self.owner, self.taker):
            stack.manager.check_invariants()
        assert_cold(self.owner, self.request, self.text.stream)
        assert_cold(self.taker, self.other, self.live.stream)
        for request in self.taker.manager.requests:
            if request is not self.other:
                assert_cold(self.taker, request, self.text.stream)
                self.taker.manager.release_request(request)
        until(self.taker.manager, lambda: not handing(self.taker).arrivals.open)
        copy = self.taker.manager.handoff.accept(
            self.owner.manager.handoff.offer(self.request)
        ).wait()
        assert_cold(self.taker, copy, self.text.stream)
        assert_nothing_left(self.owner, self.taker)


CALLS = (Scene.offer, Scene.withdraw, Scene.accept, Scene.cancel)


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Stack, Stack]]:
    owner, taker = side("prefill", max_requests=2), side("decode", drafts=2, max_requests=3)
    yield owner, taker
    close(owner, taker)


def test_a_device_error_in_an_offer_changes_nothing(sides: tuple[Stack, Stack]):
    scene = Scene(*sides)
    fail_at = 0
    while True:
        faults, before = Faults(fail_at), everything(scene.owner.manager)
        with faults.injected(), suppress(DeviceFault):
            scene.offer()
        if faults.count <= fail_at:
            break
        assert everything(scene.owner.manager) == before
        fail_at += 1
    assert fail_at
    scene.go_on()


def test_a_device_error_when_it_arrives_leaves_nothing(sides: tuple[Stack, Stack]):
    scene = Scene(*sides)
    fail_at = 0
    while True:
        faults = Faults(fail_at)
        with faults.injected(), suppress(OfferError):
            scene.accept()
        if faults.count <= fail_at:
            break
        assert [r for r in scene.taker.manager.requests if r is not scene.other] == []
        until(scene.taker.manager, lambda: not handing(scene.taker).arrivals.open)
        assert scene.taker.manager.stats().blocks_in_flight == 0
        scene.taker.manager.check_invariants()
        fail_at += 1
    assert fail_at
    scene.go_on()


def interrupt(scene: Scene, call: Callable[[Scene], None], at: int) -> bool:
    """Interrupts the call at its n-th line. Whether it had one."""
    interrupts = Interrupts(at)
    with suppress(KeyboardInterrupt), interrupts.injected():
        call(scene)
    for stack in (scene.owner, scene.taker):
        with suppress(RecoveryNeeded):
            release_now(stack.manager)
        stack.manager.recover()
    scene.go_on()
    return interrupts.count > at


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_is_recovered_from(sides: tuple[Stack, Stack], call: Callable[[Scene], None]):
    counted = Interrupts()
    scene = Scene(*sides)
    with counted.injected():
        call(scene)
    scene.go_on()
    for nth in (1, 4):
        assert interrupt(Scene(*sides), call, nth * counted.count // 9)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_at_every_line_is_recovered_from(
    sides: tuple[Stack, Stack], call: Callable[[Scene], None]
):
    at = 0
    while interrupt(Scene(*sides), call, at) or at < 100:
        at += 1 if at < 600 else 7  # behind these it polls
        if at > 1500:
            break
    assert at > 100 or call is Scene.withdraw


def test_recover_without_need_ends_arrivals_and_no_offer(sides: tuple[Stack, Stack]):
    scene = Scene(*sides)
    arrival = scene.taker.manager.handoff.accept(scene.given)
    scene.taker.manager.recover()
    scene.owner.manager.recover()
    assert arrival.done
    assert isinstance(arrival.error, Dsv4Error)
    assert scene.taker.manager.handoff.accept(scene.given).wait().length == LENGTH
    scene.go_on()
