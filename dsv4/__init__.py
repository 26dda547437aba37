"""dsv4: the KV cache for DeepSeek-V4 inference.

Importing the package loads no torch: sizing and planning work without it. Names that need torch are
loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "AttentionType": "dsv4.model",
    "LayerSpec": "dsv4.model",
    "ModelSpec": "dsv4.model",
    "CacheSchema": "dsv4.cache.schema",
    "compute_block_budget": "dsv4.cache.schema",
    "KVCacheManager": "dsv4.cache.manager",
    "PrefixOptions": "dsv4.cache.prefix.options",
    "Request": "dsv4.cache.requests",
    "Resume": "dsv4.cache.prefix.resume",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
