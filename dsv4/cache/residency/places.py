"""Where the entries of each block are: on the device, in host memory, in both, or not written yet.
Torch-free.

    device row   host     the entries are
    yes          no       written on the device, or about to be
    yes          yes      on the device; they may leave it at once
    no           yes      in host memory only
    no           no       nowhere: the block is free, or nothing of it is written

Rows of the device are given to blocks here, rows of host memory in `host_rows.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.residency.host_rows import NO_ROW, HostRows
from dsv4.errors import Dsv4Error

PASSED_OVER = 64  # the most blocks in use that are skipped to find unused ones, which leave first


class EntryPlaces:
    """The device's rows of entries: which block has which row, which rows are free, and in which
    order blocks leave the device. An open block, which a step may write, neither leaves nor counts
    as being in host memory."""

    def __init__(self, blocks: int, rows: int, hosts: HostRows | None = None) -> None:
        self.rows = rows
        self.hosts = HostRows(blocks) if hosts is None else hosts
        self.row_of = np.full(blocks, NO_ROW, dtype=np.int32)
        self.in_host = np.zeros(blocks, dtype=np.bool_)
        # how often the entries of a block were replaced: copies of earlier versions do not count
        self.versions = np.zeros(blocks, dtype=np.int64)
        # the number of the block in the requests that hold it, the same for all of them
        self.depths = np.zeros(blocks, dtype=np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._order: OrderedDict[int, None] = OrderedDict()  # the oldest use first
        self.left = 0  # blocks that have left the device since the start

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def on_device(self) -> int:
        """Blocks with a row."""
        return len(self._order)

    def is_away(self, block_id: int) -> bool:
        """Whether the entries of a block are only in host memory."""
        return bool(self.in_host[block_id]) and self.row_of[block_id] == NO_ROW

    def take(self, count: int) -> list[int]:
        """Takes free rows; there must be that many."""
        assert count <= self.free
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, rows: Sequence[int]) -> None:
        """Gives back rows that were taken and are not used."""
        self._free.extend(reversed(rows))

    def place(self, block_id: int, row: int, depth: int) -> None:
        """Gives a block that has no row one of those that were taken."""
        assert self.row_of[block_id] == NO_ROW
        self.row_of[block_id], self.depths[block_id] = row, depth
        self._order[block_id] = None

    def open(self, block_id: int) -> None:
        """A step may write the block: what host memory has of it no longer counts."""
        self.in_host[block_id] = False
        self.versions[block_id] += 1
        self.hosts.part(block_id)

    def arrive(self, block_id: int, version: int) -> bool:
        """A copy of this version of the block has reached host memory. Returns whether the block
        still has this version."""
        if self.versions[block_id] != version:
            return False
        self.in_host[block_id] = True
        return True

    def leave(self, block_id: int) -> None:
        """The block gives up its row."""
        del self._order[block_id]
        row = int(self.row_of[block_id])
        self.row_of[block_id] = NO_ROW
        self._free.append(row)

    def forget(self, block_ids: Iterable[int]) -> None:
        """These blocks are free, or their entries are not needed any more."""
        for block_id in block_ids:
            if self.row_of[block_id] != NO_ROW:
                self.leave(block_id)
            self.open(block_id)

    def touch(self, block_ids: Iterable[int]) -> None:
        """A request begins with these blocks: of those on the device they are the last to
        leave."""
        order = self._order
        for block_id in block_ids:
            if block_id in order:
                order.move_to_end(block_id)

    def choose(
        self,
        count: int,
        *,
        may_leave: Callable[[int], bool],
        is_used: Callable[[int], bool],
    ) -> list[int]:
        """Up to `count` blocks that leave the device next: of those that may, and whose entries are
        in host memory too, first the unused ones, then the least recently used."""
        chosen: list[int] = []
        passed: list[int] = []
        candidates = (b for b in self._order if self.in_host[b] and may_leave(b))
        for block_id in candidates:
            (passed if is_used(block_id) else chosen).append(block_id)
            if len(chosen) == count or len(passed) == PASSED_OVER:
                break
        chosen += passed[: count - len(chosen)]
        return chosen + list(islice(candidates, count - len(chosen)))

    def with_rows(self) -> Iterator[int]:
        """Blocks with a row, the least recently used first."""
        return iter(self._order)

    @property
    def in_host_only(self) -> list[int]:
        """Blocks whose entries have left the device."""
        away = self.in_host & (self.row_of == NO_ROW)
        return [int(block_id) for block_id in away.nonzero()[0]]

    def rebuild(self, kept: Collection[int]) -> None:
        """After an interrupt: only these blocks have rows and copies, others are forgotten, and
        every other row is free."""
        order = [block_id for block_id in self._order if self.row_of[block_id] != NO_ROW]
        known = set(order)
        order += [int(b) for b in (self.row_of != NO_ROW).nonzero()[0] if int(b) not in known]
        self._order = OrderedDict.fromkeys(order)
        seen: set[int] = set()
        for block_id in order:
            row = int(self.row_of[block_id])
            if block_id not in kept or row in seen:
                self.row_of[block_id] = NO_ROW
                del self._order[block_id]
            seen.add(row)
        others = np.ones(len(self.row_of), dtype=np.bool_)
        others[list(kept)] = False
        self.in_host[others] = False
        self.versions[others] += 1
        taken = {int(self.row_of[block_id]) for block_id in self._order}
        self._free = sorted(set(range(self.rows)).difference(taken), reverse=True)
        self.hosts.rebuild(self.in_host.nonzero()[0].tolist())

    def check_invariants(self, held: Collection[int]) -> None:
        """Every row has one block or is free; only blocks that something holds have a row or are in
        host memory, and what is in host memory has a row there. Raises Dsv4Error otherwise."""
        self.hosts.check_invariants()
        if bool((self.hosts.row_of[self.in_host] == NO_ROW).any()):
            raise Dsv4Error("entries are in host memory, but in no row of it")
        taken = [int(self.row_of[block_id]) for block_id in self._order]
        if sorted(taken + self._free) != list(range(self.rows)):
            raise Dsv4Error("rows of entries are lost or doubled: free and taken do not add up")
        if set(self._order) != set((self.row_of != NO_ROW).nonzero()[0].tolist()):
            raise Dsv4Error("a block has a row of entries, but no place in the order of leaving")
        known = {*self._order, *self.in_host.nonzero()[0].tolist()}
        if strays := known.difference(held):
            raise Dsv4Error(f"blocks {sorted(strays)[:8]} are free, but have entries somewhere")


class ResidentAllocator(BlockAllocator):
    """The allocator of blocks whose entries have places of their own, which a block gives up when
    it is free."""

    def __init__(self, total: int, places: EntryPlaces) -> None:
        super().__init__(total)
        self._places = places

    def host_rows_of(self, owner: bytes, *, blocks: bool = True, records: bool = True) -> int:
        of_records, coming = self._places.hosts.apart_from_blocks(owner)
        of_blocks = self.owners.used.get(owner, 0) - coming
        return of_blocks * blocks + of_records * records

    def _free_again(self, block_ids: Sequence[int]) -> None:
        super()._free_again(block_ids)
        self._places.forget(block_ids)
