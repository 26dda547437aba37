"""Rewind: by arithmetic where the rings reach, else from the nearest point that can be resumed."""

from __future__ import annotations

import pytest

from dsv4.cache.schema import HcaState
from dsv4.errors import InvalidInput, OutOfBlocks, RequestError
from tests.oracles.bookkeeping import no_device, nothing_changes
from tests.support.lives import assert_cold, run_to, splice, tiny_stack
from tests.support.stack import HCA_STATES


@pytest.mark.parametrize("state", HCA_STATES)
@pytest.mark.parametrize("length", [4, 129, 256, 259])
@pytest.mark.parametrize("back", [1, 2, 3, 4])
def test_within_the_rings_nothing_runs_again(length: int, back: int, state: HcaState):
    stack = tiny_stack(drafts=3, state=state, num_blocks=10)
    stream, other = stack.stream(0, 512), stack.stream(1, 512)
    request = stack.manager.admit_request(length)
    run_to(stack, request, stream, length)
    blocks = list(request.block_ids)
    plan = stack.manager.rewind(request, length - back)
    assert (plan.start, plan.end, plan.source, len(plan.run)) == (length - back,) * 2 + ("rings", 0)
    assert (request.length, request.block_ids) == (length - back, blocks)
    changed = splice(stream, other, length - back)
    assert_cold(stack, request, changed)
    run_to(
        stack, request, changed, length + (20 if back % 2 else 150), chunk=3 if back % 2 else 140
    )
    assert_cold(stack, request, changed)


def test_rejected_tokens_count_against_the_reach():
    stack = tiny_stack(drafts=3)
    stream = stack.stream(0, 400)
    request = stack.manager.admit_request(0)
    run_to(stack, request, stream, 300)
    stack.step([(request, stream, 4)], accepted=[1])
    assert stack.manager.rewind(request, 300).source == "rings"
    assert stack.manager.rewind(request, 299).source == "nothing"
    request = stack.manager.admit_request(0)
    run_to(stack, request, stream, 300)
    plan = stack.manager.prepare_forward([(request, 4)])
    stack.write(plan, [stream])
    stack.manager.abandon(plan)
    assert stack.manager.rewind(request, 299).source == "nothing"


def test_further_back_starts_over_and_gives_the_blocks_back():
    stack = tiny_stack(num_blocks=4)
    stream, other = stack.stream(0, 512), stack.stream(1, 512)
    request = stack.manager.admit_request(0)
    run_to(stack, request, stream, 400)
    plan = stack.manager.rewind(request, 390)
    assert (plan.run, plan.replay, plan.source) == (range(390), range(0), "nothing")
    assert (request.length, request.block_ids, request.resume) == (0, [], plan)
    assert stack.manager.stats().blocks_free == 4
    stack.manager.check_invariants()
    changed = splice(stream, other, 390)
    run_to(stack, request, changed, 450)
    assert_cold(stack, request, changed)


def test_a_block_that_others_read_is_copied_before_it_is_written():
    stack = tiny_stack(drafts=3, num_blocks=8)
    stream, other = stack.stream(0, 512), stack.stream(1, 512)
    request = stack.manager.admit_request(0)
    run_to(stack, request, stream, 256)
    (fork,) = stack.manager.fork(request, 1)
    shared = request.block_ids[1]
    assert stack.manager.rewind(fork, 254).source == "rings"
    assert request.block_ids[1] == shared != fork.block_ids[1]
    changed = splice(stream, other, 254)
    run_to(stack, fork, changed, 300, chunk=4)
    assert_cold(stack, fork, changed)
    assert_cold(stack, request, stream)
    assert stack.manager.memory.block_table[fork.slot, :3].tolist() == fork.block_ids
    stack.manager.check_invariants()


def test_no_block_left_for_the_copy():
    stack = tiny_stack(drafts=3, num_blocks=2)
    request = stack.manager.admit_request(0)
    run_to(stack, request, stack.stream(0, 256), 256)
    (fork,) = stack.manager.fork(request, 1)
    with nothing_changes(stack.manager), pytest.raises(OutOfBlocks, match="wait"):
        stack.manager.rewind(fork, 255)
    assert stack.manager.rewind(fork, 256).source == "rings"


def test_reset_slot_lets_go_of_blocks_that_others_read():
    stack = tiny_stack(num_blocks=8)
    stream, other = stack.stream(0, 400), stack.stream(1, 400)
    request = stack.manager.admit_request(0)
    run_to(stack, request, stream, 300)
    (fork,) = stack.manager.fork(request, 1)
    stack.manager.room.reset_slot(fork)
    assert len(fork.block_ids) == 1
    run_to(stack, fork, other, 280)
    assert_cold(stack, fork, other)
    assert_cold(stack, request, stream)
    stack.manager.check_invariants()


@pytest.mark.parametrize("length", [-1, 301, 1.5, True, None, "3"])
def test_lengths_that_are_none(length: object):
    stack = tiny_stack()
    request = stack.manager.admit_request(0)
    run_to(stack, request, stack.stream(0, 300), 300)
    told = "a rewind only goes back" if length == 301 else "length=.* whole number of at least 0"
    with nothing_changes(stack.manager), pytest.raises(InvalidInput, match=told):
        stack.manager.rewind(request, length)


def test_a_device_error_in_the_copy_of_a_block_gives_everything_back(
    monkeypatch: pytest.MonkeyPatch,
):
    stack = tiny_stack()
    manager = stack.manager
    request = manager.admit_request(0)
    run_to(stack, request, stack.stream(0, 256), 256)
    (fork,) = manager.fork(request, 1)
    for failing in ("copy_block",):
        with nothing_changes(manager), monkeypatch.context() as patch:
            patch.setattr(manager.memory, failing, no_device)
            with pytest.raises(RuntimeError, match="out of memory"):
                manager.rewind(fork, 255)
    manager.rewind(fork, 255)
    assert fork.block_ids[0] == request.block_ids[0]
    assert fork.block_ids[1] != request.block_ids[1]


def test_a_request_must_be_live_and_not_in_a_plan():
    manager = tiny_stack().manager
    request = manager.admit_request(1)
    plan = manager.prepare_forward([(request, 1)])
    with nothing_changes(manager), pytest.raises(RequestError, match="plan"):
        manager.rewind(request, 0)
    manager.commit(plan, partial=True)
    manager.release_request(request)
    with nothing_changes(manager), pytest.raises(RequestError, match="released"):
        manager.rewind(request, 0)
