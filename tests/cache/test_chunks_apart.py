"""Mixed steps: the decode rows of a step that also holds chunks keep their addresses and sizes, so
that a graph can be captured over them."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.errors import PlanError
from tests.oracles.bookkeeping import nothing_changes
from tests.support.lives import TINY_LAYERS, Text, assert_cold, run_to, tiny_stack
from tests.support.stack import Stack

DRAFTS = 2
PADDING = {"pad_tokens": 12, "pad_requests": 4}


def mixed_stack(**options: Any) -> tuple[Stack, list[Text]]:
    stack = tiny_stack(
        drafts=DRAFTS, prefix=PrefixOptions(policy=full()), num_blocks=40, max_requests=6, **options
    )
    return stack, [Text.random(stack, nth, 900) for nth in range(6)]


def write_halves(stack: Stack, plan: ForwardPlan, texts: list[Text], order: int = 1) -> None:
    """Layer by layer, the one half and then the other."""
    assert plan.decode is not None
    narrow = len(plan.decode.requests)
    streams = [text.stream for text in texts]
    work = [(plan.decode, streams[:narrow])]
    if plan.prefill is not None:
        work.append((plan.prefill, streams[narrow:]))
    for layer in TINY_LAYERS:
        for half, given in work[::order]:
            if given:
                stack.write(half, given, layers=[layer])
            else:
                half.mark_appended([layer])


def life(seed: int, steps: int) -> list[tuple[list[tuple[int, int]], list[int]]]:
    """(request, tokens) of each step, decodes first, and what is accepted. Requests 3 to 5 are in
    their prompts, which end one by one."""
    draw, left, found = Random(seed), {3: 500, 4: 300, 5: 390}, []
    for _ in range(steps):
        step = [(row, draw.randint(1, 1 + DRAFTS)) for row in range(3) if draw.random() < 0.9]
        chunks = [row for row, tokens in left.items() if tokens > 100 and draw.random() < 0.6]
        for row in chunks:
            count = draw.choice((40, 90))
            left[row] -= count
            step.append((row, count))
        kept = [draw.randint(0, n) if row < 3 else n for row, n in step]
        found.append((step, kept))
    return found


def run(apart: bool, seed: int = 0, order: int = 1) -> tuple[Stack, list[Any], list[Text]]:
    stack, texts = mixed_stack()
    manager = stack.manager
    requests = [
        manager.admit_request(text.ids[: 60 if n < 3 else 600]) for n, text in enumerate(texts)
    ]
    for n in range(3):
        run_to(stack, requests[n], texts[n], 60 + n)
    addresses = set()
    for step, kept in life(seed, 14):
        of_step = [texts[row] for row, _ in step]
        steps = [(requests[row], count) for row, count in step]
        ids = [
            token
            for row, count in step
            for token in texts[row].ids[requests[row].length :][:count].tolist()
        ]
        if apart:
            plan = manager.prepare_forward(steps, chunks_apart=True, **PADDING)
            half = plan.decode
            assert half is not None
            addresses.add((half.tokens.data_ptr(), half.request_rows.data_ptr()))
            assert (half.padded_tokens, half.request_rows.shape[0]) == (12, 4)
            assert {ratio: len(rows) for ratio, rows in half.items.items()} == {4: 11, 128: 8}
            write_halves(stack, plan, of_step, order)
            assert plan.is_stored
        else:
            plan = manager.prepare_forward(steps)
            stack.write(plan, [text.stream for text in of_step])
        manager.commit(plan, kept, ids=ids)
        manager.check_invariants()
    assert len(addresses) == int(apart)
    return stack, requests, texts


@pytest.mark.parametrize("order", [1, -1], ids=["decodes first", "chunks first"])
def test_a_mixed_step_in_halves_writes_what_it_writes_as_one(order: int):
    (one, *_), (halves, requests, texts) = run(False), run(True, order=order)
    for name in ("block_arena", "slot_arena"):
        assert torch.equal(*(getattr(s.manager.memory, name).bytes for s in (one, halves)))
    prefixes = [s.manager._parts.prefix for s in (one, halves)]
    snapshots = [
        {n.digest: p.pool.bytes[n.snapshot] for n in p.index.nodes() if n.snapshot is not None}
        for p in prefixes
        if p is not None
    ]
    assert snapshots[0].keys() == snapshots[1].keys()
    assert len(snapshots[0]) > 5
    for digest, rows in snapshots[0].items():
        assert torch.equal(rows, snapshots[1][digest])
    for request, text in zip(requests, texts, strict=True):
        assert_cold(halves, request, text.stream)


def test_behind_a_plan_with_chunks_apart_lengths_come_from_the_device():
    stack, texts = mixed_stack(ahead=1, max_open_plans=2)
    manager, draw = stack.manager, Random(8)
    requests = [manager.admit_request(text.ids[:600]) for text in texts[:3]]
    lengths = [0, 0, 0]
    behind: tuple[ForwardPlan, list[int]] | None = None
    for _ in range(12):
        plan = manager.prepare_forward(
            [(requests[0], 3), (requests[1], 2), (requests[2], 30)],
            chunks_apart=True,
            after=None if behind is None else behind[0],
            accepted=None if behind is None else torch.tensor(behind[1]),
            drafts=DRAFTS,
            **PADDING,
        )
        assert plan.decode is not None
        assert plan.prefill is not None
        assert plan.decode.positions[:5].tolist() == [
            *range(lengths[0], lengths[0] + 3),
            *range(lengths[1], lengths[1] + 2),
        ]
        assert plan.drafts[1].positions[:2].tolist() == [lengths[0] + 1, lengths[1] + 1]
        assert plan.prefill.starts.tolist() == [lengths[2]]
        if behind is not None:
            manager.commit(*behind)
        assert plan.decode.starts.tolist() == lengths[:2]
        write_halves(stack, plan, texts[:3])
        kept = [draw.randint(0, 3), draw.randint(0, 2), 30]
        lengths = [length + n for length, n in zip(lengths, kept, strict=True)]
        behind = (plan, kept)
    assert behind is not None
    manager.commit(*behind)
    for request, text in zip(requests, texts, strict=False):
        assert_cold(stack, request, text.stream)


def test_without_a_chunk_there_is_only_the_narrow_half():
    stack, texts = mixed_stack()
    request = stack.manager.admit_request(texts[0].ids[:50])
    plan = stack.manager.prepare_forward([(request, 2)], chunks_apart=True, **PADDING)
    assert plan.prefill is None
    assert plan.batch.is_decode
    write_halves(stack, plan, [texts[0]])
    stack.manager.commit(plan)
    empty = stack.manager.prepare_forward([], chunks_apart=True, **PADDING)
    assert empty.decode is not None
    assert empty.decode.padded_tokens == 12
    stack.manager.abandon(empty)
    assert_cold(stack, request, texts[0].stream)


def test_a_mixed_step_that_fails_tears_only_what_a_chunk_has_overwritten():
    stack, texts = mixed_stack()
    manager = stack.manager
    requests = [manager.admit_request(text.ids[:300]) for text in texts[:2]]
    for request, text in zip(requests, texts, strict=False):
        run_to(stack, request, text, 200)
    for touched in (False, True):
        plan = manager.prepare_forward([(requests[0], 2), (requests[1], 90)], chunks_apart=True)
        assert plan.decode is not None
        assert plan.prefill is not None
        stack.write(plan.decode, [texts[0].stream])
        assert not plan.is_stored
        if touched:
            stack.write(plan.prefill, [texts[1].stream], layers=[0, 1])
            with nothing_changes(manager), pytest.raises(PlanError, match="already wrote 90"):
                manager.abandon(plan)
            manager.fail(plan)
        else:
            manager.abandon(plan)
        assert [r.is_torn for r in requests] == [False, touched]
    manager.rewind(requests[1], 200)
    for request, text in zip(requests, texts, strict=False):
        run_to(stack, request, text, 310)
        assert_cold(stack, request, text.stream)
    manager.check_invariants()


def test_what_is_refused():
    stack, texts = mixed_stack()
    manager = stack.manager
    one, other = (manager.admit_request(text.ids[:300]) for text in texts[:2])
    with nothing_changes(manager), pytest.raises(PlanError, match="put the chunks last"):
        manager.prepare_forward([(one, 90), (other, 1)], chunks_apart=True)
    with nothing_changes(manager), pytest.raises(PlanError, match="cannot pad 2 tokens to 1"):
        manager.prepare_forward([(one, 2), (other, 90)], chunks_apart=True, pad_tokens=1)
    plan = manager.prepare_forward([(one, 1), (other, 90)], chunks_apart=True)
    with pytest.raises(PlanError, match="chunks of this plan are apart"):
        manager.acquire(0, plan.batch)
    assert plan.prefill is not None
    with nothing_changes(manager), pytest.raises(PlanError, match="belongs to a plan"):
        manager.commit(plan.prefill)
    assert manager.acquire(0, plan.prefill) is not manager.acquire(0, plan.decode)
    manager.abandon(plan)
    with pytest.raises(PlanError, match="over"):
        manager.acquire(0, plan.prefill)
