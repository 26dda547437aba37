"""The write path of one layer in plain PyTorch: window rows, tails, closed groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsv4.cache.pages import Page
from dsv4.ops.calls import CompressorWrite, StepTensors, WindowWrite
from dsv4.ops.columns import item_columns, request_columns, staged_row, token_columns
from dsv4.reference import online
from dsv4.reference.codec import VALUE_TYPES, encode
from dsv4.reference.numerics import gated_pool, hadamard, rms_norm, rotate, round_to
from dsv4.reference.pages import page_rows


def append(
    step: StepTensors, window: WindowWrite | None, compressors: Sequence[CompressorWrite]
) -> None:
    """Everything that one layer writes in a step. Groups are read before tails are overwritten."""
    if window is not None:
        append_window(step, window)
    for write in compressors:
        if write.compress:
            compress_groups(step, write)
        if write.write_tails and write.layout.online:
            online.write_states(step, write)
        elif write.write_tails:
            write_tails(step, write)


def append_window(step: StepTensors, window: WindowWrite) -> None:
    """Quantises the step's rows: the newest into the ring, at position modulo its length; all of a
    wide step's into the staging."""
    if window.staging is not None:
        stage_window(step, window)
    nth = torch.nonzero(token_columns(step.tokens).slot >= 0).flatten()
    token = token_columns(step.tokens[nth].long())
    rows = window.kv[nth]
    if window.norm is not None:
        rows = rms_norm(rows, window.norm, step.rms_eps)
        rows = rotate(rows, *_cos_sin(step.rope, token.position))
    ring_row = torch.where(token.kept == 1, token.position % window.page.rows, -1)
    write_records(step.slot_arena, window.page, token.slot, ring_row, rows)
    if window.staging is not None:
        assert window.staging_page is not None
        row = staged_row(nth, token.position, token.batch_row, token.position, window.window)
        write_records(window.staging, window.staging_page, torch.zeros_like(row), row, rows)


def stage_window(step: StepTensors, window: WindowWrite) -> None:
    """The window in front of each request's chunk, from the ring that the chunk will overwrite."""
    assert window.staging is not None
    assert window.staging_page is not None
    request = request_columns(step.batch.long()[:, None])  # columns [requests, 1]
    batch_row = torch.arange(step.batch.shape[0], device=step.batch.device)[:, None]
    position = request.start + torch.arange(1 - window.window, 0, device=step.batch.device)
    valid = (position >= 0) & (request.slot >= 0) & (request.count > 0)
    slot = request.slot.expand_as(position)[valid]
    row = staged_row(request.first_row, request.start, batch_row, position, window.window)[valid]
    ring_row = position[valid] % window.page.rows
    stored = page_rows(step.slot_arena, window.page)
    staged = page_rows(window.staging, window.staging_page)
    for source, target in zip(stored, staged, strict=True):
        target[0, row] = source[slot, ring_row]


def compress_groups(step: StepTensors, write: CompressorWrite) -> None:
    """Pools every group that the step closes, and stores entry or key in its block."""
    layout = write.layout
    item, entry, slot, start, first_row = _closed_groups(write)
    if not len(item):
        return
    if layout.online:
        pooled = online.pool_groups(step, write, entry, slot, start, first_row)
    else:
        values, logits, valid = _group_rows(step, write, entry, slot, start, first_row)
        pooled = gated_pool(values, logits, valid)
    pooled = round_to(pooled, VALUE_TYPES[layout.page.format.value_dtype])
    entries = rms_norm(pooled, write.norm, step.rms_eps)
    entries = rotate(entries, *_cos_sin(step.rope, entry * layout.ratio))
    if layout.hadamard:
        entries = hadamard(entries)
    if write.dense is not None:
        write.dense[item] = entries
        return
    block_id = step.block_table[slot, entry // layout.page.rows].long()
    write_records(step.block_arena, layout.page, block_id, entry % layout.page.rows, entries)


def write_tails(step: StepTensors, write: CompressorWrite) -> None:
    """The newest tokens' projections into the rings of the current and the previous stream."""
    layout = write.layout
    assert write.c is not None
    assert write.z is not None
    token = torch.nonzero(token_columns(step.tokens).slot >= 0).flatten()
    live = token_columns(step.tokens[token].long())
    slot, position = live.slot, live.position
    request = request_columns(step.batch[live.batch_row].long())
    end = request.start + request.count
    biased = write.z[token] + write.ape[position % layout.ratio]
    current = slice(layout.columns - layout.width, layout.columns)
    for rows, columns, k_offset, z_offset in (
        (layout.a_rows, current, layout.ka_offset_bytes, layout.za_offset_bytes),
        (layout.b_rows, slice(0, layout.width), layout.kb_offset_bytes, layout.zb_offset_bytes),
    ):
        if not rows:
            continue
        keep = position >= end - rows
        at = (slot[keep], position[keep] % rows)
        _ring(step.slot_arena, k_offset, rows, layout.width)[at] = write.c[token[keep]][:, columns]
        _ring(step.slot_arena, z_offset, rows, layout.width)[at] = biased[keep][:, columns]


def write_records(
    arena: Tensor, page: Page, arena_row: Tensor, page_row: Tensor, rows: Tensor
) -> None:
    """Row i of `rows`, of the format's value type, into row `page_row[i]` of the page in arena row
    `arena_row[i]`; where either is negative nothing is written."""
    live = torch.nonzero((arena_row >= 0) & (page_row >= 0)).flatten()
    arena_row, page_row, rows = arena_row[live], page_row[live], rows[live]
    for target, encoded in zip(page_rows(arena, page), encode(page.format, rows), strict=True):
        target[arena_row, page_row] = encoded


def _closed_groups(write: CompressorWrite) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Item, entry, slot, start and first token row of every group that ends inside the step."""
    items = item_columns(write.items.long()[:, None])  # columns [items, 1]
    nth = torch.arange(2, device=write.items.device)
    entry = items.entry + nth
    closed = (nth < items.entries) & ((entry + 1) * write.layout.ratio <= items.end)
    item, which = torch.nonzero(closed & (items.slot >= 0), as_tuple=True)
    closing = item_columns(write.items[item].long())
    return item, entry[item, which], closing.slot, closing.start, closing.first_row


def _group_rows(
    step: StepTensors,
    write: CompressorWrite,
    entry: Tensor,
    slot: Tensor,
    start: Tensor,
    first_row: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, biased logits and validity [groups, tokens pooled, …], previous stream first."""
    layout = write.layout
    streams = [(entry, layout.columns - layout.width, layout.a_rows, "a")]
    if layout.overlap:
        streams.insert(0, (entry - 1, 0, layout.b_rows, "b"))
    values, logits, valid = [], [], []
    for group, column, ring_rows, name in streams:
        position = group[:, None] * layout.ratio + torch.arange(layout.ratio, device=entry.device)
        k, z = _stream_rows(step, write, position, slot, start, first_row, column, ring_rows, name)
        values.append(k)
        logits.append(z)
        valid.append(position >= 0)
    return torch.cat(values, dim=1), torch.cat(logits, dim=1), torch.cat(valid, dim=1)


def _stream_rows(
    step: StepTensors,
    write: CompressorWrite,
    position: Tensor,
    slot: Tensor,
    start: Tensor,
    first_row: Tensor,
    column: int,
    ring_rows: int,
    stream: str,
) -> tuple[Tensor, Tensor]:
    layout = write.layout
    offsets = {
        "a": (layout.ka_offset_bytes, layout.za_offset_bytes),
        "b": (layout.kb_offset_bytes, layout.zb_offset_bytes),
    }[stream]
    stored = None
    if ring_rows:
        at = (slot[:, None], position % ring_rows)
        stored = [_ring(step.slot_arena, o, ring_rows, layout.width)[at] for o in offsets]
    if write.c is None or write.z is None:
        assert stored is not None
        return stored[0], stored[1]
    row = (first_row[:, None] + position - start[:, None]).clamp(0, write.c.shape[0] - 1)
    columns = slice(column, column + layout.width)
    fresh = [
        write.c[row][..., columns],
        (write.z[row] + write.ape[position % layout.ratio])[..., columns],
    ]
    if stored is None:
        return fresh[0], fresh[1]
    is_new = (position >= start[:, None]).unsqueeze(-1)
    return torch.where(is_new, fresh[0], stored[0]), torch.where(is_new, fresh[1], stored[1])


def _ring(slot_arena: Tensor, offset_bytes: int, rows: int, width: int) -> Tensor:
    return slot_arena.view(torch.float32).as_strided(
        (slot_arena.shape[0], rows, width),
        (slot_arena.stride(0) // 4, width, 1),
        offset_bytes // 4,
    )


def _cos_sin(table: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    rows = table[position]
    half = table.shape[-1] // 2
    return rows[..., :half], rows[..., half:]
