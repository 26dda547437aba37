"""A decode loop without any framework, a few seconds on a CPU.

A model of random weights with layers of every kind generates greedily. Prompts are prefilled in
chunks, the last request joins while the others decode, and every decode step also checks draft
tokens: `commit` keeps those that the model chooses itself, the others vanish.

    python -m examples.decode_loop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsv4 import (
    Batch,
    CacheSchema,
    CompressorWeights,
    ForwardPlan,
    KVCacheManager,
    LayerCacheHandle,
    LayerWeights,
    ModelSpec,
    Request,
    apply_rope,
    rope_table,
)

VOCABULARY = 32
PROMPT_TOKENS = (150, 5, 130)
JOINS_AT_STEP = (0, 0, 6)
NEW_TOKENS = 24
CHUNK_TOKENS = 60
DRAFT_TOKENS = 3


# ---- the model -----------------------------------------------------------------------------------


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
        """As `append` takes them: KV, then values and gates of each compressor."""
        kv = (x @ self.kv).bfloat16()
        return [kv, *((x @ weight).float() for weight in self.compressors)]

    def index_queries(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """As `select` takes them: queries [tokens, index heads, index_dim], and their weights."""
        q = (x @ self.index_q).bfloat16().unflatten(1, (self.spec.index_heads, self.spec.index_dim))
        return q, (x @ self.index_weights).bfloat16()

    def queries(self, x: Tensor, batch: Batch) -> Tensor:
        """As `attend` takes them: [tokens, heads, head_dim], after norm and RoPE."""
        q = _normed(_on_grid(x @ self.q).unflatten(1, (self.spec.heads, self.spec.head_dim)))
        return apply_rope(q.bfloat16(), self.cache.rope, batch.positions)

    def output(self, attended: Tensor) -> Tensor:
        return _on_grid(_on_grid(attended.double().flatten(1)) @ self.out)


class Model:
    """The least around the cache that makes a language model: embedding, attention, head.

    Weights and states lie on a grid that is coarse beside fp64, so sums are exact: no bit of a
    token's numbers depends on which tokens share its step. Draft layers are left out.
    """

    def __init__(self, schema: CacheSchema) -> None:
        self.schema, self.spec = schema, schema.model
        self._generator = torch.Generator().manual_seed(0)
        self.embedding = self._random(VOCABULARY, self.spec.hidden)
        self.head = self._random(self.spec.hidden, VOCABULARY)
        self.layers = [
            self._layer(n) for n, each in enumerate(schema.layers) if not each.spec.draft
        ]

    def logits(self, ids: list[int] | Tensor, manager: KVCacheManager, plan: ForwardPlan) -> Tensor:
        """[tokens, vocabulary] of the plan's tokens, which every layer writes to the cache."""
        hidden = self.embedding[ids]
        for number, layer in enumerate(self.layers):
            hidden = hidden + attention(layer, _normed(hidden), manager.acquire(number, plan.batch))
        return _normed(hidden) @ self.head

    def _layer(self, number: int) -> Layer:
        spec, kind = self.spec, self.schema.layers[number].spec
        main = self.schema.compressor(number, "main")
        index = self.schema.compressor(number, "index")
        ape = [
            c and torch.randn(c.ratio, c.columns, generator=self._generator) for c in (main, index)
        ]
        return Layer(
            spec=spec,
            q=self._random(spec.hidden, spec.heads * spec.head_dim),
            kv=self._random(spec.hidden, spec.head_dim),
            compressors=[
                self._random(spec.hidden, c.columns) for c in (main, index) if c for _ in range(2)
            ],
            index_q=self._random(spec.hidden, spec.index_heads * spec.index_dim),
            index_weights=self._random(spec.hidden, spec.index_heads),
            sink=torch.zeros(spec.heads),
            out=self._random(spec.heads * spec.head_dim, spec.hidden),
            cache=LayerWeights(
                rope=rope_table(spec, yarn=kind.yarn, tokens=self.schema.max_context),
                compressor=main and CompressorWeights(ape=ape[0], norm=torch.ones(main.width)),
                index_compressor=index
                and CompressorWeights(ape=ape[1], norm=torch.ones(index.width)),
                kv_norm=torch.ones(spec.head_dim),  # kv is handed over raw
            ),
        )

    def _random(self, rows: int, columns: int) -> Tensor:
        weight = torch.randn(rows, columns, generator=self._generator, dtype=torch.float64)
        return _on_grid(weight.div_(rows**0.5))


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
    """To multiples of 2^-12."""
    return x.mul(4096).round_().div_(4096)


def _normed(x: Tensor) -> Tensor:
    return _on_grid(x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6))


# ---- the loop ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One request and its tokens: the prompt, then what was generated.

    [0, request.length)      in the cache
    [request.length, end)    known, not yet run: the rest of the prompt, or the newest token
    """

    request: Request
    tokens: list[int]
    prompt_tokens: int
    drafts_kept: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    def next_input(self) -> list[int]:
        """A chunk of the prompt, or the newest token with drafts behind it."""
        known = self.tokens[self.request.length :]
        return known[:CHUNK_TOKENS] if len(known) > 1 else known + self._drafts()

    def take(self, ids: list[int], chosen: list[int]) -> int:
        """Adds what the model chose behind `ids`. Returns how many of `ids` are right."""
        known = len(self.tokens) - self.request.length
        if len(ids) < known:
            return len(ids)
        right = known
        while right < len(ids) and ids[right] == chosen[right - 1]:
            right += 1
        self.tokens += chosen[known - 1 : right]
        self.drafts_kept += right - known
        return right

    def _drafts(self) -> list[int]:
        """A cheap guess: what followed when the newest token was last seen."""
        earlier = [at for at, token in enumerate(self.tokens[:-1]) if token == self.tokens[-1]]
        return self.tokens[earlier[-1] + 1 :][:DRAFT_TOKENS] if earlier else []


def run_step(model: Model, manager: KVCacheManager, live: Sequence[Generation]) -> None:
    """One forward pass over all live requests, whatever each of them is doing."""
    inputs = [generation.next_input() for generation in live]
    counts = [len(ids) for ids in inputs]
    plan = manager.prepare_forward(
        [(g.request, count) for g, count in zip(live, counts, strict=True)]
    )
    logits = model.logits([token for ids in inputs for token in ids], manager, plan)
    chosen = [best.tolist() for best in logits.argmax(dim=-1).split(counts)]
    manager.commit(plan, [g.take(*ids) for g, *ids in zip(live, inputs, chosen, strict=True)])


def generate(prompts: Sequence[list[int]], joins_at_step: Sequence[int]) -> list[Generation]:
    """Runs every prompt until it has NEW_TOKENS more. Prompt n joins at step joins_at_step[n]."""
    schema = CacheSchema.build(
        ModelSpec.preset("tiny"), max_draft_tokens=DRAFT_TOKENS, max_context=1024
    )
    manager = KVCacheManager(schema, num_blocks=12, max_requests=4, max_step_tokens=512)
    model = Model(schema)
    live: list[Generation] = []
    done: list[Generation] = []
    step = 0
    while len(done) < len(prompts):
        for prompt, joins_at in zip(prompts, joins_at_step, strict=True):
            if joins_at == step:
                request = manager.admit_request(len(prompt))
                live.append(
                    Generation(request=request, tokens=list(prompt), prompt_tokens=len(prompt))
                )
        run_step(model, manager, live)
        for generation in [g for g in live if len(g.generated) >= NEW_TOKENS]:
            manager.release_request(generation.request)
            live.remove(generation)
            done.append(generation)
        step += 1
    return done


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCABULARY, (count,), generator=generator).tolist() for count in PROMPT_TOKENS
    ]
    for generation in generate(prompts, JOINS_AT_STEP):
        print(
            f"prompt of {generation.prompt_tokens} tokens: {len(generation.generated)} generated, "
            f"{generation.drafts_kept} of them from drafts: {generation.generated[:12]} …"
        )


if __name__ == "__main__":
    main()
