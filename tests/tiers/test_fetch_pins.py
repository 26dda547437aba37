"""What a fetch pins of a prompt is its own: nobody else's reason to give up, and gone with it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from dsv4.errors import OutOfBlocks, RecoveryNeeded
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Label
from dsv4.tiers.tier import PENDING, Progress, Ticket
from tests.support.faults import Interrupts
from tests.support.lives import Text, run_to
from tests.support.stack import Stack
from tests.support.tiered import TIMEOUT_S, assert_like_cold, empty, keep, stack_with


class Silent:
    """A tier that does not say yet what it has."""

    def __init__(self, tier: HostTier) -> None:
        self._tier, self.name, self.is_silent = tier, "silent", False

    def lookup(self, labels: Sequence[Label]) -> Ticket:
        return self._tier.lookup(labels)

    def poll(self, ticket: Ticket) -> Any:
        progress = self._tier.poll(ticket)
        if not self.is_silent:
            return progress
        return Progress(outcomes=(PENDING,) * len(progress.outcomes), settled=False)

    def __getattr__(self, call: str) -> Any:
        return getattr(self._tier, call)


def half_cached(tier: Any, **more: Any) -> tuple[Stack, Text]:
    """A prompt of three blocks that the tier has; the first two of them are cached too."""
    stack = stack_with([tier], **more)
    text = Text.random(stack, 3, 500)
    keep(stack, text, 400)
    empty(stack)
    request = stack.manager.admit_request(text.ids[:260])
    run_to(stack, request, text, 260)
    stack.manager.release_request(request)
    assert stack.manager.stats().blocks_cached == 2
    return stack, text


def test_blocks_that_a_fetch_keeps_are_waited_for():
    """A request that fits when the fetch is over is not told that it never does."""
    tier = Silent(HostTier(8 << 20))
    stack, text = half_cached(tier, num_blocks=4)
    manager = stack.manager
    tier.is_silent = True
    fetch = manager.tiers.fetch(text.ids[:400])
    assert not fetch.poll()
    assert manager.stats().blocks_pinned == 2
    with pytest.raises(OutOfBlocks, match="wait for") as caught:
        manager.admit_request(3 * 128)
    assert (caught.value.never, caught.value.pinned) == (False, 0)
    assert not manager.room.can_admit(3 * 128)
    fetch.cancel()
    manager.release_request(manager.admit_request(3 * 128))
    manager.check_invariants()


def test_blocks_that_a_caller_pins_too_are_not_waited_for():
    tier = Silent(HostTier(8 << 20))
    stack, text = half_cached(tier, num_blocks=4)
    manager = stack.manager
    tier.is_silent = True
    pinned = manager.prefix.pin(text.ids[:128])
    fetch = manager.tiers.fetch(text.ids[:400])
    with pytest.raises(OutOfBlocks, match=r"1 pinned.*unpin something") as caught:
        manager.admit_request(4 * 128)
    assert (caught.value.never, caught.value.pinned) == (True, 1)
    fetch.cancel()
    manager.prefix.unpin(pinned)
    manager.admit_request(4 * 128)


@pytest.mark.parametrize("inside", [False, True], ids=["lines", "calls"])
@pytest.mark.parametrize("call", ["fetch", "poll", "cancel"])
def test_an_interrupted_fetch_leaves_no_pin_that_nobody_has(call: str, inside: bool):
    stack, text = half_cached(HostTier(8 << 20))
    manager = stack.manager
    assert manager._parts.prefix
    files = (
        "/cache/changes.py",
        "/prefix/cache.py",
        "/transfers/fetch.py",
        "/transfers/loading.py",
    )
    at, found = 0, 0
    while True:
        fetch = manager.tiers.fetch(text.ids[:400]) if call != "fetch" else None
        interrupts = Interrupts(at, files, inside=inside)
        with suppress(KeyboardInterrupt), interrupts.injected():
            if fetch is None:
                fetch = manager.tiers.fetch(text.ids[:400])
            elif call == "cancel":
                fetch.cancel()
            else:
                while not fetch.poll():
                    time.sleep(0.001)
        is_over = interrupts.count <= at
        try:
            manager.prefix.evict(0)
        except RecoveryNeeded:
            found += 1
            manager.recover()
            fetch = None  # over, whoever has it
        if fetch is not None:
            fetch.cancel()
        elif manager.tiers:  # it was over, and did not come to its caller
            for each in tuple(manager.tiers.fetches.open):
                each.cancel()
        assert manager._parts.prefix.pins._standing == set(), at
        manager.check_invariants()
        manager.prefix.evict()
        stats = manager.stats()
        assert (stats.blocks_free, stats.blocks_in_flight) == (stats.blocks_total, 0)
        request = manager.admit_request(text.ids[:260])
        run_to(stack, request, text, 260)
        manager.release_request(request)
        if is_over:
            break
        at += {"fetch": 3, "poll": 11, "cancel": 1}[call]
    assert found > 10
    again = manager.tiers.admit(text.ids[:400], timeout_s=TIMEOUT_S)
    run_to(stack, again, text, 430)
    assert_like_cold(stack, again, text)
