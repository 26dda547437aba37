"""Plans: the buffers of a step against a token-by-token model, and plans that are refused."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.buffers import StepBuffers
from dsv4.errors import ContextOverflow, OutOfBlocks, PlanError, RequestError
from dsv4.model import AttentionType, LayerSpec, ModelSpec
from dsv4.ops.columns import token_columns
from tests.oracles.bookkeeping import no_device, nothing_changes, snapshot, step_rows

TINY = ModelSpec.preset("tiny")
ROWS_OF_A_STEP = ["batch", "tokens"]


def v41_like() -> ModelSpec:
    """Ratios 1 and 2 without overlap, one layer reading another one's entries."""

    def layer(number: int, ratio: int, owner: int) -> LayerSpec:
        return LayerSpec(
            layer=number,
            attention=AttentionType.CSA,
            ratio=ratio,
            gated=owner != number or ratio > 1,
            tail_skips_last=owner == number,
            index_keys="latent" if owner == number else "none",
            index_hadamard=owner != number,
            owner=owner,
        )

    return replace(TINY, name="v41-like", layers=(layer(0, 2, 0), layer(1, 2, 0), layer(2, 1, 2)))


MODELS: dict[str, tuple[ModelSpec, dict[int, bool]]] = {
    "v4": (TINY, {4: True, 128: False}),
    "v41": (v41_like(), {1: False, 2: False}),
}


def build(
    model: ModelSpec = TINY,
    *,
    num_blocks: int = 40,
    max_requests: int = 5,
    max_step_tokens: int = 400,
    max_draft_tokens: int = 0,
    max_context: int = 1000,
) -> KVCacheManager:
    schema = CacheSchema.build(
        model, max_context=max_context, max_draft_tokens=max_draft_tokens, block_tokens=128
    )
    return KVCacheManager(
        schema, num_blocks=num_blocks, max_requests=max_requests, max_step_tokens=max_step_tokens
    )


def grow(manager: KVCacheManager, request: Request, tokens: int) -> None:
    if tokens:
        manager.commit(manager.prepare_forward([(request, tokens)]), partial=True)


# ---- what a plan writes -------------------------------------------------------------------------


def check_buffers(
    manager: KVCacheManager, steps: list[tuple[Request, int, int]], ratios: dict[int, bool]
) -> dict[int, int]:
    """Compares every row, padding included; returns the work items of each ratio."""
    schema, buffers = manager.schema, manager.memory.buffers
    narrow = all(count <= schema.max_rollback_tokens for _, _, count in steps)
    expected = step_rows(
        steps,
        ring_rows=schema.ring_rows,
        ratios=ratios,
        narrow=narrow,
    )
    assert buffers.ratios == sorted(ratios)
    for name in ROWS_OF_A_STEP + [f"items_{ratio}" for ratio in ratios]:
        rows, found = expected[name], buffers.on_device[name].tolist()
        padding = len(found[0]) - len(rows[0]) if rows else 0
        assert found[: len(rows)] == [[*row, *[-1] * padding] for row in rows], name
        assert all(value == -1 for row in found[len(rows) :] for value in row), name
    return {ratio: len(expected[f"items_{ratio}"]) for ratio in ratios}


def launch_sizes(plan: ForwardPlan) -> dict[str, int]:
    """Rows that kernels are launched for."""
    sizes = {"batch": len(plan.batch.request_rows), "tokens": len(plan.batch.tokens)}
    return sizes | {f"items {ratio}": len(rows) for ratio, rows in plan.batch.items.items()}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_buffers_hold_ragged_steps_token_by_token(name: str, seed: int):
    model, ratios = MODELS[name]
    rng = random.Random(seed)
    manager = build(model, max_draft_tokens=rng.choice((0, 4)))
    live: list[Request] = []
    addresses = None
    for _ in range(25):
        if len(live) < 5 and rng.random() < 0.5:
            live.append(manager.admit_request(rng.choice((0, 1, 200))))
        if live and rng.random() < 0.15:
            manager.release_request(live.pop(rng.randrange(len(live))))
        batch = rng.sample(live, rng.randrange(len(live) + 1))
        room = manager.memory.buffers.max_tokens
        steps = []
        for request in batch:
            most = min(room, manager.schema.max_context - request.length)
            count = min(most, rng.choice((0, 1, 1, 2, 3, 4, 5, 127, 128, 129, 150)))
            room -= count
            steps.append((request, request.length, count))
        unpublished = {id(r): r.published_blocks for r in batch}
        with_start = rng.random() < 0.5
        plan = manager.prepare_forward(
            [(r, count, start) if with_start else (r, count) for r, start, count in steps]
        )
        items = check_buffers(manager, steps, ratios)
        assert plan.requests == tuple(batch)
        assert plan.starts.tolist() == [start for _, start, _ in steps]
        assert plan.counts.tolist() == [count for _, _, count in steps]
        assert plan.num_tokens == plan.batch.padded_tokens == sum(count for _, _, count in steps)
        widest = max((count for _, _, count in steps), default=0)
        assert plan.batch.is_decode == (widest <= manager.schema.max_rollback_tokens)
        assert launch_sizes(plan) == {
            "batch": len(batch),
            "tokens": plan.num_tokens,
            **{f"items {ratio}": count for ratio, count in items.items()},
        }
        new = [
            (r.slot * manager.schema.max_blocks_per_request + j, r.block_ids[j])
            for r, start, count in steps
            for j in range(unpublished[id(r)], manager.schema.blocks_for(start + count))
        ]
        buffers = manager.memory.buffers.on_device
        at, ids = buffers["new_block_at"].tolist(), buffers["new_block_id"].tolist()
        assert list(zip(at, ids, strict=True))[: len(new)] == new
        assert set(at[len(new) :]) <= {-1}
        assert set(ids[len(new) :]) <= {-1}
        for r, start, count in steps:
            held = manager.schema.blocks_for(start + count)
            assert manager.memory.block_table[r.slot, :held].tolist() == r.block_ids[:held]
        names = ROWS_OF_A_STEP + [f"items_{ratio}" for ratio in manager.memory.buffers.ratios]
        tensors = [buffers[name] for name in names]
        pointers = [tensor.data_ptr() for tensor in tensors]
        assert addresses in (None, pointers)  # the buffers never move
        plan_tensors = (plan.batch.request_rows, plan.batch.tokens, *plan.batch.items.values())
        for cut, whole in zip(plan_tensors, tensors, strict=True):
            assert not len(cut) or cut.data_ptr() == whole.data_ptr()
        addresses = pointers
        manager.commit(plan, partial=True)
        manager.check_invariants()


def test_a_step_longer_than_the_ring_keeps_the_newest_tokens():
    manager = build(max_draft_tokens=2)
    request = manager.admit_request()
    grow(manager, request, 7)
    plan = manager.prepare_forward([(request, 300)])
    token = token_columns(plan.batch.tokens)
    assert set(token.slot.tolist()) == {request.slot}
    assert token.position.tolist() == plan.batch.positions.tolist() == list(range(7, 307))
    assert token.kept.tolist() == [0] * (300 - 130) + [1] * 130


def test_an_empty_step_is_all_padding():
    manager = build()
    manager.admit_request(10)
    plan = manager.prepare_forward([])
    assert plan.batch.is_decode
    assert set(launch_sizes(plan).values()) == {0}
    check_buffers(manager, [], MODELS["v4"][1])
    manager.commit(plan, partial=True)
    plan = manager.prepare_forward([])
    manager.commit(plan, [], partial=True)


def test_a_request_without_new_tokens_keeps_a_row_of_the_batch():
    manager = build()
    a, b = manager.admit_request(), manager.admit_request()
    grow(manager, a, 5)
    plan = manager.prepare_forward([(a, 0), (b, 2)])
    buffers = manager.memory.buffers.on_device
    assert buffers["batch"][:3].tolist() == [[a.slot, 5, 0, 0], [b.slot, 0, 2, 0], [-1] * 4]
    assert buffers["tokens"][:2, :3].tolist() == [[b.slot, 0, 1], [b.slot, 1, 1]]
    check_buffers(manager, [(a, 5, 0), (b, 0, 2)], MODELS["v4"][1])
    manager.commit(plan, partial=True)
    assert (a.length, b.length) == (5, 2)


def test_rows_of_an_earlier_larger_step_become_padding():
    manager = build()
    a, b = manager.admit_request(), manager.admit_request()
    manager.commit(manager.prepare_forward([(a, 200), (b, 150)]), partial=True)
    manager.prepare_forward([(b, 1)])
    check_buffers(manager, [(b, 150, 1)], MODELS["v4"][1])


def test_steps_of_one_shape_one_after_the_other_differ_in_their_positions():
    manager = build(max_draft_tokens=1)
    a, b = manager.admit_request(), manager.admit_request()
    grow(manager, b, 3)
    for steps in ([(a, 1), (b, 1)], [(b, 2), (a, 1)], [(a, 140), (b, 1)], [(a, 1)]):
        for _ in range(4):
            expected = [(request, request.length, count) for request, count in steps]
            plan = manager.prepare_forward(steps)
            check_buffers(manager, expected, MODELS["v4"][1])
            manager.commit(plan, partial=True)


def test_a_request_released_between_equal_steps_is_refused():
    manager = build()
    a, b = manager.admit_request(), manager.admit_request()
    grow(manager, a, 3)
    manager.commit(manager.prepare_forward([(a, 1), (b, 1)]), partial=True)
    manager.release_request(b)
    with pytest.raises(RequestError, match="released"), nothing_changes(manager):
        manager.prepare_forward([(a, 1), (b, 1)])


def test_padding_sets_the_launch_sizes_and_leaves_the_rows_empty():
    manager = build(max_draft_tokens=7)
    a, b = manager.admit_request(), manager.admit_request()
    plan = manager.prepare_forward([(a, 3)], pad_tokens=64, pad_requests=4)
    sizes = launch_sizes(plan)
    assert (plan.num_tokens, plan.batch.padded_tokens, plan.batch.is_decode) == (3, 64, True)
    assert (sizes["batch"], sizes["tokens"]) == (4, 64)
    items = check_buffers(manager, [(a, 0, 3)], MODELS["v4"][1])
    for ratio, rows in plan.batch.items.items():
        assert items[ratio] <= len(rows) <= len(manager.memory.buffers.on_device[f"items_{ratio}"])
    # the sizes depend on the padding alone, so a captured graph fits every smaller step
    manager.commit(plan, partial=True)
    for steps in ([(a, 8), (b, 8)], [(b, 1)], []):
        plan = manager.prepare_forward(steps, pad_tokens=64, pad_requests=4)
        assert launch_sizes(plan) == sizes
        manager.commit(plan, partial=True)


def test_one_kind_of_padding_leaves_the_other_as_it_is():
    manager = build()
    request = manager.admit_request()
    for padding, expected in (({"pad_tokens": 9}, (9, 1)), ({"pad_requests": 3}, (1, 3))):
        plan = manager.prepare_forward([(request, 1)], **padding)
        assert (len(plan.batch.tokens), len(plan.batch.request_rows)) == expected
        manager.commit(plan, partial=True)


@pytest.mark.parametrize("padding", [{"pad_tokens": 64}, {"pad_requests": 4}])
def test_a_wide_step_is_not_padded(padding: dict[str, int]):
    manager = build(max_draft_tokens=2)
    a, b = manager.admit_request(), manager.admit_request()
    with (
        nothing_changes(manager),
        pytest.raises(PlanError, match=r"4 tokens of one request cannot be padded: .* at most 3"),
    ):
        manager.prepare_forward([(a, 1), (b, 4)], **padding)
    manager.commit(manager.prepare_forward([(a, 1), (b, 3)], **padding), partial=True)


@pytest.mark.parametrize("name", MODELS)
def test_items_are_enough_for_the_worst_step(name: str):
    """Every request starts at the last token of a group, so that it touches the most groups."""
    model, ratios = MODELS[name]
    for tokens, requests in ((1, 1), (5, 5), (6, 5), (10, 3), (400, 5)):
        for drafts in (0, tokens):
            manager = build(model, max_draft_tokens=drafts)
            live = [manager.admit_request() for _ in range(requests)]
            for request in live:
                grow(manager, request, 127)
            counts = [tokens // requests] * requests
            counts[0] += tokens - sum(counts)
            narrow = max(counts) <= 1 + drafts
            padding = {"pad_tokens": tokens, "pad_requests": requests} if narrow else {}
            plan = manager.prepare_forward(list(zip(live, counts, strict=True)), **padding)
            steps = [(r, 127, count) for r, count in zip(live, counts, strict=True)]
            for ratio, items in check_buffers(manager, steps, ratios).items():
                assert items <= len(plan.batch.items[ratio])


# ---- blocks -------------------------------------------------------------------------------------


def test_a_step_takes_the_blocks_it_needs_and_enters_them_in_the_table():
    manager = build()
    a, b = manager.admit_request(), manager.admit_request(200)
    assert (manager.memory.block_table == -1).all()
    plan = manager.prepare_forward([(a, 130), (b, 1)])
    assert (a.block_ids, b.block_ids) == ([2, 3], [0, 1])
    assert manager.memory.block_table[a.slot].tolist() == [2, 3] + [-1] * 6
    assert (
        manager.memory.block_table[b.slot].tolist() == [0] + [-1] * 7
    )  # the second is not reached yet
    manager.commit(plan, partial=True)
    manager.commit(manager.prepare_forward([(b, 128)]), partial=True)
    assert manager.memory.block_table[b.slot].tolist() == [0, 1] + [-1] * 6


def test_a_reused_slot_gets_the_new_requests_blocks():
    manager = build(max_requests=1)
    first = manager.admit_request()
    grow(manager, first, 300)
    manager.release_request(first)
    second = manager.admit_request()
    extra = manager.allocate_block(second)
    grow(manager, second, 129)
    assert second.block_ids[0] == extra
    assert manager.memory.block_table[0, :2].tolist() == second.block_ids


def test_blocks_of_an_abandoned_plan_stay_with_the_request():
    manager = build()
    request = manager.admit_request()
    plan = manager.prepare_forward([(request, 200)])
    manager.abandon(plan)
    assert (request.length, request.block_ids) == (0, [0, 1])
    manager.check_invariants()
    again = manager.prepare_forward([(request, 200)])
    assert request.block_ids == [0, 1]
    assert manager.memory.block_table[request.slot, :2].tolist() == [0, 1]
    manager.commit(again, partial=True)
    assert request.length == 200


def test_a_device_error_takes_no_blocks_and_publishes_none(monkeypatch: pytest.MonkeyPatch):
    manager = build()
    a, b = manager.admit_request(), manager.admit_request(10)
    before = snapshot(manager)
    with monkeypatch.context() as patch:
        patch.setattr(StepBuffers, "send", no_device)
        with pytest.raises(RuntimeError, match="CUDA error"):
            manager.prepare_forward([(a, 200), (b, 10)])
    assert snapshot(manager) | {"step": None} == before | {"step": None}
    manager.check_invariants()
    manager.commit(manager.prepare_forward([(a, 200), (b, 10)]), partial=True)
    for request in (a, b):
        held = len(request.block_ids)
        assert manager.memory.block_table[request.slot, :held].tolist() == request.block_ids


def test_nothing_of_a_step_keeps_a_released_request_alive():
    manager = build()
    request = manager.admit_request()
    manager.commit(manager.prepare_forward([(request, 3)]), partial=True)
    manager.release_request(request)
    gone = weakref.ref(request)
    del request
    assert gone() is None


def test_nobody_changes_what_plans_share():
    manager = build()
    request = manager.admit_request()
    plan = manager.prepare_forward([(request, 1)])
    for shared in (plan.slots, plan.counts, plan.shape.first_rows):
        with pytest.raises(ValueError, match="read-only"):
            shared[:] = 7


def test_out_of_blocks_takes_nothing_from_any_request_of_the_step():
    manager = build(num_blocks=5)
    a, b, c = (manager.admit_request(128) for _ in range(3))
    grow(manager, a, 100)
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="wait") as caught:
        manager.prepare_forward([(a, 29), (b, 129), (c, 129)])
    assert (caught.value.needed, caught.value.free, caught.value.total) == (3, 2, 5)
    assert not caught.value.never
    manager.release_request(c)
    manager.commit(manager.prepare_forward([(a, 29), (b, 129)]), partial=True)
    assert (a.length, b.length) == (129, 129)


def test_a_step_that_can_never_fit_says_so():
    manager = build(num_blocks=2)
    request = manager.admit_request(128)
    with (
        nothing_changes(manager),
        pytest.raises(OutOfBlocks, match="a request of 3 blocks") as caught,
    ):
        manager.prepare_forward([(request, 257)])
    assert caught.value.never


# ---- plans that are refused ---------------------------------------------------------------------


def test_the_same_request_twice():
    manager = build()
    a, b = manager.admit_request(), manager.admit_request()
    with nothing_changes(manager), pytest.raises(PlanError, match="is twice"):
        manager.prepare_forward([(a, 1), (b, 1), (a, 1)])


@pytest.mark.parametrize("start", [6, 1000, 4, 0, -1])
def test_a_start_that_skips_or_repeats(start: int):
    manager = build()
    request = manager.admit_request()
    grow(manager, request, 5)
    with (
        nothing_changes(manager),
        pytest.raises(PlanError, match=f"position {start} would skip or repeat .* has 5"),
    ):
        manager.prepare_forward([(request, 1, start)])
    manager.commit(manager.prepare_forward([(request, 1, 5)]), partial=True)


NO_COUNTS = [
    -1,
    1.0,
    float("nan"),
    True,
    None,
    "1",
    np.bool_(True),
    np.array([1, 2]),
    torch.ones(2),
]


@pytest.mark.parametrize("after_an_equal_step", [False, True])
@pytest.mark.parametrize("count", NO_COUNTS, ids=str)
def test_a_count_that_is_no_count(count: object, after_an_equal_step: bool):
    manager = build()
    a, b = manager.admit_request(), manager.admit_request()
    if after_an_equal_step:
        manager.commit(manager.prepare_forward([(a, 200), (b, 1)]), partial=True)
    with nothing_changes(manager), pytest.raises(PlanError, match="count of 0 or more"):
        manager.prepare_forward([(a, 200), (b, count)])  # type: ignore[list-item]


def test_integers_of_numpy_are_counts():
    manager = build()
    request = manager.admit_request(np.int64(5))
    plan = manager.prepare_forward([(request, np.int32(1))], pad_tokens=np.uint8(4))
    assert plan.counts.tolist() == [1]
    assert plan.batch.padded_tokens == 4
    manager.commit(plan, partial=True)
    assert manager.room.extend(request, np.int64(200)) == request.block_ids[1:]
    assert manager.rewind(request, np.int64(0)).start == 0
    assert request.length == 0
    manager.check_invariants()


@pytest.mark.parametrize("count", [1001, 10**12, 10**30])
def test_a_count_beyond_every_context(count: int):
    manager = build()
    request = manager.admit_request()
    with nothing_changes(manager), pytest.raises(ContextOverflow) as caught:
        manager.prepare_forward([(request, count)])
    assert caught.value.asked_tokens == count


def test_more_tokens_than_the_buffers_hold():
    manager = build(max_step_tokens=64)
    a, b = manager.admit_request(), manager.admit_request()
    with nothing_changes(manager), pytest.raises(PlanError, match=r"65 tokens .* built for 64"):
        manager.prepare_forward([(a, 60), (b, 5)])
    manager.commit(manager.prepare_forward([(a, 60), (b, 4)]), partial=True)


def test_more_tokens_than_the_context():
    manager = build(max_context=300)
    a, b = manager.admit_request(), manager.admit_request()
    grow(manager, b, 200)
    with nothing_changes(manager), pytest.raises(ContextOverflow) as caught:
        manager.prepare_forward([(a, 10), (b, 101)])
    assert caught.value.asked_tokens == 301


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ({"pad_tokens": 2}, "cannot pad 3 tokens to 2: .* between 3 and 400"),
        ({"pad_tokens": 401}, "cannot pad 3 tokens to 401: .* between 3 and 400"),
        ({"pad_tokens": -1}, "cannot pad 3 tokens to -1"),
        ({"pad_tokens": float("nan")}, "cannot pad 3 tokens to nan"),
        ({"pad_tokens": float("inf")}, "cannot pad 3 tokens to inf"),
        ({"pad_tokens": 8.0}, "8.0"),
        ({"pad_requests": 0}, "cannot pad 1 requests to 0: .* between 1 and 5"),
        ({"pad_requests": 6}, "cannot pad 1 requests to 6: .* between 1 and 5"),
        ({"pad_requests": 2.5}, "2.5"),
    ],
)
def test_padding_that_does_not_fit(pad: dict[str, int], message: str):
    manager = build(max_draft_tokens=2)
    request = manager.admit_request()
    with nothing_changes(manager), pytest.raises(PlanError, match=message):
        manager.prepare_forward([(request, 3)], **pad)


def test_more_requests_than_slots_cannot_be_live_so_the_batch_is_full_at_most():
    manager = build(max_requests=2)
    requests = [manager.admit_request() for _ in range(2)]
    plan = manager.prepare_forward([(r, 1) for r in requests], pad_requests=2)
    assert len(plan.batch.request_rows) == 2


def test_a_second_plan_while_one_is_open():
    manager = build()
    a, b = manager.admit_request(), manager.admit_request()
    plan = manager.prepare_forward([(a, 1)])
    with nothing_changes(manager), pytest.raises(PlanError, match="still open"):
        manager.prepare_forward([(b, 1)])
    manager.commit(plan, partial=True)
    manager.commit(manager.prepare_forward([(b, 1)]), partial=True)


# ---- plans that are over or foreign -------------------------------------------------------------


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_plan_that_is_over(end: str):
    manager = build()
    request = manager.admit_request()
    plan = manager.prepare_forward([(request, 3)])
    getattr(manager, end)(plan, **({"partial": True} if end == "commit" else {}))
    length = request.length
    for call in (
        lambda: manager.commit(plan),
        lambda: manager.abandon(plan),
        lambda: manager.acquire(0, plan.batch),
    ):
        with nothing_changes(manager), pytest.raises(PlanError, match="this plan is over"):
            call()
    assert request.length == length


def test_a_plan_of_another_manager():
    manager, stranger = build(), build()
    mine = manager.prepare_forward([(manager.admit_request(), 3)])
    foreign = stranger.prepare_forward([(stranger.admit_request(), 3)])
    for call in (
        lambda: manager.commit(foreign),
        lambda: manager.abandon(foreign),
        lambda: manager.acquire(0, foreign.batch),
    ):
        with (
            nothing_changes(manager),
            nothing_changes(stranger),
            pytest.raises(PlanError, match="another manager"),
        ):
            call()
    manager.commit(mine, partial=True)
    stranger.commit(foreign, partial=True)


def test_a_failed_release_leaves_the_plan_usable():
    manager = build()
    a, b = manager.admit_request(), manager.admit_request()
    plan = manager.prepare_forward([(a, 3), (b, 2)])
    for request in (a, b):
        with nothing_changes(manager), pytest.raises(RequestError, match="still open"):
            manager.release_request(request)
    assert manager.acquire(1, plan.batch).batch is plan.batch
    manager.commit(plan, partial=True)
    manager.release_request(a)
    assert b.length == 2


# ---- commit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accepted",
    [
        [],
        [1],
        [1, 1, 1],
        [[1, 1]],
        [[1], [1, 1]],
        3,
        [1.0, 1.0],
        [float("nan"), 1],
        [True, True],
        [None, 1],
        ["1", "1"],
        [-1, 1],
        [4, 1],
        [3, 3],
        [2**63, 1],
        [2**80, 1],
        [-(2**63), 1],
        np.array([1.0, 1.0]),
        np.array([5, 1], dtype=np.uint64),
    ],
)
def test_accepted_numbers_that_do_not_fit_the_plan(accepted: object):
    manager = build(max_draft_tokens=4)
    a, b = manager.admit_request(), manager.admit_request()
    plan = manager.prepare_forward([(a, 3), (b, 2)])
    with nothing_changes(manager), pytest.raises(PlanError):
        manager.commit(plan, accepted)  # type: ignore[arg-type]
    manager.commit(plan, [1, 2], partial=True)
    assert (a.length, b.length) == (1, 2)


@pytest.mark.parametrize("max_draft_tokens", [0, 1, 4, 16])
def test_no_more_tokens_are_rejected_than_the_rings_survive(max_draft_tokens: int):
    manager = build(max_draft_tokens=max_draft_tokens)
    a, b = manager.admit_request(), manager.admit_request()
    most = 1 + max_draft_tokens
    plan = manager.prepare_forward([(a, 1), (b, most + 2)])
    with (
        nothing_changes(manager),
        pytest.raises(
            PlanError,
            match=rf"request 1 .* rejects {most + 1} tokens.* survive {most}: .* >= {most}$",
        ),
    ):
        manager.commit(plan, [1, 1])
    manager.commit(plan, [0, 2], partial=True)
    assert (a.length, b.length) == (0, 2)


def test_commit_moves_lengths_by_what_was_accepted():
    manager = build(max_draft_tokens=3)
    a, b, c = (manager.admit_request() for _ in range(3))
    manager.commit(manager.prepare_forward([(a, 4), (b, 4), (c, 0)]), [4, 1, 0], partial=True)
    assert (a.length, b.length, c.length) == (4, 1, 0)
    manager.commit(manager.prepare_forward([(b, 4, 1), (a, 1, 4)]), np.array([0, 1]), partial=True)
    assert (a.length, b.length) == (5, 1)
    manager.check_invariants()


def test_rejected_positions_are_planned_again():
    manager = build(max_draft_tokens=4)
    request = manager.admit_request()
    grow(manager, request, 126)
    manager.commit(manager.prepare_forward([(request, 5)]), [1], partial=True)
    assert (request.length, len(request.block_ids)) == (127, 2)
    blocks = list(request.block_ids)
    manager.prepare_forward([(request, 5)])
    check_buffers(manager, [(request, 127, 5)], MODELS["v4"][1])
    assert request.block_ids == blocks


def test_abandon_leaves_lengths_alone_and_lets_the_next_plan_start():
    manager = build()
    request = manager.admit_request()
    grow(manager, request, 9)
    before = snapshot(manager)["requests"]
    manager.abandon(manager.prepare_forward([(request, 100)]))
    assert snapshot(manager)["requests"] == before
    manager.release_request(request)
    manager.check_invariants()


def test_a_step_that_was_written_wider_than_can_be_undone_is_not_abandoned():
    manager = build(max_draft_tokens=1)
    request = manager.admit_request()
    plan = manager.prepare_forward([(request, 3)])
    plan.batch.written.appended.add(2)
    with nothing_changes(manager), pytest.raises(PlanError, match=r"\[2\] already wrote 3 tokens"):
        manager.abandon(plan)
    manager.commit(plan, partial=True)
    plan = manager.prepare_forward([(request, 2)])
    plan.batch.written.appended.add(2)
    manager.abandon(plan)
    assert request.length == 3
