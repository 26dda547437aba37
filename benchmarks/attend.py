"""Decode attention of one layer, one query per request: window 128 and top-k or all entries.

Blocks lie where an allocator that has lived a while would put them: anywhere in an arena with the
strides of the whole model. Above ARENA_BYTES requests share blocks. FlashMLA, where installed,
reads the same pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Call, Case, Measurement, Work, sets_to_outgrow_l2
from benchmarks.installed import flash_mla_call, flash_mla_modules, working
from benchmarks.peers import ALL_HEADS_US, ATTENTION_US
from benchmarks.timing import measure
from dsv4.backends import load_backend
from dsv4.cache.pages import Page
from dsv4.cache.records import RecordFormat
from dsv4.cache.schema import CacheSchema
from dsv4.cache.views import page_tensor
from dsv4.model import ModelSpec
from dsv4.ops.backend import Backend
from dsv4.ops.calls import Attention, EntrySource, WindowSource
from dsv4.reference.codec import encode

CSA_LAYER, HCA_LAYER = 2, 3
ARENA_BYTES = 60_000_000_000
MAX_SETS = 32
DISTINCT_PAGES = 256
ERROR_QUERIES = 8
# the target is 0.7 of FlashMLA's time up to the first batch, its time above; the first step is its
# time up to the second batch, 1.6 times that above
TARGET_BATCH, FIRST_STEP_BATCH = 8, 16
BATCHES = (1, 4, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`listed` entries a query, or all of `context` tokens' if None."""

    name: str
    model: str
    layer: int
    context: int
    listed: int | None
    batches: tuple[int, ...] = BATCHES
    heads: int | None = None  # of a tensor-parallel rank; all of the model's if None
    all_heads_us: dict[int, float] = field(default_factory=dict)
    batch_invariant: bool = (
        False  # a query is never cut, so its bits depend on nothing else in the step
    )

    def spec(self) -> ModelSpec:
        model = ModelSpec.preset(self.model)
        return model if self.heads is None else replace(model, heads=self.heads)


ROWS = (
    Row(
        name="flash csa 128+512",
        model="v4-flash",
        layer=CSA_LAYER,
        context=131_072,
        listed=512,
    ),
    Row(
        name="pro csa 128+1024",
        model="v4-pro",
        layer=CSA_LAYER,
        context=131_072,
        listed=1024,
    ),
    Row(
        name="flash hca 128k 128+1024",
        model="v4-flash",
        layer=HCA_LAYER,
        context=131_072,
        listed=None,
    ),
    Row(
        name="flash hca 1M 128+8192",
        model="v4-flash",
        layer=HCA_LAYER,
        context=1_048_576,
        listed=None,
    ),
    Row(
        name="pro hca 128k 128+1024",
        model="v4-pro",
        layer=HCA_LAYER,
        context=131_072,
        listed=None,
        batches=(1, 16, 64, 256),
    ),
)

# What `batch_invariant=True` costs, compared with the calls without it.
WHOLE = tuple(
    replace(
        row,
        name=f"{row.name} batch-invariant",
        batch_invariant=True,
        batches=batches,
    )
    for row, batches in (
        (ROWS[0], ROWS[0].batches),
        (ROWS[2], ROWS[2].batches),
        (ROWS[3], (1, 4, 16, 64, 256)),
    )
)

# The ranks of a tensor-parallel group have fewer heads; peers pad them to 64. Ours with all heads,
# at the commit before ranks had a kernel: the limit. Few heads are a quarter of the matrix work.
RANK_HEADS = (8, 16, 32)
RANK_BATCHES = (1, 16, 64, 256)
RANK_SHARE = {16: 0.6}  # of the time of all heads, from batch 64 on
RANKS = tuple(
    replace(
        row,
        name=f"{row.name} {heads} heads",
        heads=heads,
        batches=RANK_BATCHES,
        all_heads_us=ALL_HEADS_US[row.name],
    )
    for row in (ROWS[0], ROWS[2])
    for heads in RANK_HEADS
)


# DeepSeek-V4.1: half the bytes. The target is 0.8 of V4-Flash's time from batch 64 on, below it all
# of that.
V41 = Row(
    name="v41 128+512",
    model="v41-flash",
    layer=CSA_LAYER,
    context=131_072,
    listed=512,
    all_heads_us=ALL_HEADS_US["flash csa 128+512"],
)
V41_SHARE = 0.8


def v41_cases() -> Iterator[Case]:
    for batch, limit in V41.all_heads_us.items():
        yield _case(
            V41,
            batch,
            suite="v41",
            target_us=round(limit * (V41_SHARE if batch >= 64 else 1.0), 2),
            anchors_us={"V4-Flash": limit},
        )


def cases() -> Iterator[Case]:
    for row in (*ROWS, *WHOLE):
        for batch in row.batches:
            peer = ATTENTION_US.get(row.name, {}).get(batch)
            yield _case(
                row,
                batch,
                suite="attention",
                target_us=peer and round(peer * (0.7 if batch <= TARGET_BATCH else 1.0), 2),
                first_step_us=peer and round(peer * (1.0 if batch <= FIRST_STEP_BATCH else 1.6), 2),
                anchors_us={"FlashMLA": peer} if peer else {},
            )


def rank_cases() -> Iterator[Case]:
    for row in RANKS:
        for batch in row.batches:
            limit = row.all_heads_us[batch]
            assert row.heads is not None
            share = RANK_SHARE.get(row.heads, 1.0) if batch >= 64 else 1.0
            yield _case(
                row,
                batch,
                suite="ranks",
                target_us=round(limit * share, 2),
                first_step_us=limit,
                anchors_us={"all heads": limit},
            )


def _case(row: Row, batch: int, *, suite: str, **goals: Any) -> Case:
    return Case(
        name=f"attend {row.name} batch {batch}",
        suite=suite,
        series=row.name,
        model=row.model,
        batch=batch,
        context=row.context,
        measure=partial(_measure, row, batch),
        **goals,
    )


def _measure(row: Row, batch: int) -> Measurement:
    inputs = make_inputs(row, batch)
    found = measure(make_work(inputs))
    return replace(found, note=f"error {relative_error(inputs[0]):.2e}")


def make_inputs(
    row: Row,
    batch: int,
    *,
    device: str = "cuda",
    arena_bytes: int = ARENA_BYTES,
    max_sets: int = MAX_SETS,
) -> list[Inputs]:
    """Of calls with different queries and keys."""
    shared = Shared.make(row, batch, device, arena_bytes, max_sets)
    return [Inputs.make(row, batch, shared) for _ in range(shared.sets)]


def make_work(inputs: list[Inputs]) -> Work:
    """The calls, and FlashMLA's arguments for the same work; for batch-invariant queries, also the
    usual calls that cut them."""
    shared = inputs[0].shared
    peers: dict[str, list[Call]] = {}
    if shared.batch_invariant:
        peers["not invariant"] = [partial(given.ours, batch_invariant=False) for given in inputs]
    else:
        peers = working(
            {
                name: partial(_flash_mla_calls, module, inputs)
                for name, module in flash_mla_modules().items()
            }
        )
    return Work(
        calls=[given.ours for given in inputs], must_move_bytes=shared.moved_bytes, peers=peers
    )


def _flash_mla_calls(module: ModuleType, inputs: list[Inputs]) -> list[Call]:
    return [flash_mla_call(module, given.flash_mla_arguments()) for given in inputs]


def relative_error(given: Inputs) -> float:
    """Of the output of some queries in the L2 norm, against the formula in fp64 on the decoded
    keys."""
    shared, device = given.shared, given.q.device
    given.ours(turn_back=False)
    count, _, width = given.out.shape
    rows = torch.linspace(0, count - 1, min(count, ERROR_QUERIES), device=device).long()
    tokens = shared.tokens[rows]
    listed = given.indices
    if listed is None:
        listed = torch.arange(shared.visible, dtype=torch.int32, device=device).expand(count, -1)
    entries = torch.empty(len(rows), listed.shape[1], width, dtype=given.q.dtype, device=device)
    shared.backend.gather_entries(
        given.entries,
        slot=tokens[:, 0].contiguous(),
        position=tokens[:, 1].contiguous(),
        indices=listed[rows].contiguous(),
        out=entries,
    )
    window = torch.empty(len(rows), shared.window.window, width, dtype=entries.dtype, device=device)
    shared.backend.gather_window(
        shared.window,
        batch=shared.request,
        batch_row=tokens[:, 2].contiguous(),
        position=tokens[:, 1].contiguous(),
        out=window,
        lengths=torch.empty(len(rows), dtype=torch.int32, device=device),
    )
    keys = torch.cat((window, entries), dim=1).double()  # [queries, keys, channels]
    logits = given.q[rows].double() @ keys.mT * width**-0.5
    total = torch.logaddexp(logits.logsumexp(-1), shared.sink.double())
    wanted = (logits - total[..., None]).exp() @ keys
    return float((given.out[rows].double() - wanted).norm() / wanted.norm())


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the calls of one case have in common: arenas, positions, sink, workspace."""

    backend: Backend
    schema: CacheSchema
    window: WindowSource
    blocks: int
    block_arena: Tensor
    entry_page: Page
    ratio: int
    visible: int
    sets: int
    batch_invariant: bool
    moved_bytes: int
    tokens: Tensor
    request: Tensor
    sink: Tensor
    workspace: Tensor
    rope: Tensor

    @classmethod
    def make(cls, row: Row, batch: int, device: str, arena_bytes: int, max_sets: int) -> Shared:
        schema = CacheSchema.build(row.spec(), max_context=row.context)
        model = schema.model
        ratio = model.layers[row.layer].ratio
        window_page = schema.layout.page("window", row.layer)
        entry_page = schema.layout.page("entries", row.layer)
        assert window_page is not None
        assert entry_page is not None
        visible = row.context // ratio
        key_bytes = model.window * window_page.format.record_bytes
        key_bytes += (row.listed or visible) * entry_page.format.record_bytes
        moved = batch * (key_bytes + 2 * 2 * model.heads * model.head_dim)
        sets = sets_to_outgrow_l2(moved, max_sets)
        blocks = min(
            max(sets, 2) * batch * schema.max_blocks_per_request, arena_bytes // schema.bytes.block
        )
        slot_arena = _filled(batch, schema.bytes.slot, window_page, device)
        rows = torch.arange(batch, dtype=torch.int32, device=device)
        last = torch.full_like(rows, row.context - 1)
        backend = load_backend("triton", torch.device(device))
        sized = load_backend("triton", torch.device(device), batch_invariant=row.batch_invariant)
        needed = sized.attend_workspace_bytes(batch, model=model, max_entries=row.listed or visible)
        return cls(
            backend=backend,
            schema=schema,
            window=WindowSource(
                arena=slot_arena, page=window_page, window=model.window, staged=False
            ),
            blocks=blocks,
            block_arena=_filled(blocks, schema.bytes.block, entry_page, device),
            entry_page=entry_page,
            ratio=ratio,
            visible=visible,
            sets=sets,
            batch_invariant=row.batch_invariant,
            moved_bytes=moved,
            tokens=torch.stack((rows, last, rows, torch.zeros_like(rows)), dim=1),
            request=torch.stack((rows, last, torch.ones_like(rows), rows), dim=1),
            sink=torch.randn(model.heads, device=device),
            workspace=torch.zeros(needed // 4, device=device),
            rope=torch.randn(row.context, model.rope_dim, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Queries, blocks and chosen entries of one call, and where its result goes."""

    shared: Shared
    q: Tensor
    entries: EntrySource
    indices: Tensor | None
    out: Tensor
    lse: Tensor

    @classmethod
    def make(cls, row: Row, batch: int, shared: Shared) -> Inputs:
        model, device = shared.schema.model, shared.tokens.device
        q = torch.randn(batch, model.heads, model.head_dim, device=device).to(torch.bfloat16)
        shape = (batch, shared.schema.max_blocks_per_request)
        table = torch.randint(shared.blocks, shape, dtype=torch.int32, device=device)
        indices = None
        if row.listed is not None:
            shape = (batch, row.listed)
            indices = torch.randint(shared.visible, shape, dtype=torch.int32, device=device)
        return cls(
            shared=shared,
            q=q,
            entries=EntrySource(
                arena=shared.block_arena,
                page=shared.entry_page,
                block_table=table,
                ratio=shared.ratio,
            ),
            indices=indices,
            out=torch.empty_like(q),
            lse=torch.empty(batch, model.heads, device=device),
        )

    def ours(self, *, turn_back: bool = True, batch_invariant: bool | None = None) -> None:
        shared = self.shared
        if batch_invariant is None:
            batch_invariant = shared.batch_invariant
        shared.backend.attend(
            Attention(
                q=self.q,
                sink=shared.sink,
                tokens=shared.tokens,
                batch=shared.request,
                window=shared.window,
                entries=self.entries,
                indices=self.indices,
                out=self.out,
                lse=self.lse,
                inverse_rope=shared.rope if turn_back else None,
                workspace=shared.workspace,
                batch_invariant=batch_invariant,
            )
        )

    def flash_mla_arguments(self) -> dict[str, object]:
        """The same keys as FlashMLA takes them (examples/flash_mla.py). It does not turn the
        output back, which `ours` does in passing."""
        shared, table, page = self.shared, self.entries.block_table, self.entries.page
        batch, width = self.q.shape[0], self.q.shape[2]
        listed = self.indices
        if listed is None:
            listed = torch.arange(shared.visible, dtype=torch.int32, device=table.device)
            listed = listed.expand(batch, -1)
        block_id = table.gather(1, (listed // page.rows).long())
        ring = shared.window.page.rows
        window = shared.tokens[:, :1] * ring + torch.arange(
            shared.window.window, dtype=torch.int32, device=table.device
        )
        return {
            "q": self.q[:, None],
            "k_cache": page_tensor(shared.window.arena, shared.window.page),
            "indices": window[:, None],
            "head_dim_v": width,
            "softmax_scale": width**-0.5,
            "attn_sink": shared.sink,
            "is_fp8_kvcache": True,
            "block_table": None,
            "cache_seqlens": None,
            "extra_k_cache": page_tensor(shared.block_arena, page),
            "extra_indices_in_kvcache": (block_id * page.rows + listed % page.rows)[:, None],
        }


def _filled(rows: int, row_bytes: int, page: Page, device: str) -> Tensor:
    """An arena whose pages of one layer hold valid records, in turn those of DISTINCT_PAGES; the
    rest is not touched."""
    arena = torch.empty((rows, row_bytes), dtype=torch.uint8, device=device)
    pages = arena.as_strided((rows, page.payload_bytes), (row_bytes, 1), page.offset_bytes)
    records = _records(page.format, page.rows).to(device)
    for nth in range(min(rows, DISTINCT_PAGES)):
        pages[nth::DISTINCT_PAGES] = records[nth]
    return arena


@cache
def _records(record: RecordFormat, rows: int) -> Tensor:
    """The bytes of DISTINCT_PAGES pages: encoding them takes longer than timing a case."""
    data, scales = encode(
        record, torch.randn(DISTINCT_PAGES * rows, record.width).to(torch.bfloat16)
    )
    pages = data.reshape(DISTINCT_PAGES, -1), scales.reshape(DISTINCT_PAGES, -1)
    return torch.cat(pages, dim=1)
