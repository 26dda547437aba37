"""Continuous batching over an accelerated model: many requests at once, each at its own pace.

`dsv4.engine` has what a step does; this file has what differs. Requests are rows of the model's
cache, which calls of `generate` use too; a caller that needs a row may run a step of the jobs that
have rows; and several threads may stream at once.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import dsv4.engine
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.trail import TokenIds
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.engine import Choose, Job, Share, greedy
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks, OverQuota, RequestError
from dsv4.integrations.transformers.forward import FastForward
from dsv4.integrations.transformers.generate import context_overflow
from dsv4.integrations.transformers.model import require_type
from dsv4.integrations.transformers.rows import KnownRow

WAIT_S = 1.0  # until a step looks again whether there is room, if it is not notified
LEAD_S = 1.0  # until a stream no longer waits for another's step: an interrupt may have ended that


class _Model:
    """An accelerated model as the core runs it, without drafts."""

    def __init__(self, model: Any, forward: FastForward) -> None:
        self._model, self._forward = model, forward

    @property
    def vocabulary(self) -> int:
        words: int = self._model.config.vocab_size
        return words

    def forward(self, plan: ForwardPlan, ids: Tensor, rows: Tensor) -> Tensor:
        """fp32"""
        hidden = self._forward.hidden_states(plan, ids, rows)
        if not len(rows):  # of a chunk in the middle of a prompt
            return hidden.new_zeros(0, self.vocabulary, dtype=torch.float32)
        logits: Tensor = self._model.lm_head(hidden)
        return logits.float()

    def draft(self, plan: ForwardPlan, newest: Tensor, count: int) -> Tensor:
        raise AssertionError("an engine of drafts=0 asks for none")


class _Core(dsv4.engine.Engine):
    """The core on rows that others use too. The rows belong to `FastCaches`: it admits requests and
    keeps idle rows. The caller holds its lock."""

    def __init__(self, model: Any, forward: FastForward, **options: Any) -> None:
        super().__init__(
            model=_Model(model, forward),
            manager=cast(KVCacheManager, forward.step.manager),  # a Lockstep has these calls too
            drafts=0,
            padding=forward.padding,
            retries=0,
            **options,
        )
        self.rows, self.caches = forward, forward.caches
        self.weights: dict[Job, str | None] = {}  # what each job's row was computed with

    def end_jobs(self) -> bool:
        has_ended = super().end_jobs()
        if has_ended:
            self.caches.changed.notify_all()
        return has_ended

    def leave(self, job: Job) -> None:
        """The row of a job that has ended is kept for a prompt that continues from it."""
        self.weights.pop(job, None)
        request, job.request = job.request, None
        if request is None or request.released:
            return
        has_tiers = bool(self.manager.tiers)
        is_known = request.trail is not None and request.incomplete_from is None
        is_done = job.is_over and not isinstance(job.error, OutOfBlocks)
        if is_done and is_known and not has_tiers and not request.is_torn and request.length:
            ids = np.asarray(job.tokens[: request.length], dtype=np.int64)
            self.caches.pool.keep(KnownRow(request=request, ids=ids))
        else:
            self.manager.room.release_later(request, suspend=has_tiers)

    def admit(self) -> None:
        """Waiting jobs get rows, oldest first, unless a call of generate has waited longer."""
        caches = self.caches
        for job in self.jobs:
            if job.request is not None or job.is_over:
                continue
            if caches.is_waited_for or not caches.make_room(1):
                return
            if job.preemptions and not self._has_spare(job):
                return
            while job.request is None:
                try:
                    request = caches.admit(
                        np.asarray(job.tokens, dtype=np.int64), job.salt, job.hints
                    )
                except OutOfBlocks as error:
                    if error.never:
                        job.error = error
                        break
                    over = error if isinstance(error, OverQuota) else None
                    # blocks are pinned, or others run with them; ranks must all try as often
                    if self.rows.step.ranks is None and caches.give_back_unused(over):
                        continue
                    if over is None:
                        return
                    break  # its salt's quota is full: others may have room
                else:
                    self.weights[job] = caches.weights.name
                    job.request = request
                    if len(job.tokens) == job.prompt_tokens:
                        job.tokens_skipped = request.length

    def _has_spare(self, job: Job) -> bool:
        """Whether a job that gave its blocks back may have them again: those that run may each need
        one soon."""
        running, stats = len(self.running), self.manager.stats()
        prompt = self.manager.prefix.prompt(job.tokens, self.caches.salt_now(job.salt))
        spare = stats.blocks_free + stats.blocks_evictable - running
        return not running or self.manager.room.needed_blocks(prompt) <= spare

    def advance(self) -> bool:
        """After an error of the step its plan fails at once, because calls of generate may come
        next. Rows that are incomplete then are released, and their jobs wait for others."""
        manager, lengths = self.manager, [(*each, each[1].length) for each in self.running]
        try:
            with torch.no_grad(), self.rows.computing():
                return super().advance()
        except BaseException:
            self.flight = None
            try:
                if manager.room.open_plans:
                    manager.fail(manager.room.open_plans[0])
            finally:
                for job, request, length in lengths:
                    if request.length != length or request.is_torn:
                        job.request = None
                        manager.room.release_later(request)
            raise

    def schedule(self) -> list[Share]:
        shares = super().schedule()
        weights = self.caches.weights.glance() if shares else None
        for share in shares:
            if self.weights[share.job] != weights:  # what both computed must not be reused
                self.weights[share.job] = weights
                share.request.trail = None
        return shares

    def make_room(self, error: OutOfBlocks) -> None:
        """First takes blocks of a row or a cache that is not in use."""
        if not self.caches.give_back_unused(error if isinstance(error, OverQuota) else None):
            super().make_room(error)

    def mend(self) -> None:
        """The manager was restored before; rows that are incomplete since then are released."""
        self.flight = None
        for job, request in self.running:
            if request.is_torn:
                job.request = None
                self.manager.room.release_later(request)


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

    def __init__(
        self, *, model: Any, step_tokens: int | None = None, choose: Choose = greedy
    ) -> None:
        """Raises InvalidInput for a model that is not accelerated."""
        require_type(model)
        forward = vars(model.model).get("forward")
        if not isinstance(forward, FastForward):
            raise InvalidInput("the model is not accelerated: call accelerate(model, …) first")
        self.model, self._forward = model, forward
        self._core = _Core(model, forward, step_tokens=step_tokens, choose=choose)
        # of the stream that steps, or is about to
        self._leading = threading.Lock()
        self._bells: deque[threading.Lock] = deque()  # of the streams that wait for it
        weakref.finalize(self, _release_rows, forward, self._core.jobs)
        with self._turn:
            forward.caches.engines.add(self)

    @property
    def jobs(self) -> list[Job]:
        """In the order of their arrival, waiting and running ones."""
        return self._core.jobs

    @property
    def step_tokens(self) -> int | None:
        return self._core.step_tokens

    @property
    def choose(self) -> Choose:
        return self._core.choose

    @choose.setter
    def choose(self, choose: Choose) -> None:
        self._core.choose = choose

    def submit(
        self,
        ids: TokenIds,
        new_tokens: int,
        salt: str | None = None,
        *,
        hints: Hints | None = None,
        stop_tokens: TokenIds | Set[int] | None = None,
        on_tokens: Callable[[Job, list[int]], None] | None = None,
        data: Any = None,
    ) -> Job:
        """A job for these tokens. It ends after `new_tokens` tokens or the first of `stop_tokens`,
        the model's end tokens unless given. Jobs of different `salt` share nothing; `hints` say
        what is kept longer. Runs nothing. Raises InvalidInput, ContextOverflow."""
        stops = self._end_tokens() if stop_tokens is None else stop_tokens
        with self._turn:
            try:
                job = self._core.submit(
                    ids,
                    new_tokens,
                    salt,
                    hints=hints,
                    stop_tokens=stops,
                    on_tokens=on_tokens,
                    data=data,
                )
            except ContextOverflow as error:
                raise context_overflow(error.asked_tokens, error.max_context_tokens) from None
            self._changed.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """The job ends; the next step gives its row back. What it has generated stays."""
        with self._turn:
            self._check_mine(job)
            self._core.cancel(job)
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
        core = self._core
        with self._turn:
            self._forward.check_restored()
            self._forward.caches.mend()
            steps = core.steps
            is_left = core.step()
            if core.steps == steps and is_left and not self._help_others():
                self._wait()
            return is_left

    def help(self) -> bool:
        """Runs a step of the jobs that have rows, for a caller that waits for rows, or takes back
        rows of ended jobs; returns whether there was either."""
        core = self._core
        if core.end_jobs():
            return True
        try:
            has_run = core.advance()
            if has_run:
                core.end_jobs()
            return has_run
        finally:
            self._ring()

    def _help_others(self) -> bool:
        """Runs a step of other engines' jobs, which have the rows; returns whether there was
        one."""
        others = [engine for engine in self._forward.caches.engines if engine is not self]
        return any(engine.help() for engine in others)

    def _wait(self) -> None:
        """Waits: nothing can run before a call of generate has ended."""
        if self._forward.caches.is_generating:
            raise RequestError(
                f"a step inside a call of generate, which uses the rows that jobs wait for: step "
                f"the engine elsewhere, or accelerate with more than max_batch="
                f"{self._manager.memory.max_requests}"
            )
        self._changed.wait(WAIT_S)

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

    # ---- whose jobs, whose rows

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

    def _check_mine(self, job: Any) -> None:
        if not isinstance(job, Job):
            raise InvalidInput(f"{job!r} is not a job: submit returns one")
        if job not in self.jobs and not job.is_over:  # in this order: it may end meanwhile
            raise InvalidInput("the job is another engine's: use the one it was submitted to")


def _release_rows(forward: FastForward, jobs: list[Job]) -> None:
    """The engine was collected, and its jobs can no longer run."""
    manager = forward.step.manager
    for job in jobs:
        request, job.request = job.request, None
        if request is not None and not request.released:
            manager.room.release_later(request, suspend=bool(manager.tiers))
