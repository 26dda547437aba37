"""Continuous batching over an accelerated model: many requests at once, each at its own pace."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.prefix.trail import TokenIds, token_ids
from dsv4.cache.requests import Request
from dsv4.errors import InvalidInput, OutOfBlocks, RequestError, require_count
from dsv4.integrations.transformers.forward import FastForward
from dsv4.integrations.transformers.generate import context_overflow
from dsv4.integrations.transformers.model import require_type
from dsv4.integrations.transformers.rows import KnownRow

WAIT_S = 1.0  # until a step looks again whether there is room, if it is not notified
LEAD_S = 1.0  # until a stream no longer waits for another's step: an interrupt may have ended that


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A prompt, and what is generated after it.

    `tokens` are all that are known: the first `prompt_tokens` were submitted. `request` is None
    while the job waits for a row. `tokens_skipped` counts those of the prompt that were cached.
    `error` is what ended only this job: what `choose` raised for it, or that it can never have the
    memory that it needs.
    """

    tokens: list[int]
    new_tokens: int
    prompt_tokens: int
    salt: str | None = None
    stop_tokens: frozenset[int] = frozenset()
    request: Request | None = None
    cancelled: bool = False
    error: Exception | None = None
    tokens_skipped: int = 0
    preemptions: int = 0  # how often its row made room for older jobs
    weights: str | None = None  # what `request` was computed with (weights.py)

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def is_stopped(self) -> bool:
        """Whether the model has ended the text by itself; the stop token is the last generated."""
        return len(self.tokens) > self.prompt_tokens and self.tokens[-1] in self.stop_tokens

    @property
    def is_over(self) -> bool:
        has_all = len(self.tokens) - self.prompt_tokens >= self.new_tokens
        return self.cancelled or self.error is not None or has_all or self.is_stopped


# logits fp32 [jobs, vocabulary] and their jobs -> the next token of each, int64 [jobs]
Choose = Callable[[Tensor, Sequence[Job]], Tensor]


def greedy(logits: Tensor, jobs: Sequence[Job]) -> Tensor:
    """The most likely token of each job."""
    return logits.argmax(dim=-1)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Share:
    """A job's part of a step: `ids` run, and the model chooses what comes next if it `samples`."""

    job: Job
    request: Request
    ids: list[int]
    samples: bool


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Engine:
    """Runs jobs on the rows of an accelerated model, as many at once as it has.

    A step runs the newest token of every job that generates, together with chunks of prompts, up to
    `step_tokens` in all. Prompts with the same beginning share it; one that continues an earlier
    job's text runs only what is new. All calls may come from any thread. `generate` may be used at
    the same time: rows go to the first caller that asked, and a call that waits for rows of jobs
    runs their steps. Where several processes compute the model, all make the same calls in the same
    order.

    If blocks run out, because prefixes are pinned, the youngest job gives its own back and waits; a
    job that is alone and has not enough ends with `error`.

    `choose` picks tokens, greedily by default. If it raises, it is called for each job separately,
    and a job for which it raises ends with that `error`. The model must stay accelerated.
    """

    model: Any
    step_tokens: int | None = None  # None: as many as a step of the model may have
    choose: Choose = greedy
    jobs: list[Job] = field(default_factory=list)  # in the order of their arrival
    _forward: FastForward = field(init=False)
    # of the stream that steps, or is about to
    _leading: threading.Lock = field(default_factory=threading.Lock, init=False)
    # of the streams that wait for it
    _bells: deque[threading.Lock] = field(default_factory=deque, init=False)

    def __post_init__(self) -> None:
        """Raises InvalidInput for a model that is not accelerated."""
        require_type(self.model)
        forward = vars(self.model.model).get("forward")
        if not isinstance(forward, FastForward):
            raise InvalidInput("the model is not accelerated: call accelerate(model, …) first")
        self._forward = forward
        most = forward.step.manager.max_step_tokens
        if self.step_tokens is None:
            self.step_tokens = most
        require_count("step_tokens", self.step_tokens)
        if self.step_tokens > most:
            raise InvalidInput(
                f"step_tokens={self.step_tokens}, but the model was accelerated for "
                f"max_step_tokens={most}: give at most that"
            )
        weakref.finalize(self, _let_go, forward, self.jobs)
        with self._turn:
            forward.caches.engines.add(self)

    def submit(
        self,
        ids: TokenIds,
        new_tokens: int,
        salt: str | None = None,
        *,
        stop_tokens: TokenIds | Set[int] | None = None,
    ) -> Job:
        """A job for these tokens. It ends after `new_tokens` tokens or the first of `stop_tokens`
        (by default the model's end tokens). Jobs of different `salt` share nothing. Runs nothing.
        Raises InvalidInput, ContextOverflow."""
        read = token_ids(ids)
        require_count("new_tokens", new_tokens)
        words = self.model.config.vocab_size
        if not len(read) or int(read.max()) >= words:
            raise InvalidInput(
                f"a prompt of {len(read)} ids up to {read.max(initial=0)}: give at least one, each "
                f"below the vocabulary's {words}"
            )
        asked, longest = len(read) + new_tokens, self._manager.schema.max_context
        if asked > longest:
            raise context_overflow(asked, longest)
        self._manager.prompt(read, salt)  # refuses a salt that is not a string
        stops: Any = self._end_tokens() if stop_tokens is None else stop_tokens
        stops = token_ids([*stops] if isinstance(stops, Set) else stops)
        job = Job(
            tokens=read.tolist(),
            new_tokens=new_tokens,
            prompt_tokens=len(read),
            salt=salt,
            stop_tokens=frozenset(stops.tolist()),
        )
        with self._turn:
            self.jobs.append(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """The job ends; the next step gives its row back. What it has generated stays."""
        with self._turn:
            self._check_mine(job)
            job.cancelled = True
            self._changed.notify_all()

    def stream(self, job: Job) -> Iterator[int]:
        """The tokens of a job as they are generated. A stream that waits for one runs a step of all
        jobs, or waits for the step that another stream runs. So several threads may stream at once,
        each token is delivered when it is ready, and nothing runs in the background. A stream that
        is left early cancels its job; one that ends with the error of a step does not. Raises the
        error that ended the job."""
        self._check_mine(job)
        seen = job.prompt_tokens
        while True:
            new = job.tokens[seen:]
            try:
                yield from new
            except BaseException:
                if not job.is_over:
                    self.cancel(job)
                raise
            seen += len(new)
            if seen < len(job.tokens):
                continue
            if job.is_over:
                break
            if not self._lead(job, seen):
                self._wait_for_leader()
        if job.error is not None:
            raise job.error

    def run(self) -> None:
        """Steps until no job is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """One step of all jobs that have a row. Returns whether a job is left.

        Where running calls of generate have all rows, it waits for one; where jobs of another
        engine have them, it runs a step of these. An error of the step is raised; no job is lost,
        and the next call continues."""
        for _ in range(3):  # the lock is not fair: a thread that steps in a loop would keep it
            if not self._leading.locked():
                break
            self._wait_for_leader()  # a bell may be the one before's
        try:
            return self._step()
        finally:
            self._ring()

    def _step(self) -> bool:
        with self._turn:
            self._forward.check_restored()
            self._forward.caches.mend()
            self._end_jobs()
            self._admit()
            if self._run():
                pass
            elif any(not job.is_over for job in self.jobs) and not self._help_others():
                self._wait()
            self._end_jobs()
            return bool(self.jobs)

    def help(self) -> bool:
        """Runs a step of the jobs that have rows, for a caller that waits for rows, or takes back
        rows of ended jobs; returns whether there was either."""
        if self._end_jobs():
            return True
        try:
            has_run = self._run()
            if has_run:
                self._end_jobs()
            return has_run
        finally:
            self._ring()

    # ---- streams of several threads

    def _lead(self, job: Job, seen: int) -> bool:
        """Runs a step for all waiting streams, unless the token has arrived; False if another
        stream leads."""
        leading = self._leading
        if not leading.acquire(blocking=False):
            return False
        try:
            with self._turn:
                if seen == len(job.tokens) and not job.is_over:
                    self._step()
            return True
        finally:
            leading.release()
            self._ring()

    def _wait_for_leader(self) -> None:
        """Waits until the leader's step has ended. If that takes long, an interrupt may have ended
        it: then another may lead. A bell is a lock, because the exit of a condition is Python code,
        where an interrupt would keep its lock."""
        leading, bell = self._leading, threading.Lock()
        bell.acquire()
        self._bells.append(bell)
        if not leading.locked() or bell.acquire(timeout=LEAD_S):
            return
        if self._leading is leading:
            self._leading = threading.Lock()

    def _ring(self) -> None:
        """Wakes all waiting streams."""
        with suppress(IndexError):  # another thread may ring too
            while True:
                self._bells.popleft().release()

    # ---- in the order of a step

    @property
    def _manager(self) -> Any:
        return self._forward.step.manager

    @property
    def _turn(self) -> Any:
        return self._forward.caches.turn

    @property
    def _changed(self) -> Any:
        return self._forward.caches.changed

    def _end_tokens(self) -> Set[int]:
        """Those of the model; a number below 0 stands for none."""
        end = self.model.generation_config.eos_token_id
        return {token for token in ([end] if isinstance(end, int) else end or ()) if token >= 0}

    def _end_jobs(self) -> bool:
        """Ended jobs leave their rows for prompts that continue from them; returns whether there
        were any."""
        over = [job for job in self.jobs if job.is_over]
        for job in over:
            self._leave(job)
        if over:
            self.jobs[:] = [job for job in self.jobs if not job.is_over]
            self._changed.notify_all()
        return bool(over)

    def _leave(self, job: Job) -> None:
        request, job.request = job.request, None
        if request is None or request.released:
            return
        is_kept = not self._manager.tiers and request.trail is not None
        if is_kept and not request.is_torn and request.incomplete_from is None and request.length:
            ids = np.asarray(job.tokens[: request.length], dtype=np.int64)
            self._forward.caches.pool.keep(KnownRow(request=request, ids=ids))
        else:
            suspend = bool(self._manager.tiers)
            self._manager.release_later(request, suspend=suspend)

    def _admit(self) -> None:
        """Jobs that wait get rows, the oldest first, unless a call of generate was there before."""
        caches = self._forward.caches
        for job in self.jobs:
            if job.request is not None or job.is_over:
                continue
            if caches.is_waited_for or not caches.make_room(1):
                return
            if job.preemptions and not self._has_spare(job):
                return
            while job.request is None:
                try:
                    job.request = caches.admit(np.asarray(job.tokens, dtype=np.int64), job.salt)
                except OutOfBlocks as error:
                    if error.never:
                        job.error = error
                        break
                    # blocks are pinned, or others run with them; ranks must all try as often
                    if self._forward.step.ranks is not None or not caches.give_back_unused():
                        return
            if job.request is None:
                continue
            job.weights = caches.weights.name
            if len(job.tokens) == job.prompt_tokens:
                job.tokens_skipped = job.request.length

    def _shares(self) -> list[_Share]:
        """Which jobs run which tokens: those that generate first, then chunks of prompts."""
        assert self.step_tokens is not None
        left, shares = self.step_tokens, []
        running = [(job, job.request) for job in self.jobs if job.request is not None]
        for job, request in sorted(
            running, key=lambda each: len(each[0].tokens) - each[1].length > 1
        ):
            pending = job.tokens[request.length :]
            if not left:
                break
            ids = pending[:left]
            left -= len(ids)
            samples = len(ids) == len(pending)
            shares.append(_Share(job=job, request=request, ids=ids, samples=samples))
        return shares

    def _has_spare(self, job: Job) -> bool:
        """Whether a job that gave its blocks back may have them again: those that run may each need
        one soon."""
        running = sum(each.request is not None for each in self.jobs)
        manager = self._manager
        prompt = manager.prompt(job.tokens, self._forward.caches.salt_now(job.salt))
        stats = manager.stats()
        spare = stats.blocks_free + stats.blocks_evictable - running
        return not running or bool(manager.needed_blocks(prompt) <= spare)

    def _run(self) -> bool:
        """Runs a step of the jobs that there are blocks for; returns whether there was one."""
        while shares := self._shares():
            try:
                self._run_shares(shares)
                return True
            except OutOfBlocks as error:
                if self._manager.open_plan is not None or not self._give_back(error):
                    raise
        return False

    def _give_back(self, error: OutOfBlocks) -> bool:
        """Frees blocks for the others: of a row or a cache that is not in use, or of the youngest
        job whose row has some. Returns whether anything was given back, or a job has ended."""
        caches, manager = self._forward.caches, self._manager
        if caches.give_back_unused():
            return True
        running = [(job, job.request) for job in self.jobs if job.request is not None]
        if not running:
            return False
        helping = [each for each in running if manager.released_blocks(each[1])] or running
        job, request = helping[-1]
        if len(running) == 1 and (error.never or len(manager.requests) == 1):
            job.error = error
        job.preemptions += 1
        job.request = None
        manager.release_later(request, suspend=bool(manager.tiers))
        return True

    def _run_shares(self, shares: list[_Share]) -> None:
        """Jobs take what was chosen, and then the step is committed: a token that is known but not
        committed is computed again."""
        weights = self._forward.caches.weights.glance()
        for share in shares:
            if share.job.weights != weights:  # what is computed with both must not be reused
                share.job.weights = weights
                share.request.trail = None
        lengths = [share.request.length for share in shares]
        steps = [(share.request, len(share.ids)) for share in shares]
        sampling = [nth for nth, share in enumerate(shares) if share.samples]
        try:
            ids = [token for share in shares for token in share.ids]
            with self._forward.stepping(steps, ids) as hidden:
                if sampling:
                    rows = torch.tensor(sampling, device=hidden.device)
                    logits = self.model.lm_head(hidden[rows]).float()
                    self._take(logits, [shares[nth].job for nth in sampling])
        except BaseException:
            for share, length in zip(shares, lengths, strict=True):
                if share.request.length != length or share.request.is_torn:
                    share.job.request = None
                    self._manager.release_later(share.request)
            raise

    def _take(self, logits: Tensor, jobs: list[Job]) -> None:
        """Jobs get what `choose` picks for them. A job for which it raises has that error, and the
        others continue. Raises InvalidInput for an invalid choice; then no job has a new token."""
        try:
            picked = [(jobs, self.choose(logits, jobs))]
            errors: dict[int, Exception] = {}
        except Exception as error:
            picked, errors = [], {0: error}
            if len(jobs) > 1:
                picked, errors = self._choose_apart(logits, jobs)
        chosen = [(some, self._checked(tokens, len(some))) for some, tokens in picked]
        for nth, its_error in errors.items():
            jobs[nth].error = its_error
        for some, tokens in chosen:
            for job, token in zip(some, tokens, strict=True):
                job.tokens.append(token)

    def _choose_apart(
        self, logits: Tensor, jobs: list[Job]
    ) -> tuple[list[tuple[list[Job], Tensor]], dict[int, Exception]]:
        picked, errors = [], {}
        for nth, job in enumerate(jobs):
            try:
                picked.append(([job], self.choose(logits[nth : nth + 1], [job])))
            except Exception as error:
                errors[nth] = error
        return picked, errors

    def _checked(self, chosen: Any, jobs: int) -> list[int]:
        """What `choose` has returned. Raises InvalidInput; then no job has a new token."""
        is_whole = isinstance(chosen, Tensor) and not chosen.is_floating_point()
        if not is_whole or tuple(chosen.shape) != (jobs,) or chosen.dtype == torch.bool:
            form = f"{chosen.dtype} {list(chosen.shape)}" if isinstance(chosen, Tensor) else chosen
            raise InvalidInput(
                f"choose has returned {form}: return one token per job, int64 [{jobs}]"
            )
        tokens: list[int] = chosen.tolist()
        words = self.model.config.vocab_size
        if min(tokens) < 0 or max(tokens) >= words:
            raise InvalidInput(
                f"choose has returned tokens between {min(tokens)} and {max(tokens)}: the "
                f"vocabulary has {words}"
            )
        return tokens

    def _help_others(self) -> bool:
        """Runs a step of other engines' jobs, which have the rows; returns whether there was
        one."""
        others = [engine for engine in self._forward.caches.engines if engine is not self]
        return any(engine.help() for engine in others)

    def _check_mine(self, job: Any) -> None:
        if not isinstance(job, Job):
            raise InvalidInput(f"{job!r} is not a job: submit returns one")
        if job not in self.jobs and not job.is_over:  # in this order: it may end meanwhile
            raise InvalidInput("the job is another engine's: use the one it was submitted to")

    def _wait(self) -> None:
        """Waits: nothing can run before a call of generate has ended."""
        if self._forward.caches.is_generating:
            raise RequestError(
                f"a step inside a call of generate, which uses the rows that jobs wait for: step "
                f"the engine elsewhere, or accelerate with more than max_batch="
                f"{self._manager.max_requests}"
            )
        self._changed.wait(WAIT_S)


def _let_go(forward: FastForward, jobs: list[Job]) -> None:
    """The engine was collected, and its jobs can no longer run."""
    manager = forward.step.manager
    for job in jobs:
        request, job.request = job.request, None
        if request is not None and not request.released:
            manager.release_later(request, suspend=bool(manager.tiers))
