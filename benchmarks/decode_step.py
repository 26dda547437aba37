"""A whole decode step: append → select → attend of every backbone layer, captured as one graph.
In V4.1 layers select among another layer's candidates, or read what another layer selected.

Queries and projections are preset, so the time is the cache's alone. Requests stand at different
phases of their groups, as in a server: in the step one in 4 closes a CSA group, one in 128 an HCA
group (a single request closes none). The schema is built for the context of the case. Where the
blocks of all requests do not fit BLOCK_ARENA_BYTES, tables name the same blocks several times,
except the block a request writes to; the case's note says how many are distinct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.append import append_bytes, random_inputs, random_weights
from benchmarks.case import Case, Measurement
from benchmarks.lengths import set_length
from benchmarks.timing import time_graph
from dsv4.cache.batch import Batch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.schema import CacheSchema
from dsv4.cache.warmup import available_processors
from dsv4.model import AttentionType, LayerSpec, ModelSpec
from dsv4.rope import rope_table
from dsv4.units import format_tokens

MODELS = ("v4-flash", "v4-pro")
BATCHES = (1, 16, 64, 256)
CONTEXTS = (8_192, 131_072, 1_048_576)
V41_CONTEXTS = (8_192, 131_072)
BLOCK_ARENA_BYTES = 40_000_000_000
PARTS = ("append", "select", "attend")
PHASES = 128


def cases() -> Iterator[Case]:
    return _cases(MODELS, CONTEXTS, "decode_step")


def v41_cases() -> Iterator[Case]:
    return _cases(("v41-flash",), V41_CONTEXTS, "v41")


def _cases(models: Sequence[str], contexts: Sequence[int], suite: str) -> Iterator[Case]:
    for model in models:
        for context in contexts:
            for batch in BATCHES:
                yield Case(
                    name=f"step {model} at {format_tokens(context)} batch {batch}",
                    suite=suite,
                    series=f"at {format_tokens(context)}",
                    model=model,
                    batch=batch,
                    context=context,
                    measure=partial(_measure, ModelSpec.preset(model), batch, context),
                )


def _measure(model: ModelSpec, batch: int, context: int) -> Measurement:
    step = DecodeStep(model, batch=batch, context=context, device="cuda")
    step.compile()
    step.run(PARTS)
    whole = time_graph([partial(step.run, PARTS)], calls_a_graph=1)
    parts = {part: time_graph([partial(step.run, (part,))], calls_a_graph=1) for part in PARTS}
    return Measurement(
        microseconds=whole.microseconds,
        launches=whole.launches,
        must_move_bytes=step.must_move_bytes(),
        parts_us={part: timed.microseconds for part, timed in parts.items()},
        parts_launches={part: timed.launches for part, timed in parts.items()},
        note=step.note(),
    )


class DecodeStep:
    """`batch` requests of about `context` tokens, and one open step over all of them: a token of
    each, or the last `chunk` ones. With `decodes` that many of them still have one token, and
    `chunks_apart` is used."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        batch: int,
        context: int,
        device: str,
        chunk: int = 1,
        decodes: int = 0,
        block_arena_bytes: int = BLOCK_ARENA_BYTES,
    ) -> None:
        self.schema = self._make_schema(model, context)
        self.batch, self.context, self.chunk = batch, context, chunk
        self.counts = [1] * decodes + [chunk] * (batch - decodes)
        self.tokens = sum(self.counts)
        self.blocks_named = batch * self.schema.max_blocks_per_request
        fitting = block_arena_bytes // self.schema.bytes.block
        self.blocks = min(self.blocks_named, max(fitting, batch + 1))
        self.manager = KVCacheManager(
            self.schema,
            num_blocks=self.blocks,
            max_requests=batch,
            max_step_tokens=self.tokens,
            device=device,
            **self._options(),
        )
        self.layers = [s.layer for s in model.layers if not s.draft]
        self.named_layers = _named_layers(model)
        self.selecting_layers = [n for n in self.layers if model.layers[n].has_indexer]
        self._fill_arenas()
        self._admit_requests()
        padding = {"pad_tokens": batch, "pad_requests": batch} if chunk == 1 else {}
        self.plan = self.manager.prepare_forward(  # launched at full size, as an engine's graph is
            list(zip(self.requests, self.counts, strict=True)),
            chunks_apart=decodes > 0,
            **padding,
        )
        self.batches = self.plan.batches
        self.handles = {
            (nth, layer): self.manager.acquire(layer, batch)
            for layer in self.layers
            for nth, batch in enumerate(self.batches)
        }
        self._make_inputs(device)

    # ---- the step --------------------------------------------------------------------------------

    def compile(self) -> None:
        """Makes the kernels of the step in as many processes as there are processors, and launches
        none: one after the other they take longer than what is timed."""
        self.manager._parts.backend.warm_up(
            partial(self.run, PARTS), workers=available_processors(), progress=lambda *_: None
        )

    def run(self, parts: Sequence[str], batches: Sequence[int] = (0, 1)) -> None:
        """The named parts of the step, or of its batches with `chunks_apart`. The first run must
        have all, for reads follow writes."""
        for layer in self.layers:
            begin = 0
            for nth, batch in enumerate(self.batches):
                rows = slice(begin, begin + batch.padded_tokens)
                begin = rows.stop
                if nth in batches:
                    self._run_layer(self.handles[nth, layer], batch, rows, parts)

    def _run_layer(
        self, handle: LayerCacheHandle, batch: Batch, rows: slice, parts: Sequence[str]
    ) -> None:
        spec = handle.schema.spec
        weights = self.weights[spec.layer]
        if "append" in parts:
            batch.written.appended.discard(spec.layer)  # a chunk is appended once, but not here
            inputs = (each[rows] for each in self.inputs[_sort(spec)])
            handle.append(*inputs, weights=weights)
        if "select" in parts and spec.layer in self.selecting_layers:
            self._select(handle, batch, rows, weights.rope)
        if "attend" in parts:
            csa = spec.attention is AttentionType.CSA
            handle.attend(
                self.q[rows],
                self.sink,
                self.chosen_of[spec.ratio][rows] if csa else None,
                self.out[rows],
                self.lse[rows],
                inverse_rope=weights.rope,
            )

    def _select(self, handle: LayerCacheHandle, batch: Batch, rows: slice, rope: Tensor) -> None:
        """What `select` does with raw queries, which it would overwrite; here they serve again."""
        model, spec = self.schema.model, handle.schema.spec
        handle.backend.prepare_index_queries(
            self.raw_index_q[rows],
            tokens=batch.tokens,
            rope=rope,
            record=self.schema.index_format,
            out=self.index_q[rows],
            transform=model.layers[spec.owner].index_keys != "latent",
        )
        bounded = spec.candidates_of is not None or spec.layer in model.candidate_sources
        handle.select(
            self.index_q[rows],
            self.index_weights[rows],
            self.chosen_of[spec.ratio][rows],
            rope=rope,
            prepared=True,
            candidates=self.candidates[rows] if bounded else None,
        )

    def must_move_bytes(self) -> int:
        """Each byte once: inputs, outputs, what is stored, keys scored, records attended to."""
        return sum(map(self._layer_bytes, self.layers))

    def _layer_bytes(self, layer: int) -> int:
        model, spec = self.schema.model, self.schema.model.layers[layer]
        total = 2 * 2 * self.tokens * model.heads * model.head_dim  # q and out
        for start, count in zip(self.plan.starts.tolist(), self.counts, strict=True):
            total += append_bytes(self.schema, layer, start=start, tokens=count, batch=1)
            end = start + count
            entries = end // spec.ratio if spec.ratio else 0
            if layer in self.selecting_layers:
                scored = entries
                if spec.candidates_of is not None:
                    most = model.candidate_blocks * model.candidate_block_entries
                    scored = min(entries, count * most)
                total += scored * self.schema.index_format.record_bytes
                # queries and weights
                total += count * 2 * model.index_heads * (model.index_dim + 1)
            if spec.attention is AttentionType.CSA:
                entries = min(entries, count * model.index_topk)
            window = min(end, model.window + count - 1)
            total += window * self.schema.window_format.record_bytes
            total += entries * self.schema.entry_format.record_bytes
        return total

    def note(self) -> str:
        if self.blocks == self.blocks_named:
            return f"{self.blocks:,} blocks, all distinct"
        return f"tables name {self.blocks_named:,} blocks, of which {self.blocks:,} are distinct"

    # ---- setting up ------------------------------------------------------------------------------

    def _make_schema(self, model: ModelSpec, context: int) -> CacheSchema:
        return CacheSchema.build(model, max_context=context)

    def _options(self) -> dict[str, Any]:
        """More options of the manager."""
        return {}

    def _fill_arenas(self) -> None:
        """Bytes that are small numbers in every format; index keys and scales as they would be."""
        for arena in (self.manager.memory.block_arena, self.manager.memory.slot_arena):
            words = arena.bytes.view(torch.int64)
            words.random_().bitwise_and_(0x0707070707070707).bitwise_or_(0x3838383838383838)
        codes = [part.code for part in self.schema.entry_format.parts if part.code is not None]
        powers = all(code.scale == "ue8m0" for code in codes)
        for layer in self.layers:
            handle = self.manager.acquire(layer)
            pool = handle.memory.pool.views if handle.schema.spec.owns_entries else {}
            for name, view in (*pool.items(), *handle.memory.state.views.items()):
                if name == "indexer_keys_fp4":
                    view.copy_(_code_pairs(view.device)[view.random_(0, 256).int()])
                elif name == "indexer_scale":
                    view.random_(126, 128)  # spans of a normal vector differ by a factor of 2
                elif name == "swa_inv" or (name == "inv_scale" and powers):
                    view.random_(120, 128)

    def _admit_requests(self) -> None:
        """As if they had been computed: lengths `context` - 1 and a little less, tables filled.
        Each request ends in a block of its own; before it come blocks from all over the arena."""
        self.requests = [self.manager.admit_request() for _ in range(self.batch)]
        width = self.schema.max_blocks_per_request
        shared = torch.arange(self.batch * (width - 1)) % max(self.blocks - self.batch, 1)
        shared = self.batch + shared[torch.randperm(len(shared))].view(self.batch, width - 1)
        table = torch.cat((shared, torch.arange(self.batch)[:, None]), dim=1)
        admitted = zip(self.requests, self.counts, table, strict=True)
        for nth, (request, count, block_ids) in enumerate(admitted):
            request.block_ids = block_ids.tolist()
            request.published_blocks = width
            phase = (nth + 1) % PHASES if count == 1 else 0
            set_length(self.manager, request, self.context - count - phase)
        slots = [request.slot for request in self.requests]
        self.manager.memory.block_table[slots] = table.int().to(self.manager.device)

    def _make_inputs(self, device: str) -> None:
        """Inputs are shared by the layers of a kind: in a model they come from the launch before,
        so they are in the L2. Weights are each layer's own."""
        model, tokens = self.schema.model, self.tokens

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).to(torch.bfloat16)

        ropes = _rope_tables(model, self.context, device)
        self.weights = {
            layer: random_weights(self.schema, layer, ropes[model.layers[layer].yarn], device)
            for layer in self.layers
        }
        by_sort = {_sort(model.layers[layer]): layer for layer in self.layers}
        self.inputs = {
            sort: random_inputs(self.schema, layer, tokens, device)
            for sort, layer in by_sort.items()
        }
        self.q = random(tokens, model.heads, model.head_dim)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(tokens, model.heads, device=device)
        self.sink = torch.randn(model.heads, device=device)
        self.raw_index_q = random(tokens, model.index_heads, model.index_dim)
        self.index_q = torch.empty_like(self.raw_index_q)
        self.index_weights = 0.01 * random(tokens, model.index_heads)
        self.chosen = torch.empty(tokens, model.index_topk, dtype=torch.int32, device=device)
        # one for all layers that select from as many entries: each is read before the next
        ratios = [model.layers[layer].ratio for layer in self.selecting_layers]
        self.chosen_of = {ratio: torch.empty_like(self.chosen) for ratio in ratios}
        self.chosen_of.update(dict.fromkeys(ratios[-1:], self.chosen))
        self.candidates = torch.empty(
            tokens, model.candidate_blocks, dtype=torch.int32, device=device
        )


def _sort(spec: LayerSpec) -> tuple[AttentionType, int, bool]:
    """Layers of a sort are appended to alike."""
    return spec.attention, spec.ratio, spec.owns_entries


def _named_layers(model: ModelSpec) -> dict[str, int]:
    """One layer of each kind, in V4.1 also one of each way to come by a selection."""
    named = {}
    for spec in model.layers:
        if spec.draft or spec.ratio == 0:
            continue
        if spec.index_keys == "latent":
            named["pairs" if spec.ratio == 2 else "singles"] = spec.layer
        elif spec.candidates_of is not None:
            named["second level"] = spec.layer
        elif spec.selector is not None:
            named["reading"] = spec.layer
        else:
            named[spec.attention.name] = spec.layer
    return named


def _code_pairs(device: torch.device) -> Tensor:
    """Bytes of two E2M1 codes each, about as often as normal numbers have them."""
    codes = [0, 1, 2, 2, 3, 3, 4, 5, 8, 9, 10, 10, 11, 11, 12, 13]
    pairs = [low | high << 4 for high in codes for low in codes]
    return torch.tensor(pairs, dtype=torch.uint8, device=device)


@lru_cache(maxsize=1)
def _rope_tables(model: ModelSpec, tokens: int, device: str) -> dict[bool, Tensor]:
    """Both tables by `LayerSpec.yarn`; at 1M tokens they take a second to make."""
    return {
        yarn: rope_table(model, yarn=yarn, tokens=tokens, device=device) for yarn in (False, True)
    }
