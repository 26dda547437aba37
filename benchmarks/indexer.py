"""The indexer of one CSA layer: queries, scoring and exact top-k. Targets and anchors: the
project's for one H200. V4-Flash and V4-Pro differ in the top-k alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.case import Call, Case, Measurement, Work, sets_to_outgrow_l2
from benchmarks.peers import torch_top_k_call
from benchmarks.timing import measure
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.index_query import prepare_index_queries
from dsv4.kernels.index_scores import index_scores
from dsv4.kernels.top_k import top_k, top_k_workspace_bytes
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource, Scoring

CSA_LAYER = 2
RATIO = 4
# (requests, entries) -> DeepGEMM with 132-byte FP8 keys, µs: the first step; the target is 0.7 of
# that
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
DRAFT_STEP = (16, 32_768, 4)  # requests, entries, tokens of each
# (rows, scores) -> target, SGLang, torch.topk, µs; k = 512
TOP_K_ANCHORS: dict[tuple[int, int], tuple[float, float, float | None]] = {
    (1, 262_144): (12.0, 14.7, 80.0),
    (8, 262_144): (13.0, 14.9, None),
    (32, 32_768): (10.0, 12.2, 78.0),
    (256, 8_192): (9.0, 9.3, 88.0),
}
QUERY_BATCHES = (1, 256)
MAX_SETS = 8


def cases() -> Iterator[Case]:
    flash = CacheSchema.build(ModelSpec.preset("v4-flash"))
    for batch in QUERY_BATCHES:
        yield Case(
            name=f"index queries batch {batch}",
            suite="indexer",
            series="index queries",
            model="v4-flash",
            batch=batch,
            measure=partial(_measure_queries, flash, batch),
        )
    for (requests, entries), deepgemm in SCORE_ANCHORS.items():
        yield Case(
            name=f"index scores {requests} x {entries}",
            suite="indexer",
            series=f"index scores of {entries}",
            model="v4-flash",
            batch=requests,
            context=entries * RATIO,
            measure=partial(_measure_scores, flash, requests, entries),
            target_us=TARGET_OF_DEEPGEMM * deepgemm,
            first_step_us=deepgemm,
            anchors_us={"DeepGEMM fp8": deepgemm},
        )
    requests, entries, tokens = DRAFT_STEP
    yield Case(
        name=f"index scores {requests} x {entries}, {tokens} tokens each",
        suite="indexer",
        series=f"index scores of {entries}, {tokens} tokens each",
        model="v4-flash",
        batch=requests,
        context=entries * RATIO,
        measure=partial(_measure_scores, flash, requests, entries, tokens_per_request=tokens),
    )
    for model in ("v4-flash", "v4-pro"):
        count = ModelSpec.preset(model).index_topk
        for (rows, columns), (target, sglang, torch_topk) in TOP_K_ANCHORS.items():
            anchors = {"SGLang": sglang} | ({"torch.topk": torch_topk} if torch_topk else {})
            yield Case(
                name=f"top-k {count} of {rows} x {columns}",
                suite="indexer",
                series=f"top-k {count} of {columns}",
                model=model,
                batch=rows,
                context=columns * RATIO,
                measure=partial(_measure_top_k, rows, columns, count),
                target_us=target if model == "v4-flash" else None,
                anchors_us=anchors if model == "v4-flash" else {},
            )


def _measure_queries(schema: CacheSchema, batch: int) -> Measurement:
    model = schema.model
    rope = torch.rand(4096, model.rope_dim, device="cuda") * 2 - 1
    q = torch.randn(batch, model.index_heads, model.index_dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    tokens = _tokens(requests=batch, position=4095)

    def call() -> None:
        prepare_index_queries(q, tokens=tokens, rope=rope, record=schema.index_format, out=out)

    return measure(Work(calls=[call], must_move_bytes=2 * q.numel() * q.element_size()))


def _measure_scores(
    schema: CacheSchema, requests: int, entries: int, *, tokens_per_request: int = 1
) -> Measurement:
    model = schema.model
    page = schema.page("index_keys", CSA_LAYER)
    assert page is not None
    blocks, rows = entries // page.rows, requests * tokens_per_request
    key_bytes = requests * entries * page.format.record_bytes
    sets = sets_to_outgrow_l2(key_bytes, MAX_SETS)
    # blocks at their true distance, up to 30 GB, of which only one layer's keys are filled
    arena = torch.empty(
        (sets * requests * blocks, schema.block_bytes), dtype=torch.uint8, device="cuda"
    )
    for offset, width, low, high in (
        (page.offset_bytes, page.format.data_row_bytes, 0, 256),
        (page.scale_offset_bytes, page.format.scale_row_bytes, 120, 130),
    ):
        view = arena.as_strided((arena.shape[0], page.rows * width), (arena.stride(0), 1), offset)
        view.random_(low, high)
    q = torch.randn(rows, model.index_heads, model.index_dim, device="cuda").bfloat16()
    weights = torch.randn(rows, model.index_heads, device="cuda").bfloat16()
    scores = torch.empty(rows, entries, device="cuda")
    # the last token of a request sees all entries, the drafts before it all but the last
    tokens = _tokens(
        requests=requests, position=entries * RATIO - 1, tokens_per_request=tokens_per_request
    )

    def make_call(table: torch.Tensor) -> Call:
        keys = EntrySource(arena=arena, page=page, block_table=table, ratio=RATIO)
        return lambda: index_scores(
            Scoring(
                q=q,
                weights=weights,
                tokens=tokens,
                keys=keys,
                scores=scores,
                tokens_per_request=tokens_per_request,
            )
        )

    tables = torch.randperm(arena.shape[0], device="cuda").int().view(sets, requests, blocks)
    moved = key_bytes + q.numel() * q.element_size() + scores.numel() * scores.element_size()
    return measure(Work(calls=[make_call(table) for table in tables], must_move_bytes=moved))


def _measure_top_k(rows: int, columns: int, count: int) -> Measurement:
    """Scores come from the launch before, so they may be in the L2 here too."""
    tokens = _tokens(requests=rows, position=columns * RATIO - 1)
    out = torch.empty(rows, count, dtype=torch.int32, device="cuda")
    needed = top_k_workspace_bytes(rows, columns)
    workspace = torch.empty(max(needed, 1), dtype=torch.uint8, device="cuda")
    scores = torch.randn(rows, columns, device="cuda").bfloat16().float()

    def call() -> None:
        top_k(scores, tokens=tokens, ratio=RATIO, out=out, workspace=workspace)

    return measure(
        Work(
            calls=[call],
            must_move_bytes=scores.numel() * scores.element_size() + out.numel() * 4,
            peers={"torch.topk": [torch_top_k_call(scores, count)]},
        )
    )


def _tokens(*, requests: int, position: int, tokens_per_request: int = 1) -> torch.Tensor:
    """The "tokens" of StepBuffers for a step whose requests all end at `position`."""
    request = torch.arange(requests).repeat_interleave(tokens_per_request)
    nth = torch.arange(tokens_per_request).repeat(requests)
    columns = (request, position - (tokens_per_request - 1) + nth, request, request)
    return torch.stack(columns, dim=1).to(device="cuda", dtype=torch.int32)
