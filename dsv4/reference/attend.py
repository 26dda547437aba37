"""Sparse attention in plain PyTorch: one softmax over window rows and compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import EntrySource, WindowSource
from dsv4.reference.gather import window_rows
from dsv4.reference.numerics import rotate, round_to
from dsv4.reference.pages import read_records


def attend(
    q: Tensor,
    sink: Tensor,
    *,
    tokens: Tensor,
    batch: Tensor,
    window: WindowSource,
    entries: EntrySource | None,
    indices: Tensor | None,
    out: Tensor,
    lse: Tensor,
    inverse_rope: Tensor | None,
    workspace: Tensor | None = None,
) -> None:
    """Attention of `q` [tokens, heads, head_dim] (after RoPE) into `out`, shaped and typed like it.

    `tokens` and `batch` are the step's index tensors (cache/step_buffers.py); rows of padding
    stay as they are in `out` and `lse`. A query sees its window and, of `entries`, those that
    `indices` int32 [tokens, k] names; without `indices` all that are visible. Indices that are
    negative or not visible are passed over; one named twice counts twice.

    Keys are values. With logits l = q·k / sqrt(head_dim) and M their maximum
        out = Σ exp(l - M) k / (Σ exp(l - M) + exp(sink - M))      sink fp32 [heads]
        lse = log Σ exp(l)                                         fp32 [tokens, heads], no sink
    in fp32, except that exp(l - M) is rounded to the type of `q` before it multiplies k, as
    DeepSeek's kernel does. `q` is of the value type of the records: bf16, or fp32 with fp32 ones.
    A query without any key gives 0 and -inf. With `inverse_rope`, the rotation table of the layer,
    the last channels of the rounded output are then turned back by the query's position and rounded
    again, as in DeepSeek's code. `workspace` is for the kernel and not used here.
    """
    for row, (slot, position, batch_row, _) in enumerate(tokens.tolist()):
        if slot < 0:
            continue
        keys = _window_keys(window, batch, position, batch_row)
        if entries is not None:
            named = None if indices is None else indices[row]
            keys = torch.cat((keys, _entry_keys(entries, named, slot, position)))
        result, lse[row] = _softmax_sum(q[row], keys.float(), sink)
        if inverse_rope is not None:
            cos, sin = inverse_rope[position].chunk(2)
            result = rotate(result, cos, -sin)
        out[row] = result


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
