"""A continuous-batching engine on the cache, for a tiny V4, a few seconds on a CPU.

Prompts wait in a queue and are hashed once. Each step runs the newest tokens of all requests that
decode, with drafts behind them, and chunks of prompts beside them. Prompts that begin like others
start where they differ. When memory is short the youngest request gives its own back and waits;
what it computed stays cached as long as nobody needs the memory. Jobs may be cancelled at any time.
Errors of the device and Ctrl-C are survived: nothing that was computed wrong is ever used.

    python -m examples.engine

Read it top to bottom: a job, then the engine's step in the order in which it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsv4 import (
    CacheSchema,
    ForwardPlan,
    KVCacheManager,
    ModelSpec,
    OutOfBlocks,
    PrefixOptions,
    Prompt,
    Request,
)
from examples.decode_loop import VOCABULARY, Model

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
    prompt: Prompt | None = None  # of `tokens` as they were when it last had to wait
    request: Request | None = None  # None: it waits
    cancelled: bool = False
    error: Exception | None = None
    passed: int = 0  # how often another one was admitted before it
    tokens_skipped: int = 0
    preemptions: int = 0
    drafts_kept: int = 0

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def is_over(self) -> bool:
        return self.cancelled or self.error is not None or len(self.generated) >= self.new_tokens

    def pending(self) -> list[int]:
        """Tokens that are known and not in the cache. There is always one: its logits give the
        next."""
        assert self.request is not None
        return self.tokens[self.request.length :]

    def drafts(self, most: int) -> list[int]:
        """A cheap guess: what followed when the newest token was last seen."""
        most = min(most, self.new_tokens - len(self.generated) - 1)
        for at in range(len(self.tokens) - 2, -1, -1):
            if self.tokens[at] == self.tokens[-1]:
                return self.tokens[at + 1 : at + 1 + max(most, 0)]
        return []

    def take(self, ids: Sequence[int], chosen: Sequence[int]) -> int:
        """Adds what the model chose behind `ids`. Returns how many of `ids` are right."""
        known = len(self.pending())
        if len(ids) < known:  # a chunk from the middle of a prompt
            return len(ids)
        right = known
        while right < len(ids) and ids[right] == chosen[right - 1]:
            right += 1
        self.drafts_kept += right - known
        self.tokens = [*self.tokens, *chosen[known - 1 : right]]
        return right


# what a job's token at a position gave: (job, position, logits)
Listener = Callable[[Job, int, Tensor], None]


# ---- the engine ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Engine:
    """Runs jobs on one manager. `step` is called by one thread, `submit` and `Job.cancelled` are
    for others too.

    `jobs` are in the order of their arrival, those that wait among those that run: a job that is
    preempted keeps its place.
    """

    model: Model
    manager: KVCacheManager
    step_tokens: int  # of all requests together
    listener: Listener | None = None
    jobs: list[Job] = field(default_factory=list)
    failures: int = 0  # in a row
    is_whole: bool = True  # False inside a step, so also after one that was interrupted

    def submit(self, ids: Sequence[int], new_tokens: int, salt: str | None = None) -> Job:
        """A job for these tokens. Raises what is wrong with them at once."""
        job = Job(tokens=list(ids), new_tokens=new_tokens, salt=salt, prompt_tokens=len(ids))
        job.prompt = self.manager.prompt(job.tokens, salt)
        self.jobs.append(job)
        return job

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.request is not None]

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs if job.request is None]

    def step(self) -> bool:
        """One forward pass over what is there to run. Returns whether anything was.

        An error of the device costs a step, no job: the next step mends what is left of it. The
        same holds for a KeyboardInterrupt, which comes through.
        """
        try:
            if not self.is_whole:
                self.mend()
            self.is_whole = False
            ran = self._step()
        except RuntimeError:
            self.failures += 1
            if self.failures > RETRIES:
                raise
            return True
        self.is_whole, self.failures = True, 0
        return ran

    def run(self) -> None:
        """Until no job is left."""
        while self.step():
            pass

    def _step(self) -> bool:
        self.end_jobs()
        self.admit()
        work = self.schedule()
        plan = self.prepare(work)
        if plan is None:
            return bool(self.jobs)
        ids = [token for _, row in work for token in row]
        logits = self.model.logits(ids, self.manager, plan)
        self.settle(plan, work, logits)
        return True

    # ---- in the order of a step

    def end_jobs(self) -> None:
        """What is over, cancelled or refused gives its memory back; its prefix stays cached."""
        for job in [job for job in self.jobs if job.is_over]:
            self.leave(job)
            self.jobs.remove(job)

    def admit(self) -> None:
        """Jobs that wait get a slot and blocks, as long as there are some to spare: each that runs
        may need a block soon."""
        while (job := self.next_waiting()) is not None:
            assert job.prompt is not None
            stats, running = self.manager.stats(), len(self.running)
            spare = stats.blocks_free + stats.blocks_evictable - running
            if not stats.slots_free or (running and self.manager.needed_blocks(job.prompt) > spare):
                return
            try:
                job.request = self.manager.admit_request(job.prompt)
            except OutOfBlocks as error:
                if error.never:  # waiting does not help
                    job.error = error
                    continue
                return
            job.tokens_skipped += job.request.resume.start
            for older in self.jobs[: self.jobs.index(job)]:
                older.passed += older.request is None

    def next_waiting(self) -> Job | None:
        """The oldest, or one of the next few that is mostly cached: it is cheap and soon gone."""
        waiting = [job for job in self.waiting if not job.is_over]
        if not waiting or waiting[0].passed >= LOOK_AHEAD:
            return waiting[0] if waiting else None
        for job in waiting[:LOOK_AHEAD]:
            assert job.prompt is not None
            if 2 * self.manager.look_up(job.prompt).start > len(job.prompt):
                return job
        return waiting[0]

    def schedule(self) -> list[tuple[Job, list[int]]]:
        """Who runs which tokens: those that decode first, with drafts, then chunks of the rest."""
        left, work = self.step_tokens, []
        for job in sorted(self.running, key=lambda job: len(job.pending()) > 1):
            ids = job.pending()[:left]
            if len(ids) == 1 == len(job.pending()):
                ids += job.drafts(min(left - 1, self.manager.schema.max_draft_tokens))
            if ids:
                work.append((job, ids))
                left -= len(ids)
        return work

    def prepare(self, work: list[tuple[Job, list[int]]]) -> ForwardPlan | None:
        """A plan for the work that there is memory for; the rest leaves `work` and waits."""
        while work:
            steps = [(job.request, len(ids)) for job, ids in work if job.request is not None]
            try:
                return self.manager.prepare_forward(steps)
            except OutOfBlocks as error:
                self.preempt(error)
                work[:] = [each for each in work if each[0].request is not None]
        return None

    def preempt(self, error: OutOfBlocks) -> None:
        """The youngest request whose memory helps gives it back. A job that is alone and has not
        enough will never have."""
        running = self.running
        helpful = [
            job
            for job in running
            if job.request is not None and self.manager.released_blocks(job.request)
        ]
        job = (helpful or running)[-1]
        if len(running) == 1:
            job.error = error
        job.preemptions += 1
        self.leave(job)

    def leave(self, job: Job) -> None:
        """The job has no request any more; should it come back, with all its tokens as prompt."""
        request, job.request = job.request, None
        if request is not None:
            self.manager.release_request(request)
        if not job.is_over:
            job.prompt = self.manager.prompt(job.tokens, job.salt)

    def settle(
        self, plan: ForwardPlan, work: Sequence[tuple[Job, list[int]]], logits: Tensor
    ) -> None:
        """Jobs take what was chosen, and the cache keeps what was right. In this order: a token
        that is known but not committed is run again, one that is committed but not known is lost.
        """
        rows = logits.split([len(ids) for _, ids in work])
        accepted = []
        for (job, ids), row in zip(work, rows, strict=True):
            assert job.request is not None
            first, reused = job.request.length, job.request.reused_tokens
            accepted.append(job.take(ids, row.argmax(dim=-1).tolist()))
            if self.listener is not None:
                for nth in range(max(0, reused - first), accepted[-1]):  # not of a replay
                    self.listener(job, first + nth, row[nth])
        ids = [token for _, row in work for token in row]
        self.manager.commit(plan, accepted, ids=ids)

    # ---- after an error or an interrupt

    def mend(self) -> None:
        """Whatever happened wherever: the books are put in order, the step has not happened, and
        requests that it has torn go on from further back. What an interrupt has kept from reaching
        its job is released."""
        manager = self.manager
        manager.recover()
        while manager.open_plan is not None:
            manager.fail(manager.open_plan)
        held = {job.request for job in self.jobs}
        for request in manager.requests:
            if request not in held:
                manager.release_request(request)
        for job in self.running:
            assert job.request is not None
            if job.request.is_torn:
                manager.rewind(job.request, job.request.length)


# ---- a day of it ---------------------------------------------------------------------------------


def build(
    *, num_blocks: int, max_requests: int, draft_tokens: int, step_tokens: int, spec: ModelSpec
) -> Engine:
    schema = CacheSchema.build(spec, max_draft_tokens=draft_tokens, max_context=1024)
    manager = KVCacheManager(
        schema,
        num_blocks=num_blocks,
        max_requests=max_requests,
        max_step_tokens=step_tokens,
        prefix=PrefixOptions(snapshots=8),
    )
    return Engine(model=Model(schema), manager=manager, step_tokens=step_tokens)


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
    engine = build(
        num_blocks=7,
        max_requests=4,
        draft_tokens=3,
        step_tokens=160,
        spec=ModelSpec.preset("tiny"),
    )
    generator = torch.Generator().manual_seed(2)

    def text(count: int) -> list[int]:
        return torch.randint(VOCABULARY, (count,), generator=generator).tolist()

    shared = text(260)  # a system prompt
    jobs = [engine.submit(ids, 24) for ids in (text(200), [*shared, *text(9)], text(3))]
    for _ in range(6):
        engine.step()
    jobs += [engine.submit([*shared, *text(n)], 16) for n in (30, 4)]
    unwanted = engine.submit(text(250), 500)
    for _ in range(6):
        engine.step()
    unwanted.cancelled = True
    engine.run()
    for job in jobs:
        print(
            f"prompt of {job.prompt_tokens} tokens: {len(job.generated)} generated, "
            f"{job.drafts_kept} of them from drafts, {job.tokens_skipped} not run for they were "
            f"cached, preempted {job.preemptions} times"
        )
    stats = engine.manager.stats()
    print(f"{stats.blocks_free} blocks free + {stats.blocks_cached} cached = {stats.blocks_total}")


if __name__ == "__main__":
    main()
