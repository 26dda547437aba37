"""Scores, then exact top-k, over as many rows at a time as the workspace holds."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.ops.calls import EntrySource
from dsv4.reference.index_scores import index_scores
from dsv4.reference.top_k import top_k as take_top_k


def select_workspace_bytes(rows: int, *, keys: EntrySource, top_k: int) -> int:
    """The workspace with which `select` handles `rows` tokens at a time."""
    return 4 * rows * keys.block_table.shape[1] * keys.page.rows


def select(
    q: Tensor,
    weights: Tensor,
    *,
    tokens: Tensor,
    keys: EntrySource,
    top_k: int,
    workspace: Tensor,
    out: Tensor,
    round_bf16: bool = True,
    tokens_per_request: int = 1,
) -> None:
    """The `top_k` entries of every token into int32 `out` [tokens, top_k]; see index_scores and
    top_k. Padding rows of `out` are not touched.

    `workspace` is contiguous uint8 memory whose content is lost. Tokens are handled in pieces whose
    scores fit it; the size of a piece follows from shapes alone, never from lengths. Raises
    InvalidInput when one token's scores do not fit.
    """
    columns = keys.block_table.shape[1] * keys.page.rows
    rows = min(tokens.shape[0], workspace.numel() // max(4 * columns, 1))
    if rows == 0 and tokens.shape[0]:
        raise InvalidInput(
            f"a workspace of {workspace.numel():,} bytes does not hold the scores of one token "
            f"over {columns:,} entries: give at least {4 * columns:,} bytes"
        )
    for first in range(0, tokens.shape[0], max(rows, 1)):
        piece = slice(first, min(first + rows, tokens.shape[0]))
        count = piece.stop - first
        scores = workspace[: 4 * count * columns].view(torch.float32).view(count, columns)
        index_scores(
            q[piece],
            weights[piece],
            tokens=tokens[piece],
            keys=keys,
            first_entry=0,
            scores=scores,
            round_bf16=round_bf16,
            skip_visible=top_k,
        )
        take_top_k(
            scores,
            tokens=tokens[piece],
            ratio=keys.ratio,
            first_entry=0,
            out=out[piece],
            bf16_scores=round_bf16,
        )
