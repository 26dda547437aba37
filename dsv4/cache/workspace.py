"""Scratch memory of calls on the device, allocated once and shared by all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache.changes import Turn
from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.cache.step.sizes import attend_workspace, select_workspace, staging_page
from dsv4.model import LayerSpec
from dsv4.ops.backend import Backend
from dsv4.ops.calls import EntrySource


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
        self.slot = torch.empty((schema.bytes.slot,), dtype=torch.uint8, device=device)
        self.arrived = torch.zeros((max_items,), dtype=torch.int32, device=device)
        self.staging_page = staging_page(
            schema, max_requests=block_table.shape[0], max_tokens=max_tokens
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
    def ask(rows: int, spec: LayerSpec, page: Page, block_entries: int) -> int:
        keys = EntrySource(arena=block_table, page=page, block_table=block_table, ratio=spec.ratio)
        return backend.select_workspace_bytes(
            rows, keys=keys, top_k=schema.model.index_topk, block_entries=block_entries
        )

    return select_workspace(schema, max_tokens, ask)


def _attend_bytes(schema: CacheSchema, backend: Backend, max_tokens: int) -> int:
    def ask(tokens: int, max_entries: int) -> int:
        return backend.attend_workspace_bytes(tokens, model=schema.model, max_entries=max_entries)

    return attend_workspace(schema, max_tokens, ask)
