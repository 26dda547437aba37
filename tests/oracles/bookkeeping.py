"""What a manager holds, as plain values: for "nothing changed" and for the slow model of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.request import Request

Row = list[int]


def snapshot(manager: KVCacheManager) -> dict[str, Any]:
    """Everything the host keeps, and the device's table and step buffers."""
    return {
        "stats": manager.stats().to_dict(),
        "free blocks": list(manager.allocator._free),
        "references": list(manager.allocator._references),
        "free slots": list(manager._free_slots),
        "requests": {
            slot: (id(r), r.slot, r.length, list(r.block_ids), r.published_blocks, r.released)
            for slot, r in manager._requests.items()
        },
        "table": manager.block_table.tolist(),
        "step": manager.buffers.device_buffer.tolist(),
        "plan": id(manager._open_plan),
    }


@contextmanager
def nothing_changes(manager: KVCacheManager) -> Iterator[None]:
    before = snapshot(manager)
    slots = manager.slot_arena.bytes.clone()
    yield
    assert snapshot(manager) == before
    assert torch.equal(manager.slot_arena.bytes, slots)
    manager.check_invariants()


def step_rows(
    steps: list[tuple[Request, int, int]], *, ring_rows: int, ratios: dict[int, bool]
) -> dict[str, list[Row]]:
    """The rows of a step's buffers, token by token. `steps` are (request, start, tokens), `ratios`
    says for each compress ratio whether its groups overlap."""
    rows: dict[str, list[Row]] = {"batch": [], "tokens": []}
    for ratio in ratios:
        rows[f"groups {ratio}"] = []
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
            groups = sorted({position // ratio for position in range(start, end)})
            # the first item of a request takes two groups where they overlap
            items = [groups[: 1 + overlap]] if groups else []
            items += [[group] for group in groups[1 + overlap :]]
            for number, item in enumerate(items):
                rows[f"groups {ratio}"].append(
                    [request.slot, start, end, first_token_row, item[0], len(item), number == 0]
                )
    return rows
