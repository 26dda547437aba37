"""What a foreign kernel needs to read a layer: tensors, strides, and the map from positions to
rows. Views share the arenas' memory and are made once; reading one allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv4.cache.arena import LayerPlanes
from dsv4.cache.schema import Page


def page_tensor(arena_bytes: Tensor, page: Page) -> Tensor:
    """The page of every arena row as uint8 [rows, B, 1, record_bytes], FlashMLA's calling form.

    The strides say record_bytes a record, as FlashMLA asks, although data rows and scale rows lie
    apart (docs/layout.md); only dimension 0 may be indexed from Python.
    """
    record = page.format.record_bytes
    return arena_bytes.as_strided(
        (arena_bytes.shape[0], page.rows, 1, record),
        (arena_bytes.stride(0), record, record, 1),
        page.offset_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SWAView:
    """The window ring. Token position p of slot s is row p % ring_rows of page s; a query at t
    reads positions max(0, t - window + 1) .. t."""

    planes: LayerPlanes
    pages: Tensor
    page: Page
    ring_rows: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicalView:
    """Compressed entries. Entry e of slot s is row e % entries_per_block of page
    block_table[s, e // entries_per_block]; a query at t sees entries e < (t + 1) // ratio."""

    planes: LayerPlanes
    pages: Tensor
    page: Page
    block_table: Tensor
    ratio: int
    entries_per_block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerView:
    """Indexer keys, addressed like the entries. Data rows first, then scale rows, as DeepGEMM's
    paged index layout has them."""

    planes: LayerPlanes
    pages: Tensor
    page: Page
    block_table: Tensor
    ratio: int
    entries_per_block: int
