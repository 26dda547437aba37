"""Exact selection: the k highest scores of every row, ties to the lowest entry."""

from __future__ import annotations

import torch
from torch import Tensor

# Scores sorted at once.
MAX_SCORES = 1 << 20
# Below the image of every number, -inf included.
UNSEEN, NOT_A_NUMBER = -(2**31), -(2**31) + 1


def top_k(scores: Tensor, *, tokens: Tensor, ratio: int, out: Tensor) -> None:
    """int32 `out` [tokens, k]: the entries with the highest of fp32 `scores` [tokens, columns],
    column j being entry j, among those the token sees.

    Entries come in ascending order, whatever their scores: attention needs the set, and rows that
    lie next to each other are read together. If fewer than k are visible, the rest is -1. Of equal
    scores the lowest entries are taken; -0 equals +0, and NaN is below every number, -inf included.
    Columns that the token does not see are ignored, whatever is in them; rows of padding tokens
    are not touched.
    """
    k = out.shape[1]
    slots, positions = tokens[:, 0], tokens[:, 1].long()
    visible = torch.div(positions + 1, ratio, rounding_mode="floor").clamp(0, scores.shape[1])
    live, choosing = slots >= 0, visible > k
    rows = torch.nonzero(live & ~choosing).flatten()
    if rows.shape[0]:
        rank = torch.arange(k, dtype=torch.int32, device=out.device)
        out[rows] = torch.where(rank < visible[rows, None], rank, -1)
    rows = torch.nonzero(live & choosing).flatten()
    if not rows.shape[0]:
        return
    most = int(visible[rows].max())
    column, at_once = torch.arange(most, device=out.device), max(1, MAX_SCORES // most)
    for first in range(0, rows.shape[0], at_once):
        part = rows[first : first + at_once]
        image = _ordered(scores[part, :most])
        image = torch.where(column < visible[part, None], image, UNSEEN)
        order = torch.sort(image, dim=-1, descending=True, stable=True).indices[:, :k]
        out[part] = torch.sort(order, dim=-1).values.to(torch.int32)


def _ordered(scores: Tensor) -> Tensor:
    """int32 numbers in the order of fp32 scores: equal for both zeros, NOT_A_NUMBER for NaN."""
    bits = (scores + 0.0).view(torch.int32)  # -0 + 0 is +0
    image = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(torch.isnan(scores), NOT_A_NUMBER, image)


def best(row: Tensor, k: int) -> Tensor:
    """Ascending indices of the k highest numbers of a row, or of all where there are fewer."""
    order = torch.sort(_ordered(row), descending=True, stable=True).indices[:k]
    return torch.sort(order).values
