"""The token ids of a committed step, request by request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dsv4.cache.prefix.trail import Ids, RecentIds, TokenTrail
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.step.shape import I64
from dsv4.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class StepIds:
    """Either all of them (`ids`), where each request has a few; or `apart` for each trail that
    learns some: its trail, a position and the ids from there on. They are checked and not yet
    learned."""

    ids: Ids | None
    apart: list[tuple[TokenTrail, int, Ids]]
    recent: RecentIds

    @classmethod
    def read(
        cls, plan: ForwardPlan, kept: I64, ids: Ids, recent: RecentIds, block_tokens: int
    ) -> StepIds:
        """Raises InvalidInput if they do not fit the step, or contradict what is known."""
        if len(ids) != plan.num_tokens:
            raise InvalidInput(
                f"{len(ids)} token ids for a step of {plan.num_tokens} tokens: give all of them, "
                f"in the order of the plan"
            )
        starts, known = plan.starts, recent.known.take(plan.slots)
        has_gaps = False
        if np.count_nonzero(starts != known):
            for row in ((starts < known) & (kept > 0)).nonzero()[0].tolist():
                trail, start, span = _of_row(plan, kept, ids, row)
                trail.check(start, span)
            has_gaps = bool(((starts > known) & (known >= 0)).any())
        if plan.shape.most_tokens <= block_tokens and not has_gaps:
            return cls(ids, [], recent)
        new = (starts <= known) & (known < starts + kept)
        return cls(None, [_of_row(plan, kept, ids, r) for r in new.nonzero()[0].tolist()], recent)

    def learn(self, plan: ForwardPlan, ends: I64) -> None:
        """Adds them to what is known of the requests, up to `ends`."""
        if self.ids is not None:
            self.recent.learn(plan.slots, plan.starts, ends, self.ids, plan.shape.token_rows)
        for trail, start, span in self.apart:
            trail.learn(start, span)


def _of_row(plan: ForwardPlan, kept: I64, ids: Ids, row: int) -> tuple[TokenTrail, int, Ids]:
    """A request's trail, where its step starts, the ids of the tokens that it keeps."""
    trail, first = plan.requests[row].trail, int(plan.shape.first_rows[row])
    assert trail is not None
    return trail, int(plan.starts[row]), ids[first : first + int(kept[row])]
