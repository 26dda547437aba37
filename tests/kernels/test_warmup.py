"""After `manager.warmup()` no step asks the compiler for anything; workers leave binaries where a
launch finds them."""

from __future__ import annotations

import json
import pickle
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.errors import TritonError

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import PageForm
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.schema import CacheSchema
from dsv4.cache.warmup import phantom_tensor, token_counts
from dsv4.errors import InvalidInput
from dsv4.kernels import launch, warmup
from dsv4.model import AttentionType, ModelSpec
from dsv4.ops.calls import CompressorWeights, KeyProjection, LayerWeights
from tests.kernels.compiling import run_apart
from tests.kernels.test_attend_wide_sm90 import launch as attend_wide_launch
from tests.kernels.test_index_scores_hopper_sm90 import launch as scores_launch
from tests.kernels.test_index_scores_wide_sm90 import launch as scores_wide_launch
from tests.support.no_gpu import no_gpu

MODELS = {"tiny": 512, "v41-tiny": 512, "v4-flash": 8192, "v4-pro": 131_072}
REQUESTS = 6


def new_manager(model: str, *, form: PageForm = "planes", **options: Any) -> KVCacheManager:
    """With layers of every sort; the tiny model has few anyway."""
    spec = ModelSpec.preset(model)
    few = replace(spec, layers=spec.layers[:6]) if "tiny" not in model else spec
    apart = "host_memory" in options
    schema = CacheSchema.build(
        few, max_context=MODELS[model], max_draft_tokens=3, entries_apart=apart, page_form=form
    )
    return KVCacheManager(
        schema, num_blocks=40, max_requests=REQUESTS, max_step_tokens=1000, **options
    )


class Engine:
    """Runs steps of any shape with tensors that have no memory: nothing is launched here."""

    def __init__(self, manager: KVCacheManager, heads: int) -> None:
        self.manager, self.heads, self.model = manager, heads, manager.schema.model
        self.layers = range(len(self.model.layers))

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return phantom_tensor(self.manager.memory.slot_arena.bytes, shape, dtype)

    def weights(self, layer: int) -> LayerWeights:
        def of(kind: str) -> CompressorWeights | None:
            layout = self.manager.schema.layout.compressor(layer, kind)  # type: ignore[arg-type]
            if layout is None:
                return None
            ape = None if layout.key_page else self.new(layout.ratio, layout.columns)
            return CompressorWeights(ape=ape, norm=self.new(layout.width))

        layout, keys = self.manager.schema.layout.compressor(layer, "main"), None
        if layout is not None and layout.key_page is not None:
            shape = (self.model.index_dim, self.model.head_dim)
            weight = self.new(*shape, dtype=torch.bfloat16)
            keys = KeyProjection(weight=weight, norm=self.new(self.model.index_dim))
        return LayerWeights(
            rope=self.new(self.manager.schema.max_context, self.model.rope_dim),
            compressor=of("main"),
            index_compressor=of("index"),
            index_projection=keys,
            kv_norm=self.new(self.model.head_dim),
        )

    def run(self, plan: ForwardPlan) -> None:
        model, rows = self.model, plan.batch.padded_tokens
        for layer in self.layers:
            handle, weights = self.manager.acquire(layer, plan.batch), self.weights(layer)
            projections = [
                self.new(
                    rows, layout.columns, dtype=torch.float32 if layout.gated else torch.bfloat16
                )
                for layout in (handle.memory.compressor, handle.memory.index_compressor)
                if layout
                for _ in range(1 + layout.gated)
            ]
            kv = self.new(rows, model.head_dim, dtype=torch.bfloat16)
            handle.append(kv, *projections, weights=weights)
            spec = handle.schema.spec
            if spec.has_indexer:
                q = self.new(rows, model.index_heads, model.index_dim, dtype=torch.bfloat16)
                scales = self.new(rows, model.index_heads, dtype=torch.bfloat16)
                bounded = spec.candidates_of is not None or layer in model.candidate_sources
                blocks = self.new(rows, max(1, model.candidate_blocks), dtype=torch.int32)
                handle.select(q, scales, rope=weights.rope, candidates=blocks if bounded else None)
            listed = handle.schema.spec.attention is AttentionType.CSA
            chosen = self.new(rows, model.index_topk, dtype=torch.int32)
            handle.attend(
                self.new(rows, self.heads, model.head_dim, dtype=torch.bfloat16),
                self.new(self.heads),
                chosen if listed else None,
                inverse_rope=weights.rope,
            )

    def draft(self, requests: int) -> None:
        """A draft step of every draft layer, if the model drafts several tokens at once."""
        model, block = self.model, self.model.draft_block
        admitted = [self.manager.admit_request() for _ in range(requests)]
        plan = self.manager.prepare_forward([(request, block) for request in admitted])
        for layer in (spec.layer for spec in model.layers if spec.draft):
            weights, rows = self.weights(layer), plan.batch.padded_tokens
            self.manager.acquire(layer, plan.batch).attend_draft(
                self.new(rows, model.head_dim, dtype=torch.bfloat16),
                self.new(rows, self.heads, model.head_dim, dtype=torch.bfloat16),
                self.new(self.heads),
                weights=weights,
                inverse_rope=weights.rope,
            )
        self.manager.abandon(plan)
        for request in admitted:
            self.manager.release_request(request)


def random_steps(manager: KVCacheManager, run: Callable[[ForwardPlan], None], seed: int) -> None:
    """Decodes, drafts, chunks and both at once, with and without padding."""
    random = Random(seed)
    limit = min(MODELS["tiny"], manager.schema.max_context)
    for nth in range(25):
        crowd = nth % 5 == 0  # chunks too short for kernels of their own, many tokens together
        several = REQUESTS if crowd else random.randint(1, REQUESTS)
        requests = [manager.admit_request() for _ in range(several)]
        for count in (random.choice((1, 7, 40, limit // 2)), 1, random.randint(2, 4)):
            counts = [random.randint(1, count) for _ in requests]
            if crowd and count > 4:
                counts = [random.randint(30, 60) for _ in requests]
            elif count == 1 or nth % 4 == 0:
                counts[0] = min(count, limit - 8)
            tokens, padding = sum(counts), {}
            if max(counts) <= manager.schema.max_rollback_tokens and random.random() < 0.5:
                padding["pad_tokens"] = random.randint(tokens, 256)
                padding["pad_requests"] = random.randint(len(requests), REQUESTS)
            plan = manager.prepare_forward(list(zip(requests, counts, strict=True)), **padding)
            run(plan)
            manager.commit(plan)
        for request in requests:
            manager.release_request(request)


@pytest.mark.parametrize(
    ("model", "heads", "options"),
    [
        ("tiny", 4, {}),
        ("v41-tiny", 2, {}),
        ("v41-tiny", 2, {"form": "records"}),
        ("v4-flash", 64, {}),
        ("v4-flash", 64, {"batch_invariant": True}),
        ("v4-pro", 16, {}),
        ("tiny", 4, {"host_memory": "10MB"}),
    ],
)
def test_no_step_compiles_anything_after_warmup(
    model: str, heads: int, options: dict[str, Any]
) -> None:
    with no_gpu(hopper="tiny" not in model) as gpu:
        manager = new_manager(model, **options)
        ready = manager.warmup(heads=heads, workers=1)
        assert ready == len(gpu.asked) > 0
        assert not gpu.started
        gpu.asked.clear()
        engine = Engine(manager, heads)
        random_steps(manager, engine.run, seed=3)
        for requests in range(1, REQUESTS + 1) if engine.model.draft_block else ():
            engine.draft(requests)
        asked = {(each.kernel.fn.__name__, each.specialization()[2:]) for each in gpu.asked}
    assert not asked
    assert len(gpu.started) > 500
    names = {each.kernel for each in gpu.started}
    assert ({"_weigh_kernel", "_add_kernel"} <= names) == ("batch_invariant" in options)
    assert ({"_resolve_kernel", "_fetch_kernel"} <= names) == ("host_memory" in options)


def test_without_warmup_steps_do_compile() -> None:
    """So the test above can fail: other heads are other binaries."""
    with no_gpu() as gpu:
        manager = new_manager("tiny")
        manager.warmup(heads=4, workers=1)
        gpu.asked.clear()
        random_steps(manager, Engine(manager, 8).run, seed=3)
    assert {each.kernel.fn.__name__ for each in gpu.asked} == {"_attend_kernel"}


def test_binaries_are_few() -> None:
    """Constants and sizes that differ from step to step, and buy nothing, make no binaries."""
    with no_gpu(hopper=True) as gpu:
        new_manager("v4-flash").warmup(workers=1)
    counts: dict[str, int] = {}
    for each in gpu.asked:
        name = each.kernel.fn.__name__
        counts[name] = counts.get(name, 0) + 1
    # narrow, and a chunk's two launches, of three sorts of layers
    assert counts["_append_kernel"] <= 9
    assert counts["_index_query_kernel"] == 1
    assert counts["_index_scores_hopper_kernel"] <= 4
    assert counts["_attend_hopper_kernel"] <= 50


def test_a_kernel_that_cannot_be_compiled_is_replaced() -> None:
    with no_gpu(hopper=True) as gpu, pytest.MonkeyPatch.context() as patch:
        compiled = gpu.compiled

        def refusing(asked: launch.Launch) -> Any:
            if "hopper" in asked.kernel.fn.__module__:
                raise TritonError("not in this Triton")
            return compiled(asked)

        patch.setattr(launch, "compiled", refusing)
        manager = new_manager("v4-flash")
        with pytest.warns(RuntimeWarning, match="the portable one runs instead"):
            ready = manager.warmup(workers=1)
        names = {each.kernel.fn.__name__ for each in gpu.asked}
        assert {"_attend_kernel", "_index_scores_kernel"} <= names
        asked = len(gpu.asked)
        assert manager.warmup(workers=1) <= ready
        assert len(gpu.asked) == asked  # the kernels in their place are there


def test_an_error_of_the_last_kernel_is_told() -> None:
    with no_gpu(), pytest.MonkeyPatch.context() as patch:
        manager = new_manager("tiny")

        def refusing(asked: launch.Launch) -> Any:
            raise TritonError("no compiler")

        patch.setattr(launch, "compiled", refusing)
        with pytest.raises(TritonError, match="no compiler"):
            manager.warmup(workers=1)


def test_what_has_no_kernels_is_ready_at_once() -> None:
    assert new_manager("tiny", backend="reference").warmup() == 0
    assert new_manager("tiny", backend="triton").warmup() == 0  # interpreted
    with pytest.raises(InvalidInput, match="heads"):
        new_manager("tiny").warmup(heads=0)
    with pytest.raises(InvalidInput, match="workers"):
        new_manager("tiny").warmup(workers=0)


def test_warming_up_leaves_the_manager_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with no_gpu():
        manager = new_manager("tiny")
        manager.memory.slot_arena.bytes.fill_(7)
        before = [t.clone() for t in (manager.memory.block_arena.bytes, manager.memory.block_table)]
        request = manager.admit_request()
        plan = manager.prepare_forward([(request, 3)])
        tokens = plan.batch.tokens.clone()
        manager.warmup(workers=1, progress=True)
        assert torch.equal(plan.batch.tokens, tokens)
        assert bool((manager.memory.slot_arena.bytes == 7).all())
        assert torch.equal(manager.memory.block_arena.bytes, before[0])
        Engine(manager, 4).run(plan)
        manager.commit(plan)
    told = capsys.readouterr().err
    assert "kernels" in told
    assert told.endswith("s\n")


def test_counts_of_tokens_reach_the_limit_and_not_beyond() -> None:
    assert token_counts(1) == [1]
    assert token_counts(5) == [1, 2, 3, 4, 5]
    assert token_counts(1000)[-1] == 1000
    assert {255, 256, 257, 768} <= set(token_counts(1000))


def test_stand_ins_have_a_shape_and_no_memory() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    found = phantom_tensor(memory, (1 << 20, 64, 512), torch.bfloat16)
    assert found.shape == (1 << 20, 64, 512)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous()
    assert found.data_ptr() == memory.data_ptr()


# ---- workers, in a process that compiles -----------------------------------------------------


def test_workers_leave_binaries_where_launches_find_them() -> None:
    found = run_apart("tests.kernels.test_warmup")
    count = found["launches"]
    # in this process, after others have compiled: in another order, of which keys must not know
    assert found["hits"] == [True] * count
    assert found["told"][0] == [0, count]
    assert sorted(found["told"][1:]) == [[nth, count] for nth in range(1, count + 1)]
    assert found["notes"] == count
    assert found["started_again"] == 0
    assert found["compiled"] == [True, False]  # as noted, and when the cache is gone


def test_a_descriptor_travels_to_a_worker_without_its_tensor() -> None:
    given = attend_wide_launch("flash hca")
    job = pickle.loads(pickle.dumps(warmup.job_of(given, "sm_90")))
    (at,) = (nth for nth, each in enumerate(given.arguments) if launch.is_descriptor(each))
    wanted, made = given.arguments[at], job.arguments[at].descriptor()
    assert type(made) is type(wanted)
    for field in ("block_shape", "layout", "padding"):
        assert getattr(made, field) == getattr(wanted, field)
    assert tuple(made.strides) == tuple(wanted.strides)
    assert made.base.dtype == wanted.base.dtype
    assert not any(isinstance(each, Tensor) for each in job.arguments)


def main() -> None:
    """Kernels that share functions, one of them with a descriptor: compiled apart, found here, and
    not compiled again."""
    import os

    cache = tempfile.mkdtemp()
    os.environ["TRITON_CACHE_DIR"] = cache
    from triton import knobs
    from triton.runtime import driver

    from dsv4.cache import records
    from dsv4.kernels.compile_worker import NoDevice
    from dsv4.kernels.index_query import index_query_launch
    from dsv4.kernels.target import TARGETS

    driver.set_active(NoDevice(TARGETS["sm_90"].triton_target))
    torch.cuda.current_device = lambda: 0
    tokens = torch.zeros((3, 4), dtype=torch.int32)
    launches = [scores_wide_launch("prepare"), attend_wide_launch("flash hca")]
    for heads in (4, 64):
        q = torch.zeros((3, heads, 128), dtype=torch.bfloat16)
        record = records.mxfp4(128)
        rope = torch.zeros((64, 64))
        launches.append(index_query_launch(q, tokens=tokens, rope=rope, record=record, out=q))
    launches += [scores_launch(), scores_wide_launch("wide")]
    told: list[tuple[int, int]] = []
    started: list[int] = []
    popen = subprocess.Popen

    def counted(*arguments: Any, **options: Any) -> Any:
        started.append(1)
        return popen(*arguments, **options)

    warmup.subprocess.Popen = counted  # type: ignore[attr-defined, misc]
    device = torch.device("cpu")

    def apart() -> int:
        started.clear()
        warmup._compile_apart(launches, device, 2, lambda *both: told.append(both))
        return len(started)

    apart()
    first = list(told)
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    for each in launches:
        each.binary()
    again = apart()
    notes = list(Path(cache, "dsv4").iterdir())
    compiled = [warmup._is_compiled(notes[0])]
    Path(notes[0].read_text()).unlink()
    compiled.append(warmup._is_compiled(notes[0]))
    print(
        json.dumps(
            {
                "launches": len(launches),
                "hits": hits,
                "told": first,
                "notes": len(notes),
                "started_again": again,
                "compiled": compiled,
            }
        )
    )


if __name__ == "__main__":
    main()
