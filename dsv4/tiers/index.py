"""What a disk tier's directory holds, in an SQLite database next to the records. Torch-free.

        ROOT/1/index-2-9d2e….sqlite   and what SQLite keeps next to it: -wal, -shm
        ROOT/1/index-lock             held while looking for an index, and while making one

The files are the truth. Whether a record is there is asked from the file system, by name; the index
knows how many bytes there are, and what goes first. If it is lost, damaged or stale this costs only
time: it is made again from the files, a piece at a time. All processes share it, so that the bytes
of all of them are counted together. Where SQLite cannot keep it in the directory (file systems
without its locks, a full disk, a read-only one) it is kept in memory, for this process alone.

A record leans on a block (`Label.leans_on`). Only records that nothing leans on are evicted, the
longest unused first, and a record's last use passes to the block that it leaned on. So using the
end of a prompt keeps all that is before it, and costs the same however long the prompt is.

Each record counts for an owner (`Label.owner`), so that a tenant's quota is kept whichever process
writes. The files do not name it: of a record that a survey finds it is the name that the chain of
records before it begins with, which is the owner's where all of them are there.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import re
import secrets
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dsv4.tiers.record import DIGEST_BYTES, Key, Kind, Label
from dsv4.tiers.rest import rest
from dsv4.tiers.shelves import Shelves
from dsv4.tiers.sizes import UNIT_BYTES
from dsv4.tiers.tier import Outage

log = logging.getLogger("dsv4.tiers")
# with the version of its tables. A name is never reused: SQLite would take the log of a lost index
# for that of the next one.
_NAME = re.compile(r"index-2-[0-9a-f]{16}\.sqlite", re.ASCII)
_OURS = re.compile(r"\.?index-[12]-[0-9a-f]{16}\.sqlite(-wal|-shm|-journal)?", re.ASCII)
_LOCK = "index-lock"
_MOST_UNITS = (1 << 31) - 1  # that SQLite's own number for its users can say
RETRY_S = 60.0  # how long an index lies in memory before its file is tried again
BUSY_S = 1.0  # how long another process may hold the lock
_TABLES = """
CREATE TABLE IF NOT EXISTS state (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    records INTEGER NOT NULL, bytes INTEGER NOT NULL,
    clock INTEGER NOT NULL,     -- of the last use, in ns; it never goes back
    complete INTEGER NOT NULL,  -- all files were looked at once
    capacity INTEGER NOT NULL   -- the largest of those that have the directory open
);
INSERT OR IGNORE INTO state VALUES (1, 0, 0, 0, 0, 0);
CREATE TABLE IF NOT EXISTS records (
    key BLOB PRIMARY KEY,       -- kind, digest
    leans_on BLOB,
    bytes INTEGER NOT NULL,     -- 0: not here, and something leans on it
    used INTEGER NOT NULL,
    leaning INTEGER NOT NULL,   -- how many records here lean on it
    owner BLOB                  -- NULL: not known yet
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS leaves ON records (used) WHERE leaning = 0 AND bytes > 0;
CREATE INDEX IF NOT EXISTS own_leaves ON records (owner, used) WHERE leaning = 0 AND bytes > 0;
CREATE INDEX IF NOT EXISTS unowned ON records (key) WHERE owner IS NULL AND bytes > 0;
CREATE TABLE IF NOT EXISTS owners (
    owner BLOB PRIMARY KEY, bytes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS others (  -- of other record versions
    path TEXT PRIMARY KEY, bytes INTEGER NOT NULL, used INTEGER NOT NULL, seen INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS oldest_others ON others (used);
CREATE TABLE IF NOT EXISTS schemas (
    fingerprint BLOB PRIMARY KEY, block_tokens INTEGER NOT NULL
) WITHOUT ROWID;
"""
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_PASSING = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_KINDS = set(Kind)
_BUSY = {errno.EMFILE, errno.ENFILE, errno.EAGAIN}
_left: list[sqlite3.Connection] = []  # of a process before the fork: not ours to close


class Books:
    """The index within one transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        row = db.execute("SELECT records, bytes, clock, complete, capacity FROM state").fetchone()
        self.records: int = row[0]
        self.bytes: int = row[1]
        self.clock: int = row[2]
        self.complete: int = row[3]
        self.capacity_bytes: int = row[4]
        self._read = row
        self._early_units = self._early_read = 0
        if not self.complete:
            self._early_units = self._early_read = db.execute("PRAGMA user_version").fetchone()[0]

    @property
    def early_bytes(self) -> int:
        """How much was stored since the index was lost, while it was not complete."""
        return self._early_units * UNIT_BYTES

    def note_early(self, size_bytes: int) -> None:
        self._early_units = min(self._early_units + size_bytes // UNIT_BYTES, _MOST_UNITS)

    def save(self) -> None:
        row = (self.records, self.bytes, self.clock, self.complete, self.capacity_bytes)
        if row != self._read:
            self._db.execute(
                "UPDATE state SET records=?, bytes=?, clock=?, complete=?, capacity=?", row
            )
        early_units = 0 if self.complete else self._early_units
        if early_units != self._early_read:
            self._db.execute(f"PRAGMA user_version={early_units}")

    def now(self) -> int:
        """The time, later than every use before. Setting a clock back changes no order."""
        self.clock = max(self.clock + 1, time.time_ns())
        return self.clock

    def holds(self, key: Key) -> bool:
        found = self._db.execute("SELECT bytes FROM records WHERE key=?", (_blob(key),)).fetchone()
        return found is not None and found[0] > 0

    def put(
        self,
        key: Key,
        leans_on: Key | None,
        size_bytes: int,
        used_ns: int,
        *,
        owner: bytes | None = None,
    ) -> None:
        """Counts a record that is there, or about to be; without an `owner` for none, until
        `find_owners`."""
        own = _blob(key)
        below = None if leans_on is None or leans_on == key else _blob(leans_on)
        execute = self._db.execute
        found = execute("SELECT bytes, owner FROM records WHERE key=?", (own,)).fetchone()
        if found is not None and found[0]:
            execute("UPDATE records SET bytes=?, used=? WHERE key=?", (size_bytes, used_ns, own))
            self.bytes += size_bytes - found[0]
            self._count(found[1], size_bytes - found[0])
            return
        execute(
            "INSERT INTO records VALUES (?, ?, ?, ?, 0, ?) ON CONFLICT (key) DO UPDATE SET "
            "leans_on=excluded.leans_on, bytes=excluded.bytes, used=max(used, excluded.used), "
            "owner=excluded.owner",
            (own, below, size_bytes, used_ns, owner),
        )
        if below is not None:
            execute(
                "INSERT INTO records VALUES (?, NULL, 0, 0, 1, NULL) "
                "ON CONFLICT (key) DO UPDATE SET leaning=leaning+1",
                (below,),
            )
        self.records += 1
        self.bytes += size_bytes
        self._count(owner, size_bytes)

    def remove(self, key: Key) -> None:
        """Removes a record that is gone. Its last use becomes that of its block."""
        own, execute = _blob(key), self._db.execute
        found = execute(
            "SELECT leans_on, bytes, used, leaning, owner FROM records WHERE key=?", (own,)
        ).fetchone()
        if found is None or not found[1]:
            return
        below, size_bytes, used_ns, leaning, owner = found
        if leaning:
            execute("UPDATE records SET leans_on=NULL, bytes=0, owner=NULL WHERE key=?", (own,))
        else:
            execute("DELETE FROM records WHERE key=?", (own,))
        if below is not None:
            execute(
                "UPDATE records SET leaning=leaning-1, used=max(used, ?) WHERE key=?",
                (used_ns, below),
            )
            execute("DELETE FROM records WHERE key=? AND leaning=0 AND bytes=0", (below,))
        self.records -= 1
        self.bytes -= size_bytes
        self._count(owner, -size_bytes)

    def use(self, label: Label) -> tuple[Key, int] | None:
        """Marks a record as used now, or the block that it leans on where it is not here itself.
        Returns what was marked, and when it was used before."""
        for key in (label.key, label.leans_on):
            found = self._db.execute(
                "SELECT used, bytes, owner FROM records WHERE key=? AND bytes>0", (_blob(key),)
            ).fetchone()
            if found is not None:
                if found[2] != label.owner and label.owner:
                    self._give(_blob(key), found[1], found[2], label.owner)
                self.put_back(key)
                return key, found[0]
        return None

    def put_back(self, key: Key) -> None:
        """Makes it the last to go among the records that nothing leans on."""
        self._db.execute("UPDATE records SET used=? WHERE key=?", (self.now(), _blob(key)))

    # ---- owners ----------------------------------------------------------------------------------

    def owned(self, owner: bytes) -> int:
        """Bytes of the records of an owner."""
        found = self._db.execute("SELECT bytes FROM owners WHERE owner=?", (owner,)).fetchone()
        return 0 if found is None else int(found[0])

    def oldest_of(self, owner: bytes, keep: Key | None) -> Key | None:
        """The record of an owner that goes next."""
        found = self._db.execute(
            "SELECT key FROM records INDEXED BY own_leaves "
            "WHERE owner=? AND leaning=0 AND bytes>0 AND key IS NOT ? ORDER BY used LIMIT 1",
            (owner, None if keep is None else _blob(keep)),
        ).fetchone()
        return None if found is None else _key(found[0])

    def find_owners(self, most: int) -> bool:
        """Finds whose some of the records are that a survey found: a record is its block's owner's,
        and at the beginning of a chain the name of what it leans on is the owner's. Returns whether
        all are known now."""
        rows = self._db.execute(
            "SELECT key FROM records INDEXED BY unowned "
            "WHERE owner IS NULL AND bytes>0 ORDER BY key LIMIT ?",
            (most,),
        ).fetchall()
        for (key,) in rows:
            rest()
            chain: dict[bytes, int] = {}
            owner = self._owner_above(key, chain)
            for each, size_bytes in chain.items():
                self._give(each, size_bytes, None, owner)
        return len(rows) < most

    def _owner_above(self, at: bytes | None, chain: dict[bytes, int]) -> bytes:
        """Of a record, and of those before it without an owner, which are put into `chain` with
        their bytes. b"": no owner's, because it does not say what it leans on, or forged parents go
        round in a circle."""
        while at is not None and at not in chain:
            found = self._db.execute(
                "SELECT leans_on, bytes, owner FROM records WHERE key=?", (at,)
            ).fetchone()
            if found is None or not found[1]:
                return at[1:]
            below, size_bytes, owner = found
            if owner is not None:
                return bytes(owner)
            chain[at] = size_bytes
            at = below
        return b""

    def _give(self, own: bytes, size_bytes: int, before: bytes | None, owner: bytes) -> None:
        self._db.execute("UPDATE records SET owner=? WHERE key=?", (owner, own))
        self._count(before, -size_bytes)
        self._count(owner, size_bytes)

    def _count(self, owner: bytes | None, size_bytes: int) -> None:
        if not owner or not size_bytes:
            return
        self._db.execute(
            "INSERT INTO owners VALUES (?, ?) ON CONFLICT (owner) DO UPDATE SET "
            "bytes=bytes+excluded.bytes",
            (owner, size_bytes),
        )
        if size_bytes < 0:
            self._db.execute("DELETE FROM owners WHERE owner=? AND bytes=0", (owner,))

    # ---- what goes first -------------------------------------------------------------------------

    def oldest(self, keep: Key | None) -> Key | str | None:
        """What goes next: records of other versions, which nothing here can read, then the record
        longest unused among those that nothing leans on, except for `keep`."""
        found = self._db.execute("SELECT path FROM others ORDER BY used LIMIT 1").fetchone()
        if found is not None:
            path: str = found[0]
            return path
        found = self._db.execute(
            "SELECT key FROM records INDEXED BY leaves "
            "WHERE leaning=0 AND bytes>0 AND key IS NOT ? ORDER BY used LIMIT 1",
            (None if keep is None else _blob(keep),),
        ).fetchone()
        return None if found is None else _key(found[0])

    def learn(self, label: Label, block_tokens: int = 0) -> None:
        """Notes the block size of a schema: the greatest common divisor of the tokens of its
        blocks, and of `block_tokens`, what is known of it already."""
        if label.kind is Kind.BLOCK or block_tokens:
            known = self._block_tokens(label)
            own = label.tokens if label.kind is Kind.BLOCK else 0
            found = math.gcd(known, own, block_tokens)
            if found != known:
                self._db.execute(
                    "INSERT OR REPLACE INTO schemas VALUES (?, ?)", (label.fingerprint, found)
                )

    def _block_tokens(self, label: Label) -> int:
        found = self._db.execute(
            "SELECT block_tokens FROM schemas WHERE fingerprint=?", (label.fingerprint,)
        ).fetchone()
        return found[0] if found is not None else 0

    def can_be_reached(self, label: Label) -> bool:
        """Whether the block that a record leans on is here, or the record leans on none, like the
        first block of a prompt: its parent is the owner, or, if it names none, it has no more
        tokens than a block."""
        if self.holds(label.leans_on):
            return True
        if label.owner and label.kind is not Kind.SNAPSHOT:
            return label.parent == label.owner
        block_tokens = self._block_tokens(label)
        match label.kind:
            case Kind.BLOCK:
                return label.tokens <= block_tokens
            case Kind.STATE:
                return label.tokens < block_tokens
            case Kind.SNAPSHOT:
                return False

    # ---- for surveys of the directory ------------------------------------------------------------

    def keys_of(self, kind: Kind, byte: int, after: bytes, count: int) -> list[tuple[Key, int]]:
        """Records of one shelf and their last uses, by name, from after a digest on."""
        first = bytes((kind, byte)) if not after else bytes((kind,)) + after
        last = bytes((kind, byte)) + b"\xff" * 32
        rows = self._db.execute(
            "SELECT key, used FROM records WHERE key>? AND key<=? AND bytes>0 ORDER BY key LIMIT ?",
            (first, last, count),
        )
        return [(_key(key), used) for key, used in rows]

    def put_other(self, path: str, size_bytes: int, used_ns: int, seen: int) -> None:
        """A file of another record version, and the survey in which it was seen."""
        self.remove_other(path)
        row = (path, size_bytes, used_ns, seen)
        self._db.execute("INSERT INTO others VALUES (?, ?, ?, ?)", row)
        self.records += 1
        self.bytes += size_bytes

    def remove_other(self, path: str) -> None:
        found = self._db.execute("SELECT bytes FROM others WHERE path=?", (path,)).fetchone()
        if found is not None:
            self._db.execute("DELETE FROM others WHERE path=?", (path,))
            self.records -= 1
            self.bytes -= found[0]

    def remove_unseen_others(self, seen: int) -> None:
        """Forgets those that a survey did not see."""
        totals = "SELECT count(*), coalesce(sum(bytes), 0) FROM others WHERE seen<>?"
        records, size_bytes = self._db.execute(totals, (seen,)).fetchone()
        if records:
            self._db.execute("DELETE FROM others WHERE seen<>?", (seen,))
            self.records -= records
            self.bytes -= size_bytes


class Index:
    """The index of one directory, for the threads of one process. Calls may wait for other threads
    and processes, for BUSY_S at most. They raise OSError or Outage, and have then changed nothing.

    `capacity_bytes`: what this process wants. While several processes have the directory open, the
    largest of their capacities applies to all.
    """

    def __init__(self, shelves: Shelves, capacity_bytes: int) -> None:
        self._shelves, self._wanted_bytes = shelves, capacity_bytes
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._name = ""
        self._retry_at = 0.0  # for an index in memory
        self._own: tuple[object, ...] = ()  # process, directory and file that `_db` belongs to
        self._presence = -1  # a descriptor whose lock says that this process is here
        self.records = self.bytes = 0  # when it was last looked at
        self.capacity_bytes = capacity_bytes
        self.complete = False
        self.openings = 0  # changes when there may be another index

    @contextmanager
    def books(self) -> Iterator[Books]:
        """A transaction: all of it, or nothing if it raises."""
        with self._lock:
            try:
                db, books = self._begun()
                try:
                    yield books
                    books.save()
                    db.execute("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._translated(error) from error
            self._note(books)

    def _begun(self) -> tuple[sqlite3.Connection, Books]:
        for again in (True, False):
            try:
                db = self._opened()
                db.execute("BEGIN IMMEDIATE")
                try:
                    return db, Books(db)
                except BaseException:
                    with suppress(sqlite3.Error):
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                if not again or _code(error) not in _DAMAGED:
                    raise
                self._set_aside(error)
        raise AssertionError

    def close(self) -> None:
        with self._lock:
            self._shut()

    def _note(self, books: Books) -> None:
        self.records, self.bytes = books.records, books.bytes
        self.capacity_bytes, self.complete = books.capacity_bytes, bool(books.complete)

    # ---- the database ----------------------------------------------------------------------------

    def _opened(self) -> sqlite3.Connection:
        fd = self._shelves.fd
        place = os.fstat(fd)
        own: tuple[object, ...] = (os.getpid(), place.st_dev, place.st_ino)
        if self._db is not None and own == self._own[:3]:
            if not self._name and (time.monotonic() < self._retry_at or not self._moved(fd, own)):
                return self._db
            if _identity(fd, self._name) == self._own[3]:
                return self._db
            log.warning("disk tier %s: its index was taken away", self._shelves.root)
        self._shut()
        found: tuple[int, int] | None = None
        for again in (True, True, False):
            try:
                db, found = self._opened_file(fd)
                break
            except (sqlite3.Error, OSError) as error:
                if isinstance(error, OSError) and error.errno in _BUSY:
                    raise  # it may work next time
                if isinstance(error, sqlite3.Error) and _code(error) in _PASSING | _DAMAGED:
                    raise
                if again:  # another process may have removed it at this moment
                    continue
                log.warning(
                    "disk tier %s: no index in there (%s); it is kept in memory, and made by "
                    "reading the directory",
                    self._shelves.root,
                    error,
                )
                self._retry_at = time.monotonic() + RETRY_S
                self._name, db = "", _connection(":memory:")
                db.executescript(_TABLES)
                self._enter(db, fd)
        self._db, self._own = db, (*own, found)
        self.openings += 1
        return db

    def _moved(self, fd: int, own: tuple[object, ...]) -> bool:
        """Whether an index in memory has given way to one in the directory, which learns what there
        is from the files."""
        try:
            db, found = self._opened_file(fd)
            db.execute("UPDATE state SET complete=0")
        except (sqlite3.Error, OSError):
            self._name, self._retry_at = "", time.monotonic() + RETRY_S
            return False
        log.warning("disk tier %s: its index can be kept in there again", self._shelves.root)
        if self._db is not None:
            self._db.close()
        self._db, self._own, self.complete = db, (*own, found), False
        self.openings += 1
        return True

    def _opened_file(self, fd: int) -> tuple[sqlite3.Connection, tuple[int, int] | None]:
        with _locked(fd):
            self._name = _found(fd) or _made(fd, self._shelves.path)
            found = _identity(fd, self._name)
        db = _connected(self._shelves.path / self._name)
        try:
            db.execute("PRAGMA synchronous=NORMAL")  # whole after a power loss, if not the last
            db.execute("PRAGMA cache_size=-16384")
            db.execute(f"PRAGMA wal_autocheckpoint={_log_pages(fd)}")
            self._enter(db, fd)
        except BaseException:
            db.close()
            raise
        return db, found

    def _enter(self, db: sqlite3.Connection, fd: int) -> None:
        """Says that this process is here, until it is closed, and what capacity it wants."""
        if self._presence >= 0:
            os.close(self._presence)
        self._presence = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            fcntl.flock(self._presence, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except OSError:
            alone = False
        with suppress(OSError):
            fcntl.flock(self._presence, fcntl.LOCK_SH | fcntl.LOCK_NB)
        db.execute("BEGIN IMMEDIATE")
        try:
            books = Books(db)
            kept_bytes = 0 if alone else books.capacity_bytes
            books.capacity_bytes = max(kept_bytes, self._wanted_bytes)
            books.save()
            db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _translated(self, error: sqlite3.Error) -> Exception:
        code = _code(error)
        if code in _DAMAGED:
            self._set_aside(error)
            return Outage(f"the index was damaged: {error}")
        if code == sqlite3.SQLITE_FULL:
            return OSError(errno.ENOSPC, f"the index: {error}")
        if code == sqlite3.SQLITE_READONLY:
            return OSError(errno.EROFS, f"the index: {error}")
        if code in _PASSING:
            return Outage("another process keeps the index")
        return OSError(errno.EIO, f"the index: {error}")

    def _set_aside(self, error: sqlite3.Error) -> None:
        log.warning(
            "disk tier %s: its index is damaged (%s) and made anew", self._shelves.root, error
        )
        self._shut()
        self.complete = False
        if self._name:
            for beside in ("", "-wal", "-shm", "-journal"):
                with suppress(OSError):
                    os.unlink(self._name + beside, dir_fd=self._shelves.fd)

    def _shut(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            if self._own[0] == os.getpid():
                with suppress(sqlite3.Error):
                    db.close()
            else:  # closing it here would remove the parent's log
                _left.append(db)
        if self._presence >= 0:
            os.close(self._presence)
            self._presence = -1


def _connected(path: Path) -> sqlite3.Connection:
    return _connection(f"{path.as_uri()}?mode=rw")


def _connection(where: str) -> sqlite3.Connection:
    return sqlite3.connect(
        where, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=True
    )


def forget(shelves: Shelves, keys: Sequence[Key], paths: Sequence[str] = ()) -> None:
    """Removes from the index of a directory, if it has one, what another program removed."""
    with suppress(sqlite3.Error, OSError):
        name = _found(shelves.fd)
        if not name:
            return
        db = _connected(shelves.path / name)
        try:
            for first in range(0, max(len(keys), len(paths)), 256):
                db.execute("BEGIN IMMEDIATE")
                books = Books(db)
                for key in keys[first : first + 256]:
                    books.remove(key)
                for other in paths[first : first + 256]:
                    books.remove_other(other)
                books.save()
                db.execute("COMMIT")
        finally:
            db.close()


@contextmanager
def _locked(fd: int) -> Iterator[None]:
    """One process at a time; on file systems without such locks, all of them. Raises OSError:
    EAGAIN if another process keeps the lock."""
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        lock = os.open(_LOCK, flags, 0o600, dir_fd=fd)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        yield
        return
    try:
        until = time.monotonic() + BUSY_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.001)
            except OSError:
                break
        yield
    finally:
        os.close(lock)


def _found(fd: int) -> str:
    """The index of the directory, if it is private and not a link; "" if there is none."""
    if fd < 0:
        return ""
    for name in sorted(os.listdir(fd)):
        if _NAME.fullmatch(name):
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
                if stat.S_ISREG(found.st_mode) and private:
                    return name
    return ""


def _made(fd: int, path: Path) -> str:
    """A new, empty index. It gets its name when it is complete. What is left of others is
    removed."""
    for name in os.listdir(fd):
        if _OURS.fullmatch(name):
            with suppress(OSError):
                os.unlink(name, dir_fd=fd)
    name = f"index-2-{secrets.token_hex(8)}.sqlite"
    create = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(f".{name}", create, 0o600, dir_fd=fd))
    try:
        db = _connected(path / f".{name}")
        try:
            if db.execute("PRAGMA journal_mode=WAL").fetchone()[0] != "wal":
                raise sqlite3.OperationalError("no write-ahead log here")
            db.executescript(f"BEGIN IMMEDIATE; {_TABLES} COMMIT;")
        finally:
            db.close()
        os.rename(f".{name}", name, src_dir_fd=fd, dst_dir_fd=fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(f".{name}", dir_fd=fd)
        raise
    return name


def _identity(fd: int, name: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(name, dir_fd=fd, follow_symlinks=False)
        return found.st_dev, found.st_ino
    return None


def _log_pages(fd: int) -> int:
    """How far SQLite's log may grow: 4 MB, less on a file system that is small itself."""
    found = os.fstatvfs(fd)
    return min(1000, max(16, found.f_blocks * found.f_frsize // 4096 // 256))


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary error code, without the extended part."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_IOERR)) & 0xFF


def _blob(key: Key) -> bytes:
    return bytes((key.kind,)) + key.digest


def _key(blob: bytes) -> Key:
    if len(blob) != 1 + DIGEST_BYTES or blob[0] not in _KINDS:
        error = sqlite3.DatabaseError("a key that is none")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error
    return Key(Kind(blob[0]), blob[1:])
