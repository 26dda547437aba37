"""Makes the calls of every step that a manager can run, so that kernels are compiled before they
are needed. Inside a backend's `warm_up` nothing is launched: tensors are placeholders that have a
shape but no memory of their own."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.batch import Batch, all_position_bounds, cut_batch
from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.memory import CacheMemory, LayerMemory
from dsv4.cache.pages import CompressorLayout
from dsv4.cache.step.shape import StepShape, StepTokens
from dsv4.errors import require_count
from dsv4.model import AttentionType
from dsv4.ops.backend import Backend
from dsv4.ops.calls import (
    CompressorWeights,
    FollowedDrafts,
    FollowedItems,
    Following,
    KeyProjection,
    LayerWeights,
    Which,
)

# Launchers choose by the number of tokens, and their choice changes at small numbers and near
# powers of two. No GPU has more processors than this.
EVERY_COUNT_UP_TO = 160
# The most tokens of a request in a step; launchers round it up to a power of two.
MOST_TOKENS = (1, 2, 3, 5, 9)


class Warmup:
    """Calls of one manager's layers with `heads` query heads, for every step up to its limits."""

    def __init__(
        self,
        memory: CacheMemory,
        backend: Backend,
        *,
        heads: int,
        kv_norm: bool,
        inverse_rope: bool,
        round_bf16: bool,
        window_cut: bool = False,
        make_handle: Callable[..., LayerCacheHandle] = LayerCacheHandle,
    ) -> None:
        self._memory, self._schema = memory, memory.schema
        self._backend = backend
        self._model = model = memory.schema.model
        self._buffers, workspace = memory.lanes[0].buffers, memory.lanes[0].workspace
        self._kv_norm, self._inverse_rope = kv_norm, inverse_rope
        self._round_bf16, self._window_cut = round_bf16, window_cut
        self._handles = [
            make_handle(LayerMemory.of(memory, layer), backend, workspace)
            for layer in range(len(memory.schema.layers))
        ]
        rows = self._buffers.max_tokens
        value = getattr(torch, memory.schema.entry_format.value_dtype)
        index = getattr(torch, memory.schema.index_format.value_dtype)
        self._rope = self._new(memory.schema.max_context, model.rope_dim)
        self._sink = self._new(heads)
        self._kv = self._new(rows, model.head_dim, dtype=value)
        self._q = self._new(rows, heads, model.head_dim, dtype=value)
        self._out = self._new(rows, heads, model.head_dim, dtype=value)
        self._lse = self._new(rows, heads)
        self._index_q = self._new(rows, model.index_heads, model.index_dim, dtype=index)
        self._index_weights = self._new(rows, model.index_heads, dtype=index)
        self._chosen = self._new(rows, model.index_topk, dtype=torch.int32)
        self._candidates = self._new(rows, max(model.candidate_blocks, 1), dtype=torch.int32)
        self._projections = {
            (layout.columns, layout.gated): self._new(
                rows, layout.columns, dtype=torch.float32 if layout.gated else value
            )
            for handle in self._handles
            for layout in (handle.memory.compressor, handle.memory.index_compressor)
            if layout is not None
        }
        self._weights = [self._layer_weights(handle) for handle in self._handles]

    def __call__(self) -> None:
        """One batch of each kind in every layer, and every batch in one layer of each kind."""
        most, decode = self._buffers.max_tokens, self._schema.max_decode_tokens
        chunk = decode + 1
        self._follow()
        sorts: dict[object, int] = {}
        for layer, handle in enumerate(self._handles):
            sorts.setdefault(_sort(handle), layer)
            self._step(layer, tokens=1, most_tokens=1)
            if 1 < decode <= most and self._memory.lanes[0].entries is not None:
                self._step(layer, tokens=decode, most_tokens=decode)  # several of one request
            if chunk <= most:
                self._step(layer, tokens=chunk, most_tokens=chunk)
        for layer in sorts.values():
            for tokens in token_counts(most):
                self._step(layer, tokens=tokens, most_tokens=1)
                for most_tokens in {chunk, tokens} if tokens >= chunk else ():
                    self._step(layer, tokens=tokens, most_tokens=most_tokens)
            for tokens in _around_powers(most):
                for most_tokens in MOST_TOKENS:
                    if most_tokens <= tokens:
                        self._select(layer, self._batch(tokens, most_tokens))
                if tokens < chunk or tokens & (tokens - 1):  # powers of two are enough here
                    continue
                for bound in all_position_bounds(self._schema):
                    self._select(layer, self._batch(tokens, tokens, bound=bound))
        self._draft()
        self._stage()

    def _stage(self) -> None:
        """What a chunk brings up from host memory, for any number of requests."""
        lane = self._memory.lanes[0].entries
        if lane is None:
            return
        for handle in self._handles:
            entries = handle.memory.entries
            if entries is not None and entries.page.apart:
                for requests in _around_powers(self._buffers.max_requests):
                    batch = self._buffers.on_device["batch"][:requests]
                    for which in get_args(Which):
                        call = lane.chunks.staging_of(handle.layer, 0, batch, which)
                        self._backend.stage(call)

    def _step(self, layer: int, *, tokens: int, most_tokens: int) -> None:
        batch = self._batch(tokens, most_tokens)
        handle, weights = self._bound(layer, batch), self._weights[layer]
        layouts = (handle.memory.compressor, handle.memory.index_compressor)
        projections = [
            self._projections[layout.columns, layout.gated][:tokens]
            for layout in layouts
            if layout is not None
            for _ in range(2 if layout.gated else 1)
        ]
        handle.append(self._kv[:tokens], *projections, weights=weights)
        self._select(layer, batch)
        listed = handle.schema.spec.attention is AttentionType.CSA
        for cut in (False, True) if self._window_cut and not batch.is_decode else (False,):
            batch = self._batch(tokens, most_tokens, window_cut=cut)
            batch.written.note(layer)
            self._bound(layer, batch).attend(
                self._q[:tokens],
                self._sink,
                self._chosen[:tokens] if listed else None,
                self._out[:tokens],
                self._lse[:tokens],
                inverse_rope=weights.rope if self._inverse_rope else None,
            )

    def _draft(self) -> None:
        """Draft steps of any number of requests, in one layer: all draft layers are the same."""
        block, layers = self._model.draft_block, self._schema.draft_layers
        if not block or not layers:
            return
        layer = min(layers)
        weights, most = self._weights[layer], self._buffers.max_tokens // block
        for requests in token_counts(min(most, self._buffers.max_requests)):
            tokens = requests * block
            self._bound(layer, self._batch(tokens, block)).attend_draft(
                self._kv[:tokens],
                self._q[:tokens],
                self._sink,
                self._out[:tokens],
                self._lse[:tokens],
                weights=weights,
                inverse_rope=weights.rope if self._inverse_rope else None,
            )

    def _follow(self) -> None:
        """Steps after others, with draft steps and without."""
        if not self._schema.steps_ahead:
            return
        buffers = self._buffers
        tensors = buffers.on_device
        drafts: list[FollowedDrafts | None] = [None]
        if buffers.max_drafts:
            with_drafts = FollowedDrafts(
                batch=tensors["draft_batch"],
                tokens=tensors["draft_tokens"],
                steps=buffers.max_drafts,
                rows=buffers.max_requests,
            )
            drafts.append(with_drafts)
        counts = [self._new(1, dtype=dtype) for dtype in (torch.int32, torch.int64)]
        for narrow, accepted, drafted in product((True, False), (None, *counts), drafts):
            self._backend.follow(
                Following(
                    follows=tensors["follows"][:1],
                    batch=tensors["batch"],
                    tokens=tensors["tokens"],
                    items=tuple(
                        FollowedItems(
                            ratio=ratio,
                            overlap=ratio in buffers.overlapping_ratios,
                            items=tensors[f"items_{ratio}"],
                        )
                        for ratio in buffers.ratios
                    ),
                    batch_before=tensors["batch"],
                    accepted=accepted,
                    narrow=narrow,
                    most_tokens=self._schema.max_decode_tokens,
                    drafts=drafted,
                )
            )

    def _select(self, layer: int, batch: Batch) -> None:
        handle = self._bound(layer, batch)
        spec = handle.schema.spec
        if handle.memory.index_keys is None or not spec.has_indexer:
            return
        bounded = spec.candidates_of is not None or layer in self._model.candidate_sources
        batch.written.note(layer)
        rows = batch.padded_tokens
        handle.select(
            self._index_q[:rows],
            self._index_weights[:rows],
            self._chosen[:rows],
            rope=self._weights[layer].rope,
            round_bf16=self._round_bf16,
            candidates=self._candidates[:rows] if bounded else None,
        )

    def _bound(self, layer: int, batch: Batch) -> LayerCacheHandle:
        handle = self._handles[layer]
        handle.bind(batch)
        return handle

    def _batch(
        self, tokens: int, most_tokens: int, *, bound: int | None = None, window_cut: bool = False
    ) -> Batch:
        """A batch that is never run: its index tensors are those of whatever step comes next."""
        requests = min(-(-tokens // most_tokens), self._buffers.max_requests)
        shape = replace(StepShape.build([], []), num_tokens=tokens, most_tokens=most_tokens)
        nothing = np.zeros(0, dtype=np.int64)
        batch = cut_batch(
            self._buffers,
            StepTokens(
                shape=shape, starts=nothing, ends=nothing, reused=nothing, window_cut=window_cut
            ),
            lane=0,
            requests=requests,
            tokens=tokens,
            item_counts=self._buffers.most_item_counts(tokens=tokens, requests=requests),
            bound=bound or self._schema.max_context,
        )
        # what layers read that read another layer's entries
        batch.written.stored.update(range(len(self._handles)))
        return batch

    def _layer_weights(self, handle: LayerCacheHandle) -> LayerWeights:
        def of(layout: CompressorLayout | None) -> CompressorWeights | None:
            if layout is None:
                return None
            ape = None
            if layout.key_page is None:
                ape = self._new(layout.ratio, layout.columns)
            return CompressorWeights(ape=ape, norm=self._new(layout.width))

        main, width = handle.memory.compressor, self._model.index_dim
        keys = None
        if main is not None and main.key_page is not None:
            weight = self._new(width, main.width, dtype=self._kv.dtype)
            keys = KeyProjection(weight=weight, norm=self._new(width))

        return LayerWeights(
            rope=self._rope,
            compressor=of(handle.memory.compressor),
            index_compressor=of(handle.memory.index_compressor),
            index_projection=keys,
            kv_norm=self._new(self._model.head_dim) if self._kv_norm else None,
        )

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return phantom_tensor(self._memory.slot_arena.bytes, shape, dtype)


def _sort(handle: LayerCacheHandle) -> Hashable:
    """Equal for layers whose calls make the same launches, except for where their pages lie."""
    spec, memory = handle.schema.spec, handle.memory
    return (
        replace(spec, layer=0, owner=0, selector=0, candidates_of=None, draft=False),
        spec.owns_entries,
        spec.has_indexer,
        spec.candidates_of is None,
        handle.schema.online,
        *(
            (view.page.format, view.page.rows)
            for view in (memory.window, memory.entries, memory.index_keys)
            if view is not None
        ),
    )


def token_counts(most: int) -> list[int]:
    """Numbers of tokens that together make launchers take every choice."""
    few = range(1, min(EVERY_COUNT_UP_TO, most) + 1)
    return sorted({*few, *_around_powers(most), most})


def _around_powers(most: int) -> list[int]:
    powers = [1 << nth for nth in range(most.bit_length())]
    found = {count for power in powers for count in (power - 1, power, power + 1, 3 * power)}
    return sorted(count for count in found if 0 < count <= most)


class _Claim:
    """Memory of a GPU, presented with a shape."""

    def __init__(self, address: int, shape: Sequence[int], form: str) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": form,
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def phantom_tensor(memory: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of any size that begins where `memory` does and allocates nothing.
    It must not be read or written: what follows `memory` is not its own."""
    form = f"<i{dtype.itemsize}"
    if memory.device.type == "cuda":
        claim: Any = _Claim(memory.data_ptr(), shape, form)
        return torch.as_tensor(claim, device=memory.device).view(dtype)
    first = memory.view(-1)[: dtype.itemsize].numpy().view(form)
    strides = [dtype.itemsize * int(np.prod(shape[nth + 1 :])) for nth in range(len(shape))]
    whole = np.lib.stride_tricks.as_strided(first, shape=shape, strides=strides)
    return torch.from_numpy(whole).view(dtype)


BAR_WIDTH = 30


@contextmanager
def progress_bar(shown: bool | None) -> Iterator[Callable[[int, int], None]]:
    """A line on stderr that shows how many of how many kernels are ready, and the time since the
    start. None shows it where stderr is a terminal."""
    visible = sys.stderr.isatty() if shown is None else shown
    begin = time.monotonic()

    def report(ready: int, of: int) -> None:
        if visible:
            done = BAR_WIDTH * ready // max(of, 1)
            bar = "█" * done + "·" * (BAR_WIDTH - done)
            seconds = time.monotonic() - begin
            print(f"\rkernels {bar} {ready}/{of} {seconds:.0f} s", end="", file=sys.stderr)

    yield report
    if visible:
        print(file=sys.stderr)


def available_processors() -> int:
    """The number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def warm_up(
    memory: CacheMemory,
    backend: Backend,
    *,
    heads: int | None,
    workers: int | None,
    progress: bool | None,
    **calls: Any,
) -> int:
    """Compiles the kernels of all these calls; returns how many are ready. Raises InvalidInput."""
    count = memory.schema.model.heads if heads is None else require_count("heads", heads)
    most = available_processors() if workers is None else require_count("workers", workers)
    made = Warmup(memory, backend, heads=count, **calls)
    with progress_bar(progress) as report:
        return backend.warm_up(made, workers=most, progress=report)
