"""Entries in host memory on a GPU: what the reference leaves, byte for byte, also by one graph for
every pattern of hits; attention over them has the bits of attention over blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsv4.kernels.backend import TritonBackend
from dsv4.ops.calls import Attention, EntrySource, Resolving, Staging
from dsv4.reference import host_entries as reference
from tests.kernels.test_attend import resolve_at_random
from tests.reference.test_attend import Step, make_step
from tests.support.host_entries import (
    BLOCKS,
    ENTRIES,
    FORMATS,
    POISON,
    RATIO,
    SLOTS,
    Machine,
    check,
    selection,
)
from tests.support.numbers import Numbers

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def random_requests(numbers: Numbers, tokens: int) -> list[tuple[int, int, int]]:
    slots = numbers.permutation(SLOTS).tolist()[: int(numbers.integers(0, SLOTS + 1))]
    starts = numbers.integers(0, ENTRIES * RATIO - tokens, len(slots)).tolist()
    return [(slot, start, tokens) for slot, start in zip(slots, starts, strict=True)]


@pytest.mark.parametrize("record", FORMATS)
@pytest.mark.parametrize(("k", "tokens"), [(5, 1), (5, 3), (16, 1)])
def test_lives_of_slots_equal_the_reference(record: str, k: int, tokens: int):
    backend = TritonBackend(torch.device(DEVICE))
    expected = Machine(3, record=FORMATS[record])
    found = Machine(3, record=FORMATS[record], on=DEVICE)
    numbers = Numbers(k + tokens)
    for _ in range(100):
        requests = random_requests(numbers, tokens)
        selected = selection(numbers, len(requests) * tokens, k)
        calls = expected.resolving(requests, selected), found.resolving(requests, selected)
        reference.resolve(calls[0])
        backend.resolve(calls[1])
        check(expected, found, calls)


def test_one_graph_serves_every_pattern_of_hits():
    """Nothing inside allocates, or waits for the host."""
    backend = TritonBackend(torch.device(DEVICE))
    expected, found = Machine(4), Machine(4, on=DEVICE)
    numbers, tokens, k = Numbers(11), 2, 5
    most = [(slot, 0, tokens) for slot in range(SLOTS)]
    nothing = torch.full((SLOTS * tokens, k), -1, dtype=torch.int32)
    fixed = found.resolving(most, nothing, padding=1)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # compiles; names no entry, so only clocks move
        fixed.batch.fill_(-1)
        backend.resolve(fixed)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.resolve(fixed)
    for _ in range(60):
        requests = random_requests(numbers, tokens)
        selected = selection(numbers, len(requests) * tokens, k)
        padding = SLOTS - len(requests) + 1
        call = expected.resolving(requests, selected, padding=padding)
        reference.resolve(call)
        for name in ("tokens", "batch", "selected"):
            given = getattr(call, name)
            getattr(fixed, name).fill_(-1)
            getattr(fixed, name)[: len(given)].copy_(given[: len(getattr(fixed, name))])
        for name in ("rows", "misses", "miss_count"):
            getattr(fixed, name).fill_(-77)
        graph.replay()
        torch.cuda.synchronize()
        check(expected, found, (call, cut(fixed, call)))


def cut(fixed: Resolving, call: Resolving) -> Resolving:
    rows, requests = len(call.rows), len(call.batch)
    return replace(
        fixed,
        rows=fixed.rows[:rows],
        misses=fixed.misses[:requests],
        miss_count=fixed.miss_count[:requests],
    )


@pytest.mark.parametrize("which", ["all", "host", "device"])
@pytest.mark.parametrize("record", ["v4", "v41", "words of 4 bytes"])
def test_chunks_stage_what_the_reference_stages(record: str, which: str):
    batch = torch.tensor(
        [(2, 0, 41, 0), (-1,) * 4, (1, 70, 9, 41), (0, 0, 3, 50)], dtype=torch.int32
    )
    results = []
    for on, stage in (
        ("cpu", reference.stage),
        (DEVICE, TritonBackend(torch.device(DEVICE)).stage),
    ):
        machine = Machine(5, record=FORMATS[record], on=on)
        page = replace(machine.page, offset_bytes=0)
        table = Numbers(9).permutation(SLOTS * BLOCKS).reshape(SLOTS, BLOCKS).int()
        arena = torch.full((SLOTS * BLOCKS, page.payload_bytes), POISON, dtype=torch.uint8)
        staged = EntrySource(arena=arena.to(on), page=page, block_table=table.to(on), ratio=RATIO)
        stage(
            Staging(
                batch=batch.to(on),
                entries=machine.source,
                block_table=machine.block_table,
                host=machine.host,
                staged=staged,
                which=which,  # type: ignore[arg-type]
            )
        )
        results.append(staged.arena.cpu())
    assert torch.equal(*results)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 200])
@pytest.mark.parametrize(
    "records", [{}, {"record": "v41_fp4", "window_record": "v41_fp8"}], ids=str
)
def test_resolved_entries_give_the_bits_of_those_in_blocks(
    records: dict[str, str], tokens: int, batch_invariant: bool
):
    """With the shapes of V4, so that Hopper's kernels take them where there is a Hopper GPU."""
    shape = {"heads": 64, "width": 512, "window": 128, "top_k": 512}
    step = make_step([(2600, 1)], kind="csa", **shape, **records).take([0] * tokens)  # type: ignore[arg-type]
    backend = TritonBackend(torch.device(DEVICE), batch_invariant=batch_invariant)
    results = [attend(backend, each) for each in (step, resolve_at_random(step))]
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected.view(torch.uint8), found.view(torch.uint8))


def attend(backend: TritonBackend, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    given = step.call(out=torch.empty_like(step.q), lse=torch.empty(step.q.shape[:2]))
    assert given.entries is not None
    assert given.indices is not None
    call: Attention = replace(
        given,
        q=given.q.to(DEVICE),
        sink=given.sink.to(DEVICE),
        tokens=given.tokens.to(DEVICE),
        batch=given.batch.to(DEVICE),
        window=replace(given.window, arena=given.window.arena.to(DEVICE)),
        entries=replace(
            given.entries,
            arena=given.entries.arena.to(DEVICE),
            block_table=given.entries.block_table.to(DEVICE),
        ),
        indices=given.indices.to(DEVICE),
        out=given.out.to(DEVICE),
        lse=given.lse.to(DEVICE),
        workspace=torch.zeros(1 << 26, device=DEVICE),
    )
    backend.attend(call)
    return call.out.cpu(), call.lse.cpu()
