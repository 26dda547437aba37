"""The write path of one layer in one launch: window rows, tails, closed groups.

Programs of several sorts share a grid: for each compressor some an item, one for several items or
one after the other; then one a token, for its window row and its rows in the tails. An item is all
that a step does to one group of one request; in a wide step the first item of a request writes the
tails, after it has read what it overwrites (work_items.py). Folded groups (fold.py) have a
program a request for their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.fold import fold_tokens, load_state, load_token, write_states
from dsv4.kernels.numerics import (
    bf16_bits,
    exp_nonpositive,
    hadamard_across_lanes,
    load_rope,
    rms_norm,
    rotate,
    round_bf16,
)
from dsv4.kernels.record_store import RecordConstants, record_constants, store_records
from dsv4.ops.calls import CompressorWrite, StepTensors, WindowWrite
from dsv4.ops.constants import SUM_LANES

# Pooling more rows than this splits the channels over programs: a group of 128 tokens is 512 KB.
MAX_ROWS_IN_ONE_PROGRAM = 8
SPLIT_CHANNELS = 32
# Else a program takes as many groups as give each of its threads four channels of every row.
CHANNELS_IN_ONE_PROGRAM = 512
# Folding goes token by token, so a thread has one channel; a narrow step folds only a few.
FOLD_SPLIT_CHANNELS = 128
FOLD_AHEAD_TOKENS = 16
# A captured step has programs for every group that could close, and mostly few do. Beyond ten for
# each of 132 multiprocessors they take several in turn: those with nothing to do cost time too.
MOST_NARROW_PROGRAMS = 1320
NUM_WARPS = 4
# A chunk's second launch has a warp a window row: no exchange between warps.
CHUNK_WINDOW_WARPS = 1
# Left alone, ptxas stops at 128 registers and spills a few. With 96, five programs of a group that
# is split fit a multiprocessor. A chunk that is folded keeps 2 · FOLD_AHEAD_TOKENS rows, and there
# are never more than two such programs for a multiprocessor.
MAX_REGISTERS = 144
MAX_SPLIT_REGISTERS = 96
MAX_CHUNK_REGISTERS = 168
MAX_FOLD_REGISTERS = 224


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
    GROUPS: int
    SPLITS: int
    LOOP: bool
    LANES: int
    WIDE: bool
    PLACE_FIRST: bool
    AHEAD: int
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
    if window is None or window.staging is None:
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
            *arguments, **constants, **launch_options(constants), enable_fp_fusion=False
        )


def launch_options(constants: dict[str, Any]) -> dict[str, int]:
    """Warps and the bound on registers of a launch with these constants."""
    window, main, index = (constants[name] for name in ("WINDOW", "MAIN", "INDEX"))
    if main is None and index is None and window is not None and window.CHUNK:
        return {"num_warps": CHUNK_WINDOW_WARPS, "maxnreg": MAX_REGISTERS}
    registers = MAX_REGISTERS
    if main is not None and main.WIDE:
        registers = MAX_FOLD_REGISTERS if main.STATE_ROWS else MAX_CHUNK_REGISTERS
    elif main is not None and main.SPLITS > 1:
        registers = MAX_SPLIT_REGISTERS
    return {"num_warps": NUM_WARPS, "maxnreg": registers}


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
        main_programs,
        index_programs,
        *window_args,
        *main_args,
        *index_args,
    )
    constants = {"WINDOW": window_constants, "MAIN": main_constants, "INDEX": index_constants}
    window_programs = _window_programs(step, window, constants, stage)
    return window_programs + main_programs + index_programs, arguments, constants


def _window_programs(
    step: StepTensors, window: WindowWrite | None, constants: dict[str, Any], stage: bool
) -> int:
    """One a staged row, or one a token where it has something to write."""
    if window is not None and stage:
        return step.batch.shape[0] * (window.window - 1)
    with_tails = any(
        c is not None and c.TAILS == "token" for c in map(constants.get, ("MAIN", "INDEX"))
    )
    return step.window.shape[0] if window is not None or with_tails else 0


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
    page, staging_page = window.page, window.staging_page
    constants = WindowConstants(
        RING=page.rows,
        WIDTH=page.format.width,
        ROPE=step.rope.shape[1],
        NORM=window.norm is not None,
        CHUNK=window.staging is not None,
        STAGE=stage,
        BEFORE=window.window - 1,
        RECORD=record_constants(page.format),
    )
    return (
        window.kv,
        step.rope if window.norm is None else window.norm,
        step.slot_arena if window.staging is None else window.staging,
        window.kv.stride(0),
        page.offset_bytes,
        page.scale_offset_bytes,
        0 if staging_page is None else staging_page.scale_offset_bytes,
    ), constants


def _compressor_arguments(
    step: StepTensors, write: CompressorWrite | None
) -> tuple[int, tuple[Any, ...], CompressorConstants | None]:
    nothing: Tensor = step.rope
    if write is None:
        return 0, (step.batch, *[nothing] * 6, step.arrived, *[0] * 11), None
    layout, items = write.layout, write.items.shape[0]
    groups = splits = 1
    if layout.online:
        splits = 1 if step.narrow else max(1, layout.width // FOLD_SPLIT_CHANNELS)
    elif layout.tokens_pooled > MAX_ROWS_IN_ONE_PROGRAM:
        splits = max(1, layout.width // SPLIT_CHANNELS)
    else:
        groups = max(1, CHANNELS_IN_ONE_PROGRAM // layout.width)
    # Where a step is narrow its tails overwrite nothing that its groups read, so other programs
    # may write them meanwhile; a wide chunk's groups must be read first.
    tails = "none"
    if write.write_tails:
        tails = ("apart" if layout.online else "token") if step.narrow else "after"
    sets = -(-items // groups) if write.compress or tails == "after" else 0
    # an online step has one program an item: there is nothing to save
    bounded = step.narrow and not layout.online
    sets_at_once = min(sets, MOST_NARROW_PROGRAMS // splits) if bounded else sets
    work_programs = sets_at_once * splits
    tail_programs = step.batch.shape[0] * splits if layout.online and tails != "none" else 0
    # What storing needs is under way with the rows, where there are registers to spare for it.
    place_first = layout.online or (step.narrow and splits == 1)
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
        GROUPS=groups,
        SPLITS=splits,
        LOOP=sets_at_once < sets,
        LANES=SUM_LANES,
        WIDE=not step.narrow,
        PLACE_FIRST=place_first,
        AHEAD=1 if step.narrow else FOLD_AHEAD_TOKENS,
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
        items,
        work_programs,
        tail_programs,
        0 if write.c is None else write.c.stride(0),
        0 if write.z is None else write.z.stride(0),
        layout.page.offset_bytes,
        layout.page.scale_offset_bytes,
        layout.state_offset_bytes if layout.online else layout.ka_offset_bytes,
        layout.za_offset_bytes,
        layout.kb_offset_bytes,
        layout.zb_offset_bytes,
    )
    return work_programs + tail_programs, arguments, constants


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
    main_programs,
    index_programs,
    kv_ptr,
    kv_norm_ptr,
    chunk_ptr,
    kv_stride,
    window_data,
    window_scale,
    chunk_scale,
    m_items,
    m_c,
    m_z,
    m_ape,
    m_norm,
    m_dense,
    m_scratch,
    m_arrived,
    m_item_rows,
    m_work_programs,
    m_tail_programs,
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
    i_item_rows,
    i_work_programs,
    i_tail_programs,
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
    if program < main_programs:
        if MAIN is not None:
            _compress(
                program, block_arena, slot_arena, block_table, batch_ptr,
                rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                m_items, m_c, m_z, m_ape, m_norm, m_dense, m_scratch, m_arrived,
                m_item_rows, m_work_programs, m_tail_programs, m_c_stride, m_z_stride,
                m_data, m_scale, m_ka, m_za, m_kb, m_zb,
                MAIN,
            )  # fmt: skip
    elif program < main_programs + index_programs:
        if INDEX is not None:
            _compress(
                program - main_programs, block_arena, slot_arena, block_table,
                batch_ptr, rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                i_items, i_c, i_z, i_ape, i_norm, i_dense, i_scratch, i_arrived,
                i_item_rows, i_work_programs, i_tail_programs, i_c_stride, i_z_stride,
                i_data, i_scale, i_ka, i_za, i_kb, i_zb,
                INDEX,
            )  # fmt: skip
    else:
        if WINDOW is not None and WINDOW.STAGE:
            _stage_window(
                program - main_programs - index_programs, slot_arena, batch_ptr, chunk_ptr,
                slot_bytes, window_data, window_scale, chunk_scale, WINDOW,
            )  # fmt: skip
        else:
            _append_token(
                program - main_programs - index_programs, slot_arena, window_ptr, rope_ptr,
                slot_bytes, eps, kv_ptr, kv_norm_ptr, chunk_ptr, kv_stride, window_data,
                window_scale, chunk_scale,
                m_c, m_z, m_ape, m_c_stride, m_z_stride, m_ka, m_za, m_kb, m_zb,
                i_c, i_z, i_ape, i_c_stride, i_z_stride, i_ka, i_za, i_kb, i_zb,
                WINDOW, MAIN, INDEX,
            )  # fmt: skip


@triton.jit
def _append_token(
    token, slot_arena, window_ptr, rope_ptr, slot_bytes, eps,
    kv_ptr, kv_norm_ptr, chunk_ptr, kv_stride, window_data, window_scale, chunk_scale,
    m_c, m_z, m_ape, m_c_stride, m_z_stride, m_ka, m_za, m_kb, m_zb,
    i_c, i_z, i_ape, i_c_stride, i_z_stride, i_ka, i_za, i_kb, i_zb,
    WINDOW: tl.constexpr, MAIN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """One token: its window row and, in a narrow step, its rows in the tails. Row i of the window
    list is token i, so the inputs need not wait for it."""
    MAIN_TAILS: tl.constexpr = MAIN is not None and MAIN.TAILS == "token"
    INDEX_TAILS: tl.constexpr = INDEX is not None and INDEX.TAILS == "token"
    row = window_ptr + token * 4
    slot = tl.load(row).to(tl.int64)
    position = tl.load(row + 1)
    target = tl.load(row + 3)
    if WINDOW is not None:
        x = _load_kv(token, kv_ptr, kv_stride, WINDOW)
    if MAIN_TAILS:
        main_rows = _load_tail(token, m_c, m_z, m_c_stride, m_z_stride, MAIN)
    if INDEX_TAILS:
        index_rows = _load_tail(token, i_c, i_z, i_c_stride, i_z_stride, INDEX)
    tl.debug_barrier()  # below which no load sinks: all of them are under way before the branch
    if slot >= 0:
        slot_ptr = slot_arena + slot * slot_bytes
        if MAIN_TAILS:
            main_bias = _load_bias(position, m_ape, MAIN)
        if INDEX_TAILS:
            index_bias = _load_bias(position, i_ape, INDEX)
        if WINDOW is not None:
            _store_window(
                x, slot_ptr, position, target, rope_ptr, eps, kv_norm_ptr, chunk_ptr,
                window_data, window_scale, chunk_scale, WINDOW,
            )  # fmt: skip
        if MAIN_TAILS:
            _store_tail(main_rows, main_bias, slot_ptr, position, m_ka, m_za, m_kb, m_zb, MAIN)
        if INDEX_TAILS:
            _store_tail(index_rows, index_bias, slot_ptr, position, i_ka, i_za, i_kb, i_zb, INDEX)


@triton.jit
def _load_kv(token, kv_ptr, kv_stride, W: tl.constexpr):
    source = kv_ptr + token.to(tl.int64) * kv_stride
    return tl.load(source + tl.arange(0, W.WIDTH)[None, :])


@triton.jit
def _store_window(
    x, slot_ptr, position, target, rope_ptr, eps, norm_ptr, chunk_ptr,
    data_offset, scale_offset, chunk_scale, W: tl.constexpr,
):  # fmt: skip
    """A row [1, WIDTH] into the ring and, in a wide step, into the staging page."""
    WIDTH: tl.constexpr = W.WIDTH
    RECORD: tl.constexpr = W.RECORD
    x = x.to(tl.float32)
    one = tl.arange(0, 1)
    if W.NORM:
        x = rms_norm(x, tl.load(norm_ptr + tl.arange(0, WIDTH))[None, :], eps, WIDTH)
        angles = rope_ptr + (position.to(tl.int64) * W.ROPE + one)[:, None]
        cos, sin = load_rope(angles, WIDTH, W.ROPE)
        x = rotate(x, cos, sin, WIDTH, W.ROPE)
    ring_row = position % W.RING
    store_records(
        x, target % 2 + one == 1,
        slot_ptr + data_offset + ring_row * RECORD.DATA_BYTES + one,
        slot_ptr + scale_offset + ring_row * RECORD.SCALE_BYTES + one,
        WIDTH, RECORD,
    )  # fmt: skip
    if W.CHUNK:
        chunk_row = (target // 2).to(tl.int64)
        store_records(
            x, one == 0,
            chunk_ptr + chunk_row * RECORD.DATA_BYTES + one,
            chunk_ptr + chunk_scale + chunk_row * RECORD.SCALE_BYTES + one,
            WIDTH, RECORD,
        )  # fmt: skip


@triton.jit
def _load_tail(token, c_ptr, z_ptr, c_stride, z_stride, C: tl.constexpr):
    """Values and logits of a token for the current stream, and with overlap for the previous."""
    column = tl.arange(0, C.WIDTH)
    row_c = c_ptr + token.to(tl.int64) * c_stride + column
    row_z = z_ptr + token.to(tl.int64) * z_stride + column
    if C.OVERLAP:
        return (
            tl.load(row_c + C.WIDTH), tl.load(row_z + C.WIDTH), tl.load(row_c), tl.load(row_z)
        )  # fmt: skip
    else:
        return tl.load(row_c), tl.load(row_z)


@triton.jit
def _load_bias(position, ape_ptr, C: tl.constexpr):
    COLUMNS: tl.constexpr = C.WIDTH * 2 if C.OVERLAP else C.WIDTH
    bias = ape_ptr + position % C.RATIO * COLUMNS + tl.arange(0, C.WIDTH)
    if C.OVERLAP:
        return tl.load(bias + C.WIDTH), tl.load(bias)
    else:
        return (tl.load(bias),)


@triton.jit
def _store_tail(rows, bias, slot_ptr, position, ka, za, kb, zb, C: tl.constexpr):
    """A token into the rings. A narrow step has no more tokens than they have rows."""
    column = tl.arange(0, C.WIDTH)
    if C.A_ROWS > 0:
        at = position % C.A_ROWS * C.WIDTH + column
        tl.store((slot_ptr + ka).to(tl.pointer_type(tl.float32)) + at, rows[0])
        tl.store((slot_ptr + za).to(tl.pointer_type(tl.float32)) + at, rows[1] + bias[0])
    if C.OVERLAP:
        at = position % C.B_ROWS * C.WIDTH + column
        tl.store((slot_ptr + kb).to(tl.pointer_type(tl.float32)) + at, rows[2])
        tl.store((slot_ptr + zb).to(tl.pointer_type(tl.float32)) + at, rows[3] + bias[1])


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
    items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    item_rows, work_programs, tail_programs, c_stride, z_stride,
    data_offset, scale_offset, ka_offset, za_offset, kb_offset, zb_offset,
    C: tl.constexpr,
):  # fmt: skip
    if C.STATE_ROWS > 0:
        _compress_folded(
            program, block_arena, slot_arena, block_table, batch_ptr, rope_ptr,
            block_bytes, slot_bytes, table_stride, eps,
            items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
            work_programs, tail_programs, c_stride, z_stride, data_offset, scale_offset, ka_offset,
            C,
        )  # fmt: skip
    else:
        _compress_rows(
            program, block_arena, slot_arena, block_table, rope_ptr,
            block_bytes, slot_bytes, table_stride, eps,
            items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
            item_rows, work_programs, c_stride, z_stride, data_offset, scale_offset,
            ka_offset, za_offset, kb_offset, zb_offset, C,
        )  # fmt: skip


@triton.jit
def _compress_rows(
    program, block_arena, slot_arena, block_table, rope_ptr,
    block_bytes, slot_bytes, table_stride, eps,
    items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    item_rows, work_programs, c_stride, z_stride, data_offset, scale_offset,
    ka_offset, za_offset, kb_offset, zb_offset,
    C: tl.constexpr,
):  # fmt: skip
    """GROUPS items of one compressor; where programs are fewer, every so many in turn up to the
    first that is padding."""
    split = program % C.SPLITS
    nth = program // C.SPLITS
    if C.LOOP:
        while _first_slot(nth, items_ptr, item_rows, C) >= 0:
            _compress_items(
                nth, split, block_arena, slot_arena, block_table, rope_ptr,
                block_bytes, slot_bytes, table_stride, eps,
                items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
                item_rows, c_stride, z_stride, data_offset, scale_offset,
                ka_offset, za_offset, kb_offset, zb_offset, C,
            )  # fmt: skip
            nth += work_programs // C.SPLITS
    else:
        _compress_items(
            nth, split, block_arena, slot_arena, block_table, rope_ptr,
            block_bytes, slot_bytes, table_stride, eps,
            items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
            item_rows, c_stride, z_stride, data_offset, scale_offset,
            ka_offset, za_offset, kb_offset, zb_offset, C,
        )  # fmt: skip


@triton.jit
def _first_slot(nth, items_ptr, item_rows, C: tl.constexpr):
    first = nth * C.GROUPS
    return tl.load(items_ptr + first * 8, mask=first < item_rows, other=-1)


@triton.jit
def _load_items(nth, items_ptr, item_rows, C: tl.constexpr):
    """Six columns [GROUPS] of the nth GROUPS items: slot, start, end, first token row, first entry,
    entries; -1 beyond the list. A single item is loaded as scalars, not once a layout."""
    if C.GROUPS == 1:
        one = tl.zeros([1], dtype=tl.int32)
        row = items_ptr + nth * 8
        return (
            tl.load(row) + one, tl.load(row + 1) + one, tl.load(row + 2) + one,
            tl.load(row + 3) + one, tl.load(row + 4) + one, tl.load(row + 5) + one,
        )  # fmt: skip
    else:
        item = nth * C.GROUPS + tl.arange(0, C.GROUPS)
        row, live = items_ptr + item * 8, item < item_rows
        return (
            tl.load(row, mask=live, other=-1), tl.load(row + 1, mask=live, other=-1),
            tl.load(row + 2, mask=live, other=-1), tl.load(row + 3, mask=live, other=-1),
            tl.load(row + 4, mask=live, other=-1), tl.load(row + 5, mask=live, other=-1),
        )  # fmt: skip


@triton.jit
def _compress_items(
    nth, split, block_arena, slot_arena, block_table, rope_ptr,
    block_bytes, slot_bytes, table_stride, eps,
    items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    item_rows, c_stride, z_stride, data_offset, scale_offset,
    ka_offset, za_offset, kb_offset, zb_offset,
    C: tl.constexpr,
):  # fmt: skip
    slot, start, end, first_row, entry, entries = _load_items(nth, items_ptr, item_rows, C)
    # Padding is -1 in every column; asking all of them has them all loaded before the branch.
    live = (slot & start & end & first_row & entry & entries) >= 0
    item = nth * C.GROUPS + tl.arange(0, C.GROUPS)
    slot = slot.to(tl.int64)
    slot_ptr = slot_arena + slot * slot_bytes
    if C.COMPRESS:
        most = tl.max(entries, axis=0) if C.OVERLAP and C.WIDE else 1
        for turn in range(most):
            closes = live & (turn < entries) & ((entry + turn + 1) * C.RATIO <= end)
            if tl.max(closes.to(tl.int32), axis=0) > 0:
                _close_groups(
                    closes, entry + turn, item, slot, start, first_row, split, block_arena,
                    slot_ptr, block_table, rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                    c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
                    c_stride, z_stride, data_offset, scale_offset,
                    ka_offset, za_offset, kb_offset, zb_offset, C,
                )  # fmt: skip
    if C.TAILS == "after":
        tl.debug_barrier()  # the rows read above may be among those written below
        row = items_ptr + item * 8
        writes_tails = tl.load(row + 6, mask=item < item_rows, other=0)
        _write_tails(
            writes_tails == 1, slot_ptr, start, end, first_row, split, c_ptr, z_ptr, ape_ptr,
            c_stride, z_stride, ka_offset, za_offset, kb_offset, zb_offset, C,
        )  # fmt: skip


@triton.jit
def _close_groups(
    closes, entry, item, slot, start, first_row, split, block_arena, slot_ptr, block_table,
    rope_ptr, block_bytes, slot_bytes, table_stride, eps,
    c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr, c_stride, z_stride,
    data_offset, scale_offset, ka_offset, za_offset, kb_offset, zb_offset,
    C: tl.constexpr,
):  # fmt: skip
    """Pools the groups that close and stores their entries."""
    ka = (slot_ptr + ka_offset).to(tl.pointer_type(tl.float32))
    za = (slot_ptr + za_offset).to(tl.pointer_type(tl.float32))
    kb = (slot_ptr + kb_offset).to(tl.pointer_type(tl.float32))
    zb = (slot_ptr + zb_offset).to(tl.pointer_type(tl.float32))
    place = ()
    if C.PLACE_FIRST:
        place = _entry_place(
            closes, entry, slot, block_arena, block_table, rope_ptr, norm_ptr, block_bytes,
            table_stride, C,
        )  # fmt: skip
    logits = _load_tiles(
        closes, entry, start, first_row, split, z_ptr, z_stride, za, zb, ape_ptr, True, C
    )
    values = _load_tiles(
        closes, entry, start, first_row, split, c_ptr, c_stride, ka, kb, ape_ptr, False, C
    )
    if not C.WIDE:
        # Left alone, ptxas loads the values after the exponentials, and one program has nothing
        # else to fill that wait. No load sinks below a barrier, and no barrier below a branch.
        tl.debug_barrier()
    if C.WIDE or slot_bytes > 0:  # always
        _finish_entries(
            _pool(logits, values, closes, entry, C), closes, item, split, entry, place, slot,
            block_arena, block_table, rope_ptr, norm_ptr, block_bytes, table_stride, eps,
            dense_ptr, scratch_ptr, arrived_ptr, data_offset, scale_offset, C,
        )  # fmt: skip


@triton.jit
def _compress_folded(
    program, block_arena, slot_arena, block_table, batch_ptr, rope_ptr,
    block_bytes, slot_bytes, table_stride, eps,
    items_ptr, c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    work_programs, tail_programs, c_stride, z_stride, data_offset, scale_offset, ring_offset,
    C: tl.constexpr,
):  # fmt: skip
    """One group that closes, or the states of one request. In a wide step the states of a request
    that begins a group are read by nobody, so programs of their own write them; else the program
    of the request's first item does, after it has read them."""
    RATIO: tl.constexpr = C.RATIO
    if C.WIDE:
        tail = program < tail_programs
        nth = tl.where(tail, program, program - tail_programs)
    else:
        tail = program >= work_programs
        nth = tl.where(tail, program - work_programs, program)
    split = nth % C.SPLITS
    item = nth // C.SPLITS
    row = tl.where(tail, batch_ptr + item * 4, items_ptr + item * 8)
    slot = tl.load(row).to(tl.int64)
    start = tl.load(row + 1)
    third = tl.load(row + 2)
    first_row = tl.load(row + 3)
    end = tl.where(tail, start + third, third)
    entry = tl.load(row + 4, mask=tail == 0, other=0)
    entries = tl.load(row + 5, mask=tail == 0, other=0)
    writes_tails = tl.load(row + 6, mask=tail == 0, other=0)
    closes = (tail == 0) & (entries > 0) & ((entry + 1) * RATIO <= end) & C.COMPRESS
    states = tail & (slot >= 0)
    if C.TAILS == "after":
        begins = start % RATIO == 0
        states = tl.where(tail, states & begins, (writes_tails == 1) & (begins == 0))
    if C.WIDE:
        # one loop over two jobs: its code is long, and slow to compile
        for job in range(tl.where(closes, 0, 1), tl.where(states, 2, 1)):
            _fold_job(
                job, True, item, split, slot, start, end, first_row, entry, block_arena, slot_arena,
                block_table, rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
                c_stride, z_stride, data_offset, scale_offset, ring_offset, C,
            )  # fmt: skip
    else:
        if closes:
            _fold_job(
                0, True, item, split, slot, start, end, first_row, entry, block_arena, slot_arena,
                block_table, rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
                c_stride, z_stride, data_offset, scale_offset, ring_offset, C,
            )  # fmt: skip
        if states:
            _fold_job(
                1, False, item, split, slot, start, end, first_row, entry, block_arena, slot_arena,
                block_table, rope_ptr, block_bytes, slot_bytes, table_stride, eps,
                c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
                c_stride, z_stride, data_offset, scale_offset, ring_offset, C,
            )  # fmt: skip


@triton.jit
def _fold_job(
    job, FOLDS: tl.constexpr, item, split, slot, start, end, first_row, entry, block_arena,
    slot_arena, block_table, rope_ptr, block_bytes, slot_bytes, table_stride, eps,
    c_ptr, z_ptr, ape_ptr, norm_ptr, dense_ptr, scratch_ptr, arrived_ptr,
    c_stride, z_stride, data_offset, scale_offset, ring_offset, C: tl.constexpr,
):  # fmt: skip
    """Job 0 closes a group, job 1 writes the states of a request's newest tokens. Without FOLDS
    no token comes between the stored state and those."""
    RATIO: tl.constexpr = C.RATIO
    PART: tl.constexpr = C.WIDTH // C.SPLITS
    ring = (slot_arena + slot * slot_bytes + ring_offset).to(tl.pointer_type(tl.float32))
    row_offset = first_row - start
    kept = tl.maximum(start, end - C.STATE_ROWS)
    stop = tl.where(job == 0, (entry + 1) * RATIO, kept)
    begin = tl.where(job == 0, entry * RATIO, kept - kept % RATIO)
    begin = stop if C.FROM_TAILS else tl.maximum(start, begin)
    one = tl.arange(0, 1)
    place = ()
    if C.PLACE_FIRST:
        place = _entry_place(
            (one == 0) & (job == 0), entry + one, slot + one, block_arena, block_table, rope_ptr,
            norm_ptr, block_bytes, table_stride, C,
        )  # fmt: skip
    if not C.FROM_TAILS:
        newest = load_token(
            kept, job == 1, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C
        )
    exists = (begin % RATIO != 0) | C.FROM_TAILS
    top, weight, product = load_state(ring, begin - 1, exists, split, PART, C)
    if FOLDS and not C.FROM_TAILS:
        top, weight, product = fold_tokens(
            top, weight, product, begin, stop, row_offset, split,
            c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C,
        )  # fmt: skip
    if job == 0:
        _finish_entries(
            tl.div_rn(product, weight)[None, :], one == 0, item + one, split, entry + one, place,
            slot + one, block_arena, block_table, rope_ptr, norm_ptr, block_bytes, table_stride,
            eps, dense_ptr, scratch_ptr, arrived_ptr, data_offset, scale_offset, C,
        )  # fmt: skip
    elif not C.FROM_TAILS:
        write_states(
            top, weight, product, newest, kept, end, row_offset, split,
            c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ring, PART, C,
        )  # fmt: skip


@triton.jit
def _entry_place(
    closes, entry, slot, block_arena, block_table, rope_ptr, norm_ptr, block_bytes, table_stride,
    C: tl.constexpr,
):  # fmt: skip
    """What storing the entries needs: pages, norm weights, angles."""
    WIDTH: tl.constexpr = C.WIDTH
    at = block_table + slot * table_stride + entry // C.PAGE_ROWS
    block_id = tl.load(at, mask=closes, other=0).to(tl.int64)
    norm = tl.load(norm_ptr + (entry * 0)[:, None] + tl.arange(0, WIDTH)[None, :])
    angles = tl.where(closes, entry * C.RATIO, 0).to(tl.int64) * C.ROPE
    cos, sin = load_rope(rope_ptr + angles[:, None], WIDTH, C.ROPE)
    return block_arena + block_id * block_bytes, norm, cos, sin


@triton.jit
def _finish_entries(
    pooled, closes, item, split, entry, place, slot, block_arena, block_table, rope_ptr, norm_ptr,
    block_bytes, table_stride, eps, dense_ptr, scratch_ptr, arrived_ptr, data_offset, scale_offset,
    C: tl.constexpr,
):  # fmt: skip
    """Stores entries [GROUPS, WIDTH]; where programs have pooled some channels each, whoever comes
    last has them all."""
    if C.SPLITS == 1:
        _store_entries(
            pooled, closes, item, entry, place, slot, block_arena, block_table, rope_ptr, norm_ptr,
            block_bytes, table_stride, eps, dense_ptr, data_offset, scale_offset, C,
        )  # fmt: skip
    else:
        PART: tl.constexpr = C.WIDTH // C.SPLITS
        line = (scratch_ptr + item.to(tl.int64) * C.WIDTH)[:, None]
        tl.store(line + (split * PART + tl.arange(0, PART))[None, :], pooled)
        tl.debug_barrier()
        mine = tl.max(item, axis=0)
        arrived = tl.atomic_add(arrived_ptr + mine, 1, sem="acq_rel")
        if arrived == C.SPLITS - 1:
            tl.store(arrived_ptr + mine, 0)
            complete = tl.load(line + tl.arange(0, C.WIDTH)[None, :], cache_modifier=".cg")
            _store_entries(
                complete, closes, item, entry, place, slot, block_arena, block_table, rope_ptr,
                norm_ptr, block_bytes, table_stride, eps, dense_ptr, data_offset, scale_offset, C,
            )  # fmt: skip


@triton.jit
def _store_entries(
    pooled, closes, item, entry, place, slot, block_arena, block_table, rope_ptr, norm_ptr,
    block_bytes, table_stride, eps, dense_ptr, data_offset, scale_offset, C: tl.constexpr,
):  # fmt: skip
    """Norm, RoPE, Hadamard for keys, and the records into their blocks (or dense rows)."""
    RECORD: tl.constexpr = C.RECORD
    WIDTH: tl.constexpr = C.WIDTH
    if C.PLACE_FIRST:
        page, norm, cos, sin = place
    else:
        page, norm, cos, sin = _entry_place(
            closes, entry, slot, block_arena, block_table, rope_ptr, norm_ptr, block_bytes,
            table_stride, C,
        )  # fmt: skip
    x = rms_norm(round_bf16(pooled), norm, eps, WIDTH)
    x = rotate(x, cos, sin, WIDTH, C.ROPE)
    if C.HADAMARD:
        x = hadamard_across_lanes(x, WIDTH**-0.5, WIDTH)
    if C.DENSE:
        dense_row = dense_ptr.to(tl.pointer_type(tl.uint16)) + item.to(tl.int64) * WIDTH
        tl.store(
            dense_row[:, None] + tl.arange(0, WIDTH)[None, :], bf16_bits(x), mask=closes[:, None]
        )
    else:
        page_row = entry % C.PAGE_ROWS
        store_records(
            x, closes,
            page + data_offset + page_row * RECORD.DATA_BYTES,
            page + scale_offset + page_row * RECORD.SCALE_BYTES,
            WIDTH, RECORD,
        )  # fmt: skip


@triton.jit
def _load_tiles(
    closes, entry, start, first_row, split, new_ptr, new_stride, ring_a, ring_b, ape_ptr,
    BIASED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Logits or values of all rows of groups, as a tuple of tiles [GROUPS, ROWS, PART]."""
    RATIO: tl.constexpr = C.RATIO
    ROWS: tl.constexpr = min(RATIO, C.LANES)
    # only the newest rows of a group that a narrow step closes can be the step's own
    NEWEST: tl.constexpr = 2 * RATIO if C.WIDE else max(C.A_ROWS - RATIO + 1, 1)
    tiles = ()
    if C.OVERLAP:
        for at in tl.static_range(0, RATIO, ROWS):
            tiles += _load_tile(
                (entry - 1) * RATIO + at, ROWS, at + ROWS + NEWEST > 2 * RATIO,
                closes & (entry > 0), start, first_row, split, 0, new_ptr, new_stride,
                ring_b, C.B_ROWS, ape_ptr, BIASED, C,
            )  # fmt: skip
    for at in tl.static_range(0, RATIO, ROWS):
        tiles += _load_tile(
            entry * RATIO + at, ROWS, at + ROWS + NEWEST > RATIO,
            closes, start, first_row, split, C.WIDTH if C.OVERLAP else 0, new_ptr, new_stride,
            ring_a, max(C.A_ROWS, 1), ape_ptr, BIASED, C,
        )  # fmt: skip
    return tiles


@triton.jit
def _load_tile(
    first, ROWS: tl.constexpr, NEW: tl.constexpr, exists, start, first_row, split, half,
    new_ptr, new_stride, ring, RING: tl.constexpr, ape_ptr, BIASED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The rows at positions [first, first + ROWS) of one stream, whose columns begin at `half`:
    from the ring and, where some can be NEW, from the step's projections."""
    WIDTH: tl.constexpr = C.WIDTH
    PART: tl.constexpr = WIDTH // C.SPLITS
    COLUMNS: tl.constexpr = WIDTH * 2 if C.OVERLAP else WIDTH
    position = first[:, None] + tl.arange(0, ROWS)[None, :]
    column = (split * PART + tl.arange(0, PART))[None, None, :]
    exists = exists[:, None, None]
    row = ring[:, None] + position % RING * WIDTH
    if NEW and not C.FROM_TAILS:
        is_new = position >= start[:, None]
        token = (first_row[:, None] + position - start[:, None]).to(tl.int64)
        row = tl.where(is_new, new_ptr + token * new_stride + half, row)
    row = tl.multiple_of(row, [16, 16])
    tile = tl.load(row[:, :, None] + column, mask=exists, other=0.0)
    if BIASED and NEW and not C.FROM_TAILS:
        bias = ape_ptr + position % C.RATIO * COLUMNS + half
        tile += tl.load(bias[:, :, None] + column, mask=exists & is_new[:, :, None], other=0.0)
    return (tile,)


@triton.jit
def _pool(logits, values, closes, entry, C: tl.constexpr):
    """Gated softmax pooling of the rows of groups: fp32 [GROUPS, WIDTH / SPLITS]. The first half of
    the tiles is the previous stream's, where there is one; the first group has none."""
    ROWS: tl.constexpr = min(C.RATIO, C.LANES)
    TILES: tl.constexpr = (2 * C.RATIO if C.OVERLAP else C.RATIO) // ROWS
    BEFORE: tl.constexpr = TILES // 2 if C.OVERLAP else 0
    before = (closes & (entry > 0))[:, None, None]
    current = closes[:, None, None]
    tops = _masked(logits[0], before if BEFORE > 0 else current)
    for nth in tl.static_range(1, TILES):
        tops = tl.maximum(tops, _masked(logits[nth], before if nth < BEFORE else current))
    top = tl.max(tops, axis=1)[:, None, :]
    weights, products = _weigh(logits[0], values[0], before if BEFORE > 0 else current, top)
    for nth in tl.static_range(1, TILES):
        weight, product = _weigh(logits[nth], values[nth], before if nth < BEFORE else current, top)
        weights += weight
        products += product
    if C.SPLITS == 1:
        # 0 / 0 for groups that do not close would take the long way through the division
        product = tl.where(closes[:, None], _halving_sum(products), 1.0)
        return tl.div_rn(product, tl.where(closes[:, None], _halving_sum(weights), 1.0))
    else:
        sums = _tree_sum(tl.join(products, weights), ROWS, C.WIDTH // C.SPLITS)
        product, weight = tl.split(sums)
        return tl.div_rn(product, weight)[None, :]


@triton.jit
def _masked(logits, exists):
    return tl.where(exists, logits, float("-inf"))


@triton.jit
def _weigh(z, k, exists, top):
    """Softmax numerators and their products with the values; rows that do not exist (their values
    are 0) count 0."""
    weight = tl.where(exists, exp_nonpositive(z - top), 0.0)
    return weight, weight * k


@triton.jit
def _halving_sum(x):
    """[groups, rows, channels] → [groups, channels]: adds the lower half of the rows to the upper
    half until one is left, as the reference does. A thread has all rows of its channels."""
    GROUPS: tl.constexpr = x.shape[0]
    ROWS: tl.constexpr = x.shape[1]
    PART: tl.constexpr = x.shape[2]
    if ROWS == 1:
        return tl.reshape(x, [GROUPS, PART])
    else:
        return _halving_sum(tl.sum(tl.reshape(x, [GROUPS, 2, ROWS // 2, PART]), axis=1))


@triton.jit
def _tree_sum(x, ROWS: tl.constexpr, PART: tl.constexpr):
    """[ROWS, PART, 2] → [PART, 2] in the same order, where the rows are spread over threads."""
    if ROWS == 1:
        return tl.reshape(x, [PART, 2])
    else:
        halves = tl.permute(tl.reshape(x, [2, ROWS // 2, PART, 2]), (1, 2, 3, 0))
        first, second = tl.split(halves)
        return _tree_sum(first + second, ROWS // 2, PART)


@triton.jit
def _write_tails(
    live, slot_ptr, start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    ka_offset, za_offset, kb_offset, zb_offset, C: tl.constexpr,
):  # fmt: skip
    """The newest tokens of requests into the rings of the current and the previous stream."""
    RATIO: tl.constexpr = C.RATIO
    WIDTH: tl.constexpr = C.WIDTH
    PART: tl.constexpr = WIDTH // C.SPLITS
    COLUMNS: tl.constexpr = WIDTH * 2 if C.OVERLAP else WIDTH
    RINGS: tl.constexpr = max(C.A_ROWS, C.B_ROWS)
    ROWS: tl.constexpr = 1 if C.OVERLAP else min(32, 2048 // PART)
    ka = (slot_ptr + ka_offset).to(tl.pointer_type(tl.float32))[:, None]
    za = (slot_ptr + za_offset).to(tl.pointer_type(tl.float32))[:, None]
    kb = (slot_ptr + kb_offset).to(tl.pointer_type(tl.float32))[:, None]
    zb = (slot_ptr + zb_offset).to(tl.pointer_type(tl.float32))[:, None]
    column = (split * PART + tl.arange(0, PART))[None, None, :]
    source = column + (WIDTH if C.OVERLAP else 0)
    most = tl.max(tl.where(live, tl.minimum(end - start, RINGS), 0), axis=0)
    for at in range(0, most, ROWS):
        back = at + tl.arange(0, ROWS)[None, :]
        position = end[:, None] - 1 - back
        inside = live[:, None] & (position >= start[:, None])
        token = (first_row[:, None] + position - start[:, None]).to(tl.int64)
        bias = (ape_ptr + position % RATIO * COLUMNS)[:, :, None]
        row_z = (z_ptr + token * z_stride)[:, :, None]
        row_k = (c_ptr + token * c_stride)[:, :, None]
        keeps = (inside & (back < C.A_ROWS))[:, :, None]
        z = tl.load(row_z + source, mask=keeps)
        k = tl.load(row_k + source, mask=keeps)
        z_bias = tl.load(bias + source, mask=keeps)
        if C.OVERLAP:
            keeps_b = (inside & (back < C.B_ROWS))[:, :, None]
            z_b = tl.load(row_z + column, mask=keeps_b)
            k_b = tl.load(row_k + column, mask=keeps_b)
            bias_b = tl.load(bias + column, mask=keeps_b)
            ring_row = position % C.B_ROWS * WIDTH
            tl.store((kb + ring_row)[:, :, None] + column, k_b, mask=keeps_b)
            tl.store((zb + ring_row)[:, :, None] + column, z_b + bias_b, mask=keeps_b)
        ring_row = position % max(C.A_ROWS, 1) * WIDTH
        tl.store((ka + ring_row)[:, :, None] + column, k, mask=keeps)
        tl.store((za + ring_row)[:, :, None] + column, z + z_bias, mask=keeps)
