"""DeepSeek-V4's records in the producer of Hopper's attention (attend_producer.py): seven spans of
FP8 codes with a power of two each, then a span of bf16 channels."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4.kernels.codes import bf16_power_bits, e4m3_times_bf16
from dsv4.kernels.hopper.attend_keys import (
    AHEAD,
    KEY_STAGES,
    RECORD_ROW,
    SPAN,
    SPANS,
    TILE,
    VECTOR,
    fetch_spans,
)
from dsv4.kernels.hopper.dialect import async_load
from dsv4.kernels.record_store import record_constants
from dsv4.ops.calls import Attention

_CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_RAW_SPANS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0]))
_RAW_CODES = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 1, [1, 0]))
_RAW_ROPE = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))

_SCALE_BYTES = 8

# One scale for the four codes of a word: a power of two, twice in $3.
_E4M3_TIMES_BF16 = gl.constexpr(e4m3_times_bf16("$3", "$3"))


class _Records(NamedTuple):
    """Tiles being loaded: four, two and one span of codes, the RoPE channels, and the scales (the
    first words of all tiles, then the second), all as words."""

    four: gl.shared_memory_descriptor
    two: gl.shared_memory_descriptor
    one: gl.shared_memory_descriptor
    rope: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


def takes(call: Attention) -> bool:
    """One format for window and entries: codes with a power of two per 64 channels, then bf16."""
    window, entries = call.window, call.entries
    record = record_constants(window.page.format)
    return (
        record.CODED + SPAN.value == call.q.shape[2]
        and ("e4m3", "ue8m0", SPAN.value) == (record.ELEMENT, record.SCALE, record.TILE)
        and record.SCALE_BYTES == _SCALE_BYTES
        and (entries is None or entries.page.format == window.page.format)
    )


@gluon.jit
def new_records():
    WORDS: gl.constexpr = SPAN // 4
    return _Records(
        four=gl.allocate_shared_memory(gl.uint32, [AHEAD, 4, TILE, WORDS], _RAW_SPANS),
        two=gl.allocate_shared_memory(gl.uint32, [AHEAD, 2, TILE, WORDS], _RAW_SPANS),
        one=gl.allocate_shared_memory(gl.uint32, [AHEAD, TILE, WORDS], _RAW_CODES),
        rope=gl.allocate_shared_memory(gl.uint32, [AHEAD, TILE, 2 * WORDS], _RAW_ROPE),
        scales=gl.allocate_shared_memory(gl.uint32, [2 * AHEAD, TILE], VECTOR),
    )


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
        source.window_data + ring * A.WINDOW_DATA_STRIDE,
        page + source.entry_data + row * A.DATA_STRIDE,
    )
    scale = gl.where(
        in_window,
        source.window_scale + ring * A.WINDOW_SCALE_STRIDE,
        page + source.entry_scale + row * A.SCALE_STRIDE,
    )
    return data, scale, live


@gluon.jit
def fetch(records, place, tile, nth, entry, block_id, source, A: gl.constexpr):
    """Starts loading the records of a tile. Rows that are not live become zeros. Returns which
    are."""
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
def take(records, stage):
    """What has arrived of a tile: its scales [keys], four to a word, the codes of each span [keys,
    words] and the RoPE channels."""
    low = records.scales.index(stage).load(RECORD_ROW)
    high = records.scales.index(AHEAD + stage).load(RECORD_ROW)
    c0, c1, c2, c3 = _apart_four(records.four.index(stage).load(SPANS))
    c4, c5 = _apart(gl.permute(records.two.index(stage).load(SPANS), [1, 2, 0]))
    c6 = records.one.index(stage).load(_CODES)
    rope = records.rope.index(stage).load(_PAIRS)
    return low, high, c0, c1, c2, c3, c4, c5, c6, rope


@gluon.jit
def hand_over(taken, keys, halves, stage, phase):
    """Decodes a tile into its stage, once that is free."""
    low, high, c0, c1, c2, c3, c4, c5, c6, rope = taken
    mbarrier.wait(keys.free.index(stage), phase)
    halves.index(stage).store(
        _side_by_side(
            _decode(c0, low, 0), _decode(c1, low, 1), _decode(c2, low, 2), _decode(c3, low, 3)
        )
    )
    halves.index(KEY_STAGES + stage).store(
        _side_by_side(_decode(c4, high, 0), _decode(c5, high, 1), _decode(c6, high, 2), rope)
    )


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
