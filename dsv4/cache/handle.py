"""One layer's view of the cache for one call: what engines hold inside their attention layer."""

from __future__ import annotations

from dsv4.cache.handle_read import LayerReads
from dsv4.cache.handle_write import LayerWrites


class LayerCacheHandle(LayerWrites, LayerReads):
    """Made once a layer by the manager and handed out by `acquire`, which binds it to a plan.

    The fast path of a step is `append`, then `select` on CSA layers, then `attend`.
    """
