"""What tiers copy where entries are kept apart from the rest of a block. A record in a host tier
shares the block's row of host memory, so that each entry is there once."""

from __future__ import annotations

import weakref

from torch import Tensor

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.residency.host_rows import SharedHostRows
from dsv4.cache.residency.residency import Residency
from dsv4.cache.transfers.copies import BlockMemory, Landing, Rows
from dsv4.tiers.host import HostTier
from dsv4.tiers.loan import Loan


class ResidentBlocks(BlockMemory):
    """A record has a copy of the entries, from the device or from host memory."""

    def __init__(self, rows: Tensor, residency: Residency) -> None:
        super().__init__(rows)
        self._residency = residency

    def whole(self, block_id: int) -> Rows:
        return self._residency.block_of(block_id)

    def target(self, block_id: int) -> Rows:
        return self._residency.target_of(block_id)


class SharedBlocks(ResidentBlocks):
    """The end of a record is the block's row of host memory."""

    shares = True

    def __init__(
        self,
        rows: Tensor,
        residency: Residency,
        hosts: SharedHostRows,
        allocator: BlockAllocator,
    ) -> None:
        super().__init__(rows, residency)
        self._hosts, self._allocator = hosts, allocator
        self.loan_bytes = hosts.width

    def share(self, host: HostTier) -> tuple[memoryview, ...]:
        self._hosts.reclaim = host.drop_loan
        host.lender = HostBytes(self._allocator, self.loan_bytes)
        return (self._hosts.memory,)

    def source(self, block_id: int) -> Rows | None:
        return self._rows[block_id] if self._residency.places.in_host[block_id] else None

    def target(self, block_id: int) -> Rows:
        return self._rows[block_id]

    def loan(self, block_id: int) -> Loan | None:
        row = int(self._hosts.row_of[block_id])
        return None if self._hosts.is_lent(row) else self._hosts.lend(block_id)

    def landing(self, block_id: int, owner: bytes) -> Landing:
        self._hosts.expect(block_id, owner)
        return SharedLanding(block_id, self._residency, self._hosts)

    def pump(self) -> None:
        self._residency.copies.pump()


class HostBytes:
    """What a manager has in host memory for the prompts of an owner, in bytes. The tier that asks
    may outlive the manager."""

    def __init__(self, allocator: BlockAllocator, row_bytes: int) -> None:
        self._allocator, self._row_bytes = weakref.ref(allocator), row_bytes

    def needed_bytes(self, owner: bytes) -> int:
        allocator = self._allocator()
        rows = 0 if allocator is None else allocator.host_rows_of(owner, records=False)
        return rows * self._row_bytes

    def lent_bytes(self, owner: bytes) -> int:
        allocator = self._allocator()
        rows = 0 if allocator is None else allocator.host_rows_of(owner, blocks=False)
        return rows * self._row_bytes


class SharedLanding:
    """A block in flight."""

    def __init__(self, block_id: int, residency: Residency, hosts: SharedHostRows) -> None:
        self._block_id, self._residency, self._hosts = block_id, residency, hosts

    @property
    def waits(self) -> bool:
        return self._hosts.is_settling

    def lend(self) -> Loan | None:
        if not self._hosts.take_quiet(self._block_id):
            return None
        return self._hosts.lend(self._block_id)

    def take_over(self, loan: Loan) -> bool:
        is_there = self._hosts.take_over(self._block_id, loan)
        if is_there:
            self._residency.places.in_host[self._block_id] = True
        return is_there

    def whole(self) -> Rows | None:
        if not self._hosts.take_quiet(self._block_id):
            return None
        return self._residency.target_of(self._block_id)


def blocks_of(rows: Tensor, residency: Residency | None, allocator: BlockAllocator) -> BlockMemory:
    """The blocks of a manager."""
    if residency is None:
        return BlockMemory(rows)
    hosts = residency.places.hosts
    if isinstance(hosts, SharedHostRows):
        return SharedBlocks(rows, residency, hosts, allocator)
    return ResidentBlocks(rows, residency)
