"""transformers' own cache layers, with every stored vector sent through a record format first, and
with beam reordering that moves all of their state (their own, before transformers 5.23, leaves the
compressors behind)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DeepseekV4ForCausalLM
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4CSACache,
    DeepseekV4HCACache,
)

from dsv4.cache.records import RecordFormat, entry_format, index_format
from dsv4.reference.codec import VALUE_TYPES, decode, encode


class _Rounding:
    """`formats` maps "window", "compressor" and "indexer" to a format, or to None for as it is."""

    _layer_type = None  # else the class would take its parent's place in transformers' registry
    formats: dict[str, RecordFormat | None]

    def _stored(self, name: str, x: Tensor) -> Tensor:
        record = self.formats[name]
        if record is None or not x.numel():
            return x
        return decode(record, *encode(record, x.to(VALUE_TYPES[record.value_dtype]))).to(x.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        stored = self._stored("window", key_states)
        return super().update(stored, stored, *args, **kwargs)  # type: ignore[misc]

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        return super().update_compressor_states(name, self._stored(name, compressed))  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        compressors = [each for each in vars(self).values() if isinstance(each, dict)]
        before = [dict(each) for each in compressors]
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        for states, was in zip(compressors, before, strict=True):
            for name, state in states.items():
                if isinstance(state, Tensor) and state is was[name]:
                    states[name] = state.index_select(0, beam_idx)


class _Sliding(_Rounding, DynamicSlidingWindowLayer):
    _layer_type = None


class _HCA(_Rounding, DeepseekV4HCACache):
    _layer_type = None


class _CSA(_Rounding, DeepseekV4CSACache):
    _layer_type = None


def rounding_cache(
    model: DeepseekV4ForCausalLM, records: str | None = None, index: str | None = None
) -> Cache:
    """A cache of transformers' own tensors, rounded as these formats do."""
    config = model.config
    entry = records and entry_format(records, head_dim=config.head_dim, rope_dim=16)
    key = index and index_format(index, index_dim=config.index_head_dim)
    formats = {"window": entry or None, "compressor": entry or None, "indexer": key or None}
    layers = []
    for kind in config.layer_types:
        if kind == "sliding_attention":
            layer: Any = _Sliding(sliding_window=config.sliding_window)
        else:
            layer = (_CSA if kind.startswith("compressed_sparse") else _HCA)(config)
        layer.formats = formats
        layers.append(layer)
    return Cache(layers=layers)
