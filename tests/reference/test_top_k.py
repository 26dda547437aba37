"""Selection against sorting by (NaN last, score, index)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.reference.top_k import top_k
from tests.oracles.indexer import make_tokens, slow_top_k
from tests.support.numbers import Numbers

INF, NAN = math.inf, math.nan
UNTOUCHED = -7
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, INF, -INF, NAN, 1e-30, -1e-30])


def run(scores: list[float], k: int, *, visible: int | None = None):
    row = torch.tensor(scores, dtype=torch.float32).reshape(1, -1)
    seen = len(scores) if visible is None else visible
    out = torch.full((1, k), UNTOUCHED, dtype=torch.int32)
    tokens = make_tokens([(0, 4 * seen - 1)])
    top_k(row, tokens=tokens, ratio=4, out=out)
    return out[0].tolist()


@settings(max_examples=200, deadline=None)
@given(scores=st.lists(VALUES, max_size=30), k=st.integers(1, 12), data=st.data())
def test_equals_sorting(scores: list[float], k: int, data: st.DataObject):
    visible = data.draw(st.integers(0, len(scores)))
    expected = slow_top_k(scores[:visible], k)
    assert run(scores, k, visible=visible) == expected


@pytest.mark.parametrize(
    ("scores", "k", "expected"),
    [
        ([1.0] * 6, 3, [0, 1, 2]),
        ([0.0, -0.0, 0.0, 1.0], 3, [0, 1, 3]),
        ([-1.0, -2.0, -1.0, -3.0], 2, [0, 2]),
        ([NAN, 1.0, NAN, 2.0], 2, [1, 3]),
        ([NAN, -INF, NAN, NAN], 2, [0, 1]),
        ([1.0, 2.0], 4, [0, 1, -1, -1]),
        ([], 2, [-1, -1]),
        ([INF, 1.0, INF, -INF], 3, [0, 1, 2]),
    ],
)
def test_ties_nan_and_short_rows(scores: list[float], k: int, expected: list[int]):
    assert run(scores, k) == expected


def test_padding_rows_keep_what_they_held():
    out = torch.full((2, 3), UNTOUCHED, dtype=torch.int32)
    top_k(
        Numbers(1).normal(2, 8),
        tokens=make_tokens([None, (0, 31)]),
        ratio=4,
        out=out,
    )
    assert out[0].tolist() == [UNTOUCHED] * 3
    assert (out[1] >= 0).all()


@pytest.mark.parametrize("at_once", [1, 60, 1 << 20])
def test_rows_do_not_depend_on_each_other(at_once: int, monkeypatch: pytest.MonkeyPatch):
    """More and fewer visible entries than k, padding between them, NaN where nobody looks."""
    monkeypatch.setattr("dsv4.reference.top_k.MAX_SCORES", at_once)
    positions = [31, None, 3, 119, 2, 87, 79, None, 43]
    scores = (2 * Numbers(3).normal(len(positions), 40)).round()
    scores[3, 5], scores[5, :4] = NAN, -INF
    tokens = make_tokens([None if p is None else (0, p) for p in positions])
    out = torch.full((len(positions), 8), UNTOUCHED, dtype=torch.int32)
    for row, position in enumerate(positions):
        scores[row, 0 if position is None else (position + 1) // 4 :] = NAN
    top_k(scores, tokens=tokens, ratio=4, out=out)
    for row, position in enumerate(positions):
        seen = [] if position is None else scores[row, : (position + 1) // 4].tolist()
        expected = [UNTOUCHED] * 8 if position is None else slow_top_k(seen, 8)
        assert out[row].tolist() == expected
