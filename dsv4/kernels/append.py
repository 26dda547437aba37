"""The write path of one layer in one launch: window rows, tails, closed groups.

Programs of several kinds share a grid. The first ones close groups, those of one compressor and
then those of the other (compress.py). The rest write one token each: its window row and, in a
decode step, its rows in the tails. A prefill step has one more launch before this one; its last
programs stage the window rows that precede each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsv4.cache.pages import CompressorKind
from dsv4.kernels.compress import (
    KEY_FIELDS,
    Compressor,
    compress,
    compressor_launch,
    is_kept,
    ring_at,
    tail_rank,
)
from dsv4.kernels.launch import Launch
from dsv4.kernels.numerics import load_rope, rms_norm, rotate, wide
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_store import RecordConstants, page_constants, store_records
from dsv4.kernels.rows import load_request, load_token, request_at, staged_row, token_at
from dsv4.kernels.target import OVERLAPPING_CHUNK_REGISTERS, Target, bounded_registers, target_of
from dsv4.ops.calls import CompressorWrite, StepTensors, WindowWrite

NUM_WARPS = 4
# A chunk's second launch has one warp per window row: no exchange between warps.
CHUNK_WINDOW_WARPS = 1
# Without a bound ptxas stops at 128 registers and spills a few. With 96, five programs of a split
# group fit on a multiprocessor. A chunk that is folded keeps 2 · FOLD_AHEAD_TOKENS rows in
# registers, and a multiprocessor never has more than two such programs. Decode steps that project
# keys hold fp64 sums and prefetched weights.
MAX_REGISTERS = 144
MAX_SPLIT_REGISTERS = 96
MAX_PROJECTION_REGISTERS = 240
MAX_CHUNK_REGISTERS = 168
MAX_FOLD_REGISTERS = 224


@dataclass(frozen=True, slots=True)
class WindowConstants:
    """A window write as compile-time constants. STAGE: this launch saves the WINDOW - 1 rows that
    precede each chunk. Without it, a WIDE (prefill) step's own rows go to the staging page too, and
    without KEEP only there."""

    RING: int
    WIDTH: int
    ROPE: int
    NORM: bool
    WIDE: bool
    STAGE: bool
    KEEP: bool
    WINDOW: int
    RECORD: RecordConstants


class Step(NamedTuple):
    """What every program of a launch receives: pointers, strides in bytes, the norm's epsilon, and
    where entries that are kept apart go."""

    block_arena: Any
    slot_arena: Any
    block_table: Any
    batch: Any
    tokens: Any
    rope: Any
    block_bytes: Any
    slot_bytes: Any
    table_stride: Any
    eps: Any
    entries_arena: Any
    entry_table: Any
    entries_bytes: Any
    entry_table_stride: Any


class Window(NamedTuple):
    """Where window rows come from and go to. Offsets are in bytes, from the start of a slot or of
    the staging page."""

    kv: Any
    norm: Any
    staging: Any
    kv_stride: Any
    data_offset: Any
    scale_offset: Any
    staging_scale_offset: Any


def append(
    step: StepTensors, window: WindowWrite | None, compressors: Sequence[CompressorWrite]
) -> None:
    """One launch; two in a prefill step. Same result as dsv4.reference.append.append, byte for
    byte.

    The ring of a prefill step must be staged before it is overwritten. So its first launch stages
    and compresses; its second, which needs few registers, stores the window rows.
    """
    if window is None or window.staging is None:
        append_launch(step, window, compressors).run()
    else:
        append_launch(step, window, compressors, stage=True).run()
        append_launch(step, window, ()).run()


def append_launch(
    step: StepTensors,
    window: WindowWrite | None,
    compressors: Sequence[CompressorWrite],
    *,
    stage: bool = False,
) -> Launch:
    """With `stage` the window rows that precede each chunk are saved, and the step's own rows are
    not stored."""
    main = compressor_launch(step, _of_kind(compressors, "main"))
    index = compressor_launch(step, _of_kind(compressors, "index"))
    window_arguments, window_constants = _window_arguments(step, window, stage)
    constants = {"WINDOW": window_constants, "MAIN": main.constants, "INDEX": index.constants}
    with_tails = any(
        c is not None and c.TAILS == "token" for c in (main.constants, index.constants)
    )
    window_programs = 0
    if window is not None and stage:
        window_programs = step.batch.shape[0] * (window.window - 1)
    elif window is not None or with_tails:
        window_programs = step.tokens.shape[0]
    apart, apart_table = step.entries_arena, step.entry_table
    step_arguments = Step(
        block_arena=step.block_arena,
        slot_arena=step.slot_arena,
        block_table=step.block_table,
        batch=step.batch,
        tokens=step.tokens,
        rope=step.rope,
        block_bytes=step.block_arena.stride(0),
        slot_bytes=step.slot_arena.stride(0),
        table_stride=step.block_table.stride(0),
        eps=step.rms_eps,
        entries_arena=step.block_arena if apart is None else apart,
        entry_table=step.block_table if apart_table is None else apart_table,
        entries_bytes=0 if apart is None else apart.stride(0),
        entry_table_stride=0 if apart_table is None else apart_table.stride(0),
    )
    return Launch(
        _append_kernel,
        (main.programs + index.programs + window_programs,),
        (
            *step_arguments,
            main.programs,
            index.programs,
            *window_arguments,
            *main.arguments,
            *index.arguments[:-KEY_FIELDS],
        ),
        constants,
        _options(constants, target_of(step.batch.device)),
    )


def _of_kind(
    compressors: Sequence[CompressorWrite], kind: CompressorKind
) -> CompressorWrite | None:
    return next((write for write in compressors if write.layout.kind == kind), None)


def _options(constants: dict[str, Any], target: Target) -> dict[str, Any]:
    """Warps and the bound on registers. Sums must round as in the reference, so nothing is
    fused."""
    window, main, index = (constants[name] for name in ("WINDOW", "MAIN", "INDEX"))
    warps, registers = NUM_WARPS, MAX_REGISTERS
    if main is None and index is None and window is not None and window.WIDE:
        warps = CHUNK_WINDOW_WARPS
    elif main is not None and main.WIDE:
        of_chunk = OVERLAPPING_CHUNK_REGISTERS if main.OVERLAP else MAX_CHUNK_REGISTERS
        registers = MAX_FOLD_REGISTERS if main.STATE_ROWS else of_chunk
    elif main is not None and main.SPLITS > 1:
        registers = bounded_registers(target, MAX_SPLIT_REGISTERS)
    elif main is not None and main.KEYS.WIDTH:
        registers = MAX_PROJECTION_REGISTERS
    return {"num_warps": warps, "maxnreg": registers, "enable_fp_fusion": False}


def _window_arguments(
    step: StepTensors, window: WindowWrite | None, stage: bool
) -> tuple[Window, WindowConstants | None]:
    if window is None:
        return Window(step.slot_arena, step.rope, step.slot_arena, 0, 0, 0, 0), None
    page, staging_page = window.page, window.staging_page
    constants = WindowConstants(
        RING=page.rows,
        WIDTH=page.format.width,
        ROPE=step.rope.shape[1],
        NORM=window.norm is not None,
        WIDE=window.staging is not None,
        STAGE=stage,
        KEEP=window.keep,
        WINDOW=window.window,
        RECORD=page_constants(page),
    )
    arguments = Window(
        kv=window.kv,
        norm=step.rope if window.norm is None else window.norm,
        staging=step.slot_arena if window.staging is None else window.staging,
        kv_stride=window.kv.stride(0),
        data_offset=page.offset_bytes,
        scale_offset=page.scale_offset_bytes,
        staging_scale_offset=0 if staging_page is None else staging_page.scale_offset_bytes,
    )
    return arguments, constants


# These counts change with every step: specialising on them would compile a binary for each value.
_COUNTS = [
    "main_programs", "index_programs",
    "m_item_rows", "m_work_programs", "m_tail_programs",
    "i_item_rows", "i_work_programs", "i_tail_programs",
]  # fmt: skip


@triton.jit(do_not_specialize=_COUNTS)
def _append_kernel(
    block_arena, slot_arena, block_table, batch, tokens, rope, block_bytes, slot_bytes,
    table_stride, eps, entries_arena, entry_table, entries_bytes, entry_table_stride,
    main_programs, index_programs,
    kv, kv_norm, staging, kv_stride, data_offset, scale_offset, staging_scale_offset,
    m_items, m_c, m_z, m_ape, m_norm, m_dense, m_scratch, m_arrived, m_item_rows,
    m_work_programs, m_tail_programs, m_c_stride, m_z_stride, m_data_offset, m_scale_offset,
    m_ka_offset, m_za_offset, m_kb_offset, m_zb_offset,
    key_weight, key_norm, key_data_offset, key_scale_offset,
    i_items, i_c, i_z, i_ape, i_norm, i_dense, i_scratch, i_arrived, i_item_rows,
    i_work_programs, i_tail_programs, i_c_stride, i_z_stride, i_data_offset, i_scale_offset,
    i_ka_offset, i_za_offset, i_kb_offset, i_zb_offset,
    WINDOW: tl.constexpr, MAIN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """Takes the fields of Step, Window and two Compressors one by one, because the host cost of
    nested arguments was never measured."""
    begin_program()
    step = Step(
        block_arena, slot_arena, block_table, batch, tokens, rope, block_bytes, slot_bytes,
        table_stride, eps, entries_arena, entry_table, entries_bytes, entry_table_stride,
    )  # fmt: skip
    window = Window(
        kv, kv_norm, staging, kv_stride, data_offset, scale_offset, staging_scale_offset
    )
    main = Compressor(
        m_items, m_c, m_z, m_ape, m_norm, m_dense, m_scratch, m_arrived, m_item_rows,
        m_work_programs, m_tail_programs, m_c_stride, m_z_stride, m_data_offset, m_scale_offset,
        m_ka_offset, m_za_offset, m_kb_offset, m_zb_offset,
        key_weight, key_norm, key_data_offset, key_scale_offset,
    )  # fmt: skip
    index = Compressor(
        i_items, i_c, i_z, i_ape, i_norm, i_dense, i_scratch, i_arrived, i_item_rows,
        i_work_programs, i_tail_programs, i_c_stride, i_z_stride, i_data_offset, i_scale_offset,
        i_ka_offset, i_za_offset, i_kb_offset, i_zb_offset,
        key_weight, key_norm, key_data_offset, key_scale_offset,
    )  # fmt: skip
    program = tl.program_id(0)
    if program < main_programs:
        if MAIN is not None:
            compress(program, step, main, MAIN)
    elif program < main_programs + index_programs:
        if INDEX is not None:
            compress(program - main_programs, step, index, INDEX)
    else:
        nth = program - main_programs - index_programs
        if WINDOW is not None and WINDOW.STAGE:
            _stage_window(nth, step, window, WINDOW)
        else:
            _append_token(nth, step, window, main, index, WINDOW, MAIN, INDEX)


@triton.jit
def _append_token(
    nth, step, window, main, index,
    WINDOW: tl.constexpr, MAIN: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    """One token: its window row and, in a decode step, its rows in the tails. Its inputs are in
    row `nth` as well, so loading them need not wait for the token's columns."""
    MAIN_TAILS: tl.constexpr = MAIN is not None and MAIN.TAILS == "token"
    INDEX_TAILS: tl.constexpr = INDEX is not None and INDEX.TAILS == "token"
    token = load_token(token_at(step.tokens, nth))
    slot, position = token.slot.to(tl.int64), token.position
    if WINDOW is not None:
        x = _load_kv(nth, window, WINDOW)
    if MAIN_TAILS:
        main_rows = _load_tail(nth, main, MAIN)
    if INDEX_TAILS:
        index_rows = _load_tail(nth, index, INDEX)
    # A barrier that no load moves below: all loads have been issued before the branch.
    tl.debug_barrier()
    if slot >= 0:
        slot_ptr = step.slot_arena + slot * step.slot_bytes
        main_bias = ()
        index_bias = ()
        if MAIN_TAILS and MAIN.BIAS:
            main_bias = _load_bias(position, main, MAIN)
        if INDEX_TAILS:
            index_bias = _load_bias(position, index, INDEX)
        if WINDOW is not None:
            _store_window(x, nth, token, slot_ptr, step, window, WINDOW)
        if MAIN_TAILS:
            _store_tail(main_rows, main_bias, slot_ptr, position, main, MAIN)
        if INDEX_TAILS:
            _store_tail(index_rows, index_bias, slot_ptr, position, index, INDEX)


@triton.jit
def _load_kv(nth, window, W: tl.constexpr):
    """[1, WIDTH]"""
    source = window.kv + nth.to(tl.int64) * window.kv_stride
    return tl.load(source + tl.arange(0, W.WIDTH)[None, :])


@triton.jit
def _store_window(x, nth, token, slot_ptr, step, window, W: tl.constexpr):
    """A row [1, WIDTH] into the ring and, in a prefill step, into the staging page."""
    WIDTH: tl.constexpr = W.WIDTH
    RECORD: tl.constexpr = W.RECORD
    x = wide(x)
    one = tl.arange(0, 1)
    if W.NORM:
        x = rms_norm(x, tl.load(window.norm + tl.arange(0, WIDTH))[None, :], step.eps, WIDTH)
        angles = step.rope + (token.position.to(tl.int64) * W.ROPE + one)[:, None]  # [1, 1]
        cos, sin = load_rope(angles, WIDTH, W.ROPE)
        x = rotate(x, cos, sin, WIDTH, W.ROPE)
    if W.KEEP:
        ring_row = token.position % W.RING
        keeps = (token.kept + one == 1) if W.WIDE else (one == 0)
        store_records(
            x, keeps,
            slot_ptr + window.data_offset + ring_row * RECORD.DATA_STRIDE + one,
            slot_ptr + window.scale_offset + ring_row * RECORD.SCALE_STRIDE + one,
            WIDTH, RECORD,
        )  # fmt: skip
    if W.WIDE:
        row = staged_row(nth, token.position, token.batch_row, token.position, W.WINDOW)
        staged = row.to(tl.int64)
        store_records(
            x, one == 0,
            window.staging + staged * RECORD.DATA_STRIDE + one,
            window.staging + window.staging_scale_offset + staged * RECORD.SCALE_STRIDE + one,
            WIDTH, RECORD,
        )  # fmt: skip


@triton.jit
def _load_tail(nth, compressor, C: tl.constexpr):
    """Values and logits [WIDTH] of a token for the current stream, and with overlap for the
    previous."""
    column = tl.arange(0, C.WIDTH)
    row_c = compressor.c + nth.to(tl.int64) * compressor.c_stride + column
    row_z = compressor.z + nth.to(tl.int64) * compressor.z_stride + column
    if C.OVERLAP:
        return (
            tl.load(row_c + C.WIDTH), tl.load(row_z + C.WIDTH), tl.load(row_c), tl.load(row_z)
        )  # fmt: skip
    else:
        return tl.load(row_c), tl.load(row_z)


@triton.jit
def _load_bias(position, compressor, C: tl.constexpr):
    """The logits' bias [WIDTH] for the current stream, and with overlap for the previous."""
    COLUMNS: tl.constexpr = C.WIDTH * 2 if C.OVERLAP else C.WIDTH
    bias = compressor.ape + position % C.RATIO * COLUMNS + tl.arange(0, C.WIDTH)
    if C.OVERLAP:
        return tl.load(bias + C.WIDTH), tl.load(bias)
    else:
        return (tl.load(bias),)


@triton.jit
def _store_tail(rows, bias, slot_ptr, position, compressor, C: tl.constexpr):
    """A token into the rings. A decode step never has more tokens than the rings have rows."""
    column = tl.arange(0, C.WIDTH)
    if C.A_ROWS > 0:
        at = tail_rank(position, C) % C.A_ROWS * C.WIDTH + column
        logits = rows[1]
        if C.BIAS:
            logits += bias[0]
        if is_kept(position, C):
            tl.store(ring_at(slot_ptr, compressor.ka_offset) + at, rows[0])
            tl.store(ring_at(slot_ptr, compressor.za_offset) + at, logits)
    if C.OVERLAP:
        at = position % C.B_ROWS * C.WIDTH + column
        tl.store(ring_at(slot_ptr, compressor.kb_offset) + at, rows[2])
        tl.store(ring_at(slot_ptr, compressor.zb_offset) + at, rows[3] + bias[1])


@triton.jit
def _stage_window(program, step, window, W: tl.constexpr):
    """One row before a request's chunk, from the ring that the chunk will overwrite."""
    RECORD: tl.constexpr = W.RECORD
    BEFORE: tl.constexpr = W.WINDOW - 1
    batch_row = program // BEFORE
    nth = program % BEFORE
    request = load_request(request_at(step.batch, batch_row))
    slot = request.slot.to(tl.int64)
    position = request.start - BEFORE + nth
    if (slot >= 0) & (position >= 0) & (request.count > 0):
        row = staged_row(request.first_row, request.start, batch_row, position, W.WINDOW)
        staged = row.to(tl.int64)
        page = step.slot_arena + slot * step.slot_bytes
        ring_row = position % W.RING
        _copy_bytes(
            page + window.data_offset + ring_row * RECORD.DATA_STRIDE,
            window.staging + staged * RECORD.DATA_STRIDE,
            RECORD.DATA_BYTES,
        )
        if RECORD.SCALE_BYTES > 0:
            _copy_bytes(
                page + window.scale_offset + ring_row * RECORD.SCALE_STRIDE,
                window.staging + window.staging_scale_offset + staged * RECORD.SCALE_STRIDE,
                RECORD.SCALE_BYTES,
            )


@triton.jit
def _copy_bytes(source, target, COUNT: tl.constexpr):
    byte = tl.arange(0, triton.next_power_of_2(COUNT))
    tl.store(target + byte, tl.load(source + byte, mask=byte < COUNT), mask=byte < COUNT)
