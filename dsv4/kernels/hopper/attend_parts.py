"""Parts of a query that several programs of Hopper's attention compute: how they are parked in the
workspace, and how the programs meet and add them up.

Each program adds the parts of some heads in a fixed order. So all programs of a query must run at
once."""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.kernels.attend import _LN_2, _LOG2_E
from dsv4.kernels.hopper.attend_keys import HALF, OPERAND
from dsv4.kernels.hopper.attend_setup import BLOCK_HEADS, pairs, real_heads
from dsv4.kernels.hopper.dialect import reinterpret, thread_barrier
from dsv4.kernels.sizes import HEADS_PER_PROGRAM, PARTS_START, POWERS

FIRST_PART = gl.constexpr(PARTS_START)
# Counters are spaced out. At most half as many as processors are in use; Hopper has up to 144.
_COUNTER_STRIDE = gl.constexpr(7)
_POWERS = gl.constexpr(POWERS)

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


class Parts(NamedTuple):
    """All parts of a query and block of heads, and the counter by which its programs meet."""

    first: gl.tensor
    counter: gl.tensor


def combine_shape(splits: int, slices: int) -> tuple[int, int]:
    """How many parts a program loads at a time when it adds them, and of how many heads per
    thread: chosen so that the loop runs once, with at most 16 loads in flight per thread."""
    if splits == 1:
        return 1, 1
    parts = min(16 if slices == 1 else 32, max(slices, triton.next_power_of_2(splits)))
    heads = 1
    while heads < 4 and 4 * heads * splits < HEADS_PER_PROGRAM and 2 * heads * parts <= 16 * slices:
        heads *= 2
    return parts, heads


@gluon.jit
def parts_of(workspace, item, splits, nth_slice, A: gl.constexpr):
    counter = workspace.to(gl.pointer_type(gl.int32))
    counter += (item * A.SLICES + nth_slice) * _COUNTER_STRIDE
    first = part_of(workspace + FIRST_PART, (item * splits).to(gl.int64), A)
    return Parts(first=first, counter=counter)


@gluon.jit
def part_of(parts, nth, A: gl.constexpr):
    return parts + nth * (BLOCK_HEADS * (A.WIDTH // 2 + 1 + _POWERS))


@gluon.jit
def _powers(part, consumer):
    return part + (1 + consumer) * BLOCK_HEADS


@gluon.jit
def sums_of(part):
    return (part + (1 + _POWERS) * BLOCK_HEADS).to(gl.pointer_type(gl.float16))


@gluon.jit
def park(acc, queries, out, share, live, ROLE: gl.constexpr, A: gl.constexpr):
    """Parks a consumer's sums in shared memory in the form of a part: as multiples of the leading
    power of two of a head's largest channel, in fp16, which keeps three bits more than bf16."""
    COLUMNS: gl.constexpr = HALF // A.SLICES
    LINE: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    bits = gl.max(gl.abs(acc), axis=1).to(gl.int32, bitcast=True) & 0x7F800000
    # powers that have an inverse; what is not finite stays so in fp16
    bits = gl.where((bits == 0) | (bits > 0x7E000000), 0x3F800000, bits)
    head = gl.arange(0, BLOCK_HEADS, layout=LINE)
    row = _powers(part_of(share.parts.first, share.split, A), 2 * share.nth_slice + ROLE)
    gl.store(row + head, bits.to(gl.float32, bitcast=True), mask=live & real_heads(head, out, A))
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    SLICES: gl.constexpr = A.SLICES  # Triton 3.8 wants the shape of the whole buffer
    half = queries.halves.index(ROLE)
    staged = reinterpret(half, gl.float16, [SLICES, BLOCK_HEADS, COLUMNS], OPERAND).index(0)
    staged.store((acc * inverse[:, None]).to(gl.float16))
    return staged


@gluon.jit
def meet(share, ROLE: gl.constexpr):
    """Waits until all parts of a query are parked. Every consumer adds 1, and one of them adds the
    rest up to 2^31, which sets the highest bit. When they leave they add the same again: the
    highest bit stays set until the last of them brings the counter back to 0."""
    step = gl.to_tensor(1)
    if ROLE == 0:
        step = gl.where(share.split == 0, -2147483648 - (2 * share.splits - 1), 1)
    thread_barrier()
    gl.atomic_add(share.parts.counter, step, sem="release", scope="gpu")
    address = share.parts.counter.to(gl.int64)
    gl.inline_asm_elementwise(_UNTIL_ALL, "=r,l", [address], gl.int32, False, 1)
    thread_barrier()
    gl.atomic_add(share.parts.counter, step, sem="relaxed", scope="gpu")


@gluon.jit
def combine(out, share, channel, position, A: gl.constexpr):
    """Adds the parts of some heads in a fixed order, a consumer's channels, four heads at a time.
    A warp takes one head; where the head has few channels, its lanes also divide the parts among
    themselves."""
    COLUMNS: gl.constexpr = HALF // A.SLICES
    LANES: gl.constexpr = A.SLICES  # lanes that divide the parts among themselves
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
    last = BLOCK_HEADS if A.HEADS % BLOCK_HEADS == 0 else out.heads
    for start in range(share.split * HEADS, last, share.splits * HEADS):
        heads = start + gl.arange(0, HEADS, layout=gl.SliceLayout(0, BOTH))
        head = start + gl.arange(0, HEADS, layout=LINE)
        real = real_heads(head, out, A)
        sink = gl.load(out.sink_row + head, mask=real, other=0.0) * _LOG2_E
        top = gl.full([HEADS], -1e30, gl.float32, LINE)
        total = gl.full([HEADS], 0.0, gl.float32, LINE)
        acc = gl.full([HEADS, COLUMNS], 0.0, gl.float32, SUM)  # [heads, channels]
        for part in range(0, share.splits, PARTS):
            there = (part + nth < share.splits) & real_heads(heads, out, A)[None, :]
            row = part_of(share.parts.first, part + nth, A)
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
            at = sums_of(row)[:, :, None] + heads[None, :, None] * A.WIDTH + columns[None, None, :]
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
