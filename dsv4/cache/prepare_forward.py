"""Between two captured graphs: who runs, which rows they write, what closes.

A plan is arithmetic on the lengths of its requests. Its index tensors live in buffers that never
move (graphs captured over them stay valid) and reach the device in one copy, padded with -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.request import Request
from dsv4.cache.schema import CacheSchema
from dsv4.errors import PlanError

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# columns of StepBuffers.batch, one row a request:
#   slot, start position, tokens, first row in the step's token tensors
BATCH_COLUMNS = 4
# columns of StepBuffers.tokens, one row a token:
#   slot, position, batch row, 1 if the window ring keeps it
TOKEN_COLUMNS = 4
# columns of StepBuffers.groups[ratio], one row a work item of a compressor:
#   slot, start position, end position, first token row, first entry, entries, 1 if the request's
#   first item. That one also writes the tails, after it has read what they hold; with overlap the
#   group behind it reads them too, so it takes two.
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
        ]
        for ratio in self.ratios:
            rows = self.max_items(ratio, tokens=max_tokens, requests=max_requests)
            sizes.append((f"groups_{ratio}", rows, GROUP_COLUMNS))
        total = sum(-(-rows * columns // 8) * 8 for _, rows, columns in sizes)
        pinned = device.type == "cuda"
        self.host_buffer = torch.full((total,), -1, dtype=torch.int32, pin_memory=pinned)
        self.device_buffer = self.host_buffer.to(device, copy=True)
        host: dict[str, I32] = {}
        on_device: dict[str, Tensor] = {}
        at = 0
        for name, rows, columns in sizes:
            span = slice(at, at + rows * columns)
            host[name] = self.host_buffer[span].numpy().reshape(rows, columns)
            on_device[name] = self.device_buffer[span].view(rows, columns)
            at += -(-rows * columns // 8) * 8
        self.host = host
        self.batch, self.tokens = on_device["batch"], on_device["tokens"]
        self.groups = {ratio: on_device[f"groups_{ratio}"] for ratio in self.ratios}
        self.new_block_at = on_device["new_block_at"].view(torch.int64).flatten()
        self.new_block_id = on_device["new_block_id"].flatten()
        most_items = max((rows for name, rows, _ in sizes if name.startswith("groups")), default=1)
        self.scratch = torch.empty(
            (most_items, schema.model.head_dim), dtype=torch.float32, device=device
        )
        self.arrived = torch.zeros((most_items,), dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if pinned else None

    def max_items(self, ratio: int, *, tokens: int, requests: int) -> int:
        """The most groups, so the most work items, that such a step can touch."""
        return min(tokens, tokens // ratio + 2 * requests)

    def memory_bytes(self) -> int:
        return 4 * (self.device_buffer.numel() + self.scratch.numel() + self.arrived.numel())

    def clear(self) -> None:
        """Every row becomes padding. Waits for the previous step's copy, which may still read."""
        if self._copied is not None:
            self._copied.synchronize()
        self.host_buffer.fill_(-1)

    def send(self) -> None:
        """The one host-to-device copy of a step."""
        self.device_buffer.copy_(self.host_buffer, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


@dataclass(slots=True, eq=False, kw_only=True)
class ForwardPlan:
    """One step: `counts[i]` new tokens of `requests[i]`, the first at `starts[i]`.

    The tokens of a step lie one after the other in the order of the requests; `num_tokens` rows in
    all, then padding up to `padded_tokens`. Kernels are launched for the padded sizes.
    """

    requests: tuple[Request, ...]
    starts: I64
    counts: I64
    serial: int
    padded_tokens: int
    padded_requests: int
    padded_items: dict[int, int]
    done: bool = False
    appended_layers: set[int] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def widest(self) -> int:
        """The most tokens of one request in this step."""
        return int(self.counts.max(initial=0))


def fill_step(
    schema: CacheSchema,
    buffers: StepBuffers,
    requests: Sequence[Request],
    starts: I64,
    counts: I64,
) -> dict[int, int]:
    """Writes a step into the host buffer. Returns how many work items each ratio has.

    Takes no blocks and copies nothing to the device.
    """
    host = buffers.host
    slots = np.fromiter((r.slot for r in requests), dtype=np.int64, count=len(requests))
    ends = starts + counts
    first_rows = np.cumsum(counts) - counts
    host["batch"][: len(slots)] = np.stack((slots, starts, counts, first_rows), axis=1)

    row_of_token = np.repeat(np.arange(len(slots)), counts)
    position = np.arange(len(row_of_token)) - (first_rows - starts)[row_of_token]
    keep = position >= ends[row_of_token] - schema.ring_rows
    host["tokens"][: len(position)] = np.stack(
        (slots[row_of_token], position, row_of_token, keep), axis=1
    )

    items: dict[int, int] = {}
    for ratio in buffers.ratios:
        first, last = starts // ratio, (ends - 1) // ratio
        merged = 1 if ratio in buffers.overlapping_ratios else 0
        touched = np.where(counts > 0, last - first + 1, 0)
        per_request = np.minimum(touched, np.maximum(touched - merged, 1))
        row = np.repeat(np.arange(len(slots)), per_request)
        nth = np.arange(len(row)) - (np.cumsum(per_request) - per_request)[row]
        entries = np.where(nth == 0, np.minimum(touched[row], 1 + merged), 1)
        entry = first[row] + nth + np.where(nth > 0, merged, 0)
        host[f"groups_{ratio}"][: len(row), :7] = np.stack(
            (slots[row], starts[row], ends[row], first_rows[row], entry, entries, nth == 0), axis=1
        )
        items[ratio] = len(row)
    return items


def fill_new_blocks(
    schema: CacheSchema,
    buffers: StepBuffers,
    requests: Sequence[Request],
    ends: I64,
) -> int:
    """Lists the block ids that the device's table does not have yet. Returns how many."""
    at = buffers.host["new_block_at"].reshape(-1).view(np.int64)
    ids = buffers.host["new_block_id"].reshape(-1)
    count = 0
    for request, end in zip(requests, ends.tolist(), strict=True):
        needed = schema.blocks_for(end)
        while request.published_blocks < needed:
            block = request.published_blocks
            at[count] = request.slot * schema.max_blocks_per_request + block
            ids[count] = request.block_ids[block]
            request.published_blocks += 1
            count += 1
    return count


def check_step(
    buffers: StepBuffers,
    counts: I64,
    *,
    pad_tokens: int | None,
    pad_requests: int | None,
) -> tuple[int, int]:
    """The padded sizes of a step. Raises PlanError when it does not fit the buffers."""
    tokens, requests = int(counts.sum()), len(counts)
    padded_tokens = tokens if pad_tokens is None else pad_tokens
    padded_requests = requests if pad_requests is None else pad_requests
    for name, live, padded, most in (
        ("tokens", tokens, padded_tokens, buffers.max_tokens),
        ("requests", requests, padded_requests, buffers.max_requests),
    ):
        if live > most:
            raise PlanError(
                f"{live} {name} in one step, but the manager was built for {most}: "
                f"split the step, or build it with a larger limit"
            )
        if not live <= padded <= most:
            raise PlanError(
                f"cannot pad {live} {name} to {padded}: the size must lie between {live} and {most}"
            )
    return padded_tokens, padded_requests
