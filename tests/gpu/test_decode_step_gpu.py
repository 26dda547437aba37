"""append → select → attend compiled on a GPU: real shapes, ragged lengths up to 1M tokens in one
batch, captured and replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.lengths import set_length
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import Request
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.calls import Attention, CompressorWeights, LayerWeights, Selection
from dsv4.reference import attend as reference_attend
from dsv4.reference import select as reference_select
from dsv4.rope import rope_table
from tests.oracles.indexer import round_trip
from tests.support.numbers import Numbers

pytestmark = pytest.mark.gpu

LENGTHS = (0, 3, 127, 130, 8_191, 1_048_575)
PADDED = 8


class Model:
    """One layer of each kind, with preset inputs in static tensors, as a captured step has them."""

    def __init__(self, preset: str) -> None:
        self.spec = ModelSpec.preset(preset)
        self.schema = CacheSchema.build(self.spec)
        kinds = [layer.spec.attention for layer in self.schema.layers]
        self.layers = [kinds.index(kind) for kind in ("swa", "csa", "hca")]
        blocks = sum(self.schema.blocks_for(n + 1) for n in LENGTHS) + PADDED
        self.manager = KVCacheManager(
            self.schema,
            num_blocks=blocks,
            max_requests=PADDED,
            max_step_tokens=PADDED,
            device="cuda",
        )
        generator, numbers = torch.Generator("cuda").manual_seed(3), Numbers(3)
        # bytes that are small finite numbers in every format
        for arena in (self.manager.memory.block_arena.bytes, self.manager.memory.slot_arena.bytes):
            arena.random_(56, 64, generator=generator)
        for layer in self.layers:
            for pool in (
                self.manager.acquire(layer).memory.pool,
                self.manager.acquire(layer).memory.state,
            ):
                for name, view in pool.views.items():
                    if name in ("inv_scale", "swa_inv", "indexer_scale"):
                        view.copy_(torch.randint(120, 128, view.shape, dtype=torch.uint8))
        tables = {
            yarn: rope_table(self.spec, yarn=yarn, tokens=self.spec.max_context, device="cuda")
            for yarn in (False, True)
        }

        def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return numbers.normal(*shape).to("cuda", dtype)

        self.weights, self.inputs, self.q, self.index, self.out = {}, {}, {}, {}, {}
        for layer in self.layers:
            layouts = [self.schema.layout.compressor(layer, k) for k in ("main", "index")]
            weights = [
                la and CompressorWeights(ape=random(la.ratio, la.columns), norm=random(la.width))
                for la in layouts
            ]
            self.weights[layer] = LayerWeights(
                rope=tables[self.spec.layers[layer].yarn],
                compressor=weights[0],
                index_compressor=weights[1],
                kv_norm=random(self.spec.head_dim),
            )
            columns = [la.columns for la in layouts if la for _ in range(2)]
            self.inputs[layer] = [
                random(PADDED, self.spec.head_dim, dtype=torch.bfloat16),
                *(random(PADDED, c) for c in columns),
            ]
            self.q[layer] = random(
                PADDED, self.spec.heads, self.spec.head_dim, dtype=torch.bfloat16
            )
            index_q = random(
                PADDED, self.spec.index_heads, self.spec.index_dim, dtype=torch.bfloat16
            )
            self.index[layer] = (
                round_trip(self.schema.index_format, index_q.cpu()).cuda(),  # as `prepared` says
                random(PADDED, self.spec.index_heads, dtype=torch.bfloat16) * 0.01,
            )
            self.out[layer] = (
                torch.zeros_like(self.q[layer]),
                torch.zeros(PADDED, self.spec.heads, device="cuda"),
                torch.zeros(PADDED, self.spec.index_topk, dtype=torch.int32, device="cuda"),
            )
        self.sink = random(self.spec.heads)

    def step(self, plan: ForwardPlan) -> None:
        for layer in self.layers:
            handle = self.manager.acquire(layer, plan.batch)
            handle.append(*self.inputs[layer], weights=self.weights[layer])
            out, lse, chosen = self.out[layer]
            selection = None
            if handle.memory.index_compressor is not None:
                q, index_weights = self.index[layer]
                selection = handle.select(
                    q, index_weights, chosen, rope=self.weights[layer].rope, prepared=True
                )
            handle.attend(
                self.q[layer], self.sink, selection, out, lse,
                inverse_rope=self.weights[layer].rope,
            )  # fmt: skip

    def admit(self, lengths: tuple[int, ...]) -> list[Request]:
        requests = [self.manager.admit_request(n) for n in lengths]
        for request, length in zip(requests, lengths, strict=True):
            blocks = self.schema.blocks_for(length)  # as if the tokens had been computed
            ids = torch.tensor(request.block_ids[:blocks], dtype=torch.int32, device="cuda")
            self.manager.memory.block_table[request.slot, :blocks] = ids
            set_length(self.manager, request, length)
            request.published_blocks = blocks
        return requests

    def results(self) -> dict[int, list[Tensor]]:
        return {layer: [t.clone() for t in tensors] for layer, tensors in self.out.items()}

    def forget(self) -> None:
        for tensors in self.out.values():
            for tensor in tensors:
                tensor.fill_(77)


@pytest.fixture(scope="module", params=["v4-flash", "v4-pro"])
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "v4-pro":  # no window-only layer in its backbone: its draft layer serves
        return Model("v4-pro")
    return Model("v4-flash")


def test_ragged_batch_equals_the_reference_and_replay_equals_eager(model: Model) -> None:
    requests = model.admit(LENGTHS)
    manager = model.manager
    empty = manager.prepare_forward([], pad_tokens=PADDED, pad_requests=PADDED)
    model.forget()
    model.step(empty)
    for tensors in model.results().values():
        assert all((t == 77).all() for t in tensors), "padding rows must stay untouched"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step(empty)
    manager.commit(empty)

    plan = manager.prepare_forward(
        [(r, 1) for r in requests], pad_tokens=PADDED, pad_requests=PADDED
    )
    torch.cuda.synchronize()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.forget()
        model.step(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    eager = model.results()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - allocations <= 32, (
        "only the clones of results() may allocate"
    )
    arenas = [manager.memory.block_arena.bytes.clone(), manager.memory.slot_arena.bytes.clone()]

    model.forget()
    graph.replay()
    torch.cuda.synchronize()
    replayed = model.results()
    for layer in model.layers:
        for a, b in zip(eager[layer], replayed[layer], strict=True):
            assert torch.equal(a, b), layer
    for arena, before in zip(
        (manager.memory.block_arena, manager.memory.slot_arena), arenas, strict=True
    ):
        assert torch.equal(arena.bytes, before)
    check_against_reference(model, plan, eager)
    manager.commit(plan, partial=True)  # a layer of each kind
    for request in requests:
        manager.release_request(request)


def check_against_reference(
    model: Model, plan: ForwardPlan, results: dict[int, list[Tensor]]
) -> None:
    live = len(LENGTHS)
    for layer in model.layers:
        handle = model.manager.acquire(layer, plan.batch)
        out, lse, chosen = results[layer]
        selection = None
        if handle.memory.index_compressor is not None:
            q, index_weights = model.index[layer]
            selection = torch.full_like(chosen, 77)
            reference_select.select(
                Selection(
                    q=q,
                    weights=index_weights,
                    tokens=plan.batch.tokens,
                    keys=handle.read_indexer_view().source,
                    top_k=model.spec.index_topk,
                    workspace=model.manager.memory.workspace.select,
                    out=selection,
                )
            )
            assert torch.equal(chosen[:live], selection[:live])
        wanted, wanted_lse = torch.zeros_like(out), torch.zeros_like(lse)
        reference_attend.attend(
            Attention(
                q=model.q[layer],
                sink=model.sink,
                tokens=plan.batch.tokens,
                batch=plan.batch.request_rows,
                window=handle.window_source(plan.batch),
                entries=handle.read_classical_view().source if handle.schema.spec.ratio else None,
                indices=selection,
                out=wanted,
                lse=wanted_lse,
                inverse_rope=model.weights[layer].rope,
            )
        )
        error = (out[:live].double() - wanted[:live].double()).norm()
        assert error <= 4e-3 * wanted[:live].double().norm(), (layer, float(error))
        torch.testing.assert_close(lse[:live], wanted_lse[:live], rtol=1e-3, atol=1e-3)
        assert (out[live:] == 77).all()
