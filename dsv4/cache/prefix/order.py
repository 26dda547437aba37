"""The order in which offered blocks go: heaps by kind, in which void entries are passed over.
Torch-free.

A policy has one order of all blocks and one more for each tenant with a quota, whose blocks are in
both. An entry counts as long as its number is the block's (`PrefixNode.queued`): what is taken from
one order is void in the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, TypeVar

from dsv4.cache.prefix.node import PrefixNode

N = TypeVar("N", bound=Hashable)
Entry = tuple[float, int, PrefixNode]  # what the heap is sorted by, the number, the block
FEW = 64  # entries that are kept without a look at whether they are void


class Order(Generic[N]):
    """Heaps by name. `push` and `pop` take O(log n), seen over many."""

    def __init__(self) -> None:
        self.heaps: dict[N, list[Entry]] = {}
        self._entries, self._most = 0, FEW

    def push(self, name: N, by: float, node: PrefixNode) -> None:
        """Under the number that the block has now."""
        self._entries += 1
        if self._entries > self._most:
            self._clear()
        heapq.heappush(self.heaps.setdefault(name, []), (by, node.queued, node))

    def pop(self, name: N) -> PrefixNode | None:
        """The first entry of a heap that has one, removed: its block, which is not offered any
        more, or None for a void entry."""
        self._entries -= 1
        _, number, node = heapq.heappop(self.heaps[name])
        if node.queued != number:
            return None
        node.queued = 0
        return node

    def _clear(self) -> None:
        """Removes void entries once they may be most of them."""
        for heap in self.heaps.values():
            heap[:] = [entry for entry in heap if entry[2].queued == entry[1]]
            heapq.heapify(heap)
        self._entries = 1 + sum(map(len, self.heaps.values()))
        self._most = FEW + 2 * self._entries


class Orders(Generic[N]):
    """The order of all blocks, and those of tenants that are kept apart."""

    def __init__(self) -> None:
        self.all = Order[N]()
        self._apart: dict[bytes, Order[N]] = {}

    def of(self, root: bytes | None) -> Order[N]:
        """Of one tenant, or of all, also for one that is not kept apart."""
        return self.all if root is None else self._apart.get(root, self.all)

    def push(self, name: N, by: float, node: PrefixNode) -> None:
        self.all.push(name, by, node)
        if self._apart and (own := self._apart.get(node.root)) is not None:
            own.push(name, by, node)

    def clear(self) -> None:
        """Nothing is offered any more."""
        self.all = Order[N]()
        self._apart = {root: Order[N]() for root in self._apart}

    def keep_apart(
        self,
        roots: Iterable[bytes],
        nodes: Collection[PrefixNode],
        push: Callable[[PrefixNode], None],
    ) -> None:
        """Keeps these tenants apart and no others. `push` offers a block anew."""
        kept, wanted = self._apart, dict.fromkeys(roots)
        self._apart = {root: kept[root] if root in kept else Order[N]() for root in wanted}
        for node in nodes if wanted.keys() - kept.keys() else ():
            if node.queued > 0 and node.root in wanted and node.root not in kept:
                push(node)
