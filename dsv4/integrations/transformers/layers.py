"""Cache layers as transformers' V4 modules call them, over the planes and pages of one manager.

All rows of a batch have the same tokens here, so positions are the same in each: a step of n
columns starts at `rows.start`. What a module supplies is stored first and returned as stored.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from dsv4.cache.handle import LayerCacheHandle
from dsv4.cache.pages import Page
from dsv4.errors import InvalidInput
from dsv4.integrations.transformers.model import no_gradients
from dsv4.integrations.transformers.rows import CacheRows, uncompiled
from dsv4.reference.codec import VALUE_TYPES, decode, encode
from dsv4.reference.pages import page_rows, read_records

# transformers' names of the two compressors -> prefix of the tail planes
_TAILS = {"compressor": "tail", "indexer": "index_tail"}


class PagedLayer(CacheLayerMixin):
    """One layer: `update` for window rows, and for compressed layers the three calls of a
    compressor: store_compression_weights, update_overlap_state (CSA), update_compressor_states."""

    is_sliding = True
    is_croppable = True
    supports_early_init = False

    def __init__(self, rows: CacheRows, layer: int) -> None:
        # not transformers' constructor: it would set keys and values, which are read from the
        # arenas
        self.rows, self.layer = rows, layer
        handle = rows.manager.acquire(layer)
        self._arena = handle.memory.shared.slot_arena.bytes  # where the layer is
        self._window_page = handle.read_swa_view().page
        self._window = handle.schema.window
        self.compressors: dict[str, _Compressor] = {}
        entries = handle.memory.entries
        # of entries that may be in host memory only the fast path knows where they are
        if handle.memory.compressor is not None and entries is not None and not entries.page.apart:
            page = handle.read_classical_view().page
            self.compressors["compressor"] = _Compressor(rows, handle, "compressor", page)
        if handle.memory.index_compressor is not None:
            page = handle.read_indexer_view().page
            self.compressors["indexer"] = _Compressor(rows, handle, "indexer", page)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The arenas were allocated with the manager."""

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """KV [rows, 1, n, head_dim] of the step's tokens; returns the window before them and
        themselves, the same tensor twice: keys are values."""
        batch, columns, width = key_states.shape[0], key_states.shape[2], key_states.shape[3]
        if width != self._window_page.format.width:
            raise InvalidInput(
                f"KV of {width} channels in a cache of {self._window_page.format.width}: it was "
                f"made for another model"
            )
        if self.layer == 0:
            self.rows.begin_step(batch, columns)
        start, slots = self.rows.start, self.rows.slots[:, None]
        arena, page = self._arena, self._window_page
        past = torch.arange(max(0, start - self._window + 1), start, device=arena.device)
        before = read_records(arena, page, slots, past % page.rows)
        data, scales = _encoded(page, key_states[:, 0].to(arena.device))
        kept = min(columns, page.rows)
        ring_row = torch.arange(start + columns - kept, start + columns, device=arena.device)
        for target, new in zip(page_rows(arena, page), (data, scales), strict=True):
            target[slots, ring_row % page.rows] = new[:, columns - kept :]
        stored = torch.cat((before, decode(page.format, data, scales)), dim=1)
        stored = stored.to(key_states.device, key_states.dtype).unsqueeze(1)
        stored = no_gradients(stored, key_states, "train without past_key_values, use_cache=False")
        self.rows.layers_done = self.layer + 1
        return stored, stored

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The window in the form of transformers' own layer, [rows, 1, at most window - 1,
        head_dim], in the model's type: a copy, decoded from the ring. None before the first
        forward. Raises InvalidInput for padded rows, which have different windows."""
        rows, page = self.rows, self._window_page
        if not rows.requests:
            return None
        if set(lengths := rows.lengths) != {rows.columns}:
            raise InvalidInput(
                f"rows of {min(lengths)} to {max(lengths)} tokens have no keys of one shape: read "
                f"their windows with cache.manager.acquire(layer).gather_swa_kv"
            )
        arena = self._arena
        slots = torch.tensor([[request.slot] for request in rows.requests], device=arena.device)
        past = torch.arange(
            max(0, rows.columns - self._window + 1), rows.columns, device=arena.device
        )
        model = rows.model()
        found = read_records(arena, page, slots, past % page.rows).unsqueeze(1)
        return found if model is None else found.to(model.device, model.dtype)

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Keys are values."""
        return self.keys

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether there are `keys`."""
        return bool(self.rows.requests)

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise InvalidInput(
            "the rows of all layers are one: crop, reorder, select, repeat and reset the cache, "
            "not a layer of it; its bytes stay where they are"
        )

    crop = reset = reorder_cache = batch_select_indices = batch_repeat_interleave = _refuse
    offload = prefetch = _refuse

    @uncompiled
    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """Stores projections [rows, n, columns] of the step's tokens; returns those of all groups
        that are complete now, and the position of the first."""
        if name not in self.compressors:
            raise InvalidInput(
                "entries of this layer may be in host memory, where only the accelerated forward "
                "finds them: run the model with it, or accelerate it without host_memory"
            )
        return self.compressors[name].store_projections(kv, gate)

    @uncompiled
    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Values and biased gates [rows, ratio, head_dim] of the group before the first complete
        one; None if there is none. The groups of the step are in the tails already."""
        return self.compressors[name].previous_group()

    @uncompiled
    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Stores new entries [rows, n, width]; returns all entries so far."""
        return self.compressors[name].store_entries(compressed)

    @uncompiled
    def get_seq_length(self) -> int:
        return self.rows.columns

    @uncompiled
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """How many keys `update` will return for this many tokens, and the position of the
        first."""
        past = min(self.rows.columns, self._window - 1)
        return past + query_length, self.rows.columns - past

    def get_max_length(self) -> int:
        return self.rows.manager.schema.max_context

    @property
    def batch_size(self) -> int:
        """Rows in use, or the most there may be while none is."""
        return len(self.rows.requests) or self.rows.manager.memory.max_requests


class _Compressor:
    """One compressor's tails and pages. Tails hold unchanged projections, gates without bias: the a
    planes the current half of the columns, the b planes the previous half."""

    def __init__(self, rows: CacheRows, handle: LayerCacheHandle, name: str, page: Page) -> None:
        self.rows, self.layer, self.name, self.page = rows, handle.layer, name, page
        memory = handle.memory
        self.arena, self.block_table = memory.shared.block_arena.bytes, memory.shared.block_table
        self.ratio, self.width = handle.schema.spec.ratio, page.format.width
        views = memory.state.views
        planes = {
            stream: views.get(f"{_TAILS[name]}_{stream}") for stream in ("ka", "za", "kb", "zb")
        }
        # (values, gates) of each half of the columns, in their order
        self.streams = [
            (values, gates)
            for values, gates in ((planes["kb"], planes["zb"]), (planes["ka"], planes["za"]))
            if values is not None and gates is not None
        ]
        self._previous: tuple[Tensor, Tensor] | None = None

    def store_projections(self, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        start = self.rows.start
        first = start - start % self.ratio
        usable = (start - first + kv.shape[1]) // self.ratio * self.ratio
        # a long step overwrites what it reads, so it reads first
        self._previous = None
        if usable and first and len(self.streams) == 2:
            values, gates = self._read(self.streams[:1], first - self.ratio, first)
            self._previous = values.to(kv), gates.to(gate)
        full_kv, full_gate = kv, gate
        if start > first:
            values, gates = self._read(self.streams, first, start)
            full_kv = torch.cat((values.to(kv), kv), dim=1)
            full_gate = torch.cat((gates.to(gate), gate), dim=1)
        self._write(kv.detach(), gate.detach())
        return full_kv[:, :usable], full_gate[:, :usable], first

    def previous_group(self) -> tuple[Tensor | None, Tensor | None]:
        previous, self._previous = self._previous, None
        if previous is None:
            return None, None
        values, gates = previous
        return values, gates + self._position_bias()[:, : self.width]

    def store_entries(self, compressed: Tensor) -> Tensor:
        first = self.rows.start // self.ratio
        total = first + compressed.shape[1]
        if not total:
            return compressed
        page, arena, slots = self.page, self.arena, self.rows.slots[:, None]
        entry = torch.arange(total, device=arena.device)
        block = self.block_table[slots, entry // page.rows].long()
        row = entry % page.rows
        if total > first:
            encoded = _encoded(page, compressed.to(arena.device))
            for target, new in zip(page_rows(arena, page), encoded, strict=True):
                target[block[:, first:], row[first:]] = new
        return read_records(arena, page, block, row).to(compressed)

    def _read(
        self, streams: list[tuple[Tensor, Tensor]], first: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Values and gates [rows, tokens, columns of these streams], fp32."""
        slots = self.rows.slots[:, None]
        position = torch.arange(first, end, device=slots.device)
        found = [[plane[slots, position % plane.shape[1]] for plane in pair] for pair in streams]
        values, gates = zip(*found, strict=True)
        return torch.cat(values, dim=-1), torch.cat(gates, dim=-1)

    def _write(self, kv: Tensor, gate: Tensor) -> None:
        """Writes the newest tokens into the rings, as many as each holds."""
        columns, end = kv.shape[1], self.rows.start + kv.shape[1]
        slots = self.rows.slots[:, None]
        for half, pair in enumerate(self.streams):
            channels = slice(half * self.width, (half + 1) * self.width)
            for plane, new in zip(pair, (kv, gate), strict=True):
                kept = min(columns, plane.shape[1])
                position = torch.arange(end - kept, end, device=slots.device)
                plane[slots, position % plane.shape[1]] = new[:, columns - kept :, channels].to(
                    plane
                )

    def _position_bias(self) -> Tensor:
        model = self.rows.model()
        assert model is not None  # it is running
        compressor = model.model.layers[self.layer].self_attn.compressor
        module = compressor.indexer if self.name == "indexer" else compressor
        bias: Tensor = module.position_bias
        return bias


def _encoded(page: Page, values: Tensor) -> tuple[Tensor, Tensor]:
    return encode(page.format, values.detach().to(VALUE_TYPES[page.format.value_dtype]))
