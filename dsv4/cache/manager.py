"""The one owner of everything: arenas, block table, slots, requests, plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager_requests import RequestCalls
from dsv4.cache.prefix.cache import LearnedIds
from dsv4.cache.prefix.trail import Tokens, token_ids
from dsv4.cache.prepare_forward import ForwardPlan, check_step, fill_new_blocks, make_plan
from dsv4.cache.requests import LENGTH, WRITTEN, Request
from dsv4.cache.schema import BlockBudget, CacheSchema
from dsv4.cache.stats import MemoryBytes, Stats
from dsv4.cache.step import checks as step_checks
from dsv4.cache.step.checks import Step
from dsv4.errors import Dsv4Error, InvalidInput, PlanError


class KVCacheManager(RequestCalls):
    """The cache of one model on one device.

    One allocator serves all layers, so admission is atomic: a request has its slot and all its
    blocks, or nothing. Host calls (everything but what handles launch) belong between captured
    graphs. A call that raises has changed nothing.
    """

    @classmethod
    def from_budget(
        cls, schema: CacheSchema, budget: BlockBudget, **options: Any
    ) -> KVCacheManager:
        """A manager with exactly the blocks and slots that `compute_block_budget` found."""
        return cls(
            schema, num_blocks=budget.num_blocks, max_requests=budget.max_requests, **options
        )

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
        shape = self._step_reader.read(steps)
        starts, published, reused, _ = self._rows.take(shape.slots, axis=1)
        ends = starts + shape.counts
        step_checks.context(self.schema, int(ends.max(initial=0)))
        check_step(
            self.schema, self.buffers, shape, pad_tokens=pad_tokens, pad_requests=pad_requests
        )
        growing = [
            (shape.requests[row], self.schema.blocks_for(int(ends[row])))
            for row in (ends > published * self.schema.block_tokens).nonzero()[0].tolist()
        ]
        held = self._take_blocks(growing)
        try:
            self.buffers.wait()
            new_blocks = fill_new_blocks(self.schema, self.buffers, growing)
            plan = make_plan(
                self.schema,
                self.buffers,
                shape,
                starts,
                ends,
                reused,
                serial=self._next_serial,
                pad_tokens=pad_tokens,
                pad_requests=pad_requests,
            )
            self._send_step(new_blocks)
            if self.prefix is not None:
                plan.captures = self.prefix.plan_captures(plan)
        except BaseException:  # of the device, out of memory, or a key pressed
            for request, blocks in held:
                self._cut_blocks(request, blocks)
            raise
        for request, blocks in growing:
            request.published_blocks = blocks
        self._next_serial += 1
        self._open_plan = plan
        return plan

    def _send_step(self, new_blocks: int) -> None:
        """The step's index tensors to the device, and from there its new blocks to the table."""
        self.buffers.send()
        if new_blocks:
            self.block_table.view(-1).index_copy_(
                0,
                self.buffers.cut("new_block_at", new_blocks),
                self.buffers.cut("new_block_id", new_blocks),
            )

    def acquire(self, layer: int, plan: ForwardPlan | None = None) -> LayerCacheHandle:
        """The handle of one layer, bound to an open plan. Allocates nothing; the same object each
        time. Without a plan it only reads."""
        if not isinstance(layer, int) or not 0 <= layer < len(self._handles):
            raise InvalidInput(f"layer {layer} of a model with {len(self._handles)} layers")
        if plan is not None:
            step_checks.open_plan(plan, self._open_plan)
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
        """The step happened: lengths move by `accepted` tokens a request (default: all).

        Rejected tokens vanish because nothing at or past the length is ever read. At most
        `schema.max_rollback_tokens` of a request may be rejected. `tokens` are the ids of the
        step's tokens in the plan's order: with them the prefix cache keeps what requests admitted
        with ids generate; without one they are ignored. Raises PlanError, InvalidInput.
        """
        step_checks.open_plan(plan, self._open_plan)
        kept = step_checks.accepted(self.schema, plan, accepted)
        learned: list[LearnedIds] = []
        if self.prefix is not None and tokens is not None:
            learned = self.prefix.read_ids(plan, kept, token_ids(tokens))
        if accepted is None:
            self._rows[LENGTH, plan.slots] = plan.ends
        else:  # what was rejected is written all the same
            self._note_written(plan)
            self._rows[LENGTH, plan.slots] = plan.starts + kept
        if self.prefix is not None:
            self.prefix.note_commit(plan, kept, learned, self.slot_arena.bytes)
        self._close(plan)

    def abandon(self, plan: ForwardPlan) -> None:
        """The step did not happen and no layer appended it; lengths stay."""
        step_checks.open_plan(plan, self._open_plan)
        if plan.appended_layers and not plan.narrow:
            raise PlanError(
                f"layers {sorted(plan.appended_layers)[:4]} already wrote {plan.shape.most_tokens} "
                f"tokens of a request, more than the {self.schema.max_rollback_tokens} that can be "
                f"undone: commit the plan and release its requests; nothing of it is cached"
            )
        if self.prefix is not None:
            self.prefix.note_abandon(plan)
        if plan.narrow:  # a replayed graph writes without telling the plan
            self._note_written(plan)
        self._close(plan)

    def _take_blocks(self, growing: Sequence[tuple[Request, int]]) -> list[tuple[Request, int]]:
        """So many blocks for each request, or none for any. Returns how many each had before."""
        held = [(request, len(request.block_ids)) for request, _ in growing]
        missing = [max(blocks - len(request.block_ids), 0) for request, blocks in growing]
        if any(missing):
            asker_blocks = max(blocks for _, blocks in growing)
            new_ids = iter(self._take(sum(missing), asker_blocks=asker_blocks))
            for (request, _), count in zip(growing, missing, strict=True):
                request.block_ids.extend(islice(new_ids, count))
        return held

    def _note_written(self, plan: ForwardPlan) -> None:
        """Rings hold tokens past the length that the request will have."""
        written = self._rows[WRITTEN, plan.slots]
        self._rows[WRITTEN, plan.slots] = np.maximum(written, plan.ends)

    def _close(self, plan: ForwardPlan) -> None:
        plan.done = True
        self._open_plan = None

    # ---- looking -----------------------------------------------------------------------------

    def memory_bytes(self) -> MemoryBytes:
        """Bytes allocated on the device; arenas and table are what the planner promised."""
        return MemoryBytes(
            block_arena=self.block_arena.memory_bytes(),
            slot_arena=self.slot_arena.memory_bytes(),
            block_table=self.block_table.numel() * self.block_table.element_size(),
            step_buffers=self.buffers.memory_bytes(),
            workspace=self.workspace.memory_bytes(),
            snapshots=0 if self.prefix is None else self.prefix.pool.memory_bytes(),
        )

    def stats(self) -> Stats:
        live = self.allocator.held
        return Stats(
            blocks_total=self.allocator.total,
            blocks_free=self.allocator.free,
            blocks_live=live,
            blocks_cached=self.allocator.idle,
            slots_total=self.max_requests,
            slots_free=len(self._free_slots),
            requests_live=len(self._requests),
            tokens_live=sum(r.length for r in self._requests.values()),
            block_bytes_live=live * self.schema.block_bytes,
            slot_bytes_live=len(self._requests) * self.schema.slot_bytes,
            prefix=None if self.prefix is None else self.prefix.stats(),
        )

    def check_invariants(self) -> None:
        """Every block and slot has exactly the owners it should. Raises Dsv4Error otherwise."""
        self.allocator.check_invariants()
        if self.prefix is not None:
            self.prefix.check_invariants(self._open_plan)
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
