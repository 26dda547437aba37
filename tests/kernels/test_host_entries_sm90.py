"""The kernels of entries in host memory, compiled for sm_90 with the shapes of V4 and V4.1."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from dsv4.cache.hot_rows import HotLayout
from dsv4.cache.pages import Page
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource, HotRows, Resolving, Staging
from tests.kernels.sm90 import compiled, empty, run_apart

REQUESTS, ARENA_ROWS = 16, 4096
# name -> (model, layer, draft tokens)
CASES: dict[str, tuple[str, int, int]] = {
    "resolve flash": ("v4-flash", 2, 0),
    "resolve pro": ("v4-pro", 2, 1),
    "fetch flash": ("v4-flash", 2, 0),
    "fetch v41": ("v41-flash", 20, 0),
    "stage flash": ("v4-flash", 2, 0),
}
MOST_REGISTERS = {"resolve": 128, "fetch": 64, "stage": 64}


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_host_entries_sm90")
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_stays_in_registers(made: dict[str, dict[str, Any]], case: str) -> None:
    assert made[case]["spill_bytes"] == 0
    assert made[case]["registers"] <= MOST_REGISTERS[case.split()[0]]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("resolve")])
def test_records_are_copied_16_bytes_a_thread(made: dict[str, dict[str, Any]], case: str) -> None:
    assert made[case]["wide_loads"] > 0
    assert made[case]["wide_loads"] == made[case]["wide_stores"]


@pytest.mark.parametrize("case", CASES)
def test_what_another_launch_wrote_is_not_read_from_a_stale_cache(
    made: dict[str, dict[str, Any]], case: str
) -> None:
    """Tables and host memory change between launches, and tables within one."""
    assert not made[case]["read_only_loads"]


def launch(case: str) -> Launch:
    from dsv4.kernels import host_entries

    kind = case.split()[0]
    if kind == "stage":
        return host_entries.stage_launch(_staging(*CASES[case]))
    maker = {"resolve": host_entries.resolve_launch, "fetch": host_entries.fetch_launch}[kind]
    return maker(_resolving(*CASES[case]))


def _schema(model: str, layer: int, drafts: int) -> tuple[CacheSchema, Page]:
    schema = CacheSchema.build(ModelSpec.preset(model), max_draft_tokens=drafts, entries_apart=True)
    page = schema.layout.page("entries", layer)
    assert page is not None
    return schema, page


def _int32(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def _source(schema: CacheSchema, page: Page) -> EntrySource:
    return EntrySource(
        arena=empty(ARENA_ROWS, schema.bytes.entries, dtype=torch.uint8),
        page=page,
        block_table=_int32(REQUESTS, schema.max_blocks_per_request),
        ratio=schema.layers[page.layer].spec.ratio,
    )


def _resolving(model: str, layer: int, drafts: int) -> Resolving:
    schema, page = _schema(model, layer, drafts)
    layout, source = HotLayout(schema), _source(schema, page)
    records, tokens, top_k = layout.records(page), 1 + drafts, schema.model.index_topk
    rows = REQUESTS * tokens
    return Resolving(
        selected=_int32(rows, top_k),
        tokens=_int32(rows, 4),
        batch=_int32(REQUESTS, 4),
        entries=source,
        block_table=source.block_table,
        host=empty(ARENA_ROWS, schema.bytes.entries, dtype=torch.uint8),
        hot=HotRows(
            first_row=1024,
            records=records,
            place=empty(REQUESTS, layout.entries(page), dtype=torch.int16),
            entry_of=_int32(REQUESTS, records),
            used=_int32(REQUESTS, records),
            clock=_int32(REQUESTS),
            hand=_int32(REQUESTS),
            counted=empty(3, dtype=torch.int64),
        ),
        rows=_int32(rows, top_k),
        misses=_int32(REQUESTS, tokens * top_k, 2),
        miss_count=_int32(REQUESTS),
        tokens_per_request=tokens,
    )


def _staging(model: str, layer: int, drafts: int) -> Staging:
    schema, page = _schema(model, layer, drafts)
    source = _source(schema, page)
    staged = Page(
        kind="entries", layer=layer, offset_bytes=0, rows=page.rows, format=page.format, apart=True
    )
    arena = empty(schema.max_blocks_per_request, page.payload_bytes, dtype=torch.uint8)
    return Staging(
        batch=_int32(2, 4),
        entries=source,
        block_table=source.block_table,
        host=empty(ARENA_ROWS, schema.bytes.entries, dtype=torch.uint8),
        staged=EntrySource(
            arena=arena, page=staged, block_table=source.block_table, ratio=source.ratio
        ),
    )


def compile_case(case: str) -> dict[str, Any]:
    found = compiled(launch(case))
    wide = r"\.global\S*\.v(2\.\w64|4\.\w32)"
    return {
        "spill_bytes": found.spill_bytes,
        "registers": found.registers,
        "wide_loads": len(re.findall("ld" + wide, found.ptx)),
        "wide_stores": len(re.findall("st" + wide, found.ptx)),
        "read_only_loads": found.ptx.count(".nc."),
    }


if __name__ == "__main__":
    print(json.dumps({case: compile_case(case) for case in CASES}))
