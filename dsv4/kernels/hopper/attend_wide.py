"""Attention of many tokens of a request for Hopper: keys are decoded once, not once per token.

Two launches: kernels/decode.py decodes the step's window rows and its requests' entries, then one
program per query and block of heads attends to the decoded rows. It has the roles of attend.py, the
same softmax and the same end, with 64 keys a tile and another producer:

    whole tiles    64 neighbouring rows, all of them seen: two bulk copies, one per half of channels
    other tiles    entries of a list, and tiles with keys that are not seen: row by row. A key that
                   is not seen stands for the query's own window row, and its weight is 0: what
                   other requests have stored, NaNs too, is never multiplied

A half of a tile is free again as soon as its products are done. Compiled only; tested on GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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
from dsv4.kernels.hopper.attend import (
    _HEADS,
    _WEIGHT_STAGES,
    WARPS_PER_ROLE,
    Out,
    Queries,
    Sums,
    Weights,
    end_left,
    end_right,
    head_blocks,
    load_queries,
    softmax,
    turns_back,
)
from dsv4.kernels.hopper.attend_keys import BARRIER, HALF, OPERAND, VECTOR, next_stage
from dsv4.kernels.hopper.dialect import async_load, bulk_load
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import load_request, load_token, request_at, staged_row, token_at
from dsv4.ops.calls import Attention

# Decoding pays for requests with many tokens, and with entries that are not too many for them.
MIN_TOKENS = 64
ROWS_PER_TOKEN = 64
TILE_KEYS = 64
STAGES = 2
WIDTH = 512
RIGHT_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(168), gl.constexpr(96)

_TILE = gl.constexpr(TILE_KEYS)
_STAGES = gl.constexpr(STAGES)
_PRODUCERS = gl.constexpr(32 * WARPS_PER_ROLE)  # threads
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KEYS, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF.value, 16]))
_WEIGHT = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_COPY = gl.constexpr(gl.BlockedLayout([16, 8], [1, 32], [4, 1], [1, 0]))
_LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@dataclass(frozen=True, slots=True)
class WideConstants:
    """A launch as compile-time constants, as in attend.py, whose parts read the last ones."""

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
    SLICES: int = 1


class _Keys(NamedTuple):
    """Tiles in shared memory: the first half of the channels of all stages, then the second; each
    half becomes ready and free by itself. `bias` is -inf where a key is not seen, and there with
    the first half. `offsets` are those of a tile's rows."""

    halves: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    offsets: gl.shared_memory_descriptor


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


class _Extent(NamedTuple):
    """A query and its tiles: none for padding. `count` keys behind the window, of `visible`
    entries."""

    slot: gl.tensor
    position: gl.tensor
    tiles: gl.tensor
    count: gl.tensor
    visible: gl.tensor


class _NoShare(NamedTuple):
    """A program does all of its heads' work."""

    split: Any
    nth_slice: Any


def supports(call: Attention) -> bool:
    """Whether this kernel does these shapes, and the step is one that it is faster for."""
    if (
        not call.window.staged
        or call.joint
        or call.window_cut
        or call.whole  # the sums of tiles of 32 keys are other ones
        or call.tokens_per_request < MIN_TOKENS
        or call.q.shape[2] != WIDTH
        or call.window.window % TILE_KEYS
        or not turns_back(call)
        or call.decoded is None
        or (call.entries is not None and call.max_visible is None)
    ):
        return False
    rows = decoded_rows(call)
    entries = rows - first_entry(call)
    return entries <= ROWS_PER_TOKEN * len(call.tokens) and 2 * WIDTH * rows <= call.decoded.numel()


def attend(call: Attention) -> None:
    """Two launches. As the reference, up to the order of fp32 sums. Deterministic; a query's result
    does not depend on what else is in the step."""
    decode_launch(call).run()
    attend_launch(call).run()


def attend_launch(call: Attention) -> Launch:
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
        TensorDescriptor.from_tensor(rows, [TILE_KEYS, HALF.value], OPERAND.value),
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
    """The entries that keys behind the window name; what lies outside the list is -1."""
    inside = (key >= 0) & (key < extent.count)
    if A.ALL:
        return gl.where(inside, key, -1)
    else:
        return gl.load(source.indices_row + key, mask=inside, other=-1)


@gluon.jit
def _produce(keys, source, A: gl.constexpr):
    """Brings tile after tile. Entries of a list are sent for one tile ahead."""
    WINDOW_TILES: gl.constexpr = A.WINDOW // _TILE
    HALF_BYTES: gl.constexpr = _TILE * HALF * 2
    extent = _extent_of(source, A)
    token = load_token(source.tokens_row)
    request = load_request(request_at(source.batch, token.batch_row), extent.slot >= 0, 0)
    own = staged_row(request.first_row, request.start, token.batch_row, 0, A.WINDOW)
    own += extent.position
    oldest = own - (A.WINDOW - 1)
    entries = source.first_entry + token.batch_row * source.entries_apart
    nth = gl.arange(0, _TILE, layout=_LINE)
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, _COPY))[None, :]
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    entry = _listed(nth - A.WINDOW, source, extent, A)
    for tile in range(0, extent.tiles):
        first = keys.ready.index(stage)
        second = keys.ready.index(_STAGES + stage)
        if _is_whole(tile, extent, A):
            begin = gl.where(tile < WINDOW_TILES, oldest, entries - A.WINDOW) + tile * _TILE
            mbarrier.wait(keys.free.index(stage), phase)
            keys.bias.index(stage).store(gl.full([_TILE], 0.0, gl.float32, _LINE))
            mbarrier.expect(first, HALF_BYTES)
            bulk_load(source.tiles, [begin, 0], first, keys.halves.index(stage))
            mbarrier.arrive(first, count=_PRODUCERS)
            mbarrier.wait(keys.free.index(_STAGES + stage), phase)
            mbarrier.expect(second, HALF_BYTES)
            bulk_load(source.tiles, [begin, HALF], second, keys.halves.index(_STAGES + stage))
            mbarrier.arrive(second, count=_PRODUCERS)
            entry = _listed((tile + 1 - WINDOW_TILES) * _TILE + nth, source, extent, A)
        else:
            place = tile * _TILE + nth
            in_window = place < A.WINDOW
            seen = gl.where(
                in_window,
                extent.position - (A.WINDOW - 1) + place >= 0,
                (entry >= 0) & (entry < extent.visible),
            )
            row = gl.where(seen, gl.where(in_window, oldest + place, entries + entry), own)
            keys.offsets.index(tile % 2).store(row * A.WIDTH)
            entry = _listed((tile + 1 - WINDOW_TILES) * _TILE + nth, source, extent, A)
            offset = keys.offsets.index(tile % 2).load(gl.SliceLayout(1, _COPY))
            at = gl.multiple_of((source.rows + offset)[:, None], [16, 16]) + column
            mbarrier.wait(keys.free.index(stage), phase)
            keys.bias.index(stage).store(gl.where(seen, 0.0, float("-inf")))
            async_load(keys.halves.index(stage), at)
            async_copy.mbarrier_arrive(first, increment_count=False)
            mbarrier.arrive(first, count=1)
            mbarrier.wait(keys.free.index(_STAGES + stage), phase)
            async_load(keys.halves.index(_STAGES + stage), at + HALF)
            async_copy.mbarrier_arrive(second, increment_count=False)
            mbarrier.arrive(second, count=1)
        stage, phase = next_stage(stage, phase, _STAGES)


@gluon.jit
def _wait_for(half, phase, tile, keys, extent, A: gl.constexpr):
    """Rows that were copied one by one must be shown to the matrix instructions, which read them
    past the ordinary way."""
    mbarrier.wait(keys.ready.index(half), phase)
    if not _is_whole(tile, extent, A):
        fence_async_shared()


@gluon.jit
def _logits(queries, keys, stage, phase, tile, extent, A: gl.constexpr):
    """Starts the logits [heads, keys] of a tile, half by half as its keys are there."""
    none = gl.full([_HEADS, _TILE], 0.0, gl.float32, _LOGITS)
    _wait_for(stage, phase, tile, keys, extent, A)
    logits = warpgroup_mma(
        queries.halves.index(0),
        keys.halves.index(stage).permute((1, 0)),
        none,
        use_acc=False,
        is_async=True,
    )
    _wait_for(_STAGES + stage, phase, tile, keys, extent, A)
    return warpgroup_mma(
        queries.halves.index(1),
        keys.halves.index(_STAGES + stage).permute((1, 0)),
        logits,
        is_async=True,
    )


@gluon.jit
def _left(queries, keys, weights, out, source, A: gl.constexpr):
    LINE: gl.constexpr = gl.SliceLayout(1, _LOGITS)
    KEY: gl.constexpr = gl.SliceLayout(0, _LOGITS)
    extent = _extent_of(source, A)
    load_queries(queries, 0, A)
    mbarrier.arrive(queries.ready, count=1)
    mbarrier.wait(queries.ready, 0)
    sums = Sums(
        top=gl.full([_HEADS], float("-inf"), gl.float32, LINE),
        total=gl.full([_HEADS], 0.0, gl.float32, LINE),
        acc=gl.full([_HEADS, HALF], 0.0, gl.float32, _SUMS),
    )
    if extent.tiles > 0:
        last = extent.tiles - 1
        stage = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        logits = _logits(queries, keys, stage, phase, 0, extent, A)
        logits = warpgroup_mma_wait(0, deps=[logits])
        mbarrier.arrive(keys.free.index(_STAGES + stage), count=1)
        for nth in range(0, last):
            sums = softmax(logits, sums, keys.bias.index(stage).load(KEY), nth, weights, A)
            running = warpgroup_mma(
                weights.probabilities.index(nth % _WEIGHT_STAGES),
                keys.halves.index(stage),
                sums.acc,
                is_async=True,
            )
            used = stage
            stage, phase = next_stage(stage, phase, _STAGES)
            next_logits = _logits(queries, keys, stage, phase, nth + 1, extent, A)
            running, next_logits = warpgroup_mma_wait(1, deps=[running, next_logits])
            mbarrier.arrive(keys.free.index(used), count=1)
            acc, logits = warpgroup_mma_wait(0, deps=[running, next_logits])
            mbarrier.arrive(keys.free.index(_STAGES + stage), count=1)
            sums = Sums(top=sums.top, total=sums.total, acc=acc)
        sums = softmax(logits, sums, keys.bias.index(stage).load(KEY), last, weights, A)
        running = warpgroup_mma(
            weights.probabilities.index(last % _WEIGHT_STAGES),
            keys.halves.index(stage),
            sums.acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[running])
        sums = Sums(top=sums.top, total=sums.total, acc=acc)
    end_left(sums, queries, weights, out, _NoShare(split=0, nth_slice=0), extent, A)


@gluon.jit
def _right(queries, keys, weights, out, source, A: gl.constexpr):
    extent = _extent_of(source, A)
    load_queries(queries, 1, A)
    mbarrier.arrive(queries.ready, count=1)
    acc = gl.full([_HEADS, HALF], 0.0, gl.float32, _SUMS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for nth in range(0, extent.tiles):
        place = nth % _WEIGHT_STAGES
        _wait_for(_STAGES + stage, phase, nth, keys, extent, A)
        mbarrier.wait(weights.ready.index(place), (nth // _WEIGHT_STAGES) % 2)
        alpha = weights.factors.index(place).load(gl.SliceLayout(1, _SUMS))  # [heads]
        acc = acc * alpha[:, None]
        acc = warpgroup_mma(
            weights.probabilities.index(place),
            keys.halves.index(_STAGES + stage),
            acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(weights.free.index(place), count=1)
        mbarrier.arrive(keys.free.index(_STAGES + stage), count=1)
        stage, phase = next_stage(stage, phase, _STAGES)
    end_right(acc, queries, weights, out, _NoShare(split=0, nth_slice=0), extent, A)


@gluon.jit(do_not_specialize=["first_row", "apart"])
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
    A: gl.constexpr,
):
    begin_program()
    BLOCKS: gl.constexpr = (A.HEADS + _HEADS - 1) // _HEADS
    item = gl.program_id(0)
    head = item % BLOCKS * _HEADS
    token = (item // BLOCKS).to(gl.int64)
    heads = gl.minimum(A.HEADS - head, _HEADS)
    queries = Queries(
        halves=gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, HALF], OPERAND),
        ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        row=q_ptr + token * q_stride + head * A.WIDTH,
        heads=heads,
    )
    keys = _Keys(
        halves=gl.allocate_shared_memory(gl.bfloat16, [2 * _STAGES, _TILE, HALF], OPERAND),
        bias=gl.allocate_shared_memory(gl.float32, [_STAGES, _TILE], VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [2 * _STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [2 * _STAGES, 1], BARRIER),
        offsets=gl.allocate_shared_memory(gl.int32, [2, _TILE], VECTOR),
    )
    weights = Weights(
        probabilities=gl.allocate_shared_memory(
            gl.bfloat16, [_WEIGHT_STAGES, _HEADS, _TILE], _WEIGHT
        ),
        factors=gl.allocate_shared_memory(gl.float32, [_WEIGHT_STAGES + 1, _HEADS], VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [_WEIGHT_STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [_WEIGHT_STAGES, 1], BARRIER),
        closed=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    mbarrier.init(queries.ready, count=2)
    for stage in gl.static_range(_STAGES):
        # one arrival of the bulk copy or of the role, one per thread or as many at once
        mbarrier.init(keys.ready.index(stage), count=1 + _PRODUCERS)
        mbarrier.init(keys.ready.index(_STAGES + stage), count=1 + _PRODUCERS)
        mbarrier.init(keys.free.index(stage), count=1)  # only left reads the first half
        mbarrier.init(keys.free.index(_STAGES + stage), count=2)
    mbarrier.init(weights.closed, count=1)
    for place in gl.static_range(_WEIGHT_STAGES):
        mbarrier.init(weights.ready.index(place), count=1)
        mbarrier.init(weights.free.index(place), count=1)
    fence_async_shared()
    source = _Source(
        rows=rows_ptr,
        tiles=tiles,
        first_entry=first_row,
        entries_apart=apart,
        tokens_row=token_at(tokens_ptr, item // BLOCKS),
        batch=batch_ptr,
        indices_row=indices_ptr + token * indices_stride,
        indices_count=indices_count,
    )
    out = Out(
        heads=heads,
        sink_row=sink_ptr + head,
        row=out_ptr + token * out_stride + head * A.WIDTH,
        lse_row=lse_ptr + token * lse_stride + head,
        rope=rope_ptr,
        parts=rope_ptr,
        counter=rope_ptr,
    )
    gl.warp_specialize(
        [
            (_left, (queries, keys, weights, out, source, A)),
            (_right, (queries, keys, weights, out, source, A)),
            (_produce, (keys, source, A)),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )
