"""What Hopper's attention kernels begin and end with: a program's query and heads, the queries in
shared memory, what its consumers exchange, and its channels of the output."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dsv4.kernels.hopper.attend_keys import BARRIER, HALF, OPERAND, SPAN, VECTOR
from dsv4.kernels.sizes import HEADS_PER_PROGRAM
from dsv4.ops.calls import Attention

WARPS_PER_ROLE = 4

BLOCK_HEADS = gl.constexpr(HEADS_PER_PROGRAM)
WEIGHT_STAGES = gl.constexpr(2)
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
_ANGLES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class Program(NamedTuple):
    """What a program works on: a query, by its row in the launch, and its heads from `head` on."""

    token: gl.tensor
    head: gl.tensor


class Queries(NamedTuple):
    """The queries of a program's heads in global memory, and the two halves of their channels in
    shared memory, `ready` once both consumers have loaded one each."""

    halves: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    row: gl.tensor
    heads: gl.tensor


class Weights(NamedTuple):
    """Probabilities of a tile, and the factors that bring sums to its maximum, from left to right.
    The factors after those of all stages normalise: they are there once `closed` is signalled."""

    probabilities: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor
    closed: gl.shared_memory_descriptor


class Out(NamedTuple):
    """Where the result of a program's heads goes, how many heads there are, and what enters it
    in addition to the keys: `angles` are those of the query in shared memory."""

    heads: gl.tensor
    sink_row: gl.tensor
    row: gl.tensor
    lse_row: gl.tensor
    rope: gl.tensor
    angles: gl.shared_memory_descriptor


def head_blocks(heads: int) -> int:
    """How many programs share the heads of a query. Rows of the last program that are not heads are
    multiplied all the same, because Hopper's matrix instruction has at least 64 rows."""
    return -(-heads // HEADS_PER_PROGRAM)


def turns_back(call: Attention) -> bool:
    """Whether RoPE's channels, if the output is turned back, are exactly those of right."""
    return call.inverse_rope is None or call.inverse_rope.shape[1] == SPAN.value


@gluon.jit
def program_of(item, A: gl.constexpr):
    """The query and block of heads of one item of a launch."""
    BLOCKS: gl.constexpr = (A.HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    head = item % BLOCKS * BLOCK_HEADS
    return Program(token=item // BLOCKS, head=head)


@gluon.jit
def row_of(pointer, stride, program, EACH: gl.constexpr):
    """Where a tensor with EACH elements per head has the elements of a program's heads."""
    return pointer + program.token.to(gl.int64) * stride + program.head * EACH


@gluon.jit
def new_queries(q_ptr, q_stride, program, A: gl.constexpr):
    queries = Queries(
        halves=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_HEADS, HALF], OPERAND),
        ready=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
        row=row_of(q_ptr, q_stride, program, A.WIDTH),
        heads=gl.minimum(A.HEADS - program.head, BLOCK_HEADS),
    )
    mbarrier.init(queries.ready, count=2)
    return queries


@gluon.jit
def new_weights(KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """For tiles of this many keys."""
    weights = Weights(
        probabilities=gl.allocate_shared_memory(
            gl.bfloat16, [WEIGHT_STAGES, BLOCK_HEADS, KEYS], LAYOUT
        ),
        factors=gl.allocate_shared_memory(gl.float32, [WEIGHT_STAGES + 1, BLOCK_HEADS], VECTOR),
        ready=gl.allocate_shared_memory(gl.int64, [WEIGHT_STAGES, 1], BARRIER),
        free=gl.allocate_shared_memory(gl.int64, [WEIGHT_STAGES, 1], BARRIER),
        closed=gl.allocate_shared_memory(gl.int64, [1], BARRIER),
    )
    mbarrier.init(weights.closed, count=1)
    for place in gl.static_range(WEIGHT_STAGES):
        mbarrier.init(weights.ready.index(place), count=1)
        mbarrier.init(weights.free.index(place), count=1)
    return weights


@gluon.jit
def new_out(sink_row, out_row, lse_row, rope_ptr, program, A: gl.constexpr):
    return Out(
        heads=gl.minimum(A.HEADS - program.head, BLOCK_HEADS),
        sink_row=sink_row,
        row=out_row,
        lse_row=lse_row,
        rope=rope_ptr,
        angles=gl.allocate_shared_memory(gl.float32, [SPAN], VECTOR),
    )


@gluon.jit
def load_queries(queries, NTH: gl.constexpr, A: gl.constexpr):
    """Loads one half of the channels of the program's heads into shared memory and signals
    `ready`."""
    head = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, _QUERY))[:, None]
    column = NTH * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, _QUERY))[None, :]
    at = queries.row + head * A.WIDTH + column
    if A.HEADS % BLOCK_HEADS == 0:
        queries.halves.index(NTH).store(gl.load(at))
    else:
        mask = (head < queries.heads) & (column >= 0)
        queries.halves.index(NTH).store(gl.load(at, mask=mask, other=0.0))
    fence_async_shared()
    mbarrier.arrive(queries.ready, count=1)


@gluon.jit
def load_sink(out, LINE: gl.constexpr, A: gl.constexpr):
    """The sinks of a program's heads, loaded long before they are used. Where a query is split, a
    placeholder that is not read: `combine` loads sinks when it adds up the parts."""
    head = gl.arange(0, BLOCK_HEADS, layout=LINE)
    if A.SPLIT:
        return head
    else:
        return gl.load(out.sink_row + head, mask=real_heads(head, out, A), other=0.0)


@gluon.jit
def load_angles(out, position, A: gl.constexpr):
    """Cosines and sines of right's last channels, loaded long before they are used. `combine` loads
    those of a split query."""
    if A.ROPE > 0 and not A.SPLIT:
        position = position - (position >> 31)  # padding's is -1: 0
        nth = gl.arange(0, A.ROPE, layout=_ANGLES)
        out.angles.store(gl.load(out.rope + position.to(gl.int64) * A.ROPE + nth))


@gluon.jit
def real_heads(head, out, A: gl.constexpr):
    """Which rows of a program are heads: all, unless the last program of a query has fewer."""
    if A.HEADS % BLOCK_HEADS == 0:
        return head >= 0
    else:
        return head < out.heads


@gluon.jit
def store_heads(staged, row, live, out, A: gl.constexpr):
    """Stores a consumer's channels from shared memory to their place, 16 bytes per thread."""
    COLUMNS: gl.constexpr = staged.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
    head = gl.arange(0, BLOCK_HEADS, layout=gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, L))[None, :]
    mask = live & real_heads(head, out, A) & (column >= 0)
    gl.store(row + head * A.WIDTH + column, staged.load(L), mask=mask)


@gluon.jit
def pairs(x):
    """Even and odd columns, which RoPE rotates together."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def split_columns(x):
    """The left and the right half of the columns; they are in different registers."""
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@gluon.jit
def turn_back(x, angles, A: gl.constexpr):
    """Inverse RoPE of the last channels, rounded to bf16 first, as DeepSeek's code does."""
    COLUMNS: gl.constexpr = x.shape[1]
    rounded = x.to(gl.bfloat16).to(gl.float32)
    even, odd = pairs(rounded)
    PAIR: gl.constexpr = gl.SliceLayout(0, even.type.layout)
    cos = angles.slice(0, COLUMNS // 2).load(PAIR)[None, :]
    sin = angles.slice(COLUMNS // 2, COLUMNS // 2).load(PAIR)[None, :]
    first, second = rotated(even, odd, cos, sin)
    return gl.reshape(gl.join(first, second), [BLOCK_HEADS, COLUMNS])


@gluon.jit
def rotated(even, odd, cos, sin):
    """Pairs of channels rotated back. It is fixed here, not by the compiler, which product is
    rounded."""
    return gl.fma(even, cos, odd * sin), gl.fma(odd, cos, -(even * sin))
