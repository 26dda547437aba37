"""The same model on the cache, as `dsv4.engine.Engine` runs it."""

from __future__ import annotations

from dsv4.extras import needed_by

with needed_by("the demo model"):
    import torch
    from torch import Tensor

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema
from dsv4.demo_model.network import Block, Network
from dsv4.errors import SchemaMismatch
from dsv4.ops.calls import CompressorWeights, LayerWeights
from dsv4.rope import apply_rope

_VALUES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class CachedModel:
    """One network on one manager, whose schema is that of `network.spec`; any record formats will
    do. Raises SchemaMismatch for the schema of another model.

    It computes on the CPU; no bit of a token's logits depends on which tokens share its step. Its
    drafts are a cheap guess: what followed a token when it last ran.
    """

    def __init__(self, network: Network, manager: KVCacheManager) -> None:
        schema = manager.schema
        if schema.model.layers != network.spec.layers or schema.model.hidden != network.spec.hidden:
            raise SchemaMismatch(
                f"the cache was laid out for {schema.model.name}, not for this model: lay it out "
                f"with CacheSchema.build(network.spec)"
            )
        self.network, self.manager = network.exact(), manager
        self._layers = [CachedLayer(block, schema) for block in self.network.blocks]
        self._followers = torch.zeros(network.vocabulary, dtype=torch.int64)

    @property
    def vocabulary(self) -> int:
        return self.network.vocabulary

    @torch.no_grad()
    def forward(self, plan: ForwardPlan, ids: Tensor, rows: Tensor) -> Tensor:
        hidden = self.network.embed(ids)
        for number, layer in enumerate(self._layers):
            handle = self.manager.acquire(number, plan.batch)
            x = layer.block.attention_input(hidden)
            hidden = hidden + layer.attention(x, handle)
            hidden = hidden + layer.block.feed_forward(hidden)
        logits = self.network.logits(hidden[rows])
        self._followers[ids[rows]] = logits.argmax(dim=-1)
        return logits

    def draft(self, plan: ForwardPlan, newest: Tensor, count: int) -> Tensor:
        guesses = [newest]
        for _ in range(count):
            guesses.append(self._followers[guesses[-1]])
        return torch.stack(guesses[1:], dim=1)


class CachedLayer:
    """A layer, and the types that its records are made of."""

    def __init__(self, block: Block, schema: CacheSchema) -> None:
        self.block = block
        number, weights = block.spec.layer, block.attention
        main, index = (
            schema.layout.compressor(number, "main"),
            schema.layout.compressor(number, "index"),
        )
        self._values = _VALUES[schema.entry_format.value_dtype]
        self._keys = None if index is None else _VALUES[schema.index_format.value_dtype]
        self._cache = LayerWeights(
            rope=block.rope[: schema.max_context],
            compressor=None if main is None else _compressor(weights, "compressor"),
            index_compressor=None if index is None else _compressor(weights, "compressor.indexer"),
            kv_norm=weights["kv_norm"],
        )

    def attention(self, x: Tensor, handle: LayerCacheHandle) -> Tensor:
        """Writes the step's tokens, chooses entries, reads."""
        block, rope = self.block, self._cache.rope
        parts: list[Tensor] = []
        if self._cache.compressor is not None:
            parts += block.pooled(x, "compressor")
        if self._cache.index_compressor is not None:
            parts += block.pooled(x, "compressor.indexer")
        handle.append(block.kv(x).to(self._values), *parts, weights=self._cache)
        residual, indices = block.residual(x), None
        if self._keys is not None:
            q, per_head = (each.to(self._keys) for each in block.index_queries(x, residual))
            indices = handle.select(q, per_head, rope=rope, round_bf16=self._keys == torch.bfloat16)
        q = block.queries(residual).to(self._values)
        q = apply_rope(q, rope, handle.open_batch().positions)
        sinks = block.attention["sinks"]
        attended, _ = handle.attend(q, sinks, indices, inverse_rope=rope)
        return block.output(attended.float())


def _compressor(weights: dict[str, Tensor], name: str) -> CompressorWeights:
    return CompressorWeights(ape=weights[f"{name}.position_bias"], norm=weights[f"{name}.kv_norm"])
