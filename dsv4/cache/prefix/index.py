"""Which blocks hold which prefixes: a tree of chain digests over the blocks of the pool.
Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from dsv4.cache.allocator import NO_OWN, BlockAllocator
from dsv4.cache.prefix.ages import Ages
from dsv4.cache.prefix.eviction import Eviction, EvictionPolicy, LeastRecentlyUsed
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.errors import Dsv4Error, InvalidInput

HASHED_AT_ONCE = 64  # blocks; few enough to stop soon after a miss


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """`what` happened to a block, stored or removed: its chain `digest`, that of its `parent`, the
    block before it, if any, and the `block_id` that it has or had in the arena."""

    what: Literal["stored", "removed"]
    digest: bytes
    parent: bytes | None
    block_id: int


class PrefixIndex:
    """From chain digests to blocks, which the allocator keeps for it.

    A block that requests hold is never evicted, nor one with a pin, nor one with cached children;
    the policy chooses from the rest. A use of a block is a use of all before it.
    """

    def __init__(self, allocator: BlockAllocator, policy: EvictionPolicy | None = None) -> None:
        self._allocator = allocator
        self.policy = LeastRecentlyUsed() if policy is None else policy
        self._nodes: dict[bytes, PrefixNode] = {}
        self._forgotten = OrderedDict[bytes, None]()  # digests of evicted blocks, oldest first
        self.evictions, self.ages = 0, Ages()
        self.events: list[BlockEvent] | None = None  # if events are wanted
        self._reported: dict[bytes, BlockEvent] = {}  # blocks that are cached as far as events say
        self.has_tiers = False  # whether some blocks are kept elsewhere too

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, digest: bytes) -> PrefixNode | None:
        return self._nodes.get(digest)

    def newest(self, count: int) -> list[PrefixNode]:
        """The blocks that were cached last, parents before children."""
        return [*islice(reversed(self._nodes.values()), count)][::-1]

    def was_evicted(self, digest: bytes) -> bool:
        return digest in self._forgotten

    def match(self, trail: TokenTrail, most_blocks: int) -> list[PrefixNode]:
        """The cached blocks that these tokens start with, `most_blocks` at most."""
        found: list[PrefixNode] = []
        nodes, chain = self._nodes, trail.chain
        for first in range(0, most_blocks, HASHED_AT_ONCE):
            last = min(most_blocks, first + HASHED_AT_ONCE)
            trail.hash_blocks(last)
            for block in range(first, last):
                node = nodes.get(chain[block])
                if node is None:
                    return found
                found.append(node)
        return found

    def count(self, chain: Sequence[bytes]) -> int:
        """How many blocks `match` would find for these digests, by bisection: a block is cached
        only if all before it are."""
        nodes = self._nodes
        return bisect_left(range(len(chain)), True, key=lambda nth: chain[nth] not in nodes)

    def touch(self, node: PrefixNode) -> None:
        self.ages.touched(node)
        self.policy.used(node)

    def add(
        self,
        digest: bytes,
        block_id: int,
        parent: PrefixNode | None,
        *,
        landed: bool = False,
        hints: Hints | None = None,
        root: bytes = b"",
    ) -> PrefixNode:
        """A block that a request has just completed, or one whose bytes a tier had."""
        node = PrefixNode(digest, block_id, parent, hints, root)
        node.stored = landed
        self.ages.cached(node)
        if landed:
            self._allocator.land(block_id)
        else:
            self._allocator.keep(block_id)
        self._nodes[digest] = node
        self._forgotten.pop(digest, None)
        if parent is not None:
            parent.children += 1
        self.policy.used(node)
        self.policy.offer(node)
        if self.events is not None:
            self.note_event("stored", node)
        return node

    def land(
        self,
        trail: TokenTrail,
        first: int,
        block_ids: Sequence[int],
        report: Callable[[PrefixNode, TokenTrail], None],
    ) -> list[int]:
        """Indexes blocks in flight, whose bytes are there and checked, as those of a prompt from
        its block `first` on. Returns those that are not needed: the same tokens are cached already,
        or the block before them no longer is. Each new node goes to `report`."""
        parent = self.get(trail.digest(first - 1)) if first else None
        if first and parent is None:
            return list(block_ids)
        unused = []
        for nth, block_id in enumerate(block_ids, first):
            node = self.get(trail.digest(nth))
            if node is None:
                digest, hints = trail.digest(nth), trail.hints
                node = self.add(digest, block_id, parent, landed=True, hints=hints, root=trail.root)
                report(node, trail)
            else:
                unused.append(block_id)
            parent = node
        return unused

    def choose(
        self, count: int, *, or_fewer: bool = False, own: Mapping[bytes, int] = NO_OWN
    ) -> list[PrefixNode]:
        """`count` blocks to evict, children before parents; none if fewer can be evicted, unless
        `or_fewer`. Among them, and first, are as many of each tenant as `own` says, by root.

        They are cached until `drop`, so their bytes can be copied somewhere else first. They must
        be dropped or spared before the next call.
        """
        if count > self._allocator.idle and not or_fewer:
            return []
        eviction = Eviction(0, self._allocator.references, has_tiers=self.has_tiers)
        is_short = False
        for eviction.root, blocks in own.items():
            eviction.wanted = len(eviction.victims) + blocks
            self.policy.choose(eviction)
            is_short = is_short or not eviction.is_done
        eviction.root, eviction.wanted = None, max(count, len(eviction.victims))
        if not is_short:
            self.policy.choose(eviction)
        if (is_short or not eviction.is_done) and not or_fewer:
            self.spare(eviction.victims)
            return []
        return eviction.victims

    def choose_all(self) -> list[PrefixNode]:
        """All blocks that can be evicted, children before parents, whatever the policy says."""
        victims, needed = [], set[PrefixNode | None]()
        for node in sorted(self.nodes(), key=lambda node: -node.depth):
            if node.pins or self._allocator.references(node.block_id) or node in needed:
                needed.add(node.parent)
            else:
                victims.append(node)
        return victims

    def drop(self, victims: Sequence[PrefixNode]) -> None:
        """Evicts what `choose` has chosen."""
        for node in victims:
            node.is_cached = False  # first: after an interrupt, what is in the index is cached
            del self._nodes[node.digest]
            self._forgotten[node.digest] = None
            self._allocator.drop(node.block_id)
            self.policy.dropped(node)
        for node in victims:
            parent = node.parent
            if parent is not None:
                parent.children -= 1
                if not parent.children and parent.digest in self._nodes:
                    self.policy.offer(parent)
        while len(self._forgotten) > self._allocator.total:
            self._forgotten.popitem(last=False)
        self.evictions += len(victims)
        self.ages.evicted(victims)
        for node in victims if self.events is not None else ():
            self.note_event("removed", node)

    def spare(self, victims: Sequence[PrefixNode]) -> None:
        """Keeps what `choose` has chosen."""
        for node in victims:
            self.policy.offer(node)

    def note_event(self, what: Literal["stored", "removed"], node: PrefixNode) -> None:
        if self.events is not None:
            parent = None if node.parent is None else node.parent.digest
            self.events.append(
                BlockEvent(what=what, digest=node.digest, parent=parent, block_id=node.block_id)
            )

    def take_events(self) -> list[BlockEvent]:
        """What happened since the last time. InvalidInput where events are not collected."""
        if self.events is None:
            raise InvalidInput(
                "this manager collects no block events: build it with PrefixOptions(events=True)"
            )
        follow_events(self._reported, self.events)
        taken, self.events = self.events, []
        return taken

    def nodes(self) -> Collection[PrefixNode]:
        return self._nodes.values()

    def check_invariants(self) -> None:
        """Raises Dsv4Error unless tree, policy and allocator agree."""
        children: dict[bytes, int] = {}
        blocks = set()
        for digest, node in self._nodes.items():
            if node.parent is not None:
                if self._nodes.get(node.parent.digest) is not node.parent:
                    raise Dsv4Error(f"block {node.block_id} is cached, but not the one before it")
                children[node.parent.digest] = children.get(node.parent.digest, 0) + 1
            if node.depth != (0 if node.parent is None else node.parent.depth + 1):
                raise Dsv4Error(f"block {node.block_id} has a wrong depth")
            if digest != node.digest or node.block_id in blocks:
                raise Dsv4Error(f"block {node.block_id} is cached twice or under a wrong digest")
            blocks.add(node.block_id)
        for digest, node in self._nodes.items():
            if node.children != children.get(digest, 0):
                raise Dsv4Error(f"block {node.block_id} has lost count of the blocks after it")
            if not node.children and not self.policy.is_offered(node):
                raise Dsv4Error(f"block {node.block_id} could never be evicted")
        if len(blocks) != self._allocator.cached:
            raise Dsv4Error(
                f"the index has {len(blocks)} blocks, the allocator keeps {self._allocator.cached}"
            )


def follow_events(reported: dict[bytes, BlockEvent], events: Iterable[BlockEvent]) -> None:
    """Which blocks exist after these events. Idempotent."""
    for event in events:
        reported.pop(event.digest, None)
        if event.what == "stored":
            reported[event.digest] = event
