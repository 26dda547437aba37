"""Static index tensors of a step: how its requests, tokens and work items lie in them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.requests import Growth
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.shape import (
    I64,
    StepShape,
    StepTokens,
    WorkItems,
    chunk_groups,
    closing_groups,
    without_existing,
)
from dsv4.cache.step.sizes import buffer_rows, max_drafts, max_items, padded_words, ratios_of
from dsv4.cache.step.sizes import most_items as most_items_of
from dsv4.errors import SchemaError
from dsv4.ops.columns import (
    FOLLOW_COLUMNS,
    ITEM_COLUMNS,
    follow_columns,
    item_columns,
    most_items,
    request_columns,
    token_columns,
)

# How many sliced tensors are kept: graphs come in few sizes, and so do the groups that close.
KEPT_CUTS = 1024


class StepBuffers:
    """Static index tensors of a step, in one int32 buffer on the host and one on the device."""

    def __init__(
        self, schema: CacheSchema, *, max_requests: int, max_tokens: int, device: torch.device
    ) -> None:
        self.schema, self.max_requests, self.max_tokens = schema, max_requests, max_tokens
        owners = [spec for spec in schema.model.layers if spec.owns_entries]
        self.ratios = ratios_of(schema)
        self.overlapping_ratios = {spec.ratio for spec in owners if spec.overlap}
        for spec in owners:
            if not spec.overlap and spec.ratio in self.overlapping_ratios:
                raise SchemaError(
                    f"groups of {spec.ratio} tokens overlap in some layers, but not in layer "
                    f"{spec.layer}: layers of one ratio share the work items of a step, so all of "
                    f"them must overlap or none"
                )
        self.max_drafts = max_drafts(schema)
        sizes = buffer_rows(schema, max_requests=max_requests, max_tokens=max_tokens)
        total = sum(padded_words(rows, columns) for _, rows, columns in sizes)
        pinned = device.type == "cuda"
        self.host_buffer = torch.full((total,), -1, dtype=torch.int32, pin_memory=pinned)
        self.device_buffer = self.host_buffer.to(device)  # on a CPU: the same memory
        self.host: dict[str, NDArray[Any]] = {
            name: rows.numpy() for name, rows in _named_rows(self.host_buffer, sizes).items()
        }
        self._lists_blocks = False
        self._request = request_columns(self.host["batch"])
        self._token = token_columns(self.host["tokens"])
        self._item_rows = {ratio: self.host[f"items_{ratio}"] for ratio in self.ratios}
        self._items = {ratio: item_columns(rows) for ratio, rows in self._item_rows.items()}
        # columns that are equal for all items of a request; those of decode batches take one entry
        self._item_of_request = np.full((max_requests, ITEM_COLUMNS), -1, dtype=np.int32)
        self._any_item = item_columns(self._item_of_request)
        self._any_item.entries[:], self._any_item.writes_tails[:] = 1, 0
        self.on_device = on_device = _named_rows(self.device_buffer, sizes)
        self.cut = lru_cache(maxsize=KEPT_CUTS)(lambda name, rows: on_device[name][:rows])
        self.cut_draft = lru_cache(maxsize=KEPT_CUTS)(
            lambda name, nth, rows: on_device[name][nth * max_requests :][:rows]
        )
        self.forget()
        self._copied = torch.cuda.Event() if pinned else None

    @property
    def most_items(self) -> int:
        """The most work items of a ratio that the buffers hold; 1 where no layer compresses."""
        return most_items_of(self.schema, tokens=self.max_tokens, requests=self.max_requests)

    def max_items(self, ratio: int, *, tokens: int, requests: int) -> int:
        """The most groups, and so the most work items, that such a step can touch."""
        return max_items(ratio, tokens=tokens, requests=requests)

    def most_item_counts(self, *, tokens: int, requests: int) -> dict[int, int]:
        """`max_items` of each ratio."""
        return {
            ratio: self.max_items(ratio, tokens=tokens, requests=requests) for ratio in self.ratios
        }

    def memory_bytes(self) -> int:
        return 4 * self.device_buffer.numel()

    def forget(self) -> None:
        """Forgets the last step."""
        self._last_shape: StepShape | None = None
        self._row_of_token = self._nth_of_token = np.empty(0, dtype=np.int64)

    def fill(self, step: StepTokens) -> dict[int, int]:
        """Writes a step into the host buffer, as soon as the copy of the previous one no longer
        reads it. Returns how many work items each ratio has."""
        if self._copied is not None:
            self._copied.synchronize()
        shape, starts, reused, counts = step.shape, step.starts, step.reused, {}
        self._fill_tokens(shape, starts, step.ends)
        unknown = None if step.before is None else step.before.unknown_starts
        # the device fills in where such a request starts, and its items
        ends = step.ends if unknown is None else np.where(unknown, starts, step.ends)
        decode = shape.most_tokens <= self.schema.max_decode_tokens
        replays = np.count_nonzero(reused > starts)
        for ratio in self.ratios:
            if decode:
                items = closing_groups(ratio, starts, ends, most_tokens=shape.most_tokens)
            else:
                overlap = ratio in self.overlapping_ratios
                items = chunk_groups(ratio, starts, ends, overlap=overlap)
            if replays:
                items = without_existing(items, reused // ratio)
            counts[ratio] = self._fill_items(ratio, items)
        if step.before is not None and unknown is not None:
            rows = unknown.nonzero()[0]
            return self._fill_follows(
                rows, step.before.rows[rows], reused[rows], counts, decode=decode
            )
        return counts

    def _fill_tokens(self, shape: StepShape, starts: I64, ends: I64) -> None:
        """Fills the rows of requests and tokens. After a step of the same shape only positions
        change."""
        request, token = self._request, self._token
        requests, count = len(shape.counts), shape.num_tokens
        if shape is not self._last_shape:
            self.forget()
            for name in ("batch", "tokens"):
                self.host[name].fill(-1)
            row, slot, self._nth_of_token = shape.token_rows
            self._row_of_token = row
            request.slot[:requests] = shape.slots
            request.count[:requests] = shape.counts
            request.first_row[:requests] = shape.first_rows
            token.slot[:count] = slot
            token.batch_row[:count] = row
            token.kept[:count] = 1
            item = self._any_item
            item.slot[:requests] = shape.slots
            item.first_row[:requests] = shape.first_rows
            self._last_shape = shape
        row = self._row_of_token
        position = starts.take(row)
        position += self._nth_of_token
        request.start[:requests] = starts
        token.position[:count] = position
        self._any_item.start[:requests] = starts
        self._any_item.end[:requests] = ends
        if shape.most_tokens > self.schema.ring_rows:
            token.kept[:count] = position >= (ends - self.schema.ring_rows)[row]

    def _fill_items(self, ratio: int, items: WorkItems) -> int:
        """The rows of a compressor's items, after `_fill_tokens`. Returns how many."""
        item, rows, count = self._items[ratio], self._item_rows[ratio], len(items.row)
        rows[count:].fill(-1)
        # they are known to be valid rows, so nothing is clipped, and out= is written directly
        self._item_of_request.take(items.row, axis=0, out=rows[:count], mode="clip")
        item.entry[:count] = items.entry
        if items.writes_tails is not None:
            item.entries[:count] = items.entries
            item.writes_tails[:count] = items.writes_tails
        return count

    def _fill_follows(
        self, rows: I64, rows_before: I64, reused: I64, item_counts: dict[int, int], *, decode: bool
    ) -> dict[int, int]:
        """Requests whose start the device fills in: their rows here and in the earlier step, and
        items after those of the others. Returns how many items there are now, of each ratio."""
        follows, count = self.host["follows"], len(rows)
        named = follow_columns(follows)
        named.batch_row[:count] = rows
        named.row_before[:count] = rows_before
        named.reused[:count] = reused
        tokens = self._request.count[rows].astype(np.int64)
        totals = {}
        for nth, ratio in enumerate(self.ratios):
            overlap = ratio in self.overlapping_ratios
            own = most_items(tokens, ratio, overlap=overlap, narrow=decode)
            ends = own.cumsum() + item_counts[ratio]
            follows[:count, FOLLOW_COLUMNS + nth] = ends - own
            totals[ratio] = int(ends[-1])
        return totals

    def fill_drafts(self, steps: int, shape: StepShape, starts: I64) -> None:
        """Fills draft steps: the nth has the nth token of each request with at least n tokens, in
        its row."""
        nth, rows = np.arange(steps)[:, None], np.arange(len(shape.counts))
        has_one, one = nth < shape.counts, np.ones_like(rows)
        filled: tuple[tuple[str, tuple[I64, ...]], ...] = (
            ("draft_batch", (shape.slots, starts + nth, one, rows)),
            ("draft_tokens", (shape.slots, starts + nth, rows, one)),
        )
        for name, columns in filled:
            self.host[name].fill(-1)
            step = self.host[name].reshape(self.max_drafts, self.max_requests, -1)
            for column, values in enumerate(columns):
                step[:steps, : len(rows), column] = np.where(has_one, values, -1)

    def fill_new_blocks(self, growth: Growth) -> int:
        """Lists the block ids that the device's table does not have yet. Returns how many; the
        caller notes that they are published."""
        if growth.requests:
            return self._list_blocks(growth)
        if self._lists_blocks:  # those of the step before
            for name in ("new_block_at", "new_block_id"):
                self.host[name].fill(-1)
            self._lists_blocks = False
        return 0

    def _list_blocks(self, growth: Growth) -> int:
        """Of each request the blocks after the published ones, and its new ones, and where they go
        in the flattened table."""
        self._lists_blocks = True
        at: list[int] = []
        ids: list[int] = []
        new_ids, new, most = growth.reserved.block_ids, 0, self.schema.max_blocks_per_request
        for request, last, missing in zip(
            growth.requests, growth.blocks, growth.missing, strict=True
        ):
            table_row, first = request.slot * most, request.published_blocks
            at += range(table_row + first, table_row + last)
            if first < last - missing:
                ids += request.block_ids[first:last]
            ids += new_ids[new : new + missing]
            new += missing
        for name, values in (("new_block_at", at), ("new_block_id", ids)):
            rows = self.host[name]
            rows.fill(-1)
            rows[: len(values)] = values
        return len(ids)

    def send(self, block_table: Tensor, new_blocks: int = 0) -> None:
        """The one host-to-device copy of a step. From there its new block ids go to the table."""
        if self._copied is not None:
            self.device_buffer.copy_(self.host_buffer, non_blocking=True)
            self._copied.record(torch.cuda.current_stream(self.device_buffer.device))
        if new_blocks:
            at, ids = self.cut("new_block_at", new_blocks), self.cut("new_block_id", new_blocks)
            block_table.view(-1).index_copy_(0, at, ids)


def _named_rows(buffer: Tensor, sizes: Sequence[tuple[str, int, int]]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    at = 0
    for name, rows, columns in sizes:
        named[name] = buffer[at : at + rows * columns].view(rows, columns)
        at += padded_words(rows, columns)
    named["new_block_at"] = named["new_block_at"].view(torch.int64).flatten()
    named["new_block_id"] = named["new_block_id"].flatten()
    return named
