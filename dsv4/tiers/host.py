"""Host memory as a tier: the rows that everything below the device goes through. Torch-free."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsv4.errors import InvalidInput
from dsv4.tiers.extents import Extent, Extents
from dsv4.tiers.leaves import Leaves
from dsv4.tiers.loan import Lender, Loan
from dsv4.tiers.record import Key, Kind, Label, Parts, Record, Refusal, Region
from dsv4.tiers.sizes import HEADER_BYTES, UNIT_BYTES, padded
from dsv4.tiers.tier import DONE, DROPPED, MISSING, Limits, Outcome, QueuedTier
from dsv4.units import format_bytes, require_bytes

MOST_LOST = 65_536  # keys remembered because the tier had no room for them
PASSING = 8  # the part of the memory that may be cleared for records on their way elsewhere


@dataclass(slots=True, eq=False)
class HostRow:
    """Memory of one record in a host tier. It stays as it is while it is held. A passing one is on
    its way to somewhere else, and is not kept. The last bytes of the payload may lie in a `loan`
    that is not the tier's memory; `payload` are the others."""

    label: Label
    parts: Parts
    extents: tuple[Extent, ...]
    payload: tuple[memoryview, ...]
    loan: Loan | None = None
    holds: int = 1
    published: bool = False
    passing: bool = False
    # keeps the block before it until its own record is held, which then keeps that block
    leans: bool = False

    @property
    def units(self) -> int:
        """Of the tier's memory."""
        return sum(count for _, count in self.extents)

    @property
    def own_bytes(self) -> int:
        """Of the payload, in the tier's memory."""
        return sum(piece.nbytes for piece in self.payload)

    @property
    def record(self) -> Record:
        return Record(label=self.label, parts=self.parts, sealed=self.published)


class HostTier(QueuedTier):
    """Records in one piece of host memory of `capacity_bytes` (a number, or "64GiB"); `name` is the
    tier's in statistics, `limits` what may wait. Records that others lean on stay until those have
    gone; of the rest the longest unused one makes room. Of a prompt that is longer than
    the memory the beginning is kept: everything that is held can be reached.

    In addition to the calls of every tier there are rows: `take` one, fill it, `publish` it; `hold`
    one to copy from it or to store it in another tier; `release` each. Rows avoid a copy in
    between. Raises InvalidInput for more memory than there is.
    """

    chunk = 8
    encrypts = False

    def __init__(
        self, capacity_bytes: int | str, *, name: str = "host", limits: Limits | None = None
    ) -> None:
        capacity_bytes = require_bytes("capacity_bytes", capacity_bytes)
        units = capacity_bytes // UNIT_BYTES
        if units < 1:
            raise InvalidInput(
                f"capacity_bytes={capacity_bytes}: a host tier needs at least {UNIT_BYTES}"
            )
        super().__init__(name, Limits(threads=1) if limits is None else limits)
        self._memory = _memory(units * UNIT_BYTES)
        self._where = format_bytes(units * UNIT_BYTES)
        self._extents = Extents(units)
        self._rows: Leaves[HostRow] = Leaves()
        # Blocks that had to go or found no room: what leans on them cannot be reached, and is not
        # kept until the block is. Oldest first.
        self._lost = OrderedDict[Key, None]()
        self._passing_units = 0
        self._owned: dict[bytes, int] = {}  # bytes of each owner, without loans
        self.lender: Lender | None = None
        self._quotas: dict[bytes, int] = {}
        self._unpin: weakref.finalize[[], HostTier] | None = None
        self._users = weakref.WeakSet[object]()  # managers' ways to this tier
        self._is_shared = True  # between all of them; otherwise one has it alone

    @property
    def region(self) -> Region:
        """All rows: what tiers that move bytes by address register."""
        return Region(name=self.name, memory=self._memory)

    def pin(self) -> None:
        """Pins the memory, so that a GPU can copy it directly, until the tier is closed or
        collected. Needs torch and a GPU."""
        if self._unpin is None or not self._unpin.alive:
            from dsv4.tiers.pin import pin

            # The driver must forget the memory before the system does, when the process ends too:
            # it would think that the addresses are in use, and fail when they are allocated again.
            self._unpin = weakref.finalize(self, pin(self._memory))
            self._at_end(self._unpin)

    def open_for(self, owner: object, *, alone: bool) -> None:
        """A manager uses this tier. One whose records have loans in its own memory has the tier
        `alone`, and blocks that are there from before are forgotten. Raises InvalidInput if another
        one uses it that is still there."""
        with self._lock:
            if len(self._users) and (alone or not self._is_shared):
                raise InvalidInput(
                    "a manager with host_memory keeps a part of what its host tier has in that "
                    "memory, so no other manager can use the tier: give each one its own"
                )
            if alone or not self._is_shared:
                self._drop([key for key in self._rows if key.kind is Kind.BLOCK])
            self._users.add(owner)
            self._is_shared, self.lender = not alone, None

    def close_for(self, owner: object) -> None:
        """It does not use the tier any more. Blocks with loans in its memory are forgotten."""
        with self._lock:
            self._users.discard(owner)
            if not self._is_shared:
                self._drop([key for key in self._rows if key.kind is Kind.BLOCK])
                self._is_shared, self.lender = True, None

    # ---- quotas ----------------------------------------------------------------------------------

    def limit(self, owner: bytes, most_bytes: int | None) -> None:
        """From now on this is the most that an owner (`Label.owner`) may have here, and in memory
        of a `lender`; None ends that. One that has more gives up its own records, those that
        nothing holds at once. Managers that share the tier share its limits."""
        with self._lock:
            if most_bytes is None:
                self._quotas.pop(owner, None)
                self._rows.keep_apart_no_more(owner)
            else:
                self._quotas[owner] = most_bytes
                self._rows.keep_apart(owner)
                self._make_room_of(owner, 0)

    def bytes_of(self, owner: bytes) -> int:
        """What records of an owner have here, in whole units; what is on loan counts where it is.
        Records on their way to another tier do not count."""
        with self._lock:
            return self._owned.get(owner, 0)

    def is_full(self, label: Label, *, loan_bytes: int = 0) -> bool:
        """Whether the owner of a record would be above its limit with this one, of which the lender
        has `loan_bytes` already."""
        with self._lock:
            most = self._quotas.get(label.owner)
            units = padded(HEADER_BYTES + label.payload_bytes - loan_bytes)
            return most is not None and self._used_by(label.owner) + units > most

    def keep_limit(self, owner: bytes) -> None:
        """Removes records of an owner, as far as nothing holds them, until it is within its limit.
        What the lender has for it may have become more."""
        with self._lock:
            self._make_room_of(owner, 0)

    def _used_by(self, owner: bytes) -> int:
        """All that counts in an owner's limit."""
        used, lender = self._owned.get(owner, 0), self.lender
        if lender is not None:
            used += lender.needed_bytes(owner) + lender.lent_bytes(owner)
        return used

    def _own(self, row: HostRow, sign: int) -> None:
        """Counts a row that is not passing."""
        owner = row.label.owner
        left = self._owned.get(owner, 0) + sign * row.units * UNIT_BYTES
        if left:
            self._owned[owner] = left
        else:
            del self._owned[owner]

    def _make_room_of(self, owner: bytes, more_bytes: int) -> bool:
        """Whether an owner can have this much more within its limit, after records of its own were
        removed for that."""
        most = self._quotas.get(owner)
        if most is None:
            return True
        needed = 0 if self.lender is None else self.lender.needed_bytes(owner)
        if more_bytes and needed + more_bytes > most:
            return False
        while self._used_by(owner) + more_bytes > most:
            entry = self._rows.pop(lambda row: not row.holds, owner=owner)
            if entry is None:
                return False
            self._remove(entry.value)
        return True

    # ---- rows ------------------------------------------------------------------------------------

    def take(
        self, label: Label, *, passing: bool = True, loan: Loan | None = None
    ) -> HostRow | None:
        """A row for a record that is not there yet, held once and not visible to others. None if
        the record is there, or everything else is held. The end of the payload lies in the `loan`.

        A block that could not be reached, because the one before it had to go or found no room, is
        not kept: its row passes, and `publish` does nothing. None unless `passing` is wanted.
        """
        with self._lock:
            if self._closed or label.key in self._rows:
                return None
            loan_bytes = 0 if loan is None else loan.memory.nbytes
            own_bytes = label.payload_bytes - loan_bytes
            units = padded(HEADER_BYTES + own_bytes) // UNIT_BYTES
            extents = None
            if not self.is_lost(label):
                extents = self._room_beside(units, label)
            passes = extents is None
            if passes:
                self._lose(label.key)
                extents = self._room_to_pass(units) if passing else None
            if extents is None:
                return None
            whole = [
                self._memory[first * UNIT_BYTES : (first + count) * UNIT_BYTES]
                for first, count in extents
            ]
            if passes:
                self._passing_units += units
            else:
                self._lost.pop(label.key, None)
                self._rows.lean(label.leans_on)
            parts = own = Parts.of_units(whole, own_bytes)
            if loan is not None:
                loan.take(None if passes else label.owner)
                parts = Parts(header=own.header, payload=(*own.payload, loan.memory))
            row = HostRow(
                label, parts, extents, own.payload, loan, passing=passes, leans=not passes
            )
            if not passes:
                self._own(row, 1)
            return row

    def publish(self, row: HostRow) -> bool:
        """Makes a row visible, unless it is passing. Its header must be in place. It stays held.
        Returns whether its record can be found now."""
        with self._lock:
            key = row.label.key
            if not (row.passing or row.published or key in self._rows):
                row.published = True
                self._rows.add(row.label, row.units * UNIT_BYTES, row, row.label.owner)
                self._report((key,), there=True)
                self._lean_no_more(row)
            # if another thread was first, this row goes when it is released
            return key in self._rows

    def hold(self, labels: Sequence[Label]) -> list[HostRow | None]:
        """The rows of records, until they are released; None where there is none. Counts as a
        use."""
        with self._lock:
            return [self._hold(label) for label in labels]

    def _hold(self, label: Label) -> HostRow | None:
        entry = self._rows.get(label.key)
        if entry is None:
            return None
        self._rows.touch(label.key)
        entry.value.holds += 1
        return entry.value

    def release(self, row: HostRow) -> None:
        """Undoes one `take` or `hold`. The memory of a row that is not visible is then free."""
        with self._lock:
            row.holds -= 1
            if row.holds:
                return
            if row.published:
                self._rows.queue(row.label.key)
                self._make_room_of(row.label.owner, 0)
                return
            self._lean_no_more(row)
            self._free(row)

    def _free(self, row: HostRow) -> None:
        self._extents.give(row.extents)
        if row.passing:
            self._passing_units -= row.units
        else:
            self._own(row, -1)
        if row.loan is not None:
            row.loan.give_back()

    def take_loan(self, label: Label, loan: Loan) -> None:
        """The same bytes lie here too: a record that is not held has its end here from now on."""
        with self._lock:
            entry = self._rows.get(label.key)
            row = None if entry is None else entry.value
            if row is None or row.holds or row.loan is None or row.loan.row == loan.row:
                return
            loan.take(label.owner)
            row.loan.give_back()
            row.loan = loan
            row.parts = Parts(header=row.parts.header, payload=(*row.payload, loan.memory))

    def drop_loan(self) -> bool:
        """Removes the record that was used longest ago, of those whose loan nothing else needs, and
        what leans on it. Returns whether there was one."""
        passed: list[Key] = []

        def may_go(row: HostRow) -> bool:
            loan = row.loan
            if loan is None:  # in the way of a block, or not
                before = self._rows.get(row.label.leans_on)
                loan = None if before is None else before.value.loan
            if not row.holds and loan is not None and not loan.is_needed:
                return True
            passed.append(row.label.key)
            return False

        with self._lock:
            try:
                while (entry := self._rows.pop(may_go)) is not None:
                    self._remove(entry.value)
                    if entry.value.loan is not None:
                        return True
                return False
            finally:
                for key in passed:
                    self._rows.queue(key)

    def _lean_no_more(self, row: HostRow) -> None:
        if row.leans:
            row.leans = False
            self._rows.lean_no_more(row.label.leans_on)

    def holds(self, key: Key) -> bool:
        """Whether a record can be found."""
        with self._lock:
            return key in self._rows

    def is_lost(self, label: Label) -> bool:
        """Whether the block before a record had no room here, so that the record could not be
        reached. A state is kept all the same: its blocks may still be on the device."""
        with self._lock:
            before = label.leans_on
            has_left = before in self._lost and before not in self._rows
            return has_left and label.kind is not Kind.STATE

    def note_loads(self, labels: Sequence[Label], refusals: Sequence[Refusal | None]) -> None:
        """Counts rows that were held, checked and used in place as loads. Refused ones are
        forgotten."""
        with self._lock:
            for label, refusal in zip(labels, refusals, strict=True):
                if refusal is None:
                    self._counters.hits += 1
                    self._counters.loaded_bytes += label.record_bytes
                else:
                    self._note_refusal(label.key, refusal)
                    self._forget(label.key)

    def use(self, blocks: Sequence[Label], snapshot: Label | None = None) -> None:
        with self._lock:
            last = self._last_held(blocks)
            for label in (last, snapshot):
                if label is not None:
                    self._rows.touch(label.key)

    def _last_held(self, blocks: Sequence[Label]) -> Label | None:
        """A block is held only if all before it are: finds the last one in a few looks."""
        held = bisect_left(range(len(blocks)), True, key=lambda n: blocks[n].key not in self._rows)
        return blocks[held - 1] if held else None

    def _lose(self, key: Key) -> None:
        if key.kind is Kind.BLOCK:
            self._lost.pop(key, None)
            self._lost[key] = None
            if len(self._lost) > MOST_LOST:
                self._lost.popitem(last=False)

    def _room_beside(self, units: int, label: Label) -> tuple[Extent, ...] | None:
        """Room that is not made by removing the block that a record leans on. Where its owner has a
        limit, its own records make room first."""
        self._rows.lean(label.leans_on)
        try:
            if not self._make_room_of(label.owner, units * UNIT_BYTES):
                return None
            return self._room(units)
        finally:
            self._rows.lean_no_more(label.leans_on)

    def _room_to_pass(self, units: int) -> tuple[Extent, ...] | None:
        """Free room, or a little that is cleared: records that are kept do not make way for one
        that is not."""
        extents = self._extents.take(units)
        most = self._memory.nbytes // UNIT_BYTES // PASSING
        if extents is None and (not self._passing_units or self._passing_units + units <= most):
            extents = self._room(units)
        return extents

    def _room(self, units: int) -> tuple[Extent, ...] | None:
        if units * UNIT_BYTES > self._memory.nbytes:
            return None
        while (extents := self._extents.take(units)) is None:
            entry = self._rows.pop(lambda row: not row.holds)
            if entry is None:
                break
            self._remove(entry.value)
        return extents

    def _remove(self, row: HostRow) -> None:
        """A record that has to make room."""
        self._lose(row.label.key)
        self._report((row.label.key,), there=False)
        self._give_back(row)

    def _forget(self, key: Key) -> None:
        entry = self._rows.remove(key)
        if entry is not None:
            self._report((key,), there=False)
            self._give_back(entry.value)

    def _give_back(self, row: HostRow) -> None:
        row.published = False
        if not row.holds:
            self._free(row)

    # ---- as a tier -------------------------------------------------------------------------------

    def _glance(self, label: Label) -> bool | None:
        return label.key in self._rows

    def _held(self) -> tuple[int | None, int | None, int | None]:
        return len(self._rows), self._rows.used_bytes, self._memory.nbytes

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        with self._lock:
            return [label.key in self._rows for label in labels]

    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        outcomes = []
        for record in records:
            with self._lock:
                row = self._hold(record.label)
            if row is None:
                outcomes.append(MISSING)
                continue
            try:
                outcomes.append(_copied(row.parts, record.parts))
            finally:
                self.release(row)
        return outcomes

    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]:
        outcomes = []
        for record in records:
            row = self.take(record.label, passing=False)
            if row is None:
                outcomes.append(DONE if self.holds(record.key) else DROPPED)
                continue
            try:
                outcomes.append(_copied(record.parts, row.parts))
                self.publish(row)
            finally:
                self.release(row)
        return outcomes

    def _drop(self, keys: Sequence[Key]) -> None:
        with self._lock:
            for key in keys:
                self._forget(key)


def _memory(size_bytes: int) -> memoryview:
    """One piece of memory, or InvalidInput with how much there is."""
    try:
        return memoryview(mmap.mmap(-1, size_bytes))
    except (OSError, OverflowError, ValueError) as error:
        has_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        raise InvalidInput(
            f"capacity_bytes={size_bytes:,}: the system gives no such piece of memory ({error}); "
            f"the machine has {has_bytes:,} bytes: ask for less"
        ) from error


def _copied(source: Parts, target: Parts) -> Outcome:
    """Copies a record between pieces that are cut differently. Of a record of another size only the
    header, for which it is then refused. numpy lets other threads run meanwhile."""
    if source.payload_bytes != target.payload_bytes:
        target.header[:] = source.header
        return DONE
    pieces, at = list(reversed(target.pieces)), 0
    for piece in source.pieces:
        start = 0
        while start < piece.nbytes:
            room = pieces[-1][at:]
            count = min(room.nbytes, piece.nbytes - start)
            np.copyto(
                np.frombuffer(room[:count], np.uint8),
                np.frombuffer(piece[start : start + count], np.uint8),
            )
            start, at = start + count, at + count
            if at == pieces[-1].nbytes:
                pieces.pop()
                at = 0
    return DONE
