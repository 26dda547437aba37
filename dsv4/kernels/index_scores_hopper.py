"""Indexer scores for Hopper: MXFP4 keys of 128 channels and 64 heads, one token a request.

The same scores as index_scores.py, and the same way to share out the work. Codes and queries meet
as E4M3 numbers in the FP8 matrix instruction, whose 32 channels are exactly one scale group of a
key, and scales follow in fp32:
  - An E2M1 code's bits, moved to the right places of a byte, are an E4M3 number: its value times
    2^-6. No arithmetic, and four codes at once.
  - Hopper keeps few bits of FP8 sums, but enough for one group of 32 products of E2M1 numbers
    (multiples of a quarter up to 36), so every group has a sum of its own that starts at 0.
  - Queries must be E2M1 numbers times a power of two for each 32 channels, as
    prepare_index_queries leaves them. A head is scaled by a power of two that goes back into its
    weight: rounding to bf16 commutes with that. It is exact where the scales of a head lie within
    2^14 of each other; channels farther below are off by at most 2^-18 of the head's largest.

Keys are under way several tiles ahead in shared memory, across tokens, and are decoded straight
into the registers from which the matrix instruction reads them. Compiled only; tested on GPUs.
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
    warpgroup_mma_wait,
)

from dsv4.cache.reads import EntrySource
from dsv4.kernels.device import processors
from dsv4.kernels.record import record_constants

HEADS, WIDTH, SCALE_GROUP = 64, 128, 32
NUM_WARPS = 4
HALF_TILE = 32
MIN_TOKENS = 32
PROGRAMS_PER_PROCESSOR = 3
MAX_REGISTERS = 168

_HEADS = gl.constexpr(HEADS)
_WIDTH = gl.constexpr(WIDTH)
_GROUP = gl.constexpr(SCALE_GROUP)  # channels
_GROUPS = gl.constexpr(WIDTH // SCALE_GROUP)
_TILE = gl.constexpr(2 * HALF_TILE)  # entries
_HALF = gl.constexpr(HALF_TILE)
_BYTES = gl.constexpr(WIDTH // 2)  # codes of a key
_AHEAD = gl.constexpr(4)  # tiles under way
_NEVER = gl.constexpr(0x7FFFFFFF)  # a tile that does not come

_MMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_KEY = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), 4)
)
_ENTRY = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])))
_HEAD = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])))
_COPY = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
_COPY_SCALE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_RAW = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))

# Bytes of two codes → the low codes and the high codes as E4M3. A low code's sign has to travel
# two places farther than the rest: 0x60 makes a carry of it.
DECODE = gl.constexpr("""
    {
    .reg .b32 low, high;
    and.b32 low, $2, 0x0F0F0F0F;
    mad.lo.u32 low, low, 4, 0x60606060;
    and.b32 $0, low, 0x9C9C9C9C;
    shr.u32 high, $2, 2;
    and.b32 high, high, 0x1C1C1C1C;
    lop3.b32 $1, $2, 0x80808080, high, 0xEA;
    }
    """)
# Each product in the upper half of a register is already the fp32 number: the weights' lower halves
# are 0.
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
# Adding 0 makes -0 one zero; a NaN is the highest of all numbers and becomes the usual one.
ROUND_BF16 = gl.constexpr("""
    {
    .reg .b32 pair, x, y;
    add.rn.f32 x, $2, 0f00000000;
    add.rn.f32 y, $3, 0f00000000;
    cvt.rn.bf16x2.f32 pair, y, x;
    shl.b32 x, pair, 16;
    and.b32 y, pair, 0xFFFF0000;
    min.s32 $0, x, 0x7FC00000;
    min.s32 $1, y, 0x7FC00000;
    }
    """)
LARGEST = gl.constexpr("""
    {
    .reg .b32 a, b, c, d;
    and.b32 a, $1, 0x7FFF7FFF;
    and.b32 b, $2, 0x7FFF7FFF;
    and.b32 c, $3, 0x7FFF7FFF;
    and.b32 d, $4, 0x7FFF7FFF;
    max.u16x2 a, a, b;
    max.u16x2 c, c, d;
    max.u16x2 $0, a, c;
    }
    """)
SCALED_E4M3 = gl.constexpr("""
    {
    .reg .b32 a, b, c, d;
    .reg .b16 low, high;
    shl.b32 a, $1, 16;
    and.b32 b, $1, 0xFFFF0000;
    shl.b32 c, $2, 16;
    and.b32 d, $2, 0xFFFF0000;
    mul.rn.f32 a, a, $3;
    mul.rn.f32 b, b, $4;
    mul.rn.f32 c, c, $5;
    mul.rn.f32 d, d, $6;
    cvt.rn.satfinite.e4m3x2.f32 low, b, a;
    cvt.rn.satfinite.e4m3x2.f32 high, d, c;
    mov.b32 $0, {low, high};
    }
    """)


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


def launch(arguments: tuple[Any, ...], *, ratio: int, page_rows: int) -> None:
    """`arguments` are those of the portable kernel."""
    q, rows, columns = arguments[0], arguments[6], arguments[7]
    tiles = rows * triton.cdiv(columns, 2 * HALF_TILE)
    _index_scores_hopper_kernel[(min(tiles, processors(q.device) * PROGRAMS_PER_PROCESSOR),)](
        *arguments,
        TOKENS=max(MIN_TOKENS, triton.next_power_of_2(rows)),
        RATIO=ratio,
        PAGE_ROWS=page_rows,
        num_warps=NUM_WARPS,
        maxnreg=MAX_REGISTERS,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _seen_columns(token, tokens_ptr, rows, columns, skip_visible, RATIO: gl.constexpr):
    """Slots of some tokens, and how many columns each has to fill."""
    live = token < rows
    slot = gl.load(tokens_ptr + token * 4, mask=live, other=-1)
    position = gl.load(tokens_ptr + token * 4 + 1, mask=live, other=-1)
    visible = (position + 1) // RATIO
    seen = gl.minimum(gl.maximum(visible, 0), columns)
    return slot, gl.where((slot >= 0) & (visible > skip_visible), seen, 0)


@gluon.jit
def _find(kept_ends, at, LINE: gl.constexpr):
    """The token of a tile, and where its tiles begin and end."""
    ends = kept_ends.load(LINE)
    token = gl.sum((ends <= at).to(gl.int32), axis=0)
    begin = gl.max(gl.where(ends <= at, ends, 0), axis=0)
    end = gl.min(gl.where(ends > at, ends, _NEVER), axis=0)
    return token, begin, end


@gluon.jit
def _next_keys(
    at, stop, kept_ends, tokens_ptr, table_ptr, rows, columns, skip_visible, table_stride,
    RATIO: gl.constexpr, PAGE_ROWS: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Of the token whose first tile is `at`: where its tiles begin and end (never, if not before
    `stop`), how many pages it has, and its row of the block table."""
    token, begin, end = _find(kept_ends, at, LINE)
    slot, seen = _seen_columns(token, tokens_ptr, rows, columns, skip_visible, RATIO)
    row = table_ptr + slot.to(gl.int64) * table_stride
    pages = (seen + PAGE_ROWS - 1) // PAGE_ROWS
    return begin, gl.where(end < stop, end, _NEVER), pages, row


@gluon.jit
def _block_ids(tile, pages, table_row, PAGE_ROWS: gl.constexpr):
    """Blocks of a tile's halves, the same for all threads; 0 from `pages` on, where the table may
    name anything. Whole pages make a tile, or whole tiles a page."""
    if PAGE_ROWS == _HALF:
        page = tile * 2
        low = gl.load(table_row + page, mask=page < pages, other=0)
        return low, gl.load(table_row + page + 1, mask=page + 1 < pages, other=0)
    else:
        page = tile * _TILE // PAGE_ROWS
        low = gl.load(table_row + page, mask=page < pages, other=0)
        return low, low


@gluon.jit
def _distance(block_id, arena_stride):
    """Bytes from the arena's begin. A product that the compiler would make of three."""
    return gl.inline_asm_elementwise(
        "mul.wide.u32 $0, $1, $2;", "=l,r,r", [block_id, arena_stride], gl.int64, True, 1
    )


@gluon.jit
def _fetch(
    raw, raw_scale, place, live, page_row, low, high, codes, scales, copy_row, scale_row,
    arena_stride, PAGE_ROWS: gl.constexpr,
):  # fmt: skip
    """Sends for the keys of a tile, unseen ones of its pages too: their scores are not written."""
    source = codes + _distance(gl.where(copy_row < _HALF, low, high), arena_stride)
    scale_source = scales + _distance(gl.where(scale_row < _HALF, low, high), arena_stride)
    if PAGE_ROWS > _HALF:
        source += page_row * _BYTES
        scale_source += page_row * _GROUPS
    async_copy.async_copy_global_to_shared(
        raw.index(place), gl.multiple_of(source, [16, 16]), mask=live
    )
    async_copy.async_copy_global_to_shared(
        raw_scale.index(place), scale_source.to(gl.pointer_type(gl.int32), bitcast=True), mask=live
    )
    async_copy.commit_group()


@gluon.jit
def _decode(codes):
    """Bytes of two codes [entries, bytes] → for each scale group an operand, its even channels
    before its odd ones."""
    even, odd = gl.inline_asm_elementwise(
        DECODE, "=&r,=r,r", [codes], (gl.uint8, gl.uint8), True, 4
    )
    even = gl.reshape(even, [_TILE, _GROUPS, _GROUP // 2])
    odd = gl.reshape(odd, [_TILE, _GROUPS, _GROUP // 2])
    x = gl.permute(gl.join(even, odd), (0, 3, 2, 1))
    k02, k13 = gl.split(gl.reshape(x, [_TILE, 2, _GROUP // 2, 2, 2]))
    k0, k2 = gl.split(k02)
    k1, k3 = gl.split(k13)
    return _operand(k0), _operand(k1), _operand(k2), _operand(k3)


@gluon.jit
def _operand(x):
    x = gl.convert_layout(gl.reshape(x, [_TILE, _GROUP]), _KEY, assert_trivial=True)
    return x.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _multiply(k, query, GROUP: gl.constexpr):
    none = gl.full([_TILE, _HEADS], 0.0, gl.float32, _MMA)
    query = query.slice(GROUP * _GROUP, _GROUP, dim=1).permute((1, 0))
    return warpgroup_mma(k, query, none, use_acc=False, is_async=True)


@gluon.jit
def _power(scales, GROUP: gl.constexpr):
    """2^(byte - 127) of one of the four bytes of each key's scales; infinity for 255."""
    if GROUP == 3:
        bits = (scales.to(gl.uint32, bitcast=True) >> 1) & 0x7F800000
    else:
        bits = (scales << (23 - 8 * GROUP)) & 0x7F800000
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _dots(k0, k1, k2, k3, query, scales):
    """Dot products [entries, heads] with a query. While a group multiplies, the one before is
    scaled; waiting for both keeps the compiler from moving that."""
    p1 = _power(scales, 1)
    p2 = _power(scales, 2)
    p3 = _power(scales, 3)
    s = warpgroup_mma_wait(0, deps=[_multiply(k0, query, 0)])
    running = _multiply(k1, query, 1)
    dot = s * _power(scales, 0)[:, None]
    s, dot = warpgroup_mma_wait(0, deps=[running, dot])
    running = _multiply(k2, query, 2)
    dot = gl.fma(s, gl.broadcast(p1[:, None], s)[0], dot)
    s, dot = warpgroup_mma_wait(0, deps=[running, dot])
    running = _multiply(k3, query, 3)
    dot = gl.fma(s, gl.broadcast(p2[:, None], s)[0], dot)
    s, dot = warpgroup_mma_wait(0, deps=[running, dot])
    return gl.fma(s, gl.broadcast(p3[:, None], s)[0], dot)


@gluon.jit
def _head_sum(x):
    """Sum over the heads in the order of the reference; each step adds two numbers."""
    x = gl.sum(gl.reshape(x, [_TILE, _HEADS // 2, 2]), axis=2)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 16]), axis=1)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 8]), axis=1)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 4]), axis=1)
    x = gl.sum(gl.reshape(x, [_TILE, 2, 2]), axis=1)
    return gl.convert_layout(gl.sum(x, axis=1), _ENTRY)


@gluon.jit
def _write(dot, weight, scales, tile, seen, scores_row):
    weight, dot = gl.broadcast(weight[None, :], dot)
    product = gl.inline_asm_elementwise(
        WEIGHTED_RELU, "=&r,=&r,f,f,r,r", [dot, weight], gl.float32, True, 2
    )
    score = _head_sum(product)
    score = gl.inline_asm_elementwise(ROUND_BF16, "=&r,=&r,f,f", [score], gl.int32, True, 2)
    # a byte of 255 marks a group with a NaN
    bits = scales.to(gl.uint32, bitcast=True)
    broken = ((0xFEFEFEFE - bits) & bits & 0x80808080) != 0
    score = gl.where(broken, 0x7FC00000, score).to(gl.float32, bitcast=True)
    column = tile * _TILE + gl.arange(0, _TILE, layout=_ENTRY)
    gl.store(scores_row + column, score, mask=column < seen)


@gluon.jit
def _load_query(q_row, weights_row, query):
    """Puts a query into shared memory as E4M3, each head's largest value from 256 to 384, and
    returns the weights that undo this and the codes' 2^-6."""
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _QUERY))[:, None]
    channel = gl.arange(0, _GROUP, layout=gl.SliceLayout(0, _QUERY))[None, :]
    at = q_row + head * _WIDTH + channel
    q0 = gl.load(at)
    q1 = gl.load(at + _GROUP)
    q2 = gl.load(at + 2 * _GROUP)
    q3 = gl.load(at + 3 * _GROUP)
    largest = gl.inline_asm_elementwise(LARGEST, "=r,r,r,r,r", [q0, q1, q2, q3], gl.int16, True, 2)
    # 255 for a NaN; below 8 the power would be infinite
    exponent = gl.maximum(gl.max(largest.to(gl.int32), axis=1) >> 7, 8)
    power = ((262 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    _store_query(query.slice(0 * _GROUP, _GROUP, dim=1), q0, power)
    _store_query(query.slice(1 * _GROUP, _GROUP, dim=1), q1, power)
    _store_query(query.slice(2 * _GROUP, _GROUP, dim=1), q2, power)
    _store_query(query.slice(3 * _GROUP, _GROUP, dim=1), q3, power)
    fence_async_shared()
    weight = gl.load(weights_row + gl.arange(0, _HEADS, layout=_HEAD)).to(gl.float32)
    power = ((exponent - 2) << 23).to(gl.float32, bitcast=True)
    weight *= gl.convert_layout(power, _HEAD)
    return (weight.to(gl.uint32, bitcast=True) & 0xFFFF0000).to(gl.float32, bitcast=True)


@gluon.jit
def _store_query(place, q, power):
    x = gl.inline_asm_elementwise(
        SCALED_E4M3, "=r,r,r,f,f,f,f", [q, gl.broadcast(power, q)[0]], gl.uint8, True, 4
    )
    x = gl.permute(gl.reshape(x, [_HEADS, _GROUP // 2, 2]), (0, 2, 1))
    place.store(gl.reshape(x, [_HEADS, _GROUP]).to(gl.float8e4nv, bitcast=True))


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
    # every warp knows all tokens
    LINE: gl.constexpr = gl.SliceLayout(
        1, gl.BlockedLayout([TOKENS // 32, 1], [32, 1], [1, 4], [0, 1])
    )
    tokens = gl.arange(0, TOKENS, layout=LINE)
    _, all_seen = _seen_columns(tokens, tokens_ptr, rows, columns, skip_visible, RATIO)
    # how many tiles the tokens up to each have, itself included; kept where it takes no registers
    ends = gl.associative_scan(gl.cdiv(all_seen, _TILE)[:, None], 0, _add)
    ends = gl.convert_layout(gl.reshape(ends, [TOKENS]), LINE, assert_trivial=True)
    kept_ends = gl.allocate_shared_memory(gl.int32, [TOKENS], _VECTOR)
    kept_ends.store(ends)
    total = gl.max(ends, axis=0)
    # this program's share of all tiles, counted through the tokens: [at, stop)
    share = gl.cdiv(total, gl.num_programs(0))
    at = gl.program_id(0) * share
    stop = gl.minimum(at + share, total)

    raw = gl.allocate_shared_memory(gl.uint8, [_AHEAD, _TILE, _BYTES], _RAW)
    raw_scale = gl.allocate_shared_memory(gl.int32, [_AHEAD, _TILE], _VECTOR)
    query = gl.allocate_shared_memory(gl.float8e4nv, [_HEADS, _WIDTH], _OPERAND)
    copy_row = gl.arange(0, _TILE, layout=gl.SliceLayout(1, _COPY))[:, None]
    copy_byte = gl.arange(0, _BYTES, layout=gl.SliceLayout(0, _COPY))[None, :]
    scale_row = gl.arange(0, _TILE, layout=_COPY_SCALE)
    codes = arena + data_offset + copy_row % PAGE_ROWS * _BYTES + copy_byte
    scales = arena + scale_offset + scale_row % PAGE_ROWS * _GROUPS

    # keys are sent for _AHEAD - 1 tiles before they are used, and their blocks' ids one tile before
    # that; far_*: the token of the tile whose ids come
    far_begin, far_pages, far_row = at, at * 0, table_ptr
    far_end = gl.where(at < stop, at, _NEVER)
    low = gl.to_tensor(0)
    high = low
    for n in gl.static_range(_AHEAD):
        far = at + n
        if n > 0:
            _fetch(
                raw, raw_scale, n - 1, far - 1 < stop, (far - 1 - far_begin) * _TILE % PAGE_ROWS,
                low, high, codes, scales, copy_row, scale_row, arena_stride, PAGE_ROWS,
            )  # fmt: skip
        if far == far_end:
            far_begin, far_end, far_pages, far_row = _next_keys(
                far, stop, kept_ends, tokens_ptr, table_ptr, rows, columns, skip_visible,
                table_stride, RATIO, PAGE_ROWS, LINE,
            )  # fmt: skip
        low, high = _block_ids(far - far_begin, far_pages, far_row, PAGE_ROWS)
    page_row = (at + _AHEAD - 1 - far_begin) * _TILE % PAGE_ROWS

    # the token of the tile that is computed; columns are counted as tiles are, through all tokens
    end, seen = at, at
    scores_row = scores_ptr
    weight = gl.full([_HEADS], 0.0, gl.float32, _HEAD)
    for now in range(at, stop):
        if now == end:
            token, begin, end = _find(kept_ends, now, LINE)
            _slot, seen = _seen_columns(token, tokens_ptr, rows, columns, skip_visible, RATIO)
            weight = _load_query(
                q_ptr + token.to(gl.int64) * q_stride,
                weights_ptr + token.to(gl.int64) * weights_stride,
                query,
            )
            seen += begin * _TILE
            scores_row = scores_ptr + (token.to(gl.int64) * scores_stride - begin * _TILE)
        async_copy.wait_group(_AHEAD - 2)
        nth = (now - at).to(gl.uint32)
        bytes_ = raw.index((nth % _AHEAD).to(gl.int32)).load(_KEY)
        key_scales = raw_scale.index((nth % _AHEAD).to(gl.int32)).load(_ENTRY)
        far = now + _AHEAD
        _fetch(
            raw, raw_scale, ((nth + _AHEAD - 1) % _AHEAD).to(gl.int32), far - 1 < stop, page_row,
            low, high, codes, scales, copy_row, scale_row, arena_stride, PAGE_ROWS,
        )  # fmt: skip
        if far == far_end:
            far_begin, far_end, far_pages, far_row = _next_keys(
                far, stop, kept_ends, tokens_ptr, table_ptr, rows, columns, skip_visible,
                table_stride, RATIO, PAGE_ROWS, LINE,
            )  # fmt: skip
        low, high = _block_ids(far - far_begin, far_pages, far_row, PAGE_ROWS)
        page_row = (far - far_begin) * _TILE % PAGE_ROWS
        k0, k1, k2, k3 = _decode(bytes_)
        dot = _dots(k0, k1, k2, k3, query, key_scales)
        _write(dot, weight, key_scales, now, seen, scores_row)
    async_copy.wait_group(0)
