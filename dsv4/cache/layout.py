"""The map of the arenas, which byte of a block and a slot is what: `lay_out` puts the pages and
planes of all layers one after the other. Sizing, views, kernels, checks and storage read where a
page begins from here; `pages.py` says where its planes lie in it, `state.py` where the rows lie
that a snapshot or a suspended request keeps. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, get_args

from dsv4.cache.pages import (
    ITEM_BYTES,
    ArenaName,
    CompressorKind,
    CompressorLayout,
    Page,
    PageForm,
    PageKind,
    Plane,
    Ring,
)
from dsv4.cache.records import RecordFormat
from dsv4.errors import InvalidInput, SchemaError
from dsv4.model import AttentionType

if TYPE_CHECKING:
    from dsv4.cache.schema import CacheSchema, LayerCacheSchema

BLOCK_ID_BYTES = 4
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheBytes:
    """How many bytes things have, of all layers together: a `block`, which is `block_tokens`
    tokens; a `slot`, what a request has outside of its blocks; a row of `entries`, what of one
    block is kept apart (0 where nothing is); a request's `block_table_row`."""

    block: int
    slot: int
    entries: int
    block_tokens: int
    block_table_row: int

    @property
    def per_token(self) -> float:
        """What one more token of context costs, alignment included (a whole block's share)."""
        return (self.block + self.entries) / self.block_tokens

    @property
    def per_request(self) -> int:
        """What a live request costs whatever its length: its slot and its row of block ids."""
        return self.slot + self.block_table_row

    def of_request(self, tokens: int) -> int:
        """All bytes of one request of that length."""
        blocks = -(-tokens // self.block_tokens)
        return self.per_request + blocks * (self.block + self.entries)


class Layout:
    """Of one schema: every page of a block and a slot, in the order of the bytes, and every plane,
    which is one kind of value of a page, with offset, rows and strides."""

    def __init__(self, pages: Sequence[Page], planes: Sequence[Plane], schema: CacheSchema) -> None:
        self.pages, self.planes = tuple(pages), tuple(planes)
        self._model, self._layers = schema.model, schema.layers
        self._pages = {(page.kind, page.layer): page for page in pages}
        self._planes = {(plane.name, plane.layer): plane for plane in planes}

    def __repr__(self) -> str:
        return f"Layout({len(self.pages)} pages, {len(self.planes)} planes)"

    def page(self, kind: PageKind, layer: int) -> Page | None:
        """The page of a kind that `layer` reads: its own, or its owner's for shared entries."""
        owner = layer if kind == "window" else self._model.layers[layer].owner
        return self._pages.get((kind, owner))

    def plane(self, name: str, layer: int) -> Plane | None:
        """The plane of that name that `layer` itself keeps."""
        return self._planes.get((name, layer))

    def compressor(self, layer: int, kind: CompressorKind) -> CompressorLayout | None:
        """The main compressor of a layer, which makes entries, or the indexer's ("index"), which
        makes index keys; None where the layer has none of its own. Raises InvalidInput."""
        if kind not in get_args(CompressorKind):
            raise InvalidInput(f"no compressor is called {kind!r}: ask for 'main' or 'index'")
        spec = self._layers[layer].spec
        indexer = kind == "index"
        page = self._pages.get(("index_keys" if indexer else "entries", layer))
        if page is None or (indexer and spec.index_keys != "compressor"):
            return None
        prefix = "index_tail" if indexer else "tail"
        return CompressorLayout(
            kind=kind,
            ratio=spec.ratio,
            overlap=spec.overlap,
            width=page.format.width,
            rope_dim=self._model.rope_dim,
            hadamard=indexer and spec.index_hadamard,
            page=page,
            gated=spec.gated,
            skips_last=self._layers[layer].tail_skips_last,
            key_page=None if indexer else self._latent_key_page(layer),
            **{
                name: self._ring(f"{prefix}_{name}", layer)
                for name in ("ka", "za", "kb", "zb", "state")
            },
        )

    def _latent_key_page(self, layer: int) -> Page | None:
        if self._layers[layer].spec.index_keys != "latent":
            return None
        return self._pages.get(("index_keys", layer))

    def _ring(self, plane_name: str, layer: int) -> Ring | None:
        plane = self.plane(plane_name, layer)
        return None if plane is None else Ring(offset_bytes=plane.offset_bytes, rows=plane.shape[0])


def lay_out(schema: CacheSchema) -> tuple[Layout, dict[ArenaName, int]]:
    """The layout, and the bytes of a row of each arena. Raises SchemaError."""
    pages: list[Page] = []
    planes: list[Plane] = []
    sizes: dict[ArenaName, int] = {"block": 0, "slot": 0, "entries": 0}
    for layer in schema.layers:
        kept: tuple[tuple[PageKind, int, RecordFormat], ...] = (
            ("entries", layer.entries_per_block, schema.entry_format),
            ("index_keys", layer.index_keys_per_block, schema.index_format),
        )
        for kind, rows, record in kept:
            if not rows:
                continue
            apart = kind == "entries" and _may_leave(schema, layer)
            arena: ArenaName = "entries" if apart else "block"
            form = "planes" if kind == "index_keys" else schema.page_form
            page = _page(kind, layer, sizes[arena], rows, record, form=form, apart=apart)
            sizes[arena] += _aligned(page.payload_bytes, schema.align_bytes)
            pages.append(page)
        page = _page(
            "window",
            layer,
            sizes["slot"],
            layer.ring_rows,
            schema.window_format,
            form=schema.page_form,
        )
        pages.append(page)
        sizes["slot"] += _aligned(page.payload_bytes, schema.align_bytes)
        for plane in _tail_planes(schema, layer, sizes["slot"]):
            planes.append(plane)
            sizes["slot"] += _aligned(plane.payload_bytes, schema.align_bytes)
    for page in pages:
        planes.extend(page.planes())
    for plane in planes:
        item = ITEM_BYTES[plane.dtype]
        if any(value % item for value in (plane.offset_bytes, *plane.strides_bytes)):
            raise SchemaError(
                f"{plane.name} of layer {plane.layer} would not be aligned to its {item}-byte "
                f"items: choose widths whose rows are multiples of {item} bytes"
            )
    planes.sort(key=lambda plane: (plane.arena, plane.offset_bytes))
    whole = {arena: _whole_records(schema, size, arena, pages) for arena, size in sizes.items()}
    return Layout(pages, planes, schema), whole


def _whole_records(
    schema: CacheSchema, row_bytes: int, arena: ArenaName, pages: Sequence[Page]
) -> int:
    """With the bytes that follow an arena's row so that the distance between two pages is a number
    of whole records: a kernel that counts records of `page_form` "records" asks for that."""
    if schema.page_form == "planes":
        return row_bytes
    own = [page for page in pages if page.form == "records" and page.arena == arena]
    unit = lcm(schema.align_bytes, *(page.record_bytes for page in own))
    return -(-row_bytes // unit) * unit


def _may_leave(schema: CacheSchema, layer: LayerCacheSchema) -> bool:
    """Whether the layer's entries are read by selection, and so are kept apart."""
    return schema.entries_apart and layer.spec.attention is AttentionType.CSA


def _page(
    kind: PageKind,
    layer: LayerCacheSchema,
    offset: int,
    rows: int,
    record: RecordFormat,
    *,
    form: PageForm,
    apart: bool = False,
) -> Page:
    return Page(
        kind=kind,
        layer=layer.spec.layer,
        offset_bytes=offset,
        rows=rows,
        format=record,
        apart=apart,
        form=form,
    )


def _tail_planes(schema: CacheSchema, layer: LayerCacheSchema, offset: int) -> Iterator[Plane]:
    """Unfinished groups: values (k) and gate logits (z) of the current (a) and previous (b)
    stream, for the main compressor and, where it has its own, for the indexer's. An online
    layer has instead, for each of its newest tokens, maximum, sum and weighted sum."""
    if layer.online:
        row_bytes = 3 * schema.model.head_dim * _FP32_BYTES
        yield Plane(
            name="tail_state",
            layer=layer.spec.layer,
            kind="tail",
            arena="slot",
            offset_bytes=offset,
            shape=(layer.state_rows, 3, schema.model.head_dim),
            strides_bytes=(row_bytes, row_bytes // 3, _FP32_BYTES),
            dtype="float32",
        )
        return
    compressors = [("tail", schema.model.head_dim)]
    if layer.spec.index_keys == "compressor" and layer.spec.owns_entries:
        compressors.append(("index_tail", schema.model.index_dim))
    for kind, width in compressors:
        for stream, rows in (("a", layer.tail_a_rows), ("b", layer.tail_b_rows)):
            for value in ("k", "z"):
                if not rows:
                    continue
                plane = Plane(
                    name=f"{kind}_{value}{stream}",
                    layer=layer.spec.layer,
                    kind=kind,
                    arena="slot",
                    offset_bytes=offset,
                    shape=(rows, width),
                    strides_bytes=(width * _FP32_BYTES, _FP32_BYTES),
                    dtype="float32",
                )
                yield plane
                offset += _aligned(plane.payload_bytes, schema.align_bytes)


def _aligned(count_bytes: int, align_bytes: int) -> int:
    return -(-count_bytes // align_bytes) * align_bytes
