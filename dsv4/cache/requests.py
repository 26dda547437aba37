"""Live requests: their slots and blocks, and the numbers that a step reads.
Torch-free: nothing here touches the device."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.allocator import Asker, BlockAllocator, BlockSupply, Holdings, Reserved
from dsv4.cache.changes import Uncopied
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prefix.trail import RecentIds, TokenTrail
from dsv4.cache.schema import CacheSchema
from dsv4.errors import (
    ContextOverflow,
    Dsv4Error,
    OutOfSlots,
    RequestError,
    require_count,
)

# rows of RequestTable.numbers, one column per slot; a step reads those of its requests at once
LENGTH, PUBLISHED, REUSED, WRITTEN = range(4)
REQUEST_NUMBERS = 4


Numbers = NDArray[np.int64]


class Growth(NamedTuple):
    """A planned growth: request i will own `blocks[i]` blocks; `missing[i]` of them come from
    `reserved`, in order."""

    requests: Sequence[Request]
    blocks: Sequence[int]
    missing: Sequence[int]
    reserved: Reserved


_NO_GROWTH = Growth((), (), (), Reserved([], ()))

Use = Literal["run", "fork", "continue", "suspend", "offer"]


class Condition(Enum):
    """The condition of a request: of those that apply, the one that allows the least. Rewind, reset
    and release are always allowed: they are what remains for a torn request.
    """

    SOUND = auto()
    REPLAYING = auto()  # entries up to `reused_tokens` are there, the rings are being filled
    INCOMPLETE = auto()  # not all layers have stored what comes after `incomplete_from`
    APPROXIMATE = auto()  # computed after a cut replay: differs from a cold run
    TORN = auto()  # the rings do not hold the state at `length`
    RELEASED = auto()

    def allows(self, use: Use) -> bool:
        return use in _ALLOWED[self]


_ALLOWED: dict[Condition, frozenset[Use]] = {
    Condition.SOUND: frozenset(("run", "fork", "continue", "suspend", "offer")),
    Condition.REPLAYING: frozenset(("run", "fork", "continue", "suspend")),
    Condition.INCOMPLETE: frozenset(("run", "fork")),
    Condition.APPROXIMATE: frozenset(("run", "fork")),
    Condition.TORN: frozenset(),
    Condition.RELEASED: frozenset(),
}
# what to do instead with an approximate request
_INSTEAD = {
    "continue": "is not continued: admit the prompt",
    "suspend": "is not suspended: release it, and admit its tokens again",
    "offer": "is not offered: hand over its prompt",
}


class Request(Uncopied):
    """What one request holds. The manager changes it; callers read it. It cannot be copied.

    Token positions, as the last commit left them:
      [0, length)              computed: entries in blocks, the rest in the slot
      [length, reused_tokens)  replayed: entries are there already and are not written again
      [length, end of blocks)  reserved: blocks are there, nothing is written
    """

    __slots__ = (
        "__weakref__",
        "_max_rollback_tokens",
        "_origin",
        "_recent",
        "_row",
        "_trail",
        "block_ids",
        "incomplete_from",
        "is_leaving",
        "released",
        "resume",
        "serial",
        "slot",
    )

    def __init__(
        self,
        table: RequestTable,
        slot: int,
        serial: int,
        block_ids: list[int],
        resume: Resume,
        trail: TokenTrail | None,
    ) -> None:
        self.slot, self.serial = slot, serial
        self.released = False
        self.is_leaving = False  # `room.release_later` was called
        self.incomplete_from: int | None = None  # a step from here on was not stored by all layers
        self._max_rollback_tokens = table.schema.max_rollback_tokens
        self._recent, self._row = table.recent, table.numbers[:, slot]
        self.block_ids = block_ids  # in the order of the tokens
        self._trail: TokenTrail | None = None
        self.trail = trail
        self.restart(resume)

    _instead = "fork(request, 1) makes another request that continues from where this one is"
    _internal: ClassVar[frozenset[str]] = frozenset(
        (
            "continue_from",
            "detach",
            "is_leaving",
            "lose_rings",
            "mend",
            "note_incomplete",
            "published_blocks",
            "require",
            "restart",
            "rings_exact_from",
            "shorten",
            "trail",
            "written_tokens",
        )
    )

    def restart(self, resume: Resume) -> None:
        """The request continues from `resume.start`, whatever it has written before."""
        self.resume = resume  # what the caller runs next to reach the length it asked for
        self._origin = resume  # the resume that filled the rings last
        self._row[LENGTH] = self._row[WRITTEN] = resume.start
        self._row[REUSED] = resume.reused_tokens
        trail = self._trail
        if trail is not None and (trail.sealed or not resume.exact):
            # what is computed after a cut replay is never cached: its trail ends there
            if not resume.exact:
                trail.cut(resume.reused_tokens)
            trail.detach()
            trail.sealed = not resume.exact
            trail.attach(self._recent, self.slot)

    def continue_from(self, parent: Request) -> None:
        """A new request takes over its parent's position, but not its blocks."""
        self._row[[LENGTH, REUSED, WRITTEN]] = parent._row[[LENGTH, REUSED, WRITTEN]]
        self.resume, self._origin = parent.resume, parent._origin
        self.incomplete_from = parent.incomplete_from
        self.trail = parent.trail and parent.trail.copy()

    @property
    def trail(self) -> TokenTrail | None:
        """Its token ids as far as they are known, and the digests of its blocks; None without a
        prefix cache."""
        return self._trail

    @trail.setter
    def trail(self, trail: TokenTrail | None) -> None:
        if self._trail is not None:
            self._trail.detach()
        self._trail = trail
        if trail is None:
            self._recent.known[self.slot] = -1
        else:
            trail.attach(self._recent, self.slot)

    @property
    def length(self) -> int:
        """Tokens that are computed and committed."""
        return int(self._row[LENGTH])

    @property
    def published_blocks(self) -> int:
        """Blocks that the device's table has."""
        return int(self._row[PUBLISHED])

    @published_blocks.setter
    def published_blocks(self, blocks: int) -> None:
        self._row[PUBLISHED] = blocks

    @property
    def reused_tokens(self) -> int:
        """Entries below this position were not computed by this request; the rings cannot go below
        it."""
        return int(self._row[REUSED])

    @reused_tokens.setter
    def reused_tokens(self, tokens: int) -> None:
        self._row[REUSED] = tokens

    @property
    def written_tokens(self) -> int:
        """The end of what was ever written to the rings: rejected tokens count."""
        return max(int(self._row[WRITTEN]), self.length)

    @written_tokens.setter
    def written_tokens(self, tokens: int) -> None:
        self._row[WRITTEN] = tokens

    @property
    def rings_exact_from(self) -> int | None:
        """From here on the rings are those of a cold run: a replay leaves others before. None after
        a cut replay, where they never are again."""
        origin = self._origin
        if not origin.exact:
            return None
        return origin.reused_tokens if origin.source == "replay" else origin.start

    @property
    def approximate_from(self) -> int | None:
        """From here on everything was computed after a cut replay, and differs from a cold run.
        None if nothing does."""
        return None if self._origin.exact else self._origin.reused_tokens

    @property
    def has_exact_state(self) -> bool:
        """Whether the rings at `length` are those of a cold run: not before the first token, nor in
        the middle of a replay."""
        rings_exact_from = self.rings_exact_from
        return rings_exact_from is not None and self.length >= max(
            1, rings_exact_from, self.reused_tokens
        )

    @property
    def is_torn(self) -> bool:
        """Whether a step that failed, or an interrupt, has overwritten what the rings held at
        `length`: the request can only be rewound, reset or released."""
        return self.written_tokens - self.length > self._max_rollback_tokens

    @property
    def condition(self) -> Condition:
        """What it can be used for."""
        if self.released:
            return Condition.RELEASED
        if self.is_torn:
            return Condition.TORN
        if not self._origin.exact:
            return Condition.APPROXIMATE
        if self.incomplete_from is not None:
            return Condition.INCOMPLETE
        return Condition.REPLAYING if self.length < self.reused_tokens else Condition.SOUND

    def require(self, use: Use) -> None:
        """RequestError where the condition of a live request does not allow a use of it."""
        condition = self.condition
        if condition.allows(use):
            return
        if condition is Condition.TORN:
            raise RequestError(
                f"a step of request {self.serial} failed after it had overwritten the rings: "
                f"rewind the request to {self.length} tokens or fewer, or release it"
            )
        if condition is Condition.APPROXIMATE:
            raise RequestError(
                f"request {self.serial} was resumed by a cut replay: from token "
                f"{self.approximate_from} on it differs from a cold run, and {_INSTEAD[use]}"
            )
        if condition is Condition.INCOMPLETE:
            raise RequestError(
                f"not all layers of request {self.serial} have stored what comes after token "
                f"{self.incomplete_from}: rewind it to there, then {use} it"
            )
        raise RequestError(
            f"request {self.serial} has {self.length} tokens of which "
            f"{self.reused_tokens} are to be replayed: run them first, then {use} it"
        )

    def note_incomplete(self, tokens: int) -> None:
        """Not all layers have stored what comes after this many tokens: it is never cached, offered
        or continued, unless a rewind takes it back. The ids from there on are forgotten, and none
        are learned after the gap."""
        if self.incomplete_from is None or tokens < self.incomplete_from:
            self.incomplete_from = tokens
            if self.trail is not None:
                self.trail.cut(tokens)

    def mend(self) -> None:
        """After tokens were taken back: the request is sound again if everything incomplete is
        gone."""
        if self.incomplete_from is not None and self.length <= self.incomplete_from:
            self.incomplete_from = None

    def lose_rings(self) -> None:
        """Records that the rings do not hold the state at `length`, as if a chunk had been written
        after it."""
        self._row[WRITTEN] = self.length + self._max_rollback_tokens + 1

    def shorten(self, tokens: int) -> None:
        """The length goes back, as far as the rings reach."""
        self._row[WRITTEN] = self.written_tokens
        self._row[LENGTH] = tokens
        self.resume = Resume(
            start=tokens,
            reused_tokens=tokens,
            end=tokens,
            source="rings",
            exact=self._origin.exact,
        )

    def detach(self) -> None:
        """The slot goes to another request; this one keeps its last values, but no memory."""
        self.released = True
        self._row = self._row.copy()
        self.block_ids = []
        self.trail = None

    def __repr__(self) -> str:
        state = "released" if self.released else f"slot {self.slot}"
        return f"Request({self.serial}: {state}, {self.length} tokens)"


def require_context(schema: CacheSchema, tokens: int) -> int:
    """A number of tokens that one request may have. InvalidInput, ContextOverflow."""
    return require_fit(schema, require_count("tokens", tokens, at_least=0))


def require_fit(schema: CacheSchema, tokens: int) -> int:
    """The same of what is a count. ContextOverflow."""
    if tokens > schema.max_context:
        raise ContextOverflow(asked_tokens=tokens, max_context_tokens=schema.max_context)
    return tokens


def root_of(request: Request) -> bytes | None:
    """What stands for the salt of a request; None if the ids of its tokens are not known."""
    return None if request.trail is None else request.trail.root


class RequestTable:
    """The live requests of one manager: its slots, its blocks, and one column of numbers per slot.

    `supply` is where its blocks come from, `holdings` what offers and arrivals of the hand-off
    hold. A call that raises has changed nothing.
    """

    def __init__(
        self,
        schema: CacheSchema,
        *,
        num_blocks: int,
        max_requests: int,
        allocator: BlockAllocator | None = None,
    ) -> None:
        self.schema, self.max_requests = schema, max_requests
        self.allocator = BlockAllocator(num_blocks) if allocator is None else allocator
        self.supply = BlockSupply(self.allocator)
        self.live: dict[int, Request] = {}  # by slot
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self.numbers = np.zeros((REQUEST_NUMBERS, max_requests), dtype=np.int64)
        self.recent = RecentIds(max_requests, schema.block_tokens)
        self.holdings = Holdings(self.supply, self.free_slots)
        self._next_serial = 0

    # ---- requests ----------------------------------------------------------------------------

    def require_live(self, request: Request) -> None:
        """RequestError for anything but a live request of this table."""
        if not isinstance(request, Request) or (
            not request.released and self.live.get(request.slot) is not request
        ):
            raise RequestError("this is not a request that this manager admitted")
        if request.released:
            raise RequestError(
                f"request {request.serial} has been released already: admit it again"
            )

    def require_slots(self, count: int = 1) -> None:
        """Raises OutOfSlots unless this many slots are free."""
        free = len(self.free_slots)
        if count > free:
            raise OutOfSlots(total=self.max_requests, needed=count, free=free)

    def make_request(
        self,
        slot: int,
        block_ids: list[int],
        resume: Resume,
        *,
        published_blocks: int = 0,
        trail: TokenTrail | None = None,
    ) -> Request:
        """A request that is not registered yet; `enlist` makes it live. Only admission calls
        this."""
        request = Request(self, slot, self._next_serial, block_ids, resume, trail)
        request.published_blocks = published_blocks
        self._next_serial += 1
        return request

    def enlist(self, request: Request) -> None:
        if self.free_slots[-1] == request.slot:
            self.free_slots.pop()
        else:
            self.free_slots.remove(request.slot)
        self.live[request.slot] = request

    def arrive(self, holder: object, request: Request) -> None:
        """Makes a request live in the slot and with the blocks that were promised to the holder."""
        self.live[request.slot] = request
        holding = self.holdings.pop(holder)
        self.allocator.arrive(holding.landing)

    def close(self, request: Request) -> None:
        """Releases slot and blocks; the request keeps its last numbers."""
        block_ids = request.block_ids
        request.detach()
        self.allocator.release(block_ids)
        del self.live[request.slot]
        self.free_slots.append(request.slot)

    # ---- blocks ------------------------------------------------------------------------------

    def reserve_step(self, requests: Sequence[Request], slots: Numbers, ends: Numbers) -> Growth:
        """Blocks for a step that takes requests up to `ends`, or OutOfBlocks: of those that have
        too few, or have some that the device's table lacks."""
        block_tokens = self.schema.block_tokens
        published = self.numbers[PUBLISHED].take(slots)
        growing = (ends > published * block_tokens).nonzero()[0]
        if not len(growing) or not self.schema.bytes.block:  # window-only layers need none
            return _NO_GROWTH
        return self._reserve_growth(
            [requests[row] for row in growing.tolist()],
            (-(-ends.take(growing) // block_tokens)).tolist(),
        )

    def settle_step(self, growth: Growth) -> None:
        """Takes what `reserve_step` has reserved, and the device's table has it."""
        self._settle_growth(growth)
        for request, blocks in zip(growth.requests, growth.blocks, strict=True):
            request.published_blocks = blocks

    def _reserve_growth(self, requests: Sequence[Request], blocks: Sequence[int]) -> Growth:
        """Reserves blocks so that each request has this many in all, or raises OutOfBlocks."""
        missing = [
            max(count - len(request.block_ids), 0)
            for request, count in zip(requests, blocks, strict=True)
        ]
        needed = sum(missing)
        askers = [Asker(r.trail, n) for r, n in zip(requests, missing, strict=True) if n]
        if needed <= self.allocator.free and not self.supply.limits:
            reserved = Reserved(self.allocator.next_ids(needed), (), askers)
            return Growth(requests, blocks, missing, reserved)
        most = max(range(len(blocks)), key=blocks.__getitem__)
        held = requests[most].block_ids
        reserved = self.supply.reserve(needed, askers, asker_blocks=blocks[most], shared=held)
        return Growth(requests, blocks, missing, reserved)

    def _settle_growth(self, growth: Growth) -> None:
        new_ids, first = self.supply.settle(growth.reserved), 0
        for request, count in zip(growth.requests, growth.missing, strict=True):
            request.block_ids += new_ids[first : first + count]
            first += count

    def grow(self, growing: Sequence[tuple[Request, int]]) -> None:
        """Gives each request this many blocks in all, or none of them any."""
        requests, blocks = zip(*growing, strict=True)
        self._settle_growth(self._reserve_growth(requests, blocks))

    def cut(self, request: Request, kept: int) -> None:
        """Releases all blocks except the first `kept`."""
        released = request.block_ids[kept:]
        request.published_blocks = min(request.published_blocks, kept)
        request.block_ids = request.block_ids[:kept]
        self.allocator.release(released)

    def replace(self, request: Request, block: int, block_id: int) -> None:
        """Replaces one of the request's blocks by another, which has a reference of its own. The
        next step publishes it."""
        old = request.block_ids[block]
        request.published_blocks = min(request.published_blocks, block)
        request.block_ids[block] = block_id
        self.allocator.release([old])

    def cut_shared(self, request: Request) -> None:
        """Releases blocks that anything else relies on; the others move up, so none is
        published."""
        shared = [b for b in request.block_ids if self.allocator.is_shared(b)]
        if shared:
            kept = [b for b in request.block_ids if not self.allocator.is_shared(b)]
            request.published_blocks = 0
            request.block_ids = kept
            self.allocator.release(shared)

    # ---- the numbers of a step's requests ----------------------------------------------------

    def move(self, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Sets the lengths of the requests in these slots."""
        self.numbers[LENGTH, slots] = lengths

    def note_written(self, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Rings hold tokens up to `ends`, past the length that the requests will have."""
        written = self.numbers[WRITTEN]
        written[slots] = np.maximum(written.take(slots), ends)

    def cut_shared_after(self, request: Request) -> None:
        """Releases shared blocks that the request has yet to write; it keeps its own."""
        first = self.schema.blocks_for(max(request.length, request.reused_tokens))
        if any(map(self.allocator.is_shared, request.block_ids[first:])):
            self.cut(request, first)

    def check_invariants(self) -> None:
        """Every block and slot has exactly the owners it should. Raises Dsv4Error otherwise."""
        self.allocator.check_invariants()
        owners: dict[int, int] = {}
        for slot, request in self.live.items():
            if request.slot != slot or request.released:
                raise Dsv4Error(f"slot {slot} is held by a request that does not know it")
            if self.schema.blocks_for(request.length) > len(request.block_ids):
                raise Dsv4Error(f"slot {slot} has more tokens than its blocks hold")
            for block_id in request.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        for holding in self.holdings.values():
            for block_id in holding.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        for block_id in range(self.allocator.total):
            if self.allocator.references(block_id) != owners.get(block_id, 0):
                raise Dsv4Error(
                    f"block {block_id} has {self.allocator.references(block_id)} references, but "
                    f"{owners.get(block_id, 0)} requests and offers hold it"
                )
        promised = [each.slot for each in self.holdings.values() if each.slot is not None]
        slots = sorted([*self.free_slots, *self.live, *promised])
        if slots != list(range(self.max_requests)):
            raise Dsv4Error("slots are lost or doubled: free and live ones do not add up")
