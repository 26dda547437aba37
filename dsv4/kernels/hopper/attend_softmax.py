"""The softmax of Hopper's attention, tile by tile, and what normalises the sums at the end."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from dsv4.kernels.attend import _LN_2, _LOG2_E
from dsv4.kernels.hopper.attend_keys import KEY_STAGES, TILE
from dsv4.kernels.hopper.attend_parts import part_of
from dsv4.kernels.hopper.attend_setup import BLOCK_HEADS, WEIGHT_STAGES, real_heads

LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.value, 16]))


class Sums(NamedTuple):
    """A softmax in progress: `acc` weighs a consumer's channels by 2^(logit - top), and `total` is
    the weight of all keys."""

    top: gl.tensor  # [heads] highest logit, base 2
    total: gl.tensor  # [heads]
    acc: gl.tensor  # [heads, channels]


@gluon.jit
def new_sums(COLUMNS: gl.constexpr, LINE: gl.constexpr, SUMS: gl.constexpr):
    return Sums(
        top=gl.full([BLOCK_HEADS], float("-inf"), gl.float32, LINE),
        total=gl.full([BLOCK_HEADS], 0.0, gl.float32, LINE),
        acc=gl.full([BLOCK_HEADS, COLUMNS], 0.0, gl.float32, SUMS),
    )


@gluon.jit
def logits_of(queries, keys, stage, phase):
    """Starts the logits [heads, keys] of a tile, once its keys are there."""
    mbarrier.wait(keys.ready.index(stage), phase)
    none = gl.full([BLOCK_HEADS, TILE], 0.0, gl.float32, LOGITS)
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
def softmax(logits, sums, bias, nth, weights, A: gl.constexpr):
    """A tile's probabilities into shared memory, and the sums brought to the new maximum."""
    place = nth % WEIGHT_STAGES
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
    mbarrier.wait(weights.free.index(place), (nth // WEIGHT_STAGES) % 2 ^ 1)
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
    """What a tile of a query that is not cut gives by itself: the weights of its keys [heads, keys]
    under its own highest logit, fp16, which has three bits more than they are multiplied with;
    their sums and that logit [heads]."""
    x = _biased(logits, bias, A)
    top = gl.max(x, axis=1)
    base = gl.where(top == float("-inf"), 0.0, top)  # no key
    weight = gl.exp2(x - base[:, None])
    return weight.to(gl.float16), gl.sum(weight, axis=1), top


@gluon.jit
def factors(top, tile_top, highest):
    """The factors that bring the sums so far, and a tile's weights, to the highest logit of
    both."""
    base = gl.where(highest == float("-inf"), 0.0, highest)
    return gl.exp2(top - base), gl.exp2(tile_top - base)


@gluon.jit
def scaled(weight, factor):
    """A tile's weights in the form in which they are multiplied with its keys."""
    return (weight.to(gl.float32) * factor[:, None]).to(gl.bfloat16)


@gluon.jit
def with_sink(total, sink, top):
    """The weight of all keys and of the sink."""
    base = gl.where(top == float("-inf"), 0.0, top)
    return total + gl.where(total > 0, gl.exp2(sink * _LOG2_E - base), 0.0)


@gluon.jit
def normaliser(total, A: gl.constexpr):
    """What sums are multiplied by at the end."""
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    if A.KEY_UNIT != 1.0:
        inverse *= A.KEY_UNIT
    return inverse


@gluon.jit
def normalised(acc, inverse, A: gl.constexpr):
    """Where queries are not cut, -0 becomes 0: some ways to compute them add tiles of zeros."""
    if A.WHOLE:
        inverse, acc = gl.broadcast(inverse[:, None], acc)
        return gl.fma(acc, inverse, gl.full(acc.shape, 0.0, gl.float32, acc.type.layout))
    else:
        return acc * inverse[:, None]


@gluon.jit
def close(sums, sink, weights, out, share, extent, A: gl.constexpr):
    """What left does first after its last tile: computes the log-sum-exp, and the factor that
    normalises, for right too."""
    LINE: gl.constexpr = sums.top.type.layout
    live = extent.slot >= 0
    top, total = sums.top, sums.total
    head = gl.arange(0, BLOCK_HEADS, layout=LINE)
    lse = top + gl.log2(total)
    real = real_heads(head, out, A)
    if A.SPLIT:
        gl.store(part_of(share.parts.first, share.split, A) + head, lse, mask=live & real)
    else:
        gl.store(out.lse_row + head, lse * _LN_2, mask=live & real)
        total = with_sink(total, sink, top)
    inverse = normaliser(total, A)
    weights.factors.index(WEIGHT_STAGES).store(inverse)  # right may still be reading the others
    mbarrier.arrive(weights.closed, count=1)
    return gl.convert_layout(inverse, gl.SliceLayout(1, sums.acc.type.layout))
