"""The portable attention kernel on whatever GPU this is, against the float64 formula and the
reference: what runs on every GPU but Hopper, and there where Hopper's own cannot be compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import PageForm
from dsv4.kernels import attend as portable
from dsv4.reference import attend as reference
from tests.support.gpu_steps import (
    DEVICE,
    RAGGED,
    V41_SHAPES,
    assert_minus_infinity_is_no_key,
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

pytestmark = pytest.mark.gpu

CHUNK = [(0, 5), (21, 60), (506, 3)]


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("swa", 1), ("swa", 64), ("csa", 8), ("csa", 32), ("csa", 64), ("csa", 96), ("csa", 128),
        ("hca", 16), ("hca", 64),
    ],
)  # fmt: skip
def test_decode_and_chunks_of_any_heads(kind: str, heads: int) -> None:
    """Split and whole, with rows in rings and staged."""
    for requests, chunk in ((RAGGED[kind], False), ([(700, 1)] * 150, False), (CHUNK, True)):
        step = make(requests, kind, heads=heads, chunk=chunk, padding=2)
        found = run_portable(step)
        assert_right(step, found)
        assert same(run_portable(step), found)


@pytest.mark.parametrize("record", ["fp8_row", "bf16"])
def test_other_records(record: str) -> None:
    step = make(RAGGED["csa"], "csa", record=record, padding=1)
    assert_right(step, run_portable(step))


@pytest.mark.parametrize("form", PAGE_FORMS)
@pytest.mark.parametrize("name", V41_SHAPES)
@pytest.mark.parametrize("heads", [64, 8])
def test_records_of_v41(name: str, heads: int, form: PageForm) -> None:
    shape = dict(V41_SHAPES[name])
    kind = shape.pop("kind")
    for requests, chunk in (([(0, 1), (126, 3), (515, 2), (9_001, 4)], False), (CHUNK, True)):
        step = make(requests, kind, heads=heads, chunk=chunk, padding=1, page_form=form, **shape)
        assert_right(step, run_portable(step))


@pytest.mark.parametrize("spread", [2.0**-6, 2.0**6])
def test_large_and_small_numbers(spread: float) -> None:
    step = make([(600, 3)], "csa", spread=spread)
    step.q = step.q / (spread * spread)
    assert_right(step, run_portable(step))


def test_indices_that_are_wild_or_named_twice() -> None:
    step = make([(9_001, 4)], "csa", padding=1)
    assert step.indices is not None
    visible = 9_002 // 4
    wild = torch.tensor([-1, -7, 2**30, 2**31 - 1, -(2**31), visible + 1, 40_000])
    step.indices[:] = wild.repeat(75)[:521].int()
    step.indices[1, 40:300] = 17
    step.indices[3, 520] = visible - 1  # alone, the last of a tile that is not full
    found = run_portable(step)
    assert_near(step, found, step.run(reference.attend, turn=True))
    assert torch.isnan(found[0][4]).all()


@pytest.mark.parametrize("entry", [False, True], ids=["window", "entry"])
@pytest.mark.parametrize("record", ["fp8_ds", "fp8_row", "bf16", "v41"])
def test_a_nan_in_a_key_makes_its_queries_nan_and_no_others(record: str, entry: bool) -> None:
    more = V41_SHAPES["pairs"] if record == "v41" else {"kind": "csa", "record": record}
    for requests in (RAGGED["csa"], [(700, 1)] * 150):
        assert_nan_is_read(make(requests, **more), run_portable, 5, entry=entry)


def test_keys_of_logit_minus_infinity_are_none() -> None:
    assert_minus_infinity_is_no_key(make(RAGGED["csa"], "csa", padding=1), run_portable)


@pytest.mark.parametrize("kind", ["csa", "hca"])
def test_bits_depend_on_nobody_else(kind: str) -> None:
    step = make(RAGGED[kind], kind, padding=2)
    tokens = len(step.q)
    out, lse = run_portable(step)
    order = Numbers(1).permutation(tokens).tolist()
    assert same(run_portable(step.take(order)), (out[order], lse[order]))
    for row in (0, tokens - 3):
        assert same(run_portable(step.take([row])), (out[[row]], lse[[row]]))


def test_a_replayed_graph_gives_the_bits_of_an_eager_launch() -> None:
    step = make(RAGGED["csa"], "csa", padding=2)
    assert step.indices is not None
    eager = run_portable(step)
    captured = replace(
        step, q=torch.zeros_like(step.q), tokens=torch.full_like(step.tokens, -1),
        indices=torch.full_like(step.indices, -1),
    )  # fmt: skip
    splits = portable.split_count(step.window.window, max_entries(step))
    workspace = torch.zeros(portable.workspace_elements(*step.q.shape, splits), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = captured.run(portable.attend, turn=True, workspace=workspace)
    graph.replay()
    assert torch.isnan(found[0]).all()
    for static, tensor in (
        (captured.q, step.q), (captured.tokens, step.tokens), (captured.indices, step.indices),
    ):  # fmt: skip
        assert isinstance(static, Tensor)
        static.copy_(tensor)
    for _ in range(2):
        graph.replay()
        assert same(found, eager)
