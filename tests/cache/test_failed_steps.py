"""Steps that only some layers have stored: nothing of them is ever found again."""

from __future__ import annotations

import numpy as np
import pytest

from dsv4.cache.flush import append_swa, maybe_flush_csa, maybe_flush_hca
from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.cache.requests import Request
from dsv4.errors import InvalidInput, PlanError, RequestError
from dsv4.model import AttentionType
from tests.support.lives import TINY_LAYERS, Text, assert_cold, run_to, tiny_stack
from tests.support.stack import Stack

DRAFT_LAYERS = [nth for nth in TINY_LAYERS if tiny_stack().schema.model.layers[nth].draft]


def prefix_stack(drafts: int = 3, **options: int) -> Stack:
    return tiny_stack(drafts=drafts, prefix=PrefixOptions(policy=full()), **options)


def reused(stack: Stack, ids: np.ndarray) -> int:
    request = stack.manager.admit_request(ids)
    stack.manager.release_request(request)
    return request.resume.reused_tokens


def test_a_decode_step_that_some_layers_appended_is_not_cached():
    stack = prefix_stack()
    manager, text = stack.manager, Text.random(stack, 0, 400)
    request = manager.admit_request(text.ids[:100])
    run_to(stack, request, text, 127)
    plan = manager.prepare_forward([(request, 1)])
    stack.write(plan, [text.stream], layers=TINY_LAYERS[:2])
    manager.commit(plan, ids=text.ids[127:128], partial=True)
    run_to(stack, request, text, 300)
    manager.release_request(request)
    assert reused(stack, text.ids[:300]) == 0
    manager.check_invariants()


def test_a_step_of_draft_layers_alone_is_not_cached_until_the_real_one_is():
    stack = prefix_stack()
    manager, text = stack.manager, Text.random(stack, 0, 400)
    request = manager.admit_request(text.ids[:100])
    run_to(stack, request, text, 127)
    plan = manager.prepare_forward([(request, 1)])
    stack.write(plan, [text.stream], layers=DRAFT_LAYERS)
    manager.commit(plan, ids=text.ids[127:128], partial=True)
    assert manager.prefix is not None
    assert len(manager.prefix.index) == 0
    manager.rewind(request, 127)
    assert len(manager.prefix.index) == 0
    run_to(stack, request, text, 300)
    manager.release_request(request)
    again = manager.admit_request(text.ids[:300])
    assert again.resume.reused_tokens == 256
    run_to(stack, again, text, 300)
    assert_cold(stack, again, text.stream)


def test_a_rewind_into_a_torn_chunk_reuses_none_of_it():
    stack = tiny_stack(prefix=PrefixOptions(policy=zero()))
    manager, text = stack.manager, Text.random(stack, 0, 900)
    request = manager.admit_request(text.ids[:800])
    run_to(stack, request, text, 256)
    plan = manager.prepare_forward([(request, 500)])
    stack.write(plan, [text.stream], layers=TINY_LAYERS[:2])
    manager.commit(plan, partial=True)
    resume = manager.rewind(request, 700)
    assert resume.reused_tokens <= 256
    run_to(stack, request, text, 700)
    assert_cold(stack, request, text.stream)


def by_hand(stack: Stack, request: Request, text: Text, *, flush: bool) -> None:
    """One token of the fine-grained calls, layer by layer."""
    plan = stack.manager.prepare_forward([(request, 1)])
    start = request.length
    for layer in TINY_LAYERS:
        handle = stack.manager.acquire(layer, plan)
        kv, projections = stack.inputs(plan, [text.stream], layer)
        append_swa(handle, kv, stack.weights[layer])
        attention = handle.schema.spec.attention
        if attention is AttentionType.SWA:
            continue
        handle.write_tail(*projections, weights=stack.weights[layer])
        if flush:
            close = maybe_flush_csa if attention is AttentionType.CSA else maybe_flush_hca
            close(handle, stack.weights[layer])
    stack.manager.commit(plan, ids=text.ids[start : start + 1], partial=not flush)


@pytest.mark.parametrize("flush", [True, False])
def test_steps_by_hand_are_cached_if_every_piece_was_written(flush: bool):
    stack = prefix_stack()
    text = Text.random(stack, 0, 300)
    request = stack.manager.admit_request(text.ids[:200])
    run_to(stack, request, text, 127)
    by_hand(stack, request, text, flush=flush)
    assert reused(stack, text.ids[:200]) == (128 if flush else 0)


def test_a_captured_graph_says_what_it_has_appended():
    stack = prefix_stack()
    manager, text = stack.manager, Text.random(stack, 0, 400)
    request = manager.admit_request(text.ids[:128])
    run_to(stack, request, text, 127)
    plan = manager.prepare_forward([(request, 1)], pad_tokens=4, pad_requests=4)
    for layers in (99, [0, -1], [True], ["0"]):
        with pytest.raises(InvalidInput, match="of a model with 5 layers"):
            plan.mark_appended(layers)  # type: ignore[arg-type]
    assert not plan.is_stored
    plan.mark_appended()
    assert plan.is_stored
    manager.commit(plan, ids=text.ids[127:128])
    with pytest.raises(PlanError, match="over"):
        plan.mark_appended()
    assert reused(stack, text.ids[:200]) == 128


# ---- fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, 1, 3, 5])
def test_after_a_failed_narrow_step_requests_go_on(layers: int):
    stack = prefix_stack()
    manager, text, wrong = (
        stack.manager,
        Text.random(stack, 0, 400),
        Text.random(stack, 1, 400),
    )
    request = manager.admit_request(text.ids[:100])
    run_to(stack, request, text, 126)
    plan = manager.prepare_forward([(request, 4)])
    stack.write(plan, [wrong.stream], layers=TINY_LAYERS[:layers])
    manager.fail(plan)
    assert (request.length, request.is_torn, manager.open_plan) == (126, False, None)
    run_to(stack, request, text, 300)
    assert_cold(stack, request, text.stream)
    manager.release_request(request)
    assert reused(stack, text.ids[:300]) == 256


@pytest.mark.parametrize("layers", [0, 1, 3, 5])
def test_after_a_failed_chunk_only_those_with_few_tokens_go_on(layers: int):
    stack = prefix_stack()
    manager = stack.manager
    texts = [Text.random(stack, nth, 700) for nth in range(2)]
    chunk, decode = (manager.admit_request(text.ids[:500]) for text in texts)
    run_to(stack, chunk, texts[0], 200)
    run_to(stack, decode, texts[1], 140)
    plan = manager.prepare_forward([(chunk, 300), (decode, 2)])
    stack.write(plan, [text.stream for text in texts], layers=TINY_LAYERS[:layers])
    manager.fail(plan)
    manager.check_invariants()
    assert (chunk.length, decode.length) == (200, 140)
    assert (chunk.is_torn, decode.is_torn) == (bool(layers), False)
    run_to(stack, decode, texts[1], 300)
    assert_cold(stack, decode, texts[1].stream)
    if layers:
        for call in (
            lambda: manager.prepare_forward([(decode, 1), (chunk, 1)]),
            lambda: manager.fork(chunk, 1),
        ):
            with pytest.raises(RequestError, match="rewind the request to 200 tokens or fewer"):
                call()
        assert manager.rewind(chunk, 200).start < 200
    run_to(stack, chunk, texts[0], 600)
    assert not chunk.is_torn
    assert_cold(stack, chunk, texts[0].stream)
    for request in (chunk, decode):
        manager.release_request(request)
    manager.check_invariants()


def test_a_failed_chunk_can_be_reset_or_released():
    stack = prefix_stack()
    manager, text = stack.manager, Text.random(stack, 0, 700)
    for end in ("reset_slot", "release_request"):
        request = manager.admit_request(500)
        plan = manager.prepare_forward([(request, 300)])
        stack.write(plan, [text.stream], layers=[0])
        manager.fail(plan)
        with pytest.raises(PlanError, match="over"):
            manager.fail(plan)
        getattr(manager, end)(request)
        assert not request.is_torn or request.released
    manager.check_invariants()
