"""Dequantising gathers in plain PyTorch: records back to vectors, in the order the caller asks for.

Results are of the value type of the records' format."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.ops.calls import EntrySource, WindowSource
from dsv4.ops.columns import request_columns, staged_row
from dsv4.reference.pages import read_records


def gather_entries(
    source: EntrySource, *, slot: Tensor, position: Tensor, indices: Tensor, out: Tensor
) -> None:
    live = torch.nonzero(slot >= 0).flatten()
    chosen = indices[live].long()
    visible = ((position[live].long() + 1) // source.ratio)[:, None]
    valid = (chosen >= 0) & (chosen < visible)
    entry = torch.where(valid, chosen, torch.zeros_like(chosen))
    owner = slot[live].long()[:, None].expand_as(entry)
    block = source.block_table[owner, entry // source.page.rows].long()
    block = torch.where(valid, block, torch.zeros_like(block))
    rows = read_records(source.arena, source.page, block, entry % source.page.rows)
    out[live] = torch.where(valid.unsqueeze(-1), rows, torch.zeros_like(rows))


def gather_all_entries(
    source: EntrySource, *, slot: Tensor, position: Tensor, out: Tensor, lengths: Tensor
) -> None:
    for row in torch.nonzero(slot >= 0).flatten().tolist():
        count = min(int(position[row] + 1) // source.ratio, out.shape[1])
        entry = torch.arange(count, device=out.device)
        block = source.block_table[slot[row], entry // source.page.rows].long()
        out[row, :count] = read_records(source.arena, source.page, block, entry % source.page.rows)
        lengths[row] = count


def gather_window(
    source: WindowSource,
    *,
    batch: Tensor,
    batch_row: Tensor,
    position: Tensor,
    out: Tensor,
    lengths: Tensor,
) -> None:
    for row in torch.nonzero(batch_row >= 0).flatten().tolist():
        newest = int(position[row])
        wanted = torch.arange(max(0, newest - source.window + 1), newest + 1, device=out.device)
        of_batch = batch_row[row : row + 1].long()
        arena_row, page_row = window_rows(source, batch[of_batch].long(), of_batch, wanted[None])
        out[row, : len(wanted)] = read_records(source.arena, source.page, arena_row, page_row)[0]
        lengths[row] = len(wanted)


def window_rows(
    source: WindowSource, batch: Tensor, batch_row: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Arena row and page row of window positions [rows, n] of the requests `batch`
    [rows, REQUEST_COLUMNS], which are rows `batch_row` of the step's."""
    request = request_columns(batch[:, None])  # columns [rows, 1]
    if not source.staged:
        return request.slot.expand_as(position), position % source.page.rows
    row = staged_row(request.first_row, request.start, batch_row[:, None], position, source.window)
    return torch.zeros_like(position), row
