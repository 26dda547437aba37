"""Rotation tables: cos and sin of every position, in fp32, as DeepSeek's code computes them.

The same bytes on every machine: each step of that code is rounded once to fp32, from a value that
is known precisely enough to round it correctly. What torch's fp32 functions give depends on the
CPU. Everything is computed on the CPU, even where torch has another default device.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

from dsv4.extras import needed_by

with needed_by("dsv4.rope"):
    import torch
    from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec
from dsv4.reference.numerics import rotate

# positions whose fp64 numbers are in memory at a time
SLICE_TOKENS = 1 << 12
# Every library's fp64 cos and sin are off by less than this; most of them by less than 1.
LIBRARY_ERROR_ULPS = 256
# decimal digits of logarithms and powers, fraction bits of angles: fp64 needs 16 and 53
DIGITS = 50
FRACTION_BITS = 256
_MIDDLE = 1 << 28


def rope_frequencies(model: ModelSpec, *, yarn: bool) -> Tensor:
    """fp32 [rope_dim / 2] angles per position. `yarn` is `LayerSpec.yarn` of the layer."""
    rope, dim = model.rope, model.rope_dim
    theta = rope.compress_theta if yarn else rope.theta
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    powers = torch.tensor(
        [_power(theta, e) for e in exponents.tolist()], dtype=torch.float32, device="cpu"
    )
    frequencies = torch.ones_like(powers) / powers
    if not yarn or rope.yarn_factor == 1.0:
        return frequencies

    def pair_of(rotations: float) -> float:
        turns = rope.yarn_original_tokens / (rotations * 2 * math.pi)
        return dim * _logarithm(turns) / (2 * _logarithm(theta))

    low = max(math.floor(pair_of(rope.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.yarn_beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    keep = 1.0 - ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / rope.yarn_factor * (1.0 - keep) + frequencies * keep


def rope_table(
    model: ModelSpec, *, yarn: bool, tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """fp32 [tokens, rope_dim] on `device`: cos of all pairs, then sin of all pairs, one row per
    position. `yarn`: the long-context table of `model`, which layers with entries use; else the
    plain one.

    Angles are fp32 position × fp32 frequency, as trained. 256 bytes per position: engines share
    one table with their queries.
    """
    return rotation_table(rope_frequencies(model, yarn=yarn), tokens=tokens, device=device)


def apply_rope(x: Tensor, table: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """`x` [tokens, …, channels] with its last channels rotated, as the cache rotates keys: what
    `attend` takes as queries. A new tensor; `x` stays as it is.

    `table` is the layer's (`rope_table`, with `yarn` as the layer has it), `positions` the plan's:
    whole numbers [tokens]; padding (-1) counts as position 0.

    The last `table.shape[1]` channels (`ModelSpec.rope_dim`) are rotated, the others keep their
    bits. Pairs are interleaved, as DeepSeek trains: channels 2i and 2i + 1 of the rotated ones are
    a pair, not i and i + rope_dim / 2. With c and s the numbers i and i + rope_dim / 2 of the
    token's row of the table, pair i, (a, b), becomes (a·c - b·s, a·s + b·c); with `inverse` (a·c +
    b·s, b·c - a·s), as `attend` with `inverse_rope` does to its output.

    `x` is bf16 or fp32, and so is the result: products and sums are rounded to fp32 one by one,
    then once to bf16 (nearest even, one NaN) if `x` is bf16. The bits are the same on every device
    and equal the cache's own, as long as no compiler fuses a product with a sum. Normalise first,
    round to the type of `x`, then rotate. It never synchronises with the host, so it may be
    captured in a graph. Raises InvalidInput.
    """
    for name, tensor in (("x", x), ("table", table), ("positions", positions)):
        if not isinstance(tensor, Tensor):
            raise InvalidInput(f"{name} is {type(tensor).__name__}: give a tensor")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise InvalidInput(f"x is {x.dtype}: give bf16 or fp32, as the layer computes")
    if table.dtype != torch.float32 or table.dim() != 2 or table.shape[1] % 2:
        raise InvalidInput(
            f"table is {table.dtype} of shape {list(table.shape)}: give fp32 [positions, rope_dim] "
            f"(cos | sin), as rope_table makes it"
        )
    if x.dim() < 2 or x.shape[-1] < table.shape[1]:
        raise InvalidInput(
            f"x has shape {list(x.shape)}: give [tokens, …, channels], with at least the "
            f"{table.shape[1]} channels that the table rotates"
        )
    if positions.shape != x.shape[:1] or positions.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(
            f"positions are {positions.dtype} of shape {list(positions.shape)}, the {x.shape[0]} "
            f"tokens of x need int32 or int64 [{x.shape[0]}]"
        )
    if not x.device == table.device == positions.device:
        raise InvalidInput(
            f"x is on {x.device}, table on {table.device}, positions on {positions.device}: "
            f"bring them to one device"
        )
    rows = positions.clamp_min(0)
    if x.device.type == "cpu" and len(rows) and int(rows.max()) >= len(table):
        raise InvalidInput(
            f"position {int(rows.max())} of a table for {len(table)} positions: make it with "
            f"tokens=max_context"
        )
    numbers = table.index_select(0, rows)
    cos, sin = numbers.view(len(rows), *[1] * (x.dim() - 2), table.shape[1]).chunk(2, dim=-1)
    return rotate(x, cos, -sin if inverse else sin)


def rotation_table(
    frequencies: Tensor, *, tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """As rope_table, from fp32 `frequencies` [pairs]. Every number is the fp32 number nearest to
    cos or sin of its fp32 angle. Made on the CPU, then brought to `device`."""
    frequencies = frequencies.float().cpu()
    pairs = frequencies.shape[0]
    table = torch.empty((tokens, 2 * pairs), dtype=torch.float32, device="cpu")
    for first in range(0, tokens, SLICE_TOKENS):
        rows = table[first : first + SLICE_TOKENS]
        last = first + rows.shape[0]
        positions = torch.arange(first, last, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * frequencies
        rows[:, :pairs] = _rounded(torch.cos(angles.double()), angles, quarter=1)
        rows[:, pairs:] = _rounded(torch.sin(angles.double()), angles, quarter=0)
    return table.to(device)


def _rounded(values: Tensor, angles: Tensor, *, quarter: int) -> Tensor:
    """fp64 → fp32. Where the library's error leaves two fp32 numbers to choose from, for about one
    value in a million, integers decide."""
    nearest = values.float()
    # the 29 bits that rounding drops: 1 followed by 28 zeros is the midpoint of two fp32 numbers
    dropped = (values.view(torch.int64) + (_MIDDLE + LIBRARY_ERROR_ULPS)) & (2 * _MIDDLE - 1)
    undecided = torch.nonzero(dropped <= 2 * LIBRARY_ERROR_ULPS, as_tuple=True)
    if len(undecided[0]):
        exact = [_exact_sin(angle, quarter) for angle in angles[undecided].tolist()]
        nearest[undecided] = torch.tensor(exact, dtype=torch.float32, device="cpu")
    return nearest


def _exact_sin(angle: float, quarter: int) -> float:
    """The fp32 number nearest to sin(angle + quarter · π/2), in integers with FRACTION_BITS
    fraction bits; `quarter` is 0 or 1."""
    if angle == 0:
        return float(quarter)
    numerator, denominator = angle.as_integer_ratio()
    x = (numerator << FRACTION_BITS) // denominator
    turns = (2 * x + _HALF_PI) // (2 * _HALF_PI)
    x -= turns * _HALF_PI
    quarter = (quarter + turns) % 4
    # Taylor's series: x - x³/3! + … for sin, 1 - x²/2! + … for cos
    nth, term = (0, 1 << FRACTION_BITS) if quarter % 2 else (1, x)
    total, square = 0, x * x >> FRACTION_BITS
    while term:
        total += term
        term = (-term * square >> FRACTION_BITS) // ((nth + 1) * (nth + 2))
        nth += 2
    shift = abs(total).bit_length() - 24
    mantissa = (abs(total) + (1 << (shift - 1))) >> shift
    sign = -total if quarter >= 2 else total
    return math.copysign(math.ldexp(mantissa, shift - FRACTION_BITS), sign)


def _arctan_of_inverse(n: int) -> int:
    """arctan(1 / n), with FRACTION_BITS fraction bits."""
    total, power, nth = 0, (1 << FRACTION_BITS) // n, 1
    while power:
        total += power // nth if nth % 4 == 1 else -(power // nth)
        power //= n * n
        nth += 2
    return total


# Machin: π / 4 = 4 · arctan(1/5) - arctan(1/239)
_HALF_PI = 2 * (4 * _arctan_of_inverse(5) - _arctan_of_inverse(239))


def _power(base: float, exponent: float) -> float:
    """base^exponent rounded to fp64; the decimal module computes in integers."""
    with localcontext() as context:
        context.prec = DIGITS
        return float((Decimal(base).ln() * Decimal(exponent)).exp())


def _logarithm(x: float) -> float:
    with localcontext() as context:
        context.prec = DIGITS
        return float(Decimal(x).ln())
