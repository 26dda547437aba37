"""How blocks that requests complete get into the index. Torch-free.

Each block whose tokens are all known is cached, and a block that another request has cached before
is adopted in place of the own one, so that one copy is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.observer import Notices
from dsv4.cache.prefix.trail import TokenTrail


class Holder(Protocol):
    """A request, as far as its blocks go: in the order of its tokens."""

    block_ids: list[int]

    @property
    def trail(self) -> TokenTrail | None: ...


H = TypeVar("H", bound=Holder)
# a request takes cached blocks in place of its own, from the block of this number on
Adopt = Callable[[H, int, Sequence[int]], None]


class BlockCaching:
    """The part of caching that knows nothing of steps, states and devices."""

    def __init__(self, allocator: BlockAllocator, index: PrefixIndex, notices: Notices) -> None:
        self._allocator, self._index, self._notices = allocator, index, notices

    def note_release(self, request: Holder) -> None:
        if request.trail is not None and request.trail.chain:
            node = self._index.get(request.trail.chain[-1])
            if node is not None:
                self._index.touch(node)

    def cache_blocks(
        self, request: H, trail: TokenTrail, first: int, last: int, adopt: Adopt[H]
    ) -> Iterator[PrefixNode]:
        """Caches a request's complete blocks from `first` to `last`, whose tokens are all known, or
        adopts the equal block that is cached already."""
        cached = self._cache_next(request, trail, first) if last == first + 1 else None
        if cached is not None:
            yield cached
            return
        self._adopt_cached(request, trail, first, last, adopt)
        for block in range(first, last):
            node = self._cache_block(request, trail, block)
            if node is None:
                break
            yield node

    def _cache_next(self, request: Holder, trail: TokenTrail, block: int) -> PrefixNode | None:
        """The node of a block that a request has just completed after its own cached ones: what
        `_adopt_cached` and `_cache_block` do in the usual case. None in any other case, with
        nothing done."""
        trail.hash_blocks(block + 1)
        get, chain, block_ids = self._index.get, trail.chain, request.block_ids
        before = get(chain[block - 1]) if block else None
        if block and (before is None or before.block_id != block_ids[block - 1]):
            return None
        if get(chain[block]) is not None:
            return None
        node = self._index.add(
            chain[block], block_ids[block], before, hints=trail.hints, root=trail.root
        )
        self._notices.cached(node, trail)
        return node

    def _adopt_cached(
        self, request: H, trail: TokenTrail, first: int, last: int, adopt: Adopt[H]
    ) -> None:
        """Replaces complete blocks of a request, whose tokens are all known, by cached ones with
        the same tokens. Never one without those before it: a request that holds a cached block
        holds all before it, so that what is idle can be evicted. For the same reason none while
        the request shares the block after them, with a fork or an offer: that one keeps the old
        blocks."""
        first = min(first, last)
        while first:
            before = self._index.get(trail.digest(first - 1))
            if before is None or before.block_id == request.block_ids[first - 1]:
                break
            first -= 1
        cached = list[int]()
        for block in range(first, last):
            node = self._index.get(trail.digest(block))
            is_own = node is not None and node.block_id == request.block_ids[block]
            if is_own and not cached:  # the request began with it, and has replayed its tokens
                first += 1
                continue
            if node is None or is_own:
                break
            cached.append(node.block_id)
        after = request.block_ids[first + len(cached) :][:1]
        if cached and all(self._allocator.references(block_id) == 1 for block_id in after):
            adopt(request, first, cached)

    def _cache_block(self, request: Holder, trail: TokenTrail, block: int) -> PrefixNode | None:
        """The node of a complete block of a request, whose tokens are all known, made now if there
        is none; None if it follows the same tokens in another request's block. Blocks before it
        that were evicted are cached again."""
        node = self._index.get(trail.digest(block))
        first = block
        while node is None and first and (node := self._index.get(trail.chain[first - 1])) is None:
            first -= 1
        if first == block and node is not None and node.digest == trail.chain[block]:
            return node
        if node is not None and node.block_id != request.block_ids[first - 1]:
            return None  # another request was first; its blocks must not wait for this one's
        for nth in range(first, block + 1):
            block_id, hints = request.block_ids[nth], trail.hints
            node = self._index.add(trail.chain[nth], block_id, node, hints=hints, root=trail.root)
            self._notices.cached(node, trail)
        return node
