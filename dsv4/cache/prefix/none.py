"""What a manager without a prefix cache has in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NoReturn

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.blocks import CachedBlocks
from dsv4.cache.prefix.eviction import LeastRecentlyUsed
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.observer import Notices
from dsv4.cache.prefix.pins import Pins
from dsv4.cache.prefix.prefixes import Prompt
from dsv4.cache.prefix.resume import PrefixMatch, Resume
from dsv4.cache.prefix.rows import SnapshotRows
from dsv4.cache.prefix.trail import Ids
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput


class NoCaptures:
    """No snapshots are taken."""

    def plan(self, *prefill: object) -> None:
        """No row exists for one."""

    def reserve(self, captures: object) -> None:
        """None were planned."""

    def give_back(self, plan: object) -> None:
        """None were reserved."""

    def rows_of(self, plans: object) -> list[int]:
        return []


class NoCaching:
    """Nothing is cached."""

    def read_ids(self, *step: object) -> None:
        """Ids of a step are not looked at."""

    def note_commit(self, *step: object) -> None:
        """Nothing is cached."""

    def note_release(self, request: Request) -> None:
        """Nothing of it stays."""


class NoPrefix:
    """In place of a PrefixCache. It is false. Nothing is cached, and prompts have no trail, because
    nothing of them is kept; what only a prefix cache can do is refused."""

    def __init__(self, schema: CacheSchema) -> None:
        self._schema = schema
        allocator, policy = BlockAllocator(0), LeastRecentlyUsed()
        self.index = PrefixIndex(allocator, policy)
        self.rows = SnapshotRows(0, policy, _nothing)
        self.pins = Pins(self.index, schema.block_tokens)
        self.captures = NoCaptures()
        self.caching = NoCaching()
        self.notices = Notices(schema.block_tokens, has_state_bytes=False)
        self.blocks = CachedBlocks(allocator, self.index, self.rows, self.pins, self.notices)

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "NoPrefix()"

    def required(self) -> NoReturn:
        """Raises InvalidInput."""
        raise InvalidInput("this manager has no prefix cache: build it with prefix=PrefixOptions()")

    def trail(self, ids: Ids, salt: str | None) -> None:
        """Of no prompt."""

    def prompt(self, ids: Ids, salt: str | None, hints: object = None) -> Prompt:
        return Prompt(len(ids), None, (self._schema.content_fingerprint, ""))

    def trail_of(self, prompt: Prompt) -> None:
        """Of no prompt. Raises InvalidInput for one that was made with a prefix cache."""
        if prompt.trail is not None:
            raise InvalidInput(
                "this prompt was made by a manager with a prefix cache: make it with this one"
            )

    def match_own(self, request: Request, length: int) -> PrefixMatch:
        """A request that goes back further than its rings starts over."""
        resume = Resume(start=0, reused_tokens=0, end=length, source="nothing")
        return PrefixMatch([], resume, None)

    def put_state(self, match: PrefixMatch, slot: object) -> None:
        """There is none to put."""

    def memory_bytes(self) -> int:
        return 0

    def stats(self, *, idle_blocks: int) -> None:
        """There is nothing to count."""

    def check_invariants(self, open_plans: Sequence[object]) -> None:
        """There is nothing to check."""


def _nothing() -> None:
    """Before a reuse of memory that does not exist."""
