"""Indexer queries as the indexer's keys are kept: RoPE, Hadamard, the round trip of the format."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.records import RecordFormat
from dsv4.ops.columns import token_columns
from dsv4.reference.codec import decode, encode
from dsv4.reference.numerics import hadamard, rotate


def prepare_index_queries(
    q: Tensor, *, tokens: Tensor, rope: Tensor, record: RecordFormat, out: Tensor
) -> None:
    token = token_columns(tokens)
    live = torch.nonzero(token.slot >= 0).flatten()
    half = rope.shape[1] // 2
    row = rope[token.position[live].long()].unsqueeze(1)
    x = rotate(q[live], row[..., :half], row[..., half:])
    finite = torch.isfinite(x).all(dim=-1, keepdim=True)
    x = torch.where(finite, hadamard(x), torch.full_like(x, torch.nan))
    out[live] = decode(record, *encode(record, x))
