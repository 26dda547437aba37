"""Steps planned and launched before the results of those in front are on the host: the bytes are
those of a synchronous run, whatever is accepted."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.errors import ContextOverflow, InvalidInput, PlanError, RequestError
from dsv4.ops.backend import BackendName
from dsv4.planner import plan as sizing
from tests.oracles.bookkeeping import nothing_changes
from tests.support.lives import TINY, TINY_LAYERS, Text, assert_cold
from tests.support.stack import POISON, Stack

DRAFTS = 3


class Engine:
    """Two or more requests, each with its text; the truth about lengths is kept here and told to
    the manager only when a plan is committed."""

    def __init__(
        self,
        *,
        ahead: int,
        requests: int = 3,
        state: HcaState = "raw",
        backend: BackendName = "reference",
        prompt: int = 0,
        policy: Any = None,
    ) -> None:
        schema = CacheSchema.build(
            TINY, max_context=1024, max_draft_tokens=DRAFTS, steps_ahead=2, hca_state=state
        )
        self.ahead = ahead
        self.stack = Stack(schema, layers=TINY_LAYERS)
        self.manager = self.stack.manager = KVCacheManager(
            schema,
            num_blocks=8 * requests,
            max_requests=requests,
            max_step_tokens=256,
            max_open_plans=3,
            backend=backend,
            prefix=PrefixOptions(policy=full() if policy is None else policy, snapshots=16),
        )
        arenas = [self.manager.memory.block_arena.bytes, self.manager.memory.slot_arena.bytes]
        assert self.manager._parts.prefix
        arenas.append(self.manager._parts.prefix.pool.bytes)
        arenas += [lane.workspace.staging for lane in self.manager.memory.lanes]
        for arena in arenas:
            arena.fill_(POISON)
        self.texts = [Text.random(self.stack, nth, 1000) for nth in range(requests)]
        self.requests = [self.manager.admit_request(t.ids[:prompt]) for t in self.texts]
        for request in self.requests:  # the same blocks, whoever asks first
            self.manager.room.extend(request, 900)
        self.lengths = [0] * requests  # as the device knows them
        self.open: list[tuple[ForwardPlan, list[int], list[int], list[int]]] = []
        self.accepted: Tensor | None = None

    def step(
        self, rows: list[int], counts: list[int], kept: list[int], device_counts: bool = True
    ) -> None:
        """Plans and runs a step behind the last one, and commits the oldest if there are more open
        than asked for."""
        busy = {row for _, others, _, _ in self.open[:-1] for row in others}
        if self.open and busy.intersection(rows).difference(self.open[-1][1]):
            self.finish()  # one that has sat out a step comes back once its last is known
        behind = self.open[-1][0] if self.open else None
        plan = self.manager.prepare_forward(
            [(self.requests[row], count) for row, count in zip(rows, counts, strict=True)],
            after=behind,
            accepted=self.accepted if behind is not None else None,
        )
        starts = [self.lengths[row] for row in rows]
        self.run(plan, rows, starts, counts)
        for row, count in zip(rows, kept, strict=True):
            self.lengths[row] += count
        self.accepted = torch.tensor(kept, dtype=torch.int32) if device_counts else None
        self.open.append((plan, rows, starts, kept))
        self.finish(self.ahead)

    def run(self, plan: ForwardPlan, rows: list[int], starts: list[int], counts: list[int]) -> None:
        positions = [p for a, n in zip(starts, counts, strict=True) for p in range(a, a + n)]
        assert plan.batch.positions.tolist() == positions
        for layer in TINY_LAYERS:

            def gather(tensors: list[Tensor]) -> Tensor:
                spans = zip(tensors, starts, counts, strict=True)
                return torch.cat([t[a : a + n] for t, a, n in spans])

            streams = [self.texts[row].stream for row in rows]
            projections = [
                gather(list(each))
                for each in zip(*(s.projections[layer] for s in streams), strict=True)
            ]
            handle = self.manager.acquire(layer, plan.batch)
            kv = gather([s.kv[layer] for s in streams])
            handle.append(kv, *projections, weights=self.stack.weights[layer])

    def finish(self, most_open: int = 0) -> None:
        while len(self.open) > most_open:
            plan, rows, starts, kept = self.open.pop(0)
            ids = [
                token
                for row, start, count in zip(rows, starts, plan.counts.tolist(), strict=True)
                for token in self.texts[row].ids[start : start + count].tolist()
            ]
            self.manager.commit(plan, kept, ids=ids)
            self.manager.check_invariants()
            assert plan.starts.tolist() == starts
        if not self.open:
            assert [r.length for r in self.requests] == self.lengths


def random_life(seed: int, requests: int, steps: int) -> list[tuple[list[int], ...]]:
    """Who runs, with how many tokens, how many are accepted: decodes with drafts, and requests that
    sit out now and then."""
    draw, life = Random(seed), []
    for step in range(steps):
        rows = [row for row in range(requests) if row == step % 3 or draw.random() < 0.85]
        counts = [draw.choice((0, 1, 2, 4, 4, 4, 4, 4)) for _ in rows]
        kept = [max(draw.randint(0, n), draw.randint(0, n)) for n in counts]
        life.append((rows, counts, kept))
    return life


def state_of(engine: Engine) -> dict[str, Any]:
    manager = engine.manager
    assert manager._parts.prefix
    snapshots = {
        node.digest: manager._parts.prefix.pool.bytes[node.snapshot]
        for node in manager._parts.prefix.index.nodes()
        if node.snapshot is not None
    }
    return {
        "blocks": manager.memory.block_arena.bytes,
        "slots": manager.memory.slot_arena.bytes,
        "cached": sorted(node.digest for node in manager._parts.prefix.index.nodes()),
        "snapshots": snapshots,
        "chains": [r.trail and r.trail.chain for r in engine.requests],
    }


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert torch.equal(one["blocks"], other["blocks"])
    assert torch.equal(one["slots"], other["slots"])
    assert one["cached"] == other["cached"]
    assert one["chains"] == other["chains"]
    assert one["snapshots"].keys() == other["snapshots"].keys()
    for digest, rows in one["snapshots"].items():
        assert torch.equal(rows, other["snapshots"][digest])


def live(life: list[tuple[list[int], ...]], **options: Any) -> Engine:
    engine = Engine(**options)
    for rows, counts, kept in life:
        engine.step(rows, counts, kept)
    engine.finish()
    return engine


@pytest.mark.parametrize(
    ("seed", "ahead", "state"),
    [
        (0, 1, "raw"),
        (1, 2, "online"),
        *(
            pytest.param(seed, ahead, state, marks=pytest.mark.nightly)
            for seed in range(2, 6)
            for ahead in (1, 2)
            for state in ("raw", "online")
        ),
    ],
)
def test_bytes_equal_the_synchronous_run_for_random_acceptances(
    seed: int, ahead: int, state: HcaState
):
    life = random_life(seed, 3, 80)
    expected, found = (live(life, ahead=n, state=state) for n in (0, ahead))
    assert_equal_states(state_of(expected), state_of(found))
    assert state_of(found)["snapshots"], "too few tokens for a block"
    for request, text in zip(found.requests, found.texts, strict=True):
        assert_cold(found.stack, request, text.stream)


def test_the_same_with_the_kernel_that_fills_in_where_requests_start(
    monkeypatch: pytest.MonkeyPatch,
):
    follow = pytest.importorskip("dsv4.kernels.follow")
    life = random_life(5, 3, 20)
    expected = live(life, ahead=0)
    found = Engine(ahead=2)
    monkeypatch.setattr(found.manager._parts.backend, "follow", follow.follow)
    for rows, counts, kept in life:
        found.step(rows, counts, kept)
    found.finish()
    assert_equal_states(state_of(expected), state_of(found))


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_chunks_run_beside_requests_whose_lengths_only_the_device_knows(ahead: int):
    """A step of a chunk and of decodes with drafts: the work items of both are right."""
    draw = Random(9)
    engine = Engine(ahead=ahead, prompt=600)
    engine.step([0, 1], [130, 90], [130, 90])
    engine.step([0, 1], [2, 4], [1, 2])
    for _ in range(12):
        kept = [draw.randint(0, 4), draw.randint(1, 3), 40]
        engine.step([0, 1, 2], [4, 3, 40], kept)
    engine.finish()
    for request, text in zip(engine.requests, engine.texts, strict=True):
        assert_cold(engine.stack, request, text.stream)


def test_without_drafts_lengths_are_known_and_only_ids_are_late():
    """The simple case: one token each, all of them kept, ids told at commit."""
    life = [([0, 1, 2], [1, 1, 1], [1, 1, 1]) for _ in range(140)]
    expected, found = Engine(ahead=0), Engine(ahead=1)
    found.manager._parts.backend.follow = no_launch  # type: ignore[method-assign]
    for engine in (expected, found):
        for rows, counts, kept in life:
            engine.step(rows, counts, kept, device_counts=False)
        engine.finish()
    assert_equal_states(state_of(expected), state_of(found))


def no_launch(*call: object) -> None:
    raise AssertionError("lengths are known")


def test_a_replayed_request_writes_no_entries_that_exist():
    """Tokens whose entries came with the prefix, one after the other with drafts in between."""
    for ahead in (0, 2):
        engine = Engine(ahead=ahead, requests=2, prompt=300)
        manager, text = engine.manager, engine.texts[0]
        assert manager._parts.prefix
        engine.step([0], [200], [200])
        engine.step([0], [99], [99])
        engine.finish()
        for node in list(manager._parts.prefix.rows._taken.values()):
            manager._parts.prefix.rows.evict(node)
        manager.release_request(engine.requests[1])
        again = manager.admit_request(text.ids[:300])
        assert again.resume.source == "replay" or again.length == 0
        engine.requests[1], engine.texts[1] = again, text
        engine.lengths[1] = again.length
        draw = Random(3)
        while engine.lengths[1] < 280:
            engine.step([1], [4], [draw.randint(1, 4)])
        engine.finish()
        assert_cold(engine.stack, again, text.stream)


def two_open(**options: Any) -> tuple[Engine, ForwardPlan, ForwardPlan]:
    engine = Engine(ahead=3, **options)
    engine.step([0, 1], [4, 4], [2, 3])
    engine.step([0, 1], [4, 1], [0, 1])
    (first, *_), (second, *_) = engine.open
    return engine, first, second


def test_what_the_host_knows_meanwhile():
    engine, first, second = two_open()
    assert second.after is first
    assert second.starts.tolist() == [4, 4]  # the latest
    assert [r.length for r in engine.requests] == [0, 0, 0]
    engine.finish(1)
    assert second.after is None
    assert second.starts.tolist() == [2, 3]
    assert second.ends.tolist() == [6, 4]
    assert [r.length for r in engine.requests] == [2, 3, 0]


def test_the_first_is_committed_first_and_abandoned_last():
    engine, first, second = two_open()
    manager = engine.manager
    with nothing_changes(manager), pytest.raises(PlanError, match="commit that one first"):
        manager.commit(second, [0, 1])
    with nothing_changes(manager), pytest.raises(PlanError, match="abandon that one first"):
        manager.abandon(first)
    with pytest.raises(RequestError, match="still open"):
        manager.release_request(engine.requests[0])
    manager.abandon(second)
    manager.commit(first, [2, 3])
    assert [r.length for r in engine.requests] == [2, 3, 0]
    engine.lengths[:2], engine.open = [2, 3], []
    engine.step([0, 1], [4, 4], [4, 4])
    engine.finish()
    for request, text in zip(engine.requests[:2], engine.texts, strict=False):
        assert_cold(engine.stack, request, text.stream)


def test_plans_behind_one_that_fails_fail_with_it():
    engine, first, second = two_open()
    manager = engine.manager
    engine.step([0], [4], [4])
    third = engine.open[-1][0]
    manager.fail(first)
    assert (first.done, second.done, third.done) == (True, True, True)
    assert manager.room.open_plans == []
    assert not any(r.is_torn for r in engine.requests)
    engine.lengths, engine.open = [0, 0, 0], []
    engine.step([0, 1], [4, 4], [4, 4])
    engine.finish()
    for request, text in zip(engine.requests[:2], engine.texts, strict=False):
        assert_cold(engine.stack, request, text.stream)


def test_what_was_written_in_vain_is_remembered():
    """A request that turns out to be finished is in a plan that is under way: its commit accepts
    nothing, and the rings are known to have lost as much as they have."""
    engine, first, second = two_open()
    manager, request = engine.manager, engine.requests[0]
    manager.commit(first, [1, 3])
    manager.commit(second, [0, 1])
    assert request.length == 1
    assert request.written_tokens >= 6
    assert not request.is_torn
    assert_cold(engine.stack, request, engine.texts[0].stream)
    manager.release_request(request)
    manager.check_invariants()


@pytest.mark.parametrize(
    ("accepted", "told"),
    [
        ([2, 3], "list"),
        (torch.tensor([2]), "int64 \\[1\\]"),
        (torch.tensor([2, 3], dtype=torch.int16), "int16"),
        (torch.tensor([2.0, 3.0]), "float32"),
        (torch.tensor([[2], [3]]), "\\[2, 1\\]"),
        (torch.tensor([2, 0, 3, 0])[::2], "in a row"),
    ],
    ids=["list", "short", "int16", "float", "shape", "strided"],
)
def test_accepted_counts_that_do_not_fit(accepted: Any, told: str):
    engine, _, second = two_open()
    with nothing_changes(engine.manager), pytest.raises(PlanError, match=told):
        engine.manager.prepare_forward([(engine.requests[0], 1)], after=second, accepted=accepted)


def test_what_cannot_be_planned_behind():
    engine, first, second = two_open()
    manager, (one, other, third) = engine.manager, engine.requests
    kept = torch.tensor([0, 1])
    with nothing_changes(manager), pytest.raises(PlanError, match="as `after`"):
        manager.prepare_forward([(third, 1)], accepted=kept)
    with nothing_changes(manager), pytest.raises(PlanError, match="5 tokens of request 0"):
        manager.prepare_forward([(one, 5)], after=second, accepted=kept)
    with nothing_changes(manager), pytest.raises(PlanError, match="no request in common"):
        manager.prepare_forward([(one, 1)])
    with nothing_changes(manager), pytest.raises(ContextOverflow):
        manager.prepare_forward([(third, 1025)], after=second, accepted=kept)
    engine.step([0, 1, 2], [1, 1, 1], [1, 1, 1])
    last = engine.open[-1][0]
    with nothing_changes(manager), pytest.raises(PlanError, match="3 plans are still open"):
        manager.prepare_forward([(one, 1)], after=last)
    manager.abandon(last)
    engine.open.pop()
    manager.commit(first, [2, 3])
    with pytest.raises(PlanError, match="this plan is over"):
        manager.prepare_forward([(other, 1)], after=first)


def test_the_schema_says_how_many_steps_may_be_ahead():
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=1)
    manager = KVCacheManager(schema, num_blocks=8, max_requests=2, max_open_plans=2)
    request = manager.admit_request(10)
    plan = manager.prepare_forward([(request, 1)])
    with nothing_changes(manager), pytest.raises(PlanError, match="steps_ahead=1"):
        manager.prepare_forward([(request, 1)], after=plan)


def test_a_plan_whose_tokens_were_taken_for_accepted_rejects_none():
    engine = Engine(ahead=2)
    engine.step([0, 1], [4, 1], [4, 1], device_counts=False)
    engine.step([0, 1], [1, 1], [1, 1])
    first = engine.open[0][0]
    with nothing_changes(engine.manager), pytest.raises(PlanError, match="as if all"):
        engine.manager.commit(first, [3, 1])
    engine.finish()


@pytest.mark.parametrize("counts", [None, torch.zeros(0, dtype=torch.int32)], ids=["all", "none"])
def test_a_plan_behind_one_without_requests(counts: Tensor | None):
    engine = Engine(ahead=1)
    manager, request = engine.manager, engine.requests[0]
    empty = manager.prepare_forward([])
    plan = manager.prepare_forward([(request, 3)], after=empty, accepted=counts)
    assert (plan.starts.tolist(), plan.unknown_starts) == ([0], None)
    manager.commit(empty)
    engine.run(plan, [0], [0], [3])
    manager.commit(plan)
    assert request.length == 3


def three_open() -> tuple[Engine, list[ForwardPlan]]:
    """The device counts what the first keeps; of the second all tokens are taken for kept."""
    engine = Engine(ahead=3)
    engine.step([0, 1], [4, 4], [2, 4])
    engine.step([0, 1], [4, 2], [4, 2], device_counts=False)
    engine.step([0, 1], [4, 4], [4, 1])
    return engine, [plan for plan, *_ in engine.open]


def test_what_a_plan_two_deep_has_taken_for_kept_is_kept():
    """Its start is known only to the device, which has counted on it all the same."""
    engine, (first, second, third) = three_open()
    assert third.unknown_starts is not None
    manager = engine.manager
    manager.commit(first, [2, 4])
    for kept in ([3, 2], [4, 1], [0, 0]):
        with nothing_changes(manager), pytest.raises(PlanError, match="as if all"):
            manager.commit(second, kept)
    manager.commit(second, [4, 2])
    manager.commit(third, [4, 1])
    engine.open = []
    engine.step([0, 1], [4, 4], [4, 4])
    engine.finish()
    for request, text in zip(engine.requests[:2], engine.texts, strict=False):
        assert_cold(engine.stack, request, text.stream)


def test_a_start_two_deep_is_known_again_once_the_first_is_committed():
    engine, (_, second, third) = three_open()
    for plan in (second, third):
        assert plan.unknown_starts is not None
    engine.finish(2)
    assert third.starts.tolist() == [6, 6]
    engine.accepted = None
    engine.open[-1] = (third, *engine.open[-1][1:3], [4, 4])
    engine.lengths[:2] = [10, 10]
    engine.step([0, 1], [40, 3], [40, 3], device_counts=False)  # a chunk
    assert second.unknown_starts is third.unknown_starts is None
    engine.finish()
    for each, text in zip(engine.requests[:2], engine.texts, strict=False):
        assert_cold(engine.stack, each, text.stream)


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_rings_are_long_enough_and_the_planner_knows(drafts: int, ahead: int):
    plain = CacheSchema.build(TINY, max_draft_tokens=drafts)
    schema = CacheSchema.build(TINY, max_draft_tokens=drafts, steps_ahead=ahead)
    more = ahead * (1 + drafts)
    assert schema.max_decode_tokens == 1 + drafts
    assert schema.max_rollback_tokens == 1 + drafts + more
    assert schema.ring_rows == plain.ring_rows + more
    for ours, theirs in zip(schema.layers, plain.layers, strict=True):
        assert ours.tail_a_rows == theirs.tail_a_rows + (more if theirs.tail_a_rows else 0)
        assert ours.tail_b_rows == theirs.tail_b_rows + (more if theirs.tail_b_rows else 0)
    found = sizing(schema)
    assert found.steps_ahead == ahead
    assert found.slot_bytes == schema.bytes.slot
    assert (found.slot_bytes > plain.bytes.slot) == (ahead > 0)
    assert schema.content_fingerprint == plain.content_fingerprint
    with pytest.raises(InvalidInput, match="steps_ahead"):
        CacheSchema.build(TINY, steps_ahead=-1)
