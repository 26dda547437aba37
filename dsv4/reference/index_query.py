"""Indexer queries in the form of the indexer's keys: RoPE, Hadamard, the format's round trip."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.records import RecordFormat
from dsv4.reference.codec import decode, encode
from dsv4.reference.numerics import hadamard, rotate

# Taken at once, so that intermediate results stay in a processor's cache.
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
    live = torch.nonzero(tokens[:, 0] >= 0).flatten()
    at_once = max(1, MAX_CHANNELS // max(q.shape[1:].numel(), 1))
    for first in range(0, live.shape[0], at_once):
        rows = live[first : first + at_once]
        table = rope[tokens[rows, 1].long()].unsqueeze(1)
        half = table.shape[-1] // 2
        x = rotate(q[rows], table[..., :half], table[..., half:])
        finite = torch.isfinite(x).all(dim=-1, keepdim=True)
        x = torch.where(finite, hadamard(x) if transform else x, torch.nan)
        out[rows] = decode(record, *encode(record, x))
