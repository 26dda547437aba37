"""A step of requests without tokens, or of no request: every call of its handles does nothing, on
both backends."""

from __future__ import annotations

import itertools

import pytest
import torch

from dsv4.backends import BackendName
from dsv4.cache.requests import Request
from dsv4.model import ModelSpec
from tests.support.lives import Text, assert_cold, run_to, tiny_stack


@pytest.mark.parametrize(
    ("backend", "preset", "requests"),
    [
        *itertools.product(["reference"], ["tiny", "v41-tiny"], [0, 1]),
        ("triton", "tiny", 0),
        pytest.param("triton", "tiny", 1, marks=pytest.mark.nightly),
        pytest.param("triton", "v41-tiny", 0, marks=pytest.mark.nightly),
        pytest.param("triton", "v41-tiny", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_step_without_tokens_does_nothing(backend: BackendName, preset: str, requests: int):
    model = ModelSpec.preset(preset)
    stack = tiny_stack(1, model=model, backend=backend, max_requests=2, max_step_tokens=64)
    manager, text = stack.manager, Text.random(stack, 0, 100)
    request: Request = manager.admit_request(40)
    run_to(stack, request, text, 40)
    slots, blocks = (
        stack.manager.memory.slot_arena.bytes.clone(),
        stack.manager.memory.block_arena.bytes.clone(),
    )
    written = manager.prepare_forward([(request, 0)])
    inputs = {layer: stack.inputs(written, [text.stream], layer) for layer in stack.layers}
    manager.abandon(written)
    plan = manager.prepare_forward([(request, 0)] * requests)
    assert plan.batch.padded_tokens == 0
    candidates = torch.empty((0, model.candidate_blocks), dtype=torch.int32)
    for layer in stack.layers:
        spec, weights, (kv, projections) = model.layers[layer], stack.weights[layer], inputs[layer]
        handle = manager.acquire(layer, plan.batch)
        handle.append(kv, *projections, weights=weights)
        chosen = None
        if spec.has_indexer:
            bounded = spec.candidates_of is not None or layer in model.candidate_sources
            chosen = handle.select(
                torch.empty((0, model.index_heads, model.index_dim), dtype=torch.bfloat16),
                torch.empty((0, model.index_heads), dtype=torch.bfloat16),
                rope=weights.rope,
                candidates=candidates if bounded else None,
            )
            assert chosen.shape == (0, model.index_topk)
        elif spec.attention == "csa":
            chosen = torch.empty((0, model.index_topk), dtype=torch.int32)
        q = torch.empty((0, model.heads, model.head_dim), dtype=torch.bfloat16)
        out, lse = handle.attend(q, torch.zeros(model.heads), chosen, inverse_rope=weights.rope)
        assert (out.shape, lse.shape) == (q.shape, (0, model.heads))
        rows, lengths = handle.gather_swa_kv()
        assert (rows.shape[0], lengths.shape[0]) == (0, 0)
        if spec.ratio:
            entries = torch.empty((0, 3), dtype=torch.int32)
            assert handle.gather_compressed_kv(entries).shape == (0, 3, model.head_dim)
            room = torch.zeros((requests, 50, model.head_dim), dtype=torch.bfloat16)
            _, lengths = handle.gather_all_compressed_kv(room)
            assert lengths.tolist() == [40 // spec.ratio] * requests
    manager.commit(plan)
    assert torch.equal(manager.memory.slot_arena.bytes, slots)
    assert torch.equal(manager.memory.block_arena.bytes, blocks)
    run_to(stack, request, text, 60)
    assert_cold(stack, request, text.stream)
