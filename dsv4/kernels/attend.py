"""Sparse attention in one launch: one softmax over window rows and compressed entries.

The keys of a query are numbered: the window first (rounded up to whole tiles), then the entries.
They are cut into tiles of BLOCK_N and splits of some tiles; where a split begins depends on what
the cache can hold and on nothing else. A split is computed from nothing, and the splits of a query
are merged in their order. So the result does not depend on who shares the launch, nor on which of
two ways the work was shared out:

    parallel  few queries: one program a split. Each leaves its sums in the workspace, and whoever
              comes last merges them.
    serial    many queries: one program a query and block of heads, split after split; the sums so
              far wait in the workspace (in L2) meanwhile.

The channels are held in chunks of 64, which is a tile of the FP8 code: a chunk of a key has one
scale, and a chunk of the accumulator is small enough to be merged in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from dsv4.cache.reads import EntrySource, WindowSource
from dsv4.errors import InvalidInput, SchemaError
from dsv4.kernels.dot import as_operand, dot, load_bf16
from dsv4.kernels.numerics import bf16_bits, round_bf16
from dsv4.kernels.record import RecordConstants, record_constants
from dsv4.kernels.record_load import load_record_chunk

# Keys a tile, and heads a program (a tensor core wants 16; 64 heads share a dequantised tile).
BLOCK_N = 64
MIN_HEADS, MAX_HEADS = 16, 64
# A split has at least TILES_PER_SPLIT tiles, and more where there would be over MAX_SPLITS.
# Changing them changes results in the last bit.
TILES_PER_SPLIT = 5
MAX_SPLITS = 16
# Programs of a launch, and so places in the workspace; below it splits run in parallel.
MAX_PROGRAMS = 512
CHUNK = 64
NUM_WARPS = 8
NUM_STAGES = 2

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class AttendConstants:
    """A launch as compile-time constants. ALL: every visible entry, not a list."""

    HEADS: int
    BLOCK_H: int
    WIDTH: int
    CHUNK: int
    BLOCK_N: int
    SPLIT_TILES: int
    SPLITS: int
    WINDOW: int
    WINDOW_ROWS: int
    STAGED: bool
    WINDOW_RECORD: RecordConstants
    ENTRIES: bool
    ALL: bool
    RATIO: int
    ENTRY_ROWS: int
    ENTRY_RECORD: RecordConstants
    ROPE: int
    COUNTERS: int


def split_count(window: int, max_entries: int) -> int:
    """Into how many splits the keys of a query may fall: `max_entries` is how many a query can
    have, the width of `indices` or the capacity of a row of the block table."""
    return -(-_tiles(window, max_entries) // _split_tiles(window, max_entries))


def workspace_elements(tokens: int, heads: int, head_dim: int, max_splits: int) -> int:
    """fp32 elements that launches of up to `tokens` tokens and `max_splits` splits need.

    They must be 0 before the first launch; launches that follow each other may share them,
    whatever their shapes.
    """
    if max_splits <= 1:
        return 0
    block = _block_heads(heads)
    programs = min(tokens * -(-heads // block) * max_splits, MAX_PROGRAMS)
    return MAX_PROGRAMS + programs * block * (head_dim + 2)


def workspace_bytes(tokens: int, heads: int, head_dim: int, max_splits: int) -> int:
    return 4 * workspace_elements(tokens, heads, head_dim, max_splits)


def attend(
    q: Tensor,
    sink: Tensor,
    *,
    tokens: Tensor,
    batch: Tensor,
    window: WindowSource,
    entries: EntrySource | None,
    indices: Tensor | None,
    out: Tensor,
    lse: Tensor,
    inverse_rope: Tensor | None,
    workspace: Tensor | None = None,
) -> None:
    """One launch. The result of dsv4.reference.attend.attend up to the order of fp32 sums.

    Deterministic; a query's result does not depend on the other queries. `workspace` is fp32 with
    `workspace_elements`, zero before its first use. Raises InvalidInput if it is too small.
    """
    programs, arguments, constants = launch_arguments(
        q, sink, tokens=tokens, batch=batch, window=window, entries=entries, indices=indices,
        out=out, lse=lse, inverse_rope=inverse_rope, workspace=workspace,
    )  # fmt: skip
    if programs:
        _attend_kernel[(programs,)](
            *arguments,
            **constants,
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
            enable_fp_fusion=False,
        )


def launch_arguments(
    q: Tensor,
    sink: Tensor,
    *,
    tokens: Tensor,
    batch: Tensor,
    window: WindowSource,
    entries: EntrySource | None,
    indices: Tensor | None,
    out: Tensor,
    lse: Tensor,
    inverse_rope: Tensor | None,
    workspace: Tensor | None,
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Programs, run-time arguments and compile-time constants of the launch."""
    count, heads, width = q.shape
    max_entries = 0
    if entries is not None:
        capacity = entries.block_table.shape[1] * entries.page.rows
        max_entries = capacity if indices is None else indices.shape[1]
    splits = split_count(window.window, max_entries)
    block = _block_heads(heads)
    items = count * -(-heads // block)
    parallel = splits > 1 and items * splits <= MAX_PROGRAMS
    units = items * splits if parallel else items
    needed = workspace_elements(count, heads, width, splits)
    given = 0 if workspace is None else workspace.numel()
    if needed > given:
        raise InvalidInput(
            f"attention of {count} tokens with {heads} heads of {width} in {splits} splits needs a "
            f"workspace of {needed} fp32 elements, got {given}: size it with workspace_elements"
        )
    for name, tensor in (("q", q), ("out", out)):
        if tensor.stride(1) != width or tensor.stride(2) != 1:
            raise InvalidInput(
                f"{name} has strides {tensor.stride()}: the heads of a token must be contiguous"
            )
    source = entries or EntrySource(
        arena=window.arena, page=window.page, block_table=tokens, ratio=1
    )
    rope = sink if inverse_rope is None else inverse_rope
    rope_dim = 0 if inverse_rope is None else inverse_rope.shape[1]
    listed = tokens if indices is None else indices
    constants = AttendConstants(
        HEADS=heads,
        BLOCK_H=block,
        WIDTH=width,
        CHUNK=_chunk(width, rope_dim, window, entries),
        BLOCK_N=BLOCK_N,
        SPLIT_TILES=_split_tiles(window.window, max_entries),
        SPLITS=splits,
        WINDOW=window.window,
        WINDOW_ROWS=window.page.rows,
        STAGED=window.chunk,
        WINDOW_RECORD=record_constants(window.page.format),
        ENTRIES=entries is not None,
        ALL=indices is None,
        RATIO=source.ratio,
        ENTRY_ROWS=source.page.rows,
        ENTRY_RECORD=record_constants(source.page.format),
        ROPE=rope_dim,
        COUNTERS=MAX_PROGRAMS,
    )
    arguments = (
        q,
        sink,
        tokens,
        batch,
        window.arena,
        source.arena,
        source.block_table,
        listed,
        out,
        lse,
        rope,
        sink if workspace is None else workspace,
        q.stride(0),
        out.stride(0),
        lse.stride(0),
        listed.stride(0),
        listed.shape[1],
        source.block_table.stride(0),
        window.arena.stride(0),
        window.page.offset_bytes,
        window.page.scale_offset_bytes,
        source.arena.stride(0),
        source.page.offset_bytes,
        source.page.scale_offset_bytes,
        units,
        int(parallel),
    )
    return min(units, MAX_PROGRAMS), arguments, {"A": constants}


def _tiles(window: int, max_entries: int) -> int:
    return -(-window // BLOCK_N) - (-max_entries // BLOCK_N)


def _split_tiles(window: int, max_entries: int) -> int:
    return max(TILES_PER_SPLIT, -(-_tiles(window, max_entries) // MAX_SPLITS))


def _block_heads(heads: int) -> int:
    return int(min(MAX_HEADS, max(MIN_HEADS, triton.next_power_of_2(heads))))


def _chunk(width: int, rope_dim: int, window: WindowSource, entries: EntrySource | None) -> int:
    """The widest chunk that no boundary of a record or of the rotated channels falls into."""
    return CHUNK
    chunk = gcd(CHUNK, width, rope_dim)
    for source in (window, entries):
        if source is not None:
            record = record_constants(source.page.format)
            if record.ELEMENT not in ("none", "e4m3") or record.SCALE == "e4m3":
                raise SchemaError(
                    f"attention reads bf16 and e4m3 records, not {source.page.format.name}"
                )
            chunk = gcd(chunk, record.CODED, record.TILE if record.CODED else 0)
    return chunk


@triton.jit(do_not_specialize=["units", "parallel"])
def _attend_kernel(
    q_ptr,
    sink_ptr,
    tokens_ptr,
    batch_ptr,
    window_arena,
    entry_arena,
    table_ptr,
    indices_ptr,
    out_ptr,
    lse_ptr,
    rope_ptr,
    workspace_ptr,
    q_stride,
    out_stride,
    lse_stride,
    indices_stride,
    indices_count,
    table_stride,
    window_bytes,
    window_data,
    window_scale,
    entry_bytes,
    entry_data,
    entry_scale,
    units,
    parallel,
    A: tl.constexpr,
):
    BLOCK_H: tl.constexpr = A.BLOCK_H
    SPLITS: tl.constexpr = A.SPLITS
    HEAD_BLOCKS: tl.constexpr = (A.HEADS + BLOCK_H - 1) // BLOCK_H
    WINDOW_TILES: tl.constexpr = (A.WINDOW + A.BLOCK_N - 1) // A.BLOCK_N
    program = tl.program_id(0)
    for unit in range(program, units, tl.num_programs(0)):
        item = unit
        first = 0
        if parallel != 0:
            item = unit // SPLITS
            first = unit % SPLITS
        token = item // HEAD_BLOCKS
        slot = tl.load(tokens_ptr + token * 4).to(tl.int64)
        position = tl.load(tokens_ptr + token * 4 + 1)
        batch_row = tl.load(tokens_ptr + token * 4 + 2)
        tiles = WINDOW_TILES
        visible = 0
        if A.ENTRIES:
            visible = (position + 1) // A.RATIO
            entries = visible
            if not A.ALL:
                entries = tl.where(visible > 0, indices_count, 0)
            tiles += (entries + A.BLOCK_N - 1) // A.BLOCK_N
        splits = (tiles + A.SPLIT_TILES - 1) // A.SPLIT_TILES
        if slot < 0:
            splits = 0
        last = splits
        if parallel != 0:
            last = tl.minimum(splits, first + 1)
        head = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        # a row of the window: the ring's, or where a chunk's rows are staged
        window_page = window_arena + slot * window_bytes
        shift = tl.zeros([], dtype=tl.int64)
        if A.STAGED:
            window_page = window_arena
            start = tl.load(batch_ptr + batch_row * 4 + 1, mask=slot >= 0, other=0)
            first_row = tl.load(batch_ptr + batch_row * 4 + 3, mask=slot >= 0, other=0)
            before = A.WINDOW - 1
            shift = first_row.to(tl.int64) + before * batch_row.to(tl.int64) - (start - before)
        for split in range(first, last):
            m, total, acc = _attend_split(
                split * A.SPLIT_TILES, tl.minimum(tiles, (split + 1) * A.SPLIT_TILES),
                q_ptr + token.to(tl.int64) * q_stride, head, position, visible, window_page,
                window_data, window_scale, shift, entry_arena, entry_bytes, entry_data, entry_scale,
                table_ptr + slot * table_stride,
                indices_ptr + token.to(tl.int64) * indices_stride, indices_count, A,
            )  # fmt: skip
            done = split == splits - 1
            if SPLITS > 1:  # noqa: SIM102 (decided at compile time)
                if splits > 1:
                    place = program
                    if parallel != 0:
                        place = unit
                    if (parallel == 0) & (split > 0):
                        m, total, acc = _merge_before(place, m, total, acc, workspace_ptr, A)
                    if (parallel != 0) | (split < splits - 1):
                        _park(place, m, total, acc, workspace_ptr, A)
                    tl.debug_barrier()
                    if parallel != 0:
                        counter = workspace_ptr.to(tl.pointer_type(tl.int32)) + item
                        done = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
                        if done:
                            tl.store(counter, 0)
                            m, total, acc = _merge_all(item * SPLITS, splits, workspace_ptr, A)
            if done:
                _finish(
                    m, total, acc, head, sink_ptr, out_ptr + token.to(tl.int64) * out_stride,
                    lse_ptr + token.to(tl.int64) * lse_stride,
                    rope_ptr + position.to(tl.int64) * A.ROPE, A,
                )  # fmt: skip


@triton.jit
def _attend_split(
    tile, end, q_row, head, position, visible, window_page, window_data, window_scale, shift,
    entry_arena, entry_bytes, entry_data, entry_scale, table_row, indices_row, indices_count,
    A: tl.constexpr,
):  # fmt: skip
    """Tiles [tile, end) of a query: maximum of the logits (base 2), sum, weighted sum of keys."""
    BLOCK_H: tl.constexpr = A.BLOCK_H
    BLOCK_N: tl.constexpr = A.BLOCK_N
    WIDTH: tl.constexpr = A.WIDTH
    CHUNK: tl.constexpr = A.CHUNK
    WINDOW_TILES: tl.constexpr = (A.WINDOW + BLOCK_N - 1) // BLOCK_N
    WINDOW_RECORD: tl.constexpr = A.WINDOW_RECORD
    ENTRY_RECORD: tl.constexpr = A.ENTRY_RECORD
    nth = tl.arange(0, BLOCK_N)
    column = tl.arange(0, CHUNK)[None, :]
    q = ()
    acc = ()
    for start in tl.static_range(0, WIDTH, CHUNK):
        at = q_row + head[:, None] * WIDTH + start + column
        q = q + (load_bf16(at, (head < A.HEADS)[:, None]),)
        acc = acc + (tl.zeros([BLOCK_H, CHUNK], dtype=tl.float32),)
    m = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for at in range(tile, tl.minimum(end, WINDOW_TILES)):
        back = at * BLOCK_N + nth
        seen = position - (A.WINDOW - 1) + back
        live = (back < A.WINDOW) & (seen >= 0)
        if A.STAGED:
            row = seen + shift
        else:
            row = (seen % A.WINDOW_ROWS).to(tl.int64)
        m, total, acc = _attend_tile(
            q, m, total, acc,
            window_page + window_data + row * WINDOW_RECORD.DATA_BYTES,
            window_page + window_scale + row * WINDOW_RECORD.SCALE_BYTES,
            live, WINDOW_RECORD, A,
        )  # fmt: skip
    if A.ENTRIES:
        for at in range(tl.maximum(tile, WINDOW_TILES), end):
            entry = (at - WINDOW_TILES) * BLOCK_N + nth
            if not A.ALL:
                entry = tl.load(indices_row + entry, mask=entry < indices_count, other=-1)
            live = (entry >= 0) & (entry < visible)
            block_id = tl.load(table_row + entry // A.ENTRY_ROWS, mask=live, other=0).to(tl.int64)
            row = entry % A.ENTRY_ROWS
            page = entry_arena + block_id * entry_bytes
            m, total, acc = _attend_tile(
                q, m, total, acc,
                page + entry_data + row * ENTRY_RECORD.DATA_BYTES,
                page + entry_scale + row * ENTRY_RECORD.SCALE_BYTES,
                live, ENTRY_RECORD, A,
            )  # fmt: skip
    return m, total, acc


@triton.jit
def _attend_tile(
    q, m, total, acc, data_ptrs, scale_ptrs, live, RECORD: tl.constexpr, A: tl.constexpr
):
    """One tile of keys into the running softmax. Dead rows are not read and weigh nothing."""
    BLOCK_H: tl.constexpr = A.BLOCK_H
    BLOCK_N: tl.constexpr = A.BLOCK_N
    CHUNK: tl.constexpr = A.CHUNK
    SCALE: tl.constexpr = A.WIDTH**-0.5 * _LOG2_E
    keys = ()
    logits = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)
    for chunk in tl.static_range(0, A.WIDTH // CHUNK):
        k = load_record_chunk(data_ptrs, scale_ptrs, live, chunk * CHUNK, CHUNK, RECORD)
        keys = keys + (k,)
    for chunk in tl.static_range(0, A.WIDTH // CHUNK):
        logits = dot(q[chunk], tl.trans(keys[chunk]), logits)
    logits = tl.where(live[None, :], logits * SCALE, float("-inf"))
    top = tl.maximum(m, tl.max(logits, axis=1))
    base = tl.where(top == float("-inf"), 0.0, top)  # no key yet
    alpha = tl.exp2(m - base)
    weight = tl.exp2(logits - base[:, None])
    p = as_operand(weight)
    summed = ()
    for chunk in tl.static_range(0, A.WIDTH // CHUNK):
        summed = summed + (dot(p, keys[chunk], acc[chunk] * alpha[:, None]),)
    return top, total * alpha + tl.sum(weight, axis=1), summed


@triton.jit
def _place(place, workspace_ptr, A: tl.constexpr):
    """Where one program's sums lie, and where its maxima, then totals."""
    SIZE: tl.constexpr = A.BLOCK_H * (A.WIDTH + 2)
    sums = workspace_ptr + A.COUNTERS + place.to(tl.int64) * SIZE
    return sums, sums + A.BLOCK_H * A.WIDTH


@triton.jit
def _park(place, m, total, acc, workspace_ptr, A: tl.constexpr):
    CHUNK: tl.constexpr = A.CHUNK
    sums, totals = _place(place, workspace_ptr, A)
    line = tl.arange(0, A.BLOCK_H)
    tl.store(totals + line, m)
    tl.store(totals + A.BLOCK_H + line, total)
    for chunk in tl.static_range(0, A.WIDTH // CHUNK):
        at = chunk * A.BLOCK_H * CHUNK + line[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        tl.store(sums + at, acc[chunk])


@triton.jit
def _weights(m, other):
    """The common maximum of two splits and the factors that bring both to it."""
    top = tl.maximum(m, other)
    base = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.exp2(m - base), tl.exp2(other - base)


@triton.jit
def _parked(place, workspace_ptr, A: tl.constexpr):
    CHUNK: tl.constexpr = A.CHUNK
    sums, totals = _place(place, workspace_ptr, A)
    line = tl.arange(0, A.BLOCK_H)
    m = tl.load(totals + line, cache_modifier=".cg")
    total = tl.load(totals + A.BLOCK_H + line, cache_modifier=".cg")
    acc = ()
    for chunk in tl.static_range(0, A.WIDTH // CHUNK):
        at = chunk * A.BLOCK_H * CHUNK + line[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
        acc = acc + (tl.load(sums + at, cache_modifier=".cg"),)
    return m, total, acc


@triton.jit
def _merge(m0, total0, acc0, m1, total1, acc1, A: tl.constexpr):
    top, w0, w1 = _weights(m0, m1)
    acc = ()
    for chunk in tl.static_range(0, A.WIDTH // A.CHUNK):
        acc = acc + (acc0[chunk] * w0[:, None] + acc1[chunk] * w1[:, None],)
    return top, total0 * w0 + total1 * w1, acc


@triton.jit
def _merge_before(place, m, total, acc, workspace_ptr, A: tl.constexpr):
    """The sums so far, parked at `place`, with those of the split just computed."""
    m0, total0, acc0 = _parked(place, workspace_ptr, A)
    return _merge(m0, total0, acc0, m, total, acc, A)


@triton.jit
def _merge_all(place, splits, workspace_ptr, A: tl.constexpr):
    """The splits parked from `place` on, merged in their order."""
    m, total, acc = _parked(place, workspace_ptr, A)
    for split in range(1, splits):
        m1, total1, acc1 = _parked(place + split, workspace_ptr, A)
        m, total, acc = _merge(m, total, acc, m1, total1, acc1, A)
    return m, total, acc


@triton.jit
def _finish(m, total, acc, head, sink_ptr, out_row, lse_row, rope_row, A: tl.constexpr):
    """Sink, division, rounding, inverse RoPE."""
    CHUNK: tl.constexpr = A.CHUNK
    BLOCK_H: tl.constexpr = A.BLOCK_H
    live = head < A.HEADS
    tl.store(lse_row + head, (m + tl.log2(total)) * _LN_2, mask=live)
    base = tl.where(m == float("-inf"), 0.0, m)
    sink = tl.load(sink_ptr + head, mask=live, other=0.0)
    denominator = total + tl.exp2(sink * _LOG2_E - base)
    # without a key and a sink there is nothing to divide
    inverse = tl.where(total > 0, 1.0 / denominator, 0.0)[:, None]
    bits_ptr = out_row.to(tl.pointer_type(tl.uint16))
    column = tl.arange(0, CHUNK)[None, :]
    for chunk in tl.static_range(0, A.WIDTH // CHUNK):
        x = round_bf16(acc[chunk] * inverse)
        if chunk * CHUNK >= A.WIDTH - A.ROPE:
            pair = (chunk * CHUNK - (A.WIDTH - A.ROPE)) // 2 + tl.arange(0, CHUNK // 2)[None, :]
            cos = tl.load(rope_row + pair)
            sin = tl.load(rope_row + A.ROPE // 2 + pair)
            even, odd = tl.split(tl.reshape(x, [BLOCK_H, CHUNK // 2, 2]))
            x = tl.join(round_bf16(even * cos + odd * sin), round_bf16(odd * cos - even * sin))
            x = tl.reshape(x, [BLOCK_H, CHUNK])
        at = head[:, None] * A.WIDTH + chunk * CHUNK + column
        tl.store(bits_ptr + at, bf16_bits(x), mask=live[:, None])
