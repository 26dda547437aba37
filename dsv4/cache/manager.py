"""The one owner of everything: arenas, block table, slots, requests, plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from dsv4.backend import BackendName, load_backend
from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.arena import Arena
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.paged_cache import PagedKVPool
from dsv4.cache.prepare_forward import (
    I64,
    ForwardPlan,
    StepBuffers,
    check_step,
    fill_new_blocks,
    make_plan,
)
from dsv4.cache.request import Request
from dsv4.cache.schema import BlockBudget, CacheSchema
from dsv4.cache.state_cache import StateCachePool
from dsv4.cache.workspace import Workspace
from dsv4.errors import (
    ContextOverflow,
    Dsv4Error,
    InvalidInput,
    OutOfBlocks,
    OutOfSlots,
    PlanError,
    RequestError,
)

Step = tuple[Request, int] | tuple[Request, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """What the manager has allocated on its device."""

    block_arena: int
    slot_arena: int
    block_table: int
    step_buffers: int
    workspace: int

    @property
    def total(self) -> int:
        cache = self.block_arena + self.slot_arena + self.block_table
        return cache + self.step_buffers + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A snapshot of who holds what. free + live = total, for blocks and for slots."""

    blocks_total: int
    blocks_free: int
    blocks_live: int
    slots_total: int
    slots_free: int
    requests_live: int
    tokens_live: int
    block_bytes_live: int
    slot_bytes_live: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


class KVCacheManager:
    """The cache of one model on one device.

    One allocator serves all layers, so admission is atomic: a request has its slot and all its
    blocks, or nothing. Host calls (everything but what handles launch) belong between captured
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
    ) -> None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("max_requests", max_requests),
            ("max_step_tokens", max_step_tokens),
        ):
            least = 0 if name == "num_blocks" and not schema.block_bytes else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidInput(f"{name}={value!r}: must be a whole number of at least {least}")
        self.schema = schema
        self.device = torch.device(device)
        self.max_requests = max_requests
        self.backend = load_backend(backend, self.device)
        self.allocator = BlockAllocator(num_blocks)
        self.block_arena = Arena(schema, "block", num_blocks, self.device)
        self.slot_arena = Arena(schema, "slot", max_requests, self.device)
        self.block_table = torch.full(
            (max_requests, schema.max_blocks_per_request),
            -1,
            dtype=torch.int32,
            device=self.device,
        )
        self.buffers = StepBuffers(
            schema, max_requests=max_requests, max_tokens=max_step_tokens, device=self.device
        )
        self.workspace = Workspace(
            schema,
            self.backend,
            self.block_table,
            max_tokens=max_step_tokens,
            device=self.device,
        )
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._requests: dict[int, Request] = {}
        self._next_serial = 0
        self._open_plan: ForwardPlan | None = None
        self._handles = tuple(
            LayerCacheHandle(
                schema=schema,
                layer=layer,
                pool=PagedKVPool(schema, self.block_arena, layer),
                state=StateCachePool(schema, self.slot_arena, layer),
                block_arena=self.block_arena.bytes,
                slot_arena=self.slot_arena.bytes,
                block_table=self.block_table,
                buffers=self.buffers,
                workspace=self.workspace,
                backend=self.backend,
            )
            for layer in range(len(schema.layers))
        )

    @classmethod
    def from_budget(
        cls, schema: CacheSchema, budget: BlockBudget, **options: Any
    ) -> KVCacheManager:
        """A manager with exactly the blocks and slots that `compute_block_budget` found."""
        return cls(
            schema, num_blocks=budget.num_blocks, max_requests=budget.max_requests, **options
        )

    # ---- requests --------------------------------------------------------------------------

    def can_admit(self, tokens: int) -> bool:
        """Whether `admit_request(tokens)` would succeed now."""
        return (
            bool(self._free_slots)
            and isinstance(tokens, int)
            and 0 <= tokens <= self.schema.max_context
            and self.allocator.can_take(self.schema.blocks_for(tokens))
        )

    def admit_request(self, tokens: int = 0) -> Request:
        """A slot, and blocks for `tokens` tokens of prompt: all or nothing.

        Computes nothing. Raises OutOfSlots, OutOfBlocks (`never` or wait) or ContextOverflow.
        """
        self._check_context(tokens)
        blocks = self.schema.blocks_for(tokens)
        if blocks > self.allocator.total:
            raise OutOfBlocks(
                needed=blocks,
                free=self.allocator.free,
                total=self.allocator.total,
                asker_blocks=blocks,
            )
        if not self._free_slots:
            raise OutOfSlots(total=self.max_requests)
        block_ids = self.allocator.take(blocks)
        request = Request(
            slot=self._free_slots.pop(),
            serial=self._next_serial,
            block_ids=block_ids,
            manager_key=self,
        )
        self._next_serial += 1
        self._requests[request.slot] = request
        return request

    def extend(self, request: Request, tokens: int) -> list[int]:
        """Blocks so that `tokens` more tokens fit behind the request's length; the new ids."""
        self._check_live(request)
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise InvalidInput(f"cannot extend by {tokens!r} tokens: give a count of 0 or more")
        self._check_context(request.length + tokens)
        held = len(request.block_ids)
        missing = self.schema.blocks_for(request.length + tokens) - held
        new_ids = self.allocator.take(max(0, missing), asker_blocks=held + missing)
        request.block_ids.extend(new_ids)
        return new_ids

    def allocate_block(self, request: Request) -> int:
        """One more block at the end of the request's table; its id."""
        self._check_live(request)
        held = len(request.block_ids)
        if held == self.schema.max_blocks_per_request:
            raise ContextOverflow(
                asked_tokens=(held + 1) * self.schema.block_tokens,
                max_context_tokens=self.schema.max_context,
            )
        (block_id,) = self.allocator.take(1, asker_blocks=held + 1)
        request.block_ids.append(block_id)
        return block_id

    def block_id(self, request: Request, block: int) -> int:
        """The physical block behind the request's block `block`."""
        self._check_live(request)
        if not isinstance(block, int) or not 0 <= block < len(request.block_ids):
            raise InvalidInput(
                f"block {block} is past the table of this request, which holds "
                f"{len(request.block_ids)} blocks: extend it first"
            )
        return request.block_ids[block]

    def reset_slot(self, request: Request) -> None:
        """Starts the request over: length 0, its slot zeroed. Its blocks stay with it."""
        self._check_live(request)
        self._check_not_planned(request)
        self.slot_arena.bytes[request.slot].zero_()
        request.length = 0

    def release_request(self, request: Request) -> None:
        """Gives slot and blocks back. The request cannot be used again."""
        self._check_live(request)
        self._check_not_planned(request)
        self.allocator.release(request.block_ids)
        del self._requests[request.slot]
        self._free_slots.append(request.slot)
        request.released = True
        request.block_ids = []

    # ---- steps -----------------------------------------------------------------------------

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
        if self._open_plan is not None:
            raise PlanError("the previous plan is still open: commit or abandon it first")
        requests, state, counts = self._checked_steps(steps)
        check_step(
            self.schema, self.buffers, counts, pad_tokens=pad_tokens, pad_requests=pad_requests
        )
        slots, starts, held, published = state.T
        block_tokens = self.schema.block_tokens if self.schema.block_bytes else np.inf
        needed = np.ceil((starts + counts) / block_tokens).astype(np.int64)
        self._take_blocks(requests, held, needed)
        self.buffers.clear()
        new_blocks = fill_new_blocks(self.schema, self.buffers, requests, published, needed)
        plan = make_plan(
            self.schema,
            self.buffers,
            requests,
            slots,
            starts,
            counts,
            serial=self._next_serial,
            pad_tokens=pad_tokens,
            pad_requests=pad_requests,
        )
        self.buffers.send()
        if new_blocks:
            self.block_table.view(-1).index_copy_(
                0, self.buffers.new_block_at[:new_blocks], self.buffers.new_block_id[:new_blocks]
            )
        self._next_serial += 1
        self._open_plan = plan
        return plan

    def acquire(self, layer: int, plan: ForwardPlan | None = None) -> LayerCacheHandle:
        """The handle of one layer, bound to an open plan. Allocates nothing; the same object each
        time. Without a plan it only reads."""
        if not isinstance(layer, int) or not 0 <= layer < len(self._handles):
            raise InvalidInput(f"layer {layer} of a model with {len(self._handles)} layers")
        if plan is not None:
            self._check_open(plan)
        handle = self._handles[layer]
        handle.plan = plan
        return handle

    def commit(self, plan: ForwardPlan, accepted: Sequence[int] | None = None) -> None:
        """The step happened: lengths move by `accepted` tokens a request (default: all).

        Rejected tokens vanish because nothing at or past the length is ever read. At most
        `schema.max_rollback_tokens` of a request may be rejected. Raises PlanError.
        """
        self._check_open(plan)
        try:
            kept = plan.counts if accepted is None else np.asarray(accepted)
        except ValueError:
            kept = np.empty(0, dtype=np.float64)
        if kept.shape != plan.counts.shape or (kept.size and kept.dtype.kind not in "iu"):
            raise PlanError(
                f"accepted must be {len(plan.counts)} whole numbers, one a request, "
                f"got {accepted!r}"
            )
        rejected = plan.counts - kept
        wrong = np.flatnonzero((kept < 0) | (rejected < 0))
        if wrong.size:
            raise PlanError(
                f"request {wrong[0]} of the plan accepts {kept[wrong[0]]} of "
                f"{plan.counts[wrong[0]]} tokens: the number must lie between"
            )
        most = self.schema.max_rollback_tokens
        wrong = np.flatnonzero(rejected > most)
        if wrong.size:
            raise PlanError(
                f"request {wrong[0]} of the plan rejects {rejected[wrong[0]]} tokens, but the "
                f"rings survive {most}: build the schema with max_draft_tokens >= "
                f"{rejected[wrong[0]] - 1}"
            )
        for request, count in zip(plan.requests, kept.tolist(), strict=True):
            request.length += count
        self._close(plan)

    def abandon(self, plan: ForwardPlan) -> None:
        """The step did not happen and no layer appended it; lengths stay."""
        self._check_open(plan)
        if plan.appended_layers and not plan.narrow:
            raise PlanError(
                f"layers {sorted(plan.appended_layers)[:4]} already wrote {plan.counts.max()} "
                f"tokens of a request, more than the {self.schema.max_rollback_tokens} that can be "
                f"undone: commit the plan, or release its requests"
            )
        self._close(plan)

    # ---- looking -----------------------------------------------------------------------------

    def memory_bytes(self) -> MemoryBytes:
        """Bytes allocated on the device; arenas and table are what the planner promised."""
        return MemoryBytes(
            block_arena=self.block_arena.memory_bytes(),
            slot_arena=self.slot_arena.memory_bytes(),
            block_table=self.block_table.numel() * self.block_table.element_size(),
            step_buffers=self.buffers.memory_bytes(),
            workspace=self.workspace.memory_bytes(),
        )

    def stats(self) -> Stats:
        live = self.allocator.total - self.allocator.free
        return Stats(
            blocks_total=self.allocator.total,
            blocks_free=self.allocator.free,
            blocks_live=live,
            slots_total=self.max_requests,
            slots_free=len(self._free_slots),
            requests_live=len(self._requests),
            tokens_live=sum(r.length for r in self._requests.values()),
            block_bytes_live=live * self.schema.block_bytes,
            slot_bytes_live=len(self._requests) * self.schema.slot_bytes,
        )

    def check_invariants(self) -> None:
        """Every block and slot has exactly the owners it should. Raises Dsv4Error otherwise."""
        self.allocator.check_invariants()
        owners: dict[int, int] = {}
        for slot, request in self._requests.items():
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
        if sorted([*self._free_slots, *self._requests]) != list(range(self.max_requests)):
            raise Dsv4Error("slots are lost or doubled: free and live ones do not add up")

    # ---- checks --------------------------------------------------------------------------------

    def _check_context(self, tokens: int) -> None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise InvalidInput(f"{tokens!r} tokens: must be a whole number, 0 or more")
        if tokens > self.schema.max_context:
            raise ContextOverflow(asked_tokens=tokens, max_context_tokens=self.schema.max_context)

    def _check_live(self, request: Request) -> None:
        if not isinstance(request, Request) or request.manager_key is not self:
            raise RequestError("this is not a request that this manager admitted")
        if request.released:
            raise RequestError(f"request {request.serial} has been released already")

    def _check_not_planned(self, request: Request) -> None:
        if self._open_plan is not None and request in self._open_plan.requests:
            raise RequestError(
                f"request {request.serial} is in a plan that is still open: commit it first"
            )

    def _check_open(self, plan: ForwardPlan) -> None:
        if not isinstance(plan, ForwardPlan):
            raise PlanError(f"{plan!r} is not a plan: take what prepare_forward returned")
        if plan.done:
            raise PlanError("this plan is over: prepare a new one for each step")
        if plan is not self._open_plan:
            raise PlanError("this plan belongs to another manager")

    def _checked_steps(self, steps: Sequence[Step]) -> tuple[tuple[Request, ...], I64, I64]:
        """Requests, their state (slot, length, blocks held, blocks published: one row each) and
        their new tokens. Raises what `prepare_forward` does, for the first step that is wrong."""
        if any(not isinstance(step, tuple) or len(step) not in (2, 3) for step in steps):
            raise PlanError("a step is (request, new tokens) or (request, new tokens, start)")
        requests = tuple(step[0] for step in steps)
        if len({id(request) for request in requests}) != len(requests):
            raise PlanError("a request stands twice in one step: merge its tokens")
        for step in steps:
            self._check_live(step[0])
            if type(step[1]) is not int or step[1] < 0:
                raise PlanError(f"{step[1]!r} new tokens for a request: give a count of 0 or more")
            if len(step) == 3 and step[2] != step[0].length:
                raise PlanError(
                    f"a step that starts at position {step[2]!r} would skip or repeat tokens: the "
                    f"request has {step[0].length}"
                )
        state = np.array(
            [(r.slot, r.length, len(r.block_ids), r.published_blocks) for r in requests],
            dtype=np.int64,
        ).reshape(-1, 4)
        counts = np.array([step[1] for step in steps], dtype=np.int64)
        if len(counts) and (longest := int((state[:, 1] + counts).max())) > self.schema.max_context:
            raise ContextOverflow(asked_tokens=longest, max_context_tokens=self.schema.max_context)
        return requests, state, counts

    def _take_blocks(self, requests: Sequence[Request], held: I64, needed: I64) -> None:
        """All missing blocks of a step, or none."""
        missing = np.maximum(needed - held, 0)
        if not missing.any():
            return
        new_ids = self.allocator.take(int(missing.sum()), asker_blocks=int(needed.max()))
        at = 0
        for row in np.flatnonzero(missing).tolist():
            count = int(missing[row])
            requests[row].block_ids.extend(new_ids[at : at + count])
            at += count

    def _close(self, plan: ForwardPlan) -> None:
        plan.done = True
        self._open_plan = None
