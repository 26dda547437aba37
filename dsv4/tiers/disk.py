"""A directory as a tier: one file per record, safe to share between processes. Torch-free."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from dsv4.errors import InvalidInput, require_count
from dsv4.tiers.lru import Lru
from dsv4.tiers.record import Key, Label, Record
from dsv4.tiers.shelves import Calls, Shelves, read_at
from dsv4.tiers.tier import (
    DONE,
    DROPPED,
    MISSING,
    Limits,
    Outage,
    Outcome,
    QueuedTier,
    foreign,
    wrong_size,
)

Sync = Literal["off", "each"]
LOW_WATER = 0.95  # of the capacity: what is left when room was made
SCANS_PER_CAPACITY = 16  # how often to look for what other processes wrote, by own bytes written
# errors that the next record may not meet: this one is dropped or missing, the tier goes on
_PASSING = {
    *(errno.EMFILE, errno.ENFILE, errno.EFBIG),
    errno.EINVAL,  # O_DIRECT's word for a write that a limit cuts short
    *(errno.ENOENT, errno.EISDIR, errno.ENOTDIR),  # somebody else is at work in the directory
}


class DiskTier(QueuedTier):
    """Records as files in a directory of its own, at most so many bytes of them.

    A file appears whole or not at all. `sync="off"`: after a power loss a record may be gone or
    damaged, and a damaged one is refused. `sync="each"`: what was reported as stored is there after
    a power loss. `direct`: around the page cache; None tries whether that works.

    Processes that share the directory see each other's records at once and each other's bytes when
    they scan, so that n of them may pass the capacity by n/16 of it.
    """

    keeps_order = True

    def __init__(
        self,
        root: str | Path,
        capacity_bytes: int,
        *,
        sync: Sync = "off",
        direct: bool | None = None,
        name: str = "disk",
        limits: Limits | None = None,
        calls: Calls | None = None,
    ) -> None:
        if sync not in get_args(Sync):
            raise InvalidInput(f"sync={sync!r}: give one of {', '.join(get_args(Sync))}")
        super().__init__(name, limits or Limits(threads=4))
        self._capacity_bytes = require_count("capacity_bytes", capacity_bytes)
        self._shelves = Shelves(Path(root), durable=sync == "each", calls=calls)
        works = self._shelves.takes_direct() if direct is not False else False
        if direct and not works:
            raise InvalidInput(f"direct=True: the file system of {root} takes no O_DIRECT")
        self._flags = os.O_DIRECT if works else 0
        self._files: Lru[None] = Lru()
        self._scanning = threading.Lock()
        self._fresh: dict[Key, int] = {}  # written since the last scan began
        self._fresh_bytes = 0
        self._reserved_bytes = 0  # being written
        self._scanned = False
        self._own = threading.local()
        self._do_later(self._scan_first)

    # ---- as a tier -------------------------------------------------------------------------------

    def _glance(self, label: Label) -> bool | None:
        return label.key in self._files or None  # another process may have it

    def _held(self) -> tuple[int | None, int | None, int | None]:
        return len(self._files), self._files.used_bytes, self._capacity_bytes

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        return [self._shelves.exists(label.key) for label in labels]

    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        return [self._load_one(record) for record in records]

    def _load_one(self, record: Record) -> Outcome:
        try:
            fd = self._shelves.open(record.key, self._flags)
        except OSError as error:
            if self._shelves.is_foreign(record.key):
                return foreign("something that is no file")
            with self._lock:
                if error.errno == errno.ENOENT:
                    self._files.remove(record.key)
            return _passing(error, MISSING)
        try:
            outcome = self._read(fd, record)
        except OSError as error:
            return _passing(error, MISSING)
        finally:
            os.close(fd)
        if outcome is DONE:
            self._note(record.label)
        return outcome

    def _read(self, fd: int, record: Record) -> Outcome:
        label, found = record.label, os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return foreign("something that is no file")
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

    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]:
        return [self._store_one(record) for record in records]

    def _store_one(self, record: Record) -> Outcome:
        label = record.label
        try:
            if self._shelves.exists(label.key):
                self._note(label)
                return DONE
            if not self._make_room(label.padded_bytes):
                return DROPPED
            try:
                self._shelves.write(label.key, self._to_write(record), flags=self._flags)
                with self._lock:
                    self._files.add(label.key, label.padded_bytes, None, label)
                    self._fresh[label.key] = label.padded_bytes
                    self._fresh_bytes += label.padded_bytes
            finally:
                with self._lock:
                    self._reserved_bytes -= label.padded_bytes
        except OSError as error:
            return _passing(error, DROPPED)
        return DONE

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            with self._lock:
                self._files.remove(key)
            self._shelves.remove(key)

    def _close(self) -> None:
        self._shelves.close()

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
        """Memory of this thread that O_DIRECT takes, where the record's own is not."""
        if not self._flags or record.parts.whole:
            return ()
        size_bytes, memory = record.label.padded_bytes, getattr(self._own, "memory", None)
        if memory is None or memory.nbytes < size_bytes:
            memory = self._own.memory = memoryview(mmap.mmap(-1, size_bytes))
        return (memory[:size_bytes],)

    # ---- room ------------------------------------------------------------------------------------

    def _note(self, label: Label) -> None:
        """A record that another process may have written."""
        with self._lock:
            if label.key not in self._files:
                self._files.add(label.key, label.padded_bytes, None, label)

    def _use(self, labels: Sequence[Label]) -> None:
        """In the directory too: other processes and the next start read it there."""
        with self._lock:
            used = self._files.touch(labels)
        self._shelves.touch(used)

    def _scan_first(self) -> None:
        with self._scanning:
            if not self._scanned:
                self._scan()

    def _scan(self) -> None:
        """Takes stock of the directory: what others wrote and removed, what lost its writer."""
        with self._lock:
            self._fresh, self._fresh_bytes = {}, 0
        self._shelves.sweep()
        found = sorted(self._shelves.scan(), key=lambda file: file.used_ns)
        with self._lock:
            known, self._files = self._files, Lru()
            for file in found:
                self._files.add(file.key, file.size_bytes, None)
                entry, before = self._files.get(file.key), known.get(file.key)
                if entry is not None and before is not None:
                    entry.tokens, entry.leans_on = before.tokens, before.leans_on
            for key, size_bytes in self._fresh.items():  # the scan may have been there before
                if key not in self._files:
                    self._files.add(key, size_bytes, None)
        self._scanned = True

    def _make_room(self, size_bytes: int) -> bool:
        """Removes what was used longest ago until a record has room, and reserves it. Raises
        OSError."""
        with self._scanning:
            unseen_bytes = self._fresh_bytes
            if not self._scanned or unseen_bytes > self._capacity_bytes / SCANS_PER_CAPACITY:
                self._scan()
            victims = []
            with self._lock:
                most = self._capacity_bytes - self._reserved_bytes - size_bytes
                if most < 0:
                    return False
                if self._files.used_bytes > most:
                    most = max(0, most - int(self._capacity_bytes * (1 - LOW_WATER)))
                    for key in self._files.oldest():
                        if self._files.used_bytes <= most:
                            break
                        self._files.remove(key)
                        victims.append(key)
            for key in victims:
                self._shelves.remove(key)
            with self._lock:
                self._reserved_bytes += size_bytes
        return True


def _padding(label: Label) -> memoryview:
    """Zeros for writing; for reading, memory that nobody looks at."""
    return memoryview(bytearray(label.padded_bytes - label.record_bytes))


def _passing(error: OSError, outcome: Outcome) -> Outcome:
    """The outcome of one record, or an outage of the tier: full, read-only, broken."""
    if error.errno in _PASSING:
        return outcome
    raise Outage(f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}") from error
