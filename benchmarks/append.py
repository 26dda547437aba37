"""The write path of one layer: decode steps where every request or none completes a group, and one
prefill chunk. Targets: the project's for one H200. Calls rotate over the layers of the
kind, as a step does; their rings and tails do not overlap."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.case import Call, Case, Measurement, Work, sets_to_outgrow_l2
from benchmarks.lengths import set_length
from benchmarks.peers import CHUNK_WRITES_US, WRITES_US
from benchmarks.timing import measure
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.pages import CompressorLayout
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import ModelSpec
from dsv4.ops.calls import CompressorWeights, KeyProjection, LayerWeights
from dsv4.rope import rope_table

# (layer kind, mode) -> batch -> target, µs; at V4-Flash's shapes
TARGETS_US: dict[tuple[str, str], dict[int, float]] = {
    ("csa", "flush"): {1: 3.3, 8: 3.5, 64: 3.7, 256: 4.2},
    ("csa", "idle"): {1: 2.2, 64: 2.5, 256: 2.9},
    ("hca", "flush"): {1: 3.3, 8: 3.5, 64: 7.0, 256: 33.0},
    ("hca", "idle"): {1: 2.0, 64: 2.2, 256: 2.6},
}
CHUNK_TARGETS_US = {"csa": 30.0, "hca": 14.0}
CHUNK_TOKENS = 8192
BATCHES = {"v4-flash": (1, 8, 64, 256), "v4-pro": (1, 64, 256)}
# series -> layer kind, how its unfinished groups are kept
SERIES: dict[str, tuple[str, HcaState]] = {
    "csa": ("csa", "raw"),
    "hca": ("hca", "raw"),
    "hca online": ("hca", "online"),
}


def cases() -> Iterator[Case]:
    for model, batches in BATCHES.items():
        short = model.removeprefix("v4-")
        for series, (kind, state) in SERIES.items():
            schema = CacheSchema.build(
                ModelSpec.preset(model), max_context=2 * CHUNK_TOKENS, hca_state=state
            )
            ratio = _layers(schema, kind)[0][1]
            for mode, start in (("flush", 4 * ratio - 1), ("idle", 4 * ratio + ratio // 2 - 1)):
                for batch in batches:
                    others = WRITES_US[kind, mode].get(batch) if model == "v4-flash" else None
                    yield Case(
                        name=f"append {short} {series} {mode} batch {batch}",
                        suite="writes",
                        series=f"{series} {mode}",
                        model=model,
                        batch=batch,
                        measure=partial(_measure, schema, kind, batch=batch, start=start, tokens=1),
                        target_us=TARGETS_US[kind, mode][batch] if others else None,
                        anchors_us={"SGLang": others[0], "vLLM": others[1]} if others else {},
                    )
            yield Case(
                name=f"append {short} {series} prefill {CHUNK_TOKENS}",
                suite="writes",
                series=f"{series} prefill",
                model=model,
                batch=1,
                context=CHUNK_TOKENS,
                measure=partial(_measure, schema, kind, batch=1, start=0, tokens=CHUNK_TOKENS),
                target_us=CHUNK_TARGETS_US[kind] if model == "v4-flash" else None,
                anchors_us={"vLLM": CHUNK_WRITES_US[kind]} if model == "v4-flash" else {},
            )


# DeepSeek-V4.1: owners of entries by the number of tokens to an entry
V41_LAYERS = {"pairs": (2, 8, 14), "singles": (20,)}
V41_BATCHES = (1, 64, 256)


def v41_cases() -> Iterator[Case]:
    schema = CacheSchema.build(ModelSpec.preset("v41-flash"), max_context=2 * CHUNK_TOKENS)
    for series, layers in V41_LAYERS.items():
        for batch, tokens in (*((batch, 1) for batch in V41_BATCHES), (1, CHUNK_TOKENS)):
            what = f"batch {batch}" if tokens == 1 else f"prefill {tokens}"
            start = 7 if tokens == 1 else 0
            yield Case(
                name=f"append v41 {series} {what}",
                suite="v41",
                series=f"append v41 {series}" + ("" if tokens == 1 else " prefill"),
                model="v41-flash",
                batch=batch,
                context=None if tokens == 1 else tokens,
                measure=partial(_measure, schema, layers, batch=batch, start=start, tokens=tokens),
            )


def _layers(schema: CacheSchema, kind: str) -> list[tuple[int, int]]:
    """Layers of one kind, and their ratio."""
    return [(s.layer, s.ratio) for s in schema.model.layers if s.attention == kind]


def _measure(
    schema: CacheSchema, of: str | tuple[int, ...], *, batch: int, start: int, tokens: int
) -> Measurement:
    """Of a kind of layers, or of these."""
    rope = rope_table(schema.model, yarn=True, tokens=schema.max_context, device="cuda")
    manager = KVCacheManager(
        schema,
        num_blocks=batch * schema.blocks_for(start + tokens),
        max_requests=batch,
        max_step_tokens=batch * tokens,
        device="cuda",
    )
    manager.memory.slot_arena.bytes.view(torch.bfloat16).normal_()
    requests = [manager.admit_request(start + tokens) for _ in range(batch)]
    for request in requests:  # as if `start` tokens had been computed
        set_length(manager, request, start)
        request.published_blocks = start // schema.block_tokens
    plan = manager.prepare_forward([(r, tokens) for r in requests])
    layers = list(of) if isinstance(of, tuple) else [layer for layer, _ in _layers(schema, of)]
    moved = append_bytes(schema, layers[0], start=start, tokens=tokens, batch=batch)

    # a decode step finds its inputs in the L2, where the launch before left them; a chunk does not
    step_inputs = random_inputs(schema, layers[0], batch) if tokens == 1 else None

    def make_call(layer: int) -> Call:
        handle = manager.acquire(layer, plan.batch)
        weights = random_weights(schema, layer, rope)
        inputs = step_inputs or random_inputs(schema, layer, batch * tokens)

        def call() -> None:
            plan.batch.written.appended.clear()
            handle.append(*inputs, weights=weights)

        return call

    sets = sets_to_outgrow_l2(moved, len(layers))
    return measure(Work(calls=[make_call(layer) for layer in layers[:sets]], must_move_bytes=moved))


def compressors(schema: CacheSchema, layer: int) -> list[CompressorLayout]:
    """The main compressor of a layer and the indexer's, where it has them."""
    found = [schema.layout.compressor(layer, "main"), schema.layout.compressor(layer, "index")]
    return [layout for layout in found if layout is not None]


def random_weights(
    schema: CacheSchema, layer: int, rope: torch.Tensor, device: str = "cuda"
) -> LayerWeights:
    made: list[CompressorWeights | None] = [
        CompressorWeights(
            ape=torch.randn(layout.ratio, layout.columns, device=device)
            if layout.key_page is None
            else None,
            norm=torch.randn(layout.width, device=device),
        )
        for layout in compressors(schema, layer)
    ]
    made += [None] * (2 - len(made))
    main, width = schema.layout.compressor(layer, "main"), schema.model.index_dim
    projection = None
    if main is not None and main.key_page is not None:
        weight = torch.randn(width, main.width, device=device).to(torch.bfloat16)
        projection = KeyProjection(weight=weight, norm=torch.randn(width, device=device))
    return LayerWeights(
        rope=rope, compressor=made[0], index_compressor=made[1], index_projection=projection
    )


def random_inputs(
    schema: CacheSchema, layer: int, tokens: int, device: str = "cuda"
) -> list[torch.Tensor]:
    """KV rows and projections of one layer, as `append` takes them."""
    kv = torch.randn(tokens, schema.model.head_dim, device=device).to(torch.bfloat16)
    rows = [kv]
    for layout in compressors(schema, layer):
        dtype = torch.float32 if layout.gated else torch.bfloat16
        for _ in range(2 if layout.gated else 1):
            rows.append(torch.randn(tokens, layout.columns, device=device).to(dtype))
    return rows


def append_bytes(schema: CacheSchema, layer: int, *, start: int, tokens: int, batch: int) -> int:
    """Inputs, window rows, tail rows and records of `batch` requests at `start`, and tail rows
    that closing groups read; of a folded group the state before the step and those it writes."""
    window_rows = min(tokens, schema.ring_rows) + (tokens if tokens > 1 else 0)  # ring and chunk
    total = 2 * tokens * schema.model.head_dim + window_rows * schema.window_format.record_bytes
    for layout in compressors(schema, layer):
        total += (8 if layout.gated else 2) * tokens * layout.columns
        closed = (start + tokens) // layout.ratio - start // layout.ratio
        total += closed * layout.page.format.record_bytes
        if layout.key_page is not None:
            total += closed * layout.key_page.format.record_bytes
            total += 2 * layout.width * layout.key_page.format.width // batch  # the weight, once
        if layout.state is not None:
            states = min(tokens, layout.state.rows) + (start % layout.ratio > 0)
            total += 3 * 4 * layout.width * states
            continue
        tail_row_bytes = 2 * 4 * layout.width
        total += tail_row_bytes * sum(min(tokens, r.rows) for r in (layout.ka, layout.kb) if r)
        if closed:
            first = (start // layout.ratio - layout.overlap) * layout.ratio
            total += tail_row_bytes * (start - max(first, 0))
    return batch * total
