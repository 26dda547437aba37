"""Keys of a wide step decoded once: every row that a token can see, and nothing outside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import PageForm
from dsv4.kernels import decode
from dsv4.ops.calls import Attention
from dsv4.ops.columns import request_columns, staged_row, token_columns
from dsv4.reference import gather
from tests.reference.test_attend import Step, make_step

GUARD = 0x5A
REQUESTS = [(0, 3), (5, 20), (100, 2), (14, 1)]


def wide_call(step: Step, memory: Tensor, max_visible: int) -> Attention:
    call = step.call(out=step.q, lse=step.q)
    return replace(call, tokens_per_request=64, max_visible=max_visible, decoded=memory)


@pytest.mark.parametrize(
    ("record", "form"),
    [("fp8_ds", "planes"), ("v41_fp4", "planes"), ("v41_fp4", "records"), ("bf16", "planes")],
)
def test_rows_equal_gathered_ones(record: str, form: PageForm) -> None:
    width = 512 if record.startswith("v41") else 128
    window_record = "v41_fp8" if record == "v41_fp4" else record
    step = make_step(
        REQUESTS,
        kind="hca",
        width=width,
        record=record,
        window_record=window_record,
        chunk=True,
        page_form=form,
    )
    assert step.entries is not None
    most = max((start + count) // step.entries.ratio for start, count in REQUESTS)
    memory = torch.full((1 << 20,), GUARD, dtype=torch.uint8)
    call = wide_call(step, memory, most)
    decode.decode_launch(call).run()
    rows = decode.decoded(call)
    assert (memory[rows.numel() * 2 :] == GUARD).all()

    token, request = token_columns(step.tokens), request_columns(step.batch)
    windows = torch.zeros(len(step.tokens), step.window.window, width, dtype=torch.bfloat16)
    lengths = torch.zeros(len(step.tokens), dtype=torch.int32)
    gather.gather_window(
        step.window,
        batch=step.batch,
        batch_row=token.batch_row,
        position=token.position,
        out=windows,
        lengths=lengths,
    )
    for nth, (row, newest) in enumerate(
        zip(token.batch_row.tolist(), token.position.tolist(), strict=True)
    ):
        count, window = int(lengths[nth]), step.window.window
        start, first_row = int(request.start[row]), int(request.first_row[row])
        last = staged_row(first_row, start, row, newest, window)
        assert torch.equal(rows[last - count + 1 : last + 1], windows[nth, :count])

    wanted = torch.zeros(len(REQUESTS), most, width, dtype=torch.bfloat16)
    lengths = torch.zeros(len(REQUESTS), dtype=torch.int32)
    gather.gather_all_entries(
        step.entries,
        slot=request.slot,
        position=request.start + request.count - 1,
        out=wanted,
        lengths=lengths,
    )
    for row, count in enumerate(lengths.tolist()):
        first = decode.first_entry(call) + row * decode.entries_apart(call)
        assert count == (REQUESTS[row][0] + REQUESTS[row][1]) // step.entries.ratio
        assert torch.equal(rows[first : first + count], wanted[row, :count])


def test_a_window_alone() -> None:
    step = make_step(REQUESTS, kind="swa", chunk=True)
    memory = torch.full((1 << 20,), GUARD, dtype=torch.uint8)
    call = wide_call(step, memory, 7)
    decode.decode_launch(call).run()
    assert decode.decoded_rows(call) == decode.first_entry(call)
    assert (memory[decode.decoded_rows(call) * 2 * step.q.shape[2] :] == GUARD).all()
    assert (memory[: 2 * step.q.shape[2]] != GUARD).any()
