"""On a GPU: after `warmup` no step compiles or loads a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.model import AttentionType, ModelSpec
from dsv4.ops.calls import CompressorWeights, LayerWeights
from dsv4.rope import rope_table

pytestmark = pytest.mark.gpu

REQUESTS, CONTEXT, MOST_TOKENS = 70, 2048, 512


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Every kernel that Triton compiles or finds in its cache on disk."""
    seen: list[str] = []

    def listener(*, src: Any, **_: Any) -> None:
        seen.append(src.name)

    before, knobs.compilation.listener = knobs.compilation.listener, listener
    yield seen
    knobs.compilation.listener = before


class Engine:
    """Layers of every sort, fed with zeros."""

    def __init__(self, model: ModelSpec, heads: int) -> None:
        few = replace(model, layers=model.layers[:5])
        self.schema = CacheSchema.build(few, max_context=CONTEXT, max_draft_tokens=3)
        self.manager = KVCacheManager(
            self.schema,
            num_blocks=2 * REQUESTS * self.schema.blocks_for(CONTEXT) // 4,
            max_requests=REQUESTS,
            max_step_tokens=MOST_TOKENS,
            device="cuda",
        )
        self.model, self.heads = few, heads
        tables = {
            yarn: rope_table(few, yarn=yarn, tokens=CONTEXT, device="cuda")
            for yarn in (False, True)
        }
        self.weights = [self._weights(layer, tables) for layer in range(len(few.layers))]

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    def _weights(self, layer: int, tables: dict[bool, Tensor]) -> LayerWeights:
        def of(kind: str) -> CompressorWeights | None:
            layout = self.schema.layout.compressor(layer, kind)  # type: ignore[arg-type]
            if layout is None:
                return None
            ape = self.new(layout.ratio, layout.columns)
            return CompressorWeights(ape=ape, norm=self.new(layout.width))

        return LayerWeights(
            rope=tables[self.model.layers[layer].yarn],
            compressor=of("main"),
            index_compressor=of("index"),
            kv_norm=self.new(self.model.head_dim),
        )

    def step(self, work: list[tuple[Any, int]], **padding: int) -> None:
        model, plan = self.model, self.manager.prepare_forward(work, **padding)
        rows = plan.batch.padded_tokens
        for layer, weights in enumerate(self.weights):
            handle = self.manager.acquire(layer, plan.batch)
            layouts = (handle.memory.compressor, handle.memory.index_compressor)
            projections = [
                self.new(rows, layout.columns) for layout in layouts if layout for _ in range(2)
            ]
            kv = self.new(rows, model.head_dim, dtype=torch.bfloat16)
            handle.append(kv, *projections, weights=weights)
            chosen = None
            if handle.schema.spec.attention is AttentionType.CSA:
                q = self.new(rows, model.index_heads, model.index_dim, dtype=torch.bfloat16)
                scales = self.new(rows, model.index_heads, dtype=torch.bfloat16)
                chosen = handle.select(q, scales, rope=weights.rope)
            q = self.new(rows, self.heads, model.head_dim, dtype=torch.bfloat16)
            handle.attend(q, self.new(self.heads), chosen, inverse_rope=weights.rope)
        self.manager.commit(plan)


@pytest.mark.parametrize(("model", "heads"), [("v4-flash", 64), ("v4-flash", 16)])
def test_no_step_compiles_anything_after_warmup(
    model: str, heads: int, compiled: list[str]
) -> None:
    engine = Engine(ModelSpec.preset(model), heads)
    asked = engine.manager.warmup(heads=heads)
    first = len(compiled)
    assert asked >= first > 10  # some were compiled for another number of heads
    assert engine.manager.warmup(heads=heads) == asked
    assert len(compiled) == first  # nothing is asked for twice
    compiled.clear()
    random = Random(5)
    rollback = engine.schema.max_rollback_tokens
    for batch in (1, 2, 3, 5, 16, 33, 64, 70, *(random.randint(1, REQUESTS) for _ in range(8))):
        requests = [engine.manager.admit_request() for _ in range(batch)]
        engine.step([(requests[0], random.randint(rollback + 1, 400))])
        engine.step([(each, random.randint(1, MOST_TOKENS // batch)) for each in requests])
        for _ in range(4):
            engine.step([(each, 1) for each in requests])
        engine.step([(each, random.randint(1, rollback)) for each in requests])
        engine.step([(each, 1) for each in requests], pad_tokens=128, pad_requests=REQUESTS)
        for each in requests:
            engine.manager.release_request(each)
    torch.cuda.synchronize()
    assert compiled == []
