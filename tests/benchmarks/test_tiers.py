"""The benchmark of tiers runs, at a size for a CPU, and measures what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import tiers
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.planner import plan_tier

TINY = replace(ModelSpec.preset("tiny"), max_context=1024)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(tiers, "REPEATS", 1)
    monkeypatch.setattr(tiers, "CHUNK", 128)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("way", ["down", "up"])
def test_copies(way) -> None:
    found = tiers.measure_copies(TINY, way, "cpu", rows=3)
    assert found.must_move_bytes == 3 * CacheSchema.build(TINY).bytes.block
    assert found.microseconds > 0
    assert found.peers_us["one plain copy"] > 0


def test_a_step_with_rows_on_their_way_down() -> None:
    found = tiers.measure_step(TINY, "cpu", batch=1, context=256, steps=1)
    assert found.microseconds > 0
    assert found.peers_us["without"] > 0


@pytest.mark.parametrize("below", ["host", "disk"])
def test_a_prefix_that_comes_back(below) -> None:
    found = tiers.measure_prefix(TINY, below, 300, "cpu")  # asserts that it was loaded
    assert found.must_move_bytes == 2 * CacheSchema.build(TINY).bytes.block
    assert found.parts_us["on the calling thread"] > 0
    assert found.peers_us["computing it, the cache's part"] > 0
    sizes = found.cache_bytes
    assert sizes[f"block in {below}"] >= sizes["block on the device"]


def test_v4_flash_takes_hardly_more_below_than_on_the_device() -> None:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    assert plan_tier(schema, tier_bytes=1 << 40).times_device < 1.01
    assert {case.suite for case in tiers.cases("cpu")} == {"tiers"}
