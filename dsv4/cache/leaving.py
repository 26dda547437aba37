"""How requests leave: now, or with the next call of the manager. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsv4.cache.absent import NoHandoff, NoTiers
from dsv4.cache.changes import Guard
from dsv4.cache.prefix.none import NoPrefix
from dsv4.cache.requests import Request, RequestTable
from dsv4.errors import RequestError, require_type

if TYPE_CHECKING:
    from dsv4.cache.handoff.handoff import Handoff
    from dsv4.cache.prefix.cache import PrefixCache
    from dsv4.cache.steps import Steps
    from dsv4.cache.transfers.tiers import Tiers


class Leaving:
    """Requests of one manager that leave."""

    def __init__(
        self, table: RequestTable, prefix: PrefixCache | NoPrefix, guard: Guard, steps: Steps
    ) -> None:
        self._table, self._prefix, self._guard, self._steps = table, prefix, guard, steps

    def release(self, request: Request) -> None:
        """Now. What the prefix cache has indexed stays cached, as far as a quota allows."""
        self._prefix.caching.note_release(request)
        trail = request.trail
        self._table.close(request)
        self._table.supply.trim_for(trail)
        self._steps.forget()

    def release_later(self, request: Request, *, suspend: bool) -> None:
        """With the next call. Safe at any time and from any thread. Raises InvalidInput,
        RequestError."""
        require_type("request", request, Request)
        if self._table.live.get(request.slot) is not request and not request.released:
            raise RequestError("this is not a request that this manager admitted")
        self._guard.defer(request, suspend=suspend)
        request.is_leaving = True

    def release_deferred(self, tiers: Tiers | NoTiers, handoff: Handoff | NoHandoff) -> None:
        """What was deferred: requests, unless an open plan still has them, fetches and hand-offs
        that nothing refers to any more."""
        deferred = self._guard.deferred
        for _ in range(len(deferred)):
            item, suspend = deferred[0]
            if not isinstance(item, Request):
                if not tiers.release_deferred(item):
                    handoff.release_deferred(item)
            elif any(item in plan.requests for plan in self._steps.open):
                deferred.append((item, suspend))
            elif not item.released and self._table.live.get(item.slot) is item:
                if suspend:
                    tiers.before_release(item)
                self.release(item)
            deferred.popleft()

    def staying(self) -> tuple[Request, ...]:
        """All live requests, except those that the next call will release."""
        live, going = tuple(self._table.live.values()), self.going()
        return tuple(request for request in live if request not in going) if going else live

    def going(self) -> list[Request]:
        """What was to be released later and no open plan has: the next call begins with releasing
        it."""
        going = [request for request in tuple(self._table.live.values()) if request.is_leaving]
        planned = {request for plan in tuple(self._steps.open) for request in plan.requests}
        return [request for request in going if request not in planned]
