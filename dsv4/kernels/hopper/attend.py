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
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dsv4.errors import InvalidInput
from dsv4.kernels.attend import _LN_2, _LOG2_E, PLACES, entries_or_window, run_time_arguments
from dsv4.kernels.codes import bf16_power_bits, e4m3_times_bf16
from dsv4.kernels.device import processors
from dsv4.kernels.record_store import record_constants
from dsv4.ops.calls import Attention

HEADS_PER_PROGRAM = 64
TILE_KEYS = 32
SCALE_WORD_BYTES = 8
WARPS_PER_ROLE = 4
# A processor has 504 registers for a thread of each role: left gets what these two leave.
RIGHT_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(168), gl.constexpr(104)
# More parts than this cost more to combine than they save.
MAX_SPLITS = 66
# What writing and adding parts costs, in the time that a tile takes, by the number of slices.
PARTS_COST_TILES = {1: 3.0, 2: 1.3, 4: 0.0}
# A part: the log2-sum-exp2 of 64 heads in fp32, their normalised sums of 512 channels in bf16.
PART_ELEMENTS = HEADS_PER_PROGRAM * (1 + 512 // 2)
# The portable kernel's counters lie in front of the parts; they are used here too, and left at 0.
PARTS_START = PLACES
_PARTS_START = gl.constexpr(PARTS_START)
# Counters lie apart. Half as many as processors are in use at most, of which Hopper has 144.
_COUNTER_STRIDE = gl.constexpr(7)

# One scale for the four codes of a word: a power of two, twice in $3.
_E4M3_TIMES_BF16 = gl.constexpr(e4m3_times_bf16("$3", "$3"))

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

_SPAN = gl.constexpr(64)  # channels that share a scale
_HALF = gl.constexpr(256)  # channels of one consumer where they are not sliced
_TILE = gl.constexpr(32)  # keys
_HEADS = gl.constexpr(64)
_KEY_STAGES = gl.constexpr(3)  # decoded tiles in shared memory
_WEIGHT_STAGES = gl.constexpr(2)
_AHEAD = gl.constexpr(3)  # tiles of records under way

_SPANS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [1, 4, 1], [2, 1, 0]))
_CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_RECORD_ROW = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])))
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _TILE.value, 16]))
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, rank=2))  # the same bytes as 32-bit words
_WEIGHT = gl.constexpr(gl.NVMMASharedLayout(64, 16, rank=2))
_RAW_SPANS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0]))
_RAW_CODES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
_RAW_ROPE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_BARRIER = gl.constexpr(mbarrier.MBarrierLayout())


@dataclass(frozen=True, slots=True)
class HopperConstants:
    """A launch as compile-time constants. ALL: every visible entry, not a list. PARTS and
    HEADS_A_THREAD: see combine_shape."""

    HEADS: int
    WIDTH: int
    WINDOW: int
    WINDOW_ROWS: int
    STAGED: bool
    ENTRIES: bool
    ALL: bool
    RATIO: int
    ENTRY_ROWS: int
    DATA_BYTES: int
    SCALE_BYTES: int
    ROPE: int
    SPLIT: bool
    SLICES: int
    PARTS: int
    HEADS_A_THREAD: int


class _Keys(NamedTuple):
    """Decoded tiles in shared memory, from the producer to the consumers: the first half of the
    channels of all stages, then the second. `bias` is -inf where a key does not live."""

    halves: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


class _Weights(NamedTuple):
    """Probabilities of a tile, and the factors that bring sums to its maximum, from left to right.
    The factors behind those of all stages normalise: they are there once `closed` is."""

    probabilities: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    closed: gl.shared_memory_descriptor


class _Records(NamedTuple):
    """Tiles under way: four, two and one span of codes, the RoPE channels, and the scales (the
    first words of all tiles, then the second), all as words. Behind them entries and block ids of
    later tiles."""

    four: gl.shared_memory_descriptor
    two: gl.shared_memory_descriptor
    one: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    entries: gl.shared_memory_descriptor
    blocks: gl.shared_memory_descriptor


class _Where(NamedTuple):
    """Where keys are, as the launch says it."""

    arena: gl.tensor
    window_row: gl.tensor
    window_bytes: gl.tensor
    window_data: gl.tensor
    window_scale: gl.tensor
    entry_data: gl.tensor
    entry_scale: gl.tensor
    entry_bytes: gl.tensor
    table: gl.tensor
    table_stride: gl.tensor
    indices_row: gl.tensor
    indices_count: gl.tensor


class _Source(NamedTuple):
    """Where a query's keys are: offsets are bytes from `arena`, that of the entries, so that window
    and entries are read by the same loads."""

    arena: gl.tensor
    window_data: gl.tensor
    window_scale: gl.tensor
    entry_data: gl.tensor
    entry_scale: gl.tensor
    entry_bytes: gl.tensor
    table_row: gl.tensor
    indices_row: gl.tensor
    indices_count: gl.tensor
    position: gl.tensor
    visible: gl.tensor
    shift: gl.tensor
    last: gl.tensor


def supports(call: Attention) -> bool:
    """Whether this kernel does these shapes and records: V4's."""
    window = call.window
    formats = {source.page.format for source in (window, call.entries) if source is not None}
    record = record_constants(window.page.format)
    return (
        call.q.shape[1] % HEADS_PER_PROGRAM == 0
        and call.q.shape[2] == record.CODED + _SPAN.value == 2 * _HALF.value
        and ("e4m3", "ue8m0", _SPAN.value) == (record.ELEMENT, record.SCALE, record.TILE)
        and record.SCALE_BYTES == SCALE_WORD_BYTES
        and len(formats) == 1
        and window.window % TILE_KEYS == 0
    )


def workspace_elements(device: torch.device) -> int:
    """fp32 elements that any launch needs at most. A part for each processor: with more programs
    than processors nothing is split."""
    return PARTS_START + processors(device) * PART_ELEMENTS


def shares(
    tokens: int, heads: int, window: int, max_entries: int, programs: int
) -> tuple[int, int]:
    """Into how many splits of its keys and slices of its channels a query is cut, so that at most
    `programs` of them run at once. Follows from shapes alone: the same launch cuts the same way
    whatever the lengths are."""
    tiles = -(-window // TILE_KEYS) - (-max_entries // TILE_KEYS)
    items = max(1, tokens * (heads // HEADS_PER_PROGRAM))
    best, least = (1, 1), float(tiles)
    for slices, cost in PARTS_COST_TILES.items():
        splits = min(tiles, programs // (items * slices), MAX_SPLITS)
        if splits > 1 and -(-tiles // splits) + cost < least:
            best, least = (splits, slices), -(-tiles // splits) + cost
    return best


def combine_shape(splits: int, slices: int) -> tuple[int, int]:
    """How many parts a program has under way when it adds them, and for how many heads a thread:
    as many as make one round of it, with up to 16 loads a thread."""
    if splits == 1:
        return 1, 1
    parts = min(16 if slices == 1 else 32, max(slices, triton.next_power_of_2(splits)))
    heads = 1
    while heads < 4 and 4 * heads * splits < HEADS_PER_PROGRAM and 2 * heads * parts <= 16 * slices:
        heads *= 2
    return parts, heads


def attend(call: Attention) -> None:
    """One launch. As the reference, up to the order of fp32 sums and, where split, one more
    rounding to bf16 of each part.

    Deterministic; a query's result depends on its keys and on the number of tokens in the launch
    (which sets the split), not on what else is in it. Only for what `supports` accepts.
    """
    grid, arguments, constants = launch_arguments(call, programs=processors(call.q.device))
    if grid[0]:
        _attend_hopper_kernel[grid](
            *arguments,
            **constants,
            num_warps=WARPS_PER_ROLE,
            launch_cooperative_grid=constants["A"].SPLIT,
        )


def launch_arguments(
    call: Attention, *, programs: int
) -> tuple[tuple[int, int, int], tuple[Any, ...], dict[str, Any]]:
    """The grid (queries and blocks of heads, splits, slices), run-time arguments and compile-time
    constants of the launch."""
    count, heads, width = call.q.shape
    window, source = call.window, entries_or_window(call)
    splits, slices = shares(count, heads, window.window, call.max_entries, programs)
    items = count * (heads // HEADS_PER_PROGRAM)
    needed = PARTS_START + items * splits * PART_ELEMENTS if splits > 1 else 0
    given = 0 if call.workspace is None else call.workspace.numel()
    if needed > given:
        raise InvalidInput(
            f"attention of {count} tokens with {heads} heads in {splits} splits needs a workspace "
            f"of {needed} fp32 elements, got {given}: size it with workspace_elements"
        )
    parts, heads_a_thread = combine_shape(splits, slices)
    constants = HopperConstants(
        HEADS=heads,
        WIDTH=width,
        WINDOW=window.window,
        WINDOW_ROWS=window.page.rows,
        STAGED=window.staged,
        ENTRIES=call.entries is not None,
        ALL=call.indices is None,
        RATIO=source.ratio,
        ENTRY_ROWS=source.page.rows,
        DATA_BYTES=source.page.format.data_row_bytes,
        SCALE_BYTES=source.page.format.scale_row_bytes,
        ROPE=0 if call.inverse_rope is None else call.inverse_rope.shape[1],
        SPLIT=splits > 1,
        SLICES=slices,
        PARTS=parts,
        HEADS_A_THREAD=heads_a_thread,
    )
    return (items, splits, slices), run_time_arguments(call), {"A": constants}


@gluon.jit
def _range(position, indices_count, split, splits, slot, A: gl.constexpr):
    """First and last tile of a split, and how many entries the query sees."""
    tiles = gl.to_tensor((A.WINDOW + _TILE - 1) // _TILE)
    visible = gl.to_tensor(0)
    if A.ENTRIES:
        visible = (position + 1) // A.RATIO
        if A.ALL:
            tiles += (visible + _TILE - 1) // _TILE
        else:
            tiles += (indices_count + _TILE - 1) // _TILE
    first = (tiles * split).to(gl.uint32) // splits.to(gl.uint32)
    last = (tiles * (split + 1)).to(gl.uint32) // splits.to(gl.uint32)
    return first.to(gl.int32), gl.where(slot < 0, first, last).to(gl.int32), visible


@gluon.jit
def _entry_at(tile, nth, source, A: gl.constexpr):
    """Where the indices of a tile's keys are, and which of them are in the list."""
    key = (tile - A.WINDOW // _TILE) * _TILE + nth
    return source.indices_row + key, (key >= 0) & (key < source.indices_count)


@gluon.jit
def _entry(tile, nth, source, A: gl.constexpr):
    """The entries that the keys of a tile name; what lies outside the list is -1."""
    if A.ALL:
        return (tile - A.WINDOW // _TILE) * _TILE + nth
    else:
        at, listed = _entry_at(tile, nth, source, A)
        return gl.load(at, mask=listed, other=-1, volatile=True)


@gluon.jit
def _later_entry(ring, place, tile, nth, source, A: gl.constexpr):
    """As _entry, sent for by _send_entry."""
    if A.ALL:
        return _entry(tile, nth, source, A)
    else:
        _, listed = _entry_at(tile, nth, source, A)
        return gl.where(listed, ring.index(place).load(_RECORD_ROW), -1)


@gluon.jit
def _send_entry(ring, place, tile, nth, source, A: gl.constexpr):
    """Sends for the indices of a tile."""
    if not A.ALL:
        at, listed = _entry_at(tile, nth, source, A)
        async_copy.async_copy_global_to_shared(ring.index(place), at, mask=listed)


@gluon.jit
def _block_at(entry, tile, source, A: gl.constexpr):
    """Where the ids of blocks with these entries are, and which of them are to be read."""
    live = (entry >= 0) & (entry < source.visible)
    live = live & (tile >= A.WINDOW // _TILE) & (tile < source.last)
    return source.table_row + entry.to(gl.uint32) // A.ENTRY_ROWS, live


@gluon.jit
def _block(entry, tile, source, A: gl.constexpr):
    at, live = _block_at(entry, tile, source, A)
    return gl.load(at, mask=live, other=0, volatile=True)


@gluon.jit
def _send_block(ring, place, entry, tile, source, A: gl.constexpr):
    """Sends for the ids of the blocks with these entries."""
    at, live = _block_at(entry, tile, source, A)
    async_copy.async_copy_global_to_shared(ring.index(place), at, mask=live)


@gluon.jit
def _rows(tile, nth, entry, block_id, source, A: gl.constexpr):
    """Byte offsets of a tile's data and scale rows from the entry arena, and which live."""
    in_window = tile < A.WINDOW // _TILE
    seen = source.position - (A.WINDOW - 1) + tile * _TILE + nth
    visible = (entry >= 0) & (entry < source.visible)
    live = gl.where(in_window, seen >= 0, visible) & (tile < source.last)
    if A.STAGED:
        ring = (seen + source.shift).to(gl.int64)
    else:
        ring = (seen.to(gl.uint32) % A.WINDOW_ROWS).to(gl.int64)
    row = (entry.to(gl.uint32) % A.ENTRY_ROWS).to(gl.int64)
    page = block_id.to(gl.int64) * source.entry_bytes
    data = gl.where(
        in_window,
        source.window_data + ring * A.DATA_BYTES,
        page + source.entry_data + row * A.DATA_BYTES,
    )
    scale = gl.where(
        in_window,
        source.window_scale + ring * A.SCALE_BYTES,
        page + source.entry_scale + row * A.SCALE_BYTES,
    )
    return data, scale, live


@gluon.jit
def _fetch(records, place, tile, nth, entry, block_id, source, A: gl.constexpr):
    """Sends for the records of a tile. Rows that do not live become zeros. Returns which live."""
    data, scale, live = _rows(tile, nth, entry, block_id, source, A)
    at = (source.arena + data).to(gl.pointer_type(gl.uint32))
    _fetch_spans(records.four.index(place), at, live, 0)
    _fetch_spans(records.two.index(place), at, live, 4)
    word = gl.arange(0, _SPAN // 4, layout=gl.SliceLayout(0, _CODES))[None, :]
    async_copy.async_copy_global_to_shared(
        records.one.index(place),
        gl.multiple_of(at[:, None], [16, 16]) + (6 * (_SPAN // 4) + word),
        mask=live[:, None],
    )
    row: gl.constexpr = gl.SliceLayout(1, _PAIRS)
    word = gl.arange(0, _SPAN // 2, layout=gl.SliceLayout(0, _PAIRS))[None, :]
    rope_at = gl.multiple_of(gl.convert_layout(at, row, assert_trivial=True)[:, None], [16, 16])
    rope_live = gl.convert_layout(live, row, assert_trivial=True)[:, None]
    async_copy.async_copy_global_to_shared(
        records.rope.index(place), rope_at + (7 * (_SPAN // 4) + word), mask=rope_live
    )
    scales_at = (source.arena + scale).to(gl.pointer_type(gl.uint32))
    for half in gl.static_range(2):
        async_copy.async_copy_global_to_shared(
            records.scales.index(half * _AHEAD + place), scales_at + half, mask=live
        )
    return live


@gluon.jit
def _fetch_spans(raw, at, live, FIRST: gl.constexpr):
    """Spans from FIRST on, each [rows, words], so that rows of a span follow each other closely:
    neighbouring rows then lie in different banks."""
    row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, _SPANS))
    at = gl.convert_layout(at, row, assert_trivial=True)[None, :, None]
    live = gl.convert_layout(live, row, assert_trivial=True)[None, :, None]
    nth: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _SPANS))
    span = FIRST + gl.arange(0, raw.shape[0], layout=nth)[:, None, None]
    words: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, _SPANS))
    word = gl.arange(0, _SPAN // 4, layout=words)[None, None, :]
    source = gl.multiple_of(at, [16, 16, 16]) + (span * (_SPAN // 4) + word)
    async_copy.async_copy_global_to_shared(raw, source, mask=live)


@gluon.jit
def _decode(codes, scales, NTH: gl.constexpr):
    """Words of four E4M3 codes of one span times its scale: twice as many words of two bf16."""
    exponent = (scales >> (8 * NTH)) & 0xFF
    bits = bf16_power_bits(exponent)
    power, codes = gl.broadcast((bits | (bits << 16))[:, None], codes)
    low, high = gl.inline_asm_elementwise(
        _E4M3_TIMES_BF16, "=r,=r,r,r", [codes, power], (gl.uint32, gl.uint32), True, 1
    )
    return gl.convert_layout(
        gl.reshape(gl.join(low, high), [_TILE, _SPAN // 2]), _PAIRS, assert_trivial=True
    )


@gluon.jit
def _side_by_side(a, b, c, d):
    """Four spans of words as one row: they stay in the registers where they are."""
    all_four = gl.join(gl.join(a, b), gl.join(c, d))  # [rows, words, second, first]
    return gl.reshape(gl.permute(all_four, [0, 3, 2, 1]), [_TILE, 4 * (_SPAN // 2)])


@gluon.jit
def _produce(keys, records, where, tokens_row, batch_ptr, split, splits, A: gl.constexpr):
    """Decodes tile after tile. The records of the next three are under way, of the three behind
    them the block ids, and of the three behind those the indices. All of them go to shared memory:
    a register that waits for a load can not be moved on to the next turn of the loop.

    Every buffer is written once a tile: Triton orders all writes to one with barriers."""
    nth = gl.arange(0, _TILE, layout=_RECORD_ROW)
    slot, position, first, last, visible = _extent(
        tokens_row, where.indices_count, split, splits, A
    )
    source = _source(where, tokens_row, batch_ptr, slot, position, last, visible, A)
    halves = keys.halves._reinterpret(gl.uint32, [2 * _KEY_STAGES, _TILE, _HALF // 2], _WORDS)
    ring = records.entries
    blocks = records.blocks
    entry_0 = _entry(first, nth, source, A)
    entry_1 = _entry(first + 1, nth, source, A)
    entry_2 = _entry(first + 2, nth, source, A)
    entry_3 = _entry(first + 3, nth, source, A)
    entry_4 = _entry(first + 4, nth, source, A)
    entry_5 = _entry(first + 5, nth, source, A)
    block_0 = _block(entry_0, first, source, A)
    block_1 = _block(entry_1, first + 1, source, A)
    block_2 = _block(entry_2, first + 2, source, A)
    live_0 = _fetch(records, 0, first, nth, entry_0, block_0, source, A)
    _send_block(blocks, 0, entry_3, first + 3, source, A)
    _send_entry(ring, 3, first + 3, nth, source, A)
    _send_entry(ring, 0, first + 6, nth, source, A)
    async_copy.commit_group()
    live_1 = _fetch(records, 1, first + 1, nth, entry_1, block_1, source, A)
    _send_block(blocks, 1, entry_4, first + 4, source, A)
    _send_entry(ring, 4, first + 4, nth, source, A)
    _send_entry(ring, 1, first + 7, nth, source, A)
    async_copy.commit_group()
    live_2 = _fetch(records, 2, first + 2, nth, entry_2, block_2, source, A)
    _send_block(blocks, 2, entry_5, first + 5, source, A)
    _send_entry(ring, 5, first + 5, nth, source, A)
    _send_entry(ring, 2, first + 8, nth, source, A)
    async_copy.commit_group()
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    near = gl.to_tensor(3)  # the place of the entries of the tile to fetch next
    far = gl.to_tensor(0)  # and of that whose blocks are to be sent for next
    for tile in range(first, last):
        async_copy.wait_group(_AHEAD - 1)
        low = records.scales.index(stage).load(_RECORD_ROW)
        high = records.scales.index(_AHEAD + stage).load(_RECORD_ROW)
        c0, c1, c2, c3 = _apart_four(records.four.index(stage).load(_SPANS))
        c4, c5 = _apart(gl.permute(records.two.index(stage).load(_SPANS), [1, 2, 0]))
        c6 = records.one.index(stage).load(_CODES)
        rope = records.rope.index(stage).load(_PAIRS)
        entry = _later_entry(ring, near, tile + 3, nth, source, A)
        block_id = blocks.index(stage).load(_RECORD_ROW)
        far_entry = _later_entry(ring, far, tile + 6, nth, source, A)
        mbarrier.wait(keys.free.index(stage), phase)
        halves.index(stage).store(
            _side_by_side(
                _decode(c0, low, 0), _decode(c1, low, 1), _decode(c2, low, 2), _decode(c3, low, 3)
            )
        )
        halves.index(_KEY_STAGES + stage).store(
            _side_by_side(_decode(c4, high, 0), _decode(c5, high, 1), _decode(c6, high, 2), rope)
        )
        keys.bias.index(stage).store(gl.where(live_0, 0.0, float("-inf")))
        fence_async_shared()
        mbarrier.arrive(keys.ready.index(stage), count=1)
        live_0, live_1 = live_1, live_2
        live_2 = _fetch(records, stage, tile + 3, nth, entry, block_id, source, A)
        _send_block(blocks, stage, far_entry, tile + 6, source, A)
        _send_entry(ring, near, tile + 9, nth, source, A)
        async_copy.commit_group()
        stage, phase = _next(stage, phase, _KEY_STAGES)
        near = gl.where(near == 2 * _AHEAD - 1, 0, near + 1)
        far = gl.where(far == 2 * _AHEAD - 1, 0, far + 1)


@gluon.jit
def _extent(tokens_row, indices_count, split, splits, A: gl.constexpr):
    """A query's slot and position, first and last tile of a split, and how many entries it sees."""
    slot = gl.load(tokens_row).to(gl.int64)
    position = gl.load(tokens_row + 1)
    first, last, visible = _range(position, indices_count, split, splits, slot, A)
    return slot, position, first, last, visible


@gluon.jit
def _source(where, tokens_row, batch_ptr, slot, position, last, visible, A: gl.constexpr):
    window_row = where.window_row
    shift = gl.to_tensor(0)
    if A.STAGED:
        batch_row = gl.load(tokens_row + 2)
        start = gl.load(batch_ptr + batch_row * 4 + 1, mask=slot >= 0, other=0)
        first_row = gl.load(batch_ptr + batch_row * 4 + 3, mask=slot >= 0, other=0)
        shift = first_row + (A.WINDOW - 1) * batch_row - (start - (A.WINDOW - 1))
    else:
        window_row += slot * where.window_bytes
    return _Source(
        arena=where.arena,
        window_data=window_row + where.window_data,
        window_scale=window_row + where.window_scale,
        entry_data=where.entry_data,
        entry_scale=where.entry_scale,
        entry_bytes=where.entry_bytes,
        table_row=where.table + slot * where.table_stride,
        indices_row=where.indices_row,
        indices_count=where.indices_count,
        position=position,
        visible=visible,
        shift=shift,
        last=last,
    )


@gluon.jit
def _apart(x):
    """Two spans of codes [rows, words, 2]."""
    first, second = gl.split(x)
    return (
        gl.convert_layout(first, _CODES, assert_trivial=True),
        gl.convert_layout(second, _CODES, assert_trivial=True),
    )


@gluon.jit
def _apart_four(x):
    """Four spans of codes [4, rows, words]."""
    x = gl.reshape(gl.permute(x, [1, 2, 0]), [_TILE, _SPAN // 4, 2, 2])
    even, odd = gl.split(x)
    first, third = _apart(even)
    second, fourth = _apart(odd)
    return first, second, third, fourth


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the parity of its next use."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _load_queries(queries, q_row, HALF: gl.constexpr, A: gl.constexpr):
    """One half of the channels of the program's heads into shared memory."""
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, _QUERY))[:, None]
    column = HALF * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(0, _QUERY))[None, :]
    queries.index(HALF).store(gl.load(q_row + head * A.WIDTH + column))
    fence_async_shared()


@gluon.jit
def _logits(queries, keys, stage, phase):
    """Starts the logits of a tile, once its keys are there."""
    mbarrier.wait(keys.ready.index(stage), phase)
    none = gl.full([_HEADS, _TILE], 0.0, gl.float32, _LOGITS)
    logits = warpgroup_mma(
        queries.index(0),
        keys.halves.index(stage).permute((1, 0)),
        none,
        use_acc=False,
        is_async=True,
    )
    return warpgroup_mma(
        queries.index(1),
        keys.halves.index(_KEY_STAGES + stage).permute((1, 0)),
        logits,
        is_async=True,
    )


@gluon.jit
def _values(keys, stage, nth_slice, ROLE: gl.constexpr, A: gl.constexpr):
    """The channels of a tile that a consumer of a slice sums."""
    SLICES: gl.constexpr = A.SLICES
    chunks = keys.halves._reinterpret(
        gl.bfloat16, [2 * _KEY_STAGES * SLICES, _TILE, _HALF // SLICES], _OPERAND
    )
    nth = 2 * nth_slice + ROLE
    return chunks.index((nth // SLICES * _KEY_STAGES + stage) * SLICES + nth % SLICES)


@gluon.jit
def _softmax(logits, top, total, acc, dead, nth, weights, A: gl.constexpr):
    """A tile's probabilities into shared memory, and the sums brought to the new maximum."""
    SCALE: gl.constexpr = A.WIDTH**-0.5 * _LOG2_E
    place = nth % _WEIGHT_STAGES
    x = logits * SCALE + dead[None, :]
    highest = gl.maximum(top, gl.max(x, axis=1))
    base = gl.where(highest == float("-inf"), 0.0, highest)  # no key yet
    alpha = gl.exp2(top - base)
    weight = gl.exp2(x - base[:, None])
    total = total * alpha + gl.sum(weight, axis=1)
    mbarrier.wait(weights.free.index(place), (nth // _WEIGHT_STAGES) % 2 ^ 1)
    weights.probabilities.index(place).store(weight.to(gl.bfloat16))
    weights.factors.index(place).store(alpha)
    fence_async_shared()
    mbarrier.arrive(weights.ready.index(place), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return highest, total, acc


@gluon.jit
def _left(
    queries, query_ready, keys, weights, q_row, sink_row, out_row, lse_row, rope_ptr, parts,
    counter, tokens_row, indices_count, split, splits, nth_slice, A: gl.constexpr,
):  # fmt: skip
    """Logits of the next tile run behind the sums of this one, so that only the softmax waits."""
    LINE: gl.constexpr = gl.SliceLayout(1, _LOGITS)
    KEY: gl.constexpr = gl.SliceLayout(0, _LOGITS)
    COLUMNS: gl.constexpr = _HALF // A.SLICES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    slot, position, first, last, _ = _extent(tokens_row, indices_count, split, splits, A)
    live = slot >= 0
    _load_queries(queries, q_row, 0, A)
    mbarrier.arrive(query_ready, count=1)
    mbarrier.wait(query_ready, 0)
    top = gl.full([_HEADS], float("-inf"), gl.float32, LINE)
    total = gl.full([_HEADS], 0.0, gl.float32, LINE)
    acc = gl.full([_HEADS, COLUMNS], 0.0, gl.float32, SUMS)
    tiles = last - first
    if tiles > 0:
        stage = gl.to_tensor(0)
        phase = gl.to_tensor(0)
        logits = warpgroup_mma_wait(0, deps=[_logits(queries, keys, stage, phase)])
        for nth in range(0, tiles - 1):
            top, total, acc = _softmax(
                logits, top, total, acc, keys.bias.index(stage).load(KEY), nth, weights, A,
            )  # fmt: skip
            running = warpgroup_mma(
                weights.probabilities.index(nth % _WEIGHT_STAGES),
                _values(keys, stage, nth_slice, 0, A),
                acc,
                is_async=True,
            )
            used = stage
            stage, phase = _next(stage, phase, _KEY_STAGES)
            next_logits = _logits(queries, keys, stage, phase)
            acc, logits = warpgroup_mma_wait(0, deps=[running, next_logits])
            mbarrier.arrive(keys.free.index(used), count=1)
        top, total, acc = _softmax(
            logits, top, total, acc, keys.bias.index(stage).load(KEY), tiles - 1, weights, A,
        )  # fmt: skip
        running = warpgroup_mma(
            weights.probabilities.index((tiles - 1) % _WEIGHT_STAGES),
            _values(keys, stage, nth_slice, 0, A),
            acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[running])
    head = gl.arange(0, _HEADS, layout=LINE)
    lse = top + gl.log2(total)
    base = gl.where(top == float("-inf"), 0.0, top)
    if A.SPLIT:
        gl.store(_part(parts, split, A) + head, lse, mask=live & (head >= 0))
    else:
        gl.store(lse_row + head, lse * _LN_2, mask=live & (head >= 0))
        sink = gl.load(sink_row + head)
        total += gl.where(total > 0, gl.exp2(sink * _LOG2_E - base), 0.0)
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    weights.factors.index(_WEIGHT_STAGES).store(inverse)  # right may still read the others
    mbarrier.arrive(weights.closed, count=1)
    acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, SUMS))[:, None]
    staged = queries.index(0)._reinterpret(gl.bfloat16, [_HEADS, COLUMNS], _OPERAND)
    staged.store(acc.to(gl.bfloat16))
    _finish(
        staged, parts, counter, split, splits, nth_slice, sink_row, out_row, lse_row, rope_ptr,
        position, live, 0, A,
    )  # fmt: skip


@gluon.jit
def _right(
    queries, query_ready, keys, weights, q_row, sink_row, out_row, lse_row, rope_ptr, parts,
    counter, tokens_row, indices_count, split, splits, nth_slice, A: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = _HALF // A.SLICES
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    slot, position, first, last, _ = _extent(tokens_row, indices_count, split, splits, A)
    live = slot >= 0
    _load_queries(queries, q_row, 1, A)
    mbarrier.arrive(query_ready, count=1)
    acc = gl.full([_HEADS, COLUMNS], 0.0, gl.float32, SUMS)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    for nth in range(0, last - first):
        place = nth % _WEIGHT_STAGES
        mbarrier.wait(keys.ready.index(stage), phase)
        mbarrier.wait(weights.ready.index(place), (nth // _WEIGHT_STAGES) % 2)
        alpha = weights.factors.index(place).load(gl.SliceLayout(1, SUMS))
        acc = acc * alpha[:, None]
        acc = warpgroup_mma(
            weights.probabilities.index(place),
            _values(keys, stage, nth_slice, 1, A),
            acc,
            is_async=True,
        )
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(weights.free.index(place), count=1)
        mbarrier.arrive(keys.free.index(stage), count=1)
        stage, phase = _next(stage, phase, _KEY_STAGES)
    mbarrier.wait(weights.closed, 0)
    acc = acc * weights.factors.index(_WEIGHT_STAGES).load(gl.SliceLayout(1, SUMS))[:, None]
    staged = queries.index(1)._reinterpret(gl.bfloat16, [_HEADS, COLUMNS], _OPERAND)
    if A.ROPE > 0 and not A.SPLIT:
        low, high = _halves(acc)
        middle, turned = _halves(high)
        turned = _turn_back(turned, rope_ptr + position.to(gl.int64) * A.ROPE, A)
        staged.slice(0, 128, dim=1).store(low.to(gl.bfloat16))
        staged.slice(128, 64, dim=1).store(middle.to(gl.bfloat16))
        staged.slice(192, 64, dim=1).store(turned.to(gl.bfloat16))
    else:
        staged.store(acc.to(gl.bfloat16))
    _finish(
        staged, parts, counter, split, splits, nth_slice, sink_row, out_row, lse_row, rope_ptr,
        position, live, 1, A,
    )  # fmt: skip


@gluon.jit
def _finish(
    staged, parts, counter, split, splits, nth_slice, sink_row, out_row, lse_row, rope_ptr,
    position, live, ROLE: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """A consumer's channels from shared memory to the output, by way of a part where split."""
    channel = (2 * nth_slice + ROLE) * (_HALF // A.SLICES)
    if A.SPLIT:
        _store(staged, _sums(_part(parts, split, A)) + channel, live, A)
        if live:
            _meet(counter, split, splits, ROLE)
            _combine(
                parts, split, splits, channel, sink_row, out_row, lse_row, rope_ptr, position, A
            )
    else:
        _store(staged, out_row + channel, live, A)


@gluon.jit
def _part(parts, nth, A: gl.constexpr):
    return parts + nth * (_HEADS * (A.WIDTH // 2 + 1))


@gluon.jit
def _sums(part):
    return (part + _HEADS).to(gl.pointer_type(gl.bfloat16))


@gluon.jit
def _meet(counter, split, splits, ROLE: gl.constexpr):
    """Waits until all parts of a query are parked. Every consumer adds 1 and one of them what is
    left to 2^31, which sets the highest bit; when they leave they add the same again, and after
    the last one the counter is 0. Until then the highest bit stays."""
    step = gl.to_tensor(1)
    if ROLE == 0:
        step = gl.where(split == 0, -2147483648 - (2 * splits - 1), 1)
    gl.thread_barrier()
    gl.atomic_add(counter, step, sem="release", scope="gpu")
    gl.inline_asm_elementwise(_UNTIL_ALL, "=r,l", [counter.to(gl.int64)], gl.int32, False, 1)
    gl.thread_barrier()
    gl.atomic_add(counter, step, sem="relaxed", scope="gpu")


@gluon.jit
def _combine(
    parts, split, splits, channel, sink_row, out_row, lse_row, rope_ptr, position,
    A: gl.constexpr,
):  # fmt: skip
    """Adds the parts of some heads in a fixed order, a consumer's channels, four heads at a time.
    A warp takes one head; where it has few channels, its lanes also share out the parts."""
    COLUMNS: gl.constexpr = _HALF // A.SLICES
    LANES: gl.constexpr = A.SLICES  # that share out the parts
    PARTS: gl.constexpr = A.PARTS
    HEADS: gl.constexpr = 4 * A.HEADS_A_THREAD
    L: gl.constexpr = gl.BlockedLayout(
        [PARTS // LANES, A.HEADS_A_THREAD, 8], [LANES, 1, COLUMNS // 8], [1, 4, 1], [2, 1, 0]
    )
    BOTH: gl.constexpr = gl.SliceLayout(2, L)
    SUM: gl.constexpr = gl.SliceLayout(0, L)
    LINE: gl.constexpr = gl.SliceLayout(1, SUM)
    nth = gl.arange(0, PARTS, layout=gl.SliceLayout(1, BOTH))[:, None]
    columns = channel + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))
    column = channel + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUM))
    for start in range(split * HEADS, _HEADS, splits * HEADS):
        heads = start + gl.arange(0, HEADS, layout=gl.SliceLayout(0, BOTH))
        head = start + gl.arange(0, HEADS, layout=LINE)
        sink = gl.load(sink_row + head) * _LOG2_E
        top = gl.full([HEADS], -1e30, gl.float32, LINE)
        total = gl.full([HEADS], 0.0, gl.float32, LINE)
        acc = gl.full([HEADS, COLUMNS], 0.0, gl.float32, SUM)
        for part in range(0, splits, PARTS):
            there = (part + nth < splits) & (heads >= 0)[None, :]
            row = _part(parts, part + nth, A)
            lse = gl.load(
                row + heads[None, :], mask=there, other=float("-inf"), cache_modifier=".cg"
            )
            at = _sums(row)[:, :, None] + heads[None, :, None] * A.WIDTH + columns[None, None, :]
            sums = gl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
            highest = gl.maximum(top, gl.convert_layout(gl.max(lse, axis=0), LINE))
            alpha = gl.exp2(top - highest)
            common = gl.convert_layout(highest, gl.SliceLayout(0, BOTH))
            weight = gl.exp2(lse - common[None, :])
            total = total * alpha + gl.convert_layout(gl.sum(weight, axis=0), LINE)
            acc = acc * alpha[:, None] + gl.sum(sums.to(gl.float32) * weight[:, :, None], axis=0)
            top = highest
        logarithm = (top + gl.log2(total)) * _LN_2
        gl.store(lse_row + head, logarithm, mask=(channel == 0) & (head >= 0))
        total += gl.exp2(sink - top)
        inverse = gl.where(total > 0, 1.0 / total, 0.0)
        result = (acc * inverse[:, None]).to(gl.bfloat16)
        if A.ROPE > 0:
            even, odd = gl.split(gl.reshape(result.to(gl.float32), [HEADS, COLUMNS // 2, 2]))
            pair = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, even.type.layout))
            pair += (channel - (A.WIDTH - A.ROPE)) // 2
            rope_row = rope_ptr + position.to(gl.int64) * A.ROPE
            cos = gl.load(rope_row + pair, mask=pair >= 0, other=1.0)[None, :]
            sin = gl.load(rope_row + A.ROPE // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
            both = gl.join(even * cos + odd * sin, odd * cos - even * sin)
            result = gl.convert_layout(gl.reshape(both, [HEADS, COLUMNS]).to(gl.bfloat16), SUM)
        gl.store(out_row + head[:, None] * A.WIDTH + column[None, :], result)


@gluon.jit
def _halves(x):
    """The left and the right half of the columns; they lie in different registers."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@gluon.jit
def _store(staged, out_row, live, A: gl.constexpr):
    """A consumer's channels from shared memory into the output, 16 bytes a thread."""
    COLUMNS: gl.constexpr = staged.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    head = gl.arange(0, _HEADS, layout=gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    mask = live & (head >= 0) & (column >= 0)
    gl.store(out_row + head * A.WIDTH + column, staged.load(L), mask=mask)


@gluon.jit
def _turn_back(x, rope_row, A: gl.constexpr):
    """Inverse RoPE of the last channels, rounded to bf16 before as DeepSeek's code does."""
    COLUMNS: gl.constexpr = x.shape[1]
    rounded = x.to(gl.bfloat16).to(gl.float32)
    even, odd = gl.split(gl.reshape(rounded, [_HEADS, COLUMNS // 2, 2]))
    pair = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, even.type.layout))
    pair -= (COLUMNS - A.ROPE) // 2
    cos = gl.load(rope_row + pair, mask=pair >= 0, other=1.0)[None, :]
    sin = gl.load(rope_row + A.ROPE // 2 + pair, mask=pair >= 0, other=0.0)[None, :]
    both = gl.join(even * cos + odd * sin, odd * cos - even * sin)
    return gl.reshape(both, [_HEADS, COLUMNS])


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
    BLOCKS: gl.constexpr = A.HEADS // _HEADS
    item = gl.program_id(0)
    split = gl.program_id(1)
    splits = gl.num_programs(1)
    nth_slice = gl.program_id(2)
    block = item % BLOCKS
    token = item // BLOCKS
    tokens_row = tokens_ptr + token * 4
    token = token.to(gl.int64)
    head = block * _HEADS
    q_row = q_ptr + token * q_stride + head * A.WIDTH
    out_row = out_ptr + token * out_stride + head * A.WIDTH
    lse_row = lse_ptr + token * lse_stride + head
    counter = workspace_ptr.to(gl.pointer_type(gl.int32))
    counter += (item * A.SLICES + nth_slice) * _COUNTER_STRIDE
    PART: gl.constexpr = _HEADS * (A.WIDTH // 2 + 1)
    # a part: normalised sums in bf16, their log2-sum-exp2 in fp32
    parts = workspace_ptr + _PARTS_START + (item * splits).to(gl.int64) * PART

    queries = gl.allocate_shared_memory(gl.bfloat16, [2, _HEADS, _HALF], _OPERAND)
    query_ready = gl.allocate_shared_memory(gl.int64, [1], _BARRIER)
    quarter: gl.constexpr = _SPAN // 4
    keys = _Keys(
        halves=gl.allocate_shared_memory(gl.bfloat16, [2 * _KEY_STAGES, _TILE, _HALF], _OPERAND),
        bias=gl.allocate_shared_memory(gl.float32, [_KEY_STAGES, _TILE], _VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [_KEY_STAGES, 1], _BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [_KEY_STAGES, 1], _BARRIER),
    )
    weights = _Weights(
        probabilities=gl.allocate_shared_memory(
            gl.bfloat16, [_WEIGHT_STAGES, _HEADS, _TILE], _WEIGHT
        ),
        factors=gl.allocate_shared_memory(gl.float32, [_WEIGHT_STAGES + 1, _HEADS], _VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [_WEIGHT_STAGES, 1], _BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [_WEIGHT_STAGES, 1], _BARRIER),
        closed=gl.allocate_shared_memory(gl.int64, [1], _BARRIER),
    )
    records = _Records(
        four=gl.allocate_shared_memory(gl.uint32, [_AHEAD, 4, _TILE, quarter], _RAW_SPANS),
        two=gl.allocate_shared_memory(gl.uint32, [_AHEAD, 2, _TILE, quarter], _RAW_SPANS),
        one=gl.allocate_shared_memory(gl.uint32, [_AHEAD, _TILE, quarter], _RAW_CODES),
        rope=gl.allocate_shared_memory(gl.uint32, [_AHEAD, _TILE, 2 * quarter], _RAW_ROPE),
        scales=gl.allocate_shared_memory(gl.uint32, [2 * _AHEAD, _TILE], _VECTOR),
        entries=gl.allocate_shared_memory(gl.int32, [2 * _AHEAD, _TILE], _VECTOR),
        blocks=gl.allocate_shared_memory(gl.int32, [_AHEAD, _TILE], _VECTOR),
    )
    mbarrier.init(query_ready, count=2)
    for stage in gl.static_range(_KEY_STAGES):
        mbarrier.init(keys.ready.index(stage), count=1)
        mbarrier.init(keys.free.index(stage), count=2)
    mbarrier.init(weights.closed, count=1)
    for place in gl.static_range(_WEIGHT_STAGES):
        mbarrier.init(weights.ready.index(place), count=1)
        mbarrier.init(weights.free.index(place), count=1)
    fence_async_shared()
    where = _Where(
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
        indices_count=indices_count,
    )
    gl.warp_specialize(
        [
            (
                _left,
                (
                    queries, query_ready, keys, weights, q_row, sink_ptr + head, out_row, lse_row,
                    rope_ptr, parts, counter, tokens_row, indices_count, split, splits, nth_slice,
                    A,
                ),
            ),
            (
                _right,
                (
                    queries, query_ready, keys, weights, q_row, sink_ptr + head, out_row, lse_row,
                    rope_ptr, parts, counter, tokens_row, indices_count, split, splits, nth_slice,
                    A,
                ),
            ),
            (_produce, (keys, records, where, tokens_row, batch_ptr, split, splits, A)),
        ],
        [4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
