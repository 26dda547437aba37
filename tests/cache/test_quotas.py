"""Quotas of salts on the device: random lives whose books are counted again from nothing after each
call, and what a salt with a full quota can and cannot do."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dsv4 import (
    CacheSchema,
    Explainer,
    Hints,
    KVCacheManager,
    ModelSpec,
    OverQuota,
    PinnedPrefix,
    PrefixOptions,
    Quota,
    Quotas,
    Request,
)
from dsv4.cache.prefix.eviction import EvictionPolicy, LeastRecentlyUsed
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import Cause, Observer
from dsv4.cache.prefix.retention import Retention
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks, OutOfSlots, RequestError
from tests.cache.test_eviction import FirstCachedFirst

BLOCK = 128
SALTS = ("a", "b", "c", None)
POLICIES = pytest.mark.parametrize("policy", [Retention, LeastRecentlyUsed, FirstCachedFirst])


SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=4096)


def cache_of(blocks: int, policy: type[EvictionPolicy] = Retention) -> KVCacheManager:
    return KVCacheManager(
        SCHEMA,
        num_blocks=blocks,
        max_requests=6,
        max_step_tokens=1024,
        prefix=PrefixOptions(snapshots=8, eviction=policy),
    )


def run(manager: KVCacheManager, request: Request, ids: Sequence[int]) -> None:
    """Computes nothing: what bytes are is not asked here."""
    while request.length < len(ids):
        count = min(1024, len(ids) - request.length)
        plan = manager.prepare_forward([(request, count)])
        plan.mark_appended()
        manager.commit(plan, ids=ids[request.length : request.length + count])


def prompt_of(number: int, tokens: int) -> list[int]:
    return [1000 * number + nth % 997 for nth in range(tokens)]


def keep(manager: KVCacheManager, number: int, tokens: int, salt: str | None) -> None:
    """A prompt that was run and is only cached now."""
    ids = prompt_of(number, tokens)
    request = manager.admit_request(ids, salt)
    run(manager, request, ids)
    manager.release_request(request)


def cached(manager: KVCacheManager, number: int, tokens: int, salt: str | None) -> int:
    prompt = manager.prefix.prompt(prompt_of(number, tokens + 1), salt)
    return manager.prefix.look_up(prompt).reused_tokens // BLOCK


def blocks_of(manager: KVCacheManager, count: int) -> Quota:
    return Quota(device_bytes=count * manager.schema.bytes.block)


# ---- any life ------------------------------------------------------------------------------------


class Witness(Observer):
    """Notes what quotas have evicted, and whose it was."""

    def __init__(self) -> None:
        self.for_quotas: list[tuple[PrefixNode, bytes | None]] = []
        self.for_memory = 0

    def left(self, victims: Sequence[PrefixNode], cause: Cause) -> None:
        askers = {each.root for each in cause.askers if each is not None}
        asker = askers.pop() if len(askers) == 1 else None
        self.for_quotas += [(node, asker) for node in victims[: cause.over_quota]]
        self.for_memory += len(victims) - cause.over_quota


class Life:
    """Requests of a few salts. What each salt has is counted from the requests and the index."""

    def __init__(self, seed: int, policy: type[EvictionPolicy]) -> None:
        self.draw = random.Random(seed)
        self.manager = cache_of(24, policy)
        self.quotas = Quotas(self.manager)
        self.live: dict[Request, tuple[str | None, list[int]]] = {}
        self.pins: list[PinnedPrefix] = []
        self.salt_of: dict[bytes, str | None] = {}  # by the digest of a prompt's first block
        self.limits: dict[str | None, int] = {}
        self.witness = Witness()
        self.refused = Counter[str]()
        assert self.manager._parts.prefix
        self.manager._parts.prefix.notices.observe(self.witness)

    def ids(self) -> tuple[str | None, list[int]]:
        salt, tokens = self.draw.choice(SALTS), self.draw.randint(1, 900)
        ids = prompt_of(self.draw.randint(0, 3), tokens)
        if self.draw.random() < 0.5:  # a branch of its own
            at = self.draw.randint(0, tokens)
            ids[at:] = [self.draw.randint(0, 99) for _ in ids[at:]]
        if tokens >= BLOCK:
            prompt = self.manager.prefix.prompt(ids, salt)
            assert prompt.trail is not None
            self.salt_of[prompt.trail.digest(0)] = salt
        return salt, ids

    def admit(self) -> None:
        salt, ids = self.ids()
        can = self.manager.room.can_admit(ids, salt)
        hints = Hints(priority=self.draw.randint(-2, 2), ttl_s=self.draw.choice([None, 50.0]))
        try:
            request = self.manager.admit_request(ids, salt, hints=hints)
        except (OutOfBlocks, OutOfSlots):
            assert not can
            raise
        assert can
        self.live[request] = salt, ids

    def step(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            salt, ids = self.live[request]
            if request.length >= len(ids):
                more = [self.draw.randint(0, 99) for _ in range(self.draw.randint(1, 300))]
                self.live[request] = salt, ids[: request.length] + more
            run(self.manager, request, self.live[request][1])
            if request.length >= BLOCK:
                prompt = self.manager.prefix.prompt(self.live[request][1][: request.length], salt)
                assert prompt.trail is not None
                self.salt_of[prompt.trail.digest(0)] = salt

    def fork(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            salt, ids = self.live[request]
            for twin in self.manager.fork(request, self.draw.randint(1, 2)):
                self.live[twin] = salt, [*ids]

    def rewind(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            salt, ids = self.live[request]
            length = self.draw.randint(0, request.length)
            self.manager.rewind(request, length)
            own = [self.draw.randint(0, 99) for _ in range(self.draw.randint(1, 200))]
            self.live[request] = salt, ids[:length] + own

    def go_on(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            salt, ids = self.live[request]
            longer = ids[: request.length] + prompt_of(7, self.draw.randint(1, 300))
            self.manager.continue_request(request, self.manager.prefix.prompt(longer, salt))
            self.live[request] = salt, longer

    def release(self) -> None:
        if self.live:
            request = self.draw.choice([*self.live])
            del self.live[request]
            self.manager.release_request(request)

    def reset(self) -> None:
        if self.live:
            self.manager.room.reset_slot(self.draw.choice([*self.live]))

    def pin(self) -> None:
        salt, ids = self.ids()
        self.pins.append(self.manager.prefix.pin(ids, salt))

    def unpin(self) -> None:
        if self.pins:
            self.manager.prefix.unpin(self.pins.pop(self.draw.randrange(len(self.pins))))

    def evict(self) -> None:
        self.manager.prefix.evict(self.draw.randint(0, 3))

    def limit(self) -> None:
        salt = self.draw.choice(SALTS)
        if self.draw.random() < 0.2:
            assert self.quotas.remove(salt) == (salt in self.limits)
            self.limits.pop(salt, None)
        else:
            self.limits[salt] = self.draw.randint(0, 14)
            self.quotas.set(salt, blocks_of(self.manager, self.limits[salt]))

    def recover(self) -> None:
        self.manager.recover()

    def counted(self) -> tuple[Counter[str | None], Counter[str | None]]:
        """Blocks that are taken, and those of them that no request holds, of each salt."""
        assert self.manager._parts.prefix
        owners: dict[int, str | None] = {}
        held: set[int] = set()
        for node in self.manager._parts.prefix.index.nodes():
            first = node
            while first.parent is not None:
                first = first.parent
            owners[node.block_id] = self.salt_of[first.digest]
        for request, (salt, _) in self.live.items():
            for block_id in request.block_ids:
                assert owners.setdefault(block_id, salt) == salt
                held.add(block_id)
        return (
            Counter(owners.values()),
            Counter(salt for block_id, salt in owners.items() if block_id not in held),
        )

    def turn(self) -> None:
        calls = (self.admit, self.step, self.step, self.fork, self.rewind, self.go_on)
        calls += (self.release, self.reset, self.pin, self.unpin, self.evict, self.limit)
        call = self.draw.choice([*calls, self.admit, self.admit, self.release, self.recover])
        before, free, evicted = (
            self.counted(),
            self.manager.stats().blocks_free,
            len(self.witness.for_quotas),
        )
        memory = self.witness.for_memory
        try:
            call()
        except OverQuota as error:
            self.refused["quota"] += 1
            self.check_refusal(error)
            if call != self.step:  # of which earlier chunks may have run
                assert (self.counted(), self.manager.stats().blocks_free) == (before, free)
                assert (len(self.witness.for_quotas), self.witness.for_memory) == (evicted, memory)
        except (OutOfBlocks, OutOfSlots, RequestError, InvalidInput, ContextOverflow) as error:
            self.refused[type(error).__name__] += 1
        self.check(before[0])

    def check_refusal(self, error: OverQuota) -> None:
        used, idle = self.counted()
        size = self.manager.schema.bytes.block
        assert error.salt in self.limits
        assert error.quota_bytes == self.limits[error.salt] * size
        assert error.used_bytes == used[error.salt] * size
        # what is idle might be held while the call runs, or pinned
        assert error.cached <= idle[error.salt]
        assert error.used + error.needed > error.total

    def check(self, before: Counter[str | None]) -> None:
        self.manager.check_invariants()
        used, idle = self.counted()
        size = self.manager.schema.bytes.block
        for salt in SALTS:
            use = self.quotas.get(salt)
            assert use.device_bytes == used[salt] * size, salt
            assert use.cached_bytes == idle[salt] * size, salt
            limit = self.limits.get(salt)
            assert use.quota == (Quota() if limit is None else blocks_of(self.manager, limit))
            if limit is not None:  # no call has brought it above, or further above
                assert used[salt] <= max(limit, before[salt])
        assert {use.salt for use in self.quotas.all()} == set(self.limits)
        for node, asker in self.witness.for_quotas:
            assert asker in (None, node.root)


@POLICIES
@pytest.mark.parametrize("seed", range(3))
def test_books_are_what_a_recount_finds(policy: type[EvictionPolicy], seed: int) -> None:
    life = Life(seed, policy)
    for _ in range(250):
        life.turn()
    assert life.refused["quota"] > 3
    assert life.witness.for_quotas
    assert life.witness.for_memory


@pytest.mark.nightly
@POLICIES
@pytest.mark.parametrize("seed", range(100, 140))
def test_books_of_long_lives(policy: type[EvictionPolicy], seed: int) -> None:
    life = Life(seed, policy)
    for _ in range(2000):
        life.turn()


# ---- what a full quota does ----------------------------------------------------------------------


@POLICIES
def test_a_salt_over_its_quota_evicts_its_own_and_nothing_of_others(
    policy: type[EvictionPolicy],
) -> None:
    manager = cache_of(16, policy)
    Quotas(manager).set("a", blocks_of(manager, 6))
    keep(manager, 1, 4 * BLOCK, "b")  # the oldest
    keep(manager, 2, 4 * BLOCK, "a")
    keep(manager, 3, 4 * BLOCK, "b")
    keep(manager, 4, 4 * BLOCK, "a")  # more than "a" may have: two blocks of its first go
    assert [cached(manager, n, 4 * BLOCK, s) for n, s in ((1, "b"), (3, "b"))] == [4, 4]
    assert cached(manager, 2, 4 * BLOCK, "a") + cached(manager, 4, 4 * BLOCK, "a") == 6
    keep(manager, 5, 6 * BLOCK, "a")
    assert cached(manager, 5, 6 * BLOCK, "a") == 6
    assert manager.stats().blocks_free == 2


def test_what_requests_hold_is_not_evicted_and_the_error_has_figures() -> None:
    manager = cache_of(16)
    quotas, size = Quotas(manager), manager.schema.bytes.block
    quotas.set("a", blocks_of(manager, 6))
    keep(manager, 1, 2 * BLOCK, "a")
    first = manager.admit_request(prompt_of(2, 3 * BLOCK), "a")
    with pytest.raises(OverQuota) as refused:
        manager.admit_request(prompt_of(3, 4 * BLOCK), "a")
    error = refused.value
    assert (error.salt, error.quota_bytes, error.used_bytes) == ("a", 6 * size, 5 * size)
    assert (error.needed_bytes, error.cached, error.never) == (4 * size, 2, False)
    assert f"{4 * size:,} more bytes" in str(error)
    assert "wait for another request of this salt" in str(error)
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.salt, twin.used) == (str(error), "a", 5)
    assert cached(manager, 1, 2 * BLOCK, "a") == 2
    assert not manager.room.can_admit(prompt_of(3, 4 * BLOCK), "a")
    assert manager.room.can_admit(prompt_of(3, 4 * BLOCK), "b")
    assert manager.room.can_admit(4 * BLOCK)  # of no salt, because it has no ids
    manager.release_request(first)
    assert manager.room.can_admit(prompt_of(3, 4 * BLOCK), "a")


def test_what_can_never_fit_says_so() -> None:
    manager = cache_of(16)
    quotas = Quotas(manager)
    quotas.set("a", blocks_of(manager, 3))
    with pytest.raises(OverQuota, match="raise the quota or ask for less") as refused:
        manager.admit_request(prompt_of(1, 4 * BLOCK), "a")
    assert refused.value.never
    keep(manager, 1, 2 * BLOCK, "a")
    pin = manager.prefix.pin(prompt_of(1, 2 * BLOCK), "a")
    with pytest.raises(OverQuota, match="unpin something") as refused:
        manager.admit_request(prompt_of(2, 2 * BLOCK), "a")
    assert (refused.value.never, refused.value.pinned) == (True, 2)
    assert quotas.get("a").pinned_bytes == 2 * manager.schema.bytes.block
    manager.prefix.unpin(pin)
    manager.admit_request(prompt_of(2, 2 * BLOCK), "a")


def test_shared_blocks_are_counted_once() -> None:
    manager = cache_of(16)
    quotas, size = Quotas(manager), manager.schema.bytes.block
    quotas.set("a", blocks_of(manager, 5))
    ids = prompt_of(1, 3 * BLOCK + 1)
    request = manager.admit_request(ids, "a")
    run(manager, request, ids)
    assert quotas.get("a").device_bytes == 4 * size
    (fork,) = manager.fork(request, 1)  # an unfinished block of its own
    same = manager.prefix.prompt(ids[: 3 * BLOCK], "a")
    assert quotas.get("a").device_bytes == 5 * size
    with pytest.raises(OverQuota):
        manager.fork(request, 1)
    manager.release_request(fork)
    third = manager.admit_request(same)  # its first two blocks are cached, the last token runs
    assert quotas.get("a").device_bytes == 5 * size
    run(manager, third, ids[: 3 * BLOCK])  # its last block is the one that was cached before
    assert quotas.get("a").device_bytes == 4 * size


def test_a_step_over_the_quota_is_refused_and_nothing_has_changed() -> None:
    manager = cache_of(16)
    Quotas(manager).set("a", blocks_of(manager, 2))
    ids = prompt_of(1, 2 * BLOCK)
    request = manager.admit_request(ids, "a")
    other = manager.admit_request(prompt_of(2, BLOCK), "b")
    run(manager, request, ids)
    with pytest.raises(OverQuota):
        manager.prepare_forward([(other, BLOCK + 1), (request, 1)])
    assert (len(other.block_ids), len(request.block_ids)) == (1, 2)
    with pytest.raises(OverQuota):
        manager.room.extend(request, 1)
    with pytest.raises(OverQuota):
        manager.continue_request(request, manager.prefix.prompt([*ids, 5], "a"))
    manager.abandon(manager.prepare_forward([(other, BLOCK + 1)]))


def test_a_lower_quota_is_reached_at_once_and_as_requests_end() -> None:
    manager = cache_of(16)
    quotas, size = Quotas(manager), manager.schema.bytes.block
    explainer = Explainer(manager)
    keep(manager, 1, 4 * BLOCK, "a")
    keep(manager, 2, 4 * BLOCK, "b")
    ids = prompt_of(3, 3 * BLOCK)
    request = manager.admit_request(ids, "a")
    run(manager, request, ids)
    use = quotas.set("a", blocks_of(manager, 1))
    assert (use.device_bytes, use.cached_bytes) == (3 * size, 0)
    manager.release_request(request)
    assert quotas.get("a").device_bytes == size
    assert cached(manager, 2, 4 * BLOCK, "b") == 4
    why = explainer.explain(prompt_of(1, 4 * BLOCK), "a")
    assert why.leaving is not None
    assert why.leaving.rule == "quota"
    assert "the quota of its salt was full" in str(why)
    assert quotas.set("a", Quota()).quota == Quota()
    keep(manager, 4, 5 * BLOCK, "a")
    assert quotas.get("a").device_bytes == 6 * size


def test_a_quota_of_nothing() -> None:
    manager = cache_of(8)
    quotas = Quotas(manager)
    quotas.set(None, Quota(device_bytes=0))
    with pytest.raises(OverQuota, match="prompts without a salt"):
        manager.admit_request([1, 2, 3])
    manager.admit_request([1, 2, 3], "")  # an empty salt is another one
    assert quotas.remove(None)
    assert not quotas.remove(None)
    manager.admit_request([1, 2, 3])
    assert repr(quotas) == "Quotas(0 salts)"


def test_another_order_of_worth_holds_within_a_quota() -> None:
    manager = cache_of(16)
    Quotas(manager).set("a", blocks_of(manager, 4))
    for number, priority in ((1, 2), (2, -2)):
        ids = prompt_of(number, 2 * BLOCK)
        request = manager.admit_request(ids, "a", hints=Hints(priority=priority))
        run(manager, request, ids)
        manager.release_request(request)
    keep(manager, 3, 2 * BLOCK, "a")
    assert [cached(manager, number, 2 * BLOCK, "a") for number in (1, 2, 3)] == [2, 0, 2]


@pytest.mark.parametrize("value", [-1, 1.5, True, "1"])
def test_bad_quotas_are_refused(value: object) -> None:
    with pytest.raises(InvalidInput, match="device_bytes"):
        Quota(device_bytes=value)  # type: ignore[arg-type]
    manager = cache_of(4)
    with pytest.raises(InvalidInput, match="quota is"):
        Quotas(manager).set("a", value)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="salt"):
        Quotas(manager).set(5, Quota())  # type: ignore[arg-type]
    assert Quotas(manager).all() == ()


def test_a_manager_without_a_prefix_cache_has_no_quotas() -> None:
    manager = KVCacheManager(SCHEMA, num_blocks=4, max_requests=1)
    with pytest.raises(InvalidInput, match="no prefix cache"):
        Quotas(manager)
