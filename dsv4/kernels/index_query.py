"""Indexer queries in the form of the indexer's keys: RoPE, Hadamard, the format's round trip."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4.cache.records import RecordFormat
from dsv4.kernels.codes import round_trip
from dsv4.kernels.launch import Launch
from dsv4.kernels.numerics import bf16_bits, hadamard, load_rope, rotate, wide
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.record_store import record_constants
from dsv4.kernels.rows import load_token, token_at

# Per program: a warp's 32 lanes then hold 16 channels each, and no barrier spans two warps.
HEADS = 4
NUM_WARPS = 1


def prepare_index_queries(
    q: Tensor,
    *,
    tokens: Tensor,
    rope: Tensor,
    record: RecordFormat,
    out: Tensor,
    transform: bool = True,
) -> None:
    """One launch. Same bits as dsv4.reference.index_query.prepare_index_queries."""
    index_query_launch(
        q, tokens=tokens, rope=rope, record=record, out=out, transform=transform
    ).run()


def index_query_launch(
    q: Tensor,
    *,
    tokens: Tensor,
    rope: Tensor,
    record: RecordFormat,
    out: Tensor,
    transform: bool = True,
) -> Launch:
    """As prepare_index_queries, without launching."""
    arguments = (
        q,
        tokens,
        rope,
        out,
        q.shape[1],
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        q.shape[-1] ** -0.5,
    )
    constants = {
        "HEADS": HEADS,
        "WIDTH": q.shape[-1],
        "ROPE": rope.shape[1],
        "RECORD": record_constants(record),
        "TRANSFORM": transform,
    }
    grid = (q.shape[0], triton.cdiv(q.shape[1], HEADS))
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    return Launch(_index_query_kernel, grid, arguments, constants, options)


@triton.jit
def _index_query_kernel(
    q_ptr, tokens_ptr, rope_ptr, out_ptr, heads, q_stride, q_head_stride, out_stride,
    out_head_stride, scale,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, RECORD: tl.constexpr,
    TRANSFORM: tl.constexpr,
):  # fmt: skip
    begin_program()
    nth = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    q = q_ptr + nth * q_stride + head * q_head_stride + channel
    x = wide(tl.load(q, mask=head < heads, other=0.0))
    token = load_token(token_at(tokens_ptr, nth))
    position = token.position.to(tl.int64)
    if token.slot >= 0:
        cos, sin = load_rope(rope_ptr + position * ROPE, WIDTH, ROPE)
        x = rotate(x, cos, sin, WIDTH, ROPE)
        exponent = x.to(tl.uint32, bitcast=True) & 0x7F800000
        broken = tl.max(exponent, axis=1)[:, None] == 0x7F800000
        if TRANSFORM:
            x = hadamard(x, scale, WIDTH)
        x = round_trip(x, WIDTH, RECORD)
        bits = tl.where(broken, 0x7FC0, bf16_bits(x))
        out = (out_ptr + nth * out_stride + head * out_head_stride).to(tl.pointer_type(tl.uint16))
        tl.store(out + channel, bits, mask=head < heads)
