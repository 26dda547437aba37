"""Entries of blocks in host memory: which are copied there, and from when on they may be read.

A copy is of one version of a block's entries, made once, in the background. Some count as arrived
while they are still running: whatever reads host memory then waits for them first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dsv4.cache.changes import LOGGER
from dsv4.cache.residency.host_rows import SharedHostRows
from dsv4.cache.residency.places import EntryPlaces
from dsv4.cache.residency.pool import HostPool
from dsv4.cache.transfers.copies import Copies, Mark, Row

MOST_COPYING = 256  # blocks on the way to host memory: a full stream would block launches


class HostEntries:
    """Copies of `rows`, the entries of blocks on the device, in rows of `pool`."""

    def __init__(self, places: EntryPlaces, pool: HostPool, rows: Tensor) -> None:
        self._places, self._hosts, self._pool, self._rows = places, places.hosts, pool, rows
        self._copies = Copies(rows.device, pool.memory)
        self._queue: deque[tuple[int, int]] = deque()  # complete blocks to copy, with versions
        self._asked = np.full_like(places.versions, -1)  # of each block the version queued last
        self._copying: deque[tuple[Mark, list[tuple[int, int]]]] = deque()
        self._early: Mark | None = None  # of copies that count as arrived, and may still be running
        self.copied = self.failed = 0
        if isinstance(places.hosts, SharedHostRows):
            places.hosts.make_mark = self.make_mark

    @property
    def memory(self) -> memoryview:
        """All of it."""
        return self._pool.memory

    @property
    def is_copying(self) -> bool:
        """Whether blocks wait for copies, or copies have not arrived."""
        return bool(self._queue or self._copying)

    def row_of(self, block_id: int) -> int:
        return int(self._hosts.row_of[block_id])

    def row(self, block_id: int) -> Tensor:
        """The entries of a block."""
        return self._pool.bytes[self.row_of(block_id)]

    def piece(self, block_id: int) -> memoryview:
        """The same."""
        return self._pool.piece(self.row_of(block_id))

    def ask(self, block_id: int) -> None:
        """Once: the block may leave when one copy has arrived, and another would read its row."""
        version = int(self._places.versions[block_id])
        if self._asked[block_id] != version:
            self._asked[block_id] = version
            self._queue.append((block_id, version))

    def pump(self, most: int = MOST_COPYING) -> None:
        """Notes copies that have arrived, and begins others."""
        while self._copying and self._copying[0][0].passed:
            for block_id, version in self._copying.popleft()[1]:
                self.copied += self._places.arrive(block_id, version)
        room = most - sum(len(blocks) for _, blocks in self._copying)
        batch: list[tuple[int, int]] = []
        while self._queue and len(batch) < room:
            block_id, version = self._queue.popleft()
            if self._places.versions[block_id] == version:
                batch.append((block_id, version))
        # those without a row of host memory wait until a tier needs fewer
        homeless = [each for each in batch if not self._hosts.take(each[0])]
        if homeless:
            self._queue.extendleft(reversed(homeless))
            batch = [each for each in batch if each not in homeless]
        if batch:
            self._copy_down(batch)

    def _copy_down(self, blocks: list[tuple[int, int]]) -> None:
        row_of = self._places.row_of
        try:
            targets = [Row((self._pool.piece(self.row_of(b)),)) for b, _ in blocks]
            sources = [self._rows[int(row_of[b])] for b, _ in blocks]
            mark = self._copies.down(zip(sources, targets, strict=True))
        except RuntimeError as error:
            LOGGER.warning("%d blocks are not in host memory yet: %s", len(blocks), error)
            self.failed += len(blocks)
            self._queue.extendleft(reversed(blocks))  # with the next commit, or when rows are short
            self._copies.finish()  # some may be running
            return
        if mark.passed and not self._copying:
            for block_id, version in blocks:
                self.copied += self._places.arrive(block_id, version)
        else:
            self._copying.append((mark, blocks))

    def make_mark(self) -> Mark:
        """What the device does now with host memory, in whatever stream, is over when it has
        passed."""
        self.hold_back()
        return self._copies.mark()

    def finish(self) -> None:
        """Begins all copies, and makes what comes next on the current stream wait for them; the
        host does not wait. Then their blocks may leave."""
        self.pump(most=len(self._queue) + MOST_COPYING)
        self.hold_back()
        while self._copying:
            self._early, blocks = self._copying.popleft()
            for block_id, version in blocks:
                self.copied += self._places.arrive(block_id, version)

    def hold_back(self) -> None:
        """What comes next on the current stream waits for the copies that are running."""
        for mark in self._running()[-1:]:
            mark.hold_back()

    def _running(self) -> list[Mark]:
        """Copies to host memory that may be running, in their order."""
        if self._early is not None and self._early.passed:
            self._early = None
        early = [] if self._early is None else [self._early]
        return [*early, *(mark for mark, _ in self._copying)]

    def wait(self) -> None:
        """Waits for the copies that are running. Blocks the host."""
        for mark in self._running():
            mark.wait()

    def hold_back_early(self) -> None:
        """What comes next on the current stream, which may be another one than before, waits for
        copies that count as arrived."""
        if self._early is not None:
            self._early.hold_back()
            self._early = None if self._early.passed else self._early

    def start_over(self) -> None:
        """After an interrupt: no copy is running or asked for."""
        self._copies.finish()
        self._copying.clear()
        self._early = None
        self._queue.clear()
        self._asked.fill(-1)

    # ---- for other machines ----------------------------------------------------------------------

    def bring_down(self, block_ids: Sequence[int]) -> list[int]:
        """Waits until the entries of these complete blocks are in host memory, where they stay as
        long as the blocks are held. Returns those that do not get there."""
        self.finish()
        self.wait()
        return [block_id for block_id in block_ids if not self._places.in_host[block_id]]

    def take_rows(self, block_ids: Sequence[int]) -> bool:
        """Host memory for entries of blocks in flight, which may be written to when `make_mark` has
        passed. Whether there is enough. If they do not arrive, the blocks are free again."""
        for block_id in block_ids:
            if not self._hosts.take(block_id):
                return False
            self._places.in_host[block_id] = True
        return True
