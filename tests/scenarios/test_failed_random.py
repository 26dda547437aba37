"""Random lives in which layers raise at any line of an append or are left out, with and without
prefix cache, chunks, drafts and plans prepared after open ones, two deep too: whoever asks for the
same tokens afterwards finds the bytes of a clean run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest

from dsv4.cache.batch import Batch
from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, zero
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.errors import PlanError
from tests.oracles.bookkeeping import nothing_changes
from tests.support.faults import Interrupts
from tests.support.lives import TINY, ColdRun, Text, run_to, tiny_stack

DRAFTS, TOKENS, PROMPT = 3, 640, 300
WRITING = ("/dsv4/reference/", "/dsv4/cache/prefix/snapshots.py", "/dsv4/cache/handle.py")
BACKBONE = [spec.layer for spec in TINY.layers if not spec.draft]


@dataclass(eq=False)
class Job:
    request: Request
    text: Text


class Life:
    def __init__(self, seed: int, policy: SnapshotPolicy | None, *, ahead: int) -> None:
        self.rng, self.ahead = Random(seed), ahead
        self.stack = tiny_stack(
            drafts=DRAFTS,
            ahead=ahead,
            num_blocks=24,
            max_requests=4,
            max_open_plans=1 + ahead,
            prefix=None if policy is None else PrefixOptions(policy=policy, snapshots=9),
        )
        self.manager = self.stack.manager
        one, two, three = (Text.random(self.stack, nth, TOKENS) for nth in range(3))
        self.texts = [one, one.then(two, 150), two, two.then(three, 260)]
        self.jobs: list[Job] = []
        self.seen: Counter[str] = Counter()

    # ---- a step

    def step(self) -> None:
        rng = self.rng
        while len(self.jobs) < 3 and (not self.jobs or rng.random() < 0.5):
            text = rng.choice(self.texts)
            self.jobs.append(Job(self.manager.admit_request(text.ids[:PROMPT]), text))
        jobs = rng.sample(self.jobs, rng.randint(1, len(self.jobs)))
        plans = [self.prepare(jobs, None)]
        while len(plans) <= self.ahead and rng.random() < 0.6:
            plans.append(self.prepare(jobs, plans[-1]))
        faulty = rng.choice((None, *plans))
        states = {}
        for plan in plans:
            states[id(plan)] = self.run(plan, jobs, faulty is plan)
            if states[id(plan)] == "raised" and rng.random() < 0.5:
                break  # what is behind it has not run
        for plan in plans:
            if not self.end(plan, jobs, states.get(id(plan), "missing"), plan is plans[-1]):
                break
        assert not self.manager.room.open_plans
        self.manager.check_invariants()
        for job in jobs:
            self.look_after(job)

    def prepare(self, jobs: list[Job], behind: ForwardPlan | None) -> ForwardPlan:
        counts = sorted(self.rng.choice((1, 4, 4, 40, 150)) for _ in jobs)
        if behind is not None:  # rows keep their order
            counts = [self.rng.choice((1, 4, 40)) for _ in jobs]
        apart = behind is None and self.rng.random() < 0.3
        steps = [(job.request, count) for job, count in zip(jobs, counts, strict=True)]
        return self.manager.prepare_forward(steps, after=behind, chunks_apart=apart)

    def run(self, plan: ForwardPlan, jobs: list[Job], is_faulty: bool) -> str:
        """All layers of all parts, or up to one that raises, or without some."""
        rng, first = self.rng, 0
        parts = [part for part in plan.batches if part.num_tokens]
        left_out = is_faulty and rng.random() < 0.4
        faults = {
            (rng.randrange(len(parts)), layer) for layer in rng.sample(BACKBONE, 1 + left_out)
        }
        for nth, part in enumerate(parts):
            streams = [job.text.stream for job in jobs[first : first + len(part.requests)]]
            first += len(part.requests)
            for layer in self.stack.layers:
                if not is_faulty or (nth, layer) not in faults:
                    self.stack.write(part, streams, layers=[layer])
                elif not left_out and not self.try_to_write(part, streams, layer):
                    return "raised"
        return "whole" if plan.is_stored else "missing"

    def try_to_write(self, part: Batch, streams: list, layer: int) -> bool:
        """Whether a layer has appended in the end: of a decode batch it may be tried again."""
        kv, projections = self.stack.inputs(part, streams, layer)
        handle, weights = self.manager.acquire(layer, part), self.stack.weights[layer]
        try:
            with Interrupts(self.rng.randrange(160), files=WRITING).injected():
                handle.append(kv, *projections, weights=weights)
        except KeyboardInterrupt:
            self.seen["raised"] += 1
        else:
            return True
        if part.written.unfinished and not part.is_decode:
            for again in (layer, 0, 3):
                with pytest.raises(PlanError, match=r"not repeatable: call fail\(plan\)"):
                    self.stack.write(part, streams, layers=[again])
        elif self.rng.random() < 0.5:
            handle.append(kv, *projections, weights=weights)
            self.seen["tried again"] += 1
            return True
        return False

    def end(self, plan: ForwardPlan, jobs: list[Job], state: str, is_last: bool) -> bool:
        """Whether the step has happened."""
        rng, spans = self.rng, zip(jobs, plan.starts.tolist(), plan.counts.tolist(), strict=True)
        ids = [token for job, a, n in spans for token in job.text.ids[a : a + n].tolist()]
        if state == "whole":
            kept = None
            if is_last and rng.random() < 0.5:
                kept = [n - rng.randint(0, min(n, 1 + DRAFTS)) for n in plan.counts.tolist()]
            self.manager.commit(plan, kept, ids=ids)
            return True
        began = any(part.written.unfinished for part in plan.batches)
        for partial in (False, True)[: 1 + began]:
            with (
                nothing_changes(self.manager),
                pytest.raises(PlanError, match=r"raised.*fail\(plan\)|lacks the append of layer"),
            ):
                self.manager.commit(plan, ids=ids, partial=partial)
        if began or rng.random() < 0.6:
            self.manager.fail(plan)
            self.seen["failed"] += 1
            return False
        starts = plan.starts.tolist()
        self.manager.commit(plan, ids=ids, partial=True)
        self.seen["partial"] += 1
        for request, start in zip(plan.requests, starts, strict=True):
            assert request.incomplete_from is not None
            assert request.incomplete_from <= start
        return True

    # ---- after it

    def look_after(self, job: Job) -> None:
        rng, request = self.rng, job.request
        if request.incomplete_from is not None or request.is_torn:
            if not request.is_torn and rng.random() < 0.3:
                (fork,) = self.manager.fork(request, 1)
                assert fork.incomplete_from == request.incomplete_from
                self.manager.release_request(fork)
            sound = request.length if request.incomplete_from is None else request.incomplete_from
            self.rewind(job, rng.randint(max(0, sound - 20), min(sound, request.length)))
            self.seen["mended"] += 1
        elif rng.random() < 0.15:
            self.rewind(job, rng.randint(0, request.length))
        if rng.random() < 0.3:
            self.check(job)
        if rng.random() < 0.1 or request.length > TOKENS - 400:
            self.manager.release_request(request)
            self.jobs.remove(job)

    def rewind(self, job: Job, length: int) -> None:
        """Back, and at times on with other tokens."""
        self.manager.rewind(job.request, length)
        assert job.request.incomplete_from is None
        assert not job.request.is_torn
        if self.rng.random() < 0.5:
            job.text = job.text.then(self.rng.choice(self.texts), length)

    def check(self, job: Job) -> None:
        """In the middle of a replay rings are still wrong."""
        if job.request.length >= max(job.request.reused_tokens, job.request.rings_exact_from):
            self.assert_cold(job.request, job.text)

    def assert_cold(self, request: Request, text: Text) -> None:
        """Snapshots leave out the draft layer."""
        cold = ColdRun(self.stack, text.stream, request.length)
        cold.assert_same(self.stack, request, with_drafts=not self.manager.prefix)

    def finish(self) -> None:
        """Every prompt once more, from whatever is cached of it."""
        for job in self.jobs:
            self.check(job)
            self.manager.release_request(job.request)
        for text in self.texts:
            request = self.manager.admit_request(text.ids[:PROMPT])
            self.seen["reused"] += request.resume.reused_tokens > 0
            run_to(self.stack, request, text, PROMPT + 5)
            self.assert_cold(request, text)
            self.manager.release_request(request)
        self.manager.check_invariants()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("policy", [None, full(), zero()], ids=["no cache", "full", "zero"])
@pytest.mark.parametrize(
    ("seed", "steps"),
    [
        (0, 60),
        *(pytest.param(seed, 1000, marks=pytest.mark.nightly) for seed in range(1, 6)),
    ],
)
def test_what_is_found_after_steps_that_failed_is_what_a_clean_run_has(
    seed: int, steps: int, policy: SnapshotPolicy | None, ahead: int
):
    life = Life(seed, policy, ahead=ahead)
    for _ in range(steps):
        life.step()
    life.finish()
    assert all(life.seen[what] for what in ("raised", "tried again", "failed", "partial", "mended"))
    assert (life.seen["reused"] > 0) is (policy is not None)
