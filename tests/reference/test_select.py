"""Selection from keys: needles, workspaces, order of the batch."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache import records
from dsv4.errors import InvalidInput
from dsv4.ops.calls import Selection
from dsv4.reference.select import select, select_workspace_bytes
from tests.oracles.indexer import make_keys, make_tokens, round_trip, slow_score, slow_top_k
from tests.support.numbers import Numbers

WIDTH, HEADS, K, PAGE_ROWS, ENTRIES = 64, 3, 4, 8, 27
UNTOUCHED = -7


def needle_case(needle: int, *, entries: int = ENTRIES):
    """Keys that all queries dislike alike, but for one."""
    record = records.mxfp4(WIDTH)
    key = torch.ones(entries, WIDTH, dtype=torch.bfloat16)
    key[needle] *= 6
    keys = make_keys(record, [key, key], page_rows=PAGE_ROWS)
    tokens = make_tokens([(1, 4 * entries - 1)])
    q = torch.ones(1, HEADS, WIDTH, dtype=torch.bfloat16)
    return keys, tokens, q, torch.ones(1, HEADS, dtype=torch.bfloat16)


@pytest.mark.parametrize("needle", [0, 3, 4, 7, 8, 15, 16, 23, 24, ENTRIES - 1])
def test_a_needle_is_found_wherever_it_lies(needle: int):
    keys, tokens, q, weights = needle_case(needle)
    workspace = torch.full((4 * 32,), 0xFF, dtype=torch.uint8)
    out = torch.full((1, K), UNTOUCHED, dtype=torch.int32)
    select(
        Selection(
            q=q, weights=weights, tokens=tokens, keys=keys, top_k=K, workspace=workspace, out=out
        )
    )
    others = [e for e in range(ENTRIES) if e != needle][: K - 1]
    assert out[0].tolist() == sorted([needle, *others])


def random_case(seed: int = 3):
    record = records.mxfp4(WIDTH)
    numbers = Numbers(seed)
    values = [numbers.normal(n, WIDTH).to(torch.bfloat16) for n in (ENTRIES, 3, 12)]
    keys = make_keys(record, values, page_rows=PAGE_ROWS)
    rows = [(0, 4 * ENTRIES - 1), (0, 70), None, (1, 12), (2, 47), (2, 1)]
    q = numbers.normal(len(rows), HEADS, WIDTH).to(torch.bfloat16)
    weights = numbers.normal(len(rows), HEADS).to(torch.bfloat16)
    stored = [round_trip(record, v) for v in values]
    return keys, rows, round_trip(record, q), weights, stored


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 6])
def test_selection_is_that_of_the_slow_formula_whatever_the_workspace(rows_at_a_time: int):
    keys, rows, q, weights, stored = random_case()
    size = select_workspace_bytes(rows_at_a_time, keys=keys, top_k=K)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8)
    out = torch.full((len(rows), K), UNTOUCHED, dtype=torch.int32)
    select(
        Selection(
            q=q,
            weights=weights,
            tokens=make_tokens(rows),
            keys=keys,
            top_k=K,
            workspace=workspace,
            out=out,
        )
    )
    for token, row in enumerate(rows):
        if row is None:
            assert out[token].tolist() == [UNTOUCHED] * K
            continue
        slot, position = row
        scores = [
            slow_score(q[token], weights[token], stored[slot][e], rounded=True)
            for e in range((position + 1) // 4)
        ]
        assert out[token].tolist() == slow_top_k(scores, K)


def test_a_workspace_too_small_for_one_row_is_refused():
    keys, rows, q, weights, _ = random_case()
    size = select_workspace_bytes(1, keys=keys, top_k=K)
    out = torch.full((len(rows), K), UNTOUCHED, dtype=torch.int32)
    with pytest.raises(InvalidInput, match=f"{size:,} bytes"):
        select(
            Selection(
                q=q,
                weights=weights,
                tokens=make_tokens(rows),
                keys=keys,
                top_k=K,
                workspace=torch.empty(size - 1, dtype=torch.uint8),
                out=out,
            )
        )
    assert (out == UNTOUCHED).all()
