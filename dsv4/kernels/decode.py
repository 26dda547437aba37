"""Decodes the keys of a prefill step once for all of its tokens: one launch, bf16 rows.

Window rows come first, as they are staged, then `max_visible` rows per request for its entries. The
content of a row that no token can see is undefined.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.attend import entries_or_window
from dsv4.kernels.gather import BLOCK_KEYS, OPTIONS, store_rows
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_load import load_record_rows
from dsv4.kernels.record_store import page_constants
from dsv4.kernels.rows import load_request, request_at
from dsv4.ops.calls import Attention


def window_rows(call: Attention) -> int:
    """The most rows that a step can stage."""
    return call.tokens.shape[0] + (call.window.window - 1) * call.batch.shape[0]


def first_entry(call: Attention) -> int:
    """The row of the first request's first entry; window rows are padded to a whole block of
    keys."""
    return _whole_blocks(window_rows(call))


def entries_apart(call: Attention) -> int:
    """The distance between the first entries of two consecutive requests, in rows."""
    if call.entries is None:
        return 0
    assert call.max_visible is not None
    return _whole_blocks(call.max_visible)


def decoded_rows(call: Attention) -> int:
    """Rows that `decode_launch` fills, in whole blocks of keys."""
    return first_entry(call) + call.batch.shape[0] * entries_apart(call)


def decoded(call: Attention) -> Tensor:
    """The rows as a view of the call's memory, [rows, head_dim]."""
    assert call.decoded is not None
    return call.decoded.view(torch.bfloat16)[: decoded_rows(call) * call.q.shape[2]].view(
        -1, call.q.shape[2]
    )


def decode_launch(call: Attention) -> Launch:
    """Only for staged windows, and only if `max_visible` is known."""
    window, source, out = call.window, entries_or_window(call), decoded(call)
    arguments = (
        window.arena,
        source.arena,
        source.block_table,
        call.batch,
        out,
        source.arena.stride(0),
        source.block_table.stride(0),
        window.page.offset_bytes,
        window.page.scale_offset_bytes,
        source.page.offset_bytes,
        source.page.scale_offset_bytes,
        window_rows(call),
        entries_apart(call),
    )
    constants = {
        "RATIO": source.ratio,
        "PAGE_ROWS": source.page.rows,
        "WIDTH": call.q.shape[2],
        "WINDOW_RECORD": page_constants(window.page),
        "ENTRY_RECORD": page_constants(source.page),
        "BLOCK": BLOCK_KEYS,
    }
    grid = (out.shape[0] // BLOCK_KEYS,)
    return Launch(_decode_kernel, grid, arguments, constants, OPTIONS)


def _whole_blocks(rows: int) -> int:
    return -(-rows // BLOCK_KEYS) * BLOCK_KEYS


@triton.jit(do_not_specialize=["rows", "apart"])
def _decode_kernel(
    window_arena, entry_arena, block_table, batch_ptr, out_ptr,
    arena_stride, table_stride, window_data, window_scale, entry_data, entry_scale, rows, apart,
    RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW_RECORD: tl.constexpr, ENTRY_RECORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_program()
    first = tl.program_id(0) * BLOCK
    nth = tl.arange(0, BLOCK)  # [keys]
    window_end = (rows + BLOCK - 1) // BLOCK * BLOCK
    if first < window_end:
        row = (first + nth).to(tl.int64)
        there = row < rows
        values = load_record_rows(  # [keys, channels]
            window_arena + window_data + row * WINDOW_RECORD.DATA_STRIDE,
            window_arena + window_scale + row * WINDOW_RECORD.SCALE_STRIDE,
            there, WIDTH, WINDOW_RECORD,
        )  # fmt: skip
        store_rows(out_ptr, first + nth, values, there, WIDTH)
    else:
        behind = first - window_end
        entry = behind % apart + nth
        request = load_request(request_at(batch_ptr, behind // apart))
        visible = (request.start + request.count) // RATIO
        there = entry < visible
        if (behind % apart < visible) & (request.slot >= 0):
            table_row = block_table + request.slot.to(tl.int64) * table_stride
            block = tl.load(table_row + entry // PAGE_ROWS, mask=there, other=0).to(tl.int64)
            page = entry_arena + block * arena_stride
            page_row = tl.where(there, entry % PAGE_ROWS, 0)
            values = load_record_rows(  # [keys, channels]
                page + entry_data + page_row * ENTRY_RECORD.DATA_STRIDE,
                page + entry_scale + page_row * ENTRY_RECORD.SCALE_STRIDE,
                there, WIDTH, ENTRY_RECORD,
            )  # fmt: skip
            store_rows(out_ptr, first + nth, values, there, WIDTH)
