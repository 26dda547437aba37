"""Memory that select and attend use and forget, allocated once for all layers."""

from __future__ import annotations

import torch

from dsv4.cache.schema import CacheSchema
from dsv4.ops.backend import Backend
from dsv4.ops.calls import EntrySource

SELECT_BYTES = 64 << 20


class Workspace:
    """`select` uint8 holds scores of some tokens at a time; `attend` fp32 the partial results of
    splits, and counters that are 0 between launches."""

    def __init__(
        self,
        schema: CacheSchema,
        backend: Backend,
        block_table: torch.Tensor,
        *,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        model = schema.model
        select_bytes = attend_bytes = 0
        for spec in model.layers:
            page = schema.page("index_keys", spec.layer)
            if page is not None:
                keys = EntrySource(
                    arena=block_table, page=page, block_table=block_table, ratio=spec.ratio
                )
                one, all_tokens = (
                    backend.select_workspace_bytes(rows, keys=keys, top_k=model.index_topk)
                    for rows in (1, max_tokens)
                )
                select_bytes = max(select_bytes, one, min(all_tokens, SELECT_BYTES))
            page = schema.page("entries", spec.layer)
            entries = block_table.shape[1] * page.rows if page is not None else 0
            if spec.index_keys != "none":
                entries = min(entries, model.index_topk)
            attend_bytes = max(
                attend_bytes,
                backend.attend_workspace_bytes(max_tokens, model=model, max_entries=entries),
            )
        self.select = torch.empty(select_bytes, dtype=torch.uint8, device=device)
        self.attend = torch.zeros(attend_bytes // 4, dtype=torch.float32, device=device)

    def memory_bytes(self) -> int:
        return self.select.numel() + 4 * self.attend.numel()
