"""Snapshots hold what a request needs at a block boundary, no more, and give it back as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.cache.arena import Arena
from dsv4.cache.prefix.snapshots import SnapshotPool
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import SnapshotLayout
from dsv4.errors import InvalidInput
from dsv4.model import AttentionType, LayerSpec, ModelSpec
from tests.support.numbers import Numbers

CPU = torch.device("cpu")
TINY = ModelSpec.preset("tiny")


def layer(nth: int, ratio: int, **options: object) -> LayerSpec:
    attention = AttentionType.CSA if ratio else AttentionType.SWA
    return LayerSpec(layer=nth, attention=attention, ratio=ratio, owner=nth, **options)


SCHEMAS = {
    "tiny": CacheSchema.build(TINY, max_context=512),
    "drafts": CacheSchema.build(TINY, max_context=512, max_draft_tokens=5),
    "long ring": CacheSchema.build(TINY, max_context=512, ring_rows=160),
    "bf16": CacheSchema.build(TINY, max_context=512, entry_format="bf16"),
    "fp8_row": CacheSchema.build(TINY, max_context=512, entry_format="fp8_row"),
    "blocks of 256": CacheSchema.build(TINY, max_context=512, block_tokens=256),
    # the ratios of V4.1: no overlap, and groups that close at once
    "ratio 2 and 1": CacheSchema.build(
        replace(TINY, layers=(layer(0, 0), layer(1, 2), layer(2, 1))),
        max_context=512,
        max_draft_tokens=2,
    ),
    "overlap of 2": CacheSchema.build(
        replace(TINY, layers=(layer(0, 2, overlap=True),)), max_context=512
    ),
    # a window that is longer than the first boundary
    "window of 200": CacheSchema.build(replace(TINY, window=200), max_context=512),
}


def live_rows(
    schema: CacheSchema, arena: Arena, slot: int, boundary: int
) -> dict[str, torch.Tensor]:
    """Every row of a slot that a step from `boundary` on may read, plane by plane."""
    found = {}
    for plane in schema.layout.planes:
        if plane.arena != "slot":
            continue
        spec = schema.model.layers[plane.layer]
        if spec.draft:
            continue  # left out of snapshots
        if plane.name.startswith("swa"):
            first = max(0, boundary - schema.model.window + 1)
        elif plane.name.endswith("b"):
            first = boundary - spec.ratio
        else:
            continue  # groups are closed at a boundary: the current stream holds nothing
        rows = [p % plane.shape[0] for p in range(first, boundary)]
        view = arena.view(plane)[slot, rows]
        found[f"{plane.layer}.{plane.name}"] = view.contiguous().view(torch.uint8).clone()
    return found


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_snapshot_gives_back_every_live_row(name: str, where: str):
    schema = SCHEMAS[name]
    arena = Arena(schema, "slot", 3, CPU)
    arena.bytes.copy_(Numbers(1).integers(0, 256, *arena.bytes.shape).to(torch.uint8))
    pool = SnapshotPool(schema, 3, where=where, device=CPU)
    boundaries = (schema.block_tokens, 2 * schema.block_tokens)
    expected = [
        live_rows(schema, arena, slot, b) for slot, b in zip((0, 1), boundaries, strict=True)
    ]
    pool.bytes.fill_(0xFF)
    for row, (slot, boundary) in enumerate(zip((0, 1), boundaries, strict=True)):
        pool.capture(arena.bytes[slot], row, boundary)
    assert bool((pool.bytes[2] == 0xFF).all())
    arena.bytes.fill_(0xEE)
    for row, boundary in enumerate(boundaries):
        pool.restore(arena.bytes[2], row, boundary)
        found = live_rows(schema, arena, 2, boundary)
        assert found.keys() == expected[row].keys()
        for plane, rows in found.items():
            assert torch.equal(rows, expected[row][plane]), plane
    assert bool((arena.bytes[:2] == 0xEE).all())


def test_other_bytes_of_the_slot_stay():
    schema = SCHEMAS["drafts"]
    arena = Arena(schema, "slot", 1, CPU)
    arena.bytes.fill_(0xAA)
    pool = SnapshotPool(schema, 1, where="device", device=CPU)
    pool.bytes.fill_(0xBB)
    pool.restore(arena.bytes[0], 0, 256)
    assert int((arena.bytes == 0xBB).sum()) == pool.layout.payload_bytes
    assert int((arena.bytes == 0xAA).sum()) == schema.bytes.slot - pool.layout.payload_bytes


@pytest.mark.parametrize(
    ("preset", "expected_bytes"),
    [
        # layers · 127 rows of 584 B, and of each CSA layer 4 rows of 512 and of 128 values, k and z
        ("v4-flash", 43 * 127 * 584 + 21 * 2 * 4 * (512 + 128) * 4),
        ("v4-pro", 61 * 127 * 584 + 30 * 2 * 4 * (512 + 128) * 4),
    ],
)
def test_the_size_is_what_the_specification_counts(preset: str, expected_bytes: int):
    for drafts in (0, 4):
        schema = CacheSchema.build(ModelSpec.preset(preset), max_draft_tokens=drafts)
        layout = SnapshotLayout(schema)
        assert layout.payload_bytes == expected_bytes
        assert 0 <= layout.row_bytes - expected_bytes < 4 * schema.align_bytes


def test_the_size_that_the_documentation_names():
    layout = SnapshotLayout(CacheSchema.build(ModelSpec.preset("v4-flash")))
    text = (Path(__file__).parents[2] / "docs" / "lifecycle.md").read_text()
    assert f"{layout.row_bytes:,} bytes" in text


def test_runs_do_not_overlap_and_fill_the_row():
    for schema in SCHEMAS.values():
        layout = SnapshotLayout(schema)
        end = 0
        for run in sorted(
            (run for section in layout.sections for run in section), key=lambda r: r.offset_bytes
        ):
            assert end <= run.offset_bytes < end + schema.align_bytes
            end = run.offset_bytes + run.bytes
        assert end <= layout.row_bytes < end + schema.align_bytes


def test_memory_is_what_was_asked_for():
    schema = SCHEMAS["tiny"]
    pool = SnapshotPool(schema, 5, where="device", device=CPU)
    assert pool.bytes.shape == (5, SnapshotLayout(schema).row_bytes)
    index_bytes = 2 * 8 * sum(run.ring_rows for section in pool.layout.sections for run in section)
    assert pool.memory_bytes() == pool.bytes.numel() + index_bytes
    assert SnapshotPool(schema, 0, where="device", device=CPU).memory_bytes() == 0


@pytest.mark.parametrize("rows", [-1, 1.5, True, None])
def test_rows_that_are_no_count(rows: object):
    with pytest.raises(InvalidInput, match="snapshots"):
        SnapshotPool(SCHEMAS["tiny"], rows, where="device", device=CPU)


def test_a_place_that_is_none():
    with pytest.raises(InvalidInput, match="'disk': use 'device' or 'host'"):
        SnapshotPool(SCHEMAS["tiny"], 1, where="disk", device=CPU)
