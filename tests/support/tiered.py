"""Managers with tiers, for tests: what was cached comes back, and is compared with a cold run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.cache.transfers.fetch import Fetch
from dsv4.errors import OutOfBlocks, OutOfSlots
from dsv4.tiers.disk import DiskTier
from dsv4.tiers.host import HostTier
from dsv4.tiers.tier import Tier
from tests.support.lives import TINY, Text, assert_cold, run_to, tiny_stack
from tests.support.stack import POISON, Stack, logical_bytes
from tests.support.tiers import PATIENT

SCHEMA = CacheSchema.build(TINY, max_context=2048)
BLOCK = SCHEMA.block_tokens
T = TypeVar("T")
TIMEOUT_S = 120.0  # where nothing is to be late, on the slowest machine


def options(policy: SnapshotPolicy | None = None, **more: Any) -> PrefixOptions:
    return PrefixOptions(policy=policy or full(), snapshots=8, model_id="tiny 1", **more)


def stack_with(
    tiers: Sequence[Tier], *, drafts: int = 0, state: HcaState = "raw", **more: Any
) -> Stack:
    more.setdefault("prefix", options())
    more.setdefault("num_blocks", 12)
    return tiny_stack(drafts, state, tiers=tiers, **more)


def disk(root: Path, **more: Any) -> DiskTier:
    return DiskTier(root / "tier", 1 << 30, **{"limits": PATIENT, **more})


def run(stack: Stack, text: Text, tokens: int) -> Request:
    """Runs a prompt as an engine does that has tiers."""
    request = stack.manager.tiers.admit(text.ids[:tokens], timeout_s=TIMEOUT_S)
    run_to(stack, request, text, tokens)
    return request


def keep(stack: Stack, text: Text, tokens: int) -> None:
    """A prompt that is computed, released and kept below."""
    request = run(stack, text, tokens)
    stack.manager.release_request(request)
    assert stack.manager.tiers.drain(TIMEOUT_S)
    stack.manager.check_invariants()


def empty(stack: Stack) -> None:
    """Nothing is cached on the device, and what is free is poisoned."""
    stack.manager.prefix.evict()
    assert stack.manager.stats().blocks_free == stack.manager.stats().blocks_total
    stack.manager.memory.block_arena.bytes.fill_(POISON)
    stack.manager.memory.slot_arena.bytes.fill_(POISON)
    assert stack.manager._parts.prefix
    stack.manager._parts.prefix.pool.bytes.fill_(POISON)


def assert_like_cold(stack: Stack, request: Request, text: Text) -> None:
    """All bytes that can be read, and of whole blocks all bytes, are those of a cold run."""
    assert_cold(stack, request, text.stream)
    length = request.length // BLOCK * BLOCK
    cold = Stack(stack.schema, layers=stack.layers, num_blocks=length // BLOCK, max_requests=1)
    cold.weights = stack.weights
    alone = cold.manager.admit_request(length)
    run_to(cold, alone, text.stream, length)
    expected, _ = logical_bytes(cold, alone)
    found, _ = logical_bytes(stack, request)
    kept = plane_bytes(stack.schema)
    assert kept.sum() > 0.9 * stack.schema.bytes.block
    assert torch.equal(found[: len(expected), kept], expected[:, kept])


def plane_bytes(schema: CacheSchema) -> Tensor:
    """bool [block_bytes]: what belongs to a plane. Padding is poison where a step wrote around it
    and zero where a state was put back."""
    kept = torch.zeros(schema.bytes.block, dtype=torch.bool)
    for page in schema.layout.pages:
        if page.kind != "window":
            kept[page.offset_bytes : page.offset_bytes + page.payload_bytes] = True
    return kept


class TieredLife(ABC, Generic[T]):
    """What happens to requests of a random life above tiers, whatever their texts are."""

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.manager: KVCacheManager
        self.live: dict[Request, T] = {}
        self.away: list[tuple[T, int]] = []  # suspended, and with how many tokens
        self.fetches: list[Fetch] = []
        self.resumed = 0  # requests that continued after something

    @abstractmethod
    def ids_of(self, text: T) -> Any: ...

    def release(self) -> None:
        if self.live:
            request = self.draw.choice(list(self.live))
            del self.live[request]
            self.manager.release_request(request)

    def suspend(self) -> None:
        if self.live:
            request = self.draw.choice(list(self.live))
            text = self.live.pop(request)
            if request.length:
                self.away.append((text, request.length))
            self.manager.tiers.suspend(request)

    def resume(self) -> None:
        if not self.away:
            return
        text, tokens = self.draw.choice(self.away)
        try:
            ids = self.ids_of(text)[:tokens]
            request = self.manager.tiers.resume(ids, timeout_s=TIMEOUT_S)
        except (OutOfBlocks, OutOfSlots):
            return self.release()
        self.resumed += request.resume.start > 0
        self.live[request] = text

    def move_fetch(self) -> None:
        for fetch in self.fetches:
            if self.draw.random() < 0.3:
                fetch.cancel()
            fetch.poll()
        self.fetches = [fetch for fetch in self.fetches if not fetch.done]


class Places:
    """The tiers of one machine, made anew as after a restart."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind, self.root = kind, root
        self.tiers = self.make()

    def make(self) -> list[Tier]:
        tiers: list[Tier] = []
        if "host" in self.kind:
            tiers.append(HostTier(8 << 20))
        if "disk" in self.kind:
            tiers.append(disk(self.root))
        return tiers

    def close(self) -> None:
        for tier in self.tiers:
            tier.close(TIMEOUT_S)
