"""Indexer keys in poisoned arenas, and slow formulas for scores and selection."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.pages import Page
from dsv4.cache.records import RecordFormat
from dsv4.ops.calls import EntrySource
from dsv4.reference.append import write_records
from dsv4.reference.codec import decode, encode
from tests.support.numbers import Numbers

POISON = 0xFF
UNTOUCHED = -12345.0
WILD_BLOCK = 2**31 - 1


def make_keys(
    record: RecordFormat,
    values: Sequence[Tensor],
    *,
    page_rows: int = 8,
    blocks: int | None = None,
    ratio: int = 4,
    seed: int = 0,
) -> EntrySource:
    """Slot s holds the bf16 keys values[s]. Blocks lie in random order between poisoned ones; the
    block table is wild where a request has no block."""
    needed = [-(-len(v) // page_rows) for v in values]
    columns = max([*needed, 1]) if blocks is None else blocks
    page = Page(kind="index_keys", layer=0, offset_bytes=32, rows=page_rows, format=record)
    row_bytes = -(-(32 + page.payload_bytes) // 16) * 16 + 16
    arena = torch.full((sum(needed) + 3, row_bytes), POISON, dtype=torch.uint8)
    order = Numbers(seed).permutation(arena.shape[0]).tolist()
    table = torch.full((len(values), columns), WILD_BLOCK, dtype=torch.int32)
    for slot, keys in enumerate(values):
        ids = torch.tensor([order.pop() for _ in range(needed[slot])], dtype=torch.int32)
        table[slot, : len(ids)] = ids
        entry = torch.arange(len(keys))
        if len(keys):
            write_records(arena, page, ids[entry // page_rows].long(), entry % page_rows, keys)
    return EntrySource(arena=arena, page=page, block_table=table, ratio=ratio)


def make_tokens(rows: Sequence[tuple[int, int] | None]) -> Tensor:
    """(slot, position) of every token; None is padding."""
    return torch.tensor(
        [[-1] * 4 if row is None else [row[0], row[1], row[0], -1] for row in rows],
        dtype=torch.int32,
    ).reshape(len(rows), 4)


def round_trip(record: RecordFormat, x: Tensor) -> Tensor:
    return decode(record, *encode(record, x))


QUERY_POWERS, KEY_POWERS = (-80, -40, 0, 20), (-10, 0, 10)


def sizes_far_apart(
    record: RecordFormat,
    entries: Sequence[int],
    tokens: int,
    heads: int,
    seed: int,
    powers: Sequence[int] = QUERY_POWERS,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Keys, queries as their format keeps them, and weights, where docs/exactness.md promises that
    scores are the same everywhere: each query has a size of its own, 2 to one of the `powers`, and
    each key; tiles of a vector differ by 2^4 or so."""
    numbers = Numbers(seed)

    def vectors(count: int, powers: Sequence[int]) -> Tensor:
        power = torch.tensor(powers)[numbers.integers(0, len(powers), count, 1)]
        power = power + numbers.integers(0, 5, count, 4).repeat_interleave(record.width // 4, 1)
        sizes = torch.exp2(power.double()).float()
        return (numbers.normal(count, record.width) * sizes).to(torch.bfloat16)

    keys = [vectors(count, KEY_POWERS) for count in entries]
    q = vectors(tokens * heads, powers).view(tokens, heads, record.width)
    weights = numbers.normal(tokens, heads).to(torch.bfloat16)
    return keys, round_trip(record, q), weights


def bf16(x: float) -> float:
    """The nearest bf16 number, by its bits."""
    if math.isnan(x) or math.isinf(x):
        return x
    bits = int(np.float32(x).view(np.uint32))
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))


def slow_score(q: Tensor, weights: Tensor, key: Tensor, *, rounded: bool) -> float:
    """Σ_h w_h · ReLU(q_h · k) of one query [heads, width] and one key, one number at a time."""
    products = []
    for head, weight in zip(q.tolist(), weights.tolist(), strict=True):
        dot = math.fsum(a * b for a, b in zip(head, key.tolist(), strict=True))
        dot = bf16(dot) if rounded else dot
        product = max(dot, 0.0) * weight
        products.append(bf16(product) if rounded else product)
    total = math.fsum(products)
    return bf16(total) if rounded else total


def slow_top_k(scores: Sequence[float], k: int) -> list[int]:
    """Sorted by (NaN last, score descending, index); the first k, ascending, then -1."""
    order = sorted(
        range(len(scores)),
        key=lambda i: (math.isnan(scores[i]), 0.0 if math.isnan(scores[i]) else -scores[i], i),
    )
    chosen = sorted(order[:k])
    return chosen + [-1] * (k - len(chosen))


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """How many bf16 numbers lie between two fp32 tensors of bf16 numbers."""

    def ordinal(x: Tensor) -> Tensor:
        bits = x.to(torch.bfloat16).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return (ordinal(a) - ordinal(b)).abs()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )
