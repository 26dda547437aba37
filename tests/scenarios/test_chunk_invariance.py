"""However its tokens are cut into steps, a request leaves the same bytes, and no others."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import ArenaName
from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import ModelSpec
from tests.support.stack import (
    HCA_STATES,
    POISON,
    Stack,
    Stream,
    layers_to_run,
    logical_bytes,
    readable_bytes,
)

TINY = ModelSpec.preset("tiny")
LENGTHS = (1, 3, 4, 5, 7, 8, 127, 128, 129, 255, 256, 257, 300)

Cut = Callable[[int], list[int]]


def in_one_piece(length: int) -> list[int]:
    return [length]


def token_by_token(length: int) -> list[int]:
    return [1] * length


def random_splits(seed: int) -> Cut:
    def cut(length: int) -> list[int]:
        rng = random.Random(f"{seed} {length}")
        chunks = []
        while (left := length - sum(chunks)) > 0:
            chunks.append(min(left, rng.choice((0, 1, 2, 3, 4, 5, 31, 64, 127, 128, 129, 200))))
        return chunks

    return cut


@dataclass
class Life:
    stack: Stack
    requests: list[Request]

    def all_bytes(self) -> list[tuple[Tensor, Tensor]]:
        return [logical_bytes(self.stack, request) for request in self.requests]


def live(
    schema: CacheSchema,
    lengths: Sequence[int],
    cut: Cut,
    *,
    layers: Sequence[int] | None = None,
    **options: float | bool,
) -> Life:
    """One request of each length, all in the same steps; the stream of a length is always the
    same."""
    stack = Stack(
        schema,
        layers=layers_to_run(schema) if layers is None else layers,
        max_requests=len(lengths) + 1,
        num_blocks=sum(map(schema.blocks_for, lengths)) + 2,
        max_step_tokens=sum(lengths),
        **options,  # type: ignore[arg-type]
    )
    requests = [stack.manager.admit_request() for _ in lengths]
    streams = [stack.stream(length, length) for length in lengths]
    chunks = [cut(length) for length in lengths]
    for nth in range(max(map(len, chunks))):
        stack.step(
            [
                (request, stream, mine[nth])
                for request, stream, mine in zip(requests, streams, chunks, strict=True)
                if nth < len(mine)
            ]
        )
    assert [request.length for request in requests] == list(lengths)
    return Life(stack, requests)


def assert_same_bytes(one: Life, other: Life) -> None:
    for request, a, b in zip(one.requests, one.all_bytes(), other.all_bytes(), strict=True):
        assert torch.equal(a[0], b[0]), f"blocks of the request of {request.length} tokens"
        assert torch.equal(a[1], b[1]), f"slot of the request of {request.length} tokens"


def assert_no_stray_bytes(life: Life) -> None:
    """Outside the records and tail rows of the tokens that were written all is still poison."""
    manager, schema = life.stack.manager, life.stack.schema
    stray = {
        "block": manager.memory.block_arena.bytes != POISON,
        "slot": manager.memory.slot_arena.bytes != POISON,
    }
    for request in life.requests:
        for layer in life.stack.layers:
            for arena, row, start, size in writable_runs(schema, layer, request):
                stray[arena][row, start : start + size] = False
    for arena, wrong in stray.items():
        assert not wrong.any(), f"{arena} arena: {torch.nonzero(wrong)[:4].tolist()}"


def writable_runs(
    schema: CacheSchema, layer: int, request: Request
) -> list[tuple[ArenaName, int, int, int]]:
    """(arena, row, first byte, bytes) of all that a request may write on a layer."""
    runs: list[tuple[ArenaName, int, int, int]] = []
    spec = schema.model.layers[layer]
    for kind in ("entries", "index_keys", "window"):
        page = schema.layout.page(kind, layer)  # type: ignore[arg-type]
        if page is None:
            continue
        rows: list[tuple[ArenaName, int, int]]
        if kind == "window":
            rows = [("slot", request.slot, r) for r in range(min(request.length, page.rows))]
        else:
            entries = range(request.length // spec.ratio)
            rows = [("block", request.block_ids[e // page.rows], e % page.rows) for e in entries]
        for arena, at, row in rows:
            data = page.offset_bytes + row * page.data_stride_bytes
            scales = page.scale_offset_bytes + row * page.scale_stride_bytes
            runs.append((arena, at, data, page.data_row_bytes))
            runs.append((arena, at, scales, page.scale_row_bytes))
    for plane in schema.layout.planes:
        if plane.layer == layer and "tail" in plane.kind:
            size = min(request.length, plane.shape[0]) * plane.strides_bytes[0]
            runs.append(("slot", request.slot, plane.offset_bytes, size))
    return runs


# ---- fresh slots: whole bytes -------------------------------------------------------------------


@pytest.mark.parametrize("drafts", [0, 5])
@pytest.mark.parametrize(("kv_norm", "state"), [(True, "raw"), (False, "raw"), (True, "online")])
def test_tiny_model_at_the_edges_of_groups_and_rings(drafts: int, kv_norm: bool, state: HcaState):
    """All lengths are one ragged batch. `drafts` decides which steps are narrow."""
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=drafts, hca_state=state)
    whole = live(schema, LENGTHS, in_one_piece, kv_norm=kv_norm)
    assert_no_stray_bytes(whole)
    for cut in (token_by_token, random_splits(1), random_splits(2), random_splits(3)):
        pieces = live(schema, LENGTHS, cut, kv_norm=kv_norm)
        assert_same_bytes(whole, pieces)
        assert_no_stray_bytes(pieces)


@pytest.mark.parametrize("state", HCA_STATES)
@pytest.mark.parametrize("seed", range(4))
def test_tiny_model_at_random_lengths(seed: int, state: HcaState):
    rng = random.Random(seed)
    lengths = rng.sample(range(1, 450), 6)
    options = {"block_tokens": rng.choice((128, 256)), "max_draft_tokens": rng.randrange(9)}
    schema = CacheSchema.build(
        TINY, max_context=512, ring_rows=rng.randrange(137, 300), hca_state=state, **options
    )
    whole = live(schema, lengths, in_one_piece)
    pieces = live(schema, lengths, random_splits(seed))
    assert_same_bytes(whole, pieces)
    assert_no_stray_bytes(pieces)


@pytest.mark.parametrize("index_format", INDEX_FORMATS)
@pytest.mark.parametrize("entry_format", ENTRY_FORMATS)
def test_every_format_with_outliers(entry_format: str, index_format: str):
    schema = CacheSchema.build(
        TINY, max_context=512, entry_format=entry_format, index_format=index_format
    )
    lengths = (5, 9, 130, 261)
    whole = live(schema, lengths, in_one_piece, spread=3.0)
    pieces = live(schema, lengths, random_splits(7), spread=3.0)
    assert_same_bytes(whole, pieces)
    assert_no_stray_bytes(whole)
    assert_no_stray_bytes(pieces)


@pytest.mark.parametrize("entry_format", ENTRY_FORMATS)
def test_every_entry_format_with_online_state_and_outliers(entry_format: str):
    schema = CacheSchema.build(TINY, max_context=512, entry_format=entry_format, hca_state="online")
    lengths = (9, 130, 261)
    whole = live(schema, lengths, in_one_piece, spread=3.0)
    pieces = live(schema, lengths, random_splits(7), spread=3.0)
    assert_same_bytes(whole, pieces)
    assert_no_stray_bytes(pieces)


def test_window_and_entries_in_different_formats():
    schema = CacheSchema.build(TINY, max_context=512, entry_format="bf16", window_format="fp8_ds")
    lengths = (5, 130)
    whole = live(schema, lengths, in_one_piece)
    assert_same_bytes(whole, live(schema, lengths, token_by_token))
    assert_no_stray_bytes(whole)


@pytest.mark.parametrize(("state", "layers"), [("raw", (2, 3)), ("online", (3,))])
def test_v4_flash_csa_and_hca(state: HcaState, layers: tuple[int, ...]):
    """Real widths, in a schema of all 43 layers."""
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"), max_context=512, hca_state=state)
    lengths = (1, 6, 130)
    whole = live(schema, lengths, in_one_piece, layers=layers)
    assert_no_stray_bytes(whole)
    for cut in (token_by_token, random_splits(1)):
        pieces = live(schema, lengths, cut, layers=layers)
        assert_same_bytes(whole, pieces)
        assert_no_stray_bytes(pieces)


def test_requests_alone_leave_the_bytes_they_leave_in_a_batch():
    schema = CacheSchema.build(TINY, max_context=512)
    together = live(schema, LENGTHS, in_one_piece)
    for at in (1, 7, 12):
        alone = live(schema, LENGTHS[at : at + 1], random_splits(5))
        for mine, theirs in zip(alone.all_bytes()[0], together.all_bytes()[at], strict=True):
            assert torch.equal(mine, theirs)


# ---- used slots: what can be read ---------------------------------------------------------------


def assert_same_readable(stack: Stack, request: Request, fresh: Stack, twin: Request) -> None:
    mine, theirs = readable_bytes(stack, request), readable_bytes(fresh, twin)
    assert mine.keys() == theirs.keys()
    for name, found in mine.items():
        assert torch.equal(found, theirs[name]), f"{name} at length {request.length}"


def run(stack: Stack, request: Request, stream: Stream, chunks: Sequence[int]) -> None:
    for count in chunks:
        stack.step([(request, stream, count)])


@pytest.mark.parametrize("state", HCA_STATES)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_slot_reused_after_a_longer_request(drafts: int, state: HcaState):
    """At every length of the heir, from 0 on, nothing of the dead request shows."""
    schema = CacheSchema.build(TINY, max_context=512, max_draft_tokens=drafts, hca_state=state)
    stack = Stack(schema, layers=layers_to_run(schema), max_requests=1, num_blocks=3)
    dead = stack.manager.admit_request()
    run(stack, dead, stack.stream(1, 300), [300])
    stack.manager.release_request(dead)
    heir = stack.manager.admit_request()
    fresh = Stack(schema, layers=layers_to_run(schema), max_requests=1, num_blocks=3)
    twin = fresh.manager.admit_request()
    assert heir.slot == dead.slot
    stream = stack.stream(2, 290)
    for count in (1, 1, 1, 1, 1, 3, 2, 117, 1, 1, 127, 4, 30):
        run(stack, heir, stream, [count])
        run(fresh, twin, stream, [count])
        assert_same_readable(stack, heir, fresh, twin)


@pytest.mark.parametrize("state", HCA_STATES)
def test_a_slot_reused_many_times(state: HcaState):
    rng = random.Random(5)
    schema = CacheSchema.build(TINY, max_context=512, hca_state=state)
    stack = Stack(schema, layers=layers_to_run(schema), max_requests=2, num_blocks=8)
    neighbour = stack.manager.admit_request()
    run(stack, neighbour, stack.stream(99, 200), [200])
    before = logical_bytes(stack, neighbour)
    for seed in range(8):
        length = rng.randrange(1, 400)
        request, stream = stack.manager.admit_request(), stack.stream(seed, length)
        run(stack, request, stream, random_splits(seed)(length))
        fresh = Stack(schema, layers=layers_to_run(schema), max_requests=1, num_blocks=8)
        twin = fresh.manager.admit_request()
        run(fresh, twin, stream, [length])
        assert_same_readable(stack, request, fresh, twin)
        stack.manager.release_request(request)
    for mine, old in zip(logical_bytes(stack, neighbour), before, strict=True):
        assert torch.equal(mine, old)


@pytest.mark.parametrize("state", HCA_STATES)
def test_a_request_that_starts_over_after_reset_slot(state: HcaState):
    schema = CacheSchema.build(TINY, max_context=512, hca_state=state)
    stack = Stack(schema, layers=layers_to_run(schema), max_requests=1)
    request = stack.manager.admit_request()
    run(stack, request, stack.stream(1, 200), [200])
    stack.manager.room.reset_slot(request)
    fresh = Stack(schema, layers=layers_to_run(schema), max_requests=1)
    twin = fresh.manager.admit_request()
    stream = stack.stream(2, 131)
    run(stack, request, stream, [3, 128])
    run(fresh, twin, stream, [131])
    assert_same_readable(stack, request, fresh, twin)
