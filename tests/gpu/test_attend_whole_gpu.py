"""Attention of few batch-invariant queries in two launches: every bit equals that of one program
per query.

Arenas and steps as in test_attend_hopper_gpu.py: every row that no query may read is NaN, and so is
what an earlier launch has left in the workspace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import PageForm
from dsv4.kernels.hopper import attend as hopper
from dsv4.kernels.hopper import attend_whole
from dsv4.ops.calls import Attention
from tests.reference.test_attend import Step
from tests.support.gpu_steps import (
    DEVICE,
    RAGGED,
    V41_SHAPES,
    assert_nan_is_read,
    assert_right,
    make,
    max_entries,
    same,
)
from tests.support.numbers import Numbers
from tests.support.stack import PAGE_FORMS

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

PROCESSORS = 132
GUARD = 7.0

HCA: dict[str, Any] = {"ratio": 128, "page_rows": 1, "max_entries": 8_192}
LENGTHS = {**RAGGED, "hca": [(0, 1), (126, 2), (16_255, 1), (16_382, 2), (16_511, 1), (600_005, 3)]}


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (hopper, attend_whole):
        monkeypatch.setattr(module, "processors", lambda _: PROCESSORS)


def make_whole(kind: str, **more: Any) -> Step:
    return make(LENGTHS[kind], kind, **{**(HCA if kind == "hca" else {}), **more})


def elements(step: Step) -> int:
    count, heads, _ = step.q.shape
    shape = count, heads, step.window.window, max_entries(step)
    return attend_whole.workspace_elements(*shape, PROCESSORS)


def whole_call(step: Step) -> Attention:
    workspace = torch.empty(elements(step), device="meta")
    return replace(step.call(out=step.q, lse=step.q), batch_invariant=True, workspace=workspace)


def one(step: Step, *, turn: bool = True) -> tuple[Tensor, Tensor]:
    """One program per query."""

    def attend(call: Attention) -> None:
        hopper.attend(replace(call, batch_invariant=True))

    return step.run(attend, turn=turn, workspace=torch.zeros(hopper.PARTS_START, device=DEVICE))


def two(step: Step, *, turn: bool = True) -> tuple[Tensor, Tensor]:
    """Two launches; what lies around their workspace must stay."""
    end = elements(step)
    workspace = torch.full((end + 1024,), torch.nan, device=DEVICE)
    workspace[: hopper.PARTS_START] = 0
    workspace[end:] = GUARD

    def attend(call: Attention) -> None:
        call = replace(call, batch_invariant=True)
        assert attend_whole.supports(call)
        attend_whole.attend(call)

    found = step.run(attend, turn=turn, workspace=workspace[:end])
    assert (workspace[: hopper.PARTS_START] == 0).all()
    assert (workspace[end:] == GUARD).all()
    return found


@pytest.mark.parametrize(
    ("kind", "heads"),
    [("csa", 64), ("hca", 64), ("csa", 8), ("csa", 96), ("hca", 16), ("csa", 1)],
)
def test_ragged_lengths(kind: str, heads: int) -> None:
    turn = (kind, heads) != ("csa", 8)
    step = make_whole(kind, heads=heads, padding=0 if heads > 64 else 2)
    found = two(step, turn=turn)
    assert_right(step, found, turn=turn)
    assert same(found, one(step, turn=turn))


@pytest.mark.parametrize("form", PAGE_FORMS)
@pytest.mark.parametrize("name", ["pairs", "singles"])
@pytest.mark.parametrize("heads", [64, 8])
def test_records_of_v41(name: str, heads: int, form: PageForm) -> None:
    shape = dict(V41_SHAPES[name], page_form=form)
    step = make([(0, 1), (126, 3), (515, 2), (9_001, 4)], shape.pop("kind"), heads=heads, **shape)
    found = two(step)
    assert_right(step, found)
    assert same(found, one(step))


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_rows_of_a_chunk(kind: str) -> None:
    step = make_whole(kind, chunk=True, padding=1)
    found = two(step)
    assert_right(step, found)
    assert same(found, one(step))


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_every_number_of_queries_gives_the_same_bits(kind: str) -> None:
    """From 1 to 256 in any order, in two launches and in one."""
    step = make_whole(kind, padding=2)
    tokens = len(step.q)
    out, lse = one(step)
    numbers = Numbers(3)
    for count in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 34, 66, 132, 133, 256):
        rows = [row % tokens for row in numbers.permutation(256).tolist()[:count]]
        taken = step.take(rows)
        wanted = out[rows], lse[rows]
        assert same(one(taken), wanted)
        if count <= 16 or attend_whole.supports(whole_call(taken)):
            assert same(two(taken), wanted)


def test_large_logits_and_sinks_at_the_ends() -> None:
    for spread in (2.0**-6, 1.0, 2.0**5):
        step = make(LENGTHS["csa"], "csa", spread=spread)
        step.sink[:4] = torch.tensor([-torch.inf, 80.0, -80.0, 0.0])
        assert same(two(step), one(step))


def test_wild_indices_and_queries_without_keys() -> None:
    step = make(LENGTHS["csa"], "csa", padding=1)
    assert step.indices is not None
    step.indices[5] = -1
    step.indices[6, 1:] = 2**30
    step.tokens[3, 1] = -1
    out, lse = two(step)
    assert same((out, lse), one(step))
    assert (out[3] == 0).all()
    assert (lse[3] == -torch.inf).all()


def test_tokens_may_lie_apart() -> None:
    step = make(LENGTHS["csa"], "csa", padding=1)
    dense = one(step)
    tokens = len(step.q)
    q = torch.full((tokens, 128, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    q[:, :64] = step.q
    out = torch.full_like(q, GUARD)
    lse = torch.full((tokens, 128), GUARD, device=DEVICE)
    workspace = torch.full((elements(step),), torch.nan, device=DEVICE)
    call = replace(
        step.call(out=out[:, :64], lse=lse[:, :64]),
        q=q[:, :64],
        inverse_rope=step.rope,
        workspace=workspace,
        batch_invariant=True,
    )
    attend_whole.attend(call)
    live = step.tokens[:, 0] >= 0
    found = out[live][:, :64].contiguous(), lse[live][:, :64].contiguous()
    assert same(found, (dense[0][live], dense[1][live]))
    assert (out[:, 64:] == GUARD).all()
    assert (lse[:, 64:] == GUARD).all()
    assert (out[~live] == GUARD).all()


def test_a_replayed_graph_gives_the_bits_of_an_eager_launch() -> None:
    step = make(LENGTHS["csa"], "csa", padding=2)
    eager = one(step)
    captured = replace(
        step,
        q=torch.zeros_like(step.q),
        tokens=torch.full_like(step.tokens, -1),
    )
    workspace = torch.zeros(elements(step), device=DEVICE)

    def attend(call: Attention) -> None:
        attend_whole.attend(replace(call, batch_invariant=True))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = captured.run(attend, turn=True, workspace=workspace)
    graph.replay()
    assert torch.isnan(found[0]).all()
    captured.q.copy_(step.q)
    captured.tokens.copy_(step.tokens)
    for _ in range(2):
        graph.replay()
        assert same(found, eager)


@pytest.mark.parametrize("entry", [False, True], ids=["window", "entry"])
def test_a_nan_in_a_key_makes_its_queries_nan_and_no_others(entry: bool) -> None:
    assert_nan_is_read(make_whole("csa"), two, 5, entry=entry)


def test_steps_of_padding_touch_nothing() -> None:
    step = make(LENGTHS["csa"], "csa", padding=1)
    out, lse = two(step.take([len(step.q) - 1] * 16))
    assert torch.isnan(out).all()
    assert torch.isnan(lse).all()
