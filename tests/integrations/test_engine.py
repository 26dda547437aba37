"""Continuous batching over an accelerated model: every job gets what it gets alone, whenever it
comes and whoever else runs."""

from __future__ import annotations

import copy
import gc
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks, RequestError
from dsv4.integrations.transformers import Engine, Job, accelerate, restore
from dsv4.integrations.transformers import engine as engine_module
from dsv4.integrations.transformers.engine import greedy
from tests.integrations.fast_v4 import counted, fast, manager_of, plain_model
from tests.integrations.tiny_v4 import VOCABULARY, prompt

NEW_TOKENS = 6
TIMEOUT_S = 120


def text(tokens: int, seed: int) -> list[int]:
    ids: list[int] = prompt(tokens, seed=seed)[0].tolist()
    return ids


@cache
def expected(ids: tuple[int, ...], new_tokens: int = NEW_TOKENS) -> list[int]:
    out = plain_model().generate(
        torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False, use_cache=False
    )
    found: list[int] = out[0, len(ids) :].tolist()
    return found


def check(job: Job) -> None:
    assert job.error is None
    assert job.generated == expected(tuple(job.tokens[: job.prompt_tokens]), job.new_tokens)


@pytest.mark.parametrize("step_tokens", [pytest.param(7, marks=pytest.mark.nightly), 40])
def test_many_jobs_that_come_and_go(step_tokens: int) -> None:
    """More jobs than rows, prompts in chunks beside others that generate, with a common beginning
    and of all lengths; two are cancelled, one of them in the middle of its prompt."""
    shared = text(130, 1)
    prompts = [shared, text(3, 2), [*shared, *text(9, 3)], text(1, 4), [*shared, *text(40, 5)]]
    with fast(plain_model(), max_batch=3, max_step_tokens=64) as model, counted(model) as runs:
        engine = Engine(model=model, step_tokens=step_tokens)
        jobs = [engine.submit(ids, NEW_TOKENS) for ids in prompts[:3]]
        unwanted = engine.submit(text(100, 7), NEW_TOKENS)
        for _ in range(4):
            assert engine.step()
        jobs += [engine.submit(ids, NEW_TOKENS) for ids in prompts[3:]]
        late = engine.submit(text(90, 8), 300)
        while not unwanted.request:
            engine.step()
        engine.cancel(unwanted)
        assert unwanted.is_over
        assert not unwanted.generated
        while len(late.generated) < 2:
            engine.step()
        engine.cancel(late)
        engine.run()
        assert max(runs) <= step_tokens
        assert engine.jobs == []
        for job in jobs:
            check(job)
        assert late.generated == expected(tuple(text(90, 8)), len(late.generated))
        assert jobs[4].tokens_skipped >= 128
        manager_of(model).check_invariants()


def test_streams_of_several_threads_and_a_turn() -> None:
    """Nobody steps in the background; a stream that is left cancels its job; the next turn of a
    conversation runs what is new."""
    prompts = [text(20 + 9 * seed, seed) for seed in range(4)]
    with fast(plain_model(), max_batch=2) as model, counted(model) as runs:
        engine = Engine(model=model)
        jobs = [engine.submit(ids, NEW_TOKENS) for ids in prompts]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda job: list(engine.stream(job)), jobs, timeout=TIMEOUT_S))
        assert found == [expected(tuple(ids)) for ids in prompts]
        job = engine.submit(prompts[0], NEW_TOKENS)
        for _ in engine.stream(job):
            break
        assert job.cancelled
        assert not engine.step()
        last = jobs[-1]
        del runs[:]
        turn = engine.submit([*last.tokens, 5, 6], NEW_TOKENS)
        engine.run()
        check(turn)
        assert runs[0] == 3


def test_jobs_stop_at_stop_tokens() -> None:
    ids = text(20, 1)
    whole = expected(tuple(ids))
    with fast(plain_model()) as model:
        engine = Engine(model=model)
        for stops in ([whole[2]], {whole[2]}, torch.tensor([whole[2]])):
            job = engine.submit(ids, NEW_TOKENS, stop_tokens=stops)
            engine.run()
            assert job.is_stopped
            assert job.generated == whole[: whole.index(whole[2]) + 1]
        model.generation_config.eos_token_id = [whole[0]]
        job = engine.submit(ids, NEW_TOKENS)
        engine.run()
        assert job.generated == whole[:1]


def test_salts_share_nothing() -> None:
    ids = text(140, 1)
    with fast(plain_model()) as model:
        engine = Engine(model=model)
        skipped = []
        for salt in ("a", "b", None, "b"):
            job = engine.submit([*ids, len(skipped)], NEW_TOKENS, salt)
            engine.run()
            check(job)
            skipped.append(job.tokens_skipped)
        assert skipped == [0, 0, 0, 128]


def test_who_chooses_sees_its_jobs() -> None:
    seen: list[int] = []

    def choose(logits: Tensor, jobs: Any) -> Tensor:
        seen.append(len(jobs))
        assert logits.shape == (len(jobs), VOCABULARY)
        assert logits.dtype == torch.float32
        return torch.tensor([job.prompt_tokens for job in jobs])

    with fast(plain_model()) as model:
        engine = Engine(model=model, choose=choose)
        jobs = [engine.submit(text(n, n), 3) for n in (5, 8)]
        engine.run()
        assert [job.generated for job in jobs] == [[5] * 3, [8] * 3]
        assert seen == [2, 2, 2]


class Broken(Exception):
    pass


@pytest.mark.parametrize("layer", [pytest.param(0, marks=pytest.mark.nightly), 3])
def test_a_step_that_fails_costs_no_job(layer: int) -> None:
    """In a chunk, which loses the row, and while generating, which does not."""
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) in (2, 9):
            raise Broken

    with fast(plain_model(), max_batch=2, max_step_tokens=50) as model:
        engine = Engine(model=model)
        jobs = [engine.submit(text(140, seed), NEW_TOKENS) for seed in (1, 2)]
        hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
        failures = 0
        while engine.jobs:
            try:
                engine.step()
            except Broken:
                failures += 1
        hook.remove()
        assert failures == 2
        for job in jobs:
            check(job)


def test_generate_beside_an_engine() -> None:
    """Rows go to whoever asked first; nobody loses his own."""
    ids = prompt(30, seed=9)
    greedy: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    alone = plain_model().generate(ids, use_cache=False, **greedy).tolist()
    with fast(plain_model(), max_batch=1) as model, ThreadPoolExecutor(1) as pool:
        engine = Engine(model=model)
        jobs = [engine.submit(text(20, seed), NEW_TOKENS) for seed in (1, 2)]
        engine.step()
        other = pool.submit(model.generate, ids, **greedy)
        engine.run()
        assert other.result(TIMEOUT_S).tolist() == alone
        for job in jobs:
            check(job)
        jobs = [engine.submit(text(20, seed), NEW_TOKENS) for seed in (4, 5)]
        engine.step()  # the job has the only row, and nobody else steps: generate does
        assert model.generate(ids, **greedy).tolist() == alone
        engine.run()
        for job in jobs:
            check(job)
        job = engine.submit(text(20, 6), NEW_TOKENS)
        engine.step()
        engine.cancel(job)  # and nobody steps
        assert pool.submit(model.generate, ids, **greedy).result(TIMEOUT_S).tolist() == alone
        started = threading.Event()

        def hold(*_: Any) -> None:
            if engine.jobs and not started.is_set():
                started.set()
                with pytest.raises(RequestError, match="inside a call of generate"):
                    engine.step()

        job = engine.submit(text(20, 3), NEW_TOKENS)
        hook = model.register_forward_hook(hold)
        model.generate(ids, **greedy)
        hook.remove()
        assert started.is_set()
        engine.run()
        check(job)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not accelerated"):
        Engine(model=plain_model())
    with fast(plain_model(), max_context=64, prefix=None) as model:
        with pytest.raises(InvalidInput, match="max_step_tokens=4096"):
            Engine(model=model, step_tokens=5000)
        engine = Engine(model=model)
        for ids in ([], [VOCABULARY], [-1], [0.5], "hello"):
            with pytest.raises(InvalidInput):
                engine.submit(ids, 3)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="new_tokens"):
            engine.submit([1], 0)
        with pytest.raises(ContextOverflow):
            engine.submit([1] * 60, 5)
        for stops in (5, "ab", [0.5], torch.zeros(2, 2, dtype=torch.int64)):
            with pytest.raises(InvalidInput, match="token ids"):
                engine.submit([1], 3, stop_tokens=stops)  # type: ignore[arg-type]
        for call in (engine.cancel, lambda job: next(engine.stream(job))):
            with pytest.raises(InvalidInput, match="is not a job"):
                call("job")  # type: ignore[no-untyped-call]
        assert engine.jobs == []
        assert not engine.step()
        job = engine.submit(prompt(20)[0], NEW_TOKENS)
        assert list(engine.stream(job)) == expected(tuple(prompt(20)[0].tolist()))


WRONG_CHOICES = (
    lambda logits, jobs: logits.argmax(dim=-1, keepdim=True),
    lambda logits, jobs: logits.argmax(dim=-1)[1:],
    lambda logits, jobs: logits.amax(dim=-1),
    lambda logits, jobs: logits.argmax(dim=-1) + VOCABULARY,
    lambda logits, jobs: -1 - logits.argmax(dim=-1),
    lambda logits, jobs: logits.argmax(dim=-1).tolist(),
)


def test_what_is_no_choice_costs_no_job() -> None:
    with fast(plain_model(), max_context=64, prefix=None) as model:
        engine = Engine(model=model)
        job = engine.submit(text(20, 0), NEW_TOKENS)
        for wrong in WRONG_CHOICES:
            engine.choose = wrong
            with pytest.raises(InvalidInput, match="choose has returned"):
                engine.step()
            assert job.generated == []
        engine.choose = greedy
        engine.run()
        check(job)


def test_an_engine_of_a_restored_model_is_refused() -> None:
    """Its own attention would run, without what the rows hold."""
    model = copy.deepcopy(plain_model())
    for _ in range(2):
        accelerate(model, max_batch=1, max_context=64, records="bf16")
        engine = Engine(model=model)
        job = engine.submit(text(20, 0), NEW_TOKENS)
        engine.step()
        restore(model)
        with pytest.raises(InvalidInput, match="has been restored"):
            engine.run()
        assert len(job.generated) == 1
    accelerate(model, max_batch=1, max_context=64, records="bf16")
    with pytest.raises(InvalidInput, match="has been restored"):
        engine.run()


def test_engines_that_are_forgotten_leave_their_rows() -> None:
    ids = prompt(7, seed=2)
    with fast(plain_model(), max_batch=1) as model:
        engine = Engine(model=model)
        job = engine.submit(text(5, 1), 30)
        engine.step()
        del engine
        gc.collect()
        assert job.request is None
        assert manager_of(model).stats().requests_live == 0
        found = model.generate(ids, max_new_tokens=2, do_sample=False)
        assert found[0, 7:].tolist() == expected(tuple(ids[0].tolist()), 2)


def test_a_row_that_an_interrupt_lost_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came when the job had let its row go, and nobody had taken it."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with fast(plain_model(), max_batch=1) as model:
        engine = Engine(model=model)
        first = engine.submit(text(20, 1), NEW_TOKENS)
        with monkeypatch.context() as patch:
            patch.setattr(vars(model.model)["forward"].caches.pool, "keep", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.run()
        check(first)
        second = engine.submit(text(20, 2), NEW_TOKENS)
        for _ in range(NEW_TOKENS + 1):
            engine.step()
        check(second)


def test_two_engines_share_the_rows() -> None:
    """Who waits for rows of the other's jobs runs these; a job stays with the engine it has."""
    with fast(plain_model(), max_batch=1) as model:
        first, second = Engine(model=model), Engine(model=model)
        theirs = first.submit(text(20, 1), NEW_TOKENS)
        first.step()
        mine = second.submit(text(9, 2), NEW_TOKENS)
        for _ in range(2 * NEW_TOKENS + 1):
            second.step()
        check(mine)
        made: list[Engine] = []

        def make_another(logits: Tensor, jobs: Any) -> Tensor:
            made.append(Engine(model=model))
            return greedy(logits, jobs)

        first.choose = make_another
        job = first.submit(text(8, 4), NEW_TOKENS)
        first.step()
        model.generate(prompt(7), max_new_tokens=1)  # which runs the job for its row
        check(job)
        assert len(made) == NEW_TOKENS
        first.choose = greedy
        check(theirs)
        later = first.submit(text(8, 3), NEW_TOKENS)
        for call in (second.cancel, lambda job: next(second.stream(job))):
            with pytest.raises(InvalidInput, match="another engine's"):
                call(later)  # type: ignore[no-untyped-call]
        first.run()
        check(later)


def test_a_stream_that_fails_does_not_cancel() -> None:
    def fail(*_: Any) -> None:
        raise Broken

    with fast(plain_model(), max_context=64, prefix=None) as model:
        engine = Engine(model=model)
        job = engine.submit(text(20, 0), NEW_TOKENS)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(Broken):
            list(engine.stream(job))
        hook.remove()
        assert list(engine.stream(job)) == job.generated
        check(job)


def test_an_error_of_a_job_comes_out_of_its_stream() -> None:
    """Four blocks, of which two are pinned: what needs three can never run."""
    with fast(plain_model(), max_batch=1, max_context=300) as model:
        manager, engine = manager_of(model), Engine(model=model)
        first = engine.submit(text(280, 1), 3)
        engine.run()
        pinned = manager.prefix.pin(first.tokens[:280])
        job, other = engine.submit(text(290, 2), 3), engine.submit(text(9, 3), NEW_TOKENS)
        with pytest.raises(OutOfBlocks):
            list(engine.stream(job))
        assert not job.cancelled
        engine.run()
        check(other)
        manager.prefix.unpin(pinned)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_job_that_choose_fails_for_ends_alone(failing: int) -> None:
    """Its stream raises what was raised for it; the others go on, and choose sees them alone."""

    def choose(logits: Tensor, jobs: Any) -> Tensor:
        if any(job in broken and len(job.generated) == 2 for job in jobs):
            raise Broken
        return greedy(logits, jobs)

    with fast(plain_model(), max_batch=3) as model:
        engine = Engine(model=model, choose=choose)
        jobs = [engine.submit(text(10 * seed, seed), NEW_TOKENS) for seed in (1, 2, 3)]
        broken = jobs[:failing]
        engine.run()
        for job in broken:
            assert isinstance(job.error, Broken)
            assert job.generated == expected(tuple(job.tokens[: job.prompt_tokens]))[:2]
            with pytest.raises(Broken):
                list(engine.stream(job))
        for job in jobs[failing:]:
            check(job)
        manager_of(model).check_invariants()


def test_an_interrupt_inside_choose_is_no_jobs_error() -> None:
    def choose(logits: Tensor, jobs: Any) -> Tensor:
        raise KeyboardInterrupt

    with fast(plain_model(), max_batch=2) as model:
        engine = Engine(model=model, choose=choose)
        jobs = [engine.submit(text(10 * seed, seed), NEW_TOKENS) for seed in (1, 2)]
        with pytest.raises(KeyboardInterrupt):
            engine.run()
        engine.choose = greedy
        engine.run()
        for job in jobs:
            check(job)


def pinned_but(engine: Engine, blocks: int) -> None:
    """All but so many blocks of the manager are pinned."""
    manager, seed = engine._manager, 100
    while (lacking := manager.stats().blocks_total - manager.stats().blocks_pinned - blocks) > 0:
        ids, seed = text(128 * min(lacking, 3), seed), seed + 1
        engine.submit([*ids, 1], 1)
        engine.run()
        manager.prefix.pin(ids)


def test_the_youngest_job_makes_room_when_blocks_run_out() -> None:
    """Two that generate need three blocks each, and four are left: each alone fits."""
    with fast(plain_model(), max_batch=2, max_context=400) as model:
        engine = Engine(model=model)
        pinned_but(engine, 4)
        held = model(prompt(100)).past_key_values  # nobody is using it: it goes before a job does
        jobs = [engine.submit(text(250, seed), 12) for seed in (1, 2)]
        for _ in range(60):
            if not engine.step():
                break
        assert [job.preemptions for job in jobs] == [0, 1]
        for job in jobs:
            check(job)
        with pytest.raises(RequestError, match="closed"):
            model(prompt(1), past_key_values=held)


def test_a_job_that_is_alone_and_has_not_enough_blocks_ends() -> None:
    with fast(plain_model(), max_batch=2, max_context=400) as model:
        engine = Engine(model=model)
        pinned_but(engine, 2)
        jobs = [engine.submit(text(n, n), 12) for n in (250, 20)]
        for _ in range(60):
            if not engine.step():
                break
        assert isinstance(jobs[0].error, OutOfBlocks)
        assert len(jobs[0].generated) == 7  # 256 tokens are two blocks
        check(jobs[1])


@pytest.mark.parametrize("is_run", [False, True])
def test_streams_of_several_threads_arrive_fairly(is_run: bool) -> None:
    """One steps and the others wait for it, also beside a thread that runs them all: each has its
    token while the next step runs, whoever runs that, and needs no turn to take it."""
    taken, late = {}, []

    def choose(logits: Tensor, of: Any) -> Tensor:
        until = time.monotonic() + 60
        while any(taken[job] < len(job.generated) for job in readers):
            if late or time.monotonic() > until:
                late.append([len(job.generated) - taken[job] for job in readers])
                break
            time.sleep(0.001)
        return greedy(logits, of)

    def read(job: Job) -> None:
        for _ in engine.stream(job):
            taken[job] += 1

    with fast(plain_model(), max_batch=7) as model:
        engine = Engine(model=model, choose=choose)
        jobs = [engine.submit(text(5, seed), 25, stop_tokens=[]) for seed in range(7)]
        readers = jobs[:6]
        taken.update(dict.fromkeys(readers, 0))
        with ThreadPoolExecutor(7) as pool:
            calls = [pool.submit(read, job) for job in readers]
            if is_run:
                calls.append(pool.submit(engine.run))
            for call in calls:
                call.result(TIMEOUT_S)
        engine.run()
        assert not late, late
        for job in jobs:
            check(job)


def test_streams_go_on_after_a_leader_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the line that says that it leads and the step."""
    monkeypatch.setattr(engine_module, "LEAD_S", 0.05)
    with fast(plain_model()) as model:
        for is_stream in (True, False):
            engine = Engine(model=model)
            job = engine.submit(text(9, 1), NEW_TOKENS)
            engine._leading.acquire()
            if is_stream:
                list(engine.stream(job))
            engine.run()
            check(job)
            assert not engine._leading.locked()


def test_two_threads_ring_at_once() -> None:
    """The other has taken the last bell between this one's look and its hand."""

    class Emptied(deque[Any]):
        def __bool__(self) -> bool:
            return True

    with fast(plain_model()) as model:
        engine = Engine(model=model)
        engine._bells = Emptied()
        job = engine.submit(text(9, 1), NEW_TOKENS)
        list(engine.stream(job))
        check(job)
