"""Indexer queries as the indexer's keys are kept: RoPE, Hadamard, the round trip of the format."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.records import RecordFormat
from dsv4.ops.columns import token_columns
from dsv4.reference.codec import decode, encode
from dsv4.reference.numerics import hadamard, rotate

# Taken at once: what comes of them stays in a processor's cache.
MAX_CHANNELS = 1 << 17


def prepare_index_queries(
    q: Tensor,
    *,
    tokens: Tensor,
    rope: Tensor,
    record: RecordFormat,
    out: Tensor,
    transform: bool = True,
) -> None:
    token = token_columns(tokens)
    live = torch.nonzero(token.slot >= 0).flatten()
    for rows in live.split(max(1, MAX_CHANNELS // max(q[0].numel(), 1))):
        cos, sin = rope[token.position[rows].long()].unsqueeze(1).chunk(2, dim=-1)
        x = rotate(q[rows], cos, sin)
        finite = torch.isfinite(x).all(dim=-1, keepdim=True)
        x = torch.where(finite, hadamard(x) if transform else x, torch.nan)
        out[rows] = decode(record, *encode(record, x))
