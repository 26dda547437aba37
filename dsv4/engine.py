"""Continuous batching: many requests at once, each at its own pace, over any model.

A model has two methods and a number (`Model`): it runs the tokens of a plan and returns logits, it
guesses what may follow, and its `vocabulary` says how many ids there are. Everything else is here.
Prompts wait in a queue and are hashed once. A step runs the newest tokens of all jobs that decode,
with drafts, together with chunks of prompts. Prompts with the same beginning share it. When memory
is short the youngest job gives its own back and waits; what it has computed stays cached, and with
tiers its state is kept too. If the schema has `steps_ahead`, a step is planned and launched while
the previous one runs: which drafts were right is known on the device, and the host learns it later.
The engine survives errors of the device and Ctrl-C, and nothing that was computed wrong is ever
used.

Read it top to bottom: a job, a model, a running step, then what a step does, in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dsv4.extras import needed_by

with needed_by("dsv4.engine"):
    import torch
    from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.trail import TokenIds, token_ids
from dsv4.cache.prepare_forward import ForwardPlan, PlanOptions
from dsv4.cache.requests import Request, root_of
from dsv4.errors import (
    ContextOverflow,
    InvalidInput,
    OutOfBlocks,
    OverQuota,
    RequestError,
    require_count,
)

if TYPE_CHECKING:
    from dsv4.cache.transfers.fetch import Fetch

LOOK_AHEAD = 4  # jobs that may be admitted before the oldest, if most of their prompt is cached
RETRIES = 3  # steps in a row that may fail before the engine gives up
TIER_TIMEOUT_S = 0.2  # that an admission waits for the rest of a prompt to arrive from a tier
PAUSE_S = 0.0005  # of a step in which nothing could run


# ---- a job ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A prompt, and what is generated after it.

    [0, request.length)      in the cache
    [request.length, end)    known, to be run: the rest of a prompt, or the newest token

    `tokens` are all that are known: the first `prompt_tokens` were submitted. `request` is None
    while the job waits. `tokens_skipped` counts those of the prompt that were cached. `error` is
    what ended only this job. `data` belongs to the caller: sampling state, a priority, a session.

    `on_tokens(job, new)` is called in the thread that steps, with the tokens of a step once these
    are in `tokens`, and with none when the job has ended and left. If it raises, the job ends with
    that error.

    Only `tokens` and `request` change what a step does with a job, each in one operation, so an
    interrupt between any two lines leaves a job that can continue.
    """

    tokens: list[int]
    new_tokens: int
    prompt_tokens: int
    salt: str | None = None
    hints: Hints | None = None
    stop_tokens: frozenset[int] = frozenset()
    on_tokens: Callable[[Job, list[int]], None] | None = None
    data: Any = None
    prompt: Prompt | None = None  # of `tokens` as they were when it last had to wait
    fetch: Fetch | None = None  # of what tiers have of the prompt
    request: Request | None = None
    cancelled: bool = False
    error: Exception | None = None
    tokens_skipped: int = 0
    preemptions: int = 0  # how often it gave its memory to older jobs
    reported: int = 0  # of the generated tokens, those that `on_tokens` was given
    drafts_kept: int = 0
    last_step: int = 0  # the last in which it had a share

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def missing_tokens(self) -> int:
        return self.new_tokens + self.prompt_tokens - len(self.tokens)

    @property
    def is_stopped(self) -> bool:
        """Whether the model has ended the text by itself; the stop token is the last generated."""
        return len(self.tokens) > self.prompt_tokens and self.tokens[-1] in self.stop_tokens

    @property
    def is_complete(self) -> bool:
        return self.missing_tokens <= 0 or self.is_stopped

    @property
    def is_over(self) -> bool:
        return self.cancelled or self.error is not None or self.is_complete


# ---- a model -------------------------------------------------------------------------------------


class Model(Protocol):
    """What an engine runs. It acquires the handles of its layers from the engine's manager."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""

    def forward(self, plan: ForwardPlan, ids: Tensor, rows: Tensor) -> Tensor:
        """Runs the tokens `ids` int64 [tokens] of a plan through all layers, each of which appends
        them to the cache. Returns the logits [len(rows), vocabulary] of the tokens in these rows;
        there may be none. If steps overlap it must not wait for the device."""

    def draft(self, plan: ForwardPlan, newest: Tensor, count: int) -> Tensor:
        """Guesses int64 [jobs, count] of what follows the `newest` tokens int64 [jobs] of those
        that decode. A wrong guess only costs time. Not called with `drafts=0`."""


# logits [rows, vocabulary] and the job of each row -> the token after each, int64 [rows]
Choose = Callable[[Tensor, Sequence[Job]], Tensor]
# of the jobs that wait, the oldest first: the one to admit next, or None
Order = Callable[[Sequence[Job]], Job | None]
# how many tokens each request of a step has -> how the plan is padded
Padding = Callable[[Sequence[int]], PlanOptions]
# what a job's token at a position gave: (job, position, logits)
Listener = Callable[[Job, int, Tensor], None]


def greedy(logits: Tensor, jobs: Sequence[Job]) -> Tensor:
    """The most likely token of each job."""
    return logits.argmax(dim=-1)


# ---- a running step ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Share:
    """A job's part of a step: tokens whose `ids` the host knows or, if it knows none, the one that
    the previous step chooses; then drafts. `samples` if the model should choose what comes next."""

    job: Job
    request: Request
    ids: list[int]
    drafts: int
    samples: bool

    @property
    def known(self) -> int:
        return len(self.ids) or 1

    @property
    def count(self) -> int:
        return self.known + self.drafts


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Flight:
    """A step that was launched. Its tensors are on the device and may not have been computed yet.

    `ids` and `chosen` [tokens] are what ran and, of rows that were sampled, what was chosen to
    follow; of each share `accepted` says how many of its tokens are right (None: all) and `newest`
    what was chosen after them. `logits` are those of all rows if a listener wants them.
    """

    plan: ForwardPlan
    shares: list[Share]
    ids: Tensor
    logits: Tensor | None
    chosen: Tensor
    accepted: Tensor | None
    newest: Tensor | None


# ---- the engine ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True, weakref_slot=True)
class Engine:
    """Runs jobs on one manager, which nothing else may use. `step` is called by one thread at a
    time, `submit` and `cancel` from any. `jobs` are in the order of their arrival, whether they
    wait or run: one that is preempted keeps its place.

    A step has at most `step_tokens` tokens in all (default: as many as the manager's plans may
    have): that bounds how long a job that decodes waits for a chunk of another's prompt. Each
    decode has up to `drafts` drafts (default: as many as the schema allows). `order` chooses which
    job is admitted next; by default the oldest, or one of the next few if most of its prompt is
    cached. `padding` says how steps are padded, for a model with captured graphs. `listener`
    receives the logits of every token that runs. `retries` steps in a row may fail.

    `choose` picks tokens. With drafts a job has several rows, in order. If steps overlap, the host
    does not know the newest tokens when it is called. If it raises, it is called for each job
    separately, and a job for which it raises ends with that `error`.
    """

    model: Model
    manager: KVCacheManager
    step_tokens: int | None = None
    drafts: int | None = None
    choose: Choose = greedy
    order: Order | None = None
    padding: Padding | None = None
    listener: Listener | None = None
    retries: int = RETRIES
    jobs: list[Job] = field(default_factory=list, init=False)
    _held_back: dict[Job, OverQuota] = field(default_factory=dict, init=False)  # by their quotas
    flight: Flight | None = field(default=None, init=False)
    steps: int = field(default=0, init=False)  # that were launched
    failures: int = field(default=0, init=False)  # in a row
    # True inside a step, so also after one that was interrupted
    _needs_mending: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Raises InvalidInput."""
        most, schema = self.manager.memory.max_step_tokens, self.manager.schema
        self.step_tokens = require_count(
            "step_tokens", most if self.step_tokens is None else self.step_tokens
        )
        if self.step_tokens > most:
            raise InvalidInput(
                f"step_tokens={self.step_tokens}, but the manager was built for "
                f"max_step_tokens={most}: give at most that"
            )
        if self.drafts is None:
            self.drafts = schema.max_draft_tokens
        if require_count("drafts", self.drafts, at_least=0) > schema.max_draft_tokens:
            raise InvalidInput(
                f"drafts={self.drafts}, but the schema was built for "
                f"max_draft_tokens={schema.max_draft_tokens}: give at most that"
            )

    def submit(
        self,
        ids: TokenIds,
        new_tokens: int,
        salt: str | None = None,
        *,
        hints: Hints | None = None,
        stop_tokens: TokenIds | Set[int] = (),
        on_tokens: Callable[[Job, list[int]], None] | None = None,
        data: Any = None,
    ) -> Job:
        """A job for these tokens. It ends after `new_tokens` tokens or the first of `stop_tokens`.
        Jobs of different `salt` share nothing; `hints` say what is kept longer. Runs nothing.
        Raises InvalidInput, ContextOverflow."""
        read, words = token_ids(ids), self.model.vocabulary
        require_count("new_tokens", new_tokens)
        if not len(read) or int(read.max()) >= words:
            raise InvalidInput(
                f"a prompt of {len(read)} ids up to {read.max(initial=0)}: give at least one, each "
                f"below the vocabulary's {words}"
            )
        asked, longest = len(read) + new_tokens, self.manager.schema.max_context
        if asked > longest:
            raise ContextOverflow(asked_tokens=asked, max_context_tokens=longest)
        stops: Any = [*stop_tokens] if isinstance(stop_tokens, Set) else stop_tokens
        job = Job(
            tokens=read.tolist(),
            new_tokens=new_tokens,
            prompt_tokens=len(read),
            salt=salt,
            hints=hints,
            stop_tokens=frozenset(token_ids(stops).tolist()),
            on_tokens=on_tokens,
            data=data,
            prompt=self.manager.prefix.prompt(read, salt, hints=hints),
        )
        self.jobs.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """The job ends; the next step gives its memory back. What it has generated stays."""
        job.cancelled = True

    @property
    def running(self) -> list[tuple[Job, Request]]:
        return [(job, job.request) for job in self.jobs if job.request is not None]

    @property
    def _waiting(self) -> list[Job]:
        """Without those whose quota was full when they were tried."""
        found = [job for job in self.jobs if job.request is None and not job.is_over]
        return [job for job in found if job not in self._held_back]

    @property
    def _overlaps(self) -> bool:
        """Whether a step is launched before the results of the previous one are known."""
        return self.manager.schema.steps_ahead > 0

    def _in_flight(self, job: Job) -> Share | None:
        shares = [] if self.flight is None else self.flight.shares
        return next((share for share in shares if share.job is job), None)

    def run(self) -> None:
        """Steps until no job is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Launches a step and takes the results of the previous one, or of this one if steps do not
        overlap. Returns whether a job is left. An error of the device, or a KeyboardInterrupt
        (which is raised), costs the running steps but no job: the next call cleans up after
        them."""
        try:
            if self._needs_mending:
                self.mend()
                for job in self.jobs:  # of a step that ended between its tokens and its report
                    self._report(job)
            self._needs_mending = True
            self.end_jobs()
            self.admit()
            if not self.advance() and self.jobs:
                time.sleep(PAUSE_S)
            self.end_jobs()
        except RuntimeError:
            self.failures += 1
            if self.failures > self.retries:
                raise
            return True
        self._needs_mending, self.failures = False, 0
        return bool(self.jobs)

    # ---- in the order of a step

    def end_jobs(self) -> bool:
        """Jobs that have ended, were cancelled or refused give their memory back, once no running
        step has it. Their prefixes stay cached. Returns whether there was any."""
        over = [job for job in self.jobs if job.is_over and not self._in_flight(job)]
        for job in over:
            self.leave(job)
            self._report(job)
            self.jobs.remove(job)
            self._report_tokens(job, [])
        return bool(over)

    def leave(self, job: Job) -> None:
        """The job has no request any more; if it runs again, then with all its tokens as prompt.
        With tiers its state is kept, for that or for the next turn of the conversation."""
        request, job.request = job.request, None
        fetch, job.fetch = job.fetch, None
        if request is not None:
            self._give_back(request)
        if fetch is not None:
            fetch.cancel()
        if not job.is_over:
            job.prompt = self.manager.prefix.prompt(job.tokens, job.salt, hints=job.hints)

    def _give_back(self, request: Request) -> None:
        if self.manager.tiers:
            with suppress(InvalidInput, RequestError):  # in the middle of a replay, or approximate
                self.manager.tiers.suspend(request)
                return
        self.manager.release_request(request)

    def admit(self) -> None:
        """Waiting jobs get a slot and blocks, as long as one block is left for each job that runs:
        it may need one soon. One whose salt has a full quota waits for that salt alone: others pass
        it."""
        self._held_back.clear()
        while (job := self._next_waiting()) is not None:
            assert job.prompt is not None
            stats, running = self.manager.stats(), len(self.running)
            spare = stats.blocks_free + stats.blocks_evictable - running
            if not stats.slots_free or (
                running and self.manager.room.needed_blocks(job.prompt) > spare
            ):
                return
            try:
                request = job.request = self._request_for(job.prompt)
            except OutOfBlocks as error:
                if error.never:  # waiting does not help
                    job.error = error
                elif isinstance(error, OverQuota):
                    self._held_back[job] = error
                else:
                    return
                continue
            if len(job.tokens) == job.prompt_tokens:
                job.tokens_skipped = request.length

    def _request_for(self, prompt: Prompt) -> Request:
        if not self.manager.tiers:
            return self.manager.admit_request(prompt)
        return self.manager.tiers.admit(prompt, timeout_s=TIER_TIMEOUT_S)

    def _next_waiting(self) -> Job | None:
        """The next of the waiting jobs whose prompts have arrived from tiers as far as they
        will."""
        waiting = self._waiting
        if self.manager.tiers:
            waiting = [job for job in waiting[:LOOK_AHEAD] if self._has_arrived(job)]
        return (self.order or self._oldest_or_cached)(waiting)

    def _oldest_or_cached(self, waiting: Sequence[Job]) -> Job | None:
        """The oldest, or the first of a few that is mostly cached: it is cheap and ends soon."""

        def is_cheap(job: Job) -> bool:
            assert job.prompt is not None
            return 2 * self.manager.prefix.look_up(job.prompt).start > len(job.prompt)

        if len(waiting) < 2:
            return waiting[0] if waiting else None
        return max(waiting[:LOOK_AHEAD], key=is_cheap)

    def _has_arrived(self, job: Job) -> bool:
        assert job.prompt is not None
        if job.fetch is None:
            job.fetch = self.manager.tiers.fetch(job.prompt)
        return job.fetch.poll()

    def advance(self) -> bool:
        """Launches a step and takes the results that are due. Returns whether there were any."""
        later = self._launch(self.schedule())
        if not self._overlaps:
            self.flight, later = later, None
        has_run = self.flight is not None or later is not None
        if self.flight is not None:
            self._settle(self.flight)
        self.flight = later
        return has_run

    def schedule(self) -> list[Share]:
        """Which jobs run which tokens: those that decode first, the longest waiting before others,
        then chunks of the rest, the oldest first."""

        def urgency(each: tuple[Job, Request]) -> tuple[bool, int]:
            is_chunk = len(each[0].tokens) - each[1].length > 1
            return is_chunk, 0 if is_chunk else each[0].last_step

        assert self.step_tokens is not None
        left, shares = self.step_tokens, []
        for job, request in sorted(self.running, key=urgency):
            if (share := self._next_share(job, request, left)) is not None:
                shares.append(share)
                left -= share.count
        return shares

    def _next_share(self, job: Job, request: Request, left: int) -> Share | None:
        """What a job runs next, after its running share: up to `left` tokens."""
        assert self.drafts is not None
        schema, flying = self.manager.schema, self._in_flight(job)
        start, ids, missing = request.length, job.tokens[request.length :], job.missing_tokens
        if flying is not None:
            start += flying.count  # at the latest
            ids = ids[flying.known :]
            missing -= flying.samples  # at least
            if flying.count <= 1 + schema.max_draft_tokens:
                left = min(left, 1 + schema.max_draft_tokens)  # a chunk cannot follow drafts
        if job.is_over or missing <= 0 or left <= 0 or start >= schema.max_context:
            return None
        drafts = 0
        if len(ids) <= 1:
            drafts = min(self.drafts, min(missing, left, schema.max_context - start) - 1)
        samples = len(ids) <= left
        return Share(job=job, request=request, ids=ids[:left], drafts=drafts, samples=samples)

    def _launch(self, shares: list[Share]) -> Flight | None:
        """Launches a step after the running one. Nothing here waits for the device."""
        plan = self._prepare(shares)
        if plan is None:
            return None
        self.steps += 1
        ids = self._inputs(plan, shares)
        last_known, sampled, jobs, end = [], list[int](), list[Job](), 0
        for share in shares:
            share.job.last_step = self.steps
            last_known.append(end + share.known - 1)
            end += share.count
            if share.samples:
                sampled += range(last_known[-1], end)
                jobs += [share.job] * (1 + share.drafts)
        rows = torch.tensor(sampled, dtype=torch.int64, device=ids.device)
        if self.listener is None:
            logits, wanted = None, self.model.forward(plan, ids, rows)
        else:
            logits = self.model.forward(plan, ids, torch.arange(end, device=ids.device))
            wanted = logits[rows.to(logits.device)]
        chosen = torch.zeros_like(ids)
        if jobs:
            picked = torch.empty_like(rows)  # the last layer may be on another device
            chosen[rows] = picked.copy_(self._choose(wanted, jobs))
        accepted = newest = None
        if self._overlaps or any(share.drafts for share in shares):
            accepted, newest = self._right_tokens(shares, ids, chosen, last_known)
        return Flight(
            plan=plan,
            shares=shares,
            ids=ids,
            logits=logits,
            chosen=chosen,
            accepted=accepted,
            newest=newest,
        )

    def _right_tokens(
        self, shares: Sequence[Share], ids: Tensor, chosen: Tensor, last_known: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Of each share how many tokens are right: those that are known, and its drafts up to the
        first that the model would not have chosen itself; and what it chose after them."""
        assert self.drafts is not None
        lists = [share.known for share in shares], [share.drafts for share in shares], last_known
        known, drafts, last = torch.tensor(lists, dtype=torch.int64, device=ids.device)
        nth = torch.arange(1, 1 + self.drafts, device=ids.device)
        row = (last[:, None] + nth).clamp_max(len(ids) - 1)
        right = (ids[row] == chosen[row - 1]) & (nth <= drafts[:, None])
        kept = right.long().cumprod(dim=1).sum(dim=1)
        newest = chosen[last + kept].clamp(0, self.model.vocabulary - 1)  # checked in `_settle`
        return known + kept, newest

    def _prepare(self, shares: list[Share]) -> ForwardPlan | None:
        """A plan for the shares that there is memory for; the other jobs leave, and wait."""
        before, follows = self.flight, dict[str, Any]()
        if before is not None:
            follows = {"after": before.plan, "accepted": before.accepted}
        while shares:
            steps, padded = [(share.request, share.count) for share in shares], PlanOptions()
            if self.padding is not None:
                padded = self.padding([count for _, count in steps])
            try:
                return self.manager.prepare_forward(steps, **follows, **padded)
            except OutOfBlocks as error:
                if before is not None:  # its memory can only be released when it has ended
                    return None
                self.make_room(error)
                shares[:] = [share for share in shares if share.job.request is not None]
        return None

    def make_room(self, error: OutOfBlocks) -> None:
        """Takes memory from the youngest job whose memory helps. A job that is alone and has not
        enough never will."""
        running, requests = self._competing(error)
        helping = [
            each for each in running if self.manager.room.released_blocks(each[1])
        ] or running
        job = helping[-1][0]
        if len(running) == 1 and (error.never or requests == 1):
            job.error = error
        job.preemptions += 1
        self.leave(job)

    def _competing(self, error: OutOfBlocks) -> tuple[list[tuple[Job, Request]], int]:
        """The running jobs whose memory can help, and how many requests the manager has of that
        kind: of the salt whose quota is full, or all."""
        if not isinstance(error, OverQuota):
            return self.running, len(self.manager.requests)
        root = error.root
        requests = [each for each in self.manager.requests if root_of(each) == root]
        own = [each for each in self.running if root_of(each[1]) == root]
        return own or self.running, len(requests)

    def _inputs(self, plan: ForwardPlan, shares: Sequence[Share]) -> Tensor:
        """The ids of a step, on the device: only there drafts and the newest tokens are known."""
        device, parts = self.manager.device, list[Tensor]()
        if all(share.ids and not share.drafts for share in shares):
            return torch.tensor([token for share in shares for token in share.ids], device=device)
        for share in shares:
            part = torch.tensor(share.ids, dtype=torch.int64, device=device)
            if not share.ids:
                assert self.flight is not None
                assert self.flight.newest is not None
                at = [each.job for each in self.flight.shares].index(share.job)
                part = self.flight.newest[at : at + 1]
            parts.append(part)
        drafting = [nth for nth, share in enumerate(shares) if share.drafts]
        if drafting:
            newest = torch.cat([parts[nth][-1:] for nth in drafting])
            most = max(share.drafts for share in shares)
            guesses = self.model.draft(plan, newest, most).to(newest)
            for row, nth in enumerate(drafting):
                parts[nth] = torch.cat([parts[nth], guesses[row, : shares[nth].drafts]])
        return torch.cat(parts)

    def _settle(self, flight: Flight) -> None:
        """The results of a step, on the host: listeners receive them, jobs take what was chosen,
        and the cache keeps what was right. In this order, because after an interrupt in between the
        step is run again (except for a job that has all its tokens), while tokens that were
        committed first would be lost. What an interrupt keeps from being reported the next step
        reports first."""
        counts, tokens, end = [share.count for share in flight.shares], len(flight.ids), 0
        results = [flight.ids, flight.chosen]
        if flight.accepted is not None:
            results.append(flight.accepted)
        found = torch.cat(results).tolist()  # here the host waits
        ids, chosen, accepted = found[:tokens], found[tokens : 2 * tokens], found[2 * tokens :]
        accepted = accepted or [*counts]
        self._check_range(chosen)
        for nth, share in enumerate(flight.shares):
            job, first = share.job, end
            end += share.count
            if job.is_complete:  # it had ended one step earlier
                accepted[nth] = 0
                continue
            new = list[int]()
            if share.samples and job.error is None:
                new = _up_to_stop(chosen[first + share.known - 1 : first + accepted[nth]], job)
            if flight.logits is not None:
                self._listen(share, flight.logits[first:end], accepted[nth], len(new))
            job.drafts_kept += max(len(new) - 1, 0)
            job.tokens.extend(new)
        kept = None if accepted == counts else accepted
        self.manager.commit(flight.plan, accepted=kept, ids=ids)
        for share in flight.shares:
            self._report(share.job)

    def _listen(self, share: Share, logits: Tensor, accepted: int, new: int) -> None:
        """Calls the listener. Outputs of a replay are not used."""
        assert self.listener is not None
        start, reused = share.request.length, share.request.reused_tokens
        end = min(start + accepted, len(share.job.tokens) + new)
        for position in range(max(start, reused), end):
            self.listener(share.job, position, logits[position - start])

    def _report(self, job: Job) -> None:
        """Calls the job's `on_tokens` with what it was not given yet, if there is something."""
        if new := job.tokens[job.prompt_tokens + job.reported :]:
            job.reported += len(new)
            self._report_tokens(job, new)

    def _report_tokens(self, job: Job, new: list[int]) -> None:
        if job.on_tokens is None:
            return
        try:
            job.on_tokens(job, new)
        except Exception as error:
            job.error = job.error or error

    # ---- sampling

    def _choose(self, logits: Tensor, jobs: Sequence[Job]) -> Tensor:
        """What `choose` picks. A job for which it raises has that error, and the others continue.
        Raises InvalidInput for an invalid choice; then no job has an error."""
        try:
            tokens = self.choose(logits, jobs)
        except Exception as error:
            return self._choose_apart(logits, jobs, error)
        return _checked(tokens, len(jobs))

    def _choose_apart(self, logits: Tensor, jobs: Sequence[Job], error: Exception) -> Tensor:
        chosen = torch.zeros(len(jobs), dtype=torch.int64, device=logits.device)
        errors = dict.fromkeys(jobs, error)
        if len(errors) > 1:
            for job in [*errors]:
                rows = [row for row, each in enumerate(jobs) if each is job]
                try:
                    tokens = self.choose(logits[rows], [job] * len(rows))
                except Exception as its_own:
                    errors[job] = its_own
                    continue
                chosen[rows] = _checked(tokens, len(rows)).to(chosen)
                del errors[job]
        for job, error in errors.items():
            job.error = error
        return chosen

    def _check_range(self, chosen: Sequence[int]) -> None:
        """Raises InvalidInput; then no job has a new token."""
        if min(chosen) < 0 or max(chosen) >= self.model.vocabulary:
            raise InvalidInput(
                f"choose has returned tokens between {min(chosen)} and {max(chosen)}: the "
                f"vocabulary has {self.model.vocabulary}"
            )

    # ---- after an error or an interrupt

    def mend(self) -> None:
        """Cleans up after anything that happened: the manager recovers, the running steps have not
        happened, and torn requests continue from further back. Requests that an interrupt has kept
        from reaching their jobs are released."""
        manager, self.flight = self.manager, None
        manager.recover()
        while manager.room.open_plans:
            manager.fail(manager.room.open_plans[0])
        held = {job.request for job in self.jobs}
        for request in manager.requests:
            if request not in held:
                manager.release_request(request)
        for _, request in self.running:
            if request.is_torn:
                manager.rewind(request, request.length)


def _up_to_stop(chosen: list[int], job: Job) -> list[int]:
    """Of the tokens chosen, those that the job takes."""
    for nth, token in enumerate(chosen[: job.missing_tokens]):
        if token in job.stop_tokens:
            return chosen[: nth + 1]
    return chosen[: job.missing_tokens]


def _checked(chosen: Any, rows: int) -> Tensor:
    """What `choose` has returned, except for its range, which only the device knows yet."""
    is_integer = isinstance(chosen, Tensor) and not chosen.is_floating_point()
    if not is_integer or tuple(chosen.shape) != (rows,) or chosen.dtype == torch.bool:
        form = f"{chosen.dtype} {list(chosen.shape)}" if isinstance(chosen, Tensor) else chosen
        raise InvalidInput(f"choose has returned {form}: return one token per row, int64 [{rows}]")
    found: Tensor = chosen
    return found
