"""The queue that all tiers share: order, bounds, deadlines, rest; no call waits and none raises."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from dsv4.errors import CopyError, InvalidInput
from dsv4.tiers.record import Key, Label, Reason, Record, check, seal
from dsv4.tiers.tier import (
    DONE,
    FAILURES,
    MISSING,
    MOST_TIDIED,
    RECENT,
    Limits,
    Outage,
    Outcome,
    QueuedTier,
    State,
    Tier,
)
from tests.support.tiers import (
    Memory,
    chain,
    file_bytes,
    found,
    label,
    load,
    payload_in,
    payload_of,
    states,
    store,
    until,
    wait,
)

DEADLINE_S, REST_S = 5.0, 1.0


class Clock:
    """The tier's time: it stands still, but for an instant per look, until a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("dsv4.tiers.tier.time", made)
    return made


class Shelf(QueuedTier):
    """A tier in a dictionary, which waits, breaks and damages when it is told to."""

    def __init__(self, limits: Limits) -> None:
        super().__init__("shelf", limits)
        self.kept: dict[Key, bytes] = {}
        self.did: list[tuple[str, Label]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fault: Callable[[], None] = lambda: None
        self.entered = threading.Semaphore(0)
        over = self._over = threading.Event()
        self._at_end(over.set)

    @property
    def ended(self) -> bool:
        return self._over.is_set()

    def _enter(self, what: str, labels: Sequence[Label]) -> None:
        self.did += [(what, each) for each in labels]
        self.entered.release()
        self.gate.wait()
        self.fault()

    def _look(self, labels: Sequence[Label]) -> Sequence[bool]:
        self._enter("lookup", labels)
        return [each.key in self.kept for each in labels]

    def _load(self, records: Sequence[Record]) -> Sequence[Outcome]:
        self._enter("load", [record.label for record in records])
        return [self._fill(record) for record in records]

    def _fill(self, record: Record) -> Outcome:
        data = self.kept.get(record.key)
        if data is None:
            return MISSING
        record.parts.whole[0][:] = data
        return DONE

    def _store(self, records: Sequence[Record]) -> Sequence[Outcome]:
        self._enter("store", [record.label for record in records])
        for record in records:
            self.kept[record.key] = bytes(record.parts.whole[0])
        return [DONE] * len(records)

    def _drop(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.kept.pop(key, None)


@pytest.fixture
def tier() -> Iterator[Shelf]:
    yield from _until_closed(Shelf(Limits(threads=2, deadline_s=DEADLINE_S, back_off_s=REST_S)))


def _until_closed(tier: Shelf) -> Iterator[Shelf]:
    yield tier
    tier.gate.set()
    tier.close(5.0)


def test_it_is_a_tier(tier: Shelf) -> None:
    as_tier: Tier = tier  # mypy's question
    assert as_tier.name == "shelf"


def test_what_is_stored_is_loaded_and_counted(tier: Shelf, memory: Memory) -> None:
    labels = chain("a", 3)
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 3
    assert found(tier, [*labels, label("other")]) == [True] * 3 + [False]
    records = [memory.blank(each) for each in [*labels, label("other")]]
    assert load(tier, records) == [State.DONE] * 3 + [State.MISSING]
    assert [payload_in(record) for record in records[:3]] == [payload_of(each) for each in labels]
    stats = tier.stats()
    each_bytes = labels[0].record_bytes
    assert (stats.hits, stats.misses, stats.stored, stats.dropped) == (3, 1, 3, 0)
    assert (stats.loaded_bytes, stats.stored_bytes) == (3 * each_bytes, 3 * each_bytes)
    assert (stats.load.count, stats.store.count) == (3, 3)
    assert 0 < stats.load.worst_s <= stats.load.total_s
    assert not stats.backing_off
    assert stats.queued_bytes == 0


def test_a_tier_that_is_only_made_has_no_threads(tier: Shelf) -> None:
    until(lambda: not has_threads("shelf"))  # another test's may be about to end


def test_damage_is_refused_counted_and_taken_away(
    tier: Shelf, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = chain("a", 2)
    tier.kept[good.key] = bytes(file_bytes(good))
    damaged = file_bytes(bad)
    damaged[300] ^= 1
    tier.kept[bad.key] = bytes(damaged)
    progress = wait(tier, tier.load([memory.blank(good), memory.blank(bad)]))
    assert states(progress) == [State.DONE, State.REFUSED]
    refusal = progress.outcomes[1].refusal
    assert refusal is not None
    assert refusal.reason is Reason.PAYLOAD_SUM
    assert tier.stats().refused == {"payload_sum": 1}
    assert str(bad.key) in caplog.text
    assert list(tier.kept) == [good.key]


def test_a_header_that_is_there_is_checked_and_not_replaced(tier: Shelf, memory: Memory) -> None:
    """Bytes that broke in host memory after they were sealed are not blessed by a new sum."""
    good, bad = (memory.filled(each) for each in chain("a", 2))
    for record in (good, bad):
        seal(record)
    bad.parts.payload[0][17] ^= 4
    sealed = [Record(label=r.label, parts=r.parts, sealed=True) for r in (good, bad)]
    assert store(tier, sealed) == [State.DONE, State.REFUSED]
    assert check(good) is None
    assert list(tier.kept) == [good.key]


def test_loads_go_before_stores_and_a_thread_is_left_to_them(tier: Shelf, memory: Memory) -> None:
    labels = chain("a", 6)
    tier.gate.clear()
    ticket = tier.store([memory.filled(each) for each in labels])
    tier.entered.acquire()
    asked = tier.load([memory.blank(label("never stored"))])
    tier.entered.acquire()  # the second thread is in the load; one store runs, the others wait
    assert [what for what, _ in tier.did] == ["store", "load"]
    tier.gate.set()
    assert states(wait(tier, asked)) == [State.MISSING]
    assert states(wait(tier, ticket)) == [State.DONE] * 6


def test_stores_are_dropped_when_the_queue_is_full(memory: Memory) -> None:
    labels = chain("a", 5)
    tier = Shelf(Limits(queued_bytes=2 * labels[0].record_bytes))
    tier.gate.clear()
    first = tier.store([memory.filled(labels[0])])
    tier.entered.acquire()  # it runs: the queue is empty again
    rest = tier.store([memory.filled(each) for each in labels[1:]])
    assert states(tier.poll(rest)) == [State.PENDING] * 2 + [State.DROPPED] * 2
    assert tier.stats().queued_bytes == 2 * labels[0].record_bytes
    tier.gate.set()
    assert states(wait(tier, first)) == [State.DONE]
    assert states(wait(tier, rest)) == [State.DONE] * 2 + [State.DROPPED] * 2
    assert tier.stats().dropped == 2
    tier.close(1.0)


def test_a_record_larger_than_the_queue_is_stored_all_the_same(memory: Memory) -> None:
    tier = Shelf(Limits(queued_bytes=1))
    assert store(tier, [memory.filled(label("a"))]) == [State.DONE]
    tier.close(1.0)


def test_loads_are_bounded_too(memory: Memory) -> None:
    labels = chain("a", 4)
    tier = Shelf(Limits(threads=1, queued_loads=2))
    tier.gate.clear()
    tier.load([memory.blank(labels[0])])
    tier.entered.acquire()
    asked = tier.load([memory.blank(each) for each in labels])
    assert states(tier.poll(asked)) == [State.PENDING] * 2 + [State.MISSING] * 2
    tier.gate.set()
    tier.close(1.0)


def test_no_call_waits_for_a_tier_that_hangs(tier: Shelf, memory: Memory) -> None:
    tier.gate.clear()
    labels = chain("a", 4)
    for _ in range(3):  # the clock stands: a call that waited would wait for ever
        ticket = tier.load([memory.blank(each) for each in labels])
        tier.lookup(labels)
        tier.store([memory.filled(each) for each in labels])
        tier.drop([labels[0].key])
        tier.poll(ticket)
        tier.cancel(ticket)
        tier.stats()


def test_after_the_deadline_the_ticket_is_over_and_its_memory_is_not(
    tier: Shelf, memory: Memory, clock: Clock
) -> None:
    """The call is still in there and writes later: the memory is free when it has returned."""
    wanted = label("a")
    tier.kept[wanted.key] = bytes(file_bytes(wanted))
    tier.gate.clear()
    record = memory.blank(wanted)
    ticket = tier.load([record])
    tier.entered.acquire()
    assert states(tier.poll(ticket)) == [State.PENDING]
    clock.now += DEADLINE_S
    progress = tier.poll(ticket)
    assert states(progress) == [State.MISSING]
    assert not progress.settled
    tier.gate.set()
    until(lambda: tier.poll(ticket).settled)
    assert payload_in(record) == payload_of(wanted)  # written after the ticket was over
    assert states(tier.poll(ticket)) == [State.MISSING]
    assert tier.stats().hits == 0
    assert tier.stats().late == 1


def test_a_tier_that_missed_a_deadline_rests_and_comes_back(
    tier: Shelf, memory: Memory, clock: Clock
) -> None:
    wanted = label("a")
    assert store(tier, [memory.filled(wanted)]) == [State.DONE]
    tier.entered.acquire()
    tier.gate.clear()
    late = tier.load([memory.blank(wanted)])
    tier.entered.acquire()
    clock.now += DEADLINE_S
    assert states(tier.poll(late)) == [State.MISSING]
    tier.gate.set()
    assert tier.stats().backing_off
    for ticket, over in (
        (tier.load([memory.blank(wanted)]), State.MISSING),
        (tier.lookup([wanted]), State.MISSING),
        (tier.store([memory.filled(label("b"))]), State.DROPPED),
    ):
        progress = tier.poll(ticket)
        assert (states(progress), progress.settled) == ([over], True)  # at once, without a thread
    clock.now += REST_S
    assert not tier.stats().backing_off
    assert load(tier, [memory.blank(wanted)]) == [State.DONE]


def test_a_long_queue_is_no_outage(memory: Memory, clock: Clock) -> None:
    """Jobs that each take a quarter of the deadline: those behind are late, the tier goes on."""
    tier, labels = Shelf(Limits(threads=1, deadline_s=DEADLINE_S)), chain("a", 10)
    late, polled = threading.Event(), threading.Event()

    def slow() -> None:
        clock.now += DEADLINE_S / 4
        if len(tier.did) == 4:
            late.set()
            polled.wait()

    tier.fault = slow
    ticket = tier.load([memory.blank(each) for each in labels])
    late.wait()
    assert states(tier.poll(ticket)) == [State.MISSING] * 10
    polled.set()
    until(lambda: tier.poll(ticket).settled)
    assert len(tier.did) == 4
    assert tier.stats().late == 1
    assert not tier.stats().backing_off
    tier.close(1.0)


def test_an_outage_is_a_miss_a_drop_and_a_rest(tier: Shelf, memory: Memory, clock: Clock) -> None:
    def fail() -> None:
        raise Outage("gone")

    tier.fault = fail
    assert store(tier, [memory.filled(label("a"))]) == [State.DROPPED]
    stats = tier.stats()
    assert (stats.outages, stats.dropped, stats.backing_off) == (1, 1, True)
    assert load(tier, [memory.blank(label("a"))]) == [State.MISSING]  # stores rest, loads are tried
    assert tier.did[-1][0] == "load"
    assert load(tier, [memory.blank(label("a"))]) == [State.MISSING]  # now they rest too
    assert len(tier.did) == 2
    tier.fault = lambda: None
    clock.now += REST_S
    assert not tier.stats().backing_off
    assert store(tier, [memory.filled(label("a"))]) == [State.DONE]


class Panic(BaseException):
    """What a library in Rust throws is no Exception."""


FAULTS = [OSError(5, "broken"), ZeroDivisionError("bug"), Panic("bug"), SystemExit(1)]


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_a_failure_is_that_records_and_a_rest_takes_several(
    tier: Shelf, memory: Memory, clock: Clock, error: BaseException
) -> None:
    """A bug of a tier too: it is logged, and costs no more than its record. No thread ends."""
    labels, fails = chain("a", 2 * FAILURES), set[str]()
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * len(labels)

    def fail() -> None:
        if tier.did[-1][1].digest.hex() in fails:
            raise error

    tier.fault = fail
    fails.add(labels[0].digest.hex())
    for _ in range(3 * RECENT):  # the same one, again and again, and nothing else
        assert load(tier, [memory.blank(labels[0])]) == [State.MISSING]
    stats = tier.stats()
    assert (stats.outages, stats.misses, stats.backing_off) == (3 * RECENT, 3 * RECENT, False)
    for each in labels[1:]:
        assert load(tier, [memory.blank(each)]) == [State.DONE]
    fails.update(each.digest.hex() for each in labels)
    for each in labels[:FAILURES]:
        assert not tier.stats().backing_off
        assert load(tier, [memory.blank(each)]) == [State.MISSING]
    for each in labels[1 : RECENT - FAILURES]:
        load(tier, [memory.blank(each)])
    assert tier.stats().backing_off
    done = len(tier.did)
    assert load(tier, [memory.blank(labels[1])]) == [State.MISSING]
    assert len(tier.did) == done  # nothing is asked of it
    fails.clear()
    clock.now += REST_S
    assert load(tier, [memory.blank(labels[0])]) == [State.DONE]
    assert store(tier, [memory.filled(label("b"))]) == [State.DONE]


def test_a_few_failures_among_many_calls_are_no_outage(tier: Shelf, memory: Memory) -> None:
    """One call in four, of records that are all different."""
    labels = chain("a", 80)

    def fail() -> None:
        if len(tier.did) % 4 == 0:
            raise OSError(503, "slow down")

    tier.fault = fail
    for each in labels:
        store(tier, [memory.filled(each)])
        assert not tier.stats().backing_off
    assert tier.stats().outages == 20
    assert len(tier.kept) == 60


def test_a_tier_that_fails_from_the_start_rests_after_a_few_records(
    tier: Shelf, memory: Memory, clock: Clock
) -> None:
    def fail() -> None:
        raise OSError(5, "broken")

    tier.fault = fail
    for nth, each in enumerate(chain("a", 10)):
        assert tier.stats().backing_off == (nth >= FAILURES)
        assert store(tier, [memory.filled(each)]) == [State.DROPPED]
    assert len(tier.did) == FAILURES
    clock.now += REST_S
    for each in chain("b", 3):
        store(tier, [memory.filled(each)])
    assert len(tier.did) == FAILURES + 1  # one look, and it rests again


class Ordered(Shelf):
    """Keeps what it is told of uses and removals."""

    keeps_order = True

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.used: list[list[Label]] = []
        self.told: list[Sequence[Label]] = []

    def _use(self, uses: Sequence[Sequence[Label]]) -> None:
        self.used.append([labels[0] for labels in uses])
        self.told += uses


def test_a_stored_block_costs_the_same_whatever_was_stored_before_it(memory: Memory) -> None:
    """A use of the last block is told alone, and what waits to be told is one block of a prompt
    and bounded over all of them, on a tier that hangs too."""
    tier = Ordered(Limits(threads=2, queued_bytes=1 << 30))
    labels = chain("a", 50)
    for each in labels:
        assert store(tier, [memory.filled(each)]) == [State.DONE]
    until(lambda: not tier._uses)
    assert sum(map(len, tier.used)) <= len(labels)
    assert tier.used[-1] == [labels[-1]]
    until(lambda: not tier._later and not tier._running)
    tier.used.clear()
    tier.gate.clear()
    while tier.entered.acquire(blocking=False):
        pass
    hangs = tier.store([memory.filled(label("hangs"))])
    tier.entered.acquire()
    for nth in range(3 * MOST_TIDIED):
        tier.use([label(("other", nth))])
        tier.use(labels)
        tier.drop([label(("gone", nth)).key])
    assert len(tier._uses) <= MOST_TIDIED
    assert len(tier._drops) <= MOST_TIDIED
    assert len(tier._later) == 1
    tier.gate.set()
    wait(tier, hangs)
    until(lambda: bool(tier.used))
    assert labels[-1] in tier.used[0]
    assert labels[-2] not in tier.used[0]
    tier.close(5.0)


@pytest.mark.parametrize(
    ("blocks", "told"),
    [(1, [0]), (2, [1, 0]), (9, [8, 7, 6, 4, 2, 1, 0]), (1000, None)],
)
def test_a_use_of_a_prompt_tells_some_of_its_blocks(blocks: int, told: list[int] | None) -> None:
    """However many a tier has of them, it is told of one that is not far from the last of those."""
    tier, labels = Ordered(Limits()), chain("a", blocks)
    tier.use(labels)
    until(lambda: bool(tier.told))
    (found,) = (list(map(labels.index, each)) for each in tier.told)
    if told is not None:
        assert found == told
    assert len(found) <= 2 * (blocks.bit_length() + 1)
    for held in range(blocks):
        nearest = next(each for each in found if each <= held)
        assert held - nearest <= min(blocks - 1 - held, (held + 1) // 2)
    tier.close(5.0)


def test_an_answer_of_the_wrong_length_costs_no_thread(tier: Shelf, memory: Memory) -> None:
    tier._look = lambda labels: []  # type: ignore[method-assign]
    for _ in range(3):
        assert found(tier, [label("a")]) == [False]
    assert store(tier, [memory.filled(label("a"))]) == [State.DONE]


def test_a_long_ticket_is_cancelled_in_one_pass(memory: Memory) -> None:
    tier = Shelf(Limits(threads=1))
    tier.gate.clear()
    record = memory.blank(label("a"))
    first = tier.load([record])
    tier.entered.acquire()
    other = tier.load([record] * 30_000)
    ticket = tier.load([record] * 30_000)
    begin = time.thread_time()
    tier.cancel(ticket)
    assert time.thread_time() - begin < 1.0  # by pairs it is several
    assert tier.poll(ticket).settled
    assert [len(tier._first), tier._queued_loads] == [30_000, 30_000]
    tier.cancel(other)
    tier.gate.set()
    assert states(wait(tier, first)) == [State.MISSING]
    tier.close(5.0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_held", [False, True], ids=["idle", "locked"])
def test_a_fork_of_the_process_refuses_every_call(
    tier: Shelf, memory: Memory, is_held: bool
) -> None:
    """Its threads are not there, and a lock that another thread had would be waited for."""
    assert store(tier, [memory.filled(label("a"))]) == [State.DONE]
    ticket = tier.load([memory.blank(label("a"))])
    wait(tier, ticket)
    record = memory.blank(label("b"))
    calls: list[Callable[[], object]] = [
        lambda: tier.lookup([label("a")]),
        lambda: tier.load([record]),
        lambda: tier.store([record]),
        lambda: tier.poll(ticket),
        lambda: tier.cancel(ticket),
        lambda: tier.drop([record.key]),
        lambda: tier.stats(),
        lambda: tier.close(1.0),
    ]
    done, entered = threading.Event(), threading.Event()

    def hold() -> None:
        with tier._lock:
            entered.set()
            done.wait(30.0)

    holder = threading.Thread(target=hold)
    if is_held:
        holder.start()
        entered.wait()
    child = os.fork()
    if not child:
        refused = 0
        try:
            signal.alarm(20)  # a call that waits ends the child
            for call in calls:
                try:
                    call()
                except CopyError as error:
                    refused += f"process {os.getppid()}" in str(error)
        finally:
            os._exit(refused)
    _, status = os.waitpid(child, 0)
    done.set()
    if is_held:
        holder.join()
    assert os.waitstatus_to_exitcode(status) == len(calls)
    assert load(tier, [memory.blank(label("a"))]) == [State.DONE]  # here nothing has changed


def test_cancel_ends_what_waits_and_settles_it(tier: Shelf, memory: Memory) -> None:
    labels = chain("a", 6)
    tier.gate.clear()
    ticket = tier.load([memory.blank(each) for each in labels])
    tier.entered.acquire()
    tier.entered.acquire()
    tier.cancel(ticket)
    progress = tier.poll(ticket)
    assert states(progress) == [State.MISSING] * 6
    assert not progress.settled  # two run
    tier.gate.set()
    until(lambda: tier.poll(ticket).settled)
    assert len(tier.did) == 2
    assert not tier.stats().backing_off
    assert tier.stats().late == 0


def test_drop_forgets(tier: Shelf, memory: Memory) -> None:
    wanted = label("a")
    assert store(tier, [memory.filled(wanted)]) == [State.DONE]
    tier.drop([wanted.key])
    until(lambda: not tier.kept)


def test_close_finishes_what_waits(memory: Memory) -> None:
    tier, labels = Shelf(Limits()), chain("a", 6)
    ticket = tier.store([memory.filled(each) for each in labels])
    tier.close(60.0)
    assert states(tier.poll(ticket)) == [State.DONE] * 6
    assert tier.ended
    until(lambda: not has_threads("shelf"))  # another test's may be about to end
    assert load(tier, [memory.blank(labels[0])]) == [State.MISSING]
    assert store(tier, [memory.filled(label("b"))]) == [State.DROPPED]
    tier.drop([labels[0].key])
    tier.close(5.0)


def test_close_does_not_wait_for_ever(memory: Memory) -> None:
    tier, labels = Shelf(Limits(threads=1)), chain("a", 3)
    tier.gate.clear()
    ticket = tier.store([memory.filled(each) for each in labels])
    tier.entered.acquire()
    tier.close(0.1)  # the call that runs does not return
    assert states(tier.poll(ticket)) == [State.PENDING] + [State.DROPPED] * 2
    assert not tier.ended  # a call still uses what would be closed
    tier.gate.set()
    until(lambda: tier.poll(ticket).settled)


def has_threads(name: str) -> bool:
    return any(thread.name.startswith(f"dsv4-{name}-") for thread in threading.enumerate())


def test_a_tier_that_is_dropped_ends_its_threads(memory: Memory) -> None:
    """Without `close`, and whatever it did before: an error, a removal, a use."""
    tier: Shelf | None = Ordered(Limits(threads=3))
    assert tier is not None
    over, labels = tier._over, chain("a", 6)
    assert store(tier, [memory.filled(each) for each in labels]) == [State.DONE] * 6
    tier.use(labels)
    tier.drop([labels[0].key])

    def fail() -> None:
        raise OSError(5, "broken")

    tier.fault = fail
    assert load(tier, [memory.blank(labels[1])]) == [State.MISSING]
    assert has_threads("shelf")
    tier = None
    until(lambda: gc.collect() >= 0 and over.is_set() and not has_threads("shelf"))


def test_a_tier_that_is_dropped_while_it_works_ends_when_the_call_is_over(memory: Memory) -> None:
    tier: Shelf | None = Shelf(Limits(threads=2))
    assert tier is not None
    gate, entered, over, kept = tier.gate, tier.entered, tier._over, tier.kept
    gate.clear()
    labels = chain("a", 2)
    records = [memory.filled(each) for each in labels]
    tier.store(records)
    entered.acquire()
    tier = None
    gc.collect()
    assert not over.is_set()
    assert has_threads("shelf")
    gate.set()
    until(lambda: over.is_set() and not has_threads("shelf"))
    assert labels[0].key in kept


def test_many_threads_may_call(memory: Memory) -> None:
    tier = Shelf(Limits(threads=3))
    labels = [chain(name, 20) for name in range(4)]
    failures: list[object] = []

    def work(mine: list[Label]) -> None:
        own = Memory(1 << 20)
        if store(tier, [own.filled(each) for each in mine]) != [State.DONE] * 20:
            failures.append("store")
        records = [own.blank(each) for each in mine]
        if load(tier, records) != [State.DONE] * 20:
            failures.append("load")
        if [payload_in(record) for record in records] != [payload_of(each) for each in mine]:
            failures.append("bytes")

    threads = [threading.Thread(target=work, args=(mine,)) for mine in labels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tier.stats().hits == 80
    tier.close(1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("threads", 0), ("threads", 1.5), ("queued_bytes", -1), ("queued_loads", "many")),
        *(("deadline_s", 0), ("back_off_s", -1.0), ("deadline_s", None), ("deadline_s", "5")),
        *(("back_off_s", math.nan), ("deadline_s", math.inf), ("back_off_s", True)),
    ],
)
def test_limits_are_positive_numbers(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput, match=field):
        Limits(**{field: value})


@pytest.mark.parametrize("arguments", [("shelf", 3), ("shelf", None), (7, Limits())])
def test_names_and_limits_are_of_their_type(arguments: tuple[Any, Any]) -> None:
    class Named(Shelf):
        def __init__(self, name: Any, limits: Any) -> None:
            QueuedTier.__init__(self, name, limits)

    with pytest.raises(InvalidInput, match=r"name is int|limits is"):
        Named(*arguments)


def test_the_time_that_close_waits_is_a_number(tier: Shelf) -> None:
    with pytest.raises(InvalidInput, match="timeout_s=None"):
        tier.close(None)  # type: ignore[arg-type]
    tier.close(math.inf)
    assert tier.ended
