"""Empty caches of transformers' own that are passed in, as generate makes them."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers.cache_utils import Cache

from dsv4.integrations.transformers.paged_cache import PagedCache

# what a Cache does by itself, and not through its layers
_VERBS = (
    *("crop", "reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"),
    *("activate_past_recording", "__deepcopy__"),
)


class StandIns:
    """Which cache of ours an object of transformers stands for. From its first call on it says and
    does what ours does, so that whoever passes it again, or asks it for its length, finds the
    conversation there; it keeps ours alive."""

    def __init__(self) -> None:
        self._ours: WeakKeyDictionary[Cache, tuple[PagedCache, Any]] = WeakKeyDictionary()

    def get(self, given: Any) -> Any:
        """Ours, or what was given."""
        if isinstance(given, Cache) and given in self._ours:
            return self._ours[given][0]
        return given

    def add(self, given: Any, cache: PagedCache) -> None:
        """`given`, if it is an empty cache of transformers', stands for ours."""
        if given is None or isinstance(given, PagedCache) or given in self._ours:
            return
        self._ours[given] = cache, given.layers
        given.layers = cache.layers
        for verb in _VERBS:
            setattr(given, verb, getattr(cache, verb))

    def remove(self, cache: PagedCache) -> None:
        """Those that stand for this cache are what they were."""
        for given, (ours, layers) in list(self._ours.items()):
            if ours is cache:
                del self._ours[given]
                given.layers = layers
                for verb in _VERBS:
                    delattr(given, verb)
