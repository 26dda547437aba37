"""Draft layers: k draft tokens of all requests in one plan, without a rewind and without Python per
request."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import PlanError
from tests.cache.test_host_cost import calls_of
from tests.oracles.bookkeeping import nothing_changes
from tests.support.lives import TINY, assert_cold, tiny_stack
from tests.support.stack import POISON, Stack, Stream

DRAFTS = 3
(DRAFT_LAYER,) = (spec.layer for spec in TINY.layers if spec.draft)


def draft(stack: Stack, plan: ForwardPlan, streams: list[Stream], wrong: list[Stream]) -> None:
    """What a draft layer does: a token of every request at a time, which turn out to be wrong."""
    weights = stack.weights[DRAFT_LAYER]
    for nth, step in enumerate(plan.drafts):
        handle = stack.manager.acquire(DRAFT_LAYER, step)
        starts = (step.starts.tolist(), step.counts.tolist())
        rows = [
            (s.kv[DRAFT_LAYER][a] if n else torch.full((TINY.head_dim,), float("nan")))
            for s, a, n in zip(wrong, *starts, strict=True)
        ]
        padding = step.padded_tokens - len(rows)
        rows += [torch.full((TINY.head_dim,), float("nan"))] * padding
        handle.append(torch.stack(rows).bfloat16(), weights=weights)
        _, lengths = handle.gather_swa_kv()
        for row, (start, count) in enumerate(zip(*starts, strict=True)):
            if count:
                assert int(lengths[row]) == min(start + 1, TINY.window)
                assert int(step.positions[row]) == int(plan.starts[row]) + nth


@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
def test_a_step_drafts_verifies_and_commits_in_one_plan(padded: bool):
    stack = tiny_stack(drafts=DRAFTS, num_blocks=24)
    manager, draw = stack.manager, Random(2)
    requests = [manager.admit_request() for _ in range(3)]
    streams, wrong = ([stack.stream(s + k, 400) for s in range(3)] for k in (0, 50))
    stack.step([(r, s, 60 + n) for n, (r, s) in enumerate(zip(requests, streams, strict=True))])
    pads = {"pad_tokens": 16, "pad_requests": 4} if padded else {}
    addresses = set()
    for _ in range(40):
        counts = [1 + DRAFTS, draw.randint(1, 1 + DRAFTS), draw.randint(0, 2)]
        plan = manager.prepare_forward(
            list(zip(requests, counts, strict=True)), drafts=DRAFTS, **pads
        )
        addresses.add(tuple(step.tokens.data_ptr() for step in plan.drafts))
        draft(stack, plan, streams, wrong)
        assert not plan.batch.written.appended, "drafts are no part of what is stored"
        stack.write(plan, streams)
        manager.commit(plan, [draw.randint(0, count) for count in counts])
        assert all(step.done for step in plan.drafts)
    assert len(addresses) == 1, "a captured graph reads the same rows"
    for request, stream in zip(requests, streams, strict=True):
        assert request.incomplete_from is None
        assert_cold(stack, request, stream)


def test_draft_steps_show_what_a_step_of_their_own_would():
    """The same bytes as plans of one token, each committed: the flow that needs rewinds."""
    stacks = [tiny_stack(drafts=DRAFTS) for _ in range(2)]
    seen: list[list[Any]] = [[], []]
    for stack, found in zip(stacks, seen, strict=True):
        manager = stack.manager
        requests = [manager.admit_request() for _ in range(2)]
        streams, wrong = ([stack.stream(s + k, 300) for s in range(2)] for k in (0, 50))
        stack.step([(r, s, 140) for r, s in zip(requests, streams, strict=True)])
        weights = stack.weights[DRAFT_LAYER]
        kv = torch.stack([s.kv[DRAFT_LAYER][140:143] for s in wrong])
        if stack is stacks[0]:
            plan = manager.prepare_forward([(r, DRAFTS) for r in requests], drafts=DRAFTS)
            for nth, step in enumerate(plan.drafts):
                handle = manager.acquire(DRAFT_LAYER, step)
                handle.append(kv[:, nth].contiguous(), weights=weights)
                found.append(handle.gather_swa_kv())
            manager.abandon(plan)
        else:
            for nth in range(DRAFTS):
                plan = manager.prepare_forward([(r, 1) for r in requests])
                handle = manager.acquire(DRAFT_LAYER, plan.batch)
                handle.append(kv[:, nth].contiguous(), weights=weights)
                found.append(handle.gather_swa_kv())
                manager.commit(plan, partial=True)
            for request in requests:
                manager.rewind(request, 140)
        assert [r.length for r in requests] == [140, 140]
    for one, other in zip(*seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(*(s.manager.memory.slot_arena.bytes for s in stacks))


def test_drafting_makes_no_call_per_request():
    def calls(count: int) -> Counter[str]:
        schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=DRAFTS)
        manager = KVCacheManager(schema, num_blocks=count, max_requests=count, max_step_tokens=512)
        requests: list[Request] = [manager.admit_request(100) for _ in range(count)]

        def run() -> None:
            for _ in range(3):
                steps = [(request, 1 + DRAFTS) for request in requests]
                plan = manager.prepare_forward(steps, drafts=DRAFTS)
                for step in plan.drafts:
                    manager.acquire(DRAFT_LAYER, step)
                plan.mark_appended()
                manager.commit(plan)

        run()  # publishes the blocks
        return calls_of(run)

    assert calls(2) == calls(100)


@pytest.mark.parametrize("ahead", [0, 1])
def test_behind_a_plan_the_device_fills_in_where_drafts_start(ahead: int):
    stack = tiny_stack(drafts=DRAFTS, ahead=1, max_open_plans=2)
    manager, draw = stack.manager, Random(4)
    requests = [manager.admit_request(300) for _ in range(2)]
    stream = [stack.stream(s, 300) for s in range(2)]
    lengths = [0, 0]
    behind: tuple[ForwardPlan, list[int]] | None = None
    for _ in range(30):
        kept = None if behind is None else torch.tensor(behind[1])
        plan = manager.prepare_forward(
            [(r, 1 + DRAFTS) for r in requests],
            drafts=DRAFTS,
            after=None if behind is None else behind[0],
            accepted=kept,
        )
        for nth, step in enumerate(plan.drafts):
            assert step.positions.tolist() == [length + nth for length in lengths]
            assert step.request_rows.tolist() == [
                [r.slot, length + nth, 1, row]
                for row, (r, length) in enumerate(zip(requests, lengths, strict=True))
            ]
        truth = list(lengths)
        if behind is not None:
            manager.commit(*behind)
            behind = None
        assert plan.starts.tolist() == truth
        assert plan.drafts[1].starts.tolist() == [length + 1 for length in truth]
        stack.write(plan, stream)
        accepted = [draw.randint(0, 1 + DRAFTS) for _ in requests]
        lengths = [length + n for length, n in zip(lengths, accepted, strict=True)]
        if ahead:
            behind = (plan, accepted)
        else:
            manager.commit(plan, accepted)
    if behind is not None:
        manager.commit(*behind)
    for request, each in zip(requests, stream, strict=True):
        assert_cold(stack, request, each)


def test_what_is_refused():
    stack = tiny_stack(drafts=DRAFTS)
    manager = stack.manager
    request = manager.admit_request(200)
    for drafts in (-1, DRAFTS + 1, True, 1.5):
        with nothing_changes(manager), pytest.raises(PlanError, match="draft steps"):
            manager.prepare_forward([(request, 2)], drafts=drafts)  # type: ignore[arg-type]
    with nothing_changes(manager), pytest.raises(PlanError, match="chunks apart"):
        manager.prepare_forward([(request, 20)], drafts=1)
    plan = manager.prepare_forward([(request, 2)], drafts=1)
    step = plan.drafts[0]
    with pytest.raises(PlanError, match="does not draft"):
        manager.acquire(1, step)
    for end in (manager.commit, manager.abandon, manager.fail):
        with nothing_changes(manager), pytest.raises(PlanError, match="belongs to a plan"):
            end(step)
    handle = manager.acquire(DRAFT_LAYER, step)
    manager.commit(plan, partial=True)
    with pytest.raises(PlanError, match="over"):
        handle.append(torch.zeros(1, TINY.head_dim).bfloat16(), weights=stack.weights[DRAFT_LAYER])
    assert (manager.memory.slot_arena.bytes == POISON).all()
