"""The thread that steps the engine, and the calls that other threads may make.

Once a step, the pieces of all answers go to the event loop of the server. A job that the engine
refuses ends alone. An error that comes back in every step ends the jobs that run. The thread goes
on in both cases.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from dsv4.cache.prefix.explain import Explainer
from dsv4.engine import Job
from dsv4.errors import ContextOverflow, Dsv4Error, InvalidInput
from dsv4.serve.generation import Generation, Piece, Usage, begin
from dsv4.serve.handovers import Handovers
from dsv4.serve.keeper import Keeper
from dsv4.serve.models import Opened
from dsv4.serve.scheduler import Scheduler
from dsv4.tiers.tier import Tier

if TYPE_CHECKING:
    from dsv4.events.publisher import EventPublisher

LOGGER = logging.getLogger("dsv4.serve")
MOST_WAIT_S = 60  # that a client is asked to wait before it tries again
R = TypeVar("R")


class QueueFull(Dsv4Error):
    """The queue has as many requests as it may. `retry_after_s`: when it makes sense to ask
    again."""

    def __init__(self, waiting: int, retry_after_s: int) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{waiting} requests are waiting, which is this server's limit: try again in "
            f"{retry_after_s} s"
        )


class ShuttingDown(Dsv4Error):
    """The server ends and takes no new requests."""


class NeverFits(Dsv4Error):
    """A request that needs more memory than there is, with nothing else running."""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Since the server began. `failures` counts steps whose error was raised."""

    requests: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When an answer moved: of its first token, of a later one, of its end."""

    first: Callable[[float], None]
    later: Callable[[float], None]
    end: Callable[[float], None]


class Runner:
    """`submit`, `cancel` and `call` may come from any thread."""

    def __init__(
        self,
        opened: Opened,
        *,
        most_waiting: int,
        tiers: Sequence[Tier] = (),
        explains: bool = False,
        publisher: EventPublisher | None = None,
    ) -> None:
        self.manager, self.publisher = opened.manager, publisher
        self.engine = Scheduler(
            model=opened.model,
            manager=opened.manager,
            padding=opened.padding,
            drafts=0,
            choose=_choose,
            tiers=tiers,
            explainer=Explainer(opened.manager) if explains else None,
            handovers=Handovers(opened.manager) if opened.manager.handoff else None,
        )
        self.keeper = Keeper(self.engine)
        self.counters = Counters()
        self.timing: Timing | None = None
        self.most_waiting = most_waiting
        self.after_step: list[Callable[[], None]] = []  # called in the thread that steps
        self.after_turn: list[Callable[[Job], None]] = []  # and with each job that has ended
        self.loop: asyncio.AbstractEventLoop | None = None
        self.rates: deque[tuple[float, int]] = deque(maxlen=64)  # time, tokens of the last steps
        self._stepping = opened.stepping
        self._calls: deque[Callable[[], None]] = deque()
        self._outbox: list[tuple[Callable[[Piece], None], Piece]] = []
        self._wake, self._entrance = threading.Condition(), threading.Lock()
        self._is_closing = self._is_draining = self._is_over = False
        self._thread = threading.Thread(target=self._run, name="dsv4-serve", daemon=True)

    # ---- calls from any thread -------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.loop = loop
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    def drain(self) -> None:
        """Takes no new requests; those that are there run on."""
        self._is_draining = True

    def close(self, timeout_s: float) -> None:
        """Ends all that runs, and the thread. What is cached is stored in tiers as far as it can
        be within this time; then they are closed."""
        self.drain()
        until = time.monotonic() + timeout_s
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        if self.publisher is not None:
            self.publisher.close(1.0)
        tiers = self.engine.tiers
        if tiers and not self.is_alive:
            if not self.manager.tiers.drain(max(0.0, until - time.monotonic())):
                LOGGER.warning("not everything that is cached was stored in time")
            self.manager.tiers.close(1.0)
            for tier in tiers:
                tier.close(1.0)

    @property
    def max_context(self) -> int:
        return self.manager.schema.max_context

    @property
    def most_tokens(self) -> int:
        """The most tokens that one request may have, prompt and answer together."""
        schema = self.manager.schema
        held = self.manager._parts.table.allocator.total * schema.block_tokens
        return min(schema.max_context, held)

    def check_fits(self, tokens: int, count: int = 1) -> None:
        """Raises ContextOverflow or NeverFits for a request that can never run, QueueFull if
        `count` more may not wait now, ShuttingDown."""
        schema = self.manager.schema
        if tokens > schema.max_context:
            note = "shorten the prompt or ask for fewer tokens"
            raise ContextOverflow(
                asked_tokens=tokens, max_context_tokens=schema.max_context, note=note
            )
        needed, total = schema.blocks_for(tokens), self.manager._parts.table.allocator.total
        if needed > total:
            raise NeverFits(
                f"{tokens} tokens need {needed} blocks of {schema.block_tokens} tokens, and the "
                f"server's memory has {total}: at most {total * schema.block_tokens} tokens fit"
            )
        most = self.most_waiting + self.manager.memory.max_requests
        if count > most:
            raise NeverFits(
                f"{count} answers are asked at once: this server runs "
                f"{self.manager.memory.max_requests}, and {self.most_waiting} may wait: ask for at "
                f"most {most}"
            )
        if self._is_draining:
            raise ShuttingDown("the server is shutting down: ask another one")
        jobs = tuple(self.engine.jobs)
        waiting = sum(job.request is None for job in jobs)
        free = self.manager.memory.max_requests - (len(jobs) - waiting)  # the next step fills these
        if waiting + count > self.most_waiting + free:
            raise QueueFull(waiting, self.retry_after_s())

    def submit(
        self,
        ids: Sequence[int],
        new_tokens: int,
        generation: Generation,
        *,
        stop_tokens: frozenset[int],
    ) -> Job:
        """Raises what `check_fits` raises, and InvalidInput."""
        begin(generation, ids)
        with self._entrance:  # a long prompt is hashed here, while steps go on
            self.check_fits(len(ids) + new_tokens)
            job = self.engine.submit(
                ids,
                new_tokens,
                generation.terms.salt,
                hints=generation.terms.hints,
                stop_tokens=stop_tokens,
                on_tokens=self._heard,
                data=generation,
            )
            self.counters.requests += 1
        with self._wake:
            if self._is_over:  # between the check and now
                raise ShuttingDown("the server has shut down: ask another one")
            self._wake.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """The next step gives the job's memory back."""
        self.engine.cancel(job)
        with self._wake:
            self._wake.notify_all()

    def call(self, function: Callable[[], R]) -> Future[R]:
        """Calls the function between two steps, in the thread that steps. Once that thread has
        ended, the future raises ShuttingDown."""
        future: Future[R] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        with self._wake:
            if self._is_over:
                future.set_exception(ShuttingDown("the server has shut down: ask another one"))
                return future
            self._calls.append(run)
            self._wake.notify_all()
        return future

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens a second, over the last steps."""
        seen = tuple(self.rates)
        if len(seen) < 2 or time.monotonic() - seen[-1][0] > 5:
            return 0.0
        return sum(count for _, count in seen[1:]) / max(seen[-1][0] - seen[0][0], 1e-6)

    def retry_after_s(self) -> int:
        """When half of what is left to generate should be done, as fast as it goes now."""
        left = sum(max(job.missing_tokens, 0) for job in tuple(self.engine.jobs))
        rate = self.tokens_per_s
        return min(MOST_WAIT_S, max(1, round(left / 2 / rate))) if rate else 1

    # ---- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._stepping():
            while True:
                with self._wake:
                    while not (self.engine.jobs or self._calls or self._is_closing):
                        self._wake.wait(self.keeper.next_s)
                        self._guarded(self.keeper.expire)
                if self._is_closing:
                    for job in tuple(self.engine.jobs):
                        self.engine.cancel(job)
                while self._calls:
                    self._calls.popleft()()
                if self.engine.jobs:
                    self._step()
                elif self._is_closing and self._ends():
                    return
                self._guarded(self.keeper.expire)

    def _ends(self) -> bool:
        """Whether the thread may end: nothing has come in the meantime. From then on nothing is
        taken."""
        with self._wake:
            self._is_over = not (self.engine.jobs or self._calls)
            return self._is_over

    def _guarded(self, call: Callable[[], object]) -> None:
        """The thread survives what goes wrong between steps: the device may be broken, and then
        every call of the manager may raise until the next step has mended it."""
        try:
            call()
        except Exception:
            LOGGER.exception("a call between two steps has failed")

    def _step(self) -> None:
        engine = self.engine
        before = self.counters.generated_tokens
        try:
            for job in tuple(engine.jobs):
                if not job.data.number:
                    engine.arrive(job)
            engine.step()
        except Exception as error:
            LOGGER.exception("a step has failed again and again: its requests end with its error")
            self.counters.failures += 1
            engine.failures = 0
            self._end_with(error)
        self.rates.append((time.monotonic(), self.counters.generated_tokens - before))
        for hear in tuple(self.after_step):
            self._guarded(hear)
        self._post()

    def _end_with(self, error: Exception) -> None:
        """Ends what runs, or, if nothing does, all that waits: it could not be admitted. Their
        clients get it at once, because the next step may fail before it comes to that; their
        memory is given back by the first step that can."""
        engine = self.engine
        for job in [job for job, _ in engine.running] or [*engine.jobs]:
            job.error = job.error or error
            engine.jobs.remove(job)
            if job.fetch is not None:
                self._guarded(job.fetch.cancel)
            self._guarded(partial(self._heard, job, []))
        if not engine.jobs:  # there may be none for long
            self._guarded(engine.step)

    def _heard(self, job: Job, new: list[int]) -> None:
        data: Generation = job.data
        if new:
            if data.stopped_by is not None:
                return
            piece = data.push(job, new)
            self._note_time(data)
            self.counters.generated_tokens += len(new)
            if data.stopped_by is not None:
                self.engine.cancel(job)
        else:
            piece = data.last(job, self._usage(job))
            self._guarded(lambda: self._note_end(job, piece))
        self._outbox.append((data.emit, piece))

    def _note_time(self, data: Generation) -> None:
        now, timing = time.monotonic(), self.timing
        if timing is not None and data.last_s is None:
            timing.first(now - data.arrived_s)
        elif timing is not None and data.last_s is not None:
            timing.later(now - data.last_s)
        data.last_s = now

    def _note_end(self, job: Job, piece: Piece) -> None:
        counters, reason = self.counters, piece.finish or "error"
        counters.finished[reason] = counters.finished.get(reason, 0) + 1
        counters.prompt_tokens += job.prompt_tokens
        counters.cached_tokens += job.tokens_skipped
        counters.preemptions += job.preemptions
        if self.timing is not None:
            self.timing.end(time.monotonic() - job.data.arrived_s)
        with suppress(InvalidInput):
            self.keeper.keep(job)
        for hear in tuple(self.after_turn):
            self._guarded(partial(hear, job))

    def _usage(self, job: Job) -> Usage:
        data: Generation = job.data
        cached, size = job.tokens_skipped, self.manager.schema.block_tokens
        whole = job.prompt_tokens // size * size if job.generated else 0
        return Usage(
            prompt_tokens=job.prompt_tokens,
            generated_tokens=len(job.generated),
            cached_tokens=cached,
            host_tokens=data.host_tokens,
            storage_tokens=data.storage_tokens,
            stored_tokens=max(0, whole - cached),
            explanation=data.explanation,
        )

    def _post(self) -> None:
        """All pieces of a step in one call into the event loop."""
        if not self._outbox:
            return
        outbox, self._outbox = self._outbox, []
        if self.loop is None:
            _deliver(outbox)
            return
        with suppress(RuntimeError):  # the loop has closed: no client is left
            self.loop.call_soon_threadsafe(_deliver, outbox)


def _deliver(outbox: Sequence[tuple[Callable[[Piece], None], Piece]]) -> None:
    for emit, piece in outbox:
        emit(piece)


def _choose(logits: Tensor, jobs: Sequence[Job]) -> Tensor:
    """Each job's token from its own row. If one raises, the engine calls again for each job."""
    rows = logits if logits.device.type == "cuda" else logits.cpu()
    chosen = []
    for row, job in zip(rows, jobs, strict=True):
        data: Generation = job.data
        token = data.choose(row)
        data.note_logprobs(row, token)
        chosen.append(token)
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device)
