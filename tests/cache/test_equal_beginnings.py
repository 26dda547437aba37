"""Prompts that start alike and run at the same time: one copy is left, and all are cached."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache.prefix.options import PrefixOptions, full
from tests.support.faults import Faults
from tests.support.lives import Text, assert_cold, run_to, tiny_stack
from tests.support.stack import Stack


def two_texts(stack: Stack, alike: int) -> tuple[Text, Text]:
    first = Text.random(stack, 0, 900)
    return first, first.then(Text.random(stack, 1, 900), alike)


@pytest.mark.parametrize("alike", [128, 300, 512])
@pytest.mark.parametrize("fails", [False, True])
def test_prompts_prefilled_in_one_step_keep_one_copy(alike: int, fails: bool):
    stack = tiny_stack(drafts=1, prefix=PrefixOptions(policy=full()), num_blocks=24)
    manager, texts = stack.manager, two_texts(stack, alike)
    requests = [manager.admit_request(text.ids[:600]) for text in texts]
    for _ in range(3):
        plan = manager.prepare_forward([(request, 170) for request in requests])
        stack.write(plan, [text.stream for text in texts])
        with Faults(0 if fails else None).injected():
            manager.commit(plan)
        manager.check_invariants()
    shared = min(alike, 510) // 128
    if fails:
        assert requests[0].block_ids[0] != requests[1].block_ids[0]
    else:
        assert requests[0].block_ids[:shared] == requests[1].block_ids[:shared]
        assert manager.stats().blocks_live == 10 - shared
    for request, text in zip(requests, texts, strict=True):
        row = manager.memory.block_table[request.slot, : request.published_blocks].tolist()
        assert row == request.block_ids[: request.published_blocks]
        run_to(stack, request, text, 700)
        assert_cold(stack, request, text.stream)
    for request in requests:
        manager.release_request(request)
    manager.check_invariants()
    if not fails:
        for text in texts:
            assert (
                manager.prefix.look_up(manager.prefix.prompt(text.ids[:700])).reused_tokens == 640
            )


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_are_adopted_in_order_whenever_their_ids_become_known(fails: bool):
    """Who held a cached block without the one before it would keep that from being evicted, though
    it is counted as evictable."""
    stack = tiny_stack(drafts=1, prefix=PrefixOptions(policy=full()), num_blocks=12)
    manager, text = stack.manager, Text.random(stack, 0, 400)
    first = manager.admit_request(text.ids[:300])
    run_to(stack, first, text, 300)
    late = manager.admit_request(text.ids[:1])
    while late.length < 200:  # generated; the host does not know the ids yet
        plan = manager.prepare_forward([(late, 100)])
        stack.write(plan, [text.stream])
        manager.commit(plan)
    with Faults(0 if fails else None).injected():
        manager.supply_ids(late, text.ids[1:200])
    assert (late.block_ids[0] == first.block_ids[0]) != fails
    manager.check_invariants()
    run_to(stack, late, text, 300)
    assert late.block_ids[:2] == first.block_ids[:2]
    manager.release_request(first)
    manager.check_invariants()
    assert manager.stats().blocks_evictable == 0
    assert_cold(stack, late, text.stream)
    manager.release_request(late)
    assert manager.prefix.evict() == 2


def test_a_plan_says_where_its_rows_are():
    stack = tiny_stack(drafts=3)
    manager = stack.manager
    requests = [manager.admit_request() for _ in range(3)]
    run_to(stack, requests[0], stack.stream(0, 50), 50)
    plan = manager.prepare_forward(
        [(requests[0], 2), (requests[1], 0), (requests[2], 3)], pad_tokens=8, pad_requests=4
    )
    assert plan.batch.positions.tolist() == [50, 51, 0, 1, 2, -1, -1, -1]
    assert plan.batch.clamped_positions.tolist() == [50, 51, 0, 1, 2, 0, 0, 0]
    assert plan.batch.batch_rows.tolist() == [0, 0, 2, 2, 2, -1, -1, -1]
    assert plan.batch.last_rows.tolist() == [1, 0, 4, 0]
    assert plan.batch.last_rows.dtype == torch.int64
