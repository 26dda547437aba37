"""Random calls with prefix cache, forks and rewinds, 10^5 of them nightly: every live request has
the right bytes.

Kernels are replaced by stamps: every row that a step writes is filled with a number made from all
tokens up to it, so foreign, stale and missing bytes show. A replay stamps garbage where a real one
would leave inexact rows. Free memory is poisoned.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import CompressorLayout
from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, periodic, zero
from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks, OutOfSlots
from dsv4.model import ModelSpec, v4_layers

STEPS, NIGHTLY_STEPS = 40_000, 100_000
CHECK_EVERY = 50
BLOCK = WINDOW = 16
CONTEXT, BLOCKS, SLOTS, DRAFTS, SNAPSHOTS = 240, 40, 6, 3, 5
GARBAGE = 7_777_777
MODEL = replace(
    ModelSpec.preset("tiny"),
    window=WINDOW,
    head_dim=16,
    rope_dim=8,
    index_dim=32,
    layers=v4_layers([0, 4, 16], backbone=3),
)
TEXTS, TEXT_TOKENS = 5, CONTEXT

Stamps = NDArray[np.int64]


def stamps_of(ids: list[int], value: int) -> list[int]:
    """One number a token, made from it and the one before; exact in fp32, and with room to add."""
    result = []
    for token in ids:
        value = (value * 1_103_515_245 + token * 12_345 + 6_789) & 0x7FFFFF
        result.append(value)
    return result


def fold_stamps(stamps: Stamps, start: int, state: int) -> Stamps:
    """The fake of a folded group: each state from the one before it, anew in each group."""
    states = []
    for position, stamp in enumerate(stamps.tolist(), start):
        state = stamp if position % BLOCK == 0 else (state * 5 + stamp) & 0x7FFFFF
        states.append(state)
    return np.array(states, dtype=np.int64)


class Life:
    """What the model knows of a request: its tokens, their stamps, and where a replay began."""

    def __init__(self, ids: list[int], salt: int) -> None:
        self.ids, self.salt, self.zeroed_at = ids, salt, 0
        self.stamps = stamps_of(ids, salt + 1)

    def change(self, length: int, ids: list[int]) -> None:
        """Other tokens from position `length` on."""
        del self.ids[length:], self.stamps[length:]
        last = self.stamps[-1] if self.stamps else self.salt + 1
        self.ids += ids
        self.stamps += stamps_of(ids, last)


class World:
    def __init__(self, policy: SnapshotPolicy, seed: int, state: HcaState) -> None:
        self.rng = random.Random(seed)
        self.schema = CacheSchema.build(
            MODEL,
            max_context=CONTEXT,
            block_tokens=BLOCK,
            max_draft_tokens=DRAFTS,
            entry_format="bf16",
            index_format="bf16",
            hca_state=state,
        )
        self.manager = KVCacheManager(
            self.schema,
            num_blocks=BLOCKS,
            max_requests=SLOTS,
            max_step_tokens=120,
            prefix=PrefixOptions(policy=policy, snapshots=SNAPSHOTS),
        )
        self.texts = [[self.rng.randrange(50) for _ in range(TEXT_TOKENS)] for _ in range(TEXTS)]
        self.lives: dict[Request, Life] = {}
        self.pins: list[PinnedPrefix] = []
        self.counts: dict[str, int] = {}
        arenas = {
            "block": self.manager.memory.block_arena.bytes.numpy(),
            "slot": self.manager.memory.slot_arena.bytes.numpy(),
        }
        self.compressors = [
            [
                (tail, layout)
                for tail, kind in (("tail", "main"), ("index_tail", "index"))
                if (layout := self.schema.layout.compressor(layer, kind)) is not None
            ]
            for layer in range(len(MODEL.layers))
        ]
        # rows of pages as int32 words, of tails as fp32, by layer and name
        self.planes: dict[tuple[int, str], np.ndarray] = {}
        for page in self.schema.layout.pages:
            arena = arenas["slot" if page.kind == "window" else "block"]
            span = arena[:, page.offset_bytes : page.offset_bytes + page.payload_bytes]
            self.planes[page.layer, page.kind] = span.view(np.int32).reshape(
                len(arena), page.rows, -1
            )
        for plane in self.schema.layout.planes:
            if "tail" in plane.kind:
                span = arenas["slot"][:, plane.offset_bytes :][:, : plane.payload_bytes]
                self.planes[plane.layer, plane.name] = span.view(np.float32).reshape(
                    SLOTS, *plane.shape
                )
        page = self.manager.memory.workspace.staging_page
        self.chunk = self.manager.memory.workspace.staging.numpy()[0, : page.payload_bytes]
        self.chunk = self.chunk.view(np.int32).reshape(page.rows, -1)
        self.poison_free()

    # ---- the fake model ------------------------------------------------------------------------

    def write(self, plan: ForwardPlan) -> None:
        table = self.manager.memory.block_table.numpy()
        spans = list(zip(plan.requests, plan.starts.tolist(), plan.counts.tolist(), strict=True))
        stamps = np.array([s for r, a, n in spans for s in self.lives[r].stamps[a : a + n]])
        for layer, spec in enumerate(MODEL.layers):
            written = self.inexact(stamps, spans, layer)
            self.begin(plan, layer)
            self.write_window(plan, spans, layer, written)
            if spec.ratio:
                self.write_tails(plan, spans, layer, written)
                self.write_entries(plan, layer, spec.ratio, written, table)
            if plan.batch.captures is not None:
                plan.batch.captures.after_append(layer)
            plan.batch.written.note(layer)

    def begin(self, plan: ForwardPlan, layer: int) -> None:
        plan.batch.written.begin(layer)

    def inexact(self, stamps: Stamps, spans: list, layer: int) -> Stamps:
        """A replay from a zeroed slot is wrong for a window longer in each layer."""
        first = 0
        for request, start, count in spans:
            zeroed_at = self.lives[request].zeroed_at
            wrong = zeroed_at + layer * (WINDOW - 1) - start if zeroed_at else 0
            if wrong > 0:
                stamps = stamps.copy()
                stamps[first : first + min(wrong, count)] = GARBAGE
            first += count
        return stamps

    def write_window(self, plan: ForwardPlan, spans: list, layer: int, written: Stamps) -> None:
        ring, rows = self.planes[layer, "window"], self.schema.ring_rows
        first = 0
        for nth, (request, start, count) in enumerate(spans):
            if not plan.batch.is_decode and count:
                at = first + nth * (WINDOW - 1)
                for back in range(min(WINDOW - 1, start)):
                    source = ring[request.slot, (start - 1 - back) % rows]
                    self.chunk[at + WINDOW - 2 - back] = source
                self.chunk[at + WINDOW - 1 : at + WINDOW - 1 + count] = written[
                    first : first + count, None
                ]
            kept = np.arange(max(start, start + count - rows), start + count)
            ring[request.slot, kept % rows] = written[first + kept - start, None]
            first += count

    def write_tails(self, plan: ForwardPlan, spans: list, layer: int, written: Stamps) -> None:
        for tail, layout in self.compressors[layer]:
            if plan.batch.captures is not None and layout.overlap:
                c = torch.zeros(len(written), layout.columns)
                c[:, : layout.width] = torch.from_numpy(written)[:, None]
                write = SimpleNamespace(
                    layout=layout, c=c, z=c + 1, ape=torch.ones(layout.ratio, layout.columns)
                )
                plan.batch.captures.before_append(layer, [write])
            if layout.online:
                self.write_states(layout, spans, layer, written)
                continue
            first = 0
            for request, start, count in spans:
                for stream, stored in (("a", layout.ka), ("b", layout.kb)):
                    if stored is None:
                        continue
                    rows = stored.rows
                    kept = np.arange(max(start, start + count - rows), start + count)
                    values = written[first + kept - start, None]
                    self.planes[layer, f"{tail}_k{stream}"][request.slot, kept % rows] = values
                    self.planes[layer, f"{tail}_z{stream}"][request.slot, kept % rows] = values + 2
                first += count

    def write_states(
        self, layout: CompressorLayout, spans: list, layer: int, written: Stamps
    ) -> None:
        """Goes on from the state in the ring, as a fold does: what is wrong there stays wrong."""
        assert layout.state is not None
        ring, rows = self.planes[layer, "tail_state"], layout.state.rows
        first = 0
        for request, start, count in spans:
            before = int(ring[request.slot, (start - 1) % rows, 0, 0]) if start % BLOCK else 0
            states = fold_stamps(written[first : first + count], start, before)
            kept = np.arange(max(start, start + count - rows), start + count)
            ring[request.slot, kept % rows] = states[kept - start, None, None]
            first += count

    def write_entries(
        self, plan: ForwardPlan, layer: int, ratio: int, written: Stamps, table: np.ndarray
    ) -> None:
        for slot, start, end, first, entry0, entries, *_ in plan.batch.items[ratio].tolist():
            for entry in range(entry0, entry0 + max(0, entries)):
                if (entry + 1) * ratio > end or slot < 0:
                    continue
                block_id = table[slot, entry * ratio // BLOCK]
                last = first + (entry + 1) * ratio - 1 - start
                group = written[max(first, last - ratio + 1) : last + 1]
                value = GARBAGE if GARBAGE in group else group[-1]
                row = entry % (BLOCK // ratio)
                for name in ("entries", "index_keys"):
                    if (layer, name) in self.planes:
                        self.planes[layer, name][block_id, row] = value

    # ---- what must hold ------------------------------------------------------------------------

    def check_bytes(self, request: Request) -> None:
        life, length = self.lives[request], request.length
        stamps = np.array(life.stamps[: max(length, request.reused_tokens)], dtype=np.int64)
        table = self.manager.memory.block_table.numpy()[request.slot]
        ids = np.array(request.block_ids, dtype=np.int64)
        computed = max(length, request.reused_tokens)
        used = -(-computed // BLOCK)
        told = min(used, request.published_blocks)  # the next step tells the rest
        assert (table[:told] == ids[:told]).all()
        for layer, spec in enumerate(MODEL.layers):
            if spec.ratio:
                entries = computed // spec.ratio
                at = np.arange(entries)
                expected = stamps[(at + 1) * spec.ratio - 1, None]
                for name in ("entries", "index_keys"):
                    plane = self.planes.get((layer, name))
                    if plane is not None:
                        rows = plane[ids[at * spec.ratio // BLOCK], at % (BLOCK // spec.ratio)]
                        assert (rows == expected).all(), (layer, name)
            if length < request.reused_tokens and life.zeroed_at:
                continue  # in the middle of a replay
            rows = self.schema.ring_rows
            at = np.arange(max(0, length - WINDOW + 1), length)
            found = self.planes[layer, "window"][request.slot, at % rows]
            assert (found == stamps[at, None]).all(), (layer, "window")
            for tail, layout in self.compressors[layer]:
                group = length - length % spec.ratio
                if layout.state is not None and length > group:
                    expected = fold_stamps(stamps[group:length], group, 0)[-1]
                    newest = (length - 1) % layout.state.rows
                    found = self.planes[layer, "tail_state"][request.slot, newest]
                    assert (found == expected).all(), (layer, "state")
                for stream, stored, begin in (
                    ("a", layout.ka, group),
                    ("b", layout.kb, max(0, group - spec.ratio)),
                ):
                    if stored is None:
                        continue
                    at, rows = np.arange(begin, length), stored.rows
                    for value, bias in (("k", 0), ("z", 2)):
                        plane = self.planes[layer, f"{tail}_{value}{stream}"]
                        found = plane[request.slot, at % rows]
                        assert (found == stamps[at, None] + bias).all(), (layer, tail, stream)

    def poison_free(self) -> None:
        manager = self.manager
        manager.memory.block_arena.bytes.numpy()[manager._parts.table.allocator._free] = 0xFF
        manager.memory.slot_arena.bytes.numpy()[manager._parts.table.free_slots] = 0xFF
        assert manager._parts.prefix
        manager._parts.prefix.pool.bytes.numpy()[manager._parts.prefix.rows._free] = 0xFF

    def check_all(self) -> None:
        self.manager.check_invariants()
        stats = self.manager.stats()
        assert stats.blocks_free + stats.blocks_live + stats.blocks_cached == BLOCKS
        assert stats.blocks_live == len({b for r in self.lives for b in r.block_ids})
        assert stats.requests_live == len(self.lives)
        for request in self.lives:
            self.check_bytes(request)
        self.poison_free()

    # ---- the calls -----------------------------------------------------------------------------

    def text(self, tokens: int) -> list[int]:
        """The start of one of a few texts, and from some point on another: prefixes recur."""
        first, second = self.rng.choice(self.texts), self.rng.choice(self.texts)
        at = min(tokens, self.rng.choice((0, 32, self.rng.randrange(CONTEXT))))
        return first[:at] + second[at:tokens]

    def note(self, request: Request, life: Life) -> None:
        self.lives[request] = life
        life.zeroed_at = request.resume.start if request.resume.source == "replay" else 0

    def admit(self) -> None:
        tokens, salt = self.rng.randrange(1, CONTEXT), self.rng.choice((0, 0, 0, 1))
        life = Life(self.text(tokens), salt)
        request = self.manager.admit_request(
            np.array(life.ids, dtype=np.int32), salt="tenant" if salt else None
        )
        assert request.length == request.resume.start < tokens
        assert request.resume.reused_tokens <= (tokens - 1) // BLOCK * BLOCK
        self.note(request, life)
        self.check_bytes(request)

    def fork(self) -> None:
        request = self.rng.choice(list(self.lives))
        life = self.lives[request]
        for fork in self.manager.fork(request, self.rng.randrange(1, 3)):
            twin = Life(list(life.ids), life.salt)
            twin.zeroed_at = life.zeroed_at
            self.lives[fork] = twin
            assert fork.length == request.length
            self.check_bytes(fork)

    def rewind(self) -> None:
        request = self.rng.choice(list(self.lives))
        life = self.lives[request]
        back = self.rng.choice((0, 1, 2, 4, self.rng.randrange(request.length + 1)))
        length = max(0, request.length - back)
        plan = self.manager.rewind(request, length)
        self.count(f"rewind from {plan.source}")
        assert request.length == plan.start <= length == plan.end
        if plan.source != "rings":
            life.zeroed_at = plan.start if plan.source == "replay" else 0
        # what comes behind is something else now
        room = self.rng.randrange(min(40, CONTEXT - length) + 1)
        life.change(length, [self.rng.randrange(50) for _ in range(room)])
        self.check_bytes(request)

    def extend(self) -> None:
        request = self.rng.choice(list(self.lives))
        self.manager.room.extend(request, self.rng.randrange(60))

    def release(self) -> None:
        request = self.rng.choice(list(self.lives))
        self.manager.release_request(request)
        del self.lives[request]

    def reset(self) -> None:
        request = self.rng.choice(list(self.lives))
        self.manager.room.reset_slot(request)
        self.note(request, Life(self.text(self.rng.randrange(1, 60)), self.lives[request].salt))

    def evict(self) -> None:
        self.manager.prefix.evict(self.rng.randrange(6))

    def pin(self) -> None:
        if self.pins and self.rng.random() < 0.6:
            self.manager.prefix.unpin(self.pins.pop(self.rng.randrange(len(self.pins))))
        else:
            self.pins.append(self.manager.prefix.pin(self.rng.choice(self.texts)[:64]))

    def step(self) -> None:
        batch = self.rng.sample(
            list(self.lives), self.rng.randrange(1, min(3, len(self.lives)) + 1)
        )
        wide = self.rng.random() < 0.5
        counts = []
        for request in batch:
            life = self.lives[request]
            count = self.rng.choice((1, 17, 37) if wide else (0, 1, 1, 2, 4))
            missing = request.length + count - len(life.ids)
            if missing > 0:
                life.change(len(life.ids), [self.rng.randrange(50) for _ in range(missing)])
            counts.append(count)
        plan = self.manager.prepare_forward(list(zip(batch, counts, strict=True)))
        if self.rng.random() < 0.1:
            if plan.batch.is_decode:
                self.write(plan)
            return self.manager.abandon(plan)
        self.write(plan)
        # prompt tokens stay; of the rest up to 4 are rejected, and something else comes instead
        accepted = [
            max(0, n - self.rng.randrange(DRAFTS + 2)) if self.rng.random() < 0.4 else n
            for n in counts
        ]
        ids = [
            token
            for request, n in zip(batch, counts, strict=True)
            for token in self.lives[request].ids[request.length : request.length + n]
        ]
        tell = self.rng.random() < 0.95
        self.manager.commit(plan, accepted, ids=ids if tell else None)
        for request, n, kept in zip(batch, counts, accepted, strict=True):
            life = self.lives[request]
            known = len(request.trail.ids) if request.trail is not None else 0
            if kept < n and known <= request.length and request.length >= request.reused_tokens:
                life.change(request.length, [])
            if self.rng.random() < 0.25:
                self.check_bytes(request)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1


CALLS = (
    (0.15, World.admit),
    (0.05, World.fork),
    (0.10, World.rewind),
    (0.04, World.extend),
    (0.16, World.release),
    (0.01, World.reset),
    (0.02, World.evict),
    (0.02, World.pin),
    (1.00, World.step),
)


def live(policy: SnapshotPolicy, steps: int, seed: int, state: HcaState) -> World:
    world = World(policy, seed, state)
    for number in range(steps):
        dice, call = world.rng.random(), World.step
        for share, candidate in CALLS:
            if dice < share:
                call = candidate
                break
            dice -= share
        if not world.lives and call not in (World.evict, World.pin):
            call = World.admit
        try:
            call(world)
            world.count(call.__name__)
        except (OutOfBlocks, OutOfSlots, ContextOverflow) as error:
            world.count(type(error).__name__)
            # the pool would stay full of those who wait for each other
            if isinstance(error, OutOfBlocks) and world.rng.random() < 0.5:
                world.release()
        except InvalidInput:
            if call is not World.pin:  # which may find nothing to pin
                raise
        if number % CHECK_EVERY == 0:
            world.check_all()
    world.check_all()
    return world


def lives(steps: int) -> list[tuple[SnapshotPolicy, int, HcaState]]:
    return [
        (full(), steps * 4 // 10, "raw"),
        (periodic(64), steps * 3 // 10, "raw"),
        (zero(), steps * 3 // 10, "raw"),
        (full(), steps // 10, "online"),
        (zero(), steps // 10, "online"),
    ]


@pytest.mark.parametrize(
    ("policy", "steps", "state"),
    [
        *lives(STEPS),
        *(pytest.param(*life, marks=pytest.mark.nightly) for life in lives(NIGHTLY_STEPS)),
    ],
    ids=str,
)
def test_random_calls_keep_every_byte_right(policy: SnapshotPolicy, steps: int, state: HcaState):
    world = live(policy, steps, seed=steps, state=state)
    manager = world.manager
    stats = manager.stats().prefix
    assert stats is not None
    # everything happened often enough to mean something
    assert sum(world.counts[call.__name__] for _, call in CALLS) > 0.7 * steps
    for what in ("admit", "fork", "rewind", "release", "step", "OutOfBlocks", "rewind from rings"):
        assert world.counts[what] > steps // 200, world.counts
    few = steps // 400
    if policy.kind == "zero":
        assert world.counts["rewind from replay"] > few
        assert stats.hits["replay"] > few
    else:
        assert world.counts["rewind from snapshot"] > few
        assert stats.hits["snapshot"] > few
        assert stats.snapshot_evictions > few
    assert stats.hits["blocks_only"] > few
    assert stats.block_evictions > steps // 200
    # nothing leaks
    for request in list(world.lives):
        manager.release_request(request)
    for pinned in world.pins:
        manager.prefix.unpin(pinned)
    manager.prefix.evict()
    assert manager.stats().blocks_free == BLOCKS
    assert manager.stats().prefix.snapshots_used == 0
    manager.check_invariants()
