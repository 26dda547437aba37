"""DeepSeek-V4.1 on a GPU: the official run, the reference's bytes, selections and attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.attend import V41, make_inputs, make_work
from benchmarks.decode_step import PARTS, DecodeStep
from benchmarks.lengths import set_length
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import PageForm
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.backend import BackendName
from dsv4.verify import verify
from tests.scenarios.test_verify_v41 import GOLDEN, check
from tests.support.numbers import Numbers
from tests.support.stack import PAGE_FORMS, Stack
from tests.test_verify_unseen import make

pytestmark = pytest.mark.gpu

FLASH = ModelSpec.preset("v41-flash")
# window only, owners of both ratios, a reader, one that selects among candidates, one that drafts
LAYERS = (0, 2, 3, 20, 24, 40)
STEPS: tuple[tuple[int, ...], ...] = ((301, 130, 7), (1, 1, 1), (6, 1, 5), (2, 257, 1), (1, 1, 1))


def test_the_official_run_is_reproduced():
    check(verify(GOLDEN, backend="triton", device="cuda"), 24)


@pytest.mark.parametrize("seed", [31, 32])
def test_an_unseen_file_is_reproduced(tmp_path: Path, seed: int):
    options = {"seed": seed, "tokens": 150, "heads": 2, "index_heads": 32, "top_k": 20}
    golden = make(tmp_path / "golden.npz", "--v41", head_dim=512, **options)
    check(verify(golden, backend="triton", device="cuda"), 44)


@pytest.mark.parametrize("form", PAGE_FORMS)
def test_arenas_are_the_reference_s(form: PageForm):
    schema = CacheSchema.build(FLASH, max_context=1024, max_draft_tokens=5, page_form=form)
    stacks = [
        Stack(schema, layers=LAYERS, max_requests=3, num_blocks=24, device=device, backend=backend)
        for device, backend in (("cpu", "reference"), ("cuda", "triton"))
    ]
    lives = [[stack.manager.admit_request() for _ in range(3)] for stack in stacks]
    for nth, counts in enumerate(STEPS):
        for stack, requests in zip(stacks, lives, strict=True):
            streams = [stack.stream(seed, 700) for seed in range(3)]
            accepted = [4, 1, 2] if nth == 2 else None
            stack.step(list(zip(requests, streams, counts, strict=True)), accepted)
        for name in ("block_arena", "slot_arena"):
            cpu, gpu = (getattr(stack.manager.memory, name).bytes.cpu() for stack in stacks)
            wrong = torch.nonzero(cpu != gpu)
            assert not len(wrong), f"step {nth}, {name}: {len(wrong)}, first {wrong[:3].tolist()}"


def test_selections_and_candidates_are_the_reference_s():
    """More entries than candidates: 20,000 tokens of one request, the last of them selecting."""
    schema = CacheSchema.build(FLASH, max_context=20_480)
    results = []
    for device, backend in (("cpu", "reference"), ("cuda", "triton")):
        manager = KVCacheManager(
            schema,
            num_blocks=160,
            max_requests=1,
            max_step_tokens=64,
            device=device,
            backend=backend,
        )
        numbers = Numbers(3)
        page = schema.layout.page("index_keys", 20)
        assert page is not None
        blocks = manager.memory.block_arena.bytes
        keys = numbers.integers(0, 256, 160, page.rows * 64).to(torch.uint8)
        scales = numbers.integers(120, 130, 160, page.rows * 4).to(torch.uint8)
        for offset, rows in ((page.offset_bytes, keys), (page.scale_offset_bytes, scales)):
            blocks[:, offset : offset + rows.shape[1]] = rows.to(device)
        request = manager.admit_request()
        request.block_ids = list(range(160))
        request.published_blocks = 160
        manager.memory.block_table[request.slot] = torch.arange(160, dtype=torch.int32).to(device)
        set_length(manager, request, 19_990)
        manager.memory.publish(request.slot, 0, request.block_ids)
        request.published_blocks = len(request.block_ids)
        plan = manager.prepare_forward([(request, 1)])
        rope = torch.zeros((schema.max_context, 64), device=device)
        lists = torch.empty((1, FLASH.candidate_blocks), dtype=torch.int32, device=device)
        found = []
        for layer in (20, 24):
            handle = manager.acquire(layer, plan.batch)
            plan.batch.written.note(layer)
            q = numbers.normal(1, FLASH.index_heads, 128).to(torch.bfloat16).to(device)
            weights = numbers.normal(1, FLASH.index_heads).to(torch.bfloat16).to(device)
            found.append(handle.select(q, weights, rope=rope, candidates=lists).cpu())
        results.append((lists.cpu(), *found))
    for expected, result in zip(*results, strict=True):
        assert torch.equal(expected, result)


def test_a_cut_window_begins_with_the_step():
    """Of a window-only layer: what a chunk's tokens read of its own rows alone."""
    check_cut_window("cuda", "triton")


def check_cut_window(device: str, backend: BackendName) -> None:
    schema = CacheSchema.build(FLASH, max_context=1024)
    stack = Stack(
        schema, layers=(0,), max_requests=2, num_blocks=16, device=device, backend=backend
    )
    requests = [stack.manager.admit_request() for _ in range(2)]
    streams = [stack.stream(seed, 400) for seed in range(2)]
    stack.step(list(zip(requests, streams, (300, 3), strict=True)))
    plan = stack.manager.prepare_forward([(requests[0], 70), (requests[1], 9)])
    stack.write(plan, streams)
    handle = stack.manager.acquire(0, plan.batch)
    rows, lengths = (found.cpu() for found in handle.gather_swa_kv())
    plan.batch.window_cut, plan.batch.sizes = True, (*plan.batch.sizes, 1)
    q = Numbers(6).normal(79, FLASH.heads, FLASH.head_dim).to(torch.bfloat16)
    sink = torch.ones(FLASH.heads)
    out, _ = handle.attend(q.to(device), sink.to(device))
    for token, (found, length) in enumerate(zip(out.cpu(), lengths.tolist(), strict=True)):
        nth = token if token < 70 else token - 70
        keys = rows[token, length - nth - 1 : length].double()
        logits = q[token].double() @ keys.T * FLASH.head_dim**-0.5
        total = torch.logaddexp(logits.logsumexp(-1), sink.double())
        wanted = (logits - total[:, None]).exp() @ keys
        assert (found.double() - wanted).norm() <= 4e-3 * wanted.norm(), token


@pytest.mark.parametrize("batch", [1, 64])
def test_attention_is_the_reference_s(batch: int):
    """Windows of 528 bytes and entries of 288 in one softmax, at the shapes of the model."""
    work = make_work(make_inputs(V41, batch, arena_bytes=2_000_000_000, max_sets=1))
    given = work.calls[0].__self__  # type: ignore[attr-defined]
    given.ours(turn_back=False)
    found = given.out.float().clone()
    shared = given.shared
    from dsv4.reference.backend import ReferenceBackend

    kernels = shared.backend
    object.__setattr__(shared, "backend", ReferenceBackend())
    given.ours(turn_back=False)
    object.__setattr__(shared, "backend", kernels)
    assert (given.out.float() - found).norm() <= 3e-3 * found.norm()


def test_a_captured_step_is_the_eager_one():
    """All layers: selections, candidates and readers in one graph."""
    step = DecodeStep(FLASH, batch=5, context=4096, device="cuda")
    manager = step.manager
    results = [step.out, step.lse, step.candidates, *step.chosen_of.values()]
    stored = [manager.memory.block_arena.bytes, manager.memory.slot_arena.bytes]
    step.run(PARTS)
    eager = [tensor.clone() for tensor in (*results, *stored)]
    assert torch.isfinite(step.out.float()).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(PARTS)
    for tensor in results:
        tensor.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    for before, after in zip(eager, (*results, *stored), strict=True):
        assert torch.equal(before, after)
