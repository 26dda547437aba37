"""The original design's fine-grained names, over the same pieces as `append`.

A decode step by hand: `append_swa`, `handle.write_tail`, then `maybe_flush_csa` or
`maybe_flush_hca`, which always make the same launches: kernels decide on the device what closes.
Only for decode batches (at most 1 + max_draft_tokens tokens per request); chunks go through
`append`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsv4.cache import tensor_checks
from dsv4.cache.handle import EntryRecords, LayerCacheHandle
from dsv4.cache.pages import CompressorLayout
from dsv4.errors import InvalidInput, SchemaMismatch
from dsv4.model import AttentionType
from dsv4.ops.calls import LayerWeights
from dsv4.ops.columns import item_columns


def append_swa(handle: LayerCacheHandle, kv: Tensor, weights: LayerWeights) -> None:
    """Quantises the step's `kv` rows [tokens, head_dim] into the window rings of their requests.

    RoPE channels keep their bits. A token's ring row follows from its position, so tokens of one
    launch never race, other requests' rings are left alone, and of more tokens than a ring has rows
    exactly the newest stay. Works for layers of every kind and for chunks. It does not write tails:
    `handle.write_tail` does, and `handle.append` does both in one launch.
    """
    handle.write_swa(kv, weights=weights)


def csa_compress_tail(
    handle: LayerCacheHandle, weights: LayerWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries [work items, head_dim], keys [work items, index_dim], and which rows are
    live, bool [work items]: the others are padding. Allocates its results; writes nothing to the
    cache."""
    _require(handle, AttentionType.CSA)
    main, index = handle.memory.compressor, handle.memory.index_compressor
    assert main is not None
    assert index is not None
    entries, keys = _dense(handle, main), _dense(handle, index)
    handle.compress_tail(main, weights, entries)
    handle.compress_tail(index, weights, keys)
    return entries, keys, _live_items(handle)


def hca_compress_tail(handle: LayerCacheHandle, weights: LayerWeights) -> tuple[Tensor, Tensor]:
    """Entries [work items, head_dim] and which rows are live, bool [work items]."""
    _require(handle, AttentionType.HCA)
    main = handle.memory.compressor
    assert main is not None
    entries = _dense(handle, main)
    handle.compress_tail(main, weights, entries)
    return entries, _live_items(handle)


def flush_write_csa(
    handle: LayerCacheHandle, entries: Tensor, keys: Tensor, valid_mask: Tensor
) -> None:
    """Quantises entries and keys into their blocks, except where `valid_mask` is false."""
    _require(handle, AttentionType.CSA)
    main, index = handle.memory.compressor, handle.memory.index_compressor
    assert main is not None
    assert index is not None
    for layout, rows in ((main, entries), (index, keys)):
        _check_flush(handle, layout, rows, valid_mask)
    handle.write_entries(
        (
            _records(handle, main, entries, valid_mask),
            _records(handle, index, keys, valid_mask),
        )
    )


def flush_write_hca(handle: LayerCacheHandle, entries: Tensor, valid_mask: Tensor) -> None:
    """Quantises entries into their blocks, except where `valid_mask` is false."""
    _require(handle, AttentionType.HCA)
    main = handle.memory.compressor
    assert main is not None
    _check_flush(handle, main, entries, valid_mask)
    handle.write_entries((_records(handle, main, entries, valid_mask),))


def maybe_flush_csa(handle: LayerCacheHandle, weights: LayerWeights) -> None:
    """Closes what ends in this step. Always called, always the same launch, no host branch."""
    _require(handle, AttentionType.CSA)
    handle.flush_compression(weights=weights)


def maybe_flush_hca(handle: LayerCacheHandle, weights: LayerWeights) -> None:
    """Closes what ends in this step. Always called, always the same launch, no host branch."""
    _require(handle, AttentionType.HCA)
    handle.flush_compression(weights=weights)


def csa_rotate_state(handle: LayerCacheHandle, slot: int, length: int) -> dict[str, Tensor]:
    """What the tails hold for a request of that length: `ka`, `za` the rows of the unfinished
    group, `kb`, `zb` those of the group before it.

    Rings are addressed by position, so a flush rotates the streams without moving a byte.
    """
    _require(handle, AttentionType.CSA)
    layer, start = handle.schema, length - length % handle.schema.spec.ratio
    current = _ring_rows(start, length, layer.tail_a_rows)
    previous = _ring_rows(max(0, start - layer.spec.ratio), start, layer.tail_b_rows)
    state = handle.memory.state
    return {
        "ka": state.tail_ka[slot, current],
        "za": state.tail_za[slot, current],
        "kb": state.tail_kb[slot, previous],
        "zb": state.tail_zb[slot, previous],
    }


def hca_reset_state(handle: LayerCacheHandle, slot: int, length: int) -> dict[str, Tensor]:
    """What the tail holds for a request of that length: the rows of the unfinished group, none
    right after a flush. No byte moves.

    With online state the tail has no rows: `state` [1 or 0, 3, head_dim] is their fold, running
    maximum, sum and weighted sum.
    """
    _require(handle, AttentionType.HCA)
    start = length - length % handle.schema.spec.ratio
    state = handle.memory.state
    if handle.schema.online:
        newest = _ring_rows(max(start, length - 1), length, handle.schema.state_rows)
        return {"state": state.tail_state[slot, newest]}
    current = _ring_rows(start, length, handle.schema.tail_a_rows)
    return {"ka": state.tail_ka[slot, current], "za": state.tail_za[slot, current]}


def _items(handle: LayerCacheHandle) -> Tensor:
    return handle.open_batch().items[handle.schema.spec.ratio]


def _live_items(handle: LayerCacheHandle) -> Tensor:
    live: Tensor = item_columns(_items(handle)).slot >= 0
    return live


def _check_flush(
    handle: LayerCacheHandle, layout: CompressorLayout, rows: Tensor, valid_mask: Tensor
) -> None:
    items = _items(handle)
    value_dtype = layout.page.format.value_dtype
    check = tensor_checks.TensorChecks(handle.memory.shared.schema, items.device)
    check.rows("rows", rows, (items.shape[0], layout.width), value_dtype)
    tensor_checks.is_tensor("valid_mask", valid_mask)
    if valid_mask.shape != items.shape[:1] or valid_mask.dtype != torch.bool:
        raise InvalidInput(
            f"valid_mask is {valid_mask.dtype} of shape {list(valid_mask.shape)}, the step has "
            f"{items.shape[0]} work items: give a bool for each"
        )


def _records(
    handle: LayerCacheHandle, layout: CompressorLayout, rows: Tensor, valid_mask: Tensor
) -> EntryRecords:
    """Where the rows of a step's work items go."""
    items = item_columns(_items(handle))
    entry = items.entry
    valid = valid_mask & (items.slot >= 0)
    table = handle.memory.shared.block_table
    block = table[items.slot.clamp_min(0), entry.clamp_min(0) // layout.page.rows]
    nowhere = torch.full_like(entry, -1)
    return EntryRecords(
        layout=layout,
        block_id=torch.where(valid, block, nowhere).long(),
        page_row=torch.where(valid, entry % layout.page.rows, nowhere).long(),
        rows=rows,
    )


def _dense(handle: LayerCacheHandle, layout: CompressorLayout) -> Tensor:
    items = _items(handle)
    dtype: torch.dtype = getattr(torch, layout.page.format.value_dtype)
    return torch.zeros((items.shape[0], layout.width), dtype=dtype, device=items.device)


def _ring_rows(first: int, last: int, rows: int) -> list[int]:
    return [position % rows for position in range(first, last)]


def _require(handle: LayerCacheHandle, attention: AttentionType) -> None:
    if handle.schema.spec.attention is not attention:
        raise SchemaMismatch(
            f"layer {handle.layer} is {handle.schema.spec.attention}, this call is for {attention}"
        )
