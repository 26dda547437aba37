"""What the cache of a demo holds after a step."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.demo.events import CacheState


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
        trained_bytes=stats.blocks_live * trained.bytes.block
        + stats.requests_live * trained.bytes.slot,
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
