"""Ownership of blocks: a free list with reference counts, and what the prefix index keeps.

Blocks are taken and given back only between captured graphs. The order is deterministic: the block
that was freed last is taken first (of one release: in its order), and a fresh pool hands out
0, 1, 2, …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn, Protocol

from dsv4.errors import Dsv4Error, InvalidInput, OutOfBlocks, OverQuota, require_count

if TYPE_CHECKING:
    from dsv4.cache.prefix.node import PrefixNode
    from dsv4.cache.prefix.quota import Quota
    from dsv4.cache.prefix.trail import TokenTrail


class BlockOwners:
    """The owner of each block that was taken for a prompt: the root of its chain of digests, which
    stands for its salt. A block is shared only by prompts of one root, so it is counted once,
    however many requests hold it. Blocks of requests without token ids have no owner.

    `used` and `idle` count the blocks of each owner that has some: not free, and of these the ones
    that are only cached. The allocator reports what changes, so each change is O(1)."""

    def __init__(self) -> None:
        self.of: dict[int, bytes] = {}
        self.used: dict[bytes, int] = {}
        self.idle: dict[bytes, int] = {}

    def give(self, block_ids: Collection[int], root: bytes) -> None:
        """Blocks that are about to be taken for a prompt."""
        if block_ids:
            self.of.update(dict.fromkeys(block_ids, root))
            self.used[root] = self.used.get(root, 0) + len(block_ids)

    def free(self, block_ids: Iterable[int]) -> None:
        """Blocks that became free."""
        for block_id in filter(self.of.__contains__, block_ids):
            root = self.of.pop(block_id)
            self.used[root] -= 1
            if not self.used[root]:
                del self.used[root]
                self.idle.pop(root, None)

    def note_idle(self, block_id: int, change: int) -> None:
        """A cached block is held by no request any more (1), or is again (-1)."""
        root = self.of.get(block_id)
        if root is not None:
            self.idle[root] = self.idle.get(root, 0) + change

    def recount(self, taken: Collection[int], idle: Collection[int]) -> None:
        """After an interrupt: only these blocks are not free, and these are idle."""
        kept = set(taken)
        self.of = {block_id: root for block_id, root in self.of.items() if block_id in kept}
        self.used = {**Counter(self.of.values())}
        self.idle = {**Counter(root for b in idle if (root := self.of.get(b)) is not None)}

    def check_invariants(self, is_taken: Callable[[int], bool], idle: Collection[int]) -> None:
        """Raises Dsv4Error unless counts and owners agree."""
        if not all(map(is_taken, self.of)):
            raise Dsv4Error("a free block has an owner")
        counted = {**Counter(self.of.values())}
        lying = {**Counter(root for b in idle if (root := self.of.get(b)) is not None)}
        if (counted, lying) != (self.used, {r: n for r, n in self.idle.items() if n}):
            raise Dsv4Error(
                f"blocks by owner: {sorted(counted.values())} are taken and "
                f"{sorted(lying.values())} idle, but {sorted(self.used.values())} and "
                f"{sorted(self.idle.values())} were counted"
            )


class BlockAllocator:
    """A fixed set of block ids. A block is held by one or more requests, or cached and idle (the
    prefix index keeps it, no request holds it), or in flight (it is being filled, and nothing reads
    it), or free."""

    def __init__(self, total: int) -> None:
        self.total = total = require_count("blocks", total, at_least=0)
        self._free = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._cached = bytearray(total)
        self.cached = 0  # blocks the index keeps, idle or held
        self.idle = 0  # those of them that no request holds
        self._in_flight: set[int] = set()
        self._generations = [0] * total
        self.owners = BlockOwners()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def held(self) -> int:
        """Blocks that requests hold."""
        return self.total - self.free - self.idle - self.in_flight

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def host_rows_of(self, owner: bytes, *, blocks: bool = True, records: bool = True) -> int:
        """How many rows of host memory an owner has for entries (docs/residency.md): for its
        `blocks` that are not free, each once, and those that only `records` of a host tier have. A
        block in flight counts when it has a row. In any thread."""
        return 0

    def references(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._references[self._known(block_id)]

    def generation(self, block_id: int) -> int:
        """How often the block has become free: its content at another generation is gone."""
        return self._generations[self._known(block_id)]

    def is_taken(self, block_id: int) -> bool:
        """Whether the block is not free."""
        held = self._references[block_id] > 0 or bool(self._cached[block_id])
        return held or block_id in self._in_flight

    def is_shared(self, block_id: int) -> bool:
        """Whether something other than one request relies on its bytes: another request or the
        index."""
        return self._references[block_id] > 1 or bool(self._cached[block_id])

    def take(self, count: int, *, asker_blocks: int | None = None) -> list[int]:
        """`count` free blocks, each with one reference, or OutOfBlocks and nothing taken.

        `asker_blocks` is what the asker would hold in all (default: just these), so that the error
        can distinguish "wait" from "never".
        """
        if require_count("blocks", count, at_least=0) > self.free:
            raise OutOfBlocks(
                needed=count,
                free=self.free,
                total=self.total,
                asker_blocks=count if asker_blocks is None else asker_blocks,
            )
        return self.take_next(count)

    def take_next(self, count: int) -> list[int]:
        """`take` of blocks that are known to be free."""
        taken = self.next_ids(count)
        assert len(taken) == count, "blocks are taken that are not free"
        del self._free[len(self._free) - count :]
        for block_id in taken:
            self._references[block_id] = 1
        return taken

    def next_ids(self, count: int, freed: Sequence[int] = ()) -> list[int]:
        """What `take(count)` would return, had these blocks been freed before it. Takes nothing."""
        listed = [*self._free[max(0, len(self._free) - count) :], *freed]
        return listed[: -count - 1 : -1] if count else []

    def share(self, block_ids: Sequence[int]) -> None:
        """One more owner for each of these blocks, which must be held or cached."""
        if not block_ids:
            return
        references, cached = self._references, self._cached
        self._known(min(block_ids))
        self._known(max(block_ids))
        for block_id in block_ids:
            if not references[block_id] and not cached[block_id]:
                raise InvalidInput(f"block {block_id} is free: only a held block can be shared")
        for block_id in block_ids:
            if not references[block_id]:
                self.idle -= 1
                self.owners.note_idle(block_id, -1)
            references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> list[int]:
        """Removes one owner of each; returns the ids that became free, in the given order.
        Cached blocks become idle instead.

        Raises InvalidInput, with nothing released, if any would drop below zero.
        """
        if len(set(block_ids)) == len(block_ids):
            short = [b for b in block_ids if not self._references[self._known(b)]]
        else:
            counts = Counter(block_ids)
            short = [b for b, n in counts.items() if self._references[self._known(b)] < n]
        if short:
            raise InvalidInput(f"blocks {short[:8]} are released more often than they are held")
        freed = []
        for block_id in block_ids:
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self._cached[block_id]:
                self.idle += 1
                self.owners.note_idle(block_id, 1)
            else:
                freed.append(block_id)
        self._free_again(freed)
        return freed

    def left_by(self, holders: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
        """The blocks that would become free, and those that would become idle, if these holders
        released what they hold."""
        counts = Counter(block_id for block_ids in holders for block_id in block_ids)
        left = [b for b, count in counts.items() if self._references[b] == count]
        return [b for b in left if not self._cached[b]], [b for b in left if self._cached[b]]

    def keep(self, block_id: int) -> None:
        """The index keeps a held block: it outlives the requests that hold it."""
        known = 0 <= block_id < self.total
        if not known or not self._references[block_id] or self._cached[block_id]:
            raise InvalidInput(f"block {block_id} is free or cached already: it cannot be cached")
        self._cached[block_id] = True
        self.cached += 1

    def drop(self, block_id: int) -> None:
        """The index gives up a block, which is free as soon as no request holds it."""
        if not self._cached[self._known(block_id)]:
            raise InvalidInput(f"block {block_id} is not cached")
        self._cached[block_id] = False
        self.cached -= 1
        if not self._references[block_id]:
            self.idle -= 1
            self.owners.note_idle(block_id, -1)
            self._free_again([block_id])

    def take_in_flight(self, count: int) -> list[int]:
        """`count` free blocks, which must exist, for bytes that will arrive."""
        taken = self.take_next(count)
        self._in_flight.update(taken)
        for block_id in taken:
            self._references[block_id] = 0
        return taken

    def land(self, block_id: int) -> None:
        """The bytes of a block in flight have arrived: the index keeps it, idle."""
        self._in_flight.remove(block_id)
        self._cached[block_id] = True
        self.cached += 1
        self.idle += 1
        self.owners.note_idle(block_id, 1)

    def give_back(self, block_ids: Sequence[int]) -> None:
        """Blocks in flight are free again."""
        if not self._in_flight.issuperset(block_ids):
            raise InvalidInput(f"blocks {list(block_ids)[:8]} are not all in flight")
        self._in_flight.difference_update(block_ids)
        self._free_again(block_ids)

    def arrive(self, block_ids: Sequence[int]) -> None:
        """The bytes of blocks in flight have arrived: a request holds them."""
        if not self._in_flight.issuperset(block_ids):
            raise InvalidInput(f"blocks {list(block_ids)[:8]} are not all in flight")
        for block_id in block_ids:
            self._references[block_id] = 1
        self._in_flight.difference_update(block_ids)

    def _free_again(self, block_ids: Sequence[int]) -> None:
        self.owners.free(block_ids)
        for block_id in block_ids:
            self._generations[block_id] += 1
        self._free.extend(reversed(block_ids))

    def check_invariants(self) -> None:
        """Every block is free once, or held, or cached, or in flight. Raises Dsv4Error
        otherwise."""
        listed = Counter(self._free)
        for block_id, references in enumerate(self._references):
            in_flight = block_id in self._in_flight
            if in_flight and (references or self._cached[block_id]):
                raise Dsv4Error(f"block {block_id} is in flight, but a request reads it")
            free = references == 0 and not self._cached[block_id] and not in_flight
            if references < 0 or listed[block_id] != free:
                raise Dsv4Error(
                    f"block {block_id} has {references} references and is {listed[block_id]} "
                    f"times in the free list: the allocator's own state is broken"
                )
        idle = sum(not r and bool(c) for r, c in zip(self._references, self._cached, strict=True))
        if (idle, sum(self._cached)) != (self.idle, self.cached):
            raise Dsv4Error(
                f"{idle} of {sum(self._cached)} cached blocks are idle, but {self.idle} of "
                f"{self.cached} were counted: the allocator's own state is broken"
            )
        lying = [b for b, r in enumerate(self._references) if not r and self._cached[b]]
        self.owners.check_invariants(self.is_taken, lying)
        unknown = [block_id for block_id in listed if not 0 <= block_id < self.total]
        if unknown:
            raise Dsv4Error(f"ids {unknown[:8]} in the free list of a pool of {self.total} blocks")

    def _known(self, block_id: int) -> int:
        if not 0 <= block_id < self.total:
            raise InvalidInput(f"block id {block_id} is not in this pool of {self.total}")
        return block_id


class Asker(NamedTuple):
    """Who needs blocks: the trail of a request (None without token ids), and how many."""

    trail: TokenTrail | None
    blocks: int


Askers = Sequence[Asker]
NO_OWN: Mapping[bytes, int] = {}
Ids = Collection[int]


class Reclaimer(Protocol):
    """Keeps blocks that no request holds, and gives them up when memory is short."""

    def choose(
        self, blocks: int, *, or_fewer: bool = False, own: Mapping[bytes, int] = NO_OWN
    ) -> list[PrefixNode]:
        """Chooses `blocks` blocks to give up, or none; then they are dropped or spared. Among
        them, and first, are as many of each owner as `own` says."""

    def drop_for(
        self, victims: Sequence[PrefixNode], askers: Askers, *, over_quota: int = 0
    ) -> None: ...

    def evictable_of(self, root: bytes, excluding: Collection[int] = ()) -> int:
        """How many of an owner's blocks could be evicted if these were held."""

    def trim(self, root: bytes, most: int) -> int:
        """Evicts blocks of an owner until it has no more than `most`, or none is left that can be.
        Returns how many."""

    def spare(self, victims: Sequence[PrefixNode]) -> None: ...

    def pinned_blocks(self, excluding: Collection[int] = (), *, root: bytes | None = None) -> int:
        """Blocks that stay until they are unpinned, except the given ones; of one owner, or
        all."""


class Reserved(NamedTuple):
    """Blocks that `settle` will take: chosen, but free or cached until then. The first
    `over_quota` victims go because a quota is full."""

    block_ids: list[int]
    victims: Sequence[PrefixNode]
    askers: Askers = ()
    over_quota: int = 0


class BlockLimit(NamedTuple):
    """The most blocks that an owner may have: its quota in one place, in whole blocks, of which
    each takes `block_bytes` there."""

    blocks: int
    salt: str | None
    quota_bytes: int
    block_bytes: int
    place: Literal["device", "host"] = "device"


class BlockSupply:
    """Blocks for those that need some. When too few are free, the reclaimer (the prefix cache,
    which evicts) is asked for more before OutOfBlocks is raised. Where an owner would have more
    than its limit, its own blocks are evicted first, or OverQuota is raised. A call that raises has
    changed nothing."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self.reclaimer: Reclaimer | None = None
        self.limits: dict[bytes, BlockLimit] = {}
        self.quotas: dict[bytes, tuple[str | None, Quota]] = {}  # of each root that has one
        # what else an owner has makes room for blocks that it got
        self.make_room: Callable[[bytes], None] | None = None

    def take(self, count: int, *, asker_blocks: int | None = None) -> list[int]:
        """`count` blocks, reclaimed where too few are free, or OutOfBlocks."""
        return self.settle(self.reserve(count, asker_blocks=asker_blocks))

    def reserve(
        self, count: int, askers: Askers = (), *, asker_blocks: int | None = None, shared: Ids = ()
    ) -> Reserved:
        """The blocks that `settle` will take, or OutOfBlocks. Until `settle` or `cancel` they are
        free or cached, and no block may be taken or released.

        `askers` get the blocks, in this order. `asker_blocks` is what the largest of them would
        hold in all, `shared` those of these blocks that exist."""
        allocator = self.allocator
        own = self._over(askers, asker_blocks, shared) if self.limits else NO_OWN
        short = count - allocator.free
        if short <= 0 and not own:
            return Reserved(allocator.next_ids(count), (), askers)
        victims = [] if self.reclaimer is None else self.reclaimer.choose(max(short, 0), own=own)
        over_quota = sum(own.values())
        if len(victims) < max(short, over_quota):
            self._refuse(count, asker_blocks, shared)
        freed = [node.block_id for node in victims]
        return Reserved(allocator.next_ids(count, freed), victims, askers, over_quota)

    def room(self, root: bytes, *, sharing: Ids = ()) -> int | None:
        """How many more blocks an owner can have while these are shared, by evicting its own where
        it must; None without a limit."""
        limit = self.limits.get(root)
        if limit is None:
            return None
        assert self.reclaimer is not None
        used = self.allocator.owners.used.get(root, 0)
        return max(0, limit.blocks - used + self.reclaimer.evictable_of(root, sharing))

    def trim_for(self, trail: TokenTrail | None) -> None:
        """`trim`, after a request with this trail gave blocks back."""
        if trail is not None:
            self.trim(trail.root)

    def trim(self, root: bytes) -> None:
        """Evicts what an owner has above its limit, as far as nothing holds it."""
        limit = self.limits.get(root)
        if limit is not None:
            assert self.reclaimer is not None
            self.reclaimer.trim(root, limit.blocks)
            if self.make_room is not None:
                self.make_room(root)

    def require_within(self, trail: TokenTrail, blocks: int) -> None:
        """OverQuota for a request that would hold more blocks than its owner may ever have."""
        limit = self.limits.get(trail.root)
        if limit is not None and blocks > limit.blocks:
            self._refuse_quota(trail.root, blocks, blocks, ())

    def _over(self, askers: Askers, asker_blocks: int | None, shared: Ids) -> Mapping[bytes, int]:
        """How many of its own blocks each owner must give up, or OverQuota."""
        wanted: Counter[bytes] = Counter()
        for trail, blocks in askers:
            if trail is not None and trail.root in self.limits:
                wanted[trail.root] += blocks
        used, own = self.allocator.owners.used, {}
        for root, blocks in wanted.items():
            over = used.get(root, 0) + blocks - self.limits[root].blocks
            if blocks and over > 0:
                assert self.reclaimer is not None
                if over > self.reclaimer.evictable_of(root):
                    self._refuse_quota(root, blocks, asker_blocks or blocks, shared)
                own[root] = over
        return own

    def _refuse_quota(self, root: bytes, blocks: int, asker_blocks: int, shared: Ids) -> NoReturn:
        assert self.reclaimer is not None
        limit, owners = self.limits[root], self.allocator.owners
        raise OverQuota(
            salt=limit.salt,
            root=root,
            place=limit.place,
            quota_bytes=limit.quota_bytes,
            block_bytes=limit.block_bytes,
            total=limit.blocks,
            used=owners.used.get(root, 0),
            needed=blocks,
            asker_blocks=asker_blocks,
            cached=owners.idle.get(root, 0),
            pinned=self.reclaimer.pinned_blocks(shared, root=root),
        )

    def _refuse(self, count: int, asker_blocks: int | None, shared: Ids) -> NoReturn:
        raise OutOfBlocks(
            needed=count,
            free=self.allocator.free,
            total=self.allocator.total,
            asker_blocks=count if asker_blocks is None else asker_blocks,
            cached=self.allocator.idle,
            pinned=0 if self.reclaimer is None else self.reclaimer.pinned_blocks(shared),
        )

    def settle(self, reserved: Reserved) -> list[int]:
        """Takes what was reserved; what was cached there is evicted."""
        self._prepare(reserved)
        block_ids = self.allocator.take_next(len(reserved.block_ids))
        self.note_taken(reserved)
        return block_ids

    def settle_in_flight(self, reserved: Reserved) -> list[int]:
        """Takes what was reserved for bytes that will arrive. `note_taken` follows once it is clear
        where they come from."""
        self._prepare(reserved)
        return self.allocator.take_in_flight(len(reserved.block_ids))

    def note_taken(self, reserved: Reserved) -> None:
        """Owners have more blocks: what else they have gives way."""
        if self.make_room is not None and self.limits:
            for trail, blocks in reserved.askers:
                if trail is not None and blocks and trail.root in self.limits:
                    self.make_room(trail.root)

    def _prepare(self, reserved: Reserved) -> None:
        """Evicts, and notes the owners before the blocks are taken: after an interrupt each block
        that is taken has its own."""
        if reserved.victims:
            assert self.reclaimer is not None
            victims, askers, over_quota = reserved.victims, reserved.askers, reserved.over_quota
            self.reclaimer.drop_for(victims, askers, over_quota=over_quota)
        new = iter(reserved.block_ids)
        for trail, blocks in reserved.askers:
            own = [*islice(new, blocks)]
            if trail is not None:
                self.allocator.owners.give(own, trail.root)

    def cancel(self, reserved: Reserved) -> None:
        """Nothing of it is taken."""
        if reserved.victims:
            assert self.reclaimer is not None
            self.reclaimer.spare(reserved.victims)

    @contextmanager
    def reserving(
        self, asker: Asker, *, asker_blocks: int | None = None, shared: Ids = ()
    ) -> Iterator[Reserved]:
        """Blocks for the code inside: taken at its end, unchanged if it raises."""
        reserved = self.reserve(asker.blocks, [asker], asker_blocks=asker_blocks, shared=shared)
        try:
            yield reserved
        except BaseException:
            self.cancel(reserved)
            raise
        self.settle(reserved)

    @contextmanager
    def sharing(self, block_ids: list[int]) -> Iterator[None]:
        """One more owner for these blocks, undone if the code inside raises."""
        self.allocator.share(block_ids)
        try:
            yield
        except BaseException:
            self.allocator.release(block_ids)
            raise


@dataclass(slots=True)
class Holding:
    """What an offer or an arrival of the hand-off between machines has: blocks that it holds like a
    request, and what its request will get: blocks in flight and a slot."""

    block_ids: list[int]
    landing: list[int] = field(default_factory=list)
    slot: int | None = None


class Holdings(dict[object, Holding]):
    """What offers and arrivals hold. `free_slots` is the table's list: slots are promised from it
    and return to it."""

    def __init__(self, supply: BlockSupply, free_slots: list[int]) -> None:
        super().__init__()
        self._supply, self._free_slots = supply, free_slots

    def hold(self, holder: object, block_ids: list[int]) -> None:
        """An offer or an arrival also holds these blocks, all that it ever will."""
        self._supply.allocator.share(block_ids)
        self[holder] = Holding(block_ids)

    def promise(self, holder: object, reserved: Reserved) -> list[int]:
        """Blocks in flight, which are returned, and a slot, which must be there, for the request
        that a holder is to bring."""
        holding = self[holder]
        holding.landing = self._supply.settle_in_flight(reserved)
        self._supply.note_taken(reserved)
        holding.slot = self._free_slots.pop()
        return holding.landing

    def release_within_quotas(self, holder: object) -> None:
        """`release`; what then is above a quota goes."""
        owners, held = self._supply.allocator.owners, self.get(holder)
        roots = {owners.of[b] for b in held.block_ids if b in owners.of} if held else set()
        self.release(holder)
        for root in roots:
            self._supply.trim(root)

    def release(self, holder: object) -> None:
        """Releases what is held and promised. Nothing may write to the blocks in flight any
        more."""
        holding = self.pop(holder, None)
        if holding is None:
            return
        allocator = self._supply.allocator
        allocator.release(holding.block_ids)
        allocator.give_back(holding.landing)
        if holding.slot is not None:
            self._free_slots.append(holding.slot)
