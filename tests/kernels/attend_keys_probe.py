"""One tile of V4.1's records through the producer of Hopper's attention, for test_codes_ptx.py."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from dsv4.kernels.hopper.attend_keys import (
    HALF,
    KEY_STAGES,
    OPERAND_WORDS,
    RECORD_ROW,
    TILE,
    fetch_spans,
    new_keys,
)
from dsv4.kernels.hopper.dialect import reinterpret
from dsv4.kernels.hopper.records_v41 import (
    _hand_over_entries,
    _hand_over_window,
    _words,
    new_records,
)

_OUT = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))


@gluon.jit
def attend_keys_probe(
    data, scales, out, WINDOW: gl.constexpr, STAGE: gl.constexpr, LIVE: gl.constexpr
):
    records = new_records()
    keys = new_keys()
    halves = reinterpret(keys.halves, gl.uint32, [2 * KEY_STAGES, TILE, HALF // 2], OPERAND_WORDS)
    nth = gl.arange(0, TILE, layout=RECORD_ROW)
    live = nth < LIVE
    stage = gl.to_tensor(STAGE)
    phase = gl.to_tensor(1)  # nobody has used a stage yet: all are free
    if WINDOW:
        fetch_spans(records.low.index(STAGE), _words(data + nth * 512), live, 0)
        fetch_spans(records.high.index(STAGE), _words(data + nth * 512), live, 4)
        fetch_spans(records.window_scales.index(STAGE), _words(scales + nth * 16), live, 0)
    else:
        fetch_spans(records.low.index(STAGE), _words(data + nth * 256), live, 0)
        fetch_spans(records.entry_scales.index(STAGE), _words(scales + nth * 32), live, 0)
    async_copy.commit_group()
    async_copy.wait_group(0)
    if WINDOW:
        _hand_over_window(keys, halves, records, stage, phase)
    else:
        _hand_over_entries(keys, halves, records, stage, phase)
    row = gl.arange(0, TILE, layout=gl.SliceLayout(1, _OUT))[:, None]
    column = gl.arange(0, HALF, layout=gl.SliceLayout(0, _OUT))[None, :]
    at = out + row * (2 * HALF) + column
    gl.store(at, keys.halves.index(STAGE).load(_OUT))
    gl.store(at + HALF, keys.halves.index(KEY_STAGES + STAGE).load(_OUT))
