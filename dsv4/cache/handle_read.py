"""The reading half of a layer's handle: gathers, selection, attention."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache import checks
from dsv4.cache.handle_base import LayerAccess
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.errors import InvalidInput, PlanError
from dsv4.model import AttentionType
from dsv4.ops.calls import Attention, EntrySource, Selection, WindowSource


class LayerReads(LayerAccess):
    """Reads what the step's `append` has left. Nothing outside a request's length is read.

    "Values" are bf16, or fp32 where the format keeps fp32. With results given by the caller, calls
    allocate nothing and look at no length on the host.
    """

    def gather_compressed_kv(self, indices: Tensor, out: Tensor | None = None) -> Tensor:
        """Entries `indices` int32 [tokens, k] of each of the step's tokens, as values
        [tokens, k, head_dim]. K and V are this one tensor. An index below 0, or of an entry that
        the token cannot see, gives zeros; rows of padding tokens stay as they are."""
        plan = self._written_plan()
        width = self._model.head_dim
        device = indices.device
        checks.index_rows("indices", indices, plan.padded_tokens, self._slot_arena.device)
        shape = (*indices.shape, width)
        out = _result("out", out, shape, self._value_dtype, device)
        self.backend.gather_entries(
            self.entry_source(),
            slot=plan.tokens[:, 0],
            position=plan.tokens[:, 1],
            indices=indices,
            out=out,
        )
        return out

    def gather_all_compressed_kv(
        self, out: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """All entries that each request's newest token sees, in order, into `out`, values
        [requests, n, head_dim], and how many, int32 [requests], at most n. What lies behind them in
        `out` stays as it is."""
        plan = self._written_plan()
        requests = plan.batch.shape[0]
        if out.dim() != 3:
            raise InvalidInput(f"out has shape {list(out.shape)}, expected [requests, n, head_dim]")
        shape = (requests, out.shape[1], self._model.head_dim)
        out = _result("out", out, shape, self._value_dtype, self._slot_arena.device)
        lengths = _result("lengths", lengths, (requests,), "int32", out.device)
        self.backend.gather_all_entries(
            self.entry_source(),
            slot=plan.batch[:, 0],
            position=plan.batch[:, 1] + plan.batch[:, 2] - 1,
            out=out,
            lengths=lengths,
        )
        return out, lengths

    def gather_swa_kv(
        self, out: Tensor | None = None, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The window of each of the step's tokens, oldest first and its own row last, as values
        [tokens, window, head_dim], and how many rows, int32 [tokens]."""
        plan = self._written_plan()
        tokens, device = plan.padded_tokens, self._slot_arena.device
        shape = (tokens, self.schema.window, self._model.head_dim)
        out = _result("out", out, shape, self._value_dtype, device)
        lengths = _result("lengths", lengths, (tokens,), "int32", device)
        self.backend.gather_window(
            self.window_source(plan),
            batch=plan.batch,
            batch_row=plan.tokens[:, 2],
            position=plan.tokens[:, 1],
            out=out,
            lengths=lengths,
        )
        return out, lengths

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
    ) -> Tensor:
        """The indexer's choice: for every token the exact `top_k` entries (default: the model's)
        by score, as int32 [tokens, top_k], ascending, ties to the lowest entry, -1 behind them.

        `q` [tokens, index heads, index_dim] are raw projections and are **overwritten** by RoPE,
        Hadamard and the round trip through the index format, unless `prepared` says that this has
        been done. `index_weights` [tokens, index heads] are already scaled. Both are bf16, or fp32
        where the index format keeps fp32. `round_bf16` rounds scores as the model was trained;
        without, they are fp32.
        Raises SchemaMismatch on a layer without an indexer, InvalidInput, PlanError.
        """
        view = self.read_indexer_view()
        plan = self._written_plan()
        device, tokens = self._slot_arena.device, plan.padded_tokens
        count = self._model.index_topk if top_k is None else top_k
        if count < 1:
            raise InvalidInput(f"top_k={count}: select at least one entry")
        checks.heads("q", q, tokens, self._model.index_dim, self._index_dtype, device)
        checks.rows(
            "index_weights",
            index_weights,
            tokens,
            q.shape[1],
            self._index_dtype,
            device,
            aligned=False,
        )
        checks.rope_table(rope, self._model.rope_dim, self._max_context, device)
        out = _result("out", out, (tokens, count), "int32", device)
        keys = self.key_source()
        if not prepared:
            self.backend.prepare_index_queries(
                q, tokens=plan.tokens, rope=rope, record=view.page.format, out=q
            )
        self.backend.select(
            Selection(
                q=q,
                weights=index_weights,
                tokens=plan.tokens,
                keys=keys,
                top_k=count,
                out=out,
                workspace=self._workspace.select,
                round_bf16=round_bf16,
                tokens_per_request=max(1, plan.shape.most_tokens),
            )
        )
        return out

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

        `q` [tokens, heads, head_dim] after RoPE is of the type of out: bf16, or fp32 where the
        formats keep fp32; `sink` fp32 [heads] joins the denominator. CSA layers read the entries
        in `indices` (of `select`), HCA layers all visible ones, SWA layers none. With
        `inverse_rope`, the layer's table, the output is rotated back.
        Raises PlanError before `append`, InvalidInput.
        """
        plan = self._written_plan()
        device, tokens, spec = self._slot_arena.device, plan.padded_tokens, self.schema.spec
        checks.heads("q", q, tokens, self._model.head_dim, self._value_dtype, device)
        checks.vector("sink", sink, (q.shape[1],), device)
        if (indices is not None) != (spec.attention is AttentionType.CSA):
            raise InvalidInput(
                f"layer {self.layer} is {spec.attention}: "
                + ("give the indices of select" if indices is None else "it takes no indices")
            )
        if indices is not None:
            checks.index_rows("indices", indices, tokens, device)
        if inverse_rope is not None:
            checks.rope_table(inverse_rope, self._model.rope_dim, self._max_context, device)
        out = _result("out", out, tuple(q.shape), self._value_dtype, device)
        lse = _result("lse", lse, (tokens, q.shape[1]), "float32", device)
        self.backend.attend(
            Attention(
                q=q,
                sink=sink,
                tokens=plan.tokens,
                batch=plan.batch,
                window=self.window_source(plan),
                entries=self.entry_source() if spec.ratio else None,
                indices=indices,
                out=out,
                lse=lse,
                inverse_rope=inverse_rope,
                workspace=self._workspace.attend,
            )
        )
        return out, lse

    def entry_source(self) -> EntrySource:
        """Where this layer's entries are. Raises SchemaMismatch for a window-only layer."""
        view = self.read_classical_view()
        return EntrySource(
            arena=self._block_arena,
            page=view.page,
            block_table=self.block_table,
            ratio=view.ratio,
        )

    def key_source(self) -> EntrySource:
        """Where this layer's indexer keys are. Raises SchemaMismatch where there is no indexer."""
        view = self.read_indexer_view()
        return EntrySource(
            arena=self._block_arena,
            page=view.page,
            block_table=self.block_table,
            ratio=view.ratio,
        )

    def window_source(self, plan: ForwardPlan) -> WindowSource:
        """Where the window rows of a step are: the ring, or for a wide step the staging."""
        return WindowSource(
            arena=self._slot_arena if plan.narrow else self._buffers.staging,
            page=self._swa_view.page if plan.narrow else self._buffers.staging_page,
            window=self.schema.window,
            staged=not plan.narrow,
        )

    def _written_plan(self) -> ForwardPlan:
        plan = self.open_plan()
        if plan.last_appended != self.layer and (
            not plan.narrow or self.layer not in plan.appended_layers
        ):
            raise PlanError(
                f"layer {self.layer} reads before it has appended this plan"
                + ("" if plan.narrow else ", or after another layer reused the staged chunk")
                + ": call append first"
            )
        return plan


def _result(
    name: str,
    given: Tensor | None,
    shape: tuple[int, ...],
    dtype_name: str,
    device: torch.device,
) -> Tensor:
    """The caller's tensor, checked, or a new one."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        raise InvalidInput(
            f"{name} is {given.dtype} {list(given.shape)} on {given.device}, expected {dtype} "
            f"{list(shape)} on {device}"
        )
    checks.contiguous(name, given)
    return given
