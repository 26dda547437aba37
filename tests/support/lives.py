"""Requests that lead the same life must show the same bytes, wherever their memory is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.pages import PageForm
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import ModelSpec
from tests.support.numbers import Numbers
from tests.support.stack import POISON, Stack, Stream, layers_to_run, readable_bytes

TINY = ModelSpec.preset("tiny")
TINY_LAYERS = tuple(range(len(TINY.layers)))


def tiny_stack(
    drafts: int = 0,
    state: HcaState = "raw",
    model: ModelSpec = TINY,
    ahead: int = 0,
    form: PageForm = "planes",
    **options: Any,
) -> Stack:
    """All layer kinds of a tiny model, all memory poisoned, weights that are always the same."""
    schema = CacheSchema.build(
        model,
        max_context=2048,
        max_draft_tokens=drafts,
        steps_ahead=ahead,
        hca_state=state,
        page_form=form,
    )
    # a snapshot needs all layers
    all_layers = tuple(range(len(model.layers)))
    layers = layers_to_run(schema) if options.get("prefix") is None else all_layers
    stack = Stack(schema, layers=layers, **options)
    if stack.manager.prefix:
        stack.manager._parts.prefix.pool.bytes.fill_(POISON)
    return stack


def splice(before: Stream, after: Stream, at: int) -> Stream:
    """The tokens of `before` up to position `at`, then those of `after`."""

    def join(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a[:at], b[at:]])

    return Stream(
        kv={layer: join(a, after.kv[layer]) for layer, a in before.kv.items()},
        projections={
            layer: tuple(map(join, a, after.projections[layer]))
            for layer, a in before.projections.items()
        },
    )


@dataclass(frozen=True)
class Text:
    """Tokens as ids and as what they bring along: equal ids bring equal projections."""

    ids: NDArray[np.int32]
    stream: Stream

    @classmethod
    def random(cls, stack: Stack, seed: int, tokens: int) -> Text:
        ids = np.arange(tokens, dtype=np.int32) + 100_000 * seed
        return cls(ids, stack.stream(seed, tokens))

    def then(self, other: Text, at: int) -> Text:
        """These tokens up to position `at`, then the other's."""
        return Text(
            np.concatenate([self.ids[:at], other.ids[at:]]), splice(self.stream, other.stream, at)
        )


def run_to(
    stack: Stack, request: Request, text: Stream | Text, length: int, chunk: int = 200
) -> None:
    """Runs a request's tokens from its length on, in chunks; a text's ids are told at commit."""
    while request.length < length:
        start, count = request.length, min(chunk, length - request.length)
        if isinstance(text, Text):
            ids = text.ids[start : start + count].tolist()
            stack.step([(request, text.stream, count)], ids=ids)
        else:
            stack.step([(request, text, count)])


class ColdRun:
    """The same tokens computed alone, in a cache of their own."""

    def __init__(self, stack: Stack, stream: Stream, length: int) -> None:
        self._stack = Stack(
            stack.schema,
            layers=stack.layers,
            max_requests=1,
            num_blocks=max(1, stack.schema.blocks_for(length)),
            device=stack.device,
            backend="reference" if stack.device == "cpu" else None,
        )
        self._stack.weights = stack.weights
        self._stream = stream
        self._request = self._stack.manager.admit_request(length)

    def assert_same(self, stack: Stack, request: Request, *, with_drafts: bool = True) -> None:
        """The request shows exactly what the cold run shows at its length; where it was resumed, or
        not `with_drafts`, but for draft layers, which snapshots leave out."""
        run_to(self._stack, self._request, self._stream, request.length, chunk=512)
        assert self._request.length == request.length
        expected = readable_bytes(self._stack, self._request)
        found = readable_bytes(stack, request)
        assert found.keys() == expected.keys()
        resumed = not with_drafts or request.resume.source in ("snapshot", "replay")
        drafts = {str(spec.layer) for spec in stack.schema.model.layers if spec.draft}
        for name, rows in found.items():
            if resumed and name.split(".")[0] in drafts:
                continue
            assert torch.equal(rows, expected[name]), f"{name} at length {request.length}"


def assert_cold(stack: Stack, request: Request, stream: Stream) -> None:
    ColdRun(stack, stream, request.length).assert_same(stack, request)


def drafted(stack: Stack, *requests: Request) -> Tensor:
    """What a draft step of the last layer returns, always of the same keys and queries. Nothing is
    stored."""
    model, layer, numbers = stack.schema.model, stack.layers[-1], Numbers(11)
    plan = stack.manager.prepare_forward([(r, model.draft_block) for r in requests])
    kv = numbers.normal(model.draft_block, model.head_dim).bfloat16()
    q = numbers.normal(model.draft_block, model.heads, model.head_dim).bfloat16()
    try:
        out, _ = stack.manager.acquire(layer, plan.batch).attend_draft(
            kv.repeat(len(requests), 1),
            q.repeat(len(requests), 1, 1),
            torch.ones(model.heads),
            weights=stack.weights[layer],
        )
    finally:
        stack.manager.abandon(plan)
    return out.unflatten(0, (len(requests), model.draft_block))
