"""Tokens per second of the engine over an accelerated model, compared with `generate` request by
request: five layers with V4-Flash's attention, random weights, few experts, prompts that share
nothing. Wall-clock times, prompts and host included.

    python -m benchmarks.transformers_engine > engine.json
    python -m benchmarks.transformers_engine --device cpu --small --requests 1 4 --new-tokens 8
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.transformers_decode import make_model
from dsv4.integrations.transformers import Engine, accelerate, restore

REQUESTS = (1, 16, 64)
PROMPT_TOKENS = 512
NEW_TOKENS = 128
WARM_UP_TOKENS = 4
STEP_TOKENS = 4096
SEQUENTIAL = 4  # one by one, more requests take longer and show nothing new
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_n_heads": 32,
    "index_head_dim": 32,
    "index_topk": 16,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """New tokens per second. `generate` runs requests one after the other on the accelerated model,
    SEQUENTIAL of them at most, `transformers` one request on transformers' own cache."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    engine: float
    generate: float
    transformers: float


def measure(
    model: Any,
    requests: Sequence[int],
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
) -> Iterator[Throughput]:
    """All three for a number of requests, after a warm-up each that compiles and captures. The
    model is left as it was."""
    generator = torch.Generator().manual_seed(0)
    few = min(WARM_UP_TOKENS, new_tokens)

    def prompts(count: int) -> list[torch.Tensor]:
        words = model.config.vocab_size
        return [torch.randint(words, (prompt_tokens,), generator=generator) for _ in range(count)]

    def generate(texts: list[torch.Tensor], tokens: int) -> None:
        for text in texts:
            ids = text[None].to(model.device)
            model.generate(ids, max_new_tokens=tokens, do_sample=False)

    generate(prompts(1), few)
    plain = _seconds(model, lambda: generate(prompts(1), new_tokens))
    accelerate(
        model,
        max_batch=max(*requests, 2),
        max_context=prompt_tokens + new_tokens,
        max_step_tokens=STEP_TOKENS,
    )
    try:
        generate(prompts(1), few)
        engine = Engine(model=model)

        def run(count: int, tokens: int) -> None:
            for text in prompts(count):
                engine.submit(text, tokens)
            engine.run()

        for count in requests:
            alone = min(count, SEQUENTIAL)
            sequential = _seconds(model, lambda: generate(prompts(alone), new_tokens))  # noqa: B023
            run(count, new_tokens)  # meets every batch size that the timed run has
            together = _seconds(model, lambda: run(count, new_tokens))  # noqa: B023
            yield Throughput(
                requests=count,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                engine=count * new_tokens / together,
                generate=alone * new_tokens / sequential,
                transformers=new_tokens / plain,
            )
    finally:
        restore(model)


def _seconds(model: Any, work: Callable[[], None]) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="a model for a CPU, of no meaning")
    options = parser.parse_args()
    device, changes = options.device, SMALL if options.small else {}
    began = time.perf_counter()
    model = make_model(device=device, dtype=torch.bfloat16, **changes)
    found = []
    for result in measure(
        model,
        options.requests,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
    ):
        print(
            f"{result.requests} requests: engine {result.engine:.0f} tokens/s, generate one by one "
            f"{result.generate:.0f}, transformers' own cache {result.transformers:.0f} "
            f"({time.perf_counter() - began:.0f} s so far)",
            file=sys.stderr,
        )
        found.append(asdict(result))
    name = torch.cuda.get_device_name() if model.device.type == "cuda" else device
    json.dump({"device": name, "results": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
