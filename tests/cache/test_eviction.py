"""Which cached blocks go first: the least recently used ones, against a model that looks at every
block each time; and that another policy can be given, under the same rules."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import pytest

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.eviction import PASSED_OVER, Eviction, LeastRecentlyUsed
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.recover import recover_index
from dsv4.errors import InvalidInput
from tests.support.lives import Text, run_to, tiny_stack


@dataclass
class Model:
    """Names, what comes before each, and when each was used; `chosen` wait to be dropped."""

    has_tiers: bool
    parents: dict[str, str | None] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    clock: int = 0

    def use(self, name: str) -> None:
        self.clock += 1
        self.uses[name] = self.clock

    def choose(self, count: int, held: set[str], stored: set[str]) -> list[str]:
        """What goes, in order; what is in use is used by it."""
        victims: list[str] = []
        in_use: list[str] = []
        passed: list[str] = []
        most_passed = PASSED_OVER if self.has_tiers else 0
        while len(victims) < count:
            left = [name for name in self.uses if name not in (*victims, *in_use, *passed)]
            before = {self.parents[name] for name in self.uses if name not in victims}
            leaves = [name for name in left if name not in before]
            if not leaves and not passed:
                break
            if not leaves:
                most_passed, passed = 0, []
                continue
            first = min(leaves, key=self.uses.__getitem__)
            if first in held:
                in_use.append(first)
            elif first not in stored and len(passed) < most_passed:
                passed.append(first)
            else:
                victims.append(first)
                parent = self.parents[first]
                if parent is not None:
                    self.uses[parent] = max(self.uses[parent], self.uses[first])
        for name in in_use:
            self.use(name)
        return victims

    def drop(self, victims: list[str]) -> None:
        for name in victims:
            del self.uses[name], self.parents[name]


class Life:
    """An index with the policy, and the model beside it."""

    def __init__(self, draw: random.Random, blocks: int, *, has_tiers: bool) -> None:
        self.draw, self.allocator = draw, BlockAllocator(blocks)
        self.index = PrefixIndex(self.allocator)
        self.index.has_tiers = has_tiers
        self.model = Model(has_tiers)
        self.nodes: dict[str, PrefixNode] = {}
        self.held: set[str] = set()  # each by a request of its own, with all before it
        self.count = 0

    def up_to(self, name: str) -> list[str]:
        found: list[str] = []
        node: str | None = name
        while node is not None:
            found.append(node)
            node = self.model.parents[node]
        return found

    def add(self) -> None:
        if not self.allocator.free:
            return
        name = str(self.count)
        self.count += 1
        parent = self.draw.choice([None, *self.nodes, *list(self.nodes)[-3:]])
        (block,) = self.allocator.take(1)
        node = self.index.add(name.encode(), block, None if parent is None else self.nodes[parent])
        node.stored = self.draw.random() < 0.3
        self.allocator.release([block])
        self.nodes[name], self.model.parents[name] = node, parent
        self.model.use(name)

    def use(self) -> None:
        if self.nodes:
            name = self.draw.choice(list(self.nodes))
            self.index.touch(self.nodes[name])
            self.model.use(name)

    def hold(self) -> None:
        if self.nodes:
            name = self.draw.choice(list(self.nodes))
            blocks = [self.nodes[each].block_id for each in self.up_to(name)]
            if name in self.held:
                self.held.remove(name)
                self.allocator.release(blocks)
            else:
                self.held.add(name)
                self.allocator.share(blocks)

    def pin(self) -> None:
        if self.nodes:
            node = self.draw.choice(list(self.nodes.values()))
            node.pins = 1 - node.pins

    def store(self) -> None:
        if self.nodes:
            self.draw.choice(list(self.nodes.values())).stored = True

    def rebuild(self) -> None:
        recover_index(self.index)

    def evict(self) -> None:
        count, fewer = self.draw.randint(0, 8), self.draw.random() < 0.5
        held = {name for name, node in self.nodes.items() if node.pins}
        held |= {each for name in self.held for each in self.up_to(name)}
        stored = {name for name, node in self.nodes.items() if node.stored}
        expected: list[str] = []
        if fewer or count <= self.allocator.idle:
            expected = self.model.choose(count, held, stored)
            if len(expected) < count and not fewer:
                expected = []
        victims = self.index.choose(count, or_fewer=fewer)
        assert [node.digest.decode() for node in victims] == expected
        if self.draw.random() < 0.3:
            self.index.spare(victims)
        else:
            self.index.drop(victims)
            self.model.drop(expected)
            for name in expected:
                del self.nodes[name]

    def check(self) -> None:
        self.index.check_invariants()
        self.allocator.check_invariants()
        uses = {name: node.last_use for name, node in self.nodes.items()}
        assert uses == self.model.uses


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_random_life_against_the_model(seed: int, has_tiers: bool):
    draw = random.Random(seed)
    life = Life(draw, blocks=draw.choice((12, 30, 120)), has_tiers=has_tiers)
    calls = (
        *(Life.add,) * 8,
        *(Life.use,) * 4,
        *(Life.hold, Life.pin, Life.store, Life.evict, Life.evict, Life.rebuild),
    )
    for _ in range(500):
        draw.choice(calls)(life)
        life.check()
    assert life.index.evictions > 5


class FirstCachedFirst:
    """Another policy: how long a block has been there, whoever uses it."""

    def __init__(self) -> None:
        self.made: dict[PrefixNode, int] = {}
        self.leaves: list[tuple[int, int, PrefixNode]] = []
        self.states: dict[PrefixNode, None] = {}

    def used(self, node: PrefixNode) -> None:
        self.made.setdefault(node, len(self.made))

    returned = used

    def offer(self, node: PrefixNode) -> None:
        heapq.heappush(self.leaves, (self.made[node], id(node), node))

    def is_offered(self, node: PrefixNode) -> bool:
        return any(each is node for _, _, each in self.leaves)

    def choose(self, eviction: Eviction) -> None:
        kept = []
        while self.leaves and not eviction.is_done:
            entry = heapq.heappop(self.leaves)
            node = entry[-1]
            if node in eviction.victims or not eviction.is_leaf(node):
                continue
            if eviction.is_held(node):
                kept.append(entry)
            elif (parent := eviction.take(node)) is not None:
                self.offer(parent)
        for entry in kept:
            heapq.heappush(self.leaves, entry)

    def superseded(self, node: PrefixNode) -> None:
        pass

    def dropped(self, node: PrefixNode) -> None:
        del self.made[node]

    def snapshot_used(self, node: PrefixNode) -> None:
        self.states.setdefault(node)

    def snapshot_dropped(self, node: PrefixNode) -> None:
        del self.states[node]

    def snapshots(self) -> Iterator[PrefixNode]:
        return iter(list(self.states))

    def rebuild(self, nodes: Collection[PrefixNode]) -> None:
        self.made = {node: self.made.get(node, 0) for node in nodes}
        self.leaves = []
        for node in nodes:
            if not node.children:
                self.offer(node)
        self.states = {node: None for node in nodes if node.snapshot is not None}


@pytest.mark.parametrize("policy", [LeastRecentlyUsed, FirstCachedFirst])
def test_a_policy_says_what_goes_first(policy: type):
    options = PrefixOptions(policy=full(), snapshots=2, eviction=policy)
    stack = tiny_stack(prefix=options, num_blocks=6, max_requests=1)
    manager = stack.manager
    texts = [Text.random(stack, nth, 400) for nth in range(3)]

    def run(nth: int) -> None:
        request = manager.admit_request(texts[nth].ids[:257])
        run_to(stack, request, texts[nth], 257)
        manager.release_request(request)
        manager.check_invariants()

    def cached(nth: int) -> int:
        return (
            manager.prefix.look_up(texts[nth].ids[:257]).reused_tokens // stack.schema.block_tokens
        )

    run(0)
    run(1)
    run(0)  # a use, which the second policy does not care for
    run(2)
    old, new = (0, 1) if policy is FirstCachedFirst else (1, 0)
    assert cached(2) == 2
    assert cached(old) < cached(new) == 2
    assert manager.prefix.evict() > 0
    assert [cached(nth) for nth in range(3)] == [0, 0, 0]
    assert manager.stats().blocks_free == manager.stats().blocks_total


def test_each_manager_has_a_policy_of_its_own():
    made = []

    def policy() -> LeastRecentlyUsed:
        made.append(LeastRecentlyUsed())
        return made[-1]

    options = PrefixOptions(eviction=policy)
    for _ in range(2):
        tiny_stack(prefix=options, num_blocks=4)
    assert len(made) == 2


def test_what_makes_no_policy_is_refused():
    with pytest.raises(InvalidInput, match="eviction='lru': give what makes a policy"):
        PrefixOptions(eviction="lru")  # type: ignore[arg-type]
