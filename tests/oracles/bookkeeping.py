"""What a manager holds, as plain values: for "nothing changed" and for the slow model of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.requests import Request

Row = list[int]


def snapshot(manager: KVCacheManager) -> dict[str, Any]:
    """Everything the host keeps, and the device's table and step buffers."""
    return {
        "stats": manager.stats().to_dict(),
        "free blocks": list(manager._parts.table.allocator._free),
        "references": list(manager._parts.table.allocator._references),
        "free slots": list(manager._parts.table.free_slots),
        "requests": {
            slot: (
                *(id(r), r.slot, r.length, list(r.block_ids), r.published_blocks, r.released),
                *(r.written_tokens, r.reused_tokens, r.rings_exact_from, r.resume),
                None if r.trail is None else r.trail.ids.tolist(),
            )
            for slot, r in manager._parts.table.live.items()
        },
        "table": manager.memory.block_table.tolist(),
        "step": manager.memory.buffers.device_buffer.tolist(),
        "plans": [*map(id, manager.room.open_plans)],
    }


def no_device(*given: object) -> None:
    """Stands in for a call that reaches the device."""
    raise RuntimeError("CUDA error: out of memory")


@contextmanager
def nothing_changes(manager: KVCacheManager) -> Iterator[None]:
    before = snapshot(manager)
    slots = manager.memory.slot_arena.bytes.clone()
    yield
    assert snapshot(manager) == before
    assert torch.equal(manager.memory.slot_arena.bytes, slots)
    manager.check_invariants()


def step_rows(
    steps: list[tuple[Request, int, int]],
    *,
    ring_rows: int,
    ratios: dict[int, bool],
    narrow: bool,
) -> dict[str, list[Row]]:
    """The rows of a step's buffers, token by token. `steps` are (request, start, tokens), `ratios`
    says for each compress ratio whether its groups overlap."""
    rows: dict[str, list[Row]] = {"batch": [], "tokens": []}
    for ratio in ratios:
        rows[f"items_{ratio}"] = []
    for batch_row, (request, start, count) in enumerate(steps):
        first_token_row = len(rows["tokens"])
        end = start + count
        rows["batch"].append([request.slot, start, count, first_token_row])
        for position in range(start, end):
            still_there = all(
                later % ring_rows != position % ring_rows for later in range(position + 1, end)
            )
            rows["tokens"].append([request.slot, position, batch_row, int(still_there)])
        for ratio, overlap in ratios.items():
            closed = [p // ratio for p in range(start, end) if (p + 1) % ratio == 0]
            items = [(entry, 1, 0) for entry in closed]
            if not narrow and count:
                # the tails go to the first item, which takes two groups where they overlap
                items = [(start // ratio, 1 + overlap, 1), *items[1 + overlap :]]
            head = [request.slot, start, end, first_token_row]
            rows[f"items_{ratio}"] += [[*head, *item] for item in items]
    return rows
