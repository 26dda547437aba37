"""What reading and writing a layer share: its places in the arenas, its views, its plan."""

from __future__ import annotations

from torch import Tensor

from dsv4.cache.paged_cache import PagedKVPool
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state_cache import StateCachePool
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.views import ClassicalView, IndexerView, SWAView, page_tensor
from dsv4.cache.workspace import Workspace
from dsv4.errors import PlanError, SchemaMismatch
from dsv4.ops.backend import Backend


class LayerAccess:
    """One layer of one manager, bound to a plan by `acquire`."""

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
        workspace: Workspace,
        backend: Backend,
    ) -> None:
        self.schema = schema.layers[layer]
        self.layer = layer
        self.pool = pool
        self.state = state
        self.backend = backend
        self.plan: ForwardPlan | None = None
        self.main = schema.compressor(layer, "tail")
        self.index = schema.compressor(layer, "index_tail")
        self._model = schema.model
        self._value_dtype = schema.entry_format.value_dtype
        self._index_dtype = schema.index_format.value_dtype
        self._max_context = schema.max_context
        self._buffers = buffers
        self._workspace = workspace
        self._block_arena, self._slot_arena = block_arena, slot_arena
        self.block_table = block_table
        self._swa_view, self._classical_view, self._indexer_view = self._make_views(schema)

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

    def open_plan(self) -> ForwardPlan:
        """The plan this handle is bound to. Raises PlanError if there is none or it is over."""
        if self.plan is None:
            raise PlanError(f"layer {self.layer} is not bound to a plan: acquire it with one")
        if self.plan.done:
            raise PlanError("this plan is over: prepare a new one for each step")
        return self.plan

    def _narrow_plan(self, call: str) -> ForwardPlan:
        plan = self.open_plan()
        if not plan.narrow:
            raise PlanError(
                f"{call} works from the tails, which hold a group and the drafts, but a request "
                f"has {plan.shape.most_tokens} tokens in this step: use append for a chunk"
            )
        return plan

    def _make_views(
        self, schema: CacheSchema
    ) -> tuple[SWAView, ClassicalView | None, IndexerView | None]:
        spec = self.schema.spec
        window_page = schema.page("window", self.layer)
        assert window_page is not None
        swa = SWAView(
            planes=self.state,
            pages=page_tensor(self._slot_arena, window_page),
            page=window_page,
            ring_rows=self.schema.ring_rows,
            window=self.schema.window,
        )
        classical = indexer = None
        entries_per_block = schema.layers[spec.owner].entries_per_block
        if page := schema.page("entries", self.layer):
            classical = ClassicalView(
                planes=self.pool,
                pages=page_tensor(self._block_arena, page),
                page=page,
                block_table=self.block_table,
                ratio=spec.ratio,
                entries_per_block=entries_per_block,
            )
        if page := schema.page("index_keys", self.layer):
            indexer = IndexerView(
                planes=self.pool,
                pages=page_tensor(self._block_arena, page),
                page=page,
                block_table=self.block_table,
                ratio=spec.ratio,
                entries_per_block=entries_per_block,
            )
        return swa, classical, indexer
