"""DeepSeek-V4.1: what holds for V4 holds for its pairs, its single tokens and its shared layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import PageForm
from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, periodic, zero
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, PlanError, SchemaMismatch
from dsv4.metrics import prometheus_text
from dsv4.model import ModelSpec
from tests.scenarios.test_chunk_invariance import (
    Cut,
    assert_no_stray_bytes,
    assert_same_bytes,
    in_one_piece,
    live,
    random_splits,
    token_by_token,
)
from tests.scenarios.test_prefix_hits import check_hit, compute
from tests.support.attending_model import AttendingModel
from tests.support.lives import Text, assert_cold, drafted, run_to, tiny_stack
from tests.support.numbers import Numbers
from tests.support.stack import PAGE_FORMS, Stack, readable_bytes

TINY = ModelSpec.preset("v41-tiny")
LENGTHS = (1, 2, 3, 8, 129, 140)
PAIRS, READER, SINGLES, SECOND, REUSES = 1, 2, 3, 4, 5


@pytest.mark.parametrize("form", PAGE_FORMS)
@pytest.mark.parametrize("cut", [token_by_token, random_splits(0), random_splits(1)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_bytes_do_not_depend_on_steps(cut: Cut, drafts: int, form: PageForm):
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=drafts, page_form=form)
    whole = live(schema, LENGTHS, in_one_piece)
    assert_same_bytes(whole, live(schema, LENGTHS, cut))
    if cut is token_by_token:
        assert_no_stray_bytes(whole)


NIGHTLY_DRAFTS = [pytest.param(drafts, marks=pytest.mark.nightly) for drafts in (1, 5)]


@pytest.mark.parametrize("drafts", [0, 2, *NIGHTLY_DRAFTS])
def test_every_rejection_of_a_step(drafts: int):
    """From every phase of a pair and around the end of a block: what is left is a cold run's, and
    so is what follows."""
    lengths = (0, 1, 2, 3, 126, 127)
    cases = [(length, kept) for length in lengths for kept in range(2 + drafts)]
    stack = tiny_stack(drafts, model=TINY, max_requests=len(cases), num_blocks=3 * len(cases))
    true, false = stack.stream(0, 200), stack.stream(1, 200)
    requests = [stack.manager.admit_request() for _ in cases]
    for request, (length, _) in zip(requests, cases, strict=True):
        if length:
            stack.step([(request, true, length)])
    wrong = []
    for length, kept in cases:
        wrong.append(
            replace(
                true,
                kv={n: torch.cat((t[: length + kept], false.kv[n][length + kept :]))
                    for n, t in true.kv.items()},
                projections={
                    n: tuple(
                        torch.cat((a[: length + kept], b[length + kept :]))
                        for a, b in zip(rows, false.projections[n], strict=True)
                    )
                    for n, rows in true.projections.items()
                },
            )
        )  # fmt: skip
    work = [(r, w, 1 + drafts) for r, w in zip(requests, wrong, strict=True)]
    stack.step(work, accepted=[kept for _, kept in cases])
    for count in (0, 1, 1):
        if count:
            stack.step([(request, true, 1) for request in requests])
        for request in requests:
            assert_cold(stack, request, true)


@pytest.mark.parametrize("form", PAGE_FORMS)
def test_fork_and_rewind(form: PageForm):
    stack = tiny_stack(2, model=TINY, form=form, num_blocks=40)
    stream = stack.stream(0, 400)
    parent = stack.manager.admit_request()
    run_to(stack, parent, stream, 201, chunk=77)
    fork = stack.manager.fork(parent, 1)[0]
    other = stack.stream(1, 400)
    for request, tokens in ((parent, stream), (fork, stream)):
        run_to(stack, request, tokens, 204, chunk=1)
        assert_cold(stack, request, tokens)
    stack.manager.rewind(fork, 202)
    assert_cold(stack, fork, stream)
    stack.manager.rewind(parent, 0)
    run_to(stack, parent, other, 131)
    assert_cold(stack, parent, other)
    stack.manager.check_invariants()


@pytest.mark.parametrize("form", PAGE_FORMS)
@pytest.mark.parametrize("policy", [full(), periodic(256), zero()], ids=str)
def test_prefix_hits_are_cold_runs(policy: SnapshotPolicy, form: PageForm):
    options = PrefixOptions(policy=policy, snapshots=16)
    stack = tiny_stack(1, model=TINY, form=form, prefix=options, num_blocks=40)
    prompt = Text.random(stack, 0, 600)
    compute(stack, prompt, 600)
    for nth, boundary in enumerate((128, 384, 512)):
        other = Text.random(stack, 10 + nth, boundary + 300)
        resume = check_hit(stack, prompt.then(other, boundary + nth), boundary + 20, 150)
        assert resume.reused_tokens == boundary


def test_a_snapshot_has_windows_and_no_pair():
    stack = tiny_stack(0, model=TINY, prefix=PrefixOptions(policy=full(), snapshots=2))
    assert stack.manager._parts.prefix
    layout = stack.manager._parts.prefix.pool.layout
    backbone = sum(not spec.draft for spec in TINY.layers)
    assert layout.payload_bytes == backbone * 127 * stack.schema.window_format.record_bytes
    flash = CacheSchema.build(ModelSpec.preset("v41-flash"))
    assert type(layout)(flash).payload_bytes == 2_682_240


@pytest.mark.parametrize("cut", [(1,), (3, 40, 2), (200,)], ids=str)
def test_what_is_read_does_not_depend_on_steps(cut: tuple[int, ...]):
    """Through selections, candidates and other layers' entries."""
    schema = CacheSchema.build(TINY, max_context=256)
    model = AttendingModel(schema)
    ids = [n * 7 % 512 for n in range(90)]

    def run(sizes: tuple[int, ...]) -> torch.Tensor:
        manager = KVCacheManager(schema, num_blocks=4, max_requests=1, backend="reference")
        request = manager.admit_request()
        rows, nth = [], 0
        while request.length < len(ids):
            count = min(sizes[nth % len(sizes)], len(ids) - request.length)
            nth += 1
            rows.append(model.step(manager, [(request, ids[request.length :][:count])]))
        return torch.cat(rows)

    assert torch.equal(run(cut), run((90,)))


@pytest.mark.parametrize(("drafts", "more"), [(0, 0), (2, 0), (2, 1)])
def test_a_draft_that_rejected_tokens_have_robbed_of_a_row_is_refused(drafts: int, more: int):
    """It reads a whole window, and rings keep one row less of it for what can be rejected."""
    schema = CacheSchema.build(
        replace(TINY, window=16),
        block_tokens=16,
        max_context=64,
        max_draft_tokens=drafts,
        ring_rows=16 + drafts + more,
    )
    stack = Stack(schema, layers=range(len(TINY.layers)))
    stream = stack.stream(0, 60)
    request = stack.manager.admit_request()
    run_to(stack, request, stream, 40)
    expected = drafted(stack, request)
    for kept in range(1 + drafts, -1, -1):
        stack.manager.room.reset_slot(request)
        run_to(stack, request, stream, 40 - kept)
        stack.step([(request, stream, 1 + drafts)], accepted=[kept])
        assert request.length == 40
        if kept or more:
            assert torch.equal(drafted(stack, request), expected)
        else:
            with pytest.raises(PlanError, match="oldest window row"):
                drafted(stack, request)
    run_to(stack, request, stream, 41)
    assert drafted(stack, request).isfinite().all()


def test_metrics_count_its_bytes():
    stack = tiny_stack(0, model=TINY, prefix=PrefixOptions(policy=full(), snapshots=4))
    text = Text.random(stack, 0, 300)
    request = stack.manager.admit_request(text.ids)
    run_to(stack, request, text, 300)
    lines = prometheus_text(stack.manager).splitlines()
    schema = stack.schema
    assert f'dsv4_live_bytes{{arena="block"}} {3.0 * schema.bytes.block}' in lines
    assert f'dsv4_live_bytes{{arena="slot"}} {float(schema.bytes.slot)}' in lines
    assert "dsv4_live_tokens 300.0" in lines
    stack.manager.release_request(request)
    cached = {
        line.split('"')[1]: float(line.split()[-1])
        for line in prometheus_text(stack.manager).splitlines()
        if line.startswith("dsv4_prefix_cached_bytes{")
    }
    # a pair owner has half as many rows in a block as the owner of single tokens
    rows = 2 * schema.block_tokens * 3 // 2
    entry, key = schema.entry_format.record_bytes, schema.index_format.record_bytes
    assert cached["csa entries"] == rows * entry
    assert cached["csa index_keys"] == rows * key


# ---- misuse --------------------------------------------------------------------------------------


def written(layer: int) -> tuple[Stack, object]:
    stack = tiny_stack(0, model=TINY)
    request = stack.manager.admit_request()
    plan = stack.manager.prepare_forward([(request, 4)])
    stack.write(plan, [stack.stream(0, 4)], layers=sorted({TINY.layers[layer].owner, layer}))
    return stack, stack.manager.acquire(layer, plan.batch)


def queries() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = Numbers(0)
    q = numbers.normal(4, TINY.index_heads, TINY.index_dim).to(torch.bfloat16)
    return q, numbers.normal(4, TINY.index_heads).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("layer", "given", "error", "message"),
    [
        (READER, False, SchemaMismatch, "reads what layer 1 selected"),
        (REUSES, False, SchemaMismatch, "reads what layer 4 selected"),
        (SECOND, False, InvalidInput, "among the candidates of layer 3"),
        (PAIRS, True, InvalidInput, "neither gives candidates nor takes any"),
    ],
)
def test_who_selects_and_with_what(layer: int, given: bool, error: type, message: str):
    stack, handle = written(layer)
    candidates = torch.zeros((4, TINY.candidate_blocks), dtype=torch.int32) if given else None
    with pytest.raises(error, match=message):
        handle.select(*queries(), rope=stack.weights[layer].rope, candidates=candidates)


def test_candidates_of_another_size_and_too_many_entries_are_refused():
    stack, handle = written(SECOND)
    rope = stack.weights[SECOND].rope
    with pytest.raises(InvalidInput, match="the model has 4 candidate blocks"):
        handle.select(*queries(), rope=rope, candidates=torch.zeros((4, 3), dtype=torch.int32))
    lists = torch.zeros((4, 4), dtype=torch.int32)
    with pytest.raises(InvalidInput, match="only 25 are visible for certain"):
        handle.select(*queries(), rope=rope, candidates=lists, top_k=26)
    for flag in ("prepared", "round_bf16"):
        with pytest.raises(InvalidInput, match=flag):
            handle.select(*queries(), rope=rope, candidates=lists, **{flag: lists})


def test_projections_of_a_layer_are_its_own():
    stack = tiny_stack(0, model=TINY)
    request = stack.manager.admit_request()
    plan = stack.manager.prepare_forward([(request, 1)])
    rows = torch.zeros((1, 128))
    kv = rows.to(torch.bfloat16)
    singles = stack.manager.acquire(SINGLES, plan.batch)
    with pytest.raises(InvalidInput, match="without a gate: leave z out"):
        singles.append(kv, kv, rows, weights=stack.weights[SINGLES])
    with pytest.raises(InvalidInput, match=r"c is torch\.float32, must be torch\.bfloat16"):
        singles.append(kv, rows, weights=stack.weights[SINGLES])
    without = replace(stack.weights[SINGLES], index_projection=None)
    with pytest.raises(InvalidInput, match=r"needs weights\.index_projection"):
        singles.append(kv, kv, weights=without)
    for given in ({"index_projection": rows}, {"compressor": without.compressor.norm}):
        with pytest.raises(InvalidInput, match="is Tensor"):
            replace(without, **given)
    pairs = stack.manager.acquire(PAIRS, plan.batch)
    with pytest.raises(SchemaMismatch, match="close in append"):
        pairs.write_tail(rows, rows, weights=stack.weights[PAIRS])
    assert readable_bytes(stack, request)


@pytest.mark.parametrize(("reader", "owner", "drafts"), [(READER, PAIRS, 3), (SECOND, SINGLES, 0)])
def test_entries_are_read_behind_their_owner(reader: int, owner: int, drafts: int):
    """In narrow steps and in chunks: what the owner has not stored is anything."""
    stack = tiny_stack(drafts, model=TINY)
    stream, request = stack.stream(0, 4), stack.manager.admit_request()
    plan = stack.manager.prepare_forward([(request, 4)])
    stack.write(plan, [stream], layers=[reader])
    handle = stack.manager.acquire(reader, plan.batch)
    q = Numbers(1).normal(4, TINY.heads, TINY.head_dim).to(torch.bfloat16)
    indices = torch.zeros((4, 1), dtype=torch.int32)
    lists = torch.zeros((4, TINY.candidate_blocks), dtype=torch.int32)

    def reads() -> list[object]:
        calls = [
            lambda: handle.attend(q, torch.ones(TINY.heads), indices),
            lambda: handle.gather_compressed_kv(indices),
        ]
        if reader == SECOND:
            rope = stack.weights[reader].rope
            calls.append(lambda: handle.select(*queries(), rope=rope, candidates=lists))
        return calls

    for call in reads():
        with pytest.raises(PlanError, match=f"reads the entries of layer {owner}"):
            call()
    handle.gather_swa_kv()
    plan.mark_appended([owner])  # as if a graph had
    if plan.batch.is_decode:
        for call in reads():
            call()


def test_candidates_are_not_published_beside_more_entries_than_are_scored():
    """Tokens that see no more than top_k entries have no scores to choose blocks by."""
    stack = tiny_stack(0, model=TINY)
    stream, request = stack.stream(0, 60), stack.manager.admit_request()
    run_to(stack, request, stream, 39)
    plan = stack.manager.prepare_forward([(request, 1)])
    stack.write(plan, [stream], layers=[SINGLES])
    handle, rope = stack.manager.acquire(SINGLES, plan.batch), stack.weights[SINGLES].rope
    found = []
    for top_k in (None, 32):
        lists = torch.full((1, TINY.candidate_blocks), -2, dtype=torch.int32)
        q, w = (rows[:1] for rows in queries())
        handle.select(q, w, rope=rope, candidates=lists, top_k=top_k)
        found.append(lists)
    assert torch.equal(*found)
    with pytest.raises(InvalidInput, match="at most 32"):
        handle.select(q, w, rope=rope, candidates=lists, top_k=33)
    handle.select(q, w, rope=rope, top_k=33)


def test_a_draft_has_no_part_in_a_plan_with_chunks():
    """Both would stage their rows in the same place."""
    stack = tiny_stack(5, model=TINY)
    requests = [stack.manager.admit_request() for _ in range(2)]
    steps = list(zip(requests, (5, 20), strict=True))
    plan = stack.manager.prepare_forward(steps, chunks_apart=True)
    rows = torch.zeros((5, TINY.head_dim), dtype=torch.bfloat16)
    q = torch.zeros((5, TINY.heads, TINY.head_dim), dtype=torch.bfloat16)
    handle = stack.manager.acquire(7, plan.decode)
    with pytest.raises(PlanError, match="a plan for it alone"):
        handle.attend_draft(rows, q, torch.ones(TINY.heads), weights=stack.weights[7])
