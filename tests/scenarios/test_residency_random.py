"""Random lives of requests whose entries may be in host memory: every output bit is that of a
manager with everything on the device.

Two managers get the same calls. The memory of the second is much too small for the entries of its
requests, so blocks leave all the time; what is not in use of it is poison: free rows of the device,
rows of host memory without a copy, hot records without an entry, staging.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch

from dsv4.cache.batch import Batch
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import OutOfBlocks, OutOfSlots
from dsv4.model import ModelSpec
from dsv4.reference.pages import page_rows
from tests.support.attending_model import AttendingModel

POISON = 0xEE
CONTEXT, SLOTS, BLOCKS, STEP = 1280, 3, 26, 256
VOCABULARY = 512


def of_pro() -> ModelSpec:
    """The first layers of V4-Pro and its draft layer, with small numbers: it begins with HCA
    layers, where V4-Flash has windows only, and selects more of what it has."""
    pro, tiny = ModelSpec.preset("v4-pro"), ModelSpec.preset("tiny")
    chosen = (*pro.layers[:5], pro.layers[-1])
    layers = (replace(spec, layer=nth, owner=nth) for nth, spec in enumerate(chosen))
    return replace(tiny, name="pro-tiny", heads=8, index_topk=32, layers=tuple(layers))


MODELS: dict[str, Callable[[], ModelSpec]] = {
    "tiny": partial(ModelSpec.preset, "tiny"),
    "pro-tiny": of_pro,
    "v41-tiny": partial(ModelSpec.preset, "v41-tiny"),
}


@dataclass
class Pair:
    """The same request of both managers, and the tokens that it has or will have."""

    requests: tuple[Request, Request]
    ids: list[int] = field(default_factory=list)
    prompt: int = 0  # tokens that both managers were given with the prompt

    def cut(self, length: int) -> None:
        """Other tokens may come from `length` on."""
        self.prompt = min(self.prompt, length)
        del self.ids[length:]


class Worlds:
    # how the two managers are laid out
    layouts: tuple[dict[str, Any], ...] = ({"entries_apart": False}, {"entries_apart": True})

    def __init__(
        self,
        model: str,
        seed: int,
        *,
        drafts: int,
        plans: int = 1,
        device: str = "cpu",
        **options: Any,
    ):
        self.rng = random.Random(seed)
        self.drafts, self.device = drafts, torch.device(device)
        spec = MODELS[model]()
        schemas = [
            CacheSchema.build(
                spec, max_context=CONTEXT, max_draft_tokens=drafts, **layout, **options
            )
            for layout in self.layouts
        ]
        self.model = AttendingModel(schemas[0], vocabulary=VOCABULARY, device=device)
        common: dict[str, Any] = {
            "num_blocks": BLOCKS,
            "max_requests": SLOTS,
            "max_step_tokens": STEP,
            "max_open_plans": plans,
            "prefix": PrefixOptions(policy=full(), snapshots=6),
            "device": device,
        }
        below = {}
        if schemas[1].entries_apart:
            below = {
                "host_memory": BLOCKS * schemas[1].bytes.entries,
                "hot_rows": (1 + drafts) * spec.index_topk + 3,
            }
        self.managers = (
            KVCacheManager(schemas[0], **common),
            KVCacheManager(schemas[1], **below, **common),
        )
        self.texts = [[self.rng.randrange(VOCABULARY) for _ in range(CONTEXT)] for _ in range(3)]
        self.pairs: list[Pair] = []
        self.counts: dict[str, int] = {}
        self.poison()

    # ---- calls of both -------------------------------------------------------------------------

    def both(self, call: Any) -> tuple[Any, Any] | None:
        """What a call returns of each manager, or None if both refuse it for want of memory."""
        results: list[Any] = []
        for nth, manager in enumerate(self.managers):
            try:
                results.append(call(manager, nth))
            except (OutOfBlocks, OutOfSlots) as error:
                results.append(error)
        if any(isinstance(result, Exception) for result in results):
            assert type(results[0]) is type(results[1]), results
            assert getattr(results[1], "memory", "blocks") == "blocks", "rows were promised"
            return None
        return results[0], results[1]

    def admit(self) -> None:
        """A prompt that begins as one of a few texts, so that prefixes recur."""
        shared = self.rng.choice((0, 256, 640, 896, self.rng.randrange(900)))
        tail = [self.rng.randrange(VOCABULARY) for _ in range(self.rng.randrange(1, 300))]
        ids = self.rng.choice(self.texts)[:shared] + tail
        found = self.both(lambda manager, _: manager.admit_request(ids))
        if found:
            first, second = found
            assert first.resume == second.resume
            self.count(first.resume.source)
            self.pairs.append(Pair(found, ids, len(ids)))

    def fork(self) -> None:
        pair = self.rng.choice(self.pairs)
        found = self.both(lambda manager, nth: manager.fork(pair.requests[nth], 1))
        if found:
            self.count("fork")
            forks = found[0][0], found[1][0]
            self.pairs.append(Pair(forks, [*pair.ids], pair.prompt))

    def rewind(self) -> None:
        pair = self.rng.choice(self.pairs)
        length = pair.requests[0].length
        back = self.rng.choice((1, 2, 3, self.rng.randrange(length + 1)))
        to = max(0, length - back)
        found = self.both(lambda manager, nth: manager.rewind(pair.requests[nth], to))
        if found:
            assert found[0] == found[1]
            self.count(f"rewind from {found[0].source}")
            pair.cut(to)

    def release(self) -> None:
        pair = self.pairs.pop(self.rng.randrange(len(self.pairs)))
        self.both(lambda manager, nth: manager.release_request(pair.requests[nth]))

    def reset(self) -> None:
        pair = self.rng.choice(self.pairs)
        self.both(lambda manager, nth: manager.room.reset_slot(pair.requests[nth]))
        pair.cut(0)
        self.count("reset")

    # ---- steps ---------------------------------------------------------------------------------

    def work(self, among: list[Pair], room: int) -> list[tuple[Pair, list[int]]]:
        """Chunks of prompts, and a few tokens of those that have none left."""
        found = []
        for pair in self.rng.sample(among, self.rng.randrange(1, len(among) + 1)):
            length = pair.requests[0].length
            most = min(room, CONTEXT - length)
            left = len(pair.ids) - length
            count = min(most, self.rng.choice((left, left, 128, self.rng.randrange(1, 200))), left)
            if left <= 0:
                count = min(most, self.rng.randrange(1, 2 + self.drafts))
                pair.ids += [self.rng.randrange(VOCABULARY) for _ in range(count)]
            if count > 0:
                found.append((pair, pair.ids[length : length + count]))
                room -= count
        few = 1 + self.drafts
        return sorted(found, key=lambda each: len(each[1]) > few)  # chunks last

    def prepare(self, work: list[tuple[Pair, list[int]]]) -> tuple[Any, Any] | None:
        few = all(len(ids) <= 1 + self.drafts for _, ids in work)
        options: dict[str, Any] = {}
        if few and self.rng.random() < 0.3:
            options = {"pad_tokens": 16, "pad_requests": SLOTS}
        elif self.rng.random() < 0.3:
            options = {"chunks_apart": True}

        def call(manager: KVCacheManager, nth: int) -> Any:
            steps = [(pair.requests[nth], len(ids)) for pair, ids in work]
            return manager.prepare_forward(steps, **options)

        return self.both(call)

    def run(self, plans: tuple[Any, Any], work: list[tuple[Pair, list[int]]]) -> None:
        """All layers of a step, on both; the outputs are the same to the bit."""
        ids = [token for _, row in work for token in row]
        first = 0
        for of_first, of_second in zip(plans[0].batches, plans[1].batches, strict=True):
            last = first + of_first.num_tokens
            expected = self.model.run(self.managers[0], of_first, ids[first:last])
            found = self.read_from_host(of_second, ids[first:last])
            assert torch.equal(expected, found), f"{of_first!r}"
            first = last

    def read_from_host(self, batch: Batch, ids: list[int]) -> torch.Tensor:
        """Hidden states of a batch of the second manager."""
        return self.model.run(self.managers[1], batch, ids)

    def end(self, plans: tuple[Any, Any], work: list[tuple[Pair, list[int]]]) -> None:
        """Commits with some drafts rejected, or lets the plan go."""
        is_few = all(len(ids) <= 1 + self.drafts for _, ids in work)
        fate = self.rng.random()
        if is_few and fate < 0.1:
            self.both(lambda manager, nth: manager.abandon(plans[nth]))
            return
        if is_few and fate < 0.15:
            self.both(lambda manager, nth: manager.fail(plans[nth]))
            return
        accepted = None
        if is_few and self.drafts:
            accepted = [self.rng.randrange(1, len(ids) + 1) for _, ids in work]
        ids = [token for _, row in work for token in row]
        told = None if self.rng.random() < 0.1 else ids  # without ids nothing of it is cached
        self.both(lambda manager, nth: manager.commit(plans[nth], accepted, ids=told))
        for pair, _ in work:
            length = pair.requests[0].length
            assert pair.requests[1].length == length
            if accepted is not None:
                del pair.ids[max(length, pair.prompt) :]

    def step(self) -> None:
        work = self.work(self.pairs, STEP)
        plans = self.prepare(work) if work else None
        if plans:
            self.run(plans, work)
            self.end(plans, work)
            self.count("step")

    def two_steps(self) -> None:
        """Two plans at once, of different requests."""
        half = len(self.pairs) // 2
        works = self.work(self.pairs[:half], STEP), self.work(self.pairs[half:], STEP)
        begun = [(plans, work) for work in works if work and (plans := self.prepare(work))]
        for plans, work in self.rng.sample(begun, len(begun)):
            self.run(plans, work)
        for plans, work in self.rng.sample(begun, len(begun)):
            self.end(plans, work)
        self.count("two steps")

    # ---- what must hold ------------------------------------------------------------------------

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def poison(self) -> None:
        """All that the second manager has and does not use."""
        manager = self.managers[1]
        residency, entries = manager._parts.residency, manager.memory.entries
        assert residency is not None
        assert entries is not None
        places, unused = residency.places, ~residency.places.in_host
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # kernels may still read what is free by now
        unused[residency.copies.on_their_way()] = False
        entries.arena.bytes[places._free] = POISON
        residency._pool.bytes[torch.from_numpy(unused)] = POISON
        manager.memory.block_arena.bytes[manager._parts.table.allocator._free] = POISON
        for page in entries.layout.pages:
            hot = entries.hot[page.layer]
            at = (hot.entry_of < 0).nonzero()
            record = at[:, 0] * hot.records + at[:, 1]
            rows = hot.first_row + record // page.rows
            for part in page_rows(entries.arena.bytes, page):
                part[rows, record % page.rows] = POISON
        for lane in manager.memory.lanes:
            assert lane.entries is not None
            lane.entries.chunks.rows.fill_(POISON)
            lane.entries._rows.fill_(-77)

    def live(self, calls: int, *, two: bool) -> None:
        choices = [(self.step, 16), (self.admit, 3), (self.fork, 2), (self.rewind, 1)]
        choices += [(self.release, 2), (self.reset, 0.2)]
        if two:
            choices.append((self.two_steps, 8))
        actions, weights = zip(*choices, strict=True)
        for _ in range(calls):
            action = self.rng.choices(actions, weights)[0]
            if not self.pairs or (action == self.two_steps and len(self.pairs) < 2):
                action = self.admit
            action()
            self.managers[1].check_invariants()
            self.poison()


CASES = [
    *(("tiny", 0, 1), ("tiny", 1, 2), ("pro-tiny", 1, 2)),
    *(("v41-tiny", 0, 1), ("v41-tiny", 2, 2)),
]


@pytest.mark.parametrize(("model", "drafts", "plans"), CASES)
def test_outputs_do_not_depend_on_where_entries_are(model: str, drafts: int, plans: int):
    lives(model, 5, drafts, plans, calls=45)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("model", "drafts", "plans"), CASES)
def test_many_outputs_do_not_depend_on_where_entries_are(
    model: str, drafts: int, plans: int, seed: int
):
    lives(model, seed, drafts, plans, calls=400)


# how entries are kept, in a model whose own formats are others
FORMATS: dict[str, dict[str, Any]] = {
    "as V4.1's": {"entry_format": "v41_fp4", "window_format": "v41_fp8"},
    "as V4.1's windows": {"entry_format": "v41_fp8"},
    "as bf16": {"entry_format": "bf16"},
    "folded": {"hca_state": "online"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_other_models(name: str, seed: int):
    lives("pro-tiny", seed, 1, 2, calls=200, **FORMATS[name])


def lives(model: str, seed: int, drafts: int, plans: int, *, calls: int, **options: Any) -> None:
    worlds = Worlds(model, seed, drafts=drafts, plans=plans, **options)
    worlds.live(calls, two=plans > 1)
    assert_both_were_needed(worlds)


def assert_both_were_needed(worlds: Worlds) -> None:
    stats = worlds.managers[1].stats().residency
    assert stats is not None
    assert stats.blocks_left > 3, "nothing left the device"
    assert worlds.counts["step"] > 10
    worlds.managers[1].stats()  # on a GPU counts are those that had arrived at the call before
    if worlds.device.type == "cuda":
        torch.cuda.synchronize()
    stats = worlds.managers[1].stats().residency
    assert stats is not None
    assert stats.misses > 30, "nothing was fetched"
    assert stats.hits > 0
