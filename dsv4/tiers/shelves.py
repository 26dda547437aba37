"""The directory of a disk tier: where each record's file is, and how it is reached. Torch-free.

    ROOT/1/b/0f/0f3c…   a block: record version, kind, first byte of the digest, digest
    ROOT/1/b/0f/.4711-9d2e….tmp   being written by process 4711

Directories are 0700 and files 0600. Each directory is opened from the one above it without
following links, and names are made of digests alone: nothing outside ROOT is ever reached.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dsv4.errors import InvalidInput
from dsv4.tiers.record import RECORD_VERSION, Key, Kind
from dsv4.tiers.sizes import UNIT_BYTES

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEMPORARY = re.compile(r"\.[0-9]+-[0-9a-f]{16}\.tmp", re.ASCII)
STALE_S = 60.0  # a temporary file that nobody has written to for so long has lost its writer


class Calls:
    """The calls to the system that change a directory. Tests put a recorder in their place."""

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
    """A record's file, by its name: what is in it nobody has looked at."""

    key: Key
    size_bytes: int
    used_ns: int  # modification time: when it was written or last loaded


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
        self.root, self._durable = root, durable
        self._calls = calls or Calls()
        try:
            if create:
                root.mkdir(mode=0o700, parents=True, exist_ok=True)
            top = os.open(root, _DIRECTORY)
        except OSError as error:
            raise InvalidInput(
                f"{root} cannot be a disk tier's directory: {error.strerror}"
            ) from error
        try:
            self._fd = self._versioned(top, create)
        finally:
            os.close(top)

    def _versioned(self, top: int, create: bool) -> int:
        """The directory of this record version; -1 where there is none and none is made."""
        name = str(RECORD_VERSION)
        try:
            if create:
                self._make(name, top)
            fd = os.open(name, _DIRECTORY, dir_fd=top)
        except FileNotFoundError:
            return -1
        except OSError as error:
            raise InvalidInput(
                f"{self.root / name} cannot hold records: {error.strerror}"
            ) from error
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            os.close(fd)
            raise InvalidInput(
                f"{self.root / name} belongs to user {found.st_uid} with mode "
                f"{stat.S_IMODE(found.st_mode):o}: records are private, it must be yours and 700"
            )
        return fd

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def takes_direct(self) -> bool:
        """Whether O_DIRECT works here, by trying it."""
        if not hasattr(os, "O_DIRECT"):
            return False
        name = _temporary_name()
        try:
            fd = os.open(
                name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_DIRECT, 0o600, dir_fd=self._fd
            )
        except OSError:
            return False
        try:
            unit = memoryview(mmap.mmap(-1, UNIT_BYTES))
            return os.writev(fd, [unit]) == UNIT_BYTES == os.preadv(fd, [unit], 0)
        except OSError:
            return False
        finally:
            os.close(fd)
            os.unlink(name, dir_fd=self._fd)

    # ---- one record ------------------------------------------------------------------------------

    def exists(self, key: Key) -> bool:
        """Whether a file has the record's name."""
        with suppress(FileNotFoundError), self._shelf(key) as fd:
            os.stat(key.digest.hex(), dir_fd=fd, follow_symlinks=False)
            return True
        return False

    def is_foreign(self, key: Key) -> bool:
        """Whether something that is no file has the record's name."""
        with suppress(OSError), self._shelf(key) as fd:
            found = os.stat(key.digest.hex(), dir_fd=fd, follow_symlinks=False)
            return not stat.S_ISREG(found.st_mode)
        return False

    def open(self, key: Key, flags: int = 0) -> int:
        """A record's file for reading. Raises OSError: ENOENT if there is none."""
        with self._shelf(key) as fd:
            # without O_NONBLOCK a FIFO in place of a record would hold the thread for ever
            read = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
            return os.open(key.digest.hex(), read | flags, dir_fd=fd)

    def write(self, key: Key, pieces: Sequence[memoryview], *, flags: int) -> None:
        """A record's file, whole or not at all. Raises OSError; then nothing is left but what could
        not be removed."""
        with self._shelf(key, create=True) as shelf:
            name = _temporary_name()
            fd = self._calls.create(name, flags=flags, dir_fd=shelf)
            try:
                try:
                    self._write_all(fd, pieces)
                    if self._durable:
                        self._calls.sync(fd)
                finally:
                    os.close(fd)
                self._calls.rename(name, key.digest.hex(), dir_fd=shelf)
            except BaseException:
                with suppress(OSError):
                    self._calls.unlink(name, dir_fd=shelf)
                raise
            if self._durable:
                self._calls.sync(shelf)

    def _write_all(self, fd: int, pieces: Sequence[memoryview]) -> None:
        left = list(pieces)
        while left:
            written = self._calls.writev(fd, left[:1024])  # IOV_MAX
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if left and written:
                left[0] = left[0][written:]

    def touch(self, keys: Sequence[Key]) -> None:
        """Marks records as used now, the last one as the newest. What is gone is passed over."""
        now = time.time_ns()
        for nth, key in enumerate(keys):
            with suppress(OSError), self._shelf(key) as fd:
                when = now + nth
                name = key.digest.hex()
                os.utime(name, ns=(when, when), dir_fd=fd, follow_symlinks=False)

    def remove(self, key: Key) -> None:
        """Takes a record's file away; one that is gone already is fine. Raises OSError."""
        with suppress(FileNotFoundError), self._shelf(key) as fd:
            self._calls.unlink(key.digest.hex(), dir_fd=fd)

    # ---- all of them -----------------------------------------------------------------------------

    def scan(self) -> Iterator[Found]:
        """Every file with a record's name, in no order. Files with other names are not ours."""
        for kind, shelf in self._all():
            with os.scandir(shelf) as entries:
                for entry in entries:
                    if not _NAME.fullmatch(entry.name):
                        continue
                    with suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        key = Key(kind, bytes.fromhex(entry.name))
                        yield Found(key, found.st_size, found.st_mtime_ns)

    def sweep(self, stale_s: float = STALE_S) -> int:
        """Removes temporary files that have lost their writers, and counts them."""
        removed, before = 0, time.time() - stale_s
        for _, shelf in self._all(with_top=True):
            with os.scandir(shelf) as entries:
                for entry in entries:
                    if not _TEMPORARY.fullmatch(entry.name):
                        continue
                    with suppress(FileNotFoundError):
                        if entry.stat(follow_symlinks=False).st_mtime < before:
                            self._calls.unlink(entry.name, dir_fd=shelf)
                            removed += 1
        return removed

    def _all(self, *, with_top: bool = False) -> Iterator[tuple[Kind, int]]:
        """Each shelf's directory, open until the next one is asked for."""
        if self._fd < 0:
            return
        if with_top:
            yield Kind.BLOCK, self._fd
        for kind in Kind:
            for byte in range(256):
                key = Key(kind, bytes((byte,)))
                # a link in place of a shelf is not followed, and hides no other shelf
                with suppress(FileNotFoundError, NotADirectoryError), self._shelf(key) as fd:
                    yield kind, fd

    @contextmanager
    def _shelf(self, key: Key, *, create: bool = False) -> Iterator[int]:
        """The directory that a record's file is in. Raises OSError."""
        kind, byte = key.kind.letter, key.digest[:1].hex()
        upper = self._down(self._fd, kind, create)
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
        """A directory. What is stored in it would be lost with it: it is durable too."""
        with suppress(FileExistsError):
            self._calls.mkdir(name, dir_fd=fd)
            if self._durable:
                self._calls.sync(fd)


def read_at(fd: int, pieces: Sequence[memoryview]) -> int:
    """Fills pieces from the start of a file. Answers with the bytes that there were."""
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
