"""Scores against a sum taken one number at a time."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import records
from dsv4.ops.calls import Scoring
from dsv4.reference.codec import VALUE_TYPES
from dsv4.reference.index_scores import head_sum, index_scores
from tests.oracles.indexer import (
    UNTOUCHED,
    make_keys,
    make_tokens,
    round_trip,
    slow_score,
    ulps,
)
from tests.support.numbers import Numbers

WIDTH, HEADS = 64, 5


def random_case(name: str, *, seed: int = 0, entries: tuple[int, ...] = (21, 0, 9)):
    record = records.index_format(name, index_dim=WIDTH)
    numbers = Numbers(seed)

    def random(*shape: int) -> torch.Tensor:
        return numbers.normal(*shape).to(VALUE_TYPES[record.value_dtype])

    values = [random(n, WIDTH) for n in entries]
    keys = make_keys(record, values, seed=seed)
    tokens = make_tokens([(0, 83), (2, 35), None, (0, 80), (1, 2), (2, 34)])
    q = round_trip(record, random(len(tokens), HEADS, WIDTH))
    weights = random(len(tokens), HEADS)
    stored = [round_trip(record, v) if len(v) else v for v in values]
    return keys, tokens, q, weights, stored


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("name", records.INDEX_FORMATS)
def test_scores_equal_the_slow_sum(name: str, rounded: bool):
    keys, tokens, q, weights, stored = random_case(name)
    scores = torch.full((len(tokens), 24), UNTOUCHED)
    index_scores(
        Scoring(q=q, weights=weights, tokens=tokens, keys=keys, scores=scores, round_bf16=rounded)
    )
    for token, (slot, position) in enumerate(tokens[:, :2].tolist()):
        visible = 0 if slot < 0 else (position + 1) // 4
        assert (scores[token, visible:] == UNTOUCHED).all()
        expected = torch.tensor(
            [
                slow_score(q[token], weights[token], stored[slot][e], rounded=rounded)
                for e in range(visible)
            ]
        )
        if rounded:
            assert (ulps(scores[token, :visible], expected) <= 1).all()
        else:
            torch.testing.assert_close(scores[token, :visible], expected, rtol=1e-5, atol=1e-5)


def test_entries_become_visible_with_their_last_token():
    keys, tokens, q, weights, _ = random_case("mxfp4")
    for position, visible in ((0, 0), (2, 0), (3, 1), (6, 1), (7, 2), (83, 21)):
        scores = torch.full((1, 24), UNTOUCHED)
        tokens = make_tokens([(0, position)])
        index_scores(Scoring(q=q[:1], weights=weights[:1], tokens=tokens, keys=keys, scores=scores))
        assert int((scores != UNTOUCHED).sum()) == visible


def test_columns_that_are_fewer_than_the_entries_take_the_first():
    keys, tokens, q, weights, _ = random_case("mxfp4")
    whole = torch.full((len(tokens), 24), UNTOUCHED)
    index_scores(Scoring(q=q, weights=weights, tokens=tokens, keys=keys, scores=whole))
    part = torch.full((len(tokens), 7), UNTOUCHED)
    index_scores(Scoring(q=q, weights=weights, tokens=tokens, keys=keys, scores=part))
    assert torch.equal(part, whole[:, :7])


def test_tokens_that_see_few_entries_can_be_skipped():
    keys, tokens, q, weights, _ = random_case("mxfp4")
    scores = torch.full((len(tokens), 24), UNTOUCHED)
    index_scores(
        Scoring(q=q, weights=weights, tokens=tokens, keys=keys, scores=scores, skip_visible=20)
    )
    assert (scores != UNTOUCHED).sum(dim=1).tolist() == [21, 0, 0, 0, 0, 0]


def test_negative_weights_give_negative_scores_and_relu_gives_zero():
    record = records.index_format("bf16", index_dim=WIDTH)
    ones = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    keys = make_keys(record, [torch.cat((ones, -ones))])
    tokens = make_tokens([(0, 31)])
    q = torch.ones(1, 2, WIDTH, dtype=torch.bfloat16)
    scores = torch.empty(1, 8)
    index_scores(
        Scoring(
            q=q,
            weights=torch.full((1, 2), -0.5, dtype=torch.bfloat16),
            tokens=tokens,
            keys=keys,
            scores=scores,
        )
    )
    assert scores.tolist() == [[-64.0] * 4 + [0.0] * 4]
    assert not torch.signbit(scores[0, 4:]).any()


def test_head_sum_adds_neighbours_then_halves():
    big = 2.0**24
    x = torch.zeros(16)
    x[0], x[1], x[8] = big, 1.0, 1.0
    # big + 1 is lost at once; then 1 meets big again: lost. In pairs of ones it would not be.
    assert head_sum(x).item() == big
    x = torch.zeros(16)
    x[0], x[8], x[9] = big, 1.0, 1.0
    assert head_sum(x).item() == big + 2
    assert head_sum(torch.ones(64)).item() == 64
    assert head_sum(torch.ones(5)).item() == 5


@pytest.mark.parametrize("at_once", [1, 3, 1 << 21])
def test_no_bit_depends_on_the_neighbours(at_once: int, monkeypatch: pytest.MonkeyPatch):
    """Tokens of one request, in any order, scored together in parts and each by itself."""
    keys, _, _, _, _ = random_case("mxfp4")
    numbers = Numbers(2)
    places = [(0, int(position)) for position in numbers.permutation(84)] + [None, (2, 34), (2, 35)]
    tokens = make_tokens(places)
    record = records.index_format("mxfp4", index_dim=WIDTH)
    q = round_trip(record, numbers.normal(len(tokens), HEADS, WIDTH).bfloat16())
    weights = numbers.normal(len(tokens), HEADS).bfloat16()
    monkeypatch.setattr("dsv4.reference.index_scores.MAX_DOTS", at_once * 21 * HEADS)
    together, alone = torch.full((2, len(tokens), 24), UNTOUCHED)
    index_scores(Scoring(q=q, weights=weights, tokens=tokens, keys=keys, scores=together))
    for row in range(len(tokens)):
        piece = slice(row, row + 1)
        index_scores(
            Scoring(
                q=q[piece],
                weights=weights[piece],
                tokens=tokens[piece],
                keys=keys,
                scores=alone[piece],
            )
        )
    assert torch.equal(together, alone)
