"""A device error at each operation of each call: the call raises and has changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from tests.support.faults import DeviceFault, Faults, everything
from tests.support.lives import Text, assert_cold, run_to, tiny_stack
from tests.support.stack import Stack


@dataclass
class Scene:
    """A busy manager: `request` is in the middle of its text, most blocks are cached."""

    stack: Stack
    text: Text
    request: Request
    plan: ForwardPlan | None = None
    accepted: int | None = None


def scene(call: str) -> Scene:
    stack = tiny_stack(
        drafts=3,
        prefix=PrefixOptions(policy=full(), snapshots=4),
        num_blocks=9 if call == "prepare a chunk" else 10,  # that has to evict
        max_requests=5,
        ahead=1,
        max_open_plans=2,
    )
    manager = stack.manager
    old, text = Text.random(stack, 9, 700), Text.random(stack, 0, 900)
    first = manager.admit_request(old.ids[:500])
    run_to(stack, first, old, 500)
    manager.release_request(first)
    request = manager.admit_request(text.ids[:300])
    run_to(stack, request, text, 382)
    made = Scene(stack, text, request)
    if call == "rewind a shared block":
        run_to(stack, request, text, 385)
    if call == "rewind far":
        manager.fork(request, 1)
    if call.startswith("commit") or call == "prepare a step behind":
        made.plan = manager.prepare_forward([(request, 4)])
        stack.write(made.plan, [text.stream])
    return made


def admit(made: Scene) -> object:
    return made.stack.manager.admit_request(made.text.ids[:900])


def fork(made: Scene) -> object:
    return made.stack.manager.fork(made.request, 3)


def rewind_far(made: Scene) -> object:
    return made.stack.manager.rewind(made.request, 300)


def rewind_a_shared_block(made: Scene) -> object:
    return made.stack.manager.rewind(made.request, 383)


def reset(made: Scene) -> object:
    return made.stack.manager.room.reset_slot(made.request)


def prepare_a_chunk(made: Scene) -> object:
    return made.stack.manager.prepare_forward([(made.request, 400)])


def prepare_a_decode(made: Scene) -> object:
    return made.stack.manager.prepare_forward([(made.request, 4)])


def prepare_a_step_behind(made: Scene) -> object:
    return made.stack.manager.prepare_forward(
        [(made.request, 4)], after=made.plan, accepted=torch.tensor([3])
    )


CALLS: dict[str, Callable[[Scene], object]] = {
    "admit": admit,
    "fork": fork,
    "rewind far": rewind_far,
    "rewind a shared block": rewind_a_shared_block,
    "reset": reset,
    "prepare a chunk": prepare_a_chunk,
    "prepare a decode": prepare_a_decode,
    "prepare a step behind": prepare_a_step_behind,
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_at_each_operation_changes_nothing(name: str):
    made = scene(name)
    manager, call = made.stack.manager, CALLS[name]
    before, at = everything(manager), 0
    while True:
        faults = Faults(at)
        with faults.injected():
            try:
                call(made)
                break
            except DeviceFault:
                pass
        assert everything(manager) == before, f"operation {at}"
        manager.check_invariants()
        at += 1
    assert at >= (1 if name != "prepare a decode" else 0), "nothing was injected"
    assert faults.count == at
    manager.check_invariants()
    if manager.room.open_plans:
        manager.fail(manager.room.open_plans[0])
    if name == "prepare a decode":
        run_to(made.stack, made.request, made.text, 500)
        assert_cold(made.stack, made.request, made.text.stream)


def test_a_commit_happens_whether_or_not_its_snapshot_can_be_taken():
    at = 0
    while True:
        made = scene("commit")
        manager, faults = made.stack.manager, Faults(at)
        assert made.plan is not None
        with faults.injected():
            manager.commit(made.plan, ids=made.text.ids[382:386])
        manager.check_invariants()
        assert (made.request.length, manager.room.open_plans) == (386, [])
        run_to(made.stack, made.request, made.text, 600)
        assert_cold(made.stack, made.request, made.text.stream)
        manager.release_request(made.request)
        again = manager.admit_request(made.text.ids[:600])
        run_to(made.stack, again, made.text, 600)
        assert_cold(made.stack, again, made.text.stream)
        if faults.count <= at:
            break
        at += 1
    assert at >= 2
