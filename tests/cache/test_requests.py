"""The table of live requests, by itself: slots, blocks and numbers, without torch."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.requests import LENGTH, WRITTEN, Request, RequestTable
from dsv4.cache.schema import CacheSchema
from dsv4.errors import Dsv4Error, OutOfBlocks, OutOfSlots, RequestError
from dsv4.model import ModelSpec

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=2048)
NOTHING = Resume(start=0, reused_tokens=0, end=0, source="nothing")


def table(num_blocks: int = 8, max_requests: int = 3) -> RequestTable:
    return RequestTable(SCHEMA, num_blocks=num_blocks, max_requests=max_requests)


class Reclaiming(PrefixIndex):
    def pinned_blocks(self, excluding: object = (), *, root: object = None) -> int:
        return 0

    def evictable_of(self, root: object, excluding: object = ()) -> int:
        return 0

    def trim(self, root: object, most: int) -> int:
        return 0

    def drop_for(
        self, victims: Sequence[PrefixNode], askers: object, *, over_quota: int = 0
    ) -> None:
        self.drop(victims)


def opened(made: RequestTable, blocks: int = 0) -> Request:
    request = made.make_request(made.free_slots[-1], made.supply.take(blocks), NOTHING)
    made.enlist(request)
    return request


def test_slots_and_blocks_come_from_the_table_and_go_back_to_it():
    made = table()
    first, second = opened(made, 2), opened(made, 1)
    assert (first.slot, second.slot) == (0, 1)
    assert (first.block_ids, second.block_ids) == ([0, 1], [2])
    made.check_invariants()
    made.close(first)
    assert first.released
    assert made.allocator.free == 7
    third = opened(made, 1)
    assert (third.slot, third.block_ids) == (0, [0])
    assert third.serial not in (first.serial, second.serial)
    made.check_invariants()


def test_a_request_is_live_in_its_own_table_only():
    made, other = table(), table()
    request = opened(made)
    twin = opened(other)
    made.require_live(request)
    for foreign in (twin, None, 0, "request"):
        with pytest.raises(RequestError, match="not a request that this manager admitted"):
            made.require_live(foreign)  # type: ignore[arg-type]
    made.close(request)
    heir = opened(made)
    assert heir.slot == request.slot
    with pytest.raises(RequestError, match=f"request {request.serial} has been released"):
        made.require_live(request)
    made.require_live(heir)


def test_slots_run_out():
    made = table(max_requests=2)
    made.require_slots(2)
    opened(made)
    with pytest.raises(OutOfSlots) as caught:
        made.require_slots(2)
    assert (caught.value.total, caught.value.needed, caught.value.free) == (2, 2, 1)


def test_growing_is_all_or_nothing():
    made = table(num_blocks=5)
    a, b = opened(made, 1), opened(made, 1)
    made.grow([(a, 2), (b, 1)])
    assert (a.block_ids, b.block_ids) == ([0, 2], [1])
    with pytest.raises(OutOfBlocks) as caught:
        made.grow([(a, 3), (b, 3)])
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert (a.block_ids, b.block_ids) == ([0, 2], [1])
    made.check_invariants()


def test_what_is_short_is_reclaimed_before_it_is_refused():
    made = table(num_blocks=4)
    kept = opened(made, 3)
    index = Reclaiming(made.allocator)
    made.supply.reclaimer = index
    root = index.add(b"0", kept.block_ids[0], None)
    index.add(b"1", kept.block_ids[1], root)
    assert len(made.supply.take(1)) == 1
    with pytest.raises(OutOfBlocks, match="0 of 4 are free: wait"):
        made.supply.take(2)
    made.cut(kept, 0)
    reserved = made.supply.reserve(2)
    assert len(index) == 2
    made.supply.cancel(reserved)
    assert made.supply.settle(made.supply.reserve(2)) == reserved.block_ids
    assert len(index) == 1
    with pytest.raises(OutOfBlocks, match="0 of 4 are free, 1 cached and idle"):
        made.supply.take(2)
    index.check_invariants()


def test_cutting_gives_blocks_back_and_forgets_that_they_were_published():
    made = table()
    request = opened(made, 4)
    request.published_blocks = 3
    made.cut(request, 2)
    assert (request.block_ids, request.published_blocks) == ([0, 1], 2)
    made.allocator.share([0])
    made.cut_shared(request)
    assert (request.block_ids, request.published_blocks) == ([1], 0)


def test_numbers_are_columns_of_the_table():
    made = table()
    a, b = opened(made, 1), opened(made, 1)
    slots = np.array([b.slot, a.slot])
    made.note_written(slots, np.array([7, 9]))
    made.move(slots, np.array([5, 6]))
    assert (a.length, b.length) == (6, 5)
    assert (a.written_tokens, b.written_tokens) == (9, 7)
    assert made.numbers[LENGTH, slots].tolist() == [5, 6]
    made.note_written(slots, np.array([6, 8]))  # never less than before
    assert made.numbers[WRITTEN, slots].tolist() == [7, 9]
    made.close(a)
    heir = opened(made)
    assert (heir.slot, heir.length, heir.written_tokens) == (0, 0, 0)
    assert (a.length, a.written_tokens) == (6, 9)


def test_restarting_forgets_what_was_written():
    made = table()
    request = opened(made, 4)
    made.numbers[0, request.slot] = 300
    resume = Resume(start=128, reused_tokens=256, end=300, source="replay")
    request.restart(resume)
    assert (request.length, request.written_tokens) == (128, 128)
    assert (request.reused_tokens, request.rings_exact_from) == (256, 256)
    assert request.resume is resume


def test_a_fork_is_where_its_parent_is():
    made = table()
    parent = opened(made, 2)
    parent.restart(Resume(start=128, reused_tokens=256, end=300, source="replay"))
    made.numbers[0, parent.slot] = 140
    made.allocator.share(parent.block_ids)
    fork = made.make_request(made.free_slots[-1], list(parent.block_ids), parent.resume)
    fork.continue_from(parent)
    made.enlist(fork)
    assert (fork.slot, fork.length, fork.written_tokens) == (1, 140, 140)
    assert (fork.reused_tokens, fork.rings_exact_from) == (256, 256)
    assert fork.published_blocks == 0
    made.check_invariants()


def test_broken_books_are_noticed():
    for breakage in ("slot lost", "block lost", "too long"):
        made = table()
        request = opened(made, 1)
        if breakage == "slot lost":
            made.free_slots.pop()
        elif breakage == "block lost":
            request.block_ids.pop()
        else:
            made.numbers[0, request.slot] = 129
        with pytest.raises(Dsv4Error):
            made.check_invariants()


def test_books_balance_whatever_happens():
    rng, made = random.Random(5), table(num_blocks=12, max_requests=4)
    live: list[Request] = []
    for _ in range(2000):
        action = rng.random()
        try:
            if action < 0.3:
                made.require_slots()
                live.append(opened(made, rng.randrange(4)))
            elif action < 0.6 and live:
                made.grow([(request, rng.randrange(6)) for request in live])
            elif action < 0.8 and live:
                made.cut(rng.choice(live), rng.randrange(4))
            elif live:
                made.close(live.pop(rng.randrange(len(live))))
        except (OutOfBlocks, OutOfSlots):
            pass
        made.check_invariants()
        assert made.allocator.held == sum(len(request.block_ids) for request in live)


def test_nothing_of_it_needs_torch():
    code = """
import sys
sys.modules["torch"] = None
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prefix.trail import token_ids
from dsv4.cache.requests import RequestTable
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
table = RequestTable(CacheSchema.build(ModelSpec.preset("tiny")), num_blocks=4, max_requests=2)
index = PrefixIndex(table.allocator)
index.pinned_blocks = lambda excluding: 0; table.supply.reclaimer = index
resume = Resume(start=0, reused_tokens=0, end=0, source="nothing")
request = table.make_request(1, table.supply.take(2), resume)
print(request.block_ids, token_ids([3, 4]).tolist())
"""
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False
    )
    assert result.stdout.strip() == "[0, 1] [3, 4]", result.stderr
