"""Attention of few queries whose result must not depend on their number, for Hopper.

attend.py cuts a query's keys into parts for many processors, rounds the parts and adds them: the
last bits of a result then depend on how the query was cut. One program per query would leave
processors idle. So there are two launches, and nothing is rounded between them:

    weigh    programs of a query take some of its tiles each: they decode the keys, and store them
             with the weights that the keys have for all heads
    add      programs of a query take some of its channels each, and add up all keys in order

Together they do, operation for operation, what one program of attend.py does with a query that is
`WHOLE`: a tile's weights are computed under its own highest logit (`weigh` in attend_softmax.py),
whichever program has the tile, and are scaled to the highest logit so far when they are added.
Compiled only; tested on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.kernels.attend import _LN_2, run_time_arguments
from dsv4.kernels.hopper import attend as narrow
from dsv4.kernels.hopper.attend import (
    PRODUCER_REGISTERS,
    RIGHT_REGISTERS,
    TILE_KEYS,
    constants_of,
    tiles_of,
)
from dsv4.kernels.hopper.attend_keys import (
    HALF,
    KEY_STAGES,
    TILE,
    VECTOR,
    Share,
    extent_of,
    new_keys,
    next_stage,
    seen_tiles,
    where_of,
)
from dsv4.kernels.hopper.attend_parts import FIRST_PART
from dsv4.kernels.hopper.attend_producer import new_incoming, produce
from dsv4.kernels.hopper.attend_setup import (
    BLOCK_HEADS,
    WARPS_PER_ROLE,
    head_blocks,
    load_queries,
    new_queries,
    pairs,
    program_of,
    rotated,
)
from dsv4.kernels.hopper.attend_softmax import (
    LOGITS,
    Sums,
    factors,
    logits_of,
    new_sums,
    normalised,
    normaliser,
    scaled,
    weigh,
    with_sink,
)
from dsv4.kernels.hopper.dialect import async_load
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import load_token, token_at
from dsv4.kernels.sizes import HEADS_PER_PROGRAM, PARTS_START
from dsv4.kernels.target import processors
from dsv4.ops.calls import Attention

WIDTH = 2 * HALF.value
# A stored tile, in fp32 elements: decoded keys in bf16, the weights of 64 heads in fp16, then the
# highest logit and the sum of weights of each head.
KEY_ELEMENTS = TILE_KEYS * WIDTH // 2
WEIGHT_ELEMENTS = HEADS_PER_PROGRAM * TILE_KEYS // 2
LINES = 2
TILE_ELEMENTS = KEY_ELEMENTS + WEIGHT_ELEMENTS + LINES * HEADS_PER_PROGRAM
# Bytes of stored tiles, which bounds the workspace: 158 MB for 16 queries of 1M tokens.
MAX_TILES = 4224
# What the second launch and storing tiles cost, in units of the time of a tile in the first launch.
COST_TILES = 3.0
# The second launch requests this many tiles at once, and several such groups ahead: what other
# processors have just written arrives late. By the number of channels of a program.
TOGETHER = 4
AHEAD = {32: 5, 64: 5, 128: 4}

_KEY_ELEMENTS = gl.constexpr(KEY_ELEMENTS)
_WEIGHT_ELEMENTS = gl.constexpr(WEIGHT_ELEMENTS)
_TILE_ELEMENTS = gl.constexpr(TILE_ELEMENTS)
_LINES = gl.constexpr(LINES * HEADS_PER_PROGRAM)
_WEIGHT = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
_TOGETHER = gl.constexpr(TOGETHER)
_COPY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@dataclass(frozen=True, slots=True)
class AddConstants:
    """The second launch as compile-time constants, as in attend.py. COLUMNS: channels of a
    program. STAGES: of shared memory, with TOGETHER tiles each."""

    HEADS: int
    WIDTH: int
    WINDOW: int
    ENTRIES: bool
    ALL: bool
    RATIO: int
    KEY_UNIT: float
    ROPE: int
    COLUMNS: int
    STAGES: int
    WHOLE: bool = True


class Tiles(NamedTuple):
    """Stored tiles, and those that are being loaded into shared memory."""

    stored: gl.tensor
    channels: gl.shared_memory_descriptor
    weights: gl.shared_memory_descriptor
    lines: gl.shared_memory_descriptor


def workspace_elements(
    tokens: int, heads: int, window: int, max_entries: int, programs: int
) -> int:
    """fp32 elements that launches of up to this many tokens need at most."""
    tiles = tiles_of(window, max_entries)
    items = min(tokens * head_blocks(heads), _most_items(programs), MAX_TILES // tiles)
    return int(PARTS_START + items * tiles * TILE_ELEMENTS)


def _most_items(programs: int) -> int:
    """Queries and blocks of heads for which all programs of the second launch run at once."""
    return programs * max(AHEAD) // int(WIDTH)


def programs_per_query(
    tokens: int, heads: int, window: int, max_entries: int, programs: int
) -> int:
    """Over how many programs the tiles of a query are distributed so that at most `programs` run at
    once; 1 where a single launch is faster. No bit of the result depends on it."""
    tiles = tiles_of(window, max_entries)
    items = tokens * head_blocks(heads)
    if not 0 < items <= min(_most_items(programs), MAX_TILES // tiles):
        return 1
    shared = min(tiles, programs // items)
    return shared if shared > 1 and -(-tiles // shared) + COST_TILES < tiles else 1


def columns_per_program(items: int, programs: int) -> int:
    """The fewest channels with which all programs of the second launch run at once."""
    return min(columns for columns in AHEAD if items * (WIDTH // columns) <= programs)


def supports(call: Attention) -> bool:
    """Whether these are queries that attend.py would not cut, and two launches are faster. Where
    the workspace has no room for their tiles, a single launch runs."""
    count, heads, _ = call.q.shape
    if not call.batch_invariant or not narrow.supports(call):
        return False
    window, entries = call.window.window, call.max_entries
    needed = PARTS_START + count * head_blocks(heads) * tiles_of(window, entries) * TILE_ELEMENTS
    if call.workspace is None or needed > call.workspace.numel():
        return False
    programs = processors(call.q.device)
    return programs_per_query(count, heads, window, entries, programs) > 1


def attend(call: Attention) -> None:
    """Two launches; the same bits as the one launch that attend.py makes of it."""
    for launch in attend_launches(call, programs=processors(call.q.device)):
        launch.run()


def attend_launches(call: Attention, *, programs: int) -> tuple[Launch, Launch]:
    count, heads, _ = call.q.shape
    window = call.window.window
    items = count * head_blocks(heads)
    tiles = tiles_of(window, call.max_entries)
    shared = programs_per_query(count, heads, window, call.max_entries, programs)
    columns = columns_per_program(items, programs)
    constants = constants_of(call)
    options = {"num_warps": WARPS_PER_ROLE, "launch_pdl": False, "enable_fp_fusion": True}
    given = run_time_arguments(call)
    first = Launch(_weigh_kernel, (items, shared), (*given, tiles), {"A": constants}, options)
    add = AddConstants(
        HEADS=heads,
        WIDTH=constants.WIDTH,
        WINDOW=constants.WINDOW,
        ENTRIES=constants.ENTRIES,
        ALL=constants.ALL,
        RATIO=constants.RATIO,
        KEY_UNIT=constants.KEY_UNIT,
        ROPE=constants.ROPE,
        COLUMNS=columns,
        STAGES=AHEAD[columns],
    )
    arguments = (
        given.sink_ptr,
        given.tokens_ptr,
        given.workspace_ptr,
        given.out_ptr,
        given.lse_ptr,
        given.rope_ptr,
        given.out_stride,
        given.lse_stride,
        given.indices_count,
        tiles,
    )
    second = Launch(
        _add_kernel,
        (items, WIDTH // add.COLUMNS),
        arguments,
        {"A": add},
        {"num_warps": WARPS_PER_ROLE, "enable_fp_fusion": True},
    )
    return first, second


@gluon.jit
def _stored(workspace, item, max_tiles):
    """Where the tiles of a query's block of heads are stored."""
    return workspace + FIRST_PART + item * max_tiles * _TILE_ELEMENTS


@gluon.jit
def _store_weights(queries, keys, stored, share, A: gl.constexpr):
    """Left: the weights of tile after tile."""
    KEY: gl.constexpr = gl.SliceLayout(0, LOGITS)
    LINE: gl.constexpr = gl.SliceLayout(1, LOGITS)
    extent = extent_of(share, A)
    load_queries(queries, 0, A)
    mbarrier.wait(queries.ready, 0)
    head = gl.arange(0, BLOCK_HEADS, layout=LINE)
    key = gl.arange(0, TILE, layout=KEY)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(extent.first, extent.last):
        logits = logits_of(queries, keys, stage, phase)
        bias = keys.bias.index(stage).load(KEY)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(keys.free.index(stage), count=1)
        weight, total, top = weigh(logits, bias, A)
        at = stored + tile * _TILE_ELEMENTS + _KEY_ELEMENTS
        row = at.to(gl.pointer_type(gl.float16))
        gl.store(row + head[:, None] * TILE + key[None, :], weight)
        line = at + _WEIGHT_ELEMENTS + head
        gl.store(line, top)
        gl.store(line + BLOCK_HEADS, total)
        stage, phase = next_stage(stage, phase, KEY_STAGES)


@gluon.jit
def _store_keys(queries, keys, stored, share, A: gl.constexpr):
    """Right: the decoded keys."""
    extent = extent_of(share, A)
    load_queries(queries, 1, A)
    key = gl.arange(0, TILE, layout=gl.SliceLayout(1, _COPY))[:, None]
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, _COPY))[None, :]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for tile in range(extent.first, extent.last):
        at = (stored + tile * _TILE_ELEMENTS).to(gl.pointer_type(gl.bfloat16))
        mbarrier.wait(keys.ready.index(stage), phase)
        first = keys.halves.index(stage).load(_COPY)
        second = keys.halves.index(KEY_STAGES + stage).load(_COPY)
        mbarrier.arrive(keys.free.index(stage), count=1)
        gl.store(at + key * A.WIDTH + column, first)
        gl.store(at + key * A.WIDTH + HALF + column, second)
        stage, phase = next_stage(stage, phase, KEY_STAGES)


@gluon.jit(do_not_specialize=["max_tiles"])
def _weigh_kernel(
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
    max_tiles,
    A: gl.constexpr,
):
    begin_program()
    item = gl.program_id(0)
    program = program_of(item, A)
    tokens_row = token_at(tokens_ptr, program.token)
    queries = new_queries(q_ptr, q_stride, program, A)
    keys = new_keys()
    incoming = new_incoming(A)
    fence_async_shared()
    where = where_of(
        (window_arena, window_bytes, window_data, window_scale),
        (entry_arena, entry_bytes, entry_data, entry_scale),
        (table_ptr, table_stride),
        (indices_ptr, indices_stride),
        batch_ptr,
        program,
    )
    split, splits = gl.program_id(1), gl.num_programs(1)
    share = Share((), tokens_row, indices_count, split, splits, gl.to_tensor(0))
    stored = _stored(workspace_ptr, item, max_tiles)
    gl.warp_specialize(
        [
            (_store_weights, (queries, keys, stored, share, A)),
            (_store_keys, (queries, keys, stored, share, A)),
            (produce, (keys, incoming, where, share, A)),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )


@gluon.jit
def _fetch(tiles, place, tile, count, columns, A: gl.constexpr):
    """Starts loading the next tiles: a program's channels of their keys, the weights, and the lines
    after them. Missing ones become zeros."""
    C: gl.constexpr = A.COLUMNS
    CHANNELS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    WEIGHTS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    at = tiles.stored + tile * _TILE_ELEMENTS
    row = gl.arange(0, _TOGETHER * TILE, layout=gl.SliceLayout(1, CHANNELS))[:, None]
    column = gl.arange(0, C, layout=gl.SliceLayout(0, CHANNELS))[None, :]
    offset = row // TILE * (2 * _TILE_ELEMENTS) + row % TILE * A.WIDTH + columns
    first = at.to(gl.pointer_type(gl.bfloat16))
    async_load(
        tiles.channels.index(place),
        gl.multiple_of(first + offset, [16, 16]) + column,
        mask=tile + row // TILE < count,
    )
    row = gl.arange(0, _TOGETHER * BLOCK_HEADS, layout=gl.SliceLayout(1, WEIGHTS))[:, None]
    key = gl.arange(0, TILE, layout=gl.SliceLayout(0, WEIGHTS))[None, :]
    offset = row // BLOCK_HEADS * (2 * _TILE_ELEMENTS) + row % BLOCK_HEADS * TILE
    offset += 2 * _KEY_ELEMENTS
    async_load(
        tiles.weights.index(place),
        gl.multiple_of(at.to(gl.pointer_type(gl.float16)) + offset, [16, 16]) + key,
        mask=tile + row // BLOCK_HEADS < count,
    )
    row = gl.arange(0, _TOGETHER * _LINES, layout=LINES)
    offset = row // _LINES * _TILE_ELEMENTS + row % _LINES
    async_load(
        tiles.lines.index(place),
        at + (_KEY_ELEMENTS + _WEIGHT_ELEMENTS) + offset,
        mask=tile + row // _LINES < count,
    )


@gluon.jit
def _scaled(tiles, place, NTH: gl.constexpr, there, sums):
    """The weights of a tile brought to the highest logit so far, the factors that bring the sums
    there, and these sums except for the channels."""
    LINE: gl.constexpr = sums.top.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LINE.parent, 2)
    weight = tiles.weights.index(place).slice(NTH * BLOCK_HEADS, BLOCK_HEADS).load(OPERAND)
    lines = tiles.lines.index(place)
    top = lines.slice(NTH * _LINES, BLOCK_HEADS).load(LINE)
    total = lines.slice(NTH * _LINES + BLOCK_HEADS, BLOCK_HEADS).load(LINE)
    top = gl.where(there, top, float("-inf"))
    highest = gl.maximum(sums.top, top)
    alpha, factor = factors(sums.top, top, highest)
    total = gl.fma(sums.total, alpha, total * factor)
    sums = Sums(top=highest, total=total, acc=sums.acc)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, OPERAND), assert_trivial=True)
    return scaled(weight, factor), alpha, sums


@gluon.jit
def _plus(acc, alpha, weight, tiles, place, NTH: gl.constexpr):
    """The sums with one more tile."""
    channels = tiles.channels.index(place).slice(NTH * TILE, TILE)
    acc = warpgroup_mma(weight, channels, acc * alpha[:, None], is_async=True)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit(do_not_specialize=["max_tiles"])
def _add_kernel(
    sink_ptr,
    tokens_ptr,
    workspace_ptr,
    out_ptr,
    lse_ptr,
    rope_ptr,
    out_stride,
    lse_stride,
    indices_count,
    max_tiles,
    A: gl.constexpr,
):
    """Some channels of one query and block of heads: what left and right of attend.py do with the
    weights, and how they end."""
    begin_program()
    C: gl.constexpr = A.COLUMNS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, SUMS)
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [4, 1], [1, 0])
    SWIZZLE: gl.constexpr = 128 if C >= 64 else 2 * C
    STAGES: gl.constexpr = A.STAGES
    ROWS: gl.constexpr = _TOGETHER * BLOCK_HEADS
    item = gl.program_id(0)
    columns = gl.program_id(1) * C
    program = program_of(item, A)
    query = load_token(token_at(tokens_ptr, program.token))
    token = program.token.to(gl.int64)
    live = query.slot >= 0
    count, _ = seen_tiles(query.position, indices_count, A)
    count = gl.where(live, count, 0)
    tiles = Tiles(
        stored=_stored(workspace_ptr, item, max_tiles),
        channels=gl.allocate_shared_memory(
            gl.bfloat16, [STAGES, _TOGETHER * TILE, C], gl.NVMMASharedLayout(SWIZZLE, 16, rank=2)
        ),
        weights=gl.allocate_shared_memory(gl.float16, [STAGES, ROWS, TILE], _WEIGHT),
        lines=gl.allocate_shared_memory(gl.float32, [STAGES, _TOGETHER * _LINES], VECTOR),
    )
    for nth in gl.static_range(STAGES):
        _fetch(tiles, nth, nth * _TOGETHER, count, columns, A)
        async_copy.commit_group()
    sums = new_sums(C, LINE, SUMS)
    place = gl.to_tensor(0)
    for tile in range(0, count, _TOGETHER):
        async_copy.wait_group(STAGES - 1)
        fence_async_shared()
        w_0, alpha_0, sums = _scaled(tiles, place, 0, tile < count, sums)
        w_1, alpha_1, sums = _scaled(tiles, place, 1, tile + 1 < count, sums)
        w_2, alpha_2, sums = _scaled(tiles, place, 2, tile + 2 < count, sums)
        w_3, alpha_3, sums = _scaled(tiles, place, 3, tile + 3 < count, sums)
        acc = _plus(sums.acc, alpha_0, w_0, tiles, place, 0)
        acc = _plus(acc, alpha_1, w_1, tiles, place, 1)
        acc = _plus(acc, alpha_2, w_2, tiles, place, 2)
        acc = _plus(acc, alpha_3, w_3, tiles, place, 3)
        sums = Sums(top=sums.top, total=sums.total, acc=acc)
        later = tile + STAGES * _TOGETHER
        if later < count:
            _fetch(tiles, place, later, count, columns, A)
        async_copy.commit_group()
        place = gl.where(place == STAGES - 1, 0, place + 1)
    head = gl.arange(0, BLOCK_HEADS, layout=LINE)
    real = live & (program.head + head < A.HEADS)
    lse_row = lse_ptr + token * lse_stride + program.head
    logarithm = (sums.top + gl.log2(sums.total)) * _LN_2
    gl.store(lse_row + head, logarithm, mask=real & (columns == 0))
    sink = gl.load(sink_ptr + program.head + head, mask=real, other=0.0)
    inverse = normaliser(with_sink(sums.total, sink, sums.top), A)
    result = normalised(sums.acc, inverse, A).to(gl.bfloat16)
    if A.ROPE > 0:
        even, odd = pairs(result.to(gl.float32))
        pair = gl.arange(0, C // 2, layout=gl.SliceLayout(0, even.type.layout))
        pair += (columns - (A.WIDTH - A.ROPE)) // 2
        position = query.position - (query.position >> 31)  # padding's is -1: 0
        rope_row = rope_ptr + position.to(gl.int64) * A.ROPE
        turned = pair >= 0
        cos = gl.load(rope_row + pair, mask=turned, other=1.0)[None, :]
        sin = gl.load(rope_row + A.ROPE // 2 + pair, mask=turned, other=0.0)[None, :]
        first, second = rotated(even, odd, cos, sin)
        first = gl.where(turned[None, :], first, even)
        second = gl.where(turned[None, :], second, odd)
        result = gl.reshape(gl.join(first, second), [BLOCK_HEADS, C]).to(gl.bfloat16)
    result = gl.convert_layout(result, OUT)
    head = program.head + gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, OUT))[:, None]
    column = columns + gl.arange(0, C, layout=gl.SliceLayout(0, OUT))[None, :]
    at = out_ptr + token * out_stride + head * A.WIDTH + column
    gl.store(at, result, mask=live & (head < A.HEADS) & (column >= 0))
