"""The free list: what is taken, shared and given back, and that errors change nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dsv4.cache.allocator import BlockAllocator
from dsv4.errors import Dsv4Error, InvalidInput, OutOfBlocks


def state_of(allocator: BlockAllocator) -> tuple[list[int], list[int]]:
    return list(allocator._free), list(allocator._references)


@contextmanager
def nothing_changes(allocator: BlockAllocator) -> Iterator[None]:
    before = state_of(allocator)
    yield
    assert state_of(allocator) == before
    allocator.check_invariants()


def test_a_fresh_pool_hands_out_ids_in_order():
    allocator = BlockAllocator(5)
    assert allocator.take(2) == [0, 1]
    assert allocator.take(1) == [2]
    assert allocator.take(2) == [3, 4]
    assert allocator.free == 0


def test_the_block_freed_last_is_taken_first():
    allocator = BlockAllocator(6)
    allocator.take(6)
    for block_id in (4, 1, 3):
        allocator.release([block_id])
    assert allocator.take(3) == [3, 1, 4]


def test_blocks_released_together_come_back_in_the_same_order():
    allocator = BlockAllocator(6)
    allocator.take(6)
    allocator.release([5, 0, 2])
    assert allocator.take(3) == [5, 0, 2]


def test_the_order_is_the_same_in_every_run():
    def run() -> list[list[int]]:
        rng, allocator, held, log = random.Random(1), BlockAllocator(20), [], []
        for _ in range(500):
            if held and rng.random() < 0.5:
                allocator.release(held.pop(rng.randrange(len(held))))
            elif (count := rng.randrange(5)) <= allocator.free:
                held.append(allocator.take(count))
                log.append(held[-1])
        return log

    assert run() == run()


def test_taken_blocks_are_distinct_and_have_one_reference():
    allocator = BlockAllocator(10)
    taken = allocator.take(7)
    assert len(set(taken)) == 7
    assert [allocator.references(b) for b in range(10)] == [1] * 7 + [0] * 3
    assert allocator.free == 3


def test_taking_nothing_changes_nothing():
    for total in (0, 3):
        allocator = BlockAllocator(total)
        with nothing_changes(allocator):
            assert allocator.take(0) == []


def test_take_gives_all_or_nothing():
    allocator = BlockAllocator(4)
    allocator.take(2)
    with nothing_changes(allocator), pytest.raises(OutOfBlocks):
        allocator.take(3)
    assert allocator.take(2) == [2, 3]


def test_running_out_while_others_hold_blocks_says_wait():
    allocator = BlockAllocator(8)
    allocator.take(5)
    with pytest.raises(OutOfBlocks, match="wait for another request") as caught:
        allocator.take(4)
    error = caught.value
    assert (error.needed, error.free, error.total, error.never) == (4, 3, 8, False)
    for number in ("4 more blocks", "a request of 4 blocks", "3 of 8"):
        assert number in str(error)


def test_asking_for_more_than_the_pool_says_never():
    allocator = BlockAllocator(8)
    with pytest.raises(OutOfBlocks, match="can never fit") as caught:
        allocator.take(9)
    assert (caught.value.needed, caught.value.total, caught.value.never) == (9, 8, True)


def test_never_depends_on_what_the_asker_would_hold_in_all():
    allocator = BlockAllocator(8)
    allocator.take(6)
    with nothing_changes(allocator):
        with pytest.raises(OutOfBlocks, match="can never fit") as caught:
            allocator.take(3, asker_blocks=9)
        assert caught.value.never
        assert "a request of 9 blocks" in str(caught.value)
        with pytest.raises(OutOfBlocks, match="wait") as caught:
            allocator.take(3, asker_blocks=8)
        assert not caught.value.never


def test_a_shared_block_is_free_only_after_its_last_owner():
    allocator = BlockAllocator(4)
    taken = allocator.take(2)
    allocator.share(taken)
    allocator.share(taken[:1])
    assert [allocator.references(b) for b in taken] == [3, 2]
    assert allocator.release(taken) == []
    assert allocator.release(taken) == [taken[1]]
    assert allocator.free == 3
    assert allocator.release(taken[:1]) == [taken[0]]
    assert allocator.free == 4
    allocator.check_invariants()


def test_a_list_may_name_a_block_as_often_as_it_is_held():
    allocator = BlockAllocator(4)
    a, b = allocator.take(2)
    allocator.share([a, a])
    assert allocator.references(a) == 3
    assert allocator.release([a, b, a]) == [b]
    assert allocator.references(a) == 1
    assert allocator.release([a]) == [a]
    allocator.check_invariants()


def test_a_block_named_more_often_than_it_is_held_releases_nothing():
    allocator = BlockAllocator(4)
    a, b = allocator.take(2)
    allocator.share([a])
    with nothing_changes(allocator), pytest.raises(InvalidInput, match=rf"\[{a}\]"):
        allocator.release([b, a, a, a])


def test_releasing_twice_raises_and_changes_nothing():
    allocator = BlockAllocator(4)
    taken = allocator.take(3)
    allocator.release(taken[:1])
    for again in (taken[:1], taken, [taken[1], taken[0]]):
        with nothing_changes(allocator), pytest.raises(InvalidInput, match="more often"):
            allocator.release(again)


def test_sharing_a_free_block_raises_and_shares_none():
    allocator = BlockAllocator(4)
    (held,) = allocator.take(1)
    with nothing_changes(allocator), pytest.raises(InvalidInput, match="block 2 is free"):
        allocator.share([held, 2])


@pytest.mark.parametrize("block_id", [-1, 4, 2**40])
def test_unknown_ids_raise_and_change_nothing(block_id: int):
    allocator = BlockAllocator(4)
    (held,) = allocator.take(1)
    message = f"block id {block_id} is not in this pool of 4"
    with nothing_changes(allocator):
        with pytest.raises(InvalidInput, match=message):
            allocator.references(block_id)
        for ids in ([held, block_id], [held, held, block_id], [block_id, block_id]):
            with pytest.raises(InvalidInput, match=message):
                allocator.share(ids)
            with pytest.raises(InvalidInput):
                allocator.release(ids)


@pytest.mark.parametrize("total", [-1, 1.5, float("nan"), float("inf"), True, "4", None])
def test_a_pool_of_no_whole_size_is_refused(total: object):
    with pytest.raises(InvalidInput, match="whole number"):
        BlockAllocator(total)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [-1, -5, 1.5, float("nan"), float("inf"), True])
def test_a_count_that_is_no_count_is_refused_and_changes_nothing(count: object):
    allocator = BlockAllocator(4)
    with nothing_changes(allocator), pytest.raises(InvalidInput):
        allocator.take(count)  # type: ignore[arg-type]


def test_an_empty_pool_never_fits_anything():
    allocator = BlockAllocator(0)
    allocator.check_invariants()
    with pytest.raises(OutOfBlocks, match="0 of 0") as caught:
        allocator.take(1)
    assert caught.value.never


@pytest.mark.parametrize(
    ("free", "references"),
    [
        ([3, 2], [1, 0, 0, 0]),  # block 1 is neither free nor held
        ([3, 2, 1, 0], [1, 0, 0, 0]),  # block 0 is both
        ([3, 2, 2, 1], [1, 0, 0, 0]),  # block 2 is free twice
        ([3, 2, 1], [-1, 0, 0, 0]),
        ([3, 2, 1, 4], [1, 0, 0, 0]),  # block 4 does not exist
    ],
)
def test_check_invariants_sees_a_broken_free_list(free: list[int], references: list[int]):
    allocator = BlockAllocator(4)
    allocator._free, allocator._references = free, references
    with pytest.raises(Dsv4Error):
        allocator.check_invariants()


def test_free_and_held_blocks_always_add_up():
    rng, allocator = random.Random(2), BlockAllocator(16)
    owners: list[list[int]] = []
    for _ in range(3000):
        action = rng.random()
        if action < 0.4 and (count := rng.randrange(6)) <= allocator.free:
            owners.append(allocator.take(count))
        elif action < 0.6 and owners:
            ids = list(rng.choice(owners))
            allocator.share(ids)
            owners.append(ids)
        elif owners:
            allocator.release(owners.pop(rng.randrange(len(owners))))
        held = [b for ids in owners for b in ids]
        assert allocator.free + len(set(held)) == allocator.total
        assert [allocator.references(b) for b in range(16)] == [held.count(b) for b in range(16)]
        allocator.check_invariants()
