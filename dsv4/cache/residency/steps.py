"""Steps of a manager whose entries may be in host memory: what a step writes has rows on the
device, and what it has completed is copied to host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dsv4.cache.memory import Lane
from dsv4.cache.prefix.trail import TokenIds
from dsv4.cache.prepare_forward import ForwardPlan, PlanOptions
from dsv4.cache.residency.residency import Residency
from dsv4.cache.step import overlap
from dsv4.cache.step.shape import StepTokens
from dsv4.cache.steps import Steps


class ResidentSteps(Steps):
    """Rows are taken first, so that a step that does not get them changes nothing. The device's
    tables are written last; if that fails, the plan did not happen. After an interrupt, which may
    have come between two books, nothing is undone here: `recover` derives both anew."""

    def __init__(self, *parts: Any, residency: Residency, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._residency = residency

    def _plan(
        self, lane: Lane, step: StepTokens, accepted: Tensor | None, options: PlanOptions
    ) -> ForwardPlan:
        residency = self._residency
        assert lane.entries is not None
        lane.entries.chunks.end()
        taken = residency.take_step(step, None if step.before is None else step.before.plan)
        try:
            plan = super()._plan(lane, step, accepted, options)
        except Exception:
            residency.cancel_step(taken)
            raise
        try:
            if plan.prefill is not None:
                residency.stage(plan.prefill, lane)
            residency.place_step(taken)
        except Exception:
            residency.cancel_step(taken)
            self._withdraw(plan)
            for request, held, published in taken.before:
                self._table.cut(request, held)
                request.published_blocks = published
            raise
        return plan

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
