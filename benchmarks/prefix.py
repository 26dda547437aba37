"""Host time of the prefix cache: admission with a full hit, and hashing, a block at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from benchmarks.case import Case, Measurement
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.trail import TokenTrail, chain_root, token_ids
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec

LONGEST = 1_048_576
CHUNK = 8192
REPEATS = 15
HASHED_BLOCKS = 1024
CONTEXTS = {131_072: ("128k", 5000.0), LONGEST: ("1M", 40_000.0)}  # label, target in µs


def cases(device: str = "cuda") -> Iterator[Case]:
    for context, (label, target_us) in CONTEXTS.items():
        yield Case(
            name=f"prefix: admit {label} tokens, full hit",
            suite="prefix",
            series=f"admit {label}, full hit",
            model="tiny",
            batch=1,
            context=context,
            measure=partial(measure_admission, context, device),
            target_us=target_us,
        )
    yield Case(
        name="prefix: hash a block of 128 tokens",
        suite="prefix",
        series="hash a block",
        model="tiny",
        batch=1,
        measure=measure_hashing,
    )


def measure_admission(context: int, device: str) -> Measurement:
    """A prompt comes a second time: ids as numpy, hash, look up, share, restore the snapshot."""
    # blocks and slots of the tiny model: the host's work is the same, the arenas are small
    schema = CacheSchema.build(replace(ModelSpec.preset("tiny"), max_context=LONGEST))
    manager = KVCacheManager(
        schema,
        num_blocks=context // schema.block_tokens + 1,
        max_requests=2,
        max_step_tokens=CHUNK,
        device=device,
        prefix=PrefixOptions(),
    )
    ids = np.random.default_rng(0).integers(0, 129_280, context, dtype=np.int64)
    request = manager.admit_request(ids)
    while request.length < context:  # as if it had been computed
        plan = manager.prepare_forward([(request, min(CHUNK, context - request.length))])
        if plan.batch.captures is not None:
            plan.batch.captures.layers.update(range(len(schema.layers)))
        plan.mark_appended(range(len(schema.layers)))
        manager.commit(plan)
    manager.release_request(request)

    def admit() -> None:
        found = manager.admit_request(ids)
        assert found.resume.start == (context - 1) // schema.block_tokens * schema.block_tokens
        manager.release_request(found)

    return Measurement(microseconds=_median_us(admit), launches=0, must_move_bytes=ids.nbytes)


def measure_hashing() -> Measurement:
    """One chain digest; must_move_bytes are the ids of a block."""
    block_tokens = 128
    root = chain_root(fingerprint="", model_id="", salt=None)
    ids = token_ids(np.arange(HASHED_BLOCKS * block_tokens))

    def hash_all() -> None:
        TokenTrail(root, block_tokens, ids).hash_blocks(HASHED_BLOCKS)

    microseconds = _median_us(hash_all) / HASHED_BLOCKS
    return Measurement(
        microseconds=microseconds,
        launches=0,
        must_move_bytes=ids.itemsize * block_tokens,
        note=f"{block_tokens / microseconds:.0f} M tokens a second",
    )


def _median_us(call: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    torch.set_num_threads(1)  # threads that wait for each other would be timed too
    for case in cases("cuda" if torch.cuda.is_available() else "cpu"):
        found = case.measure()
        print(f"{case.name}: {found.microseconds:,.1f} µs  {found.note}")
