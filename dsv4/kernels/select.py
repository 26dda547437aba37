"""Scores, then exact top-k, over as many rows at a time as the workspace holds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4.errors import InvalidInput
from dsv4.kernels.top_k import top_k as take_top_k
from dsv4.kernels.top_k import top_k_workspace_bytes
from dsv4.ops.calls import EntrySource, Scoring, Selection


def select_workspace_bytes(rows: int, *, keys: EntrySource, top_k: int) -> int:
    """fp32 scores of every entry the block table can name, then what top-k needs. It serves every
    number of entries up to `top_k` and beyond."""
    return 4 * rows * keys.capacity + top_k_workspace_bytes(rows, keys.capacity)


def select(call: Selection, *, score: Callable[[Scoring], None]) -> None:
    """One to three launches per piece of tokens, no allocation, no look at lengths on the host;
    `score` is the kernel of index scores."""
    count, columns = call.tokens.shape[0], call.keys.capacity
    rows = _rows_at_a_time(count, call.keys, call.top_k, call.workspace.numel())
    for first in range(0, count, max(rows, 1)):
        piece = slice(first, min(first + rows, count))
        tokens, out = call.tokens[piece], call.out[piece]
        scores_bytes = 4 * len(tokens) * columns if columns > call.top_k else 0
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
            workspace=call.workspace[scores_bytes:],
        )


def _rows_at_a_time(tokens: int, keys: EntrySource, top_k: int, workspace_bytes: int) -> int:
    """From shapes alone, so a captured graph holds for every length."""
    columns = keys.capacity
    if columns <= top_k:
        return tokens

    def needed(rows: int) -> int:
        return 4 * rows * columns + top_k_workspace_bytes(rows, columns)

    rows = min(tokens, workspace_bytes // (4 * columns))
    # few rows may be cut finer than many, and so the last piece may need more than the others
    while rows and max(needed(rows), needed(tokens % rows)) > workspace_bytes:
        rows -= 1
    if rows == 0 and tokens:
        raise InvalidInput(
            f"a workspace of {workspace_bytes:,} bytes does not hold the scores of one token over "
            f"{columns:,} entries: give at least {needed(1):,} bytes"
        )
    return rows
