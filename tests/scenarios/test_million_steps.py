"""Random calls on a small pool, nightly a million, each one checked against a model of who holds
what."""

from __future__ import annotations

import random

import pytest

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import (
    ContextOverflow,
    Dsv4Error,
    InvalidInput,
    OutOfBlocks,
    OutOfSlots,
    PlanError,
    RequestError,
)
from dsv4.model import ModelSpec

STEPS, NIGHTLY_STEPS = 200_000, 1_000_000
CHECK_EVERY = 50
# a row of the table is longer than the pool, so that some requests can never fit
BLOCKS, REQUESTS, CONTEXT, BLOCK_TOKENS, DRAFTS = 10, 5, 1400, 128, 3
ROW = -(-CONTEXT // BLOCK_TOKENS)


class Life:
    """The manager under test, and beside it the sets that every call must agree with."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        schema = CacheSchema.build(
            ModelSpec.preset("tiny"),
            max_context=CONTEXT,
            block_tokens=BLOCK_TOKENS,
            max_draft_tokens=DRAFTS,
        )
        options = {"num_blocks": BLOCKS, "max_requests": REQUESTS, "max_step_tokens": 300}
        self.manager = KVCacheManager(schema, **options)
        self.stranger = KVCacheManager(schema, **options).admit_request(100)
        self.free = set(range(BLOCKS))
        self.live: list[Request] = []
        self.held: dict[Request, list[int]] = {}
        self.lengths: dict[Request, int] = {}
        self.gone = self.manager.admit_request(0)
        self.manager.release_request(self.gone)
        self.succeeded = self.failed = 0

    # ---- the model ---------------------------------------------------------------------------

    def took(self, request: Request, block_ids: list[int]) -> None:
        """No id is handed out twice: each was free, and is free no more."""
        for block_id in block_ids:
            self.free.remove(block_id)
        self.held[request] += block_ids
        assert request.block_ids == self.held[request]

    def expect(self, error: Dsv4Error, kind: type[Dsv4Error] | None, in_all: int = 0) -> None:
        """The call failed as the model says, and whoever it was about still holds the same."""
        assert type(error) is kind, (error, kind)
        if isinstance(error, OutOfBlocks):
            assert error.never == (in_all > BLOCKS)
            assert (error.free, error.total) == (len(self.free), BLOCKS)
        self.failed += 1
        assert self.manager._parts.table.allocator.free == len(self.free)
        for request in self.live:
            assert request.block_ids == self.held[request]
            assert request.length == self.lengths[request]

    # ---- the steps ---------------------------------------------------------------------------

    def admit(self) -> None:
        tokens = self.rng.choice((0, 1, 128, self.rng.randrange(CONTEXT + 100)))
        blocks = -(-tokens // BLOCK_TOKENS)
        kind: type[Dsv4Error] | None = None
        if tokens > CONTEXT:
            kind = ContextOverflow
        elif blocks > BLOCKS:
            kind = OutOfBlocks
        elif len(self.live) == REQUESTS:
            kind = OutOfSlots
        elif blocks > len(self.free):
            kind = OutOfBlocks
        try:
            request = self.manager.admit_request(tokens)
        except Dsv4Error as error:
            return self.expect(error, kind, blocks)
        assert kind is None
        assert all(other.slot != request.slot for other in self.live)
        self.live.append(request)
        self.held[request], self.lengths[request] = [], 0
        self.took(request, list(request.block_ids))
        assert len(self.held[request]) == blocks
        self.succeeded += 1

    def extend(self) -> None:
        request = self.rng.choice(self.live)
        tokens = self.rng.choice((1, 128, self.rng.randrange(CONTEXT)))
        end = self.lengths[request] + tokens
        in_all = max(-(-end // BLOCK_TOKENS), len(self.held[request]))
        missing = in_all - len(self.held[request])
        kind: type[Dsv4Error] | None = None
        if end > CONTEXT:
            kind = ContextOverflow
        elif missing > len(self.free):
            kind = OutOfBlocks
        try:
            new_ids = self.manager.room.extend(request, tokens)
        except Dsv4Error as error:
            return self.expect(error, kind, in_all)
        assert kind is None
        assert len(new_ids) == missing
        self.took(request, new_ids)
        self.succeeded += 1

    def allocate(self) -> None:
        request = self.rng.choice(self.live)
        held = len(self.held[request])
        kind = ContextOverflow if held == ROW else OutOfBlocks if not self.free else None
        try:
            block_id = self.manager.allocate_block(request)
        except Dsv4Error as error:
            return self.expect(error, kind, held + 1)
        assert kind is None
        self.took(request, [block_id])
        assert self.manager.room.block_id(request, held) == block_id
        self.succeeded += 1

    def release(self) -> None:
        request = self.live.pop(self.rng.randrange(len(self.live)))
        self.manager.release_request(request)
        self.free.update(self.held.pop(request))
        del self.lengths[request]
        self.gone = request
        self.succeeded += 1

    def misuse(self) -> None:
        manager, rng = self.manager, self.rng
        call, kind = rng.choice(
            (
                (lambda: manager.release_request(self.gone), RequestError),
                (lambda: manager.room.extend(self.gone, 1), RequestError),
                (lambda: manager.allocate_block(self.stranger), RequestError),
                (lambda: manager.release_request(self.stranger), RequestError),
                (lambda: manager.admit_request(-1), InvalidInput),
                (lambda: manager.room.block_id(self.live[0], ROW), InvalidInput),
                (lambda: manager.room.extend(self.live[0], float("nan")), InvalidInput),
                (lambda: manager.prepare_forward([(self.live[0], 1)] * 2), PlanError),
                (lambda: manager.prepare_forward([(self.live[0], 301)]), PlanError),
            )
        )
        try:
            call()
        except ContextOverflow as error:  # 301 tokens may be too many for the context first
            self.expect(error, ContextOverflow)
        except Dsv4Error as error:
            self.expect(error, kind)
        else:
            pytest.fail("a misuse went through")

    def step(self) -> None:
        """A forward step of some requests: all is accepted, some drafts are not, or it fails."""
        batch = self.rng.sample(self.live, self.rng.randrange(1, len(self.live) + 1))
        counts = [self.rng.choice((0, 1, 4, 60)) for _ in batch]
        ends = [self.lengths[r] + n for r, n in zip(batch, counts, strict=True)]
        needs = [
            max(0, -(-end // BLOCK_TOKENS) - len(self.held[r]))
            for r, end in zip(batch, ends, strict=True)
        ]
        kind: type[Dsv4Error] | None = None
        if max(ends) > CONTEXT:
            kind = ContextOverflow
        elif sum(needs) > len(self.free):
            kind = OutOfBlocks
        try:
            plan = self.manager.prepare_forward(list(zip(batch, counts, strict=True)))
        except Dsv4Error as error:
            return self.expect(error, kind, -(-max(ends) // BLOCK_TOKENS))
        assert kind is None
        for request, need in zip(batch, needs, strict=True):
            new_ids = request.block_ids[len(self.held[request]) :]
            assert len(new_ids) == need
            self.took(request, new_ids)
        if self.rng.random() < 0.2:
            self.manager.abandon(plan)
        else:
            accepted = [n - self.rng.randrange(min(n, 1 + DRAFTS) + 1) for n in counts]
            self.manager.commit(plan, accepted, partial=True)
            for request, count in zip(batch, accepted, strict=True):
                self.lengths[request] += count
                assert request.length == self.lengths[request]
        for request, end in zip(batch, ends, strict=True):
            blocks = -(-end // BLOCK_TOKENS)
            row = self.manager.memory.block_table[request.slot, :blocks]
            assert row.tolist() == self.held[request][:blocks]
        self.succeeded += 1

    def check(self) -> None:
        self.manager.check_invariants()
        stats = self.manager.stats()
        taken = [block_id for ids in self.held.values() for block_id in ids]
        assert len(set(taken)) == len(taken)
        assert self.free.isdisjoint(taken)
        assert stats.blocks_free + stats.blocks_live == stats.blocks_total == BLOCKS
        assert (stats.blocks_free, stats.blocks_live) == (len(self.free), len(taken))
        assert stats.slots_free + stats.requests_live == stats.slots_total == REQUESTS
        assert stats.requests_live == len(self.live) == len({r.slot for r in self.live})
        assert stats.tokens_live == sum(self.lengths.values())


@pytest.mark.parametrize("steps", [STEPS, pytest.param(NIGHTLY_STEPS, marks=pytest.mark.nightly)])
def test_random_steps_keep_every_block_and_slot_accounted_for(steps: int):
    life = Life(seed=20261115)
    for number in range(steps):
        dice = life.rng.random()
        if not life.live or dice < 0.30:
            life.admit()
        elif dice < 0.55:
            life.extend()
        elif dice < 0.65:
            life.allocate()
        elif dice < 0.88:
            life.release()
        elif dice < 0.99:
            life.misuse()
        else:
            life.step()
        if number % CHECK_EVERY == 0:
            life.check()
    life.check()
    # both outcomes were common, so the number means something
    assert life.succeeded > steps // 4
    assert life.failed > steps // 10
    while life.live:
        life.release()
    assert life.manager._parts.table.allocator.free == BLOCKS
    life.check()
