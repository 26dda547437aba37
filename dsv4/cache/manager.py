"""The owner of everything, with every public call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NoReturn, Unpack

import numpy as np
import torch
from torch import Tensor

from dsv4.backends import load_backend
from dsv4.cache.absent import NoHandoff, NoTiers
from dsv4.cache.admission import Admission
from dsv4.cache.arena import Arena
from dsv4.cache.batch import Batch
from dsv4.cache.changes import LOGGER, Guard, Turn, Uncopied, changes
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.memory import CacheMemory, LayerMemory
from dsv4.cache.options import ManagerOptions, complete, host_bytes, place
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.index import BlockEvent
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.cache.prefix.prompt import Prompt
from dsv4.cache.prefix.resume import PrefixMatch, Resume
from dsv4.cache.prefix.snapshots import SnapshotPool
from dsv4.cache.prefix.trail import TokenIds, TokenTrail, token_ids
from dsv4.cache.prepare_forward import (
    ForwardPlan,
    PlanOptions,
)
from dsv4.cache.recover import recover_books
from dsv4.cache.requests import Condition, Request, RequestTable
from dsv4.cache.residency.places import EntryPlaces, ResidentAllocator
from dsv4.cache.residency.pool import HostPool
from dsv4.cache.residency.sizes import entry_sizes, needed_entry_rows, require_fits
from dsv4.cache.schema import BlockBudget, CacheSchema, compute_block_budget
from dsv4.cache.stats import MemoryBytes, Stats
from dsv4.cache.step import checks as step_checks
from dsv4.cache.step.checks import Step
from dsv4.cache.steps import Steps
from dsv4.cache.warmup import Warmup, available_processors, progress_bar
from dsv4.errors import (
    ContextOverflow,
    InvalidInput,
    OutOfBlocks,
    RecoveryNeeded,
    RequestError,
    ThreadError,
    is_whole,
    require_count,
    require_flag,
    require_type,
)

if TYPE_CHECKING:
    from dsv4.cache.handoff.handoff import Handoff
    from dsv4.cache.handoff.options import HandoffOptions
    from dsv4.cache.residency.residency import Residency
    from dsv4.cache.transfers.tiers import Tiers
    from dsv4.tiers.tier import Tier


class KVCacheManager(Uncopied):
    """The cache of one model on one device.

    `table` owns requests, slots and blocks, `memory` the device's bytes, `prefix` what outlives a
    request. One allocator serves all layers, so admission is atomic: a request has its slot and all
    its blocks, or nothing. Host calls (everything but what handles launch) belong between captured
    graphs. A call that raises has changed nothing. With tiers (docs/tiers.md), the fastest first,
    what is cached is kept below the device too: `manager.tiers` has the calls for that, and is
    false without any. With a hand-off (docs/distributed.md) requests go from manager to manager:
    `manager.handoff`.

    With `batch_invariant` no bit of what a token reads (scores, selection, attention) depends on
    what else is in its step or on how its request was divided into steps. Without it, the last bits
    of attention may, where a GPU has a special kernel. It costs time when there are few requests,
    and workspace (docs/exactness.md).

    Threads: calls that change the manager come one at a time, from any thread; one that comes while
    another runs raises ThreadError. `stats`, `memory_bytes` and metrics may be called at any time.
    A handle is used by the thread that acquired it; calls of one plan's handles, and its commit,
    abandon or fail, come one at a time too.
    """

    _instead = "build another one with the same schema"
    _internal: ClassVar[frozenset[str]] = frozenset(
        ("backend", "guard", "memory", "prefix", "table")
    )

    @torch.inference_mode(False)  # its memory is written both inside and outside of inference mode
    def __init__(
        self,
        schema: CacheSchema,
        *,
        num_blocks: int,
        max_requests: int,
        **options: Unpack[ManagerOptions],
    ) -> None:
        require_type("schema", schema, CacheSchema)
        settings = complete(options)
        prefix, max_step_tokens = settings["prefix"], settings["max_step_tokens"]
        least_blocks = 1 if schema.block_bytes else 0
        num_blocks = require_count("num_blocks", num_blocks, at_least=least_blocks)
        max_requests = require_count("max_requests", max_requests)
        device = place(settings)
        self.schema = schema
        if prefix is not None and prefix.replay == "cut":
            require_count("max_step_tokens", max_step_tokens, at_least=schema.model.window)
        self.backend = load_backend(
            settings["backend"], device, batch_invariant=settings["batch_invariant"]
        )
        for record in (schema.entry_format, schema.window_format, schema.index_format):
            self.backend.check_format(record)
        for layer in schema.layers:
            self.backend.check_ratio(layer.spec.layer, layer.spec.ratio)
        require_fits(schema, settings, num_blocks=num_blocks)
        sizes = entry_sizes(schema, settings, num_blocks=num_blocks, max_requests=max_requests)
        pool = places = None
        if sizes is not None:
            self.backend.check_apart()
            pool = HostPool(num_blocks, schema.entries_bytes, device)
            places = EntryPlaces(num_blocks, sizes.rows)
        self.table = RequestTable(
            schema,
            num_blocks=num_blocks,
            max_requests=max_requests,
            allocator=None if places is None else ResidentAllocator(num_blocks, places),
        )
        self.memory = CacheMemory(
            schema,
            self.backend,
            num_blocks=num_blocks,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            device=device,
            max_open_plans=settings["max_open_plans"],
            entry_sizes=sizes,
            pool=pool,
        )
        self.prefix: PrefixCache | NoPrefix = (
            NoPrefix(schema)
            if prefix is None
            else PrefixCache(schema, self.table.allocator, prefix, device)
        )
        self.table.supply.reclaimer = self.prefix.blocks
        self.guard = Guard()
        self._residency: Residency | None = None
        make_admission: Callable[..., Admission] = Admission
        make_steps: Callable[..., Steps] = Steps
        make_handle: Callable[..., LayerCacheHandle] = LayerCacheHandle
        if places is not None:
            from dsv4.cache.residency import parts  # needs the extra dsv4[tiers]

            assert pool is not None
            self._residency = parts.Residency(
                self.table,
                self.memory,
                places,
                pool,
                open_plans=lambda: self.open_plans,
                before_reuse=self.prefix.notices.before_reuse if self.prefix else None,
            )
            make_admission = partial(parts.ResidentAdmission, residency=self._residency)
            make_steps = partial(parts.ResidentSteps, residency=self._residency)
            make_handle = parts.ResidentHandle
        self.tiers = self._make_tiers(settings["tiers"])
        self.handoff = self._make_handoff(settings["handoff"])
        self._admission = make_admission(self.table, self.memory, self.prefix, self.guard)
        self._steps = make_steps(
            self.table,
            self.memory,
            self.backend,
            self.prefix,
            self.guard,
            self._admission,
            cut_replays=prefix is not None and prefix.replay == "cut",
            after_commit=(self.tiers.pump,) if self.tiers else (),
        )
        layers = [LayerMemory.of(self.memory, layer) for layer in range(len(schema.layers))]
        self._handles = tuple(  # of each lane, and again for chunks_apart
            tuple(
                tuple(make_handle(layer, self.backend, lane.workspace) for layer in layers)
                for _ in range(2)
            )
            for lane in self.memory.lanes
        )

    def __repr__(self) -> str:
        blocks = self.table.allocator
        return (
            f"KVCacheManager({self.schema.model.name} on {self.device}, {self.backend.name}: "
            f"{len(self.table.live)} of {self.max_requests} requests; {blocks.total} blocks, "
            f"{blocks.held} live, {blocks.idle} cached, {blocks.free} free)"
        )

    @classmethod
    def from_budget(
        cls,
        schema: CacheSchema,
        budget: BlockBudget,
        **options: Unpack[ManagerOptions],
    ) -> KVCacheManager:
        """A manager that allocates exactly `budget.total_bytes`: a budget that does not include
        what else these options need is refused. `from_memory` computes one that does; with other
        accounting, build a manager from `budget.num_blocks`. Raises InvalidInput."""
        require_type("budget", budget, BlockBudget)
        other_bytes = cls.other_bytes(schema, max_requests=budget.max_requests, **options)
        if budget.entry_rows:
            options.setdefault("entry_rows", budget.entry_rows)
        if other_bytes != budget.other_bytes:
            raise InvalidInput(
                f"the budget leaves {budget.other_bytes:,} bytes for what is not cache, with "
                f"these options it is {other_bytes:,}: compute it for the same ones, with "
                f"other_bytes=KVCacheManager.other_bytes(schema, …), or use from_memory"
            )
        return cls(
            schema,
            num_blocks=budget.num_blocks,
            max_requests=budget.max_requests,
            **options,
        )

    @classmethod
    def from_memory(
        cls,
        schema: CacheSchema,
        *,
        memory_bytes: int,
        max_requests: int,
        context: int | None = None,
        **options: Unpack[ManagerOptions],
    ) -> KVCacheManager:
        """A manager that allocates no more than `memory_bytes` on its device in total: slots, the
        block table, step buffers, workspace and snapshots, and blocks with what is left. With
        `host_memory` entries take no more than that of the host, and of the device what blocks
        leave.

        Raises PoolTooSmall, with the minimum, if one request of `context` tokens would not fit.
        """
        other_bytes = cls.other_bytes(schema, max_requests=max_requests, **options)
        settings = complete(options)
        budget = compute_block_budget(
            schema,
            memory_bytes=memory_bytes,
            max_requests=max_requests,
            context=context,
            other_bytes=other_bytes,
            host_bytes=host_bytes(settings),
            needed_entry_rows=needed_entry_rows(schema, settings, max_requests=max_requests),
        )
        return cls.from_budget(schema, budget, **options)

    @classmethod
    def other_bytes(
        cls, schema: CacheSchema, *, max_requests: int, **options: Unpack[ManagerOptions]
    ) -> int:
        """Bytes that a manager with these options allocates in addition to blocks, slots and block
        table: step buffers, workspace, snapshots. Allocates nothing on the device. Raises
        InvalidInput."""
        require_type("schema", schema, CacheSchema)
        settings = complete(options)
        device, nowhere = place(settings), torch.device("meta")
        memory = CacheMemory(
            schema,
            load_backend(settings["backend"], device, batch_invariant=settings["batch_invariant"]),
            num_blocks=0,
            max_requests=require_count("max_requests", max_requests),
            max_step_tokens=settings["max_step_tokens"],
            device=nowhere,
            max_open_plans=settings["max_open_plans"],
            entry_sizes=entry_sizes(schema, settings, num_blocks=0, max_requests=max_requests),
        ).memory_bytes()
        snapshots = 0
        if settings["prefix"] is not None:
            snapshots = SnapshotPool.bytes_on_device(schema, settings["prefix"], device)
        return memory.step_buffers + memory.workspace + snapshots + memory.entries

    def _make_tiers(self, tiers: Sequence[Tier]) -> Tiers | NoTiers:
        if not tiers:
            return NoTiers()
        from dsv4.cache.transfers.tiers import Tiers  # needs the extra dsv4[tiers]

        return Tiers(self, tiers)

    def _make_handoff(self, options: HandoffOptions | None) -> Handoff | NoHandoff:
        if options is None:
            return NoHandoff()
        from dsv4.cache.handoff.handoff import Handoff  # needs the extra dsv4[nixl]

        return Handoff(self, options)

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

    @property
    def open_plans(self) -> list[ForwardPlan]:
        """The plans that are open, the oldest first."""
        return self._steps.open

    @property
    def open_plan(self) -> ForwardPlan | None:
        """The plan that is open, the oldest of several."""
        return self.open_plans[0] if self.open_plans else None

    # ---- requests ------------------------------------------------------------------------------

    def prompt(
        self, ids: TokenIds, salt: str | None = None, *, hints: Hints | None = None
    ) -> Prompt:
        """Reads and hashes a prompt once, for questions about it while it waits, and for its
        admission. `hints` are those of each request that is admitted with it, through tiers too.
        Takes no memory of the cache. Raises InvalidInput, ContextOverflow."""
        if hints is not None:
            require_type("hints", hints, Hints)
        read = token_ids(ids)
        step_checks.context(self.schema, len(read))
        return self.prefix.prompt(read, salt, hints)

    def look_up(self, prompt: Prompt) -> Resume:
        """What `admit_request` would find cached of a prompt now, and where it would continue.
        Changes nothing: neither counts nor the order of eviction. Raises InvalidInput."""
        self._require_free("look_up")
        count, trail = self._read_prompt(prompt, None)
        if trail is None:
            return Resume(start=0, reused_tokens=0, end=count, source="nothing")
        return self._prefix_cache().look_up(trail)

    def needed_blocks(self, prompt: int | TokenIds | Prompt, salt: str | None = None) -> int:
        """Blocks that `admit_request` would take beyond what is cached. Changes nothing. Raises
        InvalidInput, ContextOverflow."""
        self._require_free("needed_blocks")
        count, trail = self._read_prompt(prompt, salt)
        cached = 0 if trail is None else self._prefix_cache().cached_blocks(trail)
        return self.schema.blocks_for(count) - cached

    def released_blocks(self, request: Request) -> int:
        """Blocks that could be taken, free or evictable, if this request were released."""
        self._require_free("released_blocks")
        self.table.require_live(request)
        pinned = self.prefix.pins.block_ids()
        references = self.table.allocator.references
        return sum(references(b) == 1 and b not in pinned for b in request.block_ids)

    def can_admit(self, prompt: int | TokenIds | Prompt, salt: str | None = None) -> bool:
        """Whether `admit_request` would succeed now. Changes nothing."""
        self._require_free("can_admit")
        shared: list[int] = []
        try:
            count, trail = self._read_prompt(prompt, salt)
        except (InvalidInput, ContextOverflow):
            return False
        if trail is not None:
            shared = [node.block_id for node in self._prefix_cache().match(trail).nodes]
        short = self.schema.blocks_for(count) - len(shared) - self.table.allocator.free
        fits = short <= 0 or self.prefix.blocks.evictable(excluding=shared) >= short
        return fits and bool(self.table.free_slots)

    @changes
    def admit_request(
        self,
        prompt: int | TokenIds | Prompt = 0,
        salt: str | None = None,
        *,
        reuse: bool = True,
        hints: Hints | None = None,
    ) -> Request:
        """A slot, and blocks for a prompt, all or nothing. A prompt is its token ids, a `Prompt`
        made of them, or a count.

        With ids and a prefix cache, what is cached of the prompt is reused and `request.resume`
        says what is left to run, at least its last token. Prompts with different `salt` share
        nothing. Without `reuse` everything is computed, and still cached. `hints` say what is worth
        keeping (docs/retention.md); without ids or a prefix cache nothing is.
        Raises OutOfSlots, OutOfBlocks (`never` or wait), ContextOverflow, InvalidInput.
        """
        require_flag("reuse", reuse)
        if hints is not None:
            require_type("hints", hints, Hints)
        count, found = self._read_prompt(prompt, salt)
        blocks = self.schema.blocks_for(count)
        if blocks > self.table.allocator.total:
            self._refuse_size(blocks)
        self.table.require_slots()
        if found is None:
            return self._admission.begin(count)
        trail = found.copy() if isinstance(prompt, Prompt) else found
        trail.hints = hints or trail.hints
        prefix = self._prefix_cache()
        return self._admission.after(prefix, prefix.match(trail, reuse=reuse), trail)

    @changes
    def fork(self, request: Request, count: int) -> list[Request]:
        """`count` new requests that continue from where this one is: beams, parallel samples.

        They share its whole blocks, which are never written again, and get copies of its slot and
        of its unfinished block: all or nothing. Raises OutOfSlots, OutOfBlocks, RequestError.
        """
        self._require_unplanned(request)
        request.require("fork")
        count = require_count("count", count, at_least=0)
        self.table.require_slots(count)
        return self._admission.fork(request, count)

    @changes
    def rewind(self, request: Request, length: int) -> Resume:
        """Takes back all tokens from `length` on. Returns what to run again to get there.

        As far as the rings reach (the newest 1 + max_draft_tokens that were written) that is
        nothing; further back the request continues from the nearest point that can be resumed, and
        releases the blocks after it. Raises InvalidInput, RequestError, OutOfBlocks.
        """
        self._require_unplanned(request)
        return self._admission.rewind(request, step_checks.rewind_length(request, length))

    @changes
    def supply_ids(self, request: Request, ids: TokenIds) -> None:
        """Supplies the ids of tokens that were committed without them, from the first unknown one
        on.

        Blocks that become known are cached now. A snapshot is taken if the rings still have the
        state, that is up to 1 + max_draft_tokens tokens later. Raises InvalidInput, RequestError.
        """
        self._require_unplanned(request)
        read = token_ids(ids)
        if request.trail is None:
            return
        known = len(request.trail.ids)
        if known + len(read) > request.length:
            raise InvalidInput(
                f"{len(read)} ids after the {known} that are known of request {request.serial}, "
                f"but it has {request.length} tokens: supply those that were committed"
            )
        slot = self.slot_arena.bytes[request.slot]
        self._prefix_cache().caching.supply_ids(request, read, slot, self._admission.exchange)
        self.tiers.pump()

    @changes
    def continue_request(self, request: Request, prompt: TokenIds | Prompt) -> Resume:
        """The request continues to the end of a prompt that begins with its tokens: the next turn
        of a conversation. Nothing that it has computed runs again; a new admission would continue
        after the last whole block that has a snapshot.

        Afterwards it is as if it had been admitted for the prompt: it has blocks for all of it, and
        caches it. All its tokens must be known (`supply_ids`). Returns what is left to run, which
        is also `request.resume`. Raises InvalidInput, RequestError, OutOfBlocks, ContextOverflow.
        """
        prefix = self._prefix_cache()
        self._require_unplanned(request)
        if request.condition is not Condition.INCOMPLETE:  # not all of whose tokens are known
            request.require("continue")
        count, trail = self._read_prompt(prompt, None)
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
        resume = self._admission.go_on(request, trail, count)
        prefix.use(PrefixMatch([], resume, None), trail)
        return resume

    @changes
    def extend(self, request: Request, tokens: int) -> list[int]:
        """Reserves blocks so that `tokens` more tokens fit after the request's length; returns the
        new ids."""
        self.table.require_live(request)
        end = request.length + require_count("tokens", tokens, at_least=0)
        step_checks.context(self.schema, end)
        held = len(request.block_ids)
        self.table.grow([(request, self.schema.blocks_for(end))])
        return request.block_ids[held:]

    @changes
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
        """The id of the physical block that is the request's block number `block`."""
        self.table.require_live(request)
        if not is_whole(block) or not 0 <= block < len(request.block_ids):
            raise InvalidInput(
                f"block {block} is past the table of this request, which holds "
                f"{len(request.block_ids)} blocks: extend it first"
            )
        return request.block_ids[block]

    @changes
    def reset_slot(self, request: Request) -> None:
        """Starts the request over: length 0, its slot zeroed. It keeps the blocks that only it
        holds."""
        self._require_unplanned(request)
        self._admission.reset(request)

    @changes
    def release_request(self, request: Request) -> None:
        """Releases slot and blocks; those that the prefix cache has indexed stay cached until their
        memory is needed. The request cannot be used again."""
        self._require_unplanned(request)
        self._release(request)

    def _release(self, request: Request) -> None:
        self.prefix.caching.note_release(request)
        self.table.close(request)
        self._steps.forget()

    def release_later(self, request: Request, *, suspend: bool = False) -> None:
        """Releases a request with the next call of the manager, once no open plan has it; with
        `suspend`, suspends it if possible. From then on it counts as released. Safe at any time and
        from any thread, because it only notes what to do: for finalizers, which run wherever a
        garbage collection starts, even in the middle of a call. Raises InvalidInput for something
        that is not a request, RequestError for another manager's request."""
        require_type("request", request, Request)
        if self.table.live.get(request.slot) is not request and not request.released:
            raise RequestError("this is not a request that this manager admitted")
        self.guard.defer(request, suspend=suspend)
        request.is_leaving = True

    @changes
    def _release_now(self) -> None:
        """Every call that changes something releases what is deferred; this does nothing else."""

    def _require_free(self, call: str) -> None:
        """For calls that change nothing but read what others change. Deferred releases have been
        done."""
        self.guard.require_free(call)
        if self.guard.deferred:
            self._release_now()

    def _release_deferred(self) -> None:
        """Releases what `release_later` has noted; each call that changes something begins with
        it."""
        deferred = self.guard.deferred
        for _ in range(len(deferred)):
            request, suspend = deferred[0]
            if not isinstance(request, Request):
                self._let_go(request)
            elif any(request in plan.requests for plan in self.open_plans):
                deferred.append((request, suspend))
            elif not request.released and self.table.live.get(request.slot) is request:
                if suspend:
                    self.tiers.before_release(request)
                self._release(request)
            deferred.popleft()

    def _let_go(self, item: object) -> None:
        """Ends a fetch that nothing refers to any more, or releases a hand-off."""
        if not self.tiers.let_go(item):
            self.handoff.let_go(item)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All live requests, except those that the next call will release."""
        live, going = tuple(self.table.live.values()), self._going()
        return tuple(request for request in live if request not in going) if going else live

    def _going(self) -> list[Request]:
        """What `release_later` has noted and no open plan has: the next call begins with releasing
        it."""
        going = [request for request in tuple(self.table.live.values()) if request.is_leaving]
        planned = {request for plan in tuple(self.open_plans) for request in plan.requests}
        return [request for request in going if request not in planned]

    def recover(self) -> None:
        """Restores a consistent state after a call was interrupted (RecoveryNeeded says so).

        Free lists, counts and the device's table are rebuilt from the requests and the prefix
        index. Every request that was live still is, at its length before or after the call; one
        whose slot was being overwritten `is_torn`. Requests and pins that the interrupted call was
        about to return are gone; so is a plan that was never returned, or whose lengths have moved.
        Unfinished fetches and arrivals are cancelled; offers stand. Does nothing else, and is
        harmless if it was not needed. Raises ThreadError while a call runs, one of a handle too.
        """
        guard = self.guard
        number, interrupted = guard.take_over()
        turns = [lane.workspace.turn for lane in self.memory.lanes]
        entered: list[Turn] = []
        try:
            for turn in turns:
                turn.enter("recover")
                entered.append(turn)
        except ThreadError:
            for turn in entered:
                turn.leave()
            guard.step_back(number)
            raise
        self._steps.open = recover_books(
            [change for *_, change in interrupted],
            open_plans=self.open_plans,
            table=self.table,
            memory=self.memory,
            prefix=self.prefix,
            tiers=self.tiers,
            handoff=self.handoff,
        )
        if self._residency is not None:
            self._residency.recover(self.prefix.index.nodes(), self.open_plans)
        self._steps.forget()
        for turn in turns:
            turn.leave()
        guard.give_way(number)
        if interrupted:
            torn = sum(request.is_torn for request in self.requests)
            LOGGER.warning(
                "recovered from an interrupted %s: %d requests live, %d of them torn",
                *(interrupted[0][1], len(self.requests), torn),
            )

    # ---- cached prefixes ---------------------------------------------------------------------

    @changes
    def pin(self, ids: TokenIds, salt: str | None = None) -> PinnedPrefix:
        """Keeps what is cached of these token ids until `unpin`, even under memory pressure."""
        prefix = self._prefix_cache()
        pinned = prefix.pins.pin(prefix.trail(token_ids(ids), salt), self.guard.change.hand_out)
        return pinned

    @changes
    def unpin(self, pinned: PinnedPrefix) -> None:
        """Lets a pinned prefix be evicted again."""
        self._prefix_cache().pins.unpin(pinned)

    @changes
    def evict(self, blocks: int | None = None) -> int:
        """Evicts cached blocks that no request holds, the least recently used first: `blocks` of
        them, or all that can be. Returns how many. Admission does this by itself."""
        most = (
            self.table.allocator.idle
            if blocks is None
            else require_count("blocks", blocks, at_least=0)
        )
        return self._prefix_cache().blocks.evict(most)

    # ---- steps -------------------------------------------------------------------------------

    @changes
    def prepare_forward(
        self,
        steps: Sequence[Step],
        *,
        pad_tokens: int | None = None,
        pad_requests: int | None = None,
        after: ForwardPlan | None = None,
        accepted: Tensor | None = None,
        drafts: int = 0,
        chunks_apart: bool = False,
    ) -> ForwardPlan:
        """Plans (request, new tokens[, start]) for each request of a step, and takes the blocks.

        `start`, where given, must be the request's length: positions neither skip nor repeat. With
        `pad_tokens` and `pad_requests` kernels run at those sizes, as a captured graph does, and
        the rows past the live ones do nothing. The plan stays open until `commit`, `abandon` or
        `fail`; `max_open_plans` of them, without a common request, may be open at once.

        A step `after` an open plan continues from where that one will leave its requests; up to
        `schema.steps_ahead` plans may be open before it. `accepted`, int32 or int64 [requests of
        the earlier plan] on the device, says how many of its tokens are kept; it is read there when
        its turn comes. Without it, all are kept. A chunk is always kept whole. Blocks are taken for
        the most tokens that can be kept. Plans that come after each other are prepared and run on
        one stream.

        With `drafts` the plan has that many batches in `plan.drafts`. With `chunks_apart` requests
        that have more than `schema.max_decode_tokens` come last; `plan.decode` is what is padded
        and can be captured, `plan.prefill` the chunks.
        Raises PlanError, OutOfBlocks, ContextOverflow or RequestError.
        """
        return self._steps.prepare(
            steps,
            pad_tokens=pad_tokens,
            pad_requests=pad_requests,
            after=after,
            accepted=accepted,
            drafts=drafts,
            chunks_apart=chunks_apart,
        )

    @contextmanager
    def step(
        self, steps: Sequence[Step], *, ids: TokenIds | None = None, **options: Unpack[PlanOptions]
    ) -> Iterator[ForwardPlan]:
        """A step from beginning to end: `with manager.step([(request, n)], ids=ids) as plan`.

        The plan is that of `prepare_forward`, which takes the same options. The end of the block
        commits it, with the `ids` of its tokens. To keep fewer tokens (of drafts), call `commit` in
        the block. After any exception in the block, or in that commit, the plan has failed
        (`fail`), after a `recover` if it came in the middle of a call, and the exception is raised.
        For steps that overlap use `prepare_forward`. Raises what the three raise.
        """
        plan = self.prepare_forward(steps, **options)
        try:
            yield plan
            if not plan.done:
                self.commit(plan, ids=ids)
        except BaseException:
            with suppress(ThreadError, RecoveryNeeded):  # another thread is inside: it stays open
                if self.guard.is_shut:
                    self.recover()
                if not plan.done:
                    self.fail(plan)
            raise

    def warmup(
        self,
        *,
        heads: int | None = None,
        kv_norm: bool = True,
        inverse_rope: bool = True,
        round_bf16: bool = True,
        workers: int | None = None,
        progress: bool | None = None,
    ) -> int:
        """Compiles every kernel that `append`, `select`, `attend` and `attend_draft` can launch,
        for all steps up to this manager's limits, and loads it. No step waits for a compiler then.

        `heads` are the query heads of this rank (default: all of the model's). `kv_norm`,
        `inverse_rope` and `round_bf16` say what the engine's calls have: raw KV with norm weights,
        a table to rotate back with, rounded scores. Tensors are assumed to be aligned and their
        rows contiguous. Up to `workers` processes compile at a time (default: one for each
        processor) into Triton's cache on disk, from which later processes only load. `progress`
        shows a bar on stderr (default: where it is a terminal). Launches nothing and touches no
        request. Returns how many kernels are ready: 0 for the reference, which has none. Raises
        InvalidInput.
        """
        self.guard.require_free("warmup")
        count = self.schema.model.heads if heads is None else require_count("heads", heads)
        most = available_processors() if workers is None else require_count("workers", workers)
        calls = Warmup(
            self.memory,
            self.backend,
            heads=count,
            kv_norm=kv_norm,
            inverse_rope=inverse_rope,
            round_bf16=round_bf16,
            window_cut=bool(self.prefix) and self._prefix_cache().options.replay == "cut",
            make_handle=type(self._handles[0][0][0]),
        )
        with progress_bar(progress) as report:
            return self.backend.warm_up(calls, workers=most, progress=report)

    def acquire(self, layer: int, batch: Batch | None = None) -> LayerCacheHandle:
        """The handle of one layer, bound to a batch of an open plan. Allocates nothing; the same
        object each time. Without a batch it only reads."""
        # engines call this for every layer of every step: it makes as few calls as possible
        handles = self._handles[0][0]
        if (type(layer) is not int and not is_whole(layer)) or not 0 <= layer < len(handles):
            raise InvalidInput(f"layer {layer} of a model with {len(handles)} layers")
        if self.guard.number in self.guard.visits:
            self.guard.refuse("acquire")
        if batch is not None:
            step_checks.bound(layer, batch, self._steps.open)
            handles = self._handles[batch.lane][not (batch.alone or batch.is_decode)]
        handle = handles[layer]
        handle.bind(batch)
        return handle

    @changes
    def commit(
        self,
        plan: ForwardPlan,
        accepted: Sequence[int] | None = None,
        *,
        ids: TokenIds | None = None,
        partial: bool = False,
    ) -> None:
        """The step happened: lengths move by `accepted` tokens per request (default: all).

        Rejected tokens vanish because nothing at or past the length is ever read. At most
        `schema.max_decode_tokens` of a request may be rejected. Of plans after each other the first
        is committed first, with the counts that the device had. `ids` are those of the step's
        tokens in the plan's order: with them the prefix cache keeps what requests admitted with ids
        generate; without a prefix cache they are ignored.

        Every layer, except draft layers, must have appended what is kept; the replay of a captured
        graph is noted by `plan.mark_appended`. With `partial` some layers need not have stored the
        step: its requests are then incomplete from `request.incomplete_from` on, and nothing from
        there on is cached, offered or continued until a rewind takes it back. A step in which an
        append raised cannot be committed at all: `fail` it. Raises PlanError, InvalidInput.
        """
        self._steps.commit(plan, accepted, ids, partial=partial)

    @changes
    def abandon(self, plan: ForwardPlan) -> None:
        """The step did not happen; lengths stay. For a plan that never ran, or whose few tokens can
        be undone; after an error call `fail`. Raises PlanError."""
        self._steps.abandon(plan)

    @changes
    def fail(self, plan: ForwardPlan) -> None:
        """The step failed, at whatever point: the one call after any error in it.

        Nothing of it is cached and lengths stay. Requests whose rings have lost more than they can
        get back (those with a chunk, if any layer has begun to write) can only be rewound, reset or
        released: they are `request.is_torn`. All others simply continue. Plans after this one fail
        with it. Raises PlanError.
        """
        self._steps.fail(plan)

    # ---- looking -----------------------------------------------------------------------------

    def memory_bytes(self) -> MemoryBytes:
        """Bytes allocated on the device; arenas and table are what the planner promised."""
        return self.memory.memory_bytes(snapshots=self.prefix.memory_bytes())

    def stats(self) -> Stats:
        """What holds how much, now; what `release_later` has noted counts as released. Safe from
        any thread; while a call runs elsewhere, it may show a mix of before and after."""
        allocator, live, going = self.table.allocator, self.requests, self._going()
        free, idle = allocator.left_by([request.block_ids for request in going])
        pinned = self.prefix.pins.block_ids()
        evictable = self.prefix.blocks.evictable()
        return Stats(
            blocks_total=allocator.total,
            blocks_free=allocator.free + len(free),
            blocks_live=allocator.held - len(free) - len(idle),
            blocks_cached=allocator.idle + len(idle),
            blocks_in_flight=allocator.in_flight,
            blocks_evictable=evictable + sum(block_id not in pinned for block_id in idle),
            blocks_pinned=len(pinned),
            slots_total=self.max_requests,
            slots_free=len(self.table.free_slots) + len(going),
            requests_live=len(live),
            tokens_live=sum(request.length for request in live),
            block_bytes_live=(allocator.held - len(free) - len(idle)) * self.schema.block_bytes,
            slot_bytes_live=len(live) * self.schema.slot_bytes,
            prefix=self.prefix.stats(idle_blocks=allocator.idle + len(idle)),
            transfers=self.tiers.stats(),
            tiers=self.tiers.tier_stats(),
            handoff=self.handoff.stats(),
            residency=None if self._residency is None else self._residency.stats(),
        )

    def check_invariants(self) -> None:
        """Every block, slot and snapshot has exactly the owners it should. Raises Dsv4Error
        otherwise."""
        self.table.check_invariants()
        self.prefix.check_invariants(self.open_plans)
        self.handoff.check_invariants()
        if self._residency is not None:
            self._residency.check_invariants()

    def take_events(self) -> list[BlockEvent]:
        """Which blocks were cached and evicted since the last call, in order, for a router that
        keeps track of prefixes. Build the manager with PrefixOptions(events=True)."""
        self._require_free("take_events")
        index = self._prefix_cache().index
        if index.events is None:
            raise InvalidInput(
                "this manager collects no block events: build it with PrefixOptions(events=True)"
            )
        return index.take_events()

    # ---- table and memory together -----------------------------------------------------------

    def _refuse_size(self, blocks: int) -> NoReturn:
        allocator = self.table.allocator
        raise OutOfBlocks(
            needed=blocks, free=allocator.free, total=allocator.total, asker_blocks=blocks
        )

    def _require_unplanned(self, request: Request) -> None:
        self.table.require_live(request)
        self._steps.require_unplanned(request)

    def _read_prompt(
        self, prompt: int | TokenIds | Prompt, salt: str | None
    ) -> tuple[int, TokenTrail | None]:
        """How many tokens, and their trail where ids are known and may be cached."""
        if isinstance(prompt, Prompt):
            if salt is not None:
                raise InvalidInput("a prompt has its salt already: give it to manager.prompt")
            return step_checks.context(self.schema, prompt.tokens), self.prefix.trail_of(prompt)
        if isinstance(prompt, int | np.integer):
            return step_checks.context(self.schema, prompt), None
        ids = token_ids(prompt)
        count = step_checks.context(self.schema, len(ids))
        return count, self.prefix.trail(ids, salt)

    def _prefix_cache(self) -> PrefixCache:
        if isinstance(self.prefix, NoPrefix):
            raise InvalidInput(
                "this manager has no prefix cache: build it with prefix=PrefixOptions()"
            )
        return self.prefix
