"""The directory of a disk tier: where each record's file is, and how it is reached. Torch-free.

    ROOT/1/b/0f/0f3c…   a block: record version, kind, first byte of the digest, digest
    ROOT/1/b/0f/.4711-9d2e….tmp   being written by process 4711
    ROOT/1/index-…                how much there is and what goes first (index.py)

Directories are 0700 and files 0600. Each directory is opened from the one above it without
following links, and names are made of digests alone: nothing outside ROOT is ever reached.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dsv4.errors import InvalidInput
from dsv4.tiers.record import RECORD_VERSION, Key, Kind
from dsv4.tiers.sizes import UNIT_BYTES

log = logging.getLogger("dsv4.tiers")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# without O_NONBLOCK a FIFO in place of a record would block the thread forever
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)
_VERSION = re.compile(r"[0-9]{1,5}", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9a-f]{16}\.tmp", re.ASCII)
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP}
FREE_SHARE = 100  # one part in this many of a file system is left free
STALE_S = 60.0  # a temporary file that has not been written to for this long has lost its writer


class Calls:
    """The system calls that change a directory. Tests put a recorder in their place."""

    def mkdir(self, name: str, *, dir_fd: int) -> None:
        os.mkdir(name, 0o700, dir_fd=dir_fd)

    def create(self, name: str, *, flags: int, dir_fd: int) -> int:
        create = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(name, create | flags, 0o600, dir_fd=dir_fd)

    def writev(self, fd: int, pieces: Sequence[memoryview]) -> int:
        return os.writev(fd, pieces)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, name: str, new: str, *, dir_fd: int) -> None:
        os.rename(name, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)


@dataclass(frozen=True, slots=True)
class Found:
    """A record's file, by its name; its content has not been read."""

    key: Key
    size_bytes: int
    used_ns: int  # modification time: when it was written, or last used as the end of a prompt


@dataclass(frozen=True, slots=True)
class Other:
    """A file of another record version, by its path below ROOT."""

    path: str
    size_bytes: int
    used_ns: int

    @property
    def version(self) -> str:
        return self.path.split("/", 1)[0]


class Shelves:
    """A directory of records. Raises InvalidInput if there cannot be one.

    `durable`: what is written is on the medium when `write` returns.
    """

    def __init__(
        self,
        root: Path,
        *,
        create: bool = True,
        durable: bool = False,
        calls: Calls | None = None,
    ) -> None:
        self.root, self._durable = root.absolute(), durable
        self.path = self.root / str(RECORD_VERSION)
        self._calls = calls or Calls()
        self._renewing = threading.Lock()
        # directories that are gone: other threads may still be using them
        self._left: list[int] = []
        self._secured: set[tuple[Kind, int]] = set()
        self.unreadable: list[tuple[str, OSError]] = []  # shelves, in the order of the survey
        self.fd = self._opened(create)
        self._device = os.fstat(self.fd).st_dev if self.fd >= 0 else -1

    def _opened(self, create: bool) -> int:
        """The directory of this record version; -1 if there is none and none is made."""
        root, made = self.root, []
        try:
            if create:
                made = [each for each in (root, *root.parents) if not each.exists()]
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            top = os.open(root, _DIRECTORY)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            if isinstance(error, FileExistsError | NotADirectoryError):
                why = "there is a file of that name, or above it"
            raise InvalidInput(f"{root} cannot be a disk tier's directory: {why}") from error
        try:
            if not create:
                names = os.listdir(top)
                if names and not any(_VERSION.fullmatch(name) for name in names):
                    raise InvalidInput(
                        f"{root} is not a disk tier's directory: it has {len(names)} other files "
                        "or directories and no records"
                    )
            _require_private(top, root)
            if create:
                self._make(self.path.name, top)
            try:
                fd = os.open(self.path.name, _DIRECTORY, dir_fd=top)
            except FileNotFoundError:
                return -1
            try:
                _require_private(fd, self.path)
                if self._durable:
                    self._calls.sync(top)
                    for each in made:
                        self._sync_path(each.parent)
            except BaseException:
                os.close(fd)
                raise
            return fd
        except OSError as error:
            raise InvalidInput(f"{self.path} cannot hold records: {error.strerror}") from error
        finally:
            os.close(top)

    def _sync_path(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._calls.sync(fd)
        finally:
            os.close(fd)

    def renew(self) -> bool:
        """Checks that the directory is still there. One that was deleted is created again, one that
        was put in its place is used; both return True. Raises OSError where neither is possible: if
        the file system is gone, no directory is created on the one below."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self.fd)):
                return False
        with self._renewing:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(self.path), os.fstat(self.fd)):
                    return True  # another thread was faster
            there = next(each for each in self.path.parents if each.exists())
            if os.stat(there).st_dev != self._device:
                raise OSError(errno.ESTALE, f"{self.root}: its file system is gone")
            try:
                fd = self._opened(create=True)
            except InvalidInput as error:
                raise OSError(errno.ESTALE, str(error)) from error
            log.warning("disk tier %s: the directory was taken away; a new one is used", self.root)
            self._left.append(self.fd)  # a file descriptor that is reused must not be read from
            self._secured = set()
            self.fd = fd
            return True

    def close(self) -> None:
        for fd in (self.fd, *self._left):
            if fd >= 0:
                os.close(fd)
        self.fd, self._left = -1, []

    def takes_direct(self) -> bool | None:
        """Whether O_DIRECT works here, found by trying; None if it could not be tried."""
        if not hasattr(os, "O_DIRECT"):
            return False
        name = _temporary_name()
        try:
            fd = os.open(
                name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, 0o600, dir_fd=self.fd
            )
        except OSError as error:
            return False if error.errno in _NO_DIRECT else None
        try:
            unit = memoryview(mmap.mmap(-1, UNIT_BYTES))
            return os.writev(fd, [unit]) == UNIT_BYTES == os.preadv(fd, [unit], 0)
        except OSError as error:
            return False if error.errno in _NO_DIRECT else None
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=self.fd)

    def shortage(self, size_bytes: int, most_bytes: int) -> int:
        """How many bytes must be removed before this many can be written, so that a hundredth of
        the file system and of its inodes stays free (at most `most_bytes`). Raises OSError."""
        found = os.fstatvfs(self.fd)
        keep_bytes = min(found.f_blocks * found.f_frsize // FREE_SHARE, most_bytes)
        short = size_bytes + keep_bytes - found.f_bavail * found.f_frsize
        if found.f_files and found.f_favail < min(found.f_files // FREE_SHARE, 1024) + 1:
            short = max(short, 1)
        return max(0, short)

    # ---- one record ------------------------------------------------------------------------------

    def exists(self, key: Key) -> bool:
        """Whether something has the record's name."""
        return self._stat(key) is not None

    def holds(self, key: Key, size_bytes: int) -> bool:
        """Whether a file of this size has the record's name. Raises OSError."""
        found = self._stat(key)
        return found is not None and _is_record(found, size_bytes)

    def is_foreign(self, key: Key) -> bool:
        """Whether something that is not a file has the record's name."""
        with suppress(OSError):
            found = self._stat(key)
            return found is not None and not stat.S_ISREG(found.st_mode)
        return False

    def _stat(self, key: Key) -> os.stat_result | None:
        with suppress(FileNotFoundError), self._shelf(key) as fd:
            return os.stat(key.digest.hex(), dir_fd=fd, follow_symlinks=False)
        return None

    def open(self, key: Key, flags: int = 0) -> int:
        """A record's file for reading. Raises OSError: ENOENT if there is none."""
        with self._shelf(key) as fd:
            return os.open(key.digest.hex(), _FILE | flags, dir_fd=fd)

    def write(self, key: Key, pieces: Sequence[memoryview], *, flags: int) -> None:
        """Writes a record's file, whole or not at all. An existing one of the same size is kept.
        Raises OSError; then nothing is left except what could not be removed."""
        size_bytes = sum(piece.nbytes for piece in pieces)
        with self._shelf(key, create=True) as shelf:
            name, final = _temporary_name(), key.digest.hex()
            fd = self._calls.create(name, flags=flags, dir_fd=shelf)
            try:
                try:
                    self._write_all(fd, pieces)
                    if self._durable:
                        self._calls.sync(fd)
                finally:
                    os.close(fd)
                # another writer may have finished, and said so after a sync of its own file
                if not self._keeps(shelf, final, size_bytes):
                    try:
                        self._calls.rename(name, final, dir_fd=shelf)
                    except IsADirectoryError:
                        self._clear(shelf, final)
                        self._calls.rename(name, final, dir_fd=shelf)
                    name = ""
            finally:
                if name:
                    with suppress(OSError):
                        self._calls.unlink(name, dir_fd=shelf)
            if self._durable:
                if name:
                    self._sync_file(shelf, final)
                self._secure(key, shelf)

    def _keeps(self, shelf: int, name: str, size_bytes: int) -> bool:
        with suppress(FileNotFoundError):
            return _is_record(os.stat(name, dir_fd=shelf, follow_symlinks=False), size_bytes)
        return False

    def sync(self, key: Key) -> None:
        """A record that is there already is on the medium when this returns, whichever process
        wrote it. Raises OSError."""
        with self._shelf(key) as shelf:
            self._sync_file(shelf, key.digest.hex())
            self._secure(key, shelf)

    def _sync_file(self, shelf: int, name: str) -> None:
        fd = os.open(name, _FILE, dir_fd=shelf)
        try:
            self._calls.sync(fd)
        finally:
            os.close(fd)

    def _secure(self, key: Key, shelf: int) -> None:
        """Makes names in a shelf durable, and the shelf's own name, which another process may have
        created."""
        self._calls.sync(shelf)
        place = (key.kind, key.digest[0])
        if place not in self._secured:
            upper = self._down(self.fd, key.kind.letter, create=False)
            try:
                self._calls.sync(upper)
            finally:
                os.close(upper)
            self._calls.sync(self.fd)
            self._secured.add(place)

    def _clear(self, shelf: int, name: str) -> None:
        """Removes a directory from a record's place. One with content is renamed instead, in case
        it is wanted."""
        try:
            os.rmdir(name, dir_fd=shelf)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            aside = f"foreign-{secrets.token_hex(8)}"
            os.rename(name, aside, src_dir_fd=shelf, dst_dir_fd=shelf)
            log.warning("disk tier %s: a directory lay in a record's place: now %s", name, aside)

    def _write_all(self, fd: int, pieces: Sequence[memoryview]) -> None:
        left = list(pieces)
        while left:
            written = self._calls.writev(fd, left[:1024])  # IOV_MAX
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if left and written:
                left[0] = left[0][written:]

    def touch(self, key: Key) -> None:
        """Marks a record as used now. One that is gone is skipped."""
        with suppress(OSError), self._shelf(key) as fd:
            os.utime(key.digest.hex(), dir_fd=fd, follow_symlinks=False)

    def remove(self, key: Key) -> None:
        """Removes a record's file, or what lies in its place; it is fine if it is already gone.
        Raises OSError."""
        with suppress(FileNotFoundError), self._shelf(key) as fd:
            name = key.digest.hex()
            try:
                self._calls.unlink(name, dir_fd=fd)
            except OSError as error:
                if error.errno not in (errno.EISDIR, errno.EPERM):
                    raise
                if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    raise
                self._clear(fd, name)

    # ---- all of them -----------------------------------------------------------------------------

    def shelves(self) -> Iterator[tuple[Kind, int, int]]:
        """Yields each shelf that exists: its kind, its byte and its directory, which is open until
        the next one is requested. One that cannot be opened hides no other."""
        for kind in Kind:
            try:
                upper = self._down(self.fd, kind.letter, create=False)
            except OSError:
                continue
            try:
                for byte in range(256):
                    try:
                        shelf = self._down(upper, f"{byte:02x}", create=False)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        self.unreadable.append((f"{kind.letter}/{byte:02x}", error))
                        continue
                    try:
                        yield kind, byte, shelf
                    finally:
                        os.close(shelf)
            finally:
                os.close(upper)

    def scan(self) -> Iterator[Found]:
        """Every file with a record's name, in no order. Files with other names are not ours."""
        for kind, byte, shelf in self.shelves():
            try:
                with os.scandir(shelf) as entries:
                    for entry in entries:
                        if not _NAME.fullmatch(entry.name):
                            continue
                        with suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            key = Key(kind, bytes.fromhex(entry.name))
                            yield Found(key, found.st_size, found.st_mtime_ns)
            except OSError as error:
                self.unreadable.append((f"{kind.letter}/{byte:02x}", error))

    def sweep(self) -> int:
        """Removes temporary files that have lost their writers; returns their number."""
        removed = 0
        with suppress(OSError):
            removed += self.sweep_in(self.fd)
        for _, _, shelf in self.shelves():
            with suppress(OSError):
                removed += self.sweep_in(shelf)
        return removed

    def sweep_in(self, fd: int) -> int:
        if fd < 0:
            return 0
        with os.scandir(fd) as entries:
            return sum(self.sweep_one(fd, entry) for entry in entries)

    def sweep_one(self, fd: int, entry: os.DirEntry[str]) -> bool:
        """Removes a temporary file whose writer has not written for a while, by any clock: a file
        from the far future was written before the clock was set back."""
        if not _TEMPORARY.fullmatch(entry.name):
            return False
        with suppress(FileNotFoundError):
            if abs(entry.stat(follow_symlinks=False).st_mtime - time.time()) > STALE_S:
                self._calls.unlink(entry.name, dir_fd=fd)
                return True
        return False

    def others(self) -> Iterator[Other]:
        """Every file here with a record's name but of another record version, whatever its shelves
        are called."""
        try:
            top = os.open(self.root, _DIRECTORY)
        except OSError:
            return
        try:
            for name in os.listdir(top):
                if _VERSION.fullmatch(name) and name != self.path.name:
                    yield from self._walk(top, name, name, depth=4)
        finally:
            os.close(top)

    def _walk(self, above: int, name: str, path: str, depth: int) -> Iterator[Other]:
        try:
            fd = os.open(name, _DIRECTORY, dir_fd=above)
        except OSError:
            return
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    inner = f"{path}/{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        if depth:
                            yield from self._walk(fd, entry.name, inner, depth - 1)
                    elif _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            found = entry.stat(follow_symlinks=False)
                            yield Other(inner, found.st_size, found.st_mtime_ns)
        except OSError:
            return
        finally:
            os.close(fd)

    def remove_other(self, path: str) -> None:
        """Removes a file of another record version. No link on the way is followed. Raises
        OSError."""
        *above, name = path.split("/")
        if not _NAME.fullmatch(name) or {"", ".", ".."} & set(above):
            raise ValueError(f"{path} is not a file of a record version")
        fd = os.open(self.root, _DIRECTORY)
        try:
            for each in above:
                lower = os.open(each, _DIRECTORY, dir_fd=fd)
                os.close(fd)
                fd = lower
            self._calls.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass
        finally:
            os.close(fd)

    @contextmanager
    def _shelf(self, key: Key, *, create: bool = False) -> Iterator[int]:
        """The directory that a record's file is in. Raises OSError."""
        kind, byte = key.kind.letter, key.digest[:1].hex()
        upper = self._down(self.fd, kind, create)
        try:
            lower = self._down(upper, byte, create)
        finally:
            os.close(upper)
        try:
            yield lower
        finally:
            os.close(lower)

    def _down(self, fd: int, name: str, create: bool) -> int:
        if fd < 0:
            raise FileNotFoundError(errno.ENOENT, "no record was ever stored here")
        try:
            return os.open(name, _DIRECTORY, dir_fd=fd)
        except FileNotFoundError:
            if not create:
                raise
        self._make(name, fd)
        return os.open(name, _DIRECTORY, dir_fd=fd)

    def _make(self, name: str, fd: int) -> None:
        """Creates a directory. Losing it would lose what is stored in it, so it is made durable
        too."""
        with suppress(FileExistsError):
            self._calls.mkdir(name, dir_fd=fd)
            if self._durable:
                self._calls.sync(fd)


def is_record_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _is_record(found: os.stat_result, size_bytes: int) -> bool:
    return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes


def _require_private(fd: int, path: Path) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidInput(
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: "
            "records are private, it must be yours and 700"
        )


def read_at(fd: int, pieces: Sequence[memoryview]) -> int:
    """Fills pieces from the start of a file. Returns the number of bytes read."""
    left, at = list(pieces), 0
    while left:
        count = os.preadv(fd, left[:1024], at)
        if not count:
            break
        at += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if left and count:
            left[0] = left[0][count:]
    return at


def _temporary_name() -> str:
    return f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
