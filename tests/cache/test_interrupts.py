"""Ctrl-C at every line of every call: nothing has changed, or `recover` puts all in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import RecoveryNeeded
from tests.support.faults import Interrupts
from tests.support.lives import TINY, TINY_LAYERS, Text, assert_cold, run_to, tiny_stack
from tests.support.stack import Stream

SCHEMA = CacheSchema.build(TINY, max_context=2048, max_draft_tokens=3)
AHEAD = CacheSchema.build(TINY, max_context=2048, max_draft_tokens=3, steps_ahead=1)
LENGTHS = {"busy": 382, "other": 200}


class Scene:
    """Two requests in the middle of their texts, one in no plan; most other blocks are cached.
    With `real` bytes layers write, and are compared at the end; else steps are only said to have
    been written."""

    def __init__(self, call: str, *, real: bool = False) -> None:
        self.real = real
        self.router: set[bytes] = set()  # what events say is cached
        options: dict[str, Any] = {
            "prefix": PrefixOptions(policy=full(), snapshots=4, events=True),
            "num_blocks": 11,
            "max_requests": 5,
            "max_open_plans": 1 + call.endswith("behind"),
        }
        if real:
            self.stack = tiny_stack(drafts=3, ahead=int(call.endswith("behind")), **options)
            self.manager = self.stack.manager
        else:
            schema = AHEAD if call.endswith("behind") else SCHEMA
            self.manager = KVCacheManager(schema, max_step_tokens=512, **options)
        manager = self.manager
        self.old = self.text_of(9)
        first = manager.admit_request(self.old.ids[:500])
        self.run(first, self.old, 500)
        manager.release_request(first)
        self.texts = {"busy": self.text_of(0), "other": self.text_of(1)}
        self.requests: dict[str, Request] = {}
        for name, text in self.texts.items():
            self.requests[name] = manager.admit_request(text.ids[:150])
            self.run(self.requests[name], text, LENGTHS[name])
        self.busy, self.other = self.requests["busy"], self.requests["other"]
        self.text = self.texts["busy"]
        if call == "rewind_a_shared_block":
            self.run(self.busy, self.text, 385)
        self.planned = [self.text]
        if call in ("commit", "reject", "fail", "abandon") or call.endswith("behind"):
            self.plan = manager.prepare_forward([(self.busy, 4)])
            self.write(TINY_LAYERS)
        if call in ("reject_with_one_behind", "fail_with_one_behind"):
            self.prepare_behind()
        if call in ("commit_a_chunk", "fail_a_chunk"):
            self.plan = manager.prepare_forward([(self.busy, 200)])
            self.write(TINY_LAYERS if call == "commit_a_chunk" else [0])
        if call == "adopt":  # two that begin alike, in one step
            twin = self.text_of(5)
            self.planned, names = [twin, twin], ("first", "second")
            for name in names:
                self.texts[name] = twin
                self.requests[name] = manager.admit_request(twin.ids[:140])
            self.plan = manager.prepare_forward([(self.requests[n], 140) for n in names])
            self.write(TINY_LAYERS)
        if call == "unpin":
            self.pinned = manager.prefix.pin(self.old.ids)

    def text_of(self, seed: int) -> Text:
        if self.real:
            return Text.random(self.stack, seed, 900)
        return Text(np.arange(900, dtype=np.int32) + 1000 * seed, Stream())

    def write(self, layers: Sequence[int]) -> None:
        if self.real:
            streams = [text.stream for text in self.planned]
            self.stack.write(self.plan, streams, layers=layers)
        else:
            self.plan.mark_appended(layers)
            prefill = self.plan.prefill
            if prefill is not None and prefill.captures is not None:
                prefill.captures.layers.update(layers)

    def run(self, request: Request, text: Text, length: int, chunk: int = 200) -> None:
        if self.real:
            return run_to(self.stack, request, text, length, chunk)
        while request.length < length:
            start, count = request.length, min(chunk, length - request.length)
            plan = self.manager.prepare_forward([(request, count)])
            plan.mark_appended()
            self.manager.commit(plan, ids=text.ids[start : start + count])

    # ---- the calls

    def admit(self) -> None:
        self.manager.admit_request(self.text.ids[:700])

    def admit_a_count(self) -> None:
        self.manager.admit_request(600)

    def fork(self) -> None:
        self.manager.fork(self.busy, 2)

    def extend(self) -> None:
        self.manager.room.extend(self.busy, 300)

    def allocate_block(self) -> None:
        self.manager.allocate_block(self.busy)

    def rewind_far(self) -> None:
        self.manager.rewind(self.busy, 300)

    def rewind_a_shared_block(self) -> None:
        self.manager.rewind(self.busy, 383)

    def reset(self) -> None:
        self.manager.room.reset_slot(self.busy)

    def release(self) -> None:
        self.manager.release_request(self.busy)

    def pin(self) -> None:
        self.manager.prefix.pin(self.old.ids)

    def unpin(self) -> None:
        self.manager.prefix.unpin(self.pinned)

    def evict(self) -> None:
        self.manager.prefix.evict(3)

    def prepare(self) -> None:
        self.manager.prepare_forward([(self.busy, 4)])

    def prepare_a_chunk(self) -> None:
        self.manager.prepare_forward([(self.busy, 300), (self.other, 1)])

    def commit(self) -> None:
        self.manager.commit(self.plan, ids=self.text.ids[382:386])

    def reject(self) -> None:
        self.manager.commit(self.plan, [2], ids=self.text.ids[382:386])

    def commit_a_chunk(self) -> None:
        self.manager.commit(self.plan)

    def adopt(self) -> None:
        self.manager.commit(self.plan)

    def fail(self) -> None:
        self.manager.fail(self.plan)

    def fail_a_chunk(self) -> None:
        self.manager.fail(self.plan)

    def abandon(self) -> None:
        self.manager.abandon(self.plan)

    def prepare_behind(self) -> None:
        self.manager.prepare_forward(
            [(self.other, 1), (self.busy, 4)], after=self.plan, accepted=torch.tensor([2])
        )

    def reject_with_one_behind(self) -> None:
        self.manager.commit(self.plan, [2], ids=self.text.ids[382:386])

    def fail_with_one_behind(self) -> None:
        self.manager.fail(self.plan)

    # ---- afterwards

    def go_on(self) -> None:
        """Every request that was live goes on to the right bytes; then nothing is left."""
        manager = self.manager
        self.check_books()
        for plan in manager.room.open_plans:
            assert plan.after is None or not plan.after.done
        while manager.room.open_plans:
            manager.fail(manager.room.open_plans[0])
        for request in manager.requests:
            if request not in self.requests.values():  # interrupted on its way to the caller
                manager.release_request(request)
        for name, request in self.requests.items():
            if request.released:
                continue
            if request.is_torn:
                manager.rewind(request, request.length)
            length = max(request.length, request.reused_tokens) + 140
            self.run(request, self.texts[name], length, chunk=120)
            self.check_books()
            if self.real:
                assert_cold(self.stack, request, self.texts[name].stream)
            manager.release_request(request)
        manager.check_invariants()
        again = manager.admit_request(self.text.ids[:520])
        self.run(again, self.text, 520)
        if self.real:
            assert_cold(self.stack, again, self.text.stream)
        manager.release_request(again)
        for pin in list(manager._parts.prefix.pins._standing):  # type: ignore[union-attr]
            manager.prefix.unpin(pin)
        manager.prefix.evict()
        manager.check_invariants()
        stats = manager.stats()
        assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
        self.check_events()

    def check_events(self) -> None:
        """Each block is told once when it comes and once when it goes."""
        for event in self.manager.prefix.take_events():
            is_stored = event.what == "stored"
            assert is_stored is (event.digest not in self.router)
            assert event.parent is None or event.parent in self.router or not is_stored
            (self.router.add if is_stored else self.router.remove)(event.digest)
        assert self.manager._parts.prefix
        assert self.router == {node.digest for node in self.manager._parts.prefix.index.nodes()}

    def check_books(self) -> None:
        """All that the bytes rely on."""
        manager = self.manager
        manager.check_invariants()
        self.check_events()
        allocator, schema = manager._parts.table.allocator, manager.schema
        for name, request in self.requests.items():
            if request.released:
                continue
            ids, published = request.block_ids, request.published_blocks
            assert manager.memory.block_table[request.slot, :published].tolist() == ids[:published]
            if not request.is_torn:
                first = max(request.length, request.reused_tokens) // schema.block_tokens
                assert not any(map(allocator.is_shared, ids[first:]))
            assert request.trail is not None
            known = request.trail.ids
            assert np.array_equal(known, self.texts[name].ids[: len(known)])


CALLS: tuple[Callable[[Scene], None], ...] = (
    *(Scene.admit, Scene.admit_a_count, Scene.fork, Scene.extend, Scene.allocate_block),
    *(Scene.rewind_far, Scene.rewind_a_shared_block, Scene.reset, Scene.release),
    *(Scene.pin, Scene.unpin, Scene.evict, Scene.prepare, Scene.prepare_a_chunk),
    *(Scene.commit, Scene.reject, Scene.commit_a_chunk, Scene.fail, Scene.fail_a_chunk),
    *(Scene.abandon, Scene.adopt, Scene.prepare_behind),
    *(Scene.reject_with_one_behind, Scene.fail_with_one_behind),
)


def lines_of(call: Callable[[Scene], None], *, real: bool = False, inside: bool = False) -> int:
    made, counted = Scene(call.__name__, real=real), Interrupts(inside=inside)
    with counted.injected():
        call(made)
    return counted.count


def interrupt(
    call: Callable[[Scene], None], at: int, *, real: bool = False, inside: bool = False
) -> None:
    made = Scene(call.__name__, real=real)
    assert made.manager._parts.prefix
    known = set(made.manager._parts.prefix.pins._standing)
    with pytest.raises(KeyboardInterrupt), Interrupts(at, inside=inside).injected():
        call(made)
    try:
        made.manager.room.extend(made.other, 0)
    except RecoveryNeeded:
        with pytest.raises(RecoveryNeeded, match=r"call manager\.recover\(\) before acquire"):
            made.manager.acquire(0)
        made.manager.recover()
    assert made.manager._parts.prefix.pins._standing <= known, "the caller has no other pin"
    made.go_on()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_at_any_line_is_recovered_from(call: Callable[[Scene], None]):
    lines = lines_of(call)
    assert lines > 5
    for at in range(0, lines, 3):
        interrupt(call, at)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_between_two_calls_of_a_line_is_recovered_from(
    call: Callable[[Scene], None],
):
    """Ctrl-C comes wherever Python looks for it; the first and last places are the guard's."""
    places = lines_of(call, inside=True)
    assert places > 5
    chosen = {*range(12), *range(12, places - 12, 29), *range(places - 12, places)}
    for at in chosen.intersection(range(places)):  # Python 3.12 looks at fewer places than 3.11
        interrupt(call, at, inside=True)


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_an_interrupt_at_every_line_is_recovered_from(call: Callable[[Scene], None]):
    for inside in (False, True):
        for at in range(lines_of(call, inside=inside)):
            interrupt(call, at, inside=inside)


@pytest.mark.nightly
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_after_an_interrupt_all_bytes_are_right(call: Callable[[Scene], None]):
    lines = lines_of(call, real=True)
    for at in range(0, lines, max(1, lines // 20)):
        interrupt(call, at, real=True)


@pytest.mark.parametrize("undone", [False, True])
def test_an_interrupted_cut_leaves_no_digest_of_other_tokens(undone: bool):
    """A digest that outlived its tokens would name the next request's block."""
    at = 0
    while True:
        ids = np.arange(64, dtype=np.int32)
        trail = TokenTrail(b"root", 16, ids.copy())
        trail.hash_blocks(4)
        kept = trail.keep()
        if undone:
            trail.cut(20)
        lines = Interrupts(at, ("/prefix/trail.py",))
        with suppress(KeyboardInterrupt), lines.injected():
            trail.restore(kept) if undone else trail.cut(20)
        known = len(trail.ids)
        trail.cut(min(known, 20))
        trail.learn(20, 7 + ids[20:])
        fresh = TokenTrail(b"root", 16, np.concatenate([ids[:20], 7 + ids[20:]]))
        assert [trail.digest(n) for n in range(4)] == [fresh.digest(n) for n in range(4)], at
        if lines.count <= at:
            break
        at += 1
    assert at >= 3


def test_to_recover_without_need_changes_nothing():
    made = Scene("prepare")
    before = made.manager.stats()
    made.manager.recover()
    assert made.manager.stats() == before
    made.go_on()


def test_an_interrupted_recovery_is_recovered_from():
    lines = 40
    for at in range(0, lines, 6):
        made = Scene("rewind_far")
        with pytest.raises(KeyboardInterrupt), Interrupts(60).injected():
            made.rewind_far()
        with pytest.raises(KeyboardInterrupt), Interrupts(at).injected():
            made.manager.recover()
        made.manager.recover()
        made.go_on()
