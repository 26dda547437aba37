"""The arithmetic of the specification in plain PyTorch, in an order that every backend can repeat.

Three rules make the Triton kernels equal to this file bit for bit: products and sums are rounded
one by one (no fused multiply-add); sums over the rows of a group follow the tree of `tree_sum`;
sums over the channels of a vector run in fp64 (`channel_sum` says how far their order matters).

Results are the same on every CPU: what reaches a stored byte is made of IEEE + - × ÷, of
`square_root` and of `exp_nonpositive`, never of a vector maths library. docs/exactness.md lists
every call that goes through one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.constants import (
    BF16_NAN_BITS,
    EXP_POLY,
    EXP_UNDERFLOW,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    PROJECTION_LANES,
    ROUND_MAGIC,
    SUM_LANES,
)


def exp_nonpositive(x: Tensor) -> Tensor:
    """e^x for fp32 x ≤ 0, within 2 ulp; below -87 it is 0."""
    clamped = torch.clamp_min(x, EXP_UNDERFLOW)
    n = (clamped * LOG2_E + ROUND_MAGIC) - ROUND_MAGIC
    r = (clamped - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(r, EXP_POLY[0])
    for coefficient in EXP_POLY[1:]:
        p = p * r + coefficient
    y = (p * (r * r) + r) + 1.0
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(x < EXP_UNDERFLOW, 0.0, y * power)


def gated_pool(values: Tensor, logits: Tensor, valid: Tensor) -> Tensor:
    """Softmax over axis -2 of `logits`, channel by channel, applied to `values`; fp32.

    `valid` [..., n] excludes rows. At least one row must be valid.
    """
    mask = valid.unsqueeze(-1)
    z = torch.where(mask, logits, -torch.inf)
    weight = exp_nonpositive(z - z.amax(dim=-2, keepdim=True))
    weight = torch.where(mask, weight, 0.0)
    product = torch.where(mask, weight * values, 0.0)
    return tree_sum(product) / tree_sum(weight)


def fold_token(state: Tensor, values: Tensor, logits: Tensor, first: Tensor) -> Tensor:
    """Adds one token to a running softmax, channel by channel: fp32 [..., 3, width] before and
    after: the largest logit, the sum of the weights and that of the weighted values.

    Where `first` [...] is true the token begins a group and the previous state is ignored.
    """
    top, weight, product = state.unbind(-2)
    begins = first.unsqueeze(-1)
    top = torch.where(begins, logits, top)
    weight = torch.where(begins, 0.0, weight)
    product = torch.where(begins, 0.0, product)
    rises = logits > top
    gap = torch.where(rises, top - logits, logits - top)
    gap = torch.where(logits == top, 0.0, gap)  # for equal infinities too
    shrink = exp_nonpositive(gap)
    weight = torch.where(rises, weight * shrink + 1.0, weight + shrink)
    product = torch.where(rises, product * shrink + values, product + shrink * values)
    return torch.stack((torch.where(rises, logits, top), weight, product), dim=-2)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over axis -2 in a fixed order: row r joins lane r mod SUM_LANES, in order; then the lower
    half of the lanes is added to the upper half until one is left."""
    rows, lanes = x.shape[-2], 1
    while lanes < min(rows, SUM_LANES):
        lanes *= 2
    if rows % lanes:
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % lanes))
    rounds = x.reshape(*x.shape[:-2], -(-rows // lanes), lanes, x.shape[-1]).unbind(-3)
    total = rounds[0]
    for joining in rounds[1:]:
        total = total + joining
    while lanes > 1:
        lanes //= 2
        total = total[..., :lanes, :] + total[..., lanes:, :]
    return total.squeeze(-2)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """`weight` [out, channels] times x over its last axis: fp32 [..., out], computed in fp64 and
    rounded once. Products of bf16 numbers are exact in fp64; channel c joins lane c mod
    PROJECTION_LANES, in order, and lanes are added as in `tree_sum`."""
    rows, wide = weight.double().T, x.double()
    lanes = min(PROJECTION_LANES, rows.shape[0])
    total = wide[..., :lanes, None] * rows[:lanes]
    for first in range(lanes, rows.shape[0], lanes):
        joining = slice(first, first + lanes)
        total = total + wide[..., joining, None] * rows[joining]
    return tree_sum(total).float()


def square_root(x: Tensor) -> Tensor:
    """√x of fp32, correctly rounded.

    torch.sqrt goes through the CPU's vector maths library, which is an ulp off on some CPUs. The
    root of a 24-bit number is never nearer than 4 ulps of fp64 to the midpoint of two fp32
    numbers, so an fp64 root with an error below 4 ulps rounds to the right one.
    """
    return torch.sqrt(x.double()).float()


def divide(x: Tensor, divisor: float) -> Tensor:
    """x / divisor in fp32, rounded once. On a GPU torch multiplies by the reciprocal of a Python
    number, which rounds twice."""
    return x / torch.full((), divisor, dtype=torch.float32, device=x.device)


def channel_sum(x: Tensor) -> Tensor:
    """Sum of fp32 over the last axis, computed in fp64 by halves and rounded once; keeps the axis.

    Kernels add in another order. For squares of bf16 numbers that changes nothing: they have 16
    bits, so fp64 holds the sum of 512 exactly if no two of the nonzero numbers differ by more
    than a factor of 2^14. Otherwise the order may change the last bits of fp64, and the rounded sum
    if it lies within 2^-44 of the midpoint of two fp32 numbers.
    """
    wide = x.double()
    while (width := wide.shape[-1]) > 1:
        if width % 2:
            wide, width = torch.nn.functional.pad(wide, (0, 1)), width + 1
        lower, upper = wide.split_with_sizes((width // 2, width // 2), dim=-1)
        wide = lower + upper
    return wide.float()


def to_bf16(x: Tensor) -> Tensor:
    """fp32 → bf16, nearest even; every NaN becomes the one NaN of BF16_NAN_BITS."""
    bits = x.to(torch.bfloat16).view(torch.int16)
    return torch.where(torch.isnan(x), BF16_NAN_BITS, bits).view(torch.bfloat16)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 → bf16 as `to_bf16`, or fp32 as it is."""
    return to_bf16(x) if dtype == torch.bfloat16 else x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · x / rms(x) over the last axis; fp32 inside, rounded once to the type of `x`."""
    wide = x.float()
    mean_square = divide(channel_sum(wide * wide), x.shape[-1])
    root = square_root(mean_square + eps)
    inverse = torch.ones_like(root) / root
    normed = weight * (wide * inverse)
    return to_bf16(normed) if x.dtype == torch.bfloat16 else normed


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on the last 2·cos.shape[-1] channels, pairs interleaved; fp32 inside, the type of `x`
    in and out."""
    width = 2 * cos.shape[-1]
    pairs = x[..., x.shape[-1] - width :].float()
    even, odd = pairs[..., 0::2], pairs[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    rounded = turned.flatten(-2)
    if x.dtype == torch.bfloat16:
        rounded = to_bf16(rounded)
    return torch.cat((x[..., : x.shape[-1] - width], rounded), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """H·x / sqrt(n) in natural (Sylvester) order over the last axis; the type of `x` in and out.

    Sums of bf16 numbers are exact in fp64 whatever their order, up to 2^38 apart in size.
    """
    n = x.shape[-1]
    y = x.reshape(-1, n).T.contiguous().double()  # channels first
    other = torch.empty_like(y)
    half = 1
    while half < n:
        top, bottom = y.view(n // (2 * half), 2, half, -1).unbind(1)
        sums, gaps = other.view(n // (2 * half), 2, half, -1).unbind(1)
        torch.add(top, bottom, out=sums)
        torch.sub(top, bottom, out=gaps)
        y, other = other, y
        half *= 2
    scale = torch.tensor(n**-0.5, dtype=torch.float32, device=x.device)
    turned = (y.T.float().contiguous() * scale).view(x.shape)
    return to_bf16(turned) if x.dtype == torch.bfloat16 else turned
