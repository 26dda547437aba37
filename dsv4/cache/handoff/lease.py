"""What an owner has offered: whether it may still be read, and when it ends. Torch-free.

An offer stands as long as its pledge lies in the owner's memory. Takers read it there, after the
last of the request's bytes: if it is unchanged, nothing that they read had been released before.
Ending an offer first wipes its pledge, and only then releases its memory.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4.cache.handoff.offer import NAME_BYTES
from dsv4.cache.handoff.rows import Pledges, StateRow

_TAKEN = struct.Struct(f"<8s{NAME_BYTES}s")
_TAKEN_WORD = b"taken\0\0\2"


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """One offer of this manager: what it holds, for how long, for how many takers. Only those who
    have the offer know its name, which is in no memory that is registered for others."""

    name: bytes
    cell: int
    row: StateRow
    block_ids: list[int]
    generations: tuple[int, ...]
    expires: float  # by the owner's clock
    takers: int
    over: bool = False


class Leases:
    """All offers of one manager. `ended` is called with each offer that ends, in any thread.

    The manager's calls and the link's thread both end offers, without a lock, because an
    interrupted call would keep it. The thread that takes a lease out of `standing` ends it.
    """

    def __init__(self, pledges: Pledges, ended: Callable[[Lease], None]) -> None:
        self._pledges, self._ended = pledges, ended
        self.standing: dict[bytes, Lease] = {}
        self.held: dict[bytes, Lease] = {}  # whose memory has not been released
        self.taken = self.expired = self.withdrawn = 0

    def stand(self, lease: Lease, pledge: bytes) -> None:
        """From now on takers may read it."""
        self._pledges.put(lease.cell, pledge)
        self.standing[lease.name] = lease

    def withdraw(self, name: bytes) -> bool:
        if not self._end(name):
            return False
        self.withdrawn += 1
        return True

    def serve(self, notes: Sequence[bytes]) -> bool:
        """Handles what takers reported, and expired leases. Returns whether any offer stands.
        Called by one thread."""
        for note in notes:
            self._note_taken(note)
        now = time.monotonic()
        for lease in tuple(self.standing.values()):
            if now >= lease.expires and self._end(lease.name):
                self.expired += 1
        return bool(self.standing)

    def _note_taken(self, note: bytes) -> None:
        if len(note) != _TAKEN.size:
            return
        word, name = _TAKEN.unpack(note)
        lease = self.standing.get(name)
        if word != _TAKEN_WORD or lease is None:
            return
        self.taken += 1
        lease.takers -= 1
        if lease.takers <= 0:
            self._end(name)

    def _end(self, name: bytes) -> bool:
        """Ends an offer. Returns whether it stood until now."""
        lease = self.standing.pop(name, None)
        if lease is None:
            return False
        self.finish(lease)
        return True

    def finish(self, lease: Lease) -> None:
        """Wipes its pledge, so that no taker uses it any more; then its memory may be released."""
        self._pledges.wipe(lease.cell)
        lease.over = True
        self._ended(lease)

    def forget(self, lease: Lease) -> None:
        """Its memory has been released."""
        if self.held.pop(lease.name, None) is not None:
            self._pledges.give_back(lease.cell)


def new_name() -> bytes:
    """A name for an offer: unguessable, and no other offer has it."""
    return os.urandom(NAME_BYTES)


def taken_note(name: bytes) -> bytes:
    """The note that a taker sends to the owner after its last byte."""
    return _TAKEN.pack(_TAKEN_WORD, name)
