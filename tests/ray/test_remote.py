"""The ingress's runner over replicas that are functions: each leg may break anywhere, and what is
heard is what an undisturbed run says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray", reason="replicas on Ray need the extra ray: pip install 'dsv4[ray]'")

from dsv4.errors import ContextOverflow
from dsv4.integrations.ray.messages import (
    Accepted,
    Ask,
    Failure,
    Found,
    Limits,
    Message,
    Over,
    Said,
    Way,
)
from dsv4.integrations.ray.options import RayOptions
from dsv4.integrations.ray.remote import MOST_FAILURES, RemoteRunner
from dsv4.serve.failures import ApiError
from dsv4.serve.generation import Generation, Piece, Terms
from dsv4.serve.models import StandIn, TextStream
from dsv4.serve.options import ServerOptions
from dsv4.serve.runner import NeverFits, QueueFull, ShuttingDown
from dsv4.serve.sampling import Sampling

PROMPT = [3, 1, 4, 1, 5]
END = 256  # of the stand-in's tokens
Leg = Callable[[Ask], AsyncIterator[Message]]


def following(ids: list[int]) -> int:
    """What the model says next: it depends on every token before."""
    return 97 + hash(tuple(ids)) % 26


def undisturbed(count: int) -> list[int]:
    ids = [*PROMPT]
    for _ in range(count):
        ids.append(following(ids))
    return ids[len(PROMPT) :]


async def run_leg(ask: Ask, *, breaks: int | None = None, at: str = "") -> AsyncIterator[Message]:
    """A replica that does as it is asked, or is gone after some messages."""
    ids, sent = ask.ids.tolist(), 0
    yield Accepted(replica=at or ask.replica or "any")
    for nth in range(ask.new_tokens):
        if sent == breaks:
            raise ConnectionError("the replica is gone")
        ids.append(following(ids))
        found = Found(cached=2, host=0, storage=0, explanation=None) if nth == 0 else None
        yield Said(tokens=(ids[-1],), found=found)
        sent += 1
    if sent == breaks:
        raise ConnectionError("the replica is gone")
    yield Over(complete=True, offer=b"an offer" if ask.offers else None)


class Response:
    """As Ray Serve's, with an end that a test can see."""

    def __init__(self, messages: AsyncIterator[Message], handle: Handle) -> None:
        self._messages, self._handle = messages, handle

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> Message:
        return await anext(self._messages)

    def cancel(self) -> None:
        self._handle.ended += 1


@dataclass(eq=False)
class Handle:
    """Of a deployment: its legs, one after the other; the last one again and again."""

    legs: list[Leg]
    asks: list[Ask] = field(default_factory=list)
    ended: int = 0

    def options(self, *, stream: bool) -> Handle:
        assert stream
        return self

    @property
    def generate(self) -> Handle:
        return self

    def remote(self, ask: Ask) -> Response:
        self.asks.append(ask)
        return Response(self.legs[min(len(self.asks), len(self.legs)) - 1](ask), self)


class RouterHandle:
    """`ways` one after the other, the last one again; an exception stands for a dead router."""

    def __init__(self, *ways: Way | Exception | None) -> None:
        self.ways, self.avoided = [*ways], list[frozenset[str]]()
        self.choose = self

    async def remote(self, ids: Any, salt: Any, session: Any, avoided: frozenset[str]) -> Any:
        self.avoided.append(avoided)
        way = self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]
        if isinstance(way, Exception):
            raise way
        return way


@dataclass
class Heard:
    pieces: list[Piece] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, piece: Piece) -> None:
        assert not self.over.is_set(), "a piece after the last"
        self.pieces.append(piece)
        if piece.finish is not None:
            self.over.set()

    @property
    def tokens(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.tokens]

    @property
    def last(self) -> Piece:
        return self.pieces[-1]


def remote(
    decode: Handle, router: Any = None, prefill: Handle | None = None, **options: Any
) -> RemoteRunner:
    common: dict[str, Any] = {"replicas": 2} if prefill is None else {"prefill": 1, "decode": 2}
    asked = RayOptions(**{"silence_s": 0.2, **common, **options})
    limits = Limits(max_context=1000, most_tokens=500, block_tokens=2)
    router = router or RouterHandle(Way(decode="a", prefill=None if prefill is None else "p"))
    handles: dict[str, Any] = {"router": router, "decode": decode, "prefill": prefill}
    return RemoteRunner(asked, limits, **handles)


async def ask(runner: RemoteRunner, count: int = 20, **how: Any) -> Heard:
    """Submits as a route does, and waits for the end of the answer."""
    runner.start(asyncio.get_running_loop())
    heard = Heard()
    generation = Generation(
        sampling=Sampling(seed=1),
        stream=TextStream(StandIn().tokenizer),
        emit=heard,
        terms=Terms(),
        stops=how.get("stops", ()),
    )
    submit = how.get("ids", PROMPT), count, generation
    stop_tokens = frozenset(how.get("stop_tokens", ()))
    await asyncio.to_thread(runner.submit, *submit, stop_tokens=stop_tokens)
    await asyncio.wait_for(heard.over.wait(), 30)
    return heard


def test_an_answer_whose_legs_break_anywhere_is_the_undisturbed_one():
    async def story(seed: int) -> None:
        draw = random.Random(seed)

        def leg(asked: Ask) -> AsyncIterator[Message]:
            breaks = draw.choice((None, 0, 1, 2, 5, 20))
            return run_leg(asked, breaks=breaks, at=draw.choice("ab"))

        handle = Handle([leg])
        runner = remote(handle)
        heard = await ask(runner)
        assert heard.tokens == undisturbed(20)
        assert "".join(piece.text for piece in heard.pieces) == bytes(heard.tokens).decode()
        assert heard.last.finish == "length"
        assert heard.last.usage is not None
        assert (heard.last.usage.prompt_tokens, heard.last.usage.generated_tokens) == (5, 20)
        assert heard.last.usage.cached_tokens in (0, 2)
        assert handle.ended == len(handle.asks)  # every leg was given up or had ended
        assert runner.mishaps.lost_legs == len(handle.asks) - 1
        for each in handle.asks:
            assert each.ids.tolist() == [*PROMPT, *heard.tokens[: each.said]]
            assert each.said + each.new_tokens == 20
        await asyncio.sleep(0)
        assert runner.running == 0

    for seed in range(12):
        asyncio.run(story(seed))


def test_a_prompt_runs_elsewhere_and_its_offer_goes_along():
    async def story(breaks: int | None) -> None:
        prefill, decode = Handle([lambda a: run_leg(a, breaks=breaks)]), Handle([run_leg])
        runner = remote(decode, prefill=prefill)
        heard = await ask(runner)
        assert heard.tokens == undisturbed(20)
        assert [(each.new_tokens, each.offers) for each in prefill.asks] == [(1, True)]
        (leg,) = decode.asks
        assert leg.offer == (b"an offer" if breaks is None else None)
        assert leg.said == (0 if breaks == 0 else 1)  # nothing is said twice
        assert runner.mishaps.lost_prefills == (breaks is not None)

    for breaks in (None, 0, 1):
        asyncio.run(story(breaks))


def test_a_replica_that_says_nothing_is_given_up_and_avoided():
    async def silent(asked: Ask) -> AsyncIterator[Message]:
        yield Accepted(replica="a")
        yield Said(tokens=(following(PROMPT),))
        await asyncio.sleep(60)

    async def story() -> None:
        router = RouterHandle(Way(decode="a", prefill=None), Way(decode="b", prefill=None))
        handle = Handle([silent, run_leg])
        runner = remote(handle, router)
        heard = await ask(runner)
        assert heard.tokens == undisturbed(20)
        assert router.avoided == [frozenset(), frozenset("a")]
        assert handle.asks[1].avoided == frozenset("a")
        (still,) = runner.mishaps.stood_still_s
        assert still >= 0.2

    asyncio.run(story())


def test_where_all_replicas_are_slow_an_answer_moves_less_and_less():
    """Each says something only every three `silence_s`: an answer that moved at each would never
    end."""

    async def slow(asked: Ask) -> AsyncIterator[Message]:
        async for message in run_leg(asked):
            await asyncio.sleep(0.65)
            yield message

    async def story() -> None:
        handle = Handle([slow])
        heard = await ask(remote(handle), 3)
        assert heard.tokens == undisturbed(3)
        assert len(handle.asks) == 4  # of 0.2, 0.4, 0.6 and 0.8 s

    asyncio.run(story())


def test_while_it_only_lives_an_answer_waits():
    """A long prompt before it: the replica says that it lives, for longer than `silence_s`."""

    async def slow(asked: Ask) -> AsyncIterator[Message]:
        yield Accepted(replica="a")
        for _ in range(8):
            await asyncio.sleep(asked.pulse_s)
            yield Said()
        async for message in run_leg(asked):
            if not isinstance(message, Accepted):
                yield message

    async def story() -> None:
        handle = Handle([slow])
        assert (await ask(remote(handle))).tokens == undisturbed(20)
        assert len(handle.asks) == 1

    asyncio.run(story())


def test_without_a_router_ray_serve_chooses():
    async def story() -> None:
        handle = Handle([run_leg])
        runner = remote(handle, RouterHandle(ConnectionError("the router is gone")))
        assert (await ask(runner)).tokens == undisturbed(20)
        assert handle.asks[0].replica is None
        assert runner.mishaps.unrouted == 1
        assert (await ask(runner)).tokens == undisturbed(20)  # and is not asked for a while
        assert runner.mishaps.unrouted == 2

    asyncio.run(story())


def test_a_stop_string_and_a_stop_token_end_the_leg():
    async def story() -> None:
        said = undisturbed(20)
        text = bytes(said).decode()
        handle = Handle([run_leg])
        heard = await ask(remote(handle), stops=(text[5:7],))
        assert "".join(piece.text for piece in heard.pieces) == text[: text.find(text[5:7])]
        assert (heard.last.finish, heard.last.stopped_by) == ("stop", text[5:7])
        assert handle.ended == 1
        heard = await ask(remote(Handle([run_leg])), stop_tokens=[said[9]])
        assert heard.last.finish == "stop"
        assert heard.tokens == said[: said.index(said[9])]

    asyncio.run(story())


def refusing(error: Exception) -> Leg:
    async def leg(asked: Ask) -> AsyncIterator[Message]:
        yield Over(complete=False, failure=Failure.of(error))

    return leg


def failing(error: Exception) -> Leg:
    async def leg(asked: Ask) -> AsyncIterator[Message]:
        yield Accepted(replica="a")
        yield Over(complete=False, failure=Failure.of(error))

    return leg


def test_what_one_replica_refuses_another_may_take():
    async def story() -> None:
        handle = Handle([refusing(QueueFull(9, 4)), run_leg])
        assert (await ask(remote(handle))).tokens == undisturbed(20)
        with pytest.raises(ApiError) as found:  # all refuse
            await ask(remote(Handle([refusing(QueueFull(9, 4))])))
        assert (found.value.status, found.value.retry_after_s) == (429, 4)
        with pytest.raises(ApiError, match="not this"):  # all would say so
            await ask(remote(Handle([refusing(ApiError(400, "not this")), run_leg])))

    asyncio.run(story())


def test_an_error_that_comes_again_and_again_ends_the_answer():
    async def story() -> None:
        handle = Handle([failing(RuntimeError("a device"))] * 2 + [run_leg])
        assert (await ask(remote(handle))).tokens == undisturbed(20)
        handle = Handle([failing(RuntimeError("a device"))])
        heard = await ask(remote(handle))
        assert isinstance(heard.last.error, ApiError)
        assert (heard.last.finish, heard.last.error.status) == ("error", 500)
        assert len(handle.asks) == MOST_FAILURES

    asyncio.run(story())


def lying(words: int) -> Leg:
    """A replica that calls an answer complete after some of its tokens."""

    async def leg(asked: Ask) -> AsyncIterator[Message]:
        async for message in run_leg(asked):
            if isinstance(message, Said) and len(said) < words:
                said.append(message)
                yield message
            elif not isinstance(message, Said):
                yield message

    said: list[Message] = []
    return leg


def test_a_replica_that_calls_an_answer_complete_too_early_is_not_believed():
    async def story() -> None:
        handle = Handle([lying(3), run_leg])
        heard = await ask(remote(handle))
        assert heard.tokens == undisturbed(20)
        assert [each.said for each in handle.asks] == [0, 3]
        assert handle.asks[1].avoided == frozenset("a")
        handle = Handle([lying(0)])  # all of them: it ends, and says why
        heard = await ask(remote(handle))
        assert (heard.tokens, heard.last.finish) == ([], "error")
        assert "complete that is not" in str(heard.last.error)
        assert len(handle.asks) == MOST_FAILURES

    asyncio.run(story())


def test_more_tokens_than_were_asked_for_are_not_heard():
    async def talking(asked: Ask) -> AsyncIterator[Message]:
        yield Accepted(replica="a")
        yield Said(tokens=tuple(undisturbed(50)))
        yield Over(complete=True)

    async def story() -> None:
        heard = await ask(remote(Handle([talking])))
        assert heard.tokens == undisturbed(20)
        assert heard.last.finish == "length"

    asyncio.run(story())


def test_a_client_that_goes_ends_the_leg():
    async def endless(asked: Ask) -> AsyncIterator[Message]:
        yield Accepted(replica="a")
        while True:
            await asyncio.sleep(0.01)
            yield Said()

    async def story() -> None:
        handle = Handle([endless])
        runner = remote(handle)
        runner.start(asyncio.get_running_loop())
        heard = Heard()
        generation = Generation(
            sampling=Sampling(seed=1),
            stream=TextStream(StandIn().tokenizer),
            emit=heard,
            terms=Terms(),
        )
        job = await asyncio.to_thread(
            runner.submit, PROMPT, 20, generation, stop_tokens=frozenset()
        )
        runner.cancel(job)
        await asyncio.wait_for(heard.over.wait(), 30)
        assert heard.last.finish == "cancelled"
        await asyncio.sleep(0.01)
        assert (handle.ended, runner.running) == (1, 0)

    asyncio.run(story())


def test_what_never_fits_is_refused_before_a_replica_is_asked():
    async def story() -> None:
        handle = Handle([run_leg])
        runner = remote(handle, server=ServerOptions(max_waiting=0, max_requests=1))
        with pytest.raises(ContextOverflow, match="1000"):
            await ask(runner, ids=[1] * 990)
        with pytest.raises(NeverFits, match="500"):
            await ask(runner, ids=[1] * 490)
        await runner.close()
        with pytest.raises(ShuttingDown):
            await ask(runner)
        assert not handle.asks

    asyncio.run(story())
