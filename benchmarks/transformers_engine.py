"""Tokens per second of the engine over an accelerated model, beside `generate` called request by
request: five layers with V4-Flash's attention, random weights, few experts, prompts that share
nothing. Wall-clock times, prompts and host included.

    python -m benchmarks.transformers_engine > engine.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """New tokens per second. `generate` runs the requests one after the other on the accelerated
    model, `transformers` one of them on transformers' own cache."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    engine: float
    generate: float
    transformers: float


def measure(
    model: Any,
    requests: int,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    new_tokens: int = NEW_TOKENS,
) -> Throughput:
    """All three, after a warm-up each that compiles and captures. The model is left as it was."""
    generator = torch.Generator().manual_seed(requests)
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
        max_batch=max(requests, 2),
        max_context=prompt_tokens + new_tokens,
        max_step_tokens=STEP_TOKENS,
    )
    try:
        generate(prompts(1), few)
        sequential = _seconds(model, lambda: generate(prompts(requests), new_tokens))
        engine = Engine(model=model)

        def run(tokens: int) -> None:
            for text in prompts(requests):
                engine.submit(text, tokens)
            engine.run()

        run(few)
        together = _seconds(model, lambda: run(new_tokens))
    finally:
        restore(model)
    return Throughput(
        requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        engine=requests * new_tokens / together,
        generate=requests * new_tokens / sequential,
        transformers=new_tokens / plain,
    )


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
    options = parser.parse_args()
    model = make_model(device="cuda", dtype=torch.bfloat16)
    found = []
    for requests in options.requests:
        result = measure(
            model,
            requests,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
        )
        print(
            f"{requests} requests: engine {result.engine:.0f} tokens/s, generate one by one "
            f"{result.generate:.0f}, transformers' own cache {result.transformers:.0f}",
            file=sys.stderr,
        )
        found.append(asdict(result))
    json.dump({"device": torch.cuda.get_device_name(), "results": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
