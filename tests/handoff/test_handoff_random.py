"""Random lives of requests between three managers that are not alike: what arrives, and what it
becomes, is what a cold run has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from random import Random

import pytest

from dsv4.cache.handoff.arrival import Arrival
from dsv4.cache.prefix.options import full
from dsv4.cache.requests import Request
from dsv4.errors import OfferError, OutOfBlocks, OutOfSlots
from dsv4.tiers.host import HostTier
from tests.support.handoff import assert_nothing_left, close, grown, side
from tests.support.lives import ColdRun, Text
from tests.support.stack import Stack
from tests.support.tiered import options

LONGEST = 420
TEXTS = 4


@dataclass(slots=True, eq=False)
class Live:
    stack: Stack
    request: Request
    text: int


class Lives:
    def __init__(self, stacks: list[Stack], random: Random) -> None:
        self.stacks, self.random = stacks, random
        base = Text.random(stacks[0], 50, LONGEST + 10)
        others = [Text.random(stacks[0], 51 + nth, LONGEST + 10) for nth in range(TEXTS - 1)]
        # they begin alike: 0, 130 and 256 tokens
        self.texts = [
            base,
            *(base.then(o, at) for o, at in zip(others, (0, 130, 256), strict=True)),
        ]
        self.live: list[Live] = []
        self.offers: list[tuple[Stack, bytes, int, int]] = []
        self.arrivals: list[tuple[Stack, Arrival, int]] = []
        self.counts = dict.fromkeys(("arrived", "gone", "cancelled", "failed", "refused"), 0)

    def step(self) -> None:
        calls = [self.admit, self.run, self.run, self.run, self.offer, self.offer, self.accept]
        calls += [self.accept, self.poll, self.poll, self.poll, self.release, self.fork]
        calls += [self.rewind, self.evict, self.withdraw, self.cancel]
        stack = self.random.choice(self.stacks)
        try:
            self.random.choice(calls)(stack)
        except (OutOfBlocks, OutOfSlots):
            for each in self.of(stack)[:1]:
                self.drop(each)
        except OfferError as error:
            if error.reason != "busy":
                raise
            self.withdraw(stack)
        stack.manager.check_invariants()

    def of(self, stack: Stack) -> list[Live]:
        return [each for each in self.live if each.stack is stack]

    def one_of(self, stack: Stack) -> Live | None:
        found = self.of(stack)
        return self.random.choice(found) if found else None

    def admit(self, stack: Stack) -> None:
        text = self.random.randrange(TEXTS)
        ids = self.texts[text].ids[: self.random.choice((1, 127, 129, 256, 300))]
        self.live.append(Live(stack, stack.manager.admit_request(ids), text))

    def run(self, stack: Stack) -> None:
        each = self.one_of(stack)
        if each is None or each.request.length >= LONGEST:
            return
        text, start = self.texts[each.text], each.request.length
        narrow = stack.schema.max_decode_tokens
        count = min(self.random.choice((narrow, 40, 130)), LONGEST + 5 - start)
        ids = text.ids[start : start + count].tolist()
        kept = count if count > narrow else self.random.randint(min(1, count), count)
        stack.step([(each.request, text.stream, count)], accepted=[kept], ids=ids)

    def is_exact(self, request: Request) -> bool:
        return request.length >= max(1, request.rings_exact_from, request.reused_tokens)

    def offer(self, stack: Stack) -> None:
        each = self.one_of(stack)
        if each is None or not self.is_exact(each.request):
            return
        lease_s = self.random.choice((0.003, 60.0, 60.0, 60.0))
        offer = stack.manager.handoff.offer(
            each.request, lease_s=lease_s, takers=self.random.choice((1, 2, 3))
        )
        self.offers.append((stack, offer, each.text, each.request.length))
        if self.random.random() < 0.5:
            self.drop(each)

    def accept(self, stack: Stack) -> None:
        others = [each for each in self.offers[-6:] if each[0] is not stack]
        if others:
            _, offer, text, _ = self.random.choice(others)
            self.arrivals.append((stack, stack.manager.handoff.accept(offer), text))

    def poll(self, stack: Stack) -> None:
        for at, (where, arrival, text) in list(enumerate(self.arrivals))[::-1]:
            if where is stack and arrival.poll():
                del self.arrivals[at]
                self.settle(where, arrival, text)

    def settle(self, stack: Stack, arrival: Arrival, text: int) -> None:
        if arrival.request is None:
            assert arrival.error is not None
            self.counts[arrival.error.reason] += 1
            return
        self.counts["arrived"] += 1
        self.live.append(Live(stack, arrival.request, text))
        self.compare(self.live[-1])

    def cancel(self, stack: Stack) -> None:
        for where, arrival, _ in self.arrivals:
            if where is stack:
                arrival.cancel()
                return

    def withdraw(self, stack: Stack) -> None:
        own = [offer for where, offer, _, _ in self.offers if where is stack]
        if own:
            stack.manager.handoff.withdraw(self.random.choice(own))

    def fork(self, stack: Stack) -> None:
        each = self.one_of(stack)
        if each is not None and not each.request.is_torn:
            (fork,) = stack.manager.fork(each.request, 1)
            self.live.append(Live(stack, fork, each.text))

    def rewind(self, stack: Stack) -> None:
        each = self.one_of(stack)
        if each is not None and each.request.length > 2:
            length = self.random.choice((each.request.length - 1, each.request.length // 2))
            stack.manager.rewind(each.request, length)

    def evict(self, stack: Stack) -> None:
        if stack.manager.prefix:
            stack.manager.prefix.evict(self.random.randrange(3))

    def release(self, stack: Stack) -> None:
        each = self.one_of(stack)
        if each is not None:
            if self.is_exact(each.request):
                self.compare(each)
            self.drop(each)

    def drop(self, each: Live) -> None:
        self.live.remove(each)
        each.stack.manager.release_request(each.request)

    def compare(self, each: Live) -> None:
        stream = self.texts[each.text].stream
        cold = ColdRun(each.stack, stream, each.request.length)
        cold.assert_same(each.stack, each.request, with_drafts=False)

    def end(self) -> None:
        for stack, arrival, text in self.arrivals:
            arrival.cancel()
            self.settle(stack, arrival, text)
        for each in self.live:
            if self.is_exact(each.request):
                self.compare(each)
        self.live = []
        assert_nothing_left(*self.stacks)


@pytest.fixture(scope="module")
def stacks() -> Iterator[list[Stack]]:
    tier = HostTier(4 << 20)
    made = [
        side("a", drafts=3, num_blocks=14, max_requests=5, prefix=options(full())),
        side("b", num_blocks=10, max_requests=3, handoff={"states": 3}, tiers=[tier]),
        side("c", drafts=1, num_blocks=12, max_requests=4, prefix=None),
    ]
    yield made
    close(*made)


def acquaint(stacks: list[Stack]) -> None:
    """Every two have met, which takes a process for each: from then on an arrival takes a
    moment, and lives that are short on a busy machine see some."""
    for owner, taker in permutations(stacks, 2):
        request = grown(owner, Text.random(owner, 49, 20), 9)
        arrived = taker.manager.handoff.accept(owner.manager.handoff.offer(request)).wait()
        owner.manager.release_request(request)
        taker.manager.release_request(arrived)


def test_random_lives(stacks: list[Stack]):
    lives = Lives(stacks, Random(7))
    for _ in range(150):
        lives.step()
    lives.end()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
def test_random_lives_for_long(stacks: list[Stack], seed: int):
    acquaint(stacks)
    lives = Lives(stacks, Random(1000 + seed))
    for _ in range(3000):
        lives.step()
    lives.end()
    assert lives.counts["arrived"] > 40
    assert lives.counts["gone"] > 5
