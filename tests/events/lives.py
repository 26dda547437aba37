"""Random lives of a cache: prompts that share beginnings come, end and are evicted. No layer writes
anything: only what is cached where matters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, zero
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.tiers.host import HostTier
from dsv4.tiers.record import Key, Kind
from tests.events.consumer import TIMEOUT_S

SCHEMA = CacheSchema.build(ModelSpec.preset("tiny"), max_context=4096)
BLOCK = SCHEMA.block_tokens
SALTS = (None, "a tenant", "another")
Asked = tuple[list[int], str | None]


def make(num_blocks: int = 24, **more: Any) -> KVCacheManager:
    more.setdefault("prefix", PrefixOptions(policy=zero(), model_id="tiny 1"))
    return KVCacheManager(
        SCHEMA, num_blocks=num_blocks, max_requests=4, backend="reference", **more
    )


class Lives:
    """Of one manager, drawn from a seed."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        self.manager, self.draw = manager, random.Random(seed)
        self.asked: list[Asked] = []

    def prompt(self, blocks: int = 8) -> Asked:
        """New, or like an earlier one up to somewhere."""
        salt = self.draw.choice(SALTS)
        start: list[int] = []
        if self.asked and self.draw.random() < 0.7:
            start, salt = self.draw.choice(self.asked)
            start = start[: self.draw.randrange(len(start) + 1)]
        count = self.draw.randrange(1, blocks * BLOCK)
        fresh = [self.draw.randrange(1000) for _ in range(max(0, count - len(start)))]
        return [*start, *fresh], salt

    def run(self, asked: Asked, **more: Any) -> None:
        """A request with this prompt comes and ends."""
        ids, salt = asked
        if self.manager.tiers:
            request = self.manager.tiers.admit(ids, salt, timeout_s=TIMEOUT_S)
        else:
            request = self.manager.admit_request(ids, salt, **more)
        while request.length < len(ids):
            count = min(512, len(ids) - request.length)
            plan = self.manager.prepare_forward([(request, count)])
            plan.mark_appended(set(SCHEMA.backbone_layers))
            self.manager.commit(plan, ids=ids[request.length : request.length + count])
        self.manager.release_request(request)
        self.asked.append(asked)

    def some(self, count: int) -> None:
        """Requests, and now and then an eviction."""
        for _ in range(count):
            self.run(self.prompt())
            if self.draw.random() < 0.2:
                self.manager.prefix.evict(self.draw.randrange(1, 6))
        if self.manager.tiers:
            assert self.manager.tiers.drain(TIMEOUT_S)

    def questions(self, count: int) -> list[Asked]:
        return [self.prompt(blocks=10) for _ in range(count)]


def cached(manager: KVCacheManager, asked: Asked, *, tiers: Sequence[Any] = ()) -> list[int]:
    """How many blocks of a prompt there are: on the device, then on in each of the tiers."""
    prefix = manager._parts.prefix
    assert prefix
    trail = manager.prefix.prompt(*asked).trail
    assert trail is not None
    count = prefix.index.count(trail.chain)
    found = [count]
    for tier in tiers:
        while count < len(trail.chain) and _holds(tier, Key(Kind.BLOCK, trail.chain[count])):
            count += 1
        found.append(count)
    return found


def _holds(tier: Any, key: Key) -> bool:
    return tier.holds(key) if isinstance(tier, HostTier) else tier._shelves.exists(key)
