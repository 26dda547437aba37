"""Sparse attention in one launch: one softmax over window rows and compressed entries.

The keys of a query are numbered: the window first (rounded up to whole tiles), then the entries.
They are cut into tiles of BLOCK_N keys and splits of a few tiles; where a split begins depends only
on what the cache can hold. Each split is computed from zero, and the splits of a query are merged
in order. So a query's result depends neither on the other queries of the launch nor on which of two
ways the work was distributed:

    parallel  few queries: one program per split. Each parks its sums in the workspace, and the last
              one to finish merges them.
    serial    many queries: one program per query and block of heads takes split after split, and
              parks the sums so far. It uses the same two places of the workspace throughout, so
              they stay in the L2.

A query whose keys fit into one split goes from registers straight to the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dsv4.errors import InvalidInput, SchemaError
from dsv4.kernels.dot import as_operand, dot, load_bf16
from dsv4.kernels.launch import Launch
from dsv4.kernels.numerics import INTERPRETED, bf16_bits, round_bf16
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_load import load_record_span
from dsv4.kernels.record_store import RecordConstants, page_constants
from dsv4.kernels.rows import load_request, load_token, request_at, staged_row, token_at
from dsv4.kernels.sizes import (
    PLACES,
    UNIT_KEYS,
    heads_per_program,
    split_count,
    split_units,
)
from dsv4.kernels.sizes import attend_elements as workspace_elements
from dsv4.kernels.target import AttentionTiles, attention_tiles, target_of
from dsv4.ops.calls import Attention, EntrySource, WindowSource

# The loops over tiles choose their own number of stages.
NUM_STAGES = 1

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class AttendConstants:
    """A launch as compile-time constants. ALL: every visible entry, not a list. RESOLVED: the list
    says where entries are. JOINT: the queries of a request see the window of its last token. CUT:
    they see no row before its first one."""

    HEADS: int
    BLOCK_H: int
    WIDTH: int
    SPANS: int
    SPAN_STARTS: tuple[int, ...]
    SPAN_WIDTHS: tuple[int, ...]
    BLOCK_N: int
    SPLIT_TILES: int
    SPLITS: int
    WINDOW: int
    WINDOW_ROWS: int
    STAGED: bool
    JOINT: bool
    CUT: bool
    WINDOW_RECORD: RecordConstants
    ENTRIES: bool
    ALL: bool
    RATIO: int
    ENTRY_ROWS: int
    ENTRY_RECORD: RecordConstants
    ROPE: int
    COUNTERS: int
    WINDOW_STAGES: int
    ENTRY_STAGES: int
    RESOLVED: bool


class AttendArguments(NamedTuple):
    """The arguments that the signatures of this kernel and of Hopper's begin with. Triton reads a
    signature from the kernel's own source, so they are repeated there; a test compares the
    names."""

    q_ptr: Tensor
    sink_ptr: Tensor
    tokens_ptr: Tensor
    batch_ptr: Tensor
    window_arena: Tensor
    entry_arena: Tensor
    table_ptr: Tensor
    indices_ptr: Tensor
    out_ptr: Tensor
    lse_ptr: Tensor
    rope_ptr: Tensor
    workspace_ptr: Tensor
    q_stride: int
    out_stride: int
    lse_stride: int
    indices_stride: int
    indices_count: int
    table_stride: int
    window_bytes: int
    window_data: int
    window_scale: int
    entry_bytes: int
    entry_data: int
    entry_scale: int


def attend(call: Attention) -> None:
    """One launch. The result of the reference up to the order of fp32 sums.

    Deterministic; a query's result does not depend on the other queries. The workspace has
    `workspace_elements` elements; raises InvalidInput if it is smaller.
    """
    attend_launch(call).run()


def attend_launch(call: Attention) -> Launch:
    """Raises as `attend` does."""
    count, heads, width = call.q.shape
    window, source = call.window, entries_or_window(call)
    splits = split_count(window.window, call.max_entries)
    window_record = page_constants(window.page)
    entry_record = page_constants(source.page)
    coded = [each for each in (window_record, entry_record) if each.CODED]
    tiles = attention_tiles(
        target_of(call.q.device),
        heads,
        crowded=any(each.ELEMENT == "e2m1" or each.TILE < 64 for each in coded),
        fp32_scales=any(each.SCALE == "fp32" for each in coded),
    )
    block = heads_per_program(heads, tiles.heads)
    items = count * -(-heads // block)
    parallel = splits > 1 and items * splits <= PLACES
    units = items * splits if parallel else items
    programs = units if parallel or splits == 1 else min(units, PLACES // 2)
    needed = workspace_elements(count, heads, width, splits)
    given = 0 if call.workspace is None else call.workspace.numel()
    if needed > given:
        raise InvalidInput(
            f"attention of {count} tokens with {heads} heads of {width} in {splits} splits needs a "
            f"workspace of {needed} fp32 elements, got {given}: size it with workspace_elements"
        )
    spans = _spans(width, tiles, window, call.entries)
    constants = AttendConstants(
        HEADS=heads,
        BLOCK_H=block,
        WIDTH=width,
        SPANS=len(spans),
        SPAN_STARTS=tuple(start for start, _ in spans),
        SPAN_WIDTHS=tuple(extent for _, extent in spans),
        BLOCK_N=tiles.keys,
        SPLIT_TILES=split_units(window.window, call.max_entries) * (UNIT_KEYS // tiles.keys),
        SPLITS=splits,
        WINDOW=window.window,
        WINDOW_ROWS=window.page.rows,
        STAGED=window.staged,
        JOINT=call.joint,
        CUT=call.window_cut,
        WINDOW_RECORD=window_record,
        ENTRIES=call.entries is not None,
        ALL=call.indices is None,
        RATIO=source.ratio,
        ENTRY_ROWS=source.page.rows,
        ENTRY_RECORD=entry_record,
        ROPE=0 if call.inverse_rope is None else call.inverse_rope.shape[1],
        COUNTERS=PLACES,
        WINDOW_STAGES=1 + _buffers(window_record, tiles),
        # Triton prefetches block ids this many tiles before their keys, and indices before those.
        ENTRY_STAGES=1 + _buffers(entry_record, tiles) * (2 if call.indices is None else 3),
        RESOLVED=source.resolved,
    )
    arguments = (*run_time_arguments(call), units, int(parallel))
    options = {"num_warps": tiles.warps, "num_stages": NUM_STAGES, "enable_fp_fusion": False}
    return Launch(_attend_kernel, (programs,), arguments, {"A": constants}, options)


def entries_or_window(call: Attention) -> EntrySource:
    """Where entries are read; where there are none, the window stands in for them."""
    return call.entries or EntrySource(
        arena=call.window.arena, page=call.window.page, block_table=call.tokens, ratio=1
    )


def run_time_arguments(call: Attention) -> AttendArguments:
    """Fills in a tensor of the right type, which is not read, for each argument that is missing.
    Raises InvalidInput, SchemaError."""
    _check(call.q, call.out, call.window, call.entries)
    window, source = call.window, entries_or_window(call)
    listed = call.tokens if call.indices is None else call.indices
    return AttendArguments(
        q_ptr=call.q,
        sink_ptr=call.sink,
        tokens_ptr=call.tokens,
        batch_ptr=call.batch,
        window_arena=window.arena,
        entry_arena=source.arena,
        table_ptr=source.block_table,
        indices_ptr=listed,
        out_ptr=call.out,
        lse_ptr=call.lse,
        rope_ptr=call.sink if call.inverse_rope is None else call.inverse_rope,
        workspace_ptr=call.sink if call.workspace is None else call.workspace,
        q_stride=call.q.stride(0),
        out_stride=call.out.stride(0),
        lse_stride=call.lse.stride(0),
        indices_stride=listed.stride(0),
        indices_count=listed.shape[1],
        table_stride=source.block_table.stride(0),
        window_bytes=window.arena.stride(0),
        window_data=window.page.offset_bytes,
        window_scale=window.page.scale_offset_bytes,
        entry_bytes=source.arena.stride(0),
        entry_data=source.page.offset_bytes,
        entry_scale=source.page.scale_offset_bytes,
    )


def _buffers(record: RecordConstants, tiles: AttentionTiles) -> int:
    return tiles.coded_buffers if record.CODED > 0 else tiles.bf16_buffers


def _spans(
    width: int, tiles: AttentionTiles, window: WindowSource, entries: EntrySource | None
) -> list[tuple[int, int]]:
    """Start and width of each span: powers of two, none with both coded and bf16 channels unless
    the tiles allow it."""
    edges = {width}
    for source in (window, entries):
        if source is not None and not tiles.mixed_spans:
            edges.add(page_constants(source.page).CODED)
    spans = []
    start = 0
    while start < width:
        room = min(min(edge for edge in edges if edge > start) - start, tiles.span)
        extent = 1 << (room.bit_length() - 1)
        extent = min(extent, start & -start) if start else extent
        spans.append((start, extent))
        start += extent
    return spans


def _check(q: Tensor, out: Tensor, *sources: WindowSource | EntrySource | None) -> None:
    width = q.shape[2]
    if width & (width - 1):
        raise SchemaError(f"attention needs a head_dim that is a power of two, not {width}")
    for name, tensor in (("q", q), ("out", out)):
        if tensor.stride(1) != width or tensor.stride(2) != 1:
            raise InvalidInput(
                f"{name} has strides {tensor.stride()}: the heads of a token must be contiguous"
            )
    for source in sources:
        if source is not None and source.page.format.width != width:
            raise SchemaError(
                f"queries have {width} channels, records of {source.page.format.name} "
                f"{source.page.format.width}: attention reads records of its queries' width"
            )


# Bundles for helpers are packed inside the kernel, where they cost no more than their fields.
# Comments give the shapes of block values: [heads] are the BLOCK_H heads of a program, [keys] the
# BLOCK_N keys of a tile, [channels] those of a span.


class _Query(NamedTuple):
    """One token's query, for the heads of one program."""

    row: Any  # of q
    head: Any  # [heads] their numbers; those from A.HEADS on are padding
    newest: Any  # position of the window
    visible: Any  # entries


class _Window(NamedTuple):
    """Where window rows are: row `position + shift` of the staging page, or a row of the ring. No
    row lies before the `oldest` position."""

    page: Any
    data: Any  # offsets in the page, bytes
    scale: Any
    shift: Any
    oldest: Any


class _Entries(NamedTuple):
    """Where a request's entries are, and which of them the query reads if it does not read all."""

    arena: Any
    block_bytes: Any
    data: Any  # offsets in a block, bytes
    scale: Any
    table_row: Any
    indices_row: Any
    indices_count: Any


class _Sums(NamedTuple):
    """A softmax in progress: `acc` weighs keys by 2^(logit - top), and `total` is their weight."""

    acc: Any  # of each span [heads, channels]
    top: Any  # [heads] highest logit, base 2
    total: Any  # [heads]


class _Out(NamedTuple):
    """Where a token's result goes, and what enters it in addition to the keys."""

    row: Any  # of out
    lse_row: Any
    sink: Any
    rope_row: Any
    head: Any  # [heads]


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
    begin_program()
    BLOCK_H: tl.constexpr = A.BLOCK_H
    SPLITS: tl.constexpr = A.SPLITS
    HEAD_BLOCKS: tl.constexpr = (A.HEADS + BLOCK_H - 1) // BLOCK_H
    WINDOW_TILES: tl.constexpr = (A.WINDOW + A.BLOCK_N - 1) // A.BLOCK_N
    program = tl.program_id(0)
    for unit in tl.range(program, units, tl.num_programs(0), disable_licm=True):
        item = unit
        first = 0
        if parallel != 0:
            item = unit // SPLITS
            first = unit % SPLITS
        nth = item // HEAD_BLOCKS
        token = load_token(token_at(tokens_ptr, nth))
        slot, position, batch_row = token.slot.to(tl.int64), token.position, token.batch_row
        tiles = WINDOW_TILES
        visible = 0
        if A.ENTRIES:
            visible = (position + 1) // A.RATIO
            count = visible
            if not A.ALL:
                count = tl.where(visible > 0, indices_count, 0)
            tiles += (count + A.BLOCK_N - 1) // A.BLOCK_N
        splits = (tiles + A.SPLIT_TILES - 1) // A.SPLIT_TILES
        if slot < 0:
            splits = 0
        last = splits
        if parallel != 0:
            last = tl.minimum(splits, first + 1)
        head = item % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
        # a row of the window: the ring's, or where a chunk's rows are staged
        window_page = window_arena + slot * window_bytes
        shift = 0
        newest = position
        oldest = 0
        if A.STAGED:
            window_page = window_arena
            live = slot >= 0
            request = load_request(request_at(batch_ptr, batch_row), live, 0)
            shift = staged_row(request.first_row, request.start, batch_row, 0, A.WINDOW)
            if A.JOINT:
                newest = request.start + request.count - 1
            if A.CUT:
                oldest = request.start
        for split in tl.range(first, last, disable_licm=True):
            row = nth.to(tl.int64)
            query = _Query(row=q_ptr + row * q_stride, head=head, newest=newest, visible=visible)
            window = _Window(
                page=window_page, data=window_data, scale=window_scale, shift=shift, oldest=oldest
            )
            entries = _Entries(
                arena=entry_arena,
                block_bytes=entry_bytes,
                data=entry_data,
                scale=entry_scale,
                table_row=table_ptr + slot * table_stride,
                indices_row=indices_ptr + row * indices_stride,
                indices_count=indices_count,
            )
            begin = split * A.SPLIT_TILES
            end = tl.minimum(tiles, (split + 1) * A.SPLIT_TILES)
            sums = _attend_split(begin, end, query, window, entries, A)
            out = _Out(
                row=out_ptr + row * out_stride,
                lse_row=lse_ptr + row * lse_stride,
                sink=sink_ptr,
                rope_row=rope_ptr + position.to(tl.int64) * A.ROPE,
                head=head,
            )
            # Where SPLITS is 1, the end is not inside a branch: Triton 3.6 fails on an `if` without
            # `else` after products in tensor memory.
            if SPLITS == 1 or splits == 1:
                _finish(sums, out, A)
            else:
                places = workspace_ptr + A.COUNTERS
                if parallel != 0:
                    _park(unit, sums, places, A)
                    tl.debug_barrier()
                    counter = workspace_ptr.to(tl.pointer_type(tl.int32)) + item
                    if tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1:
                        tl.store(counter, 0)
                        _merge(item * SPLITS, splits, True, places, out, A)
                        _turn_back(out, A)
                else:
                    _park(2 * program + tl.minimum(split, 1), sums, places, A)
                    tl.debug_barrier()
                    if split > 0:
                        done = split == splits - 1
                        _merge(2 * program, 2, done, places, out, A)
                        if done:
                            _turn_back(out, A)
                    tl.debug_barrier()


@triton.jit
def _attend_split(tile, end, query, window, entries, A: tl.constexpr):
    """The sums of a query over its tiles [tile, end), starting from zero."""
    BLOCK_H: tl.constexpr = A.BLOCK_H
    SPANS: tl.constexpr = A.SPANS
    BLOCK_N: tl.constexpr = A.BLOCK_N
    WINDOW_TILES: tl.constexpr = (A.WINDOW + BLOCK_N - 1) // BLOCK_N
    WINDOW_RECORD: tl.constexpr = A.WINDOW_RECORD
    ENTRY_RECORD: tl.constexpr = A.ENTRY_RECORD
    WINDOW_STAGES: tl.constexpr = A.WINDOW_STAGES
    ENTRY_STAGES: tl.constexpr = A.ENTRY_STAGES
    nth = tl.arange(0, BLOCK_N)  # [keys]
    q = ()  # of each span [heads, channels]
    acc = ()
    for span in tl.static_range(0, SPANS):
        at = query.row + query.head[:, None] * A.WIDTH + _channels(span, A)
        q = _with(q, load_bf16(at, (query.head < A.HEADS)[:, None]))
        acc = _with(acc, _zeros(BLOCK_H, A.SPAN_WIDTHS[span]))
    top = tl.full([BLOCK_H], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    sums = _Sums(acc=acc, top=top, total=total)
    for at in tl.range(
        tile, tl.minimum(end, WINDOW_TILES), num_stages=WINDOW_STAGES, disable_licm=True
    ):
        back = at * BLOCK_N + nth
        seen = query.newest - (A.WINDOW - 1) + back  # [keys] positions
        live = (back < A.WINDOW) & (seen >= window.oldest)
        row = (seen + window.shift if A.STAGED else seen % A.WINDOW_ROWS).to(tl.int64)
        data = window.page + window.data + row * WINDOW_RECORD.DATA_STRIDE
        scale = window.page + window.scale + row * WINDOW_RECORD.SCALE_STRIDE
        sums = _attend_tile(q, sums, data, scale, live, WINDOW_RECORD, A)
    if A.ENTRIES:
        for at in tl.range(
            tl.maximum(tile, WINDOW_TILES), end, num_stages=ENTRY_STAGES, disable_licm=True
        ):
            entry = (at - WINDOW_TILES) * BLOCK_N + nth  # [keys]
            if not A.ALL:
                listed = entry < entries.indices_count
                entry = tl.load(entries.indices_row + entry, mask=listed, other=-1)
            if A.RESOLVED:
                live = entry >= 0
                block_id = tl.where(live, entry // A.ENTRY_ROWS, 0).to(tl.int64)
            else:
                live = (entry >= 0) & (entry < query.visible)
                block_at = entries.table_row + entry // A.ENTRY_ROWS
                block_id = tl.load(block_at, mask=live, other=0).to(tl.int64)
            row = entry % A.ENTRY_ROWS
            page = entries.arena + block_id * entries.block_bytes
            data = page + entries.data + row * ENTRY_RECORD.DATA_STRIDE
            scale = page + entries.scale + row * ENTRY_RECORD.SCALE_STRIDE
            sums = _attend_tile(q, sums, data, scale, live, ENTRY_RECORD, A)
    return sums


@triton.jit
def _attend_tile(q, sums, data_ptrs, scale_ptrs, live, RECORD: tl.constexpr, A: tl.constexpr):
    """Adds one tile of keys to the sums. Rows that are not live are not read and weigh nothing."""
    BLOCK_H: tl.constexpr = A.BLOCK_H
    SPANS: tl.constexpr = A.SPANS
    BLOCK_N: tl.constexpr = A.BLOCK_N
    SCALE: tl.constexpr = A.WIDTH**-0.5 * _LOG2_E
    keys = ()  # of each span [keys, channels]
    logits = tl.zeros([BLOCK_H, BLOCK_N], dtype=tl.float32)  # [heads, keys]
    for span in tl.static_range(0, SPANS):
        k = load_record_span(
            data_ptrs, scale_ptrs, live, A.SPAN_STARTS[span], A.SPAN_WIDTHS[span], RECORD
        )
        keys = _with(keys, k)
    for span in tl.static_range(0, SPANS):
        logits = dot(q[span], tl.trans(keys[span]), logits)
    logits = tl.where(live[None, :], logits * SCALE, float("-inf"))
    highest = tl.maximum(sums.top, tl.max(logits, axis=1))  # [heads]
    base = tl.where(highest == float("-inf"), 0.0, highest)  # no key yet
    alpha = tl.exp2(sums.top - base)
    weight = tl.exp2(logits - base[:, None])  # [heads, keys]
    p = as_operand(weight)
    acc = ()
    for span in tl.static_range(0, SPANS):
        acc = _with(acc, dot(p, keys[span], sums.acc[span] * alpha[:, None]))
    return _Sums(acc=acc, top=highest, total=sums.total * alpha + tl.sum(weight, axis=1))


# Spans differ in width, so values that are cut into spans are tuples with a tensor per span, and
# loops over them are unrolled. The language needs a helper for each step of such a loop: to append
# to a tuple, and to turn a span's start and width into constants that can shape a range or tensor.


@triton.jit
def _with(items, one):
    """A tuple grown by one."""
    return items + (one,)  # noqa: RUF005 (Triton does not unpack)


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.zeros([ROWS, COLUMNS], dtype=tl.float32)


@triton.jit
def _channels(span: tl.constexpr, A: tl.constexpr):
    """The channels of a span, [1, channels]."""
    START: tl.constexpr = A.SPAN_STARTS[span]
    EXTENT: tl.constexpr = A.SPAN_WIDTHS[span]
    return (START + tl.arange(0, EXTENT))[None, :]


@triton.jit
def _parked(span: tl.constexpr, A: tl.constexpr):
    """Offsets of one span of parked sums, [heads, channels]; spans lie one after another."""
    BLOCK_H: tl.constexpr = A.BLOCK_H
    START: tl.constexpr = A.SPAN_STARTS[span]
    EXTENT: tl.constexpr = A.SPAN_WIDTHS[span]
    line = tl.arange(0, BLOCK_H)[:, None] * EXTENT
    return BLOCK_H * START + line + tl.arange(0, EXTENT)[None, :]


@triton.jit
def _place(nth, places, A: tl.constexpr):
    """A slot for parked sums in the workspace: BLOCK_H × WIDTH sums, then maxima, then totals."""
    return places + tl.cast(nth, tl.int64) * (A.BLOCK_H * (A.WIDTH + 2))


@triton.jit
def _park(nth, sums, places, A: tl.constexpr):
    BLOCK_H: tl.constexpr = A.BLOCK_H
    SPANS: tl.constexpr = A.SPANS
    place = _place(nth, places, A)
    line = place + BLOCK_H * A.WIDTH + tl.arange(0, BLOCK_H)
    tl.store(line, sums.top)
    tl.store(line + BLOCK_H, sums.total)
    for span in tl.static_range(0, SPANS):
        tl.store(place + _parked(span, A), sums.acc[span])


@triton.jit
def _merge(nth_place, count, done, places, out, A: tl.constexpr):
    """Merges `count` parked sums in their order: into the output if `done`, else into the first."""
    BLOCK_H: tl.constexpr = A.BLOCK_H
    SPANS: tl.constexpr = A.SPANS
    SIZE: tl.constexpr = A.BLOCK_H * (A.WIDTH + 2)
    first = _place(nth_place, places, A)
    line = first + BLOCK_H * A.WIDTH + tl.arange(0, BLOCK_H)  # [heads]
    top = tl.load(line, cache_modifier=".cg")
    total = tl.load(line + BLOCK_H, cache_modifier=".cg")
    for nth in tl.range(1, count, disable_licm=True):
        other = line + nth * SIZE
        top, old, new = _weights(top, tl.load(other, cache_modifier=".cg"))
        total = total * old + tl.load(other + BLOCK_H, cache_modifier=".cg") * new
    inverse = tl.zeros([BLOCK_H], dtype=tl.float32)
    if done:
        inverse = _close(top, total, out, A)
    for span in tl.static_range(0, SPANS):
        at = first + _parked(span, A)
        highest = tl.load(line, cache_modifier=".cg")  # [heads]
        summed = tl.load(at, cache_modifier=".cg")  # [heads, channels]
        for nth in tl.range(1, count, disable_licm=True):
            highest, old, new = _weights(highest, tl.load(line + nth * SIZE, cache_modifier=".cg"))
            more = tl.load(at + nth * SIZE, cache_modifier=".cg")
            summed = summed * old[:, None] + more * new[:, None]
        if done:
            _store(summed * inverse[:, None], span, out, A)
        else:
            tl.store(at, summed)
    if not done:
        tl.debug_barrier()  # every thread has read the old maxima
        tl.store(line, top)
        tl.store(line + BLOCK_H, total)


@triton.jit
def _weights(top, other):
    """The common maximum of two sums and the factors that bring both to it."""
    common = tl.maximum(top, other)
    base = tl.where(common == float("-inf"), 0.0, common)
    return common, tl.exp2(top - base), tl.exp2(other - base)


@triton.jit
def _finish(sums, out, A: tl.constexpr):
    """The result of a query that is one split."""
    SPANS: tl.constexpr = A.SPANS
    inverse = _close(sums.top, sums.total, out, A)
    for span in tl.static_range(0, SPANS):
        _store(sums.acc[span] * inverse[:, None], span, out, A)
    _turn_back(out, A)


@triton.jit
def _close(top, total, out, A: tl.constexpr):
    """Stores the lse and returns what the sums are multiplied by; the sink is included here."""
    live = out.head < A.HEADS
    tl.store(out.lse_row + out.head, (top + tl.log2(total)) * _LN_2, mask=live)
    sink = tl.load(out.sink + out.head, mask=live, other=0.0)
    base = tl.where(top == float("-inf"), 0.0, top)
    inverse = 1.0 / (total + tl.exp2(sink * _LOG2_E - base))
    return tl.where(total > 0, inverse, 0.0)


@triton.jit
def _store(x, span: tl.constexpr, out, A: tl.constexpr):
    """One span of the result, fp32 [heads, channels], as bf16 into the output."""
    at = out.head[:, None] * A.WIDTH + _channels(span, A)
    live = (out.head < A.HEADS)[:, None]
    if INTERPRETED:
        bits = out.row.to(tl.pointer_type(tl.uint16))
        tl.store(bits + at, bf16_bits(round_bf16(x)), mask=live)
    else:
        tl.store(out.row + at, x.to(tl.bfloat16), mask=live)


@triton.jit
def _turn_back(out, A: tl.constexpr):
    """Inverse RoPE of the last channels of the bf16 output, which this program has stored."""
    PAIRS: tl.constexpr = A.ROPE // 2
    if PAIRS > 0:
        tl.debug_barrier()
        pair = tl.arange(0, PAIRS)[None, :]
        cos = tl.load(out.rope_row + pair)
        sin = tl.load(out.rope_row + PAIRS + pair)
        words = out.row.to(tl.pointer_type(tl.uint32))
        at = words + out.head[:, None] * (A.WIDTH // 2) + (A.WIDTH - A.ROPE) // 2 + pair
        live = (out.head < A.HEADS)[:, None]
        both = tl.load(at, mask=live, other=0)  # [heads, pairs] of bf16
        even = (both << 16).to(tl.float32, bitcast=True)
        odd = (both & 0xFFFF0000).to(tl.float32, bitcast=True)
        low = round_bf16(even * cos + odd * sin).to(tl.uint32, bitcast=True) >> 16
        high = round_bf16(odd * cos - even * sin).to(tl.uint32, bitcast=True)
        tl.store(at, low | high, mask=live)
