"""Quotas of salts in host memory and on disk: random lives whose bytes are counted again from rows
and files, two writers of one directory, a lost index, and what a full quota does."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4 import (
    CacheSchema,
    DiskTier,
    HostTier,
    KVCacheManager,
    ModelSpec,
    PrefixOptions,
    Quota,
    Quotas,
    Request,
)
from dsv4.errors import InvalidInput, OutOfBlocks, OutOfSlots
from dsv4.tiers.record import Kind, Label, read_header
from dsv4.tiers.sizes import HEADER_BYTES, UNIT_BYTES, padded
from dsv4.tiers.tier import State
from tests.support.tiers import (
    PATIENT,
    Memory,
    chain,
    digest,
    found,
    label,
    record_files,
    store,
    until,
)
from tests.tiers.test_disk import idle

BLOCK = 128
SALTS = ("a", "b", None)
SCHEMA, APART = (
    CacheSchema.build(ModelSpec.preset("tiny"), max_context=4096, entries_apart=flag)
    for flag in (False, True)
)
ROW = UNIT_BYTES - HEADER_BYTES  # a payload that fills one unit


# ---- tiers alone ---------------------------------------------------------------------------------


def owned(labels: Sequence[Label], owner: bytes) -> list[Label]:
    return [replace(each, owner=owner) for each in labels]


def prompt(name: object, blocks: int, owner: bytes) -> list[Label]:
    """Blocks whose chain begins with their owner, as that of a prompt does."""
    made: list[Label] = []
    for nth in range(blocks):
        parent = made[-1].digest if made else owner
        tokens = (nth + 1) * BLOCK
        made.append(label((name, nth), parent=parent, tokens=tokens, payload_bytes=ROW))
    return owned(made, owner)


A, B = digest("tenant a"), digest("tenant b")


@pytest.fixture(params=["host", "disk"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[HostTier | DiskTier]:
    kept: HostTier | DiskTier
    if request.param == "host":
        kept = HostTier(64 * UNIT_BYTES, limits=PATIENT)
    else:
        kept = DiskTier(tmp_path / "store", 64 * UNIT_BYTES, limits=PATIENT)
        idle(kept)
    yield kept
    kept.close(timeout_s=10)


def settle(tier: HostTier | DiskTier) -> None:
    if isinstance(tier, DiskTier):
        idle(tier)


def there(tier: HostTier | DiskTier, labels: Sequence[Label]) -> int:
    return sum(tier.holds(each.key) if isinstance(tier, HostTier) else found(tier, [each])[0]
               for each in labels)  # fmt: skip


def test_an_owner_over_its_limit_gives_up_its_own_oldest(
    tier: HostTier | DiskTier, memory: Memory
) -> None:
    tier.limit(A, 6 * UNIT_BYTES)
    prompts = {name: prompt(name, 4, owner) for name, owner in (("b1", B), ("a1", A), ("a2", A))}
    for labels in prompts.values():
        for each in labels:
            assert store(tier, [memory.filled(each)]) == [State.DONE]
        settle(tier)
    assert [there(tier, prompts[name]) for name in ("b1", "a1", "a2")] == [4, 2, 4]
    assert there(tier, prompts["a1"][:2]) == 2  # its beginning
    assert (tier.bytes_of(A), tier.bytes_of(B)) == (6 * UNIT_BYTES, 4 * UNIT_BYTES)


def test_what_cannot_fit_is_not_kept_and_evicts_nothing(
    tier: HostTier | DiskTier, memory: Memory
) -> None:
    tier.limit(A, 3 * UNIT_BYTES)
    kept, large = prompt("kept", 2, A), replace(prompt("large", 1, A)[0], payload_bytes=5 * ROW)
    for each in kept:
        store(tier, [memory.filled(each)])
    assert store(tier, [memory.filled(large)]) == [State.DROPPED]
    assert there(tier, kept) == 2
    long = prompt("long", 5, A)  # its beginning is kept
    for each in long:
        store(tier, [memory.filled(each)])
        settle(tier)
    assert [there(tier, [each]) for each in long] == [1, 1, 1, 0, 0]
    tier.limit(A, 0)
    settle(tier)
    assert (tier.bytes_of(A), there(tier, long)) == (0, 0)
    assert store(tier, [memory.filled(kept[0])]) == [State.DROPPED]
    tier.limit(A, None)
    assert store(tier, [memory.filled(kept[0])]) == [State.DONE]


def test_a_held_row_counts_until_it_is_released(memory: Memory) -> None:
    tier = HostTier(64 * UNIT_BYTES)
    labels = prompt("held", 3, A)
    store(tier, [memory.filled(each) for each in labels])
    (row,) = tier.hold(labels[2:])
    assert row is not None
    tier.limit(A, UNIT_BYTES)
    assert tier.bytes_of(A) == 3 * UNIT_BYTES
    tier.release(row)
    assert tier.bytes_of(A) == UNIT_BYTES
    assert there(tier, labels) == 1
    tier.close(timeout_s=5)


def test_records_on_their_way_to_another_tier_count_for_nobody() -> None:
    tier = HostTier(64 * UNIT_BYTES)
    tier.limit(A, 0)
    row = tier.take(prompt("passing", 1, A)[0])
    assert row is not None
    assert row.passing
    assert tier.bytes_of(A) == 0
    tier.release(row)
    tier.close(timeout_s=5)


def test_two_writers_of_a_directory_count_together_and_a_lost_index_is_made_again(
    tmp_path: Path, memory: Memory
) -> None:
    root = tmp_path / "store"
    one, two = (DiskTier(root, 64 * UNIT_BYTES, limits=PATIENT) for _ in range(2))
    for each in (one, two):
        idle(each)
        each.limit(A, 5 * UNIT_BYTES)
    first, second = prompt("first", 4, A), prompt("second", 4, A)
    other = prompt("other", 6, B)
    snapshot = replace(first[1], kind=Kind.SNAPSHOT)
    for writer, labels in ((one, [*first, snapshot]), (two, second), (one, other)):
        for each in labels:
            store(writer, [memory.filled(each)])
            idle(writer)
    assert one.bytes_of(A) == two.bytes_of(A) == 5 * UNIT_BYTES
    assert one.bytes_of(B) == 6 * UNIT_BYTES
    assert sum(there(one, each) for each in (first, second, [snapshot])) == 5
    for each in (one, two):
        each.close(timeout_s=10)
    for path in (root / "1").glob("index-*"):
        path.unlink()
    again = DiskTier(root, 64 * UNIT_BYTES, limits=PATIENT)
    until(lambda: again.bytes_of(A) == 5 * UNIT_BYTES)
    assert again.bytes_of(B) == 6 * UNIT_BYTES
    again.limit(A, 2 * UNIT_BYTES)
    until(lambda: again.bytes_of(A) == 2 * UNIT_BYTES)
    assert there(again, other) == 6
    again.close(timeout_s=10)


def test_forged_parents_that_go_round_end_no_survey(tmp_path: Path, memory: Memory) -> None:
    """Somebody who can write to the store makes two records that lean on each other."""
    root = tmp_path / "store"
    ring = [digest("ring", nth) for nth in range(2)]
    labels = [
        replace(label(tokens=2 * BLOCK, payload_bytes=ROW), digest=ring[nth], parent=ring[1 - nth])
        for nth in range(2)
    ]
    with_room = DiskTier(root, 640 * UNIT_BYTES, limits=PATIENT)
    idle(with_room)
    for each in (*labels, *chain("a prompt", 3, payload_bytes=ROW)):
        store(with_room, [memory.filled(each)])
    with_room.close(timeout_s=10)
    for path in (root / "1").glob("index-*"):
        path.unlink()
    again = DiskTier(root, 640 * UNIT_BYTES, limits=PATIENT)
    until(lambda: again._index.complete)
    assert len(record_files(root)) == 5
    again.close(timeout_s=10)


# ---- below a manager -----------------------------------------------------------------------------


class Life:
    """Requests of a few salts over host memory and a disk. What a salt has there is counted from
    the rows of the host tier, and from the headers of the files, whose parents lead to a root."""

    def __init__(self, seed: int, root: Path, *, apart: bool) -> None:
        self.draw, self.root = random.Random(seed), root
        self.host = HostTier(220 * UNIT_BYTES, limits=PATIENT)
        self.disk = DiskTier(root, 420 * UNIT_BYTES, limits=PATIENT)
        idle(self.disk)
        self.manager = KVCacheManager(
            APART if apart else SCHEMA,
            num_blocks=16,
            max_requests=4,
            max_step_tokens=1024,
            host_memory=40 * APART.bytes.entries if apart else None,
            prefix=PrefixOptions(snapshots=4, model_id="quotas"),
            tiers=[self.host, self.disk],
        )
        self.quotas = Quotas(self.manager)
        self.live: dict[Request, tuple[str | None, list[int]]] = {}
        self.roots = {salt: self.root_of(salt) for salt in SALTS}
        self.known: dict[bytes, bytes] = {}  # the roots of all blocks that there ever were
        self.limits: dict[str | None, Quota] = {}
        self.full = Counter[str]()

    def root_of(self, salt: str | None) -> bytes:
        trail = self.manager.prefix.prompt([1], salt).trail
        assert trail is not None
        return trail.root

    def run(self, request: Request, ids: Sequence[int]) -> None:
        while request.length < len(ids):
            count = min(1024, len(ids) - request.length)
            plan = self.manager.prepare_forward([(request, count)])
            plan.mark_appended()
            self.manager.commit(plan, ids=ids[request.length : request.length + count])

    def admit(self) -> None:
        salt, tokens = self.draw.choice(SALTS), self.draw.randint(1, 900)
        number = self.draw.randint(0, 5)
        ids = [1000 * number + nth % 997 for nth in range(tokens)]
        trail = self.manager.prefix.prompt(ids, salt).trail
        assert trail is not None
        self.known.update(dict.fromkeys(trail.chain, trail.root))
        request = self.manager.tiers.admit(ids, salt, timeout_s=60)
        self.live[request] = salt, ids
        self.run(request, ids)

    def fork(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            for twin in self.manager.fork(request, 1):
                self.live[twin] = self.live[request]

    def release(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            del self.live[request]
            self.manager.release_request(request)

    def suspend(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            del self.live[request]
            self.manager.tiers.suspend(request)

    def limit(self) -> None:
        salt = self.draw.choice(SALTS)
        if self.draw.random() < 0.2:
            self.quotas.remove(salt)
            self.limits.pop(salt, None)
        else:
            host, disk = (self.draw.choice([None, 0, 10, 40, 80]) for _ in range(2))
            self.limits[salt] = quota = Quota(
                host_bytes=None if host is None else host * UNIT_BYTES,
                disk_bytes=None if disk is None else disk * UNIT_BYTES,
            )
            self.quotas.set(salt, quota)

    def turn(self) -> None:
        calls = (self.admit, self.admit, self.fork, self.release, self.release)
        try:
            self.draw.choice([*calls, self.suspend, self.limit])()
        except (OutOfBlocks, OutOfSlots):
            self.full["device"] += 1
        self.check()

    def check(self) -> None:
        assert self.manager.tiers.drain(timeout_s=60)
        idle(self.disk)
        self.manager.check_invariants()
        on_host, on_disk = self.in_rows(), self.in_files()
        for salt, root in self.roots.items():
            use, limit = self.quotas.get(salt), self.limits.get(salt, Quota())
            assert (use.host_bytes, use.disk_bytes) == (on_host[root], on_disk[root]), salt
            assert use.quota == limit
            for used, most in (
                (use.host_bytes, limit.host_bytes),
                (use.disk_bytes, limit.disk_bytes),
            ):
                assert most is None or used is None or used <= most
                self.full["quota"] += most is not None and used == most > 0

    def in_rows(self) -> Counter[bytes]:
        """With the entries of blocks, which are in host memory once, if they are apart
        (tests/cache/test_host_quotas.py counts these in more ways)."""
        owners: Counter[bytes] = Counter()
        shared: set[int] = set()
        if (residency := self.manager._parts.residency) is not None:
            assert self.manager._parts.prefix
            blocks = {node.block_id: node.root for node in self.manager._parts.prefix.index.nodes()}
            for request, (salt, _) in self.live.items():
                blocks |= dict.fromkeys(request.block_ids, self.roots[salt])
            for root in blocks.values():
                owners[root] += APART.bytes.entries
            shared = {int(residency.places.hosts.row_of[block_id]) for block_id in blocks}
        for key in self.host._rows:
            entry = self.host._rows.get(key)
            assert entry is not None
            row = entry.value
            lent = 0 if row.loan is None else row.loan.memory.nbytes
            owners[row.label.owner] += padded(HEADER_BYTES + row.label.payload_bytes - lent)
            owners[row.label.owner] += 0 if row.loan is None or row.loan.row in shared else lent
        return owners

    def in_files(self) -> Counter[bytes]:
        sizes: dict[bytes, tuple[Label, int]] = {}
        others: list[tuple[Label, int]] = []
        for path in record_files(self.root):
            found = read_header(path.read_bytes()[:HEADER_BYTES])
            assert isinstance(found, tuple)
            size = path.stat().st_size
            if found[0].kind is Kind.BLOCK:
                sizes[found[0].digest] = found[0], size
            else:
                others.append((found[0], size))
        owners: Counter[bytes] = Counter()
        for each, size in (*sizes.values(), *others):
            at = each.leans_on.digest
            while at in sizes:
                at = sizes[at][0].parent
            owners[self.known.get(at, at)] += size  # a disk may keep what it has no beginning of
        return owners

    def close(self) -> None:
        self.manager.tiers.close(timeout_s=20)
        for salt in self.limits:  # they do not outlive the manager
            root = self.roots[salt]
            for tier in (self.host, self.disk):
                assert root not in tier._quotas
        for tier in (self.host, self.disk):
            tier.close(timeout_s=20)


def live(seed: int, root: Path, turns: int, *, apart: bool) -> Life:
    life = Life(seed, root, apart=apart)
    for _ in range(turns):
        life.turn()
    life.close()
    return life


@pytest.mark.parametrize(("seed", "apart"), [(0, False), (1, False), (2, True)])
def test_bytes_are_what_a_recount_of_rows_and_files_finds(
    seed: int, apart: bool, tmp_path: Path
) -> None:
    """`apart`: entries are in host memory, where blocks and records share them."""
    assert live(seed, tmp_path / "store", 60, apart=apart).full["quota"]


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 120))
def test_bytes_of_long_lives(seed: int, tmp_path: Path) -> None:
    live(seed, tmp_path / "store", 400, apart=seed % 2 == 0)


def test_a_quota_of_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    manager = KVCacheManager(SCHEMA, num_blocks=4, max_requests=1, prefix=PrefixOptions())
    quotas = Quotas(manager)
    for quota in (Quota(host_bytes=1), Quota(disk_bytes=1, device_bytes=1 << 30)):
        with pytest.raises(InvalidInput, match="has 0 tiers"):
            quotas.set("a", quota)
    assert quotas.all() == ()
    assert quotas.get("a").host_bytes == quotas.get("a").disk_bytes == 0
    tiers = [DiskTier(tmp_path / name, 1 << 20, name=name) for name in "xy"]
    two = KVCacheManager(
        SCHEMA, num_blocks=4, max_requests=1, prefix=PrefixOptions(model_id="m"), tiers=tiers
    )
    with pytest.raises(InvalidInput, match="has 2 tiers of the kind DiskTier"):
        Quotas(two).set("a", Quota(disk_bytes=1))
    two.tiers.close(timeout_s=5)
    for tier in tiers:
        tier.close(timeout_s=5)
