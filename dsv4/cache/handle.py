"""One layer's view of the cache for one call: what engines hold inside their attention layer."""

from __future__ import annotations

from torch import Tensor

from dsv4.cache.paged_cache import PagedKVPool
from dsv4.cache.prepare_forward import ForwardPlan, StepBuffers
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state_cache import StateCachePool
from dsv4.cache.views import ClassicalView, IndexerView, SWAView, page_tensor
from dsv4.errors import SchemaMismatch


class LayerCacheHandle:
    """Made once a layer by the manager and handed out by `acquire`, which binds it to a plan."""

    def __init__(
        self,
        *,
        schema: CacheSchema,
        layer: int,
        pool: PagedKVPool,
        state: StateCachePool,
        block_arena: Tensor,
        slot_arena: Tensor,
        block_table: Tensor,
        buffers: StepBuffers,
    ) -> None:
        self.schema = schema.layers[layer]
        self.layer = layer
        self.pool = pool
        self.state = state
        self.buffers = buffers
        self.plan: ForwardPlan | None = None
        spec = self.schema.spec
        owner = schema.layers[spec.owner]
        window_page = schema.page("window", layer)
        assert window_page is not None
        self._swa_view = SWAView(
            planes=state,
            pages=page_tensor(slot_arena, window_page),
            page=window_page,
            ring_rows=self.schema.ring_rows,
            window=self.schema.window,
        )
        self._classical_view: ClassicalView | None = None
        self._indexer_view: IndexerView | None = None
        if page := schema.page("entries", layer):
            self._classical_view = ClassicalView(
                planes=pool,
                pages=page_tensor(block_arena, page),
                page=page,
                block_table=block_table,
                ratio=spec.ratio,
                entries_per_block=owner.entries_per_block,
            )
        if page := schema.page("index_keys", layer):
            self._indexer_view = IndexerView(
                planes=pool,
                pages=page_tensor(block_arena, page),
                page=page,
                block_table=block_table,
                ratio=spec.ratio,
                entries_per_block=owner.entries_per_block,
            )

    def read_swa_view(self) -> SWAView:
        """The window ring of this layer."""
        return self._swa_view

    def read_classical_view(self) -> ClassicalView:
        """The compressed entries this layer reads. Raises SchemaMismatch for a window-only one."""
        if self._classical_view is None:
            raise SchemaMismatch(
                f"layer {self.layer} is {self.schema.spec.attention}: it has no compressed entries"
            )
        return self._classical_view

    def read_indexer_view(self) -> IndexerView:
        """The indexer keys this layer reads. Raises SchemaMismatch where there is no indexer."""
        if self._indexer_view is None:
            raise SchemaMismatch(
                f"layer {self.layer} is {self.schema.spec.attention}: it has no indexer keys"
            )
        return self._indexer_view
