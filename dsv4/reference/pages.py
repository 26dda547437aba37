"""Rows of pages and rings in plain PyTorch: where their bytes are, and records decoded."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dsv4.cache.pages import Page, Ring
from dsv4.ops.calls import EntrySource
from dsv4.reference.codec import decode


def page_rows(arena: Tensor, page: Page) -> tuple[Tensor, Tensor]:
    """Data rows and scale rows of a page in every arena row: uint8 [arena rows, page rows, bytes],
    sharing the arena's memory. A format without scales has rows of 0 bytes."""
    start, stride = arena.storage_offset(), arena.stride(0)

    def rows(width: int, each: int, offset: int) -> Tensor:
        shape = (arena.shape[0], page.rows, width)
        return arena.as_strided(shape, (stride, each, 1), start + offset)

    data = rows(page.data_row_bytes, page.data_stride_bytes, page.offset_bytes)
    if not page.scale_row_bytes:
        return data, data[..., :0]
    return data, rows(page.scale_row_bytes, page.scale_stride_bytes, page.scale_offset_bytes)


def ring_rows(slot_arena: Tensor, ring: Ring, *shape: int) -> Tensor:
    """A compressor's ring in every slot: fp32 [slots, ring rows, *shape], sharing the arena's
    memory."""
    width = 4 * prod(shape)
    rows = slot_arena.as_strided(
        (slot_arena.shape[0], ring.rows, width),
        (slot_arena.stride(0), width, 1),
        slot_arena.storage_offset() + ring.offset_bytes,
    )
    return rows.view(torch.float32).view(*rows.shape[:-1], *shape)


def read_records(arena: Tensor, page: Page, arena_row: Tensor, page_row: Tensor) -> Tensor:
    """The records at the given places, decoded to [..., width]."""
    record, stride, found = page.format, arena.stride(0), []
    last = (arena.shape[0] - 1) * stride + arena.shape[1]
    for width, each, first in (
        (record.data_row_bytes, page.data_stride_bytes, page.offset_bytes),
        (record.scale_row_bytes, page.scale_stride_bytes, page.scale_offset_bytes),
    ):
        # rows that begin at any byte of the page: torch copies whole rows many times faster than
        # it indexes by two tensors
        rows = arena.as_strided(
            (max(0, last - first - width + 1), width), (1, 1), arena.storage_offset() + first
        )
        at = torch.add(page_row * each, arena_row, alpha=stride)
        found.append(rows.index_select(0, at.flatten()).view(*at.shape, width))
    return decode(record, *found)


def read_entries(source: EntrySource, slot: Tensor, entry: Tensor) -> Tensor:
    """Entries of slots (int64 of the same shape, or one slot for all), decoded to [..., width]."""
    rows = source.page.rows
    block_id = source.block_table[slot, torch.div(entry, rows, rounding_mode="floor")].long()
    return read_records(source.arena, source.page, block_id, entry % rows)
