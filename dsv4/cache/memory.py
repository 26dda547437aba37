"""Everything that a manager has on its device: the arenas, the block table, a step's index tensors,
and scratch memory of calls. The schema knows what the bytes mean, the request table what owns
them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from dsv4.cache.arena import Arena, LayerPlanes
from dsv4.cache.changes import Uncopied
from dsv4.cache.paged_cache import PagedKVPool
from dsv4.cache.pages import CompressorLayout, PageKind
from dsv4.cache.residency.memory import EntriesMemory, EntrySizes, LaneEntries
from dsv4.cache.schema import CacheSchema, LayerCacheSchema
from dsv4.cache.state_cache import StateCachePool
from dsv4.cache.stats import MemoryBytes
from dsv4.cache.step.buffers import StepBuffers
from dsv4.cache.views import ClassicalView, IndexerView, SWAView
from dsv4.cache.workspace import Workspace
from dsv4.ops.backend import Backend
from dsv4.ops.calls import EntrySource

if TYPE_CHECKING:
    from dsv4.cache.residency.pool import EntryRows


class Lane:
    """What one open plan has to itself: its index tensors, and the scratch memory of its calls.
    Plans of different lanes may run on different streams."""

    def __init__(
        self,
        number: int,
        schema: CacheSchema,
        backend: Backend,
        block_table: torch.Tensor,
        *,
        max_tokens: int,
        entries: EntriesMemory | None = None,
        pool: EntryRows | None = None,
    ) -> None:
        self.number = number
        self.entries = (
            None
            if entries is None
            else LaneEntries(entries, block_table, pool, max_tokens=max_tokens)
        )
        self.buffers = StepBuffers(
            schema,
            max_requests=block_table.shape[0],
            max_tokens=max_tokens,
            device=block_table.device,
        )
        # of the prefill batch with chunks_apart
        self.chunk_buffers = StepBuffers(
            schema,
            max_requests=block_table.shape[0],
            max_tokens=max_tokens,
            device=block_table.device,
        )
        self.workspace = Workspace(
            schema,
            backend,
            block_table,
            max_tokens=max_tokens,
            max_items=self.buffers.most_items,
        )


class CacheMemory(Uncopied):
    """`manager.memory`: allocated once, never moved, so that captured graphs stay valid. It knows
    no request, only slots and block ids.

    All of it is on `device`. `block_arena` has the bytes of all blocks, `slot_arena` those of the
    `max_requests` slots, the `block_table`, int32 [max_requests, blocks per request], block ids by
    slot; a plan holds up to `max_step_tokens` tokens of all requests together.
    """

    _internal: ClassVar[frozenset[str]] = frozenset(
        (
            *("buffers", "entries", "lanes", "schema", "workspace"),
            *("copy_block", "copy_slot", "fill_slot", "publish", "zero_slot"),
        )
    )

    def __init__(
        self,
        schema: CacheSchema,
        backend: Backend,
        *,
        num_blocks: int,
        max_requests: int,
        max_step_tokens: int,
        device: torch.device,
        max_open_plans: int = 1,
        entry_sizes: EntrySizes | None = None,
        pool: EntryRows | None = None,
        snapshot_bytes: int = 0,
    ) -> None:
        self.schema, self.device = schema, device
        self.max_requests, self.max_step_tokens = max_requests, max_step_tokens
        self._snapshot_bytes = snapshot_bytes
        self.entries = (
            None
            if entry_sizes is None
            else EntriesMemory(schema, entry_sizes, max_requests=max_requests, device=device)
        )
        self.block_arena = Arena(schema, "block", num_blocks, device)
        self.slot_arena = Arena(schema, "slot", max_requests, device)
        self.block_table = torch.full(
            (max_requests, schema.max_blocks_per_request), -1, dtype=torch.int32, device=device
        )
        self.lanes = tuple(
            Lane(
                number,
                schema,
                backend,
                self.block_table,
                max_tokens=max_step_tokens,
                entries=self.entries,
                pool=pool,
            )
            for number in range(max_open_plans)
        )
        self.buffers, self.workspace = self.lanes[0].buffers, self.lanes[0].workspace

    def copy_block(self, source: int, targets: Sequence[int]) -> None:
        """Copies one block into some others, in one operation: all of them or, if it raises,
        none."""
        arena = self.block_arena.bytes
        if len(targets) == 1:
            arena[targets[0]].copy_(arena[source])
            return
        ids = torch.tensor(targets, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        copied = arena[source].clone().expand(len(targets), -1)
        arena.index_copy_(0, ids.to(self.device, non_blocking=True), copied)

    def copy_slot(self, source: int, target: int) -> None:
        self.slot_arena.bytes[target].copy_(self.slot_arena.bytes[source])

    def zero_slot(self, slot: int) -> None:
        self.slot_arena.bytes[slot].zero_()

    def fill_slot(self, slot: int) -> None:
        """Copies what was prepared in the workspace's spare slot into this one, in one
        operation."""
        self.slot_arena.bytes[slot].copy_(self.workspace.slot)

    def publish(self, slot: int, first: int, block_ids: Sequence[int]) -> None:
        """Writes block ids directly into the slot's row of the table, from its block `first` on.
        Use this when there are more ids than a step buffer holds; `StepBuffers.send` publishes the
        ids of a step."""
        host = torch.tensor(block_ids, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        row = self.block_table[slot, first : first + len(block_ids)]
        row.copy_(host, non_blocking=True)

    def memory_bytes(self) -> MemoryBytes:
        """Bytes allocated on the device, snapshots of the prefix cache included; arenas and table
        are what the planner promised."""
        return MemoryBytes(
            block_arena=self.block_arena.memory_bytes(),
            slot_arena=self.slot_arena.memory_bytes(),
            block_table=self.block_table.numel() * self.block_table.element_size(),
            step_buffers=sum(
                lane.buffers.memory_bytes() + lane.chunk_buffers.memory_bytes()
                for lane in self.lanes
            ),
            workspace=sum(
                lane.workspace.memory_bytes()
                + (0 if lane.entries is None else lane.entries.memory_bytes())
                for lane in self.lanes
            ),
            snapshots=self._snapshot_bytes,
            entries=0 if self.entries is None else self.entries.memory_bytes(),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerMemory:
    """One layer's part: planes, views and compressors, and `shared`, which all layers use.

    `compressor` and `index_compressor` are those that the layer has of its own. Made once per layer
    with `of`; nothing is allocated.
    """

    shared: CacheMemory
    schema: LayerCacheSchema
    pool: PagedKVPool
    state: StateCachePool
    compressor: CompressorLayout | None
    index_compressor: CompressorLayout | None
    window: SWAView
    entries: ClassicalView | None
    index_keys: IndexerView | None

    @classmethod
    def of(cls, memory: CacheMemory, layer: int) -> LayerMemory:
        schema = memory.schema
        pool = PagedKVPool(schema, memory.block_arena, layer)
        state = StateCachePool(schema, memory.slot_arena, layer)
        window = schema.layout.page("window", layer)
        assert window is not None

        def source(kind: PageKind) -> EntrySource | None:
            page = schema.layout.page(kind, layer)
            if page is None:
                return None
            if page.apart:
                assert memory.entries is not None
                return EntrySource(
                    arena=memory.entries.arena.bytes,
                    page=page,
                    block_table=memory.entries.table,
                    ratio=schema.model.layers[layer].ratio,
                )
            return EntrySource(
                arena=memory.block_arena.bytes,
                page=page,
                block_table=memory.block_table,
                ratio=schema.model.layers[layer].ratio,
            )

        entries, index_keys = source("entries"), source("index_keys")
        of_entries: LayerPlanes = pool
        if entries is not None and entries.page.apart and memory.entries is not None:
            of_entries = LayerPlanes(schema, memory.entries.arena, layer, keeper=entries.page.layer)
        return cls(
            shared=memory,
            schema=schema.layers[layer],
            pool=pool,
            state=state,
            compressor=schema.layout.compressor(layer, "main"),
            index_compressor=schema.layout.compressor(layer, "index"),
            window=SWAView.of(state, memory.slot_arena.bytes, window, schema.model.window),
            entries=None if entries is None else ClassicalView.of(of_entries, entries),
            index_keys=None if index_keys is None else IndexerView.of(pool, index_keys),
        )

    @property
    def layer(self) -> int:
        return self.schema.spec.layer
