"""Whole simulations: hits against a computation that knows nothing of this library, routing,
refusals, tiers, residency, and what they cost."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulate import counted
from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, OutOfBlocks, PoolTooSmall
from dsv4.model import ModelSpec
from dsv4.simulate.cluster import Setup, Simulation, simulate
from dsv4.simulate.device import GrowingAllocator, Held
from dsv4.simulate.names import NamedTrail
from dsv4.simulate.replica import SimJob
from dsv4.simulate.results import Percentiles, Simulated
from dsv4.simulate.speeds import Speeds
from dsv4.simulate.sweep import fewest_replicas, setups
from dsv4.simulate.trace import TraceRequest, with_sessions
from tests.simulate.loads import load
from tests.support.numbers import Numbers

FLASH = ModelSpec.preset("v4-flash")
SPEEDS = Speeds.of("v4-flash", prefill_rate=20_000.0, decode_rate=40.0)
TRACE = [*with_sessions(load(300))]
GB = 10**9


def setup(block_tokens: int = 128, *, apart: bool = False, **options: Any) -> Setup:
    schema = CacheSchema.build(FLASH, block_tokens=block_tokens, entries_apart=apart)
    given = {"max_requests": 8, "snapshots": 16, "residency": apart, **options}
    return Setup(schema=schema, speeds=SPEEDS, **given)


def found(trace: Sequence[TraceRequest] = TRACE, **options: Any) -> Simulated:
    return simulate(trace, setup(**options))


def hit(result: Simulated) -> int:
    return sum(result.tokens_hit.values())


# ---- hits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [128, 256, 512])
def test_unbounded_hits_are_those_that_one_counts(block_tokens: int) -> None:
    result = found(block_tokens=block_tokens, untimed=True)
    assert hit(result) == counted(TRACE, block_tokens) > 0
    assert result.evictions == result.refused == 0
    assert result.tokens_asked == sum(each.input_tokens for each in TRACE)


def test_smaller_blocks_hit_no_less() -> None:
    hits = [hit(found(block_tokens=size, untimed=True)) for size in (512, 256, 128)]
    assert hits == sorted(hits)


def plain_lru(trace: Sequence[TraceRequest], capacity: int) -> int:
    """Blocks found by a list of names, whatever comes after what."""
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace:
        names = [*request.names]
        hits += next((n for n, name in enumerate(names) if name not in kept), len(names))
        for name in names:
            kept[name] = None
            kept.move_to_end(name)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return hits


@pytest.mark.parametrize("capacity", [60, 120, 300])
def test_with_a_capacity_it_is_near_a_plain_list(capacity: int) -> None:
    trace = [replace(each, input_tokens=512 * len(each.names) + 1) for each in load(2000, talks=30)]
    schema = CacheSchema.build(FLASH, block_tokens=512)
    memory = capacity * schema.bytes.block + schema.bytes.per_request
    one = setup(512, untimed=True, policy="lru", memory_bytes=memory, max_requests=1, snapshots=0)
    blocks = sum(len(each.names) for each in trace)
    own, plain = hit(simulate(trace, one)) / 512, plain_lru(trace, capacity)
    # a list drops beginnings first, and what follows them is then of no use
    assert -0.005 <= (own - plain) / blocks < 0.05
    assert own < counted(trace, 512) / 512


def test_memory_helps_and_policies_differ() -> None:
    sizes = [hit(found(memory_bytes=size * GB // 10)) for size in (12, 16, 24, 48)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]
    small = {"memory_bytes": 12 * GB // 10}
    assert hit(found(policy="lru", **small)) != hit(found(policy="retention", **small))


# ---- many replicas -------------------------------------------------------------------------------


def test_prefix_routing_finds_what_round_robin_does_not() -> None:
    results = {
        how: found(routing=how, replicas=6, memory_bytes=4 * GB)
        for how in ("prefix", "sticky", "round-robin")
    }
    assert hit(results["prefix"]) > 1.3 * hit(results["round-robin"])
    assert hit(results["sticky"]) > 1.2 * hit(results["round-robin"])
    assert results["prefix"].tokens_run["all"] < results["round-robin"].tokens_run["all"]
    for each in results.values():
        assert each.requests == len(TRACE)
        assert each.tokens_run["answers"] == sum(max(1, one.output_tokens) for one in TRACE)


def test_prompts_that_come_at_once_see_each_other() -> None:
    """All begin alike, so all would go to the one that has the beginning, if nothing waited."""

    def prompt(at_s: float, name: int) -> TraceRequest:
        names = [0, *range(100 * name, 100 * name + 15)]
        return TraceRequest(at_s=at_s, input_tokens=8192, output_tokens=2, names=names)

    crowd = [prompt(0.0, 1), *(prompt(10.0, name) for name in range(2, 8))]
    result = found(crowd, replicas=6, memory_bytes=4 * GB)
    alone = found(crowd[:1], memory_bytes=4 * GB)
    assert result.ttft.p99 == pytest.approx(alone.ttft.p99)


def test_more_replicas_are_faster_until_one_request_is_the_limit() -> None:
    waits = [found(replicas=count, memory_bytes=4 * GB).ttft.p99 for count in (1, 2, 8)]
    assert waits == sorted(waits, reverse=True)
    # 20,000 tokens a second: a step of 8,192 tokens takes 0.41 s, a decode step 25 ms
    result = found(replicas=8, memory_bytes=4 * GB)
    assert result.step.p50 == pytest.approx(0.025)


def test_the_same_again_is_the_same() -> None:
    options = {"replicas": 3, "memory_bytes": 2 * GB, "host_bytes": 3 * GB}
    first, again = found(**options), found(**options)
    assert replace(first, wall_s=0.0) == replace(again, wall_s=0.0)


def test_the_fewest_replicas() -> None:
    asked = setup(memory_bytes=4 * GB)
    limit = 1.1 * found(replicas=4, memory_bytes=4 * GB).ttft.p99
    fewest, tried = fewest_replicas(TRACE, asked, ttft_p99_s=limit)
    assert fewest is not None
    assert 1 < fewest <= 4
    by_count = {each.replicas: each.ttft.p99 for each in tried}
    assert by_count[fewest] <= limit < by_count[fewest - 1]
    # faster than a prompt runs on an idle replica: more of them do not help
    assert fewest_replicas(TRACE, asked, ttft_p99_s=0.001)[0] is None


# ---- tiers, residency, refusals ------------------------------------------------------------------


def test_tiers_give_back_what_was_evicted() -> None:
    small = {"memory_bytes": 13 * GB // 10, "replicas": 1}
    without = found(**small)
    host = found(host_bytes=4 * GB, **small)
    both = found(host_bytes=1 * GB, disk_bytes=20 * GB, **small)
    assert without.evictions > 0
    assert host.tokens_hit["host"] > 0
    assert host.tokens_hit["disk"] == 0
    assert both.tokens_hit["disk"] > 0
    assert hit(host) > hit(without)
    assert host.bytes_moved["up"] > 0 < host.bytes_moved["down"]
    assert 0 < both.peaks["host"] <= GB
    assert host.bytes_moved["up"] % 4096 == 0  # whole records
    unlimited = found(replicas=1)
    assert hit(host) <= hit(unlimited) * 1.02


def test_residency_needs_host_memory_and_holds_more() -> None:
    with pytest.raises(InvalidInput, match="host memory"):
        setup(apart=True, memory_bytes=GB)
    plain = Simulation(setup(memory_bytes=4 * GB))
    apart = Simulation(setup(apart=True, memory_bytes=4 * GB, host_bytes=40 * GB))
    assert apart.sizes.blocks > 3 * plain.sizes.blocks
    small = {"memory_bytes": 3 * GB, "host_bytes": 40 * GB, "max_requests": 2}
    cold, hot = (found(apart=True, hot_share=share, **small) for share in (0.0, 1.0))
    assert cold.step.p99 >= hot.step.p99
    assert cold.bytes_moved["up"] >= hot.bytes_moved["up"]


def test_what_never_fits_is_refused_and_the_rest_runs() -> None:
    long = TraceRequest(at_s=0.1, input_tokens=900_000, output_tokens=5, names=[])
    result = found([TRACE[0], long, *TRACE[1:]], memory_bytes=GB)
    assert result.refused == 1
    assert result.requests == len(TRACE) + 1
    # neither prompt runs: the answer would not fit, the model has no such position
    for tokens, new in ((1000, 900_000), (1 << 20, 1), (1 << 31, 1)):
        never = TraceRequest(at_s=0.0, input_tokens=tokens, output_tokens=new, names=[])
        result = found([never, *TRACE[:5]], memory_bytes=GB if new > 1 else None)
        assert (result.refused, result.requests) == (1, 6)
        assert result.tokens_run["all"] < sum(each.input_tokens for each in TRACE[:5]) + 500
    crowd = [replace(each, at_s=0.0) for each in TRACE]
    assert found(crowd, memory_bytes=2 * GB, most_waiting=20).refused > 200


def test_setups_are_checked() -> None:
    with pytest.raises(InvalidInput, match="policy"):
        setup(policy="first in")
    with pytest.raises(InvalidInput, match="routing"):
        setup(routing="best")
    with pytest.raises(InvalidInput, match="hot_share"):
        setup(hot_share=2)
    with pytest.raises(InvalidInput, match="which is off"):
        setup(hot_share=0.5)
    with pytest.raises(InvalidInput, match="leave out the disk"):
        setup(apart=True, memory_bytes=4 * GB, host_bytes=40 * GB, disk_bytes=GB)
    for wrong in ({"snapshots": -1}, {"most_waiting": -1}, {"replicas": 0}, {"replicas": 10**11}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            setup(**wrong)
    with pytest.raises(PoolTooSmall):
        found(memory_bytes=1000)
    with pytest.raises(InvalidInput, match="before"):
        found([TRACE[1], TRACE[0]])
    base = setup(memory_bytes=GB)
    some = [*setups(base, {"replicas": [1, 2], "residency": [False, True]})]
    assert [each.replicas for each in some] == [1, 2]


# ---- parts ---------------------------------------------------------------------------------------


def test_a_growing_allocator_hands_out_the_same_blocks() -> None:
    numbers, real, own = Numbers(3), BlockAllocator(9000), GrowingAllocator(9000)
    held: list[list[int]] = []
    for _ in range(400):
        count = int(numbers.integers(1, 200, 1)[0])
        if held and numbers.integers(0, 2, 1)[0]:
            block_ids = held.pop(int(numbers.integers(0, len(held), 1)[0]))
            assert own.release(block_ids) == real.release(block_ids)
        elif count <= real.free:
            assert own.next_ids(count) == real.next_ids(count)
            held.append(real.take(count))
            assert own.take(count) == held[-1]
        assert own.free == real.free
    with pytest.raises(OutOfBlocks):
        own.take(9001)
    assert GrowingAllocator(1 << 40).free == 1 << 40


def test_percentiles_count_steps() -> None:
    assert Percentiles.of([]) == Percentiles(p50=0, p90=0, p99=0)
    values = [float(n) for n in range(1, 101)]
    assert Percentiles.of(values) == Percentiles(p50=50, p90=90, p99=99)
    assert Percentiles.of([5.0, 1.0], [1, 99]) == Percentiles(p50=1, p90=1, p99=1)


def test_nothing_makes_cycles_and_so_none_are_looked_for() -> None:
    """Looking for them takes most of the time of a simulation of a day."""
    trace, found = load(200), list[str]()

    def note(phase: str, info: dict[str, int]) -> None:
        found.append(phase)

    simulation = Simulation(setup(replicas=3, memory_bytes=2 * GB))
    gc.collect()
    gc.callbacks.append(note)
    try:
        simulation.run(trace)
        assert found.count("start") <= 1  # when it is on again
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(note)
    assert not any(isinstance(each, SimJob | Held | NamedTrail) for each in cycles())


def cycles() -> list[object]:
    """What the collector would free now."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return [*gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
