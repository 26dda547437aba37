"""One layer's share of the block arena."""

from __future__ import annotations

from dsv4.cache.arena import Arena, LayerPlanes
from dsv4.cache.schema import CacheSchema


class PagedKVPool(LayerPlanes):
    """Compressed entries and indexer keys of one layer, [num_blocks, rows per block, …].

    With the default formats: `entries_fp8`, `entries_rope`, `inv_scale`, and for CSA
    `indexer_keys_fp4`, `indexer_scale`. A layer that reads another one's entries gets that layer's
    views.
    """

    def __init__(self, schema: CacheSchema, arena: Arena, layer: int) -> None:
        super().__init__(schema, arena, layer, keeper=schema.model.layers[layer].owner)
