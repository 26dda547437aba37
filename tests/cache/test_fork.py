"""Forks go on from where a request is: whole blocks shared, everything else their own."""

from __future__ import annotations

import pytest

from dsv4.cache.schema import HcaState
from dsv4.errors import InvalidInput, OutOfBlocks, OutOfSlots, RequestError
from tests.oracles.bookkeeping import nothing_changes
from tests.support.lives import assert_cold, run_to, splice, tiny_stack

CASES = [(0, 3), (1, 3), (127, 3), (128, 3), (129, 0), (255, 3), (256, 0), (300, 3)]


@pytest.mark.parametrize(
    ("length", "drafts", "state"),
    [*((*case, "raw") for case in CASES), (127, 3, "online"), (129, 0, "online")],
)
def test_forks_diverge_and_each_equals_a_cold_run(length: int, drafts: int, state: HcaState):
    stack = tiny_stack(drafts, state, max_requests=4, num_blocks=24)
    streams = [stack.stream(seed, 512) for seed in range(4)]
    parent = stack.manager.admit_request(length)
    run_to(stack, parent, streams[0], length)
    forks = stack.manager.fork(parent, 3)
    lives = {parent: streams[0]}
    lives |= {f: splice(streams[0], s, length) for f, s in zip(forks, streams[1:], strict=True)}
    for request, stream in lives.items():
        assert_cold(stack, request, stream)
    for _ in range(6):
        stack.step([(r, s, 1) for r, s in lives.items()])
    stack.step([(r, s, 140) for r, s in lives.items()][:3])
    for request, stream in lives.items():
        assert_cold(stack, request, stream)
    stack.manager.check_invariants()


def test_whole_blocks_are_shared_and_the_unfinished_one_is_copied():
    stack = tiny_stack(num_blocks=10)
    parent = stack.manager.admit_request(600)  # 5 blocks, the last two still empty
    run_to(stack, parent, stack.stream(0, 300), 300)
    first, second = stack.manager.fork(parent, 2)
    assert first.block_ids[:2] == second.block_ids[:2] == parent.block_ids[:2]
    assert len(first.block_ids) == len(second.block_ids) == 3
    assert len({first.block_ids[2], second.block_ids[2], *parent.block_ids}) == 7
    assert stack.manager.stats().blocks_live == 7
    for request in (parent, first, second):
        stack.manager.release_request(request)
        stack.manager.check_invariants()
    assert stack.manager.stats().blocks_live == 0


def test_forks_of_a_fork_outlive_the_first():
    stack = tiny_stack(num_blocks=10)
    stream = stack.stream(0, 400)
    parent = stack.manager.admit_request(0)
    run_to(stack, parent, stream, 300)
    (child,) = stack.manager.fork(parent, 1)
    stack.manager.release_request(parent)
    (grandchild,) = stack.manager.fork(child, 1)
    stack.manager.release_request(child)
    stranger = stack.manager.admit_request(0)
    run_to(stack, stranger, stack.stream(9, 400), 400)
    run_to(stack, grandchild, stream, 390, chunk=30)
    assert_cold(stack, grandchild, stream)


def test_rejected_drafts_of_a_fork_stay_its_own():
    stack = tiny_stack(drafts=3, num_blocks=10)
    stream, wrong = stack.stream(0, 400), stack.stream(1, 400)
    parent = stack.manager.admit_request(0)
    run_to(stack, parent, stream, 254)
    stack.step([(parent, wrong, 4)], accepted=[0])
    (fork,) = stack.manager.fork(parent, 1)
    stack.step([(fork, splice(stream, wrong, 256), 4)], accepted=[2])
    run_to(stack, parent, stream, 300, chunk=3)
    run_to(stack, fork, stream, 300, chunk=2)
    assert_cold(stack, parent, stream)
    assert_cold(stack, fork, stream)


def test_all_or_nothing():
    stack = tiny_stack(num_blocks=5, max_requests=4)
    manager = stack.manager
    parent = manager.admit_request(0)
    run_to(stack, parent, stack.stream(0, 300), 300)
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="3 more blocks") as caught:
        manager.fork(parent, 3)
    assert caught.value.never  # three forks and the parent need 6 blocks of 5
    other = manager.admit_request(1)
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="wait") as caught:
        manager.fork(parent, 2)
    assert not caught.value.never
    with nothing_changes(manager), pytest.raises(OutOfSlots, match=r"3 .* 2 of 4 are free"):
        manager.fork(parent, 3)
    manager.release_request(other)
    assert len(manager.fork(parent, 2)) == 2
    assert manager.fork(parent, 0) == []


@pytest.mark.parametrize("count", [-1, 1.0, True, "2", None])
def test_counts_that_are_none(count: object):
    manager = tiny_stack().manager
    request = manager.admit_request(0)
    with (
        nothing_changes(manager),
        pytest.raises(InvalidInput, match=r"count=.* whole number of at least 0"),
    ):
        manager.fork(request, count)


def test_a_request_must_be_live_and_not_in_a_plan():
    manager = tiny_stack().manager
    request = manager.admit_request(1)
    plan = manager.prepare_forward([(request, 1)])
    with nothing_changes(manager), pytest.raises(RequestError, match="plan"):
        manager.fork(request, 1)
    manager.commit(plan, partial=True)
    manager.release_request(request)
    with nothing_changes(manager), pytest.raises(RequestError, match="released"):
        manager.fork(request, 1)
