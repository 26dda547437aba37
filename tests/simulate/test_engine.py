"""The same small load on the real engine (reference, tiny model) and simulated: the same hits,
evictions and refusals, exactly, and the same blocks go in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import dsv4
from dsv4.cache.prefix.eviction import LeastRecentlyUsed
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.options import full, periodic, zero
from dsv4.cache.prefix.retention import Retention
from dsv4.cache.prefix.trail import token_ids
from dsv4.engine import LOOK_AHEAD, Engine, Job
from dsv4.simulate import replica as simulated
from dsv4.simulate.device import Device
from dsv4.simulate.names import name_of
from dsv4.simulate.replica import Replica, SimJob
from dsv4.simulate.speeds import Speeds
from dsv4.testing import EngineModel
from tests.support.numbers import Numbers

BLOCKS, SLOTS, STEP_TOKENS, ROWS = 9, 3, 400, 3
SCHEMA = dsv4.CacheSchema.build(dsv4.ModelSpec.preset("tiny"), max_context=2048)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass
class Turn:
    """A prompt, submitted before the engine's step of this number."""

    step: int
    job: Job
    ids: list[int]
    new_tokens: int
    hints: Hints | None


@dataclass
class Names:
    """A number for each prefix of whole blocks."""

    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def of(self, ids: list[int]) -> list[int]:
        size = SCHEMA.block_tokens
        ends = range(size, len(ids) + 1, size)
        return [self.known.setdefault(tuple(ids[:end]), len(self.known)) for end in ends]


def played(engine: Engine, seed: int, *, sessions: bool) -> list[Turn]:
    """Conversations whose turns go on from the answer before, with prompts in between that come
    once, and two that never fit. With `sessions` turns say which conversation is theirs."""
    numbers, turns = Numbers(seed), list[Turn]()
    system = numbers.integers(0, 32, 280).tolist()
    talks: list[list[int]] = [[*system], [*system], []]
    open_turns: dict[int, Turn] = {}
    left, step = [2, 2, 2], 0
    never = {2: ([1] * 1300, 2), 9: ([2] * 1100, 120)}  # too long; too long with its answer
    while any(left) or engine.jobs or never:
        for talk in range(len(talks)):
            last = open_turns.get(talk)
            if left[talk] and (last is None or last.job not in engine.jobs):
                if numbers.integers(0, 3, 1)[0]:
                    continue
                before = [*talks[talk]] if last is None else last.job.tokens
                asked = numbers.integers(0, 32, int(numbers.integers(20, 200, 1)[0])).tolist()
                new = int(numbers.integers(2, 40, 1)[0])
                hints = Hints(session=f"talk {talk}") if sessions else None
                turns.append(submit(engine, step, [*before, *asked], new, hints))
                open_turns[talk] = turns[-1]
                left[talk] -= 1
        if step % 9 == 3 and step < 40:
            once = numbers.integers(0, 32, int(numbers.integers(140, 500, 1)[0])).tolist()
            turns.append(submit(engine, step, once, 3))
        if step in never:
            turns.append(submit(engine, step, *never.pop(step)))
        engine.step()
        step += 1
    return turns


def submit(
    engine: Engine, step: int, ids: list[int], new_tokens: int, hints: Hints | None = None
) -> Turn:
    return Turn(step, engine.submit(ids, new_tokens, hints=hints), ids, new_tokens, hints)


class UnitSpeeds(Speeds):
    """Every step takes a second."""

    def step_s(self, decodes: int, context: int, chunks: Any = ()) -> float:
        return 1.0


def replayed(turns: list[Turn], names: Names, device: Device, most_steps: int) -> list[SimJob]:
    replica = Replica(
        device,
        UnitSpeeds(host_rate=1.0, disk_rate=1.0, link_rate=1.0),
        max_requests=SLOTS,
        step_tokens=STEP_TOKENS,
    )
    jobs, step, waiting = list[SimJob](), 0, [*turns]
    while waiting or not replica.is_idle:
        while waiting and waiting[0].step <= step:
            turn = waiting.pop(0)
            jobs.append(
                SimJob(
                    number=len(jobs),
                    arrival_s=float(step),
                    prompt_tokens=len(turn.ids),
                    new_tokens=turn.new_tokens,
                    names=names.of(turn.job.tokens),
                    hints=turn.hints,
                )
            )
            replica.submit(jobs[-1])
        replica.begin(float(step))
        flight = replica.flight
        if flight is None:
            step += 1
            continue
        # an arrival ends it early, as `Replica.submit` does
        flight.steps = min(flight.steps, most_steps)
        if waiting:
            flight.steps = max(1, min(flight.steps, waiting[0].step - step))
        step += flight.steps
        replica.finish()
    return jobs


@pytest.mark.parametrize(
    ("policy", "snapshots", "seed", "sessions"),
    [
        (Retention, periodic(256), 1, False),
        (LeastRecentlyUsed, periodic(256), 2, False),
        (Retention, full(), 3, False),
        (LeastRecentlyUsed, zero(), 4, False),
        (Retention, periodic(256), 5, True),
    ],
)
def test_the_same_happens_as_on_the_engine(
    policy: Any, snapshots: Any, seed: int, sessions: bool
) -> None:
    manager = dsv4.KVCacheManager(
        SCHEMA,
        num_blocks=BLOCKS,
        max_requests=SLOTS,
        max_step_tokens=STEP_TOKENS,
        prefix=dsv4.PrefixOptions(policy=snapshots, snapshots=ROWS, events=True, eviction=policy),
    )
    engine = Engine(model=EngineModel(manager), manager=manager, drafts=0)
    turns = played(engine, seed, sessions=sessions)
    names, digests = Names(), dict[bytes, int]()
    for turn in turns:
        trail = manager._parts.prefix.trail(token_ids(turn.job.tokens), None)
        trail.hash_blocks(len(turn.job.tokens) // SCHEMA.block_tokens)
        digests.update(zip(trail.chain, names.of(turn.job.tokens), strict=True))
    real = [(each.what, digests[each.digest]) for each in manager.prefix.take_events()]
    stats = manager.stats().prefix
    assert stats is not None
    rows = 0 if snapshots.kind == "zero" else ROWS
    for most_steps in (1, 1000):
        device = Device(
            SCHEMA, policy(), num_blocks=BLOCKS, snapshots=snapshots, snapshot_rows=rows
        )
        device.index.events = []
        jobs = replayed(turns, names, device, most_steps)
        assert [job.skipped for job in jobs] == [turn.job.tokens_skipped for turn in turns]
        assert [job.is_refused for job in jobs] == [turn.job.error is not None for turn in turns]
        assert [job.preemptions for job in jobs] == [turn.job.preemptions for turn in turns]
        assert device.index.evictions == stats.block_evictions
        assert device.rows.evictions == stats.snapshot_evictions
        own = [(each.what, name_of(each.digest)) for each in device.index.events]
        assert own == real
        # it was a load in which all of this happens
        assert sum(job.shared for job in jobs) > 0
        assert sum(job.is_refused for job in jobs) == 2
        assert device.index.evictions > 10
        device.index.check_invariants()
        device.allocator.check_invariants()


def test_it_looks_as_far_ahead() -> None:
    assert simulated.LOOK_AHEAD == LOOK_AHEAD
