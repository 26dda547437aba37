"""One layer's share of the slot arena: the window ring and the unfinished groups."""

from __future__ import annotations

from dsv4.cache.arena import Arena, LayerPlanes
from dsv4.cache.schema import CacheSchema


class StateCachePool(LayerPlanes):
    """Window ring and tails of one layer, [num_slots, rows, …].

    `swa_fp8`, `swa_rope`, `swa_inv`: ring row = token position modulo the ring's length.
    `tail_ka/za` (current stream) and `tail_kb/zb` (previous stream) likewise, and `index_tail_*`
    for the indexer's own compressor. HCA layers with online state have `tail_state` and no other
    tail: row p modulo its length holds maximum, sum and weighted sum after token p. Which rows are
    live follows from the request's length alone: see `swa_pos` and `tail_len`.
    """

    def __init__(self, schema: CacheSchema, arena: Arena, layer: int) -> None:
        super().__init__(schema, arena, layer, keeper=layer)
        self._schema = schema.layers[layer]

    def swa_pos(self, length: int) -> list[int]:
        """The token position that each ring row holds in a request of that length, for the newest
        `window` tokens; -1 in every other row."""
        rows, window = self._schema.ring_rows, self._schema.window
        positions = [-1] * rows
        for position in range(max(0, length - window), length):
            positions[position % rows] = position
        return positions

    def tail_len(self, length: int) -> int:
        """How many tokens of the unfinished group a request of that length has."""
        ratio = self._schema.spec.ratio
        return length % ratio if ratio else 0

    def reset_slot(self, slot: int) -> None:
        """Zeroes this layer's bytes of one slot. Reuse does not need it; erasing does."""
        for view in self._views.values():
            view[slot].zero_()
