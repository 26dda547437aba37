"""What the manager checks before a call changes anything. Each raises the error it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter

import numpy as np

from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.shape import I64, StepShape
from dsv4.errors import ContextOverflow, InvalidInput, PlanError, RequestError

Step = tuple[Request, int] | tuple[Request, int, int]
_SLOT, _COUNT = attrgetter("slot"), itemgetter(1)


def count(name: str, value: object) -> int:
    """A whole number, 0 or more. InvalidInput."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInput(f"{value!r} {name}: must be a whole number, 0 or more")
    return value


def context(schema: CacheSchema, tokens: int) -> int:
    """A number of tokens that one request may have. InvalidInput, ContextOverflow."""
    if count("tokens", tokens) > schema.max_context:
        raise ContextOverflow(asked_tokens=tokens, max_context_tokens=schema.max_context)
    return tokens


def live(request: Request, manager_key: object) -> None:
    """RequestError for a released or foreign request."""
    if not isinstance(request, Request) or request.manager_key is not manager_key:
        raise RequestError("this is not a request that this manager admitted")
    if request.released:
        raise RequestError(f"request {request.serial} has been released already")


def idle(request: Request, manager_key: object, open_plan: ForwardPlan | None) -> None:
    """RequestError for one that is not live, or is in the open plan."""
    live(request, manager_key)
    if open_plan is not None and request in open_plan.requests:
        raise RequestError(
            f"request {request.serial} is in a plan that is still open: commit it first"
        )


def open_plan(plan: ForwardPlan, expected: ForwardPlan | None) -> None:
    """PlanError unless `plan` is the manager's open one."""
    if not isinstance(plan, ForwardPlan):
        raise PlanError(f"{plan!r} is not a plan: take what prepare_forward returned")
    if plan.done:
        raise PlanError("this plan is over: prepare a new one for each step")
    if plan is not expected:
        raise PlanError("this plan belongs to another manager")


class StepReader:
    """Reads the (request, count) pairs of steps. The last shape is kept, until a request is
    released: a decode loop gives equal steps one after the other."""

    def __init__(
        self, schema: CacheSchema, live_by_slot: Mapping[int, Request], manager_key: object
    ) -> None:
        self._schema = schema
        self._live_by_slot, self._manager_key = live_by_slot, manager_key
        self.forget()

    def forget(self) -> None:
        self._keep(StepShape.build((), ()), ())

    def _keep(self, shape: StepShape, counts: tuple[int, ...]) -> None:
        self._shape = shape
        self._last = tuple(zip(shape.requests, counts, strict=True))

    def read(self, steps: Sequence[Step]) -> StepShape:
        """RequestError, PlanError or ContextOverflow for the first that is wrong."""
        if self._is_last(steps):
            return self._shape
        pairs = self._plain(steps)
        if pairs is None:
            _check_each(steps, self._manager_key)
            pairs = tuple(step[0] for step in steps), tuple(step[1] for step in steps)
        requests, counts = pairs
        context(self._schema, max(counts, default=0))  # before numbers become int64
        self._keep(StepShape.build([r.slot for r in requests], counts, requests), counts)
        return self._shape

    def _is_last(self, steps: Sequence[Step]) -> bool:
        """Whether these are pairs that were right before. What is equal but no count is not one."""
        try:
            return tuple(steps) == self._last and set(map(type, map(_COUNT, steps))) == {int}
        except (TypeError, ValueError, RuntimeError):  # arrays, tensors: told below
            return False

    def _plain(self, steps: Sequence[Step]) -> tuple[tuple[Request, ...], tuple[int, ...]] | None:
        """Requests and counts if every step is a right (request, count) of its own, told without a
        line of Python for each request."""
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
        live = list(map(self._live_by_slot.get, slots)) == list(requests)
        if not live or len(set(slots)) != len(slots):
            return None
        return requests, counts


def _check_each(steps: Sequence[Step], manager_key: object) -> None:
    if any(not isinstance(step, tuple) or len(step) not in (2, 3) for step in steps):
        raise PlanError("a step is (request, new tokens) or (request, new tokens, start)")
    if len({id(step[0]) for step in steps}) != len(steps):
        raise PlanError("a request stands twice in one step: merge its tokens")
    for step in steps:
        live(step[0], manager_key)
        if type(step[1]) is not int or step[1] < 0:
            raise PlanError(f"{step[1]!r} new tokens for a request: give a count of 0 or more")
        if len(step) == 3 and step[2] != step[0].length:
            raise PlanError(
                f"a step that starts at position {step[2]!r} would skip or repeat tokens: the "
                f"request has {step[0].length}"
            )


def accepted(schema: CacheSchema, plan: ForwardPlan, accepted: Sequence[int] | None) -> I64:
    """How many tokens of each request the step keeps. PlanError."""
    if accepted is None:
        return plan.counts
    try:
        kept = np.asarray(accepted)
    except ValueError:
        kept = np.empty(0, dtype=np.float64)
    if kept.shape != plan.counts.shape or (kept.size and kept.dtype.kind not in "iu"):
        raise PlanError(
            f"accepted must be {len(plan.counts)} whole numbers, one a request, got {accepted!r}"
        )
    rejected = plan.counts - kept
    wrong = np.flatnonzero((kept < 0) | (rejected < 0))
    if wrong.size:
        raise PlanError(
            f"request {wrong[0]} of the plan accepts {kept[wrong[0]]} of "
            f"{plan.counts[wrong[0]]} tokens: the number must lie between"
        )
    most = schema.max_rollback_tokens
    wrong = np.flatnonzero(rejected > most)
    if wrong.size:
        raise PlanError(
            f"request {wrong[0]} of the plan rejects {rejected[wrong[0]]} tokens, but the "
            f"rings survive {most}: build the schema with max_draft_tokens >= "
            f"{rejected[wrong[0]] - 1}"
        )
    return kept.astype(np.int64)


def rewind_length(request: Request, length: object) -> int:
    """A length that the request has had. InvalidInput."""
    if isinstance(length, bool) or not isinstance(length, int):
        raise InvalidInput(f"cannot rewind to {length!r} tokens: give a whole number")
    if not 0 <= length <= request.length:
        raise InvalidInput(
            f"cannot rewind to {length} tokens: request {request.serial} has {request.length}, "
            f"and a rewind only goes back"
        )
    return length
