"""Groups that are kept folded, for the append kernel: dsv4/reference/online.py, byte for byte.

A state is three fp32 vectors of PART channels: largest logit, sum of weights, sum of weighted
values. `C` are the CompressorConstants of append.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.numerics import exp_nonpositive


@triton.jit
def fold_token(top, weight, product, z, c, first):
    """One more token; where it is the first of its group, the state before it does not count."""
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
def fold_tokens(
    top, weight, product, begin, end, row_offset, split,
    c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Folds the tokens [begin, end), token p from row p + row_offset of the projections. A wide
    step has the next AHEAD tokens under way while it folds as many: a load takes as long."""
    AHEAD: tl.constexpr = C.AHEAD
    if AHEAD > 1:
        rows = _load_ahead(
            begin, end, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C
        )
        for at in range(begin, end, AHEAD):
            following = _load_ahead(
                at + AHEAD, end, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
                PART, C,
            )  # fmt: skip
            for nth in tl.static_range(AHEAD):
                first = (at + nth) % C.RATIO == 0
                z = rows[3 * nth] + rows[3 * nth + 1]
                folded = fold_token(top, weight, product, z, rows[3 * nth + 2], first)
                live = at + nth < end
                top = tl.where(live, folded[0], top)
                weight = tl.where(live, folded[1], weight)
                product = tl.where(live, folded[2], product)
            rows = following
    else:
        for at in range(begin, end):
            z, bias, c = _load_token(
                at, True, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C
            )
            top, weight, product = fold_token(top, weight, product, z + bias, c, at % C.RATIO == 0)
    return top, weight, product


@triton.jit
def _load_ahead(
    at, end, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """AHEAD tokens as one tuple, three vectors each; zeros from `end` on."""
    AHEAD: tl.constexpr = C.AHEAD
    rows = ()
    for nth in tl.static_range(AHEAD):
        rows += _load_token(
            at + nth, at + nth < end, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
            PART, C,
        )  # fmt: skip
    return rows


@triton.jit
def write_states(
    start, end, first_row, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, ring,
    PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The states of the newest tokens of a step into the ring. Reads the state before the step and
    nothing else of the ring, before it writes."""
    WIDTH: tl.constexpr = C.WIDTH
    kept = tl.maximum(start, end - C.STATE_ROWS)
    begin = tl.maximum(start, kept - kept % C.RATIO)
    top, weight, product = load_state(ring, begin - 1, begin % C.RATIO != 0, split, PART, C)
    tl.debug_barrier()  # the row read above may be among those written below
    top, weight, product = fold_tokens(
        top, weight, product, begin, kept, first_row - start, split,
        c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C,
    )  # fmt: skip
    channel = split * PART + tl.arange(0, PART)
    for at in range(kept, end):
        z, bias, c = _load_token(
            at, True, first_row - start, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C
        )
        top, weight, product = fold_token(top, weight, product, z + bias, c, at % C.RATIO == 0)
        row = ring + at % C.STATE_ROWS * (3 * WIDTH) + channel
        tl.store(row, top)
        tl.store(row + WIDTH, weight)
        tl.store(row + 2 * WIDTH, product)


@triton.jit
def load_state(ring, position, exists, split, PART: tl.constexpr, C: tl.constexpr):
    """The state after the token at `position`; zeros where it does not exist."""
    channel = split * PART + tl.arange(0, PART)
    row = ring + tl.maximum(position, 0) % C.STATE_ROWS * (3 * C.WIDTH) + channel
    mask = tl.full([PART], 1, dtype=tl.int1) & exists
    top = tl.load(row, mask=mask, other=0.0)
    weight = tl.load(row + C.WIDTH, mask=mask, other=0.0)
    product = tl.load(row + 2 * C.WIDTH, mask=mask, other=0.0)
    return top, weight, product


@triton.jit
def _load_token(
    position, live, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Logits, their bias and values of one token of the step."""
    channel = split * PART + tl.arange(0, PART)
    mask = tl.full([PART], 1, dtype=tl.int1) & live
    token = (position + row_offset).to(tl.int64)
    z = tl.load(z_ptr + token * z_stride + channel, mask=mask, other=0.0)
    bias = tl.load(ape_ptr + position % C.RATIO * C.WIDTH + channel, mask=mask, other=0.0)
    c = tl.load(c_ptr + token * c_stride + channel, mask=mask, other=0.0)
    return z, bias, c
