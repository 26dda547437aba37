"""A small language model with random weights, for trying an engine or a loop without a checkpoint.

It stands in for yours in the README, the examples and the tests: a real embedding, attention of
every kind of layer on the cache, and a head, a few seconds on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsv4.extras import needed_by

with needed_by("dsv4.testing"):
    import torch
    from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import CompressorLayout
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.calls import CompressorWeights, LayerWeights
from dsv4.rope import apply_rope, rope_table

VOCABULARY = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer, and what it computes for the cache from its input `x` [tokens, hidden].

    `compressors` are the value and gate projections of its compressors; `cache` is what the cache
    itself applies.
    """

    spec: ModelSpec
    q: Tensor
    kv: Tensor
    compressors: list[Tensor]
    index_q: Tensor
    index_weights: Tensor
    sink: Tensor
    out: Tensor
    cache: LayerWeights

    @property
    def has_indexer(self) -> bool:
        return self.cache.index_compressor is not None

    def projections(self, x: Tensor) -> list[Tensor]:
        """The arguments of `append`: KV, then values and gates of each compressor."""
        kv = (x @ self.kv).bfloat16()
        return [kv, *((x @ weight).float() for weight in self.compressors)]

    def index_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The arguments of `select`: queries [tokens, index heads, index_dim], and their
        weights."""
        q = (x @ self.index_q).bfloat16().unflatten(1, (self.spec.index_heads, self.spec.index_dim))
        return q, (x @ self.index_weights).bfloat16()

    def queries(self, x: Tensor, batch: Batch) -> Tensor:
        """The queries of `attend`: [tokens, heads, head_dim], after norm and RoPE."""
        q = normed(_on_grid(x @ self.q).unflatten(1, (self.spec.heads, self.spec.head_dim)))
        return apply_rope(q.bfloat16(), self.cache.rope, batch.positions)

    def output(self, attended: Tensor) -> Tensor:
        return _on_grid(_on_grid(attended.double().flatten(1)) @ self.out)


class RandomModel:
    """A minimal language model around the cache: embedding, attention, head.

    Weights and states lie on a grid that is coarse compared with fp64, so sums are exact: no bit of
    a token's numbers depends on which tokens share its step. Draft layers are left out.
    """

    def __init__(
        self,
        schema: CacheSchema,
        device: torch.device | str = "cpu",
        *,
        vocabulary: int = VOCABULARY,
    ) -> None:
        self.schema, self.spec, self.device = schema, schema.model, torch.device(device)
        self._generator = torch.Generator().manual_seed(0)
        self.embedding = self._random(vocabulary, self.spec.hidden)
        self.head = self._random(self.spec.hidden, vocabulary)
        self.layers = [
            self._layer(n) for n, each in enumerate(schema.layers) if not each.spec.draft
        ]

    def logits(
        self, ids: Sequence[int] | Tensor, manager: KVCacheManager, plan: ForwardPlan
    ) -> Tensor:
        """[tokens, vocabulary] of the plan's tokens, which every layer writes to the cache."""
        hidden = self.embedding[ids]
        for number, layer in enumerate(self.layers):
            hidden = hidden + attention(layer, normed(hidden), manager.acquire(number, plan.batch))
        return normed(hidden) @ self.head

    def _layer(self, number: int) -> Layer:
        spec, kind = self.spec, self.schema.layers[number].spec
        main = self.schema.layout.compressor(number, "main")
        index = self.schema.layout.compressor(number, "index")
        cache = LayerWeights(
            rope=rope_table(
                spec, yarn=kind.yarn, tokens=self.schema.max_context, device=self.device
            ),
            compressor=self._compressor(main),
            index_compressor=self._compressor(index),
            kv_norm=torch.ones(spec.head_dim, device=self.device),  # `projections` gives raw KV
        )
        return Layer(
            spec=spec,
            q=self._random(spec.hidden, spec.heads * spec.head_dim),
            kv=self._random(spec.hidden, spec.head_dim),
            compressors=[
                self._random(spec.hidden, c.columns) for c in (main, index) if c for _ in range(2)
            ],
            index_q=self._random(spec.hidden, spec.index_heads * spec.index_dim),
            index_weights=self._random(spec.hidden, spec.index_heads),
            sink=torch.zeros(spec.heads, device=self.device),
            out=self._random(spec.heads * spec.head_dim, spec.hidden),
            cache=cache,
        )

    def _compressor(self, layout: CompressorLayout | None) -> CompressorWeights | None:
        if layout is None:
            return None
        ape = torch.randn(layout.ratio, layout.columns, generator=self._generator)
        return CompressorWeights(
            ape=ape.to(self.device), norm=torch.ones(layout.width, device=self.device)
        )

    def _random(self, rows: int, columns: int) -> Tensor:
        weight = torch.randn(rows, columns, generator=self._generator, dtype=torch.float64)
        return _on_grid(weight.div_(rows**0.5)).to(self.device)


def attention(layer: Layer, x: Tensor, handle: LayerCacheHandle) -> Tensor:
    """What one layer does with the cache: write the step's tokens, choose entries, read."""
    handle.append(*layer.projections(x), weights=layer.cache)
    indices = None
    if layer.has_indexer:
        indices = handle.select(*layer.index_queries(x), rope=layer.cache.rope)
    q = layer.queries(x, handle.open_batch())
    attended, _ = handle.attend(q, layer.sink, indices, inverse_rope=layer.cache.rope)
    return layer.output(attended)


def _on_grid(x: Tensor) -> Tensor:
    """Rounds to multiples of 2^-12."""
    return x.mul(4096).round_().div_(4096)


def normed(x: Tensor) -> Tensor:
    return _on_grid(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6))


# ---- for an engine -------------------------------------------------------------------------------


class EngineModel:
    """The same model as `dsv4.engine.Engine` runs it, on one manager.

    Its drafts are a cheap guess, made on the device: what followed a token when it last ran.
    """

    def __init__(self, manager: KVCacheManager, *, vocabulary: int = VOCABULARY) -> None:
        self.manager, self.vocabulary = manager, vocabulary
        self.model = RandomModel(manager.schema, manager.device, vocabulary=vocabulary)
        self._followers = torch.zeros(vocabulary, dtype=torch.int64, device=manager.device)

    def forward(self, plan: ForwardPlan, ids: Tensor, rows: Tensor) -> Tensor:
        logits = self.model.logits(ids, self.manager, plan)
        self._followers[ids] = logits.argmax(dim=-1)
        return logits[rows]

    def draft(self, plan: ForwardPlan, newest: Tensor, count: int) -> Tensor:
        guesses = [newest]
        for _ in range(count):
            guesses.append(self._followers[guesses[-1]])
        return torch.stack(guesses[1:], dim=1)
