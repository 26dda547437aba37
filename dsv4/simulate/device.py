"""The cache of one simulated device: the real index, policy, sessions, pins and rows of snapshots
over blocks that have no bytes. What a manager does around them is here in counts. Torch-free."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from dsv4.cache.allocator import Asker, BlockAllocator, BlockOwners, BlockSupply, Reserved
from dsv4.cache.prefix.blocks import CachedBlocks
from dsv4.cache.prefix.caching import BlockCaching
from dsv4.cache.prefix.costs import Costs
from dsv4.cache.prefix.eviction import EvictionPolicy
from dsv4.cache.prefix.hints import Sessions
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import Notices, Observer
from dsv4.cache.prefix.options import SnapshotPolicy
from dsv4.cache.prefix.pins import Pins
from dsv4.cache.prefix.resume import PrefixMatch, Resume, replay_start, resume_after
from dsv4.cache.prefix.retention import Retention
from dsv4.cache.prefix.rows import SnapshotRows
from dsv4.cache.schema import CacheSchema
from dsv4.errors import OutOfBlocks
from dsv4.simulate.names import NamedTrail

MADE_AT_ONCE = 4096  # blocks
_ids: list[int] = []  # block ids as far as any pool has used them: all pools have the same objects


class NoOwners(BlockOwners):
    """All simulated requests have one salt, so nothing asks whose a block is."""

    def give(self, block_ids: Collection[int], root: bytes) -> None:
        pass

    def free(self, block_ids: Iterable[int]) -> None:
        pass

    def note_idle(self, block_id: int, change: int) -> None:
        pass


class GrowingAllocator(BlockAllocator):
    """The same blocks in the same order, but lists are made only as far as blocks were used, and
    small: a simulation has pools by the thousand, most of them never full."""

    _references: array[int]  # type: ignore[assignment]
    _generations: array[int]  # type: ignore[assignment]

    def __init__(self, total: int) -> None:
        super().__init__(0)
        self.total = total
        self.most_used = 0
        self.owners = NoOwners()
        self._references, self._generations = array("i"), array("i")

    @property
    def free(self) -> int:
        return len(self._free) + self.total - len(self._references)

    def take_next(self, count: int) -> list[int]:
        taken = super().take_next(count)
        self.most_used = max(self.most_used, self.total - self.free)
        return taken

    def next_ids(self, count: int, freed: Sequence[int] = ()) -> list[int]:
        self._make(count)
        return super().next_ids(count, freed)

    def _make(self, count: int) -> None:
        made = len(self._references)
        more = min(max(count - len(self._free), 0), self.total - made)
        if more:
            more = min(max(more, MADE_AT_ONCE), self.total - made)
            _ids.extend(range(len(_ids), made + more))
            self._free[:0] = reversed(_ids[made : made + more])
            for counts in (self._references, self._generations):
                counts.frombytes(bytes(counts.itemsize * more))
            self._cached.extend(bytes(more))


@dataclass(slots=True, eq=False)
class Held:
    """What a request that runs has: blocks in the order of its tokens, and how far it is."""

    block_ids: list[int]
    trail: NamedTrail
    length: int
    resume: Resume

    @property
    def exact_from(self) -> int:
        """From here on its state is a cold run's: a replay leaves another one before."""
        resume = self.resume
        return resume.reused_tokens if resume.source == "replay" else resume.start


class Device:
    """`manager.prefix` and what admission and steps do with it."""

    def __init__(
        self,
        schema: CacheSchema,
        policy: EvictionPolicy,
        *,
        num_blocks: int,
        snapshots: SnapshotPolicy,
        snapshot_rows: int,
        has_state_bytes: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        if isinstance(policy, Retention):
            policy.costs = Costs.of(schema)
        self.schema, self._policy = schema, policy
        self.allocator = GrowingAllocator(num_blocks)
        self.index = PrefixIndex(self.allocator, policy)
        self.index.ages.now = now
        self.notices = Notices(schema.block_tokens, has_state_bytes=has_state_bytes)
        self._sessions = Sessions(policy, self.notices)
        self._snapshots = snapshots
        self.rows = SnapshotRows(snapshot_rows, policy, self.notices.before_reuse)
        self.pins = Pins(self.index, schema.block_tokens)
        self.blocks = CachedBlocks(self.allocator, self.index, self.rows, self.pins, self.notices)
        self._supply = BlockSupply(self.allocator)
        self._supply.reclaimer = self.blocks
        self._caching = BlockCaching(self.allocator, self.index, self.notices)

    def observe(self, observer: Observer) -> None:
        self.notices.observe(observer)

    # ---- a request begins and ends -----------------------------------------------------------

    def match(self, trail: NamedTrail) -> PrefixMatch:
        tokens = trail.prompt_tokens
        nodes = self.index.match(trail, max(0, tokens - 1) // self.schema.block_tokens)
        return resume_after(self.schema, nodes, len(nodes), tokens, cut=False)

    def cached_blocks(self, trail: NamedTrail) -> int:
        blocks = max(0, trail.prompt_tokens - 1) // self.schema.block_tokens
        return self.index.count(trail.chain[:blocks])

    def look_up(self, trail: NamedTrail) -> Resume:
        """What `match` would answer, by bisection."""
        block_tokens, blocks = self.schema.block_tokens, self.cached_blocks(trail)
        first = max(0, replay_start(self.schema, blocks * block_tokens) // block_tokens - 1)
        nodes: list[PrefixNode | None] = [None] * blocks
        nodes[first:] = [self.index.get(digest) for digest in trail.chain[first:blocks]]
        return resume_after(self.schema, nodes, blocks, trail.prompt_tokens, cut=False).resume

    def needed_blocks(self, trail: NamedTrail) -> int:
        return self.schema.blocks_for(trail.prompt_tokens) - self.cached_blocks(trail)

    @property
    def spare(self) -> int:
        """Blocks that are free or can be evicted."""
        return self.allocator.free + self.blocks.evictable()

    def admit(self, trail: NamedTrail) -> Held:
        """Raises OutOfBlocks."""
        trail = trail.copy()
        match = self.match(trail)
        blocks = self.schema.blocks_for(trail.prompt_tokens)
        shared = [node.block_id for node in match.nodes]
        asker = Asker(trail, blocks - len(shared))
        with (
            self._supply.sharing(shared),
            self._supply.reserving(asker, asker_blocks=blocks, shared=shared) as new,
        ):
            block_ids = [*shared, *new.block_ids]
        if trail.hints is not None:
            self._sessions.admitted(trail, trail.hints)
        if match.nodes:
            if trail.hints is not None:
                match.nodes[-1].hints = trail.hints
            self._policy.returned(match.nodes[-1])
            if match.snapshot is not None:
                self._policy.snapshot_used(match.snapshot)
            for observer in self.notices.observers:
                observer.used(match, trail)
        return Held(block_ids, trail, match.resume.start, match.resume)

    def release(self, held: Held) -> None:
        self._caching.note_release(held)
        self.allocator.release(held.block_ids)
        held.block_ids = []

    def released_blocks(self, held: Held) -> int:
        """Blocks that could be taken if this request were released."""
        pinned, references = self.pins.block_ids(), self.allocator.references
        return sum(references(b) == 1 and b not in pinned for b in held.block_ids)

    # ---- steps -------------------------------------------------------------------------------

    def reserve(self, shares: Sequence[tuple[Held, int]]) -> Reserved | None:
        """Blocks for a step that runs this many tokens of each; None if none is missing. Raises
        OutOfBlocks. `settle` or nothing follows."""
        block_tokens = self.schema.block_tokens
        missing = [
            (held, -(-(held.length + count) // block_tokens) - len(held.block_ids))
            for held, count in shares
            if held.length + count > len(held.block_ids) * block_tokens
        ]
        if not missing:
            return None
        most, _ = max(shares, key=lambda share: -(-(share[0].length + share[1]) // block_tokens))
        end = next(most.length + count for held, count in shares if held is most)
        askers = [Asker(held.trail, count) for held, count in missing]
        needed = sum(count for _, count in missing)
        return self._supply.reserve(
            needed, askers, asker_blocks=-(-end // block_tokens), shared=most.block_ids
        )

    def settle(self, shares: Sequence[tuple[Held, int]], reserved: Reserved | None) -> None:
        """The requests have what was reserved."""
        if reserved is None:
            return
        block_tokens, first = self.schema.block_tokens, 0
        new = self._supply.settle(reserved)
        for held, count in shares:
            missing = -(-(held.length + count) // block_tokens) - len(held.block_ids)
            if missing > 0:
                held.block_ids += new[first : first + missing]
                first += missing

    def plan_snapshots(self, chunks: Sequence[tuple[Held, int]]) -> list[tuple[Held, int, int]]:
        """Which boundaries inside chunks get which rows. Changes nothing."""
        block_tokens = self.schema.block_tokens
        wanted: list[tuple[Held, int]] = []
        for held, count in chunks if self.rows.total else ():
            end = min(held.length + count, held.trail.prompt_tokens)
            for block in range(held.length // block_tokens + 1, end // block_tokens + 1):
                if self._is_wanted(held, block * block_tokens):
                    node = self.index.get(held.trail.digest(block - 1))
                    if node is None or node.snapshot is None:
                        wanted.append((held, block * block_tokens))
        rows = self.rows.choose(len(wanted)) if wanted else []
        return [
            (held, boundary, row)
            for (held, boundary), row in zip(reversed(wanted), rows, strict=False)
        ]

    def advance(self, held: Held, count: int, *, is_chunk: bool) -> None:
        """These tokens have run: whole blocks are cached. Unless they were a chunk, whose states
        were planned, the state is kept where it is wanted."""
        block_tokens, start = self.schema.block_tokens, held.length
        held.length = end = start + count
        first, last = start // block_tokens, end // block_tokens
        if last == first:
            return
        trail = held.trail
        trail.grow(max(end, trail.prompt_tokens))
        for node in self._caching.cache_blocks(held, trail, first, last, self._exchange):
            boundary = (node.depth + 1) * block_tokens
            if is_chunk or node.snapshot is not None:
                continue
            row = self.rows.reserve() if self._is_wanted(held, boundary) else None
            if row is not None:
                self._attach(held, node, row)

    def finish_snapshots(self, planned: Sequence[tuple[Held, int, int]]) -> None:
        for held, boundary, row in planned:
            node = self.index.get(held.trail.digest(boundary // self.schema.block_tokens - 1))
            if node is None or node.snapshot is not None:
                self.rows.give_back(row)
            else:
                self._attach(held, node, row)

    def _attach(self, held: Held, node: PrefixNode, row: int) -> None:
        self.rows.attach(node, row)
        self.notices.cached(node, held.trail, is_snapshot=True)

    def _is_wanted(self, held: Held, boundary: int) -> bool:
        return (
            self.rows.total > 0
            and boundary >= held.exact_from
            and self._snapshots.wants(boundary, held.trail.prompt_tokens, self.schema.block_tokens)
        )

    def _exchange(self, held: Held, first: int, block_ids: Sequence[int]) -> None:
        span = slice(first, first + len(block_ids))
        own = held.block_ids[span]
        self.allocator.share(block_ids)
        held.block_ids[span] = block_ids
        self.allocator.release(own)

    # ---- what tiers had ----------------------------------------------------------------------

    def land(self, trail: NamedTrail, first: int, count: int) -> int:
        """Takes blocks for what a tier had, from block `first` of a prompt on, and indexes them.
        Returns how many: what is there already, or has no room, is left out."""
        parent = self.index.get(trail.digest(first - 1)) if first else None
        if first and parent is None:
            return 0
        pin = self.pins.pin(trail, lasting=False) if first else None
        count = min(count, self.spare)
        try:
            reserved = self._supply.reserve(count, [Asker(trail, count)])
            block_ids = self._supply.settle_in_flight(reserved)
        except OutOfBlocks:
            return 0
        finally:
            if pin is not None:
                self.pins.unpin(pin)
        unused = self.index.land(trail, first, block_ids, self.notices.landed)
        self.allocator.give_back(unused)
        if count and (node := self.index.get(trail.digest(first + count - 1))):
            self.index.touch(node)
        return count - len(unused)

    def land_snapshot(self, digest: bytes) -> bool:
        """Brings the state at the end of a cached block from a tier. Returns whether a row was free
        for it."""
        node = self.index.get(digest)
        if node is None or node.snapshot is not None:
            return False
        row = self.rows.take_in_flight()
        if row is None:
            return False
        self.rows.attach(node, row)
        return True
