"""Steps that only some layers have stored: they are committed only by a word that says so, nothing
of them is ever found again, and one in which a layer raised is no step."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from dsv4.cache.flush import append_swa, maybe_flush_csa, maybe_flush_hca
from dsv4.cache.handoff.handoff import Handoff
from dsv4.cache.prefix.captures import ChunkCaptures
from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.errors import InvalidInput, PlanError, RequestError
from dsv4.model import AttentionType
from tests.oracles.bookkeeping import nothing_changes
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
    assert manager._parts.prefix
    assert len(manager._parts.prefix.index) == 0
    manager.rewind(request, 127)
    assert len(manager._parts.prefix.index) == 0
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
        handle = stack.manager.acquire(layer, plan.batch)
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


# ---- a layer is left out -------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 4, 150])
@pytest.mark.parametrize("prefix", [None, PrefixOptions(policy=full())], ids=["plain", "prefix"])
def test_a_step_that_lacks_a_layer_is_not_committed(prefix: PrefixOptions | None, tokens: int):
    stack = tiny_stack(drafts=3, prefix=prefix)
    manager, text = stack.manager, Text.random(stack, 0, 400)
    request = manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 100)
    plan = manager.prepare_forward([(request, tokens)])
    ids = text.ids[100 : 100 + tokens]
    for layer in (0, 3, 4):
        stack.write(plan, [text.stream], layers=[layer])
    with (
        nothing_changes(manager),
        pytest.raises(PlanError, match=r"lacks the append of layers 1, 2, .*fail\(plan\)"),
    ):
        manager.commit(plan, ids=ids)
    stack.write(plan, [text.stream], layers=[1])
    with nothing_changes(manager), pytest.raises(PlanError, match="append of layer 2, "):
        manager.commit(plan, ids=ids)
    stack.write(plan, [text.stream], layers=[2])
    manager.commit(plan, ids=ids)
    assert (request.length, request.incomplete_from) == (100 + tokens, None)
    run_to(stack, request, text, 380)
    assert_cold(stack, request, text.stream)


def test_of_a_mixed_step_both_halves_are_complete():
    stack = prefix_stack()
    manager, texts = stack.manager, [Text.random(stack, nth, 300) for nth in range(2)]
    requests = [manager.admit_request(text.ids[:200]) for text in texts]
    plan = manager.prepare_forward([(requests[0], 2), (requests[1], 90)], chunks_apart=True)
    assert plan.decode is not None
    assert plan.prefill is not None
    stack.write(plan.decode, [texts[0].stream])
    stack.write(plan.prefill, [texts[1].stream], layers=[0, 1, 2])
    with nothing_changes(manager), pytest.raises(PlanError, match="layer 3 of plan"):
        manager.commit(plan)
    stack.write(plan.prefill, [texts[1].stream], layers=[3])
    manager.commit(plan)
    chunk = manager.prepare_forward([(requests[1], 90)], chunks_apart=True)
    assert chunk.prefill is not None
    stack.write(chunk.prefill, [texts[1].stream])
    manager.commit(chunk)  # the half without requests has nothing to store
    assert [r.length for r in requests] == [2, 180]


def test_what_keeps_no_token_needs_no_layer():
    stack = prefix_stack()
    request = stack.manager.admit_request(10)
    stack.manager.commit(stack.manager.prepare_forward([]))
    stack.manager.commit(stack.manager.prepare_forward([(request, 0)]))
    stack.manager.commit(stack.manager.prepare_forward([(request, 2)]), [0])
    assert (request.length, request.incomplete_from) == (0, None)


@pytest.mark.parametrize("partial", [1, None, "yes"])
def test_partial_is_a_flag(partial: Any):
    stack = prefix_stack()
    plan = stack.manager.prepare_forward([(stack.manager.admit_request(10), 1)])
    with nothing_changes(stack.manager), pytest.raises(InvalidInput, match="partial"):
        stack.manager.commit(plan, partial=partial)


@pytest.mark.parametrize("prefix", [None, PrefixOptions(policy=full())], ids=["plain", "prefix"])
def test_who_commits_a_part_of_a_step_has_an_incomplete_request(
    prefix: PrefixOptions | None,
):
    stack = tiny_stack(drafts=3, prefix=prefix)
    manager, text = stack.manager, Text.random(stack, 0, 400)
    request = manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 130)
    plan = manager.prepare_forward([(request, 1)])
    stack.write(plan, [text.stream], layers=[0, 1])
    manager.commit(plan, partial=True)
    assert (request.length, request.incomplete_from) == (131, 130)
    run_to(stack, request, text, 133)
    (fork,) = manager.fork(request, 1)
    manager.rewind(request, 131)
    assert (fork.incomplete_from, request.incomplete_from) == (130, 130)
    asked = Handoff.__new__(Handoff)  # of which nothing is needed before the request is checked
    asked._manager, asked._parts, asked._guard = manager, manager._parts, manager._parts.guard
    for each in (fork, request):
        with nothing_changes(manager), pytest.raises(RequestError, match="not all layers"):
            asked.offer(each)
    for each in (fork, request):
        manager.rewind(each, 130)
        assert each.incomplete_from is None
        run_to(stack, each, text, 300)
        assert_cold(stack, each, text.stream)


# ---- a layer raises ------------------------------------------------------------------------------


def write_until_it_raises(
    stack: Stack, plan: ForwardPlan, text: Text, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers 0 and 1 as ever; in layer 2 the device fails: before its launch, behind it, or while
    the chunk's snapshots are taken."""

    def failing(call: Any, *, first: bool) -> Any:
        def fails(*given: Any, **options: Any) -> None:
            if first:
                call(*given, **options)
            raise RuntimeError("CUDA error: out of memory")

        return fails

    stack.write(plan, [text.stream], layers=[0, 1])
    with monkeypatch.context() as patch:
        if where in ("launch", "launched"):
            backend = stack.manager._parts.backend
            broken = failing(backend.append, first=where == "launched")
            patch.setattr(backend, "append", broken, raising=False)
        else:
            broken = failing(getattr(ChunkCaptures, where), first=where == "before_append")
            patch.setattr(ChunkCaptures, where, broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            stack.write(plan, [text.stream], layers=[2])


WHERE = ["launch", "launched", "before_append", "after_append"]


@pytest.mark.parametrize("where", WHERE)
def test_a_chunk_in_which_a_layer_raised_is_neither_tried_again_nor_committed(
    where: str, monkeypatch: pytest.MonkeyPatch
):
    stack = prefix_stack()
    manager, text = stack.manager, Text.random(stack, 0, 500)
    request = manager.admit_request(text.ids[:400])
    run_to(stack, request, text, 200)
    plan = manager.prepare_forward([(request, 200)])
    write_until_it_raises(stack, plan, text, where, monkeypatch)
    for layer in (2, 3, 4):
        with pytest.raises(PlanError, match=r"layer 2 .*not repeatable: call fail\(plan\)"):
            stack.write(plan, [text.stream], layers=[layer])
    plan.mark_appended()  # nobody believes it
    for partial in (False, True):
        with (
            nothing_changes(manager),
            pytest.raises(PlanError, match=r"layer 2 raised.*call fail\(plan\)"),
        ):
            manager.commit(plan, ids=text.ids[200:400], partial=partial)
    with nothing_changes(manager), pytest.raises(PlanError, match=r"call fail\(plan\)"):
        manager.abandon(plan)
    manager.fail(plan)
    assert (request.length, request.is_torn) == (200, True)
    manager.rewind(request, 200)
    run_to(stack, request, text, 450)
    assert_cold(stack, request, text.stream)
    manager.release_request(request)
    again = manager.admit_request(text.ids[:450])
    run_to(stack, again, text, 450)
    assert_cold(stack, again, text.stream)


@pytest.mark.parametrize("tries_again", [False, True])
@pytest.mark.parametrize("where", ["launch", "launched"])
def test_a_decode_step_in_which_a_layer_raised_fails_or_is_tried_again(
    where: str, tries_again: bool, monkeypatch: pytest.MonkeyPatch
):
    stack = prefix_stack()
    manager, text = stack.manager, Text.random(stack, 0, 300)
    request = manager.admit_request(text.ids[:200])
    run_to(stack, request, text, 126)
    plan = manager.prepare_forward([(request, 4)])
    write_until_it_raises(stack, plan, text, where, monkeypatch)
    stack.write(plan, [text.stream], layers=[3, 4])
    for partial in (False, True):
        with nothing_changes(manager), pytest.raises(PlanError, match="layer 2 raised"):
            manager.commit(plan, ids=text.ids[126:130], partial=partial)
    if tries_again:
        stack.write(plan, [text.stream], layers=[2])
        manager.commit(plan, ids=text.ids[126:130])
    else:
        manager.fail(plan)
        assert not request.is_torn
    run_to(stack, request, text, 290)
    assert_cold(stack, request, text.stream)


def test_a_layer_that_has_appended_and_raises_when_it_does_so_again(
    monkeypatch: pytest.MonkeyPatch,
):
    stack = prefix_stack()
    manager, text = stack.manager, Text.random(stack, 0, 300)
    request = manager.admit_request(text.ids[:200])
    plan = manager.prepare_forward([(request, 4)])
    stack.write(plan, [text.stream])
    write_until_it_raises(stack, plan, text, "launch", monkeypatch)
    with nothing_changes(manager), pytest.raises(PlanError, match="layer 2 raised"):
        manager.commit(plan)
    manager.fail(plan)


def write_without_room(
    stack: Stack, plan: ForwardPlan, text: Text, *, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All layers, one of which has no memory for its rows of the snapshots."""

    def store(*given: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    others = [nth for nth in TINY_LAYERS if nth != layer]
    stack.write(plan, [text.stream], layers=others)
    with monkeypatch.context() as patch:
        patch.setattr(ChunkCaptures, "_store", store)
        with pytest.raises(RuntimeError):
            stack.write(plan, [text.stream], layers=[layer])


def commit_whatever_came(stack: Stack, plan: ForwardPlan) -> None:
    """What an engine does that looks at no error; the cache knows better."""
    with suppress(PlanError):
        stack.manager.commit(plan)
    if not plan.done:
        stack.manager.fail(plan)


def test_other_tokens_are_not_cached_as_those_of_a_step_that_failed(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its ids are forgotten; so are the digests that were made of them."""
    stack = tiny_stack(drafts=3, prefix=PrefixOptions(policy=full()))
    manager = stack.manager
    old, new = (Text.random(stack, nth, 500) for nth in range(2))
    request = manager.admit_request(old.ids[:300])
    plan = manager.prepare_forward([(request, 300)])
    write_without_room(stack, plan, old, layer=2, monkeypatch=monkeypatch)
    commit_whatever_came(stack, plan)
    manager.rewind(request, 0)
    run_to(stack, request, new, 300)
    manager.release_request(request)
    again = manager.admit_request(old.ids[:300])
    assert again.resume.reused_tokens == 0
    run_to(stack, again, old, 300)
    assert_cold(stack, again, old.stream)


def test_a_snapshot_that_lacks_a_layer_is_not_attached_to_the_block_of_another(
    monkeypatch: pytest.MonkeyPatch,
):
    """Who cached the blocks had no row for a snapshot, for both were a step's that failed."""
    stack = tiny_stack(drafts=3, max_open_plans=2, prefix=PrefixOptions(policy=full(), snapshots=2))
    manager, text = stack.manager, Text.random(stack, 0, 500)
    first, second = (manager.admit_request(text.ids[:300]) for _ in range(2))
    plan = manager.prepare_forward([(second, 300)])
    write_without_room(stack, plan, text, layer=3, monkeypatch=monkeypatch)
    run_to(stack, first, text, 300, chunk=300)
    commit_whatever_came(stack, plan)
    again = manager.admit_request(text.ids[:300])
    assert again.resume.reused_tokens == 256
    assert again.resume.source != "snapshot"
    run_to(stack, again, text, 300)
    assert_cold(stack, again, text.stream)


@pytest.mark.parametrize("partial", [False, True])
def test_an_error_in_the_first_of_two_chunks_leaves_nothing_of_either(partial: bool):
    """The second is planned, and run, behind the first."""
    stack = tiny_stack(drafts=3, ahead=1, max_open_plans=2, prefix=PrefixOptions(policy=full()))
    manager = stack.manager
    old, new = (Text.random(stack, nth, 700) for nth in range(2))
    request = manager.admit_request(old.ids[:512])
    first = manager.prepare_forward([(request, 256)])
    second = manager.prepare_forward([(request, 256)], after=first)
    stack.write(first, [old.stream], layers=[0, 1, 2])
    stack.write(second, [old.stream])
    if partial:
        manager.commit(first, ids=old.ids[:256], partial=True)
        manager.commit(second, ids=old.ids[256:512])
        assert request.incomplete_from == 0
    else:
        with suppress(PlanError):
            manager.commit(first)
            manager.commit(second)
        while manager.room.open_plans:
            manager.fail(manager.room.open_plans[0])
    manager.rewind(request, 0)
    run_to(stack, request, new, 512)
    manager.release_request(request)
    again = manager.admit_request(old.ids[:512])
    assert again.resume.reused_tokens == 0
    run_to(stack, again, old, 512)
    assert_cold(stack, again, old.stream)
    manager.check_invariants()


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
    assert (request.length, request.is_torn, manager.room.open_plans) == (126, False, [])
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
    for end in (manager.room.reset_slot, manager.release_request):
        request = manager.admit_request(500)
        plan = manager.prepare_forward([(request, 300)])
        stack.write(plan, [text.stream], layers=[0])
        manager.fail(plan)
        with pytest.raises(PlanError, match="over"):
            manager.fail(plan)
        end(request)
        assert not request.is_torn or request.released
    manager.check_invariants()


@pytest.mark.parametrize("end", ["abandon", "fail"])
@pytest.mark.parametrize("apart", [False, True])
def test_plans_that_never_ran_tear_nothing(end: str, apart: bool):
    """A chunk, and a decode step behind it."""
    stack = tiny_stack(drafts=3, ahead=1, max_open_plans=2, prefix=PrefixOptions(policy=full()))
    manager = stack.manager
    texts = [Text.random(stack, nth, 400) for nth in range(2)]
    requests = [manager.admit_request(text.ids[:300]) for text in texts]
    for request, text in zip(requests, texts, strict=True):
        run_to(stack, request, text, 100)
    decode, chunk = requests
    first = manager.prepare_forward([(decode, 4), (chunk, 200)], chunks_apart=apart)
    second = manager.prepare_forward([(decode, 4), (chunk, 4)], after=first)
    if end == "fail":
        manager.fail(first)
    else:
        manager.abandon(second)
        manager.abandon(first)
    assert not any(request.is_torn for request in requests)
    for request, text in zip(requests, texts, strict=True):
        run_to(stack, request, text, 320)
        assert_cold(stack, request, text.stream)


def test_a_plan_that_ran_behind_a_chunk_that_did_not_has_torn_its_request():
    stack = tiny_stack(drafts=3, ahead=1, max_open_plans=2, prefix=PrefixOptions(policy=full()))
    manager, text = stack.manager, Text.random(stack, 0, 400)
    request = manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 100)
    first = manager.prepare_forward([(request, 150)])
    second = manager.prepare_forward([(request, 4)], after=first)
    stack.write(second, [text.stream], layers=[0])
    manager.fail(first)
    assert request.is_torn
    manager.rewind(request, 100)
    run_to(stack, request, text, 300)
    assert_cold(stack, request, text.stream)
