"""Requests between two processes whose blocks are in GPU memory, by NIXL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from dsv4.errors import MissingExtra

with suppress(MissingExtra):  # then every test is skipped
    from tests.handoff.test_processes import Remote, outcome, remote
    from tests.support.handoff import assert_nothing_left, close, side
    from tests.support.stack import Stack

pytestmark = [pytest.mark.gpu, pytest.mark.extra("nixl")]


@pytest.fixture(scope="module")
def taker() -> Iterator[Stack]:
    stack = side("decode", drafts=2, num_blocks=14, device="cuda")
    yield stack
    close(stack)


@pytest.fixture(scope="module")
def owner(taker: Stack) -> Iterator[Remote]:
    with remote(device="cuda", transports=None) as started:
        yield started


@pytest.mark.parametrize("length", [1, 128, 300, 433])
def test_a_request_comes_from_another_process(owner: Remote, taker: Stack, length: int):
    offer = owner.offer(length, length)
    assert outcome(taker, taker.manager.handoff.accept(offer), length) == "here"
    assert_nothing_left(taker)
    assert owner.ask("check")


def test_memory_is_used_again_at_once(owner: Remote, taker: Stack):
    """Blocks that the last step has just written are read into."""
    for seed in range(20):
        offer = owner.offer(seed, 433, lease_s=0.01 if seed % 3 == 2 else 30.0)
        assert outcome(taker, taker.manager.handoff.accept(offer), seed) in ("here", "gone")
        if seed % 2:
            taker.manager.prefix.evict()
    assert_nothing_left(taker)
    assert owner.ask("check")
