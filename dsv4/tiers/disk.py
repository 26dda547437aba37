"""A directory as a tier: one file per record, safe to share between processes. Torch-free."""

from __future__ import annotations

import errno
import logging
import math
import mmap
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

from dsv4.errors import InvalidInput, require_flag
from dsv4.tiers.health import Health
from dsv4.tiers.index import Books, Index
from dsv4.tiers.record import Key, Kind, Label, Reason, Record, Refusal
from dsv4.tiers.rest import rest
from dsv4.tiers.shelves import Calls, Shelves, read_at
from dsv4.tiers.survey import Survey
from dsv4.tiers.tier import (
    DONE,
    DROPPED,
    MISSING,
    Limits,
    Operation,
    Outage,
    Outcome,
    QueuedTier,
    State,
    Ticket,
    foreign,
    wrong_size,
)
from dsv4.units import format_bytes, require_bytes

log = logging.getLogger("dsv4.tiers")
Sync = Literal["off", "each"]
MOST_VICTIMS = 64  # evicted per record: after the capacity was reduced it is reached step by step
HELP_S = 0.1  # how long a store that needs room helps to make the index
WAIT_S = 1.0  # how long a record waits for its block, which is being stored, or for the index
EARLY_SHARE = 16  # of the capacity this part may be stored before a lost index is complete again
MOST_FREE_BYTES = 1 << 30  # kept free on the file system, or a sixteenth of the capacity
MOST_LOST = 16_384  # keys remembered because they were not stored
FRESH_NS = 60 * 10**9  # how far a file's time of last use may be older than in the index
# errors that say nothing about the record, nor about the disk: this record is dropped or missing
_PASSING = {
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EFBIG),
    errno.EINVAL,  # O_DIRECT's error for a write that a limit cuts short
    # other processes work in the directory
    *(errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
}
_FULL = {errno.ENOSPC, errno.EDQUOT}
# the next record meets it too
_DISK = {*_FULL, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENXIO}
_RECENT, _BROKEN = 32, 8  # if this many different records of the last ones failed, it is the disk


class DiskTier(QueuedTier):
    """Records as files in a directory of its own, `root`, with a limit on their total bytes,
    `capacity_bytes` (a number, or "1TB").

    A file appears whole or not at all. `sync="off"`: after a power loss a record may be gone or
    damaged, and a damaged one is refused. `sync="each"`: what was reported as stored is there after
    a power loss. `direct`: bypasses the page cache; None tries whether that works. `name` is
    the tier's in statistics, `limits` what may wait; `calls` are the system's, for tests.

    Processes that share the directory see each other's records at once and count their bytes
    together; of their capacities the largest counts. A hundredth of the file system is left free.
    """

    look_chunk = 64  # labels per job of a lookup: each is a name that the file system knows or not
    keeps_order = True

    def __init__(
        self,
        root: str | Path,
        capacity_bytes: int | str,
        *,
        sync: Sync = "off",
        direct: bool | None = None,
        name: str = "disk",
        limits: Limits | None = None,
        calls: Calls | None = None,
    ) -> None:
        if not isinstance(sync, str) or sync not in get_args(Sync):
            raise InvalidInput(f"sync={sync!r}: give one of {', '.join(get_args(Sync))}")
        if direct is not None:
            require_flag("direct", direct)
        if not isinstance(root, str | os.PathLike) or not os.fspath(root):
            raise InvalidInput(f"root={root!r}: give the path of a directory of its own")
        super().__init__(name, Limits(threads=4) if limits is None else limits)
        self._capacity_bytes = capacity_bytes = require_bytes("capacity_bytes", capacity_bytes)
        self._where = f"{root}, {format_bytes(capacity_bytes)}"
        self._durable, self._direct = sync == "each", direct
        self._shelves = Shelves(Path(root), durable=self._durable, calls=calls)
        self._at_end(self._shelves.close)
        try:
            self._flags = 0
            self._decide_direct()
            if direct and self._direct is False:
                raise InvalidInput(f"direct=True: the file system of {root} takes no O_DIRECT")
        except BaseException:
            self._end_all()
            raise
        self._index = Index(self._shelves, capacity_bytes)
        self._at_end(self._index.close)
        self._survey = Survey(self._shelves, self._index)
        self._at_end(self._survey.stop)
        self._disk = {each: Health(recent=_RECENT, failures=_BROKEN) for each in Operation}
        self._own = threading.local()
        self._takes_stock = False
        self._block_tokens: dict[bytes, int] = {}  # as far as is known, by fingerprint
        self._lost = OrderedDict[Key, None]()  # blocks that were not stored, the oldest first
        self._quotas: dict[bytes, int] = {}
        self._may_be_above: dict[bytes, None] = {}  # owners, since their limit or the index is new
        self._begin_stock()

    def _decide_direct(self) -> None:
        """O_DIRECT or not, found by trying. If a full disk prevents the trial, it is repeated
        later."""
        works = self._shelves.takes_direct() if self._direct is not False else False
        self._tries_direct = works is None
        if works is not None:
            self._direct = works
            self._flags = os.O_DIRECT if works else 0

    # ---- quotas ----------------------------------------------------------------------------------

    def limit(self, owner: bytes, most_bytes: int | None) -> None:
        """From now on this is the most that records of an owner (`Label.owner`) may have here, of
        all processes together; None ends that. One that has more gives up its own. Each process
        keeps the limits that it was given."""
        with self._lock:
            if most_bytes is None:
                self._quotas.pop(owner, None)
            else:
                self._quotas[owner] = most_bytes
                self._may_be_above[owner] = None
        self._begin_stock()

    def bytes_of(self, owner: bytes) -> int | None:
        """What records of an owner have here, those of other processes too: whole files. Asks the
        index; None if that does not answer."""
        with suppress(Outage, OSError), self._index.books() as books:
            return books.owned(owner)
        return None

    def _over(self, books: Books, owner: bytes, more_bytes: int) -> int:
        """By how much an owner would be above its limit with this much more."""
        most = self._quotas.get(owner)
        return 0 if most is None else max(0, books.owned(owner) + more_bytes - most)

    def _make_room_of(self, books: Books, owner: bytes, more_bytes: int, keep: Key | None) -> bool:
        """Whether an owner can have this much more within its limit, after records of its own were
        removed for that; after its limit was lowered, whether it has at least no more than
        before. Raises OSError."""
        most = self._quotas.get(owner)
        if most is None:
            return True
        if more_bytes > most:
            return False
        before_bytes = books.owned(owner)
        for _ in range(MOST_VICTIMS):
            if not self._over(books, owner, more_bytes):
                break
            victim = books.oldest_of(owner, keep)
            if victim is None:
                break
            self._give_up_record(books, victim)
        return books.owned(owner) + more_bytes <= max(most, before_bytes)

    # ---- as a tier -------------------------------------------------------------------------------

    def _held(self) -> tuple[int | None, int | None, int | None]:
        index = self._index
        return index.records, index.bytes, index.capacity_bytes

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        return [self._look_one(label) for label in labels]

    def _look_one(self, label: Label) -> bool:
        try:
            return self._is_there(label)
        except OSError as error:
            if error.errno not in _PASSING:
                self._blame(Operation.LOOKUP, label.key, error)
        return False

    def _is_there(self, label: Label) -> bool:
        """Asks the file system by name, because it knows what all processes wrote."""
        exists, looked_in = self._shelves.exists, self._shelves.fd
        return exists(label.key) or (self._is_another(looked_in) and exists(label.key))

    def _is_another(self, looked_in: int) -> bool:
        """Whether another directory than `looked_in` is in use now, because that one was removed;
        this call or another thread's may have noticed."""
        return self._renewed() or self._shelves.fd != looked_in

    def _renewed(self) -> bool:
        """Whether the directory had been removed; then a new one is used."""
        renewed = self._shelves.renew()
        if renewed:
            self._survey.stop()
            self._begin_stock()
        return renewed

    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        return [self._load_one(record) for record in records]

    def _load_one(self, record: Record) -> Outcome:
        """An error of one file concerns that record: it is refused, and removed like any refused
        one. Errors of many different files are the disk's."""
        try:
            fd = self._open(record.key)
        except OSError as error:
            if self._shelves.is_foreign(record.key):
                return foreign("something that is not a file")
            if error.errno == errno.ENOENT:
                self._forget(record.key)
            return self._failed(record.key, error)
        try:
            outcome = self._read(fd, record)
        except OSError as error:
            return self._failed(record.key, error)
        finally:
            os.close(fd)
        self._note_answer(Operation.LOAD)
        return outcome

    def _open(self, key: Key) -> int:
        looked_in = self._shelves.fd
        try:
            return self._shelves.open(key, self._flags)
        except FileNotFoundError:
            if not self._is_another(looked_in):
                raise
        return self._shelves.open(key, self._flags)

    def _failed(self, key: Key, error: OSError) -> Outcome:
        if error.errno in _PASSING:
            return MISSING
        self._blame(Operation.LOAD, key, error)
        if not self._has_file(key):
            return MISSING
        found = f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"
        refusal = Refusal(reason=Reason.UNREADABLE, found=found, asked="a record")
        return Outcome(State.REFUSED, refusal)

    def _has_file(self, key: Key) -> bool:
        try:
            return self._shelves.exists(key)
        except OSError:
            return False  # not the file's fault: its shelf cannot be opened

    def _blame(self, operation: Operation, key: Key, error: OSError) -> None:
        """Notes that a record could not be read or written. Raises Outage when it is the disk."""
        with self._lock:
            health = self._disk[operation]
            health.note_failure(key)
            broken = health.is_lost()
        if broken or error.errno in _DISK:
            name = errno.errorcode.get(error.errno or 0, "?")
            raise Outage(f"{name}: {error.strerror}") from error

    def _note_answer(self, operation: Operation) -> None:
        with self._lock:
            self._disk[operation].note_success()

    def _read(self, fd: int, record: Record) -> Outcome:
        label, found = record.label, os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return foreign("something that is not a file")
        if found.st_size != label.padded_bytes:
            return wrong_size(found.st_size, label.padded_bytes)
        bounce = self._bounce(record)
        pieces = record.parts.whole or bounce or (*record.parts.pieces, _padding(label))
        count = read_at(fd, pieces)
        if count != label.padded_bytes:
            return wrong_size(count, label.padded_bytes)
        if bounce:
            at = 0
            for piece in record.parts.pieces:
                piece[:] = bounce[0][at : at + piece.nbytes]
                at += piece.nbytes
        return DONE

    def store(self, records: Sequence[Record]) -> Ticket:
        """As in every tier. Records are written side by side, in any order; how long a block is,
        which says where a prompt begins, is learned from all of them first."""
        self._require(records)
        with self._lock:
            for each in records:
                if each.label.kind is Kind.BLOCK:
                    known = self._block_tokens.get(each.label.fingerprint, 0)
                    self._block_tokens[each.label.fingerprint] = math.gcd(known, each.label.tokens)
        return super().store(records)

    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]:
        return [self._store_one(record) for record in records]

    def _store_one(self, record: Record) -> Outcome:
        label, stored = record.label, False
        self._lost.pop(label.key, None)
        try:
            stored = self._write(record)
        except OSError as error:
            if error.errno not in _PASSING:
                self._blame(Operation.STORE, label.key, error)
            return DROPPED
        finally:
            if not stored:
                self._lose(label.key)
        self._note_answer(Operation.STORE)
        with suppress(Outage, OSError):
            if not self._index.complete:
                self._begin_stock()
            self._look_around(0.0)
        return DONE if stored else DROPPED

    def _lose(self, key: Key) -> None:
        """A record that was not stored. However much room there is, what leans on it is not kept
        until it is here."""
        if key.kind is Kind.BLOCK:
            with self._lock:
                self._lost[key] = None
                if len(self._lost) > MOST_LOST:
                    self._lost.popitem(last=False)

    def _write(self, record: Record) -> bool:
        """Whether a record is there now. Raises OSError."""
        label, full = record.label, 0
        if label.padded_bytes > self._index.capacity_bytes:
            return False
        self._renewed()
        if self._shelves.holds(label.key, label.padded_bytes):
            if self._durable:
                self._shelves.sync(label.key)
            return True
        if self._tries_direct:
            self._decide_direct()
        while True:
            try:
                if not self._reserve(label, full * label.padded_bytes):
                    return False
                self._shelves.write(label.key, self._to_write(record), flags=self._flags)
                self._remove_uncounted(label)
                return True
            except BaseException as error:
                self._forget(label.key)
                full += 1
                if not isinstance(error, OSError) or error.errno not in _FULL or full == 4:
                    raise

    def _remove_uncounted(self, label: Label) -> None:
        """Removes a record that was dropped or evicted while its file was being written."""
        with self._index.books() as books:
            if not books.holds(label.key):
                self._shelves.remove(label.key)

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._shelves.remove(key)
            self._forget(key)

    def _forget(self, key: Key) -> None:
        """Removes a record that is not there from the index. If that fails, its room is counted for
        a while longer."""
        with suppress(Outage, OSError):
            if self._shelves.exists(key):
                return
            with self._index.books() as books:
                books.remove(key)
            self._report((key,), there=False)

    # ---- memory ----------------------------------------------------------------------------------

    def _to_write(self, record: Record) -> Sequence[memoryview]:
        """The record as pieces that can be written: a copy only for O_DIRECT, and only from memory
        that is not in whole units."""
        bounce = self._bounce(record)
        if record.parts.whole or not bounce:
            return record.parts.whole or (*record.parts.pieces, _padding(record.label))
        at = 0
        for piece in (*record.parts.pieces, _padding(record.label)):
            bounce[0][at : at + piece.nbytes] = piece
            at += piece.nbytes
        return bounce

    def _bounce(self, record: Record) -> tuple[memoryview, ...]:
        """This thread's buffer that O_DIRECT accepts, for records whose own memory it does not."""
        if not self._flags or record.parts.whole:
            return ()
        size_bytes, memory = record.label.padded_bytes, getattr(self._own, "memory", None)
        if memory is None or memory.nbytes < size_bytes:
            memory = self._own.memory = memoryview(mmap.mmap(-1, size_bytes))
        return (memory[:size_bytes],)

    # ---- room ------------------------------------------------------------------------------------

    def _use(self, uses: Sequence[Sequence[Label]]) -> None:
        """The end of a prompt is enough: what it leans on is not evicted before it. Its file is
        touched now and then, for `dsv4 store`, and in case the index is lost."""
        within = {labels[0].leans_on for labels in uses if len(labels) == 1}
        used = []
        with self._index.books() as books:
            for labels in uses:
                if len(labels) > 1 or labels[0].key not in within:
                    found = next(filter(None, map(books.use, labels)), None)
                    used += [] if found is None else [found]
            now_ns = books.clock
        if not self._index.complete:
            self._begin_stock()
        for key, before_ns in used:
            if now_ns - before_ns > FRESH_NS:
                self._shelves.touch(key)

    def _reserve(self, label: Label, full_bytes: int) -> bool:
        """Counts a record that is about to be written, and makes room for it. `full_bytes` must be
        freed because the disk had no room for it. Raises OSError."""
        began, helped = time.monotonic(), False
        while True:
            # what leans on it is not kept before that is clear, because it may fail
            is_coming = self._is_coming(label.leans_on)
            short_bytes = max(full_bytes, self._shortage(label))
            with self._index.books() as books:
                books.learn(label, self._block_tokens.get(label.fingerprint, 0))
                if books.holds(label.key):
                    # another thread or process is about to write it, or its file was lost
                    return True
                reachable = books.can_be_reached(label) or (
                    not books.complete and self._has_file(label.leans_on)
                )
                if not reachable and label.leans_on in self._lost:
                    return False
                over = books.bytes + label.padded_bytes - books.capacity_bytes
                early_bytes = books.early_bytes + label.padded_bytes
                fits = (
                    over <= 0
                    and not short_bytes
                    and (reachable or helped)
                    and early_bytes <= books.capacity_bytes // EARLY_SHARE
                    and not self._over(books, label.owner, label.padded_bytes)
                )
                # without a complete index, something uncounted might have to go, or be leaned on
                if (books.complete or fits) and (reachable or not is_coming):
                    has_room = self._made_room(books, label, over, short_bytes, reachable)
                    if has_room is not None:
                        return has_room
                complete = books.complete
            waited_s = time.monotonic() - began
            if is_coming and not reachable and complete:
                if waited_s > self._limits.deadline_s:
                    return False
                time.sleep(0.001)
            elif complete or (helped and waited_s > WAIT_S):
                return False
            else:
                self._look_around(HELP_S)
                helped = True

    def _shortage(self, label: Label) -> int:
        """The bytes that the file system lacks: at most two records are evicted for one, because
        the space they free may take a while to appear."""
        most = min(MOST_FREE_BYTES, self._capacity_bytes // 16)
        return min(self._shelves.shortage(label.padded_bytes, most), 2 * label.padded_bytes)

    def _made_room(
        self, books: Books, label: Label, over: int, short_bytes: int, reachable: bool
    ) -> bool | None:
        """Whether a record has room, after others were removed for it; None if it would then be
        stored where no lookup reaches it. Raises OSError."""
        before_bytes = books.bytes
        # only with this much room is a record kept that leans on nothing here
        spare = books.capacity_bytes // 16
        is_over = self._over(books, label.owner, label.padded_bytes) > 0
        if (over + spare > 0 or short_bytes or is_over) and not reachable:
            return None
        if not self._make_room_of(books, label.owner, label.padded_bytes, label.leans_on):
            return False
        for _ in range(MOST_VICTIMS):
            if before_bytes - books.bytes >= max(over, short_bytes):
                break
            victim = books.oldest(label.leans_on)
            if victim is None:
                break
            self._give_up_record(books, victim)
        if short_bytes and books.bytes == before_bytes:
            raise OSError(errno.ENOSPC, "nothing is left that could make room")
        if books.bytes + label.padded_bytes > max(books.capacity_bytes, before_bytes):
            return False
        now, owner = books.now(), label.owner or None
        books.put(label.key, label.leans_on, label.padded_bytes, now, owner=owner)
        if not books.complete:
            books.note_early(label.padded_bytes)
        return True

    def _give_up_record(self, books: Books, victim: Key | str) -> None:
        rest()
        if isinstance(victim, str):
            self._shelves.remove_other(victim)
            books.remove_other(victim)
            return
        try:
            self._shelves.remove(victim)
        except OSError as error:
            if error.errno in _DISK:
                raise
            log.warning("tier %s: cannot remove %s: %s", self._name, victim, error)
            books.put_back(victim)
            return
        books.remove(victim)
        self._report((victim,), there=False)

    def _is_coming(self, key: Key) -> bool:
        """Whether another thread is storing a record at this moment."""
        with self._lock:
            return any(record.key == key for job in self._running for record in job.records)

    # ---- taking stock ----------------------------------------------------------------------------

    def _begin_stock(self) -> None:
        if not self._takes_stock:
            self._takes_stock = True
            self._do_later(self._take_stock)

    def _take_stock(self) -> None:
        """Makes the index from the files, where that is not done yet: a piece, then other queued
        work, then the next piece."""
        self._takes_stock = False
        with self._index.books():
            pass
        if not self._index.complete:
            with self._lock:
                self._may_be_above.update(dict.fromkeys(self._quotas))
        if not self._look_around(0.01, unless_complete=True) or self._is_above():
            self._begin_stock()
            return
        owner = next(iter(self._may_be_above), None)
        if owner is not None:
            if not self._is_owner_above(owner):
                self._may_be_above.pop(owner, None)
            self._begin_stock()

    def _is_owner_above(self, owner: bytes) -> bool:
        """Whether an owner still has more than its limit after a few of its records were
        removed."""
        with self._index.books() as books:
            before_bytes = books.owned(owner)
            if not books.complete or not self._over(books, owner, 0):
                return False
            self._make_room_of(books, owner, 0, None)
            return self._over(books, owner, 0) > 0 and books.owned(owner) < before_bytes

    def _is_above(self) -> bool:
        """Whether there is still more than the capacity after a few records were removed: some came
        while the index was made, or the capacity was reduced."""
        with self._index.books() as books:
            before_bytes = books.bytes
            for _ in range(MOST_VICTIMS):
                if books.bytes <= books.capacity_bytes or not books.complete:
                    return False
                victim = books.oldest(None)
                if victim is None:
                    return False
                self._give_up_record(books, victim)
            return books.bytes < before_bytes

    def _look_around(self, seconds: float, *, unless_complete: bool = False) -> bool:
        """Continues the survey of the directory: one step, or as many as the time allows while the
        index is not complete. Returns whether it is."""
        until = time.monotonic() + seconds
        while not (unless_complete and self._index.complete):
            self._survey.step(max(0.0, until - time.monotonic()))
            unless_complete = True
            if time.monotonic() >= until:
                break
        return self._index.complete


def _padding(label: Label) -> memoryview:
    """Zeros for writing; for reading, memory whose content is ignored."""
    return memoryview(bytearray(label.padded_bytes - label.record_bytes))
