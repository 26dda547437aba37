"""Quotas of salts with `host_memory`: entries in host memory count for the salt whose blocks and
records they are of, once. Random lives whose books are counted again from nothing after each
call."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dsv4 import (
    CacheSchema,
    DiskTier,
    HostTier,
    KVCacheManager,
    ModelSpec,
    OverQuota,
    PinnedPrefix,
    PrefixOptions,
    Quota,
    Quotas,
    Request,
)
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.residency.host_rows import NO_ROW, SharedHostRows
from dsv4.cache.transfers.fetch import Fetch
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks, OutOfSlots, RequestError
from dsv4.metrics import prometheus_text
from dsv4.tiers.host import HostRow
from dsv4.tiers.sizes import UNIT_BYTES
from tests.cache.test_quotas import BLOCK, Witness, prompt_of, run
from tests.support.tiers import PATIENT

SALTS = ("a", "b", None)
SPEC = ModelSpec.preset("tiny")
# without draft layers, whose windows no snapshot has
SPEC = replace(SPEC, layers=tuple(each for each in SPEC.layers if not each.draft))
SCHEMA = CacheSchema.build(SPEC, max_context=4096, entries_apart=True)
ENTRIES, TIMEOUT_S = SCHEMA.bytes.entries, 60.0
MOST_DEVICE, MOST_HOST = (None, None, 8, 14), (None, 0, 4, 9, 14, 20)
BELOW = ("nothing", "disk", "host", "both")


def cache_of(blocks: int, *, spare: int = 0, tiers: Sequence[Any] = ()) -> KVCacheManager:
    return KVCacheManager(
        SCHEMA,
        num_blocks=blocks,
        max_requests=4,
        max_step_tokens=1024,
        host_memory=(blocks + spare) * ENTRIES,
        prefix=PrefixOptions(snapshots=6, model_id="quotas"),
        tiers=tiers,
    )


def keep(manager: KVCacheManager, number: int, blocks: int, salt: str | None) -> None:
    """A prompt that was run, and is only cached now."""
    request = manager.admit_request(prompt_of(number, blocks * BLOCK), salt)
    run(manager, request, prompt_of(number, blocks * BLOCK))
    manager.release_request(request)
    if manager.tiers:
        assert manager.tiers.drain(TIMEOUT_S)


def cached(manager: KVCacheManager, number: int, blocks: int, salt: str | None) -> int:
    prompt = manager.prefix.prompt(prompt_of(number, blocks * BLOCK + 1), salt)
    return manager.prefix.look_up(prompt).reused_tokens // BLOCK


def rows_of(manager: KVCacheManager) -> SharedHostRows | None:
    assert manager._parts.residency is not None
    hosts = manager._parts.residency.places.hosts
    return hosts if isinstance(hosts, SharedHostRows) else None


def root_of(manager: KVCacheManager, salt: str | None) -> bytes:
    trail = manager.prefix.prompt([1], salt).trail
    assert trail is not None
    return trail.root


def first_of(node: PrefixNode) -> bytes:
    """Where its chain begins, from the nodes before it."""
    while node.parent is not None:
        node = node.parent
    return node.digest


# ---- any life ------------------------------------------------------------------------------------


class Life:
    """Requests of a few salts over any tiers."""

    def __init__(self, seed: int, below: str, root: Path) -> None:
        self.draw, self.below = Random(seed), below
        tiers: list[Any] = []
        self.host: HostTier | None = None
        if below in ("host", "both"):
            self.host = HostTier(self.draw.choice((60, 220)) * UNIT_BYTES, limits=PATIENT)
            tiers.append(self.host)
            self.watch(self.host)
        if below in ("disk", "both"):
            tiers.append(DiskTier(root, 420 * UNIT_BYTES, limits=PATIENT))
        spare = self.draw.choice((0, 4, 30))
        self.manager = cache_of(16, spare=spare, tiers=tiers)
        self.all, self.quotas = tiers, Quotas(self.manager)
        self.live: dict[Request, tuple[str | None, list[int]]] = {}
        self.away: list[tuple[str | None, list[int]]] = []
        self.pins: list[PinnedPrefix] = []
        self.fetches: list[Fetch] = []
        self.roots = {salt: root_of(self.manager, salt) for salt in SALTS}
        self.salt_of: dict[bytes, bytes] = {}  # the root of each prompt, by its first block
        self.limits: dict[str | None, Quota] = {}
        self.rare = (self.fork, self.rewind, self.reset, self.pin, self.unpin, self.unpin)
        self.rare += (self.limit, self.limit, self.recover)
        self.seen, self.witness = Counter[str](), Witness()
        assert self.manager._parts.prefix
        self.manager._parts.prefix.notices.observe(self.witness)

    def watch(self, host: HostTier) -> None:
        """What makes room within a limit removes nobody else's records."""
        make_room = host._make_room_of

        def watched(owner: bytes, more_bytes: int) -> bool:
            before = {key: host._rows.get(key) for key in host._rows}
            found = make_room(owner, more_bytes)
            for key, entry in before.items():
                assert entry is not None
                if key not in host._rows:
                    assert entry.value.label.owner == owner
                    self.seen["records gave way"] += 1
            return found

        host._make_room_of = watched  # type: ignore[method-assign]

    # ---- what happens --------------------------------------------------------------------------

    def note(self, ids: Sequence[int], salt: str | None) -> None:
        trail = self.manager.prefix.prompt(ids, salt).trail
        assert trail is not None
        if len(ids) >= BLOCK:
            self.salt_of[trail.digest(0)] = trail.root

    def ids(self) -> tuple[str | None, list[int]]:
        salt, tokens = self.draw.choice(SALTS), self.draw.randint(1, 900)
        ids = prompt_of(self.draw.randint(0, 3), tokens)
        if self.draw.random() < 0.4:  # a branch of its own
            at = self.draw.randint(0, tokens)
            ids[at:] = [self.draw.randint(0, 99) for _ in ids[at:]]
        self.note(ids, salt)
        return salt, ids

    def admit(self) -> None:
        salt, ids = self.ids()
        if self.manager.tiers and self.draw.random() < 0.6:
            request = self.manager.tiers.admit(ids, salt, timeout_s=TIMEOUT_S)
        else:
            request = self.manager.admit_request(ids, salt)
        self.live[request] = salt, ids

    def one(self) -> Request | None:
        return self.draw.choice([*self.live]) if self.live else None

    def step(self) -> None:
        if request := self.one():
            salt, ids = self.live[request]
            if request.length >= len(ids):
                more = [self.draw.randint(0, 99) for _ in range(self.draw.randint(1, 300))]
                ids = ids[: request.length] + more
                self.live[request] = salt, ids
            self.note(ids, salt)
            run(self.manager, request, ids)

    def fork(self) -> None:
        if request := self.one():
            for twin in self.manager.fork(request, self.draw.randint(1, 2)):
                self.live[twin] = self.live[request]

    def rewind(self) -> None:
        if request := self.one():
            salt, ids = self.live[request]
            length = self.draw.randint(0, request.length)
            self.manager.rewind(request, length)
            own = [self.draw.randint(0, 99) for _ in range(self.draw.randint(1, 200))]
            self.live[request] = salt, ids[:length] + own

    def release(self) -> None:
        if request := self.one():
            del self.live[request]
            self.manager.release_request(request)

    def reset(self) -> None:
        if request := self.one():
            self.manager.room.reset_slot(request)

    def suspend(self) -> None:
        if self.manager.tiers and (request := self.one()):
            salt, ids = self.live[request]
            ids = ids[: request.length]
            self.manager.tiers.suspend(request)
            del self.live[request]
            self.away.append((salt, ids))

    def resume(self) -> None:
        if self.away:
            salt, ids = self.away.pop(self.draw.randrange(len(self.away)))
            request = self.manager.tiers.resume([*ids, 7], salt, timeout_s=TIMEOUT_S)
            self.live[request] = salt, [*ids, 7]

    def fetch(self) -> None:
        if self.manager.tiers:
            salt, ids = self.ids()
            self.fetches.append(self.manager.tiers.fetch(ids, salt))

    def move(self) -> None:
        if self.fetches:
            fetch = self.draw.choice(self.fetches)
            if self.draw.random() < 0.2:
                fetch.cancel()
            if fetch.poll():
                self.fetches.remove(fetch)

    def pin(self) -> None:
        salt, ids = self.ids()
        self.pins.append(self.manager.prefix.pin(ids, salt))

    def unpin(self) -> None:
        if self.pins:
            self.manager.prefix.unpin(self.pins.pop(self.draw.randrange(len(self.pins))))

    def evict(self) -> None:
        self.manager.prefix.evict(self.draw.choice((None, None, 1, 5)))

    def limit(self) -> None:
        salt = self.draw.choice(SALTS)
        if self.draw.random() < 0.2:
            self.quotas.remove(salt)
            self.limits.pop(salt, None)
        else:
            device, host = (self.draw.choice(most) for most in (MOST_DEVICE, MOST_HOST))
            self.limits[salt] = quota = Quota(
                device_bytes=None if device is None else device * SCHEMA.bytes.block,
                host_bytes=None if host is None else host * ENTRIES + self.draw.randint(0, 40_000),
            )
            self.quotas.set(salt, quota)

    def recover(self) -> None:
        self.manager.recover()
        self.fetches.clear()

    def turn(self) -> None:
        calls = (self.step, self.step, self.step, self.admit, self.admit, self.release)
        calls += (self.suspend, self.resume, self.fetch, self.move, self.move, self.evict)
        call = self.draw.choice([*calls, self.release, *self.draw.sample(self.rare, 3)])
        try:
            call()
        except OverQuota as error:
            self.seen[f"refused: {error.place}"] += 1
            self.check_refusal(error)
        except (OutOfBlocks, OutOfSlots, RequestError, InvalidInput, ContextOverflow) as error:
            self.seen[type(error).__name__] += 1
        self.check()

    # ---- what must hold ------------------------------------------------------------------------

    def blocks(self) -> dict[int, bytes]:
        """The root of each block that is not free."""
        assert self.manager._parts.prefix
        found = {
            node.block_id: self.salt_of[first_of(node)]
            for node in self.manager._parts.prefix.index.nodes()
        }
        for request, (salt, _) in self.live.items():
            for block_id in request.block_ids:
                assert found.setdefault(block_id, self.roots[salt]) == self.roots[salt]
        return found

    def in_flight(self) -> dict[int, bytes]:
        """Those into which bytes are on their way."""
        if not self.manager.tiers:
            return {}
        fetches = self.manager.tiers.route.open
        return {b: fetch.trail.root for fetch in fetches for b in fetch.block_ids}

    def records(self) -> list[HostRow]:
        if self.host is None:
            return []
        found = {id(entry.value): entry.value for key in self.host._rows
                 if (entry := self.host._rows.get(key))}  # fmt: skip
        for fetch in self.manager.tiers.route.open:
            for item in fetch.loading._items:
                if item.row is not None and not item.row.passing:
                    found[id(item.row)] = item.row
            for load in fetch.loading._loads:
                found |= {id(row): row for row in load.rows if not row.passing}
        return [*found.values()]

    def counted(self) -> Counter[bytes]:
        """Bytes of host memory of each root."""
        owners: Counter[bytes] = Counter()
        hosts, blocks, landing = rows_of(self.manager), self.blocks(), self.in_flight()
        for root in blocks.values():
            owners[root] += ENTRIES
        taken: set[int] = set()
        for block_id, root in landing.items():
            owners[root] += ENTRIES if hosts is None or hosts.row_of[block_id] != NO_ROW else 0
        if hosts is not None:
            taken = {int(hosts.row_of[b]) for b in {*blocks, *landing}} - {NO_ROW}
        self.rows = len(blocks) + len(landing) if hosts is None else len(taken)
        for row in self.records():
            owners[row.label.owner] += sum(count for _, count in row.extents) * UNIT_BYTES
            if row.loan is not None and row.loan.row not in taken:
                owners[row.label.owner] += ENTRIES
                self.rows += 1
                self.seen["rows of records only"] += 1
            elif row.loan is not None:
                self.seen["rows of both"] += 1
        return owners

    def check(self) -> None:
        if self.manager.tiers:
            assert self.manager.tiers.drain(TIMEOUT_S)
        self.manager.check_invariants()
        found, blocks = self.counted(), Counter(self.blocks().values())
        for salt, root in self.roots.items():
            use, limit = self.quotas.get(salt), self.limits.get(salt, Quota())
            assert use.host_bytes == found[root], salt
            assert use.quota == limit
            most = limit.host_bytes
            if most is not None and use.host_bytes > most and not self.fetches:
                # what is left is in use, or pinned: nothing gives way any more
                assert blocks[root] * ENTRIES > most
                assert not [row for row in self.records() if row.label.owner == root]
                assert self.quotas._supply.room(root) == 0
                self.seen["above"] += 1
        residency = self.manager.stats().residency
        assert residency is not None
        assert residency.host_bytes_used == self.rows * ENTRIES <= residency.host_bytes
        for node, asker in self.witness.for_quotas:
            assert asker in (None, node.root)

    def check_refusal(self, error: OverQuota) -> None:
        limit = self.limits[error.salt]
        each = ENTRIES if error.place == "host" else SCHEMA.bytes.block
        assert error.quota_bytes == getattr(limit, f"{error.place}_bytes")
        assert error.total == error.quota_bytes // each
        assert error.used_bytes == error.used * each
        assert error.used + error.needed > error.total

    def close(self) -> None:
        for each in self.all:
            each.close(timeout_s=20)


@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("seed", range(2))
def test_books_are_what_a_recount_finds(below: str, seed: int, tmp_path: Path) -> None:
    life = Life(seed, below, tmp_path / "store")
    for _ in range(200):
        life.turn()
    assert life.seen["refused: host"]
    assert life.host is None or (life.seen["records gave way"] and life.seen["rows of both"])
    assert life.host is None or life.seen["rows of records only"]
    transfers = life.manager.stats().transfers
    assert transfers is None or transfers.fetches
    life.close()


@pytest.mark.nightly
@pytest.mark.parametrize("below", BELOW)
@pytest.mark.parametrize("seed", range(100, 110))
def test_books_of_long_lives(below: str, seed: int, tmp_path: Path) -> None:
    life = Life(seed, below, tmp_path / "store")
    for _ in range(1500):
        life.turn()
    life.close()


# ---- what a full quota of host memory does -------------------------------------------------------


def entries_of(blocks: int) -> Quota:
    return Quota(host_bytes=blocks * ENTRIES + ENTRIES // 2)


def test_entries_of_live_cached_and_shared_blocks_count_once() -> None:
    manager = cache_of(16)
    quotas = Quotas(manager)
    ids = prompt_of(1, 3 * BLOCK)
    request = manager.admit_request(ids, "a")
    assert quotas.get("a").host_bytes == 3 * ENTRIES
    run(manager, request, ids)
    twin, *_ = manager.fork(request, 1)
    assert quotas.get("a").host_bytes == 3 * ENTRIES
    run(manager, twin, [*ids, *range(10)])  # one block of its own
    assert quotas.get("a").host_bytes == 4 * ENTRIES
    manager.release_request(request)
    manager.release_request(twin)
    use, residency = quotas.get("a"), manager.stats().residency
    assert (use.host_bytes, use.cached_bytes) == (3 * ENTRIES, 3 * SCHEMA.bytes.block)
    assert residency is not None
    assert residency.host_bytes_used == 3 * ENTRIES
    assert quotas.get("b").host_bytes == 0
    manager.prefix.evict()
    assert quotas.get("a").host_bytes == 0


def test_the_tighter_of_two_quotas_holds_and_the_error_says_which() -> None:
    manager = cache_of(16)
    quotas, block = Quotas(manager), SCHEMA.bytes.block
    quotas.set("a", Quota(device_bytes=6 * block, host_bytes=4 * ENTRIES + 5))
    keep(manager, 1, 2, "a")
    first = manager.admit_request(prompt_of(2, 2 * BLOCK), "a")
    with pytest.raises(OverQuota) as refused:
        manager.admit_request(prompt_of(3, 3 * BLOCK), "a")
    error = refused.value
    assert (error.place, error.quota_bytes, error.block_bytes) == ("host", 4 * ENTRIES + 5, ENTRIES)
    assert (error.used_bytes, error.needed_bytes) == (4 * ENTRIES, 3 * ENTRIES)
    assert (error.total, error.cached, error.never) == (4, 2, False)
    assert f"{3 * ENTRIES:,} more bytes needed in host memory" in str(error)
    assert f"{4 * ENTRIES:,} of {4 * ENTRIES + 5:,} bytes are used" in str(error)
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.place) == (str(error), "host")
    assert cached(manager, 1, 2, "a") == 2  # nothing has changed
    quotas.set("a", Quota(device_bytes=4 * block, host_bytes=8 * ENTRIES))
    with pytest.raises(OverQuota) as refused:
        manager.admit_request(prompt_of(3, 3 * BLOCK), "a")
    assert (refused.value.place, refused.value.quota_bytes) == ("device", 4 * block)
    assert "on the device" in str(refused.value)
    manager.release_request(first)
    assert manager.room.can_admit(prompt_of(3, 3 * BLOCK), "a")


def test_a_salt_over_its_host_quota_evicts_its_own_and_nothing_of_others() -> None:
    manager = cache_of(16)
    Quotas(manager).set("a", entries_of(6))
    keep(manager, 1, 4, "b")  # the oldest
    keep(manager, 2, 4, "a")
    keep(manager, 3, 4, "a")
    assert cached(manager, 1, 4, "b") == 4
    assert cached(manager, 2, 4, "a") + cached(manager, 3, 4, "a") == 6
    assert manager.stats().blocks_free == 6


def test_a_record_that_shares_the_entries_of_a_block_adds_only_the_rest() -> None:
    tier = HostTier(200 * UNIT_BYTES, limits=PATIENT)
    manager = cache_of(16, spare=16, tiers=[tier])
    quotas = Quotas(manager)
    keep(manager, 1, 4, "a")
    root = root_of(manager, "a")
    assert tier.bytes_of(root) > 0
    shared = quotas.get("a").host_bytes
    assert shared == 4 * ENTRIES + tier.bytes_of(root)
    manager.prefix.evict()  # the records keep the rows
    assert quotas.get("a").host_bytes == shared
    back = manager.tiers.admit(prompt_of(1, 4 * BLOCK + 1), "a", timeout_s=TIMEOUT_S)
    assert back.reused_tokens == 4 * BLOCK
    # and the block of its last token
    assert quotas.get("a").host_bytes == 5 * ENTRIES + tier.bytes_of(root)
    manager.release_request(back)
    manager.tiers.close(timeout_s=5)
    tier.close(timeout_s=5)


def test_records_give_way_to_blocks_of_their_own_salt_only() -> None:
    tier = HostTier(400 * UNIT_BYTES, limits=PATIENT)
    manager = cache_of(16, spare=32, tiers=[tier])
    quotas = Quotas(manager)
    keep(manager, 1, 4, "b")  # the oldest, and in reach of whoever may evict it
    keep(manager, 2, 4, "a")
    manager.prefix.evict()
    most = quotas.get("a").host_bytes
    of_others = quotas.get("b").host_bytes
    quotas.set("a", Quota(host_bytes=most))
    ids = prompt_of(3, 4 * BLOCK)
    request = manager.admit_request(ids, "a")
    assert quotas.get("a").host_bytes <= most
    run(manager, request, ids)
    assert manager.tiers.drain(TIMEOUT_S)
    assert quotas.get("a").host_bytes <= most
    manager.rewind(request, 3 * BLOCK + 5)  # and another row than that of a record of its own
    run(manager, request, [*ids[: 3 * BLOCK + 5], *range(100)])
    assert quotas.get("a").host_bytes <= most
    assert quotas.get("b").host_bytes == of_others
    manager.release_request(request)
    manager.prefix.evict()
    assert manager.tiers.admit(prompt_of(1, 4 * BLOCK + 1), "b", timeout_s=60).reused_tokens == 512
    quotas.set("a", Quota(host_bytes=0))
    assert quotas.get("a").host_bytes == 0
    with pytest.raises(OverQuota, match="can never fit"):
        manager.tiers.admit([1, 2, 3], "a", timeout_s=TIMEOUT_S)
    manager.tiers.close(timeout_s=5)
    tier.close(timeout_s=5)


def test_a_fetch_does_not_push_out_what_it_fetches_or_anything_else() -> None:
    """Blocks in flight take the rows of the records that they are made from."""
    tier = HostTier(400 * UNIT_BYTES, limits=PATIENT)
    manager = cache_of(16, spare=16, tiers=[tier])
    quotas = Quotas(manager)
    keep(manager, 1, 4, "a")
    keep(manager, 2, 4, "a")
    manager.prefix.evict()
    most = quotas.get("a").host_bytes
    quotas.set("a", Quota(host_bytes=most))
    before = {*tier._rows}
    fetch = manager.tiers.fetch(prompt_of(1, 4 * BLOCK + 1), "a")
    until = time.monotonic() + TIMEOUT_S
    assert quotas.get("a").host_bytes <= most
    while not fetch.poll():
        assert time.monotonic() < until
        manager.check_invariants()
        assert quotas.get("a").host_bytes <= most
    assert fetch.fetched_blocks == 4
    assert {*tier._rows} == before
    manager.tiers.close(timeout_s=5)
    tier.close(timeout_s=5)


@pytest.mark.parametrize("way", ["unpin", "rewind", "reset_slot"])
def test_a_lower_quota_is_reached_as_soon_as_nothing_holds_the_blocks(way: str) -> None:
    """Not only when a request ends."""
    manager = cache_of(16)
    quotas = Quotas(manager)
    keep(manager, 1, 4, "a")
    pin = manager.prefix.pin(prompt_of(1, 4 * BLOCK), "a")
    request = manager.admit_request(prompt_of(1, 4 * BLOCK + 1), "a")
    if way == "unpin":
        manager.release_request(request)
    else:
        manager.prefix.unpin(pin)
    quotas.set("a", entries_of(1))
    assert quotas.get("a").host_bytes >= 4 * ENTRIES
    if way == "unpin":
        manager.prefix.unpin(pin)
    elif way == "rewind":
        manager.rewind(request, 0)
    else:
        manager.room.reset_slot(request)
    assert quotas.get("a").host_bytes <= ENTRIES


def test_such_a_quota_needs_no_host_tier_where_entries_are_in_host_memory(tmp_path: Path) -> None:
    quotas = Quotas(cache_of(4))
    assert quotas.set("a", Quota(host_bytes=5)).quota.host_bytes == 5
    with pytest.raises(InvalidInput, match="0 tiers of the kind DiskTier"):
        quotas.set("a", Quota(disk_bytes=5))


def test_a_quota_that_is_lowered_during_a_fetch_is_reached_when_it_ends() -> None:
    tier = HostTier(400 * UNIT_BYTES, limits=PATIENT)
    manager = cache_of(16, spare=16, tiers=[tier])
    quotas = Quotas(manager)
    for interrupted in (False, True):
        keep(manager, 1, 4, "a")
        manager.prefix.evict(2 if interrupted else None)
        fetch = manager.tiers.fetch(prompt_of(1, 4 * BLOCK + 1), "a")
        quotas.set("a", Quota(device_bytes=SCHEMA.bytes.block))
        if interrupted:
            assert quotas.get("a").device_bytes > SCHEMA.bytes.block
            manager.recover()
        until = time.monotonic() + TIMEOUT_S
        while not fetch.poll():
            assert time.monotonic() < until
        assert quotas.get("a").device_bytes <= SCHEMA.bytes.block
        quotas.remove("a")
    manager.tiers.close(timeout_s=5)
    tier.close(timeout_s=5)


def test_metrics_show_what_entries_have_of_the_quota() -> None:
    manager = cache_of(4)
    Quotas(manager).set("a", Quota(host_bytes=3 * ENTRIES))
    keep(manager, 1, 2, "a")
    text = prometheus_text(manager)
    for what, value in (("used", 2 * ENTRIES), ("limit", 3 * ENTRIES)):
        assert f'dsv4_quota_bytes{{place="host",salt="a",what="{what}"}} {float(value)}' in text
