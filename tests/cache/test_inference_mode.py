"""Managers are made inside `torch.inference_mode` and used outside, or the other way round, or in
turns: their memory is written to all the same."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from dsv4.ops.backend import BackendName
from dsv4.tiers.host import HostTier
from tests.support.lives import Text, assert_cold, run_to, tiny_stack
from tests.support.tiered import TIMEOUT_S, stack_with


def mode(on: bool) -> AbstractContextManager[object]:
    return torch.inference_mode() if on else nullcontext()


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("made", [True, False], ids=["inside", "outside"])
def test_the_mode_may_change_between_any_two_calls(made: bool, phase: int):
    with mode(made):
        stack = stack_with([HostTier(8 << 20)], drafts=1)
        text = Text.random(stack, 0, 400)
    manager, modes = stack.manager, itertools.cycle([phase == 0, phase != 0, phase != 0])
    with mode(next(modes)):
        request = manager.tiers.admit(text.ids[:200], timeout_s=TIMEOUT_S)
    for layers in (stack.layers[:2], stack.layers[2:]):
        if layers == stack.layers[:2]:
            with mode(next(modes)):
                plan = manager.prepare_forward([(request, 200)])
        with mode(next(modes)):
            stack.write(plan, [text.stream], layers=layers)
    with mode(next(modes)):
        manager.commit(plan)
    for length in (201, 203, 260):
        with mode(next(modes)):
            run_to(stack, request, text, length)
    with mode(next(modes)):
        (fork,) = manager.fork(request, 1)
    with mode(next(modes)):
        run_to(stack, fork, text, 262)
    with mode(next(modes)):
        manager.rewind(fork, 150)
    with mode(next(modes)):
        run_to(stack, fork, text, 262)
    assert_cold(stack, fork, text.stream)
    manager.release_request(fork)
    with mode(next(modes)):
        manager.tiers.suspend(request)
    with mode(next(modes)):
        assert manager.tiers.drain(TIMEOUT_S)
        manager.prefix.evict()
    with mode(next(modes)):
        request = manager.tiers.resume(text.ids[:260], timeout_s=TIMEOUT_S)
    with mode(next(modes)):
        run_to(stack, request, text, 300)
    assert_cold(stack, request, text.stream)
    with mode(next(modes)):
        manager.room.reset_slot(request)
    manager.release_request(request)
    manager.check_invariants()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_what_is_made_inside_is_no_inference_tensor(backend: BackendName):
    with torch.inference_mode():
        stack = tiny_stack(backend=backend, max_requests=1, max_step_tokens=16)
        memory = stack.manager.memory
    tensors = [memory.block_arena.bytes, memory.slot_arena.bytes, memory.block_table]
    tensors += [tensor for lane in memory.lanes for tensor in lane.workspace.tensors]
    assert not any(tensor.is_inference() for tensor in tensors)
    request, stream = stack.manager.admit_request(8), stack.stream(0, 16)
    run_to(stack, request, stream, 8)
    with torch.inference_mode():
        run_to(stack, request, stream, 9)
