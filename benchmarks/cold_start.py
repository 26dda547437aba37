"""How long a server waits for kernels: `warmup` of V4-Flash and V4-Pro into an empty cache, and
again in a new process from what the first one has left.

    python -m benchmarks.cold_start [v4-flash | v4-pro]

prints, for each case, the number of kernels, the seconds of `warmup`, and those of a first step
of decode afterwards, which asks the compiler for nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

from benchmarks.decode_step import PARTS, DecodeStep
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec

CASES = (("v4-flash", 64, 131_072), ("v4-flash", 16, 131_072), ("v4-pro", 128, 131_072))
ARENA_BYTES = 4_000_000_000
FIRST_TARGET_S, SECOND_TARGET_S = 30.0, 3.0


def measure(model: str, heads: int, context: int) -> dict[str, Any]:
    """In this process, whatever Triton's cache holds."""
    from triton import knobs

    compiled: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
    torch.cuda.init()
    schema = CacheSchema.build(ModelSpec.preset(model), max_context=context)
    manager = KVCacheManager(
        schema, num_blocks=64, max_requests=64, max_step_tokens=8192, device="cuda"
    )
    torch.cuda.synchronize()
    begin = time.perf_counter()
    kernels = manager.warmup(heads=heads, kv_norm=False)
    seconds = time.perf_counter() - begin
    found = {"kernels": kernels, "warmup_s": seconds, "compiled_here": sum(compiled)}
    if heads == schema.model.heads:
        found |= _first_step(schema.model, context, compiled)
    return found


def _first_step(model: ModelSpec, context: int, compiled: list[bool]) -> dict[str, Any]:
    """The first step of a smaller manager, whose kernels are the same."""
    step = DecodeStep(
        model, batch=16, context=context, device="cuda", block_arena_bytes=ARENA_BYTES
    )
    compiled.clear()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    step.run(PARTS)
    torch.cuda.synchronize()
    return {"first_decode_s": time.perf_counter() - begin, "asked_then": len(compiled)}


def main() -> None:
    if len(sys.argv) == 4:  # this file's own process of one case
        model, heads, context = sys.argv[1:]
        print(json.dumps(measure(model, int(heads), int(context))))
        return
    for model, heads, context in CASES:
        if sys.argv[1:] not in ([], [model]):
            continue
        with tempfile.TemporaryDirectory() as cache:
            for run, target in (("first", FIRST_TARGET_S), ("second", SECOND_TARGET_S)):
                environment = {**os.environ, "TRITON_CACHE_DIR": cache}
                case = (model, str(heads), str(context))
                done = subprocess.run(
                    [sys.executable, "-m", "benchmarks.cold_start", *case],
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                found = json.loads(done.stdout.splitlines()[-1])
                reached = "reached" if found["warmup_s"] <= target else f"missed {target:.0f} s"
                print(f"{model} {heads} heads, {run} time: {found} {reached}", flush=True)


if __name__ == "__main__":
    main()
