"""A continuous-batching engine on the cache, for a tiny V4, a few seconds on a CPU.

Prompts wait in a queue and are hashed once. A step runs the newest tokens of all requests that
decode, with drafts behind them, and chunks of prompts beside them. It is planned and launched while
the one before it runs: which drafts were right is known on the device, the host learns it later.
Prompts that begin alike share their beginning. When memory is short the youngest request gives its
own back and waits; what it computed stays cached as long as nobody needs the memory. Jobs may be
cancelled at any time. Errors of the device and Ctrl-C are survived, and nothing that was computed
wrong is ever used.

    python -m examples.engine

Read it top to bottom: a job, a step under way, then what a step does, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

import dsv4
from dsv4.testing import VOCABULARY, RandomModel

LOOK_AHEAD = 4  # jobs that may be admitted before the oldest, if most of their prompt is cached
RETRIES = 3  # steps in a row that may fail before the engine gives up


# ---- a job ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """A prompt, and what is generated behind it.

    [0, request.length)      in the cache
    [request.length, end)    known, to be run: the rest of a prompt, or the newest token

    Only `tokens` and `request` change while it lives, each in one assignment, so an interrupt
    between any two lines leaves a job that can go on.
    """

    tokens: list[int]
    new_tokens: int
    salt: str | None = None
    prompt_tokens: int = 0
    prompt: dsv4.Prompt | None = None  # of `tokens` as they were when it last had to wait
    request: dsv4.Request | None = None  # None: it waits
    cancelled: bool = False
    error: Exception | None = None
    tokens_skipped: int = 0
    preemptions: int = 0
    drafts_kept: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def missing_tokens(self) -> int:
        return self.new_tokens - len(self.generated)

    @property
    def is_over(self) -> bool:
        return self.cancelled or self.error is not None or self.missing_tokens <= 0

    def pending(self) -> list[int]:
        """Tokens that are known and not in the cache; one at least, whose logits give the next."""
        return self.tokens[self.request.length :]


# what a job's token at a position gave: (job, position, logits)
Listener = Callable[[Job, int, Tensor], None]


# ---- a step under way ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Share:
    """A job's part of a step: tokens whose `ids` the host knows or, if it knows none, the one that
    the step before chooses; then drafts. `samples` if the model is to choose what comes next."""

    job: Job
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
    """A step that was launched. Its tensors are on the device, and may not be computed yet.

    `ids` and `chosen` [tokens] are what ran and what the model chose behind each; of each share
    `accepted` says how many of its tokens are right and `newest` what was chosen behind them.
    """

    plan: dsv4.ForwardPlan
    shares: list[Share]
    ids: Tensor
    logits: Tensor
    chosen: Tensor
    accepted: Tensor
    newest: Tensor


# ---- the engine ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Engine:
    """Runs jobs on one manager. `step` is called by one thread, `submit` and `Job.cancelled` are
    for others too. `jobs` are in the order of their arrival, whether they wait or run: one that is
    preempted keeps its place."""

    model: RandomModel
    manager: dsv4.KVCacheManager
    step_tokens: int  # of all requests together
    listener: Listener | None = None
    jobs: list[Job] = field(default_factory=list)
    flight: Flight | None = None
    # a cheap drafter, on the device: what was chosen behind each token when it was last seen
    follows: Tensor = field(default_factory=lambda: torch.zeros(VOCABULARY, dtype=torch.int64))
    failures: int = 0  # in a row
    is_whole: bool = True  # False inside a step, so also after one that was interrupted

    def submit(self, ids: Sequence[int], new_tokens: int, salt: str | None = None) -> Job:
        """A job for these tokens. Raises what is wrong with them at once."""
        asked, longest = len(ids) + new_tokens, self.manager.schema.max_context
        if asked > longest:
            raise dsv4.ContextOverflow(asked_tokens=asked, max_context_tokens=longest)
        job = Job(tokens=list(ids), new_tokens=new_tokens, salt=salt, prompt_tokens=len(ids))
        job.prompt = self.manager.prompt(job.tokens, salt)
        self.jobs.append(job)
        return job

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.request is not None]

    def in_flight(self, job: Job) -> Share | None:
        shares = [] if self.flight is None else self.flight.shares
        return next((share for share in shares if share.job is job), None)

    def step(self) -> bool:
        """Launches a step, then takes the results of the one before. Returns whether a job is left.
        An error of the device, or a KeyboardInterrupt, which comes through, costs the steps under
        way and no job: the next call mends what is left of them."""
        try:
            if not self.is_whole:
                self.mend()
            self.is_whole = False
            self.end_jobs()
            self.admit()
            later = self.launch(self.schedule())
            if self.flight is not None:
                self.settle(self.flight)
            self.flight = later
        except RuntimeError:
            self.failures += 1
            if self.failures > RETRIES:
                raise
            return True
        self.is_whole, self.failures = True, 0
        return bool(self.jobs)

    # ---- in the order of a step

    def end_jobs(self) -> None:
        """What is over, cancelled or refused gives its memory back, once no step under way has it.
        Its prefix stays cached."""
        for job in [job for job in self.jobs if job.is_over and not self.in_flight(job)]:
            self.leave(job)
            self.jobs.remove(job)

    def leave(self, job: Job) -> None:
        """The job has no request any more; should it come back, with all its tokens as prompt."""
        request, job.request = job.request, None
        if request is not None:
            self.manager.release_request(request)
        if not job.is_over:
            job.prompt = self.manager.prompt(job.tokens, job.salt)

    def admit(self) -> None:
        """Jobs that wait get a slot and blocks, as long as there are some to spare: each that runs
        may need a block soon."""
        while (job := self.next_waiting()) is not None:
            stats, running = self.manager.stats(), len(self.running)
            spare = stats.blocks_free + stats.blocks_evictable - running
            if not stats.slots_free or (running and self.manager.needed_blocks(job.prompt) > spare):
                return
            try:
                job.request = self.manager.admit_request(job.prompt)
            except dsv4.OutOfBlocks as error:
                if error.never:  # waiting does not help
                    job.error = error
                    continue
                return
            job.tokens_skipped += job.request.resume.start

    def next_waiting(self) -> Job | None:
        """The oldest, or the first of a few that is mostly cached: it is cheap and soon gone."""

        def is_cheap(job: Job) -> bool:
            return 2 * self.manager.look_up(job.prompt).start > len(job.prompt)

        waiting = [job for job in self.jobs if job.request is None and not job.is_over]
        return max(waiting[:LOOK_AHEAD], key=is_cheap, default=None)

    def schedule(self) -> list[Share]:
        """Who runs which tokens: those that decode first, with drafts, then chunks of the rest."""
        left, shares = self.step_tokens, []
        for job in sorted(self.running, key=lambda job: len(job.pending()) > 1):
            if (share := self.next_share(job, left)) is not None:
                shares.append(share)
                left -= share.count
        return shares

    def next_share(self, job: Job, left: int) -> Share | None:
        """What a job runs next, behind what it has under way: up to `left` tokens."""
        schema, flying = self.manager.schema, self.in_flight(job)
        start, ids, missing = job.request.length, job.pending(), job.missing_tokens
        if flying is not None:
            start += flying.count  # at the latest
            ids = ids[flying.known :]
            missing -= flying.samples  # at least
            if flying.count <= 1 + schema.max_draft_tokens:
                left = min(left, 1 + schema.max_draft_tokens)  # a chunk is not behind drafts
        if job.is_over or missing <= 0 or left <= 0 or start >= schema.max_context:
            return None
        drafts = 0
        if len(ids) <= 1:
            room = min(missing, left, schema.max_context - start)
            drafts = min(schema.max_draft_tokens, room - 1)
        return Share(job=job, ids=ids[:left], drafts=drafts, samples=len(ids) <= left)

    def launch(self, shares: list[Share]) -> Flight | None:
        """A step behind the one under way. Nothing here waits for the device."""
        plan = self.prepare(shares)
        if plan is None:
            return None
        ids = self.inputs(shares)
        logits = self.model.logits(ids, self.manager, plan)
        chosen = logits.argmax(dim=-1)
        # of each share the drafts that the model would have chosen itself, up to the first wrong
        known = torch.tensor([share.known for share in shares])
        drafts = torch.tensor([share.drafts for share in shares])
        last_known = plan.batch.last_rows - drafts
        nth = torch.arange(1, 1 + self.manager.schema.max_draft_tokens)
        row = (last_known[:, None] + nth).clamp_max(len(ids) - 1)
        right = (ids[row] == chosen[row - 1]) & (nth <= drafts[:, None])
        kept = right.long().cumprod(dim=1).sum(dim=1)
        self.follows[ids] = chosen
        return Flight(
            plan=plan,
            shares=shares,
            ids=ids,
            logits=logits,
            chosen=chosen,
            accepted=known + kept,
            newest=chosen[last_known + kept],
        )

    def prepare(self, shares: list[Share]) -> dsv4.ForwardPlan | None:
        """A plan for the shares that there is memory for; the others leave, and their jobs wait."""
        before = self.flight
        while shares:
            steps = [(share.job.request, share.count) for share in shares]
            options = {"after": before.plan, "accepted": before.accepted} if before else {}
            try:
                return self.manager.prepare_forward(steps, **options)
            except dsv4.OutOfBlocks as error:
                if before is not None:  # what it has can only be given back when it is over
                    return None
                self.preempt(error)
                shares[:] = [share for share in shares if share.job.request is not None]
        return None

    def preempt(self, error: dsv4.OutOfBlocks) -> None:
        """The youngest request whose memory helps gives it back. A job that is alone and has not
        enough will never have."""
        running = self.running
        job = ([j for j in running if self.manager.released_blocks(j.request)] or running)[-1]
        if len(running) == 1:
            job.error = error
        job.preemptions += 1
        self.leave(job)

    def inputs(self, shares: Sequence[Share]) -> Tensor:
        """The step's ids, on the device: drafts, and what was chosen last, are known only there."""
        rows = []
        for share in shares:
            row = torch.tensor(share.ids, dtype=torch.int64)
            if not share.ids:
                at = [each.job for each in self.flight.shares].index(share.job)
                row = self.flight.newest[at : at + 1]
            for _ in range(share.drafts):
                row = torch.cat([row, self.follows[row[-1:]]])
            rows.append(row)
        return torch.cat(rows)

    def settle(self, flight: Flight) -> None:
        """The results of a step, on the host: listeners hear them, jobs take what was chosen, and
        the cache keeps what was right. In this order: what is interrupted in between is run again,
        but for a job that has all its tokens, and what is committed and not known would be lost."""
        ids, chosen = flight.ids.tolist(), flight.chosen.tolist()  # here the host waits
        accepted, at = flight.accepted.tolist(), 0
        for nth, share in enumerate(flight.shares):
            job, first, count = share.job, at, accepted[nth]
            at += share.count
            if job.missing_tokens <= 0:  # it was over one step earlier
                accepted[nth] = 0
                continue
            new = []
            if share.samples:
                new = chosen[first + share.known - 1 : first + count][: job.missing_tokens]
            if self.listener is not None:
                start, reused = job.request.length, job.request.reused_tokens
                end = min(start + count, len(job.tokens) + len(new))
                for position in range(max(start, reused), end):  # outputs of a replay are not used
                    self.listener(job, position, flight.logits[first + position - start])
            job.drafts_kept += max(len(new) - 1, 0)
            job.tokens = [*job.tokens, *new]
        self.manager.commit(flight.plan, accepted, ids=ids)

    # ---- after an error or an interrupt

    def mend(self) -> None:
        """Whatever happened wherever: the books are put in order, the steps under way have not
        happened, and requests that they have torn go on from further back. What an interrupt has
        kept from reaching its job is released."""
        manager, self.flight = self.manager, None
        manager.recover()
        while manager.open_plan is not None:
            manager.fail(manager.open_plan)
        held = {job.request for job in self.jobs}
        for request in manager.requests:
            if request not in held:
                manager.release_request(request)
        for job in self.running:
            if job.request.is_torn:
                manager.rewind(job.request, job.request.length)


# ---- a day of it ---------------------------------------------------------------------------------


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    schema = dsv4.CacheSchema.build(
        dsv4.ModelSpec.preset("tiny"), max_context=1024, max_draft_tokens=3, steps_ahead=1
    )
    manager = dsv4.KVCacheManager(
        schema,
        num_blocks=6,
        max_requests=4,
        max_step_tokens=160,
        max_open_plans=2,
        prefix=dsv4.PrefixOptions(snapshots=8),
    )
    engine = Engine(model=RandomModel(schema), manager=manager, step_tokens=160)
    generator = torch.Generator().manual_seed(2)

    def text(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    shared = text(260)  # a system prompt
    jobs = [engine.submit(ids, 24) for ids in (text(240), [*shared, *text(120)], text(3))]
    for _ in range(6):
        engine.step()
    jobs += [engine.submit([*shared, *text(n)], 16) for n in (30, 4)]
    unwanted = engine.submit(text(250), 500)
    for _ in range(6):
        engine.step()
    unwanted.cancelled = True
    while engine.step():
        pass
    for job in jobs:
        print(
            f"prompt of {job.prompt_tokens} tokens: {len(job.generated)} generated, "
            f"{job.drafts_kept} of them from drafts, {job.tokens_skipped} not run for they were "
            f"cached, preempted {job.preemptions} times"
        )
    stats = manager.stats()
    print(f"{stats.blocks_free} blocks free + {stats.blocks_cached} cached = {stats.blocks_total}")


if __name__ == "__main__":
    main()
