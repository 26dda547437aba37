"""Cached blocks as memory that can be reclaimed. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dsv4.cache.allocator import NO_OWN, Asker, BlockAllocator
from dsv4.cache.changes import LOGGER
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import UNKNOWN_CAUSE, Cause, Notices
from dsv4.cache.prefix.pins import Pins
from dsv4.cache.prefix.rows import SnapshotRows


class CachedBlocks:
    """Evicts blocks with the snapshots at their ends: the `Reclaimer` of the table of requests."""

    def __init__(
        self,
        allocator: BlockAllocator,
        index: PrefixIndex,
        rows: SnapshotRows,
        pins: Pins,
        notices: Notices,
    ) -> None:
        self._allocator, self._index = allocator, index
        self._rows, self._pins = rows, pins
        self._notices = notices

    def choose(
        self, blocks: int, *, or_fewer: bool = False, own: Mapping[bytes, int] = NO_OWN
    ) -> list[PrefixNode]:
        """Chooses `count` blocks to evict, or none (with `or_fewer`, as many as possible); then
        they are dropped or spared. Among them, and first, are as many of each owner as `own`
        says."""
        victims = self._index.choose(blocks, or_fewer=or_fewer, own=own)
        if victims:  # they may be written before they are dropped
            self._notices.before_reuse()
        return victims

    def spare(self, victims: Sequence[PrefixNode]) -> None:
        self._index.spare(victims)

    def drop(self, victims: Sequence[PrefixNode], cause: Cause = UNKNOWN_CAUSE) -> None:
        """Evicts what was chosen, with its snapshots."""
        self._index.drop(victims)
        if victims:
            LOGGER.debug("%d cached blocks evicted", len(victims))
            self._notices.evicted(victims, cause)
        for node in victims:
            if node.snapshot is not None:
                self._rows.drop(node)

    def drop_for(
        self, victims: Sequence[PrefixNode], askers: Sequence[Asker], *, over_quota: int = 0
    ) -> None:
        """Evicts what was chosen because others need its memory; the first `over_quota` because a
        quota is full."""
        trails = tuple(asker.trail for asker in askers)
        self.drop(victims, Cause(trails, over_quota=over_quota))

    def trim(self, root: bytes, most: int) -> int:
        """Evicts blocks of an owner until it has no more than `most`, or none is left that can be.
        Returns how many."""
        over = min(self._allocator.owners.used.get(root, 0) - most, self.evictable_of(root))
        if over <= 0:
            return 0
        victims = self.choose(0, or_fewer=True, own={root: over})
        self.drop(victims, Cause(over_quota=len(victims)))
        return len(victims)

    def evict(self, most: int) -> int:
        """Evicts `count` blocks, or all that can be. Returns how many."""
        if most >= self._allocator.idle:
            victims = self._index.choose_all()
            self._notices.before_reuse()
        else:
            victims = self.choose(most, or_fewer=True)
        self.drop(victims, Cause(reason="asked"))
        return len(victims)

    def evictable(self, excluding: Collection[int] = ()) -> int:
        """How many blocks could be evicted if these were held. A request that holds a cached block
        holds those before it, so these are all idle blocks except what pins keep."""
        references = self._allocator.references
        return self._allocator.idle - sum(
            not references(b) for b in self._pins.block_ids().union(excluding)
        )

    def evictable_of(self, root: bytes, excluding: Collection[int] = ()) -> int:
        """The same, of the blocks of one owner."""
        references, owners = self._allocator.references, self._allocator.owners
        idle = owners.idle.get(root, 0)
        if not idle:
            return 0
        kept = self._pins.block_ids().union(excluding)
        return idle - sum(not references(b) and owners.of.get(b) == root for b in kept)

    def pinned_blocks(self, excluding: Collection[int] = (), *, root: bytes | None = None) -> int:
        """Blocks that lasting pins keep, with all before them, except the given ones; of one owner,
        or all."""
        kept = self._pins.lasting_blocks(excluding)
        if root is not None:
            kept = {b for b in kept if self._allocator.owners.of.get(b) == root}
        return len(kept)
