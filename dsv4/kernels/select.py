"""Scores, then exact top-k, for as many rows at a time as fit into the workspace."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dsv4.errors import InvalidInput
from dsv4.kernels.candidates import block_scores_launch, entries_of_columns_launch
from dsv4.kernels.index_scores import candidate_scores
from dsv4.kernels.sizes import aligned, select_bytes
from dsv4.kernels.top_k import top_k as take_top_k
from dsv4.ops.calls import Candidates, EntrySource, Scoring, Selection

# pieces of many tokens are multiples of this, as the kernels take tokens
PIECE_ROWS = 128


# what the kernel of scores needs for a number of tokens, in addition to the scores
ScoreBytes = Callable[[int], int]


def select_workspace_bytes(
    rows: int,
    *,
    keys: EntrySource,
    top_k: int,
    score_bytes: ScoreBytes,
    block_entries: int = 0,
) -> int:
    """fp32 scores of every entry that the block table can name, then what their kernel or top-k
    needs. It is enough for any number of entries up to `top_k` and more."""
    columns = keys.capacity
    return select_bytes(
        rows,
        columns,
        top_k=top_k,
        score_bytes=score_bytes(rows),
        block_entries=block_entries,
    )


def select(call: Selection, *, score: Callable[[Scoring], None], score_bytes: ScoreBytes) -> None:
    """Two to four launches per piece of tokens, two or three more where candidates are published,
    one more where they bound the selection. It allocates nothing and does not read lengths from the
    device. `score` is the kernel of index scores."""
    count, columns, candidates, span = call.tokens.shape[0], call.columns, call.candidates, 0
    if candidates is not None and candidates.publish:
        span = candidates.block_entries
    elif candidates is not None:
        listed = candidates.blocks.shape[1] * candidates.block_entries
        if columns <= listed:  # every visible entry is a candidate
            candidates = None
        else:
            columns, score_bytes = listed, _nothing
    rows = _rows_at_a_time(count, columns, call.top_k, call.workspace.numel(), score_bytes, span)
    for first in range(0, count, max(rows, 1)):
        piece = slice(first, min(first + rows, count))
        of = None
        if candidates is not None:
            of = replace(candidates, blocks=candidates.blocks[piece])
        _select_piece(call, piece, columns, of, score)


def _select_piece(
    call: Selection,
    piece: slice,
    columns: int,
    candidates: Candidates | None,
    score: Callable[[Scoring], None],
) -> None:
    """Some tokens whose scores fit into the workspace, in rows of `columns` scores."""
    tokens, out = call.tokens[piece], call.out[piece]
    bounds = None if candidates is None or candidates.publish else candidates
    scores_bytes = 4 * len(tokens) * columns if columns > call.top_k else 0
    after_scores = call.workspace[aligned(scores_bytes) :]
    scores = _unread(call.tokens, len(tokens), columns)
    if scores_bytes:  # otherwise every visible entry is selected, and no score is read
        scores = call.workspace[:scores_bytes].view(torch.float32).view(-1, columns)
        scoring = Scoring(
            q=call.q[piece],
            weights=call.weights[piece],
            tokens=tokens,
            keys=call.keys,
            scores=scores,
            round_bf16=call.round_bf16,
            skip_visible=call.top_k,
            tokens_per_request=call.tokens_per_request,
            workspace=after_scores,
        )
        if bounds is None:
            score(scoring)
        else:
            candidate_scores(scoring, bounds)
    take_top_k(
        scores,
        tokens=tokens,
        ratio=call.keys.ratio,
        out=out,
        bf16_scores=call.round_bf16,
        workspace=after_scores,
        span=1 if bounds is None else bounds.block_entries,
        blocks=0 if bounds is None else bounds.blocks.shape[1],
    )
    if bounds is not None:
        size = bounds.block_entries
        entries_of_columns_launch(out, tokens=tokens, blocks=bounds.blocks, span=size).run()
    elif candidates is not None:
        _publish(call, tokens, scores, candidates, after_scores)


def _publish(
    call: Selection, tokens: Tensor, scores: Tensor, candidates: Candidates, workspace: Tensor
) -> None:
    """The best blocks. Where all blocks are candidates no score is read; a token that sees at most
    top_k entries has no scores, and all of its blocks are candidates."""
    span, ratio = candidates.block_entries, call.keys.ratio
    blocks = -(-scores.shape[1] // span)
    block_bytes = 4 * len(tokens) * blocks if blocks > candidates.blocks.shape[1] else 0
    best = _unread(call.tokens, len(tokens), blocks)
    if block_bytes:
        best = workspace[:block_bytes].view(torch.float32).view(-1, blocks)
        block_scores_launch(scores, tokens=tokens, ratio=ratio, span=span, out=best).run()
    take_top_k(
        best,
        tokens=tokens,
        ratio=ratio,
        out=candidates.blocks,
        bf16_scores=call.round_bf16,
        workspace=workspace[aligned(block_bytes) :],
        span=span,
    )


def _unread(tokens: Tensor, rows: int, columns: int) -> Tensor:
    """A tensor of scores of that shape which nothing reads."""
    return tokens.view(torch.float32).as_strided((rows, columns), (0, 0))


def _nothing(rows: int) -> int:
    return 0


def _rows_at_a_time(
    tokens: int,
    columns: int,
    top_k: int,
    workspace_bytes: int,
    score_bytes: ScoreBytes,
    block_entries: int = 0,
) -> int:
    """Computed from shapes alone, so a captured graph is valid for every length."""
    if columns <= top_k:
        return tokens

    def scored(rows: int) -> int:
        return aligned(4 * rows * columns) + score_bytes(rows)

    def needed(rows: int) -> int:
        return select_bytes(
            rows,
            columns,
            top_k=top_k,
            score_bytes=score_bytes(rows),
            block_entries=block_entries,
        )

    rows = bisect_right(range(tokens + 1), workspace_bytes, key=scored) - 1
    # few rows may be cut into smaller slices than many, so the last piece may need more memory
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
