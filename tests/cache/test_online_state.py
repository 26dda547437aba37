"""HCA groups that are kept folded: what they cost, which layers have them, what they change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.cache.state import SnapshotLayout
from dsv4.errors import InvalidInput
from dsv4.model import AttentionType, LayerSpec, ModelSpec
from dsv4.reference.numerics import fold_token, gated_pool, rms_norm, rotate, to_bf16
from tests.support.numbers import Numbers
from tests.support.stack import HCA_STATES, Stack

FLASH, TINY = ModelSpec.preset("v4-flash"), ModelSpec.preset("tiny")
HCA = 2
STATE_ROW_BYTES = 3 * 512 * 4
HCA_LAYERS = 20


# ---- layout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 1, 3, 16])
def test_bytes_of_a_v4_flash_request(drafts: int):
    """Rings, CSA tails and one state an HCA layer are below 4.8 MB; each token that can be rolled
    back costs one state more."""
    raw, online = (
        CacheSchema.build(FLASH, max_draft_tokens=drafts, hca_state=state) for state in HCA_STATES
    )
    saved = HCA_LAYERS * (2 * (128 + drafts) * 512 * 4 - (2 + drafts) * STATE_ROW_BYTES)
    assert raw.bytes.slot - online.bytes.slot == saved
    assert online.bytes.block == raw.bytes.block
    if drafts == 0:
        assert online.bytes.slot == 4_825_088
        assert online.bytes.slot - HCA_LAYERS * STATE_ROW_BYTES < 4_800_000
    assert SnapshotLayout(online).row_bytes == SnapshotLayout(raw).row_bytes
    assert online.fingerprint != raw.fingerprint


@pytest.mark.parametrize("drafts", [0, 3])
def test_an_hca_layer_has_a_ring_of_states_and_no_other_tail(drafts: int):
    raw, online = (
        CacheSchema.build(TINY, max_draft_tokens=drafts, hca_state=state) for state in HCA_STATES
    )
    for layer, spec in enumerate(TINY.layers):
        names = {p.name for p in online.layout.planes if p.layer == layer and "tail" in p.kind}
        if spec.attention is AttentionType.HCA:
            assert names == {"tail_state"}
            plane = online.layout.plane("tail_state", layer)
            assert plane is not None
            assert plane.shape == (2 + drafts, 3, TINY.head_dim)
        else:
            assert names == {
                p.name for p in raw.layout.planes if p.layer == layer and "tail" in p.kind
            }
            assert not online.layers[layer].online


def test_small_groups_stay_raw_where_the_layer_is_not_hca():
    """V4.1's groups of two have no overlap either, but two rows are less than two states."""
    spec = LayerSpec(layer=0, owner=0, attention=AttentionType.CSA, ratio=2, tail_skips_last=True)
    model = replace(TINY, layers=(spec,))
    raw, online = (CacheSchema.build(model, hca_state=state) for state in HCA_STATES)
    assert online.layout.planes == raw.layout.planes


@pytest.mark.parametrize("state", ["Online", "", None, 1])
def test_a_state_that_is_none_of_the_two(state: object):
    with pytest.raises(InvalidInput, match=r"hca_state=.*choose one of raw, online"):
        CacheSchema.build(TINY, hca_state=state)  # type: ignore[arg-type]


# ---- values -------------------------------------------------------------------------------------


def fold_group(values: Tensor, logits: Tensor) -> Tensor:
    """[tokens, width] pooled by folding one token after the other."""
    state = torch.full((3, values.shape[1]), float("nan"))
    for nth, (value, logit) in enumerate(zip(values, logits, strict=True)):
        state = fold_token(state, value, logit, torch.tensor(nth == 0))
    return state[2] / state[1]


def outliers(seed: int, spread: float) -> tuple[Tensor, Tensor]:
    numbers = Numbers(seed)
    return numbers.heavy(128, 512, spread=spread), numbers.heavy(128, 512, spread=spread)


LOGITS = {
    "as they come": lambda z: z,
    "rising": lambda z: z.sort(dim=0).values,
    "falling": lambda z: z.sort(dim=0, descending=True).values,
    "all equal": torch.zeros_like,
    "far apart": lambda z: 40 * z,
    "large": lambda z: z + 1e4,
}


@pytest.mark.parametrize("shape", LOGITS)
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_a_folded_group_is_the_pooled_one_within_a_bf16_ulp(shape: str, spread: float):
    """Before norm and quantisation. Where values cancel almost to zero the ulp is that of what is
    added up, divided by 2^12: both variants round their sums there."""
    for seed in range(4):
        values, logits = outliers(seed, spread)
        logits = LOGITS[shape](logits)
        folded = fold_group(values, logits)
        pooled = gated_pool(values, logits, torch.ones(128, dtype=torch.bool))
        exact = torch.softmax(logits.double(), dim=0)
        size = (exact * values.double().abs()).sum(dim=0).float()
        for found in (folded, pooled):
            error = (found.double() - (exact * values.double()).sum(dim=0)).abs()
            assert bool((error <= 2.0**-15 * size).all())
        ulps = torch.maximum(pooled.abs(), size / 2**12)
        one_ulp = ((torch.frexp(ulps)[1] - 8 + 127) << 23).view(torch.float32)
        apart = (folded.bfloat16().float() - pooled.bfloat16().float()).abs()
        assert bool((apart <= one_ulp).all())
        assert (apart > 0).float().mean() < 0.02


@pytest.mark.parametrize("infinite", [slice(0, 3), slice(50, 60), slice(1, 128)])
def test_a_logit_of_minus_infinity_weighs_nothing(infinite: slice):
    values, logits = outliers(0, 0.0)
    logits[infinite] = -torch.inf
    pooled = gated_pool(values, logits, torch.ones(128, dtype=torch.bool))
    torch.testing.assert_close(fold_group(values, logits), pooled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cut", [[128], [1] * 128, [5, 100, 23]])
def test_entries_of_both_states_differ_by_rounding_only(cut: list[int]):
    """Through the cache, in bf16 records, where nothing else rounds."""
    entries = {}
    for state in HCA_STATES:
        schema = CacheSchema.build(TINY, max_context=512, entry_format="bf16", hca_state=state)
        stack = Stack(schema, layers=[HCA], spread=1.0)
        request, stream = stack.manager.admit_request(), stack.stream(0, 128)
        for count in cut:
            stack.step([(request, stream, count)])
        views = stack.manager.acquire(HCA).memory.pool.views
        entries[state] = torch.cat(
            [views[name][request.block_ids[0], 0] for name in ("entries_nope", "entries_rope")]
        ).float()
    torch.testing.assert_close(entries["online"], entries["raw"], rtol=2**-6, atol=1e-4)


@pytest.mark.parametrize("wide", [1.0, 4.0])
def test_stored_entries_differ_as_rarely_and_as_little_as_the_docs_say(wide: float):
    """V4-Flash's width, after norm and RoPE: docs/exactness.md has the bound."""
    entries = different = 0
    for seed in range(4):
        numbers = Numbers(seed)
        values = numbers.normal(16, 128, 512)
        logits = numbers.normal(16, 128, 512) * wide + numbers.normal(128, 512)
        folded = torch.stack([fold_group(*group) for group in zip(values, logits, strict=True)])
        pooled = gated_pool(values, logits, torch.ones(128, dtype=torch.bool))
        norm, angles = numbers.uniform(512) + 0.5, numbers.normal(1, 32)
        online, raw = (
            rotate(rms_norm(to_bf16(x), norm, 1e-6), angles.cos(), angles.sin()).float()
            for x in (folded, pooled)
        )
        apart = (online - raw).abs()
        assert bool((apart <= 2.0**-7 * raw.abs().amax(dim=-1, keepdim=True)).all())
        entries += raw.numel()
        different += int((apart > 0).sum())
    assert 0 < different <= entries / 1000


# ---- steps --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 60, 126, 128])
@pytest.mark.parametrize("state", HCA_STATES)
def test_a_narrow_step_can_be_appended_again(length: int, state: HcaState):
    """Nothing is folded twice: a step reads the state before it and writes only those after."""
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=3, hca_state=state)
    stack = Stack(schema, layers=[HCA])
    request, stream = stack.manager.admit_request(), stack.stream(0, 200)
    stack.step([(request, stream, length)])
    plan = stack.manager.prepare_forward([(request, 4)])
    arenas = stack.manager.memory.block_arena.bytes, stack.manager.memory.slot_arena.bytes
    stack.write(plan, [stream])
    before = [arena.clone() for arena in arenas]
    for _ in range(3):
        stack.write(plan, [stream])
    for found, expected in zip(arenas, before, strict=True):
        assert torch.equal(found, expected)
