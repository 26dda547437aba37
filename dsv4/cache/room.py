"""`manager.room`: what requests have of slots and blocks, and what others would take."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv4.cache.changes import changes, require_free
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.trail import TokenIds
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request

if TYPE_CHECKING:
    from dsv4.cache.assembly import Parts


class CacheRoom:
    """Questions before an admission, and calls that take or give back memory outside of a step.
    They count as calls of the manager: one at a time changes it, and a call that raises has changed
    nothing."""

    def __init__(self, parts: Parts, release_deferred: Callable[[], None]) -> None:
        self._guard, self._release_deferred = parts.guard, release_deferred
        self._admission, self._steps, self._leaving = parts.admission, parts.steps, parts.leaving
        self._supply = parts.table.supply

    def __repr__(self) -> str:
        return f"CacheRoom({len(self._steps.open)} plans are open)"

    @property
    def open_plans(self) -> list[ForwardPlan]:
        """The plans that are open, the oldest first: each has step buffers to itself."""
        return [*self._steps.open]

    # ---- before an admission -------------------------------------------------------------------

    def can_admit(self, prompt: int | TokenIds | Prompt, salt: str | None = None) -> bool:
        """Whether `admit_request` would succeed now, with what is cached reused. False too for a
        prompt that it would refuse at any time (InvalidInput, ContextOverflow). Changes
        nothing."""
        require_free(self, "can_admit")
        return self._admission.can_admit(prompt, salt)

    def needed_blocks(self, prompt: int | TokenIds | Prompt, salt: str | None = None) -> int:
        """Blocks that `admit_request` would take beyond what is cached. Changes nothing. Raises
        InvalidInput, ContextOverflow."""
        require_free(self, "needed_blocks")
        return self._admission.needed_blocks(prompt, salt)

    def released_blocks(self, request: Request) -> int:
        """How many more blocks could be taken if this request were released: those that only it
        holds and no pin keeps. Changes nothing. Raises RequestError."""
        require_free(self, "released_blocks")
        return self._admission.released_blocks(request)

    # ---- of one request ------------------------------------------------------------------------

    @changes
    def extend(self, request: Request, tokens: int) -> list[int]:
        """Reserves blocks so that `tokens` more tokens fit after the request's length; returns the
        new ids. `manager.allocate_block` adds a single block. Raises OutOfBlocks, ContextOverflow,
        InvalidInput, RequestError."""
        return self._admission.extend(request, tokens)

    def block_id(self, request: Request, block: int) -> int:
        """The id of the physical block that is the request's block number `block`. Raises
        InvalidInput for a block that it does not hold, RequestError."""
        return self._admission.block_id(request, block)

    @changes
    def reset_slot(self, request: Request) -> None:
        """Starts the request over: length 0, its slot zeroed. It keeps the blocks that only it
        holds. Raises RequestError, of a request that is in an open plan too."""
        self._steps.require_unplanned(request)
        self._admission.reset(request)
        self._supply.trim_for(request.trail)

    def release_later(self, request: Request, *, suspend: bool = False) -> None:
        """Releases a request with the next call of the manager, once no open plan has it; with
        `suspend`, suspends it if possible. From then on it counts as released. Safe at any time and
        from any thread, because it only notes what to do: for finalizers, which run wherever a
        garbage collection starts, even in the middle of a call. Raises InvalidInput for something
        that is not a request, RequestError for another manager's request."""
        self._leaving.release_later(request, suspend=suspend)
