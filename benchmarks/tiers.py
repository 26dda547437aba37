"""Between the device and its tiers: rows up and down compared with one plain copy of as many bytes,
a decode step with rows on their way down, and a long prefix that comes back and is not computed.

The time to compute the prefix is measured too, as far as the cache's part goes: append,
select and attend of every layer, chunk by chunk. A model has more to do.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.append import random_inputs, random_weights
from benchmarks.case import Case, Measurement
from benchmarks.decode_step import PARTS, DecodeStep
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, periodic
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.transfers.copies import Copies
from dsv4.cache.transfers.worker import Outgoing
from dsv4.model import AttentionType, ModelSpec
from dsv4.rope import rope_table
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind, Label
from dsv4.tiers.tier import Limits, Tier

MODEL = "v4-flash"
ROWS = 256  # copied at a time
REPEATS = 9
STEP_BATCH, STEP_CONTEXT, STEPS = 64, 8192, 200
PREFIX_TOKENS, CHUNK = 131_072, 4096
TIMEOUT_S = 120.0
Below = Literal["host", "disk"]
_serial = count()


def cases(device: str = "cuda") -> Iterator[Case]:
    model = ModelSpec.preset(MODEL)
    for way in ("down", "up"):
        yield Case(
            name=f"tiers: {ROWS} blocks {way}, host memory",
            suite="tiers",
            series=f"blocks {way}",
            model=MODEL,
            batch=ROWS,
            measure=partial(measure_copies, model, way, device),
        )
    yield Case(
        name=f"tiers: step at 8k batch {STEP_BATCH}, written through",
        suite="tiers",
        series="step, written through",
        model=MODEL,
        batch=STEP_BATCH,
        context=STEP_CONTEXT,
        measure=partial(measure_step, model, device),
    )
    for below in ("host", "disk"):
        yield Case(
            name=f"tiers: 128k tokens back from {below}",
            suite="tiers",
            series=f"prefix from {below}",
            model=MODEL,
            batch=1,
            context=PREFIX_TOKENS,
            measure=partial(measure_prefix, model, below, PREFIX_TOKENS, device),
        )


def measure_copies(
    model: ModelSpec, way: Literal["down", "up"], device: str, rows: int = 0
) -> Measurement:
    """Row by row, as blocks are written through and fetched; compared with one copy of all of
    them."""
    rows = rows or ROWS
    schema = CacheSchema.build(model)
    arena = torch.ones((rows, schema.bytes.block), dtype=torch.uint8, device=device)
    manager = _manager(schema, 1, device, [tier := _host(schema, rows)])
    assert manager.tiers
    labels = [_label(manager) for _ in range(rows)]
    taken = [row for label in labels if (row := tier.take(label)) is not None]
    assert len(taken) == rows
    copies = Copies(torch.device(device), tier.region.memory)
    pairs = [(arena[nth], row.parts) for nth, row in enumerate(taken)]
    move = copies.down if way == "down" else copies.up
    plain = torch.frombuffer(tier.region.memory, dtype=torch.uint8)[: arena.numel()].view_as(arena)
    target, source = (plain, arena) if way == "down" else (arena, plain)

    def by_row() -> None:
        move(pairs).wait()

    def at_once() -> None:
        target.copy_(source, non_blocking=True)
        _wait(device)

    ours, theirs = _median_us(by_row, device), _median_us(at_once, device)
    return Measurement(
        microseconds=ours,
        launches=rows,
        must_move_bytes=arena.numel(),
        peers_us={"one plain copy": theirs},
        note=f"{arena.numel() / ours / 1e3:.1f} GB/s, {theirs / ours:.0%} of a plain copy",
    )


def measure_step(
    model: ModelSpec, device: str, *, batch: int = 0, context: int = 0, steps: int = 0
) -> Measurement:
    """Decode steps with a block on its way down in each, twice of what such a batch completes, and
    the same steps without."""
    batch, context, steps = batch or STEP_BATCH, context or STEP_CONTEXT, steps or STEPS
    step = DecodeStep(model, batch=batch, context=context, device=device)
    step.run(PARTS)
    replay: Callable[[], None] = partial(step.run, PARTS)
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run(PARTS)
        replay = graph.replay
    below = _manager(step.schema, 2, device, [tier := _host(step.schema, 4 * steps)])
    tiers = below.tiers
    assert tiers

    def with_rows() -> None:
        replay()
        row = tier.take(_label(below))
        if row is not None:
            tiers.offload.copy([(below.memory.block_arena.bytes[0], Outgoing(row))])
        tiers.pump()

    times: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(3):  # in turns, so that whatever else the machine does falls on both
        for name, call in (("without", replay), ("with", with_rows)):
            _wait(device)
            begin = time.perf_counter()
            for _ in range(steps):
                call()
            _wait(device)
            times[name].append((time.perf_counter() - begin) / steps * 1e6)
            below.tiers.drain(TIMEOUT_S)
    ours, alone = min(times["with"]), min(times["without"])
    return Measurement(
        microseconds=ours,
        launches=1,
        must_move_bytes=step.must_move_bytes() + step.schema.bytes.block,
        peers_us={"without": alone},
        note=f"{ours / alone - 1:+.2%} of a step without",
    )


def measure_prefix(model: ModelSpec, below: Below, tokens: int, device: str) -> Measurement:
    """A prompt that was computed and evicted comes back: until it is admitted, and its bytes are on
    the device."""
    schema = CacheSchema.build(model, max_context=tokens + CHUNK)
    blocks = schema.blocks_for(tokens) + 1
    with tempfile.TemporaryDirectory(dir=_disk_root()) as root:
        tier: Tier = _host(schema, blocks + 16)
        if below == "disk":
            limits = Limits(threads=4, queued_bytes=4 << 30, deadline_s=TIMEOUT_S)
            tier = DiskTier(Path(root) / "tier", 8 << 30, limits=limits)
        manager = _manager(schema, blocks, device, [tier], max_step_tokens=CHUNK)
        ids = np.arange(tokens, dtype=np.int64)
        computed_us = _compute(manager, ids, device)
        assert manager.tiers.drain(TIMEOUT_S)
        times, host_times = [], []
        for _ in range(3):
            manager.prefix.evict()
            _wait(device)
            begin, busy = time.perf_counter(), time.thread_time()
            request = manager.tiers.admit(ids, timeout_s=TIMEOUT_S)
            host_times.append((time.thread_time() - busy) * 1e6)
            _wait(device)
            times.append((time.perf_counter() - begin) * 1e6)
            assert request.resume.start == (tokens - 1) // schema.block_tokens * schema.block_tokens
            manager.release_request(request)
        stats = tier.stats()
        kept = schema.bytes.block * (tokens // schema.block_tokens)
        assert stats.loaded_bytes >= 3 * kept * (tokens - 1) // tokens * 0.9
        tier.close(TIMEOUT_S)
    assert manager.tiers
    record_bytes = _label(manager).padded_bytes
    return Measurement(
        microseconds=statistics.median(times),
        launches=0,
        must_move_bytes=kept,
        peers_us={"computing it, the cache's part": computed_us},
        parts_us={"on the calling thread": statistics.median(host_times)},
        parts_launches={"on the calling thread": 0},
        cache_bytes={
            "block on the device": schema.bytes.block,
            f"block in {below}": record_bytes,
        },
        note=(
            f"{kept / statistics.median(times) / 1e3:.1f} GB/s; "
            f"{record_bytes / schema.bytes.block:.4f} bytes in {below} for one on the device"
        ),
    )


# ---- what is measured ----------------------------------------------------------------------------


def _compute(manager: KVCacheManager, ids: NDArray[np.int64], device: str) -> float:
    """The prompt is run on all layers that keep something, and released. µs."""
    schema, model = manager.schema, manager.schema.model
    layers = [spec.layer for spec in model.layers if not spec.draft]
    ropes = {
        yarn: rope_table(model, yarn=yarn, tokens=schema.max_context, device=device)
        for yarn in (False, True)
    }
    weights = {n: random_weights(schema, n, ropes[model.layers[n].yarn], device) for n in layers}
    kinds = {model.layers[n].attention: n for n in layers}
    inputs = {kind: random_inputs(schema, n, CHUNK, device) for kind, n in kinds.items()}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    q = random(CHUNK, model.heads, model.head_dim)
    index_q = random(CHUNK, model.index_heads, model.index_dim)
    index_weights = 0.01 * random(CHUNK, model.index_heads)
    sink = torch.randn(model.heads, device=device)

    def run(request: Request) -> float:
        _wait(device)
        begin = time.perf_counter()
        while request.length < len(ids):
            tokens = min(CHUNK, len(ids) - request.length)
            plan = manager.prepare_forward([(request, tokens)])
            for layer in layers:
                handle = manager.acquire(layer, plan.batch)
                spec, rope = model.layers[layer], weights[layer].rope
                rows = [each[:tokens] for each in inputs[spec.attention]]
                handle.append(*rows, weights=weights[layer])
                chosen = None
                if spec.index_keys != "none":
                    queries = index_q[:tokens].clone()
                    chosen = handle.select(queries, index_weights[:tokens], rope=rope)
                used = chosen if spec.attention is AttentionType.CSA else None
                handle.attend(q[:tokens], sink, used, inverse_rope=rope)
            manager.commit(plan)
        _wait(device)
        manager.release_request(request)
        return (time.perf_counter() - begin) * 1e6

    run(manager.admit_request(len(ids)))  # kernels are compiled in a run that is not cached
    return run(manager.admit_request(ids))


def _manager(
    schema: CacheSchema,
    blocks: int,
    device: str,
    tiers: list[HostTier] | list[Tier],
    *,
    max_step_tokens: int = 128,
) -> KVCacheManager:
    return KVCacheManager(
        schema,
        num_blocks=blocks,
        max_requests=1,
        max_step_tokens=max_step_tokens,
        device=device,
        prefix=PrefixOptions(policy=periodic(8192), snapshots=8, model_id="random weights"),
        tiers=tiers,
    )


def _label(manager: KVCacheManager) -> Label:
    """The label of a block that no tier has."""
    assert manager.tiers
    digest = next(_serial).to_bytes(32, "little")
    return manager.tiers.labels.make(Kind.BLOCK, digest, bytes(32), 128)


def _host(schema: CacheSchema, rows: int) -> HostTier:
    return HostTier((rows + 1) * (schema.bytes.block + 8192) + (256 << 20))


def _disk_root() -> str | None:
    """Where a disk is, and not memory: the working directory."""
    return str(Path.cwd())


def _median_us(call: Callable[[], None], device: str) -> float:
    times = []
    for _ in range(REPEATS + 2):
        _wait(device)
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[2:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
