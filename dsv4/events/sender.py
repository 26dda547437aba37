"""The thread that sends events: it alone uses the sockets. Torch-free. Needs `dsv4[events]`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dsv4.errors import InvalidInput
from dsv4.events.ledger import Ledger, Note, batches
from dsv4.events.wire import END, MOST_TOKENS, Event, number, pack
from dsv4.extras import needed_by

with needed_by("a publisher of events"):
    import zmq

LOGGER = logging.getLogger("dsv4.events")
MOST_REQUEST_BYTES = 1_024  # of a frame from a consumer: a longer one ends the connection
SNAPSHOT_BLOCKS = 4_096  # per batch of a replay of everything
MOST_LINGER_MS = 1_000  # how long what was published last may wait for a consumer, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStats:
    """What a publisher has done since it was made. `blocks` are those that consumers know or will
    know, `waiting` notes that are not sent yet; `notes_dropped` came while too many waited, and
    everything was cleared `resets` times for that. `replays` were asked for, `snapshots` of them
    answered with everything that is cached; `replays_refused` were not requests, `replays_cut` had
    a reader that was too slow."""

    blocks: int
    batches: int
    waiting: int
    notes_dropped: int
    resets: int
    replays: int
    snapshots: int
    replays_refused: int
    replays_cut: int


class Sender:
    """Sends what `put` is given. `put` never waits: with `most_waiting` notes in the queue, further
    ones are dropped, and consumers are asked to forget everything. A consumer that reads too slowly
    misses messages, sees it by their numbers and asks for a replay.

    Numbers begin at the time of the start, so they are larger than those of any process before, and
    a consumer that has read from that one asks for what it missed.
    """

    def __init__(
        self,
        endpoint: str,
        replay: str | None,
        *,
        topic: bytes,
        rank: int | None,
        block_tokens: int,
        buffer_batches: int,
        buffer_bytes: int,
        most_waiting: int,
    ) -> None:
        self._topic, self._rank = topic, rank
        self._most_waiting = most_waiting
        self._buffer_batches, self._buffer_bytes = buffer_batches, buffer_bytes
        self._lock = threading.Lock()
        self._notes: deque[Note] = deque()
        self._lost = self._stopping = self._woken = False
        self.has_lost = False  # some notes, ever: consumers may not know all blocks
        self._dropped = self._resets = self._sending = 0
        self._replays = self._snapshots = self._refused = self._cut = 0
        self._ledger = Ledger(block_tokens)
        self.epoch = self._next = time.time_ns() // 1_000_000 << 20
        self._sent: deque[tuple[int, bytes]] = deque()
        self._sent_bytes = 0
        self._context = zmq.Context()
        try:
            self._publisher = self._context.socket(zmq.XPUB)
            self._publisher.set(zmq.XPUB_VERBOSE, 1)  # reports each subscription
            self.endpoint = self._bind(self._publisher, endpoint)
            self._router: zmq.Socket[bytes] | None = None
            self.replay_endpoint: str | None = None
            if replay is not None:
                self._router = self._context.socket(zmq.ROUTER)
                self._router.set(zmq.ROUTER_MANDATORY, 1)
                self.replay_endpoint = self._bind(self._router, replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)
        self._thread = threading.Thread(target=self._run, name="dsv4-events", daemon=True)

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        """Binds a socket. Returns the address, with its port. Raises InvalidInput."""
        # a whole replay fits, and a live consumer may lag by as much as is kept
        socket.set(zmq.SNDHWM, self._buffer_batches + 16)
        socket.set(zmq.MAXMSGSIZE, MOST_REQUEST_BYTES)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise InvalidInput(
                f"{endpoint!r} cannot be bound ({error}): give an address of this machine with a "
                f"free port, as in tcp://127.0.0.1:5557"
            ) from error
        return socket.get_string(zmq.LAST_ENDPOINT)

    def start(self) -> None:
        self._thread.start()

    def put(self, notes: Sequence[Note]) -> None:
        """Queues notes, or drops them. Does not wait."""
        with self._lock:
            if self._stopping:
                return
            if self._lost or len(self._notes) + len(notes) > self._most_waiting:
                self._lost = self.has_lost = True
                self._dropped += len(notes)
            else:
                self._notes.extend(notes)
            self._wake()

    def stop(self) -> None:
        """Sends that everything is cleared, and ends the thread. Does not wait."""
        with self._lock:
            self._stopping = True
            self._wake()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with suppress(OSError):  # full: it wakes up in any case; closed: it has ended
                os.write(self._wake_writer, b"\0")

    def stats(self) -> EventStats:
        with self._lock:
            return EventStats(
                blocks=len(self._ledger),
                batches=self._next - self.epoch,
                waiting=len(self._notes) + self._sending,
                notes_dropped=self._dropped,
                resets=self._resets,
                replays=self._replays,
                snapshots=self._snapshots,
                replays_refused=self._refused,
                replays_cut=self._cut,
            )

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_reader, zmq.POLLIN)
        poller.register(self._publisher, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        self._send(self._ledger.clear())
        is_over = False
        while not is_over:
            try:
                poller.poll()
                is_over = self._send_notes()
                self._greet()
                self._answer()
            except Exception:  # the thread must survive
                LOGGER.exception("events: a bug")
                self._note_unsent()
        self._context.destroy(linger=MOST_LINGER_MS)
        with self._lock:
            os.close(self._wake_reader)
            os.close(self._wake_writer)

    def _note_unsent(self) -> None:
        """Notes that were taken and not sent are lost: consumers are asked to forget next."""
        with self._lock:
            if self._sending:
                self._dropped += self._sending
                self._sending, self._lost, self.has_lost = 0, True, True
                self._wake()

    def _send_notes(self) -> bool:
        """Sends what was put. Returns whether nothing comes after it."""
        with self._lock:
            if self._woken:
                self._woken = False
                with suppress(BlockingIOError):
                    os.read(self._wake_reader, 4096)
            notes = list(self._notes)
            self._notes.clear()
            is_over, is_lost = self._stopping, self._lost
            self._lost, self._sending = False, len(notes) + is_lost
            self._resets += is_lost
        events = self._ledger.clear() if is_lost else self._ledger.read(notes)
        if is_over:
            events = self._ledger.clear()
        for batch in batches(events, MOST_TOKENS):
            self._send(batch)
        self._sending = 0
        return is_over

    def _send(self, events: Sequence[Event]) -> None:
        seq, payload = self._next, pack(events, self._rank)
        self._next += 1
        self._sent.append((seq, payload))
        self._sent_bytes += len(payload)
        while len(self._sent) > self._buffer_batches or (
            self._sent_bytes > self._buffer_bytes and len(self._sent) > 1
        ):
            self._sent_bytes -= len(self._sent.popleft()[1])
        with suppress(zmq.Again):  # its buffers for slow consumers are full: those miss it
            self._publisher.send_multipart([self._topic, number(seq), payload], zmq.NOBLOCK)

    def _greet(self) -> None:
        """A consumer that has just subscribed gets a batch without events: by its number it sees
        what it missed."""
        has_new = False
        for frames in _received(self._publisher):
            has_new |= len(frames) == 1 and frames[0][:1] == b"\x01"
        if has_new:
            self._send([])

    # ---- replays ---------------------------------------------------------------------------------

    def _answer(self) -> None:
        if self._router is None:
            return
        for asked in _received(self._router):
            start = asked[-1]
            if len(asked) != 3 or asked[1] or len(start) != 8:
                self._refused += 1
                continue
            self._replays += 1
            try:
                for seq, payload in self._missed(int.from_bytes(start, "big")):
                    self._reply(asked[0], (self._topic, number(seq), payload))
                self._reply(asked[0], END)
            except zmq.ZMQError:  # it is gone, or reads too slowly: it can ask again
                self._cut += 1

    def _reply(self, consumer: bytes, frames: Sequence[bytes]) -> None:
        assert self._router is not None
        self._router.send_multipart([consumer, b"", *frames], zmq.NOBLOCK)

    def _missed(self, start: int) -> Iterator[tuple[int, bytes]]:
        """All batches from this number on; or, if some of them are not kept any more, everything
        that is cached, under the last numbers."""
        if start >= self._sent[0][0] or self._sent[0][0] == self.epoch:
            return (each for each in self._sent if each[0] >= start)
        self._snapshots += 1
        whole = list(self._ledger.everything(SNAPSHOT_BLOCKS))
        return (
            (self._next - len(whole) + nth, pack(events, self._rank))
            for nth, events in enumerate(whole)
        )


def _received(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """The messages that are there."""
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
