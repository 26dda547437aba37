"""A manager and its tiers: what was cached comes back, with the bytes of a cold run, or not at all.

Every test compares with the same tokens computed alone. Arenas start poisoned, so that a byte that
nobody wrote is seen."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import PageForm
from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, periodic, zero
from dsv4.cache.transfers.aside import MOST_ASKED, Aside
from dsv4.cache.transfers.fetch import Fetch
from dsv4.errors import CopyError, InvalidInput, ThreadError
from dsv4.model import ModelSpec
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind
from tests.support.lives import Text, run_to
from tests.support.stack import PAGE_FORMS, readable_bytes
from tests.support.tiered import (
    BLOCK,
    SCHEMA,
    TIMEOUT_S,
    Places,
    assert_like_cold,
    disk,
    empty,
    keep,
    options,
    run,
    stack_with,
)
from tests.support.tiers import label, until


@pytest.fixture(params=["host", "disk", "host and disk"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    made = Places(request.param, tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("policy", [full(), periodic(256), zero()], ids=["full", "256", "zero"])
def test_what_was_evicted_comes_back_with_the_same_bytes(places: Places, policy: SnapshotPolicy):
    stack = stack_with(places.tiers, prefix=options(policy))
    text = Text.random(stack, 1, 900)
    keep(stack, text, 700)
    empty(stack)
    request = run(stack, text, 700)
    assert request.resume.reused_tokens == 5 * BLOCK
    if policy != zero():
        assert (request.resume.source, request.resume.start) == ("snapshot", 5 * BLOCK)
    assert_like_cold(stack, request, text)
    run_to(stack, request, text, 850)
    assert_like_cold(stack, request, text)
    stats = stack.manager.stats()
    assert sum(tier.loaded_bytes for tier in stats.tiers) >= 5 * SCHEMA.bytes.block
    assert stats.transfers is not None
    assert stats.transfers.tokens_fetched == 5 * BLOCK
    assert stats.transfers.records_dropped == stats.transfers.records_refused == 0
    stack.manager.check_invariants()


@pytest.mark.parametrize(("before", "after"), [(0, 0), (0, 3), (3, 0), (7, 2)])
def test_a_new_process_with_other_drafts_goes_on_where_the_old_one_was(
    tmp_path: Path, before: int, after: int
):
    first = disk(tmp_path)
    stack = stack_with([first], drafts=before)
    text = Text.random(stack, 2, 900)
    keep(stack, text, 650)
    first.close(TIMEOUT_S)
    second = disk(tmp_path)
    stack = stack_with([HostTier(4 << 20), second], drafts=after)
    request = run(stack, text, 650)
    assert (request.resume.source, request.resume.start) == ("snapshot", 5 * BLOCK)
    run_to(stack, request, text, 800)
    assert_like_cold(stack, request, text)
    assert stack.manager.stats().tiers[1].loaded_bytes > 5 * SCHEMA.bytes.block
    second.close(TIMEOUT_S)


@pytest.mark.parametrize("form", PAGE_FORMS)
def test_what_v41_stored_comes_back(tmp_path: Path, form: PageForm):
    """Written through while it runs, evicted, fetched: entries of four owners, windows of all
    layers, no pair that waits at a block's end."""
    places = Places("host and disk", tmp_path)
    stack = stack_with(places.tiers, drafts=2, model=ModelSpec.preset("v41-tiny"), form=form)
    text = Text.random(stack, 6, 500)
    keep(stack, text, 400)
    for length in (301, 400):
        empty(stack)
        request = run(stack, text, length)
        blocks = (length - 1) // BLOCK
        assert (request.resume.source, request.resume.start) == ("snapshot", blocks * BLOCK)
        run_to(stack, request, text, length + 31, chunk=3)
        assert_like_cold(stack, request, text)
        stack.manager.release_request(request)
    stats = stack.manager.stats()
    assert stats.tiers[0].loaded_bytes >= 3 * stack.schema.bytes.block
    assert stats.transfers is not None
    assert stats.transfers.records_dropped == stats.transfers.records_refused == 0
    stack.manager.check_invariants()
    places.close()


def test_pages_of_another_form_are_not_found(tmp_path: Path):
    """Neither blocks and snapshots nor a suspended request: their bytes lie elsewhere."""
    tier, model = disk(tmp_path), ModelSpec.preset("v41-tiny")
    stacks = {form: stack_with([tier], model=model, form=form) for form in PAGE_FORMS}
    planes, whole = stacks["planes"], stacks["records"]
    text = Text.random(planes, 6, 500)
    keep(planes, text, 400)
    request = run(whole, text, 400)
    assert request.resume.source == "nothing"
    assert_like_cold(whole, request, text)
    whole.manager.release_request(request)
    assert whole.manager.tiers.drain(TIMEOUT_S)
    # each finds its own
    for length, stack, other in ((395, planes, whole), (390, whole, planes)):
        empty(stack)
        request = run(stack, text, length)
        assert (request.resume.source, request.resume.start) == ("snapshot", 3 * BLOCK)
        before = readable_bytes(stack, request)
        stack.manager.tiers.suspend(request)
        assert stack.manager.tiers.drain(TIMEOUT_S)
        empty(stack)
        again = other.manager.tiers.resume(text.ids[:length], timeout_s=TIMEOUT_S)
        assert again.resume.source != "state"
        other.manager.release_request(again)
        again = stack.manager.tiers.resume(text.ids[:length], timeout_s=TIMEOUT_S)
        assert again.resume.source == "state"
        for name, rows in readable_bytes(stack, again).items():
            assert rows.equal(before[name]), name
        stack.manager.release_request(again)
    tier.close(TIMEOUT_S)


def test_blocks_in_flight_are_nobodys(tmp_path: Path):
    tier = disk(tmp_path)
    stack = stack_with([tier], num_blocks=7)
    text, other = Text.random(stack, 3, 900), Text.random(stack, 4, 900)
    keep(stack, text, 700)
    empty(stack)
    fetch = stack.manager.tiers.fetch(text.ids[:700])
    seen = set()
    while not fetch.poll():
        stats = stack.manager.stats()
        parts = (stats.blocks_free, stats.blocks_live, stats.blocks_cached, stats.blocks_in_flight)
        assert sum(parts) == stats.blocks_total == 7
        assert stats.blocks_cached == stats.blocks_live == 0  # nothing is indexed before all came
        seen.add(stats.blocks_in_flight)
        stack.manager.check_invariants()
        if stats.blocks_in_flight:
            assert not stack.manager.room.can_admit(other.ids[:300])
    assert seen <= {0, 5}
    assert stack.manager.stats().blocks_in_flight == 0
    assert stack.manager.stats().blocks_cached == fetch.fetched_blocks == 5
    request = stack.manager.admit_request(text.ids[:700])
    run_to(stack, request, text, 700)
    assert_like_cold(stack, request, text)
    tier.close(TIMEOUT_S)


def test_only_what_is_not_cached_is_fetched(tmp_path: Path):
    tier = disk(tmp_path)
    stack = stack_with([tier])
    text = Text.random(stack, 5, 900)
    keep(stack, text, 700)
    stack.manager.prefix.evict(2)
    fetch = stack.manager.tiers.fetch(text.ids[:700])
    while not fetch.poll():
        pass
    assert (fetch.cached_blocks, fetch.fetched_blocks) == (3, 2)
    assert stack.manager.stats().blocks_pinned == 0
    request = run(stack, text, 700)
    assert_like_cold(stack, request, text)
    assert request.resume.start == 5 * BLOCK
    tier.close(TIMEOUT_S)


def test_a_pool_that_is_too_small_gets_the_start_of_a_prompt(tmp_path: Path):
    tier = disk(tmp_path)
    stack = stack_with([tier], num_blocks=12)
    text, busy = Text.random(stack, 6, 900), Text.random(stack, 7, 1200)
    keep(stack, text, 700)
    empty(stack)
    held = stack.manager.admit_request(9 * BLOCK)
    run_to(stack, held, busy.stream, 9 * BLOCK)
    fetch = stack.manager.tiers.fetch(text.ids[:700])
    while not fetch.poll():
        stack.manager.check_invariants()
    assert fetch.fetched_blocks == 3
    stack.manager.check_invariants()
    request = stack.manager.admit_request(text.ids[: 3 * BLOCK])
    run_to(stack, request, text, 3 * BLOCK)
    assert_like_cold(stack, request, text)
    tier.close(TIMEOUT_S)


def test_a_cancelled_fetch_leaves_nothing(tmp_path: Path):
    tier = disk(tmp_path)
    stack = stack_with([tier])
    text = Text.random(stack, 8, 900)
    keep(stack, text, 700)
    empty(stack)
    for polls in range(6):
        fetch = stack.manager.tiers.fetch(text.ids[:700])
        for _ in range(polls):
            fetch.poll()
        fetch.cancel()
        assert fetch.done
        while stack.manager.stats().transfers.fetches_open:  # type: ignore[union-attr]
            assert stack.manager.tiers.drain(TIMEOUT_S)
        stack.manager.check_invariants()
        stats = stack.manager.stats()
        assert (stats.blocks_in_flight, stats.blocks_pinned) == (0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        empty(stack)
    request = run(stack, text, 700)
    assert_like_cold(stack, request, text)
    tier.close(TIMEOUT_S)


@pytest.mark.parametrize("waited", [False, True], ids=["before it came", "after it came"])
def test_what_another_thread_keeps_from_being_admitted_does_not_stay_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited: bool
):
    tier = disk(tmp_path)
    stack = stack_with([tier])
    manager, text = stack.manager, Text.random(stack, 3, 300)
    manager.tiers.suspend(run(stack, text, 300))
    assert manager.tiers.drain(TIMEOUT_S)
    empty(stack)
    before = manager.stats()
    wait_for, is_over = manager.tiers._wait_for, threading.Event()
    other = threading.Thread(target=_stay_inside, args=(manager, is_over))

    def wait_meanwhile(fetch: Fetch, timeout_s: float) -> None:
        if waited:
            wait_for(fetch, timeout_s)
        other.start()
        while manager._parts.guard.call != "commit":
            time.sleep(0.001)
        if not waited:
            wait_for(fetch, timeout_s)

    monkeypatch.setattr(manager.tiers, "_wait_for", wait_meanwhile)
    with pytest.raises(ThreadError):
        manager.tiers.resume(text.ids, timeout_s=TIMEOUT_S)
    monkeypatch.undo()
    is_over.set()
    other.join()
    assert manager.tiers
    host = manager.tiers.host
    manager.prefix.evict()
    until = time.monotonic() + TIMEOUT_S
    # type: ignore[union-attr]
    while manager.stats().transfers.fetches_open and time.monotonic() < until:
        manager.tiers.drain(0)
    after = manager.stats()
    assert (after.blocks_in_flight, after.blocks_free) == (0, before.blocks_free)
    assert host._extents.free_units * 4096 == host.region.memory.nbytes
    again = manager.tiers.resume(text.ids, timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.length) == ("state", 300)
    assert_like_cold(stack, again, text)
    tier.close(TIMEOUT_S)


class Panic(BaseException):
    """What a library in Rust throws is no Exception."""


class Broken:
    """A tier that does not keep the promise that no call raises."""

    def __init__(self, tier: HostTier, error: type[BaseException]) -> None:
        self._tier, self._error, self.raises, self.name = tier, error, "", "broken"

    def __getattr__(self, call: str) -> Any:
        if call == self.raises:
            raise self._error(f"no {call} today")
        return getattr(self._tier, call)


@pytest.mark.parametrize("error", [RuntimeError, Panic])
@pytest.mark.parametrize("call", ["lookup", "load", "poll", "cancel", "store"])
def test_a_tier_that_raises_is_a_miss(call: str, error: type[BaseException]):
    tier = Broken(HostTier(8 << 20), error)
    stack = stack_with([tier])
    manager, text = stack.manager, Text.random(stack, 3, 300)
    keep(stack, text, 200)
    empty(stack)
    keep(stack, text, 150)  # the first block stays cached, and is pinned by the fetch
    tier.raises = call
    request = manager.tiers.admit(text.ids[:300], timeout_s=TIMEOUT_S)
    run_to(stack, request, text, 300)
    assert_like_cold(stack, request, text)
    manager.release_request(request)
    assert manager.tiers.drain(TIMEOUT_S)
    tier.raises = ""
    manager.prefix.evict()
    stats = manager.stats()
    assert stats.transfers is not None
    assert (stats.blocks_free, stats.transfers.fetches_open) == (stats.blocks_total, 0)
    keep(stack, text, 300)
    empty(stack)
    assert manager.tiers.admit(text.ids[:300], timeout_s=TIMEOUT_S).resume.start == 256
    manager.check_invariants()


WAITS_S = 60.0  # a call that waited for it would take far longer than a busy machine does


class Slow:
    """A tier whose calls wait, as behind a lock, until they may go on."""

    def __init__(self, tier: HostTier) -> None:
        self._tier, self.go_on, self.name = tier, threading.Event(), "slow"
        self.go_on.set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._tier, name)

        def slowly(*arguments: Any) -> Any:
            self.go_on.wait(WAITS_S)
            return call(*arguments)

        return slowly if name in ("lookup", "load", "poll", "cancel", "use") else call


def test_nobody_waits_for_calls_that_are_slow():
    """Neither a fetch nor its polls; `tiers.admit` for the time that it was given."""
    slow = Slow(HostTier(8 << 20))
    stack = stack_with([HostTier(8 << 20), slow], num_blocks=20)
    manager, text = stack.manager, Text.random(stack, 3, 900)
    keep(stack, text, 700)
    empty(stack)
    host = manager.tiers.host  # type: ignore[union-attr]
    host.drop(list(host._rows))
    while host.stats().held_records:
        time.sleep(0.001)
    slow.go_on.clear()
    longest = 0.0

    def timed(call: Callable[[], Any]) -> Any:
        nonlocal longest
        begin = time.perf_counter()
        answer = call()
        longest = max(longest, time.perf_counter() - begin)
        return answer

    fetch = timed(lambda: manager.tiers.fetch(text.ids[:700]))
    for _ in range(20):
        assert not timed(fetch.poll)
    timed(fetch.cancel)
    assert longest < WAITS_S / 2
    begin = time.perf_counter()
    request = manager.tiers.admit(text.ids[:700], timeout_s=0.05)
    assert time.perf_counter() - begin < WAITS_S / 2
    assert request.resume.start == 0  # it had no time: computed
    run_to(stack, request, text, 700)
    assert_like_cold(stack, request, text)
    manager.release_request(request)
    begin = time.perf_counter()
    manager.release_request(manager.admit_request(text.ids[:700]))  # a use, which tiers are told
    assert time.perf_counter() - begin < WAITS_S / 2
    slow.go_on.set()
    empty(stack)
    assert manager.tiers.drain(TIMEOUT_S)  # else what is still on its way comes back into the host
    host.drop(list(host._rows))
    until(lambda: not host.stats().held_records)
    request = run(stack, text, 700)  # and it has what it had
    assert request.resume.start == 5 * BLOCK
    assert slow.stats().hits > 0
    assert_like_cold(stack, request, text)
    slow.close(TIMEOUT_S)


def test_a_thread_that_asks_ends_with_who_asked():
    tier = HostTier(8 << 20, name="asked")

    def ask() -> None:
        aside = Aside(tier)
        asked = aside.lookup([label("a")])
        until(lambda: aside.poll(asked).settled)
        assert any(thread.name == "dsv4-asked" for thread in threading.enumerate())

    ask()
    gc.collect()
    until(lambda: not any(thread.name == "dsv4-asked" for thread in threading.enumerate()))
    tier.close(TIMEOUT_S)


def test_a_tier_is_asked_for_so_much_at_once():
    """One that hangs: the rest is missing at once, and what was given up is never asked."""
    slow = Slow(HostTier(8 << 20))
    slow.go_on.clear()
    aside = Aside(slow)  # type: ignore[arg-type]
    asked = [aside.lookup([label(nth)]) for nth in range(MOST_ASKED + 10)]
    assert sum(aside.poll(each).settled for each in asked) >= 9
    for each in asked:
        aside.cancel(each)
    slow.go_on.set()
    until(lambda: all(aside.poll(each).settled for each in asked))


def test_what_is_hit_on_the_device_is_the_last_to_go_below(tmp_path: Path):
    """A prompt that never leaves the device, while others pass through a small host tier."""
    host = HostTier(9 * (SCHEMA.bytes.block + 8192) + (2 << 20))
    stack = stack_with([host], num_blocks=40, max_requests=2)
    manager, hot = stack.manager, Text.random(stack, 1, 600)
    keep(stack, hot, 500)
    assert manager.tiers
    labels = manager.tiers.labels
    trail = manager.prefix.prompt(hot.ids[:500]).trail
    assert trail is not None
    for nth in range(2, 14):
        request = manager.admit_request(hot.ids[:500])
        assert request.resume.source == "snapshot"
        manager.release_request(request)
        keep(stack, Text.random(stack, nth, 300), 300)
    names = [labels.of_block(trail, n).key for n in range(3)]
    names.append(labels.of_block(trail, 2, Kind.SNAPSHOT).key)
    assert [host.holds(key) for key in names] == [True] * 4
    assert host._lost  # others had to go
    empty(stack)
    request = run(stack, hot, 500)
    assert (request.resume.source, request.resume.start) == ("snapshot", 3 * BLOCK)
    assert_like_cold(stack, request, hot)
    host.close(TIMEOUT_S)


def test_what_cannot_be_kept_holds_up_nobody():
    """Blocks behind one that had no room, in front of others that have."""
    host = HostTier(4 * (SCHEMA.bytes.block + 8192))
    stack = stack_with([host], num_blocks=20, prefix=options(zero()))
    manager, text = stack.manager, Text.random(stack, 1, 2000)
    keep(stack, text, 12 * BLOCK)
    tiers = manager.tiers
    assert tiers
    before = manager.stats().transfers.records_dropped  # type: ignore[union-attr]
    assert before > 0
    somebody = SimpleNamespace(done=False)  # holds rows, or may
    tiers.fetches.open.append(somebody)  # type: ignore[arg-type]
    request = manager.admit_request(text.ids[: 14 * BLOCK])
    run_to(stack, request, text, 14 * BLOCK)
    assert not tiers.offload.outbox
    assert manager.stats().transfers.records_dropped - before == 2  # type: ignore[union-attr]
    tiers.fetches.open.remove(somebody)  # type: ignore[arg-type]
    manager.release_request(request)
    host.close(TIMEOUT_S)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_of_the_process_does_not_wait_for_threads_that_are_not_there(tmp_path: Path):
    """What asks tiers for something is refused. Admissions and steps go on, without them: before,
    they raised after they had happened, and left a request that nobody had."""
    tier = disk(tmp_path)
    stack = stack_with([HostTier(8 << 20), tier])
    manager, text = stack.manager, Text.random(stack, 3, 400)
    keep(stack, text, 300)
    worker = manager.tiers.route.worker  # type: ignore[union-attr]
    worker._lock.acquire()  # as if its thread had it
    child = os.fork()
    if not child:
        held_up = 0
        try:
            signal.alarm(60)
            for call in (
                lambda: manager.tiers.drain(5.0),
                manager.stats,
                lambda: manager.tiers.fetch(text.ids[:300]),
                lambda: manager.tiers.admit(text.ids[:300], timeout_s=5.0),
            ):
                try:
                    call()
                except CopyError:
                    held_up += 1
            assert not manager.requests
            request = manager.admit_request(text.ids[:300])  # a use, which tiers are told
            assert request.resume.reused_tokens == 2 * BLOCK
            run_to(stack, request, text, 390)  # a block that they would be given
            assert manager.tiers.offload.dropped == 1  # type: ignore[union-attr]
            assert_like_cold(stack, request, text)
            manager.release_request(request)
            manager.check_invariants()
            held_up += 10
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(held_up)
    _, status = os.waitpid(child, 0)
    worker._lock.release()
    assert os.waitstatus_to_exitcode(status) == 14
    assert manager.tiers.drain(TIMEOUT_S)
    assert_like_cold(stack, run(stack, text, 300), text)
    tier.close(TIMEOUT_S)


def test_labels_of_blocks_are_made_when_they_are_looked_at():
    stack = stack_with([HostTier(8 << 20)])
    assert stack.manager.tiers
    labels = stack.manager.tiers.labels
    trail = stack.manager.prefix.prompt(Text.random(stack, 1, 700).ids).trail
    assert trail is not None
    blocks = labels.of_blocks(trail, 4)
    assert list(blocks) == [labels.of_block(trail, n) for n in range(4)]
    assert (blocks[-1], blocks[1:3]) == (blocks[3], [blocks[1], blocks[2]])
    with pytest.raises(IndexError):
        blocks[4]
    asked = []
    made = labels.make
    # type: ignore[method-assign,func-returns-value]
    labels.make = lambda *label: asked.append(label) or made(*label)
    stack.manager.tiers.host.use(labels.of_blocks(trail, 5))
    assert len(asked) <= 4


def test_a_prompt_that_is_longer_than_host_memory_comes_back_as_far_as_that_goes():
    """Of 15 blocks in a host tier for 12 none could be used again."""
    host = HostTier(12 * (SCHEMA.bytes.block + 8192))
    stack = stack_with([host], num_blocks=18, prefix=options(zero()))
    text = Text.random(stack, 1, 2000)
    keep(stack, text, 15 * BLOCK + 1)
    empty(stack)
    fetch = stack.manager.tiers.fetch(text.ids[: 15 * BLOCK + 1])
    while not fetch.poll():
        pass
    assert fetch.fetched_blocks == host.stats().held_records
    assert fetch.fetched_blocks >= 11
    host.close(TIMEOUT_S)


def _stay_inside(manager: KVCacheManager, is_over: threading.Event) -> None:
    manager._parts.guard.enter("commit")
    is_over.wait(TIMEOUT_S)
    manager._parts.guard.leave()


def test_what_a_tier_has_is_evicted_first():
    tier = HostTier(8 << 20)
    stack = stack_with([tier], num_blocks=8)
    kept, lost = Text.random(stack, 9, 400), Text.random(stack, 10, 400)
    assert stack.manager.tiers
    tier.close(TIMEOUT_S)  # stores nothing more
    stack.manager.release_request(run(stack, lost, 300))
    stack.manager.tiers.drain(TIMEOUT_S)
    assert stack.manager._parts.prefix
    old = list(stack.manager._parts.prefix.index.nodes())
    stack.manager.release_request(run(stack, kept, 300))
    new = [node for node in stack.manager._parts.prefix.index.nodes() if node not in old]
    for node in new:
        node.stored = True
    assert not any(node.stored for node in old)
    assert stack.manager.prefix.evict(2) == 2
    assert set(stack.manager._parts.prefix.index.nodes()) == set(old)
    assert stack.manager.prefix.evict(3) == 2
    stack.manager.check_invariants()


def test_tiers_need_a_prefix_cache_and_the_name_of_the_weights():
    tier = HostTier(1 << 20)
    with pytest.raises(InvalidInput, match="tiers keep prefixes"):
        KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, tiers=[tier])
    with pytest.raises(InvalidInput, match="which weights"):
        KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, prefix=PrefixOptions(), tiers=[tier])
    with pytest.raises(InvalidInput, match="two host tiers"):
        KVCacheManager(
            SCHEMA,
            num_blocks=4,
            max_requests=1,
            prefix=options(),
            tiers=[tier, HostTier(1 << 20, name="other")],
        )
    for odd in (3, None, "disk", object()):
        with pytest.raises(InvalidInput, match="is not a tier"):
            KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, prefix=options(), tiers=[odd])
    without = KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, prefix=options())
    with pytest.raises(InvalidInput, match="has no tiers"):
        without.tiers.fetch([1, 2, 3])
