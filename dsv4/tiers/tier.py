"""What every tier can do, and the queue, deadlines and counters that all of them share. Torch-free.

Every call returns at once: the work is done by threads of the tier, and a ticket reports its
progress. An outage raises nothing: what cannot be loaded is missing, what cannot be stored is
dropped.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from queue import SimpleQueue
from typing import Protocol

from dsv4.errors import (
    InvalidInput,
    is_number,
    require_count,
    require_timeout,
    require_type,
)
from dsv4.tiers.encryption import encrypted, opened
from dsv4.tiers.fork import refuse_after_fork
from dsv4.tiers.health import Health
from dsv4.tiers.record import Key, Label, Reason, Record, Refusal, Region, check, seal

log = logging.getLogger("dsv4.tiers")
CLOSE_S = 10.0  # how long `close` waits for what is queued, if nothing else is said
_LOGGED = 100  # failures and refusals are logged this often for each tier; the counters go on
RECENT = 16  # the last calls, and how many must have failed, for a tier to count as broken
# failed records, if they also are half of the recent calls, after which a tier backs off
FAILURES = 4
MOST_TIDIED = 4_096  # the most records whose use, and keys whose removal, may wait to be passed on


class State(StrEnum):
    """How far a tier is with one key."""

    PENDING = "pending"
    DONE = "done"  # loaded and checked; stored, as far as the tier knows; found, if looked up
    MISSING = "missing"  # not there, or not in time
    REFUSED = "refused"  # there, but not what its label says
    DROPPED = "dropped"  # not stored: no room, no time, an outage


@dataclass(frozen=True, slots=True)
class Outcome:
    """The state of one key; for a refused one also why."""

    state: State
    refusal: Refusal | None = None


PENDING = Outcome(State.PENDING)
DONE = Outcome(State.DONE)
MISSING = Outcome(State.MISSING)
DROPPED = Outcome(State.DROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a ticket. An outcome that is not pending does not change any more.

    `settled`: the tier no longer touches the memory of this ticket. A ticket whose deadline has
    passed has all its outcomes and may still be unsettled: the memory must not be used until it is
    settled.
    """

    outcomes: tuple[Outcome, ...]
    settled: bool

    @property
    def finished(self) -> bool:
        return PENDING not in self.outcomes


class Operation(StrEnum):
    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"


@dataclass(slots=True, eq=False)
class Ticket:
    """Work that was handed to a tier. `poll` reports its progress."""

    operation: Operation
    started: float
    deadline: float
    outcomes: list[Outcome]
    unsettled: int = 0  # jobs that wait or run


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Seconds from the call to the outcome, over the records that succeeded."""

    count: int = 0
    total_s: float = 0.0
    worst_s: float = 0.0

    def with_one(self, seconds: float, count: int) -> Latency:
        return Latency(
            count=self.count + count,
            total_s=self.total_s + seconds * count,
            worst_s=max(self.worst_s, seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """What a tier has done since it was made, and what it holds. None: the tier cannot know."""

    name: str
    hits: int
    misses: int
    stored: int
    dropped: int
    loaded_bytes: int
    stored_bytes: int
    refused: Mapping[str, int]  # by reason
    outages: int
    late: int  # tickets that missed their deadline
    load: Latency
    store: Latency
    queued_bytes: int
    backing_off: bool  # closed for a while, after an outage or a missed deadline
    held_records: int | None
    held_bytes: int | None
    capacity_bytes: int | None


class Tier(Protocol):
    """Memory below the device. All calls return at once; none raises for an outage.

    A tier that evicts may also have `use(blocks, snapshot)`: see `QueuedTier.use`; one that can say
    what it holds `watch(watcher)`.
    """

    @property
    def name(self) -> str: ...

    def register(self, region: Region) -> None:
        """Announces memory that records of later calls point into."""

    def lookup(self, labels: Sequence[Label]) -> Ticket:
        """Asks which records are there: done or missing. This is a hint, nothing is checked. After
        the first missing one of a sequence of blocks, the rest may be reported missing unseen."""

    def load(self, records: Sequence[Record]) -> Ticket:
        """Fills the memory of each record. Done means that header and payload are checked; after
        any other outcome the content of the memory is undefined."""

    def store(self, records: Sequence[Record]) -> Ticket:
        """Keeps records. Their memory must not change until the ticket is settled. A record that is
        there already is done. Loads go first: under pressure records are dropped."""

    def poll(self, ticket: Ticket) -> Progress:
        """Returns the progress of a ticket, and ends it if its deadline has passed."""

    def cancel(self, ticket: Ticket) -> None:
        """Ends what has not begun: missing, or dropped. What is already running stays unsettled
        until it returns."""

    def drop(self, keys: Sequence[Key]) -> None:
        """Removes records eventually; if there are many, only those that fit into its queue."""

    def stats(self) -> TierStats: ...

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Finishes what is queued, as far as the time allows. Later calls miss and drop."""


# which records came (True) or went (False)
Watcher = Callable[[Sequence[Key], bool], None]


class Outage(Exception):
    """A tier cannot be reached or cannot work. Implementations raise it, the queue catches it, and
    the tier backs off. An error that concerns only these records is an OSError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much may wait and how long: `threads` move records, up to `queued_bytes` wait to be
    stored and up to `queued_loads` to be loaded, and more are refused; what takes longer than
    `deadline_s` has failed, and a tier that fails is left alone for `back_off_s`. Raises
    InvalidInput for a value that is not positive."""

    threads: int = 2
    queued_bytes: int = 256 << 20  # of stores
    queued_loads: int = 65_536  # of records and labels
    deadline_s: float = 5.0
    back_off_s: float = 10.0  # after an outage or a missed deadline

    def __post_init__(self) -> None:
        for name in ("threads", "queued_bytes", "queued_loads"):
            require_count(name, getattr(self, name))
        for name in ("deadline_s", "back_off_s"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value <= threading.TIMEOUT_MAX:
                raise InvalidInput(f"{name}={value!r}: must be a number of seconds, more than 0")


@dataclass(slots=True, eq=False)
class _Job:
    """A chunk of a ticket, or housekeeping without one."""

    ticket: Ticket | None
    first: int = 0  # of the ticket's outcomes
    labels: Sequence[Label] = ()
    records: Sequence[Record] = ()
    run: Callable[[], None] | None = None
    began: float = 0.0

    @property
    def count(self) -> int:
        return len(self.labels) or len(self.records)

    @property
    def bytes(self) -> int:
        return sum(record.label.record_bytes for record in self.records)


@dataclass(slots=True)
class _Counters:
    hits: int = 0
    misses: int = 0
    stored: int = 0
    dropped: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    outages: int = 0
    late: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    load: Latency = field(default_factory=Latency)
    store: Latency = field(default_factory=Latency)


class QueuedTier(ABC):
    """A tier whose work is done by threads. An implementation provides the methods at the end,
    which run on the threads and may block. They raise Outage where the tier cannot work, and
    OSError for an error that the next record may not meet.

    Loads and lookups go before stores, and one thread is always left to them. The tier backs off
    (for a while it is not used at all) after an outage, after a call that missed its deadline, or
    when several records failed and at least half of the last calls.

    Calls raise CopyError in a process that os.fork made: the threads are not there.

    A tier that is dropped without `close` lets go of its threads and of what it holds once it is
    collected: a thread that waits for work knows it by a weak reference alone. What had not begun
    by then is lost.
    """

    chunk = 1  # records per job
    look_chunk = 0  # labels per job of a lookup; 0: the same
    _where = ""  # for people: what an implementation keeps where, without locks and credentials
    encrypts = True  # records of a secret that wants it; False where they stay in this process
    keeps_order = False  # whether `_use` is called for what was loaded and used

    def __init__(self, name: str, limits: Limits) -> None:
        require_type("name", name, str)
        require_type("limits", limits, Limits)
        self._name, self._limits = name, limits
        self._lock = threading.RLock()
        # a token for each thread that is to look for work: a finalizer can put one without a lock
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._ended = threading.Condition(self._lock)  # a job is over
        self._first: deque[_Job] = deque()  # loads and lookups
        self._later: deque[_Job] = deque()  # stores and housekeeping
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._storing = 0
        self._running: set[_Job] = set()
        self._queued_bytes = 0
        self._queued_loads = 0
        self._closed_until = dict.fromkeys(Operation, 0.0)
        self._health = {
            stores: Health(recent=RECENT, failures=FAILURES) for stores in (False, True)
        }
        self._failures = 0
        self._uses = OrderedDict[Key, Sequence[Label]]()  # not passed on yet, the latest last
        self._drops: dict[Key, None] = {}
        self._tidies = False  # a job for these two is queued
        self._closed = False
        self._counters = _Counters()
        self._watchers: tuple[Watcher, ...] = ()
        self._endings: list[Callable[[], object]] = []
        self._end_all = weakref.finalize(
            self, _end_all, os.getpid(), self._wake, limits.threads, self._endings
        )
        self._end_all.atexit = False  # then the system takes everything back
        refuse_after_fork(self)

    def __repr__(self) -> str:
        where = f": {self._where}" if self._where else ""
        return f"{type(self).__name__}({self._name!r}{where})"

    @property
    def name(self) -> str:
        return self._name

    def register(self, region: Region) -> None:  # noqa: B027
        """Not needed here: any memory will do."""

    # ---- calls -----------------------------------------------------------------------------------

    def lookup(self, labels: Sequence[Label]) -> Ticket:
        with self._lock:
            known = [self._glance(label) for label in labels]
            ticket = self._ticket(Operation.LOOKUP, len(labels))
            for nth, found in enumerate(known):
                if found is not None:
                    ticket.outcomes[nth] = DONE if found else MISSING
            chunk = self.look_chunk or self.chunk
            jobs = [
                _Job(ticket, first, labels=labels[first : first + chunk])
                for first in range(0, len(labels), chunk)
                if None in known[first : first + chunk]
            ]
            self._enqueue(ticket, jobs)
        return ticket

    def load(self, records: Sequence[Record]) -> Ticket:
        return self._hand_over(Operation.LOAD, records)

    def store(self, records: Sequence[Record]) -> Ticket:
        return self._hand_over(Operation.STORE, records)

    def poll(self, ticket: Ticket) -> Progress:
        with self._lock:
            now = time.monotonic()
            if PENDING in ticket.outcomes and now > ticket.deadline:
                self._counters.late += 1
                # a long queue is not an outage, a call that does not return is
                if any(now - job.began > self._limits.deadline_s / 2 for job in self._running):
                    self._back_off(ticket.operation, f"no answer in {self._limits.deadline_s:g} s")
                self._end(ticket)
            return Progress(outcomes=tuple(ticket.outcomes), settled=not ticket.unsettled)

    def cancel(self, ticket: Ticket) -> None:
        with self._lock:
            self._end(ticket)

    def use(self, blocks: Sequence[Label], snapshot: Label | None = None) -> None:
        """The blocks of one prompt from its first on, and a snapshot, were used above this tier, so
        it evicts them last. Looks at a few of the blocks, whatever their number."""
        if self.keeps_order:
            with self._lock:
                self._use_later([] if snapshot is None else [[snapshot]])
                self._use_later([_some_of(blocks)] if blocks else [])

    def drop(self, keys: Sequence[Key]) -> None:
        with self._lock:
            self._drops.update(dict.fromkeys(keys))
            while len(self._drops) > MOST_TIDIED:
                self._drops.popitem()
            self._tidy_later()

    def watch(self, watcher: Watcher) -> None:
        """Calls it from now on, from any thread, when this process stores, finds or removes
        records. What other processes do with them is not reported. It must neither raise nor
        wait."""
        with self._lock:
            self._watchers = (*self._watchers, watcher)

    def stats(self) -> TierStats:
        with self._lock:
            held_records, held_bytes, capacity_bytes = self._held()
            counted, now = self._counters, time.monotonic()
            return TierStats(
                name=self._name,
                hits=counted.hits,
                misses=counted.misses,
                stored=counted.stored,
                dropped=counted.dropped,
                loaded_bytes=counted.loaded_bytes,
                stored_bytes=counted.stored_bytes,
                refused=dict(counted.refused),
                outages=counted.outages,
                late=counted.late,
                load=counted.load,
                store=counted.store,
                queued_bytes=self._queued_bytes,
                backing_off=any(now < until for until in self._closed_until.values()),
                held_records=held_records,
                held_bytes=held_bytes,
                capacity_bytes=capacity_bytes,
            )

    @property
    def is_closed(self) -> bool:
        """Whether calls miss and drop from now on."""
        return self._closed

    def close(self, timeout_s: float = CLOSE_S) -> None:
        timeout_s = min(require_timeout(timeout_s), threading.TIMEOUT_MAX)
        until = time.monotonic() + timeout_s
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._ended.wait_for(
                lambda: not (self._first or self._later or self._running), timeout_s
            )
            for job in (*self._first, *self._later):
                self._unqueue(job)
                self._give_up(job)
            self._first.clear()
            self._later.clear()
            for _ in self._threads:
                self._wake.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self._end_all()  # otherwise a call hangs in there: what it uses stays open

    # ---- queue -----------------------------------------------------------------------------------

    def _hand_over(self, operation: Operation, records: Sequence[Record]) -> Ticket:
        self._require(records)
        with self._lock:
            ticket = self._ticket(operation, len(records))
            jobs = [
                _Job(ticket, first, records=records[first : first + self.chunk])
                for first in range(0, len(records), self.chunk)
            ]
            self._enqueue(ticket, jobs)
        return ticket

    def _ticket(self, operation: Operation, count: int) -> Ticket:
        now = time.monotonic()
        return Ticket(operation, now, now + self._limits.deadline_s, [PENDING] * count)

    def _enqueue(self, ticket: Ticket, jobs: Iterable[_Job]) -> None:
        closed = self._closed or ticket.started < self._closed_until[ticket.operation]
        for job in jobs:
            ticket.unsettled += 1
            if closed or not self._has_room(job):
                self._give_up(job)
                continue
            if ticket.operation is Operation.STORE:
                self._queued_bytes += job.bytes
                self._later.append(job)
            else:
                self._queued_loads += job.count
                self._first.append(job)
            self._find_thread()

    def _has_room(self, job: _Job) -> bool:
        assert job.ticket is not None
        if job.ticket.operation is Operation.STORE:
            # one job is always accepted, or a tier with a short queue would store nothing
            waiting = self._queued_bytes
            return not waiting or waiting + job.bytes <= self._limits.queued_bytes
        waiting = self._queued_loads
        return not waiting or waiting + job.count <= self._limits.queued_loads

    def _unqueue(self, job: _Job) -> None:
        if job.ticket is None:
            return
        if job.ticket.operation is Operation.STORE:
            self._queued_bytes -= job.bytes
        else:
            self._queued_loads -= job.count

    def _do_later(self, run: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                self._later.append(_Job(None, run=run))
                self._find_thread()

    def _use_later(self, uses: Sequence[Sequence[Label]]) -> None:
        """Using the last block of a prompt implies using all before it. So only that one is queued,
        with a few before it in case it is not in this tier."""
        for labels in uses:
            self._uses.pop(labels[0].leans_on, None)
            self._uses.pop(labels[0].key, None)
            self._uses[labels[0].key] = labels
        while len(self._uses) > MOST_TIDIED:
            self._uses.popitem(last=False)
        self._tidy_later()

    def _tidy_later(self) -> None:
        if not self._tidies and not self._closed:
            self._tidies = True
            self._do_later(self._tidy)

    def _tidy(self) -> None:
        with self._lock:
            self._tidies = False
            used, self._uses = list(self._uses.values()), OrderedDict()
            gone, self._drops = tuple(self._drops), {}
        if used:
            self._use(used)
        if gone:
            self._drop(gone)
            self._report(gone, there=False)

    def _find_thread(self) -> None:
        """A thread for what was just queued: a waiting one, or a new one. Threads are started when
        they are needed: a tier that is only constructed has none."""
        if self._idle < len(self._first) + len(self._later) and (
            len(self._threads) < self._limits.threads
        ):
            name = f"dsv4-{self._name}-{len(self._threads)}"
            arguments = (weakref.ref(self), self._wake)
            thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
            thread.start()  # first: a thread that an interrupt kept from starting must not count
            self._threads.append(thread)
        if self._wake.qsize() < self._idle:
            self._wake.put(None)

    def _next(self) -> _Job | None:
        if self._first:
            return self._first.popleft()
        most = max(1, self._limits.threads - 1)
        if self._later and self._storing < most:
            return self._later.popleft()
        return None

    def _work(self, *, was_idle: bool) -> bool:
        """Does what waits. Whether the thread is to wait for more; False if the tier is closed."""
        with self._lock:
            self._idle -= was_idle
        while True:
            with self._lock:
                if (job := self._next()) is None:
                    self._idle += 1
                    return not self._closed or bool(self._first or self._later)
                self._unqueue(job)
                ticket = job.ticket
                if ticket is not None and time.monotonic() > ticket.deadline:
                    self._give_up(job)
                    self._ended.notify_all()
                    continue
                stores = ticket is None or ticket.operation is Operation.STORE
                self._storing += stores
                job.began = time.monotonic()
                self._running.add(job)
            outcomes, trouble, is_out = self._tried(job)
            with self._lock:
                self._storing -= stores
                self._running.discard(job)
                self._note_health(job, trouble, is_out=is_out)
                if ticket is not None:
                    if outcomes is None:
                        self._give_up(job)
                    else:
                        self._finish(job, outcomes)
                self._ended.notify_all()

    def _tried(self, job: _Job) -> tuple[Sequence[Outcome] | None, str, bool]:
        """The outcomes of a job; or None, what went wrong, and whether it is an outage."""
        try:
            return self._run(job), "", False
        except Outage as error:
            return None, str(error) or "an outage", True
        except OSError as error:
            return None, str(error) or type(error).__name__, False
        except BaseException:  # a library's panic may not be an Exception; this thread must survive
            log.exception("tier %s: a bug, taken for an outage", self._name)
            return None, "a bug", False

    def _run(self, job: _Job) -> Sequence[Outcome]:
        if job.run is not None:
            job.run()
            return ()
        assert job.ticket is not None
        match job.ticket.operation:
            case Operation.LOOKUP:
                there = zip(job.labels, self._look(job.labels), strict=True)
                return [DONE if found else MISSING for _, found in there]
            case Operation.LOAD:
                return self._load_checked(job.records)
            case Operation.STORE:
                return self._store_sealed(job.records)

    def _load_checked(self, records: Sequence[Record]) -> list[Outcome]:
        outcomes = []
        for record, found in zip(records, self._load(records), strict=True):
            if found is DONE:
                refusal = opened(record)
                found = DONE if refusal is None else Outcome(State.REFUSED, refusal)
            if found.state is State.REFUSED:
                self._discard(record.key)
            outcomes.append(found)
        return outcomes

    def _store_sealed(self, records: Sequence[Record]) -> list[Outcome]:
        """Checks headers that already exist: data that was damaged in memory is not stored."""
        outcomes, good = [DONE] * len(records), []
        for nth, record in enumerate(records):
            if not record.sealed:
                seal(record)
            elif (refusal := check(record)) is not None:
                outcomes[nth] = Outcome(State.REFUSED, refusal)
                continue
            good.append(nth)
        stored = self._store([self._outside(records[nth]) for nth in good]) if good else ()
        for nth, outcome in zip(good, stored, strict=True):
            outcomes[nth] = outcome
        return outcomes

    def _outside(self, record: Record) -> Record:
        secret = record.label.secret
        encrypts = self.encrypts and secret is not None and secret.encrypts
        return encrypted(record) if encrypts else record

    def _discard(self, key: Key) -> None:
        """Removes a refused record; a failure is only logged."""
        try:
            self._drop((key,))
            self._report((key,), there=False)
        except (Outage, OSError) as error:
            log.warning("tier %s: cannot remove %s: %s", self._name, key, error)

    # ---- outcomes --------------------------------------------------------------------------------

    def _give_up(self, job: _Job) -> None:
        """Ends a job without doing it."""
        if job.ticket is not None:
            stores = job.ticket.operation is Operation.STORE
            self._finish(job, [DROPPED if stores else MISSING] * job.count)

    def _end(self, ticket: Ticket) -> None:
        """Ends a ticket: its queued jobs are removed, the results of running ones will be
        ignored."""
        if ticket.unsettled:
            waiting = (*self._first, *self._later)
            self._first = deque(job for job in self._first if job.ticket is not ticket)
            self._later = deque(job for job in self._later if job.ticket is not ticket)
            for job in waiting:
                if job.ticket is ticket:
                    self._unqueue(job)
                    self._give_up(job)
        over = DROPPED if ticket.operation is Operation.STORE else MISSING
        for nth, outcome in enumerate(ticket.outcomes):
            if outcome is PENDING:
                ticket.outcomes[nth] = over
                self._count(ticket, over, 0)

    def _finish(self, job: _Job, outcomes: Sequence[Outcome]) -> None:
        ticket = job.ticket
        assert ticket is not None
        ticket.unsettled -= 1
        done = 0
        for nth, outcome in enumerate(outcomes):
            if ticket.outcomes[job.first + nth] is PENDING:
                ticket.outcomes[job.first + nth] = outcome
                done += outcome is DONE
                record_bytes = job.records[nth].label.record_bytes if job.records else 0
                self._count(ticket, outcome, record_bytes)
                if outcome.refusal is not None:
                    self._note_refusal(job.records[nth].key, outcome.refusal)
                if self.keeps_order and outcome is DONE and job.records:
                    self._use_later([[job.records[nth].label]])
        if done and job.records and self._watchers:
            found = zip(job.records, outcomes, strict=True)
            self._report([each.key for each, outcome in found if outcome is DONE], there=True)
        seconds = time.monotonic() - ticket.started
        if done and ticket.operation is Operation.LOAD:
            self._counters.load = self._counters.load.with_one(seconds, done)
        elif done and ticket.operation is Operation.STORE:
            self._counters.store = self._counters.store.with_one(seconds, done)

    def _report(self, keys: Sequence[Key], *, there: bool) -> None:
        for watcher in self._watchers:
            watcher(keys, there)

    def _count(self, ticket: Ticket, outcome: Outcome, record_bytes: int) -> None:
        counted = self._counters
        match ticket.operation, outcome.state:
            case Operation.LOAD, State.DONE:
                counted.hits += 1
                counted.loaded_bytes += record_bytes
            case Operation.LOAD, State.MISSING:
                counted.misses += 1
            case Operation.STORE, State.DONE:
                counted.stored += 1
                counted.stored_bytes += record_bytes
            case _, State.DROPPED:
                counted.dropped += 1

    def _note_refusal(self, key: Key, refusal: Refusal) -> None:
        counted = self._counters.refused
        counted[refusal.reason] += 1
        if counted.total() <= _LOGGED:
            log.warning("tier %s refuses %s: %s", self._name, key, refusal)

    def _note_health(self, job: _Job, trouble: str, *, is_out: bool) -> None:
        """Records what the outcome of one call says about the tier."""
        operation = job.ticket.operation if job.ticket else Operation.STORE
        health = self._health[operation is Operation.STORE]
        if not trouble:
            if job.ticket is not None:
                health.note_success()
            return
        self._counters.outages += 1
        if job.ticket is not None:
            asked = job.labels[0] if job.labels else job.records[0].label
            health.note_failure((operation, asked.key))
        if is_out or health.is_lost():
            self._back_off(operation, trouble)
        self._failures += 1
        if self._failures <= _LOGGED:
            log.warning("tier %s: a call failed: %s", self._name, trouble)

    def _back_off(self, operation: Operation, why: str) -> None:
        """Closes the tier for a while: one that cannot store may still load, not vice versa."""
        now = time.monotonic()
        stores = operation is Operation.STORE
        for each in (Operation.STORE,) if stores else tuple(Operation):
            if now >= self._closed_until[each]:
                log.warning(
                    "tier %s: no %s for %g s: %s", self._name, each, self._limits.back_off_s, why
                )
            self._closed_until[each] = now + self._limits.back_off_s

    # ---- what an implementation provides ---------------------------------------------------------

    def _require(self, records: Sequence[Record]) -> None:  # noqa: B027
        """Raises InvalidInput for memory that the tier cannot use."""

    def _glance(self, label: Label) -> bool | None:
        """Whether a record is there, if known without waiting. Called with the lock held."""
        return None

    def _held(self) -> tuple[int | None, int | None, int | None]:
        """Records, bytes and capacity, where they are known. Called with the lock held."""
        return None, None, None

    @abstractmethod
    def _look(self, labels: Sequence[Label]) -> Sequence[bool]: ...

    @abstractmethod
    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        """Fills memory. DONE: the bytes are in place; they are checked after this call."""

    @abstractmethod
    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]: ...

    def _use(self, uses: Sequence[Sequence[Label]]) -> None:  # noqa: B027
        """Records that were loaded, or used above, and those that they lean on, are evicted last.
        Of consecutive blocks only the last is given; if it may not be in this tier, also some
        before it, the last first: the first of them that the tier has is the one that was used."""

    @abstractmethod
    def _drop(self, keys: Sequence[Key]) -> None: ...

    def _at_end(self, call: Callable[[], object]) -> None:
        """Registers a call for when the tier is closed and its threads have ended, or when it is
        collected; the last one registered is made first. A call that refers to the tier would
        keep it alive."""
        self._endings.append(call)


def _work(tier: weakref.ref[QueuedTier], wake: SimpleQueue[None]) -> None:
    """The life of a tier's thread. While it waits it keeps no reference to the tier."""
    was_idle = False
    while (working := tier()) is not None and working._work(was_idle=was_idle):
        del working
        wake.get()
        was_idle = True


def _end_all(
    made_by: int, wake: SimpleQueue[None], threads: int, endings: list[Callable[[], object]]
) -> None:
    """Ends the threads of a tier and releases what it held. The garbage collector calls it too, in
    any thread, so it waits for no lock. In a fork of the process all of it belongs to the
    parent."""
    if os.getpid() != made_by:
        return
    for _ in range(threads):
        wake.put(None)
    while endings:
        try:
            endings.pop()()
        except Exception:
            log.exception("a tier that has ended cannot let go of something")


def _some_of(blocks: Sequence[Label]) -> list[Label]:
    """The last block and a few others at distances 1, 2, 4, … from either end, the last first."""
    last = len(blocks) - 1
    steps = [0, *(1 << n for n in range(last.bit_length()))]
    return [blocks[at] for at in sorted({*steps, *(last - step for step in steps)}, reverse=True)]


def foreign(found: str) -> Outcome:
    """Refused: something that is not a record is where a record should be."""
    return Outcome(State.REFUSED, Refusal(reason=Reason.FOREIGN, found=found, asked="a record"))


def wrong_size(found_bytes: int, asked_bytes: int) -> Outcome:
    """Refused: a record of another size is there."""
    reason = Reason.SHORT if found_bytes < asked_bytes else Reason.PAYLOAD_BYTES
    refusal = Refusal(reason=reason, found=f"{found_bytes} bytes", asked=f"{asked_bytes}")
    return Outcome(State.REFUSED, refusal)
