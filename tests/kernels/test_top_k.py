"""Interpreted radix select against the reference and against sorting."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels import sizes
from dsv4.kernels import top_k as kernel
from dsv4.reference import top_k as reference
from tests.oracles.indexer import make_tokens, slow_top_k
from tests.support.numbers import Numbers

UNTOUCHED = -7
SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-30, -1e-30, 3.0, -3.0]


@pytest.fixture(params=["few rows", "many rows"])
def short_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred scores are cut into slices as long ones are."""
    shorten(monkeypatch)
    if request.param == "many rows":
        monkeypatch.setattr(sizes, "MANY_ROWS", 1)


def shorten(monkeypatch: pytest.MonkeyPatch, *, bins: int = 64, listed: int = 32) -> None:
    for name in ("MAX_ROW", "MAX_SLICE", "MIN_SLICE"):
        monkeypatch.setattr(sizes, name, 256)
    monkeypatch.setattr(kernel, "LONG_TILE", 256)
    monkeypatch.setattr(sizes, "BINS", bins)
    monkeypatch.setattr(sizes, "LIST", listed)


def select(
    scores: Tensor, tokens: Tensor, k: int, *, bf16_scores: bool = True
) -> tuple[Tensor, Tensor]:
    rows, columns = scores.shape
    size = kernel.top_k_workspace_bytes(rows, columns, k)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    results = []
    kernel_top_k = partial(kernel.top_k, bf16_scores=bf16_scores, workspace=workspace)
    for function in (kernel_top_k, reference.top_k):
        out = torch.full((rows, k), UNTOUCHED, dtype=torch.int32)
        function(scores, tokens=tokens, ratio=4, out=out)
        results.append(out)
    return results[0], results[1]


def random_scores(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    numbers = Numbers(seed)
    x = numbers.normal(rows, columns)
    if kind == "ties":
        x = torch.round(x * 2)
    elif kind == "equal":
        x = torch.full_like(x, -2.5)
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "special":
        at = numbers.integers(0, len(SPECIAL), *x.shape)
        x = torch.tensor(SPECIAL)[at]
    elif kind == "wide":
        x = numbers.heavy(rows, columns, spread=20.0)
    return x.to(torch.bfloat16).float()


KINDS = ["normal", "ties", "equal", "zeros", "special", "wide"]
# visible entries of the rows: none, one, fewer than k, k, one more, all; and padding
SEEN = [0, 1, 5, 8, 9, 255, 256, 257, None, 700]


def tokens_of(seen: list[int | None]) -> Tensor:
    return make_tokens([None if n is None else (0, 4 * n + 2 if n else 0) for n in seen])


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_row_equal_the_reference(kind: str):
    scores = random_scores(kind, len(SEEN), 700)
    for row, seen in enumerate(SEEN):
        scores[row, seen or 0 :] = torch.nan
    found, expected = select(scores, tokens_of(SEEN), 8)
    assert found.tolist() == expected.tolist()
    for row, seen in enumerate(SEEN):
        if seen is not None:
            assert found[row].tolist() == slow_top_k(scores[row, :seen].tolist(), 8)


@pytest.mark.parametrize("bins", [2048, 64])  # the row itself, or first its bins
@pytest.mark.parametrize("kind", KINDS)
def test_one_program_a_row_equals_the_reference(
    kind: str, bins: int, monkeypatch: pytest.MonkeyPatch
):
    scores = random_scores(kind, len(SEEN), 700, seed=1)
    monkeypatch.setattr(sizes, "BINS", bins)
    found, expected = select(scores, tokens_of(SEEN), 8)
    assert found.tolist() == expected.tolist()
    assert kernel.top_k_workspace_bytes(*scores.shape, 8) == 0


@pytest.mark.parametrize(("kind", "k"), [("normal", 20), ("special", 31)])
def test_lists_too_short_of_many_rows(kind: str, k: int, monkeypatch: pytest.MonkeyPatch):
    shorten(monkeypatch, bins=64, listed=4)
    monkeypatch.setattr(sizes, "MANY_ROWS", 1)
    scores = random_scores(kind, 1, 500, seed=3)
    found, expected = select(scores, tokens_of([499]), k)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(("kind", "k"), [("normal", 64), ("special", 90)])
def test_lists_too_short_and_more_wanted_than_bins(
    kind: str, k: int, monkeypatch: pytest.MonkeyPatch
):
    shorten(monkeypatch, bins=16, listed=2)
    scores = random_scores(kind, 1, 500, seed=3)
    found, expected = select(scores, tokens_of([499]), k)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("columns", [200, 700])  # the row itself, or a list of it
@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
def test_many_wanted_and_one_that_is_always_chosen(
    kind: str, columns: int, monkeypatch: pytest.MonkeyPatch
):
    """As of candidate blocks: as many as there are bins of rows of which few are wanted."""
    shorten(monkeypatch, bins=64, listed=64)
    scores = random_scores(kind, 2, columns, seed=4)
    scores[:, columns - 10] = torch.inf
    found, expected = select(scores, tokens_of([columns, columns - 9]), 64)
    assert found.tolist() == expected.tolist()


def test_the_list_holds_what_reaches_the_bound_of_many_wanted(monkeypatch: pytest.MonkeyPatch):
    """Nothing is left to the slow search of a whole row."""
    shorten(monkeypatch, bins=64, listed=64)
    monkeypatch.setattr(kernel, "_emit_row", None)
    for seed in range(2):
        scores = random_scores("normal", 1, 2000, seed=seed)
        scores[0, 1999] = torch.inf
        found, expected = select(scores, tokens_of([2000]), 64)
        assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize(("k", "bf16_scores"), [(1, True), (9, True), (9, False), (31, True)])
def test_orders_that_bounds_might_miss(k: int, bf16_scores: bool):
    """Rising, falling, high in one place, and repeating as often as there are bins."""
    at = torch.arange(500.0)
    rising = at.to(torch.bfloat16).float()
    cluster = torch.where((at > 300) & (at < 340), 50.0, -1.0) + (at % 7)
    scores = torch.stack([rising, -rising, cluster, at % 64])
    found, expected = select(scores, tokens_of([500] * 4), k, bf16_scores=bf16_scores)
    assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("short_tiles")
@pytest.mark.parametrize("columns", [200, 700])
def test_fp32_scores(columns: int):
    scores = Numbers(2).normal(2, columns)
    scores[:, ::3] = scores[0, 0] * (1 + 2.0**-23)
    found, expected = select(scores, tokens_of([columns, columns - 1]), 80, bf16_scores=False)
    assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("short_tiles")
def test_bins_without_a_number_give_no_bound():
    scores = torch.full((2, 200), torch.nan)
    scores[:, :12] = torch.arange(12.0) * 1e9 + 0.1
    found, expected = select(scores, tokens_of([200, 199]), 9, bf16_scores=False)
    assert found.tolist() == expected.tolist()


@pytest.mark.usefixtures("short_tiles")
def test_a_winner_is_found_at_the_edges_of_slices():
    for needle in (0, 1, 255, 256, 511, 512, 699):
        scores = torch.zeros(1, 700)
        scores[0, needle] = 1.0
        found, _ = select(scores, tokens_of([700]), 3)
        assert needle in found[0].tolist()
        assert found[0].tolist() == sorted({needle, 0, 1, 2} - ({2} if needle > 2 else set()))[:3]


@pytest.mark.usefixtures("short_tiles")
def test_a_row_does_not_depend_on_its_batch():
    scores = random_scores("ties", 6, 700)
    seen: list[int | None] = [700, 300, None, 9, 650, 512]
    together, _ = select(scores, tokens_of(seen), 8)
    order = [3, 2, 5, 0, 4, 1]
    permuted, _ = select(scores[order], tokens_of([seen[i] for i in order]), 8)
    assert permuted.tolist() == together[order].tolist()
    alone, _ = select(scores[4:5], tokens_of(seen[4:5]), 8)
    assert alone.tolist() == together[4:5].tolist()


def test_more_wanted_than_there_are_columns():
    found, expected = select(Numbers(1).normal(2, 5), tokens_of([5, 3]), 9)
    assert found.tolist() == expected.tolist()
    assert found[1].tolist() == [0, 1, 2] + [-1] * 6


@settings(max_examples=25, deadline=None)
@given(
    scores=st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=40),
    k=st.integers(1, 12),
    data=st.data(),
)
def test_equals_sorting(scores: list[float], k: int, data: st.DataObject):
    seen = data.draw(st.integers(0, len(scores)))
    row = torch.tensor(scores).to(torch.bfloat16).float().reshape(1, -1)
    found, _ = select(row, tokens_of([seen]), k)
    assert found[0].tolist() == slow_top_k(row[0, :seen].tolist(), k)


@pytest.mark.usefixtures("short_tiles")
def test_a_workspace_too_small_is_refused():
    out = torch.full((1, 8), UNTOUCHED, dtype=torch.int32)
    needed = kernel.top_k_workspace_bytes(1, 700, 8)
    assert needed > 0
    for workspace in (None, torch.empty(needed - 1, dtype=torch.uint8)):
        with pytest.raises(InvalidInput, match=f"{needed:,} bytes"):
            kernel.top_k(
                torch.zeros(1, 700),
                tokens=tokens_of([700]),
                ratio=4,
                out=out,
                workspace=workspace,
            )
    assert (out == UNTOUCHED).all()


def test_the_workspace_is_small_beside_the_scores():
    for rows in (1, 2, 31, 32, 33, 256, 1024, 8192):
        assert kernel.top_k_workspace_bytes(rows, 8192, 2048) == 0
        for columns in (16_384, 32_768, 262_144):
            assert kernel.top_k_workspace_bytes(rows, columns, 1024) <= 26 * 1024 * rows
            assert kernel.top_k_workspace_bytes(rows, columns, 2048) <= 68 * 1024 * rows
