"""Sparse attention in plain PyTorch: one softmax over window rows and compressed entries."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import Attention, EntrySource, WindowSource
from dsv4.reference.gather import window_rows
from dsv4.reference.numerics import rotate, round_to
from dsv4.reference.pages import read_records
from dsv4.reference.runs import Run, runs

# Records that the queries of one request share are read once for so many of them.
RUN_TOKENS = 64


def attend(call: Attention) -> None:
    """Query after query; the workspace is not used. Neighbours of a request share what they read,
    which changes no bit of a result."""
    for run in runs(call.tokens, RUN_TOKENS):
        near, oldest = _window_keys(call.window, call.batch, run)
        far, place = _entry_keys(call.entries, call.indices, run)
        for row, position in zip(run.rows, run.positions, strict=True):
            first = max(0, position - call.window.window + 1) - oldest
            keys = near[first : position + 1 - oldest]
            if call.entries is not None:
                visible = (position + 1) // call.entries.ratio
                if call.indices is None:
                    seen = far[:visible]
                else:
                    listed = call.indices[row]
                    seen = far[place[listed[(listed >= 0) & (listed < visible)].long()]]
                keys = torch.cat((keys, seen))
            result, call.lse[row] = _softmax_sum(call.q[row], keys, call.sink)
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


def _window_keys(window: WindowSource, batch: Tensor, run: Run) -> tuple[Tensor, int]:
    """fp32 rows of all windows of a run, oldest first, and the position of the first."""
    oldest = max(0, min(run.positions) - window.window + 1)
    seen = torch.arange(oldest, max(run.positions) + 1, device=window.arena.device)
    row = torch.tensor([run.batch_row], device=seen.device)
    arena_row, page_row = window_rows(window, batch[row].long(), row, seen[None])
    return read_records(window.arena, window.page, arena_row[0], page_row[0]).float(), oldest


def _entry_keys(
    source: EntrySource | None, indices: Tensor | None, run: Run
) -> tuple[Tensor, Tensor]:
    """fp32 entries that the queries of a run read: all that one of them sees, or those named; and
    where each entry is among them."""
    if source is None:
        return torch.empty(0), torch.empty(0)
    visible = (max(run.positions) + 1) // source.ratio
    entry = torch.arange(visible, device=source.arena.device)
    place = entry
    if indices is not None:
        named = indices[run.rows.start : run.rows.stop]
        entry = torch.unique(named[(named >= 0) & (named < visible)]).long()
        place = torch.zeros_like(place)
        place[entry] = torch.arange(len(entry), device=entry.device)
    block_id = source.block_table[run.slot, entry // source.page.rows].long()
    keys = read_records(source.arena, source.page, block_id, entry % source.page.rows)
    return keys.float(), place
