"""Sparse attention for Hopper: a producer decodes keys while two warpgroups multiply.

The portable kernel (attend.py) lets every warp do everything in turn. Here the warps of a program
have roles, which Triton's Gluon dialect can express and its interpreter cannot run, so this file is
tested on GPUs only; it must agree with the portable kernel and the reference.

    producer   4 warps: reads 32 records at a time, one thread for 16 channels of a row, with the
               next ones already being loaded, and stores them decoded, bf16, in shared memory
    left       4 warps: logits of 64 heads × 32 keys, softmax, and the first half of its channels
               of the sum
    right      4 warps: the second half, from the left's probabilities

A query's keys are numbered as in attend.py and cut into `splits` parts of about equal length. Where
processors would be idle the channels are cut too: each of `slices` programs computes all logits of
a part, but sums only its own channels, so that there is less to write and to add.

The programs of a split query wait for each other, so all of them must run at once: there are never
more programs than processors, and the launch is cooperative, so the driver starts it as a whole.

    here                  which launch, left, right
    attend_setup.py       how any of these programs begins, and how it stores its heads
    attend_keys.py        which keys a query has, where they are, and their tiles once decoded
    attend_producer.py    the producer's pipeline
    records_v4.py, records_v41.py    a tile of records, fetched and decoded
    attend_softmax.py     logits, softmax, what normalises
    attend_parts.py       parts of a split query
    attend_whole.py       few queries that must not be cut, in two launches
    attend_wide.py        chunks, whose keys are decoded before
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.errors import InvalidInput
from dsv4.kernels.attend import entries_or_window, run_time_arguments
from dsv4.kernels.hopper import records_v4 as v4
from dsv4.kernels.hopper import records_v41 as v41
from dsv4.kernels.hopper.attend_keys import (
    HALF,
    KEY_STAGES,
    OPERAND,
    TILE,
    Share,
    extent_of,
    new_keys,
    next_stage,
    where_of,
)
from dsv4.kernels.hopper.attend_parts import (
    combine,
    combine_shape,
    meet,
    park,
    part_of,
    parts_of,
    sums_of,
)
from dsv4.kernels.hopper.attend_producer import new_incoming, produce
from dsv4.kernels.hopper.attend_setup import (
    BLOCK_HEADS,
    WARPS_PER_ROLE,
    WEIGHT_STAGES,
    Program,
    head_blocks,
    load_angles,
    load_queries,
    load_sink,
    new_out,
    new_queries,
    new_weights,
    row_of,
    split_columns,
    store_heads,
    turn_back,
    turns_back,
)
from dsv4.kernels.hopper.attend_softmax import (
    LOGITS,
    Sums,
    close,
    logits_of,
    new_sums,
    normalised,
    softmax,
)
from dsv4.kernels.hopper.dialect import reinterpret
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import token_at
from dsv4.kernels.sizes import PART_ELEMENTS, PARTS_START, hopper_attend_elements
from dsv4.kernels.target import processors
from dsv4.ops.calls import Attention

TILE_KEYS = TILE.value
# A processor has 504 registers for one thread of each role: left gets what these two leave.
RIGHT_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(168), gl.constexpr(104)
# More parts than this cost more to combine than they save.
MAX_SPLITS = 66
# What writing and adding parts costs, in units of the time of a tile, by the number of slices.
PARTS_COST_TILES = {1: 3.0, 2: 1.3, 4: 0.0}

_WEIGHT = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))


@dataclass(frozen=True, slots=True)
class HopperConstants:
    """A launch as compile-time constants. ALL: every visible entry, not a list. RESOLVED: the list
    says where entries are. V41: the records are V4.1's. KEY_UNIT: decoded keys times this are the
    numbers. WHOLE: the softmax of queries that are never cut. PARTS and HEADS_PER_THREAD: see
    combine_shape."""

    HEADS: int
    WIDTH: int
    WINDOW: int
    WINDOW_ROWS: int
    STAGED: bool
    ENTRIES: bool
    ALL: bool
    RATIO: int
    ENTRY_ROWS: int
    V41: bool
    KEY_UNIT: float
    WINDOW_DATA_STRIDE: int
    WINDOW_SCALE_STRIDE: int
    DATA_STRIDE: int
    SCALE_STRIDE: int
    ROPE: int
    WHOLE: bool
    SPLIT: bool
    SLICES: int
    PARTS: int
    HEADS_PER_THREAD: int
    RESOLVED: bool


def supports(call: Attention) -> bool:
    """Whether this kernel supports these shapes and records: V4's or V4.1's, with any number of
    heads."""
    return (
        call.q.shape[2] == 2 * HALF.value
        and (v4.takes(call) or v41.takes(call))
        and call.window.window % TILE_KEYS == 0
        and turns_back(call)
        and not call.joint
        and not call.window_cut
    )


def tiles_of(window: int, max_entries: int) -> int:
    """The most tiles that a query can have."""
    return -(-window // int(TILE_KEYS)) - (-max_entries // int(TILE_KEYS))


def workspace_elements(device: torch.device) -> int:
    """fp32 elements that any launch needs at most."""
    return hopper_attend_elements(processors(device))


def shares(
    tokens: int, heads: int, window: int, max_entries: int, programs: int
) -> tuple[int, int]:
    """Into how many splits of its keys and slices of its channels a query is cut, so that at most
    `programs` of them run at once. It follows from shapes alone: the same launch is always cut the
    same way, whatever the lengths are."""
    tiles = tiles_of(window, max_entries)
    items = max(1, tokens * head_blocks(heads))
    best, least = (1, 1), float(tiles)
    for slices, cost in PARTS_COST_TILES.items():
        splits = min(tiles, programs // (items * slices), MAX_SPLITS)
        if splits > 1 and -(-tiles // splits) + cost < least:
            best, least = (splits, slices), -(-tiles // splits) + cost
    return best


def attend(call: Attention) -> None:
    """One launch. As the reference, up to the order of fp32 sums and, where split, a rounding of
    each part to 11 bits.

    Deterministic; a query's result depends on its keys and on the number of tokens in the launch
    (which sets the split), not on the other queries. Only for what `supports` accepts.
    """
    attend_launch(call, programs=processors(call.q.device)).run()


def attend_launch(call: Attention, *, programs: int) -> Launch:
    """A grid of queries and blocks of heads × splits × slices, at most `programs` of them where a
    query is split. Raises InvalidInput for a workspace that is too small."""
    count, heads, _ = call.q.shape
    splits, slices = 1, 1
    if not call.batch_invariant:
        splits, slices = shares(count, heads, call.window.window, call.max_entries, programs)
    items = count * head_blocks(heads)
    needed = PARTS_START + items * splits * PART_ELEMENTS if splits > 1 else 0
    given = 0 if call.workspace is None else call.workspace.numel()
    if needed > given:
        raise InvalidInput(
            f"attention of {count} tokens with {heads} heads in {splits} splits needs a workspace "
            f"of {needed} fp32 elements, got {given}: size it with workspace_elements"
        )
    constants = constants_of(call, splits=splits, slices=slices)
    options = {
        "num_warps": WARPS_PER_ROLE,
        "launch_cooperative_grid": splits > 1,
        "launch_pdl": False,  # one program per processor: two on one processor would be slower
        "enable_fp_fusion": True,
    }
    grid = (items, splits, slices)
    arguments = run_time_arguments(call)
    return Launch(_attend_hopper_kernel, grid, arguments, {"A": constants}, options)


def constants_of(call: Attention, *, splits: int = 1, slices: int = 1) -> HopperConstants:
    window, source = call.window, entries_or_window(call)
    parts, heads_per_thread = combine_shape(splits, slices)
    return HopperConstants(
        HEADS=call.q.shape[1],
        WIDTH=call.q.shape[2],
        WINDOW=window.window,
        WINDOW_ROWS=window.page.rows,
        STAGED=window.staged,
        ENTRIES=call.entries is not None,
        ALL=call.indices is None,
        RATIO=source.ratio,
        ENTRY_ROWS=source.page.rows,
        V41=v41.takes(call),
        KEY_UNIT=v41.KEY_UNIT if v41.takes(call) else 1.0,
        WINDOW_DATA_STRIDE=window.page.data_stride_bytes,
        WINDOW_SCALE_STRIDE=window.page.scale_stride_bytes,
        DATA_STRIDE=source.page.data_stride_bytes,
        SCALE_STRIDE=source.page.scale_stride_bytes,
        ROPE=0 if call.inverse_rope is None else call.inverse_rope.shape[1],
        WHOLE=call.batch_invariant,
        SPLIT=splits > 1,
        SLICES=slices,
        PARTS=parts,
        HEADS_PER_THREAD=heads_per_thread,
        RESOLVED=source.resolved,
    )


@gluon.jit
def _values(keys, stage, nth_slice, ROLE: gl.constexpr, A: gl.constexpr):
    """The channels of a tile that a consumer of a slice sums, [keys, channels]."""
    SLICES: gl.constexpr = A.SLICES
    pieces = reinterpret(
        keys.halves, gl.bfloat16, [2 * KEY_STAGES * SLICES, TILE, HALF // SLICES], OPERAND
    )
    nth = 2 * nth_slice + ROLE
    return pieces.index((nth // SLICES * KEY_STAGES + stage) * SLICES + nth % SLICES)


@gluon.jit
def _left(queries, keys, weights, out, share, A: gl.constexpr):
    """The logits of the next tile are computed while this one is summed, so that only the softmax
    has to be waited for."""
    LINE: gl.constexpr = gl.SliceLayout(1, LOGITS)
    KEY: gl.constexpr = gl.SliceLayout(0, LOGITS)
    COLUMNS: gl.constexpr = HALF // A.SLICES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    extent = extent_of(share, A)
    load_queries(queries, 0, A)
    sink = load_sink(out, LINE, A)
    mbarrier.wait(queries.ready, 0)
    sums = new_sums(COLUMNS, LINE, SUMS)
    tiles = extent.last - extent.first
    if tiles > 0:
        stage = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        logits = warpgroup_mma_wait(0, deps=[logits_of(queries, keys, stage, phase)])
        for nth in range(0, tiles - 1):
            sums = softmax(logits, sums, keys.bias.index(stage).load(KEY), nth, weights, A)
            running = warpgroup_mma(
                weights.probabilities.index(nth % WEIGHT_STAGES),
                _values(keys, stage, share.nth_slice, 0, A),
                sums.acc,
                is_async=True,
            )
            used = stage
            stage, phase = next_stage(stage, phase, KEY_STAGES)
            next_logits = logits_of(queries, keys, stage, phase)
            acc, logits = warpgroup_mma_wait(0, deps=[running, next_logits])
            sums = Sums(top=sums.top, total=sums.total, acc=acc)
            mbarrier.arrive(keys.free.index(used), count=1)
        sums = softmax(logits, sums, keys.bias.index(stage).load(KEY), tiles - 1, weights, A)
        running = warpgroup_mma(
            weights.probabilities.index((tiles - 1) % WEIGHT_STAGES),
            _values(keys, stage, share.nth_slice, 0, A),
            sums.acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[running])
        sums = Sums(top=sums.top, total=sums.total, acc=acc)
    _end_left(sums, sink, queries, weights, out, share, extent, A)


@gluon.jit
def _end_left(sums, sink, queries, weights, out, share, extent, A: gl.constexpr):
    COLUMNS: gl.constexpr = HALF // A.SLICES
    inverse = close(sums, sink, weights, out, share, extent, A)
    acc = normalised(sums.acc, inverse, A)
    if A.SPLIT:
        staged = park(acc, queries, out, share, extent.slot >= 0, 0, A)
    else:
        staged = reinterpret(queries.halves.index(0), gl.bfloat16, [BLOCK_HEADS, COLUMNS], OPERAND)
        staged.store(acc.to(gl.bfloat16))
    _finish(staged, out, share, extent, 0, A)


@gluon.jit
def _right(queries, keys, weights, out, share, A: gl.constexpr):
    """Sums its channels with the left's probabilities, tile after tile."""
    COLUMNS: gl.constexpr = HALF // A.SLICES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    extent = extent_of(share, A)
    load_queries(queries, 1, A)
    load_angles(out, extent.position, A)
    acc = gl.full([BLOCK_HEADS, COLUMNS], 0.0, gl.float32, SUMS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for nth in range(0, extent.last - extent.first):
        place = nth % WEIGHT_STAGES
        mbarrier.wait(keys.ready.index(stage), phase)
        mbarrier.wait(weights.ready.index(place), (nth // WEIGHT_STAGES) % 2)
        alpha = weights.factors.index(place).load(gl.SliceLayout(1, SUMS))  # [heads]
        acc = acc * alpha[:, None]
        acc = warpgroup_mma(
            weights.probabilities.index(place),
            _values(keys, stage, share.nth_slice, 1, A),
            acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(weights.free.index(place), count=1)
        mbarrier.arrive(keys.free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, KEY_STAGES)
    _end_right(acc, queries, weights, out, share, extent, A)


@gluon.jit
def _end_right(acc, queries, weights, out, share, extent, A: gl.constexpr):
    """What right does after its last tile, with the normalising factor from left."""
    SUMS: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = HALF // A.SLICES
    mbarrier.wait(weights.closed, 0)
    acc = normalised(acc, weights.factors.index(WEIGHT_STAGES).load(gl.SliceLayout(1, SUMS)), A)
    if A.SPLIT:
        staged = park(acc, queries, out, share, extent.slot >= 0, 1, A)
    elif A.ROPE > 0:
        staged = reinterpret(queries.halves.index(1), gl.bfloat16, [BLOCK_HEADS, COLUMNS], OPERAND)
        low, high = split_columns(acc)
        middle, turned = split_columns(high)
        turned = turn_back(turned, out.angles, A)
        staged.slice(0, 128, dim=1).store(low.to(gl.bfloat16))
        staged.slice(128, 64, dim=1).store(middle.to(gl.bfloat16))
        staged.slice(192, 64, dim=1).store(turned.to(gl.bfloat16))
    else:
        staged = reinterpret(queries.halves.index(1), gl.bfloat16, [BLOCK_HEADS, COLUMNS], OPERAND)
        staged.store(acc.to(gl.bfloat16))
    _finish(staged, out, share, extent, 1, A)


@gluon.jit
def _finish(staged, out, share, extent, ROLE: gl.constexpr, A: gl.constexpr):
    """How both consumers end: their channels go from shared memory to the output, or first into a
    part where the query is split."""
    live = extent.slot >= 0
    channel = (2 * share.nth_slice + ROLE) * (HALF // A.SLICES)
    if A.SPLIT:
        part = part_of(share.parts.first, share.split, A)
        store_heads(staged, sums_of(part) + channel, live, out, A)
        if live:
            meet(share, ROLE)
            combine(out, share, channel, extent.position, A)
    else:
        store_heads(staged, out.row + channel, live, out, A)


@gluon.jit
def _attend_hopper_kernel(
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
    A: gl.constexpr,
):
    begin_program()
    BLOCKS: gl.constexpr = (A.HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    item = gl.program_id(0)
    split, splits, nth_slice = gl.program_id(1), gl.num_programs(1), gl.program_id(2)
    # as program_of, in the order that the measured kernel had
    block, token = item % BLOCKS, item // BLOCKS
    tokens_row = token_at(tokens_ptr, token)
    program = Program(token=token.to(gl.int64), head=block * BLOCK_HEADS)
    out_row = row_of(out_ptr, out_stride, program, A.WIDTH)
    lse_row = row_of(lse_ptr, lse_stride, program, 1)
    parts = parts_of(workspace_ptr, item, splits, nth_slice, A)
    queries = new_queries(q_ptr, q_stride, program, A)
    keys = new_keys()
    weights = new_weights(TILE, _WEIGHT)
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
    out = new_out(sink_ptr + program.head, out_row, lse_row, rope_ptr, program, A)
    share = Share(parts, tokens_row, indices_count, split, splits, nth_slice)
    gl.warp_specialize(
        [
            (_left, (queries, keys, weights, out, share, A)),
            (_right, (queries, keys, weights, out, share, A)),
            (produce, (keys, incoming, where, share, A)),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )
