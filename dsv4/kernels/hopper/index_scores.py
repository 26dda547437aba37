"""Indexer scores for Hopper: MXFP4 keys of 128 channels, and 64 heads (V4) or 32 (V4.1).

The same scores as index_scores.py, with work distributed in the same way. Codes and queries meet as
E4M3 numbers in the FP8 matrix instruction, whose 32 channels are exactly one span of a key
(channels that share a scale), and scales are applied in fp32:
  - An E2M1 code's bits, moved to the right places of a byte, are an E4M3 number: its value times
    2^-6. No arithmetic, and four codes at once.
  - Hopper keeps few bits of FP8 sums, but enough for one span of 32 products of E2M1 numbers
    (multiples of a quarter up to 36), so every span has a sum of its own that starts at 0.
  - Sums are scaled relative to the first span, and a key's score by that span's scale: rounding
    to bf16 commutes with powers of two. A first span 2^64 or more below the key's largest counts
    as if it were 2^64 below.
  - Queries must be E2M1 numbers times a power of two for each 32 channels, as
    prepare_index_queries leaves them. A head is scaled by a power of two that goes back into its
    weight. It is exact where the scales of a head lie within 2^14 of each other; channels farther
    below are off by at most 2^-18 of the head's largest.

A thread loads the words that it decodes, which are those that the matrix instruction takes from its
registers: the order of channels within a span is free. So keys never pass through shared memory,
two tiles are being loaded while one is computed, and no warp waits for another within a token.
Compiled only; tested on GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma_wait,
)

from dsv4.kernels.hopper.scores_common import (
    _BYTES,
    _HALF,
    _KEYS,
    _LANES,
    _OF_ENTRY,
    _OF_HALF,
    _OF_LANE,
    _OF_SPAN,
    _OF_WARP,
    _OPERAND,
    _QUERY,
    _SPAN,
    _SPANS,
    _VECTOR,
    _WARP_ENTRIES,
    _WARPS,
    _WIDTH,
    HEADS,
    KEYS,
    NUM_WARPS,
    SPAN,
    WIDTH,
    coded_query,
    decode,
    finish,
    lane_sums,
    load_spans,
    placed,
    span_dot,
)
from dsv4.kernels.index_scores import pieces, run_time_arguments
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_store import record_constants
from dsv4.kernels.rows import load_token, token_at
from dsv4.kernels.target import processors
from dsv4.ops.calls import Scoring

HEAD_COUNTS = (32, HEADS)
TILE = KEYS  # entries
MIN_TOKENS = 32
PROGRAMS_PER_PROCESSOR = 3
MAX_REGISTERS = 168


# Each product, in the upper half of a register, already is the fp32 number: the weights' lower
# halves are 0.
WEIGHTED_RELU = gl.constexpr("""
    {
    .reg .b32 pair, first;
    .reg .b16 low, high;
    cvt.rn.relu.bf16x2.f32 pair, $3, $2;
    mov.b32 {low, high}, pair;
    mov.b32 first, {low, low};
    mul.rn.bf16x2 $0, first, $4;
    mul.rn.bf16x2 $1, pair, $5;
    }
    """)
# Four scale bytes → the first one as a power of two, but at least 2^-64 of the largest; the others
# relative to that; the largest. Relative to the scale of a span of zeros, others would overflow.
POWERS = gl.constexpr("""
    {
    .reg .b32 a, b, c, d, x;
    shl.b32 a, $5, 23;
    and.b32 a, a, 0x7F800000;
    shl.b32 b, $5, 15;
    and.b32 b, b, 0x7F800000;
    shl.b32 c, $5, 7;
    and.b32 c, c, 0x7F800000;
    shr.u32 d, $5, 1;
    and.b32 d, d, 0x7F800000;
    max.s32 x, b, c;
    max.s32 x, x, d;
    max.s32 x, x, a;
    mov.b32 $4, x;
    sub.s32 x, x, 0x20000000;
    max.s32 a, a, x;
    mov.b32 $0, a;
    sub.s32 x, 0x3F800000, a;
    add.s32 b, b, x;
    max.s32 $1, b, 0;
    add.s32 c, c, x;
    max.s32 $2, c, 0;
    add.s32 d, d, x;
    max.s32 $3, d, 0;
    }
    """)
# A largest scale of 255 marks a NaN, and infinity times 0 is one.
FINISH = gl.constexpr(
    finish(
        second="$8",
        last="""selp.b32 y, $7, $6, second;
    mul.rn.f32 y, y, 0f00000000;
    fma.rn.f32 x, x, power, y;""",
    )
)


# Bundles are packed inside the kernel. Comments give the shapes of block values: [entries] are the
# entries of a tile.


class _Tokens(NamedTuple):
    """The tokens of a launch, and which of their entries are scored: at most `columns`, and none
    for tokens that see no more than `skip_visible`."""

    ptr: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    skip_visible: gl.tensor


class _Keys(NamedTuple):
    """Where block 0 has the codes and the scales of the first halves of a tile's entries."""

    codes: gl.tensor
    scales: gl.tensor
    block_bytes: gl.tensor


class _Token(NamedTuple):
    """One token: where its block ids are, `pages` of them, its query in shared memory, and where
    its scores go, `seen` of them."""

    table_row: gl.tensor
    pages: gl.tensor
    query: gl.shared_memory_descriptor
    weight: gl.tensor  # [heads]
    seen: gl.tensor
    scores_row: gl.tensor


class _Powers(NamedTuple):
    """Scales of keys as powers of two [entries]: the first span's, those of the other spans
    relative to it, and the largest."""

    first: gl.tensor
    second: gl.tensor
    third: gl.tensor
    fourth: gl.tensor
    largest: gl.tensor


def supports(call: Scoring) -> bool:
    """Whether this kernel supports these shapes and records: V4's and V4.1's."""
    page = call.keys.page
    record = record_constants(page.format)
    coded = (record.ELEMENT, record.SCALE, record.TILE, record.CODED)
    return (
        call.round_bf16
        and call.q.shape[1] in HEAD_COUNTS
        and call.q.shape[2] == WIDTH
        and call.q.stride(1) == WIDTH
        and coded == ("e2m1", "ue8m0", SPAN, WIDTH)
        and page.rows >= TILE // 2
        and page.rows & (page.rows - 1) == 0
    )


def index_scores(call: Scoring) -> None:
    """One launch per 256 tokens; only for what `supports` accepts."""
    for piece in pieces(call):
        index_scores_launch(piece, processors(call.q.device)).run()


def index_scores_launch(call: Scoring, processors: int) -> Launch:
    """The launch of a call that is one piece, on a GPU with this many processors."""
    rows, columns = call.scores.shape
    tiles = rows * triton.cdiv(columns, TILE)
    # starting a program costs as much as some tiles: at least two, once all processors have one
    useful = max(triton.cdiv(tiles, 2), min(tiles, processors))
    constants = {
        "TOKENS": max(MIN_TOKENS, triton.next_power_of_2(rows)),
        "RATIO": call.keys.ratio,
        "PAGE_ROWS": call.keys.page.rows,
        "HEADS": call.q.shape[1],
    }
    grid = (min(useful, processors * PROGRAMS_PER_PROCESSOR),)
    options = {"num_warps": NUM_WARPS, "maxnreg": MAX_REGISTERS, "enable_fp_fusion": True}
    arguments = run_time_arguments(call)
    return Launch(_index_scores_hopper_kernel, grid, arguments, constants, options)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _seen_columns(token, tokens, RATIO: gl.constexpr):
    """Slots of some tokens, and how many columns each has to fill."""
    live = token < tokens.rows
    slot, position, _, _ = load_token(token_at(tokens.ptr, token), live, -1)
    visible = (position + 1) // RATIO
    seen = gl.minimum(gl.maximum(visible, 0), tokens.columns)
    return slot, gl.where((slot >= 0) & (visible > tokens.skip_visible), seen, 0)


@gluon.jit
def _block_ids(tile, pages, table_row, PAGE_ROWS: gl.constexpr):
    """Blocks of a tile's warps; 0 from `pages` on, where the table may contain anything."""
    warp = gl.arange(0, _WARPS, layout=_OF_WARP)
    page = tile * _KEYS // PAGE_ROWS + warp * _WARP_ENTRIES // PAGE_ROWS
    return gl.load(table_row + page, mask=page < pages, other=0)


@gluon.jit
def _first_rows(arena, data_offset, scale_offset, PAGE_ROWS: gl.constexpr):
    """The pointers of _Keys: codes [warps, 1, entries, lanes, 1], scales [warps, 1, entries]."""
    warp = gl.arange(0, _WARPS, layout=_OF_WARP)[:, None, None]
    entry = gl.arange(0, _HALF, layout=_OF_ENTRY)[None, None, :]
    lane = gl.arange(0, _LANES, layout=_OF_LANE)[None, None, None, :, None]
    row = warp * _WARP_ENTRIES % PAGE_ROWS + entry
    codes = arena + data_offset + row[:, :, :, None, None] * _BYTES + lane * 4
    return codes, arena + scale_offset + row * _SPANS


@gluon.jit
def _distance(block_id, arena_stride):
    """Bytes from the start of the arena: one product where the compiler would use three."""
    return gl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [block_id, arena_stride], gl.int64, True, 1
    )


@gluon.jit
def _load_keys(tile, block_id, keys, PAGE_ROWS: gl.constexpr):
    """Codes and scales of a tile, including unseen ones of its pages: their scores are not
    written."""
    codes, scales = keys.codes, keys.scales
    distance = _distance(block_id, keys.block_bytes)[:, None, None]
    second = gl.arange(0, 2, layout=_OF_HALF)[None, :, None] * _HALF
    if PAGE_ROWS > _KEYS:
        page_row = tile * _KEYS % PAGE_ROWS
        codes += page_row * _BYTES
        scales += page_row * _SPANS
    source = (codes + distance[:, :, :, None, None]).to(gl.pointer_type(gl.int32), bitcast=True)
    source += second[:, :, :, None, None] * (_BYTES // 4)
    source += gl.arange(0, _SPANS, layout=_OF_SPAN)[None, None, None, None, :] * (_SPAN // 8)
    scale_source = (scales + distance).to(gl.pointer_type(gl.int32), bitcast=True) + second
    return gl.load(source), gl.load(scale_source)


@gluon.jit
def _powers(scales, HEADS: gl.constexpr):
    """Words of a key's four scales → _Powers."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    ENTRY: gl.constexpr = gl.SliceLayout(1, MMA)
    scales = gl.convert_layout(gl.reshape(scales, [_KEYS]), ENTRY, assert_trivial=True)
    first, second, third, fourth, largest = gl.inline_asm_elementwise(
        POWERS, "=&r,=&r,=&r,=&r,=&r,r", [scales], (gl.float32,) * 5, True, 1
    )
    return _Powers(first=first, second=second, third=third, fourth=fourth, largest=largest)


@gluon.jit
def _dots(k, query, powers):
    """Dot products [entries, heads] with a query, relative to the keys' first scales. While one
    span is multiplied, the one before is scaled."""
    dot = span_dot(k[0], query, 0)
    s = span_dot(k[1], query, 1)
    dot, s = warpgroup_mma_wait(0, deps=[dot, s])
    running = span_dot(k[2], query, 2)
    dot = gl.fma(s, gl.broadcast(powers.second[:, None], s)[0], dot)
    s, dot = warpgroup_mma_wait(0, deps=[running, dot])
    running = span_dot(k[3], query, 3)
    dot = gl.fma(s, gl.broadcast(powers.third[:, None], s)[0], dot)
    s, dot = warpgroup_mma_wait(0, deps=[running, dot])
    return gl.fma(s, gl.broadcast(powers.fourth[:, None], s)[0], dot)


@gluon.jit
def _write(dot, powers, tile, token):
    """Weights, adds and stores the dots [entries, heads] of a tile."""
    weight, dot = gl.broadcast(token.weight[None, :], dot)
    product = gl.inline_asm_elementwise(
        WEIGHTED_RELU, "=&r,=&r,f,f,r,r", [dot, weight], gl.float32, True, 2
    )
    x = lane_sums(product)
    second = gl.arange(0, _LANES, layout=gl.SliceLayout(0, x.type.layout)) // 2
    entries: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    first = gl.convert_layout(powers.first, entries, assert_trivial=True)
    first, x = gl.broadcast(first[:, None], x)
    largest = gl.convert_layout(powers.largest, entries, assert_trivial=True)
    largest, x = gl.broadcast(largest[:, None], x)
    second, x = gl.broadcast(second[None, :], x)
    x = gl.inline_asm_elementwise(
        FINISH, "=&r,=&r,f,f,f,f,f,f,r,r", [x, first, largest, second], gl.int32, True, 2
    )
    score, column, lane = placed(x)
    gl.store(
        token.scores_row + tile * _KEYS + column,
        score,
        mask=(column < token.seen - tile * _KEYS) & (lane % 2 == 0),
    )


@gluon.jit
def _load_query(q_row, weights_row, query):
    """Puts a query into shared memory as E4M3, and returns the weights that undo its powers and the
    codes' 2^-6."""
    HEADS: gl.constexpr = query.shape[0]
    HEAD: gl.constexpr = gl.SliceLayout(
        0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    )
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _QUERY))[:, None]
    channel = gl.arange(0, _SPAN, layout=gl.SliceLayout(0, _QUERY))[None, :]
    q = load_spans(q_row + head * _WIDTH + channel)
    weight = gl.load(weights_row + gl.arange(0, HEADS, layout=HEAD)).to(gl.float32)
    x, exponent, _ = coded_query(q, 8)  # below 8 the power would be infinite
    query.store(x.to(gl.float8e4nv, bitcast=True))
    fence_async_shared()
    power = ((exponent - 2) << 23).to(gl.float32, bitcast=True)
    weight *= gl.convert_layout(power, HEAD)
    return (weight.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)


@gluon.jit
def _score(tile, words, scales, block_id, token, keys, PAGE_ROWS: gl.constexpr):
    """Scores of a tile whose codes and scales have arrived; then starts loading the tile two
    further on, and the blocks of the one four further on."""
    HEADS: gl.constexpr = token.query.shape[0]
    powers = _powers(scales, HEADS)
    k = decode(words, HEADS)
    next_words, next_scales = _load_keys(tile + 2, block_id, keys, PAGE_ROWS)
    block_id = _block_ids(tile + 4, token.pages, token.table_row, PAGE_ROWS)
    dot = _dots(k, token.query, powers)
    _write(dot, powers, tile, token)
    return next_words, next_scales, block_id


@gluon.jit(do_not_specialize=["rows", "skip_visible"])
def _index_scores_hopper_kernel(
    q_ptr,
    weights_ptr,
    tokens_ptr,
    arena,
    table_ptr,
    scores_ptr,
    rows,
    columns,
    skip_visible,
    q_stride,
    q_head_stride,
    weights_stride,
    arena_stride,
    table_stride,
    scores_stride,
    data_offset,
    scale_offset,
    TOKENS: gl.constexpr,
    RATIO: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    HEADS: gl.constexpr,
):
    begin_program()
    # every warp knows all tokens
    LINE: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([TOKENS // 32, 1], [32, 1], [1, 4], [0, 1])
    )
    tokens = _Tokens(ptr=tokens_ptr, rows=rows, columns=columns, skip_visible=skip_visible)
    _, all_seen = _seen_columns(gl.arange(0, TOKENS, layout=LINE), tokens, RATIO)
    # running total of tiles over the tokens, each included; kept where it takes no registers
    ends = gl.associative_scan(gl.cdiv(all_seen, _KEYS)[:, None], 0, _add)
    ends = gl.convert_layout(gl.reshape(ends, [TOKENS]), LINE, assert_trivial=True)
    kept_ends = gl.allocate_shared_memory(gl.int32, [TOKENS], _VECTOR)
    kept_ends.store(ends)
    total = gl.max(ends, axis=0)
    # this program's share of all tiles, counted across the tokens: [at, stop)
    program, programs = gl.program_id(0), gl.num_programs(0)
    share = total // programs
    longer = total - share * programs
    at = program * share + gl.minimum(program, longer)
    stop = at + share + (program < longer).to(gl.int32)

    query = gl.allocate_shared_memory(gl.float8e4nv, [HEADS, _WIDTH], _OPERAND)
    codes, scales = _first_rows(arena, data_offset, scale_offset, PAGE_ROWS)
    keys = _Keys(codes=codes, scales=scales, block_bytes=arena_stride)
    while at < stop:
        ends = kept_ends.load(LINE)
        row = gl.sum((ends <= at).to(gl.int32), axis=0)
        begin = gl.max(gl.where(ends <= at, ends, 0), axis=0)
        end = gl.minimum(gl.min(gl.where(ends > at, ends, 0x7FFFFFFF), axis=0), stop)
        slot, seen = _seen_columns(row, tokens, RATIO)
        table_row = table_ptr + slot.to(gl.int64) * table_stride
        scores_row = scores_ptr + row.to(gl.int64) * scores_stride
        first = at - begin
        last = end - begin
        pages = gl.cdiv(gl.minimum(seen, last * _KEYS), PAGE_ROWS)
        # keys first, then the query: they are loaded at the same time
        id0 = _block_ids(first, pages, table_row, PAGE_ROWS)
        id1 = _block_ids(first + 1, pages, table_row, PAGE_ROWS)
        words0, scales0 = _load_keys(first, id0, keys, PAGE_ROWS)
        words1, scales1 = _load_keys(first + 1, id1, keys, PAGE_ROWS)
        id0 = _block_ids(first + 2, pages, table_row, PAGE_ROWS)
        id1 = _block_ids(first + 3, pages, table_row, PAGE_ROWS)
        weight = _load_query(
            q_ptr + row.to(gl.int64) * q_stride,
            weights_ptr + row.to(gl.int64) * weights_stride,
            query,
        )
        token = _Token(
            table_row=table_row,
            pages=pages,
            query=query,
            weight=weight,
            seen=seen,
            scores_row=scores_row,
        )
        # two tiles per iteration, so that keys which have arrived stay in their registers
        for tile in range(first, last, 2):
            words0, scales0, id0 = _score(tile, words0, scales0, id0, token, keys, PAGE_ROWS)
            if tile + 1 < last:
                words1, scales1, id1 = _score(
                    tile + 1, words1, scales1, id1, token, keys, PAGE_ROWS
                )
        at = end
