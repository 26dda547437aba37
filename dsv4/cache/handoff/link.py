"""Reads another process's memory into this one's, by NIXL. One thread, torch-free.

NIXL has no timeout and no cancel, raises what it could return, and a released handle continues to
write. So the caller gives a read up, not the link, and the memory belongs to the read until it is
`settled`: the handle has ended, or NIXL reported an error a while ago.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal

import numpy as np

from dsv4.cache.handoff.agent import make_agent, meet
from dsv4.cache.handoff.probe import Probe
from dsv4.errors import OfferError

LOGGER = logging.getLogger("dsv4.handoff")
_READING_S = 0.0003  # between two looks at a read
_SERVING_S = 0.003  # between two looks for notes of takers, while offers stand
_IDLE_S = 0.1  # the same without offers: NIXL keeps unread notes in memory
_PROBES = 4  # processes at once
_PROVEN = 4096  # whose metadata is known to be good, of the last peers
_SETTLE_S = 1.0  # after an error: transfers that were running then have ended
Where = Literal["DRAM", "VRAM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory that others may read from, or that is read into. It stays as long as NIXL knows of it:
    `keeper` is the object that frees it."""

    address: int
    size_bytes: int
    keeper: object
    where: Where = "DRAM"
    gpu: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Pieces of equal lengths, theirs and ours: `rows` are [own address, their address, bytes]."""

    rows: Sequence[tuple[int, int, int]]
    own: tuple[Where, int] = ("DRAM", 0)
    their: tuple[Where, int] = ("DRAM", 0)


@dataclass(slots=True, eq=False, kw_only=True)
class Read:
    """A read in progress. Spans are read together; when all have arrived `last` is read, followed
    by a note to the owner; then `check` returns what is wrong with what arrived, or None.

    `over` means that nothing more will happen, `settled` that nothing uses the memory any more;
    `error` is None if all went well. `ready` may delay the start, for a device.
    """

    peer: str
    metadata: bytes
    spans: Sequence[Spans]
    last: Spans
    note: bytes
    check: Callable[[], str | None]
    ready: Callable[[], bool]
    settling: Callable[[], None]  # called by the link's thread, once, when it has settled
    over: bool = False
    settled: bool = False
    error: str | None = None
    refused: bool = False  # what arrived is not what was offered
    given_up: bool = False  # abandoned: no new read is begun for it
    handles: list[Any] = field(default_factory=list)
    stage: int = 0  # waits, reads, reads the last, has ended
    probe: Probe | None = None
    settles_at: float = 0.0


_LOST: list[Read] = []
_KEPT: list[Link] = []  # closed while NIXL may write to their memory


class Link:
    """One process's connection: memory that takers may read, and reads of others' memory. Every
    call except `close` returns at once.

    The link's thread calls `serve` now and then with the notes that takers sent since; it returns
    whether it wants to be called again soon.
    """

    def __init__(
        self, name: str, memory: Sequence[Memory], serve: Callable[[list[bytes]], bool]
    ) -> None:
        self.name = name
        self._nixl = make_agent(name)
        self._memory = tuple(each for each in memory if each.size_bytes)
        for each in self._memory:
            self._nixl.register_memory(
                [(each.address, each.size_bytes, each.gpu, "")], each.where, backends=["UCX"]
            )
        self.metadata: bytes = self._nixl.get_agent_metadata()
        self._serve = serve
        # no lock: an interrupted call would keep it
        self._asked: SimpleQueue[Read | None] = SimpleQueue()  # None wakes
        self._reads: list[Read] = []
        self._peers: dict[str, bytes] = {}  # peers that NIXL knows, and their metadata
        self._proven = OrderedDict[bytes, bool]()  # metadata with which a probe has read
        self._serving = self._closed = False
        self._thread: threading.Thread | None = None
        self._start()

    def read(self, read: Read) -> None:
        """Starts a read as soon as it is ready. One that it has already is ignored. Raises
        OfferError if the link is closed."""
        self._require_open()
        self._asked.put(read)
        self._start()

    def begin_serving(self) -> None:
        """Begins to look for notes of takers. Raises OfferError if the link is closed."""
        self._require_open()
        self._serving = True
        self._asked.put(None)
        self._start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends this thread and NIXL's. Reads that have not settled never do: their memory stays
        taken, and with it the link."""
        self._closed = True
        self._asked.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        if self._reads or (thread is not None and thread.is_alive()):
            _KEPT.append(self)
        else:
            self._nixl, self._memory = None, ()

    def _require_open(self) -> None:
        if self._closed:
            raise OfferError("failed", f"the link of {self.name} is closed: build another manager")

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dsv4-link", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._take_asked(self._pause())
            if self._closed:
                for read in self._reads:
                    self._end_probe(read)
                return
            for read in tuple(self._reads):
                try:
                    self._advance(read)
                except Exception:  # its memory stays taken
                    LOGGER.exception("%s: a read from %s: a bug", self.name, read.peer)
                    self._reads.remove(read)
                    _LOST.append(read)
            self._serve_takers()

    def _take_asked(self, pause: float | None) -> None:
        """All reads that were requested, waiting for the first for a limited time."""
        try:
            read = self._asked.get(timeout=pause)
            while True:
                if read is not None and not read.settled and read not in self._reads:
                    self._reads.append(read)
                read = self._asked.get_nowait()
        except Empty:
            pass

    def _pause(self) -> float:
        if any(not read.given_up and read.probe is None for read in self._reads):
            return _READING_S
        return _SERVING_S if self._reads or self._serving else _IDLE_S

    def _serve_takers(self) -> None:
        try:
            by_peer = self._nixl.get_new_notifs()
            notes = [note for notes in by_peer.values() for note in notes]
            again = self._serve(notes)
        except Exception:
            LOGGER.exception("%s: takers are not heard", self.name)
            again = True
        if not again:
            self._serving = False
            if self._serve([]):  # a request came in between
                self._serving = True

    # ---- reads -----------------------------------------------------------------------------------

    def _advance(self, read: Read) -> None:
        if read.stage == 3:
            self._settle(read)
            return
        try:
            if read.stage == 0:
                if read.given_up:
                    self._end(read, "given up")
                    return
                if not self._meet(read) or not read.ready():
                    return
                for spans in read.spans:
                    self._transfer(read, spans, b"")
                read.stage = 1
            states = {self._nixl.check_xfer_state(handle) for handle in read.handles}
            if "ERR" in states:
                self._end(read, "NIXL reports an error", failed=True)
            elif states <= {"DONE"}:
                self._next(read)
        except Exception as error:  # NIXL's own errors, for example of a peer that is gone
            self._end(read, f"{type(error).__name__}: {error}", failed=True)

    def _next(self, read: Read) -> None:
        """Continues when everything that was begun has arrived."""
        while read.handles:
            self._release(read.handles.pop())
        if read.stage == 1 and not read.given_up:
            self._transfer(read, read.last, read.note)
            read.stage = 2
            return
        if read.given_up:
            self._end(read, "given up")
            return
        wrong = read.check()
        read.refused = wrong is not None
        self._end(read, wrong)

    def _end(self, read: Read, error: str | None, *, failed: bool = False) -> None:
        if failed:
            LOGGER.info("%s: a read from %s failed: %s", self.name, read.peer, error)
        self._end_probe(read)
        read.error, read.stage = error, 3
        read.settles_at = time.monotonic() + (_SETTLE_S if read.handles else 0.0)
        self._settle(read)
        read.over = True

    def _settle(self, read: Read) -> None:
        """Handles that have not ended may continue to write, whatever happened to the others."""
        for handle in tuple(read.handles):
            if not self._is_under_way(handle):
                read.handles.remove(handle)
                self._release(handle)
        if not read.handles and time.monotonic() >= read.settles_at:
            self._reads.remove(read)
            failed = read.error is not None and not read.given_up and not read.refused
            if failed and self._peers.get(read.peer) == _digest(read.metadata):
                self._part(read.peer)
            read.settled = True
            read.settling()

    def _is_under_way(self, handle: Any) -> bool:
        try:
            return bool(self._nixl.check_xfer_state(handle) == "PROC")
        except Exception:
            return False

    def _transfer(self, read: Read, spans: Spans, note: bytes) -> None:
        if not spans.rows:
            return
        rows = np.array(spans.rows, dtype=np.uint64)
        descriptors = []
        for column, (where, gpu) in ((0, spans.own), (1, spans.their)):
            listed = np.empty((len(rows), 3), dtype=np.uint64)
            listed[:, 0], listed[:, 1], listed[:, 2] = rows[:, column], rows[:, 2], gpu
            descriptors.append(self._nixl.get_xfer_descs(listed, where))
        handle = self._nixl.initialize_xfer("READ", *descriptors, read.peer, note)
        read.handles.append(handle)  # from here on it may write
        self._nixl.transfer(handle)

    def _release(self, handle: Any) -> None:
        """Releases the handle of a transfer that has ended."""
        try:
            self._nixl.release_xfer_handle(handle)
        except Exception as error:
            LOGGER.info("%s: NIXL keeps a handle: %s", self.name, error)

    def _meet(self, read: Read) -> bool:
        """Whether NIXL knows the peer. It is registered after a probe has read from it."""
        metadata = _digest(read.metadata)
        if self._peers.get(read.peer) == metadata:
            return True
        if not self._is_proven(read, metadata):
            return False
        if read.peer in self._peers:  # by other metadata: one of two offers is not the peer's
            self._part(read.peer)
            if read.peer in self._peers:  # until no read uses that
                return False
        self._peers[read.peer] = metadata
        meet(self._nixl, read.peer, read.metadata)
        return True

    def _is_proven(self, read: Read, metadata: bytes) -> bool:
        if metadata in self._proven:
            self._end_probe(read)
            return True
        if read.probe is None:
            if sum(each.probe is not None for each in self._reads) < _PROBES:
                ((_, pledge_at, _),) = read.last.rows
                read.probe = Probe(read.peer, read.metadata, pledge_at)
            return False
        if not read.probe.over:
            return False
        wrong = self._end_probe(read)
        if wrong is not None:
            raise ValueError(wrong)
        self._proven[metadata] = True
        if len(self._proven) > _PROVEN:
            self._proven.popitem(last=False)
        return True

    def _end_probe(self, read: Read) -> str | None:
        probe, read.probe = read.probe, None
        return None if probe is None else probe.close()

    def _part(self, peer: str) -> None:
        """Forgets a peer that failed, so that it is registered again next time, unless other reads
        use it."""
        if any(read.peer == peer and read.stage for read in self._reads):
            return
        if self._peers.pop(peer, None) is not None:
            try:
                self._nixl.remove_remote_agent(peer)
            except Exception as error:
                LOGGER.info("%s: NIXL keeps %s: %s", self.name, peer, error)


def _digest(metadata: bytes) -> bytes:
    return hashlib.blake2b(metadata, digest_size=32).digest()
