"""Sparse attention in plain PyTorch: one softmax over window rows and compressed entries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from dsv4.ops.calls import Attention, EntrySource
from dsv4.ops.columns import request_columns, staged_row
from dsv4.reference.numerics import rotate, to_bf16
from dsv4.reference.pages import read_entries, read_records
from dsv4.reference.runs import Runs, runs

# Records that the queries of one request share are read once for this many of them.
RUN_TOKENS = 64
# Below every finite logit; -inf minus it is -inf.
LOWEST = torch.finfo(torch.float32).min
# Requests with one query each are read together, about this many records at a time.
MAX_RECORDS = 1 << 13


def attend(call: Attention) -> None:
    """Query after query; the workspace is not used. Queries share reads and elementwise operations;
    sums and products are each query's own, so no bit of a result depends on the neighbours."""
    width, found = call.q.shape[2], runs(call.tokens, RUN_TOKENS)
    for first, end in _parts(call, found):
        rows = slice(found.firsts[first], found.ends[end - 1])
        q = call.q[rows].float()
        top, total = q.new_empty(2, *q.shape[:2], 1).unbind()
        summed = torch.empty_like(q)
        near, windows = _window_keys(call, found, first, end)
        far, chosen = None, None
        if call.entries is not None:
            far, chosen = _entry_keys(call, call.entries, found, first, end)
        for nth, window in enumerate(windows):
            keys = near[window]
            if far is not None and chosen is not None:
                of = chosen[nth]
                seen = far.index_select(0, of) if isinstance(of, Tensor) else far[of]
                keys = torch.cat((keys, seen))
            logits = (q[nth] @ keys.T).mul_(width**-0.5)
            torch.amax(logits, dim=-1, keepdim=True, out=top[nth])
            # keys without weight are not keys: weights from 0 on, not from -inf
            weights = logits.sub_(top[nth].clamp_min(LOWEST)).exp_()
            torch.sum(weights, dim=-1, keepdim=True, out=total[nth])
            torch.mm(weights.to(call.q.dtype).float(), keys, out=summed[nth])
        call.lse[rows] = (top + torch.log(total)).squeeze(-1)
        sinks = torch.exp(call.sink[:, None] - top)
        # without a key the sink takes all the weight
        result = summed.div_(torch.where(total > 0, total + sinks, torch.inf))
        if call.q.dtype == torch.bfloat16:
            result = to_bf16(result)
        if call.inverse_rope is not None:
            table = call.inverse_rope[found.positions[rows]].unsqueeze(1)
            half = table.shape[-1] // 2
            result = rotate(result, table[..., :half], -table[..., half:])
        call.out[rows] = result


def _parts(call: Attention, found: Runs) -> list[tuple[int, int]]:
    """Which runs are read together: neighbours that have one query each, or one that has more."""
    parts, first, count = [], 0, len(found.firsts)
    while first < count:
        end, records = first + 1, 0
        row = found.firsts[first]
        while found.ends[end - 1] == row + 1:
            records += call.window.window
            if call.indices is not None:
                records += call.indices.shape[1]
            elif call.entries is not None:
                records += (found.positions[row] + 1) // call.entries.ratio
            row += 1
            is_next = end < count and found.firsts[end] == row and found.ends[end] == row + 1
            if not is_next or records >= MAX_RECORDS:
                break
            end += 1
        parts.append((first, end))
        first = end
    return parts


def _window_keys(call: Attention, found: Runs, first: int, end: int) -> tuple[Tensor, list[slice]]:
    """fp32 rows of the windows of some runs, and which of them each query sees, oldest first."""
    window, device = call.window, call.q.device
    newest = np.array(found.positions[found.firsts[first] : found.ends[end - 1]])
    of_batch = np.array(found.batch_rows[first:end])
    begin = np.zeros(1, dtype=np.int64)
    if window.staged:
        request = request_columns(call.batch.cpu().numpy()[of_batch].astype(np.int64))
        if call.joint:
            newest[:] = request.start + request.count - 1
        if call.window_cut:
            begin = request.start
    oldest = low = np.maximum(newest - (window.window - 1), begin)
    high = newest + 1
    if end - first == 1:  # windows of a run overlap
        low = np.minimum.reduce(low, keepdims=True)
        high = np.maximum.reduce(high, keepdims=True)
    counts = high - low
    ends = np.add.accumulate(counts)
    shift = ends - counts - low  # from positions to rows
    seen = np.arange(ends[-1]) - shift.repeat(counts)
    if window.staged:
        arena_row = np.zeros(len(seen), dtype=np.int64)
        page_row = staged_row(
            request.first_row.repeat(counts),
            request.start.repeat(counts),
            of_batch.repeat(counts),
            seen,
            window.window,
        )
    else:
        arena_row = np.array(found.slots[first:end]).repeat(counts)
        page_row = seen % window.page.rows
    places = torch.from_numpy(arena_row).to(device), torch.from_numpy(page_row).to(device)
    near = read_records(window.arena, window.page, *places).float()
    return near, [*map(slice, (oldest + shift).tolist(), (newest + 1 + shift).tolist())]


def _entry_keys(
    call: Attention, source: EntrySource, found: Runs, first: int, end: int
) -> tuple[Tensor, Sequence[slice | Tensor]]:
    """fp32 rows of entries that some runs see, and which of them belong to each query: all visible
    ones, or those that `indices` names, in that order."""
    rows, device = slice(found.firsts[first], found.ends[end - 1]), call.q.device
    visible = (np.array(found.positions[rows]) + 1) // source.ratio
    slots = np.array(found.slots[first:end])
    if call.indices is None:
        counts = visible
        if end - first == 1:
            counts = np.maximum.reduce(visible, keepdims=True)
        ends = np.add.accumulate(counts)
        begins = ends - counts
        entry = torch.from_numpy(np.arange(ends[-1]) - begins.repeat(counts)).to(device)
        slot = torch.from_numpy(slots.repeat(counts)).to(device)
        far = read_entries(source, slot, entry).float()
        return far, [*map(slice, (begins + 0 * visible).tolist(), (begins + visible).tolist())]
    named = call.indices[rows]
    if source.resolved:
        return _resolved_keys(source, named)
    seen = (named >= 0) & (named < torch.from_numpy(visible).to(device)[:, None])
    entry = named[seen].long()
    count = torch.count_nonzero(seen, dim=1)
    slot = torch.from_numpy(slots).to(device)
    if len(slots) == len(visible):
        ends = np.add.accumulate(count.cpu().numpy()).tolist()
        far = read_entries(source, slot.repeat_interleave(count), entry).float()
        return far, [*map(slice, [0, *ends], ends)]
    read = torch.zeros(int(visible.max()), dtype=torch.bool, device=device)
    read[entry] = True
    different = torch.nonzero(read).flatten()
    place = torch.empty_like(read, dtype=torch.long)
    place[different] = torch.arange(len(different), device=device)
    return read_entries(source, slot, different).float(), place[entry].split(count.tolist())


def _resolved_keys(source: EntrySource, named: Tensor) -> tuple[Tensor, Sequence[slice]]:
    """The same where indices say where entries lie."""
    seen = named >= 0
    ends = list(accumulate(torch.count_nonzero(seen, dim=1).tolist()))
    at = named[seen].long()
    row = torch.div(at, source.page.rows, rounding_mode="floor")
    far = read_records(source.arena, source.page, row, at % source.page.rows).float()
    return far, [*map(slice, [0, *ends], ends)]
