"""A request on its way here from another manager. Torch-free.

    begin    the offer fits, and a slot, blocks in flight and host memory for the state are taken
    read     blocks that are not cached here come into the blocks in flight, the state to the host
    confirm  the owner's pledge is read, after the last byte: was all of it still the offer's?
    check    sums of the state and, where the owner had them in host memory, of the blocks
    settle   slot and blocks are the request's; its whole blocks are indexed

If anything goes wrong before the last step, no byte of it has been used.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsv4.cache.polled import Polled
from dsv4.errors import OfferError, RecoveryNeeded, ThreadError

if TYPE_CHECKING:
    from dsv4.cache.handoff.link import Read
    from dsv4.cache.handoff.offer import Offer
    from dsv4.cache.handoff.rows import StateRow
    from dsv4.cache.prefix.trail import TokenTrail
    from dsv4.cache.requests import Request

_POLL_S = 0.0003


@dataclass(slots=True, eq=False, kw_only=True)
class Landing:
    """What an arrival has taken from its manager, until its request has it or it is given back."""

    cell: int | None = None
    row: StateRow | None = None
    shared: list[int] = field(default_factory=list)  # blocks that are cached here
    block_ids: list[int] = field(default_factory=list)  # in flight


class Arrival(Polled):
    """A request that was accepted. `poll` advances it and says whether it has finished; then
    `request` is the request, live at the length that it was offered with, or None, and `error` says
    why. `cancel` ends it; memory that is still being written to is set aside until that has
    ended."""

    _instead = "accept the offer once more"

    def __init__(
        self,
        offer: Offer,
        trail: TokenTrail | None,
        *,
        deadline: float,
        poll: Callable[[Arrival], None],
        cancel: Callable[[Arrival], None],
    ) -> None:
        super().__init__(advance=poll, end=cancel)
        self.tokens = offer.tokens
        self.request: Request | None = None
        self.error: OfferError | None = None
        self.skipped_blocks = 0  # were cached here and were not read
        self.read_bytes = 0
        # ---- its manager's
        self.offer, self.trail, self.deadline = offer, trail, deadline
        self.landing = Landing()
        self.read: Read | None = None

    @property
    def done(self) -> bool:
        """Whether it has finished: `request` or `error` is there."""
        return self.request is not None or self.error is not None

    def wait(self) -> Request:
        """Polls until it has finished. Other calls may come in between. Raises OfferError if the
        request did not arrive; it can be computed or resumed from tiers."""
        try:
            while not self.poll():
                time.sleep(_POLL_S)
        except BaseException:
            with suppress(ThreadError, RecoveryNeeded):  # `recover` cancels it
                self.cancel()
            raise
        if self.request is None:
            assert self.error is not None
            raise self.error
        return self.request

    def __repr__(self) -> str:
        how = "on its way"
        if self.request is not None:
            how = f"here as {self.request!r}"
        elif self.error is not None:
            how = self.error.reason
        return f"Arrival({self.tokens} tokens, {how})"
