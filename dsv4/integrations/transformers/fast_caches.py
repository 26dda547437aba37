"""The caches that an accelerated model has given out, all on one manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from dsv4.cache.manager import KVCacheManager
from dsv4.errors import InvalidInput, RequestError
from dsv4.integrations.transformers.paged_cache import PagedCache
from dsv4.integrations.transformers.ranks import Ranks


class FastCaches:
    """One PagedCache a batch that is being generated. Rows come back when a cache is forgotten, or
    when a new batch needs them: then the caches that were not used for longest are closed."""

    def __init__(
        self,
        manager: KVCacheManager,
        model: Any,
        *,
        fetch_timeout_s: float,
        ranks: Ranks | None = None,
    ) -> None:
        self._manager, self._model, self._ranks = manager, model, ranks
        self._fetch_timeout_s = fetch_timeout_s
        self._last_use: WeakKeyDictionary[PagedCache, int] = WeakKeyDictionary()
        self._why_closed: WeakKeyDictionary[PagedCache, str] = WeakKeyDictionary()
        # empty caches of transformers' own that were passed in, as generate makes them
        self._stands_for: WeakKeyDictionary[Cache, PagedCache] = WeakKeyDictionary()
        self._uses = 0

    def find(self, given: Any, *, rows: int) -> PagedCache | None:
        """The cache that a call with `past_key_values=given` continues; None if it is a new one.
        Raises InvalidInput or RequestError for one that it cannot continue."""
        cache = self._stands_for.get(given, given) if isinstance(given, Cache) else given
        if not isinstance(cache, PagedCache):
            _check_empty(cache)
            return None
        self._check_ours(cache)
        cache.rows.check_batch(rows, "accelerate")
        return cache

    def open(
        self, given: Any, *, rows: int, prompts: Sequence[NDArray[np.int64]] | None = None
    ) -> PagedCache:
        """The same, made where there is none, with its rows open: for these prompts, if given."""
        cache = self.find(given, rows=rows)
        if cache is None:
            with torch.inference_mode(False):
                cache = PagedCache(
                    self._manager, self._model, fetch_timeout_s=self._fetch_timeout_s
                )
            if given is not None:
                self._stands_for[given] = cache
        if not cache.requests:
            self._open_rows(cache, rows, prompts)
        self._uses += 1
        self._last_use[cache] = self._uses
        return cache

    def _open_rows(
        self, cache: PagedCache, rows: int, prompts: Sequence[NDArray[np.int64]] | None
    ) -> None:
        def open_rows(reuse: bool) -> list[int]:
            self._make_room(rows)
            opened = cache.open_rows(rows, prompts if reuse else None)
            return [request.length for request in opened]

        if self._ranks is None:
            open_rows(True)
        else:
            self._ranks.open_alike(rows, open_rows, cache.reset)

    def discard(self, cache: PagedCache) -> None:
        """As if it had not been opened."""
        cache.reset()
        self._last_use.pop(cache, None)
        for given in [given for given, ours in self._stands_for.items() if ours is cache]:
            del self._stands_for[given]

    def close(self, cache: PagedCache, why: str) -> None:
        """Takes the rows back; from now on using the cache raises, and says why."""
        cache.reset()
        self._last_use.pop(cache, None)
        self._why_closed[cache] = why

    def _check_ours(self, cache: PagedCache) -> None:
        if cache.manager is not self._manager:
            raise InvalidInput(
                "this PagedCache has memory of its own, but an accelerated model keeps all rows in "
                "one: leave past_key_values out and pass on the cache that comes back"
            )
        if cache in self._why_closed:
            raise RequestError(f"the cache is closed: {self._why_closed[cache]}")

    def _make_room(self, rows: int) -> None:
        """Closes the caches used longest ago until `rows` rows are free."""
        in_use = [cache for cache in self._last_use if cache.requests]
        for cache in sorted(in_use, key=self._last_use.__getitem__):
            if self._manager.stats().slots_free >= rows:
                return
            self.close(
                cache,
                f"a newer batch needed its rows, and the model was accelerated for max_batch="
                f"{self._manager.max_requests} rows in all; accelerate with a larger max_batch to "
                f"keep several batches alive",
            )


def _check_empty(cache: Any) -> None:
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise InvalidInput(f"past_key_values is a {type(cache).__name__}: pass a cache, or nothing")
    if columns := cache.get_seq_length():
        raise InvalidInput(
            f"past_key_values is a {type(cache).__name__} with {columns} columns in it, which the "
            f"fast path cannot read: run the prompt with the accelerated model, or restore(model)"
        )
