"""Overlapping steps: planned and launched before the results of the previous step are on the host.

The earlier plan is committed first. Until then the host knows only an upper bound of each length,
and takes blocks for that; where the step really starts, the device fills in (`follow`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import LENGTH, RequestTable
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step import checks
from dsv4.cache.step.shape import I64, Before, StepShape
from dsv4.errors import PlanError


def read_before(
    schema: CacheSchema,
    table: RequestTable,
    shape: StepShape,
    after: ForwardPlan | None,
    accepted: Tensor | None,
    open_plans: Sequence[ForwardPlan],
    device: torch.device,
) -> Before | None:
    """What a step knows of the plan that it comes after. PlanError if that plan cannot have one
    after it, or if the accepted counts do not fit it."""
    if after is None:
        if accepted is not None:
            raise PlanError("accepted counts are those of another plan: give it as `after`")
        return None
    checks.open_plan(after, open_plans)
    ahead = 1 + _plans_ahead(after)
    if ahead > schema.steps_ahead:
        raise PlanError(
            f"{ahead} plans would be open before this one, but the rings survive the drafts "
            f"of {schema.steps_ahead}: commit one first, or build the schema with "
            f"steps_ahead={ahead}"
        )
    if accepted is not None:
        _check_accepted(accepted, after, device)
    row_of_slot = np.full(table.max_requests, -1, dtype=np.int64)
    row_of_slot[after.slots] = np.arange(len(after.slots))
    rows = row_of_slot[shape.slots]
    counted = np.zeros(len(rows), dtype=np.bool_)
    if accepted is not None:  # a chunk is kept whole
        counted = _of_rows(after.counts <= schema.max_decode_tokens, rows, counted)
    unknown = _unknown_starts(rows, counted, after)
    is_chunk = shape.counts > schema.max_decode_tokens
    if unknown is not None and (unknown & is_chunk).any():
        row = int((unknown & is_chunk).argmax())
        raise PlanError(
            f"{shape.counts[row]} tokens of request {shape.requests[row].serial} cannot be planned "
            f"before it is known how many of its last step are kept: at most "
            f"{schema.max_decode_tokens} can, or commit that step first"
        )
    return Before(plan=after, rows=rows, counted_rows=counted, unknown_starts=unknown)


def latest_starts(before: Before, lengths: I64) -> I64:
    """An upper bound of where the requests of a step start; `lengths` are those of the last
    commit."""
    return _of_rows(before.plan.ends, before.rows, lengths)


def note_lost_windows(schema: CacheSchema, plan: ForwardPlan, table: RequestTable) -> None:
    """Whether a ring may have lost the oldest row of a whole window before a request's start."""
    lengths, _, _, written = table.numbers.take(plan.slots, axis=1)  # as of the last commit
    earliest = plan.starts
    if plan.after is not None and plan.rows_before is not None:
        ends = _of_rows(plan.after.latest_ends, plan.rows_before, written)
        written = np.maximum(written, ends)
        if plan.unknown_starts is not None:
            earliest = np.where(plan.unknown_starts, lengths, earliest)
    lost = bool((written - earliest > schema.ring_rows - schema.model.window).any())
    for batch in plan.batches:
        batch.written.window_lost = lost


def require_first(plan: ForwardPlan) -> None:
    """PlanError unless the plan that this one comes after is over."""
    if plan.after is not None:
        raise PlanError(
            "this plan comes after another one that is still open: commit that one first"
        )


def require_last(plan: ForwardPlan, open_plans: Sequence[ForwardPlan]) -> None:
    """PlanError if another open plan comes after this one."""
    if _followers(plan, open_plans):
        raise PlanError(
            "another plan that is still open comes after this one: abandon that one first, or call "
            "fail(plan), which ends both"
        )


def require_kept(plan: ForwardPlan, kept: I64, open_plans: Sequence[ForwardPlan]) -> None:
    """PlanError for a plan that rejects tokens after which another one was planned."""
    for follower in _followers(plan, open_plans):
        rows = _rows_taken_whole(follower)
        wrong = rows[kept[rows] != plan.counts[rows]]
        if wrong.size:
            raise PlanError(
                f"request {wrong[0]} of the plan accepts {kept[wrong[0]]} of "
                f"{plan.counts[wrong[0]]} tokens, but the plan after it was prepared as if all "
                f"were accepted: give accepted counts to prepare_forward, or call fail(plan)"
            )


def newest(plan: ForwardPlan, open_plans: Sequence[ForwardPlan]) -> I64:
    """For each request, the end of what this plan and those after it may have written."""
    ends = plan.latest_ends
    for follower in _followers(plan, open_plans):
        assert follower.rows_before is not None
        common = follower.rows_before >= 0
        ends = ends.copy()
        ends[follower.rows_before[common]] = newest(follower, open_plans)[common]
    return ends


def last_first(plan: ForwardPlan, open_plans: Sequence[ForwardPlan]) -> list[ForwardPlan]:
    """The plans after this one and the plan itself, each before those that it comes after."""
    found = []
    for follower in _followers(plan, open_plans):
        found += last_first(follower, open_plans)
    return [*found, plan]


def move_up(plan: ForwardPlan, table: RequestTable, open_plans: Sequence[ForwardPlan]) -> None:
    """A plan is committed and the lengths have moved: plans right after it now have exact starts;
    for plans after those the upper bound gets tighter, or exact too."""
    for follower in _followers(plan, open_plans):
        _start_at(follower, table.numbers[LENGTH, follower.slots], None, open_plans)
        follower.after = None


def _start_at(
    plan: ForwardPlan,
    starts: I64,
    unknown: NDArray[np.bool_] | None,
    open_plans: Sequence[ForwardPlan],
) -> None:
    plan.start_at(starts, unknown)
    for follower in _followers(plan, open_plans):
        assert follower.rows_before is not None
        assert follower.counted_rows is not None
        rows = follower.rows_before
        still = _unknown_starts(rows, follower.counted_rows, plan)
        follows = _of_rows(plan.ends, rows, follower.starts)
        _start_at(follower, follows, still, open_plans)


def _unknown_starts(
    rows: I64, counted: NDArray[np.bool_], before: ForwardPlan
) -> NDArray[np.bool_] | None:
    """Requests whose start only the device knows: because it reads how many tokens the earlier plan
    keeps, or because only it knows where that one starts. None if there are none."""
    unknown = counted
    if before.unknown_starts is not None:
        unknown = unknown | _of_rows(before.unknown_starts, rows, counted)
    return unknown if unknown.any() else None


def _of_rows(values: NDArray[Any], rows: I64, otherwise: NDArray[Any]) -> NDArray[Any]:
    """Values of the earlier plan for requests whose rows there are `rows`; `otherwise` for those
    that are not in it."""
    found, taken = rows >= 0, otherwise.copy()
    taken[found] = values[rows[found]]
    return taken


def _followers(plan: ForwardPlan, open_plans: Sequence[ForwardPlan]) -> list[ForwardPlan]:
    if len(open_plans) == 1:
        return []
    return [each for each in open_plans if each.after is plan]


def _plans_ahead(plan: ForwardPlan) -> int:
    return 0 if plan.after is None else 1 + _plans_ahead(plan.after)


def _rows_taken_whole(follower: ForwardPlan) -> I64:
    """Rows of the earlier plan all of whose tokens were assumed to be kept, wherever they start."""
    assert follower.rows_before is not None
    assert follower.counted_rows is not None
    return follower.rows_before[(follower.rows_before >= 0) & ~follower.counted_rows]


def may_have_run(plan: ForwardPlan) -> NDArray[np.bool_]:
    """For which requests an open plan may have written something. For a chunk its handles know. A
    replayed graph leaves no trace on the host, so a decode batch may have, except for requests
    whose earlier chunk has not run."""
    sizes = [len(batch.requests) for batch in plan.batches]
    touched = np.repeat([batch.written.touched for batch in plan.batches], sizes)
    replayed = np.repeat([batch.is_decode for batch in plan.batches], sizes)
    if plan.after is not None:
        assert plan.rows_before is not None
        replayed &= _of_rows(may_have_run(plan.after), plan.rows_before, replayed)
    ran: NDArray[np.bool_] = touched | replayed
    return ran


def _check_accepted(accepted: object, after: ForwardPlan, device: torch.device) -> None:
    needed = len(after.requests)
    if not isinstance(accepted, Tensor):
        raise PlanError(
            f"accepted are {type(accepted).__name__}: give a tensor on {device}, or, if they are "
            f"on the host, commit the plan first"
        )
    if (
        accepted.dtype not in (torch.int32, torch.int64)
        or accepted.dim() != 1
        or accepted.shape[0] < needed
        or accepted.device != device
        or not accepted.is_contiguous()
    ):
        raise PlanError(
            f"accepted are {accepted.dtype} {list(accepted.shape)} on {accepted.device}: give one "
            f"int32 or int64 per request of the plan before, {needed} of them in a row on {device}"
        )
