"""The keys of a query in Hopper's attention: which ones there are, where they lie, and how decoded
ones pass from the producer (attend_producer.py) to the consumers (attend.py, attend_whole.py)."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4.kernels.hopper.dialect import async_load
from dsv4.kernels.rows import load_request, load_token, request_at, staged_row

TILE = gl.constexpr(32)  # keys
SPAN = gl.constexpr(64)  # channels that share a scale
HALF = gl.constexpr(256)  # channels of one consumer where they are not sliced
KEY_STAGES = gl.constexpr(3)  # decoded tiles in shared memory
AHEAD = gl.constexpr(3)  # tiles of records that are being loaded

OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
OPERAND_WORDS = gl.constexpr(
    gl.NVMMASharedLayout(128, 32, rank=2)
)  # OPERAND's bytes as 32-bit words
# words [spans, keys, words]; [keys]
SPANS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [1, 4, 1], [2, 1, 0]))
RECORD_ROW = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])))


class Share(NamedTuple):
    """A program's part of a query: one of `splits` parts of its keys, and one slice of its
    channels. `parts` is where those of a split query are parked (attend_parts.py), else ()."""

    parts: gl.tuple
    tokens_row: gl.tensor
    indices_count: gl.tensor
    split: gl.tensor
    splits: gl.tensor
    nth_slice: gl.tensor


class Extent(NamedTuple):
    """A query, and the tiles [first, last) that a program has of it: none for padding."""

    slot: gl.tensor
    position: gl.tensor
    first: gl.tensor
    last: gl.tensor
    visible: gl.tensor  # entries


class Keys(NamedTuple):
    """Decoded tiles in shared memory, from the producer to the consumers: the first half of the
    channels of all stages, then the second. `bias` is -inf where a key is not live."""

    halves: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


class Where(NamedTuple):
    """Where keys are, as the launch's arguments say it."""

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
    batch: gl.tensor


class _Source(NamedTuple):
    """Where a query's keys are: offsets are bytes from `arena`, that of the entries, so that window
    rows and entries are read by the same loads."""

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


@gluon.jit
def new_keys():
    keys = Keys(
        halves=gl.allocate_shared_memory(gl.bfloat16, [2 * KEY_STAGES, TILE, HALF], OPERAND),
        bias=gl.allocate_shared_memory(gl.float32, [KEY_STAGES, TILE], VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], BARRIER),
    )
    for stage in gl.static_range(KEY_STAGES):
        mbarrier.init(keys.ready.index(stage), count=1)
        mbarrier.init(keys.free.index(stage), count=2)
    return keys


@gluon.jit
def where_of(window, entries, table, indices, batch, program):
    """`window` and `entries`: an arena, the bytes of a slot or block, and where in it data and
    scales begin. `table` and `indices`: a pointer and its stride."""
    window_arena, window_bytes, window_data, window_scale = window
    entry_arena, entry_bytes, entry_data, entry_scale = entries
    table_ptr, table_stride = table
    indices_ptr, indices_stride = indices
    return Where(
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
        indices_row=indices_ptr + program.token.to(gl.int64) * indices_stride,
        batch=batch,
    )


@gluon.jit
def extent_of(share, A: gl.constexpr):
    """Splits have about equal numbers of tiles: the window's, then the entries'."""
    token = load_token(share.tokens_row)
    slot, position = token.slot.to(gl.int64), token.position
    tiles, visible = seen_tiles(position, share.indices_count, A)
    if A.RESOLVED:  # whatever is listed is visible
        visible = gl.to_tensor(0x7FFFFFFF)
    first = (tiles * share.split).to(gl.uint32) // share.splits.to(gl.uint32)
    last = (tiles * (share.split + 1)).to(gl.uint32) // share.splits.to(gl.uint32)
    return Extent(
        slot=slot,
        position=position,
        first=first.to(gl.int32),
        last=gl.where(slot < 0, first, last).to(gl.int32),
        visible=visible,
    )


@gluon.jit
def seen_tiles(position, indices_count, A: gl.constexpr):
    """How many tiles a query has, and how many entries it sees."""
    tiles = gl.to_tensor((A.WINDOW + TILE - 1) // TILE)
    visible = gl.to_tensor(0)
    if A.ENTRIES:
        visible = (position + 1) // A.RATIO
        if A.ALL:
            tiles += (visible + TILE - 1) // TILE
        else:
            tiles += (indices_count + TILE - 1) // TILE
    return tiles, visible


@gluon.jit
def source_of(where, share, extent, A: gl.constexpr):
    window_row = where.window_row
    shift = gl.to_tensor(0)
    if A.STAGED:
        batch_row = load_token(share.tokens_row).batch_row
        live = extent.slot >= 0
        request = load_request(request_at(where.batch, batch_row), live, 0)
        shift = staged_row(request.first_row, request.start, batch_row, 0, A.WINDOW)
    else:
        window_row += extent.slot * where.window_bytes
    return _Source(
        arena=where.arena,
        window_data=window_row + where.window_data,
        window_scale=window_row + where.window_scale,
        entry_data=where.entry_data,
        entry_scale=where.entry_scale,
        entry_bytes=where.entry_bytes,
        table_row=where.table + extent.slot * where.table_stride,
        indices_row=where.indices_row,
        indices_count=share.indices_count,
        position=extent.position,
        visible=extent.visible,
        shift=shift,
        last=extent.last,
    )


@gluon.jit
def _entry_at(tile, nth, source, A: gl.constexpr):
    """Where the indices of a tile's keys are, and which of them are in the list."""
    key = (tile - A.WINDOW // TILE) * TILE + nth
    return source.indices_row + key, (key >= 0) & (key < source.indices_count)


@gluon.jit
def entry_of(tile, nth, source, A: gl.constexpr):
    """The entries that the keys of a tile name; -1 outside the list."""
    if A.ALL:
        return (tile - A.WINDOW // TILE) * TILE + nth
    else:
        at, listed = _entry_at(tile, nth, source, A)
        return gl.load(at, mask=listed, other=-1, volatile=True)


@gluon.jit
def later_entry(ring, place, tile, nth, source, A: gl.constexpr):
    """As entry_of, for indices that send_entry has requested."""
    if A.ALL:
        return entry_of(tile, nth, source, A)
    else:
        _, listed = _entry_at(tile, nth, source, A)
        return gl.where(listed, ring.index(place).load(RECORD_ROW), -1)


@gluon.jit
def send_entry(ring, place, tile, nth, source, A: gl.constexpr):
    """Starts loading the indices of a tile."""
    if not A.ALL:
        at, listed = _entry_at(tile, nth, source, A)
        async_load(ring.index(place), at, mask=listed)


@gluon.jit
def _block_at(entry, tile, source, A: gl.constexpr):
    """Where the ids of the blocks with these entries are, and which of them are to be read."""
    live = (entry >= 0) & (entry < source.visible)
    live = live & (tile >= A.WINDOW // TILE) & (tile < source.last)
    return source.table_row + entry.to(gl.uint32) // A.ENTRY_ROWS, live


@gluon.jit
def block_of(entry, tile, source, A: gl.constexpr):
    if A.RESOLVED:
        return _row_of(entry, A)
    else:
        at, live = _block_at(entry, tile, source, A)
        return gl.load(at, mask=live, other=0, volatile=True)


@gluon.jit
def later_block(ring, place, entry, A: gl.constexpr):
    """As block_of, for ids that send_block has requested."""
    if A.RESOLVED:
        return _row_of(entry, A)
    else:
        return ring.index(place).load(RECORD_ROW)


@gluon.jit
def send_block(ring, place, entry, tile, source, A: gl.constexpr):
    """Starts loading the ids of the blocks with these entries."""
    if not A.RESOLVED:
        at, live = _block_at(entry, tile, source, A)
        async_load(ring.index(place), at, mask=live)


@gluon.jit
def _row_of(entry, A: gl.constexpr):
    """The arena rows of resolved entries."""
    return gl.where(entry >= 0, (entry.to(gl.uint32) // A.ENTRY_ROWS).to(gl.int32), 0)


@gluon.jit
def fetch_spans(raw, at, live, FIRST: gl.constexpr):
    """Loads spans from FIRST on, each [rows, words], so that rows of a span lie close together:
    neighbouring rows are then in different banks."""
    row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SPANS))
    at = gl.convert_layout(at, row, assert_trivial=True)[None, :, None]
    live = gl.convert_layout(live, row, assert_trivial=True)[None, :, None]
    nth: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, SPANS))
    span = FIRST + gl.arange(0, raw.shape[0], layout=nth)[:, None, None]
    words: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, SPANS))
    WORDS_EACH: gl.constexpr = raw.shape[2]
    word = gl.arange(0, WORDS_EACH, layout=words)[None, None, :]
    source = gl.multiple_of(at, [16, 16, 16]) + (span * WORDS_EACH + word)
    async_load(raw, source, mask=live)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the parity of its next use."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)
