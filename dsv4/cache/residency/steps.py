"""Steps of a manager whose entries may be in host memory: what a step writes has rows on the
device, and what it has completed is copied to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsv4.cache.memory import Lane
from dsv4.cache.prefix.trail import TokenIds
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.residency.residency import Residency, StepEntries
from dsv4.cache.step import overlap
from dsv4.cache.step.checks import Step
from dsv4.cache.step.shape import StepTokens
from dsv4.cache.steps import Steps


class ResidentSteps(Steps):
    """Rows are taken before anything else, so that a step that gets none changes nothing. The
    device's table is written last. If that fails, the plan did not happen. After an interrupt
    nothing is undone here, where it may have come between two books: `recover` does that."""

    def __init__(self, *parts: Any, residency: Residency, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._residency = residency
        self._taken: StepEntries | None = None

    def prepare(self, steps: Sequence[Step], **options: Any) -> ForwardPlan:
        self._taken = None
        try:
            plan = super().prepare(steps, **options)
        except Exception:
            if self._taken is not None:
                self._residency.cancel_step(self._taken)
            raise
        taken = self._taken
        assert taken is not None
        try:
            if plan.prefill is not None:
                self._residency.stage(plan.prefill, self._memory.lanes[plan.lane])
            self._residency.place_step(taken)
        except Exception:
            self._residency.cancel_step(taken)
            super().abandon(plan)
            for request, held in zip(plan.requests, taken.held, strict=True):
                self._table.cut(request, held)
            raise
        return plan

    def _read_step(
        self,
        lane: Lane,
        steps: Sequence[Step],
        after: ForwardPlan | None,
        accepted: Tensor | None,
    ) -> StepTokens:
        step = super()._read_step(lane, steps, after, accepted)
        self._taken = self._residency.take_step(step, after)
        return step

    def commit(
        self,
        plan: ForwardPlan,
        accepted: Sequence[int] | None,
        ids: TokenIds | None,
        *,
        partial: bool,
    ) -> None:
        super().commit(plan, accepted, ids, partial=partial)
        self._residency.note_commit(plan)

    def abandon(self, plan: ForwardPlan) -> None:
        super().abandon(plan)
        self._residency.note_end(plan)

    def fail(self, plan: ForwardPlan) -> None:
        ending = overlap.last_first(plan, self.open) if plan in self.open else []
        super().fail(plan)
        for each in ending:
            self._residency.note_end(each)
