"""The default eviction policy: what is worth least per byte goes first. Torch-free.

A block is worth what it costs to compute again (`Costs`) times how likely it is to come back soon
(`Returns`); all blocks have the same size. Under pressure blocks go in this order, which
docs/retention.md explains:

    1. those that a newer state of their session has superseded
    2. all others, the least worth first; each step of `Hints.priority` counts four times
    3. those whose `Hints.ttl_s` has not passed since their last use: the lowest priority first,
       then the one whose time ends first

and of blocks with the same rank one that a tier has before one that would be lost. Blocks of one
kind lie in a heap by their last use, so only the first of each kind are compared.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count, islice
from typing import Literal

from dsv4.cache.prefix.costs import Costs
from dsv4.cache.prefix.eviction import Eviction
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.order import Order, Orders

PER_PRIORITY = 4.0  # how much more a block is worth with each step of priority
NOT_WEIGHED = Costs(block_tokens=128, per_token=0.0, replay_tokens=1 << 20)
# How much the cost of a block weighs against the likelihood of its return. Fully weighed (1.0),
# deep prompts that seldom come back displace shallow ones that do: on the traces of
# docs/retention.md that loses more hit tokens than this policy may lose.
COST_POWER = 0.25
REMEMBERED = 4  # cached blocks for each evicted turn end that is remembered
FEWEST_REMEMBERED = 64
MOST_NEWS = 4096
NOT_IN_A_HEAP = -1  # of an offered block, in place of the number of its entry

KINDS = 6  # by turns (first, second, later) and by length (short, long)
LONG_TOKENS = 4096  # from here on a prompt is long
BINS = 160  # four for each doubling of the age
ENOUGH = 256  # lives between two looks at what was learned; the first looks come sooner
MOST_LOOKED_AT = 1024  # of the evicted turn ends, in one look
KEPT = 0.97  # of what was learned, at each look
# what is assumed of each kind before anything was seen, as this number of lives. A short first
# prompt (a title, a summary) seldom comes back; each turn that came makes another one likelier.
ASSUMED_LIVES = 0.1
ASSUMED_RETURNS = (1 / 16, 1.0, 1.0, 2.0, 2.0, 4.0)
POOLED = 0.1  # how much what all kinds do says of each: of some there are few
YOUNG = 64  # ticks: at younger ages nothing is known

# superseded or not, priority, kind (of Returns)
Rank = tuple[bool, int, int]
What = Literal["used", "returned", "superseded", "dropped", "state used", "state dropped"]
News = tuple[What, PrefixNode, int, int, float]  # when in ticks, blocks after it, when in seconds
StateKey = tuple[bool, bool, Rank]  # whether a turn ends there, whether it has a time to stay, rank


def kind_of(turns: int, tokens: int) -> int:
    return 2 * min(turns, 2) + (tokens >= LONG_TOKENS)


def bin_of(age: int) -> int:
    shift = max(0, age.bit_length() - 3)
    return min(BINS - 1, 4 * shift + (age >> shift))


def start_of(nth: int) -> int:
    """The youngest age of a bin."""
    shift = max(0, nth // 4 - 1)
    return (nth - 4 * shift) << shift


class Returns:
    """How likely it is that a cached prompt comes back, learned from those that did.

    The clock counts what happens: a block that is cached, used or evicted is a tick. Each turn of a
    conversation ends with a block, whose life ends when a prompt goes on from there (a return), or
    when it was evicted long ago (a loss); some have not come back yet. From these, by kind and age:

        density(kind, age) = returns at this age or later / ticks lived from this age on

    That is what a block of memory earns per tick from now on (least hit density: Beckmann and
    others, NSDI 2018). What was evicted is remembered for some time, so that its return is noticed.
    """

    def __init__(self) -> None:
        self._returned = [[0.0] * BINS for _ in range(KINDS)]
        self._lost = [[0.0] * BINS for _ in range(KINDS)]
        # kind, last use, turns; the oldest first
        self._gone = OrderedDict[Hashable, tuple[int, int, int]]()
        self._lives = self._at = 0
        self._density: list[list[float]] = []
        self._look()

    def density(self, kind: int, age: int) -> float:
        return self._density[kind][bin_of(age)]

    def returned(self, kind: int, age: int) -> None:
        """A prompt goes on from a turn end of this age."""
        self._returned[kind][bin_of(age)] += 1
        self._note()

    def evicted(self, name: Hashable, kind: int, turns: int, last_use: int, now: int) -> None:
        """A turn end was evicted. It may still come back."""
        self._gone[name] = kind, last_use, turns
        self._at = now
        self._note()

    def back(self, name: Hashable, now: int) -> int | None:
        """The number of turns of an evicted turn end that is cached again; None if it is not
        remembered."""
        found = self._gone.pop(name, None)
        if found is None:
            return None
        kind, last_use, turns = found
        self.returned(kind, now - last_use)
        return turns

    def forget(self, remembered: int) -> None:
        """Keeps at most this number of evicted turn ends; the others count as lost."""
        while len(self._gone) > remembered:
            _, (kind, last_use, _) = self._gone.popitem(last=False)
            self._lost[kind][bin_of(self._at - last_use)] += 1

    def _note(self) -> None:
        self._lives += 1
        if self._lives % ENOUGH == 0:
            self._look()
            for counts in (*self._returned, *self._lost):
                counts[:] = [KEPT * count for count in counts]
        elif self._lives < ENOUGH and self._lives >= 16 and not self._lives & self._lives - 1:
            self._look()

    def _look(self) -> None:
        waiting = self._waiting()
        sums = [self._sums(kind, waiting[kind]) for kind in range(KINDS)]
        pooled = [
            (sum(each[0] for each in of_bin), sum(each[1] for each in of_bin))
            for of_bin in zip(*sums, strict=True)
        ]
        self._density = [
            [
                (returns + POOLED * all_returns + ASSUMED_LIVES * ASSUMED_RETURNS[kind])
                / (ticks + POOLED * all_ticks + ASSUMED_LIVES * (YOUNG + start_of(nth)))
                for nth, ((returns, ticks), (all_returns, all_ticks)) in enumerate(
                    zip(sums[kind], pooled, strict=True)
                )
            ]
            for kind in range(KINDS)
        ]

    def _waiting(self) -> list[list[float]]:
        """How many remembered turn ends of each kind and age have not come back yet."""
        found = [[0.0] * BINS for _ in range(KINDS)]
        step = 1 + len(self._gone) // MOST_LOOKED_AT
        for kind, last_use, _ in islice(self._gone.values(), 0, None, step):
            found[kind][bin_of(self._at - last_use)] += step
        return found

    def _sums(self, kind: int, waiting: list[float]) -> list[tuple[float, float]]:
        """From each bin on: returns, and ticks lived."""
        returned, lost = self._returned[kind], self._lost[kind]
        sums = [(0.0, 0.0)] * BINS
        returns = lives = ticks = 0.0
        for nth in range(BINS - 1, -1, -1):
            returns += returned[nth]
            lives += returned[nth] + lost[nth] + waiting[nth]
            ticks += lives * (start_of(nth + 1) - start_of(nth))
            sums[nth] = returns, ticks
        return sums


class Retention:
    """An `EvictionPolicy`. `costs` are those of the model; the prefix cache sets them.

    What happens is only noted; it is looked at when memory is needed (`_catch_up`), so that a
    commit and an admission cost little.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self.costs = NOT_WEIGHED
        self._now = now
        self._returns = Returns()
        self._clock = 0
        self._nodes = 0
        self._news: list[News] = []
        self._offered: list[PrefixNode] = []  # not in a heap yet
        self._numbers = count(1)
        # heaps by rank; those by priority have leaves whose time has not passed
        self._orders = Orders[Rank | int]()
        # of each rank: the number of the first entry, and what that was worth at which time
        self._heads: dict[Rank, tuple[int, int, float]] = {}
        self._states: dict[StateKey, OrderedDict[PrefixNode, None]] = {}
        self._state_keys: dict[PrefixNode, StateKey] = {}

    # ---- what happens ------------------------------------------------------------------------

    def used(self, node: PrefixNode) -> None:
        self._note("used", node)

    def returned(self, node: PrefixNode) -> None:
        self._note("returned", node)

    def superseded(self, node: PrefixNode) -> None:
        """A newer state of its session does not begin with this block."""
        self._note("superseded", node)

    def dropped(self, node: PrefixNode) -> None:
        self._note("dropped", node)

    def snapshot_used(self, node: PrefixNode) -> None:
        self._note("state used", node)

    def snapshot_dropped(self, node: PrefixNode) -> None:
        self._note("state dropped", node)

    def _note(self, what: What, node: PrefixNode) -> None:
        self._clock += 1
        self._news.append((what, node, self._clock, node.children, self._now()))
        if len(self._news) >= MOST_NEWS:
            self._catch_up()

    def offer(self, node: PrefixNode) -> None:
        if not node.queued:
            node.queued = NOT_IN_A_HEAP
            self._offered.append(node)

    def is_offered(self, node: PrefixNode) -> bool:
        return bool(node.queued)

    # ---- what follows from it ----------------------------------------------------------------

    def _catch_up(self) -> None:
        news, self._news = self._news, []
        for each in news:
            self._learn(*each)
        offered, self._offered = self._offered, []
        for node in offered:
            if node.queued == NOT_IN_A_HEAP:
                node.queued = 0
                if node.is_cached and not node.children:  # otherwise it is offered when they go
                    self._push(node)

    def _learn(self, what: What, node: PrefixNode, at: int, children: int, at_s: float) -> None:
        match what:
            case "used" if not node.last_use:
                self._enter(node, at, at_s)
            case "used":
                node.is_turn_end = True
                self._use(node, at, at_s)
            case "returned":
                if node.is_turn_end and not children:
                    self._returns.returned(self._kind(node), at - node.last_use)
                node.turns += 1
                node.is_turn_end = True
                self._use(node, at, at_s)
            case "superseded":
                node.is_superseded = True
                if node.queued > 0:
                    self._push(node)
                if node in self._state_keys:
                    self._place(node, is_end=self._state_keys[node][0])
            case "dropped":
                self._leave(node, at)
            case "state used":
                # a turn ends where nothing comes after, or where a request goes on
                self._place(node, is_end=node in self._state_keys or not children)
            case "state dropped":
                self._remove(node)

    def _use(self, node: PrefixNode, at: int, at_s: float) -> None:
        node.last_use = at
        hints = node.hints
        node.is_superseded = hints is not None and hints.final and node.is_turn_end
        if hints is not None and hints.ttl_s is not None:
            node.keep_until = at_s + hints.ttl_s

    def _enter(self, node: PrefixNode, at: int, at_s: float) -> None:
        """A new block is in the turn of the block before it, unless it begins a branch."""
        self._nodes += 1
        parent, turns = node.parent, self._returns.back(node.digest, at)
        if turns is not None:
            node.turns = turns + 1
        elif parent is not None and node.is_first_child:
            node.turns = parent.turns
        self._use(node, at, at_s)

    def _leave(self, node: PrefixNode, at: int) -> None:
        self._nodes -= 1
        node.queued = 0
        if node.is_turn_end:
            self._returns.evicted(node.digest, self._kind(node), node.turns, node.last_use, at)
            self._returns.forget(max(FEWEST_REMEMBERED, self._nodes // REMEMBERED))

    # ---- the order of blocks -----------------------------------------------------------------

    def _push(self, node: PrefixNode) -> None:
        """Offers a block, or offers it anew because its rank has changed."""
        node.queued, node.offered_use = next(self._numbers), node.last_use
        if node.keep_until and not node.is_superseded and node.keep_until > self._now():
            self._orders.push(node.priority, node.keep_until, node)
        else:
            self._orders.push(self._rank(node), node.last_use, node)

    def keep_apart(self, roots: Iterable[bytes], nodes: Collection[PrefixNode]) -> None:
        self._catch_up()
        self._orders.keep_apart(roots, nodes, self._push)

    def choose(self, eviction: Eviction) -> None:
        self._catch_up()
        order = self._orders.of(eviction.root)
        self._end_floors(order)
        in_use = eviction.walk(partial(self._pop_least, order), self._push_all, self._take)
        # being in use counts as a use: it will not be looked at first next time
        self._clock += 1
        for node in in_use:
            self._use(node, self._clock, self._now())
        self._push_all(in_use)

    def _pop_least(self, order: Order[Rank | int]) -> PrefixNode | None:
        """The block that goes first, no longer offered; None if there is none."""
        while (name := self._least(order)) is not None:
            node = order.pop(name)
            if node is None:
                continue
            if node.last_use == node.offered_use:
                return node
            self._push(node)  # used since
        return None

    def _least(self, order: Order[Rank | int]) -> Rank | int | None:
        """The heap whose first block goes first."""
        least, found, clock = float("inf"), None, self._clock
        kept: list[int] = []
        for name, heap in order.heaps.items():
            if not heap:
                continue
            if isinstance(name, int):
                kept.append(name)
                continue
            if name[0]:
                return name
            stamp, number, node = heap[0]
            known = self._heads.get(name)
            if known is None or known[0] != number or known[1] != clock:
                worth = self._worth(name, int(stamp)) * self.costs.token(node.depth) ** COST_POWER
                known = self._heads[name] = number, clock, worth
            if known[2] < least:
                least, found = known[2], name
        return found if found is not None or not kept else min(kept)

    def _worth(self, rank: Rank, last_use: int) -> float:
        """How likely a return is, times what the priority says."""
        _, priority, kind = rank
        return self._returns.density(kind, self._clock - last_use) * PER_PRIORITY**priority

    def _take(self, eviction: Eviction, node: PrefixNode) -> None:
        parent = node.parent
        if parent is not None and node.last_use >= parent.last_use:
            # a use of a block is a use of all before it
            parent.last_use, parent.turns = node.last_use, max(parent.turns, node.turns)
            parent.hints = node.hints
            parent.keep_until = max(parent.keep_until, node.keep_until)
        freed = eviction.take(node)
        if freed is not None:
            freed.is_superseded = node.is_superseded
            self._push(freed)

    def _rank(self, node: PrefixNode) -> Rank:
        return node.is_superseded, node.priority, self._kind(node)

    def _kind(self, node: PrefixNode) -> int:
        return kind_of(node.turns, (node.depth + 1) * self.costs.block_tokens)

    def _push_all(self, nodes: Sequence[PrefixNode]) -> None:
        for node in nodes:
            self._push(node)

    def _end_floors(self, order: Order[Rank | int]) -> None:
        """Blocks whose time has passed are compared with all others from now on."""
        floors = [(name, heap) for name, heap in order.heaps.items() if isinstance(name, int)]
        now = self._now() if floors else 0.0
        for name, floor in floors:
            while floor and floor[0][0] <= now:
                if (node := order.pop(name)) is not None:
                    self._push(node)

    # ---- snapshots ---------------------------------------------------------------------------

    def snapshots(self) -> Iterator[PrefixNode]:
        """Superseded ones first, then those inside of turns, then ends of turns, the least worth
        first, then those whose time has not passed."""
        self._catch_up()
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
        key = is_end, node.keep_until > 0, self._rank(node)
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
        self._catch_up()
        self._nodes = len(nodes)
        self._orders.clear()
        for node in nodes:
            node.queued = 0
            if not node.children:
                self._push(node)
        kept = dict.fromkeys(node for node in nodes if node.snapshot is not None)
        keys = {node: key for node, key in self._state_keys.items() if node in kept}
        self._states, self._state_keys = {}, {}
        for node in {**dict.fromkeys(keys), **kept}:
            self._place(node, is_end=keys[node][0] if node in keys else not node.children)
