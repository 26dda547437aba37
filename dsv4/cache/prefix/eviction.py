"""What is evicted first when memory is short. Torch-free.

Two rules hold under every policy (`Eviction`): a block that a request or a pin holds stays, and so
does one that a cached block comes after. The policy chooses from the rest (`EvictionPolicy`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.order import Order, Orders

PASSED_OVER = 64  # how many blocks that no tier has are passed over, at most, while others go


class Eviction:
    """One choice of blocks to evict: how many are wanted, and which may go. It changes nothing: the
    victims stay cached until the index drops them. With a `root` only blocks of that tenant are
    chosen, whose quota is full."""

    def __init__(self, wanted: int, references: Callable[[int], int], *, has_tiers: bool) -> None:
        self.wanted, self.has_tiers = wanted, has_tiers
        self.root: bytes | None = None
        self.victims: list[PrefixNode] = []
        self._references = references
        self._chosen_children: dict[PrefixNode, int] = {}

    @property
    def is_done(self) -> bool:
        return len(self.victims) >= self.wanted

    def is_leaf(self, node: PrefixNode) -> bool:
        """Whether the block is cached, and none comes after it except those chosen."""
        return node.is_cached and node.children <= self._chosen_children.get(node, 0)

    def is_held(self, node: PrefixNode) -> bool:
        """Whether a request or a pin holds the block, or it is not of the tenant whose blocks are
        wanted."""
        if self.root is not None and node.root != self.root:
            return True
        return bool(node.pins or self._references(node.block_id))

    def take(self, node: PrefixNode) -> PrefixNode | None:
        """Chooses a leaf that nothing holds. Returns the block before it if that is a leaf
        now."""
        self.victims.append(node)
        parent = node.parent
        if parent is None:
            return None
        self._chosen_children[parent] = self._chosen_children.get(parent, 0) + 1
        return parent if self._chosen_children[parent] == parent.children else None

    def walk(
        self,
        pop: Callable[[], PrefixNode | None],
        push: Callable[[Sequence[PrefixNode]], None],
        take: Callable[[Eviction, PrefixNode], None],
    ) -> list[PrefixNode]:
        """Goes through offered blocks until enough are chosen: `pop` gives the next one, no longer
        offered, or None, `take` chooses one, and `push` offers those again that were passed over,
        because no tier has them. Returns those that something holds, no longer offered."""
        in_use: list[PrefixNode] = []
        passed: list[PrefixNode] = []
        most_passed = PASSED_OVER if self.has_tiers else 0
        while not self.is_done:
            node = pop()
            if node is None and passed:  # no tier has the remaining ones
                most_passed = 0
                push(passed)
                passed = []
            elif node is None:
                break
            elif not self.is_leaf(node):
                continue  # blocks come after it again: it is offered when they are gone
            elif self.is_held(node):
                in_use.append(node)
            elif not node.stored and len(passed) < most_passed:
                passed.append(node)
            else:
                take(self, node)
        push(passed)
        return in_use


class EvictionPolicy(Protocol):
    """In which order blocks and snapshots are evicted. One object serves one prefix cache.

    The cache reports what happens to nodes, and the policy keeps an order of its own; a call takes
    O(log n). It may read everything of a node: where it lies in its prompts (`depth`), what comes
    before it (`parent`), how many blocks come right after it (`children`), whether a tier has it
    (`stored`), whether a state is kept at its end (`snapshot`). An interrupt may come at any of its
    lines: `rebuild` must derive the order from the nodes and whatever the policy still has.
    """

    def used(self, node: PrefixNode) -> None:
        """The block was just cached, or a request that used it, and all before it, has ended."""

    def returned(self, node: PrefixNode) -> None:
        """A request goes on after this block: it uses it and all before it."""

    def offer(self, node: PrefixNode) -> None:
        """No cached block comes after this one any more: it may be evicted. A second call for the
        same block changes nothing."""

    def is_offered(self, node: PrefixNode) -> bool:
        """Whether `choose` considers the block."""

    def choose(self, eviction: Eviction) -> None:
        """Takes (`eviction.take`) offered leaves that nothing holds (`eviction.is_held`), until
        `eviction.is_done` or none is left. What was taken is not offered any more: it is dropped,
        or offered again."""

    def superseded(self, node: PrefixNode) -> None:
        """A newer state of its session does not begin with this block, after which none is
        cached."""

    def dropped(self, node: PrefixNode) -> None:
        """The block has left the index, whether it was offered or not."""

    def snapshot_used(self, node: PrefixNode) -> None:
        """The state at the end of the block was just stored, or a request continues from it."""

    def snapshot_dropped(self, node: PrefixNode) -> None:
        """The state at the end of the block is gone."""

    def snapshots(self) -> Iterator[PrefixNode]:
        """Blocks with a state at their end, in the order in which the states are evicted, pinned
        ones included. The caller looks at the first few. Changes nothing."""

    def rebuild(self, nodes: Collection[PrefixNode]) -> None:
        """Derives its order anew from all cached blocks, after an interrupt. Their `children` are
        right; those without any are to be offered."""


@runtime_checkable
class KeepsApart(Protocol):
    """A policy that finds the blocks of one tenant without a look at those of others. For any other
    policy those of others count as held where `eviction.root` says whose are wanted: then a choice
    takes longer the more there are."""

    def keep_apart(self, roots: Iterable[bytes], nodes: Collection[PrefixNode]) -> None:
        """From now on `choose` may be asked for blocks of these tenants alone, and of no others.
        `nodes` are all that are cached."""


class LeastRecentlyUsed:
    """The least recently used block is evicted first, and one that a tier has before one that would
    be lost. Snapshots likewise, whether a tier has them or not."""

    def __init__(self) -> None:
        self._orders = Orders[str]()  # one heap each; stamps may be out of date
        self._clock = 0
        self._pushes = 0
        self._snapshots: OrderedDict[PrefixNode, None] = OrderedDict()  # the oldest use first

    def used(self, node: PrefixNode) -> None:
        self._clock += 1
        node.last_use = self._clock

    returned = used

    def offer(self, node: PrefixNode) -> None:
        if not node.queued:
            self._push(node)

    def _push(self, node: PrefixNode) -> None:
        self._pushes += 1
        node.queued, node.offered_use = self._pushes, node.last_use
        self._orders.push("", node.last_use, node)

    def is_offered(self, node: PrefixNode) -> bool:
        return bool(node.queued)

    def choose(self, eviction: Eviction) -> None:
        # being in use counts as a use: it will not be looked at first next time
        order = self._orders.of(eviction.root)
        for node in eviction.walk(partial(self._pop, order), self._offer_all, self._take):
            self.used(node)
            self.offer(node)

    def _pop(self, order: Order[str]) -> PrefixNode | None:
        while order.heaps.get(""):
            node = order.pop("")
            if node is not None and node.last_use == node.offered_use:
                return node
            if node is not None:
                self.offer(node)  # used since
        return None

    def keep_apart(self, roots: Iterable[bytes], nodes: Collection[PrefixNode]) -> None:
        self._orders.keep_apart(roots, nodes, self._push)

    def _take(self, eviction: Eviction, node: PrefixNode) -> None:
        if node.parent is not None:  # a use of a block is a use of all before it
            node.parent.last_use = max(node.parent.last_use, node.last_use)
        parent = eviction.take(node)
        if parent is not None:
            self.offer(parent)

    def _offer_all(self, nodes: Sequence[PrefixNode]) -> None:
        for node in nodes:
            self.offer(node)

    def superseded(self, node: PrefixNode) -> None:
        """It is old enough to go."""

    def dropped(self, node: PrefixNode) -> None:
        """`choose` passes over it where it is still in a heap."""
        node.queued = 0

    def snapshot_used(self, node: PrefixNode) -> None:
        self._snapshots[node] = None
        self._snapshots.move_to_end(node)

    def snapshot_dropped(self, node: PrefixNode) -> None:
        del self._snapshots[node]

    def snapshots(self) -> Iterator[PrefixNode]:
        return iter(self._snapshots)

    def rebuild(self, nodes: Collection[PrefixNode]) -> None:
        self._orders.clear()
        for node in nodes:
            node.queued = 0
        self._offer_all([node for node in nodes if not node.children])
        kept = [node for node in nodes if node.snapshot is not None]
        known = set(kept)
        order = [node for node in self._snapshots if node in known]
        self._snapshots = OrderedDict.fromkeys([*order, *kept])
