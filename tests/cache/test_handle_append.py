"""What handle.append refuses before anything is launched, and the layouts of input it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.errors import Dsv4Error, InvalidInput, PlanError, RequestError
from dsv4.model import ModelSpec
from dsv4.ops.calls import CompressorWeights, LayerWeights
from dsv4.reference.backend import ReferenceBackend
from tests.support.stack import Stack, Stream

TINY = ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 1, 2
NAMES = ("kv", "c", "z", "index_c", "index_z")
TOKENS = 6


@dataclass
class Call:
    """The arguments of a good append, to be spoilt."""

    stack: Stack
    request: Request
    stream: Stream
    plan: ForwardPlan
    handle: LayerCacheHandle
    tensors: dict[str, Tensor]
    weights: LayerWeights

    def append(self) -> None:
        self.handle.append(**self.tensors, weights=self.weights)


def good_call(
    layer: int, *, tokens: int = TOKENS, drafts: int = 0, state: HcaState = "raw"
) -> Call:
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=drafts, hca_state=state)
    stack = Stack(schema, layers=[layer])
    request, stream = stack.manager.admit_request(), stack.stream(0, 100)
    plan = stack.manager.prepare_forward([(request, tokens)])
    kv, projections = stack.inputs(plan, [stream], layer)
    return Call(
        stack,
        request,
        stream,
        plan,
        stack.manager.acquire(layer, plan.batch),
        dict(zip(NAMES, (kv, *projections), strict=False)),
        stack.weights[layer],
    )


def refuse(call: Call, error: type[Dsv4Error], message: str) -> None:
    """Raises before any launch, and leaves arenas and plan as they are."""

    class Refusing(ReferenceBackend):
        def append(self, *_: Any) -> None:
            raise AssertionError("launched")

        write_records = append

    manager = call.stack.manager
    before = manager.memory.block_arena.bytes.clone(), manager.memory.slot_arena.bytes.clone()
    appended = set(call.plan.batch.written.appended)
    real = call.handle.backend
    call.handle.backend = Refusing()
    with pytest.raises(error, match=message):
        call.append()
    call.handle.backend = real
    assert torch.equal(manager.memory.block_arena.bytes, before[0])
    assert torch.equal(manager.memory.slot_arena.bytes, before[1])
    assert call.plan.batch.written.appended == appended


# ---- tensors ------------------------------------------------------------------------------------


def every_other(tensor: Tensor) -> Tensor:
    """The same values with a stride of two in the last dimension."""
    return tensor.repeat_interleave(2, dim=1)[:, ::2]


SPOILERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "fp16": (lambda t: t.half(), "{name} is torch.float16, must be"),
    "fp64": (lambda t: t.double(), "{name} is torch.float64, must be"),
    "other dtype": (
        lambda t: t.float() if t.dtype == torch.bfloat16 else t.bfloat16(),
        "{name} is .* must be torch",
    ),
    "other device": (lambda t: t.to("meta"), "{name} is on meta, the cache is on cpu"),
    "one token more": (lambda t: torch.cat((t, t[:1])), "{name} has shape"),
    "one token less": (lambda t: t[:-1], "{name} has shape"),
    "no tokens": (lambda t: t[:0], "{name} has shape"),
    "one channel less": (lambda t: t[:, :-1], "{name} has shape"),
    "one dimension more": (lambda t: t[None], "{name} has shape"),
    "flat": (lambda t: t.flatten(), "{name} has shape"),
    "strided channels": (every_other, "last dimension of {name} has stride 2"),
    "transposed": (lambda t: t.T.contiguous().T, "last dimension of {name} has stride"),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
@pytest.mark.parametrize(
    ("layer", "name"),
    [(SWA, "kv"), (HCA, "c"), (HCA, "z"), (CSA, "c"), (CSA, "index_c"), (CSA, "index_z")],
)
def test_a_tensor_that_does_not_fit(layer: int, name: str, spoiler: str):
    call = good_call(layer)
    spoil, message = SPOILERS[spoiler]
    good = call.tensors[name]
    call.tensors[name] = spoil(good)
    refuse(call, InvalidInput, message.format(name=name))
    call.tensors[name] = good
    call.append()


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_missing_projection(name: str):
    call = good_call(CSA)
    del call.tensors[name]
    refuse(call, InvalidInput, f"layer 1 compresses, but {name} is missing")


@pytest.mark.parametrize(
    ("layer", "extra"),
    [(SWA, "c"), (SWA, "z"), (SWA, "index_c"), (HCA, "index_c"), (HCA, "index_z")],
)
def test_a_projection_too_many(layer: int, extra: str):
    call = good_call(layer)
    call.tensors[extra] = torch.zeros(TOKENS, 128)
    refuse(call, InvalidInput, f"layer {layer} has no compressor for .*leave it out")


# ---- weights ------------------------------------------------------------------------------------


def spoil_compressor(weights: LayerWeights, name: str, **changes: Tensor) -> LayerWeights:
    compressor: CompressorWeights = getattr(weights, name)
    return replace(weights, **{name: replace(compressor, **changes)})


WEIGHT_SPOILERS: dict[str, tuple[Callable[[LayerWeights], LayerWeights], str]] = {
    "no compressor": (lambda w: replace(w, compressor=None), "needs weights.compressor"),
    "no index compressor": (
        lambda w: replace(w, index_compressor=None),
        "needs weights.index_compressor",
    ),
    "ape of another ratio": (
        lambda w: spoil_compressor(w, "compressor", ape=torch.zeros(3, 256)),
        r"ape has shape \[3, 256\], expected \[4, 256\]",
    ),
    "bf16 ape": (
        lambda w: spoil_compressor(w, "compressor", ape=torch.zeros(4, 256).bfloat16()),
        "ape is torch.bfloat16",
    ),
    "strided ape": (
        lambda w: spoil_compressor(w, "compressor", ape=torch.zeros(256, 4).T),
        "ape is not contiguous",
    ),
    "short norm": (
        lambda w: spoil_compressor(w, "index_compressor", norm=torch.zeros(64)),
        "index_norm has shape",
    ),
    "norm elsewhere": (
        lambda w: spoil_compressor(w, "compressor", norm=torch.zeros(128, device="meta")),
        "norm is on meta",
    ),
    "short kv_norm": (lambda w: replace(w, kv_norm=torch.zeros(64)), "kv_norm has shape"),
    "bf16 kv_norm": (
        lambda w: replace(w, kv_norm=torch.zeros(128).bfloat16()),
        "kv_norm is torch.bfloat16",
    ),
    "rope of another width": (
        lambda w: replace(w, rope=torch.zeros(512, 32)),
        r"rope has shape \[512, 32\], expected \[positions, 64\]",
    ),
    "flat rope": (lambda w: replace(w, rope=torch.zeros(512)), "rope has shape"),
    "bf16 rope": (lambda w: replace(w, rope=w.rope.bfloat16()), "rope is torch.bfloat16"),
    "rope elsewhere": (lambda w: replace(w, rope=w.rope.to("meta")), "rope is on meta"),
    "strided rope": (lambda w: replace(w, rope=w.rope.T.contiguous().T), "rope is not contiguous"),
}


@pytest.mark.parametrize("spoiler", WEIGHT_SPOILERS)
def test_weights_that_do_not_fit(spoiler: str):
    call = good_call(CSA)
    spoil, message = WEIGHT_SPOILERS[spoiler]
    call.weights = spoil(call.weights)
    refuse(call, InvalidInput, message)
    call.weights = call.stack.weights[CSA]
    call.append()


def test_a_rope_table_that_ends_before_the_context_does():
    call = good_call(CSA)
    call.weights = replace(call.weights, rope=call.weights.rope[:-1])
    refuse(call, InvalidInput, "rope")


# ---- plans --------------------------------------------------------------------------------------


def test_a_handle_without_a_plan():
    call = good_call(CSA)
    call.stack.manager.acquire(CSA)
    refuse(call, PlanError, "layer 1 is not bound to a plan")
    call.stack.manager.acquire(CSA, call.plan.batch)
    call.append()


def test_a_wide_plan_is_appended_once():
    call = good_call(CSA)
    call.append()
    refuse(call, PlanError, "layer 1 has appended this plan already")


@pytest.mark.parametrize(("layer", "state"), [(CSA, "raw"), (HCA, "raw"), (HCA, "online")])
def test_a_narrow_plan_can_be_appended_again(layer: int, state: HcaState):
    call = good_call(layer, tokens=3, drafts=2, state=state)
    manager = call.stack.manager
    call.append()
    before = manager.memory.block_arena.bytes.clone(), manager.memory.slot_arena.bytes.clone()
    call.append()
    assert torch.equal(manager.memory.block_arena.bytes, before[0])
    assert torch.equal(manager.memory.slot_arena.bytes, before[1])


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_plan_that_is_over(end: str):
    call = good_call(CSA)
    backbone = call.stack.manager.schema.backbone_layers
    call.plan.mark_appended(backbone if end == "commit" else [])
    getattr(call.stack.manager, end)(call.plan)
    refuse(call, PlanError, "this plan is over")


def test_a_plan_whose_request_is_released():
    call = good_call(CSA)
    manager = call.stack.manager
    with pytest.raises(RequestError, match="plan that is still open"):
        manager.release_request(call.request)
    manager.commit(call.plan, partial=True)
    manager.release_request(call.request)
    refuse(call, PlanError, "this plan is over")


def test_more_tokens_than_planned():
    call = good_call(CSA)
    kv, projections = call.stream.kv[CSA], call.stream.projections[CSA]
    tensors = [tensor[: TOKENS + 1] for tensor in (kv, *projections)]
    call.tensors = dict(zip(NAMES, tensors, strict=True))
    refuse(call, InvalidInput, r"has shape \[7, 128\], the plan's tokens .* need \[6, 128\]")


def test_padding_rows_belong_to_the_tensors():
    schema = CacheSchema.build(TINY, max_context=512)
    stack = Stack(schema, layers=[SWA])
    request, stream = stack.manager.admit_request(), stack.stream(0, 4)
    plan = stack.manager.prepare_forward([(request, 1)], pad_tokens=4)
    handle = stack.manager.acquire(SWA, plan.batch)
    with pytest.raises(InvalidInput, match=r"padding included\) need \[4, 128\]"):
        handle.append(stream.kv[SWA][:1], weights=stack.weights[SWA])
    handle.append(stream.kv[SWA], weights=stack.weights[SWA])


# ---- layouts that work --------------------------------------------------------------------------


def assert_same_arenas(one: Stack, other: Stack) -> None:
    for name in ("block_arena", "slot_arena"):
        assert torch.equal(
            getattr(one.manager.memory, name).bytes, getattr(other.manager.memory, name).bytes
        )


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize(
    ("layer", "state"), [(SWA, "raw"), (CSA, "raw"), (HCA, "raw"), (HCA, "online")]
)
def test_rows_inside_a_wider_tensor(layer: int, state: HcaState, tokens: int):
    """As a fused projection leaves them: kv and all c and z side by side."""
    plain, strided = (good_call(layer, tokens=tokens, state=state) for _ in range(2))
    plain.append()
    floats = [tensor for name, tensor in strided.tensors.items() if name != "kv"]
    if floats:
        fused = torch.cat(floats, dim=1)
        pieces = fused.split([tensor.shape[1] for tensor in floats], dim=1)
        strided.tensors |= dict(zip(NAMES[1:], pieces, strict=False))
    kv = strided.tensors["kv"]
    strided.tensors["kv"] = torch.cat((kv, torch.full_like(kv, float("nan"))), dim=1)[:, :128]
    assert all(t.stride(0) > t.shape[1] for t in strided.tensors.values()) or layer == HCA
    strided.append()
    assert_same_arenas(plain.stack, strided.stack)


@pytest.mark.parametrize("first", [0, 1])
def test_rows_that_do_not_start_on_16_bytes_are_refused(first: int):
    """Compiled kernels load projections 16 bytes at a time."""
    call = good_call(HCA)
    wide = torch.cat((call.tensors["c"], torch.zeros(TOKENS, 5)), dim=1)
    call.tensors["c"] = wide[:, first : first + 128]
    refuse(call, InvalidInput, "16 bytes")


# ---- a wide step is written once -----------------------------------------------------------------


def test_a_wide_write_swa_is_not_repeatable_and_cannot_be_abandoned():
    call = good_call(CSA)
    handle = call.stack.manager.acquire(CSA, call.plan.batch)
    handle.write_swa(call.tensors["kv"], weights=call.weights)
    with pytest.raises(PlanError, match="appended this plan already"):
        handle.write_swa(call.tensors["kv"], weights=call.weights)
    refuse(call, PlanError, "appended this plan already")
    with pytest.raises(PlanError, match="more than the"):
        call.stack.manager.abandon(call.plan)
    call.stack.manager.commit(call.plan, partial=True)


@pytest.mark.parametrize("steps", [[None], [()], [("r",)], [(1, 2, 3, 4)]])
def test_steps_of_another_shape_are_refused(steps: list):
    manager = good_call(CSA).stack.manager
    manager.abandon(manager.room.open_plans[0])
    with pytest.raises(PlanError, match="new tokens"):
        manager.prepare_forward(steps)


@pytest.mark.parametrize("plan", [None, "plan", 3])
def test_only_plans_are_committed(plan: object):
    manager = good_call(CSA).stack.manager
    with pytest.raises(PlanError, match="not a plan"):
        manager.commit(plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["kv", "c", "index_z"])
def test_what_is_no_tensor_is_refused(name: str):
    call = good_call(CSA)
    call.tensors[name] = [1.0]
    refuse(call, InvalidInput, "must be a tensor")


@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|nested tensors):UserWarning")
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr", "to_mkldnn", "nested"])
def test_a_tensor_without_strides_is_refused(form: str):
    call = good_call(CSA)
    kv = call.tensors["kv"]
    nested = torch.nested.nested_tensor
    call.tensors["kv"] = nested([kv]) if form == "nested" else getattr(kv, form)()
    refuse(call, InvalidInput, "kv is a tensor of layout .*, must be a dense one")
