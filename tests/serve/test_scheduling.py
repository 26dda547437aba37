"""Who is served when (dsv4/serve/scheduler.py): step by step, without HTTP; and over HTTP what a
client sees of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.schema import CacheSchema
from dsv4.engine import Job
from dsv4.model import ModelSpec
from dsv4.serve.generation import Generation, Terms
from dsv4.serve.models import Opened, Room, StandIn, TextStream
from dsv4.serve.runner import _choose
from dsv4.serve.sampling import Sampling
from dsv4.serve.scheduler import PASSES, Scheduler
from dsv4.testing import EngineModel
from dsv4.tiers.host import HostTier
from tests.serve.serving import WAIT_S, Running, greedy, greedy_text, running
from tests.support.numbers import Numbers

MODEL = StandIn()
TOKENIZER = MODEL.tokenizer


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(blocks: int, slots: int, tiers: Sequence[Any] = ()) -> Opened:
    """The stand-in with a pool of a few blocks, less than the longest request needs."""
    manager = KVCacheManager(
        CacheSchema.build(ModelSpec.preset("tiny"), max_context=1024),
        num_blocks=blocks,
        max_requests=slots,
        max_step_tokens=256,
        prefix=PrefixOptions(model_id="stand-in"),
        tiers=tiers,
    )
    model = EngineModel(manager, vocabulary=TOKENIZER.vocabulary)
    return Opened(model=model, manager=manager)


class Stepped:
    """A scheduler whose steps a test makes, and the order in which jobs were admitted."""

    def __init__(
        self, *, blocks: int = 40, slots: int = 2, tiers: Sequence[Any] = (), **options: Any
    ) -> None:
        opened = small(blocks, slots, tiers)
        self.engine = Scheduler(
            model=opened.model, manager=opened.manager, drafts=0, choose=_choose, **options
        )
        self.admitted: list[Job] = []

    def submit(
        self, tokens: int, new: int = 4, *, session: str = "", priority: int = 0, seed: int = 0
    ) -> Job:
        ids = Numbers(seed + 1000 * tokens).integers(0, 256, tokens).tolist()
        generation = Generation(
            sampling=Sampling(seed=0, temperature=0),
            stream=TextStream(TOKENIZER),
            emit=lambda piece: None,
            terms=Terms(session=session, priority=priority),
        )
        job = self.engine.submit(ids, new, data=generation, on_tokens=self.heard)
        self.engine.arrive(job)
        return job

    def heard(self, job: Job, new: list[int]) -> None:
        job.data.push(job, new)

    def step(self) -> bool:
        left = self.engine.step()
        for job, _ in self.engine.running:
            if job not in self.admitted:
                self.admitted.append(job)
        return left

    def run(self) -> None:
        while self.step():
            pass
        self.engine.manager.check_invariants()
        assert self.engine.manager.requests == ()


def check(*jobs: Job) -> None:
    for job in jobs:
        assert job.error is None
        assert job.generated == greedy(job.tokens[: job.prompt_tokens], job.new_tokens)


def test_a_session_of_many_requests_does_not_keep_others_waiting() -> None:
    """Twelve of one session, then two of others: these come next, not after the twelve."""
    stepped = Stepped(slots=2)
    many = [stepped.submit(20, session="many", seed=n) for n in range(12)]
    for _ in range(3):
        stepped.step()
    others = [stepped.submit(20, session=name, seed=99) for name in ("b", "c")]
    stepped.run()
    place = [stepped.admitted.index(job) for job in others]
    assert max(place) <= 5
    assert [job for job in stepped.admitted if job in many] == many
    check(*others, *many[:2])


def test_a_session_that_was_idle_has_saved_nothing_up() -> None:
    stepped = Stepped(slots=1)
    for n in range(4):
        stepped.submit(20, 4, session="a", seed=n)
    for _ in range(12):
        stepped.step()
    late = [stepped.submit(20, 4, session="late", seed=50 + n) for n in range(3)]
    more = [stepped.submit(20, 4, session="a", seed=70 + n) for n in range(3)]
    stepped.run()
    order = [job for job in stepped.admitted if job in (*late, *more)]
    assert order.index(more[0]) < order.index(late[2])


def test_higher_priorities_come_first_and_none_waits_for_ever() -> None:
    stepped = Stepped(slots=1)
    first = stepped.submit(9, 4, seed=1)
    stepped.step()
    low = stepped.submit(9, 2, priority=-1, seed=2)
    high = [stepped.submit(9, 2, seed=10 + n) for n in range(3 * PASSES)]
    highest = stepped.submit(9, 2, priority=5, seed=3)
    stepped.run()
    assert stepped.admitted[:2] == [first, highest]
    assert PASSES <= stepped.admitted.index(low) <= 2 * PASSES + 2
    assert stepped.admitted[-1] is high[-1]
    check(first, low, highest)


@pytest.mark.parametrize("has_tier", [False, True])
def test_a_higher_priority_takes_the_place_of_a_lower_one(has_tier: bool) -> None:
    """Which is suspended, continues later, and says what it says alone."""
    tier = HostTier(8 << 20)
    stepped = Stepped(slots=1, tiers=[tier] if has_tier else ())
    low = stepped.submit(150, 12, seed=1)
    for _ in range(5):
        stepped.step()
    assert low.generated
    high = stepped.submit(30, 3, priority=1, seed=2)
    stepped.step()
    stepped.step()
    assert low.request is None
    assert low.preemptions == 1
    assert high.request is not None
    stepped.run()
    check(low, high)
    suspended = stepped.engine.manager.stats().transfers
    if suspended is not None:
        assert suspended.requests_resumed >= 1
    stepped.engine.manager.tiers and stepped.engine.manager.tiers.close(WAIT_S)
    tier.close(WAIT_S)


def test_memory_is_taken_from_the_lowest_priority_and_then_from_the_youngest() -> None:
    stepped = Stepped(blocks=8, slots=3)
    low = stepped.submit(250, 30, priority=-1, seed=1)
    old, young = (stepped.submit(250, 30, seed=n) for n in (2, 3))
    while not any(job.preemptions for job in (low, old, young)):
        stepped.step()
    assert (low.preemptions, old.preemptions, young.preemptions) == (1, 0, 0)
    stepped.run()
    assert (old.preemptions, young.preemptions) == (0, 0)
    check(low, old, young)


def test_of_one_priority_the_youngest_gives_its_memory_back() -> None:
    stepped = Stepped(blocks=5, slots=2)
    old, young = (stepped.submit(250, 10, seed=n) for n in (2, 3))
    stepped.run()
    assert (old.preemptions, young.preemptions) == (0, 1)
    check(old, young)


def test_a_decode_waits_for_one_step_at_most_beside_long_prompts() -> None:
    """Each step gives it a token, and has no more tokens than steps may have."""
    stepped = Stepped(slots=4, step_tokens=48)
    decode = stepped.submit(20, 25, seed=1)
    while not decode.generated:
        stepped.step()
    prompts = [stepped.submit(300 + n, 2, seed=n) for n in range(3)]
    ran: list[int] = []
    model: Any = stepped.engine.model
    forward = model.forward

    def noted(plan: Any, ids: Any, rows: Any) -> Any:
        ran.append(len(ids))
        return forward(plan, ids, rows)

    model.forward = noted
    while not decode.is_over:
        before = len(decode.generated)
        stepped.step()
        assert len(decode.generated) == before + 1
    assert max(ran) == 48
    assert sum(len(job.tokens) for job in prompts) > 48 * len(ran) / 2  # they run meanwhile
    stepped.run()
    check(decode, *prompts)


def test_chunks_of_prompts_take_turns_between_sessions() -> None:
    """A session that sends one long prompt after another leaves room for another's short one."""
    stepped = Stepped(slots=8, step_tokens=64)
    long = [stepped.submit(600, 1, session="greedy", seed=n) for n in range(4)]
    for _ in range(4):
        stepped.step()
    short = stepped.submit(60, 1, session="small", seed=9)
    for _ in range(3):
        stepped.step()
    assert short.is_over
    assert not any(job.is_over for job in long)
    stepped.run()
    check(short, long[0])


# ---- over HTTP -----------------------------------------------------------------------------------

ASK = {"model": "stand-in", "prompt": "x" * 200, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_memory_within_one_step(
    server: Running, stream: bool
) -> None:
    engine, runner = server.engine, server.state.runner
    cancelled: list[int] = []
    cancel = runner.cancel

    def noted(job: Job) -> None:
        cancelled.append(engine.steps)
        cancel(job)

    runner.cancel = noted  # type: ignore[method-assign]
    freed: list[int] = []

    def look() -> None:
        if cancelled and not freed and not engine.manager.requests:
            freed.append(engine.steps)

    runner.after_step.append(look)
    try:
        body = {**ASK, "max_tokens": 1500, "stream": stream}
        client = server.http()
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as found:
                next(found.iter_lines())
        else:
            host, port = server.url.removeprefix("http://").split(":")
            content = json.dumps(body).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += b"Content-Type: application/json\r\n"
            with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                server.wait_until(lambda: any(job.generated for job in engine.jobs))
        client.close()
        server.wait_until(server.is_idle)
    finally:
        runner.cancel = cancel  # type: ignore[method-assign]
        runner.after_step.remove(look)
    assert len(cancelled) == len(freed) == 1
    assert freed[0] - cancelled[0] <= 1
    assert engine.manager.stats().slots_free == engine.manager.memory.max_requests


def test_a_full_queue_says_when_to_come_again() -> None:
    with running(max_requests=1, max_waiting=1) as server, server.http() as client:
        body = {**ASK, "max_tokens": 1800, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as first:
            lines = first.iter_lines()
            next(lines)
            with client.stream("POST", "/v1/completions", json={**body, "prompt": "y"}):
                server.wait_until(lambda: len(server.engine.jobs) == 2)
                refused = client.post("/v1/completions", json={**ASK, "max_tokens": 1})
                assert refused.status_code == 429
                assert 1 <= int(refused.headers["retry-after"]) <= 60
                assert refused.json()["error"]["code"] == "queue_full"
        server.wait_until(server.is_idle)
        assert client.post("/v1/completions", json={**ASK, "max_tokens": 1}).status_code == 200


def test_only_those_that_would_wait_are_counted_as_waiting() -> None:
    """With no queue at all, as many at once as can run; and not one more. What can never be taken
    is not told to come again."""
    with running(max_requests=3, max_waiting=0) as server:
        runner = server.state.runner
        gate = threading.Event()
        runner.call(lambda: gate.wait(WAIT_S))  # no step: all that come wait for it
        found = list[int]()

        def ask() -> None:
            with server.http() as client:
                found.append(
                    client.post("/v1/completions", json={**ASK, "max_tokens": 3}).status_code
                )

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        while len(found) < 2:
            time.sleep(0.01)
        assert len(server.engine.jobs) == 3
        gate.set()
        for thread in threads:
            thread.join(WAIT_S)
        assert sorted(found) == [200] * 3 + [429] * 2
        with server.http() as client:
            body = {**ASK, "max_tokens": 1}
            assert client.post("/v1/completions", json={**body, "n": 3}).status_code == 200
            refused = client.post("/v1/completions", json={**body, "n": 4})
            assert refused.status_code == 400  # and not 429 for ever
            assert "ask for at most 3" in refused.json()["error"]["message"]


def test_what_can_never_fit_is_refused_with_the_figure() -> None:
    class Small(StandIn):
        def open(self, room: Room) -> Opened:
            return small(4, room.max_requests)

    with running(Small(), max_context=1024, max_step_tokens=64) as server, server.http() as client:
        found = client.post("/v1/completions", json={**ASK, "max_tokens": 4 * 128 - 199})
        assert found.status_code == 400
        assert found.json()["error"]["code"] == "never_fits"
        assert "at most 512 tokens fit" in found.json()["error"]["message"]
        found = client.post("/v1/completions", json={**ASK, "max_tokens": 2})
        assert found.status_code == 200
        chat = {"model": "stand-in", "messages": [{"role": "user", "content": "x" * 450}]}
        found = client.post("/v1/chat/completions", json={**chat, "ignore_eos": True})
        assert found.status_code == 200  # as many tokens as fit, when the request says nothing
        assert found.json()["usage"]["total_tokens"] == 512


def test_an_error_in_one_request_harms_no_other(server: Running) -> None:
    """Of its own sampling; of the device once, which costs nothing; of the device for good, which
    ends what runs, and the server goes on."""
    engine, expected = server.engine, greedy_text(TOKENIZER.encode(ASK["prompt"]), 10)
    choose, forward = engine.choose, engine.model.forward

    def bad_choice(logits: Any, jobs: Sequence[Job]) -> Any:
        if any(job.data.sampling.seed == 666 for job in jobs):
            raise ValueError("its own")
        return choose(logits, jobs)

    def ask(**change: Any) -> httpx.Response:
        with server.http() as client:
            return client.post("/v1/completions", json={**ASK, "max_tokens": 10, **change})

    engine.choose = bad_choice
    try:
        found: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda seed=seed: found.append(ask(seed=seed)))
            for seed in (1, 666, 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
    finally:
        engine.choose = choose
    assert sorted(each.status_code for each in found) == [200, 200, 500]
    assert {each.json()["choices"][0]["text"] for each in found if each.is_success} == {expected}
    calls = []

    def fails_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device, once")
        return forward(*arguments)

    def fails(*arguments: Any) -> Any:
        raise RuntimeError("the device, for good")

    try:
        engine.model.forward = fails_once
        assert ask().json()["choices"][0]["text"] == expected
        engine.model.forward = fails
        broken = ask()
        assert broken.status_code == 500
        assert "for good" not in broken.text
    finally:
        engine.model.forward = forward
    assert ask().json()["choices"][0]["text"] == expected
    engine.manager.check_invariants()


def test_a_request_has_a_time_limit() -> None:
    with running(request_timeout_s=0.5) as server, server.http() as client:
        found = client.post("/v1/completions", json={**ASK, "max_tokens": 1700})
        assert found.status_code == 504
        assert "0.5 s" in found.json()["error"]["message"]
        server.wait_until(server.is_idle)


def test_a_server_that_drains_takes_nothing_new(server: Running) -> None:
    runner = server.state.runner
    runner.drain()
    try:
        with server.http() as client:
            found = client.post("/v1/completions", json={**ASK, "max_tokens": 1})
            assert found.status_code == 503
            assert found.json()["error"]["code"] == "shutting_down"
            assert client.get("/ready").status_code == 503
            assert client.get("/health").status_code == 200
    finally:
        runner._is_draining = False
