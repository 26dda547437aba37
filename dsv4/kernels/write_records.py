"""Quantises bf16 rows and scatters them into pages: the last step of a flush, as one operation."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4.cache.pages import Page
from dsv4.kernels.launch import Launch
from dsv4.kernels.numerics import wide
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_store import page_constants, store_records


def write_records(
    arena: Tensor, page: Page, arena_row: Tensor, page_row: Tensor, rows: Tensor
) -> None:
    write_records_launch(arena, page, arena_row, page_row, rows).run()


def write_records_launch(
    arena: Tensor, page: Page, arena_row: Tensor, page_row: Tensor, rows: Tensor
) -> Launch:
    arguments = (
        arena,
        arena_row,
        page_row,
        rows,
        arena.stride(0),
        rows.stride(0),
        page.offset_bytes,
        page.scale_offset_bytes,
    )
    constants = {"WIDTH": page.format.width, "RECORD": page_constants(page)}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Launch(_write_records_kernel, (rows.shape[0],), arguments, constants, options)


@triton.jit
def _write_records_kernel(
    arena, arena_row_ptr, page_row_ptr, rows_ptr, row_bytes, rows_stride,
    data_offset, scale_offset, WIDTH: tl.constexpr, RECORD: tl.constexpr,
):  # fmt: skip
    begin_program()
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    arena_row = tl.load(arena_row_ptr + row).to(tl.int64)
    page_row = tl.load(page_row_ptr + row).to(tl.int64)
    channel = tl.arange(0, WIDTH)[None, :]
    x = wide(tl.load(rows_ptr + (row * rows_stride)[:, None] + channel))
    page = arena + arena_row * row_bytes
    store_records(
        x,
        (arena_row >= 0) & (page_row >= 0),
        page + data_offset + page_row * RECORD.DATA_STRIDE,
        page + scale_offset + page_row * RECORD.SCALE_STRIDE,
        WIDTH,
        RECORD,
    )
