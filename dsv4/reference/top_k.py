"""Exact selection: the k highest scores of every row, ties to the lowest entry."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.columns import token_columns


def top_k(scores: Tensor, *, tokens: Tensor, ratio: int, out: Tensor) -> None:
    """int32 `out` [tokens, k]: the entries with the highest of fp32 `scores` [tokens, columns],
    column j being entry j, among those the token sees.

    Entries come in ascending order, whatever their scores: attention needs the set, and rows that
    lie next to each other are read together. Fewer than k visible ones are followed by -1. Of equal
    scores the lowest entries are taken; -0 equals +0, and NaN is below every number, -inf included.
    Columns that the token does not see are not read; rows of padding tokens are not touched.
    """
    k = out.shape[1]
    slots, positions = (c.tolist() for c in token_columns(tokens)[:2])
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot < 0:
            continue
        visible = min(max((position + 1) // ratio, 0), scores.shape[1])
        row = scores[token, :visible]
        image = torch.where(torch.isnan(row), torch.full_like(row, -torch.inf), row)
        # stable sorts: first by score, then NaN behind every number, so index decides the rest
        order = torch.argsort(image, descending=True, stable=True)
        order = order[torch.argsort(torch.isnan(row)[order].to(torch.uint8), stable=True)]
        chosen = torch.sort(order[:k]).values
        out[token] = -1
        out[token, : len(chosen)] = chosen.to(torch.int32)
