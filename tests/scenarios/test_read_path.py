"""append → select → attend over whole lives: chunks, drafts and batches leave no trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from tests.support.reading import Queries, queries, read
from tests.support.stack import Stack, Stream

SWA, CSA, HCA = 0, 1, 2
TOKENS = 170


def make() -> tuple[Stack, Stream, Queries]:
    schema = CacheSchema.build(ModelSpec.preset("tiny"), max_draft_tokens=3, max_context=256)
    stack = Stack(schema, layers=[SWA, CSA, HCA], max_requests=3, num_blocks=8)
    return stack, stack.stream(1, TOKENS), queries(stack, 1, TOKENS)


def run(chunks: list[int]) -> dict[int, tuple[Tensor, Tensor, Tensor | None]]:
    """All outputs of one request that arrives in these chunks."""
    stack, stream, asked = make()
    request = stack.manager.admit_request()
    pieces: dict[int, list] = {layer: [] for layer in stack.layers}
    for count in chunks:
        plan = stack.manager.prepare_forward([(request, count)])
        for layer in stack.layers:
            stack.write(plan, [stream], layers=[layer])
            pieces[layer].append(read(stack, plan, layer, [asked]))
        stack.manager.commit(plan, partial=True)
    return {
        layer: tuple(
            None if p[0][i] is None else torch.cat([piece[i] for piece in p]) for i in range(3)
        )
        for layer, p in pieces.items()
    }


@pytest.fixture(scope="module")
def token_by_token() -> dict[int, tuple[Tensor, Tensor, Tensor | None]]:
    return run([1] * TOKENS)


@pytest.mark.parametrize(
    "chunks", [[TOKENS], [5, 130, 35], [128, 4, 1, 37], [3, 4, 2, 150, 1, 10]], ids=str
)
def test_chunked_prefill_equals_token_by_token(chunks: list[int], token_by_token) -> None:
    for layer, (out, lse, selection) in run(chunks).items():
        wanted_out, wanted_lse, wanted_selection = token_by_token[layer]
        error = (out.double() - wanted_out.double()).norm() / wanted_out.double().norm()
        assert error < 1e-3, layer
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)
        if selection is not None:
            assert torch.equal(selection, wanted_selection)


def test_a_rejected_draft_leaves_no_trace_in_what_is_read(token_by_token) -> None:
    stack, stream, asked = make()
    other, other_asked = stack.stream(2, TOKENS), queries(stack, 2, TOKENS)
    request = stack.manager.admit_request()
    at = 0
    while at < TOKENS:
        if at > 120 and TOKENS - at > 4:  # draft other tokens first, and reject all of them
            plan = stack.manager.prepare_forward([(request, 4)])
            for layer in stack.layers:
                stack.write(plan, [other], layers=[layer])
                read(stack, plan, layer, [other_asked])
            stack.manager.commit(plan, [0], partial=True)
        count = min(40 if at < 120 else 1, TOKENS - at)
        plan = stack.manager.prepare_forward([(request, count)])
        for layer in stack.layers:
            stack.write(plan, [stream], layers=[layer])
            out, _, selection = read(stack, plan, layer, [asked])
            wanted_out, _, wanted_selection = token_by_token[layer]
            span = slice(at, at + count)
            error = (out.double() - wanted_out[span].double()).norm()
            assert error < 1e-3 * wanted_out[span].double().norm(), (layer, at)
            if selection is not None and wanted_selection is not None:
                assert torch.equal(selection, wanted_selection[span])
        stack.manager.commit(plan, partial=True)
        at += count


def test_a_ragged_batch_equals_solo_runs() -> None:
    lengths = (9, 150, 1)
    stack, _, _ = make()
    streams = [stack.stream(i, TOKENS) for i in range(3)]
    asked = [queries(stack, i, TOKENS) for i in range(3)]
    requests = [stack.manager.admit_request() for _ in range(3)]
    solo_outputs: dict[tuple[int, int], Tensor] = {}
    for i, length in enumerate(lengths):
        alone, _, _ = make()
        request = alone.manager.admit_request()
        if length > 1:
            alone.step([(request, streams[i], length - 1)])
        plan = alone.manager.prepare_forward([(request, 1)])
        for layer in alone.layers:
            alone.write(plan, [streams[i]], layers=[layer])
            solo_outputs[i, layer] = read(alone, plan, layer, [asked[i]])[0]
        alone.manager.commit(plan, partial=True)
    stack.step([(r, s, n - 1) for r, s, n in zip(requests, streams, lengths, strict=True)])
    order = (2, 0, 1)
    plan = stack.manager.prepare_forward(
        [(requests[i], 1) for i in order], pad_tokens=5, pad_requests=3
    )
    for layer in stack.layers:
        stack.write(plan, [streams[i] for i in order], layers=[layer])
        out = read(stack, plan, layer, [asked[i] for i in order])[0]
        for row, i in enumerate(order):
            assert torch.equal(out[row], solo_outputs[i, layer][0]), (layer, i)
