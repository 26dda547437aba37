"""The indexer of one V4-Flash CSA layer: scoring and exact top-k. Targets and peers: the project's
anchors for one H200."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.timing import Result, graph_time_us
from dsv4.cache.reads import EntrySource
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.index_query import prepare_index_queries
from dsv4.kernels.index_scores import index_scores
from dsv4.kernels.top_k import top_k, top_k_workspace_bytes
from dsv4.model import ModelSpec

CSA_LAYER = 2
L2_BYTES = 60 << 20
# (requests, entries) -> DeepGEMM with 132-byte FP8 keys, µs; the target is 0.7 of it
SCORE_ANCHORS = {
    (1, 2_048): 3.4,
    (1, 32_768): 4.1,
    (1, 262_144): 8.5,
    (8, 262_144): 73.6,
    (16, 32_768): 21.8,
    (64, 32_768): 73.1,
    (256, 2_048): 22.5,
    (256, 8_192): 73.8,
}
TARGET_OF_DEEPGEMM = 0.7
# (rows, scores) -> target, SGLang, torch.topk, µs; k = 512
TOP_K_ANCHORS: dict[tuple[int, int], tuple[float, float, float | None]] = {
    (1, 262_144): (12.0, 14.7, 80.0),
    (8, 262_144): (13.0, 14.9, None),
    (32, 32_768): (10.0, 12.2, 78.0),
    (256, 8_192): (9.0, 9.3, 88.0),
}
MAX_SETS = 8


def cases() -> Iterator[Result]:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    yield from _query_cases(schema)
    yield from _score_cases(schema)
    yield from _top_k_cases(schema)


def _query_cases(schema: CacheSchema) -> Iterator[Result]:
    model = schema.model
    rope = torch.rand(4096, model.rope_dim, device="cuda") * 2 - 1
    for batch in (1, 256):
        q = torch.randn(batch, model.index_heads, model.index_dim, device="cuda").bfloat16()
        out = torch.empty_like(q)
        tokens = _tokens(requests=batch, position=4095)

        def call(
            q: torch.Tensor = q, tokens: torch.Tensor = tokens, out: torch.Tensor = out
        ) -> None:
            prepare_index_queries(q, tokens=tokens, rope=rope, record=schema.index_format, out=out)

        yield Result(
            case=f"index queries batch {batch}",
            microseconds=graph_time_us([call], repeats=20),
            launches=1,
            must_move_bytes=2 * q.numel() * q.element_size(),
        )


def _score_cases(schema: CacheSchema) -> Iterator[Result]:
    page = next(p for p in schema.pages if p.kind == "index_keys" and p.layer == CSA_LAYER)
    # blocks at their true distance: about 30 GB, of which only one layer's keys are filled
    blocks = max(requests * entries for requests, entries in SCORE_ANCHORS) // page.rows
    arena = torch.empty((blocks, schema.block_bytes), dtype=torch.uint8, device="cuda")
    for offset, width, low, high in (
        (page.offset_bytes, page.format.data_row_bytes, 0, 256),
        (page.scale_offset_bytes, page.format.scale_row_bytes, 120, 130),
    ):
        view = arena.as_strided((blocks, page.rows * width), (arena.stride(0), 1), offset)
        view.random_(low, high)
    for (requests, entries), deepgemm in SCORE_ANCHORS.items():
        for tokens_per_request in (1, 4) if (requests, entries) == (16, 32_768) else (1,):
            calls, moved = _score_calls(
                schema, arena, requests, entries, tokens_per_request=tokens_per_request
            )
            plain = tokens_per_request == 1
            suffix = "" if plain else f", {tokens_per_request} tokens each"
            yield Result(
                case=f"index scores {requests} x {entries}{suffix}",
                microseconds=graph_time_us(calls, repeats=max(1, 8 // len(calls))),
                launches=1,
                must_move_bytes=moved,
                target_us=TARGET_OF_DEEPGEMM * deepgemm if plain else None,
                peers_us={"DeepGEMM fp8": deepgemm} if plain else None,
            )


def _score_calls(
    schema: CacheSchema,
    arena: torch.Tensor,
    requests: int,
    entries: int,
    *,
    tokens_per_request: int,
) -> tuple[list[Callable[[], None]], int]:
    model = schema.model
    page = next(p for p in schema.pages if p.kind == "index_keys" and p.layer == CSA_LAYER)
    ratio = model.layers[CSA_LAYER].ratio
    blocks = entries // page.rows
    rows = requests * tokens_per_request
    q = torch.randn(rows, model.index_heads, model.index_dim, device="cuda").bfloat16()
    weights = torch.randn(rows, model.index_heads, device="cuda").bfloat16()
    scores = torch.empty(rows, entries, device="cuda")
    # the last token of a request sees all entries, the drafts before it all but the last
    tokens = _tokens(
        requests=requests, position=entries * ratio - 1, tokens_per_request=tokens_per_request
    )
    key_bytes = requests * entries * page.format.record_bytes
    sets = max(1, min(MAX_SETS, arena.shape[0] // (requests * blocks), 2 * L2_BYTES // key_bytes))
    order = torch.randperm(arena.shape[0], device="cuda").int()
    calls: list[Callable[[], None]] = []
    for nth in range(sets):
        used = order[nth * requests * blocks : (nth + 1) * requests * blocks]
        keys = EntrySource(
            arena=arena, page=page, block_table=used.view(requests, blocks), ratio=ratio
        )

        def call(keys: EntrySource = keys) -> None:
            index_scores(
                q,
                weights,
                tokens=tokens,
                keys=keys,
                first_entry=0,
                scores=scores,
                tokens_per_request=tokens_per_request,
            )

        calls.append(call)
    moved = key_bytes + q.numel() * q.element_size() + scores.numel() * scores.element_size()
    return calls, moved


def _top_k_cases(schema: CacheSchema) -> Iterator[Result]:
    model = schema.model
    ratio = model.layers[CSA_LAYER].ratio
    for (rows, columns), (target, sglang, torch_topk) in TOP_K_ANCHORS.items():
        tokens = _tokens(requests=rows, position=columns * ratio - 1)
        out = torch.empty(rows, model.index_topk, dtype=torch.int32, device="cuda")
        needed = top_k_workspace_bytes(rows, columns)
        workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device="cuda")
        scores = torch.randn(rows, columns, device="cuda").bfloat16().float()

        def call(
            scores: torch.Tensor = scores,
            tokens: torch.Tensor = tokens,
            out: torch.Tensor = out,
            workspace: torch.Tensor = workspace,
        ) -> None:
            top_k(scores, tokens=tokens, ratio=ratio, first_entry=0, out=out, workspace=workspace)

        peers = {"SGLang": sglang}
        if torch_topk is not None:
            peers["torch.topk"] = torch_topk
        yield Result(
            case=f"top-k {model.index_topk} of {rows} x {columns}",
            microseconds=graph_time_us([call], repeats=10),
            launches=3 if needed else 1,
            must_move_bytes=scores.numel() * scores.element_size() + out.numel() * 4,
            target_us=target,
            peers_us=peers,
        )


def _tokens(*, requests: int, position: int, tokens_per_request: int = 1) -> torch.Tensor:
    """StepBuffers.tokens of a step whose requests all end at `position`."""
    request = torch.arange(requests).repeat_interleave(tokens_per_request)
    nth = torch.arange(tokens_per_request).repeat(requests)
    columns = (request, position - (tokens_per_request - 1) + nth, request, request)
    return torch.stack(columns, dim=1).to(device="cuda", dtype=torch.int32)
