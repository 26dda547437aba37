"""dsv4/engine.py: what a job is given, whatever else runs. tests/scenarios/test_engine_soak.py
compares every logit under random work and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4
from dsv4.engine import Engine, Job, greedy
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks
from dsv4.testing import VOCABULARY, EngineModel, RandomModel
from dsv4.tiers.host import HostTier
from tests.support.numbers import Numbers

NEW_TOKENS = 8


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def text(tokens: int, seed: int) -> list[int]:
    ids: list[int] = Numbers(seed).integers(0, VOCABULARY, tokens).tolist()
    return ids


def made(
    *,
    ahead: int = 0,
    drafts: int = 0,
    blocks: int = 16,
    tiers: Sequence[Any] = (),
    host_memory: str | None = None,
    **options: Any,
) -> Engine:
    schema = dsv4.CacheSchema.build(
        dsv4.ModelSpec.preset("tiny"),
        max_context=1024,
        max_draft_tokens=drafts,
        steps_ahead=ahead,
        entries_apart=host_memory is not None,
    )
    cache = dsv4.KVCacheManager(
        schema,
        num_blocks=blocks,
        max_requests=4,
        max_step_tokens=256,
        max_open_plans=1 + ahead,
        prefix=dsv4.PrefixOptions(snapshots=8, model_id="testing"),
        tiers=tiers,
        host_memory=host_memory,
    )
    return Engine(model=EngineModel(cache), manager=cache, **options)


def expected(ids: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[int]:
    """Token by token, with nobody else there."""
    schema = dsv4.CacheSchema.build(dsv4.ModelSpec.preset("tiny"), max_context=1024)
    cache = dsv4.KVCacheManager(schema, num_blocks=8, max_requests=1, max_step_tokens=512)
    model, request, tokens = RandomModel(schema), cache.admit_request(), list(ids)
    for _ in range(new_tokens):
        run = tokens[request.length :]
        with cache.step([(request, len(run))]) as plan:
            tokens.append(int(model.logits(run, cache, plan)[-1].argmax()))
    return tokens[len(ids) :]


def check(*jobs: Job) -> None:
    for job in jobs:
        assert job.error is None
        assert job.generated == expected(job.tokens[: job.prompt_tokens], job.new_tokens)


@pytest.mark.parametrize("step_tokens", [3, 40, None])
@pytest.mark.parametrize(("ahead", "drafts"), [(0, 0), (0, 3), (1, 0), (1, 3)])
def test_every_job_is_given_what_it_is_given_alone(
    ahead: int, drafts: int, step_tokens: int | None
) -> None:
    shared = text(140, 1)
    engine = made(ahead=ahead, drafts=drafts, step_tokens=step_tokens)
    jobs = [engine.submit(ids, NEW_TOKENS) for ids in (text(30, 2), shared, text(1, 3))]
    for _ in range(5):
        engine.step()
    jobs += [engine.submit([*shared, *text(n, n)], NEW_TOKENS) for n in (9, 4)]
    unwanted = engine.submit(text(100, 5), 300)
    for _ in range(4):
        engine.step()
    engine.cancel(unwanted)
    engine.run()
    check(*jobs)
    assert engine.jobs == []
    assert engine.manager.requests == ()
    assert unwanted.generated == expected(text(100, 5), len(unwanted.generated))
    engine.manager.check_invariants()


@pytest.mark.parametrize(("ahead", "drafts"), [(0, 0), (1, 2)])
def test_entries_may_be_in_host_memory(ahead: int, drafts: int) -> None:
    """Every job is given what it is given with everything on the device."""
    shared = text(300, 1)
    prompts = [[*shared, *text(n, n)] for n in (200, 330, 90)] + [text(700, 4)]
    given = []
    for host_memory in (None, "16MB"):
        engine = made(ahead=ahead, drafts=drafts, blocks=32, host_memory=host_memory)
        jobs = [engine.submit(ids, NEW_TOKENS) for ids in prompts]
        engine.run()
        given.append([job.generated for job in jobs])
        engine.manager.check_invariants()
    assert given[0] == given[1]
    stats = engine.manager.stats().residency
    assert stats is not None
    assert stats.blocks_left > 3


def test_a_decode_waits_for_no_more_than_a_step_s_tokens() -> None:
    """Each step has a token for it, and at most so many in all, while a long prompt runs; where a
    step has no room for all that decode, they take turns."""
    sizes: list[int] = []

    class Counting(EngineModel):
        def forward(self, plan: Any, ids: Tensor, rows: Tensor) -> Tensor:
            sizes.append(len(ids))
            return super().forward(plan, ids, rows)

    engine = made()
    engine.model, engine.step_tokens = Counting(engine.manager), 20
    first = engine.submit(text(9, 1), 12)
    engine.step()
    long = engine.submit(text(200, 2), 2)
    for generated in range(2, 11):
        engine.step()
        assert len(first.generated) == generated
        assert not long.generated
    engine.run()
    check(first, long)
    assert max(sizes) <= 20
    engine.step_tokens = 2
    jobs = [engine.submit(text(1, seed), 12) for seed in range(4)]
    for _ in range(14):
        engine.step()
        counts = [len(job.generated) for job in jobs]
    assert max(counts) - min(counts) <= 3
    engine.run()
    check(*jobs)


@pytest.mark.parametrize("ahead", [0, 1])
def test_jobs_stop_at_stop_tokens(ahead: int) -> None:
    ids = text(20, 1)
    whole = expected(ids, 20)
    engine = made(ahead=ahead, drafts=3)
    other = engine.submit(text(40, 2), 25)
    for stops in ([whole[4]], {whole[4]}, torch.tensor([whole[4]])):
        job = engine.submit(ids, 20, stop_tokens=stops)
        while not job.is_over:
            engine.step()
        assert job.is_stopped
        assert job.generated == whole[: whole.index(whole[4]) + 1]
    engine.run()
    check(other)


def test_salts_share_nothing() -> None:
    engine, ids, skipped = made(), text(140, 1), []
    for salt in ("a", "b", None, "b"):
        job = engine.submit([*ids, len(skipped)], NEW_TOKENS, salt)
        engine.run()
        check(job)
        skipped.append(job.tokens_skipped)
    assert skipped == [0, 0, 0, 128]


@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_are_reported_as_they_come(ahead: int) -> None:
    heard: dict[Job, list[list[int]]] = {}

    def hear(job: Job, new: list[int]) -> None:
        heard.setdefault(job, []).append(new)
        assert job.generated == [token for each in heard[job] for token in each]
        assert bool(new) or (job.is_over and job.request is None)
        if job.data == "bad" and len(job.generated) > 2:
            raise KeyError("a caller's own")

    engine = made(ahead=ahead, drafts=3)
    good = engine.submit(text(30, 1), NEW_TOKENS, on_tokens=hear)
    bad = engine.submit(text(20, 2), NEW_TOKENS, on_tokens=hear, data="bad")
    gone = engine.submit(text(10, 3), NEW_TOKENS, on_tokens=hear)
    engine.cancel(gone)
    engine.run()
    check(good)
    assert isinstance(bad.error, KeyError)
    assert bad.generated == expected(text(20, 2))[: len(bad.generated)]
    for job in (good, bad, gone):
        assert [bool(new) for new in heard[job]] == [True] * (len(heard[job]) - 1) + [False]
    assert heard[gone] == [[]]


@pytest.mark.parametrize("error", [RuntimeError("the device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("ahead", [0, 1])
def test_each_token_is_reported_once_though_commits_fail(
    ahead: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step ends with its commit, after jobs have taken its tokens; so its report is late."""
    heard: dict[Job, list[int]] = {}
    commits, commit = [0], dsv4.KVCacheManager.commit

    def fails(*given: Any, **options: Any) -> None:
        commits[0] += 1
        if commits[0] % 3 == 0:
            raise error
        commit(*given, **options)

    def hear(job: Job, new: list[int]) -> None:
        heard.setdefault(job, []).extend(new)
        assert job.generated == heard[job]

    def choose(logits: Tensor, jobs: Sequence[Job]) -> Tensor:
        """As one who samples by what was reported: seeds, penalties, a grammar."""
        assert ahead or all(job.generated == heard.get(job, []) for job in jobs)
        return greedy(logits, jobs)

    monkeypatch.setattr(dsv4.KVCacheManager, "commit", fails)
    engine = made(ahead=ahead, choose=choose)
    jobs = [engine.submit(text(n, n), NEW_TOKENS, on_tokens=hear) for n in (9, 150, 30)]
    left = True
    while left:
        try:
            left = engine.step()
        except KeyboardInterrupt:
            continue
    monkeypatch.undo()
    check(*jobs)
    assert [heard[job] for job in jobs] == [job.generated for job in jobs]


def test_others_may_submit_and_cancel_while_one_thread_steps() -> None:
    engine, done = made(ahead=1, drafts=3), threading.Event()
    jobs: list[Job] = []

    def come_and_go() -> None:
        for seed in range(12):
            jobs.append(engine.submit(text(5 + seed, seed), NEW_TOKENS))
            if seed % 4 == 3:
                engine.cancel(jobs[-1])
        done.set()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    while engine.step() or not done.is_set():
        pass
    thread.join()
    engine.run()
    check(*(job for job in jobs if not job.cancelled))


def test_order_says_who_is_admitted() -> None:
    admitted: list[Any] = []

    def by_priority(waiting: Sequence[Job]) -> Job | None:
        return min(waiting, key=lambda job: job.data, default=None)

    def hear(job: Job, new: list[int]) -> None:
        if job.data not in admitted:
            admitted.append(job.data)

    engine = made(blocks=2, order=by_priority)
    for data in (3, 1, 2):
        engine.submit(text(150, data), NEW_TOKENS, data=data, on_tokens=hear)
    engine.run()
    assert admitted == [1, 2, 3]
    engine.order = lambda waiting: None
    job = engine.submit(text(3, 1), 1)
    assert engine.step()
    assert job.request is None


@pytest.mark.parametrize("failing", [1, 3])
@pytest.mark.parametrize(("ahead", "drafts"), [(0, 0), (0, 3), (1, 3)])
def test_a_job_that_choose_fails_for_ends_alone(ahead: int, drafts: int, failing: int) -> None:
    def choose(logits: Tensor, jobs: Sequence[Job]) -> Tensor:
        assert len(jobs) == len(logits)
        if any(job in broken and len(job.generated) >= 2 for job in jobs):
            raise KeyError("a caller's own")
        return greedy(logits, jobs)

    engine = made(ahead=ahead, drafts=drafts, choose=choose)
    jobs = [engine.submit(text(10 * seed, seed), NEW_TOKENS) for seed in (1, 2, 3)]
    broken = jobs[:failing]
    engine.run()
    for job in broken:
        assert isinstance(job.error, KeyError)
        assert job.generated == expected(job.tokens[: job.prompt_tokens])[: len(job.generated)]
    check(*jobs[failing:])
    engine.manager.check_invariants()


WRONG_CHOICES: tuple[Callable[[Tensor, Any], Any], ...] = (
    lambda logits, jobs: logits.argmax(dim=-1, keepdim=True),
    lambda logits, jobs: logits.argmax(dim=-1)[1:],
    lambda logits, jobs: logits.amax(dim=-1),
    lambda logits, jobs: logits.argmax(dim=-1) + VOCABULARY,
    lambda logits, jobs: -1 - logits.argmax(dim=-1),
    lambda logits, jobs: logits.argmax(dim=-1).tolist(),
)


@pytest.mark.parametrize("ahead", [0, 1])
def test_what_is_no_choice_costs_no_job(ahead: int) -> None:
    engine = made(ahead=ahead)
    job = engine.submit(text(20, 0), NEW_TOKENS)
    for wrong in WRONG_CHOICES:
        engine.choose = wrong
        with pytest.raises(InvalidInput, match="choose has returned"):
            engine.run()
        assert job.generated == []
    engine.choose = greedy
    engine.run()
    check(job)


def test_what_is_refused() -> None:
    engine = made(drafts=1)
    for ids in ([], [VOCABULARY], [-1], [0.5], "hello"):
        with pytest.raises(InvalidInput):
            engine.submit(ids, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="new_tokens"):
        engine.submit([1], 0)
    with pytest.raises(InvalidInput, match="salt"):
        engine.submit([1], 1, 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="token ids"):
        engine.submit([1], 1, stop_tokens="ab")
    with pytest.raises(ContextOverflow):
        engine.submit([1] * 1020, 5)
    assert engine.jobs == []
    assert not engine.step()
    with pytest.raises(InvalidInput, match="max_step_tokens=256"):
        Engine(model=engine.model, manager=engine.manager, step_tokens=257)
    with pytest.raises(InvalidInput, match="max_draft_tokens=1"):
        Engine(model=engine.model, manager=engine.manager, drafts=2)


def test_a_job_that_can_never_fit_ends_and_the_others_go_on() -> None:
    engine = made(blocks=2)
    jobs = [engine.submit(text(n, n), NEW_TOKENS) for n in (20, 300, 30)]
    engine.run()
    assert isinstance(jobs[1].error, OutOfBlocks)
    assert jobs[1].generated == []
    check(jobs[0], jobs[2])


@pytest.mark.parametrize("ahead", [0, 1])
def test_with_tiers_a_preempted_job_goes_on_where_it_was(ahead: int) -> None:
    """Its state went down with it: no token runs twice."""
    ran: dict[int, int] = {}

    def listen(job: Job, position: int, logits: Tensor) -> None:
        if job in jobs:
            ran[position, jobs.index(job)] = ran.get((position, jobs.index(job)), 0) + 1

    tier = HostTier(1 << 28)
    engine = made(ahead=ahead, blocks=5, tiers=[tier], listener=listen)
    jobs = [engine.submit(text(250, seed), 12) for seed in (1, 2)]
    for _ in range(2000):
        if not engine.step():
            break
    assert [job.preemptions for job in jobs] == [0, 1]
    check(*jobs)
    assert set(ran.values()) == {1}
    turn = engine.submit([*jobs[1].tokens, 5, 6], NEW_TOKENS)  # the next turn of a conversation
    engine.run()
    check(turn)
    assert turn.tokens_skipped >= len(jobs[1].tokens) - 1
    tier.close(5.0)


# ---- quotas --------------------------------------------------------------------------------------


def limited(blocks: int, **options: Any) -> Engine:
    engine = made(**options)
    quota = dsv4.Quota(device_bytes=blocks * engine.manager.schema.bytes.block)
    dsv4.Quotas(engine.manager).set("a", quota)
    return engine


def test_a_salt_over_its_quota_takes_no_memory_of_others() -> None:
    """Its job grows above the quota while others run: it ends, and they are left alone."""
    engine = limited(2)
    others = [engine.submit(text(100, seed), NEW_TOKENS, salt="b") for seed in (1, 2)]
    grows = engine.submit(text(250, 3), 20, salt="a")
    last = engine.submit(text(90, 4), NEW_TOKENS, salt="c")
    engine.run()
    assert isinstance(grows.error, dsv4.OverQuota)
    assert grows.error.salt == "a"
    for job in (*others, last):
        assert (job.error, job.preemptions) == (None, 0)
        assert job.tokens[job.prompt_tokens :] == expected(job.tokens[: job.prompt_tokens])


def test_a_job_that_waits_for_its_quota_holds_up_no_other_salt() -> None:
    engine = limited(3)
    first = engine.submit(text(300, 1), NEW_TOKENS, salt="a")
    second = engine.submit(text(300, 2), NEW_TOKENS, salt="a")
    other = engine.submit(text(300, 3), NEW_TOKENS, salt="b")
    engine.step()
    assert (first.request is not None, second.request is None) == (True, True)
    assert other.request is not None
    engine.run()
    for job in (first, second, other):
        assert job.error is None
        assert job.tokens[300:] == expected(job.tokens[:300])


def test_two_jobs_of_a_full_salt_give_way_to_each_other() -> None:
    engine = limited(4)
    jobs = [engine.submit(text(250, seed), 20, salt="a") for seed in (1, 2)]
    other = engine.submit(text(250, 3), 20, salt="b")
    engine.run()
    assert [job.error for job in (*jobs, other)] == [None] * 3
    assert sum(job.preemptions for job in jobs) > 0
    assert other.preemptions == 0
    assert all(job.tokens[250:] == expected(job.tokens[:250], 20) for job in (*jobs, other))
