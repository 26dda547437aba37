"""docs/layout.md, tensor parallelism: a rank keeps the whole cache and attends with its heads."""

from __future__ import annotations

import pytest
import torch

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from tests.support.numbers import Numbers
from tests.support.stack import Stack

TINY = ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 1, 2
TOKENS = 140


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_attend_with_their_heads_over_the_same_bytes(layer: int, ranks: int):
    numbers = Numbers(layer)
    q = numbers.normal(TOKENS, TINY.heads, TINY.head_dim).bfloat16()
    sink = numbers.normal(TINY.heads)
    indices = None
    if layer == CSA:
        indices = numbers.integers(0, TOKENS // 4, TOKENS, 6).int()
    schema = CacheSchema.build(TINY, max_context=512)

    def attended(heads: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        stack = Stack(schema, layers=[layer])
        request, stream = stack.manager.admit_request(), stack.stream(0, TOKENS)
        plan = stack.manager.prepare_forward([(request, TOKENS)])
        stack.write(plan, [stream])
        handle = stack.manager.acquire(layer, plan.batch)
        out, lse = handle.attend(q[:, heads].contiguous(), sink[heads].contiguous(), indices)
        return out, lse, stack.manager.memory.slot_arena.bytes

    out, lse, slots = attended(slice(None))
    share = TINY.heads // ranks
    assert share >= 1
    for rank in range(ranks):
        heads = slice(rank * share, (rank + 1) * share)
        found, found_lse, found_slots = attended(heads)
        # logits an ulp apart may round a weight to the bf16 number beside: 2^-9 of its share
        torch.testing.assert_close(found, out[:, heads], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(found_lse, lse[:, heads], rtol=1e-5, atol=1e-5)
        assert torch.equal(found_slots, slots)
