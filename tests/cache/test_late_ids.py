"""Forks and their parents whose ids come late: what one caches never hangs on what another does not
hold, so what counts as evictable can be evicted."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import OutOfBlocks, OutOfSlots
from dsv4.model import ModelSpec

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=2048)
IDS = np.arange(900, dtype=np.int32)


def build() -> KVCacheManager:
    return KVCacheManager(
        SCHEMA,
        num_blocks=14,
        max_requests=6,
        max_step_tokens=1024,
        prefix=PrefixOptions(policy=full(), snapshots=4),
    )


def run(manager: KVCacheManager, request: Request, tokens: int, *, told: bool) -> None:
    start = request.length
    plan = manager.prepare_forward([(request, tokens)])
    plan.mark_appended()
    manager.commit(plan, ids=IDS[start : start + tokens] if told else None)


def tell(manager: KVCacheManager, request: Request) -> None:
    assert request.trail is not None
    if len(request.trail.ids) < request.length:
        manager.supply_ids(request, IDS[len(request.trail.ids) : request.length])


@pytest.mark.parametrize("teller", ["fork", "parent"])
def test_who_shares_blocks_and_learns_its_ids_late_keeps_its_own_first_block(teller: str):
    """Another request has cached the first block meanwhile, in other memory."""
    manager = build()
    parent = manager.admit_request(IDS[:100])
    run(manager, parent, 300, told=False)
    (fork,) = manager.fork(parent, 1)
    other = manager.admit_request(IDS[:128])
    run(manager, other, 128, told=True)
    told = {"fork": fork, "parent": parent}
    tell(manager, told[teller])
    manager.release_request(other)
    manager.check_invariants()
    manager.release_request(told.pop(teller))
    manager.check_invariants()
    stats = manager.stats()
    assert manager.room.can_admit((stats.blocks_free + stats.blocks_evictable) * 128)
    assert manager.prefix.evict() == stats.blocks_evictable == 1
    (left,) = told.values()
    tell(manager, left)  # alone now: its blocks are cached as ever
    manager.release_request(left)
    assert manager.stats().blocks_cached == 2
    assert manager.prefix.look_up(manager.prefix.prompt(IDS[:300])).reused_tokens == 256


@pytest.mark.parametrize("seed", range(6))
def test_what_counts_as_evictable_can_be_evicted(seed: int):
    """Requests that begin alike fork, learn ids at any time, and end."""
    draw, manager = Random(seed), build()
    live: list[Request] = []
    for _ in range(120):
        what = draw.choice(["admit", "run", "run", "fork", "tell", "tell", "release", "evict"])
        request = draw.choice(live) if live else None
        try:
            if request is None or what == "admit":
                live.append(manager.admit_request(IDS[: draw.choice([90, 128, 300])]))
                run(manager, live[-1], draw.choice([90, 200, 300]), told=draw.random() < 0.4)
            elif what == "run" and request.length < 600:
                run(manager, request, draw.choice([1, 60, 130]), told=draw.random() < 0.4)
            elif what == "fork":
                live += manager.fork(request, 1)
            elif what == "tell":
                tell(manager, request)
            elif what == "release":
                live.remove(request)
                manager.release_request(request)
            elif what == "evict":
                assert manager.stats().blocks_evictable == manager.prefix.evict()
        except (OutOfBlocks, OutOfSlots):
            pass
        manager.check_invariants()
    for request in live:
        manager.release_request(request)
    assert (
        manager.stats().blocks_evictable == manager.stats().blocks_cached == manager.prefix.evict()
    )
