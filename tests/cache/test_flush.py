"""The original design's names: what they write, what they leave alone, what the tails show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.flush import (
    csa_compress_tail,
    csa_rotate_state,
    flush_write_csa,
    flush_write_hca,
    hca_compress_tail,
    hca_reset_state,
    maybe_flush_csa,
    maybe_flush_hca,
)
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.errors import InvalidInput, PlanError, SchemaMismatch
from dsv4.model import ModelSpec
from dsv4.reference.codec import encode
from tests.support.stack import POISON, Stack, Stream

TINY = ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 1, 2
RATIO = {CSA: 4, HCA: 128}


# layers that compress, and how they keep their unfinished group
COMPRESSORS = [(CSA, "raw"), (HCA, "raw"), (HCA, "online")]


def build(
    layer: int,
    state: HcaState = "raw",
    *,
    requests: int = 3,
    drafts: int = 0,
    **options: Any,
) -> Stack:
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=drafts, hca_state=state)
    return Stack(schema, layers=[layer], max_requests=requests, **options)


def arenas(stack: Stack) -> tuple[Tensor, Tensor]:
    return (
        stack.manager.memory.block_arena.bytes.clone(),
        stack.manager.memory.slot_arena.bytes.clone(),
    )


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0]), "block arena"
    assert torch.equal(found[1], expected[1]), "slot arena"


def start(stack: Stack, lengths: list[int]) -> tuple[list[Request], list[Stream]]:
    requests = [stack.manager.admit_request() for _ in lengths]
    streams = [stack.stream(nth, length + 40) for nth, length in enumerate(lengths)]
    stack.step(list(zip(requests, streams, lengths, strict=True)))
    return requests, streams


def tails_written(
    stack: Stack, requests: list[Request], streams: list[Stream], count: int = 1
) -> LayerCacheHandle:
    """A narrow step whose projections are in the tails and whose groups are still open."""
    (layer,) = stack.layers
    plan = stack.manager.prepare_forward([(r, count) for r in requests], pad_requests=3)
    handle = stack.manager.acquire(layer, plan.batch)
    kv, projections = stack.inputs(plan, streams, layer)
    handle.write_swa(kv, weights=stack.weights[layer])
    handle.write_tail(*projections, weights=stack.weights[layer])
    return handle


# ---- write_swa ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "count"), [(0, 300), (100, 129), (5, 128), (0, 127), (127, 2)])
def test_the_ring_holds_exactly_the_newest_rows(before: int, count: int):
    stack = build(SWA, kv_norm=False)
    request, stream = stack.manager.admit_request(), stack.stream(0, 400)
    if before:
        stack.step([(request, stream, before)])
    plan = stack.manager.prepare_forward([(request, count)])
    handle = stack.manager.acquire(SWA, plan.batch)
    kv, _ = stack.inputs(plan, [stream], SWA)
    handle.write_swa(kv, weights=stack.weights[SWA])
    end, page = before + count, handle.read_swa_view().page
    data, scales = encode(page.format, stream.kv[SWA])
    expected = torch.full_like(stack.manager.memory.slot_arena.bytes[0], POISON)
    for position in range(max(0, end - page.rows), end):
        row = position % page.rows
        for offset, rows in ((page.offset_bytes, data), (page.scale_offset_bytes, scales)):
            width = rows.shape[1]
            expected[offset + row * width : offset + (row + 1) * width] = rows[position]
    first, last = page.offset_bytes, page.offset_bytes + page.payload_bytes
    found = stack.manager.memory.slot_arena.bytes[request.slot]
    assert torch.equal(found[first:last], expected[first:last])


def test_rope_channels_are_stored_exactly():
    stack = build(SWA, kv_norm=False)
    request, stream = stack.manager.admit_request(), stack.stream(0, 100)
    stack.step([(request, stream, 100)])
    stored = stack.manager.acquire(SWA).memory.state.swa_rope[request.slot, :100]
    nope = TINY.head_dim - TINY.rope_dim
    assert torch.equal(stored.view(torch.int16), stream.kv[SWA][:, nope:].view(torch.int16))


def test_window_rows_of_one_request_leave_all_others_alone():
    stack = build(SWA)
    requests, streams = start(stack, [40, 200, 3])
    before = arenas(stack)
    stack.step([(requests[1], streams[1], 9)])
    after = arenas(stack)
    for request in (requests[0], requests[2]):
        assert torch.equal(after[1][request.slot], before[1][request.slot])
    assert not torch.equal(after[1][requests[1].slot], before[1][requests[1].slot])


def test_write_swa_writes_the_ring_that_append_writes():
    by_append, by_name = build(SWA), build(SWA)
    for stack in (by_append, by_name):
        start(stack, [40, 200, 3])
    requests = list(by_append.manager._parts.table.live.values())
    streams = [by_append.stream(nth, length + 40) for nth, length in enumerate([40, 200, 3])]
    by_append.step([(requests[nth], streams[nth], 1) for nth in range(3)])
    requests = list(by_name.manager._parts.table.live.values())
    plan = by_name.manager.prepare_forward([(r, 1) for r in requests], pad_tokens=5)
    kv, _ = by_name.inputs(plan, streams, SWA)
    by_name.manager.acquire(SWA, plan.batch).write_swa(kv, weights=by_name.weights[SWA])
    assert_same(arenas(by_name), arenas(by_append))


# ---- flushes ------------------------------------------------------------------------------------


def flush(handle: LayerCacheHandle, weights: Any) -> None:
    (maybe_flush_csa if handle.layer == CSA else maybe_flush_hca)(handle, weights)


def compress_and_write(handle: LayerCacheHandle, weights: Any) -> None:
    if handle.layer == CSA:
        flush_write_csa(handle, *csa_compress_tail(handle, weights))
    else:
        flush_write_hca(handle, *hca_compress_tail(handle, weights))


def flush_compression(handle: LayerCacheHandle, weights: Any) -> None:
    handle.flush_compression(weights=weights)


@pytest.mark.parametrize("close", [flush, compress_and_write, flush_compression])
@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize(("layer", "state"), COMPRESSORS)
def test_steps_by_hand_leave_the_bytes_of_append(
    layer: int, state: HcaState, drafts: int, close: Callable[[LayerCacheHandle, Any], None]
):
    """Step after step over the end of a group, ragged phases, several tokens with drafts."""
    by_append, by_hand = (build(layer, state, drafts=drafts) for _ in range(2))
    count = 1 + drafts
    lives = [start(stack, [125, 2, 254]) for stack in (by_append, by_hand)]
    for _ in range(5):
        requests, streams = lives[0]
        by_append.step(list(zip(requests, streams, [count] * 3, strict=True)))
        requests, streams = lives[1]
        handle = tails_written(by_hand, requests, streams, count)
        close(handle, by_hand.weights[layer])
        plan = by_hand.manager.room.open_plans[0]
        assert plan is not None
        by_hand.manager.commit(plan, partial=True)
        assert_same(arenas(by_hand), arenas(by_append))


@pytest.mark.parametrize(("layer", "state"), COMPRESSORS)
def test_nothing_closes_where_no_group_ends(layer: int, state: HcaState):
    stack = build(layer, state)
    requests, streams = start(stack, [124, 1, 130])
    handle = tails_written(stack, requests, streams)
    before = arenas(stack)
    flush(handle, stack.weights[layer])
    compress_and_write(handle, stack.weights[layer])
    assert_same(arenas(stack), before)


@pytest.mark.parametrize(("layer", "state"), COMPRESSORS)
def test_compressing_writes_nothing_to_the_cache(layer: int, state: HcaState):
    stack = build(layer, state)
    requests, streams = start(stack, [127, 1, 255])
    handle = tails_written(stack, requests, streams)
    before = arenas(stack)
    compress = csa_compress_tail if layer == CSA else hca_compress_tail
    *rows, live = compress(handle, stack.weights[layer])
    assert live.sum() == 2
    for tensor, width in zip(rows, (TINY.head_dim, TINY.index_dim), strict=False):
        assert tensor.shape == (len(live), width)
        assert tensor.dtype == torch.bfloat16
        assert tensor[live].float().abs().sum() > 0
    assert_same(arenas(stack), before)


def flush_write(handle: LayerCacheHandle, rows: list[Tensor], mask: Tensor) -> None:
    (flush_write_csa if handle.layer == CSA else flush_write_hca)(handle, *rows, mask)


@pytest.mark.parametrize(("layer", "state"), COMPRESSORS)
def test_where_the_mask_is_false_nothing_is_written(layer: int, state: HcaState):
    stack = build(layer, state)
    requests, streams = start(stack, [127, 255, 3])
    handle = tails_written(stack, requests, streams)
    compress = csa_compress_tail if layer == CSA else hca_compress_tail
    *rows, live = compress(handle, stack.weights[layer])
    before = arenas(stack)
    flush_write(handle, rows, torch.zeros_like(live))
    assert_same(arenas(stack), before)
    chosen = torch.zeros_like(live)
    chosen[1] = True  # items follow the requests
    flush_write(handle, rows, chosen)
    changed = (arenas(stack)[0] != before[0]).any(dim=1).nonzero().flatten().tolist()
    assert changed == [requests[1].block_ids[1]]
    assert torch.equal(arenas(stack)[1], before[1])


@pytest.mark.parametrize(("layer", "state"), COMPRESSORS)
def test_padding_items_are_not_written_even_if_the_mask_says_so(layer: int, state: HcaState):
    stack = build(layer, state)
    requests, streams = start(stack, [127, 2, 4])
    handle = tails_written(stack, requests, streams)
    compress = csa_compress_tail if layer == CSA else hca_compress_tail
    *rows, live = compress(handle, stack.weights[layer])
    assert live.sum() == 1
    before = arenas(stack)
    flush_write(handle, rows, torch.ones_like(live))
    changed = (arenas(stack)[0] != before[0]).any(dim=1).nonzero().flatten().tolist()
    assert changed == [requests[0].block_ids[0]]


# ---- what the tails show ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 129, 131, 132])
def test_csa_streams_rotate_when_a_group_closes(length: int):
    stack = build(CSA, drafts=2)
    (request, *_), (stream, *_) = start(stack, [length, 1, 1])
    c, z, *_ = stream.projections[CSA]
    compressor = stack.weights[CSA].compressor
    assert compressor is not None
    biased = z + compressor.ape[torch.arange(len(z)) % 4]
    first, width = length - length % 4, TINY.head_dim
    shown = csa_rotate_state(stack.manager.acquire(CSA), request.slot, request.length)
    current, previous = slice(first, length), slice(max(0, first - 4), first)
    assert torch.equal(shown["ka"], c[current, width:])
    assert torch.equal(shown["za"], biased[current, width:])
    assert torch.equal(shown["kb"], c[previous, :width])
    assert torch.equal(shown["zb"], biased[previous, :width])


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_an_hca_tail_is_empty_right_after_a_flush(length: int):
    stack = build(HCA)
    (request, *_), (stream, *_) = start(stack, [length, 1, 1])
    c, z = stream.projections[HCA]
    compressor = stack.weights[HCA].compressor
    assert compressor is not None
    biased = z + compressor.ape[torch.arange(len(z)) % 128]
    first = length - length % 128
    shown = hca_reset_state(stack.manager.acquire(HCA), request.slot, request.length)
    assert shown["ka"].shape == (length % 128, TINY.head_dim)
    assert torch.equal(shown["ka"], c[first:length])
    assert torch.equal(shown["za"], biased[first:length])


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_online_state_is_the_softmax_of_the_unfinished_group_so_far(length: int):
    stack = build(HCA, "online", drafts=2)
    (request, *_), (stream, *_) = start(stack, [length, 1, 1])
    c, z = (rows.double() for rows in stream.projections[HCA])
    compressor = stack.weights[HCA].compressor
    assert compressor is not None
    group = slice(length - length % 128, length)
    biased = (z + compressor.ape[torch.arange(len(z)) % 128])[group]
    shown = hca_reset_state(stack.manager.acquire(HCA), request.slot, request.length)
    assert shown.keys() == {"state"}
    assert shown["state"].shape == (1 if length % 128 else 0, 3, TINY.head_dim)
    for top, weight, product in shown["state"].double():
        weights = torch.exp(biased - biased.amax(dim=0))
        assert torch.equal(top.float(), biased.amax(dim=0).float())
        torch.testing.assert_close(weight, weights.sum(dim=0), rtol=1e-5, atol=0.0)
        expected = (weights * c[group]).sum(dim=0)
        torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(AttributeError, match="it has swa_fp8, swa_rope, swa_inv, tail_state"):
        _ = stack.manager.acquire(HCA).memory.state.tail_ka


# ---- what is refused ----------------------------------------------------------------------------


def test_calls_for_another_kind_of_layer():
    schema = CacheSchema.build(TINY, max_context=512)
    stack = Stack(schema, layers=[SWA, CSA, HCA])
    request, stream = stack.manager.admit_request(), stack.stream(0, 10)
    plan = stack.manager.prepare_forward([(request, 1)])
    stack.write(plan, [stream])
    swa, csa, hca = (stack.manager.acquire(layer, plan.batch) for layer in (SWA, CSA, HCA))
    before = arenas(stack)
    calls: list[Callable[[], object]] = [
        lambda: maybe_flush_csa(hca, stack.weights[HCA]),
        lambda: maybe_flush_csa(swa, stack.weights[SWA]),
        lambda: maybe_flush_hca(csa, stack.weights[CSA]),
        lambda: csa_compress_tail(hca, stack.weights[HCA]),
        lambda: hca_compress_tail(csa, stack.weights[CSA]),
        lambda: csa_rotate_state(hca, 0, 1),
        lambda: hca_reset_state(swa, 0, 1),
        lambda: flush_write_hca(csa, torch.empty(0, 128), torch.empty(0, dtype=torch.bool)),
    ]
    for call in calls:
        with pytest.raises(SchemaMismatch, match="this call is for"):
            call()
    assert_same(arenas(stack), before)


@pytest.mark.parametrize(("layer", "state"), COMPRESSORS)
def test_chunks_do_not_go_through_the_tails(layer: int, state: HcaState):
    stack = build(layer, state, drafts=2)
    request, stream = stack.manager.admit_request(), stack.stream(0, 10)
    plan = stack.manager.prepare_forward([(request, 4)])
    handle = stack.manager.acquire(layer, plan.batch)
    _, projections = stack.inputs(plan, [stream], layer)
    before, weights = arenas(stack), stack.weights[layer]
    for call in (
        lambda: handle.write_tail(*projections, weights=weights),
        lambda: handle.flush_compression(weights=weights),
        lambda: compress_and_write(handle, weights),
    ):
        with pytest.raises(PlanError, match="4 tokens in this step: use append"):
            call()
    assert_same(arenas(stack), before)


def test_rows_and_masks_that_do_not_fit_the_step():
    stack = build(CSA)
    requests, streams = start(stack, [127, 3, 7])
    handle = tails_written(stack, requests, streams)
    entries, keys, live = csa_compress_tail(handle, stack.weights[CSA])
    before = arenas(stack)
    for bad in (
        (entries[:-1], keys, live),
        (entries, keys.float(), live),
        (entries, keys[:, :-1], live),
        (entries, keys, live[:-1]),
        (entries, keys, live.int()),
        (entries, keys, live[:, None]),
    ):
        with pytest.raises(InvalidInput):
            flush_write_csa(handle, *bad)
    assert_same(arenas(stack), before)
