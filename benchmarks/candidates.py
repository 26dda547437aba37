"""Selection in two levels (V4.1): a layer that publishes candidate blocks with its own selection,
and one that selects among them. Each is compared with the same selection without candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.case import Case, Measurement, Work, sets_to_outgrow_l2
from benchmarks.step_tokens import step_tokens
from benchmarks.timing import measure
from dsv4.backends import load_backend
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.calls import Candidates, EntrySource, Selection

MODEL, LAYER = "v41-flash", 20
SIZES = ((1, 131_072), (1, 1_048_576), (64, 32_768))
LEVELS = {"publishing": True, "among candidates": False}
MAX_SETS = 32


def cases() -> Iterator[Case]:
    for level, publish in LEVELS.items():
        for requests, entries in SIZES:
            yield Case(
                name=f"select v41 {level} {requests} x {entries}",
                suite="v41",
                series=f"select v41 {level} of {entries}",
                model=MODEL,
                batch=requests,
                context=entries,
                measure=partial(_measure, requests, entries, publish),
            )


def _measure(requests: int, entries: int, publish: bool) -> Measurement:
    return measure(make_work(ModelSpec.preset(MODEL), LAYER, requests, entries, publish=publish))


def make_work(
    model: ModelSpec,
    layer: int,
    requests: int,
    entries: int,
    *,
    publish: bool,
    device: str = "cuda",
) -> Work:
    """Calls over keys of different blocks, and the same selections without candidates."""
    schema = CacheSchema.build(model, max_context=entries * model.layers[layer].ratio)
    page = schema.layout.page("index_keys", layer)
    assert page is not None
    blocks, span = entries // page.rows, model.candidate_block_entries
    scored = entries if publish else min(entries, model.candidate_blocks * span)
    key_bytes = requests * scored * page.format.record_bytes
    sets = sets_to_outgrow_l2(key_bytes, MAX_SETS)
    arena = torch.empty(
        (sets * requests * blocks, schema.bytes.block), dtype=torch.uint8, device=device
    )
    for offset, width, low, high in (
        (page.offset_bytes, page.format.data_row_bytes, 0, 256),
        (page.scale_offset_bytes, page.format.scale_row_bytes, 120, 130),
    ):
        view = arena.as_strided((arena.shape[0], page.rows * width), (arena.stride(0), 1), offset)
        view.random_(low, high)
    q = torch.randn(requests, model.index_heads, model.index_dim, device=device).bfloat16()
    weights = torch.randn(requests, model.index_heads, device=device).bfloat16()
    tokens = step_tokens(
        requests=requests, position=entries * model.layers[layer].ratio - 1, device=device
    )
    out = torch.empty(requests, model.index_topk, dtype=torch.int32, device=device)
    lists = _blocks(requests, entries // span, model.candidate_blocks, device)
    backend = load_backend("triton", torch.device(device))
    tables = torch.randperm(arena.shape[0], device=device).int().view(sets, requests, blocks)
    sources = [
        EntrySource(arena=arena, page=page, block_table=table, ratio=model.layers[layer].ratio)
        for table in tables
    ]
    needed = backend.select_workspace_bytes(
        requests, keys=sources[0], top_k=model.index_topk, block_entries=span
    )
    workspace = torch.empty(needed, dtype=torch.uint8, device=device)

    def selection(keys: EntrySource, candidates: Candidates | None) -> Selection:
        return Selection(
            q=q,
            weights=weights,
            tokens=tokens,
            keys=keys,
            top_k=model.index_topk,
            out=out,
            workspace=workspace,
            candidates=candidates,
        )

    bounds = Candidates(blocks=lists, block_entries=span, publish=publish)
    return Work(
        calls=[partial(backend.select, selection(keys, bounds)) for keys in sources],
        must_move_bytes=key_bytes + 2 * q.numel() + 4 * (out.numel() + lists.numel()),
        peers={
            "without candidates": [
                partial(backend.select, selection(keys, None)) for keys in sources
            ]
        },
    )


def _blocks(rows: int, there: int, count: int, device: str) -> Tensor:
    """Candidates of every row, ascending: some of the blocks that are `there`, the last among them,
    -1 behind them."""
    lists = torch.full((rows, count), -1, dtype=torch.int32)
    for row in lists:
        chosen = torch.randperm(there - 1)[: count - 1]
        row[: len(chosen) + 1] = torch.cat((chosen, torch.tensor([there - 1]))).sort().values
    return lists.to(device)
