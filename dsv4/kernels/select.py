"""Scores, then exact top-k, over as many rows at a time as the workspace holds."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels.index_scores import index_scores
from dsv4.kernels.top_k import top_k as take_top_k
from dsv4.kernels.top_k import top_k_workspace_bytes
from dsv4.ops.calls import EntrySource


def select_workspace_bytes(rows: int, *, keys: EntrySource, top_k: int) -> int:
    """A workspace with which `select` handles `rows` tokens at a time: fp32 scores of every entry
    the block table can name, then what top-k needs. It serves every number of entries up to `top_k`
    and beyond."""
    columns = keys.block_table.shape[1] * keys.page.rows
    return 4 * rows * columns + top_k_workspace_bytes(rows, columns)


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
    """Same result as dsv4.reference.select.select. One to three launches a piece of tokens, no
    allocation, no look at lengths on the host. Raises InvalidInput when one token's scores do not
    fit the workspace; nothing has been launched then.
    """
    tokens_count = tokens.shape[0]
    columns = keys.block_table.shape[1] * keys.page.rows
    rows = _rows_at_a_time(tokens_count, keys, top_k, workspace.numel())
    for first in range(0, tokens_count, max(rows, 1)):
        piece = slice(first, min(first + rows, tokens_count))
        count = piece.stop - first
        scores_bytes = 4 * count * columns if columns > top_k else 0
        if scores_bytes:
            scores = workspace[:scores_bytes].view(torch.float32).view(count, columns)
            index_scores(
                q[piece],
                weights[piece],
                tokens=tokens[piece],
                keys=keys,
                first_entry=0,
                scores=scores,
                round_bf16=round_bf16,
                skip_visible=top_k,
                tokens_per_request=tokens_per_request,
            )
        else:  # every visible entry is selected: no score is read
            scores = tokens.view(torch.float32).as_strided((count, columns), (0, 0))
        take_top_k(
            scores,
            tokens=tokens[piece],
            ratio=keys.ratio,
            first_entry=0,
            out=out[piece],
            bf16_scores=round_bf16,
            workspace=workspace[scores_bytes:],
        )


def _rows_at_a_time(tokens: int, keys: EntrySource, top_k: int, workspace_bytes: int) -> int:
    """From shapes alone, so a captured graph holds for every length."""
    columns = keys.block_table.shape[1] * keys.page.rows
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
