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
    step loads eight at a time, so that they are under way at once."""
    if C.TAILS == "after":
        for at in range(begin, end - 7, 8):
            z0, c0 = _load_token(at, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            z1, c1 = _load_token(at + 1, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            z2, c2 = _load_token(at + 2, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            z3, c3 = _load_token(at + 3, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            z4, c4 = _load_token(at + 4, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            z5, c5 = _load_token(at + 5, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            z6, c6 = _load_token(at + 6, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            z7, c7 = _load_token(at + 7, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C)  # noqa: E501  # fmt: skip
            top, weight, product = fold_token(top, weight, product, z0, c0, at % C.RATIO == 0)
            top, weight, product = fold_token(top, weight, product, z1, c1, (at + 1) % C.RATIO == 0)
            top, weight, product = fold_token(top, weight, product, z2, c2, (at + 2) % C.RATIO == 0)
            top, weight, product = fold_token(top, weight, product, z3, c3, (at + 3) % C.RATIO == 0)
            top, weight, product = fold_token(top, weight, product, z4, c4, (at + 4) % C.RATIO == 0)
            top, weight, product = fold_token(top, weight, product, z5, c5, (at + 5) % C.RATIO == 0)
            top, weight, product = fold_token(top, weight, product, z6, c6, (at + 6) % C.RATIO == 0)
            top, weight, product = fold_token(top, weight, product, z7, c7, (at + 7) % C.RATIO == 0)
        begin = end - tl.maximum(end - begin, 0) % 8
    for at in range(begin, end):
        z, c = _load_token(
            at, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C
        )
        top, weight, product = fold_token(top, weight, product, z, c, at % C.RATIO == 0)
    return top, weight, product


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
    tl.debug_barrier()
    top, weight, product = fold_tokens(
        top, weight, product, begin, kept, first_row - start, split,
        c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C,
    )  # fmt: skip
    channel = split * PART + tl.arange(0, PART)
    for at in range(kept, end):
        z, c = _load_token(
            at, first_row - start, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride, PART, C
        )
        top, weight, product = fold_token(top, weight, product, z, c, at % C.RATIO == 0)
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
    position, row_offset, split, c_ptr, z_ptr, ape_ptr, c_stride, z_stride,
    PART: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Biased logits and values of one token of the step."""
    channel = split * PART + tl.arange(0, PART)
    token = (position + row_offset).to(tl.int64)
    bias = tl.load(ape_ptr + position % C.RATIO * C.WIDTH + channel)
    z = tl.load(z_ptr + token * z_stride + channel)
    return z + bias, tl.load(c_ptr + token * c_stride + channel)
