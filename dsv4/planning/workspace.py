"""What a manager has on a GPU in addition to blocks, slots and block table, without that GPU and
without torch: `dsv4.other_bytes` there gives the same, byte for byte."""

from __future__ import annotations

from collections.abc import Callable

from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import SnapshotLayout
from dsv4.cache.step import sizes as step
from dsv4.kernels import sizes as kernels
from dsv4.model import LayerSpec
from dsv4.planning.gpus import Gpu


def workspace_of(
    schema: CacheSchema, gpu: Gpu, *, max_step_tokens: int, open_plans: int = 1
) -> Callable[[int], int]:
    """Step buffers and scratch memory, without snapshots, of the Triton kernels: for a number of
    requests."""
    model, processors = schema.model, gpu.hopper_processors

    def select(rows: int, spec: LayerSpec, page: Page, block_entries: int) -> int:
        score_bytes = 0
        if processors is not None and rows >= kernels.WIDE_MIN_TOKENS:
            score_bytes = kernels.wide_score_bytes(rows)
        return kernels.select_bytes(
            rows,
            schema.max_blocks_per_request * page.rows,
            top_k=model.index_topk,
            score_bytes=score_bytes,
            block_entries=block_entries,
        )

    def attend(tokens: int, max_entries: int) -> int:
        splits = kernels.split_count(model.window, max_entries)
        elements = kernels.attend_elements(tokens, model.heads, model.head_dim, splits)
        if processors is not None:
            elements = max(elements, kernels.hopper_attend_elements(processors))
        return 4 * elements

    scratch = step.select_workspace(schema, max_step_tokens, select)
    scratch += step.attend_workspace(schema, max_step_tokens, attend)

    def workspace_bytes(max_requests: int) -> int:
        others = step.plan_bytes(schema, max_requests=max_requests, max_tokens=max_step_tokens)
        return open_plans * (scratch + others)

    return workspace_bytes


def snapshot_pool_bytes(schema: CacheSchema, snapshots: int) -> int:
    """The prefix cache's snapshots in device memory."""
    layout = SnapshotLayout(schema)
    if not snapshots:
        return 0
    indices = sum(2 * part.ring_rows for section in layout.sections for part in section)
    return 8 * indices + layout.row_bytes * snapshots
