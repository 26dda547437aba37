"""dsv4/engine.py under random work, too little memory, errors of the device and Ctrl-C.

Every logit that a job was given equals, bit for bit, that of its tokens run alone in one piece, and
in the end nothing is left.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full, periodic, zero
from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.engine import RETRIES, Engine, Job
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec, v4_layers
from dsv4.testing import VOCABULARY, EngineModel, RandomModel
from tests.support.faults import Faults, Interrupts
from tests.support.numbers import SHIFT

# every kind of layer, with windows, groups and blocks so short that a soak sees each border often
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
POLICIES = (full(), periodic(32), zero(), periodic(16))
FORMATS: tuple[dict[str, str], ...] = (
    {"entry_format": "bf16", "index_format": "bf16"},  # quicker to decode
    {},
)
HCA_STATES: tuple[HcaState, ...] = ("raw", "online")
INTERRUPTED_FILES = ("/dsv4/cache/", "/dsv4/engine.py")


class Soak:
    """One engine, the random work it gets, and what it answered."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(1000 * SHIFT + seed)
        draw = self.random
        self.schema = CacheSchema.build(
            TOY,
            block_tokens=16,
            max_context=256,
            max_draft_tokens=draw.choice((0, 1, 3)),
            steps_ahead=1,
            hca_state=HCA_STATES[seed % 2],
            **FORMATS[seed // 2 % 2],
        )
        manager = KVCacheManager(
            self.schema,
            num_blocks=draw.choice((8, 11, 14, 20)),
            max_requests=draw.choice((3, 4, 6)),
            max_step_tokens=48,
            max_open_plans=2,
            prefix=PrefixOptions(
                policy=POLICIES[seed % len(POLICIES)], snapshots=draw.choice((1, 3, 12))
            ),
        )
        for arena in (manager.memory.block_arena, manager.memory.slot_arena):
            arena.bytes.fill_(0xFF)
        self.model = RandomModel(self.schema)
        self.engine = Engine(
            model=EngineModel(manager),
            manager=manager,
            step_tokens=draw.choice((12, 24, 48)),
            listener=self.listen,
        )
        self.beginnings = [self.text(draw.randint(5, 60)) for _ in range(3)]
        self.jobs: list[Job] = []
        self.heard: dict[Job, dict[int, Tensor]] = {}
        self.pins: list[PinnedPrefix] = []
        self.counts = dict.fromkeys(("faults", "interrupts", "preempted", "reused"), 0)

    def text(self, tokens: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(tokens)]

    def listen(self, job: Job, position: int, logits: Tensor) -> None:
        heard = self.heard.setdefault(job, {})
        if position in heard:  # run again after an error or a preemption
            assert torch.equal(heard[position], logits), (job.tokens[: position + 1], position)
        heard[position] = logits.clone()

    # ---- what happens between steps

    def come_and_go(self) -> None:
        draw, engine = self.random, self.engine
        if len(engine.jobs) < 7 and draw.random() < 0.6:
            beginning = draw.choice(self.beginnings)
            shared = draw.choice((len(beginning), draw.randint(0, len(beginning))))
            ids = beginning[:shared] + self.text(draw.randint(1, 20))
            for _ in range(draw.choice((1, 1, 1, 2))):  # the same one twice, at the same time
                self.jobs.append(
                    engine.submit(ids, draw.randint(1, 40), draw.choice((None, None, "x")))
                )
        if engine.jobs and draw.random() < 0.03:
            draw.choice(engine.jobs).cancelled = True
        if draw.random() < 0.02:
            self.beginnings[draw.randrange(3)] = self.text(draw.randint(5, 60))
        if not engine._needs_mending and draw.random() < 0.05:
            with suppress(InvalidInput):  # not cached, or no longer
                self.pins.append(engine.manager.prefix.pin(draw.choice(self.beginnings)))
        while (
            self.pins and (len(self.pins) > 2 or draw.random() < 0.1) and not engine._needs_mending
        ):
            engine.manager.prefix.unpin(self.pins.pop(draw.randrange(len(self.pins))))

    def step(self) -> None:
        draw, counts = self.random, self.counts
        trouble = draw.random()
        if trouble < 0.08 and self.engine.failures < RETRIES:  # one more and it would give up
            with Faults(draw.randrange(500)).injected():
                failed = self.engine.failures
                self.engine.step()
            counts["faults"] += self.engine.failures > failed
        elif trouble < 0.14:
            try:
                with Interrupts(draw.randrange(1500), INTERRUPTED_FILES).injected():
                    self.engine.step()
            except KeyboardInterrupt:
                counts["interrupts"] += 1
        else:
            self.engine.step()
        if not self.engine._needs_mending:
            self.engine.manager.check_invariants()

    # ---- in the end

    def finish(self) -> None:
        engine, manager = self.engine, self.engine.manager
        while engine.step():
            pass
        assert engine.jobs == []
        for job in self.jobs:
            self.check(job)
        assert manager.requests == ()
        assert not manager.room.open_plans
        for pin in self.pins:
            manager.prefix.unpin(pin)
        manager.check_invariants()
        stats = manager.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        manager.prefix.evict()
        stats = manager.stats()
        assert (stats.blocks_free, stats.slots_free) == (stats.blocks_total, stats.slots_total)
        assert stats.prefix is not None
        assert (stats.prefix.snapshots_used, stats.prefix.blocks_indexed) == (0, 0)
        manager.check_invariants()
        self.counts["preempted"] = sum(job.preemptions for job in self.jobs)
        self.counts["reused"] = sum(job.tokens_skipped for job in self.jobs)

    def check(self, job: Job) -> None:
        """Against the job's tokens alone, in one piece, in a cache that nobody else uses."""
        heard = self.heard.get(job, {})
        if not heard:
            assert job.cancelled or job.error is not None
            return
        tokens = job.tokens[: max(heard) + 1]
        alone = KVCacheManager(self.schema, num_blocks=16, max_requests=1, max_step_tokens=256)
        request = alone.admit_request(len(tokens))
        logits = self.model.logits(tokens, alone, alone.prepare_forward([(request, len(tokens))]))
        for position, row in heard.items():
            assert torch.equal(row, logits[position]), f"job of {len(tokens)}, token {position}"
        if job.error is None and not job.cancelled:
            assert len(job.generated) == job.new_tokens
        at = job.prompt_tokens
        assert job.tokens[at:] == logits.argmax(dim=-1).tolist()[at - 1 :][: len(job.generated)]
        assert set(range(at - 1, len(tokens))) <= set(heard)


def soak(seed: int, steps: int) -> dict[str, int]:
    made = Soak(seed)
    for _ in range(steps):
        made.come_and_go()
        made.step()
    made.finish()
    return made.counts


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_logit_is_right_whatever_happens():
    total: dict[str, int] = {}
    for seed in range(4):
        for name, count in soak(seed, steps=80).items():
            total[name] = total.get(name, 0) + count
    # a soak in which nothing happened proves nothing
    for name in ("faults", "interrupts", "preempted", "reused"):
        assert total[name], total


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(100, 200))
def test_every_logit_is_right_for_an_hour(seed: int):
    soak(seed, steps=400)
