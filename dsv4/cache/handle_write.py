"""The writing half of a layer's handle."""

from __future__ import annotations

from torch import Tensor

from dsv4.cache import checks
from dsv4.cache.handle_base import LayerAccess
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CompressorLayout
from dsv4.errors import PlanError
from dsv4.ops.calls import (
    CompressorWeights,
    CompressorWrite,
    LayerWeights,
    StepTensors,
    WindowWrite,
)


class LayerWrites(LayerAccess):
    """Calls launch kernels and do nothing else: no allocation, no synchronisation, the same
    launches whatever the lengths are."""

    def append(
        self,
        kv: Tensor,
        c: Tensor | None = None,
        z: Tensor | None = None,
        index_c: Tensor | None = None,
        index_z: Tensor | None = None,
        *,
        weights: LayerWeights,
    ) -> None:
        """All that this layer writes in the step: one launch in a decode step, two in a chunk.

        Rows are the plan's tokens in its order (padding rows included, their content ignored): `kv`
        [tokens, head_dim], bf16 or, where the format keeps it, fp32; `c`, `z` fp32
        [tokens, columns] are the compressor's value and gate projections, columns
        [previous | current] for CSA; `index_c`, `index_z` the indexer's.
        Window rows go to the ring, projections to the tails, closed groups to their blocks.
        Raises InvalidInput or PlanError before anything is launched.
        """
        plan = self._unwritten_plan()
        window = self._window_write(plan, kv, weights)
        writes = self._compressor_writes(plan, weights, c, z, index_c, index_z)
        step = self.step_tensors(plan, weights)
        if plan.captures is not None:
            plan.captures.take_tails(self.layer, self._slot_arena, writes)
        self.backend.append(step, window, writes)
        self._note_append(plan)

    def write_swa(self, kv: Tensor, *, weights: LayerWeights) -> None:
        """The window rows alone. Wrap-around leaves exactly the newest ring-full."""
        plan = self._unwritten_plan()
        window = self._window_write(plan, kv, weights)
        self.backend.append(self.step_tensors(plan, weights), window, ())
        self._note_append(plan)

    def write_tail(
        self,
        c: Tensor,
        z: Tensor,
        index_c: Tensor | None = None,
        index_z: Tensor | None = None,
        *,
        weights: LayerWeights,
    ) -> None:
        """The projections into the tails alone; `flush_compression` then closes groups from them.

        Only for narrow steps: a tail holds no more than a group and the drafts.
        """
        plan = self._narrow_plan("write_tail")
        writes = self._compressor_writes(plan, weights, c, z, index_c, index_z, compress=False)
        self.backend.append(self.step_tensors(plan, weights), None, writes)

    def flush_compression(self, *, weights: LayerWeights) -> None:
        """Closes every group that ends in this step, from the tails, and stores the entries.

        Always the same launch; whether anything closes is decided on the device.
        """
        plan = self._narrow_plan("flush_compression")
        writes = [
            self._compressor_write(plan, layout, w, name, None, None, write_tails=False)
            for layout, w, name in (
                (self.main, weights.compressor, ""),
                (self.index, weights.index_compressor, "index_"),
            )
            if layout is not None
        ]
        self.backend.append(self.step_tensors(plan, weights), None, writes)

    def compress_tail(self, layout: CompressorLayout, weights: LayerWeights, out: Tensor) -> None:
        """Closed groups into `out` [work items, width], of the format's value type, and not into
        blocks."""
        plan = self._narrow_plan("compress_tail")
        chosen = weights.index_compressor if layout.hadamard else weights.compressor
        name = "index_" if layout.hadamard else ""
        write = self._compressor_write(
            plan, layout, chosen, name, None, None, write_tails=False, dense=out
        )
        self.backend.append(self.step_tensors(plan, weights), None, (write,))

    def write_entry_records(
        self, layout: CompressorLayout, block_id: Tensor, page_row: Tensor, rows: Tensor
    ) -> None:
        """`rows` into this layer's pages; a negative `block_id` writes nothing."""
        self.backend.write_records(self._block_arena, layout.page, block_id, page_row, rows)

    def step_tensors(self, plan: ForwardPlan, weights: LayerWeights) -> StepTensors:
        checks.rope_table(
            weights.rope, self._model.rope_dim, self._max_context, self._slot_arena.device
        )
        return StepTensors(
            block_arena=self._block_arena,
            slot_arena=self._slot_arena,
            block_table=self.block_table,
            batch=plan.batch,
            tokens=plan.tokens,
            window=plan.window,
            rope=weights.rope,
            rms_eps=self._model.rms_eps,
            narrow=plan.narrow,
            scratch=self._buffers.scratch,
            arrived=self._buffers.arrived,
        )

    def _note_append(self, plan: ForwardPlan) -> None:
        if plan.captures is not None:
            plan.captures.take_window(self.layer, self._buffers.staging, self._buffers.staging_page)
        plan.note_append(self.layer)

    def _unwritten_plan(self) -> ForwardPlan:
        """A wide step overwrites the rows it has staged, so each layer writes it once."""
        plan = self.open_plan()
        if self.layer in plan.appended_layers and not plan.narrow:
            raise PlanError(
                f"layer {self.layer} has appended this plan already: a wide step is not repeatable"
            )
        return plan

    def _compressor_writes(
        self,
        plan: ForwardPlan,
        weights: LayerWeights,
        c: Tensor | None,
        z: Tensor | None,
        index_c: Tensor | None,
        index_z: Tensor | None,
        *,
        compress: bool = True,
    ) -> list[CompressorWrite]:
        return [
            self._compressor_write(plan, layout, given, name, values, gates, compress=compress)
            for layout, given, name, values, gates in (
                (self.main, weights.compressor, "", c, z),
                (self.index, weights.index_compressor, "index_", index_c, index_z),
            )
            if checks.wanted(layout, f"{name}c", values, f"{name}z", gates, self.layer)
        ]

    def _window_write(self, plan: ForwardPlan, kv: Tensor, weights: LayerWeights) -> WindowWrite:
        page = self._swa_view.page
        device = self._slot_arena.device
        checks.rows("kv", kv, plan.padded_tokens, page.format.width, self._value_dtype, device)
        if weights.kv_norm is not None:
            checks.vector("kv_norm", weights.kv_norm, (page.format.width,), device)
        return WindowWrite(
            page=page,
            kv=kv,
            norm=weights.kv_norm,
            window=self.schema.window,
            staging=None if plan.narrow else self._buffers.staging,
            staging_page=None if plan.narrow else self._buffers.staging_page,
        )

    def _compressor_write(
        self,
        plan: ForwardPlan,
        layout: CompressorLayout | None,
        weights: CompressorWeights | None,
        name: str,
        c: Tensor | None,
        z: Tensor | None,
        *,
        compress: bool = True,
        write_tails: bool = True,
        dense: Tensor | None = None,
    ) -> CompressorWrite:
        assert layout is not None
        device = self._slot_arena.device
        weights = checks.given(f"weights.{name}compressor", weights, self.layer)
        checks.vector(f"{name}ape", weights.ape, (layout.ratio, layout.columns), device)
        checks.vector(f"{name}norm", weights.norm, (layout.width,), device)
        for label, tensor in ((f"{name}c", c), (f"{name}z", z)):
            if tensor is not None:
                checks.rows(label, tensor, plan.padded_tokens, layout.columns, "float32", device)
        items = plan.items[layout.ratio]
        if dense is not None:
            record = layout.page.format
            checks.rows("out", dense, items.shape[0], layout.width, record.value_dtype, device)
            checks.contiguous("out", dense)
        return CompressorWrite(
            layout=layout,
            items=items,
            ape=weights.ape,
            norm=weights.norm,
            c=c,
            z=z,
            compress=compress,
            write_tails=write_tails,
            dense=dense,
        )
