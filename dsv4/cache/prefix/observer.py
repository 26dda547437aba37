"""Who keeps elsewhere what is cached here, and what they are told. Torch-free."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.resume import PrefixMatch
from dsv4.cache.prefix.trail import TokenTrail


class NewlyCached(NamedTuple):
    """A block or the snapshot at its end, cached a moment ago. `parent` is the chain digest before
    it, `tokens` where it ends."""

    node: PrefixNode
    is_snapshot: bool
    parent: bytes
    tokens: int


class Observer(Protocol):
    """Tiers, for instance. Its calls come in the middle of others: they raise nothing, wait for
    nothing and change nothing here."""

    def cached(self, new: NewlyCached) -> None:
        """To be kept elsewhere too: its bytes are right for whatever comes next on the current
        stream, until `before_reuse`."""

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """A request was admitted with this prompt, and goes on from this match."""

    def before_reuse(self) -> None:
        """Blocks or snapshot rows are about to be used for something else: what comes next on the
        current stream may write there."""


class Notices:
    """What the parts of a prefix cache tell the observer, if it has one."""

    def __init__(self, block_tokens: int, *, has_state_bytes: bool) -> None:
        self.observer: Observer | None = None
        self._block_tokens = block_tokens
        self._has_state_bytes = has_state_bytes  # else snapshots are empty: none is kept elsewhere

    def cached(self, node: PrefixNode, trail: TokenTrail, *, is_snapshot: bool = False) -> None:
        """`trail` has the tokens of the block, which are all known."""
        if self.observer is None or (is_snapshot and not self._has_state_bytes):
            return
        parent = trail.chain[node.depth - 1] if node.depth else trail.root
        tokens = (node.depth + 1) * self._block_tokens
        self.observer.cached(NewlyCached(node, is_snapshot, parent, tokens))

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        if self.observer is not None:
            self.observer.used(match, trail)

    def before_reuse(self) -> None:
        if self.observer is not None:
            self.observer.before_reuse()
