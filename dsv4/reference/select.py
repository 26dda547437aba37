"""Scores, then exact top-k, for as many rows at a time as fit into the workspace."""

from __future__ import annotations

from dataclasses import replace

import torch

from dsv4.errors import InvalidInput
from dsv4.ops.calls import EntrySource, Scoring, Selection
from dsv4.reference.candidates import publish_candidates, top_k_of_candidates
from dsv4.reference.index_scores import index_scores
from dsv4.reference.top_k import top_k as take_top_k


def select_workspace_bytes(
    rows: int, *, keys: EntrySource, top_k: int, block_entries: int = 0
) -> int:
    return 4 * rows * keys.capacity


def select(call: Selection) -> None:
    columns, count = call.keys.capacity, call.tokens.shape[0]
    rows = min(count, call.workspace.numel() // max(4 * columns, 1))
    if rows == 0 and count:
        raise InvalidInput(
            f"a workspace of {call.workspace.numel():,} bytes does not hold the scores of one "
            f"token over {columns:,} entries: give at least {4 * columns:,} bytes"
        )
    for first in range(0, count, max(rows, 1)):
        piece = slice(first, min(first + rows, count))
        tokens = call.tokens[piece]
        scores = (
            call.workspace[: 4 * tokens.shape[0] * columns].view(torch.float32).view(-1, columns)
        )
        index_scores(
            Scoring(
                q=call.q[piece],
                weights=call.weights[piece],
                tokens=tokens,
                keys=call.keys,
                scores=scores,
                round_bf16=call.round_bf16,
                skip_visible=call.top_k,
            )
        )
        out, ratio = call.out[piece], call.keys.ratio
        candidates = call.candidates
        if candidates is not None:
            candidates = replace(candidates, blocks=candidates.blocks[piece])
        if candidates is None or candidates.publish:
            take_top_k(scores, tokens=tokens, ratio=ratio, out=out)
            if candidates is not None:
                publish_candidates(scores, tokens=tokens, ratio=ratio, candidates=candidates)
        else:
            top_k_of_candidates(scores, tokens=tokens, ratio=ratio, candidates=candidates, out=out)
