"""Dequantising gathers of V4-Flash entries: one long request and many middling ones."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.timing import Result, graph_time_us
from dsv4.cache.reads import EntrySource
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.gather import gather_all_entries, gather_entries
from dsv4.model import ModelSpec

CSA_LAYER = 2
ANCHORS_TB_PER_S = {(1, 262_144): 0.05, (16, 16_384): 0.77}
TARGET_BYTES_PER_US = 3.4e6


def cases() -> Iterator[Result]:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    page = schema.page("entries", CSA_LAYER)
    assert page is not None
    moved_per_entry = page.format.record_bytes + 2 * page.format.width
    for rows, entries in ANCHORS_TB_PER_S:
        blocks = rows * entries // page.rows
        arena = torch.randint(
            0, 120, (blocks, schema.block_bytes), dtype=torch.uint8, device="cuda"
        )
        table = torch.randperm(blocks, device="cuda").to(torch.int32).view(rows, -1)
        source = EntrySource(arena=arena, page=page, block_table=table, ratio=4)
        slot = torch.arange(rows, dtype=torch.int32, device="cuda")
        position = torch.full((rows,), entries * 4 - 1, dtype=torch.int32, device="cuda")
        out = torch.empty((rows, entries, page.format.width), dtype=torch.bfloat16, device="cuda")
        lengths = torch.empty((rows,), dtype=torch.int32, device="cuda")

        def gather_all(
            source: EntrySource = source,
            slot: torch.Tensor = slot,
            position: torch.Tensor = position,
            out: torch.Tensor = out,
            lengths: torch.Tensor = lengths,
        ) -> None:
            gather_all_entries(source, slot=slot, position=position, out=out, lengths=lengths)

        moved = rows * entries * moved_per_entry
        peer = moved / (ANCHORS_TB_PER_S[rows, entries] * 1e6)
        yield Result(
            case=f"gather all {rows} x {entries}",
            microseconds=graph_time_us([gather_all]),
            launches=1,
            must_move_bytes=moved,
            target_us=moved / TARGET_BYTES_PER_US,
            peers_us={"vLLM": round(peer, 1)},
        )
        top_k = min(512, entries)
        indices = torch.stack(
            [torch.randperm(entries, device="cuda")[:top_k].sort().values for _ in range(rows)]
        ).to(torch.int32)
        chosen = out[:, :top_k].contiguous()

        def gather_chosen(
            source: EntrySource = source,
            slot: torch.Tensor = slot,
            position: torch.Tensor = position,
            indices: torch.Tensor = indices,
            chosen: torch.Tensor = chosen,
        ) -> None:
            gather_entries(source, slot=slot, position=position, indices=indices, out=chosen)

        yield Result(
            case=f"gather top-{top_k} of {rows} x {entries}",
            microseconds=graph_time_us([gather_chosen], repeats=10),
            launches=1,
            must_move_bytes=rows * top_k * moved_per_entry,
        )
