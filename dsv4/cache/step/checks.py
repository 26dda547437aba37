"""What the manager checks before a call changes anything. Each raises the error it names."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import NoReturn

import numpy as np

from dsv4.cache.batch import Batch, Written
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request, RequestTable, require_fit
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.shape import I64, Before, StepShape, StepTokens
from dsv4.errors import PlanError, RequestError, is_whole

Step = tuple[Request, int] | tuple[Request, int, int]
_SLOT, _COUNT = attrgetter("slot"), itemgetter(1)


def unplanned(request: Request, open_plans: Sequence[ForwardPlan]) -> None:
    """RequestError for a request that is in an open plan."""
    for plan in open_plans:
        if request in plan.requests:
            raise RequestError(
                f"request {request.serial} is in a plan that is still open: commit it first"
            )


def disjoint(
    shape: StepShape, open_plans: Sequence[ForwardPlan], before: Before | None = None
) -> None:
    """PlanError for a request that is in an open plan too, unless in the one that this step
    comes after."""
    known = () if before is None else before.plan.requests
    for plan in open_plans:
        for request in set(plan.requests).intersection(shape.requests).difference(known):
            raise PlanError(
                f"request {request.serial} is in another plan that is still open: plans that are "
                f"open at once have no request in common"
            )


def untorn(schema: CacheSchema, shape: StepShape, starts: I64, written: I64) -> None:
    """RequestError for a request whose rings do not hold the state at its length."""
    torn = written - starts > schema.max_rollback_tokens
    if np.count_nonzero(torn):
        shape.requests[int(torn.argmax())].require("run")


def cut_replays(step: StepTokens, *, plain: bool) -> bool:
    """Whether the step consists of cut replays. PlanError if it has other requests too, if it does
    not reach the end of one, or is not `plain`: after another one, with drafts or with
    chunks_apart."""
    shape, starts, reused = step.shape, step.starts, step.reused
    rows = [
        row
        for row in (starts < reused).nonzero()[0].tolist()
        if shape.requests[row].approximate_from is not None
    ]
    if not rows:
        return False
    if len(rows) < len(shape.requests) or not plain:
        serials = ", ".join(str(shape.requests[row].serial) for row in rows)
        raise PlanError(
            f"cut replays (of requests {serials}) share no step with others, nor with drafts, "
            f"chunks apart or a plan before it: prepare a plan for them alone"
        )
    short = (starts + shape.counts < reused).nonzero()[0].tolist()
    if short:
        row = short[0]
        raise PlanError(
            f"a step of {shape.counts[row]} tokens ends in the cut replay of request "
            f"{shape.requests[row].serial}: give it the {reused[row] - starts[row]} tokens up to "
            f"position {reused[row]} at least"
        )
    return True


def whole_replays(plan: ForwardPlan, kept: I64, reused: I64) -> None:
    """PlanError unless a plan of cut replays keeps them whole."""
    if np.any(plan.starts + kept < reused):
        raise PlanError("a cut replay is kept whole: accept its tokens, or fail the plan")


def open_plan(plan: ForwardPlan, expected: Sequence[ForwardPlan]) -> None:
    """PlanError unless `plan` is one of the manager's open ones."""
    if not isinstance(plan, ForwardPlan) or plan.done or plan not in expected:
        _refuse_ended(plan)


def _refuse_ended(plan: object) -> NoReturn:
    if not isinstance(plan, ForwardPlan | Batch):
        raise PlanError(f"{plan!r} is not a plan: take what prepare_forward returned")
    if plan.done:
        raise PlanError("this plan is over: prepare a new one for each step")
    if isinstance(plan, Batch):
        raise PlanError("this belongs to a plan: give the plan that prepare_forward returned")
    raise PlanError("this plan belongs to another manager")


def bound(layer: int, batch: Batch, open_plans: Sequence[ForwardPlan]) -> None:
    """PlanError unless a layer can be bound to `batch`, one of an open plan."""
    if type(batch) is Batch:
        for plan in open_plans:
            if batch in plan.batches:
                return
    _drafting(layer, batch, open_plans)


def _drafting(layer: int, batch: Batch, open_plans: Sequence[ForwardPlan]) -> None:
    """PlanError unless a layer can be bound to `batch`, of draft steps of an open plan."""
    if isinstance(batch, ForwardPlan):
        open_plan(batch, open_plans)
        raise PlanError(
            "a layer is bound to a batch of a plan: give plan.batch, or plan.decode and "
            "plan.prefill where chunks are apart"
        )
    if not isinstance(batch, Batch):
        raise PlanError(f"{batch!r} is not a batch: take one of what prepare_forward returned")
    if batch.done:
        _refuse_ended(batch)
    if not any(batch in plan.drafts for plan in open_plans):
        raise PlanError("this batch belongs to a plan of another manager")
    drafting = batch.written.schema.draft_layers
    if layer not in drafting:
        raise PlanError(
            f"layer {layer} does not draft: draft steps are for {sorted(drafting)}, bind it to "
            f"the plan's batch"
        )


class StepReader:
    """Reads the (request, count) pairs of steps. The last shape is kept, until a request is
    released: a decode loop gives equal steps one after the other."""

    def __init__(self, schema: CacheSchema, table: RequestTable) -> None:
        self._schema, self._table = schema, table
        self.forget()

    def forget(self) -> None:
        self._keep(StepShape.build((), ()), ())

    def _keep(self, shape: StepShape, counts: tuple[int, ...]) -> None:
        self._least = min(counts, default=0)
        self._kept = (tuple(zip(shape.requests, counts, strict=True)), shape)

    def read(self, steps: Sequence[Step]) -> StepShape:
        """RequestError, PlanError or ContextOverflow for the first that is wrong."""
        if not isinstance(steps, list | tuple | Sequence):  # the first two are quick to check
            _refuse_steps(steps)
        last, shape = self._kept
        if self._is_last(steps, last):
            return shape
        pairs = self._plain(steps)
        if pairs is None:
            pairs = _check_each(steps, self._table)
        requests, counts = pairs
        require_fit(self._schema, max(counts, default=0))  # before numbers become int64
        shape = StepShape.build([r.slot for r in requests], counts, requests)
        self._keep(shape, counts)
        return shape

    def _is_last(self, steps: Sequence[Step], last: tuple[Step, ...]) -> bool:
        """Whether these are exactly the pairs checked last time. Because `True == 1` and `1.0 ==
        1`, equal pairs may hold bools or floats. If any count is not an int, the sum is not an int
        either (bools are tested separately)."""
        try:
            if tuple(steps) != last:
                return False
            if self._least > 1:
                return type(sum(map(_COUNT, steps))) is int
            return set(map(type, map(_COUNT, steps))) == {int}
        except (TypeError, ValueError, RuntimeError):  # arrays, tensors: reported below
            return False

    def _plain(self, steps: Sequence[Step]) -> tuple[tuple[Request, ...], tuple[int, ...]] | None:
        """Requests and counts if every step is a (request, count), valid and distinct; checked
        without a Python loop. None: check each one."""
        if set(map(type, steps)) != {tuple}:
            return None
        try:
            requests, counts = zip(*steps, strict=True)
        except ValueError:  # not pairs
            return None
        if set(map(type, counts)) != {int} or min(counts) < 0:
            return None
        if set(map(type, requests)) != {Request}:
            return None
        slots = list(map(_SLOT, requests))
        live = list(map(self._table.live.get, slots)) == list(requests)
        if not live or len(set(slots)) != len(slots):
            return None
        return requests, counts


def _refuse_steps(steps: object) -> NoReturn:
    raise PlanError(f"steps are {type(steps).__name__}: give a list of (request, new tokens)")


def _check_each(
    steps: Sequence[Step], table: RequestTable
) -> tuple[tuple[Request, ...], tuple[int, ...]]:
    """The requests and counts of a step, each looked at. RequestError, PlanError."""
    wrong = [step for step in steps if not isinstance(step, tuple) or len(step) not in (2, 3)]
    if wrong:
        raise PlanError(
            f"a step is (request, new tokens) or (request, new tokens, start), got {wrong[0]!r}"
        )
    if len({id(step[0]) for step in steps}) != len(steps):
        raise PlanError("a request is twice in one step: merge its tokens")
    for step in steps:
        table.require_live(step[0])
        if not is_whole(step[1]) or step[1] < 0:
            raise PlanError(f"{step[1]!r} new tokens for a request: give a count of 0 or more")
        if len(step) == 3 and (not is_whole(step[2]) or step[2] != step[0].length):
            raise PlanError(
                f"a step that starts at position {step[2]!r} would skip or repeat tokens: the "
                f"request has {step[0].length}"
            )
    return tuple(step[0] for step in steps), tuple(int(step[1]) for step in steps)


def accepted(schema: CacheSchema, plan: ForwardPlan, accepted: Sequence[int]) -> I64:
    """How many tokens of each request the step keeps. PlanError."""
    try:
        kept = np.asarray(accepted)
    except (ValueError, TypeError, RuntimeError) as error:
        raise PlanError(
            f"accepted are not {len(plan.counts)} whole numbers on the host, one per request: "
            f"{error}"
        ) from error
    if isinstance(accepted, list | tuple) and bool in set(map(type, accepted)):
        kept = np.empty(0, dtype=np.bool_)
    if kept.shape != plan.counts.shape or (kept.size and kept.dtype.kind not in "iu"):
        raise PlanError(
            f"accepted must be a list of {len(plan.counts)}: a whole number for each request, got "
            f"{accepted!r}"
        )
    kept, most = kept.astype(np.int64), schema.max_decode_tokens
    # as unsigned numbers, negative ones are too large
    over = np.count_nonzero(kept.view(np.uint64) > plan.counts.view(np.uint64))
    if not over and plan.shape.most_tokens <= most:
        return kept
    rejected = plan.counts - kept
    if not over and rejected.max(initial=0) <= most:
        return kept
    wrong = np.flatnonzero((kept < 0) | (rejected < 0))
    if wrong.size:
        raise PlanError(
            f"request {wrong[0]} of the plan accepts {kept[wrong[0]]} of "
            f"{plan.counts[wrong[0]]} tokens: accept between 0 and {plan.counts[wrong[0]]}"
        )
    row = int((rejected > most).argmax())
    raise PlanError(
        f"request {row} of the plan rejects {rejected[row]} tokens, but the rings survive {most}: "
        f"build the schema with max_draft_tokens >= {rejected[row] - 1}"
    )


def every_layer(plan: ForwardPlan, kept: I64, *, partial: bool) -> bool:
    """Whether every layer except draft layers has stored the step. PlanError if an append of one
    raised, or if one lacks tokens that are kept and the step is not meant to be `partial`."""
    for batch in plan.batches:
        if batch.written.unfinished:
            _refuse_unfinished(min(batch.written.unfinished))
    if all(batch.written.is_complete for batch in plan.batches):
        return True
    if not partial and kept.any():
        _refuse_lacking(plan)
    return False


def _refuse_unfinished(layer: int) -> NoReturn:
    raise PlanError(
        f"an append of layer {layer} raised, so what the step has left there is unknown: call "
        f"fail(plan)"
    )


def _refuse_lacking(plan: ForwardPlan) -> NoReturn:
    lacking = [
        _missing_layers(batch.written) + ("" if batch.part is None else f" of plan.{batch.part}")
        for batch in plan.batches
        if not batch.written.is_complete
    ]
    raise PlanError(
        f"this step lacks the append of {' and of '.join(lacking)}, and the next one would "
        f"read what was left out: run it, or call fail(plan). After the replay of a captured "
        f"graph say plan.mark_appended(); commit(plan, partial=True) keeps a step that lacks "
        f"layers"
    )


def _missing_layers(written: Written) -> str:
    """By number, the first few of many."""
    layers = sorted(set(written.schema.backbone_layers).difference(written.stored))
    shown = ", ".join(map(str, layers[:8]))
    if len(layers) > 8:
        shown += f" and {len(layers) - 8} more"
    return f"layer{'s' if len(layers) > 1 else ''} {shown}"
