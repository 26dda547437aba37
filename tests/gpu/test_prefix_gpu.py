"""Prefix hits on the device: snapshots on the device and in pinned memory, chunks and replays."""

from __future__ import annotations

import pytest

from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, zero
from tests.support.lives import ColdRun, Text, run_to, tiny_stack

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("policy", [full(), zero()], ids=str)
def test_a_hit_equals_a_cold_prefill(policy: SnapshotPolicy, where: str):
    prefix = PrefixOptions(policy=policy, snapshots=8, where=where)
    stack = tiny_stack(3, prefix=prefix, num_blocks=30, device=DEVICE)
    prompt = Text.random(stack, 0, 1000)
    request = stack.manager.admit_request(prompt.ids[:900])
    run_to(stack, request, prompt, 900, chunk=300)
    stack.manager.release_request(request)
    for nth, boundary in enumerate((128, 384, 896)):
        other = Text.random(stack, 1 + nth, 1000)
        text = prompt.then(other, boundary + nth)
        request = stack.manager.admit_request(text.ids[: boundary + 20])
        assert request.resume.reused_tokens == boundary
        assert policy.kind == "zero" or request.resume.start == boundary
        cold = ColdRun(stack, text.stream, boundary + 60)
        run_to(stack, request, text, boundary + 20, chunk=150)
        cold.assert_same(stack, request)
        run_to(stack, request, text, boundary + 60, chunk=3)
        cold.assert_same(stack, request)
        stack.manager.release_request(request)
    stack.manager.check_invariants()


def test_fork_and_rewind():
    stack = tiny_stack(3, prefix=PrefixOptions(policy=full()), num_blocks=20, device=DEVICE)
    text, other = Text.random(stack, 0, 600), Text.random(stack, 1, 600)
    request = stack.manager.admit_request(text.ids[:400])
    run_to(stack, request, text, 400)
    (fork,) = stack.manager.fork(request, 1)
    edited = text.then(other, 300)
    assert stack.manager.rewind(fork, 300).start == 256
    run_to(stack, fork, edited, 430, chunk=60)
    run_to(stack, request, text, 430, chunk=4)
    ColdRun(stack, edited.stream, 430).assert_same(stack, fork)
    ColdRun(stack, text.stream, 430).assert_same(stack, request)
