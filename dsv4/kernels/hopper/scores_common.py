"""What both kernels of index scores share: how queries and keys become E4M3 numbers, which of them
a thread has, and how the lanes of a key end its score.

A thread loads the words of keys that it decodes, which are those that the matrix instruction takes
from its registers: the order of channels within a span is free, and queries use the same order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

HEADS, WIDTH, SPAN = 64, 128, 32
NUM_WARPS = 4
KEYS = 64  # of a warpgroup
HALF = KEYS // NUM_WARPS // 2  # of a warp's keys
LANES = 4  # that share the heads of a key

_WIDTH = gl.constexpr(WIDTH)
_SPAN = gl.constexpr(SPAN)  # channels that share a scale
_SPANS = gl.constexpr(WIDTH // SPAN)
_BYTES = gl.constexpr(WIDTH // 2)  # codes of a key
_WARPS = gl.constexpr(NUM_WARPS)
_KEYS = gl.constexpr(KEYS)
_WARP_ENTRIES = gl.constexpr(2 * HALF)  # of a tile
_HALF = gl.constexpr(HALF)
_LANES = gl.constexpr(LANES)

# [warps, halves of a warp's entries, entries, lanes, spans, bytes]: a thread has a word of each
# span of two keys
_CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[
            [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0],
            [0, 1, 0, 0, 0, 0],
        ],
        lane_bases=[
            [0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0],
            [0, 0, 4, 0, 0, 0],
        ],
        warp_bases=[[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0]],
        block_bases=[],
        shape=[NUM_WARPS, 2, HALF, LANES, WIDTH // SPAN, 4],
    )
)  # fmt: skip
_WORD = gl.constexpr(gl.SliceLayout(5, _CODES))
_BY_KEY = gl.constexpr(gl.SliceLayout(3, gl.SliceLayout(4, _WORD)))
_OF_WARP = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, _BY_KEY)))
_OF_HALF = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(2, _BY_KEY)))
_OF_ENTRY = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, _BY_KEY)))
_OF_LANE = gl.constexpr(
    gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, _WORD))))
)
_OF_SPAN = gl.constexpr(
    gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _WORD))))
)
_OF_BYTE = gl.constexpr(
    gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, _CODES))))
    )
)
_QUERY = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
_VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 8, rank=2))

# A word of eight codes → the low and the high ones of its bytes as E4M3. A low code's sign must
# move two places farther than the rest: 0x60 makes a carry of it.
DECODE = gl.constexpr("""
    {
    .reg .b32 low, high;
    and.b32 low, $2, 0x0F0F0F0F;
    mad.lo.u32 low, low, 4, 0x60606060;
    and.b32 $0, low, 0x9C9C9C9C;
    shr.u32 high, $2, 2;
    and.b32 high, high, 0x1C1C1C1C;
    lop3.b32 $1, $2, 0x80808080, high, 0xEA;
    }
    """)
LARGEST = gl.constexpr("""
    {
    .reg .b32 a, b, c, d;
    and.b32 a, $1, 0x7FFF7FFF;
    and.b32 b, $2, 0x7FFF7FFF;
    and.b32 c, $3, 0x7FFF7FFF;
    and.b32 d, $4, 0x7FFF7FFF;
    max.u16x2 a, a, b;
    max.u16x2 c, c, d;
    max.u16x2 $0, a, c;
    }
    """)
SCALED_E4M3 = gl.constexpr("""
    {
    .reg .b32 a, b, c, d;
    .reg .b16 low, high;
    shl.b32 a, $1, 16;
    and.b32 b, $1, 0xFFFF0000;
    shl.b32 c, $2, 16;
    and.b32 d, $2, 0xFFFF0000;
    mul.rn.f32 a, a, $3;
    mul.rn.f32 b, b, $4;
    mul.rn.f32 c, c, $5;
    mul.rn.f32 d, d, $6;
    cvt.rn.satfinite.e4m3x2.f32 low, b, a;
    cvt.rn.satfinite.e4m3x2.f32 high, d, c;
    mov.b32 $0, {low, high};
    }
    """)


def finish(second: str, last: str) -> str:
    """PTX that adds up four lanes for two keys, whose sums are $2 and $3; where `second` is not 0 a
    lane continues with the second one, into $0. `last` multiplies by `power`, the key's, and adds
    0, which maps both zeros to one. A NaN is the highest of all numbers and becomes the usual
    one."""
    return f"""
    {{
    .reg .pred second;
    .reg .b32 x, y, power;
    setp.ne.u32 second, {second}, 0;
    selp.b32 x, $3, $2, second;
    selp.b32 y, $2, $3, second;
    shfl.sync.bfly.b32 y, y, 2, 31, -1;
    add.rn.f32 x, x, y;
    shfl.sync.bfly.b32 y, x, 1, 31, -1;
    add.rn.f32 x, x, y;
    selp.b32 power, $5, $4, second;
    {last}
    cvt.rn.bf16x2.f32 x, x, 0f00000000;
    min.s32 $0, x, 0x7FC00000;
    mov.b32 $1, 0;
    }}
    """


@gluon.jit
def load_spans(at):
    """The four spans of a query, each [heads, channels], the first one from `at`."""
    return gl.load(at), gl.load(at + _SPAN), gl.load(at + 2 * _SPAN), gl.load(at + 3 * _SPAN)


@gluon.jit
def coded_query(q, LEAST: gl.constexpr):
    """A query's spans as bytes of E4M3 numbers [heads, channels], in the order of `decode`, each
    head's largest value between 256 and 384; bf16's exponent of these values, but at least LEAST,
    and 255 for a NaN; and the powers that heads were multiplied by."""
    q0, q1, q2, q3 = q
    largest = gl.inline_asm_elementwise(LARGEST, "=r,r,r,r,r", [q0, q1, q2, q3], gl.int16, True, 2)
    exponent = gl.maximum(gl.max(largest.to(gl.int32), axis=1) >> 7, LEAST)
    power = ((262 - exponent) << 23).to(gl.float32, bitcast=True)[:, None]
    x02 = gl.join(_scaled(q0, power), _scaled(q2, power))
    x13 = gl.join(_scaled(q1, power), _scaled(q3, power))
    # [head, byte, even or odd, span]
    x = gl.reshape(gl.join(x02, x13), [q0.shape[0], _SPAN // 2, 2, 2, 2])
    x = gl.reshape(gl.permute(x, (0, 3, 4, 2, 1)), [q0.shape[0], _WIDTH])
    return x, exponent, power


@gluon.jit
def _scaled(q, power):
    return gl.inline_asm_elementwise(
        SCALED_E4M3, "=r,r,r,f,f,f,f", [q, gl.broadcast(power, q)[0]], gl.uint8, True, 4
    )


@gluon.jit
def decode(words, HEADS: gl.constexpr):
    """Words of eight codes → for each span an operand [entries, _SPAN], its even channels before
    its odd ones."""
    byte = gl.arange(0, 4, layout=_OF_BYTE)[None, None, None, None, None, :]
    words, _ = gl.broadcast(words[:, :, :, :, :, None], byte)
    even, odd = gl.inline_asm_elementwise(
        DECODE, "=&r,=r,r,r,r,r", [words], (gl.uint8, gl.uint8), True, 4
    )
    x = gl.reshape(gl.join(even, odd), [_WARPS, 2, _HALF, _LANES, 2, 2, 4, 2])
    k02, k13 = gl.split(gl.permute(x, (0, 1, 2, 7, 3, 6, 4, 5)))
    k0, k2 = gl.split(k02)
    k1, k3 = gl.split(k13)
    return _operand(k0, HEADS), _operand(k1, HEADS), _operand(k2, HEADS), _operand(k3, HEADS)


@gluon.jit
def _operand(x, HEADS: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    KEY: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    x = gl.convert_layout(gl.reshape(x, [_KEYS, _SPAN]), KEY, assert_trivial=True)
    return x.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def span_dot(k, query, NTH: gl.constexpr):
    """Starts the dots [keys, heads] of a span."""
    HEADS: gl.constexpr = query.shape[0]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 32])
    none = gl.full([_KEYS, HEADS], 0.0, gl.float32, MMA)
    query = query.slice(NTH * _SPAN, _SPAN, dim=1).permute((1, 0))
    return warpgroup_mma(k, query, none, use_acc=False, is_async=True)


@gluon.jit
def lane_sums(x):
    """[entries, heads] → [entries, lanes], in the order of the reference; each step adds two."""
    HEADS: gl.constexpr = x.shape[1]
    x = gl.sum(gl.reshape(x, [_KEYS, HEADS // 2, 2]), axis=2)
    if HEADS == 64:
        x = gl.sum(gl.reshape(x, [_KEYS, 2, 16]), axis=1)
    x = gl.sum(gl.reshape(x, [_KEYS, 2, 8]), axis=1)
    return gl.sum(gl.reshape(x, [_KEYS, 2, _LANES]), axis=1)


@gluon.jit
def placed(x):
    """Scores [warps, entries, lanes], and the entry and the lane of each. Of a thread's two
    entries, the place of the first one in x [keys, lanes] holds the one that it continued with."""
    x = gl.permute(gl.reshape(x, [_WARPS, 2, _HALF, _LANES]), (0, 2, 3, 1))
    score, _ = gl.split(x)
    layout: gl.constexpr = score.type.layout
    warp = gl.arange(0, _WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    entry = gl.arange(0, _HALF, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    lane = gl.arange(0, _LANES, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    column = warp[:, None, None] * _WARP_ENTRIES + entry[None, :, None] + lane // 2 * _HALF
    return score.to(gl.float32, bitcast=True), column, lane
