"""Dequantising gathers: records back to bf16 in one launch; the host need not know lengths."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.launch import Launch
from dsv4.kernels.numerics import INTERPRETED, bf16_bits
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_load import load_record_rows
from dsv4.kernels.record_store import page_constants
from dsv4.kernels.rows import load_request, request_at, staged_row
from dsv4.ops.calls import EntrySource, WindowSource

# keys that one program decodes
BLOCK_KEYS = 16
NUM_WARPS = 4
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}


def gather_entries(
    source: EntrySource, *, slot: Tensor, position: Tensor, indices: Tensor, out: Tensor
) -> None:
    gather_entries_launch(source, slot, position, indices, out, out).run()


def gather_all_entries(
    source: EntrySource, *, slot: Tensor, position: Tensor, out: Tensor, lengths: Tensor
) -> None:
    gather_entries_launch(source, slot, position, None, out, lengths).run()


def gather_entries_launch(
    source: EntrySource,
    slot: Tensor,
    position: Tensor,
    indices: Tensor | None,
    out: Tensor,
    lengths: Tensor,
) -> Launch:
    """Without `indices`: all entries that are seen."""
    rows, keys, width = out.shape
    arguments = (
        source.arena,
        source.block_table,
        slot,
        position,
        out if indices is None else indices,
        out,
        lengths,
        source.arena.stride(0),
        source.block_table.stride(0),
        slot.stride(0),
        position.stride(0),
        0 if indices is None else indices.stride(0),
        out.stride(0),
        keys,
        source.page.offset_bytes,
        source.page.scale_offset_bytes,
    )
    constants = {
        "RATIO": source.ratio,
        "PAGE_ROWS": source.page.rows,
        "ALL": indices is None,
        "WIDTH": width,
        "RECORD": page_constants(source.page),
        "BLOCK": BLOCK_KEYS,
    }
    grid = (rows, triton.cdiv(keys, BLOCK_KEYS))
    return Launch(_gather_entries_kernel, grid, arguments, constants, OPTIONS)


def gather_window(
    source: WindowSource,
    *,
    batch: Tensor,
    batch_row: Tensor,
    position: Tensor,
    out: Tensor,
    lengths: Tensor,
) -> None:
    gather_window_launch(source, batch, batch_row, position, out, lengths).run()


def gather_window_launch(
    source: WindowSource,
    batch: Tensor,
    batch_row: Tensor,
    position: Tensor,
    out: Tensor,
    lengths: Tensor,
) -> Launch:
    rows, _, width = out.shape
    arguments = (
        source.arena,
        batch,
        batch_row,
        position,
        out,
        lengths,
        source.arena.stride(0),
        batch_row.stride(0),
        position.stride(0),
        out.stride(0),
        source.page.offset_bytes,
        source.page.scale_offset_bytes,
    )
    constants = {
        "WINDOW": source.window,
        "RING": source.page.rows,
        "STAGED": source.staged,
        "WIDTH": width,
        "RECORD": page_constants(source.page),
        "BLOCK": BLOCK_KEYS,
    }
    grid = (rows, triton.cdiv(source.window, BLOCK_KEYS))
    return Launch(_gather_window_kernel, grid, arguments, constants, OPTIONS)


@triton.jit(do_not_specialize=["indices_stride", "keys"])
def _gather_entries_kernel(
    arena, block_table, slot_ptr, position_ptr, indices_ptr, out_ptr, lengths_ptr,
    arena_stride, table_stride, slot_stride, position_stride, indices_stride, out_stride, keys,
    data_offset, scale_offset,
    RATIO: tl.constexpr, PAGE_ROWS: tl.constexpr, ALL: tl.constexpr, WIDTH: tl.constexpr,
    RECORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_program()
    row = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [keys]
    slot = tl.load(slot_ptr + row * slot_stride).to(tl.int64)
    visible = (tl.load(position_ptr + row * position_stride) + 1) // RATIO
    if slot >= 0:
        if ALL:
            count = tl.minimum(visible, keys)
            if tl.program_id(1) == 0:
                tl.store(lengths_ptr + row, count)
            entry = key
            written = key < count
            valid = written
        else:
            written = key < keys
            entry = tl.load(indices_ptr + row * indices_stride + key, mask=written, other=-1)
            valid = (entry >= 0) & (entry < visible)
        block = tl.load(
            block_table + slot * table_stride + entry // PAGE_ROWS, mask=valid, other=0
        ).to(tl.int64)
        page = arena + block * arena_stride
        page_row = tl.where(valid, entry % PAGE_ROWS, 0)
        values = load_record_rows(  # [keys, channels]
            page + data_offset + page_row * RECORD.DATA_STRIDE,
            page + scale_offset + page_row * RECORD.SCALE_STRIDE,
            valid, WIDTH, RECORD,
        )  # fmt: skip
        store_rows(out_ptr + row * out_stride, key, values, written, WIDTH)


@triton.jit
def _gather_window_kernel(
    arena, batch_ptr, batch_row_ptr, position_ptr, out_ptr, lengths_ptr,
    arena_stride, batch_row_stride, position_stride, out_stride, data_offset, scale_offset,
    WINDOW: tl.constexpr, RING: tl.constexpr, STAGED: tl.constexpr, WIDTH: tl.constexpr,
    RECORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    begin_program()
    row = tl.program_id(0).to(tl.int64)
    key = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [keys]
    batch_row = tl.load(batch_row_ptr + row * batch_row_stride)
    newest = tl.load(position_ptr + row * position_stride)
    if batch_row >= 0:
        first = tl.maximum(newest - WINDOW + 1, 0)
        count = newest - first + 1
        if tl.program_id(1) == 0:
            tl.store(lengths_ptr + row, count)
        valid = key < count
        request = load_request(request_at(batch_ptr, batch_row))
        if STAGED:
            base = staged_row(request.first_row, request.start, batch_row, first, WINDOW)
            page = arena + tl.zeros([BLOCK], dtype=tl.int64)
            page_row = (base + key).to(tl.int64)
        else:
            slot = request.slot.to(tl.int64)
            page = arena + slot * arena_stride + tl.zeros([BLOCK], dtype=tl.int64)
            page_row = ((first + key) % RING).to(tl.int64)
        values = load_record_rows(  # [keys, channels]
            page + data_offset + page_row * RECORD.DATA_STRIDE,
            page + scale_offset + page_row * RECORD.SCALE_STRIDE,
            valid, WIDTH, RECORD,
        )  # fmt: skip
        store_rows(out_ptr + row * out_stride, key, values, valid, WIDTH)


@triton.jit
def store_rows(out_ptr, key, values, written, WIDTH: tl.constexpr):
    """bf16 values [keys, channels] (fp32 when interpreted) into rows of `out`."""
    target = out_ptr + key.to(tl.int64)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    if INTERPRETED:
        bits = bf16_bits(values)
        tl.store(target.to(tl.pointer_type(tl.uint16)), bits, mask=written[:, None])
    else:
        tl.store(target, values, mask=written[:, None])
