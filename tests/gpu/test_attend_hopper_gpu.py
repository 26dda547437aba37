"""The Hopper attention kernel against the float64 formula, the reference and the portable kernel,
on arenas where every row that no query may read is NaN.

Shapes are few: each new set of constants is compiled.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import PageForm
from dsv4.kernels.hopper import attend as hopper
from dsv4.ops.calls import Attention
from dsv4.reference import attend as reference
from tests.reference.test_attend import POISON, Step
from tests.support.gpu_steps import (
    DEVICE,
    RAGGED,
    V41_SHAPES,
    assert_an_infinite_query_gives_its_limit_or_nan,
    assert_nan_is_read,
    assert_near,
    assert_right,
    make,
    max_entries,
    run_portable,
    same,
)
from tests.support.numbers import Numbers
from tests.support.stack import PAGE_FORMS

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

PROCESSORS = 132
GUARD = 7.0


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split counts as on an H200, whatever the device."""
    set_processors(monkeypatch, PROCESSORS)


def set_processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(hopper, "processors", lambda _: count)


def shares_of(step: Step) -> tuple[int, int]:
    tokens, heads, _ = step.q.shape
    programs = hopper.processors(DEVICE)
    return hopper.shares(tokens, heads, step.window.window, max_entries(step), programs)


def run(step: Step, *, turn: bool = True) -> tuple[Tensor, Tensor]:
    """Parts of an earlier launch are NaN; what lies around them must stay."""
    assert hopper.supports(step.call(out=step.q, lse=step.q))
    end = hopper.workspace_elements(DEVICE)
    workspace = torch.full((end + 1024,), torch.nan, device=DEVICE)
    workspace[: hopper.PARTS_START] = 0
    workspace[end:] = GUARD
    found = step.run(hopper.attend, turn=turn, workspace=workspace[:end])
    assert (workspace[: hopper.PARTS_START].view(torch.int32) == 0).all(), "counters"
    assert (workspace[end:] == GUARD).all()
    return found


@pytest.mark.parametrize("kind", ["swa", "csa", "hca"])
def test_decode_of_ragged_lengths(kind: str) -> None:
    step = make(RAGGED[kind], kind, padding=2)
    turn = kind != "swa"
    found = run(step, turn=turn)
    assert_right(step, found, turn=turn)
    if kind != "swa":
        assert_near(step, found, run_portable(step))


def test_decode_of_128_heads() -> None:
    lengths = [(0, 1), (127, 1), (128, 1), (4_099, 1), (9_001, 1)]
    step = make(lengths, "csa", heads=128, top_k=1_024, slack=0, padding=1)
    assert_right(step, run(step))


@pytest.mark.parametrize("form", PAGE_FORMS)
@pytest.mark.parametrize("name", V41_SHAPES)
@pytest.mark.parametrize("heads", [64, 8])
def test_records_of_v41(name: str, heads: int, form: PageForm) -> None:
    """Split and sliced, split, whole, and a chunk of staged rows; tiles of the window and tiles of
    entries in one program and in programs of their own."""
    shape = dict(V41_SHAPES[name])
    kind = shape.pop("kind")
    ragged = [(0, 1), (1, 2), (126, 3), (255, 1), (515, 2), (1_030, 1), (9_001, 4)]
    cases = (([(9_001, 1)], False), (ragged, False), ([(700, 1)] * 150, False), ([(21, 90)], True))
    for requests, chunk in cases:
        step = make(requests, kind, heads=heads, chunk=chunk, padding=1, page_form=form, **shape)
        found = run(step)
        assert_right(step, found)
        assert same(run(step), found)
        if not chunk:
            assert_near(step, found, run_portable(step))
        if form == "records":
            planes = make(requests, kind, heads=heads, chunk=chunk, padding=1, **shape)
            assert same(run(planes), found)


@pytest.mark.parametrize(
    ("rows", "shares"), [(14, (1, 1)), (14, (3, 1)), (14, (4, 2)), (5, (21, 1)), (1, (20, 4))]
)
def test_shares_of_v41(rows: int, shares: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dict(V41_SHAPES["singles"])
    step = make([(0, 1), (126, 3), (515, 5), (9_001, 5)], shape.pop("kind"), slack=4, **shape)
    step = step.take(list(range(len(step.q) - rows, len(step.q))))
    monkeypatch.setattr(hopper, "shares", lambda *_: shares)
    assert_right(step, run(step))


def test_large_and_small_numbers_of_v41() -> None:
    """Decoded keys are the numbers divided by KEY_UNIT."""
    for spread in (2.0**-6, 2.0**6, 2.0**12):
        shape = dict(V41_SHAPES["pairs"])
        step = make([(600, 3)], shape.pop("kind"), spread=spread, **shape)
        step.q = step.q / (spread * spread)
        assert_right(step, run(step))


@pytest.mark.parametrize(
    ("kind", "heads"),
    [("csa", 8), ("csa", 16), ("csa", 32), ("csa", 96), ("hca", 16), ("swa", 1), ("hca", 48)],
)
def test_heads_of_a_rank(kind: str, heads: int) -> None:
    """Split, whole and staged; rows that are no heads are neither read nor written. 96 are a full
    block of heads and half a one."""
    for requests, chunk in ((RAGGED[kind], False), ([(700, 1)] * 150, False), ([(21, 90)], True)):
        step = make(requests, kind, heads=heads, chunk=chunk, padding=1)
        found = run(step)
        assert_right(step, found)
        if not chunk:
            assert_near(step, found, run_portable(step))


@pytest.mark.parametrize(
    ("requests", "shares"),
    [
        ([(9_001, 1)], (21, 4)),  # one tile each
        ([(9_001, 4), (100, 4)], (8, 2)),
        (RAGGED["csa"], (8, 1)),
        ([(37 * n, 4) for n in range(16)], (2, 1)),
        ([(29 * n, 4) for n in range(50)], (1, 1)),
    ],
    ids=["1 token", "8 tokens", "16 tokens", "64 tokens", "200 tokens"],
)
def test_shares_follow_the_token_count(
    requests: list[tuple[int, int]], shares: tuple[int, int]
) -> None:
    step = make(requests, "csa")
    assert shares_of(step) == shares
    assert_right(step, run(step))


@pytest.mark.parametrize(
    ("kind", "rows", "shares"),
    [
        ("csa", 16, (1, 1)),
        ("csa", 16, (3, 1)),
        ("csa", 16, (4, 2)),
        ("hca", 10, (2, 4)),
        ("hca", 10, (13, 1)),
        ("hca", 2, (33, 2)),
        ("hca", 1, (66, 1)),
    ],
)
def test_other_shares(
    kind: str, rows: int, shares: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many splits most have no tile where the context is short. No more programs than
    processors: they wait for each other."""
    step = make(RAGGED[kind], kind)
    step = step.take(list(range(len(step.q) - rows, len(step.q))))
    monkeypatch.setattr(hopper, "shares", lambda *_: shares)
    assert_right(step, run(step))


def test_launches_may_follow_each_other_on_one_workspace() -> None:
    """Counters are 0 again after every launch, whatever its shares."""
    few, many = make([(9_001, 1)], "csa"), make(RAGGED["csa"], "csa")
    workspace = torch.zeros(hopper.workspace_elements(DEVICE), device=DEVICE)
    wanted = run(few), run(many)
    for _ in range(50):
        found = tuple(
            step.run(hopper.attend, turn=True, workspace=workspace) for step in (few, many)
        )
    assert same(found[0], wanted[0])
    assert same(found[1], wanted[1])
    assert (workspace[: hopper.PARTS_START].view(torch.int32) == 0).all()


@pytest.mark.parametrize(
    ("kind", "heads", "requests", "turn"),
    [
        ("swa", 128, [(0, 20), (5, 1), (100, 60)], True),
        ("csa", 64, [(0, 70), (21, 61), (700, 62), (9_000, 7)], True),
        ("hca", 128, [(0, 5), (16_250, 140), (16_510, 2)], False),
    ],
    ids=["swa", "csa", "hca"],
)
def test_a_chunk_reads_staged_rows(
    kind: str, heads: int, requests: list[tuple[int, int]], turn: bool
) -> None:
    step = make(requests, kind, heads=heads, chunk=True, padding=3)
    assert_right(step, run(step, turn=turn), turn=turn)


def test_indices_that_are_wild_or_named_twice() -> None:
    step = make([(9_001, 4)], "csa", padding=1)
    assert step.indices is not None
    assert step.entries is not None
    visible = 9_002 // 4
    wild = torch.tensor([-1, -7, 2**30, 2**31 - 1, -(2**31), visible + 1, 40_000])
    step.indices[:] = wild.repeat(75)[:521].int()
    step.indices[1, 40:300] = 17
    step.indices[2, ::2] = torch.arange(261, device=DEVICE, dtype=torch.int32) // 3
    step.indices[3, 520] = visible - 1  # alone, the last of a tile that is not full
    found = run(step)
    assert_near(step, found, step.run(reference.attend, turn=True))
    assert_near(step, found, run_portable(step))
    assert torch.isnan(found[0][4]).all()


@pytest.mark.parametrize("processors", [PROCESSORS, 1], ids=["split", "whole"])
def test_sinks_at_the_ends(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_processors(monkeypatch, processors)
    step = make(RAGGED["csa"], "csa")
    step.sink[:4] = torch.tensor([-torch.inf, 80.0, -80.0, 0.0])
    found = run(step)
    assert_right(step, found)
    assert found[0][:, 1].abs().max() < 1e-20
    assert (found[0][:, 1] != 0).any()


@pytest.mark.parametrize("processors", [PROCESSORS, 1], ids=["split", "whole"])
def test_a_query_without_keys_gives_zero(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_processors(monkeypatch, processors)
    step = make(RAGGED["csa"], "csa")
    wanted = run(step)
    step.rope = torch.cat((step.rope[:1], step.rope))[1:]  # the row at -1 is there to be read
    step.tokens[3, 1] = -1
    step.sink[0] = -torch.inf
    out, lse = run(step)
    assert (out[3] == 0).all()
    assert (lse[3] == -torch.inf).all()
    others = [row for row in range(16) if row != 3]
    assert same((out[others, 1:], lse[others]), (wanted[0][others, 1:], wanted[1][others]))


@pytest.mark.parametrize("entry", [False, True], ids=["window", "entry"])
@pytest.mark.parametrize("record", ["fp8_ds", "v41"])
def test_a_nan_in_a_key_makes_its_queries_nan_and_no_others(record: str, entry: bool) -> None:
    more = V41_SHAPES["pairs"] if record == "v41" else {"kind": "csa", "record": record}
    for requests in (RAGGED["csa"], [(700, 1)] * 150):
        assert_nan_is_read(make(requests, **more), run, 5, entry=entry)


@pytest.mark.parametrize("processors", [PROCESSORS, 1], ids=["split", "whole"])
def test_an_infinite_query_gives_its_limit_or_nan(
    processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are no keys are zeros here, and an infinity times 0 is NaN (docs/exactness.md)."""
    set_processors(monkeypatch, processors)
    assert_an_infinite_query_gives_its_limit_or_nan(make(RAGGED["csa"], "csa", padding=1), run)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_bits_depend_on_nobody_else(kind: str) -> None:
    step = make(RAGGED[kind], kind, padding=2)
    tokens = len(step.q)
    out, lse = run(step)
    assert same(run(step), (out, lse))
    order = Numbers(1).permutation(tokens).tolist()
    assert same(run(step.take(order)), (out[order], lse[order]))
    row = tokens - 3
    alone = [tokens - 1] * (tokens - 1) + [row]  # the others are padding
    assert same(run(step.take(alone)), (out[alone], lse[alone]))


def test_a_replayed_graph_gives_the_bits_of_an_eager_launch() -> None:
    step = make(RAGGED["csa"], "csa", padding=2)
    assert step.indices is not None
    eager = run(step)
    captured = replace(
        step,
        q=torch.zeros_like(step.q),
        tokens=torch.full_like(step.tokens, -1),
        indices=torch.full_like(step.indices, -1),
    )
    workspace = torch.zeros(hopper.workspace_elements(DEVICE), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = captured.run(hopper.attend, turn=True, workspace=workspace)
    graph.replay()
    assert torch.isnan(found[0]).all()
    for static, tensor in (
        (captured.q, step.q),
        (captured.tokens, step.tokens),
        (captured.indices, step.indices),
    ):
        assert isinstance(static, Tensor)
        static.copy_(tensor)
    for _ in range(2):
        graph.replay()
        assert same(found, eager)


def test_entries_beyond_four_gigabytes() -> None:
    step = make(RAGGED["csa"], "csa")
    near = run(step)
    assert step.entries is not None
    small, table = step.entries.arena, step.entries.block_table
    before = 2**32 // small.shape[1] + 1
    arena = small.new_full((before + len(small), small.shape[1]), POISON)
    arena[before:] = small
    moved = torch.where(table < len(small), table + before, table)
    step.entries = replace(step.entries, arena=arena, block_table=moved)
    assert same(run(step), near)


def test_tokens_may_lie_apart() -> None:
    step = make(RAGGED["csa"], "csa")
    dense = run(step)
    tokens = len(step.q)
    q = torch.full((tokens, 128, 512), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    q[:, :64] = step.q
    out = torch.full_like(q, GUARD)
    lse = torch.full((tokens, 128), GUARD, device=DEVICE)
    workspace = torch.full((hopper.workspace_elements(DEVICE),), torch.nan, device=DEVICE)
    workspace[: hopper.PARTS_START] = 0
    hopper.attend(
        Attention(
            q=q[:, :64],
            sink=step.sink,
            tokens=step.tokens,
            batch=step.batch,
            window=step.window,
            entries=step.entries,
            indices=step.indices,
            out=out[:, :64],
            lse=lse[:, :64],
            inverse_rope=step.rope,
            workspace=workspace,
        )
    )
    assert same((out[:, :64].contiguous(), lse[:, :64].contiguous()), dense)
    assert (out[:, 64:] == GUARD).all()
    assert (lse[:, 64:] == GUARD).all()


def test_steps_of_padding_or_nothing_touch_nothing() -> None:
    step = make(RAGGED["csa"], "csa", padding=1)
    for rows in ([len(step.q) - 1] * 16, []):
        out, lse = run(step.take(rows))
        assert torch.isnan(out).all()
        assert torch.isnan(lse).all()
