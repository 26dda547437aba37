"""What a prefix cache reports to an observer that keeps the same prefixes elsewhere. Torch-free."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.resume import PrefixMatch
from dsv4.cache.prefix.trail import TokenTrail


class NewlyCached(NamedTuple):
    """A block or the snapshot at its end, cached a moment ago. `parent` is the chain digest of the
    block before it, `tokens` the length of the prefix that it ends."""

    node: PrefixNode
    is_snapshot: bool
    parent: bytes
    tokens: int


class Observer(Protocol):
    """Listens to one prefix cache, for instance to keep blocks in tiers too. Its methods are called
    in the middle of an admission or a commit: they must not raise, wait or change the cache."""

    def cached(self, new: NewlyCached) -> None:
        """It can be copied now: what comes next on the current stream finds its bytes, until the
        next `before_reuse`."""

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """A request with this prompt was admitted and continues after this match."""

    def before_reuse(self) -> None:
        """Some blocks or snapshot rows are about to be reused: copies of them must come before what
        comes next on the current stream."""


class Notices:
    """Passes reports of the parts of a prefix cache on to its observer, if it has one."""

    def __init__(self, block_tokens: int, *, has_state_bytes: bool) -> None:
        self.observer: Observer | None = None
        self._block_tokens = block_tokens
        self._has_state_bytes = has_state_bytes  # else snapshots are empty

    def cached(self, node: PrefixNode, trail: TokenTrail, *, is_snapshot: bool = False) -> None:
        if self.observer is None or (is_snapshot and not self._has_state_bytes):
            return
        parent = trail.chain[node.depth - 1] if node.depth else trail.root
        tokens = (node.depth + 1) * self._block_tokens
        self.observer.cached(NewlyCached(node, is_snapshot, parent, tokens))

    def before_reuse(self) -> None:
        if self.observer is not None:
            self.observer.before_reuse()
