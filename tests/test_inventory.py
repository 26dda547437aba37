"""The parts of the original design: each name is where people who know the design look for it, and
other tests use it by that name."""

from __future__ import annotations

import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsv4.cache.flush import append_swa
from dsv4.cache.handle import ClassicalView, IndexerView, LayerCacheHandle, SWAView
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, LayerCacheSchema
from dsv4.errors import InvalidInput, PlanError
from dsv4.model import ModelSpec
from dsv4.reference.codec import encode
from tests.support.stack import POISON, Stack, Stream

TESTS = Path(__file__).parent
TINY = ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 1, 2

NAMES = {
    "dsv4.cache.schema": (
        *("AttentionType.CSA", "AttentionType.HCA", "AttentionType.SWA"),
        *("LayerCacheSchema", "compute_block_budget"),
    ),
    "dsv4.cache.allocator": ("BlockAllocator.take", "BlockAllocator.release"),
    "dsv4.cache.paged_cache": ("PagedKVPool.memory_bytes",),
    "dsv4.cache.state_cache": (
        *("StateCachePool.reset_slot", "StateCachePool.swa_pos", "StateCachePool.tail_len"),
    ),
    "dsv4.cache.handle": (
        *("LayerCacheHandle.write_swa", "LayerCacheHandle.flush_compression"),
        *("LayerCacheHandle.gather_compressed_kv", "LayerCacheHandle.gather_all_compressed_kv"),
        *("LayerCacheHandle.gather_swa_kv", "LayerCacheHandle.read_swa_view"),
        *("LayerCacheHandle.read_classical_view", "LayerCacheHandle.read_indexer_view"),
        # the consumers that the design names: indexer scoring with its top-k, and attention
        *("LayerCacheHandle.select", "LayerCacheHandle.attend"),
        *("SWAView", "ClassicalView", "IndexerView"),
    ),
    "dsv4.cache.manager": (
        *("KVCacheManager.admit_request", "KVCacheManager.release_request"),
        *("KVCacheManager.allocate_block", "KVCacheManager.acquire"),
        "KVCacheManager.prepare_forward",
    ),
    "dsv4.cache.prepare_forward": ("ForwardPlan",),
    "dsv4.cache.flush": (
        *("append_swa", "csa_compress_tail", "hca_compress_tail"),
        *("flush_write_csa", "flush_write_hca", "csa_rotate_state", "hca_reset_state"),
        *("maybe_flush_csa", "maybe_flush_hca"),
    ),
}
ENTRY_PLANES = ("entries_fp8", "entries_rope", "inv_scale")
INDEX_PLANES = ("indexer_keys_fp4", "indexer_scale")
WINDOW_PLANES = ("swa_fp8", "swa_rope", "swa_inv")
TAIL_PLANES = ("tail_ka", "tail_za", "tail_kb", "tail_zb")
ALL_NAMES = [(module, name) for module, names in NAMES.items() for name in names]


def build(layer: int = SWA, **options: bool) -> Stack:
    schema = CacheSchema.build(TINY, max_context=512)
    return Stack(schema, layers=[layer], max_requests=3, **{"kv_norm": False, **options})


@pytest.mark.parametrize(("module", "name"), ALL_NAMES)
def test_each_name_is_in_its_module(module: str, name: str):
    first = name.split(".")[0]
    found = getattr(import_module(module), first)
    assert attrgetter(name)(import_module(module)) is not None
    assert found.__module__.startswith("dsv4.")


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
def test_pools_show_the_planes_of_the_design_as_views_of_one_arena(layer: int):
    schema = CacheSchema.build(TINY, max_context=512)
    manager = KVCacheManager(schema, num_blocks=3, max_requests=2)
    handle = manager.acquire(layer)
    in_blocks = {SWA: (), CSA: ENTRY_PLANES + INDEX_PLANES, HCA: ENTRY_PLANES}[layer]
    tails = {SWA: (), CSA: TAIL_PLANES, HCA: TAIL_PLANES[:2]}[layer]
    for planes, names, arena, rows in (
        (handle.memory.pool, in_blocks, manager.memory.block_arena, 3),
        (handle.memory.state, WINDOW_PLANES + tails, manager.memory.slot_arena, 2),
    ):
        for name in names:
            view: Tensor = getattr(planes, name)
            assert view.shape[0] == rows
            assert view.untyped_storage().data_ptr() == arena.bytes.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "name",
    [
        *(name.split(".")[-1] for _, name in ALL_NAMES),
        *(*ENTRY_PLANES, *INDEX_PLANES, *WINDOW_PLANES, *TAIL_PLANES),
    ],
)
def test_each_name_is_tested_by_that_name(name: str):
    others = (path for path in TESTS.rglob("test_*.py") if path != Path(__file__))
    behaviour = Path(__file__).read_text("utf-8").partition("# ---- behaviour")[2]
    texts = (behaviour, *(path.read_text("utf-8") for path in others))
    assert any(re.search(rf"\b{name}\b", text) for text in texts)


# ---- behaviour: sizes and views ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "entries", "keys", "tail_a", "tail_b"),
    [(SWA, 0, 0, 0, 0), (CSA, 32, 32, 4, 8), (HCA, 1, 0, 128, 0)],
)
def test_layer_cache_schema_has_the_sizes_of_a_block_of_128_tokens(
    layer: int, entries: int, keys: int, tail_a: int, tail_b: int
):
    """Stream b of CSA has two groups: the previous one is read while the current one fills."""
    schema = CacheSchema.build(TINY, max_context=512)
    found = schema.layers[layer]
    assert isinstance(found, LayerCacheSchema)
    assert schema.block_tokens == 128
    assert (found.entries_per_block, found.index_keys_per_block) == (entries, keys)
    assert (found.tail_a_rows, found.tail_b_rows) == (tail_a, tail_b)


def test_views_say_where_positions_are():
    """Of a layer with all three, blocks out of order: rows found through the views' maps are what
    the layer was given and what its gather reads."""
    stack = build(CSA)
    requests = [stack.manager.admit_request() for _ in range(2)]
    streams = [stack.stream(seed, 300) for seed in range(2)]
    stack.step(list(zip(requests, streams, [3, 200], strict=True)))
    plan = stack.manager.prepare_forward([(requests[0], 200)])
    stack.write(plan, streams[:1])
    handle, request = stack.manager.acquire(CSA, plan.batch), requests[0]
    gathered, count = handle.gather_all_compressed_kv(
        torch.zeros(1, 64, TINY.head_dim, dtype=torch.bfloat16)
    )
    stack.manager.commit(plan)
    assert request.block_ids == [0, 3]
    nope = TINY.head_dim - TINY.rope_dim

    swa = handle.read_swa_view()
    assert isinstance(swa, SWAView)
    for position in range(request.length - swa.window, request.length):
        stored = swa.planes.swa_rope[request.slot, position % swa.ring_rows]
        assert torch.equal(stored, streams[0].kv[CSA][position, nope:])

    entries, keys = handle.read_classical_view(), handle.read_indexer_view()
    assert isinstance(entries, ClassicalView)
    assert isinstance(keys, IndexerView)
    assert count.tolist() == [203 // entries.ratio]
    for entry in range(203 // entries.ratio):
        block_id = entries.block_table[request.slot, entry // entries.entries_per_block]
        stored = entries.planes.entries_rope[block_id, entry % entries.entries_per_block]
        assert torch.equal(stored, gathered[0, entry, nope:])
    assert keys.block_table.data_ptr() == entries.block_table.data_ptr()
    assert (keys.ratio, keys.entries_per_block) == (entries.ratio, entries.entries_per_block)


# ---- behaviour: append_swa -----------------------------------------------------------------------


def append(
    stack: Stack, work: list[tuple[Request, Stream, int]], **padding: int
) -> tuple[LayerCacheHandle, ForwardPlan]:
    """A step of one layer through append_swa alone."""
    (layer,) = stack.layers
    plan = stack.manager.prepare_forward([(r, n) for r, _, n in work], **padding)
    handle = stack.manager.acquire(layer, plan.batch)
    kv, _ = stack.inputs(plan, [stream for _, stream, _ in work], layer)
    append_swa(handle, kv, stack.weights[layer])
    stack.manager.commit(plan, partial=True)
    return handle, plan


def ring(stack: Stack, request: Request) -> list[tuple[Tensor, Tensor]]:
    """Data row and scale row of each ring row, as bytes."""
    page = stack.manager.acquire(stack.layers[0]).read_swa_view().page
    slot = stack.manager.memory.slot_arena.bytes[request.slot]
    data_bytes, scale_bytes = page.format.data_row_bytes, page.format.scale_row_bytes
    data = slot[page.offset_bytes :][: page.rows * data_bytes].view(page.rows, data_bytes)
    scales = slot[page.scale_offset_bytes :][: page.rows * scale_bytes]
    return list(zip(data, scales.view(page.rows, scale_bytes), strict=True))


def assert_ring_is_the_newest(stack: Stack, request: Request, kv: Tensor, start: int = 0) -> None:
    """Every ring row holds the record of its newest position of [start, length), byte for byte;
    rows that had no token are untouched."""
    page = stack.manager.acquire(stack.layers[0]).read_swa_view().page
    data, scales = encode(page.format, kv)
    for row, (found_data, found_scales) in enumerate(ring(stack, request)):
        tokens = [p for p in range(start, request.length) if p % page.rows == row]
        if tokens:
            assert torch.equal(found_data, data[tokens[-1]]), f"row {row}, token {tokens[-1]}"
            assert torch.equal(found_scales, scales[tokens[-1]])
        else:
            assert (found_data == POISON).all()
            assert (found_scales == POISON).all()


@pytest.mark.parametrize("layer", [SWA, CSA, HCA])
@pytest.mark.parametrize("count", [1, 127, 128, 129, 400])
def test_append_swa_leaves_exactly_the_newest(layer: int, count: int):
    stack = build(layer)
    request, stream = stack.manager.admit_request(), stack.stream(0, count)
    handle, _ = append(stack, [(request, stream, count)])
    assert_ring_is_the_newest(stack, request, stream.kv[layer])
    positions = handle.memory.state.swa_pos(request.length)
    assert sorted(p for p in positions if p >= 0) == list(range(max(0, count - 128), count))


def test_append_swa_wraps_around():
    """Over the end of the ring token by token, then in a chunk that starts in its middle."""
    stack = build()
    request, stream = stack.manager.admit_request(), stack.stream(0, 400)
    append(stack, [(request, stream, 126)])
    for count in (1, 1, 1, 1, 200):
        append(stack, [(request, stream, count)])
        assert_ring_is_the_newest(stack, request, stream.kv[SWA])


def test_append_swa_keeps_requests_apart():
    """Ragged tokens of two requests in one launch, then a padded decode step: the third request
    keeps every byte, and padding rows write nothing."""
    stack = build()
    requests = [stack.manager.admit_request() for _ in range(3)]
    streams = [stack.stream(seed, 300) for seed in range(3)]
    append(stack, list(zip(requests, streams, [5, 130, 7], strict=True)))
    before = stack.manager.memory.slot_arena.bytes.clone()
    append(stack, [(requests[2], streams[2], 3), (requests[0], streams[0], 140)])
    work = [(requests[2], streams[2], 1), (requests[0], streams[0], 1)]
    append(stack, work, pad_tokens=3, pad_requests=3)
    for request, stream in zip(requests, streams, strict=True):
        assert_ring_is_the_newest(stack, request, stream.kv[SWA])
    untouched = requests[1].slot
    assert torch.equal(stack.manager.memory.slot_arena.bytes[untouched], before[untouched])


def test_append_swa_writes_the_ring_and_nothing_else():
    stack = build(CSA)
    request, stream = stack.manager.admit_request(), stack.stream(0, 9)
    append(stack, [(request, stream, 9)])
    state = stack.manager.acquire(CSA).memory.state
    assert (stack.manager.memory.block_arena.bytes == POISON).all()
    tails = {name: view for name, view in state.views.items() if "tail" in name}
    assert tails
    for name, view in tails.items():
        assert (view.contiguous().view(torch.uint8) == POISON).all(), name


def test_append_swa_keeps_the_bits_of_rope_channels():
    stack = build()
    request, stream = stack.manager.admit_request(), stack.stream(0, 100)
    nope = TINY.head_dim - TINY.rope_dim
    stream.kv[SWA][3, nope], stream.kv[SWA][4, -1] = float("nan"), -0.0
    handle, _ = append(stack, [(request, stream, 100)])
    stored = handle.memory.state.swa_rope[request.slot, :100]
    assert torch.equal(stored.view(torch.int16), stream.kv[SWA][:, nope:].view(torch.int16))


def test_append_swa_applies_norm_and_rope_where_the_weights_have_them():
    """Then it writes what `append` writes."""
    by_name, by_append = build(kv_norm=True), build(kv_norm=True)
    stream = by_name.stream(0, 200)
    for stack in (by_name, by_append):
        work = [(stack.manager.admit_request(), stream, 150)]
        append(stack, work) if stack is by_name else stack.step(work)
    assert torch.equal(
        by_name.manager.memory.slot_arena.bytes, by_append.manager.memory.slot_arena.bytes
    )


def test_append_swa_refuses_before_it_writes():
    stack = build()
    request, stream = stack.manager.admit_request(), stack.stream(0, 9)
    handle, _ = append(stack, [(request, stream, 9)])
    before, weights = stack.manager.memory.slot_arena.bytes.clone(), stack.weights[SWA]
    with pytest.raises(PlanError, match="this plan is over"):
        append_swa(handle, stream.kv[SWA], weights)
    plan = stack.manager.prepare_forward([(request, 2)])
    handle = stack.manager.acquire(SWA, plan.batch)
    for kv in (stream.kv[SWA][:3], stream.kv[SWA][:2, :-1], stream.kv[SWA][:2].float()):
        with pytest.raises(InvalidInput, match="kv"):
            append_swa(handle, kv, weights)
    assert torch.equal(stack.manager.memory.slot_arena.bytes, before)
