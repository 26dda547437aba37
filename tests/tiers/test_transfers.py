"""A manager and its tiers: what was cached comes back, with the bytes of a cold run, or not at all.

Every test compares with the same tokens computed alone. Arenas start poisoned, so that a byte that
nobody wrote is seen."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, periodic, zero
from dsv4.cache.transfers.fetch import Fetch
from dsv4.errors import InvalidInput, ThreadError
from dsv4.model import ModelSpec
from dsv4.tiers.host import HostTier
from tests.support.lives import Text, run_to
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
    assert sum(tier.loaded_bytes for tier in stats.tiers) >= 5 * SCHEMA.block_bytes
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
    assert stack.manager.stats().tiers[1].loaded_bytes > 5 * SCHEMA.block_bytes
    second.close(TIMEOUT_S)


def test_what_v41_stored_comes_back(tmp_path: Path):
    """Written through while it runs, evicted, fetched: entries of four owners, windows of all
    layers, no pair that waits at a block's end."""
    places = Places("host and disk", tmp_path)
    stack = stack_with(places.tiers, drafts=2, model=ModelSpec.preset("v41-tiny"))
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
    assert stats.tiers[0].loaded_bytes >= 3 * stack.schema.block_bytes
    assert stats.transfers is not None
    assert stats.transfers.records_dropped == stats.transfers.records_refused == 0
    stack.manager.check_invariants()
    places.close()


def test_blocks_in_flight_are_nobodys(tmp_path: Path):
    tier = disk(tmp_path)
    stack = stack_with([tier], num_blocks=7)
    text, other = Text.random(stack, 3, 900), Text.random(stack, 4, 900)
    keep(stack, text, 700)
    empty(stack)
    fetch = stack.manager.fetch(text.ids[:700])
    seen = set()
    while not fetch.poll():
        stats = stack.manager.stats()
        parts = (stats.blocks_free, stats.blocks_live, stats.blocks_cached, stats.blocks_in_flight)
        assert sum(parts) == stats.blocks_total == 7
        assert stats.blocks_cached == stats.blocks_live == 0  # nothing is indexed before all came
        seen.add(stats.blocks_in_flight)
        stack.manager.check_invariants()
        if stats.blocks_in_flight:
            assert not stack.manager.can_admit(other.ids[:300])
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
    stack.manager.evict(2)
    fetch = stack.manager.fetch(text.ids[:700])
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
    fetch = stack.manager.fetch(text.ids[:700])
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
        fetch = stack.manager.fetch(text.ids[:700])
        for _ in range(polls):
            fetch.poll()
        fetch.cancel()
        assert fetch.done
        while stack.manager.stats().transfers.fetches_open:  # type: ignore[union-attr]
            assert stack.manager.drain_tiers(TIMEOUT_S)
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
    manager.suspend(run(stack, text, 300))
    assert manager.drain_tiers(TIMEOUT_S)
    empty(stack)
    before = manager.stats()
    wait_for, is_over = manager._wait_for, threading.Event()
    other = threading.Thread(target=_stay_inside, args=(manager, is_over))

    def wait_meanwhile(fetch: Fetch, timeout_s: float) -> None:
        if waited:
            wait_for(fetch, timeout_s)
        other.start()
        while manager.guard.call != "commit":
            time.sleep(0.001)
        if not waited:
            wait_for(fetch, timeout_s)

    monkeypatch.setattr(manager, "_wait_for", wait_meanwhile)
    with pytest.raises(ThreadError):
        manager.resume_request(text.ids, timeout_s=TIMEOUT_S)
    monkeypatch.undo()
    is_over.set()
    other.join()
    assert manager.transfers is not None
    host = manager.transfers.host
    manager.evict()
    until = time.monotonic() + TIMEOUT_S
    while manager.stats().transfers.fetches_open and time.monotonic() < until:  # type: ignore[union-attr]
        manager.drain_tiers(0)
    after = manager.stats()
    assert (after.blocks_in_flight, after.blocks_free) == (0, before.blocks_free)
    assert host._extents.free_units * 4096 == host.region.memory.nbytes
    again = manager.resume_request(text.ids, timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.length) == ("state", 300)
    assert_like_cold(stack, again, text)
    tier.close(TIMEOUT_S)


class Broken:
    """A tier that does not keep the promise that no call raises."""

    def __init__(self, tier: HostTier) -> None:
        self._tier, self.raises, self.name = tier, "", "broken"

    def __getattr__(self, call: str) -> Any:
        if call == self.raises:
            raise RuntimeError(f"no {call} today")
        return getattr(self._tier, call)


@pytest.mark.parametrize("call", ["lookup", "load", "poll", "cancel", "store"])
def test_a_tier_that_raises_is_a_miss(call: str):
    tier = Broken(HostTier(8 << 20))
    stack = stack_with([tier])
    manager, text = stack.manager, Text.random(stack, 3, 300)
    keep(stack, text, 200)
    empty(stack)
    keep(stack, text, 150)  # the first block stays cached, and is pinned by the fetch
    tier.raises = call
    request = manager.admit_fetched(text.ids[:300], timeout_s=TIMEOUT_S)
    run_to(stack, request, text, 300)
    assert_like_cold(stack, request, text)
    manager.release_request(request)
    assert manager.drain_tiers(TIMEOUT_S)
    tier.raises = ""
    manager.evict()
    stats = manager.stats()
    assert stats.transfers is not None
    assert (stats.blocks_free, stats.transfers.fetches_open) == (stats.blocks_total, 0)
    keep(stack, text, 300)
    empty(stack)
    assert manager.admit_fetched(text.ids[:300], timeout_s=TIMEOUT_S).resume.start == 256
    manager.check_invariants()


def _stay_inside(manager: KVCacheManager, is_over: threading.Event) -> None:
    manager.guard.enter("commit")
    is_over.wait(TIMEOUT_S)
    manager.guard.leave()


def test_what_a_tier_has_is_evicted_first():
    tier = HostTier(8 << 20)
    stack = stack_with([tier], num_blocks=8)
    kept, lost = Text.random(stack, 9, 400), Text.random(stack, 10, 400)
    assert stack.manager.transfers is not None
    tier.close(TIMEOUT_S)  # stores nothing more
    stack.manager.release_request(run(stack, lost, 300))
    stack.manager.drain_tiers(TIMEOUT_S)
    assert stack.manager.prefix is not None
    old = list(stack.manager.prefix.index.nodes())
    stack.manager.release_request(run(stack, kept, 300))
    new = [node for node in stack.manager.prefix.index.nodes() if node not in old]
    for node in new:
        node.stored = True
    assert not any(node.stored for node in old)
    assert stack.manager.evict(2) == 2
    assert set(stack.manager.prefix.index.nodes()) == set(old)
    assert stack.manager.evict(3) == 2
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
        with pytest.raises(InvalidInput, match="is no tier"):
            KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, prefix=options(), tiers=[odd])
    without = KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, prefix=options())
    with pytest.raises(InvalidInput, match="has no tiers"):
        without.fetch([1, 2, 3])
