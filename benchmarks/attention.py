"""Decode attention of one layer, one query a request: window 128 and top-k or all entries.

Blocks lie where an allocator that has lived a while would put them: anywhere in an arena with the
strides of the whole model. Above ARENA_BYTES requests share blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.timing import Result, graph_time_us
from dsv4.cache.reads import EntrySource, WindowSource
from dsv4.cache.schema import CacheSchema, Page
from dsv4.kernels.attend import attend, split_count, workspace_elements
from dsv4.model import ModelSpec
from dsv4.reference.codec import encode

CSA_LAYER, HCA_LAYER = 2, 3
ARENA_BYTES = 60_000_000_000
L2_BYTES = 60 << 20
MAX_SETS = 32
# up to this batch the target is the peer's time, above it 1.6 times that
PARITY_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of the anchors: `listed` entries a query, or all of `context` tokens' if None.
    `flash_mla_us` by batch."""

    name: str
    model: str
    layer: int
    context: int
    listed: int | None
    flash_mla_us: dict[int, float]


ROWS = (
    Row(
        name="flash csa 128+512",
        model="v4-flash",
        layer=CSA_LAYER,
        context=131_072,
        listed=512,
        flash_mla_us={1: 12.3, 4: 12.5, 16: 15.7, 64: 43.5, 256: 87.9},
    ),
    Row(
        name="pro csa 128+1024",
        model="v4-pro",
        layer=CSA_LAYER,
        context=131_072,
        listed=1024,
        flash_mla_us={1: 14.1, 4: 15.2, 16: 27.0, 64: 54.5, 256: 208.7},
    ),
    Row(
        name="flash hca 128k 128+1024",
        model="v4-flash",
        layer=HCA_LAYER,
        context=131_072,
        listed=None,
        flash_mla_us={1: 13.9, 4: 14.9, 16: 19.9, 64: 60.6, 256: 143.7},
    ),
    Row(
        name="flash hca 1M 128+8192",
        model="v4-flash",
        layer=HCA_LAYER,
        context=1_048_576,
        listed=None,
        flash_mla_us={1: 27.2, 4: 31.0, 16: 83.3, 64: 248.5, 256: 934.5},
    ),
)


def cases() -> Iterator[Result]:
    for row in ROWS:
        for batch, peer in row.flash_mla_us.items():
            calls, moved = make_calls(row, batch)
            yield Result(
                case=f"attend {row.name} batch {batch}",
                microseconds=graph_time_us(calls, repeats=max(1, 16 // len(calls))),
                launches=1,
                must_move_bytes=moved,
                target_us=peer if batch <= PARITY_BATCH else round(1.6 * peer, 1),
                peers_us={"FlashMLA": peer},
            )
            del calls
            torch.cuda.empty_cache()


def make_calls(
    row: Row, batch: int, *, device: str = "cuda", arena_bytes: int = ARENA_BYTES
) -> tuple[list[Callable[[], None]], int]:
    """Calls with different queries and keys, so that together they outgrow the L2, and the bytes
    that one of them has to move."""
    schema = CacheSchema.build(ModelSpec.preset(row.model), max_context=row.context)
    model = schema.model
    ratio = model.layers[row.layer].ratio
    window_page, entry_page = schema.page("window", row.layer), schema.page("entries", row.layer)
    assert window_page is not None
    assert entry_page is not None
    visible = row.context // ratio
    keys = model.window + (row.listed or visible)
    moved = batch * (keys * entry_page.format.record_bytes + 2 * 2 * model.heads * model.head_dim)
    sets = max(1, min(MAX_SETS, 2 * L2_BYTES // moved))

    blocks = min(
        max(sets, 2) * batch * schema.max_blocks_per_request, arena_bytes // schema.block_bytes
    )
    block_arena = _filled(blocks, schema.block_bytes, entry_page, device)
    slot_arena = _filled(batch, schema.slot_bytes, window_page, device)
    window = WindowSource(arena=slot_arena, page=window_page, window=model.window, chunk=False)
    rows = torch.arange(batch, dtype=torch.int32, device=device)
    last = torch.full_like(rows, row.context - 1)
    tokens = torch.stack((rows, last, rows, torch.zeros_like(rows)), dim=1)
    request = torch.stack((rows, last, torch.ones_like(rows), rows), dim=1)
    sink = torch.randn(model.heads, device=device)
    splits = split_count(model.window, row.listed or visible)
    workspace = torch.zeros(
        workspace_elements(batch, model.heads, model.head_dim, splits), device=device
    )
    rope = torch.randn(row.context, model.rope_dim, device=device)

    def make_call() -> Callable[[], None]:
        q = torch.randn(batch, model.heads, model.head_dim, device=device).to(torch.bfloat16)
        out = torch.empty_like(q)
        lse = torch.empty(batch, model.heads, device=device)
        table = torch.randint(
            blocks, (batch, schema.max_blocks_per_request), dtype=torch.int32, device=device
        )
        entries = EntrySource(arena=block_arena, page=entry_page, block_table=table, ratio=ratio)
        indices: Tensor | None = None
        if row.listed is not None:
            indices = torch.randint(visible, (batch, row.listed), dtype=torch.int32, device=device)

        def call() -> None:
            attend(
                q,
                sink,
                tokens=tokens,
                batch=request,
                window=window,
                entries=entries,
                indices=indices,
                out=out,
                lse=lse,
                inverse_rope=rope,
                workspace=workspace,
            )

        return call

    return [make_call() for _ in range(sets)], moved


def _filled(rows: int, row_bytes: int, page: Page, device: str) -> Tensor:
    """An arena whose pages of one layer hold the same valid records; the rest is not touched."""
    arena = torch.empty((rows, row_bytes), dtype=torch.uint8, device=device)
    data, scales = encode(page.format, torch.randn(page.rows, page.format.width).to(torch.bfloat16))
    records = torch.cat((data.flatten(), scales.flatten())).to(device)
    pages = arena.as_strided((rows, page.payload_bytes), (row_bytes, 1), page.offset_bytes)
    pages.copy_(records.expand_as(pages))
    return arena
