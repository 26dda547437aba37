"""`host_memory` with a host tier: entries are in host memory once, whether a block, a record or
both need them. tests/scenarios/test_residency_tiers_random.py compares whole lives."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, full
from dsv4.cache.requests import Request
from dsv4.cache.residency.host_rows import NO_ROW, SharedHostRows
from dsv4.cache.schema import CacheSchema
from dsv4.cache.transfers.copies import Copies
from dsv4.errors import InvalidInput
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.loan import Loan
from dsv4.tiers.record import Kind, seal
from tests.cache.test_residency import BLOCKS, IDS, TINY
from tests.support.attending_model import AttendingModel
from tests.support.faults import DeviceFault, Interrupts
from tests.support.tiers import chain, label

WIDTH, STAYS, TIMEOUT_S = 4096, 3000, 120.0
# without draft layers, whose windows no snapshot has
SPEC = replace(TINY, layers=tuple(each for each in TINY.layers if not each.draft))
PLAIN, APART = (
    CacheSchema.build(SPEC, max_context=3072, entries_apart=flag) for flag in (False, True)
)
MODEL = AttendingModel(PLAIN)
RECORD = APART.bytes.block + 8192


def made(schema: CacheSchema = APART, **options: Any) -> KVCacheManager:
    if schema.entries_apart:
        options.setdefault("host_memory", host(0))
    options = {"max_requests": 3, "max_step_tokens": 512, "num_blocks": BLOCKS} | options
    options.setdefault("prefix", PrefixOptions(policy=full(), snapshots=4, model_id="x"))
    return KVCacheManager(schema, **options)


def run(manager: KVCacheManager, request: Request, end: int) -> list[Tensor]:
    found = []
    while request.length < end:
        start, count = request.length, min(250, end - request.length)
        found.append(MODEL.step(manager, [(request, IDS[start : start + count])]))
    return found


def expected(start: int, end: int) -> Tensor:
    """What the same tokens give with everything on the device."""
    manager = made(PLAIN)
    return torch.cat(run(manager, manager.admit_request(IDS[:end]), end))[start:]


def with_host(spare: int = 12, **options: Any) -> tuple[KVCacheManager, HostTier]:
    tier = HostTier(80 * RECORD)
    options = {"tiers": [tier], "host_memory": host(spare)} | options
    return made(**options), tier


def host(spare: int) -> int:
    return (BLOCKS + spare) * APART.bytes.entries


def rows_of(manager: KVCacheManager) -> SharedHostRows:
    assert manager._parts.residency is not None
    hosts = manager._parts.residency.places.hosts
    assert isinstance(hosts, SharedHostRows)
    return hosts


def transfers(manager: KVCacheManager) -> Any:
    return manager.stats().transfers


# ---- what is kept once ---------------------------------------------------------------------------


def test_what_comes_back_of_an_evicted_block_is_only_what_stays_on_the_device():
    manager, tier = with_host()
    pool = manager._parts.residency._pool  # type: ignore[union-attr]
    request = manager.admit_request(IDS[:1300])
    run(manager, request, 1300)
    rows = [int(rows_of(manager).row_of[b]) for b in request.block_ids[:10]]
    manager.release_request(request)
    assert manager.tiers.drain(TIMEOUT_S)
    copied = transfers(manager).bytes_copied
    snapshots = sum(key.kind is Kind.SNAPSHOT for key in tier._rows)
    assert copied == 10 * APART.bytes.block + snapshots * snapshot_bytes(manager)
    content = pool.bytes[rows].clone()
    manager.prefix.evict()
    assert manager.stats().blocks_free == BLOCKS
    assert rows_of(manager).of_records_only == 10
    for memory in (manager.memory.block_arena.bytes, manager.memory.entries.arena.bytes):  # type: ignore[union-attr]
        memory.fill_(0xEE)
    back = manager.tiers.admit(IDS[:1300], timeout_s=TIMEOUT_S)
    assert back.reused_tokens == 1280
    assert [int(rows_of(manager).row_of[b]) for b in back.block_ids[:10]] == rows
    assert torch.equal(pool.bytes[rows], content)
    fetched = transfers(manager).bytes_fetched
    assert fetched - 10 * APART.bytes.block in (0, snapshot_bytes(manager))
    start = back.length
    assert torch.equal(torch.cat(run(manager, back, 1300)), expected(start, 1300))
    manager.check_invariants()


def snapshot_bytes(manager: KVCacheManager) -> int:
    assert manager._parts.prefix
    return manager._parts.prefix.pool.layout.row_bytes


@pytest.mark.parametrize("spare", [12, 0])
def test_two_fetches_of_the_same_blocks_do_not_take_one_row_of_host_memory(spare: int):
    manager, _ = with_host(spare=spare)
    request = manager.admit_request(IDS[:1300])
    run(manager, request, 1300)
    manager.release_request(request)
    assert manager.tiers.drain(TIMEOUT_S)
    manager.prefix.evict()
    fetches = [manager.tiers.fetch(IDS[:1300]) for _ in range(2)]
    until = time.monotonic() + TIMEOUT_S
    while not all(fetch.poll() for fetch in fetches):
        assert time.monotonic() < until
        manager.check_invariants()
    assert max(fetch.fetched_blocks for fetch in fetches) == 10
    back = manager.admit_request(IDS[:1300])
    assert back.reused_tokens == 1280
    start = back.length
    assert torch.equal(torch.cat(run(manager, back, 1300)), expected(start, 1300))
    manager.check_invariants()


def test_what_is_computed_again_is_kept_once():
    manager, tier = with_host()
    request = manager.admit_request(IDS[:700])
    run(manager, request, 700)
    manager.release_request(request)
    assert manager.tiers.drain(TIMEOUT_S)
    manager.prefix.evict()
    request = manager.admit_request(IDS[:700])  # without asking tiers
    assert request.length == 0
    run(manager, request, 700)
    assert manager.tiers.drain(TIMEOUT_S)
    assert manager._parts.prefix
    hosts = rows_of(manager)
    for nth, block_id in enumerate(request.block_ids[:5]):
        assert request.trail is not None
        digest = request.trail.digest(nth)
        row = next(e.value for k in tier._rows if k.digest == digest and k.kind is Kind.BLOCK
                   for e in [tier._rows.get(k)] if e is not None)  # fmt: skip
        assert row.loan is not None
        assert row.loan.row == hosts.row_of[block_id]
    assert (hosts.of_records_only, hosts.free) == (0, hosts.total - 5)
    manager.prefix.evict()
    back = manager.tiers.admit(IDS[:700], timeout_s=TIMEOUT_S)
    assert back.reused_tokens == 640
    assert torch.equal(torch.cat(run(manager, back, 700)), expected(back.resume.start, 700))


def test_rows_go_to_blocks_before_evicted_ones_and_the_longest_unused_go_first():
    manager, tier = with_host(spare=0)
    texts = [IDS[:900], IDS[900:1800], [*IDS[::-1]][:1500], [*IDS[5:1505]]]
    for text in texts:
        request = manager.admit_request(text)
        while request.length < len(text):
            at = request.length
            MODEL.step(manager, [(request, text[at : at + 250])])
            manager.check_invariants()
        manager.release_request(request)
        assert manager.tiers.drain(TIMEOUT_S)
    hosts = rows_of(manager)
    assert hosts.total == BLOCKS
    held = [manager.tiers.fetch(text) for text in texts]
    found = [fetch.cached_blocks for fetch in held]
    assert found[-1] == 11
    assert found[0] < 7
    for fetch in held:
        fetch.cancel()
    assert sum(key.kind is Kind.BLOCK for key in tier._rows) <= BLOCKS
    manager.check_invariants()


# ---- what is refused -----------------------------------------------------------------------------


def test_a_host_tier_with_tails_belongs_to_one_manager():
    manager, tier = with_host()
    for schema in (PLAIN, APART):
        with pytest.raises(InvalidInput, match="give each one its own"):
            made(schema, tiers=[tier])
    request = manager.admit_request(IDS[:300])
    run(manager, request, 300)
    assert manager.tiers.drain(TIMEOUT_S)
    assert len(tier._rows)
    manager.tiers.close(TIMEOUT_S)
    del manager, request
    again = made(tiers=[tier])
    assert not [key for key in tier._rows if key.kind is Kind.BLOCK]
    run(again, again.admit_request(IDS[:300]), 300)
    plain = HostTier(80 * RECORD)
    shared = made(PLAIN, tiers=[plain])
    made(PLAIN, tiers=[plain])
    with pytest.raises(InvalidInput, match="give each one its own"):
        made(APART, tiers=[plain])
    assert shared.tiers


# ---- what fails ----------------------------------------------------------------------------------


def test_a_copy_up_that_fails_is_a_miss_and_loses_nothing(monkeypatch: pytest.MonkeyPatch):
    manager, _ = with_host()
    request = manager.admit_request(IDS[:700])
    run(manager, request, 700)
    manager.release_request(request)
    assert manager.tiers.drain(TIMEOUT_S)
    manager.prefix.evict()

    def fail(*given: Any) -> Any:
        raise DeviceFault("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(Copies, "up", fail)
        missed = manager.tiers.admit(IDS[:700], timeout_s=TIMEOUT_S)
    assert missed.reused_tokens == 0
    manager.check_invariants()
    manager.release_request(missed)
    assert rows_of(manager).of_records_only == 5
    back = manager.tiers.admit(IDS[:700], timeout_s=TIMEOUT_S)
    assert back.reused_tokens == 640
    assert torch.equal(torch.cat(run(manager, back, 700)), expected(back.resume.start, 700))


def test_entries_that_cannot_be_copied_down_are_no_record_until_they_are(
    monkeypatch: pytest.MonkeyPatch,
):
    manager, tier = with_host()
    request = manager.admit_request(IDS[:500])
    residency = manager._parts.residency
    assert residency is not None

    def fail(*given: Any) -> Any:
        raise DeviceFault("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(residency.copies.host, "down", fail)
        run(manager, request, 500)
        assert not manager.tiers.drain(0.05)
        assert not len(tier._rows)
    assert manager.tiers.drain(TIMEOUT_S)
    assert sum(key.kind is Kind.BLOCK for key in tier._rows) == 3
    assert transfers(manager).records_dropped == 0


def test_rows_that_a_tier_below_does_not_give_back_are_missed_but_not_waited_for():
    """Their blocks have gone, so as many others stay on the device until the tier answers."""
    manager, tier = with_host(spare=0, entry_rows=22)
    hosts, held = rows_of(manager), list[HostRow]()
    request = manager.admit_request(IDS[:1000])
    run(manager, request, 1000)
    assert manager.tiers.drain(TIMEOUT_S)
    labels = [manager.tiers.labels.of_block(request.trail, nth) for nth in range(7)]
    held = [row for row in tier.hold(labels) if row is not None]
    assert len(held) == 7
    manager.release_request(request)
    manager.prefix.evict()
    other = manager.admit_request([*IDS[1000:], *IDS[:1900]])
    text = [*IDS[1000:], *IDS[:1900]]
    while other.length < BLOCKS * 128 - 256:
        MODEL.step(manager, [(other, text[other.length : other.length + 200])])
        manager.check_invariants()
    in_host = manager._parts.residency.places.in_host  # type: ignore[union-attr]
    assert int(np.count_nonzero(in_host)) == hosts.total - 7
    whole = [bytes(row.parts.payload[-1]) for row in held]
    for row in held:
        tier.release(row)
    MODEL.step(manager, [(other, text[other.length : other.length + 1])])
    assert int(np.count_nonzero(in_host)) > hosts.total - 7
    assert len(set(whole)) == 7
    manager.check_invariants()


@pytest.mark.parametrize("places", [4, pytest.param(60, marks=pytest.mark.nightly)])
def test_an_interrupt_while_records_come_up_is_recovered_from(places: int):
    files = ("/residency/records", "/residency/host_rows", "/tiers/loan", "/transfers/loading")

    def ready() -> KVCacheManager:
        manager, _ = with_host(spare=2)
        request = manager.admit_request(IDS[:500])
        run(manager, request, 500)
        manager.release_request(request)
        assert manager.tiers.drain(TIMEOUT_S)
        manager.prefix.evict()
        return manager

    probe = Interrupts(None, files)
    manager = ready()
    with probe.injected():
        manager.tiers.admit(IDS[:500], timeout_s=TIMEOUT_S)
    whole = expected(0, 500)
    for nth in range(places):
        manager = ready()
        at = nth * (probe.count - 1) // (places - 1)
        with Interrupts(at, files).injected(), suppress(KeyboardInterrupt):
            manager.tiers.admit(IDS[:500], timeout_s=TIMEOUT_S)
        manager.recover()
        manager.check_invariants()
        for other in manager.requests:
            manager.release_request(other)
        request = manager.tiers.admit(IDS[:500], timeout_s=TIMEOUT_S)
        start = request.length
        assert torch.equal(torch.cat(run(manager, request, 500)), whole[start:])
        manager.check_invariants()


# ---- books, without a device ---------------------------------------------------------------------


class Passed:
    """A mark that is passed when it is told."""

    def __init__(self) -> None:
        self.passed = False


class Books:
    """Blocks and records that come and go at random, with the bytes that each must find."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        blocks, rows = 6, self.draw.choice((6, 8, 11))
        self.memory = memoryview(bytearray(rows * WIDTH))
        self.hosts = SharedHostRows(blocks, rows, self.memory)
        self.tier = HostTier(self.draw.choice((4, 12)) * 8192)
        self.marks: list[Passed] = []
        self.hosts.make_mark = self.mark
        self.hosts.reclaim = self.tier.drop_loan
        self.labels = [
            each for name in range(4) for each in chain(name, 4, payload_bytes=STAYS + WIDTH)
        ]
        self.block_of: dict[int, int] = {}  # block → number of its label
        self.held: list[HostRow] = []
        self.refused = self.reclaimed = 0

    def mark(self) -> Passed:
        self.marks.append(Passed())
        return self.marks[-1]

    def content(self, nth: int) -> bytes:
        return bytes([nth + 1]) * WIDTH

    def row(self, block: int) -> memoryview:
        row = int(self.hosts.row_of[block])
        return self.memory[row * WIDTH : (row + 1) * WIDTH]

    def write(self) -> None:
        """A block is complete, and copied down."""
        block = self.draw.randrange(6)
        if block in self.block_of:
            return
        before = len(self.tier._rows)
        if not self.hosts.take(block):
            self.refused += 1
            assert all(self.hosts.is_lent(row) or b for row, b in self.taken().items())
            return
        self.reclaimed += len(self.tier._rows) < before
        nth = self.block_of[block] = self.draw.randrange(len(self.labels))
        self.row(block)[:] = self.content(nth)

    def taken(self) -> dict[int, bool]:
        """Rows, and whether a block has each."""
        owned = {int(row) for row in self.hosts.row_of if row != NO_ROW}
        return {row: row in owned for row in range(self.hosts.total)}

    def free(self) -> None:
        if self.block_of:
            block = self.draw.choice(list(self.block_of))
            del self.block_of[block]
            self.hosts.part(block)

    def store(self) -> None:
        """A block becomes a record too."""
        if not self.block_of:
            return
        block = self.draw.choice(list(self.block_of))
        wanted = self.labels[self.block_of[block]]
        if self.hosts.is_lent(int(self.hosts.row_of[block])):
            return
        loan = self.hosts.lend(block)
        row = self.tier.take(wanted, loan=loan)
        if row is None:
            self.tier.take_loan(wanted, loan)
            return
        for piece in row.payload:
            piece[:] = bytes(piece.nbytes)
        seal(row.record)
        self.tier.publish(row)
        self.held.append(row)

    def release(self) -> None:
        if self.held:
            self.tier.release(self.held.pop(self.draw.randrange(len(self.held))))

    def fetch(self) -> None:
        """A block takes over what a record has."""
        block, wanted = self.draw.randrange(6), self.draw.choice(self.labels)
        (row,) = self.tier.hold([wanted])
        if row is None:
            return
        self.held.append(row)
        loan: Loan | None = row.loan
        assert loan is not None
        if block not in self.block_of and self.hosts.take_over(block, loan):
            self.block_of[block] = self.labels.index(wanted)

    def quiet(self) -> None:
        """Something the host writes itself: not where the device may still read."""
        block = self.draw.randrange(6)
        if block in self.block_of or not self.hosts.take_quiet(block):
            return
        row, young = int(self.hosts.row_of[block]), dict(self.hosts._fresh)
        for mark, rows in self.hosts._settling:
            young |= {} if mark.passed else dict(rows)
        assert row not in young
        self.hosts.part(block)

    def pass_marks(self) -> None:
        for mark in self.marks[: self.draw.randrange(len(self.marks) + 1)]:
            mark.passed = True

    def check(self) -> None:
        self.hosts.check_invariants()
        for block, nth in self.block_of.items():
            assert self.row(block) == self.content(nth)
        for key in [*self.tier._rows]:
            entry = self.tier._rows.get(key)
            assert entry is not None
            nth = next(n for n, each in enumerate(self.labels) if each.key == key)
            assert entry.value.parts.payload[-1] == self.content(nth)
        for row in self.hosts.free_rows():
            self.memory[row * WIDTH : (row + 1) * WIDTH] = b"\xee" * WIDTH


@pytest.mark.parametrize("seed", range(12))
def test_books_of_host_rows_keep_what_blocks_and_records_have(seed: int):
    books = Books(seed)
    actions = (
        *(books.write, books.write, books.free, books.store, books.store, books.release),
        *(books.release, books.fetch, books.quiet, books.pass_marks),
    )
    for _ in range(400):
        books.draw.choice(actions)()
        books.check()
    while books.held:
        books.release()
    for block in [*books.block_of]:
        del books.block_of[block]
        books.hosts.part(block)
    while books.tier.drop_loan():
        pass
    books.check()
    assert books.hosts.free == books.hosts.total
    assert books.reclaimed or books.hosts.total > 8


def test_a_snapshot_does_not_keep_the_row_of_an_evicted_block():
    tier = HostTier(1 << 20)
    hosts = SharedHostRows(1, 1, memoryview(bytearray(WIDTH)))
    hosts.make_mark, hosts.reclaim = Passed, tier.drop_loan
    wanted = label("a", payload_bytes=STAYS + WIDTH)
    assert hosts.take(0)
    rows = [
        tier.take(wanted, loan=hosts.lend(0)),
        tier.take(label("a", kind=Kind.SNAPSHOT)),
        tier.take(label("b", kind=Kind.SNAPSHOT)),
    ]
    for row in rows:
        assert row is not None
        tier.publish(row)
        tier.release(row)
    assert not tier.drop_loan()  # the block still has the row
    hosts.part(0)
    assert hosts.take(0)
    assert [key.digest for key in tier._rows] == [label("b").digest]


def test_a_manager_without_a_host_tier_has_one_row_for_each_block():
    manager = made(prefix=PrefixOptions(policy=full(), snapshots=4, model_id="x"))
    assert manager._parts.residency is not None
    assert manager._parts.residency.places.hosts.row_of.tolist() == list(range(BLOCKS))
    assert manager.memory.entries is not None
    assert len(manager.memory.entries.tables) == 1
