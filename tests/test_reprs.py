"""What an interpreter, a debugger or a log shows of the public objects: one line, no tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsv4 import (
    CacheSchema,
    DiskTier,
    ForwardPlan,
    HostTier,
    KVCacheManager,
    ModelSpec,
    MooncakeTier,
    ObjectTier,
    PrefixOptions,
)
from dsv4.cache.prefix.trail import TokenIds
from dsv4.tiers import mooncake
from tests.support.stack import Stack

TINY = ModelSpec.preset("tiny")
SWA, CSA = 0, 1


def test_a_schema_says_what_it_lays_out() -> None:
    schema = CacheSchema.build(TINY, max_context=512)
    assert repr(schema) == (
        f"CacheSchema(tiny: {len(schema.layers)} layers, blocks of 128 tokens and "
        f"{schema.bytes.block:,} bytes, slots of {schema.bytes.slot:,} bytes, entries fp8_ds, "
        f"window fp8_ds, index keys mxfp4, max_context=512, layout {schema.fingerprint[:12]})"
    )
    longest = CacheSchema.build(ModelSpec.preset("v4-pro"))
    assert len(repr(longest)) < 250


def test_a_manager_says_where_it_is_and_who_holds_what() -> None:
    stack = Stack(CacheSchema.build(TINY), layers=[SWA], prefix=PrefixOptions(), num_blocks=9)
    manager = stack.manager
    empty = "KVCacheManager(tiny on cpu, reference: 0 of 4 requests; 9 blocks, 0 live, 0 cached, "
    assert repr(manager) == f"{empty}9 free)"
    ids: TokenIds = list(range(300))
    request = manager.admit_request(ids)
    assert "1 of 4 requests; 9 blocks, 3 live, 0 cached, 6 free" in repr(manager)
    plan = manager.prepare_forward([(request, 300)])
    stack.write(plan, [stack.stream(1, 300)])
    manager.commit(plan, partial=True, ids=ids)
    manager.release_request(request)
    assert "0 of 4 requests; 9 blocks, 0 live, 2 cached, 7 free" in repr(manager)


def a_plan(requests: int, **options: int) -> tuple[KVCacheManager, ForwardPlan]:
    schema = CacheSchema.build(TINY, max_context=512)
    manager = KVCacheManager(schema, num_blocks=40, max_requests=8)
    tokens = [1] * requests if options else range(1, 1 + requests)
    steps = [(manager.admit_request(), n) for n in tokens]
    return manager, manager.prepare_forward(steps, **options)


def test_a_plan_says_how_many_tokens_of_whom_and_whether_it_is_open() -> None:
    manager, plan = a_plan(2)
    assert repr(plan) == "ForwardPlan(open: 3 tokens, 2 requests: 1 at 0, 2 at 0)"
    manager.abandon(plan)
    assert repr(plan) == "ForwardPlan(over: 3 tokens, 2 requests: 1 at 0, 2 at 0)"
    first, second = plan.requests
    plan = manager.prepare_forward([(second, 5)])
    manager.commit(plan, partial=True)
    assert repr(manager.prepare_forward([(first, 0), (second, 1)])) == (
        "ForwardPlan(open: 1 tokens, 2 requests: 0 at 0, 1 at 5)"
    )


def test_a_plan_of_many_requests_and_of_none_is_one_short_line() -> None:
    manager, plan = a_plan(6, pad_tokens=8, pad_requests=8)
    assert repr(plan) == (
        "ForwardPlan(open: 6 tokens and 2 of padding, 6 requests: "
        "1 at 0, 1 at 0, 1 at 0, 1 at 0, …)"
    )
    manager.abandon(plan)
    assert repr(manager.prepare_forward([])) == "ForwardPlan(open: 0 tokens, 0 requests)"


def test_a_plan_ahead_of_its_lengths_says_that_it_does_not_know_them() -> None:
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=2, steps_ahead=1)
    stack = Stack(schema, layers=[SWA], max_open_plans=2)
    manager = stack.manager
    request = manager.admit_request()
    plan = manager.prepare_forward([(request, 3)])
    stack.write(plan, [stack.stream(1, 3)])
    kept = torch.tensor([2], dtype=torch.int32)  # on a GPU the host does not look
    ahead = manager.prepare_forward([(request, 3)], after=plan, accepted=kept)
    assert repr(ahead) == "ForwardPlan(open: 3 tokens, 1 requests: 3 at 3 at most)"


def test_a_handle_says_its_layer_and_its_plan() -> None:
    manager, plan = a_plan(1)
    assert repr(manager.acquire(CSA)) == "LayerCacheHandle(layer 1, csa: bound to no batch)"
    bound = repr(manager.acquire(CSA, plan.batch))
    assert bound == f"LayerCacheHandle(layer 1, csa: {plan.batch!r})"


def test_a_suspended_request_says_whether_a_tier_has_it() -> None:
    tier = HostTier(64 << 20)
    stack = Stack(
        CacheSchema.build(TINY, max_context=512),
        layers=range(len(TINY.layers)),
        prefix=PrefixOptions(model_id="weights"),
        tiers=[tier],
    )
    manager = stack.manager
    ids: TokenIds = list(range(40))
    request = manager.admit_request(ids)
    plan = manager.prepare_forward([(request, 40)])
    stack.write(plan, [stack.stream(1, 40)])
    manager.commit(plan, ids=ids)
    suspended = manager.tiers.suspend(request)
    states = {None: "being stored", True: "stored"}
    assert repr(suspended) in {f"Suspended(40 tokens, {each})" for each in states.values()}
    manager.tiers.drain(timeout_s=30)
    assert suspended.stored
    assert repr(suspended) == "Suspended(40 tokens, stored)"
    suspended._record, suspended._kept = None, False
    assert repr(suspended) == "Suspended(40 tokens, not stored)"
    tier.close(1.0)


def test_a_tier_says_what_it_keeps_where(tmp_path: Path) -> None:
    tiers = [HostTier(1 << 20, name="ram"), DiskTier(tmp_path / "root", 3 << 30)]
    assert [repr(tier) for tier in tiers] == [
        "HostTier('ram': 1 MiB)",
        f"DiskTier('disk': {tmp_path / 'root'}, 3 GiB)",
    ]
    for tier in tiers:
        tier.close(1.0)


def test_a_tier_shows_no_credentials() -> None:
    tier = ObjectTier("s3://key:secret@bucket/prefix", config={"region": "here"})
    assert repr(tier) == "ObjectTier('object': s3://bucket/prefix)"
    tier.close(1.0)


def test_a_mooncake_tier_says_its_master(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_client_class", lambda: None)
    tier = MooncakeTier("127.0.0.1:50051")
    assert repr(tier) == "MooncakeTier('mooncake': 127.0.0.1:50051)"
    tier.close(1.0)
