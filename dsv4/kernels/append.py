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
from dsv4.kernels.fold import fold_tokens, load_state, write_states
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
from dsv4.reference.numerics import SUM_LANES

# Pooling more rows than this splits the channels over programs: a group of 128 tokens is 512 KB.
MAX_ROWS_IN_ONE_PROGRAM = 8
SPLIT_CHANNELS = 32
# Folding goes token by token, so a thread has one channel; a narrow step folds only a few.
FOLD_SPLIT_CHANNELS = 128
FOLD_AHEAD_TOKENS = 8
# Programs that share the work items of one compressor; each takes every so-manieth.
MAX_WORK_PROGRAMS = 1024
NUM_WARPS = 4
# Left alone, ptxas stops at 128 registers and spills a few.
MAX_REGISTERS = 144


@dataclass(frozen=True, slots=True)
class WindowConstants:
    """A window write as compile-time constants."""

    RING: int
    WIDTH: int
    ROPE: int
    NORM: bool
    CHUNK: bool
    STAGE: bool
    BEFORE: int
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
    STATE_ROWS: int
    PAGE_ROWS: int
    SPLITS: int
    LANES: int
    AHEAD: int
    LOOP: bool
    COMPRESS: bool
    TAILS: str
    FROM_TAILS: bool
    DENSE: bool
    RECORD: RecordConstants


def append(
    step: StepTensors, window: WindowWrite | None, compressors: Sequence[CompressorWrite]
) -> None:
    """One launch; a wide step has two. Same result as dsv4.reference.append.append, byte for byte.

    A wide step's ring must be staged before it is overwritten, so its first launch stages and
    compresses, and its second, which needs few registers, stores the window rows.
    """
    if window is None or window.chunk is None:
        _launch(step, window, compressors)
    else:
        _launch(step, window, compressors, stage=True)
        _launch(step, window, ())


def _launch(
    step: StepTensors,
    window: WindowWrite | None,
    compressors: Sequence[CompressorWrite],
    *,
    stage: bool = False,
) -> None:
    grid, arguments, constants = launch_arguments(step, window, compressors, stage=stage)
    if grid:
        _append_kernel[(grid,)](
            *arguments,
            **constants,
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,
        )


def launch_arguments(
    step: StepTensors,
    window: WindowWrite | None,
    compressors: Sequence[CompressorWrite],
    *,
    stage: bool = False,
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Programs, run-time arguments and compile-time constants of a launch. With `stage` the window
    rows in front of each chunk are saved, and the step's own are not stored."""
    main, index = _main_and_index(compressors)
    window_programs = 0
    if window is not None:
        before = step.batch.shape[0] * (window.window - 1)
        window_programs = before if stage else step.window.shape[0]
    main_programs, main_args, main_constants = _compressor_arguments(step, main)
    index_programs, index_args, index_constants = _compressor_arguments(step, index)
    window_args, window_constants = _window_arguments(step, window, stage)
    arguments = (
        step.block_arena,
        step.slot_arena,
        step.block_table,
        step.batch,
        step.window,
        step.rope,
        step.block_arena.stride(0),
        step.slot_arena.stride(0),
        step.block_table.stride(0),
        step.rms_eps,
        window_programs,
        main_programs,
        *window_args,
        *main_args,
        *index_args,
    )
    constants = {"WINDOW": window_constants, "MAIN": main_constants, "INDEX": index_constants}
    return window_programs + main_programs + index_programs, arguments, constants


def _main_and_index(
    compressors: Sequence[CompressorWrite],
) -> tuple[CompressorWrite | None, CompressorWrite | None]:
    main = next((w for w in compressors if not w.layout.hadamard), None)
    index = next((w for w in compressors if w.layout.hadamard), None)
    return main, index


def _window_arguments(
    step: StepTensors, window: WindowWrite | None, stage: bool
) -> tuple[tuple[Any, ...], WindowConstants | None]:
    if window is None:
        return (step.slot_arena, step.rope, step.slot_arena, 0, 0, 0, 0), None
    page, chunk_page = window.page, window.chunk_page
    constants = WindowConstants(
        RING=page.rows,
        WIDTH=page.format.width,
        ROPE=step.rope.shape[1],
        NORM=window.norm is not None,
        CHUNK=window.chunk is not None,
        STAGE=stage,
        BEFORE=window.window - 1,
        RECORD=record_constants(page.format),
    )
    return (
        window.kv,
        step.rope if window.norm is None else window.norm,
        step.slot_arena if window.chunk is None else window.chunk,
        window.kv.stride(0),
        page.offset_bytes,
        page.scale_offset_bytes,
        0 if chunk_page is None else chunk_page.scale_offset_bytes,
    ), constants


def _compressor_arguments(
    step: StepTensors, write: CompressorWrite | None
) -> tuple[int, tuple[Any, ...], CompressorConstants | None]:
    nothing: Tensor = step.rope
    if write is None:
        return 0, (step.batch, step.batch, *[nothing] * 6, step.arrived, *[0] * 9), None
    layout, items = write.layout, write.items.shape[0]
    splits = 1
    if layout.online:
        splits = 1 if step.narrow else max(1, layout.width // FOLD_SPLIT_CHANNELS)
    elif layout.slots_pooled > MAX_ROWS_IN_ONE_PROGRAM and not layout.overlap:
        splits = max(1, layout.width // SPLIT_CHANNELS)
    # Where a step is narrow its tails overwrite nothing that its groups read, so other programs
    # may write them meanwhile; a wide chunk's groups must be read first.
    tails = "none"
    if write.write_tails:
        tails = "apart" if step.narrow or not write.compress else "after"
    work_programs = 0
    if write.compress or tails == "after":
        work_programs = min(items * splits, MAX_WORK_PROGRAMS)
    programs = work_programs + (step.batch.shape[0] if tails == "apart" else 0)
    constants = CompressorConstants(
        RATIO=layout.ratio,
        OVERLAP=layout.overlap,
        WIDTH=layout.width,
        ROPE=layout.rope_dim,
        HADAMARD=layout.hadamard,
        A_ROWS=layout.a_rows,
        B_ROWS=layout.b_rows,
        STATE_ROWS=layout.state_rows,
        PAGE_ROWS=layout.page.rows,
        SPLITS=splits,
        LANES=SUM_LANES,
        AHEAD=1 if step.narrow else FOLD_AHEAD_TOKENS,
        LOOP=work_programs < items * splits,
        COMPRESS=write.compress,
        TAILS=tails,
        FROM_TAILS=write.c is None,
        DENSE=write.dense is not None,
        RECORD=record_constants(layout.page.format),
    )
    arguments = (
        write.items,
        write.item_count,
        nothing if write.c is None else write.c,
        nothing if write.z is None else write.z,
        write.ape,
        write.norm,
        nothing if write.dense is None else write.dense,
        step.scratch,
        step.arrived,
        work_programs,
        0 if write.c is None else write.c.stride(0),
        0 if write.z is None else write.z.stride(0),
        layout.page.offset_bytes,
        layout.page.scale_offset_bytes,
        layout.state_offset_bytes if layout.online else layout.ka_offset_bytes,
        layout.za_offset_bytes,
        layout.kb_offset_bytes,
        layout.zb_offset_bytes,
    )
    return programs, arguments, constants


@triton.jit
def _append_kernel(
    block_arena,
    slot_arena,
    block_table,
    batch_ptr,
    window_ptr,
    rope_ptr,
    block_bytes,
    slot_bytes,
    table_stride,
    eps,
    window_programs,
    main_programs,
    kv_ptr,
    kv_norm_ptr,
    chunk_ptr,
    kv_stride,
    window_data,
    window_scale,
    chunk_scale,
    m_items,
    m_count,
    m_c,
    m_z,
    m_ape,
    m_norm,
    m_dense,
    m_scratch,
    m_arrived,
    m_work_programs,
    m_c_stride,
    m_z_stride,
    m_data,
    m_scale,
    m_ka,
    m_za,
    m_kb,
    m_zb,
    i_items,
    i_count,
    i_c,
    i_z,
    i_ape,
    i_norm,
    i_dense,
    i_scratch,
    i_arrived,
    i_work_programs,
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
        if WINDOW is not None and WINDOW.STAGE:
            _stage_window(
                program, slot_arena, batch_ptr, chunk_ptr, slot_bytes, window_data, window_scale,
                chunk_scale, WINDOW,
            )  # fmt: skip
        elif WINDOW is not None:
            _append_window(
                program, slot_arena, window_ptr, rope_ptr, slot_bytes, eps,
                kv_ptr, kv_norm_ptr, chunk_ptr, kv_stride, window_data, window_scale, chunk_scale,
                WINDOW,
            )  # fmt: skip
    elif program < window_programs + main_programs:
        if MAIN is not None:
            _compress(
                program - window_programs, block_arena, slot_arena, block_table, batch_ptr,
                rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                m_items, m_count, m_c, m_z, m_ape, m_norm, m_dense, m_scratch, m_arrived,
                m_work_programs, m_c_stride, m_z_stride, m_data, m_scale, m_ka, m_za, m_kb, m_zb,
                MAIN,
            )  # fmt: skip
    else:
        if INDEX is not None:
            _compress(
                program - window_programs - main_programs, block_arena, slot_arena, block_table,
                batch_ptr, rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                i_items, i_count, i_c, i_z, i_ape, i_norm, i_dense, i_scratch, i_arrived,
                i_work_programs, i_c_stride, i_z_stride, i_data, i_scale, i_ka, i_za, i_kb, i_zb,
                INDEX,
            )  # fmt: skip


@triton.jit
def _append_window(
    program, slot_arena, window_ptr, rope_ptr, slot_bytes, eps,
    kv_ptr, norm_ptr, chunk_ptr, kv_stride, data_offset, scale_offset, chunk_scale,
    W: tl.constexpr,
):  # fmt: skip
    RING: tl.constexpr = W.RING
    WIDTH: tl.constexpr = W.WIDTH
    ROPE: tl.constexpr = W.ROPE
    NORM: tl.constexpr = W.NORM
    RECORD: tl.constexpr = W.RECORD
    slot = tl.load(window_ptr + program * 4).to(tl.int64)
    position = tl.load(window_ptr + program * 4 + 1)
    token = tl.load(window_ptr + program * 4 + 2)
    target = tl.load(window_ptr + program * 4 + 3)
    if slot >= 0:
        channel = tl.arange(0, WIDTH)
        x = tl.load(kv_ptr + token.to(tl.int64) * kv_stride + channel).to(tl.float32)
        if NORM:
            x = rms_norm(x, tl.load(norm_ptr + channel), eps, WIDTH)
            cos, sin = load_rope(rope_ptr + position.to(tl.int64) * ROPE, WIDTH, ROPE)
            x = rotate(x, cos, sin, WIDTH, ROPE)
        if target % 2 == 1:
            page = slot_arena + slot * slot_bytes
            row = position % RING
            store_record(
                x,
                page + data_offset + row * RECORD.DATA_BYTES,
                page + scale_offset + row * RECORD.SCALE_BYTES,
                WIDTH,
                RECORD,
            )
        if W.CHUNK:
            chunk_row = (target // 2).to(tl.int64)
            store_record(
                x,
                chunk_ptr + chunk_row * RECORD.DATA_BYTES,
                chunk_ptr + chunk_scale + chunk_row * RECORD.SCALE_BYTES,
                WIDTH,
                RECORD,
            )


@triton.jit
def _stage_window(
    program, slot_arena, batch_ptr, chunk_ptr, slot_bytes, data_offset, scale_offset, chunk_scale,
    W: tl.constexpr,
):  # fmt: skip
    """One row in front of a request's chunk, from the ring that the chunk will overwrite."""
    RECORD: tl.constexpr = W.RECORD
    batch_row = program // W.BEFORE
    nth = program % W.BEFORE
    slot = tl.load(batch_ptr + batch_row * 4).to(tl.int64)
    start = tl.load(batch_ptr + batch_row * 4 + 1)
    count = tl.load(batch_ptr + batch_row * 4 + 2)
    first_row = tl.load(batch_ptr + batch_row * 4 + 3)
    position = start - W.BEFORE + nth
    if (slot >= 0) & (position >= 0) & (count > 0):
        chunk_row = (first_row + W.BEFORE * batch_row + nth).to(tl.int64)
        page = slot_arena + slot * slot_bytes
        ring_row = position % W.RING
        _copy_bytes(
            page + data_offset + ring_row * RECORD.DATA_BYTES,
            chunk_ptr + chunk_row * RECORD.DATA_BYTES,
            RECORD.DATA_BYTES,
        )
        if RECORD.SCALE_BYTES > 0:
            _copy_bytes(
                page + scale_offset + ring_row * RECORD.SCALE_BYTES,
                chunk_ptr + chunk_scale + chunk_row * RECORD.SCALE_BYTES,
                RECORD.SCALE_BYTES,
            )


@triton.jit
def _copy_bytes(source, target, COUNT: tl.constexpr):
    byte = tl.arange(0, triton.next_power_of_2(COUNT))
    tl.store(target + byte, tl.load(source + byte, mask=byte < COUNT), mask=byte < COUNT)


@triton.jit
def _compress(
    program, block_arena, slot_arena, block_table, batch_ptr, rope_ptr,
    block_bytes, slot_bytes, table_stride, eps,
    items_ptr, count_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    work_programs, c_stride, z_stride, data_offset, scale_offset,
    ka_offset, za_offset, kb_offset, zb_offset,
    C: tl.constexpr,
):  # fmt: skip
    RATIO: tl.constexpr = C.RATIO
    SPLITS: tl.constexpr = C.SPLITS
    if program >= work_programs:
        if C.TAILS == "apart":
            request = batch_ptr + (program - work_programs) * 4
            slot = tl.load(request).to(tl.int64)
            start = tl.load(request + 1)
            count = tl.load(request + 2)
            first_row = tl.load(request + 3)
            if slot >= 0:
                slot_ptr = slot_arena + slot * slot_bytes
                _write_tails(
                    start, start + count, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
                    slot_ptr, ka_offset, za_offset, kb_offset, zb_offset, C.WIDTH, C,
                )  # fmt: skip
    else:
        # with a program for every unit, padding rows tell; else the count does, and programs loop
        last = program + 1
        if C.LOOP:
            last = tl.load(count_ptr) * SPLITS
        for unit in range(program, last, work_programs):
            item = unit // SPLITS
            split = unit % SPLITS
            row = items_ptr + item * 8
            slot = tl.load(row).to(tl.int64)
            start = tl.load(row + 1)
            end = tl.load(row + 2)
            first_row = tl.load(row + 3)
            entry0 = tl.load(row + 4)
            entries = tl.load(row + 5)
            writes_tails = tl.load(row + 6)
            slot_ptr = slot_arena + slot * slot_bytes
            ka = (slot_ptr + ka_offset).to(tl.pointer_type(tl.float32))
            za = (slot_ptr + za_offset).to(tl.pointer_type(tl.float32))
            kb = (slot_ptr + kb_offset).to(tl.pointer_type(tl.float32))
            zb = (slot_ptr + zb_offset).to(tl.pointer_type(tl.float32))
            if C.COMPRESS:
                for nth in range(entries):
                    entry = entry0 + nth
                    if (entry + 1) * RATIO <= end:
                        _close_group(
                            item, split, entry, slot, start, first_row,
                            block_arena, block_table, rope_ptr, block_bytes, table_stride, eps,
                            c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
                            c_stride, z_stride, data_offset, scale_offset, ka, za, kb, zb, C,
                        )  # fmt: skip
            if C.TAILS == "after":  # noqa: SIM102 (the outer one is decided at compile time)
                if writes_tails == 1:
                    tl.debug_barrier()  # the rows read above may be among those written below
                    _write_tails(
                        start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
                        slot_ptr, ka_offset, za_offset, kb_offset, zb_offset,
                        C.WIDTH // SPLITS, C,
                    )  # fmt: skip


@triton.jit
def _close_group(
    item, split, entry, slot, start, first_row,
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
    dense_row = dense_ptr.to(tl.pointer_type(tl.uint16)) + item.to(tl.int64) * WIDTH
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
    """Gated softmax pooling of one group's rows: fp32 [WIDTH / SPLITS].

    Values are loaded before the logits are looked at, so that both are under way at once.
    """
    POOLED: tl.constexpr = C.RATIO * 2 if C.OVERLAP else C.RATIO
    PART: tl.constexpr = C.WIDTH // C.SPLITS
    if C.STATE_ROWS > 0:
        return _pool_folded(
            entry, start, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, C
        )
    elif POOLED == 8:
        return _pool_8(
            entry, start, first_row, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C
        )
    else:
        ROWS: tl.constexpr = min(POOLED, C.LANES)
        tops = tl.full([ROWS, PART], float("-inf"), dtype=tl.float32)
        for at in tl.static_range(0, POOLED, ROWS):
            z, k, valid = _group_rows(
                at, ROWS, False, entry, start, first_row, split, c_ptr, z_ptr, ape_ptr,
                c_stride, z_stride, ka, za, kb, zb, C,
            )  # fmt: skip
            tops = tl.maximum(tops, z)
        top = tl.max(tops, axis=0)[None, :]
        weights = tl.zeros([ROWS, PART], dtype=tl.float32)
        products = tl.zeros([ROWS, PART], dtype=tl.float32)
        for at in tl.static_range(0, POOLED, ROWS):
            z, k, valid = _group_rows(
                at, ROWS, True, entry, start, first_row, split, c_ptr, z_ptr, ape_ptr,
                c_stride, z_stride, ka, za, kb, zb, C,
            )  # fmt: skip
            weight, product = _weigh(z, k, valid, top)
            weights += weight
            products += product
        sums = _tree_sum(tl.join(products, weights), ROWS, PART)
        product, weight = tl.split(sums)
        return tl.div_rn(product, weight)


@triton.jit
def _pool_folded(
    entry, start, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ring,
    C: tl.constexpr,
):  # fmt: skip
    """A group whose tokens before the step are folded: goes on from their state."""
    PART: tl.constexpr = C.WIDTH // C.SPLITS
    end = (entry + 1) * C.RATIO
    if C.FROM_TAILS:
        top, weight, product = load_state(ring, end - 1, True, split, PART, C)
    else:
        begin = tl.maximum(start, entry * C.RATIO)
        top, weight, product = load_state(ring, begin - 1, begin % C.RATIO != 0, split, PART, C)
        top, weight, product = fold_tokens(
            top, weight, product, begin, end, first_row - start, split,
            c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C,
        )  # fmt: skip
    return tl.div_rn(product, weight)


@triton.jit
def _pool_8(
    entry, start, first_row, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb,
    C: tl.constexpr,
):  # fmt: skip
    """Eight rows one by one, a thread holding its channels of all: no exchange between threads."""
    z0, k0, v0 = _group_rows(0, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    z1, k1, v1 = _group_rows(1, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    z2, k2, v2 = _group_rows(2, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    z3, k3, v3 = _group_rows(3, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    z4, k4, v4 = _group_rows(4, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    z5, k5, v5 = _group_rows(5, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    z6, k6, v6 = _group_rows(6, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    z7, k7, v7 = _group_rows(7, 1, True, entry, start, first_row, 0, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C)  # noqa: E501  # fmt: skip
    top = tl.maximum(
        tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3)),
        tl.maximum(tl.maximum(z4, z5), tl.maximum(z6, z7)),
    )
    w0, p0 = _weigh(z0, k0, v0, top)
    w1, p1 = _weigh(z1, k1, v1, top)
    w2, p2 = _weigh(z2, k2, v2, top)
    w3, p3 = _weigh(z3, k3, v3, top)
    w4, p4 = _weigh(z4, k4, v4, top)
    w5, p5 = _weigh(z5, k5, v5, top)
    w6, p6 = _weigh(z6, k6, v6, top)
    w7, p7 = _weigh(z7, k7, v7, top)
    weight = ((w0 + w4) + (w2 + w6)) + ((w1 + w5) + (w3 + w7))
    product = ((p0 + p4) + (p2 + p6)) + ((p1 + p5) + (p3 + p7))
    return tl.div_rn(tl.reshape(product, [C.WIDTH]), tl.reshape(weight, [C.WIDTH]))


@triton.jit
def _weigh(z, k, valid, top):
    """Softmax numerators and their products with the values; rows that do not exist count 0."""
    weight = tl.where(valid[:, None], exp_nonpositive(z - top), 0.0)
    return weight, tl.where(valid[:, None], weight * k, 0.0)


@triton.jit
def _tree_sum(x, ROWS: tl.constexpr, PART: tl.constexpr):
    """[ROWS, PART, 2] → [PART, 2]: adds the lower half of the rows to the upper half until one is
    left, as the reference does."""
    if ROWS == 1:
        return tl.reshape(x, [PART, 2])
    else:
        halves = tl.permute(tl.reshape(x, [2, ROWS // 2, PART, 2]), (1, 2, 3, 0))
        first, second = tl.split(halves)
        return _tree_sum(first + second, ROWS // 2, PART)


@triton.jit
def _group_rows(
    at, ROWS: tl.constexpr, VALUES: tl.constexpr, entry, start, first_row, split,
    c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, za, kb, zb, C: tl.constexpr,
):  # fmt: skip
    """Rows [at, at + ROWS) of a group, from the step's projections or from the tails: biased
    logits, values, and which rows exist."""
    RATIO: tl.constexpr = C.RATIO
    WIDTH: tl.constexpr = C.WIDTH
    PART: tl.constexpr = WIDTH // C.SPLITS
    COLUMNS: tl.constexpr = WIDTH * 2 if C.OVERLAP else WIDTH
    nth = at + tl.arange(0, ROWS)
    column = (split * PART + tl.arange(0, PART))[None, :]
    if C.OVERLAP:
        current = nth >= RATIO
        position = (entry - 1) * RATIO + nth
        half = tl.where(current, WIDTH, 0)
        ring_row = tl.where(current, position % C.A_ROWS, position % C.B_ROWS) * WIDTH
        old_z = tl.where(current, za, zb) + ring_row
        old_k = tl.where(current, ka, kb) + ring_row
    else:
        position = entry * RATIO + nth
        half = tl.zeros([ROWS], dtype=tl.int32)
        ring_row = position % max(C.A_ROWS, 1) * WIDTH
        old_z = za + ring_row
        old_k = ka + ring_row
    valid = position >= 0
    if C.FROM_TAILS:
        z = tl.load(old_z[:, None] + column, mask=valid[:, None], other=0.0)
        k = tl.load(old_k[:, None] + column, mask=valid[:, None], other=0.0)
    else:
        is_new = position >= start
        token = (first_row + position - start).to(tl.int64)
        row_z = tl.where(is_new, z_ptr + token * z_stride + half, old_z)
        row_k = tl.where(is_new, c_ptr + token * c_stride + half, old_k)
        row_z = tl.multiple_of(row_z, 16)
        row_k = tl.multiple_of(row_k, 16)
        bias_row = ape_ptr + (position % RATIO) * COLUMNS + half
        z = tl.load(row_z[:, None] + column, mask=valid[:, None], other=0.0)
        k = z
        if VALUES:
            k = tl.load(row_k[:, None] + column, mask=valid[:, None], other=0.0)
        bias = tl.load(bias_row[:, None] + column, mask=(valid & is_new)[:, None], other=0.0)
        z = z + bias
    z = tl.where(valid[:, None], z, float("-inf"))
    return z, k, valid


@triton.jit
def _write_tails(
    start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    slot_ptr, ka_offset, za_offset, kb_offset, zb_offset, PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The newest tokens of the step into the rings: current stream, then previous stream; or their
    states, where groups are kept folded."""
    ka = (slot_ptr + ka_offset).to(tl.pointer_type(tl.float32))
    za = (slot_ptr + za_offset).to(tl.pointer_type(tl.float32))
    kb = (slot_ptr + kb_offset).to(tl.pointer_type(tl.float32))
    zb = (slot_ptr + zb_offset).to(tl.pointer_type(tl.float32))
    if C.STATE_ROWS > 0:
        write_states(
            start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ka, PART, C
        )
    else:
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
