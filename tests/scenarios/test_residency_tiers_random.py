"""Random lives of requests with `host_memory` above a host tier, which has its records' entries in
the same rows: every output bit is that of a run with everything on the device, and no entries are
in host memory twice. What nothing has of it is poison."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.requests import Request
from dsv4.cache.residency.host_rows import SharedHostRows
from dsv4.cache.schema import CacheSchema
from dsv4.errors import OutOfBlocks, OutOfSlots
from dsv4.model import ModelSpec
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Kind
from tests.support.attending_model import AttendingModel
from tests.support.tiered import TIMEOUT_S, TieredLife

POISON = 0xEE
LONGEST, STEP, BLOCKS, SLOTS, VOCABULARY = 640, 256, 9, 2, 512


@cache
def world(name: str) -> tuple[CacheSchema, CacheSchema, AttendingModel]:
    """Without draft layers, whose windows no snapshot has."""
    spec = ModelSpec.preset(name)
    spec = replace(spec, layers=tuple(each for each in spec.layers if not each.draft))
    together, apart = (
        CacheSchema.build(spec, max_context=1024, entries_apart=flag) for flag in (False, True)
    )
    return together, apart, AttendingModel(together, vocabulary=VOCABULARY)


@cache
def texts(name: str) -> list[tuple[list[int], Tensor]]:
    """Texts that share beginnings, and what they give with everything on the device."""
    draw, (together, _, model) = Random(7), world(name)
    first, *others = ([draw.randrange(VOCABULARY) for _ in range(LONGEST)] for _ in range(4))
    found = []
    for cut, other in zip((LONGEST, 100, 256, 390), (first, *others), strict=True):
        ids = [*first[:cut], *other[cut:]]
        manager = KVCacheManager(together, num_blocks=8, max_requests=1, max_step_tokens=1024)
        found.append((ids, model.step(manager, [(manager.admit_request(len(ids)), ids)])))
    return found


class Life(TieredLife[int]):
    """Texts, which go by number, share beginnings; the device, host memory and the tiers hold a few
    of them each."""

    def __init__(self, name: str, seed: int, root: Path) -> None:
        super().__init__(seed)
        _, schema, self.model = world(name)
        record = schema.bytes.block + 8192
        self.host = HostTier(self.draw.choice((12, 40)) * record)
        self.disk = DiskTier(root, self.draw.choice((12, 60)) * (record + schema.bytes.entries))
        below = self.draw.random() < 0.5
        self.spare = self.draw.choice((0, 3, 12))
        self.manager = KVCacheManager(
            schema,
            num_blocks=BLOCKS,
            max_requests=SLOTS,
            max_step_tokens=STEP,
            prefix=PrefixOptions(policy=full(), snapshots=8, model_id="x"),
            host_memory=(BLOCKS + self.spare) * schema.bytes.entries,
            tiers=[self.host, self.disk] if below else [self.host],
        )
        self.texts = [ids for ids, _ in texts(name)]
        self.outputs = [outputs for _, outputs in texts(name)]
        self.shared = 0  # rows that were of a record and of a block
        self.kept = 0  # rows that were of a record only

    def ids_of(self, text: int) -> list[int]:
        return self.texts[text]

    # ---- what happens --------------------------------------------------------------------------

    def step(self) -> None:
        self.draw.choice(
            (
                *(self.turn, self.turn, self.turn, self.turn, self.admit, self.run, self.release),
                *(self.suspend, self.resume, self.begin_fetch, self.move_fetch, self.evict),
                *(self.evict, self.move_fetch),
                *(self.rewind, self.drop),
            )
        )()
        self.check()

    def turn(self) -> None:
        """A prompt is computed, or found, and its request goes on living for a while or not."""
        self.admit()
        if self.live:
            self.run()
            self.draw.choice((self.release, self.release, self.run))()

    def admit(self) -> None:
        nth = self.draw.randrange(len(self.texts))
        count = self.draw.choice((LONGEST, self.draw.randrange(1, LONGEST)))
        ids, tiers = self.texts[nth][:count], self.manager.tiers
        try:
            if self.draw.random() < 0.3:
                request = self.manager.admit_request(ids)
            else:
                request = tiers.admit(ids, timeout_s=TIMEOUT_S)
        except (OutOfBlocks, OutOfSlots):
            return self.release()
        self.live[request] = nth

    def run(self) -> None:
        if not self.live:
            return
        request = self.draw.choice(list(self.live))
        end = max(request.length, request.resume.end) + self.draw.randrange(1, 40)
        self.run_to(request, min(LONGEST, end), self.draw.choice((STEP, STEP, 150, 17)))

    def run_to(self, request: Request, end: int, chunk: int) -> None:
        nth = self.live[request]
        while request.length < end:
            start, count = request.length, min(chunk, end - request.length)
            try:
                ids = self.texts[nth][start : start + count]
                found = self.model.step(self.manager, [(request, ids)])
            except OutOfBlocks as error:
                refused = error
                break
            whole = request.reused_tokens - start  # a replay computes what is known already
            expected = self.outputs[nth][start : start + count]
            assert torch.equal(found[max(0, whole) :], expected[max(0, whole) :])
            self.check()
        else:
            return
        assert refused.memory == "blocks", "a row was promised"

    def rewind(self) -> None:
        if self.live:
            request = self.draw.choice(list(self.live))
            self.manager.rewind(request, self.draw.randrange(request.length + 1))

    def begin_fetch(self) -> None:
        ids = self.draw.choice(self.texts)[: self.draw.randrange(1, LONGEST)]
        self.fetches.append(self.manager.tiers.fetch(ids))

    def evict(self) -> None:
        self.manager.prefix.evict(self.draw.choice((2, BLOCKS, BLOCKS)))

    def drop(self) -> None:
        """The tier loses a record, as when it was refused."""
        keys = list(self.host._rows)
        if keys and self.draw.random() < 0.1:
            self.host._drop([self.draw.choice(keys)])

    # ---- what must hold ------------------------------------------------------------------------

    def check(self) -> None:
        manager = self.manager
        manager.check_invariants()
        residency = manager._parts.residency
        assert residency is not None
        assert manager._parts.prefix
        hosts, places = residency.places.hosts, residency.places
        assert isinstance(hosts, SharedHostRows)
        residency._pool.bytes[hosts.free_rows()] = POISON
        entries = manager.memory.entries
        assert entries is not None
        entries.arena.bytes[places._free] = POISON
        manager.memory.block_arena.bytes[manager._parts.table.allocator._free] = POISON
        with self.host._lock:
            records = [self.host._rows.get(key) for key in [*self.host._rows]]
            for record in records:
                if record is None or record.key.kind is not Kind.BLOCK:
                    continue
                loan = record.value.loan
                assert loan is not None
                assert hosts.is_lent(loan.row)
                node = manager._parts.prefix.index.get(record.key.digest)
                here = node is not None and places.in_host[node.block_id]
                self.shared += here and hosts.row_of[node.block_id] == loan.row  # type: ignore[union-attr]
                self.kept += node is None

    def check_once(self) -> None:
        """When all is quiet, nothing is in host memory twice."""
        manager, residency = self.manager, self.manager._parts.residency
        assert residency is not None
        assert manager._parts.prefix
        for node in manager._parts.prefix.index.nodes():
            label = next((k for k in self.host._rows if k.digest == node.digest), None)
            entry = None if label is None else self.host._rows.get(label)
            if entry is None or entry.key.kind is not Kind.BLOCK:
                continue
            if residency.places.in_host[node.block_id]:
                assert entry.value.loan is not None
                assert entry.value.loan.row == residency.places.hosts.row_of[node.block_id]

    def end(self) -> None:
        for fetch in self.fetches:
            fetch.cancel()
        for request in list(self.live):
            self.run_to(request, min(LONGEST, max(request.length, request.resume.end)), STEP)
            self.manager.release_request(request)
        manager = self.manager
        assert manager.tiers.drain(TIMEOUT_S)
        self.check_once()
        manager.prefix.evict()
        stats = manager.stats()
        assert stats.transfers is not None
        assert (stats.blocks_free, stats.transfers.records_refused) == (stats.blocks_total, 0)
        manager.check_invariants()
        for tier in (self.host, self.disk):
            tier.close(TIMEOUT_S)
        residency = manager._parts.residency
        assert residency is not None
        hosts = residency.places.hosts
        assert isinstance(hosts, SharedHostRows)
        blocks = sum(key.kind is Kind.BLOCK for key in self.host._rows)
        assert hosts.free == hosts.total - blocks  # no row is lost
        assert self.host._extents.free_units * 4096 + self.held() == self.host.region.memory.nbytes

    def held(self) -> int:
        return self.host._rows.used_bytes


def live(name: str, seed: int, root: Path, steps: int) -> Life:
    life = Life(name, seed, root)
    for _ in range(steps):
        life.step()
    life.end()
    return life


@pytest.mark.parametrize("name", ["tiny", "v41-tiny"])
def test_a_few_lives(name: str, tmp_path: Path):
    lives = [live(name, seed, tmp_path / str(seed), 20) for seed in range(4)]
    found: list[Any] = [life.manager.stats().transfers for life in lives]
    assert sum(life.shared for life in lives) > 30
    assert sum(life.kept for life in lives) > 10
    assert sum(each.tokens_fetched for each in found) > 256


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tiny", "v41-tiny"])
@pytest.mark.parametrize("seed", range(100, 115))
def test_many_lives(name: str, seed: int, tmp_path: Path):
    live(name, seed, tmp_path, 200)
