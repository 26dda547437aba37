"""Sparse attention for Hopper: a producer decodes keys while two warpgroups multiply.

The portable kernel (attend.py) lets every warp do everything in turn. Here the warps of a program
have roles, which Triton's Gluon dialect can express and its interpreter cannot run, so this file is
tested on GPUs only; it must agree with the portable kernel and the reference.

    producer   4 warps: reads 32 records at a time, one thread for 16 channels of a row, the next
               ones already under way, and stores them decoded, bf16, in shared memory
    left       4 warps: logits of 64 heads × 32 keys, softmax, and the first half of its channels
               of the sum
    right      4 warps: the second half, from the left's probabilities

A query's keys are numbered as in attend.py and cut into `splits` parts of about equal length. Where
processors would be idle the channels are cut too: every one of `slices` programs computes all
logits of a part, but sums only its own channels, so that there is less to write and to add.

Parts are parked; the programs of a query wait for each other, and each adds the parts of some heads
in a fixed order. So all of them must run at once: there are never more than processors, and the
launch is a cooperative one, which the driver starts as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.errors import InvalidInput
from dsv4.kernels.attend import _LN_2, _LOG2_E, PLACES, entries_or_window, run_time_arguments
from dsv4.kernels.hopper import records_v41 as v41
from dsv4.kernels.hopper.attend_keys import (
    BARRIER,
    HALF,
    KEY_STAGES,
    OPERAND,
    SPAN,
    TILE,
    VECTOR,
    Share,
    Where,
    extent_of,
    new_keys,
    next_stage,
)
from dsv4.kernels.hopper.attend_producer import new_incoming, produce
from dsv4.kernels.hopper.dialect import reinterpret, thread_barrier
from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_store import record_constants
from dsv4.kernels.rows import token_at
from dsv4.kernels.target import processors
from dsv4.ops.calls import Attention

HEADS_PER_PROGRAM = 64
TILE_KEYS = TILE.value
SCALE_WORD_BYTES = 8
WARPS_PER_ROLE = 4
# A processor has 504 registers for a thread of each role: left gets what these two leave.
RIGHT_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(168), gl.constexpr(104)
# More parts than this cost more to combine than they save.
MAX_SPLITS = 66
# What writing and adding parts costs, in the time that a tile takes, by the number of slices.
PARTS_COST_TILES = {1: 3.0, 2: 1.3, 4: 0.0}
# A part, of 64 heads: the log2-sum-exp2 in fp32, a power of two in fp32 for each consumer of each
# slice, and the normalised sums of 512 channels in fp16, as multiples of these powers.
POWERS = 8
PART_ELEMENTS = HEADS_PER_PROGRAM * (1 + POWERS + 512 // 2)
# The portable kernel's counters lie in front of the parts; they are used here too, and left at 0.
PARTS_START = PLACES
_PARTS_START = gl.constexpr(PARTS_START)
# Counters lie apart. Half as many as processors are in use at most, of which Hopper has 144.
_COUNTER_STRIDE = gl.constexpr(7)

_HEADS = gl.constexpr(HEADS_PER_PROGRAM)
_POWERS = gl.constexpr(POWERS)
_WEIGHT_STAGES = gl.constexpr(2)
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.value, 16]))
_WEIGHT = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))
_ANGLES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

# The first thread of a warpgroup waits until the highest bit of a counter ($1) is set.
_UNTIL_ALL = gl.constexpr("""{
    .reg .pred other, wait;
    .reg .b32 now;
    mov.u32 now, %tid.x;
    and.b32 now, now, 127;
    setp.ne.u32 other, now, 0;
    @other bra there;
again:
    ld.acquire.gpu.global.b32 now, [$1];
    setp.ge.s32 wait, now, 0;
    @wait bra again;
there:
    mov.b32 $0, 0;
}""")


@dataclass(frozen=True, slots=True)
class HopperConstants:
    """A launch as compile-time constants. ALL: every visible entry, not a list. V41: which records;
    KEY_UNIT: decoded keys times this are the numbers. WHOLE: the softmax of queries that are never
    cut. PARTS and HEADS_PER_THREAD: see combine_shape."""

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
    WINDOW_DATA_BYTES: int
    WINDOW_SCALE_BYTES: int
    DATA_BYTES: int
    SCALE_BYTES: int
    ROPE: int
    WHOLE: bool
    SPLIT: bool
    SLICES: int
    PARTS: int
    HEADS_PER_THREAD: int


class Queries(NamedTuple):
    """The queries of a program's heads in global memory, and the two halves of their channels in
    shared memory, `ready` once both consumers have loaded one each."""

    halves: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    row: gl.tensor
    heads: gl.tensor


class Weights(NamedTuple):
    """Probabilities of a tile, and the factors that bring sums to its maximum, from left to right.
    The factors behind those of all stages normalise: they are there once `closed` is."""

    probabilities: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    closed: gl.shared_memory_descriptor


class Out(NamedTuple):
    """Where the result of a program's heads goes, how many they are, and what it takes from outside
    the keys: `angles` are those of the query in shared memory. Where a query is split its parts are
    parked, and `counter` is where its programs meet."""

    heads: gl.tensor
    sink_row: gl.tensor
    row: gl.tensor
    lse_row: gl.tensor
    rope: gl.tensor
    angles: gl.shared_memory_descriptor
    parts: gl.tensor
    counter: gl.tensor


class Sums(NamedTuple):
    """A softmax under way: `acc` weighs a consumer's channels by 2^(logit - top), and `total` is
    the weight of all keys."""

    top: gl.tensor  # [heads] highest logit, base 2
    total: gl.tensor  # [heads]
    acc: gl.tensor  # [heads, channels]


def supports(call: Attention) -> bool:
    """Whether this kernel does these shapes and records: V4's or V4.1's, with any number of
    heads."""
    return (
        call.q.shape[2] == 2 * HALF.value
        and (_is_v4(call) or _is_v41(call))
        and call.window.window % TILE_KEYS == 0
        and turns_back(call)
        and not call.joint
        and not call.window_cut
    )


def turns_back(call: Attention) -> bool:
    """Whether the output stays as it is or the channels that right turns are all of RoPE's."""
    return call.inverse_rope is None or call.inverse_rope.shape[1] == SPAN.value


def tiles_of(window: int, max_entries: int) -> int:
    """Tiles that a query can have."""
    return -(-window // int(TILE_KEYS)) - (-max_entries // int(TILE_KEYS))


def _is_v4(call: Attention) -> bool:
    """One format for window and entries: codes with a power of two for 64, then bf16 channels."""
    window, entries = call.window, call.entries
    record = record_constants(window.page.format)
    return (
        record.CODED + SPAN.value == call.q.shape[2]
        and ("e4m3", "ue8m0", SPAN.value) == (record.ELEMENT, record.SCALE, record.TILE)
        and record.SCALE_BYTES == SCALE_WORD_BYTES
        and (entries is None or entries.page.format == window.page.format)
    )


def _is_v41(call: Attention) -> bool:
    """A window of FP8 and entries of FP4, all channels coded."""
    window = record_constants(call.window.page.format)
    found = (window.ELEMENT, window.SCALE, window.TILE, window.DATA_BYTES, window.SCALE_BYTES)
    wanted = ("e4m3", "ue8m0", 32, v41.WINDOW_DATA_BYTES, v41.WINDOW_SCALE_BYTES)
    if call.entries is None or found != wanted:
        return found == wanted
    entry = record_constants(call.entries.page.format)
    return ("e2m1", "e4m3", 16, v41.ENTRY_DATA_BYTES, v41.ENTRY_SCALE_BYTES) == (
        entry.ELEMENT,
        entry.SCALE,
        entry.TILE,
        entry.DATA_BYTES,
        entry.SCALE_BYTES,
    ) and entry.GLOBAL_SCALE == 1.0


def workspace_elements(device: torch.device) -> int:
    """fp32 elements that any launch needs at most. A part for each processor: with more programs
    than processors nothing is split."""
    return PARTS_START + processors(device) * PART_ELEMENTS


def head_blocks(heads: int) -> int:
    """Programs that share the heads of a query. The rows of the last one that are no heads are
    multiplied all the same, for 64 rows are the least of Hopper's matrix instruction."""
    return -(-heads // HEADS_PER_PROGRAM)


def shares(
    tokens: int, heads: int, window: int, max_entries: int, programs: int
) -> tuple[int, int]:
    """Into how many splits of its keys and slices of its channels a query is cut, so that at most
    `programs` of them run at once. Follows from shapes alone: the same launch cuts the same way
    whatever the lengths are."""
    tiles = tiles_of(window, max_entries)
    items = max(1, tokens * head_blocks(heads))
    best, least = (1, 1), float(tiles)
    for slices, cost in PARTS_COST_TILES.items():
        splits = min(tiles, programs // (items * slices), MAX_SPLITS)
        if splits > 1 and -(-tiles // splits) + cost < least:
            best, least = (splits, slices), -(-tiles // splits) + cost
    return best


def combine_shape(splits: int, slices: int) -> tuple[int, int]:
    """How many parts a program has under way when it adds them, and of how many heads per
    thread: as many as make one round of it, with up to 16 loads per thread."""
    if splits == 1:
        return 1, 1
    parts = min(16 if slices == 1 else 32, max(slices, triton.next_power_of_2(splits)))
    heads = 1
    while heads < 4 and 4 * heads * splits < HEADS_PER_PROGRAM and 2 * heads * parts <= 16 * slices:
        heads *= 2
    return parts, heads


def attend(call: Attention) -> None:
    """One launch. As the reference, up to the order of fp32 sums and, where split, a rounding of
    each part to 11 bits.

    Deterministic; a query's result depends on its keys and on the number of tokens in the launch
    (which sets the split), not on what else is in it. Only for what `supports` accepts.
    """
    attend_launch(call, programs=processors(call.q.device)).run()


def attend_launch(call: Attention, *, programs: int) -> Launch:
    """A grid of queries and blocks of heads × splits × slices, `programs` of them at most where a
    query is split. Raises InvalidInput for a workspace that is too small."""
    count, heads, _ = call.q.shape
    splits, slices = 1, 1
    if not call.whole:
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
        "launch_pdl": False,  # a program wants a processor: waiting for one beside others is slower
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
        V41=_is_v41(call),
        KEY_UNIT=v41.KEY_UNIT if _is_v41(call) else 1.0,
        WINDOW_DATA_BYTES=window.page.format.data_row_bytes,
        WINDOW_SCALE_BYTES=window.page.format.scale_row_bytes,
        DATA_BYTES=source.page.format.data_row_bytes,
        SCALE_BYTES=source.page.format.scale_row_bytes,
        ROPE=0 if call.inverse_rope is None else call.inverse_rope.shape[1],
        WHOLE=call.whole,
        SPLIT=splits > 1,
        SLICES=slices,
        PARTS=parts,
        HEADS_PER_THREAD=heads_per_thread,
    )


@gluon.jit
def new_queries(q_ptr, q_stride, token, head, A: gl.constexpr):
    """Of the program that begins with this head."""
    queries = Queries(
        halves=gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, HALF], OPERAND),
        ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        row=q_ptr + token * q_stride + head * A.WIDTH,
        heads=gl.minimum(A.HEADS - head, _HEADS),
    )
    mbarrier.init(queries.ready, count=2)
    return queries


@gluon.jit
def new_weights(KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """For tiles of so many keys."""
    weights = Weights(
        probabilities=gl.allocate_shared_memory(
            gl.bfloat16, [_WEIGHT_STAGES, _HEADS, KEYS], LAYOUT
        ),
        factors=gl.allocate_shared_memory(gl.float32, [_WEIGHT_STAGES + 1, _HEADS], VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [_WEIGHT_STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [_WEIGHT_STAGES, 1], BARRIER),
        closed=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    mbarrier.init(weights.closed, count=1)
    for place in gl.static_range(_WEIGHT_STAGES):
        mbarrier.init(weights.ready.index(place), count=1)
        mbarrier.init(weights.free.index(place), count=1)
    return weights


@gluon.jit
def load_queries(queries, NTH: gl.constexpr, A: gl.constexpr):
    """One half of the channels of the program's heads into shared memory."""
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _QUERY))[:, None]
    column = NTH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, _QUERY))[None, :]
    at = queries.row + head * A.WIDTH + column
    if A.HEADS % _HEADS == 0:
        queries.halves.index(NTH).store(gl.load(at))
    else:
        mask = (head < queries.heads) & (column >= 0)
        queries.halves.index(NTH).store(gl.load(at, mask=mask, other=0.0))
    fence_async_shared()


@gluon.jit
def logits_of(queries, keys, stage, phase):
    """Starts the logits [heads, keys] of a tile, once its keys are there."""
    mbarrier.wait(keys.ready.index(stage), phase)
    none = gl.full([_HEADS, TILE], 0.0, gl.float32, _LOGITS)
    logits = warpgroup_mma(
        queries.halves.index(0),
        keys.halves.index(stage).permute((1, 0)),
        none,
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        queries.halves.index(1),
        keys.halves.index(KEY_STAGES + stage).permute((1, 0)),
        logits,
        is_async=True,
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
def softmax(logits, sums, bias, nth, weights, A: gl.constexpr):
    """A tile's probabilities into shared memory, and the sums brought to the new maximum."""
    place = nth % _WEIGHT_STAGES
    if A.WHOLE:
        weight, tile_total, tile_top = weigh(logits, bias, A)
        highest = gl.maximum(sums.top, tile_top)
        alpha, factor = factors(sums.top, tile_top, highest)
        total = gl.fma(sums.total, alpha, tile_total * factor)
        probabilities = scaled(weight, factor)
    else:
        x = _biased(logits, bias, A)
        highest = gl.maximum(sums.top, gl.max(x, axis=1))  # [heads]
        base = gl.where(highest == float("-inf"), 0.0, highest)  # no key yet
        alpha = gl.exp2(sums.top - base)
        weight = gl.exp2(x - base[:, None])
        total = sums.total * alpha + gl.sum(weight, axis=1)
        probabilities = weight.to(gl.bfloat16)
    mbarrier.wait(weights.free.index(place), (nth // _WEIGHT_STAGES) % 2 ^ 1)
    weights.probabilities.index(place).store(probabilities)
    weights.factors.index(place).store(alpha)
    fence_async_shared()
    mbarrier.arrive(weights.ready.index(place), count=1)
    acc = sums.acc * gl.convert_layout(alpha, gl.SliceLayout(1, sums.acc.type.layout))[:, None]
    return Sums(top=highest, total=total, acc=acc)


@gluon.jit
def _biased(logits, bias, A: gl.constexpr):
    """Logits of seen keys, base 2: [heads, keys]."""
    SCALE: gl.constexpr = A.KEY_UNIT * A.WIDTH**-0.5 * _LOG2_E
    return logits * SCALE + bias[None, :]


@gluon.jit
def weigh(logits, bias, A: gl.constexpr):
    """What a tile of a whole query gives by itself: the weights of its keys [heads, keys] under its
    own highest logit, fp16, which has three bits more than they are multiplied with; their sums and
    that logit [heads]."""
    x = _biased(logits, bias, A)
    top = gl.max(x, axis=1)
    base = gl.where(top == float("-inf"), 0.0, top)  # no key
    weight = gl.exp2(x - base[:, None])
    return weight.to(gl.float16), gl.sum(weight, axis=1), top


@gluon.jit
def factors(top, tile_top, highest):
    """What brings the sums so far, and a tile's weights, to the highest logit of both."""
    base = gl.where(highest == float("-inf"), 0.0, highest)
    return gl.exp2(top - base), gl.exp2(tile_top - base)


@gluon.jit
def scaled(weight, factor):
    """A tile's weights as they are multiplied with its keys."""
    return (weight.to(gl.float32) * factor[:, None]).to(gl.bfloat16)


@gluon.jit
def _left(queries, keys, weights, out, share, A: gl.constexpr):
    """Logits of the next tile run behind the sums of this one, so that only the softmax waits."""
    LINE: gl.constexpr = gl.SliceLayout(1, _LOGITS)
    KEY: gl.constexpr = gl.SliceLayout(0, _LOGITS)
    COLUMNS: gl.constexpr = HALF // A.SLICES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    extent = extent_of(share, A)
    load_queries(queries, 0, A)
    mbarrier.arrive(queries.ready, count=1)
    sink = load_sink(out, LINE, A)
    mbarrier.wait(queries.ready, 0)
    sums = Sums(
        top=gl.full([_HEADS], float("-inf"), gl.float32, LINE),
        total=gl.full([_HEADS], 0.0, gl.float32, LINE),
        acc=gl.full([_HEADS, COLUMNS], 0.0, gl.float32, SUMS),
    )
    tiles = extent.last - extent.first
    if tiles > 0:
        stage = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        logits = warpgroup_mma_wait(0, deps=[logits_of(queries, keys, stage, phase)])
        for nth in range(0, tiles - 1):
            sums = softmax(logits, sums, keys.bias.index(stage).load(KEY), nth, weights, A)
            running = warpgroup_mma(
                weights.probabilities.index(nth % _WEIGHT_STAGES),
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
            weights.probabilities.index((tiles - 1) % _WEIGHT_STAGES),
            _values(keys, stage, share.nth_slice, 0, A),
            sums.acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[running])
        sums = Sums(top=sums.top, total=sums.total, acc=acc)
    _end_left(sums, sink, queries, weights, out, share, extent, A)


@gluon.jit
def load_sink(out, LINE: gl.constexpr, A: gl.constexpr):
    """The sinks of a program's heads, long before they are used. Where a query is split something
    that nobody reads: whoever adds up its parts loads sinks then."""
    head = gl.arange(0, _HEADS, layout=LINE)
    if A.SPLIT:
        return head
    else:
        return gl.load(out.sink_row + head, mask=_real(head, out, A), other=0.0)


@gluon.jit
def with_sink(total, sink, top):
    """The weight of all keys and of the sink."""
    base = gl.where(top == float("-inf"), 0.0, top)
    return total + gl.where(total > 0, gl.exp2(sink * _LOG2_E - base), 0.0)


@gluon.jit
def normaliser(total, A: gl.constexpr):
    """What sums are multiplied by in the end."""
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    if A.KEY_UNIT != 1.0:
        inverse *= A.KEY_UNIT
    return inverse


@gluon.jit
def normalised(acc, inverse, A: gl.constexpr):
    """Where queries are whole, -0 becomes 0: some ways to it add tiles of zeros."""
    if A.WHOLE:
        inverse, acc = gl.broadcast(inverse[:, None], acc)
        return gl.fma(acc, inverse, gl.full(acc.shape, 0.0, gl.float32, acc.type.layout))
    else:
        return acc * inverse[:, None]


@gluon.jit
def close(sums, sink, weights, out, share, extent, A: gl.constexpr):
    """What left does first behind its last tile: the log-sum-exp, and the factor that normalises,
    for right too."""
    LINE: gl.constexpr = sums.top.type.layout
    live = extent.slot >= 0
    top, total = sums.top, sums.total
    head = gl.arange(0, _HEADS, layout=LINE)
    lse = top + gl.log2(total)
    real = _real(head, out, A)
    if A.SPLIT:
        gl.store(_part(out.parts, share.split, A) + head, lse, mask=live & real)
    else:
        gl.store(out.lse_row + head, lse * _LN_2, mask=live & real)
        total = with_sink(total, sink, top)
    inverse = normaliser(total, A)
    weights.factors.index(_WEIGHT_STAGES).store(inverse)  # right may still read the others
    mbarrier.arrive(weights.closed, count=1)
    return gl.convert_layout(inverse, gl.SliceLayout(1, sums.acc.type.layout))


@gluon.jit
def _end_left(sums, sink, queries, weights, out, share, extent, A: gl.constexpr):
    COLUMNS: gl.constexpr = HALF // A.SLICES
    inverse = close(sums, sink, weights, out, share, extent, A)
    acc = normalised(sums.acc, inverse, A)
    if A.SPLIT:
        staged = _park(acc, queries, out, share, extent.slot >= 0, 0, A)
    else:
        staged = reinterpret(queries.halves.index(0), gl.bfloat16, [_HEADS, COLUMNS], OPERAND)
        staged.store(acc.to(gl.bfloat16))
    _finish(staged, out, share, extent, 0, A)


@gluon.jit
def _right(queries, keys, weights, out, share, A: gl.constexpr):
    """Sums its channels with the left's probabilities, tile after tile."""
    COLUMNS: gl.constexpr = HALF // A.SLICES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    extent = extent_of(share, A)
    load_queries(queries, 1, A)
    mbarrier.arrive(queries.ready, count=1)
    load_angles(out, extent.position, A)
    acc = gl.full([_HEADS, COLUMNS], 0.0, gl.float32, SUMS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for nth in range(0, extent.last - extent.first):
        place = nth % _WEIGHT_STAGES
        mbarrier.wait(keys.ready.index(stage), phase)
        mbarrier.wait(weights.ready.index(place), (nth // _WEIGHT_STAGES) % 2)
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
def load_angles(out, position, A: gl.constexpr):
    """Cosines and sines of right's last channels, long before they are used. Those of a split
    query are for whoever adds up its parts."""
    if A.ROPE > 0 and not A.SPLIT:
        position = position - (position >> 31)  # padding's is -1: 0
        nth = gl.arange(0, A.ROPE, layout=_ANGLES)
        out.angles.store(gl.load(out.rope + position.to(gl.int64) * A.ROPE + nth))


@gluon.jit
def _end_right(acc, queries, weights, out, share, extent, A: gl.constexpr):
    """What right does behind its last tile, with the factor that left has found."""
    SUMS: gl.constexpr = acc.type.layout
    COLUMNS: gl.constexpr = HALF // A.SLICES
    mbarrier.wait(weights.closed, 0)
    acc = normalised(acc, weights.factors.index(_WEIGHT_STAGES).load(gl.SliceLayout(1, SUMS)), A)
    if A.SPLIT:
        staged = _park(acc, queries, out, share, extent.slot >= 0, 1, A)
    elif A.ROPE > 0:
        staged = reinterpret(queries.halves.index(1), gl.bfloat16, [_HEADS, COLUMNS], OPERAND)
        low, high = split_columns(acc)
        middle, turned = split_columns(high)
        turned = turn_back(turned, out.angles, A)
        staged.slice(0, 128, dim=1).store(low.to(gl.bfloat16))
        staged.slice(128, 64, dim=1).store(middle.to(gl.bfloat16))
        staged.slice(192, 64, dim=1).store(turned.to(gl.bfloat16))
    else:
        staged = reinterpret(queries.halves.index(1), gl.bfloat16, [_HEADS, COLUMNS], OPERAND)
        staged.store(acc.to(gl.bfloat16))
    _finish(staged, out, share, extent, 1, A)


@gluon.jit
def _park(acc, queries, out, share, live, ROLE: gl.constexpr, A: gl.constexpr):
    """A consumer's sums in shared memory as parts have them: fp16 keeps three bits more than bf16,
    of multiples of the power of two that the largest channel of a head begins with."""
    COLUMNS: gl.constexpr = HALF // A.SLICES
    LINE: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    bits = gl.max(gl.abs(acc), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
    # powers that have an inverse; what is not finite stays that in fp16
    bits = gl.where((bits == 0) | (bits > 0x7E000000), 0x3F800000, bits)
    head = gl.arange(0, _HEADS, layout=LINE)
    row = _powers(_part(out.parts, share.split, A), 2 * share.nth_slice + ROLE)
    gl.store(row + head, bits.to(gl.float32, bitcast=True), mask=live & _real(head, out, A))
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    SLICES: gl.constexpr = A.SLICES  # Triton 3.8 wants a shape for all that is there
    half = queries.halves.index(ROLE)
    staged = reinterpret(half, gl.float16, [SLICES, _HEADS, COLUMNS], OPERAND).index(0)
    staged.store((acc * inverse[:, None]).to(gl.float16))
    return staged


@gluon.jit
def _finish(staged, out, share, extent, ROLE: gl.constexpr, A: gl.constexpr):
    """How both consumers end: their channels from shared memory to the output, by way of a part
    where the query is split."""
    live = extent.slot >= 0
    channel = (2 * share.nth_slice + ROLE) * (HALF // A.SLICES)
    if A.SPLIT:
        store_heads(staged, _sums(_part(out.parts, share.split, A)) + channel, live, out, A)
        if live:
            _meet(out.counter, share, ROLE)
            _combine(out, share, channel, extent.position, A)
    else:
        store_heads(staged, out.row + channel, live, out, A)


@gluon.jit
def _real(head, out, A: gl.constexpr):
    """Which rows of a program are heads: all, unless the last program of a query has fewer."""
    if A.HEADS % _HEADS == 0:
        return head >= 0
    else:
        return head < out.heads


@gluon.jit
def _part(parts, nth, A: gl.constexpr):
    return parts + nth * (_HEADS * (A.WIDTH // 2 + 1 + _POWERS))


@gluon.jit
def _powers(part, consumer):
    return part + (1 + consumer) * _HEADS


@gluon.jit
def _sums(part):
    return (part + (1 + _POWERS) * _HEADS).to(gl.pointer_type(gl.float16))


@gluon.jit
def _meet(counter, share, ROLE: gl.constexpr):
    """Waits until all parts of a query are parked. Every consumer adds 1 and one of them what is
    left to 2^31, which sets the highest bit; when they leave they add the same again, and after
    the last one the counter is 0. Until then the highest bit stays."""
    step = gl.to_tensor(1)
    if ROLE == 0:
        step = gl.where(share.split == 0, -2147483648 - (2 * share.splits - 1), 1)
    thread_barrier()
    gl.atomic_add(counter, step, sem="release", scope="gpu")
    gl.inline_asm_elementwise(_UNTIL_ALL, "=r,l", [counter.to(gl.int64)], gl.int32, False, 1)
    thread_barrier()
    gl.atomic_add(counter, step, sem="relaxed", scope="gpu")


@gluon.jit
def _combine(out, share, channel, position, A: gl.constexpr):
    """Adds the parts of some heads in a fixed order, a consumer's channels, four heads at a time.
    A warp takes one head; where it has few channels, its lanes also share out the parts."""
    COLUMNS: gl.constexpr = HALF // A.SLICES
    LANES: gl.constexpr = A.SLICES  # that share out the parts
    PARTS: gl.constexpr = A.PARTS
    HEADS: gl.constexpr = 4 * A.HEADS_PER_THREAD
    L: gl.constexpr = gl.BlockedLayout(
        [PARTS // LANES, A.HEADS_PER_THREAD, 8], [LANES, 1, COLUMNS // 8], [1, 4, 1], [2, 1, 0]
    )
    BOTH: gl.constexpr = gl.SliceLayout(2, L)
    SUM: gl.constexpr = gl.SliceLayout(0, L)
    LINE: gl.constexpr = gl.SliceLayout(1, SUM)
    nth = gl.arange(0, PARTS, layout=gl.SliceLayout(1, BOTH))[:, None]
    columns = channel + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    column = channel + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUM))
    last = _HEADS if A.HEADS % _HEADS == 0 else out.heads
    for start in range(share.split * HEADS, last, share.splits * HEADS):
        heads = start + gl.arange(0, HEADS, layout=gl.SliceLayout(0, BOTH))
        head = start + gl.arange(0, HEADS, layout=LINE)
        real = _real(head, out, A)
        sink = gl.load(out.sink_row + head, mask=real, other=0.0) * _LOG2_E
        top = gl.full([HEADS], -1e30, gl.float32, LINE)
        total = gl.full([HEADS], 0.0, gl.float32, LINE)
        acc = gl.full([HEADS, COLUMNS], 0.0, gl.float32, SUM)  # [heads, channels]
        for part in range(0, share.splits, PARTS):
            there = (part + nth < share.splits) & _real(heads, out, A)[None, :]
            row = _part(out.parts, part + nth, A)
            # [parts, heads], then [parts, heads, channels]
            lse = gl.load(
                row + heads[None, :], mask=there, other=float("-inf"), cache_modifier=".cg"
            )
            power = gl.load(
                _powers(row, channel // COLUMNS) + heads[None, :],
                mask=there,
                other=0.0,
                cache_modifier=".cg",
            )
            at = _sums(row)[:, :, None] + heads[None, :, None] * A.WIDTH + columns[None, None, :]
            sums = gl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            highest = gl.maximum(top, gl.convert_layout(gl.max(lse, axis=0), LINE))
            alpha = gl.exp2(top - highest)
            common = gl.convert_layout(highest, gl.SliceLayout(0, BOTH))
            weight = gl.exp2(lse - common[None, :])
            total = total * alpha + gl.convert_layout(gl.sum(weight, axis=0), LINE)
            scaled = sums.to(gl.float32) * (weight * power)[:, :, None]
            acc = acc * alpha[:, None] + gl.sum(scaled, axis=0)
            top = highest
        logarithm = (top + gl.log2(total)) * _LN_2
        gl.store(out.lse_row + head, logarithm, mask=(channel == 0) & real)
        total += gl.exp2(sink - top)
        inverse = gl.where(total > 0, 1.0 / total, 0.0)
        result = (acc * inverse[:, None]).to(gl.bfloat16)
        if A.ROPE > 0:
            even, odd = pairs(result.to(gl.float32))
            pair = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, even.type.layout))
            pair += (channel - (A.WIDTH - A.ROPE)) // 2
            rope_row = out.rope + position.to(gl.int64) * A.ROPE
            cos = gl.load(rope_row + pair, mask=pair >= 0, other=1.0)[None, :]
            sin = gl.load(rope_row + A.ROPE // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
            both = gl.join(even * cos + odd * sin, odd * cos - even * sin)
            result = gl.convert_layout(gl.reshape(both, [HEADS, COLUMNS]).to(gl.bfloat16), SUM)
        at = out.row + head[:, None] * A.WIDTH + column[None, :]
        gl.store(at, result, mask=real[:, None] & (column >= 0)[None, :])


@gluon.jit
def pairs(x):
    """Even and odd columns, which RoPE turns together."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def split_columns(x):
    """The left and the right half of the columns; they lie in different registers."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@gluon.jit
def store_heads(staged, row, live, out, A: gl.constexpr):
    """A consumer's channels from shared memory to where they go, 16 bytes per thread."""
    COLUMNS: gl.constexpr = staged.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    mask = live & _real(head, out, A) & (column >= 0)
    gl.store(row + head * A.WIDTH + column, staged.load(L), mask=mask)


@gluon.jit
def turn_back(x, angles, A: gl.constexpr):
    """Inverse RoPE of the last channels, rounded to bf16 before as DeepSeek's code does."""
    COLUMNS: gl.constexpr = x.shape[1]
    rounded = x.to(gl.bfloat16).to(gl.float32)
    even, odd = pairs(rounded)
    PAIR: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    cos = angles.slice(0, COLUMNS // 2).load(PAIR)[None, :]
    sin = angles.slice(COLUMNS // 2, COLUMNS // 2).load(PAIR)[None, :]
    first, second = rotated(even, odd, cos, sin)
    return gl.reshape(gl.join(first, second), [_HEADS, COLUMNS])


@gluon.jit
def rotated(even, odd, cos, sin):
    """Pairs of channels turned back. Which product is rounded is not left to the compiler."""
    return gl.fma(even, cos, odd * sin), gl.fma(odd, cos, -(even * sin))


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
    BLOCKS: gl.constexpr = (A.HEADS + _HEADS - 1) // _HEADS
    item = gl.program_id(0)
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    nth_slice = gl.program_id(2)
    block = item % BLOCKS
    token = item // BLOCKS
    tokens_row = token_at(tokens_ptr, token)
    token = token.to(gl.int64)
    head = block * _HEADS
    out_row = out_ptr + token * out_stride + head * A.WIDTH
    lse_row = lse_ptr + token * lse_stride + head
    counter = workspace_ptr.to(gl.pointer_type(gl.int32))
    counter += (item * A.SLICES + nth_slice) * _COUNTER_STRIDE
    parts = _part(workspace_ptr + _PARTS_START, (item * splits).to(gl.int64), A)

    queries = new_queries(q_ptr, q_stride, token, head, A)
    keys = new_keys()
    weights = new_weights(TILE, _WEIGHT)
    incoming = new_incoming(A)
    fence_async_shared()
    where = Where(
        arena=entry_arena,
        window_row=window_arena.to(gl.int64) - entry_arena.to(gl.int64),
        window_bytes=window_bytes,
        window_data=window_data,
        window_scale=window_scale,
        entry_data=entry_data,
        entry_scale=entry_scale,
        entry_bytes=entry_bytes,
        table=table_ptr,
        table_stride=table_stride,
        indices_row=indices_ptr + token * indices_stride,
        batch=batch_ptr,
    )
    out = Out(
        heads=gl.minimum(A.HEADS - head, _HEADS),
        sink_row=sink_ptr + head,
        row=out_row,
        lse_row=lse_row,
        rope=rope_ptr,
        angles=gl.allocate_shared_memory(gl.float32, [SPAN], VECTOR),
        parts=parts,
        counter=counter,
    )
    share = Share(
        tokens_row=tokens_row,
        indices_count=indices_count,
        split=split,
        splits=splits,
        nth_slice=nth_slice,
    )
    gl.warp_specialize(
        [
            (_left, (queries, keys, weights, out, share, A)),
            (_right, (queries, keys, weights, out, share, A)),
            (produce, (keys, incoming, where, share, A)),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )
