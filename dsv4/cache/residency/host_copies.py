"""Copies of complete blocks' entries to host memory: each block once, in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from dsv4.cache.changes import LOGGER
from dsv4.cache.residency.host_rows import SharedHostRows
from dsv4.cache.residency.places import EntryPlaces
from dsv4.cache.residency.pool import EntryRows, HostPool
from dsv4.cache.transfers.copies import Mark

MOST_COPYING = 256  # blocks on the way to host memory: a full stream would block launches


class HostCopies:
    """A block that was asked for is copied from its row of `arena` to its row of host memory. It
    may leave the device once the copy has arrived, which `places` records. A block that has changed
    meanwhile is not copied, or its copy does not count."""

    def __init__(self, places: EntryPlaces, pool: HostPool, arena: Tensor) -> None:
        self.copied = self.failed = 0
        self._places, self._hosts, self._arena = places, places.hosts, arena
        self.host = pool  # for what the host itself reads and writes
        self._pool: EntryRows = pool
        self._queue: deque[tuple[int, int]] = deque()  # blocks to copy, with their versions
        self._asked = np.full_like(places.versions, -1)  # of each block the version queued last
        self._running: deque[tuple[Mark, list[tuple[int, int]]]] = deque()
        self._early: Mark | None = None  # of copies that count as arrived, and may still be running
        if isinstance(places.hosts, SharedHostRows):
            places.hosts.make_mark = self.make_mark

    def ask(self, block_id: int) -> None:
        """Asks for a copy of a complete block, once: after the first copy has arrived the block may
        leave, and a second copy would read the row that it has left."""
        version = int(self._places.versions[block_id])
        if self._asked[block_id] != version:
            self._asked[block_id] = version
            self._queue.append((block_id, version))

    def pump(self, most: int = MOST_COPYING) -> None:
        """Notes which copies have arrived, and begins others, until `most` blocks are on the
        way."""
        while self._running and self._running[0][0].passed:
            for block_id, version in self._running.popleft()[1]:
                self.copied += self._places.arrive(block_id, version)
        room = most - sum(len(blocks) for _, blocks in self._running)
        batch: list[tuple[int, int]] = []
        while self._queue and len(batch) < room:
            block_id, version = self._queue.popleft()
            if self._places.versions[block_id] == version:
                batch.append((block_id, version))
        # blocks for which host memory has no row wait until a tier gives one back
        homeless = [each for each in batch if not self._hosts.take(each[0])]
        if homeless:
            self._queue.extendleft(reversed(homeless))
            batch = [each for each in batch if each not in homeless]
        if batch:
            self._begin(batch)

    def _begin(self, blocks: list[tuple[int, int]]) -> None:
        row_of, host_row_of = self._places.row_of, self._hosts.row_of
        try:
            rows = [(self._arena[int(row_of[b])], int(host_row_of[b])) for b, _ in blocks]
            mark = self._pool.down(rows)
        except RuntimeError as error:
            LOGGER.warning("%d blocks are not in host memory yet: %s", len(blocks), error)
            self.failed += len(blocks)
            # tried again at the next commit, or when rows are short
            self._queue.extendleft(reversed(blocks))
            self._pool.finish()  # some may be running
            return
        if mark.passed and not self._running:
            for block_id, version in blocks:
                self.copied += self._places.arrive(block_id, version)
        else:
            self._running.append((mark, blocks))

    def hasten(self) -> bool:
        """Begins all copies that were asked for and counts them as arrived, so that their blocks
        may leave. The host does not wait: what comes next on the current stream does. Returns
        whether there were any."""
        if not self._queue and not self._running:
            return False
        self.pump(most=len(self._queue) + MOST_COPYING)
        self.hold_back()
        while self._running:
            self._early, blocks = self._running.popleft()
            for block_id, version in blocks:
                self.copied += self._places.arrive(block_id, version)
        return True

    # ---- for what reads or writes where copies may be running ------------------------------------

    def hold_back(self) -> None:
        """What comes next on the current stream waits for the copies that are running."""
        for mark in self._marks()[-1:]:
            mark.hold_back()

    def hold_back_early(self) -> None:
        """What comes next on the current stream waits for the copies that count as arrived: it may
        be another stream than the one that waits for them since `hasten`."""
        if self._early is not None:
            self._early.hold_back()
            self._early = None if self._early.passed else self._early

    def wait(self) -> None:
        """Waits until no copy is running."""
        for mark in self._marks():
            mark.wait()

    def _marks(self) -> list[Mark]:
        """Of the copies that may be running, in their order."""
        if self._early is not None and self._early.passed:
            self._early = None
        early = [] if self._early is None else [self._early]
        return [*early, *(mark for mark, _ in self._running)]

    def make_mark(self) -> Mark:
        """A mark that is passed when everything that the device does with host memory now, on any
        stream, is over."""
        self.hold_back()
        return self._pool.mark()

    # ---- for other machines ----------------------------------------------------------------------

    def piece(self, block_id: int) -> memoryview:
        """A block's row of host memory."""
        return self.host.piece(int(self._hosts.row_of[block_id]))

    def bring_down(self, block_ids: Sequence[int]) -> list[int]:
        """Waits until the entries of these complete blocks are in host memory, where they stay as
        long as the blocks are held. Returns those that do not get there."""
        self.hasten()
        self.wait()
        return [block_id for block_id in block_ids if not self._places.in_host[block_id]]

    def take_rows(self, block_ids: Sequence[int]) -> bool:
        """Takes rows for entries of blocks in flight, which may be written to when `make_mark` has
        passed. Returns whether there are enough. If entries do not arrive, their blocks are free
        again."""
        for block_id in block_ids:
            if not self._hosts.take(block_id):
                return False
            self._places.in_host[block_id] = True
        return True

    # ---- after an interrupt, and looking ---------------------------------------------------------

    def on_their_way(self) -> list[int]:
        """Blocks whose copies are running."""
        return [block_id for _, blocks in self._running for block_id, _ in blocks]

    def forget(self) -> None:
        """Waits for the copies that are running, and forgets which blocks were asked for."""
        self._pool.finish()
        self._running.clear()
        self._early = None
        self._queue.clear()
        self._asked.fill(-1)
