"""Overlap on a GPU: graphs captured once per lane, steps launched before the results of those in
front are on the host; the bytes are those of the reference's synchronous run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from tests.support.stack import POISON, Stack, Stream

pytestmark = pytest.mark.gpu
DEVICE, DRAFTS, REQUESTS, LANES = "cuda", 3, 4, 2
TOKENS = (1 + DRAFTS) * REQUESTS


@contextmanager
def no_wait() -> Iterator[None]:
    """Nothing inside waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stack_on(device: str) -> Stack:
    schema = CacheSchema.build(
        ModelSpec.preset("tiny"), max_context=512, max_draft_tokens=DRAFTS, steps_ahead=1
    )
    layers = range(len(schema.layers))
    stack = Stack(schema, layers=layers, device=device)
    stack.manager = KVCacheManager(
        schema,
        num_blocks=4 * REQUESTS,
        max_requests=REQUESTS,
        max_step_tokens=64,
        max_open_plans=LANES,
        device=device,
    )
    for arena in (stack.manager.memory.block_arena, stack.manager.memory.slot_arena):
        arena.bytes.fill_(POISON)
    return stack


class Lane:
    """A graph that appends a step in every layer; its inputs are gathered on the device, from the
    positions of the plan."""

    def __init__(self, stack: Stack, streams: list[Stream], plan: ForwardPlan) -> None:
        self.stack, self.plan = stack, plan
        self.sources = {
            layer: [torch.stack([s.kv[layer] for s in streams])]
            + [torch.stack(p) for p in zip(*(s.projections[layer] for s in streams), strict=True)]
            for layer in stack.layers
        }
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._append()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._append()

    def _append(self) -> None:
        rows = self.plan.batch.batch_rows.clamp_min(0).long()
        positions = self.plan.batch.clamped_positions.long()
        for layer, sources in self.sources.items():
            given = [source[rows, positions] for source in sources]
            handle = self.stack.manager.acquire(layer, self.plan.batch)
            handle.append(*given, weights=self.stack.weights[layer])


def test_graphs_replay_behind_each_other_without_a_wait():
    gpu, cpu = stack_on(DEVICE), stack_on("cpu")
    for layer, weights in cpu.weights.items():
        assert torch.equal(weights.rope, gpu.weights[layer].rope.cpu())
    streams = {s.device: [s.stream(n, 400) for n in range(REQUESTS)] for s in (gpu, cpu)}
    requests = {
        s.device: [s.manager.admit_request(400) for _ in range(REQUESTS)] for s in (gpu, cpu)
    }
    padding = {"pad_tokens": TOKENS, "pad_requests": REQUESTS}
    empty = [gpu.manager.prepare_forward([], **padding) for _ in range(LANES)]
    lanes = [Lane(gpu, streams[DEVICE], plan) for plan in empty]
    for plan in empty:
        gpu.manager.abandon(plan)
    draw = Random(1)
    life = [[draw.randint(0, 1 + DRAFTS) for _ in range(REQUESTS)] for _ in range(60)]
    on_device: list[Tensor] = [torch.tensor(kept, device=DEVICE) for kept in life]
    torch.cuda.synchronize()

    steps = [(request, 1 + DRAFTS) for request in requests[DEVICE]]
    behind: ForwardPlan | None = None
    for nth, kept in enumerate(life):
        with no_wait():
            plan = gpu.manager.prepare_forward(
                steps,
                after=behind,
                accepted=None if behind is None else on_device[nth - 1],
                **padding,
            )
            lanes[plan.lane].graph.replay()
        plan.mark_appended()
        if behind is not None:
            gpu.manager.commit(behind, life[nth - 1])
        behind = plan
        for_cpu = zip(requests["cpu"], streams["cpu"], strict=True)
        cpu.step([(r, s, 1 + DRAFTS) for r, s in for_cpu], kept)
    assert behind is not None
    gpu.manager.commit(behind, life[-1])
    torch.cuda.synchronize()
    lengths = [[r.length for r in requests[s.device]] for s in (gpu, cpu)]
    assert lengths[0] == lengths[1]
    for name in ("block_arena", "slot_arena"):
        found, expected = (getattr(s.manager.memory, name).bytes.cpu() for s in (gpu, cpu))
        assert torch.equal(found, expected), name
