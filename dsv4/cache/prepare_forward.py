"""Between two captured graphs: who runs, which rows they write, what closes.

A plan is arithmetic on the lengths of its requests. Its index tensors live in buffers that never
move (graphs captured over them stay valid) and reach the device in one copy, padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.request import Request
from dsv4.cache.schema import CacheSchema, Page
from dsv4.cache.snapshots import WideCaptures
from dsv4.errors import PlanError

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# columns of StepBuffers.batch, one row a request:
#   slot, start position, tokens, first row in the step's token tensors
BATCH_COLUMNS = 4
# columns of StepBuffers.tokens, one row a token:
#   slot, position, batch row
TOKEN_COLUMNS = 4
# columns of StepBuffers.window, one row a token that is stored as a window record:
#   slot, position, token row, 2 · chunk row + 1 if the ring keeps it. Narrow steps use no chunk.
WINDOW_COLUMNS = 4
# columns of StepBuffers.groups[ratio], one row a work item of a compressor:
#   slot, start position, end position, first token row, first entry, entries, 1 if it writes the
#   tails. In a narrow step items are the groups that close. In a wide one the first item of each
#   request also writes the tails, after it has read what they hold; with overlap the group behind
#   it reads them too, so it takes both.
GROUP_COLUMNS = 8


class StepBuffers:
    """Static index tensors of a step, in one int32 buffer on the host and one on the device."""

    def __init__(
        self, schema: CacheSchema, *, max_requests: int, max_tokens: int, device: torch.device
    ) -> None:
        self.max_requests, self.max_tokens = max_requests, max_tokens
        owners = [spec for spec in schema.model.layers if spec.owns_entries]
        self.ratios = sorted({spec.ratio for spec in owners})
        self.overlapping_ratios = {spec.ratio for spec in owners if spec.overlap}
        self.max_new_blocks = max_requests + max_tokens // schema.block_tokens
        sizes: list[tuple[str, int, int]] = [
            ("new_block_at", self.max_new_blocks, 2),  # int64 offsets into the block table, first
            ("new_block_id", self.max_new_blocks, 1),
            ("batch", max_requests, BATCH_COLUMNS),
            ("tokens", max_tokens, TOKEN_COLUMNS),
            ("window", max_tokens, WINDOW_COLUMNS),
        ]
        for ratio in self.ratios:
            rows = self.max_items(ratio, tokens=max_tokens, requests=max_requests)
            sizes.append((f"groups_{ratio}", rows, GROUP_COLUMNS))
        total = sum(-(-rows * columns // 8) * 8 for _, rows, columns in sizes)
        pinned = device.type == "cuda"
        self.host_buffer = torch.full((total,), -1, dtype=torch.int32, pin_memory=pinned)
        self.device_buffer = self.host_buffer.to(device)  # on a CPU: the same memory
        self._host_words: I32 = self.host_buffer.numpy()
        host: dict[str, I32] = {}
        on_device: dict[str, Tensor] = {}
        at = 0
        for name, rows, columns in sizes:
            span = slice(at, at + rows * columns)
            host[name] = self._host_words[span].reshape(rows, columns)
            on_device[name] = self.device_buffer[span].view(rows, columns)
            at += -(-rows * columns // 8) * 8
        self.host = host
        self._on_device, self._last_cuts = on_device, dict[str, Tensor]()
        self.batch, self.tokens = on_device["batch"], on_device["tokens"]
        self.window = on_device["window"]
        self.groups = {ratio: on_device[f"groups_{ratio}"] for ratio in self.ratios}
        self.new_block_at = on_device["new_block_at"].view(torch.int64).flatten()
        self.new_block_id = on_device["new_block_id"].flatten()
        most_items = max((rows for name, rows, _ in sizes if name.startswith("groups")), default=1)
        self.scratch = torch.empty(
            (most_items, schema.model.head_dim), dtype=torch.float32, device=device
        )
        self.arrived = torch.zeros((most_items,), dtype=torch.int32, device=device)
        # A wide step overwrites the ring before it is read: its window rows, and those before it,
        # are staged here. One page, used by one layer after the other.
        self.chunk_page = Page(
            kind="window",
            layer=-1,
            offset_bytes=0,
            rows=max_tokens + (schema.model.window - 1) * max_requests,
            format=schema.window_format,
        )
        self.chunk = torch.empty(
            (1, self.chunk_page.payload_bytes), dtype=torch.uint8, device=device
        )
        self._copied = torch.cuda.Event() if pinned else None

    def cut(self, name: str, rows: int) -> Tensor:
        """The first rows of a tensor. Steps of one size, one after the other, get the same."""
        last = self._last_cuts.get(name)
        if last is None or last.shape[0] != rows:
            last = self._last_cuts[name] = self._on_device[name][:rows]
        return last

    def max_items(self, ratio: int, *, tokens: int, requests: int) -> int:
        """The most groups, so the most work items, that such a step can touch."""
        return min(tokens, tokens // ratio + 2 * requests)

    def memory_bytes(self) -> int:
        words = self.device_buffer.numel() + self.scratch.numel() + self.arrived.numel()
        return 4 * words + self.chunk.numel()

    def clear(self) -> None:
        """Every row becomes padding. Waits for the previous step's copy, which may still read."""
        if self._copied is not None:
            self._copied.synchronize()
        self._host_words.fill(-1)

    def send(self) -> None:
        """The one host-to-device copy of a step."""
        if self._copied is not None:
            self.device_buffer.copy_(self.host_buffer, non_blocking=True)
            self._copied.record()


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardPlan:
    """One step: `counts[i]` new tokens of `requests[i]`, the first at `starts[i]`.

    The tokens of a step lie one after the other in the order of the requests; `num_tokens` rows in
    all, then padding up to `padded_tokens`. The index tensors are cut to the padded sizes, for
    which kernels are launched. A step is `narrow` if no request has more tokens than its rings can
    lose; only then may it be padded, and so captured.
    """

    requests: tuple[Request, ...]
    slots: I64
    starts: I64
    counts: I64
    serial: int
    narrow: bool
    batch: Tensor
    tokens: Tensor
    window: Tensor
    items: dict[int, Tensor]
    captures: WideCaptures | None = None
    done: bool = False
    appended_layers: set[int] = field(default_factory=set)
    last_appended: int | None = None

    def note_append(self, layer: int) -> None:
        """A layer has written this step; a chunk's staged rows are now that layer's."""
        self.appended_layers.add(layer)
        self.last_appended = layer

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def padded_tokens(self) -> int:
        return self.tokens.shape[0]


def make_plan(
    schema: CacheSchema,
    buffers: StepBuffers,
    requests: tuple[Request, ...],
    slots: I64,
    starts: I64,
    counts: I64,
    reused: I64,
    *,
    serial: int,
    pad_tokens: int | None,
    pad_requests: int | None,
) -> ForwardPlan:
    """Fills the host buffer with a step and cuts the device's tensors to size. Entries below
    `reused` tokens of a request exist and are not written.

    Takes no blocks and copies nothing to the device.
    """
    item_counts = fill_step(schema, buffers, slots, starts, counts, reused)
    tokens, batch_rows = int(counts.sum()), len(requests)
    if pad_tokens is not None or pad_requests is not None:
        tokens = tokens if pad_tokens is None else pad_tokens
        batch_rows = batch_rows if pad_requests is None else pad_requests
        item_counts = {
            ratio: buffers.max_items(ratio, tokens=tokens, requests=batch_rows)
            for ratio in buffers.ratios
        }
    return ForwardPlan(
        requests=requests,
        slots=slots,
        starts=starts,
        counts=counts,
        serial=serial,
        narrow=is_narrow(schema, counts),
        batch=buffers.cut("batch", batch_rows),
        tokens=buffers.cut("tokens", tokens),
        window=buffers.cut("window", tokens),
        items={ratio: buffers.groups[ratio][:count] for ratio, count in item_counts.items()},
    )


def is_narrow(schema: CacheSchema, counts: I64) -> bool:
    return bool(counts.max(initial=0) <= schema.max_rollback_tokens)


def fill_step(
    schema: CacheSchema,
    buffers: StepBuffers,
    slots: I64,
    starts: I64,
    counts: I64,
    reused: I64,
) -> dict[int, int]:
    """Writes a step into the host buffer. Returns how many work items each ratio has."""
    host = buffers.host
    ends = starts + counts
    first_rows = counts.cumsum() - counts
    _set_columns(host["batch"], slots, starts, counts, first_rows)

    row_of_token, nth = _spread(counts)
    token = np.arange(len(row_of_token))
    position = starts[row_of_token] + nth
    slot_of_token = slots[row_of_token]
    _set_columns(host["tokens"], slot_of_token, position, row_of_token)
    kept = position >= (ends - schema.ring_rows)[row_of_token]
    chunk_row = token + (row_of_token + 1) * (schema.model.window - 1)
    _set_columns(host["window"], slot_of_token, position, token, 2 * chunk_row + kept)

    narrow = is_narrow(schema, counts)
    replays = bool((reused > starts).any())
    item_counts: dict[int, int] = {}
    for ratio in buffers.ratios:
        items = _Items(
            ratio=ratio,
            merged=not narrow and ratio in buffers.overlapping_ratios,
            tails=not narrow,
            existing=reused // ratio if replays else None,
        )
        columns = items.columns(slots, starts, ends, first_rows)
        _set_columns(host[f"groups_{ratio}"], *columns)
        item_counts[ratio] = len(columns[0])
    return item_counts


def _spread(counts: I64) -> tuple[I64, I64]:
    """Of `counts[row]` things a row, one after the other: their rows, and which of its row each
    is."""
    if counts.max(initial=0) <= 1:
        row = np.flatnonzero(counts)
        return row, np.zeros_like(row)
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]


def _set_columns(target: I32, *columns: NDArray[Any]) -> None:
    for nth, column in enumerate(columns):
        target[: len(column), nth] = column


@dataclass(slots=True, kw_only=True)
class _Items:
    """How one ratio's compressors share the work of a step.

    `merged`: the first item of a request takes two groups. `tails`: it writes the tails, and is
    there even if nothing closes. Of each request the first `existing` entries are left out.
    """

    ratio: int
    merged: bool
    tails: bool
    existing: I64 | None

    def columns(self, slots: I64, starts: I64, ends: I64, first_rows: I64) -> list[I64]:
        """The columns of GROUP_COLUMNS, one row an item."""
        first = starts // self.ratio
        items = ends // self.ratio - first
        if self.tails:
            items = np.where(ends > starts, np.maximum(items - self.merged, 1), 0)
        row, nth = _spread(items)
        entry, entries = first[row] + nth, np.ones_like(row)
        writes_tails = np.zeros_like(row)
        if self.tails:
            is_first = nth == 0
            entry += self.merged & ~is_first
            entries += self.merged & is_first
            writes_tails += is_first
        result = [slots[row], starts[row], ends[row], first_rows[row], entry, entries, writes_tails]
        return result if self.existing is None else self._without_existing(result, row)

    def _without_existing(self, columns: list[I64], row: I64) -> list[I64]:
        assert self.existing is not None
        *head, entry, entries, writes_tails = columns
        skipped = np.clip(self.existing[row] - entry, 0, entries)
        result = [*head, entry + skipped, entries - skipped, writes_tails]
        left = (entries > skipped) | (writes_tails > 0)
        return [column[left] for column in result]


def fill_new_blocks(
    schema: CacheSchema,
    buffers: StepBuffers,
    requests: Sequence[Request],
    published: I64,
    needed: I64,
) -> int:
    """Lists the block ids that the device's table does not have yet. Returns how many."""
    at = buffers.host["new_block_at"].reshape(-1).view(np.int64)
    ids = buffers.host["new_block_id"].reshape(-1)
    count = 0
    for row in np.flatnonzero(needed > published).tolist():
        request, first, last = requests[row], int(published[row]), int(needed[row])
        span = slice(count, count + last - first)
        at[span] = request.slot * schema.max_blocks_per_request + np.arange(first, last)
        ids[span] = request.block_ids[first:last]
        request.published_blocks = last
        count += last - first
    return count


def check_step(
    schema: CacheSchema,
    buffers: StepBuffers,
    counts: I64,
    *,
    pad_tokens: int | None,
    pad_requests: int | None,
) -> None:
    """Raises PlanError when a step does not fit the buffers, or its padding does not fit it."""
    for name, live, padded, most in (
        ("tokens", int(counts.sum()), pad_tokens, buffers.max_tokens),
        ("requests", len(counts), pad_requests, buffers.max_requests),
    ):
        if live > most:
            raise PlanError(
                f"{live} {name} in one step, but the manager was built for {most}: "
                f"split the step, or build it with a larger limit"
            )
        if padded is None:
            continue
        if isinstance(padded, bool) or not isinstance(padded, int) or not live <= padded <= most:
            raise PlanError(
                f"cannot pad {live} {name} to {padded!r}: the size must be a whole number between "
                f"{live} and {most}"
            )
        if not is_narrow(schema, counts):
            raise PlanError(
                f"a step with {counts.max()} tokens of one request cannot be padded: a graph "
                f"holds at most {schema.max_rollback_tokens} a request (1 + max_draft_tokens)"
            )
