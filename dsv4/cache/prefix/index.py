"""Which blocks hold which prefixes: a tree of chain digests over the blocks of the pool.
Torch-free."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.errors import Dsv4Error

HASHED_AT_ONCE = 64  # blocks; few enough to stop soon behind a miss
PASSED_OVER = 64  # blocks that no tier has, at most, while others are let go


class PrefixNode:
    """One cached block. `snapshot` is the row of the state at its end, if that is kept; `stored`
    says that a tier has its bytes, or had them when it was asked last."""

    __slots__ = (
        "block_id",
        "children",
        "digest",
        "last_use",
        "parent",
        "pins",
        "queued",
        "snapshot",
        "stored",
    )

    def __init__(self, digest: bytes, block_id: int, parent: PrefixNode | None) -> None:
        self.digest, self.block_id, self.parent = digest, block_id, parent
        self.children = self.pins = self.last_use = 0
        self.snapshot: int | None = None
        self.queued = self.stored = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEvent:
    """A block was cached or let go: its chain digest, and that of the block before it, if any."""

    what: Literal["stored", "removed"]
    digest: bytes
    parent: bytes | None
    block_id: int


class PrefixIndex:
    """From chain digests to blocks, which the allocator keeps for it.

    A block that requests hold is never evicted, nor one with a pin, nor one with cached children;
    of the rest the least recently used goes first, what a tier has before what would be lost. A use
    of a block is a use of all before it.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator
        self._nodes: dict[bytes, PrefixNode] = {}
        self._leaves: list[tuple[int, int, PrefixNode]] = []  # a heap; stamps may be out of date
        self._clock = 0
        self._pushes = 0
        self._forgotten: dict[bytes, None] = {}  # digests of evicted blocks, oldest first
        self.evictions = 0
        self.events: list[BlockEvent] | None = None  # where somebody reads them
        self._told: dict[bytes, BlockEvent] = {}  # blocks that are there by what was read
        self.has_tiers = False  # whether some blocks are kept elsewhere too

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, digest: bytes) -> PrefixNode | None:
        return self._nodes.get(digest)

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
        """How many blocks `match` would find behind these digests, in a few looks: a block is
        cached only if all before it are."""
        nodes = self._nodes
        return bisect_left(range(len(chain)), True, key=lambda nth: chain[nth] not in nodes)

    def touch(self, node: PrefixNode) -> None:
        self._clock += 1
        node.last_use = self._clock

    def add(
        self, digest: bytes, block_id: int, parent: PrefixNode | None, *, landed: bool = False
    ) -> PrefixNode:
        """A block that a request has just completed, or one whose bytes a tier had."""
        node = PrefixNode(digest, block_id, parent)
        node.stored = landed
        if landed:
            self._allocator.land(block_id)
        else:
            self._allocator.keep(block_id)
        self._nodes[digest] = node
        self._forgotten.pop(digest, None)
        if parent is not None:
            parent.children += 1
        self.touch(node)
        self._queue(node)
        if self.events is not None:
            self._tell("stored", node)
        return node

    def choose(self, count: int, *, or_fewer: bool = False) -> list[PrefixNode]:
        """`count` blocks to let go, children before parents; none, unless `or_fewer`, if so many
        cannot be let go.

        They are cached until `drop`, so their bytes can be copied somewhere else first. Before
        anything else is asked of the index they must be dropped or spared.
        """
        if count > self._allocator.idle and not or_fewer:
            return []
        victims = self._pop_victims(count)
        if len(victims) < count and not or_fewer:
            self.spare(victims)
            return []
        return victims

    def drop(self, victims: Sequence[PrefixNode]) -> None:
        """Lets go of what `choose` has chosen."""
        for node in victims:
            del self._nodes[node.digest]
            self._forgotten[node.digest] = None
            self._allocator.drop(node.block_id)
        for node in victims:
            parent = node.parent
            if parent is not None:
                parent.children -= 1
                if not parent.children and parent.digest in self._nodes:
                    self._queue(parent)
        while len(self._forgotten) > self._allocator.total:
            del self._forgotten[next(iter(self._forgotten))]
        self.evictions += len(victims)
        for node in victims:
            self._tell("removed", node)

    def spare(self, victims: Sequence[PrefixNode]) -> None:
        """Keeps what `choose` has chosen."""
        for node in victims:
            self._queue(node)

    def _pop_victims(self, count: int) -> list[PrefixNode]:
        """Up to `count` nodes that may go, out of the heap; nothing else changes."""
        victims: list[PrefixNode] = []
        in_use: list[PrefixNode] = []
        passed: list[PrefixNode] = []
        gone: dict[PrefixNode, int] = {}
        most_passed = PASSED_OVER if self.has_tiers else 0
        while len(victims) < count and (self._leaves or passed):
            if not self._leaves:  # no tier has what is left
                most_passed = 0
                for node in passed:
                    self._queue(node)
                passed = []
            stamp, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if node.children > gone.get(node, 0):
                continue  # has children again: queued when they are gone
            if stamp < node.last_use:
                self._queue(node)
            elif node.pins or self._allocator.references(node.block_id):
                in_use.append(node)
            elif not node.stored and len(passed) < most_passed:
                passed.append(node)
            else:
                victims.append(node)
                parent = node.parent
                if parent is not None:
                    parent.last_use = max(parent.last_use, node.last_use)
                    gone[parent] = gone.get(parent, 0) + 1
                    if gone[parent] == parent.children:
                        self._queue(parent)
        for node in passed:
            self._queue(node)
        for node in in_use:  # being in use is a use: it will not be looked at first next time
            self.touch(node)
            self._queue(node)
        return victims

    def _tell(self, what: Literal["stored", "removed"], node: PrefixNode) -> None:
        if self.events is not None:
            parent = None if node.parent is None else node.parent.digest
            self.events.append(
                BlockEvent(what=what, digest=node.digest, parent=parent, block_id=node.block_id)
            )

    def take_events(self) -> list[BlockEvent]:
        """What happened since the last time."""
        assert self.events is not None
        _follow(self._told, self.events)
        taken, self.events = self.events, []
        return taken

    def _tell_rest(self) -> None:
        """After an interrupt: what happened to nodes and was not told."""
        if self.events is None:
            return
        told = self._told.copy()
        _follow(told, self.events)
        for digest, event in reversed(told.items()):
            node = self._nodes.get(digest)
            if node is None or node.block_id != event.block_id:
                self.events.append(replace(event, what="removed"))
        for digest, node in self._nodes.items():
            if digest not in told or told[digest].block_id != node.block_id:
                self._tell("stored", node)

    def _queue(self, node: PrefixNode) -> None:
        if not node.queued:
            node.queued = True
            self._pushes += 1
            heapq.heappush(self._leaves, (node.last_use, self._pushes, node))

    def rebuild(self) -> None:
        """After an interrupt: counts and heap anew, from the nodes. Use by requests is the
        allocator's to know."""
        for node in self._nodes.values():
            node.children, node.queued = 0, False
        for node in self._nodes.values():
            if node.parent is not None:
                node.parent.children += 1
        self._leaves = []
        for node in self._nodes.values():
            if not node.children:
                self._queue(node)
        self._tell_rest()

    def nodes(self) -> Iterable[PrefixNode]:
        return self._nodes.values()

    def check_invariants(self) -> None:
        """Raises Dsv4Error unless tree, heap and allocator agree."""
        children: dict[bytes, int] = {}
        blocks = set()
        for digest, node in self._nodes.items():
            if node.parent is not None:
                if self._nodes.get(node.parent.digest) is not node.parent:
                    raise Dsv4Error(f"block {node.block_id} is cached, but not the one before it")
                children[node.parent.digest] = children.get(node.parent.digest, 0) + 1
            if digest != node.digest or node.block_id in blocks:
                raise Dsv4Error(f"block {node.block_id} is cached twice or under a wrong digest")
            blocks.add(node.block_id)
        for digest, node in self._nodes.items():
            if node.children != children.get(digest, 0):
                raise Dsv4Error(f"block {node.block_id} has lost count of the blocks behind it")
            if not node.children and not node.queued:
                raise Dsv4Error(f"block {node.block_id} could never be evicted")
        if len(blocks) != self._allocator.cached:
            raise Dsv4Error(
                f"the index has {len(blocks)} blocks, the allocator keeps {self._allocator.cached}"
            )


def _follow(told: dict[bytes, BlockEvent], events: Iterable[BlockEvent]) -> None:
    """Which blocks are there after these events; twice is as once."""
    for event in events:
        told.pop(event.digest, None)
        if event.what == "stored":
            told[event.digest] = event
