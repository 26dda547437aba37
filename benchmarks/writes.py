"""The write path of one V4-Flash layer: decode steps where every request or none completes a
group, and one prefill chunk. Targets and peers: the project's anchors for one H200."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.timing import Result, graph_time_us
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.cache.writes import CompressorWeights, LayerWeights
from dsv4.model import ModelSpec
from dsv4.rope import rope_table

CSA_LAYER, HCA_LAYER = 2, 3
L2_BYTES = 60 << 20
# (layer, mode) -> batch -> (target, SGLang, vLLM), µs
ANCHORS: dict[tuple[str, str], dict[int, tuple[float, float, float]]] = {
    ("csa", "flush"): {
        1: (3.3, 6.7, 16.6),
        8: (3.5, 7.3, 17.2),
        64: (3.7, 7.7, 17.7),
        256: (4.2, 8.4, 19.2),
    },
    ("csa", "idle"): {1: (2.2, 4.6, 10.5), 64: (2.5, 5.3, 11.3), 256: (2.9, 5.9, 11.9)},
    ("hca", "flush"): {
        1: (3.3, 4.4, 12.4),
        8: (3.5, 5.0, 13.4),
        64: (7.0, 10.5, 23.9),
        256: (33.0, 38.7, 55.0),
    },
    ("hca", "idle"): {1: (2.0, 3.1, 8.8), 64: (2.2, 4.1, 10.0), 256: (2.6, 7.7, 12.3)},
}
PREFILL_ANCHORS = {"csa": (30.0, 118.0), "hca": (14.0, 145.0)}
CHUNK_TOKENS = 8192


def cases(batches: tuple[int, ...] = (1, 8, 64, 256)) -> Iterator[Result]:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"), max_context=2 * CHUNK_TOKENS)
    rope = rope_table(schema.model, yarn=True, tokens=schema.max_context, device="cuda")
    for name, layer in (("csa", CSA_LAYER), ("hca", HCA_LAYER)):
        ratio = schema.layers[layer].spec.ratio
        for mode, start in (("flush", 4 * ratio - 1), ("idle", 4 * ratio + ratio // 2 - 1)):
            for batch in batches:
                call, moved = _case(schema, layer, rope, batch=batch, start=start, tokens=1)
                anchor = ANCHORS[name, mode].get(batch)
                yield Result(
                    case=f"append {name} {mode} batch {batch}",
                    microseconds=graph_time_us(call, repeats=20 // len(call)),
                    launches=1,
                    must_move_bytes=moved,
                    target_us=anchor[0] if anchor else None,
                    peers_us={"SGLang": anchor[1], "vLLM": anchor[2]} if anchor else None,
                )
        call, moved = _case(schema, layer, rope, batch=1, start=0, tokens=CHUNK_TOKENS)
        target, vllm = PREFILL_ANCHORS[name]
        yield Result(
            case=f"append {name} prefill {CHUNK_TOKENS}",
            microseconds=graph_time_us(call),
            launches=2,
            must_move_bytes=moved,
            target_us=target,
            peers_us={"vLLM": vllm},
        )


def _case(
    schema: CacheSchema, layer: int, rope: torch.Tensor, *, batch: int, start: int, tokens: int
) -> tuple[list[Callable[[], None]], int]:
    blocks = schema.blocks_for(start + tokens)
    manager = KVCacheManager(
        schema,
        num_blocks=batch * blocks,
        max_requests=batch,
        max_step_tokens=batch * tokens,
        device="cuda",
    )
    manager.slot_arena.bytes.view(torch.bfloat16).normal_()
    requests = [manager.admit_request(start + tokens) for _ in range(batch)]
    for request in requests:  # as if `start` tokens had been computed
        request.length = start
        request.published_blocks = start // schema.block_tokens
    plan = manager.prepare_forward([(r, tokens) for r in requests])
    handle = manager.acquire(layer, plan)
    compressors = {}
    for kind in ("tail", "index_tail"):
        layout = schema.compressor(layer, kind)
        compressors[kind] = layout and CompressorWeights(
            ape=torch.randn(layout.ratio, layout.columns, device="cuda"),
            norm=torch.randn(layout.width, device="cuda"),
        )
    weights = LayerWeights(
        rope=rope,
        compressor=compressors["tail"],
        index_compressor=compressors["index_tail"],
    )
    rows = batch * tokens
    widths = [la.columns for la in (handle.main, handle.index) if la for _ in range(2)]
    moved = rows * 2 * schema.model.head_dim + 4 * rows * sum(widths)
    sets = max(1, min(6, L2_BYTES * 2 // moved)) if tokens > 1 else 1
    calls: list[Callable[[], None]] = []
    for _ in range(sets + (tokens > 1)):
        kv = torch.randn(rows, schema.model.head_dim, device="cuda").to(torch.bfloat16)
        projections = [torch.randn(rows, width, device="cuda") for width in widths]

        def call(kv: torch.Tensor = kv, projections: list[torch.Tensor] = projections) -> None:
            plan.appended_layers.clear()
            handle.append(kv, *projections, weights=weights)

        calls.append(call)
    return calls, moved + _stored_bytes(schema, layer, start, tokens, batch)


def _stored_bytes(schema: CacheSchema, layer: int, start: int, tokens: int, batch: int) -> int:
    """Window rows, tail rows and records written, and tail rows read by groups that close."""
    window_rows = min(tokens, schema.ring_rows) + (tokens if tokens > 1 else 0)  # ring and chunk
    total = window_rows * schema.window_format.record_bytes
    for kind in ("tail", "index_tail"):
        layout = schema.compressor(layer, kind)  # type: ignore[arg-type]
        if layout is None:
            continue
        closed = (start + tokens) // layout.ratio - start // layout.ratio
        total += closed * layout.page.format.record_bytes
        tail_row_bytes = 2 * 4 * layout.width
        total += tail_row_bytes * (min(tokens, layout.a_rows) + min(tokens, layout.b_rows))
        if closed:
            first = (start // layout.ratio - layout.overlap) * layout.ratio
            total += tail_row_bytes * (start - max(first, 0))
    return batch * total
