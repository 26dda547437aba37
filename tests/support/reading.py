"""Queries for tests/support/stack.py: like projections, they depend only on (stream, position)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.prepare_forward import ForwardPlan
from tests.support.numbers import Numbers
from tests.support.stack import Stack, batch_of


@dataclass
class Queries:
    """Attention and indexer queries of every token that one request might ever see."""

    q: Tensor
    index_q: Tensor
    index_weights: Tensor


def queries(stack: Stack, seed: int, tokens: int, *, heads: int | None = None) -> Queries:
    model = stack.schema.model
    numbers = Numbers(7_000_001 + seed)

    def random(*shape: int) -> Tensor:
        return numbers.normal(*shape).to(torch.bfloat16).to(stack.device)

    return Queries(
        q=random(tokens, heads or model.heads, model.head_dim),
        index_q=random(tokens, model.index_heads, model.index_dim),
        index_weights=random(tokens, model.index_heads),
    )


def sink(stack: Stack, heads: int | None = None) -> Tensor:
    return _sinks(heads or stack.schema.model.heads, stack.device)


@cache
def _sinks(count: int, device: str | torch.device) -> Tensor:
    """Made once: a graph that is being captured takes no copies from the host."""
    return torch.linspace(-1.0, 2.0, count).to(device)


def rows(plan: ForwardPlan | Batch, tensors: Sequence[Tensor]) -> Tensor:
    """The plan's rows of per-token tensors; padding rows are NaN."""
    pieces = [
        t[a : a + n]
        for t, a, n in zip(tensors, plan.starts.tolist(), plan.counts.tolist(), strict=True)
    ]
    padding = (batch_of(plan).padded_tokens - plan.num_tokens, *tensors[0].shape[1:])
    like = tensors[0]
    pieces.append(torch.full(padding, float("nan"), dtype=like.dtype, device=like.device))
    return torch.cat(pieces)


def read(
    stack: Stack, plan: ForwardPlan | Batch, layer: int, asked: Sequence[Queries]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, log-sum-exp and, on a CSA layer, the selection of one layer's step."""
    handle = stack.manager.acquire(layer, batch_of(plan))
    table = stack.weights[layer].rope
    selection = None
    if handle.schema.spec.index_keys != "none":
        selection = handle.select(
            rows(plan, [a.index_q for a in asked]),
            rows(plan, [a.index_weights for a in asked]),
            rope=table,
        )
    q = rows(plan, [a.q for a in asked])
    out, lse = handle.attend(q, sink(stack, q.shape[1]), selection, inverse_rope=table)
    return out, lse, selection
