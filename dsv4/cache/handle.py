"""One layer's view of the cache for one call: what engines hold inside their attention layer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_not
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from dsv4.cache import tensor_checks
from dsv4.cache.batch import ENTRIES, TAILS, WINDOW, Batch, BatchCaptures
from dsv4.cache.changes import Uncopied, in_turn
from dsv4.cache.memory import LayerMemory
from dsv4.cache.pages import CompressorLayout
from dsv4.cache.repeats import Key, Repeats
from dsv4.cache.views import ClassicalView, IndexerView, SWAView
from dsv4.cache.workspace import Workspace
from dsv4.errors import InvalidInput, PlanError, SchemaMismatch, require_count, require_flag
from dsv4.model import AttentionType
from dsv4.ops.backend import Backend
from dsv4.ops.calls import (
    Attention,
    Candidates,
    CompressorWeights,
    CompressorWrite,
    KeyProjection,
    LayerWeights,
    Selection,
    StepTensors,
    WindowSource,
    WindowWrite,
)
from dsv4.ops.columns import request_columns, token_columns

__all__ = ["ClassicalView", "IndexerView", "LayerCacheHandle", "SWAView"]


# the compressor's c and z, the indexer's c and z
Projections = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EntryRecords:
    """`rows` for the pages of one compressor; a negative `block_id` writes nothing."""

    layout: CompressorLayout
    block_id: Tensor
    page_row: Tensor
    rows: Tensor


class LayerCacheHandle(Uncopied):
    """Made once per layer by the manager and handed out by `acquire`, which binds it to a batch.

    The fast path of a step is `append`, then `select` on CSA layers, then `attend`. Writes launch
    kernels and do nothing else: no allocation, no synchronisation, the same launches whatever the
    lengths are. Reads see what the step's `append` has left, and nothing outside a request's
    length; with results given by the caller they allocate nothing and look at no length on the
    host. "Values" are bf16, or fp32 where the format keeps fp32. Only the thread that acquired a
    handle uses it, and no other thread may be inside a call of the same plan at the same time
    (ThreadError).
    """

    _instead = "manager.acquire(layer, batch) returns it"
    _internal: ClassVar[frozenset[str]] = frozenset(
        (
            "bind",
            "turn",
            "window_source",
            "write_entries",
        )
    )

    def __init__(self, memory: LayerMemory, backend: Backend, workspace: Workspace) -> None:
        schema = memory.shared.schema
        self.memory, self.backend = memory, backend
        self.layer, self.schema = memory.layer, memory.schema
        self._compressor, self._index_compressor = memory.compressor, memory.index_compressor
        self._block_table = memory.shared.block_table
        self.batch: Batch | None = None
        self.thread: int | None = None  # the thread that acquired it
        self._model = schema.model
        self._value_dtype = schema.entry_format.value_dtype
        self._index_format = schema.index_format
        self._index_dtype = schema.index_format.value_dtype
        self._block_arena = memory.shared.block_arena.bytes
        self._slot_arena = memory.shared.slot_arena.bytes
        self._workspace, self.turn = workspace, workspace.turn
        self._check = tensor_checks.TensorChecks(schema, self._slot_arena.device)
        self._repeats = Repeats(
            backend, (self._block_arena, self._slot_arena, self._block_table, *workspace.tensors)
        )
        self._owner, self._window_page = self.schema.spec.owner, memory.window.page
        self._has_indexer = self.schema.spec.has_indexer
        self._parts = WINDOW | (TAILS | ENTRIES if self._compressor is not None else 0)

    def __repr__(self) -> str:
        bound = "bound to no batch" if self.batch is None else repr(self.batch)
        return f"LayerCacheHandle(layer {self.layer}, {self.schema.spec.attention}: {bound})"

    # ---- views -------------------------------------------------------------------------------

    def read_swa_view(self) -> SWAView:
        """The window ring of this layer."""
        return self.memory.window

    def read_classical_view(self) -> ClassicalView:
        """The compressed entries this layer reads. Raises SchemaMismatch for a window-only one."""
        if self.memory.entries is None:
            raise SchemaMismatch(
                f"layer {self.layer} is {self.schema.spec.attention}: it has no compressed entries"
            )
        return self.memory.entries

    def read_indexer_view(self) -> IndexerView:
        """The indexer keys this layer reads. Raises SchemaMismatch for one without an indexer."""
        if self.memory.index_keys is None:
            raise SchemaMismatch(
                f"layer {self.layer} is {self.schema.spec.attention}: it has no indexer keys"
            )
        return self.memory.index_keys

    # ---- writes ------------------------------------------------------------------------------

    @in_turn
    def append(
        self,
        kv: Tensor,
        c: Tensor | None = None,
        z: Tensor | None = None,
        index_c: Tensor | None = None,
        index_z: Tensor | None = None,
        *,
        weights: LayerWeights,
    ) -> None:
        """All that this layer writes in the step: one launch in a decode step, two in a chunk.

        Rows are the batch's tokens in order (padding rows included, their content ignored): `kv`
        [tokens, head_dim], bf16 or, where the format keeps it, fp32; `c`, `z` fp32 [tokens,
        columns] are the compressor's value and gate projections, columns [previous | current] where
        groups overlap; `index_c`, `index_z` the indexer's. A layer of ratio 1 takes `c` of the type
        of `kv` and no `z`. Window rows go to the ring, projections to the tails, closed groups to
        their blocks. Raises InvalidInput or PlanError before anything is launched. After any other
        error call `fail`: a chunk is not appended again by any layer, as after a success.
        """
        batch = self.batch
        if (  # all false in the usual case, which makes no further calls
            batch is None
            or batch.done
            or batch.written.unfinished
            or self.layer in batch.written.appended
        ):
            batch = self._unwritten_batch()
        if type(weights) is not LayerWeights:
            tensor_checks.layer_weights(weights)
        projections = (c, z, index_c, index_z)
        if batch.captures is None:
            build = partial(self._append_calls, batch, weights, kv, projections)
            given = (kv, *projections, *_tensors_of(weights))
            call_key = ("append", batch.sizes, batch.item_counts)
            self._repeated(batch, call_key, given, build, begin=True)
        else:
            self._append_captured(batch, batch.captures, weights, kv, projections)
        batch.written.note(self.layer)

    def _append_calls(
        self, batch: Batch, weights: LayerWeights, kv: Tensor, projections: Projections
    ) -> list[partial[None]]:
        window = self._window_write(batch, kv, weights)
        writes = self._compressor_writes(batch, weights, projections)
        step = self._step_tensors(batch, weights)
        return [partial(self.backend.append, step, window, writes)]

    def _append_captured(
        self,
        batch: Batch,
        captures: BatchCaptures,
        weights: LayerWeights,
        kv: Tensor,
        projections: Projections,
    ) -> None:
        """An append of which snapshots are taken, before it and after it."""
        window = self._window_write(batch, kv, weights)
        writes = self._compressor_writes(batch, weights, projections)
        step = self._step_tensors(batch, weights)
        batch.written.begin(self.layer)
        captures.before_append(self.layer, writes)
        self.backend.append(step, window, writes)
        captures.after_append(self.layer)

    def _repeated(
        self,
        batch: Batch,
        call_key: Key,
        given: Sequence[Tensor | None],
        build: partial[list[partial[None]]],
        *,
        begin: bool = False,
    ) -> None:
        """Makes calls of the backend. `build` checks what was given and returns them, and changes
        nothing; when a call comes again with the same shapes, nothing is checked or built. `begin`:
        they write."""
        key, known = self._repeats.find(call_key, given)
        tensors = [*filter(_is_given, given)]
        places = None if known is None else known.places(tensors)
        calls = build() if places is None else []
        if begin:
            batch.written.begin(self.layer)
        if known is None or places is None:
            self._repeats.make(key, tensors, calls, batch.tokens)
        else:
            known.run(places, tensors)

    @in_turn
    def write_swa(self, kv: Tensor, *, weights: LayerWeights) -> None:
        """Writes only the window rows. Wrap-around leaves exactly the newest rows that fit into the
        ring."""
        batch = self._unwritten_batch()
        tensor_checks.layer_weights(weights)
        window = self._window_write(batch, kv, weights)
        step = self._step_tensors(batch, weights)
        batch.written.begin(self.layer)
        self.backend.append(step, window, ())
        if batch.captures is not None and self._parts == WINDOW:
            batch.captures.after_append(self.layer)
        batch.written.note_part(self.layer, WINDOW, self._parts)

    @in_turn
    def write_tail(
        self,
        c: Tensor,
        z: Tensor,
        index_c: Tensor | None = None,
        index_z: Tensor | None = None,
        *,
        weights: LayerWeights,
    ) -> None:
        """Writes only the projections into the tails; `flush_compression` then closes groups from
        them.

        Only for decode batches: a tail holds no more than a group and the drafts.
        """
        self._require_whole_tails("write_tail")
        batch = self._decode_batch("write_tail")
        tensor_checks.layer_weights(weights)
        writes = self._compressor_writes(batch, weights, (c, z, index_c, index_z))
        step = self._step_tensors(batch, weights)
        batch.written.begin(self.layer)
        self.backend.append(step, None, [replace(each, compress=False) for each in writes])
        batch.written.note_part(self.layer, TAILS, self._parts)

    @in_turn
    def flush_compression(self, *, weights: LayerWeights) -> None:
        """Closes every group that ends in this step, from the tails, and stores the entries.

        Always the same launch; whether anything closes is decided on the device.
        """
        self._require_whole_tails("flush_compression")
        batch = self._decode_batch("flush_compression")
        tensor_checks.layer_weights(weights)
        writes = [
            replace(self._compressor_write(batch, layout, w, name), write_tails=False)
            for layout, w, name in (
                (self._compressor, weights.compressor, ""),
                (self._index_compressor, weights.index_compressor, "index_"),
            )
            if layout is not None
        ]
        step = self._step_tensors(batch, weights)
        batch.written.begin(self.layer)
        self.backend.append(step, None, writes)
        batch.written.note_part(self.layer, ENTRIES, self._parts)

    @in_turn
    def compress_tail(self, layout: CompressorLayout, weights: LayerWeights, out: Tensor) -> None:
        """Writes closed groups to `out` [work items, width], of the format's value type, and not to
        blocks."""
        self._require_whole_tails("compress_tail")
        batch = self._decode_batch("compress_tail")
        tensor_checks.layer_weights(weights)
        indexer = layout.kind == "index"
        chosen = weights.index_compressor if indexer else weights.compressor
        name = "index_" if indexer else ""
        write = self._compressor_write(batch, layout, chosen, name)
        shape, dtype = (write.items.shape[0], layout.width), layout.page.format.value_dtype
        for check in (self._check.rows, self._check.whole):
            check("out", out, shape, dtype)
        step = self._step_tensors(batch, weights)
        self.backend.append(step, None, (replace(write, write_tails=False, dense=out),))

    @in_turn
    def write_entries(self, records: Sequence[EntryRecords]) -> None:
        """Stores what closes in the bound batch: all that the layer's compressors have."""
        batch = self.open_batch()
        batch.written.begin(self.layer)
        for each in records:
            self.backend.write_records(
                self._block_arena, each.layout.page, each.block_id, each.page_row, each.rows
            )
        batch.written.note_part(self.layer, ENTRIES, self._parts)

    def _step_tensors(self, batch: Batch, weights: LayerWeights) -> StepTensors:
        self._check.rope_table(weights.rope)
        return StepTensors(
            block_arena=self._block_arena,
            slot_arena=self._slot_arena,
            block_table=self._block_table,
            batch=batch.request_rows,
            tokens=batch.tokens,
            rope=weights.rope,
            rms_eps=self._model.rms_eps,
            narrow=batch.is_decode,
            scratch=self._workspace.scratch,
            arrived=self._workspace.arrived,
        )

    def _compressor_writes(
        self, batch: Batch, weights: LayerWeights, projections: Projections
    ) -> list[CompressorWrite]:
        c, z, index_c, index_z = projections
        compressors = (
            (self._compressor, weights.compressor, "", c, z, weights.index_projection),
            (self._index_compressor, weights.index_compressor, "index_", index_c, index_z, None),
        )
        return [
            self._compressor_write(batch, *each)
            for each in compressors
            if tensor_checks.wanted(each[0], *each[2:5], self.layer)
        ]

    def _window_write(self, batch: Batch, kv: Tensor, weights: LayerWeights) -> WindowWrite:
        page = self._window_page
        shape = batch.padded_tokens, page.format.width
        self._check.rows("kv", kv, shape, self._value_dtype)
        if weights.kv_norm is not None:
            self._check.whole("kv_norm", weights.kv_norm, shape[1:], "float32")
        return WindowWrite(
            page=page,
            kv=kv,
            norm=weights.kv_norm,
            window=self.schema.window,
            staging=None if batch.is_decode else self._workspace.staging,
            staging_page=None if batch.is_decode else self._workspace.staging_page,
        )

    def _compressor_write(
        self,
        batch: Batch,
        layout: CompressorLayout | None,
        weights: CompressorWeights | None,
        name: str,
        c: Tensor | None = None,
        z: Tensor | None = None,
        keys: KeyProjection | None = None,
    ) -> CompressorWrite:
        assert layout is not None
        rows = batch.padded_tokens, layout.columns
        weights = tensor_checks.given(f"weights.{name}compressor", weights, self.layer)
        if weights.ape is not None or layout.key_page is None:
            ape = tensor_checks.given(f"weights.{name}compressor.ape", weights.ape, self.layer)
            self._check.whole(f"{name}ape", ape, (layout.ratio, layout.columns), "float32")
        self._check.whole(f"{name}norm", weights.norm, (layout.width,), "float32")
        for label, tensor in ((f"{name}c", c), (f"{name}z", z)):
            if tensor is not None:
                dtype = "float32" if layout.gated else self._value_dtype
                self._check.rows(label, tensor, rows, dtype)
        if layout.key_page is not None:
            self._check_projection(layout, keys)
        return CompressorWrite(
            layout=layout,
            items=batch.items[layout.ratio],
            ape=weights.ape,
            norm=weights.norm,
            c=c,
            z=z,
            keys=None if layout.key_page is None else keys,
        )

    def _check_projection(self, layout: CompressorLayout, keys: KeyProjection | None) -> None:
        keys = tensor_checks.given("weights.index_projection", keys, self.layer)
        width = self._model.index_dim
        shape = (width, layout.width)
        self._check.whole("index_projection.weight", keys.weight, shape, self._value_dtype)
        self._check.whole("index_projection.norm", keys.norm, (width,), "float32")

    def _require_whole_tails(self, call: str) -> None:
        """Raises SchemaMismatch where groups cannot be closed from the tails."""
        layout = self._compressor
        if layout is not None and (layout.skips_last or not layout.gated):
            raise SchemaMismatch(
                f"{call} works from the tails, and those of layer {self.layer} leave out the last "
                f"token of a group: its groups close in append"
            )

    # ---- reads -------------------------------------------------------------------------------

    @in_turn
    def gather_compressed_kv(self, indices: Tensor, out: Tensor | None = None) -> Tensor:
        """Entries `indices` int32 [tokens, k] of each of the step's tokens, as values [tokens, k,
        head_dim]. K and V are this one tensor. An index below 0, or of an entry that the token
        cannot see, gives zeros; rows of padding tokens are unchanged."""
        batch = self._readable_batch()
        rows = batch.padded_tokens, "k"
        self._check.whole("indices", indices, rows, "int32", tensor_checks.OF_ROWS)
        shape = (*indices.shape, self._model.head_dim)
        out = self._result("out", out, shape, self._value_dtype)
        token = token_columns(batch.tokens)
        self.backend.gather_entries(
            self.read_classical_view().source,
            slot=token.slot,
            position=token.position,
            indices=indices,
            out=out,
        )
        return out

    @in_turn
    def gather_all_compressed_kv(
        self, out: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """All entries that each request's newest token sees, in order, into `out`, values
        [requests, n, head_dim], and how many, int32 [requests], at most n. The rest of `out` is
        unchanged."""
        batch = self._readable_batch()
        requests = batch.request_rows.shape[0]
        tensor_checks.is_tensor("out", out)
        if out.dim() != 3:
            raise InvalidInput(f"out has shape {list(out.shape)}, expected [requests, n, head_dim]")
        shape = (requests, out.shape[1], self._model.head_dim)
        out = self._result("out", out, shape, self._value_dtype)
        lengths = self._result("lengths", lengths, (requests,), "int32")
        request = request_columns(batch.request_rows)
        self.backend.gather_all_entries(
            self.read_classical_view().source,
            slot=request.slot,
            position=request.start + request.count - 1,
            out=out,
            lengths=lengths,
        )
        return out, lengths

    @in_turn
    def gather_swa_kv(
        self, out: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The window of each of the step's tokens, oldest first and its own row last, as values
        [tokens, window, head_dim], and how many rows, int32 [tokens]. Raises PlanError before
        `append` and in a batch of cut replays, whose windows are not gathered."""
        batch = self.open_batch()
        batch.written.require_written(self.layer)
        if batch.window_cut:
            raise PlanError("windows of a cut replay are not gathered: attend cuts them")
        shape = (batch.padded_tokens, self.schema.window, self._model.head_dim)
        out = self._result("out", out, shape, self._value_dtype)
        lengths = self._result("lengths", lengths, shape[:1], "int32")
        token = token_columns(batch.tokens)
        self.backend.gather_window(
            self.window_source(batch),
            batch=batch.request_rows,
            batch_row=token.batch_row,
            position=token.position,
            out=out,
            lengths=lengths,
        )
        return out, lengths

    @in_turn
    def select(
        self,
        q: Tensor,
        index_weights: Tensor,
        out: Tensor | None = None,
        *,
        rope: Tensor,
        prepared: bool = False,
        round_bf16: bool = True,
        top_k: int | None = None,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """The indexer's choice: for every token the exact `top_k` entries (default: the model's)
        by score, as int32 [tokens, top_k], ascending, ties to the lowest entry, followed by -1.

        `q` [tokens, index heads, index_dim] are raw projections and are **overwritten** by RoPE,
        Hadamard and the round trip through the index format, unless `prepared` says that this has
        been done. `index_weights` [tokens, index heads] are already scaled by (index heads *
        index_dim) ** -0.5. Both are bf16, or fp32 where the index format keeps fp32. `round_bf16`
        rounds scores as the model was trained; without, they are fp32. Index keys of the latent
        (V4.1) have no Hadamard, nor have queries.

        `candidates` int32 [tokens, candidate_blocks], if given, are written by a layer whose
        candidates others use, and read by those. They are valid only within one step. Raises
        SchemaMismatch on a layer without an indexer, InvalidInput, PlanError.
        """
        if self.memory.index_keys is None:
            self.read_indexer_view()
        if not self._has_indexer:
            self._refuse_selection()
        batch = self._readable_batch()
        if out is None:
            count = self._model.index_topk if top_k is None else require_count("top_k", top_k)
            shape = batch.tokens.shape[0], count
            out = torch.empty(shape, dtype=torch.int32, device=self._slot_arena.device)
        given = (q, index_weights, out, rope, candidates)
        # True does not count as 1 here
        call_key = ("select", batch.sizes, prepared, round_bf16, repr(top_k))
        build = partial(self._select_calls, batch, *given, prepared, round_bf16, top_k)
        self._repeated(batch, call_key, given, build)
        return out

    def _select_calls(
        self,
        batch: Batch,
        q: Tensor,
        index_weights: Tensor,
        out: Tensor,
        rope: Tensor,
        candidates: Tensor | None,
        prepared: bool,
        round_bf16: bool,
        top_k: int | None,
    ) -> list[partial[None]]:
        keys, model = self.memory.index_keys, self._model
        assert keys is not None
        rows, heads = batch.padded_tokens, model.index_heads
        if prepared is not False or round_bf16 is not True:
            require_flag("prepared", prepared)
            require_flag("round_bf16", round_bf16)
        count = model.index_topk if top_k is None else require_count("top_k", top_k)
        needed, dtype = (rows, "heads", model.index_dim), self._index_dtype
        self._check.whole("q", q, needed, dtype, tensor_checks.OF_ROWS)
        if q.shape[1] != heads:
            self._refuse_index_heads(q.shape[1])
        self._check.rows("index_weights", index_weights, (rows, heads), dtype, aligned=False)
        self._check.rope_table(rope)
        self._check.result("out", out, (rows, count), "int32")
        bounds = None
        if candidates is not None or self.schema.spec.candidates_of is not None:
            bounds = self._candidates(candidates, rows, count)
        selection = Selection(
            q=q,
            weights=index_weights,
            tokens=batch.tokens,
            keys=keys.source,
            top_k=count,
            out=out,
            workspace=self._workspace.select,
            round_bf16=round_bf16,
            tokens_per_request=max(1, batch.shape.most_tokens),
            max_visible=_visible(batch, keys.source.ratio),
            candidates=bounds,
        )
        calls = [partial(self.backend.select, selection)]
        if not prepared:
            prepare = partial(
                self.backend.prepare_index_queries,
                q,
                tokens=batch.tokens,
                rope=rope,
                record=self._index_format,
                out=q,
                transform=model.layers[self._owner].index_hadamard,
            )
            calls.insert(0, prepare)
        return calls

    def _refuse_selection(self) -> NoReturn:
        raise SchemaMismatch(
            f"layer {self.layer} has no indexer: it reads what layer {self.schema.spec.selector} "
            f"selected"
        )

    def _refuse_index_heads(self, heads: int) -> NoReturn:
        raise InvalidInput(
            f"q has {heads} index heads, the model has {self._model.index_heads}: every rank of a "
            f"model that is split by heads must choose the same entries, so gather the index "
            f"queries and index weights of all ranks before select"
        )

    def _candidates(self, blocks: Tensor | None, rows: int, top_k: int) -> Candidates:
        """What `select` does with candidate blocks on this layer, where the layer takes some or
        some are given. Raises InvalidInput."""
        source, model = self.schema.spec.candidates_of, self._model
        if blocks is None:
            raise InvalidInput(
                f"layer {self.layer} selects among the candidates of layer {source}: give the "
                f"tensor that its select filled in this step"
            )
        if source is None and self.layer not in model.candidate_sources:
            raise InvalidInput(
                f"layer {self.layer} neither gives candidates nor takes any: leave them out"
            )
        width, size = model.candidate_blocks, model.candidate_block_entries
        self._check.whole("candidates", blocks, (rows, "k"), "int32", tensor_checks.OF_ROWS)
        if blocks.shape[1] != width:
            raise InvalidInput(
                f"candidates have {blocks.shape[1]} columns, the model has {width} candidate blocks"
            )
        if source is not None and (width - 1) * size + 1 < top_k:
            raise InvalidInput(
                f"top_k={top_k} of {width} candidate blocks of {size} entries: only "
                f"{(width - 1) * size + 1} are visible for certain"
            )
        # tokens that see no more than top_k entries are not scored
        if source is None and width * size < top_k:
            raise InvalidInput(
                f"top_k={top_k} with {width} candidate blocks of {size} entries: blocks are "
                f"chosen by scores, which are made of tokens that see more than top_k entries, so "
                f"select at most {width * size}, or select twice, once without candidates"
            )
        return Candidates(blocks=blocks, block_entries=size, publish=source is None)

    @in_turn
    def attend(
        self,
        q: Tensor,
        sink: Tensor,
        indices: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        inverse_rope: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One softmax over window and entries, K = V: out [tokens, heads, head_dim] and the
        log-sum-exp of the logits fp32 [tokens, heads], without the sink.

        `q` [tokens, heads, head_dim] after RoPE (`dsv4.apply_rope`) is of the type of out: bf16, or
        fp32 where the formats keep fp32; `sink` fp32 [heads] joins the denominator. CSA layers read
        the entries in `indices` (of `select`), HCA layers all visible ones, SWA layers none. With
        `inverse_rope`, the layer's table, the output is rotated back. Raises InvalidInput, and
        PlanError before `append`, its own or that of the layer whose entries it reads.
        """
        batch = self._readable_batch()
        if not isinstance(q, Tensor) or q.is_nested:
            tensor_checks.is_tensor("q", q)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        given = (q, sink, indices, out, lse, inverse_rope)
        build = partial(self._attend_calls, batch, *given)
        self._repeated(batch, ("attend", batch.sizes), given, build)
        return out, lse

    def _attend_calls(
        self,
        batch: Batch,
        q: Tensor,
        sink: Tensor,
        indices: Tensor | None,
        out: Tensor,
        lse: Tensor,
        inverse_rope: Tensor | None,
    ) -> list[partial[None]]:
        spec, entries, rows = self.schema.spec, self.memory.entries, batch.padded_tokens
        self._check_queries(rows, q, sink, inverse_rope)
        if (indices is not None) != (spec.attention is AttentionType.CSA):
            self._refuse_indices(indices)
        if indices is not None:
            self._check.whole("indices", indices, (rows, "k"), "int32", tensor_checks.OF_ROWS)
        self._check.result("out", out, tuple(q.shape), self._value_dtype)
        self._check.result("lse", lse, tuple(q.shape[:2]), "float32")
        attention = Attention(
            q=q,
            sink=sink,
            tokens=batch.tokens,
            batch=batch.request_rows,
            window=self.window_source(batch),
            entries=None if entries is None else entries.source,
            indices=indices,
            out=out,
            lse=lse,
            inverse_rope=inverse_rope,
            workspace=self._workspace.attend,
            tokens_per_request=max(1, batch.shape.most_tokens),
            max_visible=_visible(batch, max(1, spec.ratio)),
            decoded=self._workspace.select,
            window_cut=batch.window_cut,
        )
        return [partial(self.backend.attend, attention)]

    def _refuse_indices(self, indices: Tensor | None) -> NoReturn:
        raise InvalidInput(
            f"layer {self.layer} is {self.schema.spec.attention}: "
            + ("give the indices of select" if indices is None else "it takes no indices")
        )

    @in_turn
    def attend_draft(
        self,
        kv: Tensor,
        q: Tensor,
        sink: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        *,
        weights: LayerWeights,
        inverse_rope: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A draft step of a DSpark layer: the batch's tokens, `draft_block` per request, are a
        draft past its length. Each query sees the window of the request's last token and all keys
        of the draft, later ones too. out and lse as of `attend`.

        `kv` and `weights` as in `append`: keys are rounded as records are, but not stored. The plan
        stays unwritten: `abandon` it when all draft layers have drafted. Three launches. Raises
        SchemaMismatch on other layers, PlanError, InvalidInput.
        """
        model = self._model
        if not self.schema.spec.draft or not model.draft_block:
            raise SchemaMismatch(f"layer {self.layer} does not draft several tokens")
        batch = self.open_batch()
        counts = batch.counts.tolist()
        if (
            batch.written.touched
            or batch.part is not None
            or any(count != model.draft_block for count in counts)
        ):
            raise PlanError(
                f"a draft step has {model.draft_block} tokens of every request and stores nothing: "
                f"prepare a plan for it alone, of requests that are to draft"
            )
        if batch.written.window_lost:
            raise PlanError(
                "the oldest window row that a draft reads was overwritten by tokens that were "
                "rejected or taken back: run a token first, or build the schema with a greater "
                "ring_rows"
            )
        tensor_checks.layer_weights(weights)
        workspace = self._workspace
        self._check_queries(batch.padded_tokens, q, sink, inverse_rope)
        window = replace(
            self._window_write(batch, kv, weights),
            window=self.schema.window + model.draft_block,
            staging=workspace.staging,
            staging_page=workspace.staging_page,
            keep=False,
        )
        step = self._step_tensors(batch, weights)
        out = self._result("out", out, tuple(q.shape), self._value_dtype)
        lse = self._result("lse", lse, tuple(q.shape[:2]), "float32")
        self.backend.append(step, window, ())
        self.backend.attend(
            Attention(
                q=q,
                sink=sink,
                tokens=batch.tokens,
                batch=batch.request_rows,
                window=WindowSource(
                    arena=workspace.staging,
                    page=workspace.staging_page,
                    window=window.window,
                    staged=True,
                ),
                entries=None,
                indices=None,
                out=out,
                lse=lse,
                inverse_rope=inverse_rope,
                workspace=workspace.attend,
                joint=True,
            )
        )
        return out, lse

    def window_source(self, batch: Batch) -> WindowSource:
        """Where the window rows of a batch are: the ring, or for a prefill batch the staging."""
        return WindowSource(
            arena=self._slot_arena if batch.is_decode else self._workspace.staging,
            page=self._window_page if batch.is_decode else self._workspace.staging_page,
            window=self.schema.window,
            staged=not batch.is_decode,
        )

    def _check_queries(
        self, rows: int, q: Tensor, sink: Tensor, inverse_rope: Tensor | None
    ) -> None:
        needed = rows, "heads", self._model.head_dim
        self._check.whole("q", q, needed, self._value_dtype, tensor_checks.OF_ROWS)
        self._check.whole("sink", sink, (q.shape[1],), "float32")
        if inverse_rope is not None:
            self._check.rope_table(inverse_rope)

    def _result(
        self, name: str, given: Tensor | None, shape: tuple[int, ...], dtype: str
    ) -> Tensor:
        """The caller's tensor, checked, or a new one."""
        if given is None:
            device = self._slot_arena.device
            return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        self._check.result(name, given, shape, dtype)
        return given

    # ---- batches -----------------------------------------------------------------------------

    def bind(self, batch: Batch | None) -> None:
        """Binds the handle to a batch, for this thread. Raises ThreadError while another thread
        uses the plan that the handle is bound to."""
        turn = self.turn
        turn.enter("acquire")
        self.batch, self.thread = batch, threading.get_ident()
        del turn.visits[turn.number]  # leave, without a call

    def open_batch(self) -> Batch:
        """The batch this handle is bound to. Raises PlanError if there is none or it is over."""
        batch = self.batch
        if batch is None:
            raise PlanError(f"layer {self.layer} is not bound to a plan: acquire it with a batch")
        if batch.done:
            raise PlanError("this plan is over: prepare a new one for each step")
        return batch

    def _decode_batch(self, call: str) -> Batch:
        batch = self.open_batch()
        if not batch.is_decode:
            raise PlanError(
                f"{call} works from the tails, which hold a group and the drafts, but a request "
                f"has {batch.shape.most_tokens} tokens in this step: use append for a chunk"
            )
        return batch

    def _unwritten_batch(self) -> Batch:
        batch = self.open_batch()
        batch.written.require_unwritten(self.layer)
        return batch

    def _readable_batch(self) -> Batch:
        """The bound batch, in which everything that this layer reads is stored, window rows and
        entries."""
        batch, owner = self.batch, self._owner
        if (  # the usual case in every step, without further calls
            batch is not None
            and not batch.done
            and batch.written.last == self.layer
            and owner in batch.written.stored
        ):
            return batch
        batch = self.open_batch()
        batch.written.require_readable(self.layer, owner)
        return batch


def _visible(batch: Batch, ratio: int) -> int | None:
    """A bound on the entries that a token of a prefill batch sees."""
    return None if batch.position_bound is None else batch.position_bound // ratio


_is_given: Any = partial(is_not, None)


def _tensors_of(weights: LayerWeights) -> tuple[Tensor | None, ...]:
    """The tensors of a layer's weights that a step uses."""
    main, index = weights.compressor, weights.index_compressor
    keys = weights.index_projection
    return (
        weights.rope,
        weights.kv_norm,
        *((None, None) if main is None else (main.ape, main.norm)),
        *((None, None) if index is None else (index.ape, index.norm)),
        *((None, None) if keys is None else (keys.weight, keys.norm)),
    )
