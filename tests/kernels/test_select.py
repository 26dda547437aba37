"""Interpreted selection from keys equals the reference, whatever the workspace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache import records
from dsv4.errors import InvalidInput
from dsv4.kernels import select as kernel
from dsv4.kernels import sizes
from dsv4.kernels import top_k as top_k_kernel
from dsv4.kernels.backend import TritonBackend
from dsv4.ops.backend import Backend
from dsv4.ops.calls import EntrySource, Selection
from dsv4.reference.backend import ReferenceBackend
from tests.oracles.indexer import make_keys, make_tokens, round_trip
from tests.support.numbers import Numbers

KERNEL: Backend = TritonBackend(torch.device("cpu"))
REFERENCE: Backend = ReferenceBackend()
WIDTH, HEADS, K, PAGE_ROWS = 64, 4, 6, 8
UNTOUCHED = -7
ROWS = [(0, 1199), (0, 1198), None, (1, 12), (2, 163), (2, 1), (0, 27)]
ENTRIES = (300, 3, 41)


def case(name: str = "mxfp4", *, seed: int = 0) -> tuple[EntrySource, Tensor, Tensor, Tensor]:
    record = records.index_format(name, index_dim=WIDTH)
    numbers = Numbers(seed)
    values = [numbers.normal(n, WIDTH).to(torch.bfloat16) for n in ENTRIES]
    keys = make_keys(record, values, page_rows=PAGE_ROWS, seed=seed)
    q = numbers.normal(len(ROWS), HEADS, WIDTH).to(torch.bfloat16)
    weights = numbers.normal(len(ROWS), HEADS).to(torch.bfloat16)
    return keys, make_tokens(ROWS), round_trip(record, q), weights


def run(
    backend: Backend,
    keys: EntrySource,
    tokens: Tensor,
    q: Tensor,
    weights: Tensor,
    *,
    rows_at_a_time: int,
    k: int = K,
    round_bf16: bool = True,
    tokens_per_request: int = 1,
) -> list[list[int]]:
    size = backend.select_workspace_bytes(rows_at_a_time, keys=keys, top_k=k)
    out = torch.full((len(tokens), k), UNTOUCHED, dtype=torch.int32)
    backend.select(
        Selection(
            q=q,
            weights=weights,
            tokens=tokens,
            keys=keys,
            top_k=k,
            workspace=torch.full((size,), 0xFF, dtype=torch.uint8),
            out=out,
            round_bf16=round_bf16,
            tokens_per_request=tokens_per_request,
        )
    )
    return out.tolist()


def cut_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a few hundred scores are cut into slices as long ones are."""
    for name in ("MAX_ROW", "MAX_SLICE", "MIN_SLICE"):
        monkeypatch.setattr(sizes, name, 256)
    monkeypatch.setattr(sizes, "BINS", 64)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("rows_at_a_time", [1, 3, 7])
def test_equals_the_reference_whatever_the_workspace(
    rows_at_a_time: int, cut: bool, monkeypatch: pytest.MonkeyPatch
):
    if cut:
        cut_rows(monkeypatch)
    expected = run(REFERENCE, *case(), rows_at_a_time=7)
    assert run(KERNEL, *case(), rows_at_a_time=rows_at_a_time) == expected
    assert expected[2] == [UNTOUCHED] * K


@pytest.mark.parametrize("round_bf16", [True, False])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_formats_and_roundings(name: str, round_bf16: bool):
    arguments = case(name, seed=1)
    expected = run(REFERENCE, *arguments, rows_at_a_time=7, round_bf16=round_bf16)
    found = run(KERNEL, *arguments, rows_at_a_time=7, round_bf16=round_bf16, tokens_per_request=2)
    assert found == expected


def test_decoding_several_tokens_equals_decoding_each_alone():
    keys, tokens, q, weights = case(seed=2)
    together = run(KERNEL, keys, tokens, q, weights, rows_at_a_time=7, tokens_per_request=4)
    for i in range(len(tokens)):
        one = slice(i, i + 1)
        alone = run(KERNEL, keys, tokens[one], q[one], weights[one], rows_at_a_time=1)
        assert alone == together[one]


@pytest.mark.parametrize("needle", [0, 5, 6, 7, 8, 63, 64, 127, 128, 255, 256, 298, 299])
def test_a_needle_is_found_wherever_it_lies(needle: int, monkeypatch: pytest.MonkeyPatch):
    cut_rows(monkeypatch)
    key = torch.ones(300, WIDTH, dtype=torch.bfloat16)
    key[needle] *= 6
    keys = make_keys(records.mxfp4(WIDTH), [key], page_rows=PAGE_ROWS)
    q = torch.ones(1, HEADS, WIDTH, dtype=torch.bfloat16)
    weights = torch.ones(1, HEADS, dtype=torch.bfloat16)
    found = run(KERNEL, keys, make_tokens([(0, 1199)]), q, weights, rows_at_a_time=1)
    others = [e for e in range(300) if e != needle][: K - 1]
    assert found == [sorted([needle, *others])]


def test_scores_that_relu_makes_equal_go_to_the_first_entries():
    key = torch.ones(40, WIDTH, dtype=torch.bfloat16)
    keys = make_keys(records.mxfp4(WIDTH), [key], page_rows=PAGE_ROWS)
    tokens = make_tokens([(0, 159), (0, 159)])
    q = torch.ones(2, HEADS, WIDTH, dtype=torch.bfloat16)
    q[0] = -q[0]
    weights = torch.ones(2, HEADS, dtype=torch.bfloat16)
    weights[1] = -1
    found = run(KERNEL, keys, tokens, q, weights, rows_at_a_time=2)
    assert found == [list(range(K))] * 2


def test_all_entries_are_selected_where_no_more_fit_the_table():
    keys, tokens, q, weights = case()
    expected = run(REFERENCE, keys, tokens, q, weights, rows_at_a_time=7, k=400)
    assert run(KERNEL, keys, tokens, q, weights, rows_at_a_time=0, k=400) == expected


def test_a_workspace_too_small_for_one_row_is_refused():
    keys, tokens, q, weights = case()
    size = KERNEL.select_workspace_bytes(1, keys=keys, top_k=K)
    out = torch.full((len(tokens), K), UNTOUCHED, dtype=torch.int32)
    with pytest.raises(InvalidInput, match=f"{size:,} bytes"):
        KERNEL.select(
            Selection(
                q=q,
                weights=weights,
                tokens=tokens,
                keys=keys,
                top_k=K,
                workspace=torch.empty(size - 1, dtype=torch.uint8),
                out=out,
            )
        )
    assert (out == UNTOUCHED).all()


def test_every_piece_fits_a_workspace_that_holds_one_row(monkeypatch: pytest.MonkeyPatch):
    cut_rows(monkeypatch)
    monkeypatch.setattr(sizes, "MAX_SLICE", 512)
    monkeypatch.setattr(sizes, "ENOUGH_PROGRAMS", 8)
    keys, *_ = case()
    columns = keys.block_table.shape[1] * keys.page.rows
    for tokens in (1, 5, 9, 20):
        one = 4 * columns + top_k_kernel.top_k_workspace_bytes(1, columns, K)
        for size in range(one, 20 * one, 997):
            rows = kernel._rows_at_a_time(tokens, columns, K, size, lambda rows: 0)
            for piece in {rows, tokens % rows} - {0}:
                counts = top_k_kernel.top_k_workspace_bytes(piece, columns, K)
                assert 4 * piece * columns + counts <= size


@pytest.mark.parametrize("max_visible", [K + 1, 48, 10_000])
def test_no_column_behind_the_last_visible_entry_is_scored(max_visible: int):
    keys, tokens, q, weights = case()
    tokens[:, 1].clamp_(max=4 * max_visible - 1)
    found = torch.full((len(tokens), K), UNTOUCHED, dtype=torch.int32)
    columns = min(max_visible, keys.capacity)
    top_k_bytes = top_k_kernel.top_k_workspace_bytes(len(tokens), columns, K)
    needed = -(-4 * len(tokens) * columns // 16) * 16 + top_k_bytes
    KERNEL.select(
        Selection(
            q=q,
            weights=weights,
            tokens=tokens,
            keys=keys,
            top_k=K,
            workspace=torch.empty(needed, dtype=torch.uint8),
            out=found,
            max_visible=max_visible,
        )
    )
    live = tokens[:, 0] >= 0
    expected = run(REFERENCE, keys, tokens, q, weights, rows_at_a_time=7)
    assert found[live].tolist() == [row for row, there in zip(expected, live, strict=True) if there]


def test_pieces_of_many_tokens_leave_room_for_the_kernel_of_scores():
    columns, each, size = 4_096, 9_000, 40 << 20
    rows = kernel._rows_at_a_time(8_192, columns, K, size, lambda rows: rows * each)
    assert rows % kernel.PIECE_ROWS == 0
    assert rows * (4 * columns + each) <= size < (rows + kernel.PIECE_ROWS) * (4 * columns + each)
