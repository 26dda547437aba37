"""Matrix products of bf16 values: tensor cores when compiled, fp32 when interpreted.

Triton's interpreter multiplies the bit patterns of bf16 tensors, so interpreted kernels carry bf16
values in fp32; every product of two bf16 numbers is exact in both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dsv4.kernels.numerics import INTERPRETED, round_bf16, wide


@triton.jit
def load_bf16(ptrs, mask):
    """bf16 numbers in the form that `dot` takes; 0 where masked."""
    x = tl.load(ptrs, mask=mask, other=0.0)
    if INTERPRETED:
        return wide(x)
    else:
        return x


@triton.jit
def as_operand(x):
    """fp32 → the nearest bf16, in the form that `dot` takes."""
    if INTERPRETED:
        return round_bf16(x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def dot(a, b, acc):
    """acc + a·b in fp32, for operands from `load_bf16`, `as_operand` or `load_record_rows`."""
    if INTERPRETED:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)
