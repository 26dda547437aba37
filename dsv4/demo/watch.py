"""Watches every forward of a model while `generate` runs it, and makes an event of what the cache
did."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dsv4.cache.schema import CacheSchema
from dsv4.demo.events import CacheState, Emit, StepEvent
from dsv4.demo.state import cache_state
from dsv4.integrations.transformers import PagedCache, transformers_cache_bytes
from dsv4.integrations.transformers.model import cache_schema

TRAINED_RECORDS = "fp8_ds"

Decode = Callable[[Sequence[int]], str]


class Watcher:
    """Steps of one part of the demo. `transformers_bytes[step]` are those of transformers' own
    caches after each step: recorded where their cache is used, otherwise compared with."""

    def __init__(
        self,
        part: str,
        names: Sequence[str],
        emit: Emit,
        decode: Decode,
        transformers_bytes: Sequence[int] = (),
    ) -> None:
        self.part, self.names, self._emit, self._decode = part, names, emit, decode
        self.transformers_bytes = list(transformers_bytes)
        self.chosen: dict[str, list[int]] = {name: [] for name in names}
        self._records = not transformers_bytes
        self._step = 0
        self._state: CacheState | None = None
        self._trained: CacheSchema | None = None

    @contextmanager
    def watching(self, model: Any) -> Iterator[None]:
        hook = model.register_forward_hook(self._see)
        try:
            yield
        finally:
            hook.remove()

    def _see(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        cache = output.past_key_values
        if isinstance(cache, PagedCache):
            lengths = [request.length for request in cache.requests]
            if self._trained is None:
                most = cache.manager.schema.max_context
                self._trained = cache_schema(model, max_context=most, records=TRAINED_RECORDS)
            self._state = cache_state(cache.manager, cache.requests, self._state, self._trained)
        else:
            lengths = [cache.get_seq_length()] * len(self.names)
            if self._records:
                self.transformers_bytes.append(transformers_cache_bytes(cache))
        newest = torch.argmax(output.logits[:, -1], dim=-1).tolist()
        for name, token in zip(self.names, newest, strict=True):
            self.chosen[name].append(token)
        self._emit(
            StepEvent(
                part=self.part,
                step=self._step,
                lengths=dict(zip(self.names, lengths, strict=True)),
                chosen={name: list(tokens) for name, tokens in self.chosen.items()},
                said={name: self._decode(tokens) for name, tokens in self.chosen.items()},
                transformers_bytes=self.transformers_bytes[self._step],
                cache=self._state,
            )
        )
        self._step += 1
