"""The owner of everything, with the calls of each request and each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from dsv4.cache.assembly import make_handles, make_handoff, make_parts, make_tiers
from dsv4.cache.batch import Batch
from dsv4.cache.changes import Uncopied, changes
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.options import ManagerOptions, complete
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.prefixes import Prefixes, Prompt
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prefix.trail import TokenIds
from dsv4.cache.prepare_forward import ForwardPlan, PlanOptions
from dsv4.cache.recover import recover
from dsv4.cache.requests import Request
from dsv4.cache.room import CacheRoom
from dsv4.cache.schema import CacheSchema
from dsv4.cache.stats import Stats, count_stats
from dsv4.cache.step import checks as step_checks
from dsv4.cache.step.checks import Step
from dsv4.cache.warmup import warm_up
from dsv4.errors import (
    InvalidInput,
    RecoveryNeeded,
    ThreadError,
    is_whole,
    require_count,
    require_type,
)


class KVCacheManager(Uncopied):
    """The cache of one model on one device.

    `schema` is its layout, `num_blocks` blocks hold the context of all requests, `max_requests` may
    be live at once. The `options` are named and explained in `ManagerOptions`
    (dsv4/cache/options.py); `dsv4.Cache` and `dsv4.manager_from_memory` find numbers that fit a
    memory.

    Here are the calls that an engine makes for each request and each step. Others are with what
    they are about: `manager.memory` is what lies on the device, `manager.room` says what fits,
    `manager.prefix` is what outlives a request (false without a prefix cache). With tiers
    (docs/tiers.md), the fastest first, what is cached is kept below the device too:
    `manager.tiers`. With a hand-off (docs/distributed.md) requests go from manager to manager:
    `manager.handoff`. Both are false where they are not there.

    One allocator serves all layers, so admission is atomic: a request has its slot and all its
    blocks, or nothing. Host calls (everything but what handles launch) belong between captured
    graphs. A call that raises has changed nothing.

    With `batch_invariant` no bit of what a token reads (scores, selection, attention) depends on
    what else is in its step or on how its request was divided into steps. Without it, the last bits
    of attention may, where a GPU has a special kernel. It costs time when there are few requests,
    and workspace (docs/exactness.md).

    Threads: calls that change the manager come one at a time, from any thread, wherever they are;
    one that comes while another runs raises ThreadError. `stats`, `memory.memory_bytes` and metrics
    may be called at any time. A handle is used by the thread that acquired it; calls of one plan's
    handles, and its commit, abandon or fail, come one at a time too.
    """

    _instead = "build another one with the same schema"

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
        least_blocks = 1 if schema.bytes.block else 0
        num_blocks = require_count("num_blocks", num_blocks, at_least=least_blocks)
        max_requests = require_count("max_requests", max_requests)
        self.schema = schema
        parts = self._parts = make_parts(
            schema, num_blocks=num_blocks, max_requests=max_requests, options=settings
        )
        self._guard, self.memory = parts.guard, parts.memory
        self._admission, self._steps, self._leaving = parts.admission, parts.steps, parts.leaving
        self.tiers = make_tiers(self, settings["tiers"])
        self.handoff = make_handoff(self, settings["handoff"])
        self._release_deferred = partial(parts.leaving.release_deferred, self.tiers, self.handoff)
        self.prefix = Prefixes(parts, self._release_deferred)
        self.room = CacheRoom(parts, self._release_deferred)
        if self.tiers:
            self._steps.after_commit.append(self.tiers.pump)
        self._handles = make_handles(parts)

    def __repr__(self) -> str:
        table, backend = self._parts.table, self._parts.backend
        blocks = table.allocator
        return (
            f"KVCacheManager({self.schema.model.name} on {self.device}, {backend.name}: "
            f"{len(table.live)} of {table.max_requests} requests; {blocks.total} blocks, "
            f"{blocks.held} live, {blocks.idle} cached, {blocks.free} free)"
        )

    @property
    def device(self) -> torch.device:
        """The device that the arenas are on."""
        return self.memory.device

    # ---- requests ------------------------------------------------------------------------------

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
        return self._admission.admit(prompt, salt, reuse=reuse, hints=hints)

    @changes
    def fork(self, request: Request, count: int) -> list[Request]:
        """`count` new requests that continue from where this one is: beams, parallel samples.

        They share its whole blocks, which are never written again, and get copies of its slot and
        of its unfinished block: all or nothing. Raises OutOfSlots, OutOfBlocks, RequestError,
        InvalidInput.
        """
        self._steps.require_unplanned(request)
        return self._admission.fork(request, count)

    @changes
    def rewind(self, request: Request, length: int) -> Resume:
        """Takes back all tokens from `length` on. Returns what to run again to get there.

        As far as the rings reach (the newest `schema.max_rollback_tokens` that were written) that
        is nothing; further back the request continues from the nearest point that can be resumed,
        and releases the blocks after it. Raises InvalidInput, RequestError, OutOfBlocks.
        """
        self._steps.require_unplanned(request)
        return self._admission.rewind(request, length)

    @changes
    def supply_ids(self, request: Request, ids: TokenIds) -> None:
        """Supplies the ids of tokens that were committed without them, from the first unknown one
        on.

        Blocks that become known are cached now. A snapshot is taken if the rings still have the
        state, that is up to `schema.max_rollback_tokens` tokens later. Raises InvalidInput,
        RequestError.
        """
        self._steps.require_unplanned(request)
        if self._admission.supply_ids(request, ids):
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
        self._parts.prefix.required()
        self._steps.require_unplanned(request)
        return self._admission.go_on(request, prompt)

    @changes
    def allocate_block(self, request: Request) -> int:
        """One more block at the end of the request's table; its id. Raises OutOfBlocks,
        ContextOverflow, RequestError."""
        return self._admission.add_block(request)

    @changes
    def release_request(self, request: Request) -> None:
        """Releases slot and blocks; those that the prefix cache has indexed stay cached until their
        memory is needed. The request cannot be used again. Raises RequestError, of a request that
        is in an open plan too."""
        self._steps.require_unplanned(request)
        self._leaving.release(request)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All live requests, except those that the next call will release."""
        return self._leaving.staying()

    def recover(self) -> None:
        """Restores a consistent state after a call was interrupted (RecoveryNeeded says so).

        Free lists, counts and the device's table are rebuilt from the requests and the prefix
        index. Every request that was live still is, at its length before or after the call; one
        whose slot was being overwritten `is_torn`. Requests and pins that the interrupted call was
        about to return are gone; so is a plan that was never returned, or whose lengths have moved.
        Unfinished fetches and arrivals are cancelled; offers stand. Does nothing else, and is
        harmless if it was not needed. Raises ThreadError while a call runs, one of a handle too.
        """
        recover(self._parts, self.tiers, self.handoff)

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
        options: PlanOptions = {
            "pad_tokens": pad_tokens,
            "pad_requests": pad_requests,
            "drafts": drafts,
            "chunks_apart": chunks_apart,
        }
        return self._steps.prepare(steps, after, accepted, options)

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
                if self._guard.is_shut:
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
        self._guard.require_free("warmup")
        return warm_up(
            self.memory,
            self._parts.backend,
            heads=heads,
            workers=workers,
            progress=progress,
            kv_norm=kv_norm,
            inverse_rope=inverse_rope,
            round_bf16=round_bf16,
            window_cut=self._steps.cut_replays,
            make_handle=self._parts.make_handle,
        )

    def acquire(self, layer: int, batch: Batch | None = None) -> LayerCacheHandle:
        """The handle of one layer, bound to a batch of an open plan. Allocates nothing; the same
        object each time. Without a batch it only reads."""
        # engines call this for every layer of every step: it makes as few calls as possible
        handles = self._handles[0][0]
        if (type(layer) is not int and not is_whole(layer)) or not 0 <= layer < len(handles):
            raise InvalidInput(f"layer {layer} of a model with {len(handles)} layers")
        if self._guard.number in self._guard.visits:
            self._guard.refuse("acquire")
        if batch is not None:
            step_checks.bound(layer, batch, self._steps.open)
            handles = self._handles[batch.lane][batch.part == "prefill"]
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
        there on is cached, offered, suspended or continued until a rewind takes it back. A step in
        which an append raised is never committed: `fail` it. Raises PlanError, InvalidInput.
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

    def stats(self) -> Stats:
        """What holds how much, now; what `room.release_later` has noted counts as released. Safe
        from any thread; while a call runs elsewhere, it may show a mix of before and after."""
        return count_stats(self._parts, self.tiers, self.handoff)

    def check_invariants(self) -> None:
        """Every block, slot and snapshot has exactly the owners it should. Raises Dsv4Error
        otherwise."""
        parts = self._parts
        parts.table.check_invariants()
        parts.prefix.check_invariants(self._steps.open)
        self.handoff.check_invariants()
        if parts.residency is not None:
            parts.residency.check_invariants()
