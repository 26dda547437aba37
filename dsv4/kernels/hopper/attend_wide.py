"""Attention of many tokens of a request for Hopper: keys are decoded once, not once per token.

Two launches: kernels/decode.py decodes the step's window rows and its requests' entries, then one
program per query and block of heads attends to the decoded rows. It has the roles of attend.py, the
same softmax and the same arithmetic at the end, with tiles of 64 keys and the channels in quarters:
left sums the first one, right the others. While left's softmax leaves the matrix units idle, right
multiplies by the weights of the tile before. A quarter of a tile is free again as soon as its
products are done, and what is copied into it arrives while the others are in use. The producer is a
different one:

    whole tiles    64 neighbouring rows, all of them seen: a bulk copy per quarter
    other tiles    entries of a list, and tiles with keys that are not seen: row by row. The query's
                   own window row replaces a key that is not seen, with weight 0: so what other
                   requests have stored, NaNs too, is never multiplied

A program has a processor for itself, so nothing else fills the wait for its first loads: sinks,
angles and the queries of a later program are requested early. Compiled only; tested on GPUs.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4.kernels.attend import run_time_arguments
from dsv4.kernels.decode import (
    decode_launch,
    decoded,
    decoded_rows,
    entries_apart,
    first_entry,
)
from dsv4.kernels.hopper.attend_keys import BARRIER, OPERAND, VECTOR, next_stage
from dsv4.kernels.hopper.attend_setup import (
    BLOCK_HEADS,
    WARPS_PER_ROLE,
    WEIGHT_STAGES,
    head_blocks,
    load_angles,
    load_queries,
    load_sink,
    new_out,
    new_queries,
    new_weights,
    program_of,
    row_of,
    split_columns,
    store_heads,
    turn_back,
    turns_back,
)
from dsv4.kernels.hopper.attend_softmax import Sums, close, new_sums, normalised, softmax
from dsv4.kernels.hopper.dialect import async_load, bulk_load, reinterpret
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import load_request, load_token, request_at, staged_row, token_at
from dsv4.kernels.target import processors
from dsv4.ops.calls import Attention

# Decoding pays off for requests with many tokens, and if their entries are not too many for them.
MIN_TOKENS = 64
ROWS_PER_TOKEN = 64
TILE_KEYS = 64
STAGES = 2
WIDTH = 512
# Per thread, of 504 in all: left has the other 200. With 176 Triton 3.9 spills in its loop.
RIGHT_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(72)

_TILE = gl.constexpr(TILE_KEYS)
_STAGES = gl.constexpr(STAGES)
_PRODUCERS = gl.constexpr(32 * WARPS_PER_ROLE)  # threads
_QUARTERS = gl.constexpr(4)
_QUARTER = gl.constexpr(WIDTH // 4)  # channels
# Quarters of the next logits that have been started when right may multiply: with 2 it delays them,
# with 4 it begins late (8,192 tokens over HCA at 128k: 2,200 and 2,090 us, with 3 2,040).
_GO = gl.constexpr(3)
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _QUARTER.value, 16]))
_WEIGHT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_COPY = gl.constexpr(gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0]))
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


# Prefetches $2 bytes from address $1 on into the L2; one thread of a warpgroup does it.
_PREFETCH = gl.constexpr("""{
    .reg .pred asks;
    .reg .b32 thread;
    .reg .b64 address;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, 127;
    setp.eq.u32 asks, thread, 0;
    setp.ne.and.u32 asks, $2, 0, asks;
    and.b64 address, $1, -16;
    @asks cp.async.bulk.prefetch.L2.global [address], $2;
    mov.b32 $0, 0;
}""")


@dataclass(frozen=True, slots=True)
class WideConstants:
    """A launch as compile-time constants, as in attend.py, whose code reads the last of them."""

    HEADS: int
    WIDTH: int
    WINDOW: int
    ENTRIES: bool
    ALL: bool
    RATIO: int
    ROPE: int
    KEY_UNIT: float = 1.0
    WHOLE: bool = False
    SPLIT: bool = False


class _Keys(NamedTuple):
    """Tiles in shared memory: the first quarter of the channels of all stages, then the second and
    so on; each becomes ready and free by itself. `bias` is -inf where a key is not seen; it comes
    with the first quarter. `offsets` are those of a tile's rows. `go` allows right to multiply,
    with one barrier for each set of weights that exists at a time."""

    quarters: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    offsets: gl.shared_memory_descriptor
    go: gl.shared_memory_descriptor


class _Source(NamedTuple):
    """Where decoded rows are, and which of them a query reads."""

    rows: gl.tensor
    tiles: gl.tensor  # the rows as a descriptor of bulk copies
    first_entry: gl.tensor
    entries_apart: gl.tensor
    tokens_row: gl.tensor
    batch: gl.tensor
    indices_row: gl.tensor
    indices_count: gl.tensor


class _Later(NamedTuple):
    """All queries, and the program that will probably run next on this processor."""

    q: gl.tensor
    q_stride: gl.tensor
    item: gl.tensor


class _Extent(NamedTuple):
    """A query and its tiles: none for padding. `count` keys after the window, out of `visible`
    entries."""

    slot: gl.tensor
    position: gl.tensor
    tiles: gl.tensor
    count: gl.tensor
    visible: gl.tensor


def supports(call: Attention) -> bool:
    """Whether this kernel supports these shapes, and the step is one for which it is faster."""
    if (
        not call.window.staged
        or call.joint
        or call.window_cut
        or call.batch_invariant  # tiles of 32 keys give other sums
        or call.tokens_per_request < MIN_TOKENS
        or call.q.shape[2] != WIDTH
        or call.window.window % TILE_KEYS
        or not turns_back(call)
        or call.decoded is None
        or (call.entries is not None and (call.max_visible is None or call.entries.resolved))
    ):
        return False
    rows = decoded_rows(call)
    entries = rows - first_entry(call)
    return entries <= ROWS_PER_TOKEN * len(call.tokens) and 2 * WIDTH * rows <= call.decoded.numel()


def attend(call: Attention) -> None:
    """Two launches. As the reference, up to the order of fp32 sums. Deterministic; a query's result
    does not depend on what else is in the step."""
    decode_launch(call).run()
    attend_launch(call, programs=processors(call.q.device)).run()


def attend_launch(call: Attention, *, programs: int) -> Launch:
    """One program for each query and block of heads, `programs` of them at once."""
    heads = call.q.shape[1]
    given = run_time_arguments(call)
    rows = decoded(call)
    constants = WideConstants(
        HEADS=heads,
        WIDTH=WIDTH,
        WINDOW=call.window.window,
        ENTRIES=call.entries is not None,
        ALL=call.indices is None,
        RATIO=1 if call.entries is None else call.entries.ratio,
        ROPE=0 if call.inverse_rope is None else call.inverse_rope.shape[1],
    )
    arguments = (
        given.q_ptr,
        given.sink_ptr,
        given.tokens_ptr,
        given.batch_ptr,
        rows,
        TensorDescriptor.from_tensor(rows, [TILE_KEYS, _QUARTER.value], OPERAND.value),
        given.indices_ptr,
        given.out_ptr,
        given.lse_ptr,
        given.rope_ptr,
        given.q_stride,
        given.out_stride,
        given.lse_stride,
        given.indices_stride,
        given.indices_count,
        first_entry(call),
        entries_apart(call),
        programs,
    )
    options = {"num_warps": WARPS_PER_ROLE, "launch_pdl": False, "enable_fp_fusion": True}
    grid = (call.q.shape[0] * head_blocks(heads),)
    return Launch(_attend_wide_kernel, grid, arguments, {"A": constants}, options)


@gluon.jit
def _extent_of(source, A: gl.constexpr):
    token = load_token(source.tokens_row)
    tiles = gl.to_tensor(A.WINDOW // _TILE)
    count = gl.to_tensor(0)
    visible = gl.to_tensor(0)
    if A.ENTRIES:
        visible = (token.position + 1) // A.RATIO
        count = visible if A.ALL else source.indices_count
        tiles += (count + _TILE - 1) // _TILE
    else:  # unrolled loops would make ptxas serialise products
        tiles = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tiles], gl.int32, False, 1)
    return _Extent(
        slot=token.slot,
        position=token.position,
        tiles=gl.where(token.slot < 0, 0, tiles),
        count=count,
        visible=visible,
    )


@gluon.jit
def _is_whole(tile, extent, A: gl.constexpr):
    """Whether a tile is 64 neighbouring rows that are all seen."""
    WINDOW_TILES: gl.constexpr = A.WINDOW // _TILE
    in_window = tile < WINDOW_TILES
    seen = extent.position - (A.WINDOW - 1) + tile * _TILE >= 0
    if A.ALL:
        return gl.where(in_window, seen, (tile + 1 - WINDOW_TILES) * _TILE <= extent.count)
    else:
        return in_window & seen


@gluon.jit
def _listed(key, source, extent, A: gl.constexpr):
    """The entries that keys after the window name; -1 outside the list."""
    inside = (key >= 0) & (key < extent.count)
    if A.ALL:
        return gl.where(inside, key, -1)
    else:
        return gl.load(source.indices_row + key, mask=inside, other=-1)


@gluon.jit
def _produce(keys, source, A: gl.constexpr):
    """Loads tile after tile. Entries of a list are requested one tile ahead."""
    WINDOW_TILES: gl.constexpr = A.WINDOW // _TILE
    QUARTER_BYTES: gl.constexpr = _TILE * _QUARTER * 2
    extent = _extent_of(source, A)
    token = load_token(source.tokens_row)
    request = load_request(request_at(source.batch, token.batch_row), extent.slot >= 0, 0)
    own = staged_row(request.first_row, request.start, token.batch_row, 0, A.WINDOW)
    own += extent.position
    oldest = own - (A.WINDOW - 1)
    entries = source.first_entry + token.batch_row * source.entries_apart
    nth = gl.arange(0, _TILE, layout=_LINE)
    column = gl.arange(0, _QUARTER, layout=gl.SliceLayout(0, _COPY))[None, :]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    entry = _listed(nth - A.WINDOW, source, extent, A)
    for tile in range(0, extent.tiles):
        if _is_whole(tile, extent, A):
            begin = gl.where(tile < WINDOW_TILES, oldest, entries - A.WINDOW) + tile * _TILE
            for quarter in gl.static_range(_QUARTERS):
                place = quarter * _STAGES + stage
                ready = keys.ready.index(place)
                mbarrier.wait(keys.free.index(place), phase)
                if quarter == 0:
                    keys.bias.index(stage).store(gl.full([_TILE], 0.0, gl.float32, _LINE))
                mbarrier.expect(ready, QUARTER_BYTES)
                bulk_load(
                    source.tiles, [begin, quarter * _QUARTER], ready, keys.quarters.index(place)
                )
                mbarrier.arrive(ready, count=_PRODUCERS)
            entry = _listed((tile + 1 - WINDOW_TILES) * _TILE + nth, source, extent, A)
        else:
            key = tile * _TILE + nth
            in_window = key < A.WINDOW
            seen = gl.where(
                in_window,
                extent.position - (A.WINDOW - 1) + key >= 0,
                (entry >= 0) & (entry < extent.visible),
            )
            row = gl.where(seen, gl.where(in_window, oldest + key, entries + entry), own)
            keys.offsets.index(tile % 2).store(row * A.WIDTH)
            entry = _listed((tile + 1 - WINDOW_TILES) * _TILE + nth, source, extent, A)
            offset = keys.offsets.index(tile % 2).load(gl.SliceLayout(1, _COPY))
            at = gl.multiple_of((source.rows + offset)[:, None], [16, 16]) + column
            for quarter in gl.static_range(_QUARTERS):
                place = quarter * _STAGES + stage
                ready = keys.ready.index(place)
                mbarrier.wait(keys.free.index(place), phase)
                if quarter == 0:
                    keys.bias.index(stage).store(gl.where(seen, 0.0, float("-inf")))
                async_load(keys.quarters.index(place), at + quarter * _QUARTER)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                mbarrier.arrive(ready, count=1)
        stage, phase = next_stage(stage, phase, _STAGES)


@gluon.jit
def _wait_for(place, phase, tile, keys, extent, A: gl.constexpr):
    """Rows that were copied one by one must be made visible to the matrix instructions, which do
    not read them through the ordinary path."""
    mbarrier.wait(keys.ready.index(place), phase)
    if not _is_whole(tile, extent, A):
        fence_async_shared()


@gluon.jit
def _columns(queries):
    """The memory of the queries, in quarters of channels. The output is put there after the last
    logits; `closed` signals that to right."""
    return reinterpret(queries.halves, gl.bfloat16, [_QUARTERS, BLOCK_HEADS, _QUARTER], OPERAND)


@gluon.jit
def _add_logits(
    logits,
    queries,
    keys,
    stage,
    phase,
    tile,
    extent,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    A: gl.constexpr,
):
    """Starts what quarters [FIRST, LAST) add to the logits [heads, keys] of a tile, one by one as
    their keys arrive."""
    columns = _columns(queries)
    for quarter in gl.static_range(FIRST, LAST):
        place = quarter * _STAGES + stage
        _wait_for(place, phase, tile, keys, extent, A)
        logits = warpgroup_mma(
            columns.index(quarter),
            keys.quarters.index(place).permute((1, 0)),
            logits,
            use_acc=quarter > 0,
            is_async=True,
        )
    return logits


@gluon.jit
def _send_for(later, A: gl.constexpr):
    BLOCKS: gl.constexpr = (A.HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    head = later.item % BLOCKS * BLOCK_HEADS
    row = later.q + (later.item // BLOCKS).to(gl.int64) * later.q_stride + head * A.WIDTH
    size = gl.minimum(A.HEADS - head, BLOCK_HEADS) * (2 * A.WIDTH)
    size = gl.where(later.item < gl.num_programs(0), size, 0)
    gl.inline_asm_elementwise(_PREFETCH, "=r,l,r", [row.to(gl.int64), size], gl.int32, False, 1)


@gluon.jit
def _left(queries, keys, weights, out, source, later, A: gl.constexpr):
    LINE: gl.constexpr = gl.SliceLayout(1, _LOGITS)
    KEY: gl.constexpr = gl.SliceLayout(0, _LOGITS)
    extent = _extent_of(source, A)
    load_queries(queries, 0, A)
    sink = load_sink(out, LINE, A)
    mbarrier.wait(queries.ready, 0)
    sums = new_sums(_QUARTER, LINE, _SUMS)
    if extent.tiles > 0:
        last = extent.tiles - 1
        stage = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        none = gl.full([BLOCK_HEADS, _TILE], 0.0, gl.float32, _LOGITS)
        logits = _add_logits(none, queries, keys, stage, phase, 0, extent, 0, _QUARTERS, A)
        logits = warpgroup_mma_wait(0, deps=[logits])
        for nth in range(0, last):
            sums = softmax(logits, sums, keys.bias.index(stage).load(KEY), nth, weights, A)
            running = warpgroup_mma(
                weights.probabilities.index(nth % WEIGHT_STAGES),
                keys.quarters.index(stage),
                sums.acc,
                is_async=True,
            )
            used = stage
            stage, phase = next_stage(stage, phase, _STAGES)
            coming = _add_logits(none, queries, keys, stage, phase, nth + 1, extent, 0, 1, A)
            running, coming = warpgroup_mma_wait(1, deps=[running, coming])
            mbarrier.arrive(keys.free.index(used), count=1)
            coming = _add_logits(coming, queries, keys, stage, phase, nth + 1, extent, 1, _GO, A)
            mbarrier.arrive(keys.go.index(nth % WEIGHT_STAGES), count=1)
            coming = _add_logits(
                coming, queries, keys, stage, phase, nth + 1, extent, _GO, _QUARTERS, A
            )
            acc, logits = warpgroup_mma_wait(0, deps=[running, coming])
            sums = Sums(top=sums.top, total=sums.total, acc=acc)
        _send_for(later, A)
        sums = softmax(logits, sums, keys.bias.index(stage).load(KEY), last, weights, A)
        running = warpgroup_mma(
            weights.probabilities.index(last % WEIGHT_STAGES),
            keys.quarters.index(stage),
            sums.acc,
            is_async=True,
        )
        mbarrier.arrive(keys.go.index(last % WEIGHT_STAGES), count=1)
        acc = warpgroup_mma_wait(0, deps=[running])
        sums = Sums(top=sums.top, total=sums.total, acc=acc)
    inverse = close(sums, sink, weights, out, None, extent, A)
    first = normalised(sums.acc, inverse, A)
    columns = _columns(queries)
    columns.index(0).store(first.to(gl.bfloat16))
    store_heads(columns.index(0), out.row, extent.slot >= 0, out, A)


@gluon.jit
def _right(queries, keys, weights, out, source, A: gl.constexpr):
    extent = _extent_of(source, A)
    load_queries(queries, 1, A)
    load_angles(out, extent.position, A)
    second = gl.full([BLOCK_HEADS, _QUARTER], 0.0, gl.float32, _SUMS)
    third = gl.full([BLOCK_HEADS, _QUARTER], 0.0, gl.float32, _SUMS)
    fourth = gl.full([BLOCK_HEADS, _QUARTER], 0.0, gl.float32, _SUMS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for nth in range(0, extent.tiles):
        place = nth % WEIGHT_STAGES
        place_phase = (nth // WEIGHT_STAGES) % 2
        mbarrier.wait(weights.ready.index(place), place_phase)
        alpha = weights.factors.index(place).load(gl.SliceLayout(1, _SUMS))[:, None]
        second = second * alpha
        third = third * alpha
        fourth = fourth * alpha
        mbarrier.wait(keys.go.index(place), place_phase)
        # all branches come first: between products they would make ptxas serialise them
        mbarrier.wait(keys.ready.index(_STAGES + stage), phase)
        mbarrier.wait(keys.ready.index(2 * _STAGES + stage), phase)
        _wait_for(3 * _STAGES + stage, phase, nth, keys, extent, A)
        probabilities = weights.probabilities.index(place)
        second = _multiply(probabilities, keys, 1, stage, second)
        third = _multiply(probabilities, keys, 2, stage, third)
        fourth = _multiply(probabilities, keys, 3, stage, fourth)
        second, third, fourth = warpgroup_mma_wait(2, deps=[second, third, fourth])
        mbarrier.arrive(keys.free.index(_STAGES + stage), count=1)
        second, third, fourth = warpgroup_mma_wait(1, deps=[second, third, fourth])
        mbarrier.arrive(keys.free.index(2 * _STAGES + stage), count=1)
        second, third, fourth = warpgroup_mma_wait(0, deps=[second, third, fourth])
        mbarrier.arrive(keys.free.index(3 * _STAGES + stage), count=1)
        mbarrier.arrive(weights.free.index(place), count=1)
        stage, phase = next_stage(stage, phase, _STAGES)
    mbarrier.wait(weights.closed, 0)
    inverse = weights.factors.index(WEIGHT_STAGES).load(gl.SliceLayout(1, _SUMS))
    columns = _columns(queries)
    columns.index(1).store(normalised(second, inverse, A).to(gl.bfloat16))
    columns.index(2).store(normalised(third, inverse, A).to(gl.bfloat16))
    fourth = normalised(fourth, inverse, A)
    if A.ROPE > 0:
        straight, turned = split_columns(fourth)
        turned = turn_back(turned, out.angles, A)
        columns.index(3).slice(0, 64, dim=1).store(straight.to(gl.bfloat16))
        columns.index(3).slice(64, 64, dim=1).store(turned.to(gl.bfloat16))
    else:
        columns.index(3).store(fourth.to(gl.bfloat16))
    for quarter in gl.static_range(1, _QUARTERS):
        row = out.row + quarter * _QUARTER
        store_heads(columns.index(quarter), row, extent.slot >= 0, out, A)


@gluon.jit
def _multiply(probabilities, keys, QUARTER: gl.constexpr, stage, acc):
    values = keys.quarters.index(QUARTER * _STAGES + stage)
    return warpgroup_mma(probabilities, values, acc, is_async=True)


@gluon.jit(do_not_specialize=["first_row", "apart", "at_once"])
def _attend_wide_kernel(
    q_ptr,
    sink_ptr,
    tokens_ptr,
    batch_ptr,
    rows_ptr,
    tiles,
    indices_ptr,
    out_ptr,
    lse_ptr,
    rope_ptr,
    q_stride,
    out_stride,
    lse_stride,
    indices_stride,
    indices_count,
    first_row,
    apart,
    at_once,
    A: gl.constexpr,
):
    begin_program()
    item = gl.program_id(0)
    program = program_of(item, A)
    queries = new_queries(q_ptr, q_stride, program, A)
    keys = _Keys(
        quarters=gl.allocate_shared_memory(
            gl.bfloat16, [_QUARTERS * _STAGES, _TILE, _QUARTER], OPERAND
        ),
        bias=gl.allocate_shared_memory(gl.float32, [_STAGES, _TILE], VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [_QUARTERS * _STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [_QUARTERS * _STAGES, 1], BARRIER),
        offsets=gl.allocate_shared_memory(gl.int32, [2, _TILE], VECTOR),
        go=gl.allocate_shared_memory(gl.int64, [WEIGHT_STAGES, 1], BARRIER),
    )
    weights = new_weights(_TILE, _WEIGHT)
    for place in gl.static_range(WEIGHT_STAGES):
        mbarrier.init(keys.go.index(place), count=1)
    for nth in gl.static_range(_QUARTERS * _STAGES):
        # one arrival for the bulk copy or the role, and one per thread, or all of these at once
        mbarrier.init(keys.ready.index(nth), count=1 + _PRODUCERS)
        mbarrier.init(keys.free.index(nth), count=1)
    fence_async_shared()
    source = _Source(
        rows=rows_ptr,
        tiles=tiles,
        first_entry=first_row,
        entries_apart=apart,
        tokens_row=token_at(tokens_ptr, program.token),
        batch=batch_ptr,
        indices_row=indices_ptr + program.token.to(gl.int64) * indices_stride,
        indices_count=indices_count,
    )
    sink_row = sink_ptr + program.head
    out_row = row_of(out_ptr, out_stride, program, A.WIDTH)
    lse_row = row_of(lse_ptr, lse_stride, program, 1)
    out = new_out(sink_row, out_row, lse_row, rope_ptr, program, A)
    later = _Later(q=q_ptr, q_stride=q_stride, item=item + at_once)
    gl.warp_specialize(
        [
            (_left, (queries, keys, weights, out, source, later, A)),
            (_right, (queries, keys, weights, out, source, A)),
            (_produce, (keys, source, A)),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )
