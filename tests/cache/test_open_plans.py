"""Several plans at once over disjoint requests: micro-batches, pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest

from dsv4.cache import build
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.errors import InvalidInput, PlanError, RequestError
from tests.oracles.bookkeeping import nothing_changes
from tests.support.lives import TINY_LAYERS, Text, assert_cold, run_to, tiny_stack
from tests.support.numbers import Numbers
from tests.support.stack import Stack


def two_lanes(**options: Any) -> Stack:
    stack = tiny_stack(drafts=2, prefix=PrefixOptions(policy=full()), num_blocks=40, **options)
    stack.manager = KVCacheManager(
        stack.schema,
        num_blocks=40,
        max_requests=4,
        max_step_tokens=512,
        prefix=PrefixOptions(policy=full()),
        max_open_plans=2,
    )
    return stack


@pytest.mark.parametrize("seed", range(3))
def test_two_plans_run_layer_by_layer_in_turns(seed: int):
    """Chunks and decodes of two micro-batches, committed in either order."""
    stack, numbers = two_lanes(), Numbers(seed)
    manager = stack.manager
    texts = [Text.random(stack, nth, 1200) for nth in range(4)]
    requests = [manager.admit_request(text.ids[:400]) for text in texts]
    for turn in range(6):
        counts = [
            int(abs(float(numbers.normal(1)[0])) * (90 if turn % 2 else 1)) + 1 for _ in range(4)
        ]
        halves = ((0, 1), (2, 3))
        plans = [manager.prepare_forward([(requests[n], counts[n]) for n in h]) for h in halves]
        manager.check_invariants()
        for layer in TINY_LAYERS:
            for plan, half in zip(plans, halves, strict=True):
                stack.write(plan, [texts[n].stream for n in half], layers=[layer])
        order = (0, 1) if turn % 3 else (1, 0)
        for nth in order:
            ids = [
                token
                for n in halves[nth]
                for token in texts[n].ids[requests[n].length :][: counts[n]].tolist()
            ]
            manager.commit(plans[nth], ids=ids)
        manager.check_invariants()
    for request, text in zip(requests, texts, strict=True):
        assert_cold(stack, request, text.stream)


def test_plans_that_are_open_at_once_share_no_request():
    stack = two_lanes()
    manager = stack.manager
    a, b, c = (manager.admit_request(10) for _ in range(3))
    first = manager.prepare_forward([(a, 1), (b, 1)])
    with nothing_changes(manager), pytest.raises(PlanError, match="no request in common"):
        manager.prepare_forward([(c, 1), (b, 1)])
    second = manager.prepare_forward([(c, 1)])
    assert manager.room.open_plans == [first, second]
    assert manager.acquire(0, first.batch) is not manager.acquire(0, second.batch)
    with nothing_changes(manager), pytest.raises(PlanError, match="2 plans are still open"):
        manager.prepare_forward([])
    for request in (a, b, c):
        with pytest.raises(RequestError, match="still open"):
            manager.release_request(request)
    manager.abandon(first)
    manager.release_request(a)
    with pytest.raises(RequestError, match="still open"):
        manager.release_request(c)
    manager.fail(second)
    manager.release_request(c)
    assert not manager.room.open_plans


def test_memory_counts_every_lane():
    schema = two_lanes().schema
    one, two = (
        build.manager_from_memory(
            schema,
            memory_bytes=200 << 20,
            max_requests=2,
            max_step_tokens=64,
            max_open_plans=plans,
        ).memory.memory_bytes()
        for plans in (1, 2)
    )
    assert two.workspace == 2 * one.workspace
    assert two.step_buffers == 2 * one.step_buffers
    assert two.total <= 200 << 20
    with pytest.raises(InvalidInput, match="max_open_plans"):
        KVCacheManager(schema, num_blocks=1, max_requests=1, max_open_plans=0)


def test_one_plan_runs_on_while_the_other_waits():
    stack = two_lanes()
    manager = stack.manager
    texts = [Text.random(stack, nth, 600) for nth in range(2)]
    waiting, busy = (manager.admit_request(text.ids[:300]) for text in texts)
    plan = manager.prepare_forward([(waiting, 200)])
    run_to(stack, busy, texts[1], 500)
    stack.write(plan, [texts[0].stream])
    manager.commit(plan)
    for request, text in ((waiting, texts[0]), (busy, texts[1])):
        run_to(stack, request, text, 550)
        assert_cold(stack, request, text.stream)
