"""What the ingress has instead of an engine: jobs that run on replicas.

A job's tokens come from one replica after another; each stretch is a *leg*. The first leg of a long
prompt is on a prefill replica and ends with the first token and an offer; the next is on a decode
replica. A leg that breaks (the replica is killed, stopped or drained) is followed by one elsewhere,
whose prompt is everything so far: which token follows depends on the tokens before it, the seed and
the position alone, so the answer is the one that an undisturbed run gives. Only the newest leg is
listened to, so nothing comes twice.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.serve.handle import DeploymentHandle

from dsv4.engine import Job
from dsv4.errors import ContextOverflow
from dsv4.integrations.ray.messages import (
    Accepted,
    Ask,
    Failure,
    Found,
    Limits,
    Message,
    Over,
    Role,
    Said,
    Way,
)
from dsv4.integrations.ray.options import RayOptions
from dsv4.serve.failures import ApiError
from dsv4.serve.generation import Generation, Piece, Usage, begin
from dsv4.serve.runner import Counters, NeverFits, QueueFull, ShuttingDown, Timing

LOGGER = logging.getLogger("dsv4.ray")
ROUTER_S = 1.0  # that a choice may take; then Ray Serve chooses
ROUTER_PAUSE_S = 2.0  # without asking a router that has not answered
ADMISSION_S = 30.0  # that a request waits for a replica to accept it
PAUSE_S = 0.1  # after a leg that broke
MOST_PATIENCE = 4  # times `silence_s`, for a replica of an answer that has met silent ones
MOST_FAILURES = 3  # legs that ended with an error of their replica, of one answer

CUT_SHORT = Failure(
    status=500,
    message="the replica calls an answer complete that is not",
    code=None,
    param=None,
    retry_after_s=None,
)


class Lost(Exception):
    """A leg has broken; another replica can go on."""


class Silent(Lost):
    """The replica has said nothing for too long. It may only be slow."""


@dataclass(slots=True, kw_only=True)
class Mishaps:
    """What streams have met. `stood_still_s` are the times between the last token before a break
    and the first after it."""

    lost_legs: int = 0
    lost_prefills: int = 0
    unrouted: int = 0  # choices that were left to Ray Serve
    stood_still_s: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Course:
    """A job's way through the replicas."""

    job: Job
    accepted: concurrent.futures.Future[None]
    avoided: set[str] = field(default_factory=set)
    began_s: float = field(default_factory=time.monotonic)
    moved_s: float | None = None  # its newest token
    broken: bool = False  # since its newest token
    found: Found | None = None
    failures: int = 0
    silences: int = 0

    @property
    def data(self) -> Generation:
        generation: Generation = self.job.data
        return generation


class RemoteRunner:
    """`submit` and `cancel` may come from any thread; legs are followed in the event loop."""

    def __init__(
        self,
        options: RayOptions,
        limits: Limits,
        *,
        router: DeploymentHandle[Any],
        decode: DeploymentHandle[Any],
        prefill: DeploymentHandle[Any] | None,
    ) -> None:
        self._options, self._limits, self._router = options, limits, router
        self._handles: dict[Role, DeploymentHandle[Any]] = {"decode": decode}
        if prefill is not None:
            self._handles["prefill"] = prefill
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router_again_s = 0.0
        self._is_draining = False
        self.counters, self.mishaps = Counters(), Mishaps()
        self.timing: Timing | None = None

    # ---- as of a runner in this process

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def close(self) -> None:
        self._is_draining = True
        for task in [*self._tasks.values()]:
            task.cancel()

    @property
    def is_alive(self) -> bool:
        return self._loop is not None

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def max_context(self) -> int:
        return self._limits.max_context

    @property
    def most_tokens(self) -> int:
        return self._limits.most_tokens

    @property
    def running(self) -> int:
        return len(self._tasks)

    def check_fits(self, tokens: int, count: int = 1) -> None:
        """Raises ContextOverflow, NeverFits, QueueFull, ShuttingDown."""
        longest, most = self._limits.max_context, self._limits.most_tokens
        if tokens > longest:
            note = "shorten the prompt or ask for fewer tokens"
            raise ContextOverflow(asked_tokens=tokens, max_context_tokens=longest, note=note)
        if tokens > most:
            raise NeverFits(f"{tokens} tokens: a replica's memory has room for {most} of a request")
        if self._is_draining:
            raise ShuttingDown("the server is shutting down: ask another one")
        server = self._options.server
        room = self._options.decoders * (server.max_requests + server.max_waiting)
        if self._tasks and len(self._tasks) + count > room:
            raise QueueFull(len(self._tasks), 1)

    def submit(
        self,
        ids: Sequence[int],
        new_tokens: int,
        generation: Generation,
        *,
        stop_tokens: frozenset[int],
    ) -> Job:
        """Waits until a replica has accepted it. Raises what `check_fits` raises, and ApiError as
        the replicas say it."""
        self.check_fits(len(ids) + new_tokens)
        begin(generation, ids)
        job = Job(
            tokens=[*ids],
            new_tokens=new_tokens,
            prompt_tokens=len(ids),
            salt=generation.terms.salt,
            hints=generation.terms.hints,
            stop_tokens=stop_tokens,
            data=generation,
        )
        self.counters.requests += 1
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin, Course(job=job, accepted=accepted))
        accepted.result()
        return job

    def cancel(self, job: Job) -> None:
        job.cancelled = True
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has closed: no client is left
            self._loop.call_soon_threadsafe(self._stop, job)

    # ---- in the event loop

    def _begin(self, course: Course) -> None:
        task = asyncio.ensure_future(self._run(course))
        self._tasks[course.job] = task
        task.add_done_callback(lambda _: self._tasks.pop(course.job, None))

    def _stop(self, job: Job) -> None:
        task = self._tasks.get(job)
        if task is not None:
            task.cancel()

    async def _run(self, course: Course) -> None:
        try:
            await self._follow(course)
        except asyncio.CancelledError:
            course.job.cancelled = True
            self._end(course, None)
        except Exception as error:
            if not isinstance(error, ApiError):
                LOGGER.exception("an answer has ended with an error")
            self._end(course, error)

    def _end(self, course: Course, error: Exception | None) -> None:
        """Its last piece; or its error, where no replica had accepted it."""
        job = course.job
        if not course.accepted.done():
            course.accepted.set_exception(error or ShuttingDown("the request was cancelled"))
            return
        job.error = error
        piece = course.data.last(job, self._usage(course))
        self._note_end(course, piece)
        course.data.emit(piece)

    async def _follow(self, course: Course) -> None:
        """Legs, until the answer is over. Raises ApiError."""
        job, offer = course.job, None
        while True:
            way = await self._choose(course)
            if way is not None and way.prefill is not None and job.missing_tokens > 1 and not offer:
                offer = await self._prefill(course, way.prefill)
            if not self._is_over(course):
                try:
                    await self._leg(course, "decode", None if way is None else way.decode, offer)
                except Lost as lost:
                    self._note_lost(course, lost)
                    offer = None
                    await asyncio.sleep(PAUSE_S)
            if self._is_over(course):
                self._end(course, None)
                return

    def _is_over(self, course: Course) -> bool:
        return course.job.is_complete or course.data.stopped_by is not None

    def _note_lost(self, course: Course, lost: Lost) -> None:
        self.mishaps.lost_legs += 1
        course.broken = True
        LOGGER.warning(
            "an answer goes on elsewhere after %d tokens: %s", len(course.job.generated), lost
        )

    async def _choose(self, course: Course) -> Way | None:
        """Of the router; None where it does not answer, and Ray Serve chooses."""
        job, now = course.job, time.monotonic()
        if now >= self._router_again_s:
            ids = np.asarray(job.tokens, dtype=np.int64)
            session = course.data.terms.session
            named = session if session.rpartition("/")[2] else None
            avoided = frozenset(course.avoided)
            try:
                async with asyncio.timeout(ROUTER_S):
                    way: Way | None = await self._router.choose.remote(
                        ids, job.salt, named, avoided
                    )
                    if way is not None:
                        return way
            except Exception as error:  # it is gone, or stands still
                LOGGER.warning("the router does not answer: %s", type(error).__name__)
                self._router_again_s = time.monotonic() + ROUTER_PAUSE_S
        self.mishaps.unrouted += 1
        return None

    async def _prefill(self, course: Course, replica: str) -> bytes | None:
        """Runs the prompt and the first token there. Returns the offer of the request; without one,
        the decode replica computes what is missing."""
        try:
            return await self._leg(course, "prefill", replica, None)
        except Lost as lost:
            LOGGER.warning("a prompt is computed where its answer is: %s", lost)
            self.mishaps.lost_prefills += 1
            course.broken = course.moved_s is not None
            return None

    async def _leg(
        self, course: Course, role: Role, replica: str | None, offer: bytes | None
    ) -> bytes | None:
        """Returns the offer that it ends with. Raises Lost, ApiError."""
        ask = self._ask(course, role, replica, offer)
        at = replica
        # where all are slow, moving from one to the next would make them slower
        patience = min(1 + course.silences, MOST_PATIENCE) * self._options.silence_s
        messages = self._hear(self._handles[role], ask, patience)
        try:
            async for message in messages:
                match message:
                    case Accepted():
                        at = message.replica
                        if not course.accepted.done():
                            course.accepted.set_result(None)
                    case Said():
                        course.found = course.found or message.found
                        self._note_tokens(course, message)
                        if self._is_over(course):
                            return None
                    case Over():
                        if message.complete and (role == "prefill" or self._is_over(course)):
                            return message.offer
                        failure = CUT_SHORT if message.complete else message.failure
                        self._require_other(course, failure)
                        raise Lost(
                            "the replica has ended it" if failure is None else failure.message
                        )
            raise Lost("the stream has ended early")
        except Lost as lost:
            course.silences += isinstance(lost, Silent)
            if at is not None:
                course.avoided.add(at)
            raise
        finally:
            await messages.aclose()

    def _require_other(self, course: Course, failure: Failure | None) -> None:
        """Raises ApiError for what another replica would say too, for an error that has come again
        and again, and for a request that none has accepted in time."""
        if failure is None:
            return
        course.failures += course.accepted.done() and failure.status == 500
        late = time.monotonic() - course.began_s > ADMISSION_S
        everywhere = len(course.avoided) + 1 >= self._options.decoders
        refused = not course.accepted.done() and (late or everywhere)
        if failure.is_final or refused or course.failures >= MOST_FAILURES:
            raise failure.error()

    async def _hear(
        self, handle: DeploymentHandle[Any], ask: Ask, patience_s: float
    ) -> AsyncGenerator[Message, None]:
        """Raises Lost when the replica is gone or says nothing for this long."""
        response: Any = handle.options(stream=True).generate.remote(ask)
        try:
            while True:
                try:
                    async with asyncio.timeout(patience_s):
                        message: Message = await anext(response)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise Silent(f"silent for {patience_s:g} s") from None
                except Exception as error:  # whatever Ray raises for an actor that has died
                    raise Lost(f"{type(error).__name__}") from error
                yield message
        finally:
            response.cancel()

    def _ask(self, course: Course, role: Role, replica: str | None, offer: bytes | None) -> Ask:
        job, data = course.job, course.data
        return Ask(
            ids=np.asarray(job.tokens, dtype=np.int64),
            said=len(job.generated),
            new_tokens=1 if role == "prefill" else job.missing_tokens,
            sampling=data.sampling,
            stop_tokens=job.stop_tokens,
            logprobs=data.logprobs,
            schema=None if data.grammar is None else data.grammar.schema,
            terms=data.terms,
            pulse_s=self._options.silence_s / 4,
            replica=replica,
            avoided=frozenset(course.avoided),
            offers=role == "prefill",
            offer=offer,
        )

    # ---- tokens become pieces

    def _note_tokens(self, course: Course, said: Said) -> None:
        job, data = course.job, course.data
        for nth, token in enumerate(said.tokens):
            if self._is_over(course):
                return
            job.tokens.append(token)
            data.newest = said.logprobs[nth] if nth < len(said.logprobs) else None
            piece = data.push(job, [token])
            self.counters.generated_tokens += 1
            self._note_time(course)
            data.emit(piece)

    def _note_time(self, course: Course) -> None:
        now, timing = time.monotonic(), self.timing
        if course.moved_s is None:
            if timing is not None:
                timing.first(now - course.data.arrived_s)
        else:
            if timing is not None:
                timing.later(now - course.moved_s)
            if course.broken:
                self.mishaps.stood_still_s.append(now - course.moved_s)
        course.moved_s, course.broken = now, False

    def _note_end(self, course: Course, piece: Piece) -> None:
        counters, reason = self.counters, piece.finish or "error"
        counters.finished[reason] = counters.finished.get(reason, 0) + 1
        counters.prompt_tokens += course.job.prompt_tokens
        counters.cached_tokens += 0 if course.found is None else course.found.cached
        if self.timing is not None:
            self.timing.end(time.monotonic() - course.data.arrived_s)

    def _usage(self, course: Course) -> Usage:
        """As its first leg found it."""
        job, size, found = course.job, self._limits.block_tokens, course.found
        cached = 0 if found is None else found.cached
        whole = job.prompt_tokens // size * size if job.generated else 0
        return Usage(
            prompt_tokens=job.prompt_tokens,
            generated_tokens=len(job.generated),
            cached_tokens=cached,
            host_tokens=0 if found is None else found.host,
            storage_tokens=0 if found is None else found.storage,
            stored_tokens=max(0, whole - cached),
            explanation=None if found is None else found.explanation,
        )
