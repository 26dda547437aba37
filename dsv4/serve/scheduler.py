"""Who is served when: the engine's steps, with priorities, and sessions that take turns.

waiting     by priority; of the same priority, the session that has been served least; then the
            oldest. A job that others have passed `PASSES` times rises by one priority, so none
            waits for ever
running     decodes first, as always; chunks of prompts in the order above
no memory   the lowest priority gives its memory back, of these the youngest. With tiers it is
            suspended, and continues from its state
no room     a job that waits takes the place of a running one of lower priority
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dsv4.cache.prefix.explain import Explainer
from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.requests import Request
from dsv4.engine import LOOK_AHEAD, Engine, Job, Share
from dsv4.errors import OutOfBlocks, OverQuota
from dsv4.serve.generation import Generation
from dsv4.serve.handovers import Handovers
from dsv4.tiers.host import HostTier
from dsv4.tiers.tier import Tier

PASSES = 8


@dataclass(slots=True, eq=False, kw_only=True)
class Scheduler(Engine):
    """An engine whose jobs have a `Generation` as `data`. `served` counts the tokens that ran for
    each session with a job; `pins` are what callers asked to keep. With an `explainer` a job's data
    says why no more of its prompt was cached."""

    served: dict[str, int] = field(default_factory=dict, init=False)
    pins: list[PinnedPrefix] = field(default_factory=list, init=False)
    tiers: Sequence[Tier] = ()  # of the manager
    explainer: Explainer | None = None
    handovers: Handovers | None = None  # of a manager with a hand-off
    newest: int = field(default=0, init=False)  # number of the job that came last

    def arrive(self, job: Job) -> None:
        """A session that was idle has not saved anything up: it begins where the least served of
        the others is."""
        session = job.data.terms.session
        if session not in self.served:
            self.served[session] = min(self.served.values(), default=0)
        self.newest += 1
        job.data.number = self.newest

    def end_jobs(self) -> bool:
        has_ended = super(Scheduler, self).end_jobs()
        if has_ended:
            left = {job.data.terms.session for job in self.jobs}
            self.served = {name: count for name, count in self.served.items() if name in left}
        return has_ended

    def rank(self, job: Job) -> tuple[int, int, int]:
        """Lower is sooner."""
        data: Generation = job.data
        return -data.rank(PASSES), self.served.get(data.terms.session, 0), data.number

    @property
    def running(self) -> list[tuple[Job, Request]]:
        """In the order in which chunks of prompts run."""
        found = [(job, job.request) for job in self.jobs if job.request is not None]
        return sorted(found, key=lambda each: self.rank(each[0]))

    def _next_waiting(self) -> Job | None:
        waiting = sorted(self._waiting, key=self.rank)
        if self.handovers is not None:
            waiting = [job for job in waiting if not self.handovers.expects(job)]
        if self.manager.tiers:
            waiting = [job for job in waiting[:LOOK_AHEAD] if self._has_arrived(job)]
        return waiting[0] if waiting else None

    def schedule(self) -> list[Share]:
        shares = super(Scheduler, self).schedule()
        for share in shares:
            session = share.job.data.terms.session
            self.served[session] = self.served.get(session, 0) + share.count
        return shares

    def admit(self) -> None:
        before = {job for job, _ in self.running}
        if self.handovers is not None:
            self.handovers.land(sorted(self.jobs, key=self.rank), len(before))
        super(Scheduler, self).admit()
        admitted = [job for job, _ in self.running if job not in before]
        for job in admitted:
            self._note_sources(job)
            for each in self.jobs:
                if each.request is None and each.data.number < job.data.number:
                    each.data.passed += 1
        if self.flight is None and not admitted:
            for waiting in (self._next_waiting(), *self._held_back):
                if waiting is not None:
                    self.displace(waiting)

    def _note_sources(self, job: Job) -> None:
        """Which of a prompt's cached tokens tiers had. A state counts where its last block came
        from."""
        fetch, data = job.fetch, job.data
        if fetch is None or len(job.tokens) > job.prompt_tokens:
            return
        size = self.manager.schema.block_tokens
        left = job.tokens_skipped - fetch.cached_blocks * size
        hosts = [tier.name for tier in self.tiers if isinstance(tier, HostTier)]
        for nth, name in enumerate(fetch.sources):
            tokens = min(left, size) if nth + 1 < len(fetch.sources) else left
            if tokens <= 0:
                return
            if name in hosts:
                data.host_tokens += tokens
            else:
                data.storage_tokens += tokens
            left -= tokens

    def displace(self, waiting: Job) -> None:
        """One running job of lower priority gives its memory back: of the same salt, if its quota
        is what is full."""
        error = self._held_back.get(waiting)
        running = self.running if error is None else self._competing(error)[0]
        lower = [
            job
            for job, _ in running
            if job.data.rank(PASSES) < waiting.data.rank(PASSES) and not job.is_over
        ]
        if lower:
            self.preempt(self.victim(lower))

    def make_room(self, error: OutOfBlocks) -> None:
        if error.pinned and self.unpin_for(error):
            return
        running, requests = self._competing(error)
        helping = [job for job, request in running if self.manager.room.released_blocks(request)]
        job = self.victim(helping or [job for job, _ in running])
        if len(running) == 1 and (error.never or requests == 1):
            job.error = error
        self.preempt(job)

    def victim(self, jobs: Sequence[Job]) -> Job:
        return max(jobs, key=lambda job: (-job.data.rank(PASSES), job.data.number))

    def leave(self, job: Job) -> None:
        if self.handovers is not None:
            self.handovers.leave(job)
        super(Scheduler, self).leave(job)

    def preempt(self, job: Job) -> None:
        job.preemptions += 1
        self.leave(job)

    def unpin_for(self, error: OutOfBlocks) -> bool:
        """What callers asked to keep gives way to what runs: of the salt whose quota is full, or
        all. Returns whether there was any."""
        root = error.root if isinstance(error, OverQuota) else None
        found = [pin for pin in self.pins if root is None or pin.nodes[0].root == root]
        for pin in found:
            self.manager.prefix.unpin(pin)
            self.pins.remove(pin)
        return bool(found)

    def _request_for(self, prompt: Prompt) -> Request:
        if self.explainer is not None:
            self._explain(self.explainer, prompt)
        try:
            return super(Scheduler, self)._request_for(prompt)
        except OutOfBlocks as error:
            if not (error.pinned and self.unpin_for(error)):
                raise
        return super(Scheduler, self)._request_for(prompt)

    def _explain(self, explainer: Explainer, prompt: Prompt) -> None:
        """Before the prompt is admitted: afterwards it is cached itself."""
        job = next(each for each in self.jobs if each.prompt is prompt)
        if len(job.tokens) == job.prompt_tokens:
            job.data.explanation = explainer.explain(prompt)
