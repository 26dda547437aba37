"""Sparse attention in plain PyTorch: one softmax over window rows and compressed entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dsv4.ops.calls import Attention, EntrySource, WindowSource
from dsv4.ops.columns import request_columns
from dsv4.reference.gather import window_rows
from dsv4.reference.numerics import rotate, round_to
from dsv4.reference.pages import read_records
from dsv4.reference.runs import Run, runs

# Records that the queries of one request share are read once for so many of them.
RUN_TOKENS = 64


def attend(call: Attention) -> None:
    """Query after query; the workspace is not used. Neighbours of a request share what they read
    and what is done number by number; sums and products are each query's own, so no bit of a
    result depends on the neighbours."""
    heads, width = call.q.shape[1:]
    for run in runs(call.tokens, RUN_TOKENS):
        rows = slice(run.rows.start, run.rows.stop)
        q = call.q[rows].float()
        top, total = q.new_empty(2, len(q), heads, 1)
        summed = torch.empty_like(q)
        for nth, keys in enumerate(_keys(call, run)):
            logits = (q[nth] @ keys.T).mul_(width**-0.5)
            torch.amax(logits, dim=-1, keepdim=True, out=top[nth])
            weights = logits.sub_(top[nth]).exp_()
            torch.sum(weights, dim=-1, keepdim=True, out=total[nth])
            torch.mm(weights.to(call.q.dtype).float(), keys, out=summed[nth])
        call.lse[rows] = (top + torch.log(total)).squeeze(-1)
        sinks = torch.exp(call.sink[:, None] - top)
        result = round_to(summed.div_(total + sinks), call.q.dtype)
        if call.inverse_rope is not None:
            cos, sin = call.inverse_rope[run.positions].unsqueeze(1).chunk(2, dim=-1)
            result = rotate(result, cos, -sin)
        call.out[rows] = result


def _keys(call: Attention, run: Run) -> Iterator[Tensor]:
    """fp32 [n, head_dim] of each query of a run, one or more: its window, oldest first, then the
    entries it sees, all of them or those named, in the order in which they are."""
    newest = run.positions
    if call.joint:
        request = request_columns(call.batch[run.batch_row])
        newest = [int(request.start + request.count) - 1] * len(newest)
    near, oldest = _window_keys(call.window, call.batch, run, newest)
    windows = [
        slice(max(0, position - call.window.window + 1) - oldest, position + 1 - oldest)
        for position in newest
    ]
    source, device = call.entries, near.device
    if source is None:
        yield from (near[window] for window in windows)
        return
    visible = [(position + 1) // source.ratio for position in run.positions]
    if call.indices is None:
        far = _entry_keys(source, run, torch.arange(max(visible), device=device))
        for window, count in zip(windows, visible, strict=True):
            yield torch.cat((near[window], far[:count]))
        return
    named = call.indices[run.rows.start : run.rows.stop]
    seen = (named >= 0) & (named < torch.tensor(visible, device=device)[:, None])
    entry = named[seen].long()
    if len(windows) == 1:
        yield torch.cat((near, _entry_keys(source, run, entry)))
        return
    read = torch.zeros(max(visible), dtype=torch.bool, device=device)
    read[entry] = True
    different = torch.nonzero(read).flatten()
    shared = torch.cat((near, _entry_keys(source, run, different)))
    place = torch.empty_like(read, dtype=torch.long)
    place[different] = torch.arange(len(near), len(shared), device=device)
    places = place[entry].split(torch.count_nonzero(seen, dim=1).tolist())
    of_window = torch.arange(len(near), device=device)
    for window, of_entries in zip(windows, places, strict=True):
        yield shared.index_select(0, torch.cat((of_window[window], of_entries)))


def _window_keys(
    window: WindowSource, batch: Tensor, run: Run, newest: Sequence[int]
) -> tuple[Tensor, int]:
    """fp32 rows of the windows of a run that end at `newest`, oldest first, and the position of the
    first."""
    oldest = max(0, min(newest) - window.window + 1)
    seen = torch.arange(oldest, max(newest) + 1, device=window.arena.device)
    row = torch.tensor([run.batch_row], device=seen.device)
    arena_row, page_row = window_rows(window, batch[row].long(), row, seen[None])
    return read_records(window.arena, window.page, arena_row[0], page_row[0]).float(), oldest


def _entry_keys(source: EntrySource, run: Run, entry: Tensor) -> Tensor:
    """fp32 rows of these entries."""
    block_id = source.block_table[run.slot, entry // source.page.rows].long()
    return read_records(source.arena, source.page, block_id, entry % source.page.rows).float()
