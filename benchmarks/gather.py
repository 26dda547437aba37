"""Dequantising gathers of V4-Flash entries: one long request and many middling ones. V4-Pro's
records are the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.case import Call, Case, Measurement, Work, sets_to_outgrow_l2
from benchmarks.peers import GATHER_TB_PER_S
from benchmarks.timing import measure
from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.gather import gather_all_entries, gather_entries
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource

CSA_LAYER = 2
RATIO = 4
TOP_K = 512
TARGET_BYTES_PER_US = 3.4e6


def cases() -> Iterator[Case]:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    page = schema.layout.page("entries", CSA_LAYER)
    assert page is not None
    for (rows, entries), rate in GATHER_TB_PER_S.items():
        moved = rows * entries * _moved_per_entry(page)
        yield Case(
            name=f"gather all {rows} x {entries}",
            suite="gather",
            series=f"gather all of {entries}",
            model="v4-flash",
            batch=rows,
            context=entries * RATIO,
            measure=partial(_measure, schema, page, rows, entries, listed=False),
            target_us=moved / TARGET_BYTES_PER_US,
            anchors_us={"vLLM": round(moved / (rate * 1e6), 1)},
        )
        yield Case(
            name=f"gather top-{TOP_K} of {rows} x {entries}",
            suite="gather",
            series=f"gather top-{TOP_K} of {entries}",
            model="v4-flash",
            batch=rows,
            context=entries * RATIO,
            measure=partial(_measure, schema, page, rows, entries, listed=True),
        )


def _moved_per_entry(page: Page) -> int:
    return page.format.record_bytes + 2 * page.format.width


def _measure(
    schema: CacheSchema, page: Page, rows: int, entries: int, *, listed: bool
) -> Measurement:
    blocks = rows * entries // page.rows
    arena = torch.randint(0, 120, (blocks, schema.bytes.block), dtype=torch.uint8, device="cuda")
    table = torch.randperm(blocks, device="cuda").to(torch.int32).view(rows, -1)
    source = EntrySource(arena=arena, page=page, block_table=table, ratio=RATIO)
    slot = torch.arange(rows, dtype=torch.int32, device="cuda")
    position = torch.full((rows,), entries * RATIO - 1, dtype=torch.int32, device="cuda")
    taken = TOP_K if listed else entries
    moved = rows * taken * _moved_per_entry(page)
    out = torch.empty((rows, taken, page.format.width), dtype=torch.bfloat16, device="cuda")
    lengths = torch.empty((rows,), dtype=torch.int32, device="cuda")

    def gather_all() -> None:
        gather_all_entries(source, slot=slot, position=position, out=out, lengths=lengths)

    def gather_listed(indices: Tensor) -> Call:
        return lambda: gather_entries(
            source, slot=slot, position=position, indices=indices, out=out
        )

    calls: list[Call] = [gather_all]
    if listed:
        calls = [
            gather_listed(_chosen(rows, entries)) for _ in range(sets_to_outgrow_l2(moved, 32))
        ]
    return measure(Work(calls=calls, must_move_bytes=moved))


def _chosen(rows: int, entries: int) -> Tensor:
    lists = [torch.randperm(entries, device="cuda")[:TOP_K].sort().values for _ in range(rows)]
    return torch.stack(lists).to(torch.int32)
