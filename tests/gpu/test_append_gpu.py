"""The compiled append on a GPU: the reference's bytes, graphs, addresses past 2^31 and 2^32.

Steps share few launch sizes, because each new combination costs seconds of compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import ModelSpec
from tests.support.stack import HCA_STATES, POISON, Stack, Stream, logical_bytes

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
FLASH, TINY = ModelSpec.preset("v4-flash"), ModelSpec.preset("tiny")
SWA, CSA, HCA = 0, 2, 3  # layers of V4-Flash
DRAFTS, REQUESTS = 3, 4
PADDING = {"pad_tokens": REQUESTS * (1 + DRAFTS), "pad_requests": REQUESTS}


def schema_of(model: ModelSpec, **options: Any) -> CacheSchema:
    return CacheSchema.build(model, max_context=512, max_draft_tokens=DRAFTS, **options)


class Pair:
    """The same life on the GPU and, by the reference, on the CPU."""

    def __init__(self, schema: CacheSchema, layers: Sequence[int], **options: Any) -> None:
        options = {"max_requests": REQUESTS, "num_blocks": 12} | options
        self.gpu = Stack(schema, layers=layers, device=DEVICE, backend="triton", **options)
        self.cpu = Stack(schema, layers=layers, backend="reference", **options)
        self.stacks = (self.gpu, self.cpu)
        self.requests = [[s.manager.admit_request() for _ in range(REQUESTS)] for s in self.stacks]
        self.streams = [[s.stream(seed, 400) for seed in range(REQUESTS)] for s in self.stacks]

    def step(self, counts: dict[int, int], accepted: list[int] | None = None, **pad: int) -> None:
        for stack, requests, streams in zip(self.stacks, self.requests, self.streams, strict=True):
            work = [(requests[nth], streams[nth], count) for nth, count in counts.items()]
            stack.step(work, accepted, **pad)

    def assert_equal(self) -> None:
        for name in ("block_arena", "slot_arena"):
            found, expected = (getattr(s.manager.memory, name).bytes.cpu() for s in self.stacks)
            wrong = torch.nonzero(found != expected)
            assert not len(wrong), f"{name}: {len(wrong)} bytes differ, first {wrong[:3].tolist()}"
        assert not self.gpu.manager.memory.workspace.arrived.any()


@contextmanager
def no_allocation_and_no_sync() -> Iterator[None]:
    """Nothing inside allocates on the device, and nothing waits for it."""

    def allocations() -> int:
        return int(torch.cuda.memory_stats()["allocation.all.allocated"])

    before = allocations()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert allocations() == before


# ---- the reference's bytes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "state"), [(SWA, "raw"), (CSA, "raw"), (HCA, "raw"), (HCA, "online")]
)
def test_compiled_append_leaves_the_bytes_of_the_reference(layer: int, state: HcaState):
    """Chunks that straddle groups and turn the rings, then decode and draft steps."""
    pair = Pair(schema_of(FLASH, hca_state=state), [layer])
    pair.step({0: 9, 1: 126, 2: 300, 3: 6})
    pair.assert_equal()
    pair.step({0: 1, 1: 1, 2: 1, 3: 1}, **PADDING)
    pair.assert_equal()
    pair.step({1: 4, 3: 4, 0: 4}, accepted=[2, 0, 4], **PADDING)
    pair.assert_equal()
    for _ in range(4):
        pair.step({3: 1, 1: 2}, **PADDING)
    pair.assert_equal()


def with_outliers(stream: Stream) -> Stream:
    """Infinities, and NaN where it is not stored as it comes: an fp32 sum with NaN has other bits
    on a GPU, so gate logits get none."""
    inf, nan = float("inf"), float("nan")
    for layer, kv in stream.kv.items():
        kv[2, 5], kv[3, 70], kv[6, 100] = nan, inf, -inf
        for nth, tensor in enumerate(stream.projections[layer]):
            tensor[1, 9], tensor[9, 11] = inf, -inf
            if nth % 2 == 0:
                tensor[5, 17] = nan
    return stream


@pytest.mark.parametrize(
    ("entry_format", "index_format"), [("fp8_ds", "mxfp4"), ("fp8_row", "nvfp4"), ("bf16", "fp8")]
)
def test_compiled_formats_with_outliers(entry_format: str, index_format: str):
    schema = schema_of(TINY, entry_format=entry_format, index_format=index_format)
    pair = Pair(schema, [1], spread=3.0)
    for streams in pair.streams:
        with_outliers(streams[0])
    pair.step({0: 21, 1: 130})
    pair.assert_equal()


# ---- graphs -------------------------------------------------------------------------------------


class Captured:
    """A decode step of some layers, captured at its largest size over an empty plan."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        tokens = PADDING["pad_tokens"]
        self.inputs: dict[int, list[Tensor]] = {}
        model = stack.schema.model
        for layer in stack.layers:
            handle = stack.manager.acquire(layer)
            widths = [
                la.columns
                for la in (handle.memory.compressor, handle.memory.index_compressor)
                if la
                for _ in range(2)
            ]
            self.inputs[layer] = [
                torch.zeros(tokens, model.head_dim, dtype=torch.bfloat16, device=DEVICE),
                *(torch.zeros(tokens, width, device=DEVICE) for width in widths),
            ]
        plan = stack.manager.prepare_forward([], **PADDING)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._append(plan)  # compiles
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph), no_allocation_and_no_sync():
            self._append(plan)
        stack.manager.commit(plan)

    def _append(self, plan: ForwardPlan) -> None:
        for layer, tensors in self.inputs.items():
            handle = self.stack.manager.acquire(layer, plan.batch)
            handle.append(*tensors, weights=self.stack.weights[layer])

    def step(
        self, work: Sequence[tuple[Request, Stream, int]], accepted: list[int] | None = None
    ) -> None:
        """Replays over a smaller step; padding rows of the inputs are NaN."""
        plan = self.stack.manager.prepare_forward([(r, n) for r, _, n in work], **PADDING)
        for layer, tensors in self.inputs.items():
            if work:
                kv, projections = self.stack.inputs(plan, [s for _, s, _ in work], layer)
                for static, fresh in zip(tensors, (kv, *projections), strict=True):
                    static.copy_(fresh)
        self.graph.replay()
        plan.mark_appended()
        self.stack.manager.commit(plan, accepted)


def changed_rows(before: Tensor, after: Tensor) -> set[int]:
    return set((before != after).any(dim=1).nonzero().flatten().tolist())


@pytest.mark.parametrize("state", HCA_STATES)
def test_a_graph_replayed_at_smaller_sizes_touches_live_rows_only(state: HcaState):
    pair = Pair(schema_of(FLASH, hca_state=state), [SWA, CSA, HCA])
    arenas = (pair.gpu.manager.memory.block_arena.bytes, pair.gpu.manager.memory.slot_arena.bytes)
    captured = Captured(pair.gpu)
    assert all(bool((arena == POISON).all()) for arena in arenas)  # an empty step writes nothing
    pair.step({0: 9, 1: 126, 2: 254, 3: 2})
    pair.assert_equal()
    steps: list[tuple[dict[int, int], list[int] | None]] = [
        ({0: 4, 1: 4, 2: 4, 3: 4}, None),  # the captured size
        ({1: 1}, None),
        ({}, None),
        ({3: 2, 0: 1}, [1, 0]),
        ({2: 0, 1: 3}, None),
    ]
    requests, streams = pair.requests[0], pair.streams[0]
    for counts, accepted in steps:
        before = [arena.clone() for arena in arenas]
        captured.step([(requests[nth], streams[nth], n) for nth, n in counts.items()], accepted)
        live = [requests[nth] for nth, count in counts.items() if count]
        blocks, slots = map(changed_rows, before, arenas)
        assert blocks <= {block for request in live for block in request.block_ids}
        assert slots == {request.slot for request in live}
        work = [(pair.requests[1][nth], pair.streams[1][nth], n) for nth, n in counts.items()]
        if work:
            pair.cpu.step(work, accepted)
        pair.assert_equal()


def test_replay_and_eager_leave_the_same_bytes():
    schema = schema_of(FLASH)
    replayed, eager = (
        Stack(schema, layers=[SWA, CSA, HCA], device=DEVICE, max_requests=REQUESTS, num_blocks=12)
        for _ in range(2)
    )
    captured = Captured(replayed)
    lives = []
    for stack in (replayed, eager):
        requests = [stack.manager.admit_request() for _ in range(REQUESTS)]
        streams = [stack.stream(seed, 400) for seed in range(REQUESTS)]
        stack.step(list(zip(requests, streams, (126, 2, 9, 255), strict=True)))
        lives.append((requests, streams))
    run: list[Callable[..., None]] = [
        captured.step,
        lambda work: eager.step(work, **PADDING),
    ]
    for counts in ((1, 1, 1, 1), (4, 0, 2, 3), (1, 1, 1, 1)):
        for step, (requests, streams) in zip(run, lives, strict=True):
            step(list(zip(requests, streams, counts, strict=True)))
    for name in ("block_arena", "slot_arena"):
        one, other = (getattr(s.manager.memory, name).bytes for s in (replayed, eager))
        assert torch.equal(one, other)


# ---- allocations and syncs ----------------------------------------------------------------------


def test_append_and_acquire_allocate_nothing_and_never_wait():
    stack = Stack(
        schema_of(FLASH),
        layers=[SWA, CSA, HCA],
        device=DEVICE,
        max_requests=REQUESTS,
        num_blocks=12,
    )
    requests = [stack.manager.admit_request() for _ in range(REQUESTS)]
    streams = [stack.stream(seed, 400) for seed in range(REQUESTS)]
    for counts, padding in (((9, 126, 300, 6), {}), ((1,) * REQUESTS, PADDING)):
        steps = list(zip(requests, counts, strict=True))
        plan = stack.manager.prepare_forward(steps, **padding)
        inputs = {layer: stack.inputs(plan, streams, layer) for layer in stack.layers}
        stack.write(plan, streams)  # compiles
        plan.batch.written.appended.clear()
        torch.cuda.synchronize()
        with no_allocation_and_no_sync():
            for layer, (kv, projections) in inputs.items():
                handle = stack.manager.acquire(layer, plan.batch)
                handle.append(kv, *projections, weights=stack.weights[layer])
        stack.manager.commit(plan)


# ---- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [2**31, 2**32])
def test_the_last_block_and_the_last_slot_of_large_arenas(limit: int):
    schema = schema_of(FLASH)
    num_blocks = limit // schema.bytes.block + 8
    slots = limit // schema.bytes.slot + 2
    needed = num_blocks * schema.bytes.block + slots * schema.bytes.slot
    if torch.cuda.mem_get_info()[0] < 2 * needed:
        pytest.skip(f"{needed:,} bytes of arenas do not fit")
    large = Stack(
        schema, layers=[CSA, HCA], device=DEVICE, num_blocks=num_blocks, max_requests=slots
    )
    small = Stack(schema, layers=[CSA, HCA], num_blocks=3, max_requests=REQUESTS)
    assert large.manager.memory.block_arena.bytes.numel() > limit
    assert large.manager.memory.slot_arena.bytes.numel() > limit
    large.manager._parts.table.allocator.take(num_blocks - 3)
    request = [large.manager.admit_request() for _ in range(slots)][-1]
    twin = small.manager.admit_request()
    for stack, mine in ((large, request), (small, twin)):
        stream = stack.stream(0, 400)
        stack.step([(mine, stream, 300)])
        for _ in range(4):
            stack.step([(mine, stream, 1)], **PADDING)
    assert sorted(request.block_ids) == [num_blocks - 3, num_blocks - 2, num_blocks - 1]
    assert request.slot == slots - 1
    assert request.slot * schema.bytes.slot > limit
    assert min(request.block_ids) * schema.bytes.block > limit
    found = gathered(large, request)
    for mine, expected in zip(found, logical_bytes(small, twin), strict=True):
        assert torch.equal(mine, expected)
    for arena in (
        large.manager.memory.block_arena.bytes[:-3],
        large.manager.memory.slot_arena.bytes[:-1],
    ):
        for piece in arena.split(512):
            assert bool((piece == POISON).all())


def gathered(stack: Stack, request: Request) -> tuple[Tensor, Tensor]:
    """As logical_bytes, without copying a whole arena to the host."""
    blocks = [stack.manager.memory.block_arena.bytes[block].cpu() for block in request.block_ids]
    return torch.stack(blocks), stack.manager.memory.slot_arena.bytes[request.slot].cpu()
