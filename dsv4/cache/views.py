"""What a foreign kernel needs to read a layer: tensors, strides, and the map from positions to
rows. Views share the arenas' memory and are made once; reading one allocates nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from dsv4.cache.arena import LayerPlanes
from dsv4.cache.pages import Page
from dsv4.ops.calls import EntrySource


def page_tensor(arena_bytes: Tensor, page: Page) -> Tensor:
    """The page of every arena row as uint8 [rows, B, 1, record_bytes], FlashMLA's calling form.

    The strides say record_bytes per record, as FlashMLA requires, although data rows and scale rows
    lie separately (docs/layout.md); only dimension 0 may be indexed from Python. Where records are
    whole (`page_form="records"`, and entries that are kept apart) they do lie so.
    """
    record, stride = page.format.record_bytes, page.record_bytes
    return arena_bytes.as_strided(
        (arena_bytes.shape[0], page.rows, 1, record),
        (arena_bytes.stride(0), stride, stride, 1),
        page.offset_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SWAView:
    """The window ring. Token position p of slot s is row p % ring_rows of page s; a query at t
    reads positions max(0, t - window + 1) .. t."""

    planes: LayerPlanes
    pages: Tensor
    page: Page
    window: int

    @classmethod
    def of(cls, planes: LayerPlanes, arena_bytes: Tensor, page: Page, window: int) -> Self:
        pages = page_tensor(arena_bytes, page)
        return cls(planes=planes, pages=pages, page=page, window=window)

    @property
    def ring_rows(self) -> int:
        return self.page.rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntriesView:
    """Records that lie in blocks. Number e of slot s is row e % entries_per_block of page
    block_table[s, e // entries_per_block]; a query at t sees those with e < (t + 1) // ratio.
    `source` says the same to a backend."""

    planes: LayerPlanes
    pages: Tensor
    source: EntrySource

    @classmethod
    def of(cls, planes: LayerPlanes, source: EntrySource) -> Self:
        return cls(planes=planes, pages=page_tensor(source.arena, source.page), source=source)

    @property
    def page(self) -> Page:
        return self.source.page

    @property
    def block_table(self) -> Tensor:
        return self.source.block_table

    @property
    def ratio(self) -> int:
        return self.source.ratio

    @property
    def entries_per_block(self) -> int:
        return self.source.page.rows


class ClassicalView(EntriesView):
    """Compressed entries, the keys and values of attention. "Classical" is the original design's
    word for them: they are read like an ordinary KV cache, block by block."""

    __slots__ = ()


class IndexerView(EntriesView):
    """Indexer keys, addressed like the entries. Data rows first, then scale rows, as in DeepGEMM's
    paged index layout."""

    __slots__ = ()
