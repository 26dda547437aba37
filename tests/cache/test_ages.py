"""How old blocks become: what the histograms count, with a clock that the test moves."""

from __future__ import annotations

import pytest

from dsv4 import KVCacheManager, Quota, Quotas
from dsv4.cache.prefix.ages import BOUNDS_S, Seconds
from dsv4.metrics import prometheus_text
from tests.cache.test_quotas import BLOCK, cache_of, keep, prompt_of, run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    return [1000.0]


def aged(clock: list[float], blocks: int = 8) -> KVCacheManager:
    manager = cache_of(blocks)
    assert manager._parts.prefix
    manager._parts.prefix.index.ages.now = lambda: clock[0]
    return manager


def counted(manager: KVCacheManager) -> tuple[dict[float, int], dict[float, int], dict[float, int]]:
    """By the bound: lifetimes, idle times, gaps."""
    stats = manager.stats().prefix
    assert stats is not None
    found = []
    for each in (stats.block_lifetime_s, stats.block_idle_s, stats.block_gap_s):
        bounds = (*each.bounds, float("inf"))
        found.append({b: n for b, n in zip(bounds, each.counts, strict=True) if n})
    return found[0], found[1], found[2]


def test_a_block_is_idle_from_the_end_of_the_request_that_used_it_last(clock: list[float]) -> None:
    manager = aged(clock)
    ids = prompt_of(1, 2 * BLOCK)
    request = manager.admit_request(ids)
    run(manager, request, ids)
    clock[0] += 50  # while it runs
    manager.release_request(request)
    clock[0] += 4
    assert manager.prefix.evict(2) == 2
    assert counted(manager) == ({60.0: 2}, {5.0: 2}, {})
    stats = manager.stats().prefix
    assert stats is not None
    assert (stats.block_lifetime_s.total, stats.block_idle_s.total) == (108.0, 8.0)


def test_every_block_of_a_hit_has_a_gap_since_its_own_last_admission(clock: list[float]) -> None:
    manager = aged(clock)
    keep(manager, 1, 4 * BLOCK, None)
    clock[0] += 10
    short = prompt_of(1, 2 * BLOCK + 1)  # finds two blocks
    manager.release_request(manager.admit_request(short))
    clock[0] += 100
    manager.release_request(manager.admit_request(prompt_of(1, 4 * BLOCK + 1)))
    _, _, gaps = counted(manager)
    assert gaps == {15.0: 2, 300.0: 4}
    stats = manager.stats().prefix
    assert stats is not None
    assert stats.block_gap_s.total == 2 * 10 + 2 * 100 + 2 * 110


def test_a_clock_that_goes_back_counts_as_no_time(clock: list[float]) -> None:
    manager = aged(clock)
    keep(manager, 1, BLOCK, None)
    clock[0] -= 500
    manager.release_request(manager.admit_request(prompt_of(1, BLOCK + 1)))
    manager.prefix.evict(8)
    lifetimes, idle, gaps = counted(manager)
    assert (lifetimes, idle, gaps) == ({0.1: 1}, {0.1: 1}, {0.1: 1})


def test_bounds_belong_to_the_bucket_below_them() -> None:
    seconds = Seconds()
    for each in (0.0, BOUNDS_S[0], BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        seconds.add(each)
    counts = seconds.read().counts
    assert (counts[0], counts[-2], counts[-1], sum(counts)) == (2, 1, 1, 4)


def test_metrics_have_them_and_the_quotas(clock: list[float]) -> None:
    manager = aged(clock)
    quotas, size = Quotas(manager), manager.schema.bytes.block
    for salt in ("a", "", None):
        quotas.set(salt, Quota(device_bytes=3 * size))
    quotas.set("no limit", Quota())
    keep(manager, 1, 2 * BLOCK, "a")
    clock[0] += 20
    keep(manager, 2, 3 * BLOCK, "a")  # both of the first go
    text = prometheus_text(manager)
    assert 'dsv4_kv_block_lifetime_seconds_bucket{le="15"} 0.0' in text
    assert 'dsv4_kv_block_lifetime_seconds_bucket{le="60"} 2.0' in text
    assert "dsv4_kv_block_lifetime_seconds_sum 40.0" in text
    assert "dsv4_kv_block_reuse_gap_seconds_count 0.0" in text
    used = 'dsv4_quota_bytes{place="device",salt="a",what="used"}'
    assert f"{used} {float(3 * size)}" in text
    assert text.count('what="limit"') == 3
    assert "no limit" not in text
