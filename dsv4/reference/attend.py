"""Sparse attention in plain PyTorch: one softmax over window rows and compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import Attention, EntrySource, WindowSource
from dsv4.ops.columns import token_columns
from dsv4.reference.gather import window_rows
from dsv4.reference.numerics import rotate, round_to
from dsv4.reference.pages import read_records


def attend(call: Attention) -> None:
    """Query after query; the workspace is not used."""
    for row, token in enumerate(map(token_columns, call.tokens.cpu().numpy())):
        slot, position, batch_row = int(token.slot), int(token.position), int(token.batch_row)
        if slot < 0:
            continue
        keys = _window_keys(call.window, call.batch, position, batch_row)
        if call.entries is not None:
            named = None if call.indices is None else call.indices[row]
            keys = torch.cat((keys, _entry_keys(call.entries, named, slot, position)))
        result, call.lse[row] = _softmax_sum(call.q[row], keys.float(), call.sink)
        if call.inverse_rope is not None:
            cos, sin = call.inverse_rope[position].chunk(2)
            result = rotate(result, cos, -sin)
        call.out[row] = result


def _softmax_sum(q: Tensor, keys: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """[heads, head_dim] like `q` and fp32 [heads] of one query over fp32 `keys` [n, head_dim]."""
    if not len(keys):
        return torch.zeros_like(q), torch.full_like(sink, -torch.inf)
    logits = (q.float() @ keys.T) * q.shape[-1] ** -0.5
    top = logits.amax(dim=-1, keepdim=True)
    weights = torch.exp(logits - top)
    total = weights.sum(dim=-1, keepdim=True)
    summed = round_to(weights, q.dtype).float() @ keys
    result = summed / (total + torch.exp(sink[:, None] - top))
    return round_to(result, q.dtype), (top + torch.log(total)).squeeze(-1)


def _window_keys(window: WindowSource, batch: Tensor, position: int, batch_row: int) -> Tensor:
    """The visible window of a query, oldest first."""
    first = max(0, position - window.window + 1)
    seen = torch.arange(first, position + 1, device=window.arena.device)
    row = torch.tensor([batch_row], device=seen.device)
    arena_row, page_row = window_rows(window, batch[row].long(), row, seen[None])
    return read_records(window.arena, window.page, arena_row[0], page_row[0])


def _entry_keys(source: EntrySource, named: Tensor | None, slot: int, position: int) -> Tensor:
    """The visible entries of a query: all, or those named, in the order in which they are."""
    visible = (position + 1) // source.ratio
    if named is None:
        entry = torch.arange(visible, device=source.arena.device)
    else:
        entry = named[(named >= 0) & (named < visible)].long()
    block_id = source.block_table[slot, entry // source.page.rows].long()
    return read_records(source.arena, source.page, block_id, entry % source.page.rows)
