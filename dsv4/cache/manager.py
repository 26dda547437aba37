"""The one owner of everything, and every public call: requests come, run and go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.backends import load_backend
from dsv4.cache.arena import Arena
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.memory import CacheMemory, LayerMemory
from dsv4.cache.prefix.cache import LearnedIds, PinnedPrefix, PrefixCache, PrefixMatch
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prefix.trail import Ids, Tokens, token_ids
from dsv4.cache.prepare_forward import ForwardPlan, check_step, fill_new_blocks, make_plan
from dsv4.cache.requests import Request, RequestTable
from dsv4.cache.schema import BlockBudget, CacheSchema
from dsv4.cache.stats import MemoryBytes, Stats
from dsv4.cache.step import checks as step_checks
from dsv4.cache.step.checks import Step, StepReader
from dsv4.errors import (
    ContextOverflow,
    InvalidInput,
    OutOfBlocks,
    PlanError,
    is_whole,
    require_count,
)
from dsv4.ops.backend import BackendName


class KVCacheManager:
    """The cache of one model on one device.

    `table` owns requests, slots and blocks, `memory` the device's bytes, `prefix` what outlives a
    request. One allocator serves all layers, so admission is atomic: a request has its slot and all
    its blocks, or nothing. Host calls (everything but what handles launch) belong between captured
    graphs. A call that raises has changed nothing.
    """

    def __init__(
        self,
        schema: CacheSchema,
        *,
        num_blocks: int,
        max_requests: int,
        max_step_tokens: int = 8192,
        device: torch.device | str = "cpu",
        backend: BackendName | None = None,
        prefix: PrefixOptions | None = None,
    ) -> None:
        least_blocks = 1 if schema.block_bytes else 0
        num_blocks = require_count("num_blocks", num_blocks, at_least=least_blocks)
        max_requests = require_count("max_requests", max_requests)
        max_step_tokens = require_count("max_step_tokens", max_step_tokens)
        place = torch.device(device)
        self.schema = schema
        self.backend = load_backend(backend, place)
        for record in (schema.entry_format, schema.window_format, schema.index_format):
            self.backend.check_format(record)
        self.memory = CacheMemory(
            schema,
            self.backend,
            num_blocks=num_blocks,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            device=place,
        )
        self.table = RequestTable(schema, num_blocks=num_blocks, max_requests=max_requests)
        self.prefix: PrefixCache | None = None
        if prefix is not None:
            self.prefix = PrefixCache(schema, self.table.allocator, prefix, place)
            self.table.reclaim = self.prefix.evict
        self.open_plan: ForwardPlan | None = None
        self._step_reader = StepReader(schema, self.table)
        self._handles = tuple(
            LayerCacheHandle(LayerMemory.of(self.memory, layer), self.backend)
            for layer in range(len(schema.layers))
        )

    @classmethod
    def from_budget(
        cls,
        schema: CacheSchema,
        budget: BlockBudget,
        *,
        max_step_tokens: int = 8192,
        device: torch.device | str = "cpu",
        backend: BackendName | None = None,
        prefix: PrefixOptions | None = None,
    ) -> KVCacheManager:
        """A manager with exactly the blocks and slots that `compute_block_budget` found."""
        return cls(
            schema,
            num_blocks=budget.num_blocks,
            max_requests=budget.max_requests,
            max_step_tokens=max_step_tokens,
            device=device,
            backend=backend,
            prefix=prefix,
        )

    # ---- what it was built with --------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def max_requests(self) -> int:
        return self.table.max_requests

    @property
    def max_step_tokens(self) -> int:
        """The most tokens, of all requests together, that one plan holds."""
        return self.memory.buffers.max_tokens

    @property
    def block_arena(self) -> Arena:
        return self.memory.block_arena

    @property
    def slot_arena(self) -> Arena:
        return self.memory.slot_arena

    @property
    def block_table(self) -> Tensor:
        """int32 [max_requests, blocks per request] on the device: block ids, by slot."""
        return self.memory.block_table

    # ---- requests come and go ----------------------------------------------------------------

    def can_admit(self, tokens: int | Tokens, salt: str | None = None) -> bool:
        """Whether `admit_request` would succeed now."""
        allocator = self.table.allocator
        shared: list[int] = []
        try:
            count, ids = _count_and_ids(tokens)
            step_checks.context(self.schema, count)
            if self.prefix is not None and ids is not None:
                match = self.prefix.match(self.prefix.trail(ids, salt))
                shared = [node.block_id for node in match.nodes]
        except (InvalidInput, ContextOverflow):
            return False
        allocator.share(shared)  # so that they are not counted as evictable
        short = self.schema.blocks_for(count) - len(shared) - allocator.free
        fits = short <= 0 or (self.prefix is not None and self.prefix.index.can_evict(short))
        allocator.release(shared)
        return fits and bool(self.table.free_slots)

    def admit_request(self, tokens: int | Tokens = 0, salt: str | None = None) -> Request:
        """A slot, and blocks for a prompt of `tokens`, a count or the token ids: all or nothing.

        With ids and a prefix cache, what is cached of the prompt is reused and `request.resume`
        says what is left to run, at least its last token. Prompts with different `salt` share
        nothing. Raises OutOfSlots, OutOfBlocks (`never` or wait), ContextOverflow, InvalidInput.
        """
        allocator = self.table.allocator
        count, ids = _count_and_ids(tokens)
        count = step_checks.context(self.schema, count)
        blocks = self.schema.blocks_for(count)
        if blocks > allocator.total:
            raise OutOfBlocks(
                needed=blocks, free=allocator.free, total=allocator.total, asker_blocks=blocks
            )
        self.table.require_slots()
        if self.prefix is None or ids is None:
            resume = Resume(start=0, reused_tokens=0, end=count, source="nothing")
            return self.table.open(self.table.take(blocks), resume)
        trail = self.prefix.trail(ids, salt)
        match = self.prefix.match(trail)
        shared = [node.block_id for node in match.nodes]
        allocator.share(shared)
        try:
            own = self.table.take(blocks - len(shared), asker_blocks=blocks)
        except OutOfBlocks:
            allocator.release(shared)
            raise
        request = self.table.open(shared + own, match.resume)
        if shared:
            try:
                self._publish(request, 0, len(shared))
                self._apply_match(request, match)
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
        self._require_unplanned(request)
        request.require_whole()
        self.table.require_slots(require_count("count", count, at_least=0))
        held = self.schema.blocks_for(request.length)
        whole = max(request.length, request.reused_tokens) // self.schema.block_tokens
        shared = request.block_ids[:whole] if self.schema.block_bytes else []
        copies = self.table.take(count * max(0, held - len(shared)), asker_blocks=held + count)
        forks = []
        for nth in range(count):
            self.table.allocator.share(shared)
            forks.append(self.table.fork(request, [*shared, *copies[nth : nth + 1]]))
        try:
            for fork in forks:
                self.memory.copy_slot(request.slot, fork.slot)
                if copies:
                    self.memory.copy_block(request.block_ids[len(shared)], fork.block_ids[-1])
                self._publish(fork, 0)
        except BaseException:  # the device's error
            for fork in forks:
                self.release_request(fork)
            raise
        return forks

    def rewind(self, request: Request, length: int) -> Resume:
        """Takes tokens from `length` on back. Returns what to run again to be there.

        As far as the rings reach (the newest 1 + max_draft_tokens that were written) that is
        nothing; further back the request goes on from the nearest point that can be resumed, and
        gives the blocks behind it back. Raises InvalidInput, RequestError, OutOfBlocks.
        """
        self._require_unplanned(request)
        length = step_checks.rewind_length(request, length)
        reach = request.written_tokens - self.schema.max_rollback_tokens
        if length >= max(reach, request.reused_tokens):
            self._own_unfinished_block(request, length)
            request.length = length
            resume = Resume(start=length, reused_tokens=length, end=length, source="rings")
        elif self.prefix is None:
            resume = Resume(start=0, reused_tokens=0, end=length, source="nothing")
            self.table.cut(request, 0)
            self.table.restart(request, resume)
        else:
            match = self.prefix.match_own(request, length)
            resume = match.resume
            self.table.cut(request, resume.reused_tokens // self.schema.block_tokens)
            self._apply_match(request, match)
        if request.trail is not None:
            request.trail.cut(length)
        request.resume = resume
        request.mend()
        return resume

    def extend(self, request: Request, tokens: int) -> list[int]:
        """Blocks so that `tokens` more tokens fit behind the request's length; the new ids."""
        self.table.require_live(request)
        end = request.length + require_count("tokens", tokens, at_least=0)
        step_checks.context(self.schema, end)
        ((_, held),) = self.table.grow([(request, self.schema.blocks_for(end))])
        return request.block_ids[held:]

    def allocate_block(self, request: Request) -> int:
        """One more block at the end of the request's table; its id."""
        self.table.require_live(request)
        held = len(request.block_ids)
        if held == self.schema.max_blocks_per_request:
            raise ContextOverflow(
                asked_tokens=(held + 1) * self.schema.block_tokens,
                max_context_tokens=self.schema.max_context,
            )
        self.table.grow([(request, held + 1)])
        return request.block_ids[held]

    def block_id(self, request: Request, block: int) -> int:
        """The physical block behind the request's block `block`."""
        self.table.require_live(request)
        if not is_whole(block) or not 0 <= block < len(request.block_ids):
            raise InvalidInput(
                f"block {block} is past the table of this request, which holds "
                f"{len(request.block_ids)} blocks: extend it first"
            )
        return request.block_ids[block]

    def reset_slot(self, request: Request) -> None:
        """Starts the request over: length 0, its slot zeroed. Blocks that only it holds stay with
        it."""
        self._require_unplanned(request)
        self.memory.zero_slot(request.slot)
        self.table.cut_shared(request)
        if request.trail is not None:
            request.trail.cut(0)
        self.table.restart(request, Resume(start=0, reused_tokens=0, end=0, source="nothing"))
        request.mend()

    def release_request(self, request: Request) -> None:
        """Gives slot and blocks back; those that the prefix cache has indexed stay cached until
        their memory is needed. The request cannot be used again."""
        self._require_unplanned(request)
        if self.prefix is not None:
            self.prefix.note_release(request)
        self.table.close(request)
        self._step_reader.forget()
        self.memory.buffers.forget()

    # ---- cached prefixes ---------------------------------------------------------------------

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
        most = (
            self.table.allocator.idle
            if blocks is None
            else require_count("blocks", blocks, at_least=0)
        )
        return self._prefix_cache().evict(most, or_fewer=True)

    # ---- steps -------------------------------------------------------------------------------

    def prepare_forward(
        self,
        steps: Sequence[Step],
        *,
        pad_tokens: int | None = None,
        pad_requests: int | None = None,
    ) -> ForwardPlan:
        """Plans (request, new tokens[, start]) for each request of a step, and takes the blocks.

        `start`, where given, must be the request's length: positions neither skip nor repeat. With
        `pad_tokens` and `pad_requests` kernels run at those sizes, as a captured graph does, and
        the rows past the live ones do nothing. The plan stays open until `commit` or `abandon`.
        Raises PlanError, OutOfBlocks, ContextOverflow or RequestError.
        """
        if self.open_plan is not None:
            raise PlanError("the previous plan is still open: commit or abandon it first")
        buffers = self.memory.buffers
        shape = self._step_reader.read(steps)
        starts, published, reused, written = self.table.numbers.take(shape.slots, axis=1)
        ends = starts + shape.counts
        step_checks.untorn(self.schema, shape, starts, written)
        step_checks.context(self.schema, int(ends.max(initial=0)))
        check_step(self.schema, buffers, shape, pad_tokens=pad_tokens, pad_requests=pad_requests)
        growing = [
            (shape.requests[row], self.schema.blocks_for(int(ends[row])))
            for row in (ends > published * self.schema.block_tokens).nonzero()[0].tolist()
        ]
        held = self.table.grow(growing)
        try:
            buffers.wait()
            new_blocks = fill_new_blocks(self.schema, buffers, growing)
            plan = make_plan(
                self.schema,
                buffers,
                shape,
                starts,
                ends,
                reused,
                pad_tokens=pad_tokens,
                pad_requests=pad_requests,
            )
            self.memory.send(new_blocks)
            if self.prefix is not None:
                plan.captures = self.prefix.plan_captures(plan)
        except BaseException:  # of the device, out of memory, or a key pressed
            for request, blocks in held:
                self.table.cut(request, blocks)
            raise
        for request, blocks in growing:
            request.published_blocks = blocks
        self.open_plan = plan
        return plan

    def acquire(self, layer: int, plan: ForwardPlan | None = None) -> LayerCacheHandle:
        """The handle of one layer, bound to an open plan. Allocates nothing; the same object each
        time. Without a plan it only reads."""
        if not is_whole(layer) or not 0 <= layer < len(self._handles):
            raise InvalidInput(f"layer {layer} of a model with {len(self._handles)} layers")
        if plan is not None:
            step_checks.open_plan(plan, self.open_plan)
        handle = self._handles[layer]
        handle.plan = plan
        return handle

    def commit(
        self,
        plan: ForwardPlan,
        accepted: Sequence[int] | None = None,
        *,
        tokens: Tokens | None = None,
    ) -> None:
        """The step happened: lengths move by `accepted` tokens per request (default: all).

        Rejected tokens vanish because nothing at or past the length is ever read. At most
        `schema.max_rollback_tokens` of a request may be rejected. `tokens` are the ids of the
        step's tokens in the plan's order: with them the prefix cache keeps what requests admitted
        with ids generate; without one they are ignored. Raises PlanError, InvalidInput.
        """
        step_checks.open_plan(plan, self.open_plan)
        kept = step_checks.accepted(self.schema, plan, accepted)
        learned: list[LearnedIds] = []
        if self.prefix is not None and tokens is not None:
            learned = self.prefix.read_ids(plan, kept, token_ids(tokens))
        if accepted is None:
            self.table.move(plan.slots, plan.ends)
        else:  # what was rejected is written all the same
            self.table.note_written(plan.slots, plan.ends)
            self.table.move(plan.slots, plan.starts + kept)
        if self.prefix is not None:
            self.prefix.note_commit(plan, kept, learned, self.slot_arena.bytes)
        self._close(plan)

    def abandon(self, plan: ForwardPlan) -> None:
        """The step did not happen and no layer appended it; lengths stay."""
        step_checks.open_plan(plan, self.open_plan)
        if not plan.narrow and (plan.touched or plan.appended_layers):
            raise PlanError(
                f"layers {sorted(plan.appended_layers)[:4]} already wrote {plan.shape.most_tokens} "
                f"tokens of a request, more than the {self.schema.max_rollback_tokens} that can be "
                f"undone: call fail(plan); nothing of it is cached"
            )
        if self.prefix is not None:
            self.prefix.note_abandon(plan)
        if plan.narrow:  # a replayed graph writes without telling the plan
            self.table.note_written(plan.slots, plan.ends)
        self._close(plan)

    def fail(self, plan: ForwardPlan) -> None:
        """The step failed, wherever it was: the one call after any error in it.

        Nothing of it is cached and lengths stay. Requests whose rings have lost more than they can
        get back (those with a chunk, if any layer has begun to write) can only be rewound, reset or
        released: `request.is_torn` tells. All others just go on. Raises PlanError.
        """
        step_checks.open_plan(plan, self.open_plan)
        if self.prefix is not None:
            self.prefix.note_abandon(plan)
        if plan.narrow or plan.touched:
            self.table.note_written(plan.slots, plan.ends)
        self._close(plan)

    def _close(self, plan: ForwardPlan) -> None:
        plan.done = True
        self.open_plan = None

    # ---- looking -----------------------------------------------------------------------------

    def memory_bytes(self) -> MemoryBytes:
        """Bytes allocated on the device; arenas and table are what the planner promised."""
        return self.memory.memory_bytes(
            snapshots=0 if self.prefix is None else self.prefix.pool.memory_bytes()
        )

    def stats(self) -> Stats:
        """Who holds what, now."""
        allocator, live = self.table.allocator, self.table.live
        return Stats(
            blocks_total=allocator.total,
            blocks_free=allocator.free,
            blocks_live=allocator.held,
            blocks_cached=allocator.idle,
            slots_total=self.max_requests,
            slots_free=len(self.table.free_slots),
            requests_live=len(live),
            tokens_live=sum(request.length for request in live.values()),
            block_bytes_live=allocator.held * self.schema.block_bytes,
            slot_bytes_live=len(live) * self.schema.slot_bytes,
            prefix=None if self.prefix is None else self.prefix.stats(),
        )

    def check_invariants(self) -> None:
        """Every block, slot and snapshot has exactly the owners it should. Raises Dsv4Error
        otherwise."""
        self.table.check_invariants()
        if self.prefix is not None:
            self.prefix.check_invariants(self.open_plan)

    # ---- table and memory together -----------------------------------------------------------

    def _require_unplanned(self, request: Request) -> None:
        self.table.require_live(request)
        step_checks.unplanned(request, self.open_plan)

    def _prefix_cache(self) -> PrefixCache:
        if self.prefix is None:
            raise InvalidInput(
                "this manager has no prefix cache: build it with prefix=PrefixOptions()"
            )
        return self.prefix

    def _apply_match(self, request: Request, match: PrefixMatch) -> None:
        """Puts a request where a match says it goes on, with the state that it needs there."""
        assert self.prefix is not None
        self.table.restart(request, match.resume)
        self.prefix.put_state(match, self.slot_arena.bytes[request.slot])

    def _own_unfinished_block(self, request: Request, length: int) -> None:
        """Makes sure that what the request writes from `length` on is in blocks of its own."""
        allocator = self.table.allocator
        block, inside = divmod(length, self.schema.block_tokens)
        if not self.schema.block_bytes:
            return
        if inside and allocator.is_shared(old := request.block_ids[block]):
            (copy,) = self.table.take(1, asker_blocks=block + 1)
            try:
                self.memory.copy_block(old, copy)
                self.memory.publish(request.slot, block, [copy])
            except BaseException:  # the device's error
                allocator.release([copy])
                raise
            allocator.release([old])
            request.block_ids[block] = copy
            request.published_blocks = max(request.published_blocks, block + 1)
        behind = block + bool(inside)
        if any(map(allocator.is_shared, request.block_ids[behind:])):
            self.table.cut(request, behind)

    def _publish(self, request: Request, first: int, last: int | None = None) -> None:
        """Tells the device's table some blocks of a request before its next step would."""
        ids = request.block_ids[first:last]
        if ids:
            self.memory.publish(request.slot, first, ids)
            request.published_blocks = max(request.published_blocks, first + len(ids))


def _count_and_ids(tokens: int | Tokens) -> tuple[int, Ids | None]:
    if isinstance(tokens, int | np.integer):
        return tokens if isinstance(tokens, int) else int(tokens), None
    ids = token_ids(tokens)
    return len(ids), ids
