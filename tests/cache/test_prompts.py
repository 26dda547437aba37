"""Prompts that are hashed once, ids that come late, and what a scheduler asks before it admits."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np
import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.schema import CacheSchema
from dsv4.errors import ContextOverflow, InvalidInput
from dsv4.model import ModelSpec
from tests.support.faults import everything
from tests.support.lives import Text, assert_cold, run_to, tiny_stack

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=4096, max_draft_tokens=1)
IDS = np.arange(4000, dtype=np.int32)


def build(num_blocks: int = 32, schema: CacheSchema = SCHEMA, **options: Any) -> KVCacheManager:
    return KVCacheManager(
        schema,
        num_blocks=num_blocks,
        max_requests=4,
        max_step_tokens=512,
        prefix=PrefixOptions(**{"policy": full(), "snapshots": 8, **options}),
    )


def compute(manager: KVCacheManager, ids: Any, **options: Any) -> None:
    request = manager.admit_request(ids, **options)
    while request.length < request.resume.end:
        count = min(500, request.resume.end - request.length)
        plan = manager.prepare_forward([(request, count)])
        plan.mark_appended()
        if plan.prefill is not None and plan.prefill.captures is not None:
            plan.prefill.captures.layers.update(range(len(SCHEMA.layers)))
        manager.commit(plan)
    manager.release_request(request)


@pytest.mark.parametrize("policy", [full(), zero()])
@pytest.mark.parametrize("tokens", [0, 1, 127, 128, 129, 1000, 2000, 3000])
def test_a_prompt_is_told_what_its_admission_finds(policy: Any, tokens: int):
    manager = build(policy=policy)
    compute(manager, IDS[:2000])
    manager.prefix.evict(3)
    prompt = manager.prefix.prompt(IDS[:tokens])
    before = everything(manager)
    found = manager.prefix.look_up(prompt)
    needed, fits = manager.room.needed_blocks(prompt), manager.room.can_admit(prompt)
    assert everything(manager) == before
    assert needed == manager.room.needed_blocks(IDS[:tokens])
    assert fits
    held = manager.stats().blocks_live
    for given in (prompt, prompt, IDS[:tokens]):
        request = manager.admit_request(given)
        assert request.resume == found
        shared = request.resume.reused_tokens // 128
        assert manager.stats().blocks_live - held == needed + shared
        manager.release_request(request)


def test_a_snapshot_where_a_replay_would_start_is_seen():
    """The only one that is left lies at 256; the replay of 896 tokens would start there too."""
    manager = build(snapshots=1)
    compute(manager, IDS[:257])
    manager.prefix.pin(IDS[:256])
    compute(manager, IDS[:1000])
    found = manager.prefix.look_up(manager.prefix.prompt(IDS[:1000]))
    assert found == Resume(start=256, reused_tokens=896, end=1000, source="snapshot")
    assert manager.admit_request(IDS[:1000]).resume == found


def test_waiting_prompts_are_not_hashed_again(monkeypatch: pytest.MonkeyPatch):
    manager = build()
    compute(manager, IDS[:2000])
    prompt = manager.prefix.prompt(IDS[:3000])

    def refused(*given: object, **options: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(hashlib, "blake2b", refused)
    assert manager.prefix.look_up(prompt).reused_tokens == 1920
    assert manager.room.can_admit(prompt)
    request = manager.admit_request(prompt)
    assert request.resume.reused_tokens == 1920
    manager.release_request(request)


def test_a_long_prompt_is_asked_about_in_a_few_looks():
    model = ModelSpec.preset("tiny")
    schema = CacheSchema.build(model, max_context=min(model.max_context, 131072))
    manager = build(num_blocks=8, schema=schema)
    prompt = manager.prefix.prompt(np.arange(schema.max_context, dtype=np.int32))
    index = manager._parts.prefix.index  # type: ignore[union-attr]
    looks = 0

    class Counting(dict[bytes, Any]):
        def __contains__(self, key: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__contains__(key)

    index._nodes = Counting(index._nodes)

    def took() -> float:
        nonlocal looks
        looks, begin = 0, time.thread_time()
        assert manager.prefix.look_up(prompt) == Resume(
            start=0, reused_tokens=0, end=schema.max_context, source="nothing"
        )
        assert 0 < looks <= 12
        return time.thread_time() - begin

    assert min(took() for _ in range(3)) < 0.02  # a garbage collection may fall into one of them


def test_a_prompt_stays_what_it_was():
    manager = build()
    prompt = manager.prefix.prompt(IDS[:300])
    request = manager.admit_request(prompt)
    plan = manager.prepare_forward([(request, 300)])
    plan.mark_appended()
    manager.commit(plan)
    plan = manager.prepare_forward([(request, 2)])
    plan.mark_appended()
    manager.commit(plan, ids=[7, 8])
    assert (len(prompt), len(prompt.trail.ids)) == (300, 300)  # type: ignore[union-attr]


def test_prompts_of_others_are_refused():
    manager, other = build(), build(model_id="other")
    prompt = other.prefix.prompt(IDS[:300])
    plain = KVCacheManager(SCHEMA, num_blocks=8, max_requests=1, max_step_tokens=8)
    for call in (manager.admit_request, manager.prefix.look_up, manager.room.needed_blocks):
        with pytest.raises(InvalidInput, match="another schema or model"):
            call(prompt)  # type: ignore[operator]
        with pytest.raises(InvalidInput, match="without a prefix cache"):
            call(plain.prefix.prompt(IDS[:300]))  # type: ignore[operator]
    assert not manager.room.can_admit(prompt)
    with pytest.raises(InvalidInput, match="its salt already"):
        other.admit_request(prompt, salt="a")
    with pytest.raises(ContextOverflow):
        manager.prefix.prompt(np.zeros(5000, dtype=np.int32))
    request = plain.admit_request(plain.prefix.prompt(IDS[:300]))
    assert (len(request.block_ids), request.resume.end) == (3, 300)


def test_store_but_do_not_reuse():
    manager = build()
    compute(manager, IDS[:1000])
    request = manager.admit_request(IDS[:1000], reuse=False)
    assert request.resume.start == request.resume.reused_tokens == 0
    manager.release_request(request)
    manager.prefix.evict()
    compute(manager, IDS[:1000], reuse=False)
    assert manager.prefix.look_up(manager.prefix.prompt(IDS[:1000])).reused_tokens == 896


# ---- ids that come late --------------------------------------------------------------------------


def test_ids_told_a_step_late_lose_neither_blocks_nor_snapshots():
    stack = tiny_stack(drafts=1, prefix=PrefixOptions(policy=full()))
    manager, text = stack.manager, Text.random(stack, 0, 500)
    request = manager.admit_request(text.ids[:100])
    run_to(stack, request, text, 100)
    told = 100
    while request.length < 300:
        stack.step([(request, text.stream, 1)])
        manager.supply_ids(request, text.ids[told : request.length - 1])
        told = request.length - 1
    manager.release_request(request)
    again = manager.admit_request(text.ids[:290])
    assert again.resume == Resume(start=256, reused_tokens=256, end=290, source="snapshot")
    run_to(stack, again, text, 300)
    assert_cold(stack, again, text.stream)


def test_only_ids_of_committed_tokens_are_told():
    stack = tiny_stack(drafts=1, prefix=PrefixOptions(policy=full()))
    manager, text = stack.manager, Text.random(stack, 0, 500)
    request = manager.admit_request(text.ids[:100])
    run_to(stack, request, text, 100)
    stack.step([(request, text.stream, 1)])
    with pytest.raises(InvalidInput, match="it has 101 tokens"):
        manager.supply_ids(request, text.ids[100:102])
    manager.supply_ids(request, text.ids[100:101])
    assert request.trail is not None
    assert len(request.trail.ids) == 101


# ---- capacity ------------------------------------------------------------------------------------


def test_capacity_in_numbers():
    manager = build(num_blocks=16)
    compute(manager, IDS[:1000])
    pinned = manager.prefix.pin(IDS[:256])
    stats = manager.stats()
    assert (stats.blocks_free, stats.blocks_cached) == (9, 7)
    assert (stats.blocks_evictable, stats.blocks_pinned) == (5, 2)
    request = manager.admit_request(IDS[:1000])
    assert manager.stats().blocks_evictable == 0
    assert manager.room.released_blocks(request) == 6  # 8, of which two are pinned
    (fork,) = manager.fork(request, 1)
    assert manager.room.released_blocks(fork) == 0  # its parent holds them too
    manager.release_request(fork)
    manager.release_request(request)
    manager.prefix.unpin(pinned)
    assert manager.stats().blocks_evictable == 7


# ---- events --------------------------------------------------------------------------------------


def test_events_tell_which_blocks_are_there():
    manager = build(num_blocks=16, events=True)
    known: dict[bytes, bytes | None] = {}

    def follow() -> None:
        for event in manager.prefix.take_events():
            if event.what == "stored":
                assert event.parent is None or event.parent in known
                known[event.digest] = event.parent
            else:
                del known[event.digest]
        index = manager._parts.prefix.index  # type: ignore[union-attr]
        assert known == {n.digest: n.parent and n.parent.digest for n in index.nodes()}

    compute(manager, IDS[:1000])
    follow()
    assert len(known) == 7
    manager.prefix.evict(2)
    follow()
    compute(manager, IDS[2000:3800])
    follow()
    assert manager.prefix.take_events() == []
    with pytest.raises(InvalidInput, match="events=True"):
        build().prefix.take_events()
