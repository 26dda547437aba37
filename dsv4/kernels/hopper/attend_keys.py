"""The producer of the Hopper attention kernel: finds a query's keys, loads and decodes them.

Four warps take tile after tile of 32 keys. A key's place follows from two loads that depend on each
other, its index in the list and its block's id, so each is sent for some tiles ahead of the next.
attend.py has the consumers, the launch and the roles.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
)

from dsv4.kernels.codes import bf16_power_bits, e4m3_times_bf16
from dsv4.kernels.hopper.dialect import async_load, reinterpret
from dsv4.kernels.rows import load_request, load_token, request_at, staged_row

TILE = gl.constexpr(32)  # keys
SPAN = gl.constexpr(64)  # channels that share a scale
HALF = gl.constexpr(256)  # channels of one consumer where they are not sliced
KEY_STAGES = gl.constexpr(3)  # decoded tiles in shared memory
AHEAD = gl.constexpr(3)  # tiles of records under way

OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
BARRIER = gl.constexpr(mbarrier.MBarrierLayout())
OPERAND_WORDS = gl.constexpr(
    gl.NVMMASharedLayout(128, 32, rank=2)
)  # OPERAND's bytes as 32-bit words
# words [spans, keys, words], [keys, words] of codes and [keys, words] of bf16 pairs; [keys]
SPANS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [1, 4, 1], [2, 1, 0]))
_CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
RECORD_ROW = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])))
RAW_SPANS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0]))
_RAW_CODES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
_RAW_ROPE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))

# One scale for the four codes of a word: a power of two, twice in $3.
_E4M3_TIMES_BF16 = gl.constexpr(e4m3_times_bf16("$3", "$3"))


class Share(NamedTuple):
    """What of a query a program does: one of `splits` parts of its keys, and one slice of its
    channels."""

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
    channels of all stages, then the second. `bias` is -inf where a key does not live."""

    halves: gl.shared_memory_descriptor
    bias: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


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


class Where(NamedTuple):
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
    batch: gl.tensor


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
def new_records():
    WORDS: gl.constexpr = SPAN // 4
    return _Records(
        four=gl.allocate_shared_memory(gl.uint32, [AHEAD, 4, TILE, WORDS], RAW_SPANS),
        two=gl.allocate_shared_memory(gl.uint32, [AHEAD, 2, TILE, WORDS], RAW_SPANS),
        one=gl.allocate_shared_memory(gl.uint32, [AHEAD, TILE, WORDS], _RAW_CODES),
        rope=gl.allocate_shared_memory(gl.uint32, [AHEAD, TILE, 2 * WORDS], _RAW_ROPE),
        scales=gl.allocate_shared_memory(gl.uint32, [2 * AHEAD, TILE], VECTOR),
        entries=gl.allocate_shared_memory(gl.int32, [2 * AHEAD, TILE], VECTOR),
        blocks=gl.allocate_shared_memory(gl.int32, [AHEAD, TILE], VECTOR),
    )


@gluon.jit
def extent_of(share, A: gl.constexpr):
    """Splits have about equal numbers of tiles: the window's, then the entries'."""
    token = load_token(share.tokens_row)
    slot, position = token.slot.to(gl.int64), token.position
    tiles = gl.to_tensor((A.WINDOW + TILE - 1) // TILE)
    visible = gl.to_tensor(0)
    if A.ENTRIES:
        visible = (position + 1) // A.RATIO
        if A.ALL:
            tiles += (visible + TILE - 1) // TILE
        else:
            tiles += (share.indices_count + TILE - 1) // TILE
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
def produce(keys, records, where, share, A: gl.constexpr):
    """Decodes tile after tile. The records of the next three are under way, of the three behind
    them the block ids, and of the three behind those the indices. All of them go to shared memory:
    a register that waits for a load can not be moved on to the next turn of the loop.

    Every buffer is written once per tile: Triton orders all writes to one with barriers."""
    nth = gl.arange(0, TILE, layout=RECORD_ROW)
    extent = extent_of(share, A)
    source = source_of(where, share, extent, A)
    first = extent.first
    halves = reinterpret(keys.halves, gl.uint32, [2 * KEY_STAGES, TILE, HALF // 2], OPERAND_WORDS)
    ring = records.entries
    blocks = records.blocks
    entry_0 = entry_of(first, nth, source, A)
    entry_1 = entry_of(first + 1, nth, source, A)
    entry_2 = entry_of(first + 2, nth, source, A)
    entry_3 = entry_of(first + 3, nth, source, A)
    entry_4 = entry_of(first + 4, nth, source, A)
    entry_5 = entry_of(first + 5, nth, source, A)
    block_0 = block_of(entry_0, first, source, A)
    block_1 = block_of(entry_1, first + 1, source, A)
    block_2 = block_of(entry_2, first + 2, source, A)
    live_0 = _fetch(records, 0, first, nth, entry_0, block_0, source, A)
    send_block(blocks, 0, entry_3, first + 3, source, A)
    send_entry(ring, 3, first + 3, nth, source, A)
    send_entry(ring, 0, first + 6, nth, source, A)
    async_copy.commit_group()
    live_1 = _fetch(records, 1, first + 1, nth, entry_1, block_1, source, A)
    send_block(blocks, 1, entry_4, first + 4, source, A)
    send_entry(ring, 4, first + 4, nth, source, A)
    send_entry(ring, 1, first + 7, nth, source, A)
    async_copy.commit_group()
    live_2 = _fetch(records, 2, first + 2, nth, entry_2, block_2, source, A)
    send_block(blocks, 2, entry_5, first + 5, source, A)
    send_entry(ring, 5, first + 5, nth, source, A)
    send_entry(ring, 2, first + 8, nth, source, A)
    async_copy.commit_group()
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    near = gl.to_tensor(3)  # the place of the entries of the tile to fetch next
    far = gl.to_tensor(0)  # and of that whose blocks are to be sent for next
    for tile in range(first, extent.last):
        async_copy.wait_group(AHEAD - 1)
        low = records.scales.index(stage).load(RECORD_ROW)  # [keys] of four scales
        high = records.scales.index(AHEAD + stage).load(RECORD_ROW)
        # codes of each span [keys, words]
        c0, c1, c2, c3 = _apart_four(records.four.index(stage).load(SPANS))
        c4, c5 = _apart(gl.permute(records.two.index(stage).load(SPANS), [1, 2, 0]))
        c6 = records.one.index(stage).load(_CODES)
        rope = records.rope.index(stage).load(_PAIRS)
        entry = later_entry(ring, near, tile + 3, nth, source, A)
        block_id = blocks.index(stage).load(RECORD_ROW)
        far_entry = later_entry(ring, far, tile + 6, nth, source, A)
        mbarrier.wait(keys.free.index(stage), phase)
        halves.index(stage).store(
            _side_by_side(
                _decode(c0, low, 0), _decode(c1, low, 1), _decode(c2, low, 2), _decode(c3, low, 3)
            )
        )
        halves.index(KEY_STAGES + stage).store(
            _side_by_side(_decode(c4, high, 0), _decode(c5, high, 1), _decode(c6, high, 2), rope)
        )
        keys.bias.index(stage).store(gl.where(live_0, 0.0, float("-inf")))
        fence_async_shared()
        mbarrier.arrive(keys.ready.index(stage), count=1)
        live_0, live_1 = live_1, live_2
        live_2 = _fetch(records, stage, tile + 3, nth, entry, block_id, source, A)
        send_block(blocks, stage, far_entry, tile + 6, source, A)
        send_entry(ring, near, tile + 9, nth, source, A)
        async_copy.commit_group()
        stage, phase = next_stage(stage, phase, KEY_STAGES)
        near = gl.where(near == 2 * AHEAD - 1, 0, near + 1)
        far = gl.where(far == 2 * AHEAD - 1, 0, far + 1)


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
    """The entries that the keys of a tile name; what lies outside the list is -1."""
    if A.ALL:
        return (tile - A.WINDOW // TILE) * TILE + nth
    else:
        at, listed = _entry_at(tile, nth, source, A)
        return gl.load(at, mask=listed, other=-1, volatile=True)


@gluon.jit
def later_entry(ring, place, tile, nth, source, A: gl.constexpr):
    """As entry_of, sent for by send_entry."""
    if A.ALL:
        return entry_of(tile, nth, source, A)
    else:
        _, listed = _entry_at(tile, nth, source, A)
        return gl.where(listed, ring.index(place).load(RECORD_ROW), -1)


@gluon.jit
def send_entry(ring, place, tile, nth, source, A: gl.constexpr):
    """Sends for the indices of a tile."""
    if not A.ALL:
        at, listed = _entry_at(tile, nth, source, A)
        async_load(ring.index(place), at, mask=listed)


@gluon.jit
def _block_at(entry, tile, source, A: gl.constexpr):
    """Where the ids of blocks with these entries are, and which of them are to be read."""
    live = (entry >= 0) & (entry < source.visible)
    live = live & (tile >= A.WINDOW // TILE) & (tile < source.last)
    return source.table_row + entry.to(gl.uint32) // A.ENTRY_ROWS, live


@gluon.jit
def block_of(entry, tile, source, A: gl.constexpr):
    at, live = _block_at(entry, tile, source, A)
    return gl.load(at, mask=live, other=0, volatile=True)


@gluon.jit
def send_block(ring, place, entry, tile, source, A: gl.constexpr):
    """Sends for the ids of the blocks with these entries."""
    at, live = _block_at(entry, tile, source, A)
    async_load(ring.index(place), at, mask=live)


@gluon.jit
def _rows(tile, nth, entry, block_id, source, A: gl.constexpr):
    """Byte offsets of a tile's data and scale rows from the entry arena, and which live."""
    in_window = tile < A.WINDOW // TILE
    seen = source.position - (A.WINDOW - 1) + tile * TILE + nth
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
    fetch_spans(records.four.index(place), at, live, 0)
    fetch_spans(records.two.index(place), at, live, 4)
    word = gl.arange(0, SPAN // 4, layout=gl.SliceLayout(0, _CODES))[None, :]
    async_load(
        records.one.index(place),
        gl.multiple_of(at[:, None], [16, 16]) + (6 * (SPAN // 4) + word),
        mask=live[:, None],
    )
    row: gl.constexpr = gl.SliceLayout(1, _PAIRS)
    word = gl.arange(0, SPAN // 2, layout=gl.SliceLayout(0, _PAIRS))[None, :]
    rope_at = gl.multiple_of(gl.convert_layout(at, row, assert_trivial=True)[:, None], [16, 16])
    rope_live = gl.convert_layout(live, row, assert_trivial=True)[:, None]
    async_load(records.rope.index(place), rope_at + (7 * (SPAN // 4) + word), mask=rope_live)
    scales_at = (source.arena + scale).to(gl.pointer_type(gl.uint32))
    for half in gl.static_range(2):
        async_load(records.scales.index(half * AHEAD + place), scales_at + half, mask=live)
    return live


@gluon.jit
def fetch_spans(raw, at, live, FIRST: gl.constexpr):
    """Spans from FIRST on, each [rows, words], so that rows of a span follow each other closely:
    neighbouring rows then lie in different banks."""
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
def _decode(codes, scales, NTH: gl.constexpr):
    """Words of four E4M3 codes of one span times its scale: twice as many words of two bf16."""
    exponent = (scales >> (8 * NTH)) & 0xFF
    bits = bf16_power_bits(exponent)
    power, codes = gl.broadcast((bits | (bits << 16))[:, None], codes)
    low, high = gl.inline_asm_elementwise(
        _E4M3_TIMES_BF16, "=r,=r,r,r", [codes, power], (gl.uint32, gl.uint32), True, 1
    )
    return gl.convert_layout(
        gl.reshape(gl.join(low, high), [TILE, SPAN // 2]), _PAIRS, assert_trivial=True
    )


@gluon.jit
def _side_by_side(a, b, c, d):
    """Four spans of words as one row: they stay in the registers where they are."""
    all_four = gl.join(gl.join(a, b), gl.join(c, d))  # [rows, words, second, first]
    return gl.reshape(gl.permute(all_four, [0, 3, 2, 1]), [TILE, 4 * (SPAN // 2)])


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
    x = gl.reshape(gl.permute(x, [1, 2, 0]), [TILE, SPAN // 4, 2, 2])
    even, odd = gl.split(x)
    first, third = _apart(even)
    second, fourth = _apart(odd)
    return first, second, third, fourth


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the parity of its next use."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)
