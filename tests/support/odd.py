"""A life on odd numbers: rows of zeros, of infinities and NaNs, tiny and large ones, norms of zero.
What is stored and what is selected is the same on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.calls import LayerWeights
from tests.support.numbers import Numbers
from tests.support.stack import Stack

CSA, HCA = 1, 2
TOKENS, STEPS, TOP_K = 60, (43, 1, 9), 5
SPECIAL = (float("inf"), -float("inf"), float("nan"))
FORMATS: tuple[dict[str, Any], ...] = (
    {},
    {"index_format": "nvfp4"},
    {"hca_state": "online"},
    {"entry_format": "bf16"},
)


def odd(x: Tensor, numbers: Numbers, *, special: bool = True) -> Tensor:
    """Most rows as they are; in place."""
    for row in x:
        kind = int(numbers.integers(0, 14, 1))
        if kind < 3:
            row *= 2.0 ** (-130, -100, 60)[kind]
        elif kind == 3:
            row.zero_()
        elif kind < 7 and special:
            row[int(numbers.integers(0, len(row), 1))] = SPECIAL[kind - 4]
    return x


def odd_life(seed: int, stacks: Sequence[Stack]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What each stack has stored, block and slot arenas, and what it selects in one more step."""
    results = []
    for stack in stacks:
        numbers = Numbers(seed)
        model = stack.schema.model
        stream = stack.stream(seed, TOKENS)
        for layer in (CSA, HCA):
            odd(stream.kv[layer], numbers)
            # where groups are folded as they come, sums of infinities have a machine's NaN
            folded = layer == HCA and stack.schema.hca_state == "online"
            for nth, projection in enumerate(stream.projections[layer]):
                if nth % 2 == 0:
                    odd(projection, numbers, special=not folded)
                else:
                    projection *= 2.0 ** int(numbers.integers(-20, 6, 1))
        if seed % 2:
            stack.weights = {k: _with_zero_norms(v) for k, v in stack.weights.items()}
        request = stack.manager.admit_request()
        for count in STEPS:
            stack.step([(request, stream, count)])
        q = odd(numbers.normal(model.index_heads, model.index_dim), numbers).to(torch.bfloat16)
        weights = numbers.normal(1, model.index_heads).to(torch.bfloat16)
        plan = stack.manager.prepare_forward([(request, 1)])
        stack.write(plan, [stream])
        selected = stack.manager.acquire(CSA, plan.batch).select(
            q[None].to(stack.device),
            weights.to(stack.device),
            rope=stack.weights[CSA].rope,
            top_k=TOP_K,
        )
        found = [
            selected,
            stack.manager.memory.block_arena.bytes,
            stack.manager.memory.slot_arena.bytes,
        ]
        results.append(tuple(each.cpu().clone() for each in found))
    return results  # type: ignore[return-value]


def odd_stack(seed: int, **options: Any) -> Stack:
    schema = CacheSchema.build(
        ModelSpec.preset("tiny"), max_context=512, **FORMATS[seed % len(FORMATS)]
    )
    return Stack(schema, layers=(CSA, HCA), max_requests=1, num_blocks=3, **options)


def _with_zero_norms(weights: LayerWeights) -> LayerWeights:
    changed = {}
    for name in ("compressor", "index_compressor"):
        part = getattr(weights, name)
        if part is not None:
            changed[name] = replace(part, norm=part.norm.clone())
            changed[name].norm[::2] = 0.0
    return replace(weights, **changed)
