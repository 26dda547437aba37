"""Random lives with everything at once: drafts, chunks, plans prepared two deep after an open one,
forks, rewinds, evictions, suspended requests, steps that fail and Ctrl-C at any line. Every logit
is, bit for bit, that of a run of the same tokens that nobody disturbed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from random import Random

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full, periodic, zero
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import OutOfBlocks, OutOfSlots
from dsv4.model import ModelSpec, v4_layers
from dsv4.testing import VOCABULARY, RandomModel
from dsv4.tiers.host import HostTier
from tests.support.faults import Interrupts
from tests.support.numbers import SHIFT, Numbers
from tests.support.tiered import TIMEOUT_S

# every kind of layer, with windows, groups and blocks so short that a life sees each border often
TOY = replace(
    ModelSpec.preset("tiny"),
    name="toy",
    hidden=32,
    heads=2,
    index_heads=2,
    index_topk=6,
    window=8,
    layers=v4_layers([0, 4, 16, 4, 0], backbone=4),
)
DRAFTS, DEPTH, TOKENS = 3, 2, 200
DRAFT_LAYER = 4


@dataclass(eq=False)
class Job:
    request: Request
    ids: list[int]
    told: int  # ids up to here are known to the manager; drafts of other tokens come after them


@dataclass(eq=False)
class Open:
    """A plan that is open, the tokens that it runs, and how many of each request will be kept."""

    plan: ForwardPlan
    ids: list[int]
    kept: list[int]


class Life:
    def __init__(self, seed: int) -> None:
        self.draw = draw = Random(1000 * SHIFT + seed)
        self.numbers = Numbers(seed)
        self.schema = CacheSchema.build(
            TOY,
            block_tokens=16,
            max_context=256,
            max_draft_tokens=DRAFTS,
            steps_ahead=DEPTH,
            hca_state=("raw", "online")[seed % 2],
            entry_format="bf16",
            index_format="bf16",
        )
        policy = (full(), zero(), periodic(32))[seed % 3]
        self.tiers = [HostTier(1 << 20)] if seed % 4 < 2 else []
        self.manager = KVCacheManager(
            self.schema,
            num_blocks=draw.choice((22, 30, 40)),
            max_requests=5,
            max_step_tokens=128,
            max_open_plans=1 + DEPTH,
            prefix=PrefixOptions(policy=policy, snapshots=draw.choice((2, 9)), model_id="toy"),
            tiers=self.tiers,
        )
        for arena in (self.manager.memory.block_arena, self.manager.memory.slot_arena):
            arena.bytes.fill_(0xFF)
        self.model = RandomModel(self.schema)
        first = self.text(TOKENS)
        cuts = (0, 16, 70, 121)
        self.texts = [first, *(first[:cut] + self.text(TOKENS - cut) for cut in cuts)]
        self.logits = [self.undisturbed(ids) for ids in self.texts]
        self.jobs: list[Job] = []
        self.away: list[list[int]] = []
        self.seen: Counter[str] = Counter()

    def text(self, tokens: int) -> list[int]:
        return [self.draw.randrange(VOCABULARY) for _ in range(tokens)]

    def undisturbed(self, ids: list[int]) -> Tensor:
        alone = KVCacheManager(self.schema, num_blocks=16, max_requests=1, max_step_tokens=256)
        request = alone.admit_request(len(ids))
        return self.model.logits(ids, alone, alone.prepare_forward([(request, len(ids))]))

    # ---- one operation

    def go_on(self) -> None:
        call = self.draw.choice(
            (*[self.step] * 8, *[self.admit] * 3, self.fork, self.rewind, self.evict)
            + ((self.suspend, self.resume, self.resume) if self.tiers else ())
        )
        try:
            if self.draw.random() < 0.12:
                with Interrupts(self.draw.randrange(2500)).injected():
                    call()
            else:
                call()
        except (OutOfBlocks, OutOfSlots):
            self.fail()
            self.release()
        except KeyboardInterrupt:
            self.seen["interrupts"] += 1
            self.manager.recover()
            self.fail()
            self.take_stock()
        assert not self.manager.room.open_plans
        self.manager.check_invariants()

    def take_stock(self) -> None:
        """After an interrupt: who was being returned is not there, who was released may be."""
        live = set(self.manager.requests)
        self.jobs = [job for job in self.jobs if job.request in live]
        for request in live - {job.request for job in self.jobs}:
            self.manager.release_request(request)

    def fail(self) -> None:
        while self.manager.room.open_plans:
            self.manager.fail(self.manager.room.open_plans[0])
            self.seen["failed"] += 1
        for job in self.jobs:
            if job.request.is_torn:
                self.manager.rewind(job.request, self.draw.randint(0, job.request.length))
                self.seen["torn"] += 1

    def job(self) -> Job | None:
        return self.draw.choice(self.jobs) if self.jobs else None

    def admit(self) -> None:
        ids = self.draw.choice(self.texts)
        prompt = ids[: self.draw.randint(1, TOKENS - 60)]
        if self.tiers:
            request = self.manager.tiers.admit(prompt, timeout_s=TIMEOUT_S)
        else:
            request = self.manager.admit_request(prompt)
        self.jobs.append(Job(request, ids, len(prompt)))
        self.seen["reused"] += request.resume.reused_tokens > 0

    def release(self) -> None:
        if (job := self.job()) is not None:
            self.jobs.remove(job)
            self.manager.release_request(job.request)

    def fork(self) -> None:
        if (job := self.job()) is not None:
            (made,) = self.manager.fork(job.request, 1)
            self.jobs.append(Job(made, job.ids, job.told))
            self.seen["forks"] += 1

    def rewind(self) -> None:
        """Back, and on with any text that begins like this: what is run again to be there is the
        same."""
        if (job := self.job()) is not None:
            length = self.draw.randint(0, job.request.length)
            self.manager.rewind(job.request, length)
            job.told, same = length, job.ids[:length]
            job.ids = self.draw.choice([ids for ids in self.texts if ids[: len(same)] == same])
            self.seen["rewinds"] += 1

    def evict(self) -> None:
        self.seen["evicted"] += self.manager.prefix.evict(self.draw.randint(1, 12))

    def suspend(self) -> None:
        job = self.job()
        if job is not None and job.request.length:
            ids = job.ids[: job.request.length]
            self.jobs.remove(job)
            self.manager.tiers.suspend(job.request)
            self.away.append(ids)

    def resume(self) -> None:
        if self.away:
            ids = self.draw.choice(self.away)
            request = self.manager.tiers.resume(ids, timeout_s=TIMEOUT_S)
            whole = [text for text in self.texts if text[: len(ids)] == ids]
            self.jobs.append(Job(request, self.draw.choice(whole), len(ids)))
            self.seen["resumed"] += request.resume.source == "state"

    # ---- a step, and those prepared after it

    def step(self) -> None:
        draw = self.draw
        for job in [job for job in self.jobs if job.request.length > TOKENS - 60]:
            self.jobs.remove(job)
            self.manager.release_request(job.request)
        if not self.jobs:
            return self.admit()
        jobs = draw.sample(self.jobs, draw.randint(1, min(3, len(self.jobs))))
        opened: list[Open] = []
        lengths = [job.request.length for job in jobs]
        depth = draw.choice((0, 0, 1, DEPTH))
        for _ in range(1 + depth):
            opened.append(self.prepare(jobs, lengths, opened[-1] if opened else None))
            self.run(opened[-1], jobs, lengths)
            lengths = [a + n for a, n in zip(lengths, opened[-1].kept, strict=True)]
        self.seen["two deep"] += depth == DEPTH
        ending = draw.randint(0, 9 * len(opened))
        for nth, each in enumerate(opened):
            if nth == ending:  # it failed, and with it those after it
                return self.fail()
            self.manager.commit(each.plan, each.kept, ids=each.ids)

    def prepare(self, jobs: list[Job], lengths: list[int], before: Open | None) -> Open:
        draw = self.draw
        decodes = before is not None or draw.random() < 0.6
        most = 1 + DRAFTS if decodes else 40
        counts = sorted(draw.randint(1, most) for _ in jobs)
        if before is not None:  # rows keep their order
            draw.shuffle(counts)
        right = [
            draw.randint(min(n, max(0, job.told - start)), n)
            if n <= 1 + DRAFTS and draw.random() < 0.5
            else n
            for job, start, n in zip(jobs, lengths, counts, strict=True)
        ]
        ids: list[int] = []
        for job, start, n, kept in zip(jobs, lengths, counts, right, strict=True):
            ids += job.ids[start : start + kept] + self.text(n - kept)
        self.seen["rejected"] += right != counts
        accepted = None
        if before is not None and (
            before.kept != before.plan.counts.tolist() or draw.random() < 0.5
        ):
            accepted = torch.tensor(before.kept, dtype=torch.int32)
        plan = self.manager.prepare_forward(
            [(job.request, n) for job, n in zip(jobs, counts, strict=True)],
            after=None if before is None else before.plan,
            accepted=accepted,
            drafts=DRAFTS if decodes and draw.random() < 0.4 else 0,
        )
        return Open(plan, ids, right)

    def run(self, opened: Open, jobs: list[Job], lengths: list[int]) -> None:
        plan = opened.plan
        for batch in plan.drafts:
            kv = self.numbers.normal(batch.num_tokens, TOY.head_dim).bfloat16()
            handle = self.manager.acquire(DRAFT_LAYER, batch)
            handle.append(kv, weights=self.model.layers[0].cache)
            self.seen["drafts"] += 1
        found = self.model.logits(opened.ids, self.manager, plan)
        rows = iter(found.split(plan.counts.tolist()))
        for job, start, kept in zip(jobs, lengths, opened.kept, strict=True):
            request, logits = job.request, next(rows)
            expected = self.logits[self.texts.index(job.ids)][start : start + kept]
            # of a replay only the rings are wanted, whose logits nobody reads
            exact = max(0, max(request.reused_tokens, request.rings_exact_from) - start)
            assert torch.equal(logits[exact:kept], expected[exact:]), (start, kept, request)
            self.seen["logits"] += max(0, kept - exact)

    def finish(self) -> None:
        manager = self.manager
        for job in self.jobs:
            manager.release_request(job.request)
        if self.tiers:
            assert manager.tiers.drain(TIMEOUT_S)
        manager.prefix.evict()
        stats = manager.stats()
        assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
        manager.check_invariants()
        for tier in self.tiers:
            tier.close(TIMEOUT_S)


def live(seed: int, operations: int) -> Counter[str]:
    life = Life(seed)
    for _ in range(operations):
        life.go_on()
    life.finish()
    return life.seen


def test_every_logit_is_that_of_an_undisturbed_run():
    total: Counter[str] = Counter()
    for seed in range(6):
        total += live(seed, operations=100)
    # a life in which nothing happened proves nothing
    for what in (
        *("interrupts", "failed", "torn", "reused", "forks", "rewinds", "evicted", "resumed"),
        *("rejected", "two deep", "drafts", "logits"),
    ):
        assert total[what], (what, total)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(100, 160))
def test_every_logit_is_that_of_an_undisturbed_run_for_long(seed: int):
    live(seed, operations=1000)
