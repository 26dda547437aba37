"""Steps of a manager: plans are prepared, then committed, abandoned or failed.

What these calls promise is written at the manager's. A plan's device memory is that of its lane;
`Turn` keeps its handles out while it ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

from torch import Tensor

from dsv4.cache.admission import Admission
from dsv4.cache.batch import Batch
from dsv4.cache.changes import LOGGER, Guard, Turn
from dsv4.cache.memory import CacheMemory, Lane
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.captures import ChunkCaptures
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.prefix.trail import TokenIds
from dsv4.cache.prepare_forward import (
    ForwardPlan,
    PlanOptions,
    check_step,
    following,
    make_plan,
)
from dsv4.cache.requests import REUSED, Request, RequestTable, require_fit
from dsv4.cache.step import checks as step_checks
from dsv4.cache.step import overlap
from dsv4.cache.step.checks import Step, StepReader
from dsv4.cache.step.shape import I64, StepTokens
from dsv4.errors import PlanError, RequestError, require_flag
from dsv4.ops.backend import Backend


class Steps:
    """The plans that are open, the oldest first. Its calls come from the call that is inside the
    manager."""

    def __init__(
        self,
        table: RequestTable,
        memory: CacheMemory,
        backend: Backend,
        prefix: PrefixCache | NoPrefix,
        guard: Guard,
        admission: Admission,
        *,
        cut_replays: bool,
    ) -> None:
        self.open: list[ForwardPlan] = []
        self.after_commit: list[Callable[[], None]] = []
        self._schema, self._table, self._memory = table.schema, table, memory
        self._backend, self._prefix, self._guard = backend, prefix, guard
        self._admission, self.cut_replays = admission, cut_replays
        self._readers = tuple(StepReader(table.schema, table) for _ in memory.lanes)

    def require_unplanned(self, request: Request) -> None:
        """RequestError for anything but a live request that is in no open plan."""
        self._table.require_live(request)
        step_checks.unplanned(request, self.open)

    def written_tokens(self, request: Request) -> int:
        """What the rings of a request may hold, with what open plans write. RequestError if one
        has a chunk of it: then they hold no state."""
        written = request.written_tokens
        for plan in self.open:
            if request not in plan.requests:
                continue
            row = plan.requests.index(request)
            if plan.counts[row] > self._schema.max_decode_tokens:
                raise RequestError(
                    f"a chunk of request {request.serial} is running, and its rings hold no "
                    f"state: commit the plan, then offer it"
                )
            written = max(written, int(plan.latest_ends[row]))
        return written

    def prepare(
        self,
        steps: Sequence[Step],
        after: ForwardPlan | None,
        accepted: Tensor | None,
        options: PlanOptions,
    ) -> ForwardPlan:
        if options["chunks_apart"] is not False:
            require_flag("chunks_apart", options["chunks_apart"])
        lane = self._free_lane()
        step = self._read_step(lane, steps, after, accepted)
        return self._plan(lane, step, accepted, options)

    def _plan(
        self, lane: Lane, step: StepTokens, accepted: Tensor | None, options: PlanOptions
    ) -> ForwardPlan:
        """Takes blocks, and writes what the device needs to know. All or nothing."""
        if self.cut_replays:
            is_plain = step.before is None and not options["drafts"] and not options["chunks_apart"]
            step = replace(step, window_cut=step_checks.cut_replays(step, plain=is_plain))
        check_step(lane.buffers, step.shape, options)
        growth = self._table.reserve_step(step.shape.requests, step.shape.slots, step.ends)
        try:  # the device first, the table of live requests last and at once
            plan = make_plan(lane, step, options)
            new_blocks = lane.buffers.fill_new_blocks(growth)
            if self._schema.model.draft_block:
                overlap.note_lost_windows(self._schema, plan, self._table)
            captures = None if plan.prefill is None else self._plan_captures(plan.prefill, lane)
            lane.buffers.send(self._memory.block_table, new_blocks)
            if len(plan.batches) > 1:
                lane.chunk_buffers.send(self._memory.block_table)
            if plan.unknown_starts is not None:
                self._backend.follow(following(lane.buffers, plan, accepted))
        except BaseException:  # an error of the device, out of memory, or Ctrl-C
            self._table.supply.cancel(growth.reserved)
            raise
        if growth.requests:
            self._table.settle_step(growth)
        if captures is not None and plan.prefill is not None:
            plan.prefill.captures = captures
            self._prefix.captures.reserve(captures)
        self._guard.change.hand_out(plan)
        self.open.append(plan)
        return plan

    def _plan_captures(self, prefill: Batch, lane: Lane) -> ChunkCaptures | None:
        slots = self._memory.slot_arena.bytes
        return self._prefix.captures.plan(prefill, slots, lane.workspace)

    def _read_step(
        self,
        lane: Lane,
        steps: Sequence[Step],
        after: ForwardPlan | None,
        accepted: Tensor | None,
    ) -> StepTokens:
        """Where the new tokens of a step lie. Raises PlanError, ContextOverflow or RequestError."""
        shape, before = self._readers[lane.number].read(steps), None
        if after is not None or accepted is not None:
            before = overlap.read_before(
                self._schema, self._table, shape, after, accepted, self.open, self._memory.device
            )
        if self.open:
            step_checks.disjoint(shape, self.open, before)
        starts, _, reused, written = self._table.numbers.take(shape.slots, axis=1)
        step_checks.untorn(self._schema, shape, starts, written)
        if before is not None:
            starts = overlap.latest_starts(before, starts)
        ends = starts + shape.counts
        require_fit(self._schema, int(ends.max(initial=0)))
        return StepTokens(shape=shape, starts=starts, ends=ends, reused=reused, before=before)

    def commit(
        self,
        plan: ForwardPlan,
        accepted: Sequence[int] | None,
        ids: TokenIds | None,
        *,
        partial: bool,
    ) -> None:
        if partial is not False:
            require_flag("partial", partial)
        turn = self._enter_turn(plan)
        try:
            slots, kept = plan.shape.slots, plan.shape.counts
            has_neighbours = len(self.open) > 1  # else no plan comes before or after it
            if accepted is not None or has_neighbours or plan.batches[0].window_cut:
                kept = self._read_kept(plan, accepted)
            ends = plan.starts + kept
            learned = None
            if ids is not None:
                learned = self._prefix.caching.read_ids(plan, kept, ids, self._table.recent)
            if not step_checks.every_layer(plan, kept, partial=partial):
                learned = None
                for row in kept.nonzero()[0].tolist():
                    plan.requests[row].note_incomplete(int(plan.starts[row]))
            if accepted is not None:  # rejected tokens were written too
                self._table.note_written(slots, plan.latest_ends)
            self._table.move(slots, ends)
            self._prefix.caching.note_commit(
                plan,
                kept,
                ends,
                learned,
                lambda: overlap.newest(plan, self.open),
                self._memory.slot_arena.bytes,
                self._admission.exchange,
            )
            if has_neighbours:
                overlap.move_up(plan, self._table, self.open)
            self._close(plan)
        finally:
            del turn.visits[turn.number]  # turn.leave, without a call
        for call in self.after_commit:
            call()

    def _read_kept(self, plan: ForwardPlan, accepted: Sequence[int] | None) -> I64:
        """How many tokens of each request are kept. PlanError if the plans before and after it, or
        its cut replays, do not allow that."""
        kept, has_neighbours = plan.counts, len(self.open) > 1
        if has_neighbours:
            overlap.require_first(plan)
        if accepted is not None:
            kept = step_checks.accepted(self._schema, plan, accepted)
        if has_neighbours:
            overlap.require_kept(plan, kept, self.open)
        if plan.batches[0].window_cut:
            step_checks.whole_replays(plan, kept, self._table.numbers[REUSED].take(plan.slots))
        return kept

    def abandon(self, plan: ForwardPlan) -> None:
        turn = self._enter_turn(plan)
        try:
            overlap.require_last(plan, self.open)
            chunks = plan.prefill
            if chunks is not None and (chunks.written.touched or chunks.written.appended):
                raise PlanError(
                    f"layers {sorted(chunks.written.appended | chunks.written.unfinished)[:4]} "
                    f"already wrote {plan.shape.most_tokens} tokens of a request, more than the "
                    f"{self._schema.max_decode_tokens} that can be undone: call fail(plan); "
                    f"nothing of it is cached"
                )
            self._prefix.captures.give_back(plan)
            self._note_unkept(plan)
            self._close(plan)
        finally:
            turn.leave()

    def fail(self, plan: ForwardPlan) -> None:
        step_checks.open_plan(plan, self.open)
        failing = overlap.last_first(plan, self.open)
        turns: list[Turn] = []
        try:
            for each in failing:
                turns.append(self._enter_turn(each))
            for each in failing:
                self._prefix.captures.give_back(each)
                self._note_unkept(each)
                self._close(each)
        finally:
            for turn in turns:
                turn.leave()
        if LOGGER.isEnabledFor(logging.INFO):
            torn = sum(request.is_torn for request in plan.requests)
            LOGGER.info("a step of %d requests failed, %d are torn", len(plan.requests), torn)

    def forget(self) -> None:
        """Removes what the last steps hold, so that it keeps no request alive."""
        for reader, lane in zip(self._readers, self._memory.lanes, strict=True):
            reader.forget()
            lane.buffers.forget()
            lane.chunk_buffers.forget()

    def _enter_turn(self, plan: ForwardPlan) -> Turn:
        """No handle of the plan is used until the turn ends. PlanError for a plan that is not
        open, ThreadError while a thread uses its handles."""
        step_checks.open_plan(plan, self.open)
        turn = self._memory.lanes[plan.lane].workspace.turn
        visit = self._guard.visits[self._guard.number]
        if turn.visits.setdefault(turn.number, visit) is not visit:  # turn.enter, without a call
            turn.come_past(visit)
        return turn

    def _note_unkept(self, plan: ForwardPlan) -> None:
        """What a step that did not happen may have written."""
        ran = overlap.may_have_run(plan)
        self._table.note_written(plan.slots[ran], plan.latest_ends[ran])

    def _withdraw(self, plan: ForwardPlan) -> None:
        """A plan that never reached its caller did not happen."""
        self._prefix.captures.give_back(plan)
        self._close(plan)

    def _close(self, plan: ForwardPlan) -> None:
        plan.close()
        self.open.remove(plan)

    def _free_lane(self) -> Lane:
        """PlanError if as many plans are open as can be."""
        if not self.open:
            return self._memory.lanes[0]
        taken = {plan.lane for plan in self.open}
        for lane in self._memory.lanes:
            if lane.number not in taken:
                return lane
        _refuse_plan(len(taken))


def _refuse_plan(taken: int) -> NoReturn:
    if taken == 1:
        raise PlanError(
            "the previous plan is still open: commit or abandon it first, or build the manager "
            "with max_open_plans=2"
        )
    raise PlanError(f"{taken} plans are still open: commit or abandon one first")
