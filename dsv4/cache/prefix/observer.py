"""What a prefix cache reports to its observers: tiers, which keep the same prefixes elsewhere, and
publishers of events. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.resume import PrefixMatch
from dsv4.cache.prefix.trail import TokenTrail


class Cause(NamedTuple):
    """Why blocks are evicted: requests with these trails need memory (None for one without token
    ids), or `evict` was called ("asked"). The first `over_quota` of them go because the quota of
    their salt is full."""

    askers: tuple[TokenTrail | None, ...] = ()
    reason: Literal["memory", "asked"] = "memory"
    over_quota: int = 0


UNKNOWN_CAUSE = Cause()


class NewlyCached(NamedTuple):
    """A block or the snapshot at its end, cached a moment ago. `parent` is the chain digest of the
    block before it, `tokens` the length of the prefix that it ends."""

    node: PrefixNode
    is_snapshot: bool
    parent: bytes
    tokens: int


class Observer:
    """Listens to one prefix cache, for instance to keep blocks in tiers too. Its methods are called
    in the middle of an admission or a commit: they must not raise, wait or change the cache. Here
    they do nothing; a subclass has those that it needs."""

    def cached(self, new: NewlyCached, trail: TokenTrail) -> None:
        """It can be copied now: what comes next on the current stream finds its bytes, until the
        next `before_reuse`. The tokens are the trail's."""

    def landed(self, node: PrefixNode, trail: TokenTrail) -> None:
        """A block that a tier had is cached."""

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """A request with this prompt was admitted and continues after this match."""

    def before_reuse(self) -> None:
        """Some blocks or snapshot rows are about to be reused: copies of them must come before what
        comes next on the current stream."""

    def evicted(self, victims: Sequence[PrefixNode]) -> None:
        """These blocks left the cache."""

    def left(self, victims: Sequence[PrefixNode], cause: Cause) -> None:
        """The same, and why."""

    def entries_left(self, block_ids: Sequence[int]) -> None:
        """Entries of these blocks, cached or not, are only in host memory now
        (docs/residency.md)."""

    def refused(self, digest: bytes, tier: str) -> None:
        """A tier had a block with this digest, but its bytes are not what they should be."""

    def recovered(self, nodes: Collection[PrefixNode]) -> None:
        """After an interrupt: these blocks are cached and no others, whatever was reported."""


class Notices:
    """Passes reports of the parts of a prefix cache on to its observers."""

    def __init__(self, block_tokens: int, *, has_state_bytes: bool) -> None:
        self.observers: list[Observer] = []
        self._block_tokens = block_tokens
        self._has_state_bytes = has_state_bytes  # else snapshots are empty

    def observe(self, observer: Observer) -> None:
        """Reports to this one too from now on."""
        self.observers.append(observer)

    def cached(self, node: PrefixNode, trail: TokenTrail, *, is_snapshot: bool = False) -> None:
        if not self.observers or (is_snapshot and not self._has_state_bytes):
            return
        parent = trail.chain[node.depth - 1] if node.depth else trail.root
        tokens = (node.depth + 1) * self._block_tokens
        new = NewlyCached(node, is_snapshot, parent, tokens)
        for observer in self.observers:
            observer.cached(new, trail)

    def landed(self, node: PrefixNode, trail: TokenTrail) -> None:
        for observer in self.observers:
            observer.landed(node, trail)

    def before_reuse(self) -> None:
        for observer in self.observers:
            observer.before_reuse()

    def evicted(self, victims: Sequence[PrefixNode], cause: Cause) -> None:
        for observer in self.observers:
            observer.evicted(victims)
            observer.left(victims, cause)

    def entries_left(self, block_ids: Sequence[int]) -> None:
        for observer in self.observers:
            observer.entries_left(block_ids)

    def refused(self, digest: bytes, tier: str) -> None:
        for observer in self.observers:
            observer.refused(digest, tier)

    def recovered(self, nodes: Collection[PrefixNode]) -> None:
        for observer in self.observers:
            observer.recovered(nodes)
