"""What is allocated is what was asked for, all told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsv4.cache import build
from dsv4.cache.assembly import _needed_memory
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.options import complete
from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.cache.schema import CacheSchema, compute_block_budget
from dsv4.cache.state import SnapshotLayout
from dsv4.errors import InvalidInput, PoolTooSmall
from dsv4.model import ModelSpec
from tests.support.owned import bytes_of

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=4096, max_draft_tokens=2)
MIB = 1 << 20
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_step_tokens": 64},
    {"prefix": PrefixOptions(policy=full(), snapshots=5)},
    {"prefix": PrefixOptions(policy=full(), snapshots=5, where="host"), "max_step_tokens": 100},
    {"prefix": PrefixOptions(policy=zero())},
    {"prefix": PrefixOptions(snapshots=0)},
    {"prefix": PrefixOptions(snapshots=2), "max_open_plans": 3, "max_step_tokens": 50},
)


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
@pytest.mark.parametrize("requests", [1, 7])
def test_no_more_is_allocated_than_asked(options: dict[str, Any], requests: int):
    asked = 200 * MIB
    made = build.manager_from_memory(SCHEMA, memory_bytes=asked, max_requests=requests, **options)
    total = made.memory.memory_bytes().total
    assert bytes_of(made) == total  # all tensors that the manager has
    assert asked - SCHEMA.bytes.block < total <= asked
    other = build.other_bytes(SCHEMA, max_requests=requests, **options)
    budget = compute_block_budget(
        SCHEMA, memory_bytes=asked, max_requests=requests, other_bytes=other
    )
    assert (budget.total_bytes, budget.num_blocks) == (total, made._parts.table.allocator.total)


def test_a_step_leaves_nothing_allocated():
    made = build.manager_from_memory(
        SCHEMA, memory_bytes=20 * MIB, max_requests=3, max_step_tokens=400, prefix=PrefixOptions()
    )
    before = bytes_of(made)
    request = made.admit_request(list(range(300)))
    plan = made.prepare_forward([(request, 300)])
    plan.mark_appended()
    made.commit(plan, ids=list(range(300)))
    made.fork(request, 1)
    made.rewind(request, 100)
    assert bytes_of(made) == before


def test_a_budget_for_other_options_is_refused():
    other = build.other_bytes(SCHEMA, max_requests=2)
    budget = compute_block_budget(SCHEMA, memory_bytes=200 * MIB, max_requests=2, other_bytes=other)
    with pytest.raises(InvalidInput, match="compute it for the same ones"):
        build.manager_from_budget(SCHEMA, budget, max_step_tokens=64)
    uncounted = compute_block_budget(SCHEMA, memory_bytes=200 * MIB, max_requests=2)
    with pytest.raises(InvalidInput, match=f"leaves 0 bytes .* it is {other:,}"):
        build.manager_from_budget(SCHEMA, uncounted)


def test_too_little_memory_says_how_much_is_needed():
    with pytest.raises(PoolTooSmall, match="in addition") as caught:
        build.manager_from_memory(SCHEMA, memory_bytes=MIB, max_requests=2, max_step_tokens=64)
    least = caught.value.minimum_bytes
    for memory_bytes in (least - 1, least):
        if memory_bytes < least:
            with pytest.raises(PoolTooSmall):
                build.manager_from_memory(
                    SCHEMA, memory_bytes=memory_bytes, max_requests=2, max_step_tokens=64
                )
        else:
            build.manager_from_memory(
                SCHEMA, memory_bytes=memory_bytes, max_requests=2, max_step_tokens=64
            )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_blocks": 1 << 40}, "1,099,511,627,776 blocks"),
        ({"max_requests": 1 << 63}, "9,223,372,036,854,775,808 requests"),
        ({"max_step_tokens": 1 << 40}, "steps of 1,099,511,627,776 tokens, 1 at"),
        ({"max_open_plans": 1 << 40}, "steps of 8,192 tokens, 1,099,511,627,776 at"),
        ({"prefix": PrefixOptions(snapshots=1 << 40)}, "1,099,511,627,776 snapshots"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_more_memory_than_there_is_is_refused_before_any_is_taken(
    options: dict[str, Any], said: str
):
    """What the host keeps of blocks grew until the system ended the process."""
    sizes: dict[str, Any] = {"num_blocks": 4, "max_requests": 2} | options
    with pytest.raises(InvalidInput, match=rf"for {said}.*and cpu has .*: ask for less"):
        KVCacheManager(SCHEMA, **sizes)


def test_a_budget_above_what_there_is_is_refused():
    for sizes in ({"memory_bytes": 1 << 63}, {"max_requests": 1 << 40}):
        given = {"memory_bytes": 100 * MIB, "max_requests": 2} | sizes
        with pytest.raises(InvalidInput, match="and cpu has"):
            build.manager_from_memory(SCHEMA, **given)


def test_snapshots_count_where_they_are() -> None:
    """Those in host memory need none of a GPU's, and a policy that keeps none needs no room."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    rows = 1 << 20

    def needed(prefix: PrefixOptions, device: torch.device) -> dict[torch.device, int]:
        options = complete({"prefix": prefix, "max_step_tokens": 64})
        found = _needed_memory(SCHEMA, options, device, num_blocks=8, max_requests=2)
        return {where: sum(parts.values()) for where, parts in found.items()}

    all_of_them = rows * SnapshotLayout(SCHEMA).row_bytes
    host = PrefixOptions(policy=full(), snapshots=rows, where="host")
    assert needed(host, gpu)[gpu] < all_of_them == needed(host, gpu)[cpu]
    assert needed(host, cpu)[cpu] > all_of_them
    assert needed(PrefixOptions(policy=full(), snapshots=rows), gpu)[gpu] > all_of_them
    assert (
        needed(PrefixOptions(policy=full(), snapshots=rows, where="host"), cpu)[cpu] > all_of_them
    )
    KVCacheManager(
        SCHEMA, num_blocks=8, max_requests=2, prefix=PrefixOptions(policy=zero(), snapshots=1 << 40)
    )
