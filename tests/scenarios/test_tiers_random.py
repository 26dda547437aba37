"""Random lives above tiers that are too small: whatever comes back has the bytes of a cold run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dsv4.cache.prefix.options import full
from dsv4.cache.requests import Request
from dsv4.errors import OutOfBlocks, OutOfSlots
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from tests.support.lives import ColdRun, Text, run_to
from tests.support.tiered import SCHEMA, TIMEOUT_S, TieredLife, options, stack_with

TEXTS, LONGEST = 5, 700


class Life(TieredLife[Text]):
    """A manager whose pool holds a few prompts; host memory and disk hold a few more. Texts share
    beginnings. Each operation is one of those below, drawn at random."""

    def __init__(self, seed: int, root: Path) -> None:
        super().__init__(seed)
        self.tiers = [
            HostTier(self.draw.choice((8, 20)) * (SCHEMA.bytes.block + 8192)),
            DiskTier(root / "tier", self.draw.choice((12, 60)) * (SCHEMA.bytes.block + 8192)),
        ]
        self.stack = stack_with(
            self.tiers[self.draw.choice((0, 0, 1)) :],
            drafts=self.draw.choice((0, 2)),
            num_blocks=9,
            max_requests=2,
            prefix=options(full()),
        )
        self.manager = self.stack.manager
        first = Text.random(self.stack, 0, LONGEST)
        others = [Text.random(self.stack, seed, LONGEST) for seed in range(1, TEXTS)]
        cuts = [self.draw.choice((0, 100, 256, 390)) for _ in others]
        self.texts = [first, *(first.then(o, cut) for o, cut in zip(others, cuts, strict=True))]

    def ids_of(self, text: Text) -> NDArray[np.int32]:
        return text.ids

    def step(self) -> None:
        self.draw.choice(
            (
                *(self.admit, self.admit, self.run, self.run, self.release, self.suspend),
                *(self.resume, self.begin_fetch, self.move_fetch, self.evict),
            )
        )()
        self.manager.check_invariants()
        stats = self.manager.stats()
        parts = (stats.blocks_free, stats.blocks_live, stats.blocks_cached, stats.blocks_in_flight)
        assert sum(parts) == stats.blocks_total

    def admit(self) -> None:
        text = self.draw.choice(self.texts)
        tokens = self.draw.randrange(1, LONGEST - 200)
        try:
            request = self.manager.tiers.admit(text.ids[:tokens], timeout_s=TIMEOUT_S)
        except (OutOfBlocks, OutOfSlots):
            return self.release()
        self.resumed += request.resume.start > 0
        self.live[request] = text

    def run(self) -> None:
        if not self.live:
            return
        request = self.draw.choice(list(self.live))
        text = self.live[request]
        length = min(LONGEST, max(request.length, request.resume.end) + self.draw.randrange(1, 90))
        try:
            run_to(self.stack, request, text, length, chunk=self.draw.choice((1 << 8, 150)))
        except OutOfBlocks:
            return self.release()
        self.check(request, text)

    def check(self, request: Request, text: Text) -> None:
        """A state says of draft layers what the request had: nothing, soon after a snapshot."""
        cold = ColdRun(self.stack, text.stream, request.length)
        cold.assert_same(self.stack, request, with_drafts=False)

    def begin_fetch(self) -> None:
        text = self.draw.choice(self.texts)
        self.fetches.append(self.manager.tiers.fetch(text.ids[: self.draw.randrange(1, LONGEST)]))

    def evict(self) -> None:
        self.manager.prefix.evict(self.draw.randrange(1, 9))

    def end(self) -> None:
        """Nothing is left on the way, and nothing was ever refused."""
        for fetch in self.fetches:
            fetch.cancel()
        for request, text in self.live.items():
            run_to(self.stack, request, text, max(request.length, request.resume.end))
            self.check(request, text)
            self.manager.release_request(request)
        assert self.manager.tiers.drain(TIMEOUT_S)
        self.manager.prefix.evict()
        stats = self.manager.stats()
        assert stats.transfers is not None
        assert (stats.blocks_free, stats.transfers.records_refused) == (stats.blocks_total, 0)
        self.manager.check_invariants()
        for tier in self.tiers:
            tier.close(TIMEOUT_S)
        assert self.tiers[0]._extents.free_units * 4096 + self._held_bytes() == self._host_bytes()

    def _held_bytes(self) -> int:
        held = self.tiers[0].stats().held_bytes
        assert held is not None
        return held

    def _host_bytes(self) -> int:
        return self.tiers[0].region.memory.nbytes


def live(seed: int, root: Path, steps: int) -> int:
    life = Life(seed, root)
    for _ in range(steps):
        life.step()
    life.end()
    return life.resumed


def test_a_few_lives(tmp_path: Path):
    resumed = [live(seed, tmp_path / str(seed), 40) for seed in range(3)]
    assert sum(resumed) > 3


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_lives(seed: int, tmp_path: Path):
    live(seed, tmp_path, 200)
