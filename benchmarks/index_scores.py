"""Index scores of one CSA layer. Targets: the project's for one H200. V4-Pro's are the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.case import Call, Case, Measurement, Work, sets_to_outgrow_l2
from benchmarks.installed import index_score_peers
from benchmarks.peers import INDEX_SCORES_US
from benchmarks.step_tokens import step_tokens
from benchmarks.timing import measure
from dsv4.backends import load_backend
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource, Scoring

CSA_LAYER = 2
RATIO = 4
# DeepGEMM's time is the first step
TARGET_OF_DEEPGEMM = 0.7
DRAFT_STEP = (16, 32_768, 4)  # requests, entries, tokens of each
MAX_SETS = 8


def cases() -> Iterator[Case]:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    for (requests, entries), deepgemm in INDEX_SCORES_US.items():
        yield Case(
            name=f"index scores {requests} x {entries}",
            suite="indexer",
            series=f"index scores of {entries}",
            model="v4-flash",
            batch=requests,
            context=entries * RATIO,
            measure=partial(_measure, schema, requests, entries),
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
        measure=partial(_measure, schema, requests, entries, tokens_per_request=tokens),
    )


# DeepSeek-V4.1: 32 heads, and its layer of one entry per token
V41_LAYER = 20
V41_SIZES = ((1, 32_768), (1, 1_048_576), (64, 32_768))


def v41_cases() -> Iterator[Case]:
    schema = CacheSchema.build(ModelSpec.preset("v41-flash"))
    for requests, entries in V41_SIZES:
        yield Case(
            name=f"index scores v41 {requests} x {entries}",
            suite="v41",
            series=f"index scores v41 of {entries}",
            model="v41-flash",
            batch=requests,
            context=entries,
            measure=partial(_measure, schema, requests, entries, layer=V41_LAYER),
        )


def _measure(
    schema: CacheSchema,
    requests: int,
    entries: int,
    *,
    tokens_per_request: int = 1,
    layer: int = CSA_LAYER,
) -> Measurement:
    model, ratio = schema.model, schema.model.layers[layer].ratio
    page = schema.layout.page("index_keys", layer)
    assert page is not None
    blocks, rows = entries // page.rows, requests * tokens_per_request
    key_bytes = requests * entries * page.format.record_bytes
    sets = sets_to_outgrow_l2(key_bytes, MAX_SETS)
    # blocks at their true distance, up to 30 GB, of which only one layer's keys are filled
    arena = torch.empty(
        (sets * requests * blocks, schema.bytes.block), dtype=torch.uint8, device="cuda"
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
    tokens = step_tokens(
        requests=requests, position=entries * ratio - 1, tokens_per_request=tokens_per_request
    )

    backend = load_backend("triton", torch.device("cuda"))

    def make_call(table: torch.Tensor) -> Call:
        scoring = Scoring(
            q=q,
            weights=weights,
            tokens=tokens,
            keys=EntrySource(arena=arena, page=page, block_table=table, ratio=ratio),
            scores=scores,
            tokens_per_request=tokens_per_request,
        )
        return lambda: backend.index_scores(scoring)

    tables = torch.randperm(arena.shape[0], device="cuda").int().view(sets, requests, blocks)
    moved = key_bytes + q.numel() * q.element_size() + scores.numel() * scores.element_size()
    work = Work(calls=[make_call(table) for table in tables], must_move_bytes=moved)
    if tokens_per_request == 1:
        heads, width = model.index_heads, model.index_dim
        work.peers.update(index_score_peers(requests, entries, heads=heads, width=width, sets=sets))
    return measure(work)
