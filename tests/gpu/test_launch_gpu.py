"""Prepared launches on a GPU: Triton is asked once for each kind, and results stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from dsv4.cache.repeats import Repeats
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Repetition
from dsv4.model import ModelSpec
from tests.support.reading import queries, read
from tests.support.stack import Stack

pytestmark = pytest.mark.gpu

TINY = ModelSpec.preset("tiny")


def test_triton_is_asked_once_for_each_kind_of_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    run = JITFunction.run

    def counted(self: JITFunction, *arguments: Any, **more: Any) -> Any:
        asked.append(self.fn.__name__)
        return run(self, *arguments, **more)

    schema = CacheSchema.build(TINY, max_context=512)
    stacks = [
        Stack(schema, layers=range(len(TINY.layers)), max_requests=2, num_blocks=8, device=device)
        for device in ("cuda", "cpu")
    ]
    monkeypatch.setattr(JITFunction, "run", counted)
    requests = [[stack.manager.admit_request() for _ in range(2)] for stack in stacks]
    streams = [[stack.stream(nth, 40) for nth in range(2)] for stack in stacks]
    counts = []
    for _ in range(40):
        asked.clear()
        for stack, of_stack, streams_of_stack in zip(stacks, requests, streams, strict=True):
            stack.step([(r, s, 1) for r, s in zip(of_stack, streams_of_stack, strict=True)])
        counts.append(len(asked))
    assert sum(counts) > 0
    assert not any(counts[16:]), counts  # every phase of a group has been seen
    gpu, cpu = (stack.manager for stack in stacks)
    assert torch.equal(gpu.memory.block_arena.bytes.cpu(), cpu.memory.block_arena.bytes)
    assert torch.equal(gpu.memory.slot_arena.bytes.cpu(), cpu.memory.slot_arena.bytes)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "captured"])
def test_repeated_reads_and_writes_give_what_checked_ones_give(
    graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stacks live the same life, one of them without repetitions."""
    repeated: list[object] = []
    run = Repetition.run

    def counted(self: Repetition, *given: Any) -> None:
        repeated.append(self)
        run(self, *given)

    monkeypatch.setattr(Repetition, "run", counted)
    schema = CacheSchema.build(TINY, max_context=512)
    layers = range(len(TINY.layers))
    stacks = [
        Stack(schema, layers=layers, max_requests=2, num_blocks=8, device="cuda") for _ in range(2)
    ]
    asked = [queries(stacks[0], nth, 200) for nth in range(2)]
    lives = [[stack.manager.admit_request() for _ in range(2)] for stack in stacks]
    streams = [[stack.stream(nth, 200) for nth in range(2)] for stack in stacks]

    def step(nth: int, count: int) -> list[Tensor]:
        stack, manager = stacks[nth], stacks[nth].manager
        plan = manager.prepare_forward([(each, count) for each in lives[nth]])
        found: list[Tensor] = []

        def whole() -> None:
            found.clear()
            for layer in layers:
                stack.write(plan, streams[nth], layers=[layer])
                found.extend(t for t in read(stack, plan, layer, asked) if t is not None)

        whole()
        if graph and count == 1:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                whole()
            captured.replay()
        manager.commit(plan)
        return [t.cpu() for t in found]

    find = Repeats.find
    for count in (20, 20, 20, *[1] * 12):
        monkeypatch.setattr(Repeats, "find", find)
        quick = step(0, count)
        monkeypatch.setattr(Repeats, "find", lambda *_: (None, None))
        for actual, expected in zip(quick, step(1, count), strict=True):
            assert torch.equal(actual.nan_to_num(), expected.nan_to_num())
    assert len(repeated) > 4 * len(layers)
    one, other = (stack.manager for stack in stacks)
    assert torch.equal(one.memory.block_arena.bytes, other.memory.block_arena.bytes)
    assert torch.equal(one.memory.slot_arena.bytes, other.memory.slot_arena.bytes)
