"""The reference backend on a CPU: one prefill of 2,048 tokens and 64 decode steps.

    python -m benchmarks.laptop                 # tiny, and one layer of each kind of V4-Flash
    python -m benchmarks.laptop csa --profile   # one case, and where its time goes

A line per case and part: ms of one thread's processor time in append, select and attend, the least
of three runs: other work on the machine disturbs that little. The digest is of the arenas, of every
selection and of every output: two versions with the same numbers print the same.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections import defaultdict
from dataclasses import replace

import torch

from benchmarks.append import random_inputs, random_weights
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec, v4_layers
from dsv4.ops.calls import LayerWeights
from dsv4.rope import rope_table

PREFILL_TOKENS, DECODE_STEPS, RUNS = 2048, 64, 3
PARTS = ("append", "select", "attend")
FLASH = ModelSpec.preset("v4-flash")


def schemas() -> dict[str, CacheSchema]:
    """The tiny model, and models of one V4-Flash layer."""
    context = 2 * PREFILL_TOKENS
    alone = {
        name: replace(FLASH, layers=v4_layers([ratio], backbone=1), max_context=context)
        for name, ratio in (("window", 0), ("csa", 4), ("hca", 128))
    }
    return {
        "tiny": CacheSchema.build(ModelSpec.preset("tiny"), max_context=context),
        **{name: CacheSchema.build(model) for name, model in alone.items()},
        "hca folded": CacheSchema.build(alone["hca"], hca_state="online"),
    }


class Laptop:
    """One request, and what its steps took."""

    def __init__(self, schema: CacheSchema) -> None:
        torch.manual_seed(0)
        self.schema, self.model = schema, schema.model
        self.manager = KVCacheManager(
            schema,
            num_blocks=schema.max_blocks_per_request,
            max_requests=1,
            max_step_tokens=PREFILL_TOKENS,
            backend="reference",
        )
        self.request: Request = self.manager.admit_request()
        self.layers = [layer.layer for layer in self.model.layers if not layer.draft]
        self.weights = [self._weights(layer) for layer in self.layers]
        self.seen = hashlib.sha256()

    def _weights(self, layer: int) -> LayerWeights:
        yarn, tokens = self.model.layers[layer].yarn, self.schema.max_context
        rope = rope_table(self.model, yarn=yarn, tokens=tokens)
        made = random_weights(self.schema, layer, rope, "cpu")
        return replace(made, kv_norm=torch.randn(self.model.head_dim))

    def step(self, tokens: int) -> dict[str, float]:
        """Runs a step of this many tokens through all layers; seconds by part."""
        took: dict[str, float] = defaultdict(float)
        begun = 0.0

        def now(part: str) -> None:
            nonlocal begun
            before, begun = begun, time.thread_time()
            took[part] += begun - before

        plan = self.manager.prepare_forward([(self.request, tokens)])
        for layer, weights in zip(self.layers, self.weights, strict=True):
            handle, model = self.manager.acquire(layer, plan.batch), self.model
            inputs = random_inputs(self.schema, layer, tokens, "cpu")
            q = torch.randn(tokens, model.heads, model.head_dim).bfloat16()
            index_q = torch.randn(tokens, model.index_heads, model.index_dim).bfloat16()
            index_weights = torch.randn(tokens, model.index_heads).bfloat16()
            sink, chosen = torch.randn(model.heads), None
            begun = time.thread_time()
            handle.append(*inputs, weights=weights)
            now("append")
            if model.layers[layer].index_keys != "none":
                chosen = handle.select(index_q, index_weights, rope=weights.rope)
                now("select")
            out, lse = handle.attend(q, sink, chosen, inverse_rope=weights.rope)
            now("attend")
            for result in (chosen, out, lse):
                self.saw(result)
        self.manager.commit(plan)
        return took

    def saw(self, result: torch.Tensor | None) -> None:
        if result is not None:
            self.seen.update(result.contiguous().view(torch.uint8).numpy().tobytes())

    def digest(self) -> str:
        self.saw(self.manager.memory.block_arena.bytes)
        self.saw(self.manager.memory.slot_arena.bytes)
        return self.seen.hexdigest()[:16]


def measure(name: str, schema: CacheSchema, *, runs: int) -> None:
    least: dict[tuple[str, str], float] = defaultdict(lambda: float("inf"))
    for _ in range(runs):
        laptop = Laptop(schema)
        took = {("prefill", part): s for part, s in laptop.step(PREFILL_TOKENS).items()}
        for _ in range(DECODE_STEPS):
            for part, seconds in laptop.step(1).items():
                took["decode", part] = took.get(("decode", part), 0.0) + seconds
        for key, seconds in took.items():
            least[key] = min(least[key], seconds)
    for phase in ("prefill", "decode"):
        parts = {part: 1e3 * least[phase, part] for part in PARTS if (phase, part) in least}
        told = "  ".join(f"{part} {ms:8.1f}" for part, ms in parts.items())
        print(f"{name:12} {phase:8} {told}  total {sum(parts.values()):8.1f} ms", flush=True)
    print(f"{name:12} digest   {laptop.digest()}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the reference backend on this CPU.")
    parser.add_argument("cases", nargs="*", help=", ".join(schemas()))
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread")
    for name, schema in schemas().items():
        if chosen.cases and name not in chosen.cases:
            continue
        if not chosen.profile:
            measure(name, schema, runs=RUNS)
            continue
        with torch.profiler.profile() as profile:
            measure(name, schema, runs=1)
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


if __name__ == "__main__":
    main()
