"""Cut replays: an approximation that has to be asked for, that says what it is, and of which
nothing is ever found again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full, periodic, zero
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.requests import Request
from dsv4.errors import InvalidInput, PlanError, RequestError
from dsv4.model import ModelSpec
from dsv4.tiers.host import HostTier
from tests.scenarios.test_prefix_replay import Runner, different, tokens
from tests.support.handoff import MODEL, close, side

# windows and blocks of 16 tokens
SMALL = replace(ModelSpec.preset("v41-tiny"), window=16)
BLOCK = WINDOW = 16
# a prompt shares so many tokens with one of CACHED that is cached, the reused blocks among them
CACHED, SHARED, PROMPT = 96, 52, 100
FIRST, REUSED = 32, 48
TIMEOUT_S = 120.0


class CutRunner(Runner):
    """Of prompts that begin with a cached one; snapshots lie further back than a cut replay."""

    def __init__(self, options: PrefixOptions | None = None, **more: object) -> None:
        super().__init__(SMALL, BLOCK)
        prefix = options or PrefixOptions(policy=periodic(64), snapshots=6, replay="cut")
        self.manager = KVCacheManager(
            self.schema, num_blocks=60, max_requests=4, max_step_tokens=256, prefix=prefix, **more
        )  # type: ignore[arg-type]
        self.cached = tokens(0, CACHED)
        self.prompt = [*self.cached[:SHARED], *tokens(1, PROMPT - SHARED)]
        self.compute(self.cached)

    def admit(self) -> Request:
        return self.manager.admit_request(self.prompt)

    def indexed(self) -> list[tuple[bytes, bool]]:
        """What can be found: digests, and whether there is a snapshot."""
        assert self.manager._parts.prefix
        nodes = self.manager._parts.prefix.index.nodes()
        return sorted((node.digest, node.snapshot is not None) for node in nodes)

    def check_published(self, *texts: list[int]) -> int:
        """Every block that can be found is a cold run's, byte for byte. How many were looked at."""
        prefix, seen = self.manager._parts.prefix, set()
        assert prefix
        for ids in texts:
            manager = self.new_manager(None)
            request = manager.admit_request(len(ids))
            self.run(manager, request, ids, 100)
            trail = prefix.prompt(torch.tensor(ids).int().numpy(), None).trail
            assert trail is not None
            for block, digest in enumerate(trail.chain):
                node = prefix.index.get(digest)
                if node is not None:
                    found = self.manager.memory.block_arena.bytes[node.block_id]
                    assert torch.equal(
                        found, manager.memory.block_arena.bytes[request.block_ids[block]]
                    )
                    seen.add(digest)
        assert seen == {node.digest for node in prefix.index.nodes()}
        return len(seen)


def test_it_must_be_asked_for():
    assert PrefixOptions().replay == "exact"
    exact = CutRunner(PrefixOptions(policy=zero()))
    assert exact.admit().resume.exact
    runner = CutRunner()
    resume = Resume(start=FIRST, reused_tokens=REUSED, end=PROMPT, source="cut_replay", exact=False)
    assert runner.manager.prefix.look_up(runner.manager.prefix.prompt(runner.prompt)) == resume
    request = runner.admit()
    assert (request.resume, request.approximate_from) == (resume, REUSED)
    assert runner.manager._parts.prefix
    assert runner.manager._parts.prefix._counters.hits["cut_replay"] == 1
    # a snapshot that is no further back is exact, and so is a hit within a window
    near = runner.manager.admit_request([*runner.cached[:70], *tokens(2, 20)])
    assert (near.resume.source, near.resume.start, near.resume.exact) == ("snapshot", 64, True)
    short = runner.manager.admit_request([*runner.cached[:20], *tokens(2, 20)])
    assert (short.resume.source, short.resume.start, short.resume.exact) == ("nothing", 0, True)


def test_nothing_in_front_of_it_is_read_and_what_follows_is_an_approximation():
    runner = CutRunner()
    states, expected = runner.compute(runner.prompt)  # a cut replay too
    again = runner.admit()
    runner.manager.memory.slot_arena.bytes[again.slot].fill_(0xFF)  # NaN in every code
    found = runner.run(runner.manager, again, runner.prompt, 256)
    assert torch.isfinite(found).all()
    # the chunks of both differ, and their results do not
    assert torch.equal(found, states)
    assert not different(runner.readable(runner.manager, again), expected)
    cold = runner.cold(runner.prompt)
    wrong = different(expected, cold)
    assert any(name.endswith("swa_fp8") for name in wrong)
    assert any("entries" in name for name in wrong)


def test_nothing_behind_it_is_found_again():
    # every boundary is to have a snapshot, and the last one, at 96, is kept
    runner = CutRunner(PrefixOptions(policy=full(), snapshots=1, replay="cut"))
    before = runner.indexed()
    request = runner.admit()
    (fork,) = runner.manager.fork(request, 1)
    assert (fork.approximate_from, fork.resume.exact) == (REUSED, False)
    for each, ids in ((request, runner.prompt), (fork, [*runner.prompt[:REUSED], *tokens(2, 52)])):
        runner.run(runner.manager, each, ids[:REUSED], 50)
        runner.run(runner.manager, each, ids, 50)
    # generated tokens: with ids, without and told later
    runner.model.step(runner.manager, [(request, [7]), (fork, [8])])
    plan = runner.manager.prepare_forward([(request, 40)])
    plan.mark_appended()
    runner.manager.commit(plan)
    runner.manager.supply_ids(request, tokens(3, 40))
    assert runner.indexed() == before
    for each in (request, fork):
        runner.manager.release_request(each)
    assert runner.indexed() == before
    assert (
        runner.manager.prefix.look_up(runner.manager.prefix.prompt(runner.prompt)).reused_tokens
        == REUSED
    )
    runner.manager.check_invariants()
    # the same prompt without reuse is exact, and is found then
    request = runner.manager.admit_request(runner.prompt, reuse=False)
    runner.run(runner.manager, request, runner.prompt, 90)
    assert runner.check_published(runner.cached, runner.prompt) == 9


def test_rewinds_say_whether_what_is_left_is_exact():
    runner = CutRunner()
    request = runner.admit()
    runner.run(runner.manager, request, runner.prompt, 256)
    near = runner.manager.rewind(request, PROMPT - 1)
    assert (near.source, near.exact) == ("rings", False)
    far = runner.manager.rewind(request, 75)  # its own blocks behind 48 are no cold run's
    assert (far.start, far.reused_tokens, far.exact) == (FIRST, REUSED, False)
    runner.run(runner.manager, request, runner.prompt[:75], 256)
    back = runner.manager.rewind(request, 10)
    assert (back.start, back.exact, request.approximate_from) == (0, True, None)
    before = runner.indexed()
    other = [*runner.prompt[:10], *tokens(5, 30)]
    runner.run(runner.manager, request, other, 33)
    assert runner.indexed() != before
    assert not different(runner.readable(runner.manager, request), runner.cold(other))
    runner.check_published(runner.cached, other)
    runner.manager.room.reset_slot(request)
    assert request.resume.exact


def test_it_runs_alone_in_one_step_and_is_kept_whole():
    runner = CutRunner()
    manager = runner.manager
    request, other = runner.admit(), manager.admit_request(4)
    (fork,) = manager.fork(request, 1)
    with pytest.raises(PlanError, match="share no step with others"):
        manager.prepare_forward([(request, 60), (other, 4)])
    with pytest.raises(PlanError, match="a plan for them alone"):
        manager.prepare_forward([(request, 60)], chunks_apart=True)
    with pytest.raises(PlanError, match="give it the 16 tokens up to position 48"):
        manager.prepare_forward([(request, 15)])
    plan = manager.prepare_forward([(request, 16), (fork, 60)])  # replays share a step
    assert plan.batch.window_cut
    handle = manager.acquire(0, plan.batch)
    kv, weights = torch.zeros((76, 128), dtype=torch.bfloat16), runner.model.layers[0]["weights"]
    handle.append(kv, weights=weights)
    with pytest.raises(PlanError, match="not gathered"):
        handle.gather_swa_kv()
    with pytest.raises(PlanError, match="kept whole"):
        manager.commit(plan, [15, 60])
    manager.fail(plan)
    for each in (request, fork):
        manager.rewind(each, each.length)
    manager.release_request(fork)
    request = runner.admit()
    runner.model.step(manager, [(request, runner.prompt[FIRST:REUSED])])
    assert not manager.prepare_forward([(request, 1), (other, 4)]).batch.window_cut


def test_it_is_not_suspended_continued_or_kept_by_tiers():
    tier = HostTier(1 << 30)
    options = PrefixOptions(policy=zero(), replay="cut", model_id="small")
    runner = CutRunner(options, tiers=[tier])
    assert runner.manager.tiers.drain(TIMEOUT_S)
    kept = tier.stats()
    for length in (REUSED, PROMPT):
        request = runner.admit()
        runner.run(runner.manager, request, runner.prompt[:length], 256)
        with pytest.raises(RequestError, match=r"cut replay.*not suspended"):
            runner.manager.tiers.suspend(request)
        with pytest.raises(RequestError, match=r"cut replay.*not continued"):
            runner.manager.continue_request(request, [*runner.prompt, 1])
        runner.manager.room.release_later(request, suspend=True)
        assert request not in runner.manager.requests
        runner.manager.prefix.evict(0)
        assert request.released
    assert runner.manager.tiers.drain(TIMEOUT_S)
    assert tier.stats().held_records == kept.held_records == CACHED // BLOCK
    again = runner.manager.tiers.resume(runner.prompt, timeout_s=TIMEOUT_S)
    assert (again.resume.source, again.resume.exact) == ("cut_replay", False)


def test_it_is_not_handed_over():
    prefix = PrefixOptions(policy=zero(), replay="cut", model_id=MODEL)
    stack = side("cut", model=ModelSpec.preset("v41-tiny"), prefix=prefix)
    try:
        request = stack.manager.admit_request(range(300))
        plan = stack.manager.prepare_forward([(request, 300)])
        plan.mark_appended()
        stack.manager.commit(plan, ids=range(300))
        assert stack.manager.handoff.offer(request)
        again = stack.manager.admit_request(range(300))
        assert again.resume.start == 128
        plan = stack.manager.prepare_forward([(again, 172)])
        plan.mark_appended()
        stack.manager.commit(plan, ids=range(128, 300))
        with pytest.raises(RequestError, match=r"cut replay.*not offered"):
            stack.manager.handoff.offer(again)
    finally:
        close(stack)


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(InvalidInput, match="use 'exact' or 'cut'"):
        PrefixOptions(replay="serving")  # type: ignore[arg-type]
    cut = PrefixOptions(replay="cut")
    for model, drafts, match in (
        (ModelSpec.preset("tiny"), 0, "tiny is not V4.1"),
        (SMALL, 15, "max_draft_tokens=15"),
    ):
        runner = Runner(model, BLOCK if model is SMALL else 128, drafts)
        with pytest.raises(InvalidInput, match=match):
            runner.new_manager(cut)
    runner = Runner(SMALL, BLOCK)
    with pytest.raises(InvalidInput, match="max_step_tokens"):
        KVCacheManager(runner.schema, num_blocks=4, max_requests=1, max_step_tokens=15, prefix=cut)


class RandomLife(CutRunner):
    """Calls in any order, of requests that share beginnings; whatever can be found is compared."""

    def __init__(self, seed: int) -> None:
        options = PrefixOptions(policy=periodic(64), snapshots=2, replay="cut", model_id="small")
        super().__init__(options, tiers=[HostTier(1 << 26)])
        self.rng = random.Random(seed)
        self.lives: dict[Request, list[int]] = {}
        self.cold_blocks: dict[bytes, torch.Tensor] = {}
        self.seen = {"cut": 0, "exact": 0}

    def step(self) -> None:
        rng, manager = self.rng, self.manager
        request = rng.choice(list(self.lives)) if self.lives else None
        act = rng.choice(
            ("admit", "admit", "run", "run", "run", "fork", "rewind", "leave", "evict")
        )
        if act == "admit" and len(self.lives) < 4:
            shared = rng.randrange(1, CACHED)
            ids = [*self.cached[:shared], *tokens(rng.randrange(3), rng.randrange(1, 60))]
            one = manager.tiers.admit(ids, timeout_s=TIMEOUT_S)
            self.lives[one] = ids
            self.seen["exact" if one.resume.exact else "cut"] += 1
            assert one.resume.exact == (one.approximate_from is None)
        elif request is None:
            return
        elif act == "run":
            self.extend(request)
        elif act == "fork" and len(self.lives) < 4:
            (fork,) = manager.fork(request, 1)
            self.lives[fork] = list(self.lives[request])
        elif act == "rewind" and request.length:
            resume = manager.rewind(request, rng.randrange(request.length + 1))
            assert resume.exact == (request.approximate_from is None)
            kept = rng.randrange(resume.end + 1, PROMPT + 40)
            self.lives[request] = [*self.lives[request][: resume.end], *tokens(9, kept)][:kept]
        elif act == "leave":
            manager.room.release_later(request, suspend=rng.random() < 0.5)
            del self.lives[request]
        elif act == "evict":
            manager.prefix.evict(rng.randrange(4))

    def extend(self, request: Request) -> None:
        """Some more of its tokens, those of a cut replay at least; then it may generate."""
        ids, start = self.lives[request], request.length
        if len(ids) <= start:
            ids.append(self.rng.randrange(512))
        count = self.rng.choice((1, 1, 7, 20, 60))
        if request.approximate_from is not None:
            count = max(count, request.reused_tokens - start)
        self.model.step(self.manager, [(request, ids[start : start + count])])

    def check(self) -> None:
        """Every block that can be found, and every live request that is exact, is a cold run's."""
        prefix = self.manager._parts.prefix
        assert prefix
        for request, ids in self.lives.items():
            self.learn(ids[: request.length])
            exact = request.approximate_from is None and request.length >= request.rings_exact_from
            if exact and request.length:
                found = self.readable(self.manager, request)
                cold = self.cold(ids[: request.length])
                drafts = tuple(f"{spec.layer}." for spec in SMALL.layers if spec.draft)
                assert not [n for n in different(found, cold) if not n.startswith(drafts)]
        for node in prefix.index.nodes():
            found = self.manager.memory.block_arena.bytes[node.block_id]
            assert torch.equal(found, self.cold_blocks[node.digest])
        self.manager.check_invariants()

    def learn(self, ids: list[int]) -> None:
        """What a cold run has in the blocks of these tokens."""
        prefix = self.manager._parts.prefix
        assert prefix
        trail = prefix.prompt(torch.tensor(ids).int().numpy(), None).trail
        assert trail is not None
        if all(digest in self.cold_blocks for digest in trail.chain):
            return
        manager = self.new_manager(None)
        request = manager.admit_request(len(ids))
        self.run(manager, request, ids, 100)
        for digest, block_id in zip(trail.chain, request.block_ids, strict=False):
            self.cold_blocks[digest] = manager.memory.block_arena.bytes[block_id].clone()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_random_lives_publish_nothing_inexact(seed: int):
    life = RandomLife(seed)
    life.learn(life.cached)
    for nth in range(240):
        life.step()
        for request, ids in life.lives.items():
            life.learn(ids[: request.length])
        if nth % 6 == 0:
            life.check()
    assert min(life.seen.values()) >= 5
