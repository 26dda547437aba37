"""Index queries of one CSA layer, made ready for scoring. V4-Pro's are the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.case import Case, Measurement, Work
from benchmarks.step_tokens import step_tokens
from benchmarks.timing import measure
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.index_query import prepare_index_queries
from dsv4.model import ModelSpec

BATCHES = (1, 256)


def cases() -> Iterator[Case]:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    for batch in BATCHES:
        yield Case(
            name=f"index queries batch {batch}",
            suite="indexer",
            series="index queries",
            model="v4-flash",
            batch=batch,
            measure=partial(_measure, schema, batch),
        )


def _measure(schema: CacheSchema, batch: int) -> Measurement:
    model = schema.model
    rope = torch.rand(4096, model.rope_dim, device="cuda") * 2 - 1
    q = torch.randn(batch, model.index_heads, model.index_dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    tokens = step_tokens(requests=batch, position=4095)

    def call() -> None:
        prepare_index_queries(q, tokens=tokens, rope=rope, record=schema.index_format, out=out)

    return measure(Work(calls=[call], must_move_bytes=2 * q.numel() * q.element_size()))
