"""The map of the arenas: byte counts against the papers, and no two planes on one byte."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.cache import records
from dsv4.cache.pages import ITEM_BYTES, Page, Plane
from dsv4.cache.schema import (
    AttentionType,
    CacheSchema,
    byte_map,
    bytes_by_kind,
    compute_block_budget,
)
from dsv4.errors import InvalidInput, PoolTooSmall, SchemaError
from dsv4.model import PRESETS, LayerSpec, ModelSpec, v4_layers

FLASH = PRESETS["v4-flash"]
PRO = PRESETS["v4-pro"]
TINY = PRESETS["tiny"]


def payload_per_token(schema: CacheSchema) -> float:
    """Bytes a token before alignment: what the papers count (the pad byte of 584 included)."""
    in_block = (page.payload_bytes for page in schema.layout.pages if page.kind != "window")
    return sum(in_block) / schema.block_tokens


def paint(schema: CacheSchema, arena: str) -> np.ndarray:
    """How many planes claim each byte of a row of the arena, by walking offsets and strides."""
    row_bytes = schema.bytes.block if arena == "block" else schema.bytes.slot
    claims = np.zeros(row_bytes, dtype=np.uint8)
    for plane in schema.layout.planes:
        if plane.arena != arena:
            continue
        rows, columns = plane.shape
        row_stride, column_stride = plane.strides_bytes
        item = ITEM_BYTES[plane.dtype]
        assert column_stride == item
        last = plane.offset_bytes + (rows - 1) * row_stride + columns * item
        assert plane.offset_bytes >= 0
        assert last <= row_bytes, f"{plane} leaves the row of {row_bytes} bytes"
        for row in range(rows):
            start = plane.offset_bytes + row * row_stride
            claims[start : start + columns * item] += 1
    return claims


def check_layout(schema: CacheSchema) -> None:
    """Planes are disjoint, inside, aligned, and the sums of bytes_by_kind are the totals."""
    by_kind = bytes_by_kind(schema)
    for arena, total in (("block", schema.bytes.block), ("slot", schema.bytes.slot)):
        claims = paint(schema, arena)
        assert claims.max(initial=0) <= 1, f"two planes of the {arena} share a byte"
        assert sum(by_kind[arena].values()) == total
        assert by_kind[arena]["padding"] == int((claims == 0).sum())
        assert total % schema.align_bytes == 0
    for page in schema.layout.pages:
        assert page.offset_bytes % schema.align_bytes == 0
    for plane in schema.layout.planes:
        item = ITEM_BYTES[plane.dtype]
        assert plane.offset_bytes % item == 0
        assert all(stride % item == 0 for stride in plane.strides_bytes)
    names = [(plane.name, plane.layer) for plane in schema.layout.planes]
    assert len(set(names)) == len(names)


# ---- byte counts of the published models ----------------------------------------------------


@pytest.mark.parametrize(
    ("model", "index_format", "entry_format", "bytes_per_token"),
    [
        ("v4-flash", "mxfp4", "fp8_ds", 3_514.25),
        ("v4-flash-0731", "mxfp4", "fp8_ds", 3_514.25),
        ("v4-pro", "mxfp4", "fp8_ds", 5_031.4375),
        ("v4-flash", "fp8", "fp8_ds", 3_850.25),
        ("v4-pro", "fp8", "fp8_ds", 5_511.4375),
        ("v4-flash", "bf16", "bf16", 6_880.0),
        ("v4-pro", "bf16", "bf16", 9_848.0),
    ],
)
@pytest.mark.parametrize("block_tokens", [128, 256, 512])
def test_bytes_per_token_before_alignment_are_the_papers(
    model: str, index_format: str, entry_format: str, bytes_per_token: float, block_tokens: int
) -> None:
    schema = CacheSchema.build(
        PRESETS[model],
        block_tokens=block_tokens,
        index_format=index_format,
        entry_format=entry_format,
    )
    assert payload_per_token(schema) == bytes_per_token


def test_a_million_tokens_of_flash_are_3_685_gb() -> None:
    blocks = CacheSchema.build(FLASH).blocks_for(1_048_576)
    assert blocks * 21 * (32 * 584 + 32 * 68) + blocks * 20 * 584 == 3_684_958_208
    assert payload_per_token(CacheSchema.build(FLASH)) * 1_048_576 == 3_684_958_208


@pytest.mark.parametrize("block_tokens", [128, 256, 512])
def test_bytes_per_token_stay_near_the_papers_with_alignment(block_tokens: int) -> None:
    assert CacheSchema.build(FLASH, block_tokens=block_tokens).bytes.per_token <= 3_550
    assert CacheSchema.build(PRO, block_tokens=block_tokens).bytes.per_token <= 5_031.4375 * 1.01


def test_flash_sizes_to_the_byte() -> None:
    schema = CacheSchema.build(FLASH)
    assert schema.bytes.block == 449_824 + 20 * 24  # 584-byte HCA pages end 24 before a sector
    csa_tail = 2 * 4 * (4 + 8) * (512 + 128)  # k and z, fp32, current and previous stream
    hca_tail = 2 * 4 * 128 * 512
    assert schema.bytes.slot == 44 * 128 * 584 + 21 * csa_tail + 20 * hca_tail
    assert schema.bytes.block_table_row == 1_048_576 // 128 * 4
    assert schema.bytes.per_request == schema.bytes.slot + schema.bytes.block_table_row
    assert schema.bytes.per_request <= 15_800_000


def test_draft_layers_cost_one_ring_each_and_no_block_bytes() -> None:
    one, three = CacheSchema.build(FLASH), CacheSchema.build(PRESETS["v4-flash-0731"])
    assert three.bytes.block == one.bytes.block
    assert three.bytes.slot - one.bytes.slot == 2 * 128 * 584
    for schema, drafts in ((one, 1), (three, 3)):
        rings = [page for page in schema.layout.pages if schema.model.layers[page.layer].draft]
        assert [(page.kind, page.rows, page.payload_bytes) for page in rings] == [
            ("window", 128, 74_752)
        ] * drafts


@pytest.mark.parametrize("block_tokens", [128, 256, 512])
def test_entries_and_keys_a_block(block_tokens: int) -> None:
    for layer in CacheSchema.build(FLASH, block_tokens=block_tokens).layers:
        csa = layer.spec.attention is AttentionType.CSA
        expected = {0: 0, 4: block_tokens // 4, 128: block_tokens // 128}[layer.spec.ratio]
        assert layer.entries_per_block == expected
        assert layer.index_keys_per_block == (expected if csa else 0)


def test_tails_hold_the_group_the_previous_one_and_the_drafts() -> None:
    for drafts in (0, 1, 4, 16):
        schema = CacheSchema.build(FLASH, max_draft_tokens=drafts)
        rows = {
            layer.spec.attention: (layer.tail_a_rows, layer.tail_b_rows) for layer in schema.layers
        }
        assert rows == {
            AttentionType.SWA: (0, 0),
            AttentionType.CSA: (4 + drafts, 8 + drafts),
            AttentionType.HCA: (128 + drafts, 0),
        }
        assert schema.ring_rows == 128 + drafts
        assert schema.max_rollback_tokens == 1 + drafts


# ---- the page rule --------------------------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [128, 256, 512])
@pytest.mark.parametrize("align_bytes", [16, 32, 64, 576])
def test_pages_follow_flashmla(block_tokens: int, align_bytes: int) -> None:
    schema = CacheSchema.build(FLASH, block_tokens=block_tokens, align_bytes=align_bytes)
    for kind, prefix, scale in (("entries", "entries", "inv_scale"), ("window", "swa", "swa_inv")):
        for layer in range(len(schema.layers)):
            page = schema.layout.page(kind, layer)
            if page is None:
                assert kind == "entries"
                assert schema.layers[layer].spec.ratio == 0
                continue
            nope = schema.layout.plane(f"{prefix}_fp8", layer)
            rope = schema.layout.plane(f"{prefix}_rope", layer)
            scales = schema.layout.plane(scale, layer)
            assert nope is not None
            assert rope is not None
            assert scales is not None
            for s in (0, 1, page.rows - 1):
                assert row_start(nope, s) - page.offset_bytes == 576 * s
                assert row_start(rope, s) - page.offset_bytes == 576 * s + 448
                assert row_start(scales, s) - page.offset_bytes == 576 * page.rows + 8 * s
            assert (nope.shape[1], rope.shape[1], scales.shape[1]) == (448, 64, 7)
            assert (nope.dtype, rope.dtype, scales.dtype) == ("float8_e4m3fn", "bfloat16", "uint8")


def row_start(plane: Plane, row: int) -> int:
    return plane.offset_bytes + row * plane.strides_bytes[0]


def test_index_pages_follow_deepgemm() -> None:
    schema = CacheSchema.build(FLASH)
    page, keys = schema.layout.page("index_keys", 2), schema.layout.plane("indexer_keys_fp4", 2)
    scales = schema.layout.plane("indexer_scale", 2)
    assert page is not None
    assert keys is not None
    assert scales is not None
    assert row_start(keys, 5) - page.offset_bytes == 64 * 5
    assert row_start(scales, 5) - page.offset_bytes == 64 * 32 + 4 * 5


@pytest.mark.parametrize(
    ("block_tokens", "csa_stride", "hca_stride"),
    [(128, 19_008, 1_152), (256, 37_440, 1_728), (512, 74_880, 2_880)],
)
def test_with_576_alignment_pages_have_the_strides_of_sm100(
    block_tokens: int, csa_stride: int, hca_stride: int
) -> None:
    schema = CacheSchema.build(FLASH, block_tokens=block_tokens, align_bytes=576)
    pages = sorted(
        (page for page in schema.layout.pages if page.kind != "window"),
        key=lambda page: page.offset_bytes,
    )
    ends = [page.offset_bytes for page in pages[1:]] + [schema.bytes.block]
    for page, end in zip(pages, ends, strict=True):
        if page.kind == "entries":
            csa = schema.model.layers[page.layer].attention is AttentionType.CSA
            assert end - page.offset_bytes == (csa_stride if csa else hca_stride)
    # the next plane after layer 0's ring of 128 rows is layer 1's
    rings = [schema.layout.page("window", layer) for layer in (0, 1)]
    assert [ring.offset_bytes for ring in rings if ring] == [0, 74_880]
    check_layout(schema)


# ---- planes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", PRESETS)
def test_planes_of_the_presets_are_disjoint(model: str) -> None:
    check_layout(CacheSchema.build(PRESETS[model]))


def test_planes_lie_in_the_order_of_their_offsets() -> None:
    planes = CacheSchema.build(FLASH).layout.planes
    for arena in ("block", "slot"):
        offsets = [plane.offset_bytes for plane in planes if plane.arena == arena]
        assert offsets == sorted(offsets)


def test_the_names_of_the_inventory_are_there() -> None:
    schema = CacheSchema.build(FLASH)
    of_layer = {
        kind: {plane.name for plane in schema.layout.planes if plane.layer == layer}
        for kind, layer in (("swa", 0), ("csa", 2), ("hca", 3))
    }
    swa = {"swa_fp8", "swa_rope", "swa_inv"}
    entries = {"entries_fp8", "entries_rope", "inv_scale"}
    index = {"indexer_keys_fp4", "indexer_scale"}
    tail_a, tail_b = {"tail_ka", "tail_za"}, {"tail_kb", "tail_zb"}
    index_tail = {f"index_{name}" for name in tail_a | tail_b}
    assert of_layer["swa"] == swa
    assert of_layer["csa"] == swa | entries | index | tail_a | tail_b | index_tail
    assert of_layer["hca"] == swa | entries | tail_a


def test_byte_map_lists_every_plane_of_the_arena() -> None:
    schema = CacheSchema.build(TINY)
    for arena in ("block", "slot"):
        lines = byte_map(schema, arena).splitlines()
        planes = [plane for plane in schema.layout.planes if plane.arena == arena]
        assert len(lines) == 1 + len(planes)
        for line, plane in zip(lines[1:], planes, strict=True):
            assert line.split()[0] == f"{plane.offset_bytes:,}"
            assert line.endswith(f"layer {plane.layer:<3} {plane.name}")


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize("block_tokens", [1, 4, 64, 127, 129, 192, 200])
def test_blocks_that_split_a_group_are_refused(block_tokens: int) -> None:
    with pytest.raises(SchemaError, match=f"block_tokens={block_tokens}.*multiple of 128"):
        CacheSchema.build(FLASH, block_tokens=block_tokens)


@pytest.mark.parametrize(
    "name", ["block_tokens", "align_bytes", "max_draft_tokens", "max_context", "ring_rows"]
)
@pytest.mark.parametrize("value", [-1, 128.0, float("nan"), float("inf"), True, "128"])
def test_counts_are_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name):
        CacheSchema.build(FLASH, **{name: value})


@pytest.mark.parametrize("name", ["block_tokens", "align_bytes", "max_context", "ring_rows"])
def test_zero_is_no_size(name: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name}=0"):
        CacheSchema.build(FLASH, **{name: 0})


def test_a_ring_that_a_rejected_draft_would_ruin_is_refused() -> None:
    with pytest.raises(SchemaError, match="ring_rows >= 132 or at most 3 drafts"):
        CacheSchema.build(FLASH, ring_rows=131, max_draft_tokens=4)
    with pytest.raises(SchemaError, match="ring_rows >= 128"):
        CacheSchema.build(FLASH, ring_rows=127)
    assert CacheSchema.build(FLASH, ring_rows=132, max_draft_tokens=4).ring_rows == 132
    assert CacheSchema.build(FLASH, ring_rows=256, max_draft_tokens=4).ring_rows == 256


@pytest.mark.parametrize("align_bytes", [1, 8, 24, 33, 584])
def test_alignment_must_allow_vector_loads(align_bytes: int) -> None:
    with pytest.raises(SchemaError, match="multiple of 16"):
        CacheSchema.build(FLASH, align_bytes=align_bytes)


def test_context_past_the_model_is_refused() -> None:
    with pytest.raises(SchemaError, match="1048577"):
        CacheSchema.build(FLASH, max_context=1_048_577)


def test_formats_of_another_width_are_refused() -> None:
    with pytest.raises(SchemaError, match="head_dim=512"):
        CacheSchema.build(FLASH, entry_format=records.fp8_ds(256, 64))
    with pytest.raises(SchemaError, match="index_dim=128"):
        CacheSchema.build(FLASH, index_format=records.mxfp4(64))
    with pytest.raises(SchemaError, match="unknown record format"):
        CacheSchema.build(FLASH, window_format="fp7")


def test_widths_that_leave_items_unaligned_are_refused_when_built() -> None:
    odd = replace(TINY, head_dim=67)  # 3 bytes of FP8, then bf16 on an odd address
    with pytest.raises(SchemaError, match="aligned"):
        CacheSchema.build(odd)


# ---- fingerprint ----------------------------------------------------------------------------

CHANGES: dict[str, dict[str, Any]] = {
    "block_tokens": {"block_tokens": 256},
    "align_bytes": {"align_bytes": 64},
    "ring_rows": {"ring_rows": 160},
    "max_draft_tokens": {"max_draft_tokens": 4},
    "max_draft_tokens with the same ring": {"max_draft_tokens": 3, "ring_rows": 160},
    "entry_format": {"entry_format": "fp8_row", "window_format": "fp8_ds"},
    "window_format": {"window_format": "bf16"},
    "index_format": {"index_format": "nvfp4"},
    "layers": {"model": PRESETS["v4-flash-0731"]},
    "window": {"model": replace(FLASH, window=256)},
    "rope table": {"model": replace(FLASH, rope=replace(FLASH.rope, yarn_factor=8.0))},
    "rms_eps": {"model": replace(FLASH, rms_eps=1e-5)},
}


def build(change: dict[str, Any]) -> CacheSchema:
    return CacheSchema.build(**{"model": FLASH, **change})


RING_CHANGES = ("ring_rows", "max_draft_tokens", "max_draft_tokens with the same ring")


def test_fingerprints_differ_with_every_parameter() -> None:
    prints = {name: build(change).fingerprint for name, change in CHANGES.items()}
    prints["as it is"] = build({}).fingerprint
    assert len(set(prints.values())) == len(prints)


def test_content_fingerprints_differ_with_every_parameter_but_the_lengths_of_rings() -> None:
    prints = {name: build(change).content_fingerprint for name, change in CHANGES.items()}
    expected = build({}).content_fingerprint
    assert [prints.pop(name) for name in RING_CHANGES] == [expected] * len(RING_CHANGES)
    assert len({expected, *prints.values()}) == len(prints) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"hca_state": "online"},  # entries differ by rounding
        {"model": replace(FLASH, index_topk=256)},  # what later layers say depends on it
        *(
            {"model": replace(FLASH, rope=replace(FLASH.rope, **{field.name: 3.0}))}
            for field in fields(FLASH.rope)
        ),
    ],
    ids=str,
)
def test_what_changes_the_numbers_in_blocks_changes_the_content_fingerprint(
    change: dict[str, Any],
) -> None:
    assert build(change).content_fingerprint != build({}).content_fingerprint
    assert build(change).fingerprint != build({}).fingerprint


def test_integers_of_numpy_make_the_same_schema() -> None:
    usual = build({"block_tokens": 256, "max_draft_tokens": 3, "max_context": 4096})
    numpy = {"block_tokens": np.int64(256), "max_draft_tokens": np.int8(3)}
    same = build({**numpy, "max_context": np.int32(4096)})
    assert same == usual
    assert same.fingerprint == usual.fingerprint
    model = replace(FLASH, window=np.int64(FLASH.window))
    assert build({"model": model}).fingerprint == build({}).fingerprint


def test_a_format_that_differs_in_values_only_has_its_own_fingerprint() -> None:
    usual = records.mxfp4(128)
    part = usual.parts[0]
    assert part.code is not None
    other = replace(usual, parts=(replace(part, code=replace(part.code, amax_floor=1e-4)),))
    assert build({"index_format": other}).fingerprint != build({}).fingerprint


def test_alignment_after_the_last_page_has_its_own_fingerprint() -> None:
    one_layer = replace(FLASH, layers=v4_layers([128], backbone=1))
    a = CacheSchema.build(one_layer, align_bytes=16)
    b = CacheSchema.build(one_layer, align_bytes=32)
    assert a.layout.planes == b.layout.planes
    assert a.bytes.block != b.bytes.block
    assert a.fingerprint != b.fingerprint


# as they were before layers had facts of their own; tiers and offers of then are still read
RELEASED = {
    "v4-flash": "b377bd668f19bd959ce26de722bb4d9b",
    "v4-pro": "748acdd112c573ab852795ec5b9594a0",
    "v41-flash": "83bce1a1087abd54686489ed1e6f14c4",
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_keep_their_fingerprints(name: str) -> None:
    assert CacheSchema.build(ModelSpec.preset(name)).fingerprint == RELEASED[name]


@pytest.mark.parametrize(
    "fact", [{"gated": True}, {"tail_skips_last": False}, {"index_hadamard": True}], ids=str
)
def test_a_fact_of_a_layer_that_is_not_v41_s_has_its_own_fingerprint(fact: dict[str, bool]) -> None:
    owner = V41.layers[20]
    assert (owner.gated, owner.tail_skips_last, owner.index_hadamard) == (False, True, False)
    layers = (*V41.layers[:20], replace(owner, **fact), *V41.layers[21:])
    other = CacheSchema.build(replace(V41, layers=layers))
    assert other.content_fingerprint != CacheSchema.build(V41).content_fingerprint


def test_cut_replays_change_no_fingerprint() -> None:
    """Nothing that follows one is cached."""
    assert build({"model": replace(FLASH, cut_replays=True)}).fingerprint == build({}).fingerprint


def test_which_compressor_a_layout_is_of_does_not_follow_from_its_arithmetic() -> None:
    for hadamard in (True, False):
        layer = replace(v4_layers([4], backbone=1)[0], index_hadamard=hadamard)
        schema = CacheSchema.build(replace(TINY, layers=(layer,)))
        main, index = schema.layout.compressor(0, "main"), schema.layout.compressor(0, "index")
        assert main is not None
        assert index is not None
        assert (main.kind, main.hadamard) == ("main", False)
        assert (index.kind, index.hadamard) == ("index", hadamard)


def test_lengths_and_names_that_move_no_byte_do_not_change_it() -> None:
    expected = build({}).fingerprint
    assert build({"model": replace(FLASH, heads=32, index_heads=8)}).fingerprint == expected
    assert build({"max_context": 4096}).fingerprint == expected
    assert build({"model": replace(FLASH, name="mine")}).fingerprint == expected
    assert build({"model": replace(FLASH, max_context=4096)}).fingerprint == expected
    assert build({"window_format": "fp8_ds"}).fingerprint == expected


def test_another_process_finds_the_same_fingerprint() -> None:
    code = (
        "from dsv4.cache.schema import CacheSchema; from dsv4.model import ModelSpec;"
        "print(CacheSchema.build(ModelSpec.preset('v4-flash')).fingerprint)"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        env={"PYTHONHASHSEED": "12345"},
    )
    assert result.stdout.strip() == build({}).fingerprint


# ---- V4.1: other ratios, shared layers, other records ---------------------------------------


V41 = PRESETS["v41-flash"]


def v41_owner(layer: int) -> int:
    if layer < 2:
        return layer
    return 2 + (layer - 2) // 6 * 6 if layer < 20 else 20


def v41_schema(**options: Any) -> CacheSchema:
    return CacheSchema.build(V41, **options)


def test_v41_records_and_owners() -> None:
    schema = v41_schema()
    assert (schema.window_format.record_bytes, schema.entry_format.record_bytes) == (528, 288)
    owners = [spec.layer for spec in V41.layers if spec.owns_entries]
    assert owners == [2, 8, 14, 20]


@pytest.mark.parametrize("block_tokens", [2, 64, 128, 256])
def test_v41_costs_890_bytes_a_token(block_tokens: int) -> None:
    schema = v41_schema(block_tokens=block_tokens)
    assert payload_per_token(schema) == 890
    check_layout(schema)


def test_v41_shared_layers_have_no_planes_in_the_block_and_read_their_owners() -> None:
    schema = v41_schema()
    in_block = {plane.layer for plane in schema.layout.planes if plane.arena == "block"}
    assert in_block == {2, 8, 14, 20}
    for layer in range(40):
        for kind in ("entries", "index_keys"):
            page = schema.layout.page(kind, layer)
            if layer < 2:
                assert page is None
                continue
            assert page is not None
            assert page.layer == v41_owner(layer)
            assert page.rows == (64 if layer < 20 else 128)
        window = schema.layout.page("window", layer)
        assert window is not None
        assert window.layer == layer


def test_v41_slots_hold_the_rings_and_a_pair_state_of_the_ratio_2_owners() -> None:
    schema = v41_schema()
    tails = {plane.layer for plane in schema.layout.planes if plane.kind == "tail"}
    assert tails == {2, 8, 14}  # ratio 1 closes at once, shared layers compress nothing
    assert not any(
        plane.kind == "index_tail" for plane in schema.layout.planes
    )  # keys come from latents
    rings, pairs = 43 * 128 * 528, 3 * 2 * 512 * 4  # of a pair, the token that waits
    assert schema.bytes.slot == rings + pairs == 2_918_400
    undrafted = CacheSchema.build(replace(V41, layers=V41.layers[:40]))
    assert undrafted.bytes.slot == 2_715_648
    assert (schema.bytes.block, schema.bytes.per_token) == (113_920, 890)


@pytest.mark.parametrize("drafts", range(9))
@pytest.mark.parametrize("ratio", [2, 3, 4])
def test_a_tail_without_last_tokens_keeps_what_any_rollback_needs(ratio: int, drafts: int) -> None:
    """Whatever length a step starts at and is taken back to, the tokens of the unfinished group are
    there, and none of those that the step writes lies on one that it reads."""
    spec = LayerSpec(
        layer=0, owner=0, attention=AttentionType.CSA, ratio=ratio, tail_skips_last=True
    )
    schema = CacheSchema.build(
        replace(TINY, layers=(spec,)), max_draft_tokens=drafts, block_tokens=12 * ratio
    )
    rows = schema.layers[0].tail_a_rows
    for start in range(3 * ratio):
        group = start - start % ratio
        kept = [p for p in range(group, start + 1 + drafts) if p % ratio != ratio - 1]
        ranks = [p - p // ratio for p in kept]
        assert len({rank % rows for rank in ranks}) == len(ranks)


@pytest.mark.parametrize("options", [{}, {"max_draft_tokens": 5}, {"block_tokens": 256}], ids=str)
def test_v41_pages_are_as_flash_mla_wants_them(options: dict[str, int]) -> None:
    """All data rows, then all scale rows; from page to page a multiple of the data row."""
    schema = v41_schema(**options, align_bytes=512)
    for kind, arena, row, scale in (
        ("entries", schema.bytes.block, 256, 32),
        ("window", schema.bytes.slot, 512, 16),
    ):
        page = schema.layout.page(kind, 20)
        assert page is not None
        assert (page.format.data_row_bytes, page.format.scale_row_bytes) == (row, scale)
        assert page.scale_offset_bytes == page.offset_bytes + page.rows * row
        assert arena % row == page.offset_bytes % row == 0
    if options.get("max_draft_tokens") is None:  # the default alignment does, too
        default = v41_schema(**options)
        assert (default.bytes.block % 256, default.bytes.slot % 512) == (0, 0)


def test_a_shared_layer_has_no_tail_even_where_groups_overlap() -> None:
    csa = v4_layers([4], backbone=1)[0]
    shared = replace(csa, layer=1)  # reads layer 0
    schema = CacheSchema.build(replace(TINY, layers=(csa, shared)))
    assert {plane.layer for plane in schema.layout.planes if plane.kind != "window"} == {0}
    check_layout(schema)


# ---- random schemas -------------------------------------------------------------------------


@st.composite
def schemas(draw: st.DrawFn) -> CacheSchema:
    layers: list[LayerSpec] = []
    for number in range(draw(st.integers(1, 5))):
        owners = [spec for spec in layers if spec.owns_entries]
        if owners and draw(st.booleans()):
            shared = draw(st.sampled_from(owners))
            layers.append(replace(shared, layer=number, index_keys="none"))
            continue
        ratio = draw(st.sampled_from([0, 1, 2, 3, 4, 8, 16]))
        overlap = draw(st.booleans()) if ratio else False
        layers.append(
            LayerSpec(
                layer=number,
                attention=draw(st.sampled_from(AttentionType)),
                ratio=ratio,
                overlap=overlap,
                gated=ratio > 1 or draw(st.booleans()),
                tail_skips_last=not overlap and draw(st.booleans()),
                index_keys=draw(st.sampled_from(["none", "compressor", "latent"])),
                index_hadamard=draw(st.booleans()),
                owner=number,
            )
        )
    model = replace(
        TINY,
        head_dim=draw(st.sampled_from([32, 48, 96, 128])) + 16,
        rope_dim=16,
        index_dim=draw(st.sampled_from([32, 64, 96])),
        window=draw(st.integers(1, 20)),
        layers=tuple(layers),
    )
    group = lcm(1, *(spec.ratio for spec in layers if spec.ratio))
    drafts = draw(st.integers(0, 5))
    entry_format = draw(st.sampled_from(sorted(records.ENTRY_FORMATS)))
    alike = ["fp32"] if entry_format == "fp32" else sorted({*records.ENTRY_FORMATS} - {"fp32"})
    return CacheSchema.build(
        model,
        block_tokens=group * draw(st.integers(1, 3)),
        align_bytes=16 * draw(st.integers(1, 5)),
        max_draft_tokens=drafts,
        ring_rows=model.window + drafts + draw(st.integers(0, 3)),
        entry_format=entry_format,
        window_format=draw(st.sampled_from(alike)),
        index_format=draw(st.sampled_from(sorted(records.INDEX_FORMATS))),
    )


@settings(max_examples=150, deadline=None)
@given(schemas())
def test_planes_of_any_schema_are_disjoint(schema: CacheSchema) -> None:
    check_layout(schema)
    for spec in schema.model.layers:
        page = schema.layout.page("entries", spec.layer)
        assert (page is None) == (spec.ratio == 0)
        if page is not None:
            assert page.layer == spec.owner
            assert page.rows * spec.ratio == schema.block_tokens


def test_the_painter_sees_an_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: move one page by 8 bytes and two planes share them."""
    shifted = Page.scale_offset_bytes.func
    monkeypatch.setattr(Page, "scale_offset_bytes", property(lambda page: shifted(page) - 8))
    with pytest.raises(AssertionError, match="share a byte"):
        check_layout(CacheSchema.build(TINY))


# ---- budget ---------------------------------------------------------------------------------


def test_budget_gives_slots_first_and_the_rest_to_blocks() -> None:
    schema = CacheSchema.build(TINY)
    memory = 10_000_000
    budget = compute_block_budget(schema, memory_bytes=memory, max_requests=3)
    assert budget.slot_arena_bytes == 3 * schema.bytes.slot
    assert budget.block_table_bytes == 3 * schema.bytes.block_table_row
    assert budget.block_arena_bytes == budget.num_blocks * schema.bytes.block
    assert budget.total_bytes + budget.unused_bytes == memory
    assert 0 <= budget.unused_bytes < schema.bytes.block


def test_budget_minimum_is_the_least_that_works() -> None:
    schema = CacheSchema.build(TINY)
    with pytest.raises(PoolTooSmall) as caught:
        compute_block_budget(schema, memory_bytes=0, max_requests=2, context=1000)
    minimum = caught.value.minimum_bytes
    assert minimum == 2 * schema.bytes.per_request + 8 * schema.bytes.block
    assert f"{minimum:,}" in str(caught.value)
    found = compute_block_budget(schema, memory_bytes=minimum, max_requests=2, context=1000)
    assert (found.num_blocks, found.unused_bytes) == (8, 0)
    with pytest.raises(PoolTooSmall):
        compute_block_budget(schema, memory_bytes=minimum - 1, max_requests=2, context=1000)


@pytest.mark.parametrize("name", ["memory_bytes", "max_requests", "context"])
@pytest.mark.parametrize("value", [-1, 1.5, float("nan"), float("inf"), True])
def test_budget_counts_are_whole_numbers(name: str, value: object) -> None:
    counts = {"memory_bytes": 10**9, "max_requests": 1, "context": 128, name: value}
    with pytest.raises(InvalidInput, match=name):
        compute_block_budget(CacheSchema.build(TINY), **counts)


# ---- docs -----------------------------------------------------------------------------------


def test_the_numbers_of_the_layout_page_are_the_schema_s() -> None:
    text = (Path(__file__).parents[2] / "docs" / "layout.md").read_text(encoding="utf-8")
    schema = CacheSchema.build(FLASH)
    sm100 = CacheSchema.build(FLASH, align_bytes=576)
    large = [CacheSchema.build(FLASH, block_tokens=tokens) for tokens in (256, 512)]
    online = CacheSchema.build(FLASH, hca_state="online")
    numbers = [
        *(online.bytes.slot, online.bytes.per_request, bytes_by_kind(online)["slot"]["hca tail"]),
        *(schema.bytes.block, schema.bytes.slot, schema.bytes.per_request, schema.bytes.per_token),
        *(schema.bytes.block_table_row, sm100.bytes.block, sm100.bytes.per_token),
        *(size.bytes.block for size in large),
        *(size.bytes.per_token for size in large),
        *(amount for kinds in bytes_by_kind(schema).values() for amount in kinds.values()),
        *(plane.offset_bytes for plane in schema.layout.planes if plane.layer in (2, 3)),
    ]
    missing = [number for number in numbers if f"{number:,}".removesuffix(".0") not in text]
    assert not missing


def test_an_unknown_compressor_is_refused():
    schema = CacheSchema.build(ModelSpec.preset("tiny"))
    with pytest.raises(InvalidInput, match="ask for 'main' or 'index'"):
        schema.layout.compressor(1, "tail")  # type: ignore[arg-type]
