"""DeepSeek-V4 of Hugging Face transformers on this cache."""

from dsv4.integrations.transformers.accelerate import accelerate, restore
from dsv4.integrations.transformers.engine import Engine, Job
from dsv4.integrations.transformers.paged_cache import PagedCache, transformers_cache_bytes
from dsv4.integrations.transformers.speculation import speculation

__all__ = [
    "Engine",
    "Job",
    "PagedCache",
    "accelerate",
    "restore",
    "speculation",
    "transformers_cache_bytes",
]
