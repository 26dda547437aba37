"""The same life of requests on the reference and on the Triton kernels, compared byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.flush import (
    append_swa,
    csa_compress_tail,
    hca_compress_tail,
    maybe_flush_csa,
    maybe_flush_hca,
)
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from tests.support.stack import POISON, Stack

TINY = ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 1, 2
TINY_LAYERS = range(len(TINY.layers))


def written(stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    """All that an append can write."""
    manager = stack.manager
    return (
        manager.memory.block_arena.bytes,
        manager.memory.slot_arena.bytes,
        manager.memory.workspace.staging,
    )


class Both:
    """The same life on two stacks, one per backend; after every step they have written the same."""

    def __init__(
        self,
        *,
        layers: Sequence[int] = TINY_LAYERS,
        model: ModelSpec = TINY,
        requests: int = 4,
        tokens: int = 300,
        stack: dict[str, Any] | None = None,
        **schema: Any,
    ) -> None:
        self.schema = CacheSchema.build(model, max_context=512, **schema)
        self.stacks = [
            Stack(
                self.schema,
                layers=layers,
                max_requests=requests,
                num_blocks=3 * requests,
                backend=backend,  # type: ignore[arg-type]
                **(stack or {}),
            )
            for backend in ("reference", "triton")
        ]
        for each in self.stacks:
            each.manager.memory.workspace.staging.fill_(POISON)
        self.lives = [[s.manager.admit_request() for _ in range(requests)] for s in self.stacks]
        self.streams = [self.stacks[0].stream(seed, tokens) for seed in range(requests)]

    def step(self, counts: dict[int, int], accepted: list[int] | None = None, **pad: int) -> None:
        for stack, requests in zip(self.stacks, self.lives, strict=True):
            work = [(requests[nth], self.streams[nth], count) for nth, count in counts.items()]
            stack.step(work, accepted, **pad)
        self.assert_equal()

    def empty_step(self, **pad: int) -> None:
        """A step of nothing but padding rows."""
        for stack in self.stacks:
            plan = stack.manager.prepare_forward([], **pad)
            for layer in stack.layers:
                sources = (self.streams[0].kv[layer], *self.streams[0].projections[layer])
                rows = [
                    t.new_full((plan.batch.padded_tokens, t.shape[1]), float("nan"))
                    for t in sources
                ]
                handle = stack.manager.acquire(layer, plan.batch)
                handle.append(*rows, weights=stack.weights[layer])
            stack.manager.commit(plan, partial=True)
        self.assert_equal()

    def skip(self, counts: dict[int, int]) -> None:
        """As `step`, but both stacks are written by the reference: prefills that cost nothing."""
        reference = self.stacks[0]
        for stack, requests in zip(self.stacks, self.lives, strict=True):
            plan = stack.manager.prepare_forward([(requests[i], n) for i, n in counts.items()])
            if stack is reference:
                stack.write(plan, [self.streams[nth] for nth in counts])
            stack.manager.commit(plan, partial=True)
        for expected, found in zip(*map(written, self.stacks), strict=True):
            found.copy_(expected)

    def replace_request(self, nth: int) -> None:
        """Another request in the slot and blocks of one that is released."""
        for stack, requests in zip(self.stacks, self.lives, strict=True):
            stack.manager.release_request(requests[nth])
            requests[nth] = stack.manager.admit_request()

    def step_by_hand(self, layer: int) -> None:
        """A decode step of one layer through append_swa, write_tail and the flush."""
        for stack, requests in zip(self.stacks, self.lives, strict=True):
            plan = stack.manager.prepare_forward([(r, 1) for r in requests], pad_tokens=3)
            handle = stack.manager.acquire(layer, plan.batch)
            kv, projections = stack.inputs(plan, self.streams, layer)
            weights = stack.weights[layer]
            append_swa(handle, kv, weights)
            if projections:
                handle.write_tail(*projections, weights=weights)
                flush = maybe_flush_csa if len(projections) == 4 else maybe_flush_hca
                flush(handle, weights)
            stack.manager.commit(plan, partial=True)
        self.assert_equal()

    def compressed_tails(self, layer: int) -> Tensor:
        """A decode step of one layer whose closed groups become dense rows, the same bits on both
        backends. Returns which rows are live."""
        compress: Callable[..., tuple[Tensor, ...]]
        results = []
        for stack, requests in zip(self.stacks, self.lives, strict=True):
            plan = stack.manager.prepare_forward([(r, 1) for r in requests], pad_tokens=4)
            handle = stack.manager.acquire(layer, plan.batch)
            _, projections = stack.inputs(plan, self.streams, layer)
            handle.write_tail(*projections, weights=stack.weights[layer])
            compress = csa_compress_tail if len(projections) == 4 else hca_compress_tail
            results.append(compress(handle, stack.weights[layer]))
            stack.manager.commit(plan, partial=True)
        self.assert_equal()
        for expected, found in zip(*results, strict=True):
            assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))
        return results[0][-1]

    def assert_equal(self) -> None:
        names = ("block arena", "slot arena", "chunk")
        for name, expected, found in zip(names, *map(written, self.stacks), strict=True):
            wrong = torch.nonzero(expected != found)
            assert not len(wrong), f"{name}: {len(wrong)} bytes differ, first {wrong[:3].tolist()}"
        assert not self.stacks[1].manager.memory.workspace.arrived.any()


def two_layers_of_flash() -> ModelSpec:
    """V4-Flash's layers 2 and 3 as a model of their own, so that whole arenas stay small."""
    flash = ModelSpec.preset("v4-flash")
    layers = tuple(
        replace(flash.layers[layer], layer=layer - 2, owner=layer - 2) for layer in (2, 3)
    )
    return replace(flash, name="flash-2-3", layers=layers)
