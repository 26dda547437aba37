"""What the default policy keeps: what comes back, against what does not. Only counted memory: loads
run through the real index."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator

import pytest

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.costs import Costs
from dsv4.cache.prefix.eviction import PASSED_OVER, EvictionPolicy, LeastRecentlyUsed
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.retention import BINS, Retention, Returns, bin_of, start_of
from dsv4.cache.recover import recover_index
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec
from dsv4.simulate.replay import CountedMemory, replay
from dsv4.simulate.trace import TraceRequest, read_trace

FLASH = CacheSchema.build(ModelSpec.preset("v4-flash"))
BLOCK = FLASH.block_tokens


def prompt(names: list[int], tokens: int | None = None) -> TraceRequest:
    count = BLOCK * len(names) + 1 if tokens is None else tokens
    return TraceRequest(at_s=0.0, input_tokens=count, output_tokens=1, names=names)


class Names:
    """Block names that no other prompt has."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, count: int) -> list[int]:
        first, self.count = self.count, self.count + count
        return list(range(first, self.count))


# ---- a helper must not evict a session -----------------------------------------------------------


def session_and_helpers(policy: Callable[[], EvictionPolicy], *, turns: int) -> list[int]:
    """A session of 90,000 tokens, in a pool that holds it and a tenth more; between its turns 100
    helpers with prompts of 300 tokens each (a title, a summary), which together need more than what
    is left. Returns how many tokens of each turn after the first were computed again although the
    session had them."""
    names = Names()
    session = names.take(90_000 // BLOCK)
    memory = CountedMemory(FLASH, len(session) * 11 // 10, policy())
    lost = []
    for turn in range(turns):
        had = 0 if not turn else len(session) * BLOCK
        if turn:
            session += names.take(2)
        hit = memory.run(prompt(session))
        lost.append(had - hit)
        for _ in range(100):
            memory.run(prompt(names.take(2), 300))
        memory.index.check_invariants()
    return lost[1:]


def test_helpers_do_not_evict_a_session() -> None:
    """From the first turn on, when nothing was learned yet."""
    assert session_and_helpers(Retention, turns=12) == [0] * 11


def test_the_least_recently_used_order_loses_the_session_to_helpers() -> None:
    """What the test above would find without a policy of its own."""
    assert min(session_and_helpers(LeastRecentlyUsed, turns=4)) > 0


# ---- against the least recently used order -------------------------------------------------------


def mixed_load(seed: int, requests: int) -> Iterator[TraceRequest]:
    """Conversations whose turns come back after a while, among prompts that never do."""
    draw, names = random.Random(seed), Names()
    system = names.take(2)
    talks: list[list[int]] = []
    for _ in range(requests):
        if talks and draw.random() < 0.4:
            talk = draw.choice(talks)
            talk += names.take(draw.randint(1, 3))
            if draw.random() < 0.15:
                talks.remove(talk)
        else:
            talk = [*system, *names.take(draw.randint(2, 40))]
            if draw.random() < 0.25:
                talks.append(talk)
        yield prompt(list(talk))


@pytest.mark.parametrize("blocks", [300, 1200])
def test_it_finds_more_than_the_least_recently_used_order(blocks: int) -> None:
    load = list(mixed_load(1, 1500))
    capacity = blocks * FLASH.bytes.block
    lru = replay(load, FLASH, LeastRecentlyUsed, capacity_bytes=capacity)
    own = replay(load, FLASH, Retention, capacity_bytes=capacity)
    assert lru.evictions > 0
    assert own.tokens_asked == lru.tokens_asked == sum(each.input_tokens for each in load)
    assert own.tokens_hit > 1.05 * lru.tokens_hit


def test_it_finds_the_same_where_everything_fits() -> None:
    load = list(mixed_load(2, 300))
    capacity = 1_000_000 * FLASH.bytes.block
    lru = replay(load, FLASH, LeastRecentlyUsed, capacity_bytes=capacity)
    own = replay(load, FLASH, Retention, capacity_bytes=capacity)
    assert (own.tokens_hit, own.evictions) == (lru.tokens_hit, 0)
    # counted without an index: the longest beginning that any prompt before had
    seen: set[int] = set()
    hit = 0
    for each in load:
        found = [name in seen for name in each.names]
        hit += BLOCK * (found.index(False) if False in found else len(found))
        seen.update(each.names)
    assert own.tokens_hit == hit


# ---- any life ------------------------------------------------------------------------------------


class Cached:
    """An index with the policy, blocks that are made one by one, and a clock."""

    def __init__(self, blocks: int = 64, *, has_tiers: bool = False) -> None:
        self.allocator = BlockAllocator(blocks)
        self.at_s = 1000.0
        self.policy = Retention(now=lambda: self.at_s)
        self.index = PrefixIndex(self.allocator, self.policy)
        self.index.has_tiers = has_tiers
        self.made = 0

    def add(self, parent: PrefixNode | None = None, hints: Hints | None = None) -> PrefixNode:
        (block,) = self.allocator.take(1)
        self.made += 1
        node = self.index.add(str(self.made).encode(), block, parent, hints=hints)
        self.allocator.release([block])
        return node

    def chain(self, blocks: int, hints: Hints | None = None) -> list[PrefixNode]:
        nodes: list[PrefixNode] = []
        for _ in range(blocks):
            nodes.append(self.add(nodes[-1] if nodes else None, hints))
        self.index.touch(nodes[-1])
        return nodes

    def evict(self, count: int) -> list[PrefixNode]:
        victims = self.index.choose(count, or_fewer=True)
        self.index.drop(victims)
        return victims


def random_life(seed: int, *, has_tiers: bool) -> None:
    draw = random.Random(seed)
    cached = Cached(40, has_tiers=has_tiers)
    held: list[list[int]] = []
    hints = [None, Hints(priority=2), Hints(ttl_s=5.0), Hints(session="s", priority=-1, ttl_s=50.0)]
    for _ in range(400):
        cached.at_s += draw.random()
        nodes = list(cached.index.nodes())
        what = draw.randrange(8)
        if what < 3 and cached.allocator.free:
            cached.add(draw.choice([None, *nodes]), draw.choice(hints))
            nodes = list(cached.index.nodes())
            draw.choice(nodes).stored = True
        elif what == 3 and nodes:
            draw.choice([cached.index.touch, cached.index.policy.returned])(draw.choice(nodes))
        elif what == 4 and nodes:
            path, node = [], draw.choice(nodes)
            at: PrefixNode | None = node
            while at is not None:
                path.append(at.block_id)
                at = at.parent
            cached.allocator.share(path)
            held.append(path)
        elif what == 5 and held:
            cached.allocator.release(held.pop(draw.randrange(len(held))))
        elif what == 6:
            check_eviction(cached, draw, held)
        elif nodes:
            leaf = draw.choice([node for node in nodes if not node.children])
            draw.choice([cached.policy.superseded, lambda _: recover_index(cached.index)])(leaf)
        cached.index.check_invariants()
        cached.allocator.check_invariants()
    for path in held:
        cached.allocator.release(path)
    cached.evict(1000)
    assert len(cached.index) == 0
    assert cached.allocator.free == cached.allocator.total


def check_eviction(cached: Cached, draw: random.Random, held: list[list[int]]) -> None:
    """As many go as were wanted or could, children before parents, nothing that is held."""
    in_use = {block for path in held for block in path}
    could = sum(node.block_id not in in_use for node in cached.index.nodes())
    wanted = draw.randint(0, 12)
    victims = cached.index.choose(wanted, or_fewer=True)
    assert len(victims) == len(set(victims)) == min(wanted, could)
    assert not in_use.intersection(node.block_id for node in victims)
    place = {node: nth for nth, node in enumerate(victims)}
    for node in cached.index.nodes():
        if node.parent in place:
            assert place[node] < place[node.parent]
    if draw.random() < 0.3:
        cached.index.spare(victims)
    else:
        cached.index.drop(victims)


@pytest.mark.parametrize("has_tiers", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_nothing_held_goes_and_everything_idle_can(
    seed: int, has_tiers: bool
) -> None:
    random_life(seed, has_tiers=has_tiers)


# ---- the order under pressure --------------------------------------------------------------------


def test_the_order_under_pressure() -> None:
    """Superseded, then by priority, then what has a time to stay, the one that ends first."""
    cached = Cached()
    hour = cached.chain(1, Hints(ttl_s=3600))
    minute = cached.chain(1, Hints(ttl_s=60))
    cheap_hour = cached.chain(1, Hints(ttl_s=3600, priority=-1))
    dear = cached.chain(1, Hints(priority=3))
    plain = cached.chain(1)
    cheap = cached.chain(1, Hints(priority=-3))
    cut = cached.chain(2, Hints(session="s", ttl_s=3600, priority=8))
    cached.policy.superseded(cut[1])
    expected = [cut[1], cut[0], *cheap, *plain, *dear, *cheap_hour, *minute, *hour]
    assert cached.evict(100) == expected


def test_a_time_to_stay_passes_and_is_refreshed_by_use() -> None:
    cached = Cached()
    kept = cached.chain(1, Hints(ttl_s=60))
    used = cached.chain(1, Hints(ttl_s=60))
    plain = cached.chain(1)
    cached.at_s += 50
    cached.index.policy.returned(used[0])
    cached.at_s += 20  # the first one's time has passed, the second one's has not
    order = cached.evict(3)
    assert order[-1] is used[0]
    assert set(order[:2]) == {kept[0], plain[0]}


def test_a_superseded_block_that_is_used_again_is_like_any_other() -> None:
    cached = Cached()
    cut, plain = cached.chain(1), cached.chain(1)
    cached.policy.superseded(cut[0])
    cached.index.policy.returned(cut[0])
    assert cached.evict(2) == [*plain, *cut]


def test_what_a_tier_has_goes_first() -> None:
    cached = Cached(has_tiers=True)
    lost, stored = cached.chain(1), cached.chain(1)
    stored[0].stored = True
    assert cached.evict(1) == stored
    assert PASSED_OVER > 1
    assert cached.evict(1) == lost


def test_ends_of_turns_keep_their_snapshots_longest() -> None:
    cached = Cached()
    helper, session = cached.chain(1), cached.chain(40)  # short, long
    for row, node in enumerate((session[2], session[5], session[-1], helper[0])):
        node.snapshot = row
        cached.policy.snapshot_used(node)
    assert list(cached.policy.snapshots()) == [session[2], session[5], helper[0], session[-1]]
    cached.policy.snapshot_used(session[2])  # a request went on from there: a turn ends there too
    assert next(cached.policy.snapshots()) is session[5]
    cached.policy.snapshot_dropped(session[5])
    session[5].snapshot = None
    recover_index(cached.index)
    assert set(cached.policy.snapshots()) == {helper[0], session[2], session[-1]}
    assert list(cached.policy.snapshots())[-1] is session[-1]


# ---- what it costs the host ----------------------------------------------------------------------


def calls(work: Callable[[], object]) -> int:
    count = 0

    def note(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def eviction_calls(blocks: int) -> float:
    """Per evicted block, with this many cached."""
    cached = Cached(blocks)
    while cached.allocator.free:
        cached.chain(min(8, cached.allocator.free))
    cached.evict(64)
    return calls(lambda: cached.evict(64)) / 64


def test_an_eviction_costs_the_same_however_much_is_cached() -> None:
    """Calls per block: a heap's comparisons, which grow with the logarithm, are not calls."""
    assert eviction_calls(16_384) < 1.5 * eviction_calls(1024)


# ---- its parts -----------------------------------------------------------------------------------


def test_bins_of_ages_have_no_gaps() -> None:
    for age in (*range(5000), 10**6, 10**9):
        nth = bin_of(age)
        assert start_of(nth) <= age < start_of(nth + 1) or nth == BINS - 1
    assert bin_of(2**60) == BINS - 1


def test_what_returns_is_worth_more_than_what_is_lost() -> None:
    returns = Returns()
    for nth in range(600):
        returns.returned(3, 400)
        returns.evicted(nth, 1, 0, 0, now=400)
        returns.forget(10)
    assert returns.density(3, 100) > 10 * returns.density(1, 100)
    assert returns.back(599, now=500) == 0
    assert returns.back(0, now=500) is None


def test_a_deep_token_costs_more_and_a_replay_has_an_end() -> None:
    costs = Costs.of(FLASH)
    assert costs.token(0) == 1.0 < costs.token(100) < costs.token(1000)
    layers = len(FLASH.layers)
    assert costs.replay_tokens == FLASH.model.window * layers
    assert costs.snapshot(1) < costs.snapshot(50) < costs.snapshot(8000)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"session": ""}, "session=''"),
        ({"session": 3}, "session=3"),
        ({"priority": 9}, "priority=9"),
        ({"priority": True}, "priority=True"),
        ({"ttl_s": 0}, "ttl_s=0"),
        ({"ttl_s": float("nan")}, "ttl_s=nan"),
        ({"ttl_s": "5m"}, "ttl_s='5m'"),
        ({"final": 1}, "final=1"),
        ({"final": True}, "name the session"),
    ],
)
def test_hints_that_cannot_be_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Hints(**wrong)  # type: ignore[arg-type]


def test_a_trace_is_read_and_bad_lines_are_named(tmp_path) -> None:
    good = '{"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
    file = tmp_path / "trace.jsonl"
    file.write_text(good + "\n" + good)
    read = list(read_trace(file))
    assert read[0] == TraceRequest(at_s=1.5, input_tokens=600, output_tokens=5, names=[0, 1])
    assert len(read) == 2
    for bad in ("nonsense", "[]", '{"timestamp": 0}', good.replace("[0, 7]", '"07"')):
        file.write_text(good + bad)
        with pytest.raises(InvalidInput, match="line 2"):
            list(read_trace(file))
    with pytest.raises(InvalidInput, match="cannot be read"):
        list(read_trace(tmp_path / "none"))
