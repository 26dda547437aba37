"""The default eviction policy: what is worth least per byte goes first. Torch-free.

A block is worth what it costs to compute again (`Costs`) times how likely it is to come back soon
(`Returns`); all blocks have the same size. Under pressure blocks go in this order (docs/retention.md):

    1. those that a newer state of their session has superseded
    2. all others, the least worth first; each step of `Hints.priority` counts four times
    3. those whose `Hints.ttl_s` has not passed since their last use: the lowest priority first, then
       the one whose time ends first

and of blocks with the same rank one that a tier has before one that would be lost. Blocks of one
kind lie in a heap by their last use, so only the first of each kind are compared.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import count

from dsv4.cache.prefix.costs import Costs
from dsv4.cache.prefix.eviction import PASSED_OVER, Eviction
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.returns import Returns, kind_of

PER_PRIORITY = 4.0  # how much more a block is worth with each step of priority
NOT_WEIGHED = Costs(block_tokens=128, per_token=0.0, replay_tokens=1 << 20)
REMEMBERED = 4  # cached blocks for each evicted turn end that is remembered
FEWEST_REMEMBERED = 256

# superseded or not, priority, kind (of Returns)
Rank = tuple[bool, int, int]
Entry = tuple[float, int, PrefixNode]  # last use (or when its time ends), number, block
StateKey = tuple[bool, bool, Rank]  # whether a turn ends there, whether it has a time to stay, rank


class Retention:
    """An `EvictionPolicy`. `costs` are those of the model; the prefix cache sets them."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.costs = NOT_WEIGHED
        self._now = now
        self._returns = Returns()
        self._clock = 0
        self._nodes = 0
        self._numbers = count(1)
        self._heaps: dict[Rank, list[Entry]] = {}
        self._floors: dict[int, list[Entry]] = {}  # by priority: leaves whose time has not passed
        self._stale = 0  # entries of these heaps that are void
        self._states: dict[StateKey, OrderedDict[PrefixNode, None]] = {}
        self._state_keys: dict[PrefixNode, StateKey] = {}

    # ---- what happens to blocks --------------------------------------------------------------

    def used(self, node: PrefixNode) -> None:
        self._clock += 1
        if not node.last_use:
            self._enter(node)
        self._use(node)

    def returned(self, node: PrefixNode) -> None:
        """A prompt goes on after this block."""
        self._clock += 1
        if not node.children and node.is_turn_end:
            self._returns.returned(node.kind, self._clock - node.last_use)
            self._set_turns(node, node.turns + 1)
        self._use(node)
        node.is_turn_end = True

    def superseded(self, node: PrefixNode) -> None:
        """A newer state of its session does not begin with this block."""
        node.is_superseded = True
        self._offer_again(node)
        if node in self._state_keys:
            self._place(node, is_end=self._state_keys[node][0])

    def _use(self, node: PrefixNode) -> None:
        node.last_use = self._clock
        node.is_superseded = False
        if node.hints is not None and node.hints.ttl_s is not None:
            node.keep_until = self._now() + node.hints.ttl_s

    def _enter(self, node: PrefixNode) -> None:
        """A new block is in the turn of the block before it, unless it begins a branch."""
        self._nodes += 1
        parent, turns = node.parent, self._returns.back(node.digest, self._clock)
        if turns is not None:
            turns += 1
        elif parent is not None and parent.children == 1:
            turns = parent.turns
            parent.is_turn_end = False
        self._set_turns(node, turns or 0)
        node.is_turn_end = True

    def _set_turns(self, node: PrefixNode, turns: int) -> None:
        node.turns = turns
        node.kind = kind_of(turns, (node.depth + 1) * self.costs.block_tokens)

    def dropped(self, node: PrefixNode) -> None:
        self._nodes -= 1
        if node.queued:
            node.queued = 0
            self._stale += 1
        if node.is_turn_end:
            self._returns.evicted(node.digest, node.kind, node.turns, node.last_use, self._clock)
            most = max(FEWEST_REMEMBERED, self._nodes // REMEMBERED)
            self._returns.forget(most, self._clock)

    # ---- the order of blocks -----------------------------------------------------------------

    def offer(self, node: PrefixNode) -> None:
        if not node.queued:
            self._push(node)

    def is_offered(self, node: PrefixNode) -> bool:
        return bool(node.queued)

    def _offer_again(self, node: PrefixNode) -> None:
        """Its rank has changed."""
        if node.queued:
            self._stale += 1
            self._push(node)

    def _push(self, node: PrefixNode) -> None:
        node.queued, node.offered_use = next(self._numbers), node.last_use
        if node.keep_until and not node.is_superseded and node.keep_until > self._now():
            floor = self._floors.setdefault(node.priority, [])
            heapq.heappush(floor, (node.keep_until, node.queued, node))
        else:
            heap = self._heaps.setdefault(_rank(node), [])
            heapq.heappush(heap, (node.last_use, node.queued, node))
        if self._stale > 64 + self._nodes:
            self._clear_stale()

    def choose(self, eviction: Eviction) -> None:
        in_use: list[PrefixNode] = []
        passed: list[PrefixNode] = []
        most_passed = PASSED_OVER if eviction.has_tiers else 0
        self._end_floors()
        while not eviction.is_done:
            node = self._pop_least()
            if node is None and passed:  # no tier has the remaining ones
                most_passed = 0
                self._offer_all(passed)
                passed = []
            elif node is None:
                break
            elif not eviction.is_leaf(node):
                continue  # blocks come after it again: it is offered when they are gone
            elif eviction.is_held(node):
                in_use.append(node)
            elif not node.stored and len(passed) < most_passed:
                passed.append(node)
            else:
                self._take(eviction, node)
        self._offer_all(passed)
        # being in use counts as a use: it will not be looked at first next time
        for node in in_use:
            self.used(node)
            self.offer(node)

    def _pop_least(self) -> PrefixNode | None:
        """The block that goes first, no longer offered; None if there is none."""
        while True:
            heap = self._least_heap()
            if heap is None:
                return None
            _, number, node = heapq.heappop(heap)
            if node.queued != number:
                self._stale -= 1
                continue
            node.queued = 0
            if node.last_use == node.offered_use:
                return node
            self._push(node)  # used since

    def _least_heap(self) -> list[Entry] | None:
        """The heap whose first block goes first."""
        least, found = float("inf"), None
        for rank, heap in list(self._heaps.items()):
            if not heap:
                del self._heaps[rank]
                continue
            if rank[0]:
                return heap
            first = heap[0][2]
            worth = self._worth(rank, int(heap[0][0])) * self.costs.block(first.depth)
            if worth < least:
                least, found = worth, heap
        if found is None and (kept := [each for each in self._floors if self._floors[each]]):
            return self._floors[min(kept)]
        return found

    def _worth(self, rank: Rank, last_use: int) -> float:
        """How likely a return is, times what the priority says."""
        _, priority, kind = rank
        return self._returns.density(kind, self._clock - last_use) * PER_PRIORITY**priority

    def _take(self, eviction: Eviction, node: PrefixNode) -> None:
        parent = node.parent
        if parent is not None and node.last_use >= parent.last_use:
            # a use of a block is a use of all before it
            parent.last_use, parent.kind, parent.turns = node.last_use, node.kind, node.turns
            parent.hints = node.hints
            parent.keep_until = max(parent.keep_until, node.keep_until)
        freed = eviction.take(node)
        if freed is not None:
            freed.is_turn_end = False  # its turn has ended later
            freed.is_superseded = node.is_superseded
            self.offer(freed)

    def _offer_all(self, nodes: list[PrefixNode]) -> None:
        for node in nodes:
            self.offer(node)

    def _end_floors(self) -> None:
        """Blocks whose time has passed are worth what all others are."""
        now = self._now() if self._floors else 0.0
        for floor in self._floors.values():
            while floor and floor[0][0] <= now:
                _, number, node = heapq.heappop(floor)
                if node.queued == number:
                    self._push(node)
                else:
                    self._stale -= 1

    def _clear_stale(self) -> None:
        for heaps in (self._heaps.values(), self._floors.values()):
            for heap in heaps:
                heap[:] = [entry for entry in heap if entry[2].queued == entry[1]]
                heapq.heapify(heap)
        self._stale = 0

    # ---- snapshots ---------------------------------------------------------------------------

    def snapshot_used(self, node: PrefixNode) -> None:
        # a turn ends where nothing comes after, or where a request went on
        self._place(node, is_end=node in self._state_keys or not node.children)

    def snapshot_dropped(self, node: PrefixNode) -> None:
        self._remove(node)

    def snapshots(self) -> Iterator[PrefixNode]:
        """Superseded ones first, then those inside of turns, then ends of turns, the least worth
        first, then those whose time has not passed."""
        orders = [(key, iter(states)) for key, states in self._states.items()]
        heads = [(key, node, order) for key, order in orders if (node := next(order, None))]
        now = self._now() if heads else 0.0
        while heads:
            nth = min(range(len(heads)), key=lambda nth: self._state_worth(*heads[nth][:2], now))
            key, node, order = heads[nth]
            after = next(order, None)
            if after is None:
                del heads[nth]
            else:
                heads[nth] = key, after, order
            yield node

    def _state_worth(self, key: StateKey, node: PrefixNode, now: float) -> tuple[bool, bool, float]:
        is_end, _, rank = key
        worth = self._worth(rank, node.last_use) * self.costs.snapshot(node.depth)
        return node.keep_until > now, is_end and not rank[0], -1.0 if rank[0] else worth

    def _place(self, node: PrefixNode, *, is_end: bool) -> None:
        """The state at the end of this block was used last of its kind."""
        self._remove(node)
        key = is_end, node.keep_until > 0, _rank(node)
        self._states.setdefault(key, OrderedDict())[node] = None
        self._state_keys[node] = key

    def _remove(self, node: PrefixNode) -> None:
        key = self._state_keys.pop(node, None)
        if key is not None:
            states = self._states[key]
            del states[node]
            if not states:
                del self._states[key]

    # ---- after an interrupt ------------------------------------------------------------------

    def rebuild(self, nodes: Collection[PrefixNode]) -> None:
        self._nodes, self._stale = len(nodes), 0
        self._heaps, self._floors = {}, {}
        for node in nodes:
            node.queued = 0
        self._offer_all([node for node in nodes if not node.children])
        keys = self._state_keys
        known = [node for states in self._states.values() for node in states]
        kept = dict.fromkeys(node for node in nodes if node.snapshot is not None)
        order = [node for node in known if node in kept]
        self._states, self._state_keys = {}, {}
        for node in dict.fromkeys([*order, *kept]):
            self._place(node, is_end=keys[node][0] if node in keys else not node.children)


def _rank(node: PrefixNode) -> Rank:
    return node.is_superseded, node.priority, node.kind
