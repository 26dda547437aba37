"""Scratch memory of calls on the device, allocated once and shared by all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.changes import Turn
from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.model import AttentionType
from dsv4.ops.backend import Backend
from dsv4.ops.calls import EntrySource

SELECT_BYTES = 256 << 20


class Workspace:
    """`select` uint8 holds scores of some tokens at a time and, once a layer has selected, decoded
    keys of a prefill batch; `attend` fp32 the partial results of splits, and counters that are 0
    between launches.

    `scratch` fp32 [items, head_dim] and `arrived` int32 [items], 0 between launches, serve groups
    that several programs pool together. `staging` uint8 [1, bytes] holds one `staging_page`: a
    prefill batch overwrites the ring before it is read, so its window rows, and those before them,
    stay here until the layer has attended. A rewind prepares a state in `slot` uint8 [slot_bytes]
    before it is copied to the request's. `turn` lets one thread at a time use it.
    """

    def __init__(
        self,
        schema: CacheSchema,
        backend: Backend,
        block_table: Tensor,
        *,
        max_tokens: int,
        max_items: int,
    ) -> None:
        device, model = block_table.device, schema.model
        self.turn = Turn()
        self.select = torch.empty(
            _select_bytes(schema, backend, block_table, max_tokens),
            dtype=torch.uint8,
            device=device,
        )
        self.attend = torch.zeros(
            _attend_bytes(schema, backend, max_tokens) // 4, dtype=torch.float32, device=device
        )
        self.scratch = torch.empty((max_items, model.head_dim), dtype=torch.float32, device=device)
        self.slot = torch.empty((schema.slot_bytes,), dtype=torch.uint8, device=device)
        self.arrived = torch.zeros((max_items,), dtype=torch.int32, device=device)
        self.staging_page = Page(
            kind="window",
            layer=-1,
            offset_bytes=0,
            rows=max_tokens + (model.window + model.draft_block - 1) * block_table.shape[0],
            format=schema.window_format,
        )
        self.staging = torch.empty(
            (1, self.staging_page.payload_bytes), dtype=torch.uint8, device=device
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.select, self.attend, self.scratch, self.arrived, self.staging, self.slot

    def memory_bytes(self) -> int:
        words = self.attend.numel() + self.scratch.numel() + self.arrived.numel()
        return self.select.numel() + self.staging.numel() + self.slot.numel() + 4 * words


def _select_bytes(
    schema: CacheSchema, backend: Backend, block_table: Tensor, max_tokens: int
) -> int:
    """For the scores of all tokens of a step, or as many as fit into SELECT_BYTES, at least one."""
    top_k, needed = schema.model.index_topk, 0
    for spec in schema.model.layers:
        page = schema.page("index_keys", spec.layer)
        if page is not None and spec.has_indexer:
            keys = EntrySource(
                arena=block_table, page=page, block_table=block_table, ratio=spec.ratio
            )
            publishes = spec.layer in schema.model.candidate_sources
            blocks_of = schema.model.candidate_block_entries if publishes else 0
            one, all_tokens = (
                backend.select_workspace_bytes(
                    rows, keys=keys, top_k=top_k, block_entries=blocks_of
                )
                for rows in (1, max_tokens)
            )
            needed = max(needed, one, min(all_tokens, SELECT_BYTES))
    return needed


def _attend_bytes(schema: CacheSchema, backend: Backend, max_tokens: int) -> int:
    model, needed = schema.model, 0
    for spec in model.layers:
        page = schema.page("entries", spec.layer)
        entries = schema.max_blocks_per_request * page.rows if page is not None else 0
        if spec.attention is AttentionType.CSA:
            entries = min(entries, model.index_topk)
        size = backend.attend_workspace_bytes(max_tokens, model=model, max_entries=entries)
        needed = max(needed, size)
    return needed
