"""Rows of pages and rings in plain PyTorch: where their bytes are, and records decoded."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from dsv4.cache.pages import Page, Ring
from dsv4.reference.codec import decode


def page_rows(arena: Tensor, page: Page) -> tuple[Tensor, Tensor]:
    """Data rows and scale rows of a page in every arena row: uint8 [arena rows, page rows, bytes],
    sharing the arena's memory. A format without scales has rows of 0 bytes."""
    data_bytes, scale_bytes = page.format.data_row_bytes, page.format.scale_row_bytes
    data = _strided(arena, page.rows, data_bytes, page.offset_bytes)
    if not scale_bytes:
        return data, data[..., :0]
    return data, _strided(arena, page.rows, scale_bytes, page.scale_offset_bytes)


def ring_rows(slot_arena: Tensor, ring: Ring, *shape: int) -> Tensor:
    """A compressor's ring in every slot: fp32 [slots, ring rows, *shape], sharing the arena's
    memory."""
    rows = _strided(slot_arena, ring.rows, 4 * prod(shape), ring.offset_bytes)
    return rows.view(torch.float32).view(*rows.shape[:-1], *shape)


def read_records(arena: Tensor, page: Page, arena_row: Tensor, page_row: Tensor) -> Tensor:
    """The records at these places, decoded to [..., width]."""
    data, scales = page_rows(arena, page)
    return decode(page.format, data[arena_row, page_row], scales[arena_row, page_row])


def _strided(arena: Tensor, rows: int, width: int, offset_bytes: int) -> Tensor:
    return arena.as_strided(
        (arena.shape[0], rows, width),
        (arena.stride(0), width, 1),
        arena.storage_offset() + offset_bytes,
    )
