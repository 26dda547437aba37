"""Requests whose entries may be in host memory go to another manager of this kind: what they give
there is what they give with everything on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.handoff.options import HandoffOptions
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.transfers.copies import Copies
from dsv4.errors import OfferError, OutOfBlocks, OutOfSlots
from dsv4.model import ModelSpec
from dsv4.tiers.host import HostTier
from tests.support.attending_model import AttendingModel
from tests.support.faults import Interrupts
from tests.support.handoff import PATIENT_S, until

POISON, BLOCKS, SLOTS, LONGEST, STEP = 0xEE, 14, 2, 1100, 256
NAMES = ["tiny", "v41-tiny"]
_DRAW = Random(3)
TEXT = [_DRAW.randrange(512) for _ in range(LONGEST)]


class World:
    """Managers of one model, and what a text gives with everything on the device."""

    def __init__(self, name: str) -> None:
        spec = ModelSpec.preset(name)
        self.together, self.apart = (
            CacheSchema.build(spec, max_context=2048, max_draft_tokens=1, entries_apart=flag)
            for flag in (False, True)
        )
        self.model = AttendingModel(self.together)
        self.managers: list[KVCacheManager] = []
        manager = self.made(apart=False, num_blocks=32, handoff=None)
        request = manager.admit_request(TEXT)
        self.expected = self.run(manager, request, LONGEST)

    def made(self, *, apart: bool = True, spare: int | None = None, **options: Any) -> Any:
        """With `spare` rows of host memory it has a host tier."""
        schema = self.apart if apart else self.together
        options = {
            "num_blocks": BLOCKS,
            "max_requests": SLOTS,
            "max_step_tokens": STEP,
            "prefix": PrefixOptions(policy=full(), snapshots=4, model_id="m"),
            "handoff": HandoffOptions(
                name=f"side {len(self.managers)}", lease_s=PATIENT_S, deadline_s=PATIENT_S
            ),
        } | options
        if apart:
            rows = options["num_blocks"] + (spare or 0)
            options["host_memory"] = rows * schema.bytes.entries
        if spare is not None:
            options["tiers"] = [HostTier(60 * (schema.bytes.block + 8192))]
        self.managers.append(KVCacheManager(schema, **options))
        return self.managers[-1]

    def run(self, manager: Any, request: Request, end: int, most: int = STEP) -> Tensor:
        found = [torch.empty(0)]
        while request.length < end:
            start, count = request.length, min(most, end - request.length)
            ids = TEXT[start : start + count]
            found.append(self.model.step(manager, [(request, ids)]))
        return torch.cat([part for part in found if part.numel()]) if len(found) > 1 else found[0]

    def goes_on(self, manager: Any, request: Request, count: int = 40) -> None:
        """It gives what it should, in single tokens and in a chunk."""
        for most in (1, STEP):
            start, end = request.length, min(LONGEST, request.length + min(count, 6 * most))
            found = self.run(manager, request, end, most)
            assert torch.equal(found, self.expected[start:end])
            poison(manager)
        manager.check_invariants()

    def close(self) -> None:
        for manager in self.managers:
            if manager.handoff:
                manager.handoff.close()
            for tier in manager.tiers.all if manager.tiers else ():
                tier.close(PATIENT_S)
        self.managers.clear()


def poison(manager: Any) -> None:
    """Everything that is free."""
    manager.check_invariants()
    residency, entries = manager._parts.residency, manager.memory.entries
    entries.arena.bytes[residency.places._free] = POISON
    manager.memory.block_arena.bytes[manager._parts.table.allocator._free] = POISON
    hosts = residency.places.hosts
    if hosts.shares:
        residency._pool.bytes[hosts.free_rows()] = POISON
        return
    free = ~residency.places.in_host
    residency._pool.bytes[torch.from_numpy(free)] = POISON


WORLDS: dict[str, World] = {}


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    name = getattr(request, "param", "tiny")
    if name not in WORLDS:
        WORLDS[name] = World(name)
    found = WORLDS[name]
    yield found
    found.close()


def grown(world: World, manager: Any, length: int) -> Request:
    request = manager.admit_request(TEXT[:length])
    world.run(manager, request, length)
    return request


@pytest.mark.parametrize("world", NAMES, indirect=True)
@pytest.mark.parametrize(("length", "spare"), [(900, None), (896, 3)])
def test_a_request_arrives_wherever_its_entries_are(world: World, length: int, spare: int | None):
    owner, taker = world.made(spare=spare), world.made(spare=spare)
    request = grown(world, owner, length)
    assert owner.stats().residency.blocks_only_in_host > 0
    offer = owner.handoff.offer(request)
    owner.release_request(request)
    owner.prefix.evict()  # the offer alone holds the blocks
    poison(owner)
    copy = taker.handoff.accept(offer).wait()
    assert copy.length == length
    assert taker.stats().residency.blocks_only_in_host == length // 128
    world.goes_on(taker, copy)
    until(owner, lambda: not owner.handoff.leases.held)
    owner.prefix.evict()
    assert owner.stats().blocks_free == BLOCKS
    # and from there, after it was written on, to a third
    third = world.made()
    again = third.handoff.accept(taker.handoff.offer(copy)).wait()
    world.goes_on(third, again)
    world.goes_on(taker, copy)


def test_what_the_taker_has_in_host_memory_is_not_read(world: World):
    owner, taker = world.made(), world.made()
    here = grown(world, taker, 700)
    taker.release_request(here)
    arrival = taker.handoff.accept(owner.handoff.offer(grown(world, owner, 900)))
    copy = arrival.wait()
    assert arrival.skipped_blocks == 5
    whole = world.apart.bytes.block + world.apart.bytes.entries
    state = taker.handoff.side.labels.state.payload_bytes + 512
    assert 0 < arrival.read_bytes - 2 * whole < state
    world.goes_on(taker, copy)


@pytest.mark.parametrize("apart", [True, False])
def test_the_other_kind_of_manager_does_not_take_it(world: World, apart: bool):
    owner, taker = world.made(apart=apart), world.made(apart=not apart)
    offer = owner.handoff.offer(grown(world, owner, 300))
    with pytest.raises(OfferError, match="entries apart") as refused:
        taker.handoff.accept(offer)
    assert refused.value.reason == "schema"
    assert taker.stats().blocks_free == BLOCKS


def test_entries_that_were_changed_on_their_way_are_refused(world: World):
    owner, taker = world.made(), world.made()
    request = grown(world, owner, 300)
    offer = owner.handoff.offer(request)
    owner._parts.residency.copies.piece(request.block_ids[1])[5] ^= 1
    arrival = taker.handoff.accept(offer)
    with pytest.raises(OfferError, match="block 1, its sum is wrong"):
        arrival.wait()
    taker.check_invariants()
    assert taker.stats().blocks_free == BLOCKS


def test_entries_that_cannot_be_copied_down_are_not_offered(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    owner, taker = world.made(), world.made()
    request = owner.admit_request(TEXT[:300])

    def fail(*_: Any) -> None:
        raise RuntimeError("no copies today")

    with monkeypatch.context() as patch:
        patch.setattr(Copies, "down", fail)
        world.run(owner, request, 300)
        with pytest.raises(OfferError, match="2 of 2 blocks are not in host memory") as refused:
            owner.handoff.offer(request)
        assert refused.value.reason == "busy"
    assert not owner.handoff.leases.held
    assert owner.handoff.side.rows.free == owner.handoff.side.options.states
    copy = taker.handoff.accept(owner.handoff.offer(request)).wait()
    world.goes_on(taker, copy)


@pytest.mark.parametrize("spare", [None, 0])
def test_rows_that_the_offer_names_stay_after_an_interrupt(world: World, spare: int | None):
    """Nothing but the offer has the blocks when `recover` derives all rows anew."""
    owner, taker = world.made(spare=spare), world.made()
    request = grown(world, owner, 700)
    offer = owner.handoff.offer(request)
    owner.release_request(request)
    owner.prefix.evict()
    if owner.tiers:
        assert owner.tiers.drain(PATIENT_S)
        tier = owner.tiers.all[0]
        tier._drop([*tier._rows])
    with Interrupts(at=40).injected(), pytest.raises(KeyboardInterrupt):
        owner.admit_request(TEXT[300:900])
    owner.recover()
    poison(owner)
    for begin in (0, 100):  # other requests need rows of host memory
        other = owner.admit_request(TEXT[begin : begin + 600][::-1])
        while other.length < 600:
            ids = TEXT[begin : begin + 600][::-1][other.length :][:STEP]
            world.model.step(owner, [(other, ids)])
        owner.release_request(other)
    poison(owner)
    copy = taker.handoff.accept(offer).wait()
    world.goes_on(taker, copy)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(2, 9))]
)
@pytest.mark.parametrize("world", NAMES, indirect=True)
def test_lives_between_managers(world: World, seed: int):
    draw = Random(seed)
    managers = [world.made(), world.made(spare=draw.choice((0, 4))), world.made(num_blocks=11)]
    live: list[tuple[Any, Request]] = []
    arrived = 0
    for _ in range(20):
        manager = draw.choice(managers)
        own = [each for each in live if each[0] is manager]
        with suppress(OutOfBlocks, OutOfSlots, OfferError):
            if len(own) < SLOTS and draw.random() < 0.5:
                request = manager.admit_request(TEXT[: draw.choice((130, 300, 700))])
                live.append((manager, request))
            elif own:
                _, request = draw.choice(own)
                start = request.length
                end = min(LONGEST, max(request.resume.end, start) + draw.choice((1, 60, 200)))
                found = world.run(manager, request, end)
                known = max(0, request.reused_tokens - start)
                assert torch.equal(found[known:], world.expected[start:end][known:])
                other = draw.choice([each for each in managers if each is not manager])
                offer = manager.handoff.offer(request)
                if draw.random() < 0.7:
                    live.remove((manager, request))
                    manager.release_request(request)
                copy = other.handoff.accept(offer).wait()
                arrived += 1
                live.append((other, copy))
        for each in managers:
            if draw.random() < 0.2:
                each.prefix.evict(draw.choice((2, BLOCKS)))
            poison(each)
        if len(live) > 4:
            manager, request = live.pop(draw.randrange(len(live)))
            manager.release_request(request)
    assert arrived > 2
