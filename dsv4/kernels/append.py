"""The write path of one layer in one launch: window rows, tails, closed groups.

Programs of three sorts share a grid: one a token for the window, one an item (and channel split)
for each compressor. An item is all that a step does to one group of one request; the first item of
a request also writes the tails, after it has read what it overwrites (prepare_forward.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4.cache.writes import CompressorWrite, StepTensors, WindowWrite
from dsv4.kernels.numerics import (
    bf16_bits,
    exp_nonpositive,
    hadamard,
    load_rope,
    rms_norm,
    rotate,
    round_bf16,
)
from dsv4.kernels.record import RecordConstants, record_constants, store_record

# Pooling more rows than this splits the channels over programs: a group of 128 tokens is 512 KB.
MAX_ROWS_IN_ONE_PROGRAM = 8
POOL_TILE_ELEMENTS = 4096
FEW_ITEMS = 64


@dataclass(frozen=True, slots=True)
class WindowConstants:
    """A window write as compile-time constants."""

    RING: int
    WIDTH: int
    ROPE: int
    NORM: bool
    RECORD: RecordConstants


@dataclass(frozen=True, slots=True)
class CompressorConstants:
    """A compressor as compile-time constants."""

    RATIO: int
    OVERLAP: bool
    WIDTH: int
    ROPE: int
    HADAMARD: bool
    A_ROWS: int
    B_ROWS: int
    PAGE_ROWS: int
    SPLITS: int
    TILE_ELEMENTS: int
    COMPRESS: bool
    TAILS: str
    FROM_TAILS: bool
    DENSE: bool
    RECORD: RecordConstants


def append(
    step: StepTensors, window: WindowWrite | None, compressors: Sequence[CompressorWrite]
) -> None:
    """One launch. Same result as dsv4.reference.append.append, byte for byte."""
    main, index = _main_and_index(compressors)
    tokens = step.tokens.shape[0] if window is not None else 0
    main_programs, main_args, main_constants = _compressor_arguments(step, main)
    index_programs, index_args, index_constants = _compressor_arguments(step, index)
    grid = tokens + main_programs + index_programs
    if grid == 0:
        return
    window_args, window_constants = _window_arguments(step, window)
    _append_kernel[(grid,)](
        step.block_arena,
        step.slot_arena,
        step.block_table,
        step.tokens,
        step.rope,
        step.block_arena.stride(0),
        step.slot_arena.stride(0),
        step.block_table.stride(0),
        step.rms_eps,
        tokens,
        main_programs,
        *window_args,
        *main_args,
        *index_args,
        WINDOW=window_constants,
        MAIN=main_constants,
        INDEX=index_constants,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _main_and_index(
    compressors: Sequence[CompressorWrite],
) -> tuple[CompressorWrite | None, CompressorWrite | None]:
    main = next((w for w in compressors if not w.layout.hadamard), None)
    index = next((w for w in compressors if w.layout.hadamard), None)
    return main, index


def _window_arguments(
    step: StepTensors, window: WindowWrite | None
) -> tuple[tuple[Any, ...], WindowConstants | None]:
    if window is None:
        return (step.slot_arena, step.rope, 0, 0, 0), None
    page = window.page
    constants = WindowConstants(
        RING=page.rows,
        WIDTH=page.format.width,
        ROPE=step.rope.shape[1],
        NORM=window.norm is not None,
        RECORD=record_constants(page.format),
    )
    return (
        window.kv,
        step.rope if window.norm is None else window.norm,
        window.kv.stride(0),
        page.offset_bytes,
        page.scale_offset_bytes,
    ), constants


def _compressor_arguments(
    step: StepTensors, write: CompressorWrite | None
) -> tuple[int, tuple[Any, ...], CompressorConstants | None]:
    nothing: Tensor = step.rope
    if write is None:
        return 0, (step.tokens, *[nothing] * 6, step.arrived, *[0] * 9), None
    layout, items = write.layout, write.items.shape[0]
    splits = 1
    if layout.slots_pooled > MAX_ROWS_IN_ONE_PROGRAM:
        splits = min(16 if items <= FEW_ITEMS else 4, layout.width // 16)
    # Where a step is narrow its tails overwrite nothing that its groups read, so other programs
    # may write them meanwhile; a wide chunk's groups must be read first.
    tails = "none"
    if write.write_tails:
        tails = "apart" if step.narrow or not write.compress else "after"
    constants = CompressorConstants(
        RATIO=layout.ratio,
        OVERLAP=layout.overlap,
        WIDTH=layout.width,
        ROPE=layout.rope_dim,
        HADAMARD=layout.hadamard,
        A_ROWS=layout.a_rows,
        B_ROWS=layout.b_rows,
        PAGE_ROWS=layout.page.rows,
        SPLITS=splits,
        TILE_ELEMENTS=POOL_TILE_ELEMENTS,
        COMPRESS=write.compress,
        TAILS=tails,
        FROM_TAILS=write.c is None,
        DENSE=write.dense is not None,
        RECORD=record_constants(layout.page.format),
    )
    arguments = (
        write.items,
        nothing if write.c is None else write.c,
        nothing if write.z is None else write.z,
        write.ape,
        write.norm,
        nothing if write.dense is None else write.dense,
        step.scratch,
        step.arrived,
        items if write.compress else 0,
        0 if write.c is None else write.c.stride(0),
        0 if write.z is None else write.z.stride(0),
        layout.page.offset_bytes,
        layout.page.scale_offset_bytes,
        layout.ka_offset_bytes,
        layout.za_offset_bytes,
        layout.kb_offset_bytes,
        layout.zb_offset_bytes,
    )
    programs = (items * splits if write.compress else 0) + (items if tails == "apart" else 0)
    return programs, arguments, constants


@triton.jit
def _append_kernel(
    block_arena,
    slot_arena,
    block_table,
    tokens_ptr,
    rope_ptr,
    block_bytes,
    slot_bytes,
    table_stride,
    eps,
    window_programs,
    main_programs,
    kv_ptr,
    kv_norm_ptr,
    kv_stride,
    window_data,
    window_scale,
    m_items,
    m_c,
    m_z,
    m_ape,
    m_norm,
    m_dense,
    m_scratch,
    m_arrived,
    m_item_count,
    m_c_stride,
    m_z_stride,
    m_data,
    m_scale,
    m_ka,
    m_za,
    m_kb,
    m_zb,
    i_items,
    i_c,
    i_z,
    i_ape,
    i_norm,
    i_dense,
    i_scratch,
    i_arrived,
    i_item_count,
    i_c_stride,
    i_z_stride,
    i_data,
    i_scale,
    i_ka,
    i_za,
    i_kb,
    i_zb,
    WINDOW: tl.constexpr,
    MAIN: tl.constexpr,
    INDEX: tl.constexpr,
):
    program = tl.program_id(0)
    if program < window_programs:
        if WINDOW is not None:
            _append_window(
                program, slot_arena, tokens_ptr, rope_ptr, slot_bytes, eps,
                kv_ptr, kv_norm_ptr, kv_stride, window_data, window_scale, WINDOW,
            )  # fmt: skip
    elif program < window_programs + main_programs:
        if MAIN is not None:
            _compress(
                program - window_programs, block_arena, slot_arena, block_table, rope_ptr,
                block_bytes, slot_bytes, table_stride, eps,
                m_items, m_c, m_z, m_ape, m_norm, m_dense, m_scratch, m_arrived,
                m_item_count, m_c_stride, m_z_stride, m_data, m_scale, m_ka, m_za, m_kb, m_zb,
                MAIN,
            )  # fmt: skip
    else:
        if INDEX is not None:
            _compress(
                program - window_programs - main_programs, block_arena, slot_arena, block_table,
                rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                i_items, i_c, i_z, i_ape, i_norm, i_dense, i_scratch, i_arrived,
                i_item_count, i_c_stride, i_z_stride, i_data, i_scale, i_ka, i_za, i_kb, i_zb,
                INDEX,
            )  # fmt: skip


@triton.jit
def _append_window(
    token, slot_arena, tokens_ptr, rope_ptr, slot_bytes, eps,
    kv_ptr, norm_ptr, kv_stride, data_offset, scale_offset, W: tl.constexpr,
):  # fmt: skip
    RING: tl.constexpr = W.RING
    WIDTH: tl.constexpr = W.WIDTH
    ROPE: tl.constexpr = W.ROPE
    NORM: tl.constexpr = W.NORM
    RECORD: tl.constexpr = W.RECORD
    slot = tl.load(tokens_ptr + token * 4).to(tl.int64)
    position = tl.load(tokens_ptr + token * 4 + 1)
    keep = tl.load(tokens_ptr + token * 4 + 3)
    if keep == 1:
        channel = tl.arange(0, WIDTH)
        x = tl.load(kv_ptr + token.to(tl.int64) * kv_stride + channel).to(tl.float32)
        if NORM:
            x = rms_norm(x, tl.load(norm_ptr + channel), eps, WIDTH)
            cos, sin = load_rope(rope_ptr + position.to(tl.int64) * ROPE, WIDTH, ROPE)
            x = rotate(x, cos, sin, WIDTH, ROPE)
        row = position % RING
        page = slot_arena + slot * slot_bytes
        store_record(
            x,
            page + data_offset + row * RECORD.DATA_BYTES,
            page + scale_offset + row * RECORD.SCALE_BYTES,
            WIDTH,
            RECORD,
        )


@triton.jit
def _compress(
    program, block_arena, slot_arena, block_table, rope_ptr,
    block_bytes, slot_bytes, table_stride, eps,
    items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    items, c_stride, z_stride, data_offset, scale_offset,
    ka_offset, za_offset, kb_offset, zb_offset,
    C: tl.constexpr,
):  # fmt: skip
    RATIO: tl.constexpr = C.RATIO
    SPLITS: tl.constexpr = C.SPLITS
    # programs past the items write tails alone
    is_tail = program >= items * SPLITS
    item = tl.where(is_tail, program - items * SPLITS, program // SPLITS)
    split = tl.where(is_tail, 0, program % SPLITS)
    row = items_ptr + item * 8
    slot = tl.load(row).to(tl.int64)
    start = tl.load(row + 1)
    end = tl.load(row + 2)
    first_row = tl.load(row + 3)
    entry0 = tl.load(row + 4)
    entries = tl.load(row + 5)
    is_first = tl.load(row + 6)
    if slot >= 0:
        slot_ptr = slot_arena + slot * slot_bytes
        ka = (slot_ptr + ka_offset).to(tl.pointer_type(tl.float32))
        za = (slot_ptr + za_offset).to(tl.pointer_type(tl.float32))
        kb = (slot_ptr + kb_offset).to(tl.pointer_type(tl.float32))
        zb = (slot_ptr + zb_offset).to(tl.pointer_type(tl.float32))
        if is_tail:
            if C.TAILS == "apart" and is_first == 1:
                _write_tails(
                    start, end, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
                    ka, za, kb, zb, C.WIDTH, C,
                )  # fmt: skip
        else:
            if C.COMPRESS:
                for nth in range(entries):
                    entry = entry0 + nth
                    if (entry + 1) * RATIO <= end:
                        _close_group(
                            item, split, nth, entry, slot, start, first_row,
                            block_arena, block_table, rope_ptr, block_bytes, table_stride, eps,
                            c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
                            c_stride, z_stride, data_offset, scale_offset, ka, za, kb, zb, C,
                        )  # fmt: skip
            if C.TAILS == "after" and is_first == 1:
                tl.debug_barrier()  # the rows read above may be among those written below
                _write_tails(
                    start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
                    ka, za, kb, zb, C.WIDTH // SPLITS, C,
                )  # fmt: skip


@triton.jit
def _close_group(
    item, split, nth, entry, slot, start, first_row,
    block_arena, block_table, rope_ptr, block_bytes, table_stride, eps,
    c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    c_stride, z_stride, data_offset, scale_offset, ka, za, kb, zb, C: tl.constexpr,
):  # fmt: skip
    """Pools one group and stores its entry. What the store needs is loaded before the pooling."""
    WIDTH: tl.constexpr = C.WIDTH
    ROPE: tl.constexpr = C.ROPE
    SPLITS: tl.constexpr = C.SPLITS
    PAGE_ROWS: tl.constexpr = C.PAGE_ROWS
    channel = tl.arange(0, WIDTH)
    norm = tl.load(norm_ptr + channel)
    cos, sin = load_rope(rope_ptr + (entry * C.RATIO).to(tl.int64) * ROPE, WIDTH, ROPE)
    block_id = tl.load(block_table + slot * table_stride + entry // PAGE_ROWS).to(tl.int64)
    page = block_arena + block_id * block_bytes
    pooled = _pool(
        entry, start, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
        ka, za, kb, zb, C,
    )  # fmt: skip
    dense_row = dense_ptr.to(tl.pointer_type(tl.uint16)) + (item * 2 + nth).to(tl.int64) * WIDTH
    if SPLITS == 1:
        _store_entry(
            pooled, norm, cos, sin, eps, page, entry % PAGE_ROWS, dense_row,
            data_offset, scale_offset, C,
        )  # fmt: skip
    else:
        # each program pools some channels; whoever comes last has them all
        PART: tl.constexpr = WIDTH // SPLITS
        line = scratch_ptr + item.to(tl.int64) * WIDTH
        tl.store(line + split * PART + tl.arange(0, PART), pooled)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + item, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            tl.store(arrived_ptr + item, 0)
            complete = tl.load(line + channel, cache_modifier=".cg")
            _store_entry(
                complete, norm, cos, sin, eps, page, entry % PAGE_ROWS, dense_row,
                data_offset, scale_offset, C,
            )  # fmt: skip


@triton.jit
def _store_entry(
    pooled, norm, cos, sin, eps, page, page_row, dense_row, data_offset, scale_offset,
    C: tl.constexpr,
):  # fmt: skip
    """Norm, RoPE, Hadamard for keys, and the record into its block (or a dense row)."""
    RECORD: tl.constexpr = C.RECORD
    WIDTH: tl.constexpr = C.WIDTH
    x = rms_norm(round_bf16(pooled), norm, eps, WIDTH)
    x = rotate(x, cos, sin, WIDTH, C.ROPE)
    if C.HADAMARD:
        x = hadamard(x, WIDTH**-0.5, WIDTH)
    if C.DENSE:
        tl.store(dense_row + tl.arange(0, WIDTH), bf16_bits(x))
    else:
        store_record(
            x,
            page + data_offset + page_row * RECORD.DATA_BYTES,
            page + scale_offset + page_row * RECORD.SCALE_BYTES,
            WIDTH,
            RECORD,
        )


@triton.jit
def _pool(
    entry, start, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    ka, za, kb, zb, C: tl.constexpr,
):  # fmt: skip
    """Gated softmax pooling of one group's rows: fp32 [WIDTH / SPLITS]."""
    RATIO: tl.constexpr = C.RATIO
    POOLED: tl.constexpr = RATIO * 2 if C.OVERLAP else RATIO
    PART: tl.constexpr = C.WIDTH // C.SPLITS
    ROWS: tl.constexpr = min(POOLED, C.TILE_ELEMENTS // PART)
    if ROWS == POOLED:
        z, k, valid = _group_tile(
            0, ROWS, True, entry, start, first_row, split, c_ptr, z_ptr, ape_ptr,
            c_stride, z_stride, ka, za, kb, zb, C,
        )  # fmt: skip
        weight, product = _weigh(z, k, valid, tl.max(z, axis=0))
        weight_sum = tl.sum(weight, axis=0)
        value_sum = tl.sum(product, axis=0)
    else:
        top = tl.full([PART], float("-inf"), dtype=tl.float32)
        for at in range(0, POOLED, ROWS):
            z, k, valid = _group_tile(
                at, ROWS, False, entry, start, first_row, split, c_ptr, z_ptr, ape_ptr,
                c_stride, z_stride, ka, za, kb, zb, C,
            )  # fmt: skip
            top = tl.maximum(top, tl.max(z, axis=0))
        weight_sum = tl.zeros([PART], dtype=tl.float64)
        value_sum = tl.zeros([PART], dtype=tl.float64)
        for at in range(0, POOLED, ROWS):
            z, k, valid = _group_tile(
                at, ROWS, True, entry, start, first_row, split, c_ptr, z_ptr, ape_ptr,
                c_stride, z_stride, ka, za, kb, zb, C,
            )  # fmt: skip
            weight, product = _weigh(z, k, valid, top)
            weight_sum += tl.sum(weight, axis=0)
            value_sum += tl.sum(product, axis=0)
    return tl.div_rn(value_sum.to(tl.float32), weight_sum.to(tl.float32))


@triton.jit
def _weigh(z, k, valid, top):
    """Softmax numerators and their products with the values, in fp64 for the sums to come."""
    weight = tl.where(valid[:, None], exp_nonpositive(z - top[None, :]), 0.0)
    product = tl.where(valid[:, None], weight * k, 0.0)
    return weight.to(tl.float64), product.to(tl.float64)


@triton.jit
def _group_tile(
    at, ROWS: tl.constexpr, VALUES: tl.constexpr, entry, start, first_row, split,
    c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C: tl.constexpr,
):  # fmt: skip
    """Rows [at, at + ROWS) of a group: biased logits, values, and which rows exist."""
    RATIO: tl.constexpr = C.RATIO
    OVERLAP: tl.constexpr = C.OVERLAP
    WIDTH: tl.constexpr = C.WIDTH
    A_ROWS: tl.constexpr = C.A_ROWS
    B_ROWS: tl.constexpr = C.B_ROWS
    PART: tl.constexpr = WIDTH // C.SPLITS
    COLUMNS: tl.constexpr = WIDTH * 2 if OVERLAP else WIDTH
    nth = at + tl.arange(0, ROWS)
    column = split * PART + tl.arange(0, PART)
    if OVERLAP:
        current = nth >= RATIO
        position = (entry - 1) * RATIO + nth
        source_column = tl.where(current, WIDTH, 0)
    else:
        current = nth >= 0
        position = entry * RATIO + nth
        source_column = tl.zeros([ROWS], dtype=tl.int32)
    valid = position >= 0
    k = tl.zeros([ROWS, PART], dtype=tl.float32)
    z = tl.full([ROWS, PART], float("-inf"), dtype=tl.float32)
    if not C.FROM_TAILS:
        is_new = valid & (position >= start)
        token = (first_row + position - start).to(tl.int64)
        at_input = source_column[:, None] + column[None, :]
        bias = tl.load(
            ape_ptr + (position % RATIO)[:, None] * COLUMNS + at_input, mask=is_new[:, None]
        )
        z = tl.load(z_ptr + token[:, None] * z_stride + at_input, mask=is_new[:, None])
        z = z + bias
        if VALUES:
            k = tl.load(c_ptr + token[:, None] * c_stride + at_input, mask=is_new[:, None])
        is_old = valid & (position < start)
    else:
        is_old = valid
    if A_ROWS > 0:
        ring_row = position % A_ROWS
        if OVERLAP:
            ring_row = tl.where(current, ring_row, position % B_ROWS)
            old_z_ptr = tl.where(current[:, None], za + column[None, :], zb + column[None, :])
            old_k_ptr = tl.where(current[:, None], ka + column[None, :], kb + column[None, :])
        else:
            old_z_ptr = tl.broadcast_to(za + column[None, :], [ROWS, PART])
            old_k_ptr = tl.broadcast_to(ka + column[None, :], [ROWS, PART])
        old_z = tl.load(old_z_ptr + ring_row[:, None] * WIDTH, mask=is_old[:, None])
        z = tl.where(is_old[:, None], old_z, z)
        if VALUES:
            old_k = tl.load(old_k_ptr + ring_row[:, None] * WIDTH, mask=is_old[:, None])
            k = tl.where(is_old[:, None], old_k, k)
    z = tl.where(valid[:, None], z, float("-inf"))
    return z, k, valid


@triton.jit
def _write_tails(
    start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    ka, za, kb, zb, PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The newest tokens of the step into the rings: current stream, then previous stream."""
    _write_tail(
        start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
        ka, za, C.OVERLAP, C.A_ROWS, PART, C,
    )  # fmt: skip
    if C.OVERLAP:
        _write_tail(
            start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
            kb, zb, False, C.B_ROWS, PART, C,
        )  # fmt: skip


@triton.jit
def _write_tail(
    start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    k_ring, z_ring, SECOND_HALF: tl.constexpr, RING: tl.constexpr, PART: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    RATIO: tl.constexpr = C.RATIO
    WIDTH: tl.constexpr = C.WIDTH
    COLUMNS: tl.constexpr = WIDTH * 2 if C.OVERLAP else WIDTH
    # a decode step has few tokens a request, a chunk fills the ring
    ROWS: tl.constexpr = 1 if C.TAILS == "apart" else min(32, 2048 // PART)
    column = split * PART + tl.arange(0, PART)
    source_column = column + (WIDTH if SECOND_HALF else 0)
    if RING > 0:
        for at in range(tl.maximum(start, end - RING), end, ROWS):
            position = at + tl.arange(0, ROWS)
            live = (position < end)[:, None]
            token = (first_row + position - start).to(tl.int64)
            bias = tl.load(
                ape_ptr + (position % RATIO)[:, None] * COLUMNS + source_column[None, :], mask=live
            )
            k = tl.load(c_ptr + token[:, None] * c_stride + source_column[None, :], mask=live)
            z = tl.load(z_ptr + token[:, None] * z_stride + source_column[None, :], mask=live)
            ring_at = (position % RING)[:, None] * WIDTH + column[None, :]
            tl.store(k_ring + ring_at, k, mask=live)
            tl.store(z_ring + ring_at, z + bias, mask=live)
