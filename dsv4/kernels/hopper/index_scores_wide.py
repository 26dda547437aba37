"""Indexer scores of many tokens for Hopper: a key is decoded once for a whole band of tokens.

The same scores as index_scores.py, bit for bit, in two launches.

    prepare    queries become E4M3 numbers once, not once per program
    score      a program per band of tokens and tile of entries: three warpgroups hold 64 keys each
               in the registers that the matrix instruction takes, and a warp loads the queries

While one token is multiplied, the one before is weighed and added up. The scales of a key's spans
are folded into its E4M3 numbers, so that one sum over all channels is enough. Hopper keeps 14 bits
of such sums. Every product is a multiple of its key's smallest unit times its query's, and no
partial sum exceeds the product of their lengths (Cauchy and Schwarz): where that is at most 2^14
units, nothing is lost. Elsewhere each span has a sum of its own, as in index_scores.py.

The tokens of a band need not belong to one request: a program handles one run of neighbours of the
same request after another. Compiled only; tested on GPUs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.hopper import index_scores as narrow
from dsv4.kernels.hopper.attend_keys import next_stage
from dsv4.kernels.hopper.dialect import async_load
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
    coded_query,
    decode,
    finish,
    lane_sums,
    load_spans,
    placed,
    span_dot,
)
from dsv4.kernels.index_scores import WEIGHTED_RELU
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import load_token, token_at
from dsv4.kernels.sizes import WIDE_GROUP as GROUP
from dsv4.kernels.sizes import WIDE_MIN_TOKENS as MIN_TOKENS
from dsv4.kernels.sizes import WIDE_QUERY_BYTES as QUERY_BYTES
from dsv4.kernels.sizes import WIDE_TOKEN_BYTES as TOKEN_BYTES
from dsv4.kernels.sizes import wide_score_bytes as workspace_bytes
from dsv4.ops.calls import Scoring

CONSUMERS = 3
TILE = CONSUMERS * KEYS
BAND = 128  # tokens
STAGES = 4
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 152, 40
EXACT_UNITS = 2.0**14

_PROGRAM_KEYS = gl.constexpr(TILE)
_BAND = gl.constexpr(BAND)
_GROUP = gl.constexpr(GROUP)
_PLACES = gl.constexpr(STAGES * GROUP)  # tokens in shared memory
_STAGES = gl.constexpr(STAGES)
_CONSUMERS = gl.constexpr(CONSUMERS)
_CONSUMER_REGISTERS = gl.constexpr(CONSUMER_REGISTERS)
_PRODUCER_REGISTERS = gl.constexpr(PRODUCER_REGISTERS)
_EXACT_UNITS = gl.constexpr(EXACT_UNITS)
_NONE = gl.constexpr(0x7FFFFFFF)

_BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
_ROWS = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
# the producer is one warp
_COPY = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [1, 1], [1, 0]))
_COPY_WEIGHTS = gl.constexpr(gl.BlockedLayout([2], [32], [1], [0]))
# every warp knows all tokens of a band
_LINE = gl.constexpr(
    gl.SliceLayout(1, gl.BlockedLayout([BAND // 32, 1], [32, 1], [1, NUM_WARPS], [0, 1]))
)
_PRODUCER_LINE = gl.constexpr(
    gl.SliceLayout(1, gl.BlockedLayout([BAND // 32, 1], [32, 1], [1, 1], [0, 1]))
)
# Where a key has a NaN its power is one.
FINISH = gl.constexpr(finish(second="$6", last="fma.rn.f32 x, x, power, 0f00000000;"))

# FINISH of the four tokens of a group at once. The sums are $8 + 4 * entry + 2 * (token % 2) +
# token // 2. Of the eight a lane goes on with two: those of the entry that $24 names, and of token
# 0 or 1 and of token 2 or 3, as $32 says.
FINISH_GROUP = gl.constexpr("""
    {
    .reg .pred second, odd;
    .reg .b32 x0, x1, x2, x3, y0, y1, y2, y3, power;
    setp.ne.u32 second, $24, 0;
    setp.ne.u32 odd, $32, 0;
    selp.b32 x0, $12, $8, second;
    selp.b32 y0, $8, $12, second;
    selp.b32 x2, $13, $9, second;
    selp.b32 y2, $9, $13, second;
    selp.b32 x1, $14, $10, second;
    selp.b32 y1, $10, $14, second;
    selp.b32 x3, $15, $11, second;
    selp.b32 y3, $11, $15, second;
    shfl.sync.bfly.b32 y0, y0, 2, 31, -1;
    shfl.sync.bfly.b32 y1, y1, 2, 31, -1;
    shfl.sync.bfly.b32 y2, y2, 2, 31, -1;
    shfl.sync.bfly.b32 y3, y3, 2, 31, -1;
    add.rn.f32 x0, x0, y0;
    add.rn.f32 x1, x1, y1;
    add.rn.f32 x2, x2, y2;
    add.rn.f32 x3, x3, y3;
    selp.b32 y0, x0, x1, odd;
    selp.b32 x0, x1, x0, odd;
    selp.b32 y2, x2, x3, odd;
    selp.b32 x2, x3, x2, odd;
    shfl.sync.bfly.b32 y0, y0, 1, 31, -1;
    shfl.sync.bfly.b32 y2, y2, 1, 31, -1;
    add.rn.f32 x0, x0, y0;
    add.rn.f32 x2, x2, y2;
    selp.b32 power, $20, $16, second;
    fma.rn.f32 x0, x0, power, 0f00000000;
    fma.rn.f32 x2, x2, power, 0f00000000;
    cvt.rn.bf16x2.f32 x0, x0, 0f00000000;
    cvt.rn.bf16x2.f32 x2, x2, 0f00000000;
    min.s32 $0, x0, 0x7FC00000;
    min.s32 $1, x2, 0x7FC00000;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
    mov.b32 $4, 0;
    mov.b32 $5, 0;
    mov.b32 $6, 0;
    mov.b32 $7, 0;
    }
    """)
_GROUP_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["f"] * 16 + ["r"] * 16))


class _Tokens(NamedTuple):
    """The tokens of a launch, the band and the first entry of a program."""

    ptr: gl.tensor
    rows: gl.tensor
    columns: gl.tensor
    skip_visible: gl.tensor
    band: gl.tensor
    begin: gl.tensor


class _Line(NamedTuple):
    """The tokens of a band: their rows, their slots, and how many entries each sees."""

    row: gl.tensor
    slot: gl.tensor
    seen: gl.tensor


class _Run(NamedTuple):
    """Neighbouring tokens [first, stop) of one request that see entries of the tile; `seen` is the
    most entries that one of them sees. `first` is _NONE after the last run of a band."""

    first: gl.tensor
    stop: gl.tensor
    slot: gl.tensor
    seen: gl.tensor


class _Keys(NamedTuple):
    """Where keys are: byte offsets in a block."""

    arena: gl.tensor
    table: gl.tensor
    block_bytes: gl.tensor
    table_stride: gl.tensor
    data: gl.tensor
    scale: gl.tensor


class _Queries(NamedTuple):
    """Prepared queries in global memory, and in shared memory those of some groups of tokens with
    their weights. A group that extends past the end of a run holds whatever follows there."""

    ptr: gl.tensor
    weights_ptr: gl.tensor
    lengths: gl.tensor
    codes: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


class _Scores(NamedTuple):
    ptr: gl.tensor
    stride: gl.tensor


class _Block(NamedTuple):
    """Keys as E4M3 numbers relative to their largest scale `power`, as a whole and span by span. A
    span more than 2^14 below that has yet to be multiplied by its `rest`. `length` is that of the
    longest key in units of its own, infinite where one sum is not enough."""

    whole: gl.tensor
    k0: gl.tensor
    k1: gl.tensor
    k2: gl.tensor
    k3: gl.tensor
    rest0: gl.tensor  # [keys]
    rest1: gl.tensor
    rest2: gl.tensor
    rest3: gl.tensor
    power: gl.tensor  # [keys]
    length: gl.tensor


def supports(call: Scoring) -> bool:
    """Whether this kernel supports these shapes and records, and there are enough tokens for it."""
    given = 0 if call.workspace is None else call.workspace.numel()
    return (
        call.tokens_per_request >= MIN_TOKENS
        and given >= workspace_bytes(call.q.shape[0])
        and narrow.supports(call)
    )


def index_scores(call: Scoring) -> None:
    """Two launches, whatever the number of tokens; only for what `supports` accepts."""
    assert call.workspace is not None
    space = prepared(call.workspace, call.q.shape[0])
    prepare_launch(call, *space).run()
    score_launch(call, *space).run()


def prepared(workspace: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where queries, weights and lengths of this many tokens lie."""
    rows = tokens + GROUP
    queries, weights, lengths = workspace[: rows * TOKEN_BYTES].split(
        [rows * QUERY_BYTES, rows * 2 * HEADS, rows * 4]
    )
    return queries, weights.view(torch.bfloat16), lengths.view(torch.float32)


def prepare_launch(call: Scoring, queries: Tensor, weights: Tensor, lengths: Tensor) -> Launch:
    arguments = (
        call.q,
        call.weights,
        queries,
        weights,
        lengths,
        call.q.stride(0),
        call.weights.stride(0),
    )
    return Launch(
        _prepare_kernel,
        (call.q.shape[0],),
        arguments,
        {"HEADS": call.q.shape[1]},
        {"num_warps": NUM_WARPS, "enable_fp_fusion": True},
    )


def score_launch(call: Scoring, queries: Tensor, weights: Tensor, lengths: Tensor) -> Launch:
    rows, columns = call.scores.shape
    keys = call.keys
    arguments = (
        queries,
        weights,
        lengths,
        call.tokens,
        keys.arena,
        keys.block_table,
        call.scores,
        rows,
        columns,
        call.skip_visible,
        keys.arena.stride(0),
        keys.block_table.stride(0),
        call.scores.stride(0),
        keys.page.offset_bytes,
        keys.page.scale_offset_bytes,
    )
    grid = (triton.cdiv(columns, TILE), triton.cdiv(rows, BAND))
    constants = {"RATIO": keys.ratio, "PAGE_ROWS": keys.page.rows, "HEADS": call.q.shape[1]}
    return Launch(
        _score_wide_kernel,
        grid,
        arguments,
        constants,
        {"num_warps": NUM_WARPS, "launch_pdl": False, "enable_fp_fusion": True},
    )


# ---- queries ---------------------------------------------------------------------------------


@gluon.jit
def _unit(q):
    """The exponents, as bf16 has them, of the lowest bits of numbers with at most two bits; a large
    one for 0. [heads]"""
    bits = q.to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF
    exponent = (bits >> 7) - ((bits >> 6) & 1)
    return gl.min(gl.where(bits == 0, 0x7FFF, exponent), axis=1)


@gluon.jit
def _prepare_kernel(
    q_ptr,
    weights_ptr,
    queries_ptr,
    query_weights_ptr,
    lengths_ptr,
    q_stride,
    weights_stride,
    HEADS: gl.constexpr,
):
    """One token: each head's largest value from 256 to 384, as in index_scores.py."""
    begin_program()
    row = gl.program_id(0).to(gl.int64)
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _QUERY))
    channel = gl.arange(0, _SPAN, layout=gl.SliceLayout(0, _QUERY))[None, :]
    q0, q1, q2, q3 = load_spans(q_ptr + row * q_stride + head[:, None] * _WIDTH + channel)
    weight = gl.load(weights_ptr + row * weights_stride + head).to(gl.float32)
    # below 15 the power of the weights would be zero
    x, exponent, power = coded_query((q0, q1, q2, q3), 15)
    to_head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _ROWS))[:, None]
    to_channel = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, _ROWS))[None, :]
    place = queries_ptr + row * (HEADS * _WIDTH) + to_head * _WIDTH + to_channel
    gl.store(place, gl.convert_layout(x, _ROWS))
    # the longest head in units of its own
    unit = gl.minimum(gl.minimum(_unit(q0), _unit(q1)), gl.minimum(_unit(q2), _unit(q3)))
    f0, f1 = q0.to(gl.float32) * power, q1.to(gl.float32) * power
    f2, f3 = q2.to(gl.float32) * power, q3.to(gl.float32) * power
    squares = gl.sum(f0 * f0 + f1 * f1 + f2 * f2 + f3 * f3, axis=1)
    length = gl.sqrt(squares) * gl.exp2((exponent - unit - 8).to(gl.float32))
    coded = (exponent - unit <= 15) & (exponent < 255)  # E4M3 keeps all its bits
    length = gl.where(unit == 0x7FFF, 0.0, gl.where(coded, length, float("inf")))
    gl.store(lengths_ptr + row, gl.max(length, axis=0) * 1.001)
    # undoes what queries were multiplied by, and the keys' 2^6
    weight *= ((exponent - 14) << 23).to(gl.float32, bitcast=True)
    weight = (weight.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)
    gl.store(query_weights_ptr + row * HEADS + head, weight.to(gl.bfloat16))


# ---- tokens ----------------------------------------------------------------------------------


@gluon.jit
def _line_of(tokens, LAYOUT: gl.constexpr, RATIO: gl.constexpr):
    row = tokens.band + gl.arange(0, _BAND, layout=LAYOUT)
    slot, position, _, _ = load_token(token_at(tokens.ptr, row), row < tokens.rows, -1)
    visible = (position + 1) // RATIO
    shown = (slot >= 0) & (visible > tokens.skip_visible)
    return _Line(row=row, slot=slot, seen=gl.where(shown, gl.minimum(visible, tokens.columns), 0))


@gluon.jit
def _next_run(line, tokens, begin):
    """The first run from row `begin` on."""
    wanted = (line.row >= begin) & (line.seen > tokens.begin)
    first = gl.min(gl.where(wanted, line.row, _NONE), axis=0)
    slot = gl.load(token_at(tokens.ptr, first), mask=first < _NONE, other=-1)
    other = (line.row > first) & ((line.slot != slot) | (wanted == 0))
    stop = gl.min(gl.where(other, line.row, _NONE), axis=0)
    stop = gl.minimum(stop, gl.minimum(tokens.band + _BAND, tokens.rows))
    seen = gl.max(gl.where((line.row >= first) & (line.row < stop), line.seen, 0), axis=0)
    return _Run(first=first, stop=stop, slot=slot, seen=seen)


@gluon.jit
def _left(row, stop, tokens, begin, RATIO: gl.constexpr):
    """How many entries from `begin` on a token sees; none after the run."""
    position = gl.load(token_at(tokens.ptr, row) + 1, mask=row < stop, other=-1)
    return gl.minimum((position + 1) // RATIO, tokens.columns) - begin


# ---- the producer ----------------------------------------------------------------------------


@gluon.jit
def _send(queries, place, row):
    HEADS: gl.constexpr = queries.codes.shape[1]
    head = gl.arange(0, HEADS, layout=gl.SliceLayout(1, _COPY))[:, None]
    channel = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, _COPY))[None, :]
    at = queries.ptr + row.to(gl.int64) * (HEADS * _WIDTH) + head * _WIDTH + channel
    async_load(queries.codes.index(place), at.to(gl.pointer_type(gl.float8e4nv), bitcast=True))
    column = gl.arange(0, HEADS, layout=_COPY_WEIGHTS)
    async_load(
        queries.weights.index(place), queries.weights_ptr + row.to(gl.int64) * HEADS + column
    )


@gluon.jit
def _produce(queries, tokens, RATIO: gl.constexpr):
    """The groups of all runs pass through the stages one after another, several at a time."""
    AHEAD: gl.constexpr = _STAGES // 2
    line = _line_of(tokens, _PRODUCER_LINE, RATIO)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    ready = gl.to_tensor(0)
    run = _next_run(line, tokens, tokens.band)
    while run.first < _NONE:
        groups = (run.stop - run.first + _GROUP - 1) // _GROUP
        for nth in range(0, groups + AHEAD):
            if nth < groups:
                mbarrier.wait(queries.free.index(stage), phase)
                for token in gl.static_range(_GROUP):
                    row = run.first + nth * _GROUP + token
                    _send(queries, stage * _GROUP + token, row)
                stage, phase = next_stage(stage, phase, _STAGES)
            async_copy.commit_group()
            async_copy.wait_group(AHEAD)
            if nth >= AHEAD:
                fence_async_shared()
                mbarrier.arrive(queries.ready.index(ready), count=1)
                ready = gl.where(ready == _STAGES - 1, 0, ready + 1)
        run = _next_run(line, tokens, run.stop)


# ---- keys ------------------------------------------------------------------------------------


@gluon.jit
def _load_block(begin, run, keys, PAGE_ROWS: gl.constexpr, HEADS: gl.constexpr):
    """The keys of the entries from `begin` on; block 0 replaces pages that are not seen."""
    warp = gl.arange(0, _WARPS, layout=_OF_WARP)
    half = gl.arange(0, 2, layout=_OF_HALF)[None, :, None]
    entry = gl.arange(0, _HALF, layout=_OF_ENTRY)[None, None, :]
    lane = gl.arange(0, _LANES, layout=_OF_LANE)[None, None, None, :, None]
    span = gl.arange(0, _SPANS, layout=_OF_SPAN)[None, None, None, None, :]
    first = begin + warp * _WARP_ENTRIES
    page = first // PAGE_ROWS
    table_row = keys.table + run.slot.to(gl.int64) * keys.table_stride
    seen_pages = (run.seen + PAGE_ROWS - 1) // PAGE_ROWS
    block_id = gl.load(table_row + page, mask=page < seen_pages, other=0)
    block = (keys.arena + block_id.to(gl.int64) * keys.block_bytes)[:, None, None]
    row = (first % PAGE_ROWS)[:, None, None] + half * _HALF + entry
    at = (block + keys.data + row * _BYTES)[:, :, :, None, None] + lane * 4 + span * (_SPAN // 2)
    words = gl.load(at.to(gl.pointer_type(gl.int32), bitcast=True))
    scale_at = block + keys.scale + row * _SPANS
    scales = gl.load(scale_at.to(gl.pointer_type(gl.int32), bitcast=True))
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    ENTRY: gl.constexpr = gl.SliceLayout(1, MMA)
    scales = gl.convert_layout(gl.reshape(scales, [_KEYS]), ENTRY, assert_trivial=True)
    return _folded_block(decode(words, HEADS), scales)


@gluon.jit
def _folded_block(k, scales):
    s0 = scales & 0xFF
    s1 = (scales >> 8) & 0xFF
    s2 = (scales >> 16) & 0xFF
    s3 = (scales >> 24) & 0xFF
    f0, f1 = k[0].to(gl.float32), k[1].to(gl.float32)
    f2, f3 = k[2].to(gl.float32), k[3].to(gl.float32)
    ENTRY: gl.constexpr = scales.type.layout
    n0, n1, n2, n3 = (
        _squares(f0, ENTRY),
        _squares(f1, ENTRY),
        _squares(f2, ENTRY),
        _squares(f3, ENTRY),
    )
    # a span of zeros has no scale
    top = gl.maximum(
        gl.maximum(gl.where(n0 > 0, s0, 0), gl.where(n1 > 0, s1, 0)),
        gl.maximum(gl.where(n2 > 0, s2, 0), gl.where(n3 > 0, s3, 0)),
    )
    low = gl.minimum(
        gl.minimum(gl.where(n0 > 0, s0, 255), gl.where(n1 > 0, s1, 255)),
        gl.minimum(gl.where(n2 > 0, s2, 255), gl.where(n3 > 0, s3, 255)),
    )
    low = gl.minimum(low, top)
    squares = (
        n0 * _square_of_power(s0 - low)
        + n1 * _square_of_power(s1 - low)
        + n2 * _square_of_power(s2 - low)
        + n3 * _square_of_power(s3 - low)
    )
    # codes stand for 2^-6 of their values, and half of the lowest scale is a unit
    length = gl.sqrt(squares) * 128.0
    nan = gl.maximum(gl.maximum(s0, s1), gl.maximum(s2, s3)) == 255
    length = gl.where(nan | (top - low > 14), float("inf"), length)
    k0 = _folded(f0, s0 - top)
    k1 = _folded(f1, s1 - top)
    k2 = _folded(f2, s2 - top)
    k3 = _folded(f3, s3 - top)
    return _Block(
        whole=_joined(k0, k1, k2, k3),
        k0=k0,
        k1=k1,
        k2=k2,
        k3=k3,
        rest0=_rest(s0 - top),
        rest1=_rest(s1 - top),
        rest2=_rest(s2 - top),
        rest3=_rest(s3 - top),
        power=gl.where(nan, float("nan"), (top << 23).to(gl.float32, bitcast=True)),
        length=gl.max(length, axis=0),
    )


@gluon.jit
def _squares(f, ENTRY: gl.constexpr):
    return gl.convert_layout(gl.sum(f * f, axis=1), ENTRY)


@gluon.jit
def _square_of_power(n):
    return ((127 + 2 * gl.minimum(gl.maximum(n, 0), 40)) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _folded(f, below):
    """2^6 times the values, relative to the largest scale, or to 2^-14 of it."""
    shift = gl.minimum(gl.maximum(below, -14), 0)
    power = ((127 + 12 + shift) << 23).to(gl.float32, bitcast=True)
    return (f * gl.convert_layout(power, gl.SliceLayout(1, f.type.layout))[:, None]).to(
        gl.float8e4nv
    )


@gluon.jit
def _rest(below):
    return ((127 + gl.minimum(gl.maximum(below + 14, -126), 0)) << 23).to(gl.float32, bitcast=True)


# ---- scores ----------------------------------------------------------------------------------


@gluon.jit
def _weight(queries, place):
    HEADS: gl.constexpr = queries.codes.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    return queries.weights.index(place).load(gl.SliceLayout(0, MMA))


@gluon.jit
def _one_sum(block, query):
    """Starts the dots [keys, heads] with a token as one sum."""
    HEADS: gl.constexpr = query.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    none = gl.full([_KEYS, HEADS], 0.0, gl.float32, MMA)
    return warpgroup_mma(block.whole, query.permute((1, 0)), none, use_acc=False, is_async=True)


@gluon.jit
def _joined(k0, k1, k2, k3):
    """Spans side by side."""
    KEY: gl.constexpr = k0.type.layout
    x = gl.join(gl.join(k0, k1), gl.join(k2, k3))
    x = gl.reshape(gl.permute(x, (0, 3, 2, 1)), [_KEYS, _WIDTH])
    return gl.convert_layout(x, KEY, assert_trivial=True)


@gluon.jit
def _four_sums(block, query):
    """The dots [keys, heads] with a token, each span by itself."""
    dot = warpgroup_mma_wait(0, deps=[span_dot(block.k0, query, 0)])
    dot = dot * gl.broadcast(block.rest0[:, None], dot)[0]
    s = warpgroup_mma_wait(0, deps=[span_dot(block.k1, query, 1)])
    dot = gl.fma(s, gl.broadcast(block.rest1[:, None], s)[0], dot)
    s = warpgroup_mma_wait(0, deps=[span_dot(block.k2, query, 2)])
    dot = gl.fma(s, gl.broadcast(block.rest2[:, None], s)[0], dot)
    s = warpgroup_mma_wait(0, deps=[span_dot(block.k3, query, 3)])
    return gl.fma(s, gl.broadcast(block.rest3[:, None], s)[0], dot)


@gluon.jit
def _weighed(dot, weight):
    """Weighs and adds up the dots [keys, heads] of a token: [keys, lanes]. Not pure, or the
    compiler would move it after the next wait. One product for two dots, as in the portable kernel:
    Hopper multiplies bf16 at half of the rate of the instructions that separate the pairs."""
    weight, dot = gl.broadcast(weight[None, :], dot)
    product = gl.inline_asm_elementwise(
        WEIGHTED_RELU, "=&r,=&r,f,f,r", [dot, weight], gl.float32, False, 2
    )
    return lane_sums(product)


@gluon.jit
def _write_group(x0, x1, x2, x3, power, scores, stride, left0, left1, left2, left3):
    """Adds up the lanes of four tokens and stores their scores."""
    x = gl.join(gl.join(x0, x1), gl.join(x2, x3))  # [keys, lanes, token % 2, token // 2]
    layout: gl.constexpr = x.type.layout
    of_key: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    of_lane: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    power = gl.convert_layout(power, of_key, assert_trivial=True)
    power, x = gl.broadcast(power[:, None][:, :, None][:, :, :, None], x)
    lane = gl.arange(0, _LANES, layout=of_lane)
    second, x = gl.broadcast((lane // 2)[None, :][:, :, None][:, :, :, None], x)
    odd, x = gl.broadcast((lane % 2)[None, :][:, :, None][:, :, :, None], x)
    x = gl.inline_asm_elementwise(
        FINISH_GROUP, _GROUP_CONSTRAINTS, [x, power, second, odd], gl.int32, False, 8
    )
    first, then = gl.split(x)
    _store_pair(first, scores, stride, left0, left1)
    _store_pair(then, scores + 2 * stride, stride, left2, left3)


@gluon.jit
def _store_pair(x, scores, stride, left0, left1):
    """Stores scores of two tokens: a lane has those of one of two entries and of one of the two."""
    x, _ = gl.split(x)
    score, column, lane = placed(x)
    odd = lane % 2
    left = gl.where(odd == 0, left0, left1)
    gl.store(scores + (odd * stride + column), score, mask=column < left)


@gluon.jit
def _write(dot, power, weight, scores, left):
    """Weighs, adds and stores the dots [keys, heads] of a token."""
    x = _weighed(dot, weight)
    second = gl.arange(0, _LANES, layout=gl.SliceLayout(0, x.type.layout)) // 2
    power = gl.convert_layout(power, gl.SliceLayout(1, x.type.layout), assert_trivial=True)
    power, x = gl.broadcast(power[:, None], x)
    second, x = gl.broadcast(second[None, :], x)
    x = gl.inline_asm_elementwise(
        FINISH, "=&r,=&r,f,f,f,f,r,r", [x, power, second], gl.int32, False, 2
    )
    score, column, lane = placed(x)
    gl.store(scores + column, score, mask=(column < left) & (lane % 2 == 0))


@gluon.jit
def _consume(
    queries,
    tokens,
    keys,
    scores,
    RATIO: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    NTH: gl.constexpr,
):
    """Scores of all runs for the keys of one warpgroup."""
    line = _line_of(tokens, _LINE, RATIO)
    begin = tokens.begin + NTH * _KEYS
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    run = _next_run(line, tokens, tokens.band)
    while run.first < _NONE:
        block = _load_block(begin, run, keys, PAGE_ROWS, queries.codes.shape[1])
        mine = (line.row >= run.first) & (line.row < run.stop)
        length = gl.max(gl.load(queries.lengths + line.row, mask=mine, other=0.0), axis=0)
        out = scores.ptr + run.first.to(gl.int64) * scores.stride + begin
        if length * block.length <= _EXACT_UNITS:
            for row in range(run.first, run.stop, _GROUP):
                place = stage * _GROUP
                mbarrier.wait(queries.ready.index(stage), phase)
                dot0 = _one_sum(block, queries.codes.index(place))
                left0 = _left(row, run.stop, tokens, begin, RATIO)
                left1 = _left(row + 1, run.stop, tokens, begin, RATIO)
                left2 = _left(row + 2, run.stop, tokens, begin, RATIO)
                left3 = _left(row + 3, run.stop, tokens, begin, RATIO)
                dot1 = _one_sum(block, queries.codes.index(place + 1))
                dot0 = warpgroup_mma_wait(1, deps=[dot0])
                x0 = _weighed(dot0, _weight(queries, place))
                dot2 = _one_sum(block, queries.codes.index(place + 2))
                dot1 = warpgroup_mma_wait(1, deps=[dot1])
                x1 = _weighed(dot1, _weight(queries, place + 1))
                dot3 = _one_sum(block, queries.codes.index(place + 3))
                dot2 = warpgroup_mma_wait(1, deps=[dot2])
                x2 = _weighed(dot2, _weight(queries, place + 2))
                dot3 = warpgroup_mma_wait(0, deps=[dot3])
                weight3 = _weight(queries, place + 3)
                mbarrier.arrive(queries.free.index(stage), count=1)
                x3 = _weighed(dot3, weight3)
                _write_group(
                    x0, x1, x2, x3, block.power, out, scores.stride, left0, left1, left2, left3
                )
                out += _GROUP * scores.stride
                stage, phase = next_stage(stage, phase, _STAGES)
        else:
            for row in range(run.first, run.stop, _GROUP):
                mbarrier.wait(queries.ready.index(stage), phase)
                for nth in range(0, _GROUP):
                    place = stage * _GROUP + nth
                    left = _left(row + nth, run.stop, tokens, begin, RATIO)
                    dot = _four_sums(block, queries.codes.index(place))
                    _write(dot, block.power, _weight(queries, place), out, left)
                    out += scores.stride
                mbarrier.arrive(queries.free.index(stage), count=1)
                stage, phase = next_stage(stage, phase, _STAGES)
        run = _next_run(line, tokens, run.stop)


@gluon.jit(do_not_specialize=["rows", "columns", "skip_visible"])
def _score_wide_kernel(
    queries_ptr,
    weights_ptr,
    lengths_ptr,
    tokens_ptr,
    arena,
    table_ptr,
    scores_ptr,
    rows,
    columns,
    skip_visible,
    arena_stride,
    table_stride,
    scores_stride,
    data_offset,
    scale_offset,
    RATIO: gl.constexpr,
    PAGE_ROWS: gl.constexpr,
    HEADS: gl.constexpr,
):
    begin_program()
    tokens = _Tokens(
        ptr=tokens_ptr,
        rows=rows,
        columns=columns,
        skip_visible=skip_visible,
        band=gl.program_id(1) * _BAND,
        begin=gl.program_id(0) * _PROGRAM_KEYS,
    )
    keys = _Keys(
        arena=arena,
        table=table_ptr,
        block_bytes=arena_stride,
        table_stride=table_stride,
        data=data_offset,
        scale=scale_offset,
    )
    queries = _Queries(
        ptr=queries_ptr,
        weights_ptr=weights_ptr,
        lengths=lengths_ptr,
        codes=gl.allocate_shared_memory(gl.float8e4nv, [_PLACES, HEADS, _WIDTH], _OPERAND),
        weights=gl.allocate_shared_memory(gl.bfloat16, [_PLACES, HEADS], _VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [_STAGES, 1], _BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [_STAGES, 1], _BARRIER),
    )
    scores = _Scores(ptr=scores_ptr, stride=scores_stride)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(queries.ready.index(stage), count=1)
        mbarrier.init(queries.free.index(stage), count=_CONSUMERS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (queries, tokens, keys, scores, RATIO, PAGE_ROWS, 0)),
            (_consume, (queries, tokens, keys, scores, RATIO, PAGE_ROWS, 1)),
            (_consume, (queries, tokens, keys, scores, RATIO, PAGE_ROWS, 2)),
            (_produce, (queries, tokens, RATIO)),
        ],
        [4, 4, 1],
        [_CONSUMER_REGISTERS, _CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )
