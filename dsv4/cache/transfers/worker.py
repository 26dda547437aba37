"""Work that needs no device: checksums, headers, and storing in tiers. One thread per manager,
torch-free."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

from dsv4.cache.transfers.aside import progress_of
from dsv4.tiers.fork import refuse_after_fork
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Key, Record, Refusal, check, seal
from dsv4.tiers.tier import DONE, Ticket, Tier

if TYPE_CHECKING:
    from dsv4.cache.transfers.copies import Mark

LOGGER = logging.getLogger("dsv4.tiers")
_POLL_S = 0.0005


@dataclass(slots=True, eq=False)
class Outgoing:
    """A row of host memory that holds, or will hold, the payload of a record on its way down.
    `fill`, if there is one, makes the payload; `kept`: the host tier has the record; `stored` is
    None until every tier has answered."""

    row: HostRow
    fill: Callable[[], None] | None = None
    kept: bool = False
    stored: bool | None = None


@dataclass(slots=True, eq=False)
class CopyBatch:
    """Records whose payloads are being copied to the host."""

    mark: Mark
    records: Sequence[Outgoing]


@dataclass(slots=True, eq=False)
class Checked:
    """Rows of the host tier whose sums are checked before they go to the device."""

    rows: Sequence[HostRow]
    refusals: list[Refusal | None] | None = None  # once it is done


@dataclass(slots=True, eq=False)
class _Stored:
    """Records that the tiers below are storing."""

    records: list[Outgoing]
    tickets: list[tuple[Tier, Ticket]]


class Worker:
    """Seals records, makes them visible in the host tier, and stores them in the tiers below it;
    checks rows. Calls return at once.

    The thread ends with `close`, or when the worker is collected: while it waits for work it has
    only a weak reference to the worker. It finishes what it has begun first, and survives whatever
    a tier raises: a library's panic need not be an Exception.
    """

    def __init__(self, host: HostTier, below: Sequence[Tier], *, host_is_tier: bool) -> None:
        self._host, self._below, self._host_is_tier = host, tuple(below), host_is_tier
        self._lock = threading.RLock()
        # an item means that there may be work: a finalizer can put one without the lock, and puts
        # the worker itself, so that it is not collected before the work is done
        self._wake: SimpleQueue[Worker | None] = SimpleQueue()
        self._records: deque[Outgoing] = deque()
        self._checks: deque[Checked] = deque()
        self._sent: list[_Stored] = []
        self._orphans: deque[CopyBatch] = deque()
        self._busy = False
        self._thread: threading.Thread | None = None
        self._closed, self._made_by = False, os.getpid()
        self.stored: deque[Key] = deque()  # for the owner to read
        self.dropped = 0
        weakref.finalize(self, self._wake.put, None).atexit = False
        refuse_after_fork(self)

    def __repr__(self) -> str:
        return "a manager's way to its tiers"

    @property
    def takes_more(self) -> bool:
        """False once it is closed, and in a fork of the process, which does not have the thread."""
        return not self._closed and os.getpid() == self._made_by

    def send(self, records: Sequence[Outgoing]) -> None:
        with self._lock:
            self._records.extend(records)
            self.start()

    def check(self, rows: Sequence[HostRow]) -> Checked:
        job = Checked(rows)
        with self._lock:
            self._checks.append(job)
            self.start()
        return job

    def start(self) -> None:
        """The thread runs, and looks for work."""
        with self._lock:
            if self._closed:
                self._drop_rest()
            elif self._thread is None or not self._thread.is_alive():
                arguments = (weakref.ref(self), self._wake)
                thread = threading.Thread(
                    target=_work, args=arguments, name="dsv4-offload", daemon=True
                )
                thread.start()
                self._thread = thread
            if self._wake.empty():
                self._wake.put(None)

    def adopt(self, batches: Sequence[CopyBatch]) -> None:
        """Takes over copies whose owner was collected, and sends them once they have finished. A
        finalizer calls this, so it waits for no lock; the thread must have been started."""
        if batches:
            self._orphans.extend(batches)
            self._wake.put(self)

    @property
    def idle(self) -> bool:
        with self._lock:
            if not (self._records or self._checks or self._sent or self._busy):
                return True
            self.start()  # an interrupt may have come before the thread was woken
            return False

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._records) + sum(len(batch.records) for batch in self._sent)

    def close(self, timeout_s: float) -> None:
        """Ends the thread. Rows that it still has stay held: tiers may be reading them. What is
        sent later is dropped."""
        with self._lock:
            self._closed = True
            self._wake.put(None)
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        self._drop_rest()

    def _drop_rest(self) -> None:
        """Handles what is sent to a closed worker: nothing is stored any more, and rows are checked
        here."""
        self._check_rows()
        with self._lock:
            records = list(self._records)
            self._records.clear()
        self._end(records, [False] * len(records))

    # ---- the thread ------------------------------------------------------------------------------

    def work(self) -> bool:
        """Does the queued work. Returns whether the thread should wait for more."""
        while self._orphans:
            batch = self._orphans.popleft()
            batch.mark.wait()
            self.send(batch.records)
        while True:
            with self._lock:
                self._busy = False
                if self._closed:
                    return False
                if not (self._records or self._checks or self._sent):
                    return True
                records = list(self._records)
                self._records.clear()
                self._busy = True
            checked = self._check_rows()
            if records:
                self._store(records)
            self._poll()
            if self._sent and not records and not checked:
                time.sleep(_POLL_S)

    def _check_rows(self) -> bool:
        """Whether there were any to check. A fetch waits for them."""
        checked = False
        while True:
            with self._lock:
                if not self._checks:
                    return checked
                job = self._checks.popleft()
            job.refusals = [check(_record(row)) for row in job.rows]
            checked = True

    def _store(self, records: Sequence[Outgoing]) -> None:
        sealed = []
        for each in records:
            self._check_rows()
            try:
                if each.fill is not None:
                    each.fill()
                seal(Record(label=each.row.label, parts=each.row.parts))
            except BaseException:
                LOGGER.exception("%s is not kept: a bug", each.row.label.key)
                self._end([each], [False])
                continue
            each.kept = self._host_is_tier and self._host.publish(each.row)
            sealed.append(each)
        if not sealed:
            return
        if not self._below:
            self._end(sealed, [each.kept for each in sealed])
            return
        batch = [_record(each.row) for each in sealed]
        try:
            tickets = [(tier, tier.store(batch)) for tier in self._below]
        except BaseException:
            LOGGER.exception("%d records are not kept: a bug", len(sealed))
            self._give_up(sealed)
            return
        with self._lock:
            self._sent.append(_Stored(sealed, tickets))

    def _poll(self) -> None:
        for batch in tuple(self._sent):
            count = len(batch.records)
            asked = [
                progress_of(tier, ticket, count, survives=BaseException)
                for tier, ticket in batch.tickets
            ]
            progress = [each for each in asked if each is not None]
            if len(progress) < len(asked):
                self._give_up(batch.records)
            elif all(each.finished and each.settled for each in progress):
                stored = [
                    record.kept or any(each.outcomes[nth] is DONE for each in progress)
                    for nth, record in enumerate(batch.records)
                ]
                self._end(batch.records, stored)
            else:
                continue
            with self._lock:
                self._sent.remove(batch)

    def _give_up(self, records: Sequence[Outgoing]) -> None:
        """Gives up on a tier that broke its contract. Rows stay held: some tier may have them."""
        for each in records:
            each.stored, self.dropped = False, self.dropped + 1

    def _end(self, records: Sequence[Outgoing], stored: Sequence[bool]) -> None:
        for each, is_stored in zip(records, stored, strict=True):
            self._host.release(each.row)
            each.stored = is_stored
            if is_stored:
                self.stored.append(each.row.label.key)
            else:
                self.dropped += 1


def _work(worker: weakref.ref[Worker], wake: SimpleQueue[Worker | None]) -> None:
    working = worker()
    while working is not None and working.work():
        del working
        working = wake.get() or worker()


def _record(row: HostRow) -> Record:
    """A row with its header in place."""
    return Record(label=row.label, parts=row.parts, sealed=True)
