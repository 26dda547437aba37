"""Which row of the snapshot pool has which state. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice

from dsv4.cache.changes import LOGGER
from dsv4.cache.prefix.eviction import EvictionPolicy
from dsv4.cache.prefix.node import PrefixNode
from dsv4.errors import Dsv4Error


class SnapshotRows:
    """A row is free, or holds the state at the end of a cached block, or is in flight (a tier's
    bytes are on their way into it), or reserved for a state that is about to be copied: a reserved
    row is then attached to its block or given back.

    Where no row is free, one that no pin keeps is evicted; the policy chooses it. `before_reuse`
    is called first: the old state may still be being copied to a tier.
    """

    def __init__(
        self, total: int, policy: EvictionPolicy, before_reuse: Callable[[], None]
    ) -> None:
        self.total = total
        self._policy = policy
        self.evictions = 0
        self._before_reuse = before_reuse
        self._free = list(range(total - 1, -1, -1))
        self._taken: dict[int, PrefixNode] = {}
        self._in_flight: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._taken)

    def reserve(self) -> int | None:
        """A free row, or the one that is evicted first; None if there is none."""
        if not self.total:
            return None
        if self._free:
            return self._free.pop()
        node = next(self._unpinned(), None)
        if node is None:
            LOGGER.debug("a snapshot is not taken: all %d rows are pinned or taken", self.total)
            return None
        self.evict(node)
        return self._free.pop()

    def choose(self, count: int) -> list[int]:
        """The rows that `reserve` would return if it were called `count` times, or fewer. Changes
        nothing."""
        free = self._free[: -count - 1 : -1] if count else []
        evicted = islice(self._unpinned(), count - len(free))
        return [*free, *(node.snapshot for node in evicted if node.snapshot is not None)]

    def reserve_chosen(self, rows: Collection[int]) -> None:
        """Reserves what `choose` has returned."""
        chosen = set(rows)
        for row in chosen.intersection(self._taken):
            self.evict(self._taken[row])
        self._free = [row for row in self._free if row not in chosen]

    def take_in_flight(self) -> int | None:
        """A row for bytes that will arrive; None if all are pinned."""
        row = self.reserve()
        if row is not None:
            self._in_flight.add(row)
        return row

    def give_back(self, row: int) -> None:
        """A row that was reserved or in flight is free again."""
        self._in_flight.discard(row)
        self._free.append(row)

    def attach(self, node: PrefixNode, row: int) -> None:
        """A row that was reserved or in flight holds the state at the end of this block."""
        self._in_flight.discard(row)
        node.snapshot = row
        self._taken[row] = node
        self._policy.snapshot_used(node)

    def evict(self, node: PrefixNode) -> None:
        """Drops the state at the end of this block because its row is needed."""
        LOGGER.debug("a snapshot evicted, of the block %d", node.block_id)
        self._before_reuse()
        self.evictions += 1
        self.drop(node)

    def drop(self, node: PrefixNode) -> None:
        """Drops the state at the end of this block, which has one."""
        assert node.snapshot is not None
        del self._taken[node.snapshot]
        self._policy.snapshot_dropped(node)
        self._free.append(node.snapshot)
        node.snapshot = None

    def _unpinned(self) -> Iterator[PrefixNode]:
        return (node for node in self._policy.snapshots() if not node.pins)

    def check_invariants(self, nodes: Iterable[PrefixNode], reserved: Iterable[int]) -> None:
        """Raises Dsv4Error unless every row has exactly one owner; `reserved` are open plans'."""
        owned = {node.snapshot: node for node in nodes if node.snapshot is not None}
        rows = sorted([*self._free, *reserved, *self._taken, *self._in_flight])
        if rows != list(range(self.total)) or owned != self._taken:
            raise Dsv4Error("snapshots are lost or doubled: free and taken ones do not add up")
