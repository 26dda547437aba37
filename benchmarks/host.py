"""Host time of a decode step: prepare_forward + commit for 256 requests, at two context lengths,
plain and with prefix cache, ids and drafts; and of launching its layers eagerly, per launch.

Steps of both lengths take turns, so that whatever else the machine does falls on both alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from random import Random

import numpy as np
import torch

from benchmarks.case import Case, Measurement
from benchmarks.decode_step import PARTS, DecodeStep
from benchmarks.lengths import set_length
from benchmarks.timing import time_graph
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec

REQUESTS = 256
STEPS = 200
WARM_UP_STEPS = 400  # a processor that idled takes a while to reach its clock
TARGET_US = 300.0
LONGEST = 1_048_576
CONTEXTS = {8192: "8k", LONGEST: "1M"}
DRAFTS, DRAFT_CONTEXTS = 3, {2048: "2k", LONGEST: "1M"}
DRAFT_TARGET_US = 200.0
LAUNCH_BATCH, LAUNCH_CONTEXT, LAUNCH_STEPS = 16, 8192, 30
LAUNCH_TARGET_US = 25.0


def cases(device: str = "cuda") -> Iterator[Case]:
    told = f" with ids and {DRAFTS} drafts"
    for contexts, name, series, measure, target_us in (
        (CONTEXTS, "", "", _measure, TARGET_US),
        (DRAFT_CONTEXTS, told, " with ids and drafts", _measure_drafts, DRAFT_TARGET_US),
    ):
        for context, label in contexts.items():
            yield Case(
                name=f"host: plan + commit {REQUESTS} requests{name} at {label}",
                suite="host",
                series=f"plan + commit{series} at {label}",
                model="tiny",
                batch=REQUESTS,
                context=context,
                measure=partial(measure, context, device),
                target_us=target_us,
            )

    if device == "cuda":
        for part in PARTS:
            yield Case(
                name=f"host: eager {part} of v4-flash, per launch",
                suite="host",
                series=f"eager {part}",
                model="v4-flash",
                batch=LAUNCH_BATCH,
                context=LAUNCH_CONTEXT,
                measure=partial(_measure_launches, part),
                target_us=LAUNCH_TARGET_US,
            )


@cache
def _launched_step() -> DecodeStep:
    step = DecodeStep(
        ModelSpec.preset("v4-flash"), batch=LAUNCH_BATCH, context=LAUNCH_CONTEXT, device="cuda"
    )
    step.run(PARTS)
    return step


def _measure_launches(part: str) -> Measurement:
    """What the host takes for one launch while the GPU lags behind; the queue is never full."""
    step = _launched_step()
    run = partial(_select, step) if part == "select" else partial(step.run, (part,))
    launches = time_graph([run], calls_a_graph=1).launches
    times = []
    for _ in range(LAUNCH_STEPS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return Measurement(
        microseconds=statistics.median(times) / launches, launches=1, must_move_bytes=0
    )


def _select(step: DecodeStep) -> None:
    """As engines select: queries are prepared too, in place, so they are others each time."""
    for layer in step.selecting_layers:
        rope = step.weights[layer].rope
        step.handles[0, layer].select(step.raw_index_q, step.index_weights, step.chosen, rope=rope)


def _measure(context: int, device: str) -> Measurement:
    return _measure_all(device)[context]


@cache
def _measure_all(device: str) -> dict[int, Measurement]:
    made = {context: decoding_requests(context, REQUESTS, device) for context in CONTEXTS}
    times: dict[int, list[float]] = {context: [] for context in CONTEXTS}
    for _ in range(WARM_UP_STEPS + STEPS):
        for context, (manager, requests) in made.items():
            begin = time.perf_counter()
            plan = manager.prepare_forward([(request, 1) for request in requests])
            plan.mark_appended()
            manager.commit(plan)
            times[context].append((time.perf_counter() - begin) * 1e6)
    if device == "cuda":
        torch.cuda.synchronize()
    return {
        context: Measurement(
            microseconds=statistics.median(times[context][WARM_UP_STEPS:]),
            launches=0,
            must_move_bytes=manager.memory.buffers.device_buffer.numel() * 4,
        )
        for context, (manager, _) in made.items()
    }


def _measure_drafts(context: int, device: str) -> Measurement:
    return _measure_all_drafts(device)[context]


@cache
def _measure_all_drafts(device: str) -> dict[int, Measurement]:
    made = {context: drafting_requests(context, REQUESTS, device) for context in DRAFT_CONTEXTS}
    times: dict[int, list[float]] = {context: [] for context in DRAFT_CONTEXTS}
    draw, ids = Random(0), np.arange((1 + DRAFTS) * REQUESTS, dtype=np.int32)
    for _ in range(WARM_UP_STEPS + STEPS):
        accepted = np.array([draw.randint(1, 1 + DRAFTS) for _ in range(REQUESTS)])
        for context, (manager, requests) in made.items():
            begin = time.perf_counter()
            plan = manager.prepare_forward([(request, 1 + DRAFTS) for request in requests])
            plan.mark_appended()
            manager.commit(plan, accepted, ids=ids)
            times[context].append((time.perf_counter() - begin) * 1e6)
    if device == "cuda":
        torch.cuda.synchronize()
    return {
        context: Measurement(
            microseconds=statistics.median(times[context][WARM_UP_STEPS:]),
            launches=0,
            must_move_bytes=manager.memory.buffers.device_buffer.numel() * 4,
        )
        for context, (manager, _) in made.items()
    }


def drafting_requests(
    context: int, count: int, device: str, *, steps: int = WARM_UP_STEPS + STEPS
) -> tuple[KVCacheManager, list[Request]]:
    """Requests as `decoding_requests` makes them, whose ids are known and whose last whole block is
    cached, with room for a number of steps."""
    schema = CacheSchema.build(
        replace(ModelSpec.preset("tiny"), max_context=LONGEST), max_draft_tokens=DRAFTS
    )
    most = steps * (1 + DRAFTS)
    manager = KVCacheManager(
        schema,
        num_blocks=count * (3 + most // schema.block_tokens),
        max_requests=count,
        max_step_tokens=count * (1 + DRAFTS),
        device=device,
        prefix=PrefixOptions(),
    )
    assert manager._parts.prefix
    blocks = min(context, LONGEST - most - schema.block_tokens) // schema.block_tokens
    blocks -= blocks % 8  # in phase with snapshots
    ids = np.zeros((blocks + 1) * schema.block_tokens + most, dtype=np.int32)
    requests = []
    for nth in range(count):
        request = manager.admit_request([], salt=str(nth))
        requests.append(request)
        length = blocks * schema.block_tokens + nth % schema.block_tokens
        manager.room.extend(request, schema.block_tokens + 1)
        cached, unfinished = request.block_ids
        trail = manager._parts.prefix.trail(
            ids, str(nth)
        )  # all write to the same ids: digests differ
        trail.chain[:] = [trail.root] * blocks
        trail.cut(length)
        request.trail = trail
        manager._parts.prefix.index.add(trail.root, cached, None)
        request.block_ids = [cached] * blocks + [unfinished]
        request.published_blocks = blocks + 1
        set_length(manager, request, length)
    return manager, requests


def decoding_requests(
    context: int, count: int, device: str
) -> tuple[KVCacheManager, list[Request]]:
    """Requests of about this many tokens, as if they had been computed, in different phases. The
    model is the tiny one: the host's work is the same, the arenas are small."""
    schema = CacheSchema.build(replace(ModelSpec.preset("tiny"), max_context=LONGEST))
    manager = KVCacheManager(
        schema,
        num_blocks=8 * count,
        max_requests=count,
        max_step_tokens=count,
        device=device,
    )
    requests = [manager.admit_request() for _ in range(count)]
    blocks = min(context, LONGEST - 2 * (WARM_UP_STEPS + STEPS)) // schema.block_tokens
    for nth, request in enumerate(requests):
        length = blocks * schema.block_tokens + nth % schema.block_tokens
        set_length(manager, request, length)
        request.block_ids = [0] * (blocks + 1)
        request.published_blocks = blocks + 1
    return manager, requests


if __name__ == "__main__":
    for case in cases("cuda" if torch.cuda.is_available() else "cpu"):
        print(f"{case.name}: {case.measure().microseconds:.0f} µs")
