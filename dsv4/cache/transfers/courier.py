"""What needs no device: sums, headers, and what tiers are told. One thread, torch-free."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsv4.cache.transfers.aside import progress_of
from dsv4.tiers.fork import refuse_after_fork
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Key, Record, Refusal, check, seal
from dsv4.tiers.tier import DONE, Ticket, Tier

LOGGER = logging.getLogger("dsv4.tiers")
_POLL_S = 0.0005


@dataclass(slots=True, eq=False)
class Parcel:
    """A row of host memory that holds, or will hold, the payload of a record. `fill`, if there is
    one, makes it; `kept` says that the host tier has it; `stored` is None until every tier has
    answered."""

    row: HostRow
    fill: Callable[[], None] | None = None
    kept: bool = False
    stored: bool | None = None


@dataclass(slots=True, eq=False)
class Checked:
    """Rows of the host tier that are looked through before they go to the device."""

    rows: Sequence[HostRow]
    refusals: list[Refusal | None] | None = None  # once it is done


@dataclass(slots=True, eq=False)
class _Batch:
    parcels: list[Parcel]
    tickets: list[tuple[Tier, Ticket]]


class Courier:
    """Seals parcels, lets the host tier find them, and hands them to the tiers below it; checks
    rows. Calls return at once. `host_is_tier`: records stay in the
    host memory, it is not only staging."""

    def __init__(self, host: HostTier, below: Sequence[Tier], *, host_is_tier: bool) -> None:
        self._host, self._below, self._host_is_tier = host, tuple(below), host_is_tier
        # Held by itself, not as the condition, whose end is Python: an interrupt there keeps it.
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._parcels: deque[Parcel] = deque()
        self._checks: deque[Checked] = deque()
        self._sent: list[_Batch] = []
        self._busy = False
        self._thread: threading.Thread | None = None
        self._closed = False
        self.stored: deque[Key] = deque()  # for the owner to read
        self.dropped = 0
        refuse_after_fork(self)

    def __repr__(self) -> str:
        return "a manager's way to its tiers"

    def send(self, parcels: Sequence[Parcel]) -> None:
        with self._lock:
            self._parcels.extend(parcels)
            self._start()

    def check(self, rows: Sequence[HostRow]) -> Checked:
        job = Checked(rows)
        with self._lock:
            self._checks.append(job)
            self._start()
        return job

    @property
    def idle(self) -> bool:
        with self._lock:
            if not (self._parcels or self._checks or self._sent or self._busy):
                return True
            self._start()  # an interrupt may have come before the thread was told
            return False

    @property
    def waiting(self) -> int:
        with self._lock:
            return len(self._parcels) + sum(len(batch.parcels) for batch in self._sent)

    def close(self) -> None:
        """The thread ends. Rows that it still has stay held: tiers may be reading them."""
        with self._lock:
            self._closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(5.0)

    def _start(self) -> None:
        if self._thread is None or not (self._thread.is_alive() or self._closed):
            self._thread = threading.Thread(target=self._run, name="dsv4-courier", daemon=True)
            self._thread.start()
        self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._busy = False
                while not (self._parcels or self._checks or self._sent or self._closed):
                    self._wake.wait()
                if self._closed:
                    return
                parcels = list(self._parcels)
                self._parcels.clear()
                self._busy = True
            checked = self._check_rows()
            if parcels:
                self._dispatch(parcels)
            self._poll()
            if self._sent and not parcels and not checked:
                time.sleep(_POLL_S)

    def _check_rows(self) -> bool:
        """Whether there were any to check. Somebody waits for them."""
        checked = False
        while True:
            with self._lock:
                if not self._checks:
                    return checked
                job = self._checks.popleft()
            job.refusals = [check(_record(row)) for row in job.rows]
            checked = True

    def _dispatch(self, parcels: Sequence[Parcel]) -> None:
        sealed = []
        for parcel in parcels:
            self._check_rows()
            try:
                if parcel.fill is not None:
                    parcel.fill()
                seal(Record(label=parcel.row.label, parts=parcel.row.parts))
            except Exception:
                LOGGER.exception("%s is not kept: a bug", parcel.row.label.key)
                self._end([parcel], [False])
                continue
            parcel.kept = self._host_is_tier and self._host.publish(parcel.row)
            sealed.append(parcel)
        if not sealed:
            return
        if not self._below:
            self._end(sealed, [parcel.kept for parcel in sealed])
            return
        records = [_record(parcel.row) for parcel in sealed]
        try:
            tickets = [(tier, tier.store(records)) for tier in self._below]
        except Exception:  # rows stay held: some tier may have them
            LOGGER.exception("%d records are not kept: a bug", len(sealed))
            for parcel in sealed:
                parcel.stored, self.dropped = False, self.dropped + 1
            return
        with self._lock:
            self._sent.append(_Batch(sealed, tickets))

    def _poll(self) -> None:
        for batch in tuple(self._sent):
            count = len(batch.parcels)
            asked = [progress_of(tier, ticket, count) for tier, ticket in batch.tickets]
            progress = [each for each in asked if each is not None]
            if len(progress) < len(asked):  # rows stay held: some tier may have them
                for parcel in batch.parcels:
                    parcel.stored, self.dropped = False, self.dropped + 1
                with self._lock:
                    self._sent.remove(batch)
                continue
            if not all(each.finished and each.settled for each in progress):
                continue
            stored = [
                parcel.kept or any(each.outcomes[nth] is DONE for each in progress)
                for nth, parcel in enumerate(batch.parcels)
            ]
            self._end(batch.parcels, stored)
            with self._lock:
                self._sent.remove(batch)

    def _end(self, parcels: Sequence[Parcel], stored: Sequence[bool]) -> None:
        for parcel, kept in zip(parcels, stored, strict=True):
            self._host.release(parcel.row)
            parcel.stored = kept
            if kept:
                self.stored.append(parcel.row.label.key)
            else:
                self.dropped += 1


def _record(row: HostRow) -> Record:
    """A row with its header in place."""
    return Record(label=row.label, parts=row.parts, sealed=True)
