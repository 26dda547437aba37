"""The one place where requests begin, go back and continue. Nothing else makes a `Request`.

    admit       for a prompt: one of the next two
    begin       from nothing
    after       after cached blocks, with a snapshot or a replay
    from_state  after cached blocks, with the state of a request that was suspended
    arrived     with blocks and state of another machine's request
    fork        where a live request is
    rewind      a live request, to an earlier length
    reset       a live request, to length 0
    go_on       a live request, to the end of a longer prompt

`look_up`, `needed_blocks`, `released_blocks` and `can_admit` only answer. All others first write to
the device, to a slot and blocks that no request has, and then change the bookkeeping, so an error
leaves everything unchanged. What the calls promise is written at the manager's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from torch import Tensor

from dsv4.cache.allocator import Asker
from dsv4.cache.changes import LOGGER, Guard
from dsv4.cache.memory import CacheMemory
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.resume import PrefixMatch, Resume
from dsv4.cache.prefix.trail import TokenIds, TokenTrail, token_ids
from dsv4.cache.requests import Condition, Request, RequestTable, require_context, require_fit
from dsv4.errors import (
    ContextOverflow,
    InvalidInput,
    OutOfBlocks,
    is_whole,
    require_count,
    require_flag,
    require_type,
)

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

    # ---- what a prompt is, and what it would need --------------------------------------------

    def prompt(self, ids: TokenIds, salt: str | None, hints: Hints | None) -> Prompt:
        if hints is not None:
            require_type("hints", hints, Hints)
        read = token_ids(ids)
        require_fit(self._schema, len(read))
        return self._prefix.prompt(read, salt, hints)

    def read(
        self, prompt: int | TokenIds | Prompt, salt: str | None
    ) -> tuple[int, TokenTrail | None]:
        """How many tokens, and their trail where ids are known and may be cached."""
        if isinstance(prompt, Prompt):
            if salt is not None:
                raise InvalidInput(
                    "a prompt has its salt already: give it to manager.prefix.prompt"
                )
            return require_fit(self._schema, prompt.tokens), self._prefix.trail_of(prompt)
        if isinstance(prompt, int | np.integer):
            return require_context(self._schema, prompt), None
        ids = token_ids(prompt)
        return require_fit(self._schema, len(ids)), self._prefix.trail(ids, salt)

    def look_up(self, prompt: Prompt) -> Resume:
        count, trail = self.read(prompt, None)
        if trail is None:
            return Resume(start=0, reused_tokens=0, end=count, source="nothing")
        return self._prefix.required().look_up(trail)

    def needed_blocks(self, prompt: int | TokenIds | Prompt, salt: str | None) -> int:
        count, trail = self.read(prompt, salt)
        cached = 0 if trail is None else self._prefix.required().cached_blocks(trail)
        return self._schema.blocks_for(count) - cached

    def released_blocks(self, request: Request) -> int:
        self._table.require_live(request)
        pinned = self._prefix.pins.block_ids()
        references = self._table.allocator.references
        return sum(references(b) == 1 and b not in pinned for b in request.block_ids)

    def can_admit(self, prompt: int | TokenIds | Prompt, salt: str | None) -> bool:
        shared: list[int] = []
        try:
            count, trail = self.read(prompt, salt)
        except (InvalidInput, ContextOverflow):
            return False
        if trail is not None:
            shared = [node.block_id for node in self._prefix.required().match(trail).nodes]
        needed = self._schema.blocks_for(count) - len(shared)
        short = needed - self._table.allocator.free
        fits = short <= 0 or self._prefix.blocks.evictable(excluding=shared) >= short
        if fits and needed and trail is not None:
            room = self._table.supply.room(trail.root, sharing=shared)
            fits = room is None or needed <= room
        return fits and bool(self._table.free_slots)

    # ---- a request begins --------------------------------------------------------------------

    def admit(
        self,
        prompt: int | TokenIds | Prompt,
        salt: str | None,
        *,
        reuse: bool,
        hints: Hints | None,
    ) -> Request:
        if reuse is not True:
            require_flag("reuse", reuse)
        if hints is not None:
            require_type("hints", hints, Hints)
        count, found = self.read(prompt, salt)
        blocks = self._schema.blocks_for(count)
        if blocks > self._table.allocator.total:
            self._refuse_size(blocks)
        self._table.require_slots()
        if found is None:
            return self.begin(count)
        if self._table.supply.limits:
            self._table.supply.require_within(found, blocks)
        trail = found.copy() if isinstance(prompt, Prompt) else found
        trail.hints = hints or trail.hints
        prefix = self._prefix.required()
        return self.after(prefix, prefix.match(trail, reuse=reuse), trail)

    def require_within(self, prompt: TokenIds | Prompt, salt: str | None) -> None:
        """OverQuota for a prompt that its salt's quota can never hold, before tiers are asked."""
        count, trail = self.read(prompt, salt)
        if trail is not None:
            self._table.supply.require_within(trail, self._schema.blocks_for(count))

    def _refuse_size(self, blocks: int) -> NoReturn:
        allocator = self._table.allocator
        raise OutOfBlocks(
            needed=blocks, free=allocator.free, total=allocator.total, asker_blocks=blocks
        )

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
        """Requests that continue from where this one is."""
        request.require("fork")
        count = require_count("count", count, at_least=0)
        self._table.require_slots(count)
        return self._fork(request, count)

    def _fork(self, request: Request, count: int) -> list[Request]:
        """They share its whole blocks, and get copies of its slot and of its unfinished block."""
        table, schema = self._table, self._schema
        held = schema.blocks_for(request.length)
        whole = max(request.length, request.reused_tokens) // schema.block_tokens
        shared = request.block_ids[:whole] if schema.bytes.block else []
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
        if self._schema.bytes.block:
            for block_id in begun:
                self._memory.block_arena.bytes[block_id].copy_(block_bytes)

    # ---- a live request goes elsewhere -------------------------------------------------------

    def rewind(self, request: Request, length: int) -> Resume:
        """Goes back to a length that the request has had."""
        tokens = require_count("length", length, at_least=0)
        if tokens > request.length:
            raise InvalidInput(
                f"cannot rewind to {length} tokens: request {request.serial} has {request.length}, "
                f"and a rewind only goes back"
            )
        resume = self._rewind(request, tokens)
        self._table.supply.trim_for(request.trail)
        return resume

    def _rewind(self, request: Request, length: int) -> Resume:
        """Directly where the rings still hold the state there, otherwise to the nearest point that
        can be resumed."""
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

    def go_on(self, request: Request, prompt: TokenIds | Prompt) -> Resume:
        """Continues to the end of a prompt that begins with the request's own tokens."""
        if request.condition is not Condition.INCOMPLETE:  # not all of whose tokens are known
            request.require("continue")
        count, trail = self.read(prompt, None)
        known = request.trail
        if trail is None or known is None or not request.condition.allows("continue"):
            raise InvalidInput(
                f"the tokens of request {request.serial} are not known to be the prompt's: both "
                f"must be given as ids"
            )
        fixed = max(request.length, request.reused_tokens)  # entries to replay belong to its tokens
        is_same = len(known.ids) >= fixed and known.root == trail.root and count > fixed
        if not is_same or not np.array_equal(trail.ids[:fixed], known.ids[:fixed]):
            raise InvalidInput(
                f"a prompt of {count} tokens does not go on from the {fixed} of request "
                f"{request.serial}: it must begin with them and be longer, all of them must be "
                f"known (supply_ids), and the salt must be the same"
            )
        trail = trail.copy()
        trail.hints = trail.hints or known.hints
        self._table.grow([(request, self._schema.blocks_for(count))])
        request.trail = trail
        resume = Resume(start=request.length, reused_tokens=fixed, end=count, source="rings")
        request.resume = resume
        self._prefix.required().use(PrefixMatch([], resume, None), trail)
        return resume

    def supply_ids(self, request: Request, ids: TokenIds) -> bool:
        """Ids of tokens that were committed without them. Returns whether they are of use."""
        read = token_ids(ids)
        if request.trail is None:
            return False
        known = len(request.trail.ids)
        if known + len(read) > request.length:
            raise InvalidInput(
                f"{len(read)} ids after the {known} that are known of request {request.serial}, "
                f"but it has {request.length} tokens: supply those that were committed"
            )
        slot = self._memory.slot_arena.bytes[request.slot]
        self._prefix.required().caching.supply_ids(request, read, slot, self.exchange)
        return True

    def extend(self, request: Request, tokens: int) -> list[int]:
        """Blocks for this many tokens after the request's length; the ids of the new ones."""
        self._table.require_live(request)
        end = request.length + require_count("tokens", tokens, at_least=0)
        require_context(self._schema, end)
        held = len(request.block_ids)
        self._table.grow([(request, self._schema.blocks_for(end))])
        return request.block_ids[held:]

    def add_block(self, request: Request) -> int:
        """One more block; its id."""
        self._table.require_live(request)
        held = len(request.block_ids)
        if held == self._schema.max_blocks_per_request:
            raise ContextOverflow(
                asked_tokens=(held + 1) * self._schema.block_tokens,
                max_context_tokens=self._schema.max_context,
            )
        self._table.grow([(request, held + 1)])
        return request.block_ids[held]

    def block_id(self, request: Request, block: int) -> int:
        """The id of the request's block number `block`."""
        self._table.require_live(request)
        if not is_whole(block) or not 0 <= block < len(request.block_ids):
            raise InvalidInput(
                f"block {block} is past the table of this request, which holds "
                f"{len(request.block_ids)} blocks: extend it first"
            )
        return request.block_ids[block]

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
        if not inside or not self._schema.bytes.block:
            return
        if not self._table.allocator.is_shared(request.block_ids[block]):
            return
        with self._table.supply.reserving(
            Asker(request.trail, 1), asker_blocks=block + 1, shared=request.block_ids
        ) as new:
            self._memory.copy_block(request.block_ids[block], new.block_ids)
        (copy,) = new.block_ids
        self._table.replace(request, block, copy)
