"""Launches that overlap (kernels/overlap.py), in a stream and beside other streams."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from benchmarks.decode_step import PARTS, DecodeStep
from dsv4.model import ModelSpec

pytestmark = pytest.mark.gpu

STREAMS, REPLAYS = 3, 200


def captured(step: DecodeStep) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step.run(PARTS)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(PARTS)
    return graph


def results(step: DecodeStep) -> list[torch.Tensor]:
    chosen = list(step.chosen_of.values())
    return [
        each.clone() for each in (step.out, step.lse, step.manager.memory.slot_arena.bytes, *chosen)
    ]


# A query that processors share is one launch whose programs wait for each other: if programs of two
# such launches held half of the GPU each, neither would end.
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("batch", [1, 8, 24])
def test_steps_of_several_streams_end_and_do_not_mix(batch: int) -> None:
    make = partial(DecodeStep, ModelSpec.preset("v4-flash"), context=8192, device="cuda")
    steps = [make(batch=batch, block_arena_bytes=2_000_000_000) for _ in range(STREAMS)]
    steps[0].compile()
    graphs = [captured(step) for step in steps]
    torch.cuda.synchronize()
    alone = [results(step) for step in steps]
    streams = [torch.cuda.Stream() for _ in steps]
    for step in steps:
        step.out.fill_(float("nan"))
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for step, expected in zip(steps, alone, strict=True):
        for found, wanted in zip(results(step), expected, strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
