"""What a manager with entries in host memory has on its device in addition: the rows of entries,
the table that maps blocks to them, and hot rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dsv4.cache.arena import Arena
from dsv4.cache.batch import Batch
from dsv4.cache.hot_rows import HotLayout
from dsv4.cache.residency.chunks import ChunkEntries
from dsv4.cache.schema import CacheSchema
from dsv4.ops.calls import EntrySource, HotRows, Resolving

if TYPE_CHECKING:
    from dsv4.cache.residency.pool import EntryRows


@dataclass(frozen=True, slots=True, kw_only=True)
class EntrySizes:
    """`rows` for the entries of blocks on the device; `layout` says what each slot has for hot
    entries. `host_rows` rows in host memory: one for each block, or, `shared` with a host tier,
    more."""

    rows: int
    layout: HotLayout
    host_rows: int = 0
    shared: bool = False


class EntriesMemory:
    """Allocated once, never moved. `arena` has the rows of blocks, then the hot rows of each slot.
    `table` int32 [max_requests, blocks per request] has the row of each block, or -1 where its
    entries are only in host memory. `tables` are this one and, where host memory is shared with a
    tier, a second one with the rows there (otherwise a block's row there is its number). `hot` has
    the hot rows of each layer that owns entries, views of the tensors here; `counted` int64
    [layers, 3] are their counts."""

    def __init__(
        self, schema: CacheSchema, sizes: EntrySizes, *, max_requests: int, device: torch.device
    ) -> None:
        layout = sizes.layout
        self.schema, self.rows, self.layout = schema, sizes.rows, layout
        hot_rows = max_requests * layout.arena_rows
        self.arena = Arena(schema, "entries", sizes.rows + hot_rows, device)

        def made(width: int, dtype: torch.dtype, value: int) -> Tensor:
            return torch.full((max_requests, width), value, dtype=dtype, device=device)

        pages = layout.pages
        self.table = made(schema.max_blocks_per_request, torch.int32, -1)
        self.tables: tuple[Tensor, ...] = (self.table,)
        if sizes.shared:
            self.tables += (made(schema.max_blocks_per_request, torch.int32, -1),)
        records = sum(layout.records(page) for page in pages)
        self.place = made(sum(layout.entries(page) for page in pages), torch.int16, -1)
        self.entry_of, self.used = made(records, torch.int32, -1), made(records, torch.int32, 0)
        self.clock, self.hand = (made(len(pages), torch.int32, 0) for _ in range(2))
        self.counted = torch.zeros((len(pages), 3), dtype=torch.int64, device=device)
        # slots of decode batches that failed: what their tables name may not have been fetched
        self.lost: set[int] = set()
        # on a GPU: a copy of `counted` on the host, the stream that copies, and its event
        self._counts, self._newest = self.counted, [[0, 0, 0] for _ in pages]
        self._stream: Any = None
        self._arrived: Any = None
        self.hot: dict[int, HotRows] = {}
        entry = record = 0
        for nth, page in enumerate(pages):
            last_entry, last_record = entry + layout.entries(page), record + layout.records(page)
            self.hot[page.layer] = HotRows(
                first_row=sizes.rows,
                records=layout.records(page),
                place=self.place[:, entry:last_entry],
                entry_of=self.entry_of[:, record:last_record],
                used=self.used[:, record:last_record],
                clock=self.clock[:, nth],
                hand=self.hand[:, nth],
                counted=self.counted[nth],
            )
            entry, record = last_entry, last_record

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (
            *(self.arena.bytes, *self.tables, self.place, self.entry_of, self.used),
            *(self.clock, self.hand, self.counted),
        )

    def forget_hot(self, slot: int) -> None:
        """Forgets the hot records of a slot."""
        self.place[slot].fill_(-1)
        self.entry_of[slot].fill_(-1)

    def forget_lost(self) -> None:
        """Forgets the hot records of slots that are lost. In a captured graph that happens when it
        is replayed, so they stay lost until the next step is planned."""
        if not self.lost:
            return
        is_capturing = self.is_capturing()
        for slot in tuple(self.lost):
            self.forget_hot(slot)
            if not is_capturing:
                self.lost.discard(slot)

    def is_capturing(self) -> bool:
        """Whether what is launched now becomes part of a graph."""
        return self.place.is_cuda and torch.cuda.is_current_stream_capturing()

    def read_counts(self) -> list[list[int]]:
        """Hits, misses and bytes fetched of each layer. Does not wait: on a GPU they are those of
        an earlier call."""
        if self.counted.device.type != "cuda":
            return self.counted.tolist()
        if self._arrived is None:
            self._counts = torch.zeros_like(self.counted, device="cpu").pin_memory()
            self._stream = torch.cuda.Stream(self.counted.device)
            # `counted` is written before it is read for the first time
            self._stream.wait_stream(torch.cuda.current_stream(self.counted.device))
        if self._arrived is None or self._arrived.query():
            found = self._counts.tolist()
            with torch.cuda.stream(self._stream):
                self._counts.copy_(self.counted, non_blocking=True)
                self._arrived = torch.cuda.Event()
                self._arrived.record(self._stream)
            self._newest = found
        return self._newest

    def memory_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)


class LaneEntries:
    """What one open plan has to itself for entries: where a decode batch finds the selected ones,
    and `chunks`, what a prefill batch reads."""

    def __init__(
        self, memory: EntriesMemory, block_table: Tensor, pool: EntryRows | None, *, max_tokens: int
    ) -> None:
        schema, device = memory.schema, block_table.device
        self._memory = memory
        # the row of each block of a request in host memory
        self._host_table = memory.tables[1] if len(memory.tables) > 1 else block_table
        self._pool = pool  # pinned for as long as a handle may read it
        self._host = None if pool is None else pool.bytes
        requests, top_k = block_table.shape[0], schema.model.index_topk
        self._rows = torch.empty(max_tokens * top_k, dtype=torch.int32, device=device)
        most = schema.max_decode_tokens * top_k
        self._misses = torch.empty((requests, most, 2), dtype=torch.int32, device=device)
        self._miss_count = torch.empty(requests, dtype=torch.int32, device=device)
        self.chunks = ChunkEntries(
            schema,
            memory.arena.bytes,
            (memory.table, self._host_table),
            self._host,
            unit_bytes=memory.layout.staged_bytes,
        )

    @property
    def _own(self) -> tuple[Tensor, ...]:
        return self._rows, self._misses, self._miss_count, *self.chunks.tensors

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._own if self._host is None else (*self._own, self._host)

    def memory_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._own)

    def resolving(self, batch: Batch, source: EntrySource, selected: Tensor) -> Resolving:
        """What finds the entries that a layer reads; afterwards its `rows` say where they are."""
        assert self._host is not None
        rows = self._rows[: selected.numel()].view(selected.shape)
        return Resolving(
            selected=selected,
            tokens=batch.tokens,
            batch=batch.request_rows,
            entries=source,
            block_table=self._host_table,
            host=self._host,
            hot=self._memory.hot[source.page.layer],
            rows=rows,
            misses=self._misses,
            miss_count=self._miss_count,
            # the most of any step, because a captured graph replays this call for others
            tokens_per_request=self._memory.schema.max_decode_tokens,
        )
