"""Cached blocks as memory that can be reclaimed. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsv4.cache.allocator import Asker, BlockAllocator
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

    def choose(self, blocks: int, *, or_fewer: bool = False) -> list[PrefixNode]:
        """Chooses `count` blocks to evict, or none (with `or_fewer`, as many as possible); then
        they are dropped or spared."""
        victims = self._index.choose(blocks, or_fewer=or_fewer)
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

    def drop_for(self, victims: Sequence[PrefixNode], askers: Sequence[Asker]) -> None:
        """Evicts what was chosen because others need its memory."""
        self.drop(victims, Cause(tuple(asker.trail for asker in askers)))

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

    def pinned_blocks(self, excluding: Collection[int] = ()) -> int:
        """Blocks that lasting pins keep, with all before them, except the given ones."""
        return self._pins.lasting_blocks(excluding)
