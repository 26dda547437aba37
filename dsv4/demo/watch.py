"""Watches every forward of a model while `generate` runs it, and makes an event of what the cache
did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.demo.events import CacheState, DemoEvent, StepEvent
from dsv4.integrations.transformers import PagedCache, transformers_cache_bytes
from dsv4.integrations.transformers.model import cache_schema

TRAINED_RECORDS = "fp8_ds"

Emit = Callable[[DemoEvent], None]


class Watcher:
    """Steps of one part of the demo. `transformers_bytes[step]` are those of transformers' own
    caches after each step: recorded where their cache is used, otherwise compared with."""

    def __init__(
        self, part: str, names: Sequence[str], emit: Emit, transformers_bytes: Sequence[int] = ()
    ) -> None:
        self.part, self.names, self._emit = part, names, emit
        self.transformers_bytes = list(transformers_bytes)
        self.chosen: dict[str, list[int]] = {name: [] for name in names}
        self._records = not transformers_bytes
        self._step = 0
        self._state: CacheState | None = None
        self._trained: CacheSchema | None = None

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        hook = model.register_forward_hook(self._see)
        try:
            yield
        finally:
            hook.remove()

    def _see(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        cache = output.past_key_values
        if isinstance(cache, PagedCache):
            lengths = [request.length for request in cache.requests]
            if self._trained is None:
                most = cache.manager.schema.max_context
                self._trained = cache_schema(model, max_context=most, records=TRAINED_RECORDS)
            self._state = cache_state(cache.manager, cache.requests, self._state, self._trained)
        else:
            lengths = [cache.get_seq_length()] * len(self.names)
            if self._records:
                self.transformers_bytes.append(transformers_cache_bytes(cache))
        newest = torch.argmax(output.logits[:, -1], dim=-1).tolist()
        for name, token in zip(self.names, newest, strict=True):
            self.chosen[name].append(token)
        self._emit(
            StepEvent(
                part=self.part,
                step=self._step,
                lengths=dict(zip(self.names, lengths, strict=True)),
                chosen={name: list(tokens) for name, tokens in self.chosen.items()},
                transformers_bytes=self.transformers_bytes[self._step],
                cache=self._state,
            )
        )
        self._step += 1


def cache_state(
    manager: KVCacheManager,
    requests: Sequence[Request],
    before: CacheState | None,
    trained: CacheSchema,
) -> CacheState:
    stats = manager.stats()
    entries = entries_by_kind(manager.schema, [request.length for request in requests])
    return CacheState(
        blocks_live=stats.blocks_live,
        blocks_total=stats.blocks_total,
        slots_live=stats.requests_live,
        slots_total=stats.slots_total,
        blocks_taken=stats.blocks_live - (before.blocks_live if before else 0),
        closed={kind: n - (before.entries[kind] if before else 0) for kind, n in entries.items()},
        entries=entries,
        block_bytes=stats.block_bytes_live,
        slot_bytes=stats.slot_bytes_live,
        trained_bytes=stats.blocks_live * trained.block_bytes
        + stats.requests_live * trained.slot_bytes,
    )


def entries_by_kind(schema: CacheSchema, lengths: Sequence[int]) -> dict[str, int]:
    """Entries that requests of these lengths have, over all layers of a kind."""
    entries: dict[str, int] = {}
    for layer in schema.layers:
        if layer.spec.owns_entries:
            kind = layer.spec.attention.value
            count = sum(length // layer.spec.ratio for length in lengths)
            entries[kind] = entries.get(kind, 0) + count
    return entries
