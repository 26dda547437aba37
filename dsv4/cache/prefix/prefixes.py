"""`manager.prefix`: prompts, what is cached of them, what stays and what goes. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dsv4.cache.changes import changes, require_free
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.index import BlockEvent
from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.cache.prefix.resume import Resume
from dsv4.cache.prefix.trail import TokenIds, TokenTrail, token_ids
from dsv4.errors import require_count

if TYPE_CHECKING:
    from dsv4.cache.assembly import Parts


class Prompt:
    """Token ids of a prompt, as `manager.prefix.prompt` made it. It holds no memory of the cache
    and nothing changes it: it may be looked up and admitted any number of times, by every manager
    of the same schema and model."""

    __slots__ = ("family", "tokens", "trail")

    def __init__(self, tokens: int, trail: TokenTrail | None, family: tuple[str, ...]) -> None:
        self.tokens, self.trail, self.family = tokens, trail, family

    def __len__(self) -> int:
        return self.tokens

    def __repr__(self) -> str:
        return f"Prompt({self.tokens} tokens)"


class Prefixes:
    """What outlives a request, and prompts that ask for it. They count as calls of the manager: one
    at a time changes it, and a call that raises has changed nothing.

    It is false for a manager without a prefix cache, and refuses then what needs one; prompts can
    be made and looked up all the same.
    """

    def __init__(self, parts: Parts, release_deferred: Callable[[], None]) -> None:
        self._guard, self._release_deferred = parts.guard, release_deferred
        self._prefix, self._admission = parts.prefix, parts.admission
        self._allocator, self._supply = parts.table.allocator, parts.table.supply

    def __bool__(self) -> bool:
        """Whether the manager has a prefix cache."""
        return bool(self._prefix)

    def __repr__(self) -> str:
        return f"Prefixes({len(self._prefix.index)} blocks)" if self else "Prefixes(none)"

    # ---- prompts -------------------------------------------------------------------------------

    def prompt(
        self, ids: TokenIds, salt: str | None = None, *, hints: Hints | None = None
    ) -> Prompt:
        """Reads and hashes a prompt once, for questions about it while it waits, and for its
        admission. `hints` are those of each request that is admitted with it, through tiers too.
        Takes no memory of the cache. Raises InvalidInput, ContextOverflow."""
        return self._admission.prompt(ids, salt, hints)

    def look_up(self, prompt: Prompt) -> Resume:
        """What `admit_request` would find cached of a prompt now, and where it would continue.
        Changes nothing: neither counts nor the order of eviction. Raises InvalidInput."""
        require_free(self, "look_up")
        return self._admission.look_up(prompt)

    # ---- what stays ----------------------------------------------------------------------------

    @changes
    def pin(self, ids: TokenIds, salt: str | None = None) -> PinnedPrefix:
        """Keeps what is cached of these token ids until `unpin`, even under memory pressure.
        Raises InvalidInput if nothing of them is cached, or without a prefix cache."""
        prefix = self._prefix.required()
        return prefix.pins.pin(prefix.trail(token_ids(ids), salt), self._guard.change.hand_out)

    @changes
    def unpin(self, pinned: PinnedPrefix) -> None:
        """Lets a pinned prefix be evicted again. Raises InvalidInput for one that is not pinned
        here, or no more."""
        self._prefix.required().pins.unpin(pinned)
        self._supply.trim(pinned.nodes[0].root)

    @changes
    def evict(self, blocks: int | None = None) -> int:
        """Evicts cached blocks that no request holds, all or `blocks` of them, in the order of
        `PrefixOptions.eviction`. Returns how many. Admission does it too. Raises InvalidInput."""
        most = self._allocator.idle
        if blocks is not None:
            most = require_count("blocks", blocks, at_least=0)
        return self._prefix.required().blocks.evict(most)

    def take_events(self) -> list[BlockEvent]:
        """Which blocks were cached and evicted since the last call, in order, for a router that
        keeps track of prefixes. Raises InvalidInput unless the manager was built with
        PrefixOptions(events=True)."""
        require_free(self, "take_events")
        return self._prefix.required().index.take_events()
