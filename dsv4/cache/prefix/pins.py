"""Prefixes that stay cached, even under memory pressure, until they are unpinned. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.errors import InvalidInput


@dataclass(frozen=True, slots=True, eq=False)
class PinnedPrefix:
    """The first `tokens` tokens of some prompt, which stay cached until they are unpinned. A fetch
    does that when it has finished; a pin of the caller's is `lasting`."""

    tokens: int
    nodes: tuple[PrefixNode, ...]
    lasting: bool = True


class Pins:
    """A pin keeps the last block of a prefix, with all before it, and the snapshots to resume
    from there."""

    def __init__(self, index: PrefixIndex, block_tokens: int) -> None:
        self._index, self._block_tokens = index, block_tokens
        self._standing: set[PinnedPrefix] = set()
        self._block_ids: frozenset[int] | None = None  # what pins keep; None: not known

    def pin(
        self,
        trail: TokenTrail,
        hand_out: Callable[[object], None] | None = None,
        *,
        lasting: bool = True,
    ) -> PinnedPrefix:
        nodes = self._index.match(trail, len(trail.ids) // self._block_tokens)
        if not nodes:
            raise InvalidInput("nothing of this prefix is cached: run it once before pinning it")
        # the same prompt again resumes one block earlier than one that continues it
        resumed = [node for node in reversed(nodes) if node.snapshot is not None][:2]
        kept = [nodes[-1], *resumed]
        pin = PinnedPrefix(len(nodes) * self._block_tokens, tuple(kept), lasting)
        if hand_out is not None:
            hand_out(pin)
        for node in kept:
            node.pins += 1
        self._standing.add(pin)
        self._block_ids = None
        return pin

    def unpin(self, pin: PinnedPrefix) -> None:
        if not isinstance(pin, PinnedPrefix) or pin not in self._standing:
            raise InvalidInput(f"{pin!r} is not pinned here: give what pin returned, once")
        self._block_ids = None
        self._standing.remove(pin)
        for node in pin.nodes:
            node.pins -= 1

    def block_ids(self) -> frozenset[int]:
        """Blocks that pins keep, with all before them."""
        if self._block_ids is None:
            self._block_ids = _ids_up_to(tuple(self._standing))
        return self._block_ids

    def lasting_blocks(self, excluding: Collection[int]) -> Collection[int]:
        """Blocks that the caller's pins keep, with all before them, except the given ones."""
        lasting = [pin for pin in tuple(self._standing) if pin.lasting]
        return _ids_up_to(lasting).difference(excluding)


def _ids_up_to(pins: Iterable[PinnedPrefix]) -> frozenset[int]:
    kept: set[PrefixNode] = set()
    for pin in pins:
        node: PrefixNode | None = pin.nodes[0]
        while node is not None and node not in kept:
            kept.add(node)
            node = node.parent
    return frozenset(node.block_id for node in kept)
