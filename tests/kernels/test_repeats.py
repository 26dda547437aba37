"""Calls that come again: what is launched then is what the checked way launches, and whatever is
not the same goes the checked way."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from dsv4.cache.repeats import MOST_KEYS, Repeats
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, PlanError
from dsv4.kernels import launch
from dsv4.model import ModelSpec
from tests.support.both import Both
from tests.support.no_gpu import NoGpu, no_gpu
from tests.support.reading import queries, read
from tests.support.stack import Stack

TINY = ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 1, 2
LAYERS = {"swa": SWA, "csa": CSA, "hca": HCA}
OPERATIONS = ("append", "select", "attend")


@pytest.fixture
def gpu() -> Iterator[NoGpu]:
    with no_gpu() as found:
        yield found


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every repetition that is run."""
    seen: list[object] = []
    run = launch.Repetition.run

    def counted(self: launch.Repetition, places: list[int], tensors: Sequence[Tensor]) -> None:
        seen.append(self)
        run(self, places, tensors)

    monkeypatch.setattr(launch.Repetition, "run", counted)
    return seen


class Layer:
    """The calls of one layer in a plan that stays open, with new tensors each time."""

    def __init__(self, layer: int, tokens: int = 1, requests: int = 1) -> None:
        schema = CacheSchema.build(TINY, max_context=512)
        self.stack = Stack(schema, layers=[layer], num_blocks=16)
        admitted = [self.stack.manager.admit_request() for _ in range(requests)]
        self.plan = self.stack.manager.prepare_forward([(each, tokens) for each in admitted])
        self.handle = self.stack.manager.acquire(layer, self.plan.batch)
        self.weights = self.stack.weights[layer]
        self._kept: list[Tensor] = []  # so that no tensor comes to lie where another was

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        self._kept.append(torch.zeros((self.plan.batch.padded_tokens, *shape), dtype=dtype))
        return self._kept[-1]

    def inputs(self, operation: str) -> dict[str, Any]:
        model, handle = self.stack.schema.model, self.handle
        if operation == "append":
            given: dict[str, Any] = {"kv": self.new(model.head_dim, dtype=torch.bfloat16)}
            for layout, name in (
                (handle.memory.compressor, ""),
                (handle.memory.index_compressor, "index_"),
            ):
                for kind in "cz" if layout else "":
                    given[name + kind] = self.new(layout.columns)
            return given | {"weights": self.weights}
        if operation == "select":
            return {
                "q": self.new(model.index_heads, model.index_dim, dtype=torch.bfloat16),
                "index_weights": self.new(model.index_heads, dtype=torch.bfloat16),
                "rope": self.weights.rope,
                "out": self.new(model.index_topk, dtype=torch.int32),
            }
        return {
            "q": self.new(model.heads, model.head_dim, dtype=torch.bfloat16),
            "sink": torch.zeros(model.heads),
            "indices": self.new(model.index_topk, dtype=torch.int32)
            if handle.memory.index_compressor
            else None,
            "out": self.new(model.heads, model.head_dim, dtype=torch.bfloat16),
            "lse": self.new(model.heads),
            "inverse_rope": self.weights.rope,
        }

    def call(self, operation: str, given: dict[str, Any] | None = None) -> None:
        self.plan.batch.written.appended.discard(self.handle.layer)  # a chunk is appended once
        if operation != "append":
            self.plan.batch.written.note(self.handle.layer)
        getattr(self.handle, operation)(**(given or self.inputs(operation)))

    def make_known(self, operation: str) -> None:
        for _ in range(2):
            self.call(operation)

    @property
    def operations(self) -> tuple[str, ...]:
        return OPERATIONS if self.handle.memory.index_compressor else ("append", "attend")


# ---- the same launches -----------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 40], ids=["decode", "drafts", "chunk"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_repetition_launches_what_the_checked_way_does(
    gpu: NoGpu, repeated: list[object], layer: int, tokens: int
) -> None:
    one = Layer(layer, tokens, requests=2)
    for operation in one.operations:
        one.make_known(operation)
        given = one.inputs(operation)
        assert not repeated
        gpu.started.clear()
        one.call(operation, given)
        again = list(gpu.started)
        assert len(repeated) == 1
        gpu.started.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Repeats, "find", lambda *_: (None, None))
            one.call(operation, given)
        assert again == gpu.started != []
        repeated.clear()


def test_results_that_are_not_given_are_made(gpu: NoGpu, repeated: list[object]) -> None:
    one = Layer(CSA)
    for operation in ("select", "attend"):
        for _ in range(3):
            given = one.inputs(operation)
            made = given.pop("out")
            one.plan.batch.written.note(one.handle.layer)
            found = getattr(one.handle, operation)(**given)
            found = found[0] if operation == "attend" else found
            assert (found.shape, found.dtype) == (made.shape, made.dtype)
            last = gpu.started[-1].arguments
            assert found.data_ptr() in last
        assert len(repeated) == 1
        repeated.clear()


def test_tensors_of_one_storage_stay_apart_as_they_were(gpu: NoGpu, repeated: list[object]) -> None:
    one = Layer(HCA, 4)

    def fused(apart: int) -> dict[str, Any]:
        given = one.inputs("append")
        width = given["c"].shape[1]
        both = one.new(2 * width + 16)
        given["c"], given["z"] = both[:, :width], both[:, apart + width : apart + 2 * width]
        return given

    for _ in range(2):
        one.call("append", fused(0))
    assert not repeated
    for apart, expected in ((0, 1), (16, 1), (16, 2)):  # as before; moved; now that is known
        given = fused(apart)
        gpu.started.clear()
        one.call("append", given)
        assert len(repeated) == expected
        assert {given["c"].data_ptr(), given["z"].data_ptr()} <= set(gpu.started[0].arguments)


def test_whoever_shares_memory_with_the_cache_is_never_repeated(
    gpu: NoGpu, repeated: list[object]
) -> None:
    one = Layer(CSA)
    given = one.inputs("attend")
    part = one.stack.manager.memory.workspace.scratch.view(-1)[: given["sink"].numel()]
    for _ in range(4):
        one.call("attend", given | {"sink": part})
    assert not repeated


def test_a_call_that_does_more_than_launch_is_not_repeated(
    gpu: NoGpu, repeated: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Layer(SWA)
    attend = one.handle.backend.attend

    def with_more(call: Any) -> None:
        call.out.zero_()
        attend(call)

    monkeypatch.setattr(one.handle.backend, "attend", with_more)
    for _ in range(4):
        one.call("attend")
    assert not repeated
    assert len(gpu.started) == 4


@pytest.mark.parametrize("change", ["profiler", "alignment"])
def test_what_a_repetition_cannot_do_goes_the_checked_way(
    gpu: NoGpu, repeated: list[object], change: str
) -> None:
    one = Layer(CSA)
    one.make_known("select")
    given = one.inputs("select")
    if change == "alignment":
        row = given["index_weights"].shape[1]
        given["index_weights"] = one.new(row + 1, dtype=torch.bfloat16)[:, 1:]
        one.call("select", given)  # the strides are others too: a key of its own
        assert not repeated
        given["index_weights"] = torch.zeros(row + 1, dtype=torch.bfloat16)[1:].view(1, row)
    watched: list[object] = []
    if change == "profiler":
        knobs.runtime.launch_enter_hook.add(watched.append)
    before = len(gpu.started)
    try:
        one.call("select", given)
    finally:
        knobs.runtime.launch_enter_hook.remove(watched.append)
    assert not repeated
    assert len(gpu.started) > before
    assert given["index_weights"].data_ptr() in gpu.started[-2].arguments


# ---- errors stay -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "change", "what"),
    [
        ("append", {"kv": lambda t: t.float()}, "must be torch.bfloat16"),
        ("append", {"kv": lambda t: t[:, :-1]}, "has shape"),
        ("append", {"kv": lambda t: t.tolist()}, "must be a tensor"),
        ("append", {"kv": lambda t: t.to("meta")}, "is on meta"),
        ("append", {"c": lambda _: None}, "is missing"),
        ("append", {"index_z": lambda t: torch.cat((t, t))}, "has shape"),
        ("append", {"weights": lambda w: replace(w, rope=w.rope[:-1])}, "max_context"),
        ("append", {"weights": lambda w: replace(w, compressor=None)}, "needs weights.compressor"),
        ("append", {"weights": lambda _: None}, "must be LayerWeights"),
        ("select", {"q": lambda t: t.to("meta")}, "is on meta"),
        ("select", {"top_k": lambda _: True}, "top_k"),
        ("select", {"top_k": lambda _: [3]}, "top_k"),
        ("select", {"out": lambda t: t.long()}, "expected torch.int32"),
        ("attend", {"q": lambda t: t[:, :1]}, "sink has shape"),
        ("attend", {"indices": lambda _: None}, "give the indices"),
        ("attend", {"sink": lambda t: t.double()}, "must be torch.float32"),
        ("attend", {"lse": lambda t: t.repeat(1, 2)[:, ::2]}, "not contiguous"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else v.replace(" ", "_"),
)
def test_wrong_input_is_refused_however_often_right_input_came(
    gpu: NoGpu, operation: str, change: dict[str, Callable[[Any], Any]], what: str
) -> None:
    one = Layer(CSA)
    one_entry = {"top_k": 1, "out": None} if "top_k" in change else {}
    for _ in range(4):
        one.call(operation, one.inputs(operation) | one_entry)
    given = one.inputs(operation) | one_entry
    for name, changed in change.items():
        given[name] = changed(given.get(name))
    gpu.started.clear()
    one.plan.batch.written.touched = False
    with pytest.raises(InvalidInput, match=what):
        getattr(one.handle, operation)(**given)
    assert not gpu.started
    assert not one.plan.batch.written.touched


def test_plans_are_looked_at_every_time(gpu: NoGpu) -> None:
    one = Layer(CSA, 40)
    for operation in OPERATIONS:
        one.make_known(operation)
    one.plan.batch.written.note(one.handle.layer)
    with pytest.raises(PlanError, match="appended this plan already"):
        one.handle.append(**one.inputs("append"))
    one.plan.batch.written.appended.clear()
    one.plan.batch.written.last = None
    for operation in ("select", "attend"):
        with pytest.raises(PlanError, match="call append first"):
            getattr(one.handle, operation)(**one.inputs(operation))


def test_weights_may_lie_elsewhere_next_time(gpu: NoGpu, repeated: list[object]) -> None:
    one = Layer(SWA)
    one.make_known("append")
    assert one.weights.kv_norm is not None
    moved = replace(one.weights, kv_norm=one.weights.kv_norm.clone())
    one.call("append", one.inputs("append") | {"weights": moved})
    assert len(repeated) == 1
    assert moved.kv_norm is not None
    assert moved.kv_norm.data_ptr() in gpu.started[-1].arguments
    assert one.weights.kv_norm.data_ptr() not in gpu.started[-1].arguments


def test_keys_are_forgotten_before_there_are_too_many(gpu: NoGpu, repeated: list[object]) -> None:
    one = Layer(CSA)
    one.make_known("attend")
    for top_k in range(1, MOST_KEYS + 2):
        given = one.inputs("select") | {"top_k": top_k, "out": None}
        one.call("select", given)
    assert not repeated
    one.call("attend")
    assert not repeated
    one.call("attend")
    one.call("attend")
    assert len(repeated) == 1


# ---- the same results, interpreted -----------------------------------------------------------


def test_steps_that_repeat_write_what_the_reference_writes(repeated: list[object]) -> None:
    both = Both(layers=[CSA], requests=2, tokens=60)
    for _ in range(5):
        both.step({0: 1, 1: 1}, pad_tokens=2, pad_requests=2)
    assert len(repeated) == 3
    for _ in range(3):
        both.step({0: 8})
    assert len(repeated) == 4


def test_reads_that_repeat_return_what_the_reference_returns(repeated: list[object]) -> None:
    both = Both(layers=[CSA], requests=1, tokens=60)
    both.step({0: 40})
    asked = [queries(both.stacks[0], 0, 60)]
    for _ in range(4):
        found: list[list[Tensor]] = []
        for stack, lives in zip(both.stacks, both.lives, strict=True):
            plan = stack.manager.prepare_forward([(each, 1) for each in lives])
            stack.write(plan, both.streams)
            found.append([t for t in read(stack, plan, CSA, asked) if t is not None])
            stack.manager.commit(plan)
        for expected, actual in zip(*found, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
            if expected.dtype == torch.int32:
                assert torch.equal(actual, expected)
    assert len(repeated) == 1 + 2 * 2  # in the fourth a group closes: reads do not mind


# ---- what a repeated launch costs the host ---------------------------------------------------


# Calls of Python and C per call of a layer with all that it can be given, its launches included.
MOST_CALLS = {"append": 65, "select": 45, "attend": 42}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_repeated_call_makes_few_calls(gpu: NoGpu, operation: str) -> None:
    one = Layer(CSA)
    one.make_known(operation)
    given = one.inputs(operation)
    call = getattr(one.handle, operation)
    call(**given)
    calls: Counter[str] = Counter()
    no_gpu_file = NoGpu.get_current_device.__code__.co_filename

    def count(frame: FrameType, event: str, what: object) -> None:
        if frame.f_code.co_filename in (no_gpu_file, __file__):
            return  # what stands for the driver costs nothing here
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(what, "__qualname__", repr(what))] += 1

    gc.disable()
    sys.setprofile(count)
    try:
        call(**given)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert calls["Repetition.run"] == 1
    assert calls.total() <= MOST_CALLS[operation], calls
