"""Selection in two levels: the best blocks of entries of one layer, then entries inside them."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import Candidates
from dsv4.ops.columns import token_columns
from dsv4.reference.top_k import best


def publish_candidates(
    scores: Tensor, *, tokens: Tensor, ratio: int, candidates: Candidates
) -> None:
    """The best blocks of every token, as `Candidates` specifies; scores as for top_k."""
    size, out = candidates.block_entries, candidates.blocks
    for token, visible in _visible(tokens, ratio):
        row = scores[token, :visible]
        row = torch.where(torch.isnan(row), torch.full_like(row, -torch.inf), row)
        row = torch.nn.functional.pad(row, (0, -visible % size), value=-torch.inf)
        blocks = row.unflatten(0, (-1, size)).amax(dim=-1)
        blocks[-1:] = torch.inf  # the block of the newest entry
        chosen = best(blocks, out.shape[1])
        out[token] = -1
        out[token, : len(chosen)] = chosen.to(torch.int32)


def top_k_of_candidates(
    scores: Tensor, *, tokens: Tensor, ratio: int, candidates: Candidates, out: Tensor
) -> None:
    """As top_k, but only among the entries of each token's candidate blocks."""
    size = candidates.block_entries
    nth = torch.arange(size, device=scores.device)
    for token, visible in _visible(tokens, ratio):
        blocks = candidates.blocks[token].long()
        entry = (blocks[blocks >= 0, None] * size + nth).flatten()
        entry = entry[entry < visible]
        chosen = entry[best(scores[token, entry], out.shape[1])]
        out[token] = -1
        out[token, : len(chosen)] = chosen.to(torch.int32)


def _visible(tokens: Tensor, ratio: int) -> list[tuple[int, int]]:
    """Rows of live tokens, and how many entries each sees."""
    slots, positions = (c.tolist() for c in token_columns(tokens)[:2])
    pairs = enumerate(zip(slots, positions, strict=True))
    return [(row, (position + 1) // ratio) for row, (slot, position) in pairs if slot >= 0]
