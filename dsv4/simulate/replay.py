"""Runs a trace through the prefix index with an eviction policy. Torch-free, except for what the
schema needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dsv4.cache.allocator import BlockAllocator
from dsv4.cache.prefix.costs import Costs
from dsv4.cache.prefix.eviction import EvictionPolicy
from dsv4.cache.prefix.index import PrefixIndex
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prefix.retention import Retention
from dsv4.cache.schema import CacheSchema
from dsv4.errors import require_count
from dsv4.simulate.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a trace found cached. `index_s` is the time that the host spent in the index and the
    policy; divided by admissions and evictions it says what one costs."""

    requests: int
    tokens_asked: int
    tokens_hit: int
    blocks_cached: int
    evictions: int
    index_s: float
    evict_s: float

    @property
    def hit_rate(self) -> float:
        return self.tokens_hit / self.tokens_asked if self.tokens_asked else 0.0


class CountedMemory:
    """A prefix cache of a number of blocks that have no bytes. One request runs at a time."""

    def __init__(self, schema: CacheSchema, num_blocks: int, policy: EvictionPolicy) -> None:
        self.schema = schema
        self.allocator = BlockAllocator(require_count("num_blocks", num_blocks))
        self.index = PrefixIndex(self.allocator, policy)
        if isinstance(policy, Retention):
            policy.costs = Costs.of(schema)
        self.evict_s = 0.0

    def run(self, request: TraceRequest) -> int:
        """Admits a request, caches its whole blocks and releases it. Returns how many of its tokens
        were cached; the last one always runs. What does not fit is not cached."""
        block_tokens = self.schema.block_tokens
        names = request.names[: min(request.input_tokens // block_tokens, self.allocator.total)]
        most = max(0, request.input_tokens - 1) // block_tokens
        digests = [name.to_bytes(8, "little", signed=True) for name in names]
        found = self._match(digests, most)
        held = [node.block_id for node in found]
        self.allocator.share(held)
        last = found[-1] if found else None
        if last is not None:
            self.index.policy.returned(last)
        node = last
        for block_id, digest in zip(
            self._take(len(digests) - len(found)), digests[len(found) :], strict=True
        ):
            held.append(block_id)
            known = self.index.get(digest)
            node = known if known is not None else self.index.add(digest, block_id, node)
        if node is not None:
            self.index.touch(node)
        self.allocator.release(held)
        return len(found) * block_tokens

    def _match(self, digests: list[bytes], most: int) -> list[PrefixNode]:
        found: list[PrefixNode] = []
        for digest in digests[:most]:
            node = self.index.get(digest)
            if node is None:
                break
            found.append(node)
        return found

    def _take(self, count: int) -> list[int]:
        short = count - self.allocator.free
        if short > 0:
            began = time.perf_counter()
            self.index.drop(self.index.choose(short))
            self.evict_s += time.perf_counter() - began
        return self.allocator.take(count)


def replay(
    trace: Iterable[TraceRequest],
    schema: CacheSchema,
    policy: Callable[[], EvictionPolicy],
    *,
    capacity_bytes: int,
) -> Replayed:
    """One request after the other, each as if it ended before the next one came. `names` of the
    trace must be of blocks of `schema.block_tokens` tokens. Raises InvalidInput."""
    blocks = require_count("capacity_bytes", capacity_bytes) // schema.bytes.block
    memory = CountedMemory(schema, blocks, policy())
    requests = asked = hit = 0
    began = time.perf_counter()
    for request in trace:
        requests, asked = requests + 1, asked + request.input_tokens
        hit += memory.run(request)
    return Replayed(
        requests=requests,
        tokens_asked=asked,
        tokens_hit=hit,
        blocks_cached=len(memory.index),
        evictions=memory.index.evictions,
        index_s=time.perf_counter() - began,
        evict_s=memory.evict_s,
    )
