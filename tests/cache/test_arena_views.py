"""Views are windows on the arenas: each writes exactly the schema's bytes and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from dsv4.cache.arena import Arena
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import ITEM_BYTES, Plane
from dsv4.cache.records import Part, RecordFormat, TileCode
from dsv4.cache.schema import CacheSchema, bytes_by_kind
from dsv4.errors import SchemaMismatch
from dsv4.model import AttentionType, LayerSpec, ModelSpec, v4_layers
from dsv4.reference.codec import decode, encode
from tests.support.numbers import Numbers

ROWS = 3
# one layer of each kind with V4's real widths: window only, CSA, HCA, draft
V4_SMALL = replace(
    ModelSpec.preset("v4-flash"), name="v4-small", layers=v4_layers([0, 4, 128, 0], backbone=3)
)
SWA, CSA, HCA, DRAFT = range(4)

WINDOW_528 = RecordFormat(
    name="v41_window",
    width=512,
    parts=(
        Part(
            name="fp8",
            start=0,
            width=512,
            code=TileCode(element="e4m3", tile=32, scale="ue8m0", amax_floor=1e-4),
        ),
    ),
)
ENTRY_288 = RecordFormat(
    name="v41_entry",
    width=512,
    parts=(
        Part(
            name="fp4",
            start=0,
            width=512,
            code=TileCode(element="e2m1", tile=16, scale="e4m3", amax_floor=6 * 2.0**-9),
        ),
    ),
)


def v41_schema() -> CacheSchema:
    """Ratios 1 and 2, layers that read an earlier one's entries, keys from the latent."""

    def layer(number: int, ratio: int, owner: int) -> LayerSpec:
        return LayerSpec(
            layer=number,
            attention=AttentionType.CSA if ratio else AttentionType.SWA,
            ratio=ratio,
            gated=owner != number or ratio != 1,
            tail_skips_last=bool(ratio) and owner == number,
            index_keys="latent" if ratio and owner == number else "none",
            index_hadamard=owner != number,
            owner=owner,
        )

    layers = (layer(0, 0, 0), layer(1, 2, 1), layer(2, 2, 1), layer(3, 1, 3), layer(4, 1, 3))
    model = replace(V4_SMALL, name="v41-like", layers=layers)
    return CacheSchema.build(
        model, max_context=256, entry_format=ENTRY_288, window_format=WINDOW_528
    )


def build(**options: object) -> CacheSchema:
    return CacheSchema.build(V4_SMALL, max_context=512, **options)  # type: ignore[arg-type]


SCHEMAS = {
    "fp8_ds mxfp4": build(),
    "fp8_row fp8 drafts": build(
        entry_format="fp8_row", index_format="fp8", max_draft_tokens=3, block_tokens=256
    ),
    "bf16 bf16 aligned to 576": build(entry_format="bf16", index_format="bf16", align_bytes=576),
    "fp8_ds nvfp4 long ring": build(index_format="nvfp4", ring_rows=160),
    "v41": v41_schema(),
    "tiny": CacheSchema.build(ModelSpec.preset("tiny"), max_context=512),
}


def manager_of(schema: CacheSchema) -> KVCacheManager:
    manager = KVCacheManager(schema, num_blocks=ROWS, max_requests=ROWS, max_step_tokens=8)
    manager.memory.block_arena.bytes.fill_(0xFF)
    manager.memory.slot_arena.bytes.fill_(0xFF)
    return manager


def address(arena: Arena, view: Tensor) -> int:
    return view.data_ptr() - arena.bytes.data_ptr()


# ---- planes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_write_through_a_view_lands_on_the_planes_bytes_and_nowhere_else(name: str):
    schema = SCHEMAS[name]
    manager = manager_of(schema)
    numbers = Numbers(1)
    for plane in schema.layout.planes:
        arena = manager.memory.block_arena if plane.arena == "block" else manager.memory.slot_arena
        handle = manager.acquire(plane.layer)
        view = getattr(
            handle.memory.pool if plane.arena == "block" else handle.memory.state, plane.name
        )
        assert view.shape == (ROWS, *plane.shape)
        item = ITEM_BYTES[plane.dtype]
        payload = numbers.integers(0, 255, ROWS, *plane.shape[:-1], plane.shape[-1] * item)
        source = payload.to(torch.uint8)
        view.copy_(source.view(view.dtype))
        expected = np.full((ROWS, arena.row_bytes), 0xFF, dtype=np.uint8)
        for row in range(ROWS):
            for record in range(plane.shape[0]):
                at = plane.offset_bytes + record * plane.strides_bytes[0]
                expected[row, at : at + payload.shape[-1]] = payload[row, record]
        np.testing.assert_array_equal(arena.bytes.numpy(), expected, err_msg=plane.name)
        arena.bytes.fill_(0xFF)


@pytest.mark.parametrize("name", SCHEMAS)
def test_planes_of_an_arena_do_not_overlap_and_stay_inside(name: str):
    schema = SCHEMAS[name]
    for arena, total in (("block", schema.bytes.block), ("slot", schema.bytes.slot)):
        owner = np.full(total, -1)
        for number, plane in enumerate(p for p in schema.layout.planes if p.arena == arena):
            assert plane.strides_bytes[1] == ITEM_BYTES[plane.dtype]
            for record in range(plane.shape[0]):
                at = plane.offset_bytes + record * plane.strides_bytes[0]
                span = owner[at : at + plane.shape[1] * ITEM_BYTES[plane.dtype]]
                assert len(span) == plane.shape[1] * ITEM_BYTES[plane.dtype]
                assert (span == -1).all()
                span[:] = number
        assert (owner >= 0).sum() == sum(
            p.payload_bytes for p in schema.layout.planes if p.arena == arena
        )


@pytest.mark.parametrize("name", SCHEMAS)
def test_views_are_made_once_and_share_the_arenas_memory(name: str):
    manager = manager_of(SCHEMAS[name])
    for layer in range(len(manager.schema.layers)):
        handle = manager.acquire(layer)
        for arena, planes in (
            (manager.memory.block_arena, handle.memory.pool),
            (manager.memory.slot_arena, handle.memory.state),
        ):
            for plane_name, view in planes.views.items():
                assert getattr(planes, plane_name) is view
                assert view.untyped_storage().data_ptr() == arena.bytes.data_ptr()


def test_layers_have_the_names_of_the_inventory():
    manager = manager_of(SCHEMAS["fp8_ds mxfp4"])
    entries = ["entries_fp8", "entries_rope", "inv_scale"]
    window = ["swa_fp8", "swa_rope", "swa_inv"]
    tails = ["tail_ka", "tail_za", "tail_kb", "tail_zb"]
    index_tails = [f"index_{name}" for name in tails]
    expected = {
        SWA: (set(), set(window)),
        CSA: (
            {*entries, "indexer_keys_fp4", "indexer_scale"},
            {*window, *tails, *index_tails},
        ),
        HCA: (set(entries), {*window, "tail_ka", "tail_za"}),
        DRAFT: (set(), set(window)),
    }
    for layer, (pool, state) in expected.items():
        handle = manager.acquire(layer)
        assert (set(handle.memory.pool.views), set(handle.memory.state.views)) == (pool, state)


def test_views_have_the_shapes_and_types_of_the_design():
    manager = manager_of(SCHEMAS["fp8_ds mxfp4"])
    pool, state = manager.acquire(CSA).memory.pool, manager.acquire(CSA).memory.state
    found = {
        name: (tuple(view.shape[1:]), view.dtype)
        for name, view in (pool.views | state.views).items()
    }
    fp8, bf16, u8, fp32 = torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.float32
    assert found == {
        "entries_fp8": ((32, 448), fp8),
        "entries_rope": ((32, 64), bf16),
        "inv_scale": ((32, 7), u8),
        "indexer_keys_fp4": ((32, 64), u8),
        "indexer_scale": ((32, 4), u8),
        "swa_fp8": ((128, 448), fp8),
        "swa_rope": ((128, 64), bf16),
        "swa_inv": ((128, 7), u8),
        "tail_ka": ((4, 512), fp32),
        "tail_za": ((4, 512), fp32),
        "tail_kb": ((8, 512), fp32),
        "tail_zb": ((8, 512), fp32),
        "index_tail_ka": ((4, 128), fp32),
        "index_tail_za": ((4, 128), fp32),
        "index_tail_kb": ((8, 128), fp32),
        "index_tail_zb": ((8, 128), fp32),
    }
    hca = manager.acquire(HCA)
    assert hca.memory.pool.entries_fp8.shape == (ROWS, 1, 448)
    assert hca.memory.state.tail_ka.shape == (ROWS, 128, 512)


@pytest.mark.parametrize(
    ("layer", "part", "name", "has"),
    [
        (SWA, "pool", "entries_fp8", "no planes"),
        (HCA, "pool", "indexer_keys_fp4", "entries_fp8"),
        (HCA, "state", "tail_kb", "tail_ka"),
        (SWA, "state", "tail_ka", "swa_fp8"),
        (CSA, "pool", "entires_fp8", "entries_fp8"),
    ],
)
def test_a_plane_that_a_layer_does_not_have_says_what_it_has(
    layer: int, part: str, name: str, has: str
):
    planes = getattr(manager_of(SCHEMAS["fp8_ds mxfp4"]).acquire(layer).memory, part)
    with pytest.raises(AttributeError, match=rf"layer {layer} keeps no '{name}'.*{has}"):
        getattr(planes, name)
    assert not hasattr(planes, name)


@pytest.mark.parametrize("name", SCHEMAS)
def test_memory_of_the_layers_and_the_padding_make_the_arena(name: str):
    manager = manager_of(SCHEMAS[name])
    schema = manager.schema
    own = [
        (handle.memory.pool, handle.memory.state)
        for handle in (manager.acquire(layer) for layer in range(len(schema.layers)))
        if handle.schema.spec.owner == handle.layer
    ]
    padding = {arena: kinds["padding"] for arena, kinds in bytes_by_kind(schema).items()}
    assert sum(pool.memory_bytes() for pool, _ in own) == ROWS * (
        schema.bytes.block - padding["block"]
    )
    states = [manager.acquire(layer).memory.state for layer in range(len(schema.layers))]
    assert sum(state.memory_bytes() for state in states) == ROWS * (
        schema.bytes.slot - padding["slot"]
    )


def test_reset_of_a_layers_slot_zeroes_its_planes_only():
    manager = manager_of(SCHEMAS["fp8_ds mxfp4"])
    manager.acquire(CSA).memory.state.reset_slot(1)
    expected = np.full(tuple(manager.memory.slot_arena.bytes.shape), 0xFF, dtype=np.uint8)
    for plane in manager.schema.layout.planes:
        if plane.arena == "slot" and plane.layer == CSA:
            for record in range(plane.shape[0]):
                at = plane.offset_bytes + record * plane.strides_bytes[0]
                expected[1, at : at + plane.shape[1] * ITEM_BYTES[plane.dtype]] = 0
    np.testing.assert_array_equal(manager.memory.slot_arena.bytes.numpy(), expected)


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 160, 161, 500])
def test_swa_pos_and_tail_len_follow_from_the_length_alone(length: int):
    manager = manager_of(SCHEMAS["fp8_ds nvfp4 long ring"])
    state = manager.acquire(CSA).memory.state
    positions = state.swa_pos(length)
    assert len(positions) == 160
    live = {row: p for row, p in enumerate(positions) if p >= 0}
    assert sorted(live.values()) == list(range(max(0, length - 128), length))
    assert all(p % 160 == row for row, p in live.items())
    assert state.tail_len(length) == length % 4
    assert manager.acquire(HCA).memory.state.tail_len(length) == length % 128
    assert manager.acquire(SWA).memory.state.tail_len(length) == 0


# ---- pages --------------------------------------------------------------------------------------


def flashmla_record(page: bytes, rows: int, slot: int) -> tuple[bytes, bytes, bytes]:
    """Spec §4.3: B data rows of 576 bytes, then B scale rows of 8."""
    nope = page[576 * slot : 576 * slot + 448]
    rope = page[576 * slot + 448 : 576 * slot + 576]
    scales = page[576 * rows + 8 * slot : 576 * rows + 8 * slot + 7]
    return nope, rope, scales


@pytest.mark.parametrize("align_bytes", [32, 576])
@pytest.mark.parametrize("block_tokens", [128, 512])
@pytest.mark.parametrize(("layer", "kind"), [(CSA, "entries"), (HCA, "entries"), (CSA, "window")])
def test_pages_follow_flashmlas_rule(layer: int, kind: str, block_tokens: int, align_bytes: int):
    schema = build(block_tokens=block_tokens, align_bytes=align_bytes)
    manager = manager_of(schema)
    handle = manager.acquire(layer)
    view = handle.read_swa_view() if kind == "window" else handle.read_classical_view()
    rows = {"window": 128, "entries": block_tokens // (4 if layer == CSA else 128)}[kind]
    assert view.page.rows == rows
    assert view.pages.shape == (ROWS, rows, 1, 584)
    assert view.pages.dtype == torch.uint8
    assert view.pages.stride(1) == 584
    assert view.pages.stride(3) == 1
    assert view.pages.stride(0) % align_bytes == 0
    assert view.page.offset_bytes % align_bytes == 0

    x = Numbers(layer).normal(ROWS, rows, 512).to(torch.bfloat16)
    x[:, :, 100] *= 1000
    data, scales = encode(schema.entry_format, x)
    prefix, scale = ("swa", "swa_inv") if kind == "window" else ("entries", "inv_scale")
    planes = view.planes.views
    planes[f"{prefix}_fp8"].copy_(data[..., :448].view(torch.float8_e4m3fn))
    planes[f"{prefix}_rope"].copy_(data[..., 448:].view(torch.bfloat16))
    planes[scale].copy_(scales[..., :7])
    memory = torch.empty(0, dtype=torch.uint8).set_(view.pages.untyped_storage())
    found = [[b"", b""] for _ in range(ROWS * rows)]
    for page in range(ROWS):
        start = view.pages.storage_offset() + page * view.pages.stride(0)
        raw = memory[start : start + 584 * rows].numpy().tobytes()
        for slot in range(rows):
            nope, rope, scale_bytes = flashmla_record(raw, rows, slot)
            assert raw[576 * rows + 8 * slot + 7] == 0xFF  # nobody wrote the pad byte
            found[page * rows + slot] = [nope + rope, scale_bytes + b"\0"]
    as_read = [
        torch.frombuffer(bytearray(b"".join(column)), dtype=torch.uint8).view(ROWS, rows, -1)
        for column in zip(*found, strict=True)
    ]
    assert torch.equal(as_read[0], data)
    assert torch.equal(as_read[1], scales)
    assert torch.equal(
        decode(schema.entry_format, *as_read), decode(schema.entry_format, data, scales)
    )


def test_a_page_from_python_is_indexed_by_its_first_dimension():
    manager = manager_of(SCHEMAS["fp8_ds mxfp4"])
    view = manager.acquire(CSA).read_classical_view()
    manager.memory.block_arena.bytes.copy_(
        Numbers(2).integers(0, 256, *manager.memory.block_arena.bytes.shape).to(torch.uint8)
    )
    page = view.page
    for row in range(ROWS):
        span = slice(page.offset_bytes, page.offset_bytes + page.payload_bytes)
        assert torch.equal(view.pages[row].flatten(), manager.memory.block_arena.bytes[row, span])


@pytest.mark.parametrize(("index_format", "data", "scale"), [("mxfp4", 64, 4), ("fp8", 128, 4)])
def test_index_pages_follow_deepgemms_rule(index_format: str, data: int, scale: int):
    """All data rows of a page, then one 4-byte scale word a row (spec §3.4)."""
    schema = build(index_format=index_format)
    manager = manager_of(schema)
    view = manager.acquire(CSA).read_indexer_view()
    assert view.pages.shape == (ROWS, 32, 1, data + scale)
    assert view.pages.stride()[1:] == (data + scale, data + scale, 1)
    x = Numbers(3).normal(32, 128).to(torch.bfloat16)
    rows, scales = encode(schema.index_format, x)
    keys = getattr(
        view.planes, "indexer_keys_fp4" if index_format == "mxfp4" else "indexer_keys_fp8"
    )
    keys[1] = rows.view(keys.dtype)
    view.planes.indexer_scale[1] = scales.view(view.planes.indexer_scale.dtype)
    raw = view.pages[1].flatten()
    assert torch.equal(raw[: 32 * data], rows.flatten())
    assert torch.equal(raw[32 * data :], scales.flatten())


def test_views_tell_how_positions_become_rows():
    manager = manager_of(SCHEMAS["fp8_row fp8 drafts"])
    csa, hca = manager.acquire(CSA), manager.acquire(HCA)
    classical, indexer, window = (
        csa.read_classical_view(),
        csa.read_indexer_view(),
        csa.read_swa_view(),
    )
    assert (classical.ratio, classical.entries_per_block) == (4, 64)
    assert (indexer.ratio, indexer.entries_per_block) == (4, 64)
    assert (window.window, window.ring_rows) == (128, 131)
    assert (hca.read_classical_view().ratio, hca.read_classical_view().entries_per_block) == (
        128,
        2,
    )
    assert classical.block_table is manager.memory.block_table
    assert indexer.block_table is manager.memory.block_table


def test_layers_without_entries_or_keys_say_so():
    manager = manager_of(SCHEMAS["fp8_ds mxfp4"])
    for layer in (SWA, DRAFT):
        with pytest.raises(SchemaMismatch, match=f"layer {layer} is swa"):
            manager.acquire(layer).read_classical_view()
    for layer in (SWA, HCA):
        with pytest.raises(SchemaMismatch, match=f"layer {layer} is .* no indexer keys"):
            manager.acquire(layer).read_indexer_view()


# ---- shared entries -----------------------------------------------------------------------------


def test_layers_that_share_entries_see_their_owners_views():
    schema = SCHEMAS["v41"]
    manager = manager_of(schema)
    for reader, owner in ((2, 1), (4, 3)):
        mine, theirs = manager.acquire(reader), manager.acquire(owner)
        assert list(mine.memory.pool.views) == list(theirs.memory.pool.views)
        assert {"entries_fp4", "inv_scale"} <= set(mine.memory.pool.views)
        for name, view in mine.memory.pool.views.items():
            assert view.data_ptr() == theirs.memory.pool.views[name].data_ptr()
            assert view.stride() == theirs.memory.pool.views[name].stride()
        for read in ("read_classical_view", "read_indexer_view"):
            a, b = getattr(mine, read)(), getattr(theirs, read)()
            assert a.pages.data_ptr() == b.pages.data_ptr()
            assert (a.page, a.ratio, a.entries_per_block) == (b.page, b.ratio, b.entries_per_block)
        assert mine.read_swa_view().pages.data_ptr() != theirs.read_swa_view().pages.data_ptr()
    assert manager.acquire(1).read_classical_view().entries_per_block == 64
    assert manager.acquire(4).read_classical_view().entries_per_block == 128


def test_shared_layers_add_a_window_and_nothing_else():
    schema = SCHEMAS["v41"]
    kinds: dict[int, set[str]] = {}
    for plane in schema.layout.planes:
        kinds.setdefault(plane.layer, set()).add(plane.kind)
    assert kinds == {
        0: {"window"},
        1: {"entries", "index_keys", "window", "tail"},
        2: {"window"},
        3: {"entries", "index_keys", "window"},  # ratio 1 leaves no unfinished group
        4: {"window"},
    }
    assert schema.bytes.block >= (64 + 128) * (288 + 68)
    assert schema.layout.page("window", 2).payload_bytes == 128 * 528  # type: ignore[union-attr]


def test_v41_records_of_288_and_528_bytes_round_trip_through_the_views():
    schema = SCHEMAS["v41"]
    manager = manager_of(schema)
    x = Numbers(9).normal(128, 512).to(torch.bfloat16)
    entries = manager.acquire(4).read_classical_view()
    data, scales = encode(schema.entry_format, x)
    entries.planes.entries_fp4[2] = data
    entries.planes.inv_scale[2] = scales.view(torch.float8_e4m3fn)
    assert torch.equal(entries.pages[2].flatten(), torch.cat((data.flatten(), scales.flatten())))
    window = manager.acquire(4).read_swa_view()
    data, scales = encode(schema.window_format, x)
    window.planes.swa_fp8[0] = data.view(torch.float8_e4m3fn)
    window.planes.swa_inv[0] = scales
    assert torch.equal(window.pages[0].flatten(), torch.cat((data.flatten(), scales.flatten())))
    assert window.pages.shape == (ROWS, 128, 1, 528)
    assert entries.pages.shape == (ROWS, 128, 1, 288)


def test_an_arena_view_covers_the_last_row_of_the_arena():
    schema = SCHEMAS["fp8_ds mxfp4"]
    arena = Arena(schema, "block", 5, torch.device("cpu"))
    last: Plane = max(
        (p for p in schema.layout.planes if p.arena == "block"),
        key=lambda plane: plane.offset_bytes,
    )
    view = arena.view(last)
    end = address(arena, view[4]) + (last.shape[0] - 1) * last.strides_bytes[0]
    assert end + last.shape[1] * ITEM_BYTES[last.dtype] <= arena.memory_bytes()
    assert address(arena, view[4]) == 4 * schema.bytes.block + last.offset_bytes
