"""Folded groups in the append kernel: dsv4/reference/online.py, byte for byte.

`compressor` and `C` are a Compressor and its CompressorConstants (compress.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from dsv4.kernels.numerics import exp_nonpositive


class State(NamedTuple):
    """Three fp32 vectors [PART]: largest logit, sum of weights, sum of weighted values."""

    top: Any
    weight: Any
    product: Any


@triton.jit
def _fold_token(top, weight, product, z, c, first):
    """Folds one more token; if it is the first of its group, the state before it is ignored."""
    top = tl.where(first, z, top)
    weight = tl.where(first, 0.0, weight)
    product = tl.where(first, 0.0, product)
    rises = z > top
    gap = tl.where(rises, top - z, z - top)
    shrink = exp_nonpositive(tl.where(z == top, 0.0, gap))
    weight = tl.where(rises, weight * shrink + 1.0, weight + shrink)
    product = tl.where(rises, product * shrink + c, product + shrink * c)
    return tl.where(rises, z, top), weight, product


@triton.jit
def fold_tokens(state, begin, end, row_offset, split, compressor, C: tl.constexpr):
    """Folds the tokens [begin, end), token p from row p + row_offset of the projections. A prefill
    step loads the next AHEAD tokens while it folds as many: a load takes about as long."""
    AHEAD: tl.constexpr = C.AHEAD
    PART: tl.constexpr = C.WIDTH // C.SPLITS
    z_stride, c_stride = compressor.z_stride, compressor.c_stride
    top, weight, product = state
    # three pointers are advanced: computing addresses from positions would be half of the
    # instructions
    channel = split * PART + tl.arange(0, PART)
    token = (begin + row_offset).to(tl.int64)
    at_z = compressor.z + token * z_stride + channel
    at_c = compressor.c + token * c_stride + channel
    at_bias = compressor.ape + begin % C.RATIO * C.WIDTH + channel
    rows = _load_ahead(at_z, at_c, at_bias, z_stride, c_stride, end - begin, C)
    for left in range(end - begin, 0, -AHEAD):
        at_z += AHEAD * z_stride
        at_c += AHEAD * c_stride
        at_bias += AHEAD * C.WIDTH
        following = _load_ahead(at_z, at_c, at_bias, z_stride, c_stride, left - AHEAD, C)
        # for a group's first token the running maximum is its own logit and the sums are 0
        first = (left == end - begin) & (begin % C.RATIO == 0)
        top = tl.where(first, rows[0] + rows[1], top)
        # Exponentials depend on logits alone, so all those of a block are started at once; what is
        # left for the sums is one product and one sum per token.
        factors = ()
        for nth in tl.static_range(AHEAD):
            z = rows[3 * nth] + rows[3 * nth + 1]
            factors += _factors(top, z, rows[3 * nth + 2], nth < left)
            top = tl.where((z > top) & (nth < left), z, top)
        for nth in tl.static_range(AHEAD):
            weight = weight * factors[3 * nth] + factors[3 * nth + 1]
            product = product * factors[3 * nth] + factors[3 * nth + 2]
        rows = following
    return State(top, weight, product)


@triton.jit
def _load_ahead(at_z, at_c, at_bias, z_stride, c_stride, left, C: tl.constexpr):
    """AHEAD tokens of one group as one tuple, three vectors each: logits, bias, values; zeros
    past the `left` tokens that exist."""
    AHEAD: tl.constexpr = C.AHEAD
    rows = ()
    for nth in tl.static_range(AHEAD):
        rows += _load_row(at_z, at_bias + nth * C.WIDTH, at_c, nth < left)
        at_z += z_stride
        at_c += c_stride
    return rows


@triton.jit
def _load_row(at_z, at_bias, at_c, live):
    mask = tl.full(at_z.shape, 1, dtype=tl.int1) & live
    z = tl.load(at_z, mask=mask, other=0.0)
    bias = tl.load(at_bias, mask=mask, other=0.0)
    c = tl.load(at_c, mask=mask, other=0.0)
    return z, bias, c


@triton.jit
def _factors(top, z, c, live):
    """What a token does to the sums: both are multiplied by the first factor, then the second is
    added to the weights and the third to the values. A factor of 1 and a summand of -0 change
    nothing."""
    rises = (z > top) & live
    shrink = exp_nonpositive(tl.where(z == top, 0.0, -tl.abs(z - top)))
    keep = tl.where(rises, shrink, 1.0)
    # written as bits, because Triton turns the literal -0.0 into +0, and -0 + +0 is +0
    nothing = tl.full(z.shape, 0x80000000, tl.uint32).to(tl.float32, bitcast=True)
    add = tl.where(rises, 1.0, tl.where(live, shrink, nothing))
    return keep, add, add * c


@triton.jit
def write_states(state, newest, kept, end, row_offset, split, ring, compressor, C: tl.constexpr):
    """Writes the states of the tokens [kept, end) into the ring, starting from the state before
    them; `newest` are the projections of the first."""
    WIDTH: tl.constexpr = C.WIDTH
    PART: tl.constexpr = WIDTH // C.SPLITS
    top, weight, product = state
    if C.WIDE:
        tl.debug_barrier()  # some of the rows read before may be overwritten here
    channel = split * PART + tl.arange(0, PART)
    for at in range(kept, end):
        z, bias, c = newest
        newest = load_projections(at + 1, at + 1 < end, row_offset, split, compressor, C)
        top, weight, product = _fold_token(top, weight, product, z + bias, c, at % C.RATIO == 0)
        row = ring + at % C.STATE_ROWS * (3 * WIDTH) + channel
        tl.store(row, top)
        tl.store(row + WIDTH, weight)
        tl.store(row + 2 * WIDTH, product)


@triton.jit
def load_state(ring, position, exists, split, C: tl.constexpr):
    """The state after the token at `position`; zeros where it does not exist."""
    PART: tl.constexpr = C.WIDTH // C.SPLITS
    channel = split * PART + tl.arange(0, PART)
    row = ring + tl.maximum(position, 0) % C.STATE_ROWS * (3 * C.WIDTH) + channel
    mask = tl.full([PART], 1, dtype=tl.int1) & exists
    top = tl.load(row, mask=mask, other=0.0)
    weight = tl.load(row + C.WIDTH, mask=mask, other=0.0)
    product = tl.load(row + 2 * C.WIDTH, mask=mask, other=0.0)
    return State(top, weight, product)


@triton.jit
def load_projections(position, live, row_offset, split, compressor, C: tl.constexpr):
    """Logits, their bias and values [PART] of one token of the step; zeros where it is not live."""
    PART: tl.constexpr = C.WIDTH // C.SPLITS
    channel = split * PART + tl.arange(0, PART)
    token = (position + row_offset).to(tl.int64)
    return _load_row(
        compressor.z + token * compressor.z_stride + channel,
        compressor.ape + position % C.RATIO * C.WIDTH + channel,
        compressor.c + token * compressor.c_stride + channel,
        live,
    )
