"""Random calls as in test_prefix_random, and what no engine should do but every engine will: steps
that fail half way, in a layer or between two, are committed without some layers, or are told their
ids late; errors of the device and interrupts in the middle of any call; twins in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from dsv4.cache.prefix.options import SnapshotPolicy, full, periodic, zero
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import HcaState
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks, OutOfSlots, PlanError
from tests.oracles.bookkeeping import nothing_changes
from tests.scenarios.test_prefix_random import BLOCKS, CONTEXT, MODEL, Life, World
from tests.support.faults import DeviceFault, Faults, Interrupts

CHECK_EVERY = 40


class Attack(World):
    """Some layers of a step may stay unwritten: `layers_left` says how many more are written,
    `pieces_left` how many pieces of the one after them, of which a piece raises."""

    layers_left: int | None = None
    pieces_left: int | None = None

    def begin(self, plan: ForwardPlan, layer: int) -> None:
        if self.layers_left == 0 and self.pieces_left is None:
            raise HalfRun
        if self.layers_left is not None:
            self.layers_left -= 1
        super().begin(plan, layer)

    def write_window(self, plan: ForwardPlan, *given: object) -> None:
        self.next_piece()
        super().write_window(plan, *given)  # type: ignore[arg-type]

    def write_tails(self, plan: ForwardPlan, *given: object) -> None:
        self.next_piece()
        super().write_tails(plan, *given)  # type: ignore[arg-type]
        self.next_piece()

    def next_piece(self) -> None:
        if self.layers_left is None or self.layers_left >= 0 or self.pieces_left is None:
            return
        self.pieces_left -= 1
        if self.pieces_left < 0:
            raise HalfRun

    def planned(self, *, wide: bool) -> ForwardPlan:
        """A step of some requests, with ids for all its tokens."""
        count = self.rng.randrange(1, min(3, len(self.lives)) + 1)
        steps = []
        for request in self.rng.sample(list(self.lives), count):
            tokens = self.rng.choice((1, 17, 37) if wide else (1, 2, 4))
            life = self.lives[request]
            missing = request.length + tokens - len(life.ids)
            if missing > 0:
                life.change(len(life.ids), [self.rng.randrange(50) for _ in range(missing)])
            steps.append((request, tokens))
        return self.manager.prepare_forward(steps)

    def ids_of(self, plan: ForwardPlan) -> list[int]:
        spans = zip(plan.requests, plan.starts.tolist(), plan.counts.tolist(), strict=True)
        return [token for r, a, n in spans for token in self.lives[r].ids[a : a + n]]

    def write_some(self, plan: ForwardPlan) -> None:
        """The first few layers of a step, perhaps none, never all."""
        self.layers_left = self.rng.randrange(len(MODEL.layers))
        try:
            self.write(plan)
        except HalfRun:
            pass
        finally:
            self.layers_left = None

    def write_into(self, plan: ForwardPlan) -> None:
        """The first few layers of a step, and a part of one after them."""
        self.pieces_left = self.rng.randrange(3)
        try:
            self.write_some(plan)
        finally:
            self.pieces_left = None

    def mend(self, request: Request, length: int) -> None:
        """Back to where it is whole, or away."""
        if self.rng.random() < 0.3:
            self.manager.release_request(request)
            del self.lives[request]
            return
        resume = self.manager.rewind(request, self.rng.randint(max(0, length - 20), length))
        self.note_resume(request)
        self.count(f"mended from {resume.source}")
        self.check_bytes(request)

    def note_resume(self, request: Request) -> None:
        life, resume = self.lives[request], request.resume
        if resume.source != "rings":
            life.zeroed_at = resume.start if resume.source == "replay" else 0

    # ---- the calls -----------------------------------------------------------------------------

    def ask_and_admit(self) -> None:
        """What is said of a prompt beforehand is what happens."""
        manager, salt = self.manager, self.rng.choice((0, 0, 1))
        ids = self.text(self.rng.randrange(1, CONTEXT))
        prompt = manager.prefix.prompt(np.array(ids, dtype=np.int32), "tenant" if salt else None)
        fits, found, needed = (
            call(prompt)
            for call in (manager.room.can_admit, manager.prefix.look_up, manager.room.needed_blocks)
        )
        free = manager.stats().blocks_free
        try:
            request = manager.admit_request(prompt)
        except (OutOfBlocks, OutOfSlots):
            assert not fits
            raise
        assert fits
        assert request.resume == found
        held = len(request.block_ids) - found.reused_tokens // self.schema.block_tokens
        assert needed == held
        assert manager.stats().blocks_free == max(0, free - needed)
        self.note(request, Life(ids, salt))

    def ask_and_release(self) -> None:
        manager, request = self.manager, self.rng.choice(list(self.lives))
        said, before = manager.room.released_blocks(request), manager.stats()
        manager.release_request(request)
        del self.lives[request]
        after = manager.stats()
        gained = after.blocks_free - before.blocks_free
        assert said == gained + after.blocks_evictable - before.blocks_evictable

    def evict_all(self) -> None:
        evictable = self.manager.stats().blocks_evictable
        assert self.manager.prefix.evict() == evictable

    def fail(self) -> None:
        """What a layer has begun cannot be committed, whatever is said, nor be tried again."""
        plan = self.planned(wide=self.rng.random() < 0.6)
        if self.rng.random() < 0.5:
            self.write_some(plan)
        else:
            self.write_into(plan)
        for partial in (False, True)[: 1 + bool(plan.batch.written.unfinished)]:
            if not plan.is_stored:
                with nothing_changes(self.manager), pytest.raises(PlanError):
                    self.manager.commit(plan, ids=self.ids_of(plan), partial=partial)
        self.manager.fail(plan)
        for request in plan.requests:
            if request.is_torn:
                self.mend(request, request.length)
            else:
                self.check_bytes(request)

    def commit_half_run(self) -> None:
        plan = self.planned(wide=self.rng.random() < 0.4)
        before = [request.length for request in plan.requests]
        self.write_some(plan)
        ids = self.ids_of(plan) if self.rng.random() < 0.8 else None
        self.manager.commit(plan, ids=ids, partial=True)
        for request, length in zip(plan.requests, before, strict=True):
            assert request.incomplete_from == length
            self.mend(request, length)

    def rewind_far(self) -> None:
        request = self.rng.choice(list(self.lives))
        length = self.rng.randrange(request.length + 1)
        resume = self.manager.rewind(request, length)
        self.note_resume(request)
        assert request.length == resume.start <= length
        self.check_bytes(request)

    def tell_late(self) -> None:
        plan = self.planned(wide=self.rng.random() < 0.3)
        ids = self.ids_of(plan)
        self.write(plan)
        self.manager.commit(plan)
        at = 0
        for request, count in zip(plan.requests, plan.counts.tolist(), strict=True):
            assert request.trail is not None
            unknown = request.length - len(request.trail.ids)
            if 0 < unknown <= count and self.rng.random() < 0.8:
                self.manager.supply_ids(request, ids[at + count - unknown : at + count])
            at += count
            self.check_bytes(request)

    def twins(self) -> None:
        """The same prompt twice, prefilled in one step, one of them without reuse."""
        ids = self.text(self.rng.randrange(1, CONTEXT))
        prompt = self.manager.prefix.prompt(np.array(ids, dtype=np.int32))
        requests = []
        for reuse in (True, False):
            requests.append(self.manager.admit_request(prompt, reuse=reuse))
            self.note(requests[-1], Life(list(ids), 0))
        room = [(r, min(37, len(ids) - r.length)) for r in requests]
        plan = self.manager.prepare_forward(room)
        self.write(plan)
        self.manager.commit(plan, ids=self.ids_of(plan) if self.rng.random() < 0.5 else None)
        for request in requests:
            self.check_bytes(request)

    def with_a_fault(self) -> None:
        call = self.any_call()
        with Faults(self.rng.randrange(4)).injected():
            try:
                call(self)
            except DeviceFault:
                self.count("fault")
        self.clear_up()

    def with_an_interrupt(self) -> None:
        call = self.any_call()
        try:
            with Interrupts(self.rng.randrange(180)).injected():
                call(self)
        except KeyboardInterrupt:
            self.count("interrupt")
            self.manager.recover()
        self.clear_up()

    def any_call(self) -> Callable[[Attack], None]:
        """Most ways to go wrong are in a rewind: it overwrites a live slot."""
        others = (*ORDINARY, Attack.fail, Attack.tell_late, Attack.twins)
        return Attack.rewind_far if self.rng.random() < 0.35 else self.rng.choice(others)

    def clear_up(self) -> None:
        """As an engine does that does not know how far the call came."""
        manager = self.manager
        self.layers_left = None
        while manager.room.open_plans:
            manager.fail(manager.room.open_plans[0])
        for request in manager.requests:
            if request not in self.lives:
                manager.release_request(request)
        for request in list(self.lives):
            if request.released:
                del self.lives[request]
                continue
            self.note_resume(request)
            if request.incomplete_from is not None or request.is_torn:
                self.mend(request, min(request.length, request.incomplete_from or request.length))
        prefix = manager._parts.prefix
        assert prefix
        self.pins = list(prefix.pins._standing)
        self.check_all()


class HalfRun(Exception):
    pass


ORDINARY = (
    *(World.admit, World.fork, World.rewind, World.extend, World.release),
    *(World.reset, World.evict, World.step, World.step),
)
CALLS: tuple[tuple[float, Callable[[Attack], None]], ...] = (
    *((0.14, Attack.ask_and_admit), (0.03, World.fork), (0.06, World.rewind)),
    *((0.10, Attack.ask_and_release), (0.01, World.evict), (0.002, Attack.evict_all)),
    *((0.02, World.pin), (0.06, Attack.fail)),
    *((0.05, Attack.commit_half_run), (0.08, Attack.tell_late), (0.05, Attack.twins)),
    *((0.05, Attack.with_a_fault), (0.08, Attack.with_an_interrupt), (1.00, World.step)),
)


def attack(policy: SnapshotPolicy, steps: int, seed: int, state: HcaState) -> Attack:
    world = Attack(policy, seed, state)
    for number in range(steps):
        dice, call = world.rng.random(), CALLS[-1][1]
        for share, candidate in CALLS:
            if dice < share:
                call = candidate
                break
            dice -= share
        if not world.lives:
            call = World.admit
        try:
            call(world)
            world.count(call.__name__)
        except (OutOfBlocks, OutOfSlots, ContextOverflow) as error:
            world.count(type(error).__name__)
            if world.lives and world.rng.random() < 0.5:
                world.release()
            if call in (Attack.with_a_fault, Attack.with_an_interrupt):
                world.clear_up()
        except InvalidInput:
            if call is not World.pin:
                raise
        if number % CHECK_EVERY == 0:
            world.check_all()
    return world


def check_end(world: Attack) -> None:
    manager = world.manager
    world.check_all()
    for request in list(world.lives):
        manager.release_request(request)
    for pinned in world.pins:
        manager.prefix.unpin(pinned)
    manager.prefix.evict()
    stats = manager.stats()
    assert stats.blocks_free == BLOCKS
    assert stats.prefix is not None
    assert stats.prefix.snapshots_used == 0
    manager.check_invariants()


POLICIES = (full(), periodic(64), zero())
STATES: tuple[HcaState, ...] = ("raw", "online")


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_attacks_leave_every_byte_right(policy: SnapshotPolicy):
    happened: Counter[str] = Counter()
    for seed, state in enumerate(STATES):
        world = attack(policy, 1000, seed, state)
        check_end(world)
        happened.update(world.counts)
    for what in ("fail", "commit_half_run", "tell_late", "twins", "fault", "interrupt"):
        assert happened[what] > 1, (what, happened)


@pytest.mark.nightly
@pytest.mark.timeout(0)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_attacks_leave_every_byte_right(policy: SnapshotPolicy, seed: int):
    check_end(attack(policy, 20_000, seed, STATES[seed % 2]))
