"""DeepSeek-V4 of Hugging Face transformers on this cache."""

from dsv4.errors import MissingExtra

try:
    import transformers.models.deepseek_v4 as _v4  # noqa: F401

    from dsv4.integrations.transformers.private import require_names

    require_names()  # before the modules that import these names are loaded
except MissingExtra:
    raise
except ImportError as error:
    raise MissingExtra(
        f"this integration needs transformers 5.17 or newer ({error}): install it with "
        f"pip install 'dsv4[transformers]'"
    ) from error

from dsv4.engine import Job
from dsv4.integrations.transformers.accelerate import accelerate, restore, speculation
from dsv4.integrations.transformers.cache import PagedCache, transformers_cache_bytes
from dsv4.integrations.transformers.engine import Engine

__all__ = [
    "Engine",
    "Job",
    "PagedCache",
    "accelerate",
    "restore",
    "speculation",
    "transformers_cache_bytes",
]
