"""A replica: a model on its cache, in a process that Ray starts, restarts and drains."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

from dsv4.cache.handoff.options import HandoffOptions
from dsv4.engine import Job
from dsv4.events.publisher import EventPublisher
from dsv4.integrations.ray.messages import (
    Accepted,
    Announcement,
    Ask,
    Failure,
    Found,
    Limits,
    Message,
    Over,
    Role,
    Said,
)
from dsv4.integrations.ray.options import RayOptions
from dsv4.routing.names import Naming
from dsv4.serve.app import CLOSE_S, make_state
from dsv4.serve.generation import Generation, Piece
from dsv4.serve.load import load_model
from dsv4.serve.models import ServedModel, TextStream
from dsv4.serve.runner import Runner

LOGGER = logging.getLogger("dsv4.ray")
ANNOUNCE_S = 0.5


class Relayed(Generation):
    """An answer whose text is made elsewhere, of its tokens."""

    def push(self, job: Job, new: Sequence[int]) -> Piece:
        for token in new:
            self.history.add(token)
        self.generated += len(new)
        if self.grammar is not None:
            self.grammar.advance(new)
        found = () if self.newest is None else (self.newest,)
        return Piece(tokens=tuple(new), logprobs=found)


class Replica:
    """`generate` streams an answer; the router hears of the replica twice a second."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, options: RayOptions, role: Role, router: DeploymentHandle[Any]
    ) -> None:
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._role, self._router = role, router
        self._name = serve.get_replica_context().replica_id.unique_id
        self._state = await asyncio.to_thread(self._open, options)
        runner = self._state.runner
        self._runner: Runner = runner
        self._publisher = runner.publisher
        runner.start(asyncio.get_running_loop())
        self._announcing = asyncio.create_task(self._announce())

    def _open(self, options: RayOptions) -> Any:
        model: ServedModel = load_model(options.model)
        handoff = None
        if options.prefill is not None:
            handoff = HandoffOptions(name=self._name, deadline_s=options.deadline_s)
        state = make_state(model, options.server, handoff)
        here = f"tcp://{options.events_host or ray.util.get_node_ip_address()}:*"
        state.runner.publisher = EventPublisher(state.runner.manager, here, replay=here)
        self._naming = Naming(
            fingerprint=state.runner.manager.schema.content_fingerprint,
            model_id=model.weights_id,
            block_tokens=state.runner.manager.schema.block_tokens,
            key=options.server.cache_key,
        )
        return state

    # ---- what Ray Serve calls

    def check_health(self) -> None:
        """Raises RuntimeError, and the replica is replaced."""
        if not self._runner.is_alive:
            raise RuntimeError("the thread that steps has ended")

    async def __del__(self) -> None:
        """The replica is drained: its streams have ended, or had their time."""
        self._announcing.cancel()
        await asyncio.to_thread(self._runner.close, CLOSE_S)

    # ---- what other processes call

    def limits(self) -> Limits:
        return Limits(
            max_context=self._runner.max_context,
            most_tokens=self._runner.most_tokens,
            block_tokens=self._naming.block_tokens,
        )

    async def cache_state(self) -> dict[str, Any]:
        """What the cache holds, between two steps."""
        found = await self._state.cache_state()
        return {"replica": self._name, "role": self._role, **found}

    async def metrics(self) -> tuple[str, bytes]:
        return self._name, await self._state.metrics_text()

    async def generate(self, ask: Ask) -> AsyncIterator[Message]:
        """What is generated, as it comes; at least once in `pulse_s` something. Does not raise: an
        error is in the last message."""
        heard = asyncio.Queue[Piece]()
        generation, runner = self._generation(ask, heard), self._runner
        handovers = runner.engine.handovers
        ids: list[int] = ask.ids.tolist()
        try:
            generation.grammar = self._grammar(ask)
            if handovers is not None and ask.offers:
                handovers.offer_when_done(generation)
            if handovers is not None and ask.offer is not None:
                handovers.expect(generation, ask.offer)
            job = await asyncio.to_thread(
                runner.submit, ids, ask.new_tokens, generation, stop_tokens=ask.stop_tokens
            )
        except Exception as error:
            if handovers is not None:
                handovers.forget(generation)
            yield Over(complete=False, failure=Failure.of(error))
            return
        try:
            yield Accepted(replica=self._name)
            is_first = True
            while True:
                pieces = await _next_pieces(heard, ask.pulse_s)
                said = _said(pieces, ask, job if is_first else None)
                if said.tokens:
                    is_first = False
                if said.tokens or not pieces:
                    yield said
                if pieces and pieces[-1].finish is not None:
                    last = pieces[-1]
                    offer = None if handovers is None else handovers.offer(generation)
                    failure = None if last.error is None else Failure.of(last.error)
                    complete = last.finish in ("stop", "length")
                    yield Over(complete=complete, offer=offer, failure=failure)
                    return
        finally:
            if not job.is_over:
                runner.cancel(job)

    def _generation(self, ask: Ask, heard: asyncio.Queue[Piece]) -> Relayed:
        said = ask.ids[len(ask.ids) - ask.said :] if ask.said else ask.ids[:0]
        return Relayed(
            sampling=ask.sampling,
            stream=TextStream(self._state.model.tokenizer),
            emit=heard.put_nowait,
            logprobs=ask.logprobs,
            terms=ask.terms,
            said=tuple(said.tolist()),
        )

    def _grammar(self, ask: Ask) -> Any:
        return None if ask.schema is None else self._state.grammars.json(ask.schema)

    async def _announce(self) -> None:
        while True:
            with suppress(Exception):  # the router starts anew: it hears the next one
                async with asyncio.timeout(4 * ANNOUNCE_S):
                    await self._router.announce.remote(self._announcement())
            await asyncio.sleep(ANNOUNCE_S)

    def _announcement(self) -> Announcement:
        jobs = tuple(self._runner.engine.jobs)
        held = [0 if job.request is None else job.request.length for job in jobs]
        left = [len(job.tokens) - length for job, length in zip(jobs, held, strict=True)]
        counters, publisher = self._runner.counters, self._runner.publisher
        assert publisher is not None
        assert publisher.replay_endpoint is not None
        return Announcement(
            replica=self._name,
            role=self._role,
            endpoint=publisher.endpoint,
            replay=publisher.replay_endpoint,
            naming=self._naming,
            resumes=bool(self._runner.manager.tiers),
            pid=os.getpid(),
            node=ray.util.get_node_ip_address(),
            load=float(sum(max(0, count) for count in left)),
            jobs=len(jobs),
            cached_tokens=counters.cached_tokens,
            prompt_tokens=counters.prompt_tokens,
        )


async def _next_pieces(heard: asyncio.Queue[Piece], pulse_s: float) -> list[Piece]:
    """Those that are there, after waiting for the first; none when it does not come in time."""
    try:
        async with asyncio.timeout(pulse_s):
            pieces = [await heard.get()]
    except TimeoutError:
        return []
    while not heard.empty():
        pieces.append(heard.get_nowait())
    return pieces


def _said(pieces: Sequence[Piece], ask: Ask, job: Job | None) -> Said:
    """One message of several pieces; with what the prompt found, if there is a job."""
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    logprobs: tuple[Any, ...] = ()
    if ask.logprobs is not None:
        logprobs = tuple(each for piece in pieces for each in piece.logprobs)
    found = None
    if job is not None and tokens:
        data: Generation = job.data
        found = Found(
            cached=job.tokens_skipped,
            host=data.host_tokens,
            storage=data.storage_tokens,
            explanation=data.explanation,
        )
    return Said(tokens=tokens, logprobs=logprobs, found=found)
