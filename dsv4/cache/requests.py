"""Live requests: who has which slot and which blocks, and the numbers that a step reads of them.
Torch-free: nothing here touches the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.schema import CacheSchema
from dsv4.errors import Dsv4Error, OutOfSlots, RequestError

# rows of RequestTable.numbers, one column per slot; a step reads those of its requests at once
LENGTH, PUBLISHED, REUSED, WRITTEN = range(4)
REQUEST_NUMBERS = 4


class Request:
    """What one request holds. The manager changes it; callers read it.

    Token positions, as the last commit left them:
      [0, length)              computed: entries in blocks, the rest in the slot
      [length, reused_tokens)  replayed: entries are there already and are not written again
      [length, end of blocks)  paid for: blocks are there, nothing is written
    """

    __slots__ = (
        "__weakref__",
        "_max_rollback_tokens",
        "_row",
        "block_ids",
        "exact_from",
        "released",
        "resume",
        "serial",
        "slot",
        "torn_from",
        "trail",
    )

    def __init__(
        self,
        *,
        slot: int,
        serial: int,
        block_ids: list[int],
        row: NDArray[np.int64],
        resume: Resume,
        max_rollback_tokens: int,
    ) -> None:
        self.slot, self.serial = slot, serial
        self.released = False
        self._max_rollback_tokens = max_rollback_tokens
        self.resume = resume  # what the caller runs next to get where it wanted to be
        self.exact_from = 0  # below, a replay may have left rings that differ from a cold run's
        self.torn_from: int | None = None  # a step from here on was not stored by all layers
        self.trail: TokenTrail | None = None
        self._row = row
        self._row[:] = 0
        self.block_ids = block_ids  # in the order of the tokens

    @property
    def length(self) -> int:
        return int(self._row[LENGTH])

    @length.setter
    def length(self, tokens: int) -> None:
        self._row[WRITTEN] = self.written_tokens
        self._row[LENGTH] = tokens

    @property
    def published_blocks(self) -> int:
        """Blocks that the device's table has."""
        return int(self._row[PUBLISHED])

    @published_blocks.setter
    def published_blocks(self, blocks: int) -> None:
        self._row[PUBLISHED] = blocks

    @property
    def reused_tokens(self) -> int:
        """Entries below this position came from somebody else; the rings cannot go below it."""
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
    def is_torn(self) -> bool:
        """Whether a step that failed has overwritten what the rings held at `length`: the request
        can only be rewound, reset or released."""
        return self.written_tokens - self.length > self._max_rollback_tokens

    def require_whole(self) -> None:
        """RequestError for a torn request."""
        if self.is_torn:
            raise RequestError(
                f"a step of request {self.serial} failed after it had overwritten the rings: "
                f"rewind the request to {self.length} tokens or fewer, or release it"
            )

    def note_torn(self, tokens: int) -> None:
        """Not all layers have stored what lies behind so many tokens: it is never cached, unless a
        rewind takes it back. Their ids are forgotten, and behind a gap none are learned."""
        if self.torn_from is None or tokens < self.torn_from:
            self.torn_from = tokens
            if self.trail is not None:
                self.trail.cut(tokens)

    def mend(self) -> None:
        """After tokens were taken back: nothing is torn if all that was is gone."""
        if self.torn_from is not None and self.length <= self.torn_from:
            self.torn_from = None

    def detach(self) -> None:
        """The slot goes to another request; this one keeps its last values."""
        self.released = True
        self._row = self._row.copy()
        self.block_ids = []

    def __repr__(self) -> str:
        state = "released" if self.released else f"slot {self.slot}"
        return f"Request({self.serial}: {state}, {self.length} tokens)"


class RequestTable:
    """The live requests of one manager: its slots, its blocks, and one column of numbers per slot.

    A call that raises has changed nothing. `reclaim(blocks)` is asked for more free blocks where
    they are too few, before OutOfBlocks is raised: the prefix cache evicts.
    """

    def __init__(self, schema: CacheSchema, *, num_blocks: int, max_requests: int) -> None:
        self.schema, self.max_requests = schema, max_requests
        self.allocator = BlockAllocator(num_blocks)
        self.live: dict[int, Request] = {}  # by slot
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self.numbers = np.zeros((REQUEST_NUMBERS, max_requests), dtype=np.int64)
        self.reclaim: Callable[[int], object] | None = None
        self._next_serial = 0

    # ---- requests ----------------------------------------------------------------------------

    def require_live(self, request: Request) -> None:
        """RequestError for anything but a live request of this table."""
        if not isinstance(request, Request) or (
            not request.released and self.live.get(request.slot) is not request
        ):
            raise RequestError("this is not a request that this manager admitted")
        if request.released:
            raise RequestError(f"request {request.serial} has been released already")

    def require_slots(self, count: int = 1) -> None:
        """OutOfSlots unless so many slots are free."""
        free = len(self.free_slots)
        if count > free:
            raise OutOfSlots(total=self.max_requests, needed=count, free=free)

    def open(self, block_ids: list[int], resume: Resume) -> Request:
        """A new request in a free slot, which must be there, with blocks that were taken for it."""
        slot = self.free_slots.pop()
        request = Request(
            slot=slot,
            serial=self._next_serial,
            block_ids=block_ids,
            row=self.numbers[:, slot],
            resume=resume,
            max_rollback_tokens=self.schema.max_rollback_tokens,
        )
        self._next_serial += 1
        self.live[slot] = request
        return request

    def fork(self, parent: Request, block_ids: list[int]) -> Request:
        """A new request that is where another one is, with blocks that were taken for it."""
        request = self.open(block_ids, parent.resume)
        request.length, request.written_tokens = parent.length, parent.written_tokens
        request.reused_tokens, request.exact_from = parent.reused_tokens, parent.exact_from
        request.trail = parent.trail and parent.trail.copy()
        request.torn_from = parent.torn_from
        return request

    def restart(self, request: Request, resume: Resume) -> None:
        """The request goes on from `resume.start`, whatever it has written before."""
        request.length = request.written_tokens = resume.start
        request.reused_tokens = resume.reused_tokens
        request.exact_from = resume.reused_tokens if resume.source == "replay" else resume.start
        request.resume = resume

    def close(self, request: Request) -> None:
        """Slot and blocks go back; the request keeps its last numbers."""
        self.allocator.release(request.block_ids)
        del self.live[request.slot]
        self.free_slots.append(request.slot)
        request.detach()

    # ---- blocks ------------------------------------------------------------------------------

    def take(self, count: int, *, asker_blocks: int | None = None) -> list[int]:
        """`count` blocks, reclaimed where too few are free, or OutOfBlocks."""
        short = count - self.allocator.free
        if short > 0 and self.reclaim is not None:
            self.reclaim(short)
        return self.allocator.take(count, asker_blocks=asker_blocks)

    def grow(self, growing: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """So many blocks in all for each request, or none for any. Returns how many each had."""
        held = [(request, len(request.block_ids)) for request, _ in growing]
        missing = [max(blocks - len(request.block_ids), 0) for request, blocks in growing]
        if any(missing):
            asker_blocks = max(blocks for _, blocks in growing)
            new_ids = iter(self.take(sum(missing), asker_blocks=asker_blocks))
            for (request, _), count in zip(growing, missing, strict=True):
                request.block_ids.extend(islice(new_ids, count))
        return held

    def cut(self, request: Request, kept: int) -> None:
        """All but the first `kept` blocks go back."""
        self.allocator.release(request.block_ids[kept:])
        request.block_ids = request.block_ids[:kept]
        request.published_blocks = min(request.published_blocks, kept)

    def cut_shared(self, request: Request) -> None:
        """Blocks that anybody else relies on go back; the others move up, so none is published."""
        shared = [b for b in request.block_ids if self.allocator.is_shared(b)]
        if shared:
            kept = [b for b in request.block_ids if not self.allocator.is_shared(b)]
            self.allocator.release(shared)
            request.block_ids, request.published_blocks = kept, 0

    # ---- the numbers of a step's requests ----------------------------------------------------

    def move(self, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """The requests in these slots have these lengths now."""
        self.numbers[LENGTH, slots] = lengths

    def note_written(self, slots: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Rings hold tokens up to `ends`, past the length that the requests will have."""
        self.numbers[WRITTEN, slots] = np.maximum(self.numbers[WRITTEN, slots], ends)

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
        for block_id in range(self.allocator.total):
            if self.allocator.references(block_id) != owners.get(block_id, 0):
                raise Dsv4Error(
                    f"block {block_id} has {self.allocator.references(block_id)} references, but "
                    f"{owners.get(block_id, 0)} requests hold it"
                )
        if sorted([*self.free_slots, *self.live]) != list(range(self.max_requests)):
            raise Dsv4Error("slots are lost or doubled: free and live ones do not add up")
