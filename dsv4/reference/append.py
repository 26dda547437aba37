"""The write path of one layer in plain PyTorch: window rows, tails, closed groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsv4.cache.pages import CompressorLayout, Page, Ring
from dsv4.ops.calls import CompressorWrite, StepTensors, WindowWrite
from dsv4.ops.columns import TokenColumns, request_columns, staged_row, token_columns
from dsv4.reference import online
from dsv4.reference.codec import VALUE_TYPES, encode
from dsv4.reference.groups import ClosedGroups, closed_groups
from dsv4.reference.numerics import (
    gated_pool,
    hadamard,
    project,
    rms_norm,
    rotate,
    round_to,
    to_bf16,
)
from dsv4.reference.pages import page_rows, ring_rows

PROJECTED_ROWS = 256  # entries at a time: each needs a hundred kilobytes of products


def append(
    step: StepTensors, window: WindowWrite | None, compressors: Sequence[CompressorWrite]
) -> None:
    live = torch.nonzero(step.tokens[:, 0] >= 0).flatten()
    token = token_columns(step.tokens[live].long())
    if window is not None:
        append_window(step, window, live, token)
    for write in compressors:
        if write.compress and write.items.shape[0]:
            compress_groups(step, write)
        if write.write_tails and write.layout.state is not None:
            online.write_states(step, write)
        elif write.write_tails:
            write_tails(step, write, live, token)


def append_window(
    step: StepTensors, window: WindowWrite, live: Tensor, token: TokenColumns
) -> None:
    """Quantises the step's rows: the newest go into the ring, at position modulo its length; all
    rows of a prefill step also go into the staging. `token` has the columns of the `live` rows."""
    if window.staging is not None:
        stage_window(step, window)
    rows = window.kv[live]
    if window.norm is not None:
        rows = rms_norm(rows, window.norm, step.rms_eps)
        rows = rotate(rows, *_cos_sin(step.rope, token.position))
    if window.keep:
        ring_row = torch.where(token.kept == 1, token.position % window.page.rows, -1)
        write_records(step.slot_arena, window.page, token.slot, ring_row, rows)
    if window.staging is not None:
        assert window.staging_page is not None
        row = staged_row(live, token.position, token.batch_row, token.position, window.window)
        write_records(window.staging, window.staging_page, torch.zeros_like(row), row, rows)


def stage_window(step: StepTensors, window: WindowWrite) -> None:
    """The window before each request's chunk, from the ring that the chunk will overwrite."""
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
    groups = closed_groups(write)
    if not groups.item.shape[0]:
        return
    if layout.state is not None:
        pooled = online.pool_groups(step, write, groups)
    elif layout.gated:
        pooled = gated_pool(*_group_rows(step, write, groups))
    else:
        pooled = _projections(write, groups)
    if layout.page.format.value_dtype == "bfloat16":
        pooled = to_bf16(pooled)
    latent = rms_norm(pooled, write.norm, step.rms_eps)
    entries = rotate(latent, *_cos_sin(step.rope, groups.entry * layout.ratio))
    if write.keys is not None:
        _write_keys(step, write, groups, latent)
    if layout.hadamard:
        entries = hadamard(entries)
    if write.dense is not None:
        write.dense[groups.item] = entries
        return
    _write_entries(step, layout.page, groups, entries)


def _write_keys(
    step: StepTensors, write: CompressorWrite, groups: ClosedGroups, latent: Tensor
) -> None:
    """Index keys of latents, the entries before their rotation."""
    page = write.layout.key_page
    assert page is not None
    assert write.keys is not None
    projected = [project(rows, write.keys.weight) for rows in latent.split(PROJECTED_ROWS)]
    keys = round_to(torch.cat(projected), VALUE_TYPES[page.format.value_dtype])
    keys = rms_norm(keys, write.keys.norm, step.rms_eps)
    keys = rotate(keys, *_cos_sin(step.rope, groups.entry * write.layout.ratio))
    _write_entries(step, page, groups, keys)


def _write_entries(step: StepTensors, page: Page, groups: ClosedGroups, rows: Tensor) -> None:
    block = torch.div(groups.entry, page.rows, rounding_mode="floor")
    arena, table = step.block_arena, step.block_table
    if page.apart:
        assert step.entries_arena is not None
        assert step.entry_table is not None
        arena, table = step.entries_arena, step.entry_table
    arena_row = table[groups.slot, block].long()
    write_records(arena, page, arena_row, groups.entry % page.rows, rows)


def write_tails(
    step: StepTensors, write: CompressorWrite, live: Tensor, token: TokenColumns
) -> None:
    """The newest tokens' projections into the rings of the current and the previous stream. `token`
    has the columns of the `live` rows."""
    layout, arena = write.layout, step.slot_arena
    if layout.ka is None and layout.kb is None:
        return
    assert write.c is not None
    assert write.z is not None
    values, biased = write.c[live], write.z[live]
    if write.ape is not None:
        biased = biased + write.ape[token.position % layout.ratio]
    batch = step.batch[token.batch_row].long()
    rank, last = token.position, batch[:, 1] + batch[:, 2]  # past the request's tokens
    if layout.skips_last:
        rank, last = _rank(layout, rank), _rank(layout, last)
    width, row_bytes, rows = layout.width, 4 * layout.width, 0
    for ring, new, first in (
        (layout.ka, values, values.shape[1] - width),
        (layout.za, biased, values.shape[1] - width),
        (layout.kb, values, 0),
        (layout.zb, biased, 0),
    ):
        if ring is None:
            continue
        if ring.rows != rows:
            rows = ring.rows
            # skips what a later token of the step would overwrite
            keep = rank >= last - rows
            if layout.skips_last:
                keep = keep & (token.position % layout.ratio != layout.ratio - 1)
            nth = torch.nonzero(keep).flatten()
            at = token.slot[nth], rank[nth] % rows
        target = arena.as_strided(
            (arena.shape[0], rows, row_bytes),
            (arena.stride(0), row_bytes, 1),
            arena.storage_offset() + ring.offset_bytes,
        )
        target.view(torch.float32)[at] = new[nth, first : first + width]


def _rank(layout: CompressorLayout, position: Tensor) -> Tensor:
    """A position's rank among the tokens that go to tails without the last one of each group."""
    return position - position // layout.ratio


def _biased(write: CompressorWrite, z: Tensor, position: Tensor) -> Tensor:
    return z if write.ape is None else z + write.ape[position % write.layout.ratio]


def write_records(
    arena: Tensor, page: Page, arena_row: Tensor, page_row: Tensor, rows: Tensor
) -> None:
    live = torch.nonzero((arena_row >= 0) & (page_row >= 0)).flatten()
    if live.shape[0] < rows.shape[0]:
        arena_row, page_row, rows = arena_row[live], page_row[live], rows[live]
    for target, encoded in zip(page_rows(arena, page), encode(page.format, rows), strict=True):
        rest = target.shape[-1] - encoded.shape[-1]  # of a whole record, after the last scale
        target[arena_row, page_row] = pad(encoded, (0, rest)) if rest else encoded


def _group_rows(
    step: StepTensors, write: CompressorWrite, groups: ClosedGroups
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, biased logits and validity [groups, tokens pooled, …], previous stream first."""
    layout = write.layout
    first = layout.width if layout.overlap else 0
    streams = [(groups.entry, slice(first, first + layout.width), layout.ka, layout.za)]
    if layout.overlap:
        streams.insert(0, (groups.entry - 1, slice(0, layout.width), layout.kb, layout.zb))
    place = torch.arange(layout.ratio, device=groups.entry.device)
    values, logits, valid = [], [], []
    for group, columns, k_ring, z_ring in streams:
        position = group[:, None] * layout.ratio + place
        fresh_k, fresh_z = _fresh_rows(write, groups, position, columns)
        values.append(_stream_rows(step, write, groups, position, k_ring, fresh_k))
        logits.append(_stream_rows(step, write, groups, position, z_ring, fresh_z))
        valid.append(position >= 0)
    return torch.cat(values, dim=1), torch.cat(logits, dim=1), torch.cat(valid, dim=1)


def _projections(write: CompressorWrite, groups: ClosedGroups) -> Tensor:
    """The tokens of groups of one, fp32 [groups, width]."""
    assert write.c is not None
    return write.c[groups.first_row + groups.entry - groups.start].float()


def _fresh_rows(
    write: CompressorWrite, groups: ClosedGroups, position: Tensor, columns: slice
) -> tuple[Tensor | None, Tensor | None]:
    """Values and biased logits of the step's own tokens; undefined for other positions."""
    if write.c is None or write.z is None:
        return None, None
    row = groups.first_row[:, None] + position - groups.start[:, None]
    row = row.clamp(0, write.c.shape[0] - 1)
    biased = _biased(write, write.z[row], position)
    return write.c[row][..., columns], biased[..., columns]


def _stream_rows(
    step: StepTensors,
    write: CompressorWrite,
    groups: ClosedGroups,
    position: Tensor,
    ring: Ring | None,
    fresh: Tensor | None,
) -> Tensor:
    """Rows [groups, ratio, width] of a tail's ring, or fresh ones from the step's first on."""
    if ring is None:
        assert fresh is not None
        return fresh
    rows = ring_rows(step.slot_arena, ring, write.layout.width)
    rank = _rank(write.layout, position) if write.layout.skips_last else position
    stored = rows[groups.slot[:, None], rank % ring.rows]
    if fresh is None:
        return stored
    return torch.where((position >= groups.start[:, None]).unsqueeze(-1), fresh, stored)


def _cos_sin(table: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    rows = table[position]
    half = table.shape[-1] // 2
    return rows[..., :half], rows[..., half:]
