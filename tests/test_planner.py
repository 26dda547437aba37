"""The planner's promise: its bytes are the bytes, and one more of anything does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.cache.schema import CacheSchema, bytes_by_kind
from dsv4.errors import InvalidInput, PoolTooSmall
from dsv4.model import PRESETS, v4_layers
from dsv4.planner import Sizing, plan
from dsv4.units import parse_bytes

FLASH = CacheSchema.build(PRESETS["v4-flash"])
TINY = CacheSchema.build(PRESETS["tiny"])
GIB = 2**30
FORMATS = {"entries": "fp8_ds", "window": "fp8_ds", "index_keys": "mxfp4", "pages": "planes"}


def check_exact(schema: CacheSchema, found: Sizing) -> None:
    """What a manager allocates for the budget, counted from the schema's own sizes."""
    budget = found.budget
    assert budget is not None
    assert budget.total_bytes == (
        budget.num_blocks * schema.bytes.block
        + budget.max_requests * schema.bytes.slot
        + budget.max_requests * schema.max_blocks_per_request * 4
    )
    assert found.memory_bytes is None or (
        budget.total_bytes + budget.unused_bytes == found.memory_bytes
    )
    assert found.context_tokens is not None
    assert found.requests is not None
    assert budget.max_requests == found.requests
    if schema.bytes.block:
        assert budget.num_blocks >= found.requests * schema.blocks_for(found.context_tokens)
    assert found.needed_bytes is not None
    assert found.needed_bytes <= budget.total_bytes


# ---- sizes ----------------------------------------------------------------------------------


def test_sizes_are_the_schema_s_and_kept_apart() -> None:
    found = plan(FLASH)
    assert found.question == "bytes"
    assert found.bytes_per_token == 3518.0
    assert found.bytes_per_request == FLASH.bytes.slot + FLASH.bytes.block_table_row
    assert (found.block_bytes, found.slot_bytes) == (FLASH.bytes.block, FLASH.bytes.slot)
    assert found.block_table_row_bytes == 32_768
    assert found.block_tokens == 128
    assert found.fingerprint == FLASH.fingerprint
    assert found.formats == FORMATS
    assert found.bytes_by_kind == bytes_by_kind(FLASH)
    answers = (found.memory_bytes, found.context_tokens, found.requests, found.needed_bytes)
    assert answers == (None,) * 4
    assert found.budget is None


def test_sizes_do_not_move_with_the_question() -> None:
    asked = plan(FLASH, memory_bytes=80 * GIB, context_tokens=131_072)
    plain = plan(FLASH)
    assert asked.bytes_per_token == plain.bytes_per_token
    assert asked.bytes_per_request == plain.bytes_per_request


def test_sizes_of_v41() -> None:
    """890 bytes per token; a request of 1M tokens without draft layers and with them."""
    model = PRESETS["v41-flash"]
    backbone = replace(model, layers=tuple(spec for spec in model.layers if not spec.draft))
    for spec, slot, whole in ((backbone, 2_715_648, 935_948_288), (model, 2_918_400, 936_151_040)):
        schema = CacheSchema.build(spec)
        found = plan(schema, context_tokens=1_048_576, requests=1)
        assert (found.bytes_per_token, found.block_bytes) == (890.0, 113_920)
        assert found.slot_bytes == slot
        assert found.request_bytes == whole + found.block_table_row_bytes
        assert found.formats == FORMATS | {"entries": "v41_fp4", "window": "v41_fp8"}
        check_exact(schema, found)
    drafting = CacheSchema.build(model, max_draft_tokens=5)
    assert drafting.ring_rows == 133


# ---- the four questions ---------------------------------------------------------------------


def test_memory_for_requests_and_context_is_exact() -> None:
    found = plan(FLASH, context_tokens=1_048_576, requests=16)
    assert found.question == "memory"
    assert found.request_bytes == 8192 * 450_304 + 15_065_088 + 32_768
    assert found.needed_bytes == 16 * found.request_bytes
    check_exact(FLASH, found)
    assert found.budget is not None
    assert found.budget.total_bytes == found.needed_bytes
    assert found.budget.num_blocks == 16 * 8192


def test_requests_that_fit() -> None:
    found = plan(FLASH, memory_bytes=80 * GIB, context_tokens=1_048_576)
    assert (found.question, found.requests) == ("requests", 23)
    check_exact(FLASH, found)
    assert plan(FLASH, memory_bytes=80 * GIB, context_tokens=1_048_576, requests=23).fits is True
    assert plan(FLASH, memory_bytes=80 * GIB, context_tokens=1_048_576, requests=24).fits is False


def test_largest_context_at_once() -> None:
    found = plan(FLASH, memory_bytes=80 * GIB, requests=256)
    assert found.question == "context"
    check_exact(FLASH, found)
    assert found.context_tokens is not None
    assert found.context_tokens % 128 == 0
    longer = found.context_tokens + 1
    same = plan(FLASH, memory_bytes=80 * GIB, context_tokens=found.context_tokens, requests=256)
    assert same.fits is True
    assert plan(FLASH, memory_bytes=80 * GIB, context_tokens=longer, requests=256).fits is False


def test_context_is_never_longer_than_the_schema_s() -> None:
    found = plan(TINY, memory_bytes=GIB, requests=2)
    assert found.context_tokens == TINY.max_context == 16_384


def test_what_does_not_fit_says_what_would() -> None:
    found = plan(TINY, memory_bytes=TINY.bytes.of_request(1000), context_tokens=1000, requests=2)
    assert found.fits is False
    assert found.budget is None
    assert found.needed_bytes == 2 * TINY.bytes.of_request(1000)
    enough = plan(TINY, memory_bytes=found.needed_bytes, context_tokens=1000, requests=2)
    assert enough.fits is True
    check_exact(TINY, enough)


def test_what_is_left_out_is_the_longest_context_and_one_request() -> None:
    assert plan(TINY, memory_bytes=GIB).context_tokens == 16_384
    assert plan(TINY, requests=3).needed_bytes == 3 * TINY.bytes.of_request(16_384)
    assert plan(TINY, context_tokens=1000).needed_bytes == TINY.bytes.of_request(1000)


def test_a_part_of_a_block_is_a_block() -> None:
    sizes = [plan(TINY, context_tokens=n).needed_bytes for n in (1, 128, 129, 256)]
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3] == sizes[1] + TINY.bytes.block


def test_a_manager_allocates_what_was_planned() -> None:
    from dsv4.cache import build
    from dsv4.cache.prefix.options import PrefixOptions
    from tests.support.owned import bytes_of

    options: dict[str, Any] = {"max_step_tokens": 16, "prefix": PrefixOptions(snapshots=3)}

    def other_bytes(requests: int) -> int:
        return build.other_bytes(TINY, max_requests=requests, **options)

    questions: tuple[dict[str, int], ...] = (
        {"memory_bytes": 8_000_000, "context_tokens": 1000},
        {"memory_bytes": 8_000_000, "requests": 3},
        {"context_tokens": 1000, "requests": 3},
        {"memory_bytes": 8_000_000, "context_tokens": 500, "requests": 3},
    )
    for question in questions:
        found = plan(TINY, other_bytes=other_bytes, **question)
        assert found.budget is not None
        assert found.requests is not None
        assert found.request_bytes is not None
        needed = found.requests * found.request_bytes + other_bytes(found.requests)
        assert (found.other_bytes, found.needed_bytes) == (other_bytes(found.requests), needed)
        manager = build.manager_from_budget(TINY, found.budget, **options)
        total = manager.memory.memory_bytes().total
        assert bytes_of(manager) == total == found.budget.total_bytes
        assert needed <= total <= question.get("memory_bytes", needed)
        if found.question == "requests":  # one more would not fit
            more = found.requests + 1
            assert plan(TINY, **question, requests=more, other_bytes=other_bytes).fits is False


def test_what_a_manager_needs_besides_counts_in_every_refusal() -> None:
    def other_bytes(requests: int) -> int:
        return 1_000_000 + requests

    alone = TINY.bytes.of_request(1000)
    for question in ({"context_tokens": 1000}, {"context_tokens": 1000, "requests": 1}):
        with pytest.raises(PoolTooSmall) as caught:
            plan(TINY, memory_bytes=alone + 1_000_000, other_bytes=other_bytes, **question)
        assert caught.value.minimum_bytes == alone + 1_000_001
    with pytest.raises(
        PoolTooSmall, match="in addition to 1,000,002 bytes for the manager"
    ) as caught:
        plan(TINY, memory_bytes=1_000_000, requests=2, other_bytes=other_bytes)
    assert caught.value.minimum_bytes == 2 * TINY.bytes.of_request(1) + 1_000_002


# ---- too small ------------------------------------------------------------------------------


@pytest.mark.parametrize("requests", [None, 1, 5])
def test_memory_too_small_for_one_request_is_refused_with_the_minimum(
    requests: int | None,
) -> None:
    minimum = TINY.bytes.of_request(1000)
    with pytest.raises(PoolTooSmall, match=f"{minimum:,}") as caught:
        plan(TINY, memory_bytes=minimum - 1, context_tokens=1000, requests=requests)
    assert caught.value.minimum_bytes == minimum
    assert plan(TINY, memory_bytes=minimum, context_tokens=1000).requests == 1


def test_memory_without_a_block_for_each_request_is_refused_with_the_minimum() -> None:
    minimum = 7 * TINY.bytes.of_request(1)
    with pytest.raises(PoolTooSmall, match=f"{minimum:,}") as caught:
        plan(TINY, memory_bytes=minimum - 1, requests=7)
    assert caught.value.minimum_bytes == minimum
    assert plan(TINY, memory_bytes=minimum, requests=7).context_tokens == 128


@pytest.mark.parametrize("name", ["memory_bytes", "context_tokens", "requests"])
@pytest.mark.parametrize("value", [0, -1, 1.0, float("nan"), float("inf"), True, "1M"])
def test_counts_are_whole_numbers_of_at_least_one(name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name):
        plan(TINY, **{name: value})


def test_context_past_the_schema_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"16,385.*16,384"):
        plan(TINY, context_tokens=16_385)
    short = CacheSchema.build(PRESETS["tiny"], max_context=1024)
    with pytest.raises(InvalidInput, match="max_context up to 16,384"):
        plan(short, context_tokens=2048)


# ---- corners --------------------------------------------------------------------------------


def test_a_model_of_windows_only_has_no_blocks() -> None:
    schema = CacheSchema.build(replace(PRESETS["tiny"], layers=v4_layers([0, 0], backbone=2)))
    assert plan(schema).bytes_per_token == 0
    found = plan(schema, memory_bytes=10 * schema.bytes.per_request + 5, context_tokens=16_384)
    assert found.requests == 10
    check_exact(schema, found)
    assert plan(schema, memory_bytes=schema.bytes.per_request, requests=1).context_tokens == 16_384
    with pytest.raises(PoolTooSmall):
        plan(schema, memory_bytes=schema.bytes.per_request - 1, requests=1)


def test_to_dict_is_json() -> None:
    for found in (plan(FLASH), plan(FLASH, memory_bytes=80 * GIB)):
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    asked = plan(FLASH, memory_bytes=80 * GIB)
    assert asked.budget is not None
    assert asked.to_dict()["budget"]["total_bytes"] == asked.budget.total_bytes


MEMORY, CONTEXT, REQUESTS = st.integers(1, 4 * GIB), st.integers(1, 16_384), st.integers(1, 5000)


@settings(max_examples=150, deadline=None)
@given(memory_bytes=MEMORY, context_tokens=CONTEXT, requests=REQUESTS)
def test_one_more_request_does_not_fit(
    memory_bytes: int, context_tokens: int, requests: int
) -> None:
    request_bytes = TINY.bytes.of_request(context_tokens)
    if memory_bytes < request_bytes:
        with pytest.raises(PoolTooSmall) as caught:
            plan(TINY, memory_bytes=memory_bytes, context_tokens=context_tokens)
        assert caught.value.minimum_bytes == request_bytes
        return
    found = plan(TINY, memory_bytes=memory_bytes, context_tokens=context_tokens)
    check_exact(TINY, found)
    assert found.requests is not None
    assert found.requests * request_bytes <= memory_bytes < (found.requests + 1) * request_bytes
    three = plan(TINY, memory_bytes=memory_bytes, context_tokens=context_tokens, requests=requests)
    assert three.fits == (requests <= found.requests)
    assert three.needed_bytes == requests * request_bytes


@settings(max_examples=150, deadline=None)
@given(memory_bytes=MEMORY, requests=REQUESTS)
def test_one_more_token_each_does_not_fit(memory_bytes: int, requests: int) -> None:
    minimum_bytes = requests * TINY.bytes.of_request(1)
    if memory_bytes < minimum_bytes:
        with pytest.raises(PoolTooSmall) as caught:
            plan(TINY, memory_bytes=memory_bytes, requests=requests)
        assert caught.value.minimum_bytes == minimum_bytes
        return
    found = plan(TINY, memory_bytes=memory_bytes, requests=requests)
    check_exact(TINY, found)
    assert found.context_tokens is not None
    longer_bytes = requests * TINY.bytes.of_request(found.context_tokens + 1)
    assert found.context_tokens == TINY.max_context or longer_bytes > memory_bytes


def test_a_billion_requests_are_only_arithmetic() -> None:
    found = plan(TINY, context_tokens=16_384, requests=10**9)
    assert found.needed_bytes == 10**9 * TINY.bytes.of_request(16_384) > parse_bytes("1PiB")


def test_the_size_of_a_snapshot_is_in_the_plan():
    # 44 layers of 127 window rows, 21 of them with 4 rows of a previous group, k and z, as fp32
    assert plan(FLASH).snapshot_bytes == 3_619_328
    payload = 43 * 127 * 584 + 21 * 2 * 4 * (512 + 128) * 4
    assert 0 <= plan(FLASH).to_dict()["snapshot_bytes"] - payload < 64
