"""Prepared launches on a GPU: Triton is asked once for each kind, and results stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
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
    assert torch.equal(gpu.block_arena.bytes.cpu(), cpu.block_arena.bytes)
    assert torch.equal(gpu.slot_arena.bytes.cpu(), cpu.slot_arena.bytes)
