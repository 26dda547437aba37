"""What a chunk reads of entries that are not all on the device: those of one layer lie in the
staging, while the next layer's come up from host memory.

    current stream    attend 1 | device 2 | attend 2 | device 3 | attend 3
    side stream       host 2 ------------->  host 3 ------------->

Blocks in host memory stay as they are while a plan is open, so their entries may come early. What
the step itself writes is on the device, and is copied when the layer is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.ops.backend import Backend
from dsv4.ops.calls import EntrySource, Staging, Which

# requests, and their tokens, that are staged together: where they begin and end in the batch
Group = tuple[slice, slice]
# one layer that owns entries, and which of the groups
Unit = tuple[int, int]


class SideStream:
    """Launches next to those of the current stream. What `run` launches waits for all that the
    current stream has to do now; what comes next there waits for it after `hold_back`. On a CPU it
    is over when `run` returns."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, call: Callable[[], None], uses: tuple[Tensor, ...]) -> Any:
        """What to give `hold_back`. `uses`: memory that is not free before the call has ended."""
        if self._stream is None:
            call()
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for tensor in uses:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            call()
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def hold_back(self, event: Any) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def hold_back_for_all(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


class ChunkEntries:
    """The staging of one lane. `rows` uint8 [2, blocks, bytes] is for two units, the one that is
    read and the one that comes next; `table` int32 [max_requests, blocks per request] says where
    in a unit the blocks of a request are.
    """

    def __init__(
        self,
        schema: CacheSchema,
        arena: Tensor,
        tables: tuple[Tensor, Tensor],
        host: Tensor | None,
        *,
        unit_bytes: int,
    ) -> None:
        entry_table, device = tables[0], tables[0].device
        self._tables, self._host = tables, host
        blocks = schema.max_blocks_per_request
        row_bytes = -(-unit_bytes // blocks)
        row_bytes = -(-row_bytes // schema.align_bytes) * schema.align_bytes
        self.rows = torch.empty((2, blocks, row_bytes), dtype=torch.uint8, device=device)
        self.table = torch.full_like(entry_table, -1)
        self._ramp = torch.arange(blocks, dtype=torch.int32, device=device)
        self.side = SideStream(device)
        self._batch: Batch | None = None
        self._groups: list[Group] = []
        self._held: list[Unit | None] = [None, None]
        self._coming: list[Any] = [None, None]  # what a reader has to wait for
        self._sources: dict[int, EntrySource] = {}
        # of a layer, the next one that reads entries of this kind, and the next that reads others
        self._next: dict[int, int] = {}
        self._next_others: dict[int, int] = {}
        alike: list[int] = []
        for layer in schema.layers:
            number, page = layer.spec.layer, schema.layout.page("entries", layer.spec.layer)
            if page is None or not page.apart:
                continue
            self._sources[number] = EntrySource(
                arena=arena, page=page, block_table=entry_table, ratio=layer.spec.ratio
            )
            if alike and not layer.spec.draft:  # chunks may leave these out
                self._next[alike[-1]] = number
                if self._sources[alike[-1]].page.layer != page.layer:
                    self._next_others |= dict.fromkeys(alike, number)
                    alike.clear()
            alike.append(number)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.rows, self.table, self._ramp

    # ---- a batch -------------------------------------------------------------------------------

    def begin(self, batch: Batch, blocks: list[int]) -> None:
        """The requests of this batch each read this many blocks from the staging. As many of them
        as fit are staged together."""
        groups: list[Group] = []
        first, used, most = 0, 0, len(self._ramp)
        first_rows = [*batch.shape.first_rows.tolist(), batch.num_tokens]
        for nth, (slot, count) in enumerate(zip(batch.shape.slots.tolist(), blocks, strict=True)):
            if used + count > most:
                groups.append((slice(first, nth), slice(first_rows[first], first_rows[nth])))
                first, used = nth, 0
            self.table[slot, :count] = self._ramp[used : used + count]
            used += count
        last = len(blocks)
        groups.append((slice(first, last), slice(first_rows[first], first_rows[last])))
        self._batch, self._groups = batch, groups

    def end(self) -> None:
        """No batch reads the staging any more. What comes next on the current stream waits for what
        is still on its way, so all that it uses may change."""
        self.forget_held()
        self._batch, self._groups = None, []

    def forget_held(self) -> None:
        """What comes next waits as after `end`; the batch is brought everything again."""
        if self._batch is not None:
            self.side.hold_back_for_all()
        self._held, self._coming = [None, None], [None, None]

    def groups_of(self, batch: Batch) -> list[Group] | None:
        """None for a batch whose entries are all on the device."""
        return self._groups if batch is self._batch else None

    # ---- a layer -------------------------------------------------------------------------------

    def bring(self, backend: Backend, layer: int, group: int) -> int:
        """Which half of `rows` has the entries that a layer reads, for a group of the batch; what
        is launched on the current stream from now on finds them. Begins to bring the next ones to
        the other half."""
        unit = self._unit(layer, group)
        half = self._find(unit)
        is_new = half is None
        if half is None:
            half = 0 if self._coming[0] is None else 1
            self._forget(half)
            self._stage(backend, layer, group, half, "all")
            self._held[half] = unit
        self.side.hold_back(self._coming[half])
        self._coming[half] = None
        self._bring_next(backend, layer, group, 1 - half)
        if not is_new:
            self._stage(backend, layer, group, half, "device")
        return half

    def half_of(self, layer: int, group: int) -> int:
        """Where `bring` has put them."""
        return self._held.index(self._unit(layer, group))

    def staged(self, layer: int, half: int) -> EntrySource:
        """Where a layer's entries are."""
        source = self._sources[layer]
        page: Page = replace(source.page, offset_bytes=0)
        return EntrySource(
            arena=self.rows[half], page=page, block_table=self.table, ratio=source.ratio
        )

    def staging_of(self, layer: int, half: int, requests: Tensor, which: Which) -> Staging:
        """The call that brings them there, for these rows of a batch."""
        assert self._host is not None
        return Staging(
            batch=requests,
            entries=self._sources[layer],
            block_table=self._tables[1],
            host=self._host,
            staged=self.staged(layer, half),
            which=which,
        )

    def _bring_next(self, backend: Backend, layer: int, group: int, half: int) -> None:
        following = (layer, group + 1)
        if group + 1 == len(self._groups):
            # with one group, the entries of layers that share them are there until the last of them
            after = self._next_others if len(self._groups) == 1 else self._next
            if layer not in after:
                return
            following = (after[layer], 0)
        unit = self._unit(*following)
        if self._find(unit) is not None:
            return
        assert self._batch is not None
        self._forget(half)
        uses = (self.rows, self.table, *self._tables, self._batch.request_rows)
        self._coming[half] = self.side.run(
            lambda: self._stage(backend, *following, half, "host"), uses
        )
        self._held[half] = unit

    def _stage(
        self,
        backend: Backend,
        layer: int,
        group: int,
        half: int,
        which: Which,
    ) -> None:
        assert self._batch is not None
        requests = self._batch.request_rows[self._groups[group][0]]
        backend.stage(self.staging_of(layer, half, requests, which))

    def _forget(self, half: int) -> None:
        """Its content is not needed. What is still on its way there has been launched before all
        that is brought there from now on."""
        self._held[half] = self._coming[half] = None

    def _unit(self, layer: int, group: int) -> Unit:
        return self._sources[layer].page.layer, group

    def _find(self, unit: Unit) -> int | None:
        return self._held.index(unit) if unit in self._held else None
