"""Entries in host memory: what is refused, how much there is of each memory, and what happens when
a copy fails. tests/scenarios/test_residency_random.py compares whole lives."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dsv4
from dsv4.cache import build
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full, zero
from dsv4.cache.requests import Request
from dsv4.cache.residency import pool as pools
from dsv4.cache.residency.places import EntryPlaces
from dsv4.cache.schema import CacheSchema
from dsv4.cache.transfers.copies import Mark
from dsv4.errors import InvalidInput, OutOfBlocks, PoolTooSmall, RecoveryNeeded, SchemaMismatch
from dsv4.model import ModelSpec
from dsv4.reference import host_entries
from dsv4.tiers.disk import DiskTier
from tests.support.attending_model import AttendingModel
from tests.support.faults import DeviceFault, Faults, Interrupts
from tests.support.late_streams import LateGpu
from tests.support.owned import bytes_of

TINY = ModelSpec.preset("tiny")
SIZES: dict[str, Any] = {"max_context": 2048, "max_draft_tokens": 1}
PLAIN = CacheSchema.build(TINY, **SIZES)
APART = CacheSchema.build(TINY, entries_apart=True, **SIZES)
AHEAD: dict[str, Any] = {"max_context": 2048, "max_draft_tokens": 1, "steps_ahead": 1}
BLOCKS = 24
MODEL = AttendingModel(PLAIN)
IDS = torch.randint(0, 512, (2000,), generator=torch.Generator().manual_seed(3)).tolist()
POISON = 0xEE


def made(schema: CacheSchema = APART, **options: Any) -> KVCacheManager:
    if schema.entries_apart:
        options.setdefault("host_memory", BLOCKS * schema.bytes.entries)
    options = {"max_requests": 3, "max_step_tokens": 256, "num_blocks": BLOCKS} | options
    options.setdefault("prefix", PrefixOptions(policy=full(), snapshots=4, model_id="x"))
    manager = KVCacheManager(schema, **options)
    manager.memory.block_arena.bytes.fill_(POISON)
    if manager.memory.entries is not None:
        manager.memory.entries.arena.bytes.fill_(POISON)
        residency(manager)._pool.bytes.fill_(POISON)
    return manager


def residency(manager: KVCacheManager) -> Any:
    assert manager._parts.residency is not None
    return manager._parts.residency


def run(manager: KVCacheManager, request: Request, end: int, chunk: int = 200) -> list[Tensor]:
    found = []
    while request.length < end:
        start, count = request.length, min(chunk, end - request.length)
        found.append(MODEL.step(manager, [(request, IDS[start : start + count])]))
    return found


def expected(start: int, end: int) -> Tensor:
    """What the same tokens give with everything on the device."""
    manager = made(PLAIN)
    return torch.cat(run(manager, manager.admit_request(IDS[:end]), end))[start:]


# ---- what is refused ---------------------------------------------------------------------------


def test_options_that_do_not_go_together_are_refused(tmp_path: Path):
    enough = BLOCKS * APART.bytes.entries
    cases: list[tuple[CacheSchema, dict[str, Any], str]] = [
        (PLAIN, {"host_memory": enough}, "entries_apart=True"),
        (APART, {"host_memory": None}, "give host_memory"),
        (PLAIN, {"hot_rows": 64}, "give host_memory"),
        (APART, {"host_memory": enough - 1}, f"holds the entries of {BLOCKS - 1} blocks"),
        (APART, {"hot_rows": 1}, "hot_rows=1"),
        (APART, {"entry_rows": 7}, "entry_rows=7: the entries of 8 blocks"),
    ]
    for schema, options, found in cases:
        with pytest.raises(InvalidInput, match=found):
            made(schema, **options)


def test_reads_that_do_not_look_in_host_memory_are_refused():
    manager = made()
    request = manager.admit_request()
    plan = manager.prepare_forward([(request, 1)])
    csa = next(spec.layer for spec in TINY.layers if spec.attention == "csa")
    for layer in range(len(TINY.layers)):
        handle = manager.acquire(layer, plan.batch)
        if layer == csa:
            with pytest.raises(SchemaMismatch, match="host memory"):
                handle.read_classical_view()
            with pytest.raises(SchemaMismatch, match="host memory"):
                handle.gather_compressed_kv(torch.zeros((1, 1), dtype=torch.int32))
        elif TINY.layers[layer].attention == "hca":
            handle.read_classical_view()


def test_memory_that_the_system_does_not_give_or_pin_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InvalidInput, match=r"host_memory: the system gives no piece"):
        pools.HostPool(1 << 40, 1 << 30, torch.device("cpu"))
    import dsv4.tiers.pin as pinning

    def refuse(memory: memoryview) -> Any:
        raise InvalidInput("CUDA does not register it")

    monkeypatch.setattr(pinning, "pin", refuse)
    with pytest.raises(InvalidInput, match=r"host_memory: .* cannot be pinned .*ulimit"):
        pools.HostPool(4, 4096, torch.device("cuda"))


# ---- how much there is -------------------------------------------------------------------------


def test_no_more_is_allocated_than_asked_of_either_memory():
    asked, host = 6 << 20, 12 << 20
    options: dict[str, Any] = {"max_requests": 3, "max_step_tokens": 256}
    manager = build.manager_from_memory(
        APART, memory_bytes=asked, host_memory=host, context=512, **options
    )
    memory, stats = manager.memory.memory_bytes(), manager.stats().residency
    assert stats is not None
    assert stats.host_bytes <= host
    assert memory.total <= asked
    assert asked - memory.total < APART.bytes.block + APART.bytes.entries
    assert bytes_of(manager) == memory.total + stats.host_bytes
    assert manager._parts.table.allocator.total == stats.host_bytes // APART.bytes.entries


def test_too_little_of_either_memory_says_which():
    options: dict[str, Any] = {"max_requests": 3, "max_step_tokens": 256}
    with pytest.raises(PoolTooSmall, match="of host memory hold"):
        build.manager_from_memory(APART, memory_bytes=30 << 20, host_memory=1000, **options)
    with pytest.raises(PoolTooSmall, match="on the device do not hold") as caught:
        build.manager_from_memory(APART, memory_bytes=1000, host_memory="1GB", **options)
    least = caught.value.minimum_bytes
    build.manager_from_memory(APART, memory_bytes=least, host_memory="1GB", **options)
    with pytest.raises(InvalidInput, match="without host memory the device holds"):
        build.manager_from_memory(
            APART, memory_bytes=60 << 20, host_memory="300kB", context=128, **options
        )


def test_one_call_makes_a_cache_with_host_memory():
    manager = dsv4.Cache(
        TINY, memory="14MB", host_memory="20MB", max_context=2048, max_requests=3,
        max_step_tokens=256,
    )  # fmt: skip
    assert manager.schema.entries_apart
    assert manager.stats().residency is not None
    assert dsv4.Cache(TINY, memory="40MB", max_context=2048).stats().residency is None


# ---- what a life needs -------------------------------------------------------------------------


def test_a_hit_on_blocks_in_host_memory_copies_nothing_up():
    given = []
    for schema in (PLAIN, APART):
        manager = made(schema, prefix=PrefixOptions(policy=full(), snapshots=30, model_id="x"))
        first = manager.admit_request(IDS[:1500])
        run(manager, first, 1500)
        manager.release_request(first)
        other = manager.admit_request(IDS[::-1][:1200])
        while other.length < 1200:  # takes the rows
            n = min(200, 1200 - other.length)
            MODEL.step(manager, [(other, IDS[::-1][other.length : other.length + n])])
        again = manager.admit_request(IDS[:1500])
        assert again.length == 1408
        if schema is APART:
            places = residency(manager).places
            assert all(places.row_of[b] < 0 for b in again.block_ids[:8])
            before = places.on_device
        given.append(torch.cat(run(manager, again, 1440, chunk=2)))
    assert torch.equal(*given)
    assert places.on_device <= before + 1  # the block that it writes


def test_a_state_goes_to_a_disk_and_comes_back(tmp_path: Path):
    disk = DiskTier(tmp_path, 1 << 26)
    manager = made(tiers=[disk])
    request = manager.admit_request(IDS[:1400])
    run(manager, request, 1301)
    assert manager.stats().residency.blocks_only_in_host > 0  # type: ignore[union-attr]
    manager.tiers.suspend(request)
    assert manager.tiers.drain(120)
    manager.prefix.evict()
    for memory in (manager.memory.entries.arena.bytes, residency(manager)._pool.bytes):  # type: ignore[union-attr]
        memory.fill_(POISON)
    manager.memory.block_arena.bytes.fill_(POISON)
    back = manager.tiers.resume(IDS[:1301], timeout_s=120)
    assert back.length == 1301
    manager.check_invariants()
    manager.room.extend(back, 99)
    found = torch.cat([*run(manager, back, 1310, chunk=1), *run(manager, back, 1400)])
    assert torch.equal(found, expected(1301, 1400))
    manager.tiers.close(120)
    disk.close(120)


def test_steps_may_overlap():
    """Each is planned and run before the one before it is committed."""
    outputs = []
    for apart in (False, True):
        schema = CacheSchema.build(TINY, entries_apart=apart, **AHEAD)
        manager = made(schema, max_open_plans=2)
        request = manager.admit_request(IDS[:1200])
        run(manager, request, 1150)
        manager.room.extend(request, 300)
        found, at = [], request.length
        before = manager.prepare_forward([(request, 2)])
        found.append(MODEL.run(manager, before.batch, IDS[at : at + 2]))
        for nth in range(60):
            kept = 1 + nth % 2
            accepted = torch.tensor([kept], dtype=torch.int32)
            plan = manager.prepare_forward([(request, 2)], after=before, accepted=accepted)
            ids = IDS[at + kept : at + kept + 2]
            found.append(MODEL.run(manager, plan.batch, ids))
            manager.commit(before, [kept])
            manager.check_invariants()
            at, before = at + kept, plan
        manager.abandon(before)
        outputs.append(torch.cat(found))
    assert torch.equal(*outputs)


def test_a_chunk_that_is_planned_already_reads_what_its_request_had_then():
    """The step before it completes a block that is cached, and the cached one has left."""
    schema = CacheSchema.build(TINY, entries_apart=True, **AHEAD)
    manager = made(schema, max_open_plans=2)
    first = manager.admit_request(IDS[:256])
    run(manager, first, 256)
    manager.release_request(first)
    other = manager.admit_request(IDS[700:1900])
    for start in range(700, 1900, 200):
        MODEL.step(manager, [(other, IDS[start : start + 200])])
    request = manager.admit_request(IDS[:512], reuse=False)
    before = manager.prepare_forward([(request, 128)])
    found = [MODEL.run(manager, before.batch, IDS[:128])]
    after = manager.prepare_forward([(request, 128)], after=before)
    manager.commit(before, ids=IDS[:128])
    cached = manager._parts.prefix.required().match(request.trail).nodes[0].block_id
    assert residency(manager).places.row_of[cached] < 0
    assert request.block_ids[0] != cached
    found.append(MODEL.run(manager, after.batch, IDS[128:256]))
    manager.commit(after, ids=IDS[128:256])
    assert request.block_ids[0] == cached
    found += run(manager, request, 512)
    assert torch.equal(torch.cat(found), expected(0, 512))
    manager.check_invariants()


# ---- what fails --------------------------------------------------------------------------------


CALLS: dict[str, Any] = {
    "prepare a chunk": lambda m, r: m.prepare_forward([(r, 200)]),
    "prepare a decode": lambda m, r: m.prepare_forward([(r, 2)]),
    "admit": lambda m, r: m.admit_request(IDS[:1300]),
    "fork": lambda m, r: m.fork(r, 2),
    "rewind a little": lambda m, r: m.rewind(r, r.length - 1),
    "rewind far": lambda m, r: m.rewind(r, 700),
}


def busy(schema: CacheSchema = APART) -> tuple[KVCacheManager, Request]:
    manager = made(schema, max_requests=4)
    request = manager.admit_request(IDS[:1100])
    run(manager, request, 1023, chunk=256)
    manager.room.extend(request, 300)
    run(manager, request, 1025, chunk=2)
    return manager, request


IN_CI = ("prepare a chunk", "fork")


@pytest.mark.parametrize(
    "name",
    [n if n in IN_CI else pytest.param(n, marks=pytest.mark.nightly) for n in CALLS],
)
def test_a_device_error_in_any_copy_loses_nothing(name: str):
    manager, request = busy()
    length, at = request.length, 0
    while True:
        faults = Faults(at)
        with faults.injected():
            try:
                result = CALLS[name](manager, request)
            except DeviceFault:
                result = None
        manager.check_invariants()
        if faults.count <= at:
            break
        assert result is None
        assert request.length == length
        assert not manager.room.open_plans
        assert len(manager.requests) == 1
        at += 1
    assert at > 0 or name not in IN_CI
    if manager.room.open_plans:
        manager.abandon(manager.room.open_plans[0])
    for other in manager.requests:
        if other is not request:
            manager.release_request(other)
    start = request.length
    found = torch.cat(run(manager, request, 1150, chunk=31))
    if name == "rewind far":  # windows of draft layers fill again: not as in a cold run
        plain, same = busy(PLAIN)
        plain.rewind(same, 700)
        assert same.length == start
        assert torch.equal(found, torch.cat(run(plain, same, 1150, chunk=31)))
    else:
        assert torch.equal(found, expected(start, 1150))


def test_a_step_that_could_not_be_planned_leaves_nothing_behind():
    """One request has a block of its own that the device's table lacks yet, one has to get a block
    back that has left, and one is in a plan that comes before."""
    schema = CacheSchema.build(TINY, entries_apart=True, **AHEAD)
    manager = made(schema, max_requests=3, max_open_plans=2, entry_rows=11)
    first, second = manager.admit_request(IDS[:256]), manager.admit_request(256)
    third = manager.admit_request(IDS[900:1000])
    run(manager, first, 256, chunk=128)
    for start in (0, 128):  # without its ids, so that it need not copy what it rewinds into
        plan = manager.prepare_forward([(second, 128)])
        MODEL.run(manager, plan.batch, IDS[start : start + 128])
        manager.commit(plan)
    MODEL.step(manager, [(third, IDS[900:1000])])
    manager.rewind(first, 255)
    manager.rewind(second, 255)
    places = residency(manager).places
    with residency(manager).lending(places.rows - 2) as rows:  # all that may leave has left
        places.give(rows)
    assert places.row_of[second.block_ids[1]] < 0 <= places.row_of[first.block_ids[1]]
    before = manager.prepare_forward([(third, 40)])
    MODEL.run(manager, before.batch, IDS[1000:1040])
    steps = [(first, 1), (second, 1), (third, 1)]
    requests = first, second, third
    books = [(r.length, r.written_tokens, r.published_blocks, r.block_ids) for r in requests]
    at, plan = 0, None
    while plan is None:
        with Faults(at).injected(), suppress(DeviceFault):
            plan = manager.prepare_forward(steps, after=before)
            break
        assert books == [
            (r.length, r.written_tokens, r.published_blocks, r.block_ids) for r in requests
        ]
        manager.check_invariants()
        at += 1
    assert at > 5
    found = MODEL.run(manager, plan.batch, [IDS[255], IDS[255], IDS[1040]])
    assert torch.equal(found[:2], expected(255, 256).repeat(2, 1))


def test_what_a_call_that_broke_off_has_not_fetched_is_not_taken_for_fetched(
    monkeypatch: pytest.MonkeyPatch,
):
    """Whether the step is tried again or fails."""
    manager = made(entry_rows=8)
    request = manager.admit_request(IDS[:1300])
    run(manager, request, 1300, chunk=256)
    manager.room.extend(request, 100)
    found, copy, before = [], host_entries._copy_record, manager.stats().residency
    for nth, copied in enumerate((0, 0, 3, 3, 7)):
        left = [copied]

        def fail(*given: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise DeviceFault("CUDA error: out of memory")
            copy(*given)

        ids = IDS[1300 + nth :][:1]
        plan = manager.prepare_forward([(request, 1)])
        with monkeypatch.context() as patch:
            patch.setattr(host_entries, "_copy_record", fail)
            with suppress(DeviceFault):
                MODEL.run(manager, plan.batch, ids)
        if nth % 2:
            manager.fail(plan)
            plan = manager.prepare_forward([(request, 1)])
            # before a handle is used: the calls of a replayed graph are none of a handle's
            assert manager.memory.entries is not None
            assert not manager.memory.entries.lost
        found.append(MODEL.run(manager, plan.batch, ids))
        manager.commit(plan, ids=ids)
    assert torch.equal(torch.cat(found), expected(1300, 1305))
    after = manager.stats().residency
    assert before is not None
    assert after is not None
    assert after.misses > before.misses + 30


def test_an_interrupt_between_two_books_comes_out_as_one(monkeypatch: pytest.MonkeyPatch):
    """Nothing is undone there, which would fail halfway and hide it."""
    manager = made()
    request = manager.admit_request(IDS[:200])
    run(manager, request, 200)

    def breaks_off(places: EntryPlaces, block_id: int, row: int, depth: int) -> None:
        places.row_of[block_id] = row
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EntryPlaces, "place", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            manager.prepare_forward([(request, 200)])
    with pytest.raises(RecoveryNeeded):
        manager.prepare_forward([(request, 1)])
    manager.recover()
    manager.check_invariants()
    assert not manager.room.open_plans
    assert torch.equal(torch.cat(run(manager, request, 500)), expected(200, 500))


def test_a_replay_in_steps_shorter_than_a_block_reads_what_has_left():
    """Its blocks are complete, but it ends in the middle of the only one that it reads."""
    manager = made(entry_rows=8, prefix=PrefixOptions(policy=zero(), snapshots=4, model_id="x"))
    request = manager.admit_request(IDS[:200])
    run(manager, request, 200)
    manager.release_request(request)
    other = manager.admit_request(IDS[900:1900])  # takes the rows
    for start in range(900, 1900, 250):
        MODEL.step(manager, [(other, IDS[start : start + 250])])
    request = manager.admit_request(IDS[:200])
    assert (request.length, request.reused_tokens) == (0, 128)
    assert residency(manager).places.row_of[request.block_ids[0]] < 0
    found = torch.cat(run(manager, request, 200, chunk=40))
    assert torch.equal(found[128:], expected(128, 200))


def test_blocks_whose_copies_fail_stay_on_the_device_until_they_can_be_copied(
    monkeypatch: pytest.MonkeyPatch,
):
    manager = made()
    request = manager.admit_request(IDS[:1500])
    held = residency(manager)

    def fail(rows: Any) -> Any:
        raise DeviceFault("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(held.copies.host, "down", fail)
        found = run(manager, request, 900, chunk=128)
        assert held.places.in_host.sum() == 0
        with pytest.raises(OutOfBlocks, match="rows for entries needed") as caught:
            run(manager, request, 1500, chunk=256)
        assert caught.value.memory == "entries"
        manager.check_invariants()
    length = request.length
    found = run(manager, request, 1500)
    assert torch.equal(torch.cat(found), expected(length, 1500))
    assert manager.stats().residency.copies_failed > 0  # type: ignore[union-attr]


class Late(Mark):
    """A copy that runs until somebody says that it is over. `waited` counts the streams that were
    made to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over, self.waited = False, 0

    @property
    def passed(self) -> bool:
        return self.is_over

    def hold_back(self) -> None:
        self.waited += 1

    def wait(self) -> None:
        self.is_over = True


def running_late(manager: KVCacheManager, patch: pytest.MonkeyPatch) -> list[tuple[Late, int]]:
    """From now on copies to host memory run until they are waited for. Each with how many blocks
    it is of."""
    host, begun = residency(manager).copies.host, list[tuple[Late, int]]()
    down = host.down

    def late(rows: Any) -> Late:
        found = [*rows]
        down(found)
        begun.append((Late(), len(found)))
        return begun[-1][0]

    patch.setattr(host, "down", late)
    return begun


def test_a_block_is_copied_once_however_long_that_takes(monkeypatch: pytest.MonkeyPatch):
    """A second copy would read the row after the first one has let the block leave."""
    manager = made(prefix=PrefixOptions(policy=zero(), snapshots=4, model_id="x"))
    begun = running_late(manager, monkeypatch)
    request = manager.admit_request(IDS[:256])
    run(manager, request, 256)
    again = manager.admit_request(IDS[:300])
    assert again.reused_tokens == 256
    assert len(again.resume.replay) > 128
    run(manager, again, 256, chunk=40)
    assert sum(count for _, count in begun) == 2


def test_whoever_reads_what_counts_as_copied_waits_for_it(monkeypatch: pytest.MonkeyPatch):
    """Rows are short, so blocks leave before their copies are over. A step on another stream waits
    too, and so does what is loaded into the host memory of a block that is free again."""
    manager = made()
    begun = running_late(manager, monkeypatch)
    request = manager.admit_request(IDS[:1500])
    run(manager, request, 1300, chunk=256)
    held = residency(manager)
    assert held.places.left > 0
    mark = held.copies._early
    assert mark in [each for each, _ in begun]
    before = mark.waited
    manager.room.extend(request, 100)
    run(manager, request, 1303, chunk=1)
    assert mark.waited >= before + 3
    held.target_of(0)
    assert mark.is_over
    run(manager, request, 1304, chunk=1)
    assert held.copies._early is not mark
    assert torch.equal(torch.cat(run(manager, request, 1320, chunk=1)), expected(1304, 1320))


def test_a_row_is_not_written_before_the_copy_of_it_has_run():
    """Copies that count as arrived run as late as they may."""
    manager, gpu = made(), LateGpu()
    with gpu.installed():
        gpu.make_late(manager)
        run(manager, manager.admit_request(IDS[:1000]), 1000, chunk=250)
        held = residency(manager)
        places, arena = held.places, manager.memory.entries.arena.bytes  # type: ignore[union-attr]
        there = {b: arena[int(places.row_of[b])].clone() for b in places.with_rows()}
        late = [b for b in there if not places.in_host[b]]
        held._make_room(places.rows - 1, keep=(), before=None)
        arena[places._free] = POISON
        held.copies.wait()
        left = [b for b in late if places.is_away(b)]
        assert left
        for block_id in left:
            assert torch.equal(held._pool.bytes[block_id], there[block_id])


NIGHTLY = [
    pytest.param(name, 6, marks=pytest.mark.nightly) for name in ("prepare a decode", "fork")
]


@pytest.mark.parametrize(("name", "places"), [("prepare a chunk", 3), *NIGHTLY])
def test_an_interrupt_is_recovered_from(name: str, places: int):
    """At some of the lines of the files that are only for this."""
    files = ("/dsv4/cache/residency/",)
    manager, request = busy()
    probe = Interrupts(None, files)
    with probe.injected():
        CALLS[name](manager, request)
    whole = expected(0, 1060)
    for nth in range(places):
        manager, request = busy()
        at = nth * (probe.count - 1) // max(1, places - 1)
        with Interrupts(at, files).injected(), suppress(KeyboardInterrupt):
            CALLS[name](manager, request)
        manager.recover()
        manager.check_invariants()
        if manager.room.open_plans:
            manager.abandon(manager.room.open_plans[0])
        for other in manager.requests:
            if other is not request:
                manager.release_request(other)
        if request.is_torn:
            manager.rewind(request, min(request.length, 1000))
        start = request.length
        found = torch.cat(run(manager, request, 1060))
        assert torch.equal(found, whole[start:])
        manager.check_invariants()


# ---- another place -----------------------------------------------------------------------------


class Elsewhere:
    """What `EntryRows` asks for, and nothing more: no memory that the host reads. It might be
    another GPU's."""

    def __init__(self, blocks: int, row_bytes: int, device: torch.device) -> None:
        self.bytes = torch.full((blocks, row_bytes), POISON, dtype=torch.uint8)
        self.came = 0

    def down(self, rows: Iterable[tuple[Tensor, int]]) -> Mark:
        for row, number in rows:
            self.bytes[number].copy_(row)
            self.came += 1
        return self.mark()

    def mark(self) -> Mark:
        return Mark()

    def finish(self) -> None:
        pass

    def memory_bytes(self) -> int:
        return self.bytes.numel()


def test_entries_may_be_wherever_kernels_can_read_them(monkeypatch: pytest.MonkeyPatch):
    """A request grows, is forked, and goes on."""
    monkeypatch.setattr(pools, "HostPool", Elsewhere)
    manager = made(max_requests=3)
    held = residency(manager)
    assert isinstance(held.copies.host, Elsewhere)
    request = manager.admit_request(IDS[:1500])
    found = run(manager, request, 1300, chunk=256)
    assert held.places.left > 0
    assert held.copies.host.came > 8
    manager.rewind(request, 1299)
    (fork,) = manager.fork(request, 1)
    found = [torch.cat(found)[:1299], *run(manager, request, 1400), *run(manager, fork, 1320, 1)]
    whole = expected(0, 1400)
    assert torch.equal(torch.cat(found), torch.cat((whole, whole[1299:1320])))
    stats = manager.stats().residency
    assert stats is not None
    assert stats.host_bytes == held.copies.host.bytes.numel()
    assert stats.misses > 0
    manager.check_invariants()
