"""Requests live and end: slots, blocks, errors that change nothing, bytes that were promised."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dsv4.cache import build
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, compute_block_budget
from dsv4.errors import (
    ContextOverflow,
    Dsv4Error,
    InvalidInput,
    OutOfBlocks,
    OutOfSlots,
    PoolTooSmall,
    RequestError,
    SchemaError,
)
from dsv4.model import PRESETS, ModelSpec, v4_layers
from tests.oracles.bookkeeping import nothing_changes, snapshot
from tests.support.owned import bytes_of

TINY = ModelSpec.preset("tiny")
NOT_COUNTS = [-1, -(10**30), 1.5, float("nan"), float("inf"), float("-inf"), True, "3", None]


def tiny_manager(
    *, num_blocks: int = 8, max_requests: int = 3, max_context: int = 1000
) -> KVCacheManager:
    schema = CacheSchema.build(TINY, max_context=max_context)
    return KVCacheManager(
        schema, num_blocks=num_blocks, max_requests=max_requests, max_step_tokens=256
    )


def grow(manager: KVCacheManager, request: Request, tokens: int) -> None:
    """Lets a request compute so many tokens."""
    while tokens:
        step = min(tokens, manager.memory.buffers.max_tokens)
        plan = manager.prepare_forward([(request, step)])
        plan.mark_appended()  # as if
        manager.commit(plan)
        tokens -= step


# ---- the life of a request ----------------------------------------------------------------------


def test_a_request_gets_a_slot_and_the_blocks_of_its_prompt():
    manager = tiny_manager()
    request = manager.admit_request(300)
    assert (request.slot, request.block_ids, request.length) == (0, [0, 1, 2], 0)
    assert manager.admit_request(0).block_ids == []
    assert manager.admit_request(128).block_ids == [3]
    stats = manager.stats()
    assert (stats.blocks_total, stats.blocks_free, stats.blocks_live) == (8, 4, 4)
    assert (stats.slots_total, stats.slots_free, stats.requests_live) == (3, 0, 3)
    assert stats.block_bytes_live == 4 * manager.schema.bytes.block
    assert stats.slot_bytes_live == 3 * manager.schema.bytes.slot
    manager.check_invariants()


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (1000, 8)]
)
def test_blocks_cover_the_tokens(tokens: int, blocks: int):
    manager = tiny_manager()
    assert len(manager.admit_request(tokens).block_ids) == blocks


def test_extend_adds_the_missing_blocks_behind_the_length():
    manager = tiny_manager()
    request = manager.admit_request(100)
    assert manager.room.extend(request, 128) == []
    assert manager.room.extend(request, 129) == [1]
    assert manager.room.extend(request, 129) == []
    grow(manager, request, 130)
    assert manager.room.extend(request, 126) == []
    assert manager.room.extend(request, 127) == [2]
    assert request.block_ids == [0, 1, 2]
    assert manager.room.extend(request, 0) == []
    manager.check_invariants()


def test_allocate_block_adds_one_at_the_end():
    manager = tiny_manager()
    request, other = manager.admit_request(1), manager.admit_request(1)
    assert manager.allocate_block(request) == 2
    assert manager.allocate_block(other) == 3
    assert [manager.room.block_id(request, j) for j in range(2)] == [0, 2]
    assert [manager.room.block_id(other, j) for j in range(2)] == [1, 3]
    assert manager.stats().blocks_free == 4


def test_release_gives_everything_back():
    manager = tiny_manager()
    before = manager.stats()
    requests = [manager.admit_request(n) for n in (10, 300, 0)]
    grow(manager, requests[1], 300)
    for request in (requests[1], requests[0], requests[2]):
        manager.release_request(request)
        assert request.released
        assert request.block_ids == []
        manager.check_invariants()
    assert manager.stats() == before


def test_a_slot_is_used_again_and_the_new_request_is_another_one():
    manager = tiny_manager(max_requests=1)
    first = manager.admit_request(200)
    grow(manager, first, 200)
    manager.release_request(first)
    second = manager.admit_request(5)
    assert second.slot == first.slot
    assert second.serial != first.serial
    assert (second.length, second.published_blocks) == (0, 0)


def test_the_same_calls_give_the_same_ids():
    def run() -> list[list[int]]:
        manager = tiny_manager(num_blocks=20, max_requests=4)
        a, b = manager.admit_request(300), manager.admit_request(500)
        manager.release_request(a)
        c = manager.admit_request(700)
        manager.room.extend(b, 900)
        return [b.block_ids, c.block_ids]

    assert run() == run()


def test_reset_slot_starts_the_request_over_with_its_blocks():
    manager = tiny_manager()
    request, other = manager.admit_request(200), manager.admit_request(1)
    grow(manager, request, 150)
    manager.memory.slot_arena.bytes.fill_(0xFF)
    blocks = list(request.block_ids)
    manager.room.reset_slot(request)
    assert (request.length, request.block_ids) == (0, blocks)
    assert not manager.memory.slot_arena.bytes[request.slot].any()
    assert (manager.memory.slot_arena.bytes[other.slot] == 0xFF).all()
    assert (manager.memory.slot_arena.bytes[2] == 0xFF).all()
    manager.check_invariants()
    grow(manager, request, 256)
    assert request.length == 256
    assert manager.memory.block_table[request.slot, :2].tolist() == request.block_ids


def test_can_admit_says_what_admit_would_do():
    manager = tiny_manager(num_blocks=5, max_requests=2)
    for tokens in (-1, 0, 640, 641, 1000, 1001):
        expected = tokens >= 0 and tokens <= 640
        assert manager.room.can_admit(tokens) == expected
        if expected:
            manager.release_request(manager.admit_request(tokens))
    manager.admit_request(0)
    manager.admit_request(0)
    assert not manager.room.can_admit(0)


def test_tokens_live_is_the_sum_of_the_lengths():
    manager = tiny_manager()
    a, b = manager.admit_request(), manager.admit_request()
    grow(manager, a, 130)
    grow(manager, b, 7)
    assert manager.stats().tokens_live == 137
    manager.release_request(a)
    assert manager.stats().tokens_live == 7
    assert manager.stats().to_dict()["tokens_live"] == 7


# ---- planned bytes are allocated bytes ----------------------------------------------------------


@pytest.mark.parametrize("entry_format", ENTRY_FORMATS)
@pytest.mark.parametrize("preset", PRESETS)
def test_planned_bytes_equal_allocated_bytes(preset: str, entry_format: str):
    # tensors are counted: those of large models need no memory for that
    device = "cpu" if "tiny" in preset else "meta"
    for index_format in INDEX_FORMATS:
        for max_draft_tokens in (0, 1, 4, 16):
            schema = CacheSchema.build(
                ModelSpec.preset(preset),
                max_context=512,
                entry_format=entry_format,
                index_format=index_format,
                max_draft_tokens=max_draft_tokens,
            )
            for max_requests in (1, 2):
                sizes = {
                    "max_requests": max_requests,
                    "other_bytes": build.other_bytes(
                        schema, max_requests=max_requests, max_step_tokens=16
                    ),
                }
                with pytest.raises(PoolTooSmall) as caught:
                    compute_block_budget(schema, memory_bytes=0, **sizes)
                memory = caught.value.minimum_bytes + schema.bytes.block + 17
                budget = compute_block_budget(schema, memory_bytes=memory, **sizes)
                assert budget.num_blocks == 5
                assert budget.unused_bytes == 17
                assert budget.total_bytes + budget.unused_bytes == memory
                manager = build.manager_from_budget(
                    schema, budget, max_step_tokens=16, device=device, backend="reference"
                )
                used = manager.memory.memory_bytes()
                assert (used.block_arena, used.slot_arena, used.block_table) == (
                    budget.block_arena_bytes,
                    budget.slot_arena_bytes,
                    budget.block_table_bytes,
                )
                # and that is what torch has really allocated
                assert bytes_of(manager, device) == used.total == budget.total_bytes


@pytest.mark.parametrize("preset", PRESETS)
def test_the_minimum_works_when_given_and_one_byte_less_does_not(preset: str):
    schema = CacheSchema.build(ModelSpec.preset(preset), max_context=512)
    other_bytes = build.other_bytes(schema, max_requests=2, max_step_tokens=16)
    sizes = {"max_requests": 2, "other_bytes": other_bytes}
    with pytest.raises(PoolTooSmall) as caught:
        compute_block_budget(schema, memory_bytes=1000, **sizes)
    minimum = caught.value.minimum_bytes
    assert f"{minimum:,}" in str(caught.value)
    assert "512 tokens needs 4 blocks" in str(caught.value)
    with pytest.raises(PoolTooSmall) as caught:
        compute_block_budget(schema, memory_bytes=minimum - 1, **sizes)
    assert caught.value.minimum_bytes == minimum
    budget = compute_block_budget(schema, memory_bytes=minimum, **sizes)
    assert (budget.num_blocks, budget.unused_bytes) == (4, 0)
    manager = build.manager_from_budget(schema, budget, max_step_tokens=16)
    assert len(manager.admit_request(512).block_ids) == 4


def test_a_shorter_context_needs_less_memory():
    schema = CacheSchema.build(TINY, max_context=4096)
    needs = []
    for context in (None, 1024, 1):
        with pytest.raises(PoolTooSmall) as caught:
            compute_block_budget(schema, memory_bytes=0, max_requests=1, context=context)
        needs.append(caught.value.minimum_bytes)
    assert needs[0] - needs[1] == 24 * schema.bytes.block
    assert needs[1] - needs[2] == 7 * schema.bytes.block


def test_a_window_only_model_needs_no_blocks():
    """Planned bytes must work when given, also where no layer keeps entries."""
    model = replace(TINY, name="window-only", layers=v4_layers([0, 0], backbone=2))
    schema = CacheSchema.build(model, max_context=512)
    manager = build.manager_from_memory(
        schema, memory_bytes=2**20, max_requests=1, max_step_tokens=16
    )
    assert manager._parts.table.allocator.total == 0
    request = manager.admit_request(512)
    manager.commit(manager.prepare_forward([(request, 5)]), partial=True)
    manager.check_invariants()
    manager.release_request(request)


def test_fresh_memory_is_zeroed_padding_included():
    manager = KVCacheManager(
        CacheSchema.build(TINY, max_context=512, align_bytes=576),
        num_blocks=2,
        max_requests=2,
        max_step_tokens=16,
        prefix=PrefixOptions(snapshots=3),
    )
    assert manager._parts.prefix
    for memory in (
        manager.memory.block_arena,
        manager.memory.slot_arena,
        manager._parts.prefix.pool,
    ):
        assert memory.bytes.numel()
        assert not memory.bytes.any()


def test_a_manager_without_owners_gives_its_memory_back_at_once():
    """No circle of references: its gigabytes must not wait for the garbage collector."""
    manager = KVCacheManager(
        CacheSchema.build(TINY, max_context=512),
        num_blocks=2,
        max_requests=2,
        max_step_tokens=16,
        prefix=PrefixOptions(),
    )
    request = manager.admit_request(5)
    manager.commit(manager.prepare_forward([(request, 5)]), partial=True)
    gone = weakref.ref(manager.memory.block_arena)
    gc.collect()
    gc.disable()
    try:
        del manager
        assert gone() is None
    finally:
        gc.enable()


def test_layers_of_one_ratio_overlap_all_or_none():
    """They share the work items of a step."""
    first, *rest = v4_layers([4, 4, 0], backbone=3)
    schema = CacheSchema.build(replace(TINY, layers=(replace(first, overlap=False), *rest)))
    with pytest.raises(SchemaError, match=r"groups of 4 tokens overlap .* but not in layer 0"):
        KVCacheManager(schema, num_blocks=2, max_requests=1, max_step_tokens=16)


def test_a_budget_for_more_context_than_the_schema_has_is_refused():
    schema = CacheSchema.build(TINY, max_context=512)
    with pytest.raises(InvalidInput, match="max_context=512"):
        compute_block_budget(schema, memory_bytes=2**40, max_requests=1, context=513)


@pytest.mark.parametrize("value", [v for v in NOT_COUNTS if v is not None])
@pytest.mark.parametrize("argument", ["memory_bytes", "max_requests", "context"])
def test_a_budget_from_something_that_is_no_count_is_refused(argument: str, value: object):
    schema = CacheSchema.build(TINY, max_context=512)
    arguments = {"memory_bytes": 2**30, "max_requests": 1, "context": 512, argument: value}
    with pytest.raises(InvalidInput, match=f"{argument}="):
        compute_block_budget(schema, **arguments)


@pytest.mark.parametrize("value", [0, *NOT_COUNTS])
@pytest.mark.parametrize("argument", ["num_blocks", "max_requests", "max_step_tokens"])
def test_a_manager_of_no_whole_size_is_refused(argument: str, value: object):
    schema = CacheSchema.build(TINY, max_context=512)
    arguments = {"num_blocks": 2, "max_requests": 1, "max_step_tokens": 16, argument: value}
    with pytest.raises(InvalidInput, match=f"{argument}="):
        KVCacheManager(schema, **arguments)


# ---- errors change nothing ----------------------------------------------------------------------


def test_admitting_past_max_requests():
    manager = tiny_manager(max_requests=2)
    manager.admit_request(10)
    manager.admit_request(10)
    for tokens in (0, 10):
        with (
            nothing_changes(manager),
            pytest.raises(OutOfSlots, match="all 2 state slots") as caught,
        ):
            manager.admit_request(tokens)
        assert caught.value.total == 2


@pytest.mark.parametrize("tokens", [1001, 10**9, 10**30])
def test_admitting_past_the_context(tokens: int):
    manager = tiny_manager()
    with (
        nothing_changes(manager),
        pytest.raises(ContextOverflow, match="max_context=1000") as caught,
    ):
        manager.admit_request(tokens)
    assert (caught.value.asked_tokens, caught.value.max_context_tokens) == (tokens, 1000)


@pytest.mark.parametrize("tokens", NOT_COUNTS)
def test_a_prompt_length_that_is_no_count(tokens: object):
    manager = tiny_manager()
    with nothing_changes(manager), pytest.raises(InvalidInput, match="whole number"):
        manager.admit_request(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", NOT_COUNTS)
def test_extending_by_something_that_is_no_count(tokens: object):
    manager = tiny_manager()
    request = manager.admit_request(1)
    with (
        nothing_changes(manager),
        pytest.raises(InvalidInput, match=r"tokens=.* whole number of at least 0"),
    ):
        manager.room.extend(request, tokens)  # type: ignore[arg-type]


def test_a_request_larger_than_the_pool_never_fits():
    manager = tiny_manager(num_blocks=4)
    manager.admit_request(1)
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="can never fit") as caught:
        manager.admit_request(513)
    error = caught.value
    assert (error.needed, error.free, error.total, error.never) == (5, 3, 4, True)


def test_never_is_said_even_when_all_slots_are_taken():
    manager = tiny_manager(num_blocks=4, max_requests=1)
    manager.admit_request(1)
    with nothing_changes(manager), pytest.raises(OutOfBlocks) as caught:
        manager.admit_request(513)
    assert caught.value.never


def test_a_request_that_others_keep_out_must_wait():
    manager = tiny_manager(num_blocks=4)
    other = manager.admit_request(256)
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="wait for another") as caught:
        manager.admit_request(512)
    error = caught.value
    assert (error.needed, error.free, error.total, error.never) == (4, 2, 4, False)
    manager.release_request(other)
    assert len(manager.admit_request(512).block_ids) == 4


def test_extending_tells_wait_from_never():
    manager = tiny_manager(num_blocks=4)
    request, other = manager.admit_request(256), manager.admit_request(1)
    with nothing_changes(manager):
        with pytest.raises(OutOfBlocks, match="wait") as caught:
            manager.room.extend(request, 512)
        assert (caught.value.needed, caught.value.free, caught.value.never) == (2, 1, False)
        with pytest.raises(OutOfBlocks, match="can never fit") as caught:
            manager.room.extend(request, 513)
        assert (caught.value.needed, caught.value.free, caught.value.never) == (3, 1, True)
        with pytest.raises(ContextOverflow) as overflow:
            manager.room.extend(request, 1001)
        assert overflow.value.asked_tokens == 1001
    manager.release_request(other)
    assert manager.room.extend(request, 512) == [2, 3]


def test_extending_past_the_context_counts_the_length():
    manager = tiny_manager()
    request = manager.admit_request()
    grow(manager, request, 600)
    with nothing_changes(manager), pytest.raises(ContextOverflow) as caught:
        manager.room.extend(request, 401)
    assert caught.value.asked_tokens == 1001
    assert len(manager.room.extend(request, 400)) == 3


def test_one_more_block_than_there_are_says_wait():
    manager = tiny_manager(num_blocks=3)
    request, _ = manager.admit_request(256), manager.admit_request(1)
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="wait") as caught:
        manager.allocate_block(request)
    assert (caught.value.needed, caught.value.free, caught.value.never) == (1, 0, False)


def test_one_more_block_than_the_pool_has_says_never():
    manager = tiny_manager(num_blocks=3)
    request = manager.admit_request(384)
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="never") as caught:
        manager.allocate_block(request)
    assert caught.value.never


def test_a_block_past_the_end_of_the_table_row():
    manager = tiny_manager(num_blocks=8, max_context=200)
    request = manager.admit_request(200)
    assert len(request.block_ids) == manager.memory.block_table.shape[1] == 2
    with (
        nothing_changes(manager),
        pytest.raises(ContextOverflow, match="max_context=200") as caught,
    ):
        manager.allocate_block(request)
    assert caught.value.asked_tokens == 384


@pytest.mark.parametrize("block", [-1, 2, 10**30, float("nan"), float("inf")])
def test_looking_past_the_end_of_a_requests_table(block: int):
    manager = tiny_manager()
    request = manager.admit_request(200)
    with nothing_changes(manager), pytest.raises(InvalidInput, match="holds 2 blocks"):
        manager.room.block_id(request, block)


CALLS: dict[str, Callable[[KVCacheManager, Request], object]] = {
    "extend": lambda manager, request: manager.room.extend(request, 1),
    "allocate_block": lambda manager, request: manager.allocate_block(request),
    "block_id": lambda manager, request: manager.room.block_id(request, 0),
    "reset_slot": lambda manager, request: manager.room.reset_slot(request),
    "release_request": lambda manager, request: manager.release_request(request),
    "prepare_forward": lambda manager, request: manager.prepare_forward([(request, 1)]),
}


@pytest.mark.parametrize("call", CALLS)
def test_using_a_released_request(call: str):
    manager = tiny_manager()
    request, other = manager.admit_request(200), manager.admit_request(200)
    manager.release_request(request)
    heir = manager.admit_request(200)  # has the same slot and the same blocks
    assert (heir.slot, heir.block_ids) == (request.slot, [0, 1])
    with (
        nothing_changes(manager),
        pytest.raises(RequestError, match=f"{request.serial} .*released"),
    ):
        CALLS[call](manager, request)
    assert not other.released


@pytest.mark.parametrize("call", CALLS)
def test_using_a_request_of_another_manager(call: str):
    manager, stranger = tiny_manager(), tiny_manager()
    manager.admit_request(200)
    foreign = stranger.admit_request(200)
    with (
        nothing_changes(manager),
        nothing_changes(stranger),
        pytest.raises(RequestError, match="not a request that this manager admitted"),
    ):
        CALLS[call](manager, foreign)


@pytest.mark.parametrize("call", ["reset_slot", "release_request"])
def test_a_request_in_an_open_plan_cannot_end_or_start_over(call: str):
    manager = tiny_manager()
    request, other = manager.admit_request(200), manager.admit_request(200)
    plan = manager.prepare_forward([(request, 3)])
    with nothing_changes(manager), pytest.raises(RequestError, match=r"plan that is still open"):
        CALLS[call](manager, request)
    CALLS[call](manager, other)
    manager.commit(plan, partial=True)
    assert request.length == 3
    CALLS[call](manager, request)


def test_releasing_twice_leaves_the_heirs_blocks_alone():
    manager = tiny_manager()
    request = manager.admit_request(200)
    manager.release_request(request)
    with nothing_changes(manager), pytest.raises(RequestError):
        manager.release_request(request)


# ---- acquire ------------------------------------------------------------------------------------


def allocations(call: Callable[[], object]) -> int:
    """How many times torch asked its CPU allocator for memory during the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    return sum(
        event.name == "[memory]" or event.self_cpu_memory_usage > 0 for event in recorded.events()
    )


def test_acquire_allocates_nothing():
    manager = tiny_manager()
    request = manager.admit_request(10)
    plan = manager.prepare_forward([(request, 3)])

    def look_at_every_layer() -> None:
        for layer in range(len(manager.schema.layers)):
            handle = manager.acquire(layer, plan.batch)
            handle.read_swa_view().pages  # noqa: B018
            if handle.schema.spec.ratio:
                handle.read_classical_view().planes.entries_fp8  # noqa: B018
            if handle.schema.spec.index_keys != "none":
                handle.read_indexer_view().planes.indexer_keys_fp4  # noqa: B018

    assert allocations(lambda: torch.empty(1000)) > 0  # the counter counts
    assert allocations(look_at_every_layer) == 0


def test_acquire_gives_the_same_object_each_time():
    manager = tiny_manager()
    request = manager.admit_request(10)
    handles = [manager.acquire(layer) for layer in range(len(manager.schema.layers))]
    assert len({id(handle) for handle in handles}) == len(handles)
    assert all(handle.batch is None for handle in handles)
    plan = manager.prepare_forward([(request, 3)])
    for layer, handle in enumerate(handles):
        assert manager.acquire(layer, plan.batch) is handle
        assert handle.batch is plan.batch
        assert (handle.layer, handle.schema) == (layer, manager.schema.layers[layer])
        assert handle.read_swa_view() is handle.read_swa_view()


@pytest.mark.parametrize("layer", [-1, 5, 10**30, float("nan")])
def test_an_unknown_layer_is_refused(layer: int):
    manager = tiny_manager()
    with nothing_changes(manager), pytest.raises(InvalidInput, match="model with 5 layers"):
        manager.acquire(layer)


# ---- check_invariants ---------------------------------------------------------------------------


def lose_a_block(manager: KVCacheManager, a: Request, b: Request) -> None:
    a.block_ids.pop()


def hold_a_block_twice(manager: KVCacheManager, a: Request, b: Request) -> None:
    a.block_ids.append(b.block_ids[0])


def hold_a_free_block(manager: KVCacheManager, a: Request, b: Request) -> None:
    a.block_ids.append(manager._parts.table.allocator._free[-1])


def free_a_held_block(manager: KVCacheManager, a: Request, b: Request) -> None:
    manager._parts.table.allocator.release(b.block_ids[:1])


def lose_a_slot(manager: KVCacheManager, a: Request, b: Request) -> None:
    manager._parts.table.free_slots.pop()


def free_a_held_slot(manager: KVCacheManager, a: Request, b: Request) -> None:
    manager._parts.table.free_slots.append(a.slot)


def swap_slots(manager: KVCacheManager, a: Request, b: Request) -> None:
    a.slot, b.slot = b.slot, a.slot


def outgrow_the_blocks(manager: KVCacheManager, a: Request, b: Request) -> None:
    manager._parts.table.numbers[0, a.slot] = 129


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        hold_a_block_twice,
        hold_a_free_block,
        free_a_held_block,
        lose_a_slot,
        free_a_held_slot,
        swap_slots,
        outgrow_the_blocks,
    ],
)
def test_check_invariants_finds(damage: Callable[[KVCacheManager, Request, Request], None]):
    manager = tiny_manager()
    a, b = manager.admit_request(100), manager.admit_request(100)
    manager.check_invariants()
    damage(manager, a, b)
    with pytest.raises(Dsv4Error):
        manager.check_invariants()


def test_looking_changes_nothing():
    manager = tiny_manager()
    manager.admit_request(100)
    before = snapshot(manager)
    manager.stats()
    manager.memory.memory_bytes()
    manager.check_invariants()
    manager.room.can_admit(5)
    manager.acquire(0)
    assert snapshot(manager) == before
