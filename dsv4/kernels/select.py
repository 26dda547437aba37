"""Scores, then exact top-k, over as many rows at a time as the workspace holds."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

import torch

from dsv4.errors import InvalidInput
from dsv4.kernels.top_k import top_k as take_top_k
from dsv4.kernels.top_k import top_k_workspace_bytes
from dsv4.ops.calls import EntrySource, Scoring, Selection

# pieces of many tokens are whole multiples of this, as kernels take tokens
PIECE_ROWS = 128


# what the kernel of scores needs for so many tokens, besides the scores
ScoreBytes = Callable[[int], int]


def select_workspace_bytes(
    rows: int, *, keys: EntrySource, top_k: int, score_bytes: ScoreBytes
) -> int:
    """fp32 scores of every entry the block table can name, then what their kernel or top-k needs.
    It serves every number of entries up to `top_k` and beyond."""
    columns = keys.capacity
    behind = max(score_bytes(rows), top_k_workspace_bytes(rows, columns))
    return _aligned(4 * rows * columns) + behind


def select(call: Selection, *, score: Callable[[Scoring], None], score_bytes: ScoreBytes) -> None:
    """Two to four launches per piece of tokens, no allocation, no look at lengths on the device;
    `score` is the kernel of index scores."""
    count, columns = call.tokens.shape[0], call.columns
    rows = _rows_at_a_time(count, columns, call.top_k, call.workspace.numel(), score_bytes)
    for first in range(0, count, max(rows, 1)):
        piece = slice(first, min(first + rows, count))
        tokens, out = call.tokens[piece], call.out[piece]
        scores_bytes = 4 * len(tokens) * columns if columns > call.top_k else 0
        behind = call.workspace[_aligned(scores_bytes) :]
        if scores_bytes:
            scores = call.workspace[:scores_bytes].view(torch.float32).view(-1, columns)
            score(
                Scoring(
                    q=call.q[piece],
                    weights=call.weights[piece],
                    tokens=tokens,
                    keys=call.keys,
                    scores=scores,
                    round_bf16=call.round_bf16,
                    skip_visible=call.top_k,
                    tokens_per_request=call.tokens_per_request,
                    workspace=behind,
                )
            )
        else:  # every visible entry is selected: no score is read
            scores = call.tokens.view(torch.float32).as_strided((len(tokens), columns), (0, 0))
        take_top_k(
            scores,
            tokens=tokens,
            ratio=call.keys.ratio,
            out=out,
            bf16_scores=call.round_bf16,
            workspace=behind,
        )


def _aligned(count_bytes: int) -> int:
    return -(-count_bytes // 16) * 16


def _rows_at_a_time(
    tokens: int, columns: int, top_k: int, workspace_bytes: int, score_bytes: ScoreBytes
) -> int:
    """From shapes alone, so a captured graph holds for every length."""
    if columns <= top_k:
        return tokens

    def scored(rows: int) -> int:
        return _aligned(4 * rows * columns) + score_bytes(rows)

    def needed(rows: int) -> int:
        top_k_bytes = _aligned(4 * rows * columns) + top_k_workspace_bytes(rows, columns)
        return max(scored(rows), top_k_bytes)

    rows = bisect_right(range(tokens + 1), workspace_bytes, key=scored) - 1
    # few rows may be cut finer than many, and so the last piece may need more than the others
    while rows > 0 and max(needed(rows), needed(tokens % rows)) > workspace_bytes:
        rows -= 1
    if rows <= 0 < tokens:
        raise InvalidInput(
            f"a workspace of {workspace_bytes:,} bytes does not hold the scores of one token over "
            f"{columns:,} entries: give at least {needed(1):,} bytes"
        )
    if PIECE_ROWS <= rows < tokens:
        rows -= rows % PIECE_ROWS
    return max(rows, 0)
