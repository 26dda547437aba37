"""DeepSeek-V4.1's layers on the Triton kernels, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import PageForm
from dsv4.errors import PlanError, SchemaMismatch
from dsv4.model import ModelSpec
from dsv4.ops.backend import Backend
from dsv4.ops.calls import Candidates, Selection
from tests.kernels.test_select import KERNEL, REFERENCE, UNTOUCHED, case, cut_rows
from tests.support.both import Both
from tests.support.numbers import Numbers
from tests.support.stack import PAGE_FORMS

TINY = ModelSpec.preset("v41-tiny")
PAIRS, SHARED, SINGLES, DRAFT = 1, 2, 3, 6


def both(**options: object) -> Both:
    return Both(model=TINY, **options)  # type: ignore[arg-type]


# ---- append --------------------------------------------------------------------------------------


def test_token_by_token_from_the_start():
    life = both(layers=range(8), requests=1)
    for _ in range(4):
        life.step({0: 1})


@pytest.mark.parametrize("form", PAGE_FORMS)
def test_padded_decode_steps(form: PageForm):
    life = both(layers=(PAIRS, SINGLES), requests=3, page_form=form)
    life.skip({0: 3, 1: 126, 2: 255})
    life.step({0: 1, 2: 1}, pad_tokens=4, pad_requests=3)
    life.step({1: 1}, pad_tokens=3, pad_requests=3)
    life.empty_step(pad_tokens=4, pad_requests=3)


@pytest.mark.parametrize("form", PAGE_FORMS)
@pytest.mark.parametrize("drafts", [1, 4])
def test_draft_steps_and_rejections(drafts: int, form: PageForm):
    """Tails are read at every length that a step can be taken back to."""
    life = both(layers=(PAIRS,), requests=2, max_draft_tokens=drafts, page_form=form)
    life.skip({0: 3, 1: 8})
    most = 1 + drafts
    life.step({0: most, 1: most}, accepted=[0, 1], pad_tokens=2 * most, pad_requests=2)
    life.step({1: most, 0: most}, accepted=[most - 1, 1])
    life.step({0: 1, 1: most}, accepted=[1, most])
    life.step({0: most, 1: 1})


def test_chunks_that_straddle_pairs_and_turn_the_tails():
    life = both(layers=(PAIRS, SHARED, SINGLES), requests=3, max_draft_tokens=2)
    life.step({0: 7, 1: 4, 2: 1})
    life.step({0: 6, 1: 5, 2: 0})
    life.step({0: 1, 2: 3})


def test_chunks_in_pages_of_whole_records():
    """Staged rows are whole too: those of the chunk, and those from the ring before it."""
    life = both(layers=(PAIRS, SINGLES), requests=2, page_form="records")
    life.skip({0: 129, 1: 2})
    life.step({0: 3, 1: 2})


def test_outliers_and_zeros():
    life = both(layers=(PAIRS, SINGLES), requests=1, stack={"spread": 3.0})
    for stream in life.streams:
        stream.projections[SINGLES][0][2] = 0
        stream.projections[PAIRS][0][:2] = 0
    life.step({0: 5})
    life.step({0: 1})


# ---- draft steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PAGE_FORMS)
def test_a_draft_step_sees_ring_and_draft_and_stores_nothing(form: PageForm):
    """Rings that have not turned and that have, padding, and a turn back at each own position."""
    life = both(layers=(DRAFT,), requests=2, max_draft_tokens=5, page_form=form)
    life.skip({0: 3, 1: 140})
    numbers = Numbers(5)
    rows, block = 12, TINY.draft_block
    kv = numbers.normal(rows, TINY.head_dim).to(torch.bfloat16)
    q = numbers.normal(rows, 2, TINY.head_dim).to(torch.bfloat16)
    found = []
    for stack, requests in zip(life.stacks, life.lives, strict=True):
        before = stack.manager.memory.slot_arena.bytes.clone()
        plan = stack.manager.prepare_forward([(r, block) for r in requests], pad_tokens=rows)
        weights = stack.weights[DRAFT]
        handle = stack.manager.acquire(DRAFT, plan.batch)
        out = torch.zeros_like(q)
        handle.attend_draft(kv, q, torch.ones(2), out, weights=weights, inverse_rope=weights.rope)
        stack.manager.abandon(plan)
        assert torch.equal(stack.manager.memory.slot_arena.bytes, before)
        found.append(out.float())
    assert torch.equal(found[0][2 * block :], torch.zeros_like(found[0][2 * block :]))
    assert (found[0] - found[1]).norm() <= 2e-3 * found[0].norm()
    # the first query of a draft sees its last key: other keys, other results
    stack, requests = life.stacks[0], life.lives[0]
    plan = stack.manager.prepare_forward([(r, block) for r in requests], pad_tokens=rows)
    handle = stack.manager.acquire(DRAFT, plan.batch)
    changed = kv.clone()
    changed[block - 1] += 1
    again, _ = handle.attend_draft(
        changed,
        q,
        torch.ones(2),
        weights=stack.weights[DRAFT],
        inverse_rope=stack.weights[DRAFT].rope,
    )
    assert not torch.equal(again[0].float(), found[0][0])
    assert torch.equal(again[block:10].float(), found[0][block:10])


def test_a_draft_step_has_a_plan_of_its_own():
    life = both(layers=(PAIRS, DRAFT), requests=1, max_draft_tokens=5)
    stack, request = life.stacks[0], life.lives[0][0]
    kv = torch.zeros((5, TINY.head_dim), dtype=torch.bfloat16)
    q = torch.zeros((5, 2, TINY.head_dim), dtype=torch.bfloat16)
    plan = stack.manager.prepare_forward([(request, 5)])
    weights = stack.weights[DRAFT]
    with pytest.raises(SchemaMismatch, match="layer 1 does not draft"):
        stack.manager.acquire(PAIRS, plan.batch).attend_draft(kv, q, torch.ones(2), weights=weights)
    handle = stack.manager.acquire(DRAFT, plan.batch)
    handle.append(kv, weights=weights)
    with pytest.raises(PlanError, match="stores nothing"):
        handle.attend_draft(kv, q, torch.ones(2), weights=weights)
    stack.manager.abandon(plan)
    plan = stack.manager.prepare_forward([(request, 4)])
    handle = stack.manager.acquire(DRAFT, plan.batch)
    with pytest.raises(PlanError, match="has 5 tokens of every request"):
        handle.attend_draft(kv[:4], q[:4], torch.ones(2), weights=weights)


# ---- cut windows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", PAGE_FORMS)
def test_a_cut_window_begins_with_the_step(form: PageForm):
    """Against the formula over the rows that a token may see, on both backends."""
    life = both(layers=(0,), requests=2, page_form=form)
    life.skip({0: 130, 1: 3})
    q = Numbers(6).normal(4, 2, TINY.head_dim).to(torch.bfloat16)
    for stack, requests in zip(life.stacks, life.lives, strict=True):
        plan = stack.manager.prepare_forward([(requests[0], 2), (requests[1], 2)])
        stack.write(plan, life.streams)
        handle = stack.manager.acquire(0, plan.batch)
        rows, lengths = handle.gather_swa_kv()
        plan.batch.window_cut, plan.batch.sizes = True, (*plan.batch.sizes, 1)
        out, _ = handle.attend(q, torch.ones(2))
        for token, (found, length) in enumerate(zip(out, lengths.tolist(), strict=True)):
            keys = rows[token, length - 1 - token % 2 : length].double()
            logits = q[token].double() @ keys.T * TINY.head_dim**-0.5
            total = torch.logaddexp(logits.logsumexp(-1), torch.ones(2).double())
            wanted = (logits - total[:, None]).exp() @ keys
            assert (found.double() - wanted).norm() <= 4e-3 * wanted.norm(), token


# ---- select in two levels ------------------------------------------------------------------------


def selected(
    backend: Backend,
    blocks: Tensor,
    *,
    publish: bool,
    top_k: int,
    rows_at_a_time: int,
    span: int = 4,
    seed: int = 0,
) -> Tensor:
    keys, tokens, q, weights = case(seed=seed)
    size = backend.select_workspace_bytes(
        rows_at_a_time, keys=keys, top_k=top_k, block_entries=span if publish else 0
    )
    out = torch.full((len(tokens), top_k), UNTOUCHED, dtype=torch.int32)
    backend.select(
        Selection(
            q=q,
            weights=weights,
            tokens=tokens,
            keys=keys,
            top_k=top_k,
            workspace=torch.full((size,), 0xFF, dtype=torch.uint8),
            out=out,
            candidates=Candidates(blocks=blocks, block_entries=span, publish=publish),
        )
    )
    return out


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("blocks", "top_k", "rows_at_a_time", "span"),
    [(4, 6, 7, 4), (4, 9, 2, 3), (20, 6, 3, 4), (80, 6, 7, 4)],
)
def test_candidates_and_what_is_selected_among_them(
    monkeypatch: pytest.MonkeyPatch,
    blocks: int,
    top_k: int,
    rows_at_a_time: int,
    span: int,
    cut: bool,
):
    if cut:
        cut_rows(monkeypatch)
    found = []
    for backend in (REFERENCE, KERNEL):
        lists = torch.full((7, blocks), UNTOUCHED, dtype=torch.int32)
        sizes = {"top_k": top_k, "rows_at_a_time": rows_at_a_time, "span": span}
        first = selected(backend, lists, publish=True, **sizes)
        second = selected(backend, lists, publish=False, seed=1, **sizes)
        found.append((lists.tolist(), first.tolist(), second.tolist()))
    assert found[0] == found[1]
    lists, _, second = found[0]
    for row, chosen in zip(lists, second, strict=True):
        live = [block for block in row if block >= 0]
        assert {entry // span for entry in chosen if entry >= 0} <= set(live)
