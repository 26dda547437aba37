"""Surveys the directory of a disk tier, a little at a time: the index learns what other processes
wrote and removed, and temporary files that have lost their writers are removed. Torch-free."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import TypeVar

from dsv4.tiers.index import Index
from dsv4.tiers.record import Key, Kind, Label, Refusal, read_header
from dsv4.tiers.rest import rest
from dsv4.tiers.shelves import STALE_S, Shelves, is_record_name
from dsv4.tiers.sizes import HEADER_BYTES

STALE_NS = int(STALE_S * 1e9)
T = TypeVar("T")
PIECE = 64  # names that are looked at in one step


class Survey:
    """Surveys of a directory, one after the other, for the threads of one tier."""

    def __init__(self, shelves: Shelves, index: Index) -> None:
        self._shelves, self._index = shelves, index
        self._lock = threading.Lock()
        self._round: Iterator[None] | None = None

    def step(self, timeout_s: float) -> None:
        """Makes one step, unless other threads are at it all the time. Raises what the index
        raises; then the survey is over."""
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            going, self._round = self._round or _round(self._shelves, self._index), None
            with suppress(StopIteration):
                next(going)
                self._round = going
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Ends the survey; the next step begins a new one."""
        self._round = None


def _round(shelves: Shelves, index: Index) -> Iterator[None]:
    """One survey, step by step: each looks at PIECE names at most. At its end the index is
    complete; it ends early if the index was replaced. Raises what the index raises."""
    with index.books():
        began = index.openings
    # younger files may still be in the process of being stored
    before_ns = time.time_ns() - STALE_NS
    shelves.unreadable.clear()
    with suppress(OSError):
        shelves.sweep_in(shelves.fd)
    for kind, byte, shelf in shelves.shelves():
        if index.openings != began:
            return
        names: set[bytes] = set()
        try:
            yield from _files(shelves, index, kind, shelf, names, before_ns)
        except OSError as error:
            shelves.unreadable.append((f"{kind.letter}/{byte:02x}", error))
            continue
        yield from _gone(shelves, index, kind, byte, names, before_ns)
    yield from _others(shelves, index)
    while index.openings == began:
        with index.books() as books:
            if books.find_owners(PIECE):
                break
        yield
    with index.books() as books:
        if index.openings == began:
            books.complete = 1


def _files(
    shelves: Shelves, index: Index, kind: Kind, shelf: int, names: set[bytes], before_ns: int
) -> Iterator[None]:
    """The files of a shelf: those that the index does not know are entered into it."""
    piece: list[Key] = []
    with os.scandir(shelf) as entries:
        for entry in entries:
            if not is_record_name(entry.name):
                shelves.sweep_one(shelf, entry)
                continue
            rest()
            key = Key(kind, bytes.fromhex(entry.name))
            names.add(key.digest)
            piece.append(key)
            if len(piece) == PIECE:
                _note_stored(index, shelf, piece, before_ns)
                piece = []
                yield
    _note_stored(index, shelf, piece, before_ns)
    yield


def _note_stored(index: Index, shelf: int, piece: list[Key], before_ns: int) -> None:
    with index.books() as books:
        unknown = [key for key in _resting(piece) if not books.holds(key)]
    if not unknown:
        return
    looked = _resting(unknown)
    found = [(key, *each) for key in looked if (each := _look(shelf, key)) is not None]
    now_ns = time.time_ns()
    with index.books() as books:
        for key, label, size_bytes, used_ns in _resting(found):
            if books.complete and before_ns < used_ns < now_ns + STALE_NS:
                continue  # its writer counts it, or is about to remove it
            if label is not None:
                books.learn(label)
            if not books.holds(key):
                leans_on = None if label is None else label.leans_on
                books.put(key, leans_on, size_bytes, min(used_ns, time.time_ns()))


def _resting(each: Iterable[T]) -> Iterator[T]:
    """The same, with rests for other threads."""
    for one in each:
        rest()
        yield one


def _look(shelf: int, key: Key) -> tuple[Label | None, int, int] | None:
    """What a file says of itself, if it can be read and is the record of its name; its size and its
    last use. None if it is gone."""
    name = key.digest.hex()
    try:
        found = os.stat(name, dir_fd=shelf, follow_symlinks=False)
    except FileNotFoundError:
        return None
    label = None
    with suppress(OSError):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        fd = os.open(name, flags, dir_fd=shelf)
        try:
            header = read_header(os.pread(fd, HEADER_BYTES, 0))
        finally:
            os.close(fd)
        if not isinstance(header, Refusal) and header[0].key == key:
            label = header[0]
    return label, max(found.st_size, 1), found.st_mtime_ns


def _gone(
    shelves: Shelves, index: Index, kind: Kind, byte: int, names: set[bytes], before_ns: int
) -> Iterator[None]:
    """Records of a shelf that the index knows but that are not there any more."""
    after = b""
    while True:
        with index.books() as books:
            rows = books.keys_of(kind, byte, after, PIECE)
        gone = [key for key, used_ns in rows if key.digest not in names and used_ns < before_ns]
        gone = [key for key in _resting(gone) if not shelves.exists(key)]
        if gone:
            with index.books() as books:
                for key in _resting(gone):
                    books.remove(key)
        if len(rows) < PIECE:
            return
        after = rows[-1][0].digest
        yield


def _others(shelves: Shelves, index: Index) -> Iterator[None]:
    """Records of other versions, which this one cannot read: they still take room."""
    seen = time.time_ns()
    for nth, other in enumerate(shelves.others(), 1):
        with index.books() as books:
            books.put_other(other.path, max(other.size_bytes, 1), other.used_ns, seen)
        if not nth % PIECE:
            yield
    with index.books() as books:
        books.remove_unseen_others(seen)
