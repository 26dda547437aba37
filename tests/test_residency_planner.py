"""What the planner promises of two memories: one request more, or one byte less, does not fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dsv4.cache.hot_rows import HotLayout
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, PoolTooSmall
from dsv4.model import PRESETS
from dsv4.residency_planner import ResidencySizing, plan_residency

FLASH = CacheSchema.build(PRESETS["v4-flash"])
DEVICE, HOST, LINK = 141 * 10**9, 256 * 10**9, 55 * 10**9


def sized(schema: CacheSchema, tokens: int, **options: Any) -> ResidencySizing:
    given: dict[str, Any] = {
        "memory_bytes": DEVICE,
        "host_memory_bytes": HOST,
        "link_bytes_per_second": LINK,
    }
    return plan_residency(schema, context_tokens=tokens, **{**given, **options})


@pytest.mark.parametrize(
    ("name", "with_host", "without"), [("v4-flash", 78, 38), ("v41-flash", 339, 150)]
)
def test_more_requests_of_a_million_tokens_fit(name: str, with_host: int, without: int):
    found = sized(CacheSchema.build(PRESETS[name]), 1 << 20)
    assert (found.requests, found.requests_without) == (with_host, without)
    assert (found.limited_by, found.pays) == ("host", True)


def test_bytes_of_a_request_of_v4_flash_by_hand():
    """21 layers select; they have 32 entries of 584 bytes, kept apart 592, and 32 keys of 68 in a
    block of 128 tokens, and 20 layers one entry of 583 in each."""
    blocks, owners = 8192, 21
    entries_row = owners * 32 * 592  # of the entries arena: pages of 18,944 bytes need no padding
    found = sized(FLASH, 1 << 20)
    assert found.host_request_bytes == blocks * entries_row
    assert found.hot_rows == 4 * 512
    assert found.hot_bytes == 2048 // 32 * entries_row
    tables = owners * (2 * 32 * blocks + 8 * 2048 + 8) + 4 * blocks
    assert found.table_bytes == tables
    stays = blocks * (FLASH.bytes.block - owners * 32 * 584)
    slot_and_table = FLASH.bytes.slot + 4 * blocks
    open_rows = 2 * entries_row
    assert found.device_request_bytes == (
        stays + slot_and_table + found.hot_bytes + tables + open_rows
    )
    assert found.request_bytes_without == blocks * FLASH.bytes.block + slot_and_table
    assert found.chunk_bytes == 2 * blocks * 32 * 592
    two = sized(FLASH, 1 << 20, step_tokens=8000, open_plans=2)
    assert two.chunk_bytes == 2 * (found.chunk_bytes + 63 * entries_row)


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro", "v41-flash", "tiny", "v41-tiny"])
def test_one_more_request_or_one_byte_less_does_not_fit(name: str):
    schema = CacheSchema.build(PRESETS[name])
    tokens = schema.max_context // 2

    def other_bytes(requests: int) -> int:
        return 1000 + 7 * requests

    one = sized(schema, tokens, other_bytes=other_bytes)
    for count in (1, 3, 20):
        device = count * one.device_request_bytes + one.chunk_bytes + other_bytes(count)
        host = count * one.host_request_bytes
        for less_device, less_host, limit in ((0, 0, count), (1, 0, count - 1), (0, 1, count - 1)):
            memory = {
                "memory_bytes": device - less_device,
                "host_memory_bytes": host - less_host,
                "other_bytes": other_bytes,
            }
            if not limit:
                with pytest.raises(PoolTooSmall) as raised:
                    sized(schema, tokens, **memory)
                assert raised.value.minimum_bytes == (device if less_device else host)
                continue
            found = sized(schema, tokens, **memory)
            assert found.requests == limit
            assert found.limited_by == ("host" if less_host else "device")
            assert found.other_bytes == other_bytes(limit)


def test_a_step_fetches_what_is_not_hot():
    found = sized(FLASH, 1 << 20)
    all_missed = 78 * 21 * 512 * 592
    assert [(step.hit_rate, step.fetched_bytes) for step in found.steps] == [
        (1.0, 0),
        (0.95, round(0.05 * all_missed)),
        (0.9, round(0.1 * all_missed)),
        (0.5, all_missed // 2),
        (0.0, all_missed),
    ]
    assert [step.seconds for step in found.steps] == [
        step.fetched_bytes / LINK for step in found.steps
    ]
    few = sized(FLASH, 1 << 20, step_requests=2)
    assert few.step_requests == 2
    assert few.steps[-1].fetched_bytes == 2 * 21 * 512 * 592
    short = sized(FLASH, 1024, step_requests=1)  # 256 entries, all of them are selected
    assert short.steps[-1].fetched_bytes == 21 * 256 * 592


def test_layers_that_share_a_selection_fetch_it_once():
    """V4.1: eight layers select, 38 read entries."""
    schema = CacheSchema.build(PRESETS["v41-flash"])
    found = sized(schema, 1 << 20, step_requests=1)
    assert found.steps[-1].fetched_bytes == 8 * 512 * 288


def test_it_does_not_pay_for_short_contexts():
    found = sized(FLASH, 8192)
    assert not found.pays
    assert found.requests < found.requests_without
    assert found.pays_from_tokens is not None
    first = found.pays_from_tokens
    longer, shorter = sized(FLASH, first), sized(FLASH, first - FLASH.block_tokens)
    assert longer.device_request_bytes < longer.request_bytes_without
    assert shorter.device_request_bytes >= shorter.request_bytes_without
    assert sized(FLASH, 1 << 20, host_memory_bytes=20 * 10**9).pays is False
    short = CacheSchema.build(PRESETS["v4-flash"], max_context=2048)
    assert sized(short, 2048).pays_from_tokens is None


def test_hot_rows_of_a_layer_follow_its_entries_in_a_block():
    schema = CacheSchema.build(PRESETS["v41-flash"], entries_apart=True)
    hot = HotLayout(schema, 2000)
    assert hot.arena_rows == 32
    assert [hot.records(page) for page in hot.pages] == [2048, 2048, 2048, 4096]
    assert [page.layer for page in hot.pages] == [2, 8, 14, 20]
    assert hot.hot_bytes == 32 * schema.bytes.entries


def test_hot_rows_that_cannot_work_are_refused():
    apart = replace(FLASH, entries_apart=True, max_draft_tokens=3)
    assert HotLayout(apart).hot_rows == 8192
    with pytest.raises(InvalidInput, match="selects 2,048 entries"):
        HotLayout(apart, 2047)
    with pytest.raises(InvalidInput, match="32,767 can be numbered"):
        HotLayout(apart, 40_000)
    with pytest.raises(InvalidInput, match="entries_apart=True"):
        HotLayout(FLASH)
    with pytest.raises(InvalidInput, match="past the 1,048,576 tokens"):
        sized(FLASH, (1 << 20) + 1)


def test_the_default_is_what_can_be_numbered():
    many = replace(FLASH, entries_apart=True, max_draft_tokens=20)
    hot = HotLayout(many)
    assert hot.needed_entries == 21 * 512
    assert max(hot.records(page) for page in hot.pages) == 32_767 // 32 * 32
