"""Selection in two levels: scores of blocks of entries, then from columns back to entries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsv4.kernels.launch import Launch
from dsv4.kernels.overlap import begin_program
from dsv4.kernels.rows import load_token, token_at

# Blocks per program of the first kernel; a program of the second has all columns of a row.
BLOCKS_AT_ONCE = 256
NUM_WARPS = 4
OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}


def block_scores_launch(
    scores: Tensor, *, tokens: Tensor, ratio: int, span: int, out: Tensor
) -> Launch:
    """fp32 `out` [tokens, blocks]: the highest of the visible scores of each block of `span`
    entries, NaN ignored; infinity for the block of the newest visible entry. Blocks that a token
    does not see, and rows of padding tokens, keep what they held."""
    rows, blocks = out.shape
    arguments = (scores, tokens, out, scores.shape[1], blocks, scores.stride(0), out.stride(0))
    constants = {
        "RATIO": ratio,
        "SPAN": span,
        "SPAN_PADDED": triton.next_power_of_2(span),
        "AT_ONCE": BLOCKS_AT_ONCE,
    }
    grid = (rows, triton.cdiv(blocks, BLOCKS_AT_ONCE))
    return Launch(_block_scores_kernel, grid, arguments, constants, OPTIONS)


def entries_of_columns_launch(out: Tensor, *, tokens: Tensor, blocks: Tensor, span: int) -> Launch:
    """Turns columns in int32 `out` [tokens, k] into entries: column j is entry j % span of block
    j // span in the token's list. -1 stays."""
    rows, k = out.shape
    arguments = (out, tokens, blocks, out.stride(0), blocks.stride(0))
    constants = {"K": k, "K_PADDED": triton.next_power_of_2(k), "SPAN": span}
    return Launch(_entries_of_columns_kernel, (rows,), arguments, constants, OPTIONS)


@triton.jit
def _block_scores_kernel(
    scores_ptr, tokens_ptr, out_ptr, columns, blocks, scores_stride, out_stride,
    RATIO: tl.constexpr, SPAN: tl.constexpr, SPAN_PADDED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    begin_program()
    nth = tl.program_id(0).to(tl.int64)
    token = load_token(token_at(tokens_ptr, nth))
    visible = tl.minimum((token.position + 1) // RATIO, columns)
    block = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    if (token.slot >= 0) & (tl.program_id(1) * AT_ONCE * SPAN < visible):
        row = scores_ptr + nth * scores_stride
        place = tl.arange(0, SPAN_PADDED)[None, :]
        entry = block[:, None] * SPAN + place
        # whole 16 bytes are loaded; up to three of the scores may not be visible
        loaded = (entry < tl.cdiv(visible, 4) * 4) & (entry < columns)
        score = tl.load(row + entry, mask=loaded, other=float("-inf"))  # [AT_ONCE, SPAN_PADDED]
        counts = (place < SPAN) & (entry < visible) & (score == score)
        highest = tl.max(tl.where(counts, score, float("-inf")), axis=1)
        highest = tl.where(block == (visible - 1) // SPAN, float("inf"), highest)
        seen = (block * SPAN < visible) & (block < blocks)
        tl.store(out_ptr + nth * out_stride + block, highest, mask=seen)


@triton.jit
def _entries_of_columns_kernel(
    out_ptr, tokens_ptr, blocks_ptr, out_stride, blocks_stride,
    K: tl.constexpr, K_PADDED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    begin_program()
    nth = tl.program_id(0).to(tl.int64)
    token = load_token(token_at(tokens_ptr, nth))
    if token.slot >= 0:
        at = tl.arange(0, K_PADDED)
        out = out_ptr + nth * out_stride + at
        column = tl.load(out, mask=at < K, other=-1)
        listed = column >= 0
        block = tl.load(blocks_ptr + nth * blocks_stride + column // SPAN, mask=listed, other=0)
        entry = tl.where(listed, block * SPAN + column % SPAN, -1)
        tl.store(out, entry, mask=at < K)
