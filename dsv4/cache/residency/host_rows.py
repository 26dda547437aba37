"""Which row of host memory has the entries of which block, and which rows belong to records of a
host tier. Torch-free.

    block   record   the row has
    yes     no       entries of a block, or is about to
    yes     yes      entries of a block that are also the end of a tier's record: one copy for both
    no      yes      entries of a block that was evicted: a tier has it, until its row is needed
    no      no       no content

Without a host tier every block has the row of its own number.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from dsv4.errors import Dsv4Error
from dsv4.tiers.loan import Loan

NO_ROW = -1


class Passing(Protocol):
    """A position of the device's work."""

    @property
    def passed(self) -> bool: ...


class HostRows:
    """Every block has the row of its own number, always."""

    shares = False

    def __init__(self, blocks: int) -> None:
        self.row_of = np.arange(blocks, dtype=np.int32)
        self.total = blocks

    def take(self, block_id: int) -> bool:
        """Gives a block a row of its own, if it has none. Returns whether it has one now. The row's
        old content is lost."""
        return True

    def part(self, block_id: int) -> None:
        """The block no longer needs its row."""

    def expect(self, block_id: int, owner: bytes) -> None:
        """A block in flight for an owner, which may get the row of a record: it counts once it has
        one."""

    def apart_from_blocks(self, owner: bytes) -> tuple[int, int]:
        """How many rows only records of an owner have, and how many of its blocks have none yet and
        do not count. In any thread."""
        return 0, 0

    def used(self, taken: int) -> int:
        """How many rows blocks and records have, if `taken` blocks are not free."""
        return taken

    def rebuild(self, kept: Collection[int]) -> None:
        """After an interrupt: only these blocks have a row."""

    def check_invariants(self) -> None:
        """Raises Dsv4Error if rows are lost or doubled."""


class SharedHostRows(HostRows):
    """A block gets a row when something is to be written there. `lend` lends the row to a record of
    a host tier, which keeps it when the block no longer needs it. If no row is free, `reclaim` asks
    the tier to give one back, and returns whether it did.

    The host must not write a row that the device still reads: a row that became free is given to
    `take_quiet` only after the device has passed a mark (`make_mark`) that was set later.

    For quotas every block counts that is not free, with or without a row: it can have one whenever
    it needs one. So what is counted here is the difference.
    """

    shares = True

    def __init__(self, blocks: int, rows: int, memory: memoryview) -> None:
        super().__init__(blocks)
        assert rows >= blocks
        self.row_of.fill(NO_ROW)
        self.total = rows
        self._block_of = np.full(rows, NO_ROW, dtype=np.int32)
        self.memory, self.width = memory, memory.nbytes // rows
        self._loans: dict[int, Loan] = {}
        self._returned: deque[int] = deque()  # by records that ended, in any thread
        # free rows: those that the device does not read, and those that it may still read, with the
        # time at which each became free
        self._quiet = dict.fromkeys(range(rows - 1, -1, -1))
        self._unquiet: dict[int, int] = {}
        self._fresh: list[tuple[int, int]] = []
        self._settling: deque[tuple[Passing, list[tuple[int, int]]]] = deque()
        self._clock = 0
        self.make_mark: Callable[[], Passing]
        self.reclaim: Callable[[], bool] = lambda: False
        self._counting = threading.Lock()  # records begin and end in any thread
        self._of_records: dict[int, bytes] = {}  # rows that only a record has, and whose it is
        self._records_of: Counter[bytes] = Counter()
        self._expected: dict[int, bytes] = {}  # blocks in flight without a row
        self._expected_of: Counter[bytes] = Counter()

    # ---- rows of blocks ------------------------------------------------------------------------

    def take(self, block_id: int) -> bool:
        return self._has_own(block_id) or self._give(block_id, self._find())

    def take_quiet(self, block_id: int) -> bool:
        """`take` for bytes that the host writes. While `is_settling`, what failed may succeed
        later."""
        return self._has_own(block_id) or self._give(block_id, self._find_quiet())

    def _has_own(self, block_id: int) -> bool:
        row = int(self.row_of[block_id])
        return row != NO_ROW and not self.is_lent(row)

    def _give(self, block_id: int, row: int | None) -> bool:
        if row is None:
            return False
        self._part(block_id)
        self._own(block_id, row)
        return True

    @property
    def is_settling(self) -> bool:
        """Whether there are free rows that the device may still read."""
        self._settle()
        return bool(self._settling)

    def part(self, block_id: int) -> None:
        self._expect_no_more(block_id)
        self._part(block_id)

    def _part(self, block_id: int) -> None:
        row = int(self.row_of[block_id])
        if row == NO_ROW:
            return
        self.row_of[block_id] = self._block_of[row] = NO_ROW
        if self.is_lent(row):
            self._count(row)
        else:
            self._add_free(row)

    def take_over(self, block_id: int, loan: Loan) -> bool:
        """The block has the row of a record, whose bytes are its own. If another block with the
        same bytes has that row, it gets a row with a copy; returns whether there was one."""
        assert not loan.over
        if self._block_of[loan.row] == NO_ROW:
            self._part(block_id)
            self._own(block_id, loan.row)
        elif self.row_of[block_id] != loan.row:
            if not self.take_quiet(block_id):
                return False
            start = int(self.row_of[block_id]) * self.width
            self.memory[start : start + self.width] = loan.memory
        return True

    def _own(self, block_id: int, row: int) -> None:
        self.row_of[block_id], self._block_of[row] = row, block_id
        if self.is_lent(row):
            self._count(row)
        self._expect_no_more(block_id)

    # ---- whose rows ----------------------------------------------------------------------------

    def expect(self, block_id: int, owner: bytes) -> None:
        if self.row_of[block_id] == NO_ROW and block_id not in self._expected:
            self._expected[block_id] = owner
            self._expected_of[owner] += 1

    def _expect_no_more(self, block_id: int) -> None:
        owner = self._expected.pop(block_id, None)
        if owner is not None:
            _take_one(self._expected_of, owner)

    def apart_from_blocks(self, owner: bytes) -> tuple[int, int]:
        return self._records_of[owner], self._expected_of[owner]

    def used(self, taken: int) -> int:
        return int(np.count_nonzero(self._block_of != NO_ROW)) + len(self._of_records)

    def _count(self, row: int) -> None:
        """The block or the record of a row has changed."""
        with self._counting:
            loan, owner = self._loans.get(row), None
            if loan is not None and loan.is_out and self._block_of[row] == NO_ROW:
                owner = loan.record_owner
            before = self._of_records.pop(row, None)
            if owner is not None:
                self._of_records[row] = owner
                self._records_of[owner] += 1
            if before is not None:
                _take_one(self._records_of, before)

    # ---- rows of records -----------------------------------------------------------------------

    def is_lent(self, row: int) -> bool:
        loan = self._loans.get(row)
        return loan is not None and loan.is_out

    def lend(self, block_id: int) -> Loan:
        """Lends a block's row to a new record, whose end its entries are. No record may have it."""
        row = int(self.row_of[block_id])
        assert row != NO_ROW
        assert not self.is_lent(row)
        memory = self.memory[row * self.width : (row + 1) * self.width]
        self._loans[row] = loan = Loan(
            row, memory, is_needed=self._is_needed, change=self._note_loan
        )
        return loan

    def _note_loan(self, loan: Loan) -> None:
        """A record has it, or has given it back. In any thread."""
        self._count(loan.row)
        if loan.over:
            self._returned.append(loan.row)

    def _is_needed(self, row: int) -> bool:
        return bool(self._block_of[row] != NO_ROW)

    # ---- free rows -----------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many rows no block and no record has."""
        self._collect()
        return len(self._quiet) + len(self._unquiet)

    @property
    def of_records_only(self) -> int:
        """How many rows only a record has: those of blocks that were evicted."""
        return self.total - int(np.count_nonzero(self._block_of != NO_ROW)) - self.free

    def free_rows(self) -> list[int]:
        self._collect()
        return [*self._quiet, *self._unquiet]

    def _add_free(self, row: int) -> None:
        self._clock += 1
        self._unquiet[row] = self._clock
        self._fresh.append((row, self._clock))

    def _collect(self) -> None:
        """Frees the rows that records have given back, unless a block has them."""
        while self._returned:
            row = self._returned.popleft()
            is_free = row in self._quiet or row in self._unquiet
            if self._block_of[row] == NO_ROW and not is_free and not self.is_lent(row):
                self._add_free(row)

    def _reclaimed(self) -> bool:
        self._collect()
        if self._quiet or self._unquiet:
            return True
        self.reclaim()
        self._collect()
        return bool(self._quiet or self._unquiet)

    def _find(self) -> int | None:
        """A free row for bytes that the device writes: it does so after its reads."""
        if not self._reclaimed():
            return None
        row, _ = (self._unquiet or self._quiet).popitem()
        return row

    def _find_quiet(self) -> int | None:
        self._reclaimed()
        self._settle()
        return self._quiet.popitem()[0] if self._quiet else None

    def _settle(self) -> None:
        if self._fresh:
            self._settling.append((self.make_mark(), self._fresh))
            self._fresh = []
        while self._settling and self._settling[0][0].passed:
            for row, when in self._settling.popleft()[1]:
                if self._unquiet.get(row) == when:
                    del self._unquiet[row]
                    self._quiet[row] = None

    # ---- after an interrupt, and looking -------------------------------------------------------

    def rebuild(self, kept: Collection[int]) -> None:
        owners: dict[int, int] = {}
        for block_id in kept:
            row = int(self.row_of[block_id])
            if row != NO_ROW:
                owners.setdefault(row, block_id)
        self.row_of.fill(NO_ROW)
        self._block_of.fill(NO_ROW)
        self._expected.clear()
        self._expected_of.clear()
        for row, block_id in owners.items():
            self._own(block_id, row)
        self._quiet, self._unquiet = {}, {}
        self._fresh.clear()
        self._settling.clear()
        for row in range(self.total):
            if row not in owners and not self.is_lent(row):
                self._add_free(row)
            self._count(row)

    def check_invariants(self) -> None:
        owned = {int(row): b for b, row in enumerate(self.row_of) if row != NO_ROW}
        known = {row: int(b) for row, b in enumerate(self._block_of) if b != NO_ROW}
        if owned != known:
            raise Dsv4Error("a row of host memory has two blocks, or a block two rows")
        free = self.free_rows()
        lent = {row for row in range(self.total) if self.is_lent(row)}
        if {*free, *owned, *lent} != set(range(self.total)) or len(set(free)) < len(free):
            raise Dsv4Error("rows of host memory are lost: no block, no record and not free")
        if strays := {*owned, *lent}.intersection(free):
            raise Dsv4Error(f"rows {sorted(strays)[:8]} of host memory are free, but in use")
        self._check_counts()

    def _check_counts(self) -> None:
        with self._counting:
            loans = {row: loan for row, loan in self._loans.items() if loan.is_out}
            whose = {r: loan.record_owner for r, loan in loans.items() if self._block_of[r] < 0}
            known = {row: owner for row, owner in whose.items() if owner is not None}
            agree = known == self._of_records and self._records_of == Counter(known.values())
        if not agree:
            raise Dsv4Error("rows of records are counted for others than have them")
        if any(self.row_of[block_id] != NO_ROW for block_id in self._expected):
            raise Dsv4Error("a block has a row of host memory, and does not count for its owner")


def _take_one(counts: Counter[bytes], owner: bytes) -> None:
    counts[owner] -= 1
    if not counts[owner]:
        del counts[owner]
