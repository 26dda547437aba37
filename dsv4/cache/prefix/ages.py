"""How long cached blocks live, lie unused, and wait for their next use: histograms. Torch-free."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.stats import Histogram

BOUNDS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0, 604800.0)


class Seconds:
    """Counts of seconds, by the first bound that is not smaller."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._total_s = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        seconds = max(0.0, seconds)
        self._counts[bisect_left(BOUNDS_S, seconds)] += count
        self._total_s += count * seconds

    def read(self) -> Histogram:
        return Histogram(bounds=BOUNDS_S, counts=tuple(self._counts), total=self._total_s)


class Ages:
    """What the index reports of its blocks. A block is used when an admission finds it, and until
    the request that has its prompt's last block ends: like the policy, a use of a block is one of
    all before it, and a block that goes passes its last use to the one before."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.lifetime, self.idle, self.gap = Seconds(), Seconds(), Seconds()

    def cached(self, node: PrefixNode) -> None:
        node.cached_s = node.found_s = node.used_s = self.now()

    def touched(self, node: PrefixNode) -> None:
        node.used_s = self.now()

    def found(self, nodes: Sequence[PrefixNode]) -> None:
        """An admission goes on after these blocks."""
        now, since_s, count = self.now(), 0.0, 0
        for node in nodes:
            if node.found_s != since_s:  # neighbours were mostly found at the same time
                if count:
                    self.gap.add(now - since_s, count)
                since_s, count = node.found_s, 0
            count += 1
            node.found_s = now
        if count:
            self.gap.add(now - since_s, count)
            nodes[-1].used_s = now

    def evicted(self, victims: Sequence[PrefixNode]) -> None:
        """Children before parents."""
        now = self.now() if victims else 0.0
        for node in victims:
            self.lifetime.add(now - node.cached_s)
            self.idle.add(now - node.used_s)
            if node.parent is not None:
                node.parent.used_s = max(node.parent.used_s, node.used_s)
