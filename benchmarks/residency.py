"""Entries in host memory: `resolve` alone, and whole decode steps of V4-Flash whose CSA layers read
entries that only the host has, at given shares of hits, in comparison with all on the device; and
chunks over blocks whose entries are all in host memory, on the device, or not kept apart.

Selections are synthetic. From one step to the next each keeps the given share of its entries; the
others are ones that it has not named for a long time. An entry always comes from the same stretch
of the context, so that the entries of a selection are different and in order. They change between
replays of one captured graph, outside of the time that is measured; indexer and top-k run as usual,
and their result is not used. Steps name few distinct blocks, as in decode_step.py, and the host has
the same ones: a note says how many. Cases with targets come first, so that a short run has them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from math import gcd
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.case import Case, Measurement
from benchmarks.decode_step import PARTS, DecodeStep
from benchmarks.prefill import timed
from dsv4.cache.pages import Page
from dsv4.cache.repeats import Key, Repeats
from dsv4.cache.residency.pool import HostPool
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.ops.backend import Backend, Repetition
from dsv4.ops.calls import Attention, EntrySource, HotRows, Resolving
from dsv4.reference.pages import page_rows
from dsv4.units import format_tokens

DEVICE = "cuda"
MODEL = "v4-flash"
CSA_LAYER, RATIO = 2, 4
BATCHES = (1, 16, 64, 256)
HITS = (1.0, 0.9, 0.0, 0.5, 0.95)
# (context, batch): at 1M tokens 38 requests fit on the device, and 78 with 256 GB of host memory
TARGETS = ((1_048_576, 64), (1_048_576, 16))
OTHER_STEPS = tuple((1_048_576, batch) for batch in (78, 38, 1)) + tuple(
    (131_072, batch) for batch in (16, 64, 1)
)
HOT_ENTRIES = 2048
ARENA_BYTES = 10_000_000_000
COMPILED_BYTES = 1_000_000_000  # of an arena that nothing is read of
BLOCKS_AT_ONCE = 4096  # on their way to host memory
CALLS = 20  # of `resolve` in one graph, each with its own tables
NOT_TIMED = Measurement(microseconds=0.0, launches=0, must_move_bytes=0)
WARM_STEPS, STEPS = 12, 20


# a chunk, and where the entries are of all that comes before it; "together": without host_memory
CHUNK, CHUNK_CONTEXT = 8_192, 1_048_576
Place = Literal["together", "device", "host"]
PLACES: dict[Place, str] = {
    "together": "without host_memory",
    "device": "on the device",
    "host": "in host memory",
}


def cases() -> Iterator[Case]:
    yield from _chunk_cases()
    yield from _step_cases(TARGETS)
    yield from _resolve_cases()
    yield from _step_cases(OTHER_STEPS)


def _resolve_cases() -> Iterator[Case]:
    model = ModelSpec.preset(MODEL)
    for batch in BATCHES:
        for hits in HITS:  # one after the other: they share their layers
            yield Case(
                name=f"resolve {hits:.0%} hits batch {batch}",
                suite="residency",
                series=f"resolve {hits:.0%} hits",
                model=MODEL,
                batch=batch,
                context=model.max_context,
                measure=partial(_measure_resolve, model, batch, hits),
            )


def _step_cases(steps: Sequence[tuple[int, int]]) -> Iterator[Case]:
    model = ModelSpec.preset(MODEL)
    for context, batch in steps:
        for hits in (None, *HITS):  # one after the other: they share a step
            where = "on the device" if hits is None else f"{hits:.0%} hits"
            yield Case(
                name=f"host step at {format_tokens(context)} {where} batch {batch}",
                suite="residency",
                series=f"host step at {format_tokens(context)} {where}",
                model=MODEL,
                batch=batch,
                context=context,
                measure=partial(_measure_step, model, batch, context, hits),
            )


def _chunk_cases() -> Iterator[Case]:
    model = ModelSpec.preset(MODEL)
    start = format_tokens(CHUNK_CONTEXT - CHUNK)
    for place, where in PLACES.items():
        yield Case(
            name=f"chunk {MODEL} {CHUNK} from {start} {where}",
            suite="residency",
            series=f"chunk from {start} {where}",
            model=MODEL,
            batch=CHUNK,
            context=CHUNK_CONTEXT,
            measure=partial(_measure_chunk, model, place),
        )


# ---- selections ----------------------------------------------------------------------------------


class Selections:
    """The selection of each of `rows` tokens, int32 [rows, k] in `chosen`; `change` keeps a share
    of it. Entry k comes from the kth of k equal stretches of `entries`."""

    def __init__(self, rows: int, k: int, entries: int, hits: float, device: str) -> None:
        self.stretch = entries // k
        self.k = k
        self.missed = self.share_missed(hits)
        self.first = torch.arange(k, dtype=torch.int32, device=device) * self.stretch
        self.within = torch.randint(0, self.stretch, (rows, k), dtype=torch.int32, device=device)
        # without a common divisor all entries of a stretch come before one comes again
        self.stride = next(n for n in count(self.stretch // 3) if gcd(n, self.stretch) == 1)
        self.chosen = self.within + self.first

    def share_missed(self, hits: float) -> int:
        return self.k - round(hits * self.k)

    def change(self) -> None:
        rows, k = self.chosen.shape
        order = torch.rand(rows, k, device=self.chosen.device).argsort(dim=1)
        new = (self.within + self.stride) % self.stretch
        self.within = torch.where(order < self.missed, new, self.within)
        self.chosen.copy_(self.within + self.first)


# ---- resolve alone -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayer:
    """What a layer resolves with, and the selections that change between its steps."""

    call: Resolving
    selections: Selections

    def set_hits(self, hits: float) -> None:
        """From now on selections keep this share; counting begins anew."""
        self.selections.missed = self.selections.share_missed(hits)
        self.call.hot.counted.zero_()


def hot_rows(slots: int, entries: int, records: int, device: str) -> HotRows:
    """Nothing is hot."""

    def filled(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    return HotRows(
        first_row=0,
        records=records,
        place=filled(-1, slots, entries, dtype=torch.int16),
        entry_of=filled(-1, slots, records),
        used=filled(0, slots, records),
        clock=filled(0, slots),
        hand=filled(0, slots),
        counted=filled(0, 3, dtype=torch.int64),
    )


def host_layer(
    source: EntrySource,
    *,
    block_table: Tensor,
    host: Tensor,
    tokens: Tensor,
    batch: Tensor,
    k: int,
    records: int,
    entries: int,
    hits: float,
) -> HostLayer:
    """One token of each request, which sees this many entries or more. The arena of `source` has
    hot rows only."""
    device, requests = str(source.arena.device), len(batch)
    selections = Selections(requests, k, entries, hits, device)

    def numbers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    call = Resolving(
        selected=selections.chosen,
        tokens=tokens,
        batch=batch,
        entries=source,
        block_table=block_table,
        host=host,
        hot=hot_rows(block_table.shape[0], source.capacity, records, device),
        rows=numbers(requests, k),
        misses=numbers(requests, k, 2),
        miss_count=numbers(requests),
        tokens_per_request=1,
    )
    return HostLayer(call=call, selections=selections)


def resolving_layers(
    schema: CacheSchema,
    layer: int,
    *,
    batch: int,
    hits: float,
    records: int,
    calls: int,
    device: str,
    arena_bytes: int = ARENA_BYTES,
) -> list[HostLayer]:
    """`calls` layers of `batch` requests of the schema's longest context, with entries apart; all
    of them have the page of `layer`, and their records of one run of host memory."""
    page, spec = schema.layout.page("entries", layer), schema.layers[layer].spec
    assert page is not None
    width = schema.max_blocks_per_request
    blocks = min(batch * width, arena_bytes // schema.bytes.entries)
    host = host_rows(blocks, schema.bytes.entries, device, arena_bytes)
    rows_each = -(-records // page.rows)
    arena = torch.empty((batch * rows_each, schema.bytes.entries), dtype=torch.uint8, device=device)
    slot = torch.arange(batch, dtype=torch.int32, device=device)
    position = torch.full_like(slot, schema.max_context - 1)
    one = torch.ones_like(slot)
    named = torch.arange(batch * width, device=device) % blocks
    table = named[torch.randperm(len(named), device=device)].view(batch, width).int()
    return [
        host_layer(
            EntrySource(
                arena=arena, page=page, block_table=torch.full_like(table, -1), ratio=spec.ratio
            ),
            block_table=table,
            host=host,
            tokens=torch.stack((slot, position, slot, one), dim=1),
            batch=torch.stack((slot, position, one, slot), dim=1),
            k=schema.model.index_topk,
            records=rows_each * page.rows,
            entries=schema.max_context // spec.ratio,
            hits=hits,
        )
        for _ in range(calls)
    ]


def host_rows(rows: int, row_bytes: int, device: str, arena_bytes: int) -> Tensor:
    """uint8 [rows, row_bytes] of host memory, which all cases share."""
    pool = host_pool(max(arena_bytes, rows * row_bytes), device)
    return pool.bytes.view(-1)[: rows * row_bytes].view(rows, row_bytes)


@lru_cache(maxsize=1)
def host_pool(size_bytes: int, device: str) -> HostPool:
    """Host memory that kernels on `device` can read. Making it takes longer than what is timed."""
    pool = HostPool(1, -(-size_bytes // 8) * 8, torch.device(device))
    pool.bytes.view(torch.int64).fill_(0x3838383838383838)
    return pool


@lru_cache(maxsize=1)
def _resolving_layers_of(model: ModelSpec, batch: int, arena_bytes: int) -> list[HostLayer]:
    schema = CacheSchema.build(model, entries_apart=True)
    return resolving_layers(
        schema,
        CSA_LAYER,
        batch=batch,
        hits=1.0,
        records=HOT_ENTRIES,
        calls=CALLS,
        device=DEVICE,
        arena_bytes=arena_bytes,
    )


def _arena_bytes() -> int:
    return COMPILED_BYTES if timing.is_compiling() else ARENA_BYTES


def _measure_resolve(model: ModelSpec, batch: int, hits: float) -> Measurement:
    from dsv4.backends import load_backend

    if timing.is_compiling() and hits != HITS[0]:
        return NOT_TIMED  # the same kernels
    layers = _resolving_layers_of(model, batch, _arena_bytes())
    for layer in layers:
        layer.set_hits(hits)
    backend = load_backend(None, torch.device(DEVICE))

    def resolve_all() -> None:
        for layer in layers:
            backend.resolve(layer.call)

    timed = time_changing(resolve_all, [layer.selections.change for layer in layers])
    return Measurement(
        microseconds=timed.microseconds / CALLS,
        launches=timed.launches // CALLS,
        must_move_bytes=fetched_bytes(layers) // CALLS,
        note=f"{len(layers[0].call.host):,} blocks in host memory, {hit_note(layers)}",
    )


def fetched_bytes(layers: Sequence[HostLayer]) -> int:
    """Of one step, as its selections are made."""
    return sum(
        len(layer.call.batch) * layer.selections.missed * layer.call.entries.page.record_bytes
        for layer in layers
    )


def hit_note(layers: Sequence[HostLayer]) -> str:
    """What was counted in all steps, the first ones included, in which nothing was hot."""
    counted = sum(layer.call.hot.counted.cpu() for layer in layers)
    hits, misses, _ = counted.tolist()  # type: ignore[union-attr]
    return f"{hits / max(hits + misses, 1):.1%} hits counted, with the first steps"


def time_changing(call: Callable[[], None], changes: Sequence[Callable[[], None]]) -> timing.Timed:
    """The median of replays of one graph; the `changes` are made before each, and not timed."""
    if timing.is_compiling():
        call()
        return timing.Timed(microseconds=0.0, launches=0)

    def change() -> None:
        for each in changes:
            each()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    graph.instantiate()
    times = []
    for nth in range(WARM_STEPS + STEPS):
        change()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if nth >= WARM_STEPS:
            times.append(float(begin.elapsed_time(end)) * 1000)
    return timing.Timed(microseconds=statistics.median(times), launches=timing.launches(graph))


# ---- decode steps --------------------------------------------------------------------------------


class HostStep(DecodeStep):
    """A decode step in which CSA layers read synthetic selections: from blocks on the device
    (`hits` None), or from host memory through hot rows.

    Blocks keep their entries on the device too, where with host memory nothing reads them: the
    table that `resolve` is given has no block, and its arena has hot rows only.
    """

    def __init__(
        self,
        model: ModelSpec,
        *,
        batch: int,
        context: int,
        device: str,
        hits: float | None,
        hot_entries: int = HOT_ENTRIES,
        arena_bytes: int = ARENA_BYTES,
    ) -> None:
        super().__init__(
            model, batch=batch, context=context, device=device, block_arena_bytes=arena_bytes
        )
        self.layers_of: dict[int, HostLayer] = {}
        self._make_layers(model, hot_entries, device, arena_bytes)
        self.set_hits(hits)
        self.backend: Backend = self.manager._parts.backend
        for handle in self.handles.values():
            handle.backend = _Reading(self)  # type: ignore[assignment]
            # a call that is repeated would read from where it read before `set_hits`
            handle._repeats = _Unrepeated(self.backend, ())

    def _make_layers(
        self, model: ModelSpec, hot_entries: int, device: str, arena_bytes: int
    ) -> None:
        table = self.manager.memory.block_table
        apart = CacheSchema.build(model, max_context=self.context, entries_apart=True)
        pages = [page for n in self.selecting_layers if (page := apart.layout.page("entries", n))]
        rows_each = -(-hot_entries // min(page.rows for page in pages))
        self.hot_arena = torch.empty(
            (self.batch * rows_each, apart.bytes.entries), dtype=torch.uint8, device=device
        )
        host = self._entries_in_host_memory(apart, pages, device, arena_bytes)
        nowhere = torch.full_like(table, -1)
        for layer, page in zip(self.selecting_layers, pages, strict=True):
            self.layers_of[layer] = host_layer(
                EntrySource(
                    arena=self.hot_arena,
                    page=page,
                    block_table=nowhere,
                    ratio=model.layers[layer].ratio,
                ),
                block_table=table,
                host=host,
                tokens=self.plan.batch.tokens,
                batch=self.plan.batch.request_rows,
                k=model.index_topk,
                records=rows_each * page.rows,
                entries=int(self.plan.starts.min()) // model.layers[layer].ratio,
                hits=1.0,
            )

    def _entries_in_host_memory(
        self, apart: CacheSchema, pages: Sequence[Page], device: str, arena_bytes: int
    ) -> Tensor:
        """The records of all blocks as host memory has them: whole ones."""
        arena = self.manager.memory.block_arena.bytes
        host = host_rows(len(arena), apart.bytes.entries, device, arena_bytes)
        for first in range(0, len(arena), BLOCKS_AT_ONCE):
            blocks = arena[first : first + BLOCKS_AT_ONCE]
            entries = torch.zeros(
                (len(blocks), apart.bytes.entries), dtype=torch.uint8, device=device
            )
            for page in pages:
                own = self.schema.layout.page("entries", page.layer)
                assert own is not None
                for there, here in zip(
                    page_rows(entries, page), page_rows(blocks, own), strict=True
                ):
                    there[..., : here.shape[-1]] = here
            host[first : first + len(blocks)].copy_(entries)
        return host

    def set_hits(self, hits: float | None) -> None:
        """From now on selections keep this share, or are read on the device."""
        self.hits = hits
        for layer in self.layers_of.values():
            layer.set_hits(1.0 if hits is None else hits)

    def change(self) -> None:
        for layer in self.layers_of.values():
            layer.selections.change()

    def attend(self, call: Attention) -> None:
        """What a layer attends to, with its synthetic selection if it has one."""
        if call.indices is None or call.entries is None:
            self.backend.attend(call)
            return
        layer = self.layers_of[call.entries.page.layer]
        if self.hits is None:
            self.backend.attend(replace(call, indices=layer.selections.chosen))
            return
        self.backend.resolve(layer.call)
        source = replace(layer.call.entries, resolved=True)
        self.backend.attend(replace(call, entries=source, indices=layer.call.rows))


class _Reading:
    """The backend of a step's handles: all of it, but its own `attend`."""

    def __init__(self, step: HostStep) -> None:
        self._backend, self.attend = step.backend, step.attend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


class _Unrepeated(Repeats):
    """Makes every call anew."""

    def find(
        self, call_key: Key, tensors: Sequence[Tensor | None]
    ) -> tuple[Key | None, Repetition | None]:
        return None, None


@lru_cache(maxsize=1)
def _step_of(model: ModelSpec, batch: int, context: int, arena_bytes: int) -> HostStep:
    """Compiled for both places."""
    step = HostStep(
        model, batch=batch, context=context, device=DEVICE, hits=None, arena_bytes=arena_bytes
    )
    if not timing.is_compiling():
        for hits in (None, 1.0):
            step.set_hits(hits)
            step.compile()
    return step


def _measure_step(model: ModelSpec, batch: int, context: int, hits: float | None) -> Measurement:
    if timing.is_compiling() and hits not in (None, HITS[0]):
        return NOT_TIMED  # the same kernels
    step = _step_of(model, batch, context, _arena_bytes())
    step.set_hits(hits)
    step.run(PARTS)
    timed = time_changing(partial(step.run, PARTS), [step.change])
    layers = [*step.layers_of.values()]
    note = step.note()
    if hits is not None:
        note += f"; {fetched_bytes(layers):,} bytes fetched, {hit_note(layers)}"
    return Measurement(
        microseconds=timed.microseconds,
        launches=timed.launches,
        must_move_bytes=step.must_move_bytes(),
        note=note,
    )


# ---- chunks --------------------------------------------------------------------------------------


class ChunkStep(DecodeStep):
    """The last `chunk` tokens of one request. The entries of the blocks before it are where `place`
    says, and they are the same in host memory as on the device."""

    def __init__(
        self, model: ModelSpec, place: Place, *, chunk: int, context: int, device: str
    ) -> None:
        self.place: Place = place
        super().__init__(model, batch=1, chunk=chunk, context=context, device=device)

    def _make_schema(self, model: ModelSpec, context: int) -> CacheSchema:
        apart = self.place != "together"
        return CacheSchema.build(model, max_context=context, entries_apart=apart)

    def _options(self) -> dict[str, Any]:
        if self.place == "together":
            return {}
        options = {"host_memory": self.blocks * self.schema.bytes.entries}
        return options | ({"entry_rows": self.blocks} if self.place == "device" else {})

    def _admit_requests(self) -> None:
        super()._admit_requests()
        residency, entries = self.manager._parts.residency, self.manager.memory.entries
        if residency is None or entries is None:
            return
        (request,), places = self.requests, residency.places
        before = request.block_ids[: request.length // self.schema.block_tokens]
        if self.place == "host":
            target, rows = residency._pool.bytes, before
            places.in_host[before] = True
        else:
            target, rows = entries.arena.bytes, places.take(len(before))
            for depth, (block_id, row) in enumerate(zip(before, rows, strict=True)):
                places.place(block_id, row, depth)
        for first in range(0, len(rows), BLOCKS_AT_ONCE):
            chosen = torch.tensor(rows[first : first + BLOCKS_AT_ONCE], device=target.device)
            target[chosen] = small_numbers(
                len(chosen), self.schema.bytes.entries, self.manager.device
            ).to(target.device)
        residency.tables.publish(request.slot, 0, request.block_ids)

    def run(self, parts: Sequence[str], batches: Sequence[int] = (0, 1)) -> None:
        """Nothing is there of an earlier run."""
        for lane in self.manager.memory.lanes:
            if lane.entries is not None:
                lane.entries.chunks._held = [None, None]
        super().run(parts, batches)

    def note(self) -> str:
        if self.place != "host":
            return super().note()
        blocks = (self.context - self.chunk) // self.schema.block_tokens
        return f"{super().note()}; {blocks * self.schema.bytes.entries:,} bytes come up"


def small_numbers(rows: int, row_bytes: int, device: torch.device) -> Tensor:
    """uint8 [rows, row_bytes] that are small numbers in every format."""
    made = torch.empty((rows, row_bytes), dtype=torch.uint8, device=device)
    made.view(torch.int64).random_().bitwise_and_(0x0707070707070707).bitwise_or_(
        0x3838383838383838
    )
    return made


def _measure_chunk(model: ModelSpec, place: Place) -> Measurement:
    if timing.is_compiling():
        return NOT_TIMED  # a chunk sees to its own kernels
    _step_of.cache_clear()
    step = ChunkStep(model, place, chunk=CHUNK, context=CHUNK_CONTEXT, device=DEVICE)
    step.compile()
    step.run(PARTS)
    microseconds, launches = timed(partial(step.run, PARTS))
    return Measurement(
        microseconds=microseconds,
        launches=launches,
        must_move_bytes=step.must_move_bytes(),
        note=step.note(),
    )
