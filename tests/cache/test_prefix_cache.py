"""Prefixes through the manager: who may share, what stays under pressure, what is counted."""

from __future__ import annotations

import builtins
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full, periodic, zero
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.errors import InvalidInput, MissingExtra, OutOfBlocks
from dsv4.metrics import prometheus_text
from dsv4.model import ModelSpec, v4_layers
from tests.oracles.bookkeeping import no_device, nothing_changes
from tests.support.lives import TINY, Text, assert_cold, run_to, splice, tiny_stack
from tests.support.stack import HCA_STATES

IDS = np.arange(1000, dtype=np.int32)


def build(
    *, num_blocks: int = 20, schema: CacheSchema | None = None, **options: Any
) -> KVCacheManager:
    """A manager whose steps write nothing: only the bookkeeping is looked at."""
    schema = CacheSchema.build(TINY, max_context=2048) if schema is None else schema
    options = {"policy": zero()} | options
    return KVCacheManager(
        schema,
        num_blocks=num_blocks,
        max_requests=4,
        max_step_tokens=512,
        prefix=PrefixOptions(**options),
    )


def compute(manager: KVCacheManager, ids: np.ndarray, salt: str | None = None) -> None:
    request = manager.admit_request(ids, salt=salt)
    finish(manager, request)
    manager.release_request(request)


def finish(manager: KVCacheManager, request: Request) -> None:
    while request.length < request.resume.end:
        count = min(500, request.resume.end - request.length)
        manager.commit(appended(manager.prepare_forward([(request, count)])))


def appended(plan: ForwardPlan) -> ForwardPlan:
    """As if every layer had written the step."""
    for layer in range(len(TINY.layers)):
        plan.batch.written.note(layer)
    return plan


def reused(manager: KVCacheManager, ids: np.ndarray, salt: str | None = None) -> int:
    request = manager.admit_request(ids, salt=salt)
    manager.release_request(request)
    return request.resume.reused_tokens


# ---- what a hit leaves to run ------------------------------------------------------------------


def test_a_whole_prompt_that_is_given_again_after_a_hit_is_refused():
    """`request.resume` was not looked at: these would be stored at positions after the prompt."""
    manager = build(num_blocks=40)
    compute(manager, IDS[:900])
    request = manager.admit_request(IDS[:900])
    assert request.resume.run == range(256, 900)
    plan = appended(manager.prepare_forward([(request, 500)]))
    with nothing_changes(manager), pytest.raises(InvalidInput, match=r"those of request\.resume"):
        manager.commit(plan, ids=IDS[:500])
    manager.fail(plan)


# ---- who may share -----------------------------------------------------------------------------


def test_tenants_never_share():
    manager = build()
    compute(manager, IDS[:300], salt="a")
    assert reused(manager, IDS[:300], salt="a") == 256
    for salt in (None, "", "b", "A", "a "):
        assert reused(manager, IDS[:300], salt=salt) == 0
    compute(manager, IDS[:200])
    assert reused(manager, IDS[:300]) == 128
    assert reused(manager, IDS[:300], salt="b") == 0


def test_models_and_formats_never_match():
    schemas = [
        CacheSchema.build(TINY, max_context=512),
        CacheSchema.build(TINY, max_context=512, entry_format="bf16"),
        CacheSchema.build(TINY, max_context=512, index_format="fp8"),
        CacheSchema.build(TINY, max_context=512, block_tokens=256),
        CacheSchema.build(
            replace(TINY, layers=v4_layers([0, 4, 128, 4, 4, 0], backbone=5)), max_context=512
        ),
    ]
    caches = [build(schema=schema, model_id=m) for schema in schemas for m in ("", "x", "y")]
    digests = [m._parts.prefix.trail(IDS[:256].copy(), None).digest(0) for m in caches]
    assert len(set(digests)) == len(caches)


@pytest.mark.parametrize("state", HCA_STATES)
def test_caches_that_differ_in_drafts_only_keep_the_same_blocks_and_snapshots(state: HcaState):
    """Blocks, snapshots and digests of the same tokens, from rings of other lengths."""
    found = []
    for drafts, chunk in ((0, 200), (3, 1), (5, 77)):
        options = PrefixOptions(policy=full(), snapshots=8)
        stack = tiny_stack(drafts=drafts, state=state, prefix=options)
        manager = stack.manager
        assert manager._parts.prefix
        for memory in (manager.memory.block_arena.bytes, manager.memory.slot_arena.bytes):
            memory.zero_()  # as they come; the stack has poisoned them
        manager._parts.prefix.pool.bytes.zero_()
        text = Text.random(stack, 0, 400)
        request = manager.admit_request(text.ids)
        run_to(stack, request, text, 100, chunk=90)
        run_to(stack, request, text, 400, chunk=chunk)
        assert request.trail is not None
        nodes = [manager._parts.prefix.index.get(digest) for digest in request.trail.chain]
        assert all(node is not None and node.snapshot is not None for node in nodes)
        found.append(
            {
                "digests": list(request.trail.chain),
                "blocks": manager.memory.block_arena.bytes[request.block_ids[:3]],
                "snapshots": manager._parts.prefix.pool.bytes[
                    [node.snapshot for node in nodes if node]
                ],
                "fingerprint": manager.schema.fingerprint,
            }
        )
    first, *others = found
    assert len(first["digests"]) == 3
    for other in others:
        assert other["fingerprint"] != first["fingerprint"]
        assert other["digests"] == first["digests"]
        assert torch.equal(other["blocks"], first["blocks"])
        assert torch.equal(other["snapshots"], first["snapshots"])


def test_the_last_token_always_runs():
    manager = build()
    compute(manager, IDS[:512])
    for tokens, expected in ((512, 384), (513, 512), (384, 256), (129, 128), (128, 0), (1, 0)):
        assert reused(manager, IDS[:tokens]) == expected


def test_counts_reuse_nothing_and_are_not_cached():
    manager = build()
    request = manager.admit_request(300)
    finish(manager, request)
    manager.release_request(request)
    assert manager.stats().blocks_cached == 0
    assert (request.resume.start, request.resume.end) == (0, 300)


def test_without_a_prefix_cache_ids_are_a_count():
    manager = KVCacheManager(
        CacheSchema.build(TINY, max_context=512), num_blocks=8, max_requests=2, max_step_tokens=512
    )
    request = manager.admit_request(IDS[:300])
    assert (len(request.block_ids), request.resume.end) == (3, 300)
    manager.commit(appended(manager.prepare_forward([(request, 300)])), ids=IDS[:300])
    manager.release_request(request)
    assert manager.stats().blocks_free == 8
    assert manager.stats().prefix is None
    for call in (
        lambda: manager.prefix.pin(IDS[:300]),
        manager.prefix.evict,
        lambda: manager.prefix.unpin(None),
    ):
        with pytest.raises(InvalidInput, match="no prefix cache"):
            call()


# ---- under pressure ----------------------------------------------------------------------------


def test_cached_blocks_make_room_and_the_oldest_go_first():
    manager = build(num_blocks=8)
    compute(manager, IDS[:300])  # 2 whole blocks stay
    compute(manager, IDS[500:900])  # 3 more
    stats = manager.stats()
    assert (stats.blocks_free, stats.blocks_live, stats.blocks_cached) == (3, 0, 5)
    assert manager.room.can_admit(600)
    request = manager.admit_request(600)
    stats = manager.stats()
    assert (stats.blocks_free, stats.blocks_live, stats.blocks_cached) == (0, 5, 3)
    assert reused_now(manager, IDS[:300]) == 0
    assert reused_now(manager, IDS[500:900]) == 384
    manager.release_request(request)
    manager.check_invariants()


def reused_now(manager: KVCacheManager, ids: np.ndarray) -> int:
    """Without asking for blocks that are not there."""
    return manager._parts.prefix.match(
        manager._parts.prefix.trail(ids.copy(), None)
    ).resume.reused_tokens


def test_wait_and_never_with_a_full_cache():
    manager = build(num_blocks=6)
    compute(manager, IDS[:400])
    holder = manager.admit_request(256)
    assert manager.stats().blocks_free == 1
    with nothing_changes(manager), pytest.raises(OutOfBlocks, match="wait") as caught:
        manager.admit_request(128 * 5)
    assert not caught.value.never
    assert not manager.room.can_admit(128 * 5)
    with nothing_changes(manager), pytest.raises(OutOfBlocks) as caught:
        manager.admit_request(128 * 7)
    assert caught.value.never
    # its own prefix counts as there, and is not evicted for the rest of it
    assert manager.room.can_admit(IDS[: 128 * 4])
    assert not manager.room.can_admit(IDS[: 128 * 5])
    with nothing_changes(manager), pytest.raises(OutOfBlocks):
        manager.admit_request(IDS[: 128 * 5])
    request = manager.admit_request(IDS[: 128 * 4])
    assert request.resume.reused_tokens == 384
    manager.release_request(holder)
    assert manager.room.can_admit(128 * 2)
    manager.check_invariants()


def test_pinned_prefixes_survive_pressure():
    manager = build(num_blocks=8)
    compute(manager, IDS[:300])
    pinned = manager.prefix.pin(IDS[:300])
    assert pinned.tokens == 256
    compute(manager, IDS[100:400])
    for start in range(3):
        compute(manager, IDS[start : start + 700])
    assert reused(manager, IDS[:300]) == 256
    assert not manager.room.can_admit(128 * 7)
    manager.prefix.unpin(pinned)
    with pytest.raises(InvalidInput, match="not pinned"):
        manager.prefix.unpin(pinned)
    assert manager.room.can_admit(128 * 8)
    manager.release_request(manager.admit_request(128 * 8))
    assert reused(manager, IDS[:300]) == 0
    with pytest.raises(InvalidInput, match="nothing of this prefix is cached"):
        manager.prefix.pin(IDS[:300])


def test_a_pinned_prefix_keeps_its_snapshot():
    stack = tiny_stack(prefix=PrefixOptions(policy=full(), snapshots=2), num_blocks=20)
    text = Text.random(stack, 0, 300)
    request = stack.manager.admit_request(text.ids)
    run_to(stack, request, text, 300)
    pinned = stack.manager.prefix.pin(text.ids)
    for seed in (1, 2):
        other = Text.random(stack, seed, 300)
        run_to(stack, stack.manager.admit_request(other.ids), other, 300)
    again = stack.manager.admit_request(text.ids)
    assert (again.resume.source, again.resume.start) == ("snapshot", 256)
    stack.manager.prefix.unpin(pinned)
    stack.manager.check_invariants()


# ---- rewind with snapshots ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "start"), [(390, 384), (384, 384), (300, 256), (130, 128), (100, 0)]
)
def test_a_rewind_goes_on_from_the_nearest_snapshot(length: int, start: int):
    stack = tiny_stack(drafts=3, prefix=PrefixOptions(policy=full()), num_blocks=12)
    text, other = Text.random(stack, 0, 500), Text.random(stack, 1, 500)
    request = stack.manager.admit_request(text.ids[:400])
    run_to(stack, request, text, 400)
    plan = stack.manager.rewind(request, length)
    assert (plan.start, plan.run) == (start, range(start, length))
    assert request.length == start
    edited = text.then(other, length)
    run_to(stack, request, edited, 450, chunk=70)
    assert_cold(stack, request, edited.stream)
    again = stack.manager.admit_request(text.ids[:400])  # the old text is still there, untouched
    run_to(stack, again, text, 400)
    assert_cold(stack, again, text.stream)
    stack.manager.check_invariants()


def test_a_rewind_into_a_cached_block_leaves_it_alone():
    stack = tiny_stack(drafts=3, prefix=PrefixOptions(policy=full()), num_blocks=12)
    text, other = Text.random(stack, 0, 500), Text.random(stack, 1, 500)
    request = stack.manager.admit_request(text.ids[:256])
    run_to(stack, request, text, 256)
    cached = request.block_ids[1]
    assert stack.manager.rewind(request, 254).source == "rings"
    assert request.block_ids[1] != cached
    edited = splice(text.stream, other.stream, 254)
    run_to(stack, request, edited, 300, chunk=4)
    assert_cold(stack, request, edited)
    again = stack.manager.admit_request(text.ids[:300])
    assert again.resume.start == 256
    assert_cold(stack, again, text.stream)


def test_a_fork_of_a_hit_and_a_fork_in_a_replay():
    stack = tiny_stack(prefix=PrefixOptions(policy=zero()), num_blocks=20)
    text, other = Text.random(stack, 0, 1000), Text.random(stack, 1, 1000)
    request = stack.manager.admit_request(text.ids[:900])
    run_to(stack, request, text, 900)
    stack.manager.release_request(request)
    request = stack.manager.admit_request(text.ids[:900])
    assert request.resume.replay == range(896 - 640, 896)
    run_to(stack, request, text, 500)
    (fork,) = stack.manager.fork(request, 1)
    edited = text.then(other, 900)
    run_to(stack, fork, edited, 930)
    run_to(stack, request, text, 930)
    assert_cold(stack, fork, edited.stream)
    assert_cold(stack, request, text.stream)
    assert fork.block_ids[:7] == request.block_ids[:7]


# ---- what is said --------------------------------------------------------------------------------


def test_counters_and_bytes():
    manager = build(num_blocks=9, policy=periodic(128), snapshots=3)
    compute(manager, IDS[:100])  # too short
    compute(manager, IDS[:400])  # not cached
    compute(manager, IDS[:400])  # blocks only: nothing was appended, so there is no snapshot
    compute(manager, IDS[500:900] + 7)
    manager.prefix.evict()
    compute(manager, IDS[:400])  # evicted
    stats = manager.stats()
    prefix = stats.prefix
    assert prefix.misses == {"too_short": 1, "not_cached": 2, "evicted": 1}
    assert {kind for kind, count in prefix.hits.items() if count} == {"blocks_only"}
    assert prefix.hits["blocks_only"] == 1
    assert (prefix.tokens_asked, prefix.tokens_shared, prefix.tokens_skipped) == (1700, 384, 0)
    assert (prefix.block_evictions, prefix.snapshots_used, prefix.snapshots_total) == (6, 0, 3)
    assert (stats.blocks_cached, prefix.blocks_indexed) == (3, 3)
    kinds = prefix.cached_bytes_by_kind
    assert sum(kinds.values()) == 3 * manager.schema.bytes.block
    assert {"csa entries", "csa index_keys", "hca entries", "padding"} <= set(kinds)
    assert manager.stats().to_dict()["prefix"]["hits"]["blocks_only"] == 1
    assert manager.memory.memory_bytes().snapshots == manager._parts.prefix.pool.memory_bytes()


def test_prometheus_text():
    manager = build(num_blocks=9)
    compute(manager, IDS[:400])
    reused(manager, IDS[:400])
    lines = prometheus_text(manager).splitlines()
    for line in (
        'dsv4_blocks{state="cached"} 3.0',
        'dsv4_blocks{state="free"} 6.0',
        'dsv4_prefix_hits_total{state="blocks_only"} 1.0',
        'dsv4_prefix_misses_total{reason="not_cached"} 1.0',
        'dsv4_prefix_tokens_total{what="asked"} 800.0',
        "dsv4_live_tokens 0.0",
    ):
        assert line in lines
    plain = KVCacheManager(
        CacheSchema.build(TINY, max_context=512), num_blocks=2, max_requests=1, max_step_tokens=16
    )
    assert "dsv4_prefix" not in prometheus_text(plain)


def test_metrics_without_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *arguments: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ImportError("no prometheus_client", name=name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=r"dsv4\[metrics\]"):
        prometheus_text(build())


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens", [[-1], [[1, 2]], [1.5], "abc", [2**31], torch.ones(300, dtype=torch.bfloat16)]
)
def test_ids_that_are_none(tokens: object):
    manager = build()
    with nothing_changes(manager), pytest.raises(InvalidInput):
        manager.admit_request(tokens)
    assert not manager.room.can_admit(tokens)
    with nothing_changes(manager), pytest.raises(InvalidInput):
        manager.prefix.pin(tokens)


def test_salts_must_be_strings():
    manager = build()
    with nothing_changes(manager), pytest.raises(InvalidInput, match="salt=3"):
        manager.admit_request(IDS[:300], salt=3)


def test_ids_at_commit_must_fit_the_step_and_the_prompt():
    manager = build()
    request = manager.admit_request(IDS[:200])
    plan = appended(manager.prepare_forward([(request, 150)]))
    with nothing_changes(manager), pytest.raises(InvalidInput, match=r"3 token ids .* 150 tokens"):
        manager.commit(plan, ids=[1, 2, 3])
    with nothing_changes(manager), pytest.raises(InvalidInput, match=r"token 7 .* rewind"):
        manager.commit(plan, ids=[*range(7), 9, *range(8, 150)])
    manager.commit(plan, ids=IDS[:150])
    assert request.length == 150


def test_options_that_cannot_be():
    with pytest.raises(InvalidInput, match="multiple of block_tokens=128"):
        build(policy=periodic(200))
    with pytest.raises(InvalidInput, match="at least 1"):
        periodic(0)
    windows = CacheSchema.build(
        replace(ModelSpec.preset("tiny"), layers=v4_layers([0, 0], backbone=2)), max_context=512
    )
    with pytest.raises(InvalidInput, match="window-only"):
        build(schema=windows)


def test_a_chunk_that_some_layers_lack_is_not_found_again():
    manager = build(policy=full())
    request = manager.admit_request(IDS[:300])
    plan = manager.prepare_forward([(request, 300)])
    plan.batch.written.note(0)  # the layers after it are left out
    manager.commit(plan, partial=True)
    plan = manager.prepare_forward([(request, 200)])
    manager.commit(appended(plan), ids=IDS[300:500])
    manager.release_request(request)
    assert reused(manager, IDS[:500]) == 0
    compute(manager, IDS[:300])
    assert reused(manager, IDS[:500]) == 256


def test_the_same_prompt_twice_at_once_does_not_keep_blocks_from_going():
    stack = tiny_stack(prefix=PrefixOptions(policy=full()), num_blocks=10)
    manager, text = stack.manager, Text.random(stack, 0, 1200)
    first, second = (manager.admit_request(text.ids[:512]) for _ in range(2))
    run_to(stack, first, text, 512)
    run_to(stack, second, text, 512)
    manager.release_request(first)
    run_to(stack, second, text, 1100, chunk=100)
    assert second.length == 1100
    manager.check_invariants()


def test_a_pin_counts_once():
    manager = build()
    compute(manager, IDS[:300])
    pins = [manager.prefix.pin(IDS[:300]) for _ in range(2)]
    manager.prefix.unpin(pins[0])
    with nothing_changes(manager), pytest.raises(InvalidInput, match="once"):
        manager.prefix.unpin(pins[0])
    assert manager.prefix.evict() == 0
    manager.prefix.unpin(pins[1])
    assert manager.prefix.evict() == 2


def test_what_drafts_wrote_stays_with_its_request():
    """Another tenant's snapshot takes the same row; after its hit draft windows are empty."""
    stack = tiny_stack(prefix=PrefixOptions(policy=full(), snapshots=2), num_blocks=20)
    manager = stack.manager
    drafting = [spec.layer for spec in TINY.layers if spec.draft]
    assert drafting
    for salt, layers in (("a", stack.layers), ("b", tuple(set(stack.layers) - set(drafting)))):
        text = Text.random(stack, ord(salt), 290)
        request = manager.admit_request(text.ids, salt=salt)
        plan = manager.prepare_forward([(request, 290)])
        stack.write(plan, [text.stream], layers=layers)
        manager.commit(plan)
        manager.release_request(request)
    request = manager.admit_request(text.ids, salt="b")
    assert request.resume.source == "snapshot"
    for layer in drafting:
        for view in manager.acquire(layer).memory.state.views.values():
            assert not view[request.slot].view(torch.uint8).any()


@pytest.mark.parametrize("failing", ["memory.publish", "_parts.prefix.put_state"])
def test_a_device_error_in_admission_gives_everything_back(
    failing: str, monkeypatch: pytest.MonkeyPatch
):
    manager = build()
    compute(manager, IDS[:300])
    part, call = failing.rsplit(".", 1)
    with nothing_changes(manager), monkeypatch.context() as patch:
        patch.setattr(attrgetter(part)(manager), call, no_device)
        with pytest.raises(RuntimeError, match="out of memory"):
            manager.admit_request(IDS[:300])
    assert reused(manager, IDS[:300]) == 256


def test_a_device_error_in_a_fork_gives_everything_back(monkeypatch: pytest.MonkeyPatch):
    manager = build()
    request = manager.admit_request(IDS[:300])
    finish(manager, request)
    before = manager.stats()
    with monkeypatch.context() as patch:
        patch.setattr(manager.memory, "copy_block", no_device)
        with pytest.raises(RuntimeError, match="out of memory"):
            manager.fork(request, 2)
    assert manager.stats() == before
    manager.check_invariants()
    assert [fork.length for fork in manager.fork(request, 2)] == [300, 300]
