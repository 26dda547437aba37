"""The benchmark of entries in host memory, in small and without a GPU: hits are counted as the case
asks for them, and what is attended to does not depend on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks import residency, run, timing
from benchmarks.case import Case, Measurement
from benchmarks.decode_step import PARTS
from benchmarks.residency import (
    PLACES,
    ChunkStep,
    HostStep,
    Place,
    Selections,
    fetched_bytes,
    resolving_layers,
)
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.calls import Staging
from dsv4.reference.host_entries import resolve
from tests.support.late_streams import LateGpu
from tests.support.no_gpu import no_gpu

TINY = ModelSpec.preset("tiny")
HOT = 4 * TINY.index_topk


@pytest.mark.parametrize("hits", [1.0, 0.5, 0.0])
def test_a_selection_keeps_its_share(hits: float):
    selections = Selections(3, 8, 510, hits, "cpu")
    before = selections.chosen.clone()
    for _ in range(20):
        selections.change()
        kept = (selections.chosen == before).sum(dim=1)
        assert (kept == round(8 * hits)).all()
        assert (selections.chosen.diff(dim=1) > 0).all(), "different entries, in order"
        assert (selections.chosen >= 0).all()
        assert (selections.chosen < 510).all()
        before = selections.chosen.clone()


@pytest.mark.parametrize("hits", [1.0, 0.5, 0.0])
def test_the_share_that_is_asked_for_is_counted(hits: float):
    schema = CacheSchema.build(TINY, max_context=2048, entries_apart=True)
    csa = next(spec.layer for spec in TINY.layers if spec.has_indexer)
    layers = resolving_layers(
        schema, csa, batch=2, hits=hits, records=HOT, calls=1, device="cpu", arena_bytes=1 << 20
    )
    (layer,) = layers
    for _ in range(8):
        layer.selections.change()
        resolve(layer.call)
    layer.call.hot.counted.zero_()
    for _ in range(5):
        layer.selections.change()
        resolve(layer.call)
    named = 5 * 2 * TINY.index_topk
    missed = named - round(hits * named)
    assert layer.call.hot.counted.tolist() == [named - missed, missed, 5 * fetched_bytes(layers)]


def test_a_step_has_the_same_bits_wherever_entries_are():
    found = []
    for hits in (None, 0.5):
        torch.manual_seed(3)
        step = HostStep(
            TINY,
            batch=3,
            context=512,
            device="cpu",
            hits=hits,
            hot_entries=HOT,
            arena_bytes=1 << 20,
        )
        for nth, layer in enumerate(step.layers_of.values()):
            torch.manual_seed(nth)
            layer.selections.within.random_(0, layer.selections.stretch)
            layer.selections.missed = TINY.index_topk // 2
        outs = []
        for nth in range(3):
            torch.manual_seed(nth)
            step.change()
            step.run(PARTS)
            outs.append(step.out.clone())
        found.append(torch.stack(outs))
    assert torch.equal(*(out.view(torch.int16) for out in found))
    assert not torch.equal(found[0][0], found[0][1]), "selections change what is read"


def test_one_step_reads_where_it_was_told_last():
    """Its calls come again with the same shapes, which elsewhere repeats the launches."""
    with no_gpu() as gpu:
        step = HostStep(
            TINY,
            batch=2,
            context=512,
            device="cpu",
            hits=None,
            hot_entries=HOT,
            arena_bytes=1 << 20,
        )
        counts = []
        for hits in (None, None, None, 1.0, 0.5, None):
            step.set_hits(hits)
            gpu.started.clear()
            step.run(PARTS)
            counts.append(sum(each.kernel == "_resolve_kernel" for each in gpu.started))
        assert counts == [0, 0, 0, *[len(step.selecting_layers)] * 2, 0]
        with timing.compiling() as found:
            step.set_hits(1.0)
            step.run(PARTS)
        names = {launch.kernel.fn.__name__ for launch in found.launches.values()}
        assert {"_resolve_kernel", "_fetch_kernel", "_attend_kernel"} <= names


# ---- chunks --------------------------------------------------------------------------------------


def chunk_step(place: Place) -> ChunkStep:
    torch.manual_seed(5)
    return ChunkStep(TINY, place, chunk=128, context=1024, device="cpu")


def test_a_chunk_has_the_same_bits_wherever_entries_are():
    device, host = chunk_step("device"), chunk_step("host")
    for _ in range(2):
        for step in (device, host):
            step.out.zero_()
            step.run(PARTS)
        assert torch.equal(*(step.out.view(torch.int16) for step in (device, host)))
    assert torch.count_nonzero(host.out) > 0
    host.manager._parts.residency._pool.bytes.zero_()  # type: ignore[union-attr]
    for step in (device, host):
        step.run(PARTS)
    assert not torch.equal(device.out, host.out), "it reads host memory"


def test_every_run_of_a_chunk_brings_everything_up():
    step, gpu, came = chunk_step("host"), LateGpu(), list[tuple[int, str]]()
    layers = [page.layer for page in step.manager.memory.entries.layout.pages]  # type: ignore[union-attr]
    stage = step.manager._parts.backend.stage
    with gpu.installed():
        gpu.make_late(step.manager)
        launched = step.manager._parts.backend.stage

        def noted(call: Staging) -> None:
            came.append((call.entries.page.layer, call.which))
            launched(call)

        step.manager._parts.backend.stage = noted  # type: ignore[method-assign]
        for _ in range(3):
            came.clear()
            step.run(PARTS)
            first, *others = layers
            expected = [(first, "all")]
            for layer in others:
                expected += [(layer, "host"), (layer, "device")]
            assert came == expected
    assert gpu.put_off >= 3 * len(others)
    step.manager._parts.backend.stage = stage  # type: ignore[method-assign]


def test_the_kernels_of_a_chunk_are_those_of_its_place():
    names = dict[Place, set[str]]()
    with no_gpu():
        for place in PLACES:
            step = chunk_step(place)
            with timing.compiling() as found:
                step.run(PARTS)
            names[place] = {launch.kernel.fn.__name__ for launch in found.launches.values()}
    assert names["together"] == names["device"]
    assert names["host"] - names["device"] == {"_stage_kernel"}


# ---- the suite -----------------------------------------------------------------------------------


def test_every_case_of_the_suite_can_be_measured(monkeypatch: pytest.MonkeyPatch):
    """In small, on the CPU, where nothing is timed."""

    def once(call: Callable[[], None], changes: Sequence[Callable[[], None]]) -> timing.Timed:
        for change in changes:
            change()
        call()
        return timing.Timed(microseconds=1.0, launches=2)

    def run_once(call: Callable[[], None]) -> tuple[float, int]:
        call()
        return 1.0, 2

    small: dict[str, object] = {
        "DEVICE": "cpu",
        "MODEL": "tiny",
        "CSA_LAYER": 1,
        "BATCHES": (1, 2),
        "TARGETS": ((1024, 2),),
        "OTHER_STEPS": ((512, 1),),
        "HOT_ENTRIES": HOT,
        "ARENA_BYTES": 1 << 21,
        "CHUNK": 256,
        "CHUNK_CONTEXT": 1024,
        "CALLS": 2,
        "time_changing": once,
        "timed": run_once,
    }
    for name, value in small.items():
        monkeypatch.setattr(residency, name, value)
    shorter = replace(TINY, max_context=2048)
    monkeypatch.setattr(ModelSpec, "preset", lambda name: shorter)
    for cached in (residency.host_pool, residency._step_of, residency._resolving_layers_of):
        cached.cache_clear()
    cases = list(residency.cases())
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        found = case.measure()
        assert found.launches > 0, case.name
        assert ("hits counted" in found.note) == ("hits" in case.name)
        assert ("come up" in found.note) == case.name.endswith("in host memory")
    for cached in (residency.host_pool, residency._step_of, residency._resolving_layers_of):
        cached.cache_clear()


def test_no_case_begins_when_time_is_up(monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: clock[0])

    def measure() -> Measurement:
        clock[0] += 4.0
        return Measurement(microseconds=1.0, launches=1, must_move_bytes=1)

    cases = [
        Case(name=name, suite="residency", series="s", model="m", batch=1, measure=measure)
        for name in "abcd"
    ]
    begun: list[Case] = []
    found = [(case.name, case.measure()) for case in run.in_time(cases, 10.0, begun)]
    assert [name for name, _ in found] == ["a", "b", "c"]
    assert begun == cases[:3]
