"""Host time of a decode step: prepare_forward + commit for 256 requests, at two context lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.timing import Result
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec

REQUESTS = 256
STEPS = 200
TARGET_US = 300.0


def cases(device: str = "cuda") -> Iterator[Result]:
    # slots and blocks of the tiny model: the host's work is the same, the arenas are small
    model = ModelSpec.preset("tiny")
    for tokens, label in ((8192, "8k"), (1_048_576 - 2 * STEPS, "1M")):
        schema = CacheSchema.build(replace(model, max_context=1_048_576))
        manager = KVCacheManager(
            schema,
            num_blocks=4 * REQUESTS,
            max_requests=REQUESTS,
            max_step_tokens=REQUESTS,
            device=device,
        )
        requests = [manager.admit_request() for _ in range(REQUESTS)]
        blocks = tokens // schema.block_tokens
        for nth, request in enumerate(requests):  # as if they had been computed, phases apart
            request.length = blocks * schema.block_tokens + nth % schema.block_tokens
            request.block_ids = [0] * (blocks + 1)
            request.published_blocks = blocks + 1
        times = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            plan = manager.prepare_forward([(request, 1) for request in requests])
            manager.commit(plan)
            times.append((time.perf_counter() - begin) * 1e6)
        if device == "cuda":
            torch.cuda.synchronize()
        yield Result(
            case=f"host: plan + commit {REQUESTS} requests at {label}",
            microseconds=statistics.median(times),
            launches=0,
            must_move_bytes=manager.buffers.device_buffer.numel() * 4,
            target_us=TARGET_US,
        )


if __name__ == "__main__":
    for result in cases("cuda" if torch.cuda.is_available() else "cpu"):
        print(f"{result.case}: {result.microseconds:.0f} µs")
