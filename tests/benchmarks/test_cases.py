"""The benchmarks without a GPU: which cases there are, what they would run, what is reported."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.errors import OutOfResources

import benchmarks
from benchmarks import append, attend, candidates, laptop, report, run, timing
from benchmarks.case import Case, Measurement, sets_to_outgrow_l2
from benchmarks.decode_step import PARTS, DecodeStep
from benchmarks.registry import SUITES
from dsv4.bench import BenchResult, write_results
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec, v4_layers
from examples.flash_mla import stand_in
from tests.support.no_gpu import no_gpu
from tests.support.results import BASE

TINY, TINY_V41 = ModelSpec.preset("tiny"), ModelSpec.preset("v41-tiny")
WITH_EXTRAS = ("dsv4.tiers.record", "benchmarks.tiers", "benchmarks.transformers_decode")


# ---- the registry -------------------------------------------------------------------------------


def test_every_case_is_registered_once_and_under_its_suite() -> None:
    names = []
    for suite, cases in SUITES.items():
        listed = list(cases())
        assert {case.suite for case in listed} == {suite}
        points = [(case.series, case.model, case.batch) for case in listed]
        assert len(set(points)) == len(points), "two points of one line at the same batch"
        names += [case.name for case in listed]
    assert len(set(names)) == len(names)


def test_suites_whose_packages_are_missing_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("xxhash", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in [name for name in sys.modules if name.startswith(WITH_EXTRAS)]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("tiers", "transformers_decode"):
        monkeypatch.delattr(benchmarks, module, raising=False)
    assert [suite for suite in SUITES if not run.can_run(suite)] == ["tiers", "transformers"]
    assert "left out: suite tiers (a tier needs xxhash" in capsys.readouterr().out


def test_the_cases_span_what_the_models_do() -> None:
    cases = [case for listed in SUITES.values() for case in listed()]
    for suite in ("writes", "attention", "decode_step"):
        chosen = [case for case in cases if case.suite == suite]
        for model in ("v4-flash", "v4-pro"):
            batches = {case.batch for case in chosen if case.model == model}
            assert {1, 64, 256} <= batches
    contexts = {case.context for case in cases if case.suite == "decode_step"}
    assert contexts == {8_192, 131_072, 1_048_576}
    assert any(case.context == 8192 and "prefill" in case.name for case in cases)
    for case in cases:
        if case.anchors_us and case.target_us is not None:
            assert case.target_us <= max(case.anchors_us.values())
        if case.first_step_us is not None and case.target_us is not None:
            assert case.target_us <= case.first_step_us


@pytest.mark.parametrize(
    ("touched_bytes", "sets"), [(1, 32), (60 << 20, 2), (64 << 20, 2), (1 << 30, 1), (10 << 20, 12)]
)
def test_rotating_buffers_outgrow_the_l2(touched_bytes: int, sets: int) -> None:
    assert sets_to_outgrow_l2(touched_bytes, 32) == sets


def test_bytes_of_an_append_counted_by_hand() -> None:
    """V4-Flash, one request. kv 2 · 512; CSA projections 4 · 2 · (1024 + 256); a window record of
    584 bytes; a tail row of k and z, streams a and b, fp32. A closing group reads 7 earlier rows
    and writes a record (584 + 68)."""
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"), max_context=1024)
    inputs, tails = 2 * 512 + 4 * 2 * (1024 + 256), 2 * 2 * 4 * (512 + 128)
    idle = append.append_bytes(schema, 2, start=16, tokens=1, batch=1)
    assert idle == inputs + 584 + tails
    flush = append.append_bytes(schema, 2, start=15, tokens=1, batch=3)
    assert flush == 3 * (idle + 584 + 68 + 7 * 2 * 4 * (512 + 128))
    assert append.append_bytes(schema, 0, start=15, tokens=1, batch=1) == 2 * 512 + 584


def test_bytes_of_an_append_to_a_folded_group() -> None:
    """An HCA layer of V4-Flash: a state of 3 · 512 fp32 is read where a group is open and one is
    written for each of the newest two tokens, whatever closes."""
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"), max_context=1024, hca_state="online")
    inputs, state = 2 * 512 + 4 * 2 * 512, 3 * 4 * 512
    assert append.append_bytes(schema, 3, start=128, tokens=1, batch=1) == inputs + 584 + state
    flush = append.append_bytes(schema, 3, start=127, tokens=1, batch=2)
    assert flush == 2 * (inputs + 584 + 2 * state + 584)
    chunk = append.append_bytes(schema, 3, start=0, tokens=128, batch=1)
    assert chunk == 128 * inputs + (128 + 128) * 584 + 2 * state + 584


# ---- a decode step ------------------------------------------------------------------------------


def make_step(*, batch: int = 9, context: int = 512, share: float = 1.0) -> DecodeStep:
    schema = CacheSchema.build(TINY, max_context=context)
    named = batch * context // schema.block_tokens
    return DecodeStep(
        TINY,
        batch=batch,
        context=context,
        device="cpu",
        block_arena_bytes=int(share * named) * schema.bytes.block,
    )


def test_blocks_are_shared_within_the_budget_but_not_where_requests_write() -> None:
    step = make_step(share=0.5)
    assert step.blocks == 18
    assert step.manager.memory.block_arena.rows == 18
    assert step.note() == "tables name 36 blocks, of which 18 are distinct"
    tables = [request.block_ids for request in step.requests]
    assert {block for table in tables for block in table} == set(range(18))
    last = [table[-1] for table in tables]
    assert len(set(last)) == len(last)
    assert not set(last) & {block for table in tables for block in table[:-1]}
    slots = [request.slot for request in step.requests]
    assert step.manager.memory.block_table[slots].tolist() == tables
    assert make_step(share=1.0).note() == "36 blocks, all distinct"


def test_a_quarter_of_the_requests_closes_a_group() -> None:
    step = make_step(batch=128, context=256, share=0.6)
    ends = step.plan.starts + 1
    assert (ends % 4 == 0).sum() == 32
    assert (ends % 128 == 0).sum() == 1
    assert (ends <= 256).all()
    assert (step.plan.starts >= 128).all(), "all write into their last block"
    assert (make_step(batch=1, context=256).plan.starts + 1) % 4 != 0


def test_a_step_runs_all_layers_and_its_parts_repeat_it() -> None:
    step = make_step(share=0.5)
    assert step.layers == [0, 1, 2, 3], "backbone only"
    before = step.manager.memory.block_arena.bytes.clone()
    step.run(PARTS)
    changed = (
        (step.manager.memory.block_arena.bytes != before).any(dim=1).nonzero().flatten().tolist()
    )
    assert set(changed) <= set(range(step.batch)), "entries go into blocks of one request"
    assert len(changed) == sum((step.plan.starts + 1) % 4 == 0)
    assert torch.isfinite(step.out.float()).all()
    assert torch.isfinite(step.lse).all()
    for row, start in enumerate(step.plan.starts.tolist()):
        chosen = step.chosen[row].tolist()
        assert chosen == sorted(set(chosen))
        assert chosen[0] >= 0
        assert chosen[-1] < (start + 1) // 4
    # the last layer is CSA: its selection and output are what the buffers hold
    out, arena = step.out.clone(), step.manager.memory.slot_arena.bytes.clone()
    step.out.fill_(7)
    step.run(("attend",))
    assert torch.equal(step.out, out)
    step.run(("append",))
    assert torch.equal(step.manager.memory.slot_arena.bytes, arena), (
        "a narrow append repeats itself"
    )


def test_bytes_of_a_step_counted_by_hand() -> None:
    """4 heads of 128, 16 of the entries selected by 8 index heads, at position 510 of 512. A layer
    reads q and 128 window records and writes out; beside that what append moves."""
    records = 64 + 2 * 64 + 8  # 64 fp8 channels, 64 bf16 ones, a scale row
    window_only = 2 * 2 * 4 * 128 + 128 * records + (2 * 128 + records)
    for ratio, entries in ((4, 16), (128, 511 // 128)):
        model = replace(TINY, layers=v4_layers([0, ratio], backbone=2))
        step = DecodeStep(model, batch=1, context=512, device="cpu")
        appended = append.append_bytes(step.schema, 1, start=510, tokens=1, batch=1)
        other = 2 * 2 * 4 * 128 + 128 * records + appended + entries * records
        if ratio == 4:
            other += 511 // 4 * 68 + 2 * 8 * 128 + 2 * 8  # keys scored, queries, their weights
        assert step.must_move_bytes() == window_only + other


def test_a_chunk_runs_all_parts_and_those_of_one_layer_again() -> None:
    step = DecodeStep(TINY, batch=2, chunk=150, context=1024, device="cpu")
    assert not step.plan.batch.is_decode
    assert step.plan.starts.tolist() == [1024 - 150] * 2
    step.run(PARTS)
    whole = step.out.clone()
    assert whole.isfinite().all()
    assert step.must_move_bytes() > 0
    for layer in step.selecting_layers[:1]:
        step.layers = [layer]
        for part in PARTS:
            step.run((part,))


def test_decodes_and_a_chunk_run_as_two_halves() -> None:
    step = DecodeStep(TINY, batch=4, decodes=3, chunk=150, context=1024, device="cpu")
    assert [batch.padded_tokens for batch in step.batches] == [3, 150]
    assert step.plan.starts.tolist() == [1022, 1021, 1020, 1024 - 150]
    step.run(PARTS)
    assert step.out.isfinite().all()
    for half, rows in enumerate((slice(3), slice(3, None))):
        step.out.fill_(torch.nan)
        step.run(PARTS, (half,))
        assert step.out[rows].isfinite().all()
        assert int(step.out.isnan().all(-1).all(-1).sum()) == 153 - len(step.out[rows])


def test_v41_has_cases_of_all_that_v4_has() -> None:
    cases = list(SUITES["v41"]())
    batches = {case.batch for case in cases if case.name.startswith("attend v41 128+512")}
    assert batches == {1, 4, 16, 32, 64, 128, 256}
    for kind in (
        *("append v41 pairs", "append v41 singles", "index scores v41", "select v41 publishing"),
        *("select v41 among candidates", "chunk v41-flash 8192 from", "step v41-flash at 128k"),
    ):
        assert any(case.name.startswith(kind) for case in cases), kind
    limits = {case.batch: case for case in cases if case.name.startswith("attend v41 128+512")}
    for batch, case in limits.items():
        assert case.target_us is not None
        assert (case.target_us <= 0.8 * case.anchors_us["V4-Flash"] + 0.01) == (batch >= 64)


@pytest.mark.parametrize("chunk", [1, 40])
def test_a_step_of_v41_runs_all_layers(chunk: int) -> None:
    """Layers of all sorts, each with the selection of its selector."""
    step = DecodeStep(TINY_V41, batch=2, chunk=chunk, context=256, device="cpu")
    step.compile()
    step.run(PARTS)
    assert torch.isfinite(step.out.float()).all()
    assert list(step.chosen_of) == [2, 1]
    for ratio, chosen in step.chosen_of.items():
        last = chosen[-1].tolist()
        assert last == sorted(set(last))
        assert last[-1] < step.plan.ends.tolist()[-1] // ratio
    inside = step.candidates[-1].tolist()
    assert {entry // TINY_V41.candidate_block_entries for entry in step.chosen[-1].tolist()} <= {
        *inside
    }
    assert sorted(step.named_layers) == ["pairs", "reading", "second level", "singles"]
    assert step.must_move_bytes() > 0
    for layer in step.named_layers.values():
        step.layers = [layer]
        for part in PARTS:
            step.run((part,))


def test_compiling_a_case_collects_its_launches_and_times_nothing() -> None:
    """Beside it stands what its peers launch, for they are timed too."""
    torch.manual_seed(0)
    with no_gpu() as gpu:
        work = candidates.make_work(TINY_V41, 3, 2, 128, publish=True, device="cpu")
        with timing.compiling() as found:
            measured = timing.measure(work)
        names = {each.kernel.fn.__name__ for each in found.launches.values()}
        assert {"_index_scores_kernel", "_block_scores_kernel"} <= names
        assert not gpu.started
        assert not gpu.asked
    assert measured.microseconds == 0
    assert not timing._compiling


@pytest.mark.parametrize("publish", [True, False])
def test_candidates_are_timed_beside_a_selection_without(publish: bool) -> None:
    torch.manual_seed(0)
    work = candidates.make_work(TINY_V41, 3, 2, 128, publish=publish, device="cpu")
    (alone,) = work.peers.values()
    assert len(alone) == len(work.calls)
    work.calls[0]()
    alone[0]()
    assert work.must_move_bytes > 0


# ---- peers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [attend.CSA_LAYER, attend.HCA_LAYER])
def test_flash_mla_would_be_timed_on_the_same_attention(layer: int) -> None:
    row = attend.Row(
        name="small",
        model="v4-flash",
        layer=layer,
        context=1024,
        listed=64 if layer == attend.CSA_LAYER else None,
    )
    torch.manual_seed(layer)
    shared = attend.Shared.make(row, 2, "cpu", arena_bytes=20_000_000, max_sets=1)
    for pages, page in (
        (shared.block_arena, shared.entry_page),
        (shared.window.arena, shared.window.page),
    ):  # records that differ from page to page
        for arena_row in range(pages.shape[0]):
            pages[arena_row, page.offset_bytes : page.scale_offset_bytes].random_(0x30, 0x38)
    given = attend.Inputs.make(row, 2, shared)
    given.ours(turn_back=False)
    out, lse = stand_in(**given.flash_mla_arguments())  # type: ignore[arg-type]
    error = (given.out.double() - out[:, 0].double()).norm() / out.double().norm()
    assert error < 4e-3
    torch.testing.assert_close(given.lse, lse[:, :, 0], rtol=1e-3, atol=1e-3)
    assert 1e-4 < attend.relative_error(given) < 4e-3
    given.q.mul_(1.25)  # after the keys were seen: what is compared follows the queries
    assert 1e-4 < attend.relative_error(given) < 4e-3
    shared.sink.add_(9.0)
    before = given.out.clone()
    assert attend.relative_error(given) < 4e-3
    assert not torch.equal(before, given.out)


# ---- counting, merging, reporting ---------------------------------------------------------------


def test_launches_are_the_working_nodes_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a driver of three kernels, a fill, and an empty node."""
    kinds = {11: 0, 12: 0, 13: 5, 14: 2, 15: 0}

    class Driver:
        def cuGraphGetNodes(self, graph, nodes, count):
            assert graph.value == 4711
            count._obj.value = len(kinds)
            for i, node in enumerate(kinds if nodes is not None else ()):
                nodes[i] = node
            return 0

        def cuGraphNodeGetType(self, node, kind):
            kind._obj.value = kinds[node.value]
            return 0

    class Graph:
        def raw_cuda_graph(self) -> int:
            return 4711

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert timing.launches(Graph()) == 4  # type: ignore[arg-type]
    monkeypatch.setattr(Driver, "cuGraphNodeGetType", lambda *_: 1)
    with pytest.raises(RuntimeError, match="error 1"):
        timing.launches(Graph())  # type: ignore[arg-type]


def test_launches_on_amd_are_counted_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = "7f00-7f01 r-xp 0 00:00 1  /opt/venv/torch/lib/libamdhip64.so.7\n7f01-7f02 rw-p 0 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    asked = []

    class Driver:
        hipGraphGetNodes, hipGraphNodeGetType = "nodes", "type"

        def __init__(self, name: str) -> None:
            asked.append(name)

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert timing._graph_calls() == ("nodes", "type")
    assert asked == ["/opt/venv/torch/lib/libamdhip64.so.7"]


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-generation"),
        ("AMD Instinct MI300X", "instinct-mi300x"),
    ],
)
def test_results_files_are_named_after_the_whole_gpu(gpu: str, name: str) -> None:
    assert run.file_name(gpu) == name


def test_results_of_two_gpus_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    run.check_gpu(path, "NVIDIA B200")
    write_results(path, [BASE])
    run.check_gpu(path, BASE.run.gpu)
    with pytest.raises(InvalidInput, match="results of NVIDIA H200, and this is NVIDIA B200"):
        run.check_gpu(path, "NVIDIA B200")


def test_cases_that_do_not_fit_or_fail_do_not_end_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Measurement(microseconds=1.0, launches=1, must_move_bytes=1)

    def case(name: str, error: Exception | None = None) -> Case:
        def measure() -> Measurement:
            if error is not None:
                raise error
            return found

        return Case(name=name, suite="host", series="s", model="m", batch=1, measure=measure)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    failed: list[str] = []
    cases = [
        case("large", torch.OutOfMemoryError("CUDA out of memory")),
        case("broken", OutOfResources(232_448, 101_376, "shared memory")),
        case("fine"),
    ]
    assert [(case.name, m) for case, m in run.measured(cases, failed)] == [("fine", found)]
    assert failed == ["broken"]
    told = capsys.readouterr().out
    assert "left out: large (the GPU has not enough memory)" in told
    assert "FAILED: broken" in told
    assert "shared memory" in told
    with pytest.raises(torch.AcceleratorError):
        list(run.measured([case("lost", torch.AcceleratorError("illegal access"))], failed))


def test_an_unsupported_gpu_has_no_benchmarks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    v100 = SimpleNamespace(name="Tesla V100", major=7, minor=0)
    monkeypatch.setattr(sys, "argv", ["run", "--only", "host"])
    for name, value in (
        ("is_available", True), ("current_device", 7), ("get_device_name", v100.name),
        ("get_device_properties", v100),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert run.main() == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("UnsupportedGpu: ")
    assert "Tesla V100 is sm_70" in told.err


def result(case: str, suite: str, **fields: object) -> BenchResult:
    return replace(BASE, case=case, suite=suite, **fields)  # type: ignore[arg-type]


def test_a_suite_replaces_its_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    assert run.merged(path, [result("a", "host")], "host") == [result("a", "host")]
    old = [result("x", "attention"), result("y", "writes"), result("z", "forgotten")]
    write_results(path, old)
    new = [result("new", "writes")]
    assert run.merged(path, new, "writes") == [new[0], old[0]]
    assert run.merged(path, new, "writes", whole=False) == [new[0], old[1], old[0]]
    again = [replace(old[1], microseconds=1.0)]
    assert run.merged(path, again, "writes", whole=False) == [again[0], old[0]]


def test_a_result_has_the_case_the_measurement_and_the_floor() -> None:
    case = Case(
        name="n", suite="writes", series="s", model="v4-pro", batch=8, measure=lambda: found,
        context=4, target_us=5.0, first_step_us=6.0, anchors_us={"vLLM": 9.0},
    )  # fmt: skip
    found = Measurement(
        microseconds=10.0, launches=3, must_move_bytes=8_000_000, peers_us={"FlashMLA": 4.0},
        parts_us={"append": 1.0}, parts_launches={"append": 2}, note="shared",
    )  # fmt: skip
    ceilings = timing.Ceilings(copy_bytes_per_us=4e6, empty_launch_us=0.5)
    environment = dict.fromkeys(("commit", "torch", "triton", "python"), "?")
    elsewhere = run.make_result(case, found, ceilings, {**environment, "gpu": "NVIDIA B200"})
    assert (elsewhere.target_us, elsewhere.first_step_us, elsewhere.anchors_us) == (None, None, {})
    assert (elsewhere.peers_us, elsewhere.verdict) == ({"FlashMLA": 4.0}, "no target")
    environment["gpu"] = "NVIDIA H200"
    made = run.make_result(case, case.measure(), ceilings, environment)
    assert (made.target_us, made.first_step_us) == (5.0, 6.0)
    assert made.floor_us == 2.5
    assert made.percent_of_floor == 25
    text = run.line(made)
    for shown in ("10.00", "FlashMLA 4.0 | vLLM 9.0", "shared", "800", "25.0"):
        assert shown in text


def test_misses_are_marked_and_nothing_is_hidden() -> None:
    cases = {case.name: case for listed in SUITES.values() for case in listed()}
    chosen = cases["attend flash csa 128+512 batch 64"]
    limits = {"target_us": chosen.target_us, "first_step_us": chosen.first_step_us}
    for time_us, mark in (
        (45.2, "| reached |"),
        (52.0, "| first step; target 1.15 x |"),
        (144.64, "| **miss** (2.00 x) |"),
    ):
        text = report.tables([result(chosen.name, "attention", microseconds=time_us, **limits)])
        (line,) = [line for line in text.splitlines() if line.startswith(f"| {chosen.name} ")]
        assert line.endswith(mark)
        assert "FlashMLA 45.2" in line
        assert "| attend flash csa 128+512 batch 256 | FlashMLA 86.6 |" in text
        assert "24 registered cases have no result" in text
    with pytest.raises(InvalidInput, match="no lines"):
        report.updated("# Performance", report.tables([BASE]))


def test_cases_of_v41_stand_beside_those_of_v4_that_do_as_much() -> None:
    cases = {case.name: case for listed in SUITES.values() for case in listed()}
    beside = {name: report._beside(name, cases) for name in cases if "v41" in name}  # type: ignore[arg-type]
    alone = {name for name, other in beside.items() if other is None}
    alike = {
        name for name in beside if name.startswith(("step", "chunk", "attend", "append v41 p"))
    }
    assert alike <= beside.keys() - alone
    for name, other in beside.items():
        if other is not None:
            assert (cases[name].batch, "v4-flash") == (other.batch, other.model)
    step, v4 = "step v41-flash at 8k batch 16", "step v4-flash at 8k batch 16"
    parts = {"append": 1.0, "select": 2.0, "attend": 3.0}
    found = result(step, "v41", microseconds=60.0, launches=7, parts_us=parts)
    text = report.v41_table([found, result(v4, "decode_step", microseconds=80.0)])
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {step} ")]
    assert "| 60.0 | 80.0 | 0.75 | append 1.0, select 2.0, attend 3.0 | 7 |" in line
    assert f"{len(list(SUITES['v41']())) - 1} registered cases have no result" in text


# ---- the reference on a CPU ---------------------------------------------------------------------


@pytest.mark.parametrize("name", laptop.schemas())
def test_a_laptop_times_every_part_and_repeats_its_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(laptop, "PREFILL_TOKENS", 9)
    monkeypatch.setattr(laptop, "DECODE_STEPS", 2)
    told = []
    for _ in range(2):
        laptop.measure(name, laptop.schemas()[name], runs=2)
        told.append([line.split() for line in capsys.readouterr().out.splitlines()])
    assert told[0][-1] == told[1][-1]  # the digest
    parts = [part for part in told[0][0] if part in laptop.PARTS]
    assert parts == [p for p in laptop.PARTS if p != "select" or name in ("tiny", "csa")]
