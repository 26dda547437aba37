"""DeepSeek-V4.1's records in the producer of Hopper's attention (attend_producer.py): the window's
are FP8 with a power of two per 32 channels, the entries' FP4 with an E4M3 scale per 16.

A tile is of one kind or the other, because the window is whole tiles, and takes one of two paths
from memory to shared memory. Decoded keys are the numbers divided by KEY_UNIT, which saves a
product for every two channels of an entry; logits and results are multiplied by it again. All of
these are powers of two: nothing is rounded.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from dsv4.kernels.codes import bf16_power_bits, e2m1_pairs_times_bf16, e4m3_times_bf16
from dsv4.kernels.hopper.attend_keys import AHEAD, HALF, KEY_STAGES, TILE, fetch_spans
from dsv4.kernels.hopper.dialect import reinterpret
from dsv4.kernels.record_store import record_constants
from dsv4.ops.calls import Attention

KEY_UNIT = 256.0
WINDOW_DATA_BYTES, WINDOW_SCALE_BYTES = 512, 16
ENTRY_DATA_BYTES, ENTRY_SCALE_BYTES = 256, 32
# What a thread receives at once: 16 bytes of a record, one of four in a span of 64.
_SPAN_WORDS = gl.constexpr(16)

# Eight rows lie in neighbouring lanes: then 16-byte accesses of eight lanes use all banks, both
# in the records as they arrive (swizzled accordingly) and in the decoded keys.
_RAW = gl.constexpr(gl.SwizzledSharedLayout(4, 2, 4, [2, 1, 0]))
_RAW_SCALES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# words [spans, keys, words of a span], [spans, keys, threads, words] of FP8 codes, and of FP4
# codes [spans, keys, threads, scales of a thread, words of a scale]
_LOADED = gl.constexpr(gl.BlockedLayout([1, 1, 4], [1, 8, 4], [1, 4, 1], [1, 2, 0]))
_EIGHTS = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [1, 4, 1, 1], [3, 1, 2, 0]))
_FOURS = gl.constexpr(
    gl.BlockedLayout([1, 1, 1, 2, 2], [1, 8, 4, 1, 1], [1, 4, 1, 1, 1], [4, 3, 1, 2, 0])
)
_EIGHTS_SCALE = gl.constexpr(gl.SliceLayout(3, _EIGHTS))  # [spans, keys, threads]
_FOURS_SCALE = gl.constexpr(gl.SliceLayout(4, _FOURS))  # [spans, keys, threads, scales]
_FOURS_PAIR = gl.constexpr(gl.SliceLayout(3, _FOURS_SCALE))  # [spans, keys, threads]

# 2^120 of the codes, less KEY_UNIT's 2^8
_V41_E4M3_TIMES_BF16 = gl.constexpr(e4m3_times_bf16("$3", "$3", unit=112))
_E2M1_TIMES_BF16 = gl.constexpr(e2m1_pairs_times_bf16())
# Two E4M3 scales in a halfword ($2) to twice the first ($0) and twice the second ($1), as bf16
# times 2^118: that is 2^126, which E2M1 codes lack, less KEY_UNIT's 2^8. Read as bf16 their bits
# lack 2^120. The highest code is NaN, and becomes bits that are all ones.
_SCALES_OF = gl.constexpr("""{
    .reg .b32 both, up, nan;
    mov.b32 up, 0x7F007F00;
    prmt.b32 both, $2, 0, 0x1404;
    shr.b32 both, both, 4;
    and.b32 both, both, 0x07F007F0;
    mov.b32 nan, 0x07F007F0;
    set.eq.u32.bf16x2 nan, both, nan;
    mul.rn.bf16x2 both, both, up;
    mov.b32 up, 0x77007700;
    mul.rn.bf16x2 both, both, up;
    or.b32 both, both, nan;
    prmt.b32 $0, both, both, 0x1010;
    prmt.b32 $1, both, both, 0x3232;
}""")


class _Records(NamedTuple):
    """Tiles being loaded, as words: the codes of a window's first half of channels, or all of an
    entry's; those of the window's second half; scales of each kind."""

    low: gl.shared_memory_descriptor
    high: gl.shared_memory_descriptor
    window_scales: gl.shared_memory_descriptor
    entry_scales: gl.shared_memory_descriptor


def takes(call: Attention) -> bool:
    """A window of FP8 and entries of FP4, all channels coded."""
    window = record_constants(call.window.page.format)
    found = (window.ELEMENT, window.SCALE, window.TILE, window.DATA_BYTES, window.SCALE_BYTES)
    wanted = ("e4m3", "ue8m0", 32, WINDOW_DATA_BYTES, WINDOW_SCALE_BYTES)
    if call.entries is None or found != wanted:
        return found == wanted
    entry = record_constants(call.entries.page.format)
    return ("e2m1", "e4m3", 16, ENTRY_DATA_BYTES, ENTRY_SCALE_BYTES) == (
        entry.ELEMENT,
        entry.SCALE,
        entry.TILE,
        entry.DATA_BYTES,
        entry.SCALE_BYTES,
    ) and entry.GLOBAL_SCALE == 1.0


@gluon.jit
def new_records():
    return _Records(
        low=gl.allocate_shared_memory(gl.uint32, [AHEAD, 4, TILE, _SPAN_WORDS], _RAW),
        high=gl.allocate_shared_memory(gl.uint32, [AHEAD, 4, TILE, _SPAN_WORDS], _RAW),
        window_scales=gl.allocate_shared_memory(gl.uint32, [AHEAD, 1, TILE, 4], _RAW_SCALES),
        entry_scales=gl.allocate_shared_memory(gl.uint32, [AHEAD, 2, TILE, 4], _RAW_SCALES),
    )


@gluon.jit
def hand_over(tile, keys, halves, records, stage, phase, A: gl.constexpr):
    """Decodes a tile of either kind into its stage, once that is free."""
    if A.ENTRIES:
        if tile < A.WINDOW // TILE:
            _hand_over_window(keys, halves, records, stage, phase)
        else:
            _hand_over_entries(keys, halves, records, stage, phase)
    else:
        _hand_over_window(keys, halves, records, stage, phase)


@gluon.jit
def fetch(records, place, tile, nth, entry, block_id, source, A: gl.constexpr):
    """Starts loading the records of a tile. Rows that are not live become zeros. Returns which
    are."""
    if A.ENTRIES:
        if tile < A.WINDOW // TILE:
            live = _fetch_window(records, place, tile, nth, source, A)
        else:
            live = _fetch_entries(records, place, tile, entry, block_id, source, A)
    else:
        live = _fetch_window(records, place, tile, nth, source, A)
    return live


@gluon.jit
def _fetch_window(records, place, tile, nth, source, A: gl.constexpr):
    seen = source.position - (A.WINDOW - 1) + tile * TILE + nth
    live = (seen >= 0) & (tile < source.last)
    if A.STAGED:
        row = (seen + source.shift).to(gl.int64)
    else:
        row = (seen.to(gl.uint32) % A.WINDOW_ROWS).to(gl.int64)
    at = _words(source.arena + source.window_data + row * A.WINDOW_DATA_STRIDE)
    fetch_spans(records.low.index(place), at, live, 0)
    fetch_spans(records.high.index(place), at, live, 4)
    scales_at = _words(source.arena + source.window_scale + row * A.WINDOW_SCALE_STRIDE)
    fetch_spans(records.window_scales.index(place), scales_at, live, 0)
    return live


@gluon.jit
def _fetch_entries(records, place, tile, entry, block_id, source, A: gl.constexpr):
    live = (entry >= 0) & (entry < source.visible) & (tile < source.last)
    row = (entry.to(gl.uint32) % A.ENTRY_ROWS).to(gl.int64)
    page = source.arena + block_id.to(gl.int64) * source.entry_bytes
    at = _words(page + source.entry_data + row * A.DATA_STRIDE)
    fetch_spans(records.low.index(place), at, live, 0)
    scales_at = _words(page + source.entry_scale + row * A.SCALE_STRIDE)
    fetch_spans(records.entry_scales.index(place), scales_at, live, 0)
    return live


@gluon.jit
def _words(at):
    return at.to(gl.pointer_type(gl.uint32))


@gluon.jit
def _hand_over_window(keys, halves, records, stage, phase):
    """Decodes a tile of the window into its stage, once that is free."""
    low = records.low.index(stage).load(_LOADED)
    high = records.high.index(stage).load(_LOADED)
    # two scales of 32 channels for each span of 64; two threads share each scale
    scales = reinterpret(records.window_scales, gl.uint16, [AHEAD, TILE, 8], _PLAIN)
    scales = scales.index(stage).permute((1, 0))  # [spans, keys]
    row: gl.constexpr = gl.SliceLayout(2, _EIGHTS_SCALE)
    low_scales = scales.slice(0, 4, dim=0).load(row)
    high_scales = scales.slice(4, 4, dim=0).load(row)
    mbarrier.wait(keys.free.index(stage), phase)
    halves.index(stage).store(_eights(low, low_scales))
    halves.index(KEY_STAGES + stage).store(_eights(high, high_scales))


@gluon.jit
def _eights(codes, scales):
    """FP8 codes [4, keys, words] and pairs of exponents [4, keys]: the words of a half."""
    nth: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, _EIGHTS_SCALE))
    shift = (gl.arange(0, 4, layout=nth) // 2 * 8)[None, None, :]
    exponent = (scales.to(gl.uint32)[:, :, None] >> shift) & 0xFF
    bits = bf16_power_bits(exponent)
    power = (bits | (bits << 16))[:, :, :, None]
    codes = gl.reshape(codes, [4, TILE, 4, 4])
    codes = gl.convert_layout(codes, _EIGHTS, assert_trivial=True)
    power, codes = gl.broadcast(power, codes)
    low, high = gl.inline_asm_elementwise(
        _V41_E4M3_TIMES_BF16, "=r,=r,r,r", [codes, power], (gl.uint32, gl.uint32), True, 1
    )
    words = gl.permute(gl.join(low, high), [1, 0, 2, 3, 4])
    return gl.reshape(words, [TILE, HALF // 2])


@gluon.jit
def _hand_over_entries(keys, halves, records, stage, phase):
    """Decodes a tile of entries into its stage, once that is free."""
    codes = records.low.index(stage)
    first = codes.slice(0, 2, dim=0).load(_LOADED)
    second = codes.slice(2, 2, dim=0).load(_LOADED)
    # two scales of 16 channels for each thread, four threads for a span, two spans for a half
    scales = reinterpret(records.entry_scales, gl.uint16, [2 * AHEAD, TILE, 2, 4], _RAW_SCALES)
    first_scales = scales.index(2 * stage).permute((1, 0, 2)).load(_FOURS_PAIR)
    second_scales = scales.index(2 * stage + 1).permute((1, 0, 2)).load(_FOURS_PAIR)
    mbarrier.wait(keys.free.index(stage), phase)
    halves.index(stage).store(_fours(first, first_scales))
    halves.index(KEY_STAGES + stage).store(_fours(second, second_scales))


@gluon.jit
def _fours(codes, scales):
    """FP4 codes [2, keys, words] and pairs of scales [2, keys, threads]: the words of a half."""
    first, second = gl.inline_asm_elementwise(
        _SCALES_OF, "=r,=r,r", [scales.to(gl.uint32)], (gl.uint32, gl.uint32), True, 1
    )
    scale = gl.convert_layout(gl.join(first, second), _FOURS_SCALE, assert_trivial=True)
    codes = gl.reshape(codes, [2, TILE, 4, 2, 2])
    codes = gl.convert_layout(codes, _FOURS, assert_trivial=True)
    scale, codes = gl.broadcast(scale[:, :, :, :, None], codes)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        _E2M1_TIMES_BF16,
        "=&r,=&r,=&r,=&r,r,r",
        [codes, scale],
        (gl.uint32, gl.uint32, gl.uint32, gl.uint32),
        True,
        1,
    )
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3))  # [..., second bit, first bit]
    return gl.reshape(gl.permute(words, [1, 0, 2, 3, 4, 5, 6]), [TILE, HALF // 2])
