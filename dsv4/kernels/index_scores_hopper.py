"""Indexer scores for Hopper: MXFP4 keys of 128 channels and 64 heads, one token a request.

The same scores as index_scores.py, bit for bit, and the same way to share out the work. What
Gluon adds: keys are under way several tiles ahead in shared memory, and are decoded straight into
the registers from which the matrix instruction reads them. Compiled only; tested on GPUs.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
)

from dsv4.cache.reads import EntrySource
from dsv4.kernels.index_scores import DECODE_MXFP4, WEIGHTED_RELU
from dsv4.kernels.record import record_constants

HEADS, WIDTH, SCALE_GROUP = 64, 128, 32
NUM_WARPS = 4
HALF_TILE = 32
# four programs a processor
MAX_REGISTERS = 128

_HEADS = gl.constexpr(HEADS)
_WIDTH = gl.constexpr(WIDTH)
_TILE = gl.constexpr(64)  # entries
_WORDS = gl.constexpr(32)  # 16-bit words of four codes in a key
_GROUPS = gl.constexpr(4)  # scales of a key
_AHEAD = gl.constexpr(4)  # tiles under way

_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_KEY = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
)
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_COPY_ROW = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])))
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_RAW = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))


def supports(q: Tensor, keys: EntrySource, first_entry: int, round_bf16: bool, group: int) -> bool:
    """Whether this kernel does these shapes and records: V4's, one token at a time."""
    record = record_constants(keys.page.format)
    coded = (record.ELEMENT, record.SCALE, record.TILE, record.CODED)
    return (
        round_bf16
        and group == 1
        and tuple(q.shape[1:]) == (HEADS, WIDTH)
        and q.stride(1) == WIDTH
        and coded == ("e2m1", "ue8m0", SCALE_GROUP, WIDTH)
        and first_entry == 0
        and keys.page.rows >= HALF_TILE
        and keys.page.rows & (keys.page.rows - 1) == 0
    )


def launch(programs: int, arguments: tuple[Any, ...], *, ratio: int, page_rows: int) -> None:
    """`arguments` are those of the portable kernel."""
    rows = arguments[6]
    _index_scores_hopper_kernel[(programs,)](
        *arguments,
        TOKENS=max(128, triton.next_power_of_2(rows)),
        RATIO=ratio,
        PAGE_ROWS=page_rows,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _seen_columns(token, tokens_ptr, rows, columns, first_entry, skip_visible, RATIO: gl.constexpr):
    """Slots of some tokens, and how many columns each has to fill."""
    live = token < rows
    slot = gl.load(tokens_ptr + token * 4, mask=live, other=-1)
    position = gl.load(tokens_ptr + token * 4 + 1, mask=live, other=-1)
    visible = (position + 1) // RATIO
    seen = gl.minimum(gl.maximum(visible - first_entry, 0), columns)
    return slot, gl.where((slot >= 0) & (visible > skip_visible), seen, 0)


@gluon.jit
def _pages(tile, last, arena, table_row, arena_stride, PAGE_ROWS: gl.constexpr):
    """The two halves of a tile: where the pages begin that hold them. Whole pages make a tile, or
    whole tiles a page, so the halves' pages are the same for all threads."""
    first = tile * _TILE // PAGE_ROWS
    second = (tile * _TILE + _TILE // 2) // PAGE_ROWS
    live = tile < last
    low = gl.load(table_row + first, mask=live, other=0).to(gl.int64)
    high = gl.load(table_row + second, mask=live, other=0).to(gl.int64)
    return low * arena_stride, high * arena_stride


@gluon.jit
def _fetch(
    raw, raw_scale, place, tile, last, nth, low, high, seen, arena, data_offset, scale_offset,
    PAGE_ROWS: gl.constexpr,
):  # fmt: skip
    """Sends for the keys of a tile. Entries that are not seen become zeros."""
    live = nth < gl.where(tile < last, seen - tile * _TILE, 0)
    page = gl.where(nth < _TILE // 2, low, high)
    page_row = (tile * _TILE + nth).to(gl.uint32) % PAGE_ROWS
    data = arena + (page + (data_offset + page_row * (_WORDS * 2)))
    word = gl.arange(0, _WORDS, layout=gl.SliceLayout(0, _COPY))[None, :]
    source = gl.multiple_of(data.to(gl.pointer_type(gl.int16))[:, None], [16, 16]) + word
    async_copy.async_copy_global_to_shared(raw.index(place), source, mask=live[:, None])
    scale = arena + (page + (scale_offset + page_row * _GROUPS))
    async_copy.async_copy_global_to_shared(
        raw_scale.index(place), scale.to(gl.pointer_type(gl.int32)), mask=live
    )
    async_copy.commit_group()


@gluon.jit
def _decode(words, scales):
    """Codes [entries, words] and the four scale bytes of each key → four operands, each with every
    fourth channel. As in index_scores.py: a code's magnitude bits at the border of a bf16's
    exponent and mantissa are its value times 2^-126."""
    wide = gl.reshape(words, [_TILE, _GROUPS, _WORDS // _GROUPS])
    LAYOUT: gl.constexpr = wide.type.layout
    KEY_ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT))
    GROUP: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    group = gl.arange(0, _GROUPS, layout=GROUP)[None, :]
    exponent = (gl.convert_layout(scales, KEY_ROW)[:, None] >> (8 * group)) & 0xFF
    # A byte of 255 marks a group with a NaN, whose code is 0: infinity times 0 is NaN again. No
    # writer stores a byte of 0.
    power, wide = gl.broadcast((exponent << 7).to(gl.int16)[:, :, None], wide)
    k0, k1, k2, k3 = gl.inline_asm_elementwise(
        DECODE_MXFP4,
        "=&r,=&r,=&r,=&r,r,r",
        [wide, power],
        (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        True,
        2,
    )
    return _operand(k0), _operand(k1), _operand(k2), _operand(k3)


@gluon.jit
def _operand(x):
    return gl.convert_layout(gl.reshape(x, [_TILE, _WORDS]), _KEY, assert_trivial=True)


@gluon.jit
def _weighted_relu(dot, weight):
    """bf16(ReLU(bf16(dot)) · weight) as fp32, two at once."""
    return gl.inline_asm_elementwise(
        WEIGHTED_RELU,
        "=&r,=&r,f,f,r",
        [dot, weight],
        gl.float32,
        True,
        2,
    )


@gluon.jit
def _head_sum(x):
    """Sum over the heads in the order of the reference; each step adds two numbers."""
    x = gl.sum(gl.reshape(x, [_TILE, _HEADS // 2, 2]), axis=2)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 16]), axis=1)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 8]), axis=1)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 4]), axis=1)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 2]), axis=1)
    return gl.sum(x, axis=1)


@gluon.jit
def _round_bf16(x):
    """The nearest bf16 number of a sum, ties to even; every NaN the same."""
    bits = x.to(gl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    rounded = bits.to(gl.float32, bitcast=True)
    return gl.where(x != x, float("nan"), rounded)


@gluon.jit(do_not_specialize=["rows", "first_entry", "skip_visible"])
def _index_scores_hopper_kernel(
    q_ptr,
    weights_ptr,
    tokens_ptr,
    arena,
    table_ptr,
    scores_ptr,
    rows,
    columns,
    first_entry,
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
):
    LINE: gl.constexpr = gl.BlockedLayout([TOKENS // 128], [32], [4], [0])
    token = gl.arange(0, TOKENS, layout=LINE)
    _, seen = _seen_columns(token, tokens_ptr, rows, columns, first_entry, skip_visible, RATIO)
    # how many tiles the tokens up to each have, itself included
    ends = gl.associative_scan((seen + _TILE - 1) // _TILE, 0, _add)
    total = gl.max(ends, axis=0).to(gl.int64)
    # this program's share of all tiles, counted through the tokens: [at, stop)
    at = (gl.program_id(0) * total // gl.num_programs(0)).to(gl.int32)
    stop = ((gl.program_id(0) + 1) * total // gl.num_programs(0)).to(gl.int32)

    raw = gl.allocate_shared_memory(gl.int16, [_AHEAD, _TILE, _WORDS], _RAW)
    raw_scale = gl.allocate_shared_memory(gl.int32, [_AHEAD, _TILE], _VECTOR)
    queries = gl.allocate_shared_memory(gl.bfloat16, [4, _HEADS, _WORDS], _OPERAND)
    nth = gl.arange(0, _TILE, layout=_COPY_ROW)
    line = gl.arange(0, _TILE, layout=gl.SliceLayout(1, _MMA))
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(0, _MMA))
    query_head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _QUERY))[:, None]
    query_channel = gl.arange(0, _WIDTH, layout=gl.SliceLayout(0, _QUERY))[None, :]
    none = gl.full([_TILE, _HEADS], 0.0, gl.float32, _MMA)
    while at < stop:
        mine = gl.sum((ends <= at).to(gl.int32), axis=0)
        begin = gl.max(gl.where(ends <= at, ends, 0), axis=0)
        end = gl.minimum(gl.min(gl.where(ends > at, ends, 0x7FFFFFFF), axis=0), stop)
        slot, mine_seen = _seen_columns(
            mine, tokens_ptr, rows, columns, first_entry, skip_visible, RATIO
        )
        table_row = table_ptr + slot.to(gl.int64) * table_stride
        scores_row = scores_ptr + mine.to(gl.int64) * scores_stride
        first = at - begin
        last = end - begin
        # keys first, then the query: they travel together
        for place in gl.static_range(_AHEAD - 1):
            low, high = _pages(first + place, last, arena, table_row, arena_stride, PAGE_ROWS)
            _fetch(
                raw, raw_scale, place, first + place, last, nth, low, high, mine_seen, arena,
                data_offset, scale_offset, PAGE_ROWS,
            )  # fmt: skip
        low, high = _pages(first + _AHEAD - 1, last, arena, table_row, arena_stride, PAGE_ROWS)
        q_row = q_ptr + mine.to(gl.int64) * q_stride
        q = gl.load(q_row + query_head * _WIDTH + query_channel)
        even, odd = gl.split(gl.reshape(q, [_HEADS, _WIDTH // 2, 2]))
        q0, q2 = gl.split(gl.reshape(even, [_HEADS, _WORDS, 2]))
        q1, q3 = gl.split(gl.reshape(odd, [_HEADS, _WORDS, 2]))
        queries.index(0).store(q0)
        queries.index(1).store(q1)
        queries.index(2).store(q2)
        queries.index(3).store(q3)
        fence_async_shared()
        weight = gl.load(weights_ptr + mine.to(gl.int64) * weights_stride + head)
        place = gl.to_tensor(0)
        for tile in range(first, last):
            async_copy.wait_group(_AHEAD - 2)
            words = raw.index(place).load(_KEY)
            scales = raw_scale.index(place).load(gl.SliceLayout(1, _KEY))
            ahead = gl.where(place == 0, _AHEAD - 1, place - 1)
            _fetch(
                raw, raw_scale, ahead, tile + _AHEAD - 1, last, nth, low, high, mine_seen, arena,
                data_offset, scale_offset, PAGE_ROWS,
            )  # fmt: skip
            low, high = _pages(tile + _AHEAD, last, arena, table_row, arena_stride, PAGE_ROWS)
            k0, k1, k2, k3 = _decode(words, scales)
            dot = warpgroup_mma(
                k0, queries.index(0).permute((1, 0)), none, use_acc=False, is_async=True
            )
            dot = warpgroup_mma(k1, queries.index(1).permute((1, 0)), dot, is_async=True)
            dot = warpgroup_mma(k2, queries.index(2).permute((1, 0)), dot, is_async=True)
            dot = warpgroup_mma(k3, queries.index(3).permute((1, 0)), dot)
            spread, dot = gl.broadcast(weight[None, :], dot)
            score = _round_bf16(_head_sum(_weighted_relu(dot, spread)))
            score = gl.where(score == 0, 0.0, score)
            score = gl.convert_layout(score, gl.SliceLayout(1, _MMA))
            column = tile * _TILE + line
            gl.store(scores_row + column, score, mask=column < mine_seen)
            place = gl.where(place == _AHEAD - 1, 0, place + 1)
        async_copy.wait_group(0)
        at = end
