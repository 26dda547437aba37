"""A layer's handle where entries may be in host memory: it writes them to rows of their own, and
reads them wherever they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.handle import EntryRecords, LayerCacheHandle
from dsv4.cache.memory import LayerMemory
from dsv4.cache.repeats import Key, Repeats
from dsv4.cache.residency.chunks import Group
from dsv4.cache.views import ClassicalView
from dsv4.cache.workspace import Workspace
from dsv4.errors import InvalidInput, SchemaMismatch
from dsv4.ops.backend import Backend
from dsv4.ops.calls import Attention, LayerWeights, StepTensors


class ResidentHandle(LayerCacheHandle):
    """The calls are the same. Views and gathers of entries that may be in host memory are refused:
    only `attend` finds them."""

    def __init__(self, memory: LayerMemory, backend: Backend, workspace: Workspace) -> None:
        super().__init__(memory, backend, workspace)
        shared = memory.shared
        apart = shared.entries
        (lane_entries,) = (each.entries for each in shared.lanes if each.workspace is workspace)
        assert apart is not None
        assert lane_entries is not None
        self._apart, self._lane_entries = apart, lane_entries
        self._chunks = lane_entries.chunks
        self._is_apart = memory.entries is not None and memory.entries.page.apart
        self._repeats = Repeats(
            backend,
            (
                *(self._block_arena, self._slot_arena, self._block_table),
                *(*workspace.tensors, *apart.tensors, *lane_entries.tensors),
            ),
        )

    # ---- what is refused -----------------------------------------------------------------------

    def read_classical_view(self) -> ClassicalView:
        """As of any handle, if the layer's entries stay on the device; otherwise raises
        SchemaMismatch."""
        self._require_on_device("a view of them")
        return super().read_classical_view()

    def gather_compressed_kv(self, indices: Tensor, out: Tensor | None = None) -> Tensor:
        """As `read_classical_view`."""
        self._require_on_device("a gather")
        return super().gather_compressed_kv(indices, out)

    def gather_all_compressed_kv(
        self, out: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `read_classical_view`."""
        self._require_on_device("a gather")
        return super().gather_all_compressed_kv(out, lengths)

    def write_entries(self, records: Sequence[EntryRecords]) -> None:
        """As `read_classical_view`."""
        self._require_on_device("writing records to blocks")
        super().write_entries(records)

    def _require_on_device(self, what: str) -> None:
        """SchemaMismatch for a layer whose entries may be in host memory."""
        if self._is_apart:
            raise SchemaMismatch(
                f"entries of layer {self.layer} may be in host memory, where only attend finds "
                f"them: {what} needs a manager without host_memory"
            )

    # ---- writes --------------------------------------------------------------------------------

    def _step_tensors(self, batch: Batch, weights: LayerWeights) -> StepTensors:
        return replace(
            super()._step_tensors(batch, weights),
            entries_arena=self._apart.arena.bytes,
            entry_table=self._apart.table,
        )

    # ---- reads ---------------------------------------------------------------------------------

    def _repeated(
        self,
        batch: Batch,
        call_key: Key,
        given: Sequence[Tensor | None],
        build: partial[list[partial[None]]],
        *,
        begin: bool = False,
    ) -> None:
        if batch.is_decode and call_key[0] == "attend":
            self._apart.forget_lost()  # if an error came before this call
            try:
                super()._repeated(batch, call_key, given, build, begin=begin)
            except BaseException:
                self._apart.lost.update(batch.shape.slots.tolist())
                raise
            return
        groups = self._chunks.groups_of(batch) if self._is_apart else None
        if groups is not None and call_key[0] == "attend":
            if len(groups) > 1:  # where one ends and the next begins is not in the key
                for call in build():
                    call()
                return
            call_key = (*call_key, "staged", self._chunks.bring(self.backend, self.layer, 0))
        super()._repeated(batch, call_key, given, build, begin=begin)

    def _attend_calls(self, batch: Batch, *given: Any) -> list[partial[None]]:
        calls = super()._attend_calls(batch, *given)
        if not self._is_apart:
            return calls
        (attention,) = calls[0].args
        if batch.is_decode:
            return self._fetching(batch, attention)
        groups = self._chunks.groups_of(batch)
        if groups is None:
            return calls
        if len(groups) == 1:  # and it is there
            half = self._chunks.half_of(self.layer, 0)
            return [partial(self.backend.attend, self._reading(attention, half))]
        return [partial(self._attend_group, attention, *each) for each in enumerate(groups)]

    def _fetching(self, batch: Batch, attention: Attention) -> list[partial[None]]:
        """A decode batch fetches the entries that it selected and that are not on the device."""
        source, selected = attention.entries, attention.indices
        assert source is not None
        assert selected is not None
        if selected.shape[1] > self._model.index_topk:
            raise InvalidInput(
                f"indices of {selected.shape[1]} entries per token: with host_memory at most the "
                f"model's top_k of {self._model.index_topk} can be fetched"
            )
        resolving = self._lane_entries.resolving(batch, source, selected)
        found = replace(attention, entries=replace(source, resolved=True), indices=resolving.rows)
        return [
            partial(self.backend.resolve, resolving),
            partial(self.backend.attend, found),
        ]

    def _reading(self, attention: Attention, half: int) -> Attention:
        """What a chunk reads was brought to one place."""
        return replace(attention, entries=self._chunks.staged(self.layer, half))

    def _attend_group(self, attention: Attention, nth: int, group: Group) -> None:
        """Those requests of a batch whose entries find room together."""
        assert attention.indices is not None
        half, (_, tokens) = self._chunks.bring(self.backend, self.layer, nth), group
        part = replace(
            self._reading(attention, half),
            q=attention.q[tokens],
            tokens=attention.tokens[tokens],
            indices=attention.indices[tokens],
            out=attention.out[tokens],
            lse=attention.lse[tokens],
        )
        self.backend.attend(part)
