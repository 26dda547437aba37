"""The half of a manager that requests live in: they come, fork, go back, grow and go."""

from __future__ import annotations

from dsv4.cache.manager_base import ManagerBase
from dsv4.cache.prefix.cache import PinnedPrefix
from dsv4.cache.prefix.resume import ResumePlan
from dsv4.cache.prefix.trail import Ids, Tokens, token_ids
from dsv4.cache.requests import Request
from dsv4.cache.step import checks as step_checks
from dsv4.errors import ContextOverflow, InvalidInput, OutOfBlocks, OutOfSlots


class RequestCalls(ManagerBase):
    """A call that raises has changed nothing."""

    def can_admit(self, tokens: int | Tokens, salt: str | None = None) -> bool:
        """Whether `admit_request` would succeed now."""
        shared: list[int] = []
        try:
            count, ids = _count_and_ids(tokens)
            step_checks.context(self.schema, count)
            if self.prefix is not None and ids is not None:
                match = self.prefix.match(self.prefix.trail(ids, salt))
                shared = [node.block_id for node in match.nodes]
        except (InvalidInput, ContextOverflow):
            return False
        self.allocator.share(shared)  # so that they are not counted as evictable
        short = self.schema.blocks_for(count) - len(shared) - self.allocator.free
        fits = short <= 0 or (self.prefix is not None and self.prefix.index.can_evict(short))
        self.allocator.release(shared)
        return fits and bool(self._free_slots)

    def admit_request(self, tokens: int | Tokens = 0, salt: str | None = None) -> Request:
        """A slot, and blocks for a prompt of `tokens`, a count or the token ids: all or nothing.

        With ids and a prefix cache, what is cached of the prompt is reused and `request.resume`
        says what is left to run, at least its last token. Prompts with different `salt` share
        nothing. Raises OutOfSlots, OutOfBlocks (`never` or wait), ContextOverflow, InvalidInput.
        """
        count, ids = _count_and_ids(tokens)
        step_checks.context(self.schema, count)
        blocks = self.schema.blocks_for(count)
        if blocks > self.allocator.total:
            raise OutOfBlocks(
                needed=blocks,
                free=self.allocator.free,
                total=self.allocator.total,
                asker_blocks=blocks,
            )
        if not self._free_slots:
            raise OutOfSlots(total=self.max_requests)
        if self.prefix is None or ids is None:
            resume = ResumePlan(start=0, reused_tokens=0, end=count, source="nothing")
            return self._new_request(self._take(blocks), resume)
        trail = self.prefix.trail(ids, salt)
        match = self.prefix.match(trail)
        shared = [node.block_id for node in match.nodes]
        self.allocator.share(shared)
        try:
            own = self._take(blocks - len(shared), asker_blocks=blocks)
        except OutOfBlocks:
            self.allocator.release(shared)
            raise
        request = self._new_request(shared + own, match.resume)
        if shared:
            try:
                self._publish(request, 0, len(shared))
                self._resume(request, match)
            except BaseException:  # the device's error
                self.release_request(request)
                raise
        request.trail = trail
        self.prefix.use(match, trail)
        return request

    def fork(self, request: Request, count: int) -> list[Request]:
        """`count` new requests that go on from where this one is: beams, parallel samples.

        They share its whole blocks, which are never written again, and get copies of its slot and
        of its unfinished block: all or nothing. Raises OutOfSlots, OutOfBlocks, RequestError.
        """
        step_checks.idle(request, self, self._open_plan)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise InvalidInput(f"{count!r} forks of a request: give a count of 0 or more")
        if count > len(self._free_slots):
            raise OutOfSlots(total=self.max_requests, needed=count, free=len(self._free_slots))
        held = self.schema.blocks_for(request.length)
        whole = max(request.length, request.reused_tokens) // self.schema.block_tokens
        shared = request.block_ids[:whole] if self.schema.block_bytes else []
        copies = self._take(count * max(0, held - len(shared)), asker_blocks=held + count)
        forks = []
        for nth in range(count):
            self.allocator.share(shared)
            fork = self._new_request([*shared, *copies[nth : nth + 1]], request.resume)
            fork.length, fork.written_tokens = request.length, request.written_tokens
            fork.reused_tokens, fork.exact_from = request.reused_tokens, request.exact_from
            fork.trail = request.trail and request.trail.copy()
            forks.append(fork)
        try:
            for fork in forks:
                self.slot_arena.bytes[fork.slot].copy_(self.slot_arena.bytes[request.slot])
                if copies:
                    self._copy_block(request.block_ids[len(shared)], fork.block_ids[-1])
                self._publish(fork, 0)
        except BaseException:  # the device's error
            for fork in forks:
                self.release_request(fork)
            raise
        return forks

    def rewind(self, request: Request, length: int) -> ResumePlan:
        """Takes tokens from `length` on back. Returns what to run again to be there.

        As far as the rings reach (the newest 1 + max_draft_tokens that were written) that is
        nothing; further back the request goes on from the nearest point that can be resumed, and
        gives the blocks behind it back. Raises InvalidInput, RequestError, OutOfBlocks.
        """
        step_checks.idle(request, self, self._open_plan)
        step_checks.rewind_length(request, length)
        reach = request.written_tokens - self.schema.max_rollback_tokens
        if length >= max(reach, request.reused_tokens):
            self._own_unfinished_block(request, length)
            request.length = length
            resume = ResumePlan(start=length, reused_tokens=length, end=length, source="rings")
        elif self.prefix is None:
            resume = ResumePlan(start=0, reused_tokens=0, end=length, source="nothing")
            self._cut_blocks(request, 0)
            self._restart(request, resume)
        else:
            match = self.prefix.match_own(request, length)
            resume = match.resume
            self._cut_blocks(request, resume.reused_tokens // self.schema.block_tokens)
            self._resume(request, match)
        if request.trail is not None:
            request.trail.cut(length)
        request.resume = resume
        return resume

    def pin(self, tokens: Tokens, salt: str | None = None) -> PinnedPrefix:
        """Keeps what is cached of these token ids until `unpin`, whatever the pressure."""
        prefix = self._prefix_cache()
        return prefix.pin(prefix.trail(token_ids(tokens), salt))

    def unpin(self, pinned: PinnedPrefix) -> None:
        """Lets a pinned prefix be evicted again."""
        self._prefix_cache().unpin(pinned)

    def evict(self, blocks: int | None = None) -> int:
        """Lets cached blocks go that no request holds, the least recently used first, so many or
        all that can. Returns how many. Admission does this by itself."""
        most = self.allocator.idle if blocks is None else step_checks.count("blocks", blocks)
        return self._prefix_cache().evict(most, or_fewer=True)

    def extend(self, request: Request, tokens: int) -> list[int]:
        """Blocks so that `tokens` more tokens fit behind the request's length; the new ids."""
        step_checks.live(request, self)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise InvalidInput(f"cannot extend by {tokens!r} tokens: give a count of 0 or more")
        step_checks.context(self.schema, request.length + tokens)
        held = len(request.block_ids)
        missing = self.schema.blocks_for(request.length + tokens) - held
        new_ids = self._take(max(0, missing), asker_blocks=held + missing)
        request.block_ids.extend(new_ids)
        return new_ids

    def allocate_block(self, request: Request) -> int:
        """One more block at the end of the request's table; its id."""
        step_checks.live(request, self)
        held = len(request.block_ids)
        if held == self.schema.max_blocks_per_request:
            raise ContextOverflow(
                asked_tokens=(held + 1) * self.schema.block_tokens,
                max_context_tokens=self.schema.max_context,
            )
        (block_id,) = self._take(1, asker_blocks=held + 1)
        request.block_ids.append(block_id)
        return block_id

    def block_id(self, request: Request, block: int) -> int:
        """The physical block behind the request's block `block`."""
        step_checks.live(request, self)
        if not isinstance(block, int) or not 0 <= block < len(request.block_ids):
            raise InvalidInput(
                f"block {block} is past the table of this request, which holds "
                f"{len(request.block_ids)} blocks: extend it first"
            )
        return request.block_ids[block]

    def reset_slot(self, request: Request) -> None:
        """Starts the request over: length 0, its slot zeroed. Blocks that only it holds stay with
        it."""
        step_checks.idle(request, self, self._open_plan)
        self.slot_arena.bytes[request.slot].zero_()
        shared = [b for b in request.block_ids if self.allocator.is_shared(b)]
        if shared:
            kept = [b for b in request.block_ids if not self.allocator.is_shared(b)]
            self.allocator.release(shared)
            request.block_ids, request.published_blocks = kept, 0
        if request.trail is not None:
            request.trail.cut(0)
        self._restart(request, ResumePlan(start=0, reused_tokens=0, end=0, source="nothing"))

    def release_request(self, request: Request) -> None:
        """Gives slot and blocks back; those that the prefix cache has indexed stay cached until
        their memory is needed. The request cannot be used again."""
        step_checks.idle(request, self, self._open_plan)
        if self.prefix is not None:
            self.prefix.note_release(request)
        self.allocator.release(request.block_ids)
        del self._requests[request.slot]
        self._free_slots.append(request.slot)
        request.detach()
        self._step_reader.forget()
        self.buffers.forget()


def _count_and_ids(tokens: int | Tokens) -> tuple[int, Ids | None]:
    if isinstance(tokens, int):
        return tokens, None
    ids = token_ids(tokens)
    return len(ids), ids
