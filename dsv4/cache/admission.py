"""The one place where requests begin, go back and continue. Nothing else makes a `Request`.

    begin       from nothing
    after       after cached blocks, with a snapshot or a replay
    from_state  after cached blocks, with the state of a request that was suspended
    arrived     with blocks and state of another machine's request
    fork        where a live request is
    rewind      a live request, to an earlier length
    reset       a live request, to length 0
    go_on       a live request, to the end of a longer prompt

All of them first write to the device, to a slot and blocks that no request has, and then change the
bookkeeping, so an error leaves everything unchanged. The manager checks what a caller passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from dsv4.cache.allocator import Asker
from dsv4.cache.changes import LOGGER, Guard
from dsv4.cache.memory import CacheMemory
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.prefix.resume import PrefixMatch, Resume
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request, RequestTable

if TYPE_CHECKING:
    from dsv4.cache.handoff.arrival import Arrival

Fill = Callable[[int, Sequence[int]], None]


class Admission:
    """Requests of one manager. It is only called from a call of the manager."""

    def __init__(
        self,
        table: RequestTable,
        memory: CacheMemory,
        prefix: PrefixCache | NoPrefix,
        guard: Guard,
    ) -> None:
        self._table, self._memory, self._prefix, self._guard = table, memory, prefix, guard
        self._schema = table.schema

    # ---- a request begins --------------------------------------------------------------------

    def begin(self, count: int) -> Request:
        """A request that starts from nothing, with blocks for `count` tokens."""
        resume = Resume(start=0, reused_tokens=0, end=count, source="nothing")
        block_ids = self._table.supply.take(self._schema.blocks_for(count))
        return self._enter(self._table.make_request(self._table.free_slots[-1], block_ids, resume))

    def after(self, prefix: PrefixCache, match: PrefixMatch, trail: TokenTrail) -> Request:
        """A request that continues after cached blocks."""

        def fill(slot: int, begun: Sequence[int]) -> None:
            if match.nodes:
                prefix.put_state(match, self._memory.slot_arena.bytes[slot])

        request = self._after(match, trail, fill)
        prefix.use(match, trail)
        return request

    def from_state(
        self,
        prefix: PrefixCache,
        match: PrefixMatch,
        trail: TokenTrail,
        slot_bytes: Tensor,
        block_bytes: Tensor,
    ) -> Request:
        """A request that was suspended: slot and unfinished block come from the host."""
        self._table.require_slots()

        def fill(slot: int, begun: Sequence[int]) -> None:
            self._put_state(slot, begun, slot_bytes, block_bytes)

        request = self._after(match, trail, fill)
        prefix.use(match, trail)
        return request

    def _after(self, match: PrefixMatch, trail: TokenTrail, fill: Fill) -> Request:
        """After the blocks of a match. `fill` puts the state into a slot and, where the state ends
        inside a block, into that block; no request has that slot or block yet."""
        table, resume, block_tokens = self._table, match.resume, self._schema.block_tokens
        slot, shared = table.free_slots[-1], [node.block_id for node in match.nodes]
        blocks = self._schema.blocks_for(resume.end)
        asker = Asker(trail, blocks - len(shared))
        with (
            table.supply.sharing(shared),
            table.supply.reserving(asker, asker_blocks=blocks, shared=shared) as new,
        ):
            is_inside = resume.source == "state" and resume.start % block_tokens > 0
            begun = new.block_ids[:is_inside]
            published = [*shared, *begun]
            if published:
                self._memory.publish(slot, 0, published)
            fill(slot, begun)
        block_ids = [*shared, *new.block_ids]
        request = table.make_request(
            slot, block_ids, resume, published_blocks=len(published), trail=trail
        )
        return self._enter(request)

    def arrived(self, arrival: Arrival, slot_bytes: Tensor, block_bytes: Tensor) -> Request:
        """The request of an arrival, in the slot and the blocks that were promised to it. The
        blocks have arrived already, the state is on the host."""
        table, landing, length = self._table, arrival.landing, arrival.tokens
        slot, block_ids = table.holdings[arrival].slot, [*landing.shared, *landing.block_ids]
        assert slot is not None
        if block_ids:
            self._memory.publish(slot, 0, block_ids)
        is_inside = length % self._schema.block_tokens > 0
        self._put_state(slot, block_ids[-1:] if is_inside else [], slot_bytes, block_bytes)
        resume = Resume(start=length, reused_tokens=length, end=length, source="state")
        request = table.make_request(
            slot, block_ids, resume, published_blocks=len(block_ids), trail=arrival.trail
        )
        self._guard.change.hand_out(request)
        table.arrive(arrival, request)
        return request

    def fork(self, request: Request, count: int) -> list[Request]:
        """Requests that continue from where this one is. They share its whole blocks, and get
        copies of its slot and of its unfinished block."""
        table, schema = self._table, self._schema
        held = schema.blocks_for(request.length)
        whole = max(request.length, request.reused_tokens) // schema.block_tokens
        shared = request.block_ids[:whole] if schema.block_bytes else []
        slots = table.free_slots[: -count - 1 : -1] if count else []
        asker = Asker(request.trail, count * max(0, held - len(shared)))
        with table.supply.reserving(
            asker, asker_blocks=held + count, shared=request.block_ids
        ) as new:
            copies = new.block_ids
            owned = [[*shared, *copies[nth : nth + 1]] for nth in range(len(slots))]
            for slot, block_ids in zip(slots, owned, strict=True):
                self._memory.copy_slot(request.slot, slot)
                if block_ids:
                    self._memory.publish(slot, 0, block_ids)
            if copies:  # all of them at once
                self._memory.copy_block(request.block_ids[len(shared)], copies)
        forks = []
        for slot, block_ids in zip(slots, owned, strict=True):
            twin = table.make_request(
                slot, block_ids, request.resume, published_blocks=len(block_ids)
            )
            twin.continue_from(request)
            forks.append(twin)
            table.allocator.share(shared)
        self._guard.change.hand_out(*forks)
        for fork in forks:
            table.enlist(fork)
        return forks

    def _enter(self, request: Request) -> Request:
        self._guard.change.hand_out(request)
        self._table.enlist(request)
        return request

    def _put_state(
        self, slot: int, begun: Sequence[int], slot_bytes: Tensor, block_bytes: Tensor
    ) -> None:
        """Copies a state from the host into a slot and, where it ends inside a block, into that
        block."""
        self._memory.slot_arena.bytes[slot].copy_(slot_bytes)
        if self._schema.block_bytes:
            for block_id in begun:
                self._memory.block_arena.bytes[block_id].copy_(block_bytes)

    # ---- a live request goes elsewhere -------------------------------------------------------

    def rewind(self, request: Request, length: int) -> Resume:
        """Goes back to `length` tokens: directly where the rings still hold the state there,
        otherwise to the nearest point that can be resumed."""
        reach = request.written_tokens - self._schema.max_rollback_tokens
        if length >= max(reach, request.reused_tokens):
            self._own_unfinished_block(request, length)
            if request.trail is not None:
                request.trail.cut(length)
            request.shorten(length)
            self._table.cut_shared_after(request)
        else:
            match = self._prefix.match_own(request, length)
            if match.resume.source != "nothing":
                self._prefix.put_state(match, self._memory.workspace.slot)
            self._resume_at(request, match.resume, length)
        request.mend()
        return request.resume

    def reset(self, request: Request) -> None:
        """Goes back to length 0, with a slot of zeros. It keeps the blocks that only it holds."""
        with self._guard.change.rewriting(request):
            self._memory.zero_slot(request.slot)
            if request.trail is not None:
                request.trail.cut(0)
            request.restart(Resume(start=0, reused_tokens=0, end=0, source="nothing"))
            self._table.cut_shared(request)
        request.mend()

    def go_on(self, request: Request, trail: TokenTrail, count: int) -> Resume:
        """Continues to the end of a prompt of `count` tokens that begins with the request's own."""
        self._table.grow([(request, self._schema.blocks_for(count))])
        fixed = max(request.length, request.reused_tokens)
        request.trail = trail
        request.resume = Resume(
            start=request.length, reused_tokens=fixed, end=count, source="rings"
        )
        return request.resume

    def exchange(self, request: Request, first: int, block_ids: Sequence[int]) -> None:
        """From its block `first` on the request holds these blocks, of the same bytes, in place of
        its own. It keeps its own if the device fails."""
        try:
            self._memory.publish(request.slot, first, block_ids)
        except RuntimeError as error:
            LOGGER.warning("%d equal blocks are kept twice: %s", len(block_ids), error)
            return
        span = slice(first, first + len(block_ids))
        own = request.block_ids[span]
        self._table.allocator.share(block_ids)
        request.block_ids[span] = block_ids
        self._table.allocator.release(own)

    def _resume_at(self, request: Request, resume: Resume, length: int) -> None:
        """The request continues from where a resume says. Unless that is from nothing, the state is
        in the workspace's spare slot, and one operation of the device copies it."""
        with self._guard.change.rewriting(request):
            if resume.source != "nothing":
                self._memory.fill_slot(request.slot)
            if request.trail is not None:
                request.trail.cut(length)
            self._table.cut(request, resume.reused_tokens // self._schema.block_tokens)
            request.restart(resume)

    def _own_unfinished_block(self, request: Request, length: int) -> None:
        """Makes sure that what the request writes from `length` on into its unfinished block goes
        to a block of its own."""
        block, inside = divmod(length, self._schema.block_tokens)
        if not inside or not self._schema.block_bytes:
            return
        if not self._table.allocator.is_shared(request.block_ids[block]):
            return
        with self._table.supply.reserving(
            Asker(request.trail, 1), asker_blocks=block + 1, shared=request.block_ids
        ) as new:
            self._memory.copy_block(request.block_ids[block], new.block_ids)
        (copy,) = new.block_ids
        self._table.replace(request, block, copy)
