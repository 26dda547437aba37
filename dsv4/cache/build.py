"""One call from a model's name and an amount of memory to a manager."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, cast

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.options import ManagerOptions, refuse_unknown
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.records import RecordFormat
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.model import ModelSpec
from dsv4.units import parse_bytes, parse_tokens


class SchemaOptions(TypedDict, total=False):
    """Options of `CacheSchema.build`, except `max_context` and `entries_apart`, which
    `host_memory` implies: type, and what it does."""

    block_tokens: Annotated[int, "Tokens of a block: a multiple of every compress ratio."]
    align_bytes: Annotated[int, "Where pages start: 32, or 576 where SM100's TMA asks for it."]
    ring_rows: Annotated[
        int | None, "Rows of the window ring. None: the fewest that the next two options allow."
    ]
    max_draft_tokens: Annotated[int, "Draft tokens of a step that may be rejected."]
    steps_ahead: Annotated[int, "Steps that may be planned before the results of one are known."]
    entry_format: Annotated[
        str | RecordFormat | None, "Record format of entries. None: that of the model's training."
    ]
    window_format: Annotated[
        str | RecordFormat | None,
        "Record format of the window. None: entry_format where given, else that of the training.",
    ]
    index_format: Annotated[str | RecordFormat, "Record format of index keys."]
    hca_state: Annotated[
        HcaState,
        'The unfinished group of HCA layers: "raw", each token of it, or "online", folded into a '
        "running softmax.",
    ]


class CacheOptions(SchemaOptions, ManagerOptions, total=False):
    """All options of `Cache`."""


_OWN_OPTIONS = ("memory", "max_requests", "max_context", "context")


def Cache(
    model: str | Path | ModelSpec,
    *,
    memory: int | str,
    max_requests: int = 32,
    max_context: int | str | None = None,
    context: int | str | None = None,
    **options: Unpack[CacheOptions],
) -> KVCacheManager:
    """A cache for a model that allocates no more than `memory` on its device: its schema, and a
    `KVCacheManager` with as many blocks as fit.

    `model` is the name of a preset, the path of a config.json, or a ModelSpec; `memory` bytes or
    "40GiB". `max_requests` may be live at once, each up to `max_context` tokens (default: all
    positions of the model); at least one of `context` tokens (default: `max_context`) must fit.
    Prompts with the same beginning share it; `prefix=None` switches that off. All other options are
    those of `CacheSchema.build` and `KVCacheManager`, which docs/reference/options.md lists; with
    `steps_ahead` as many plans may be open as that needs, and with `host_memory` entries may be in
    host memory. Raises ConfigError, SchemaError, PoolTooSmall (with the minimum), InvalidInput.
    """
    refuse_unknown("Cache", options, (*_OWN_OPTIONS, *CacheOptions.__annotations__))
    schema_options, manager_options = (
        {name: value for name, value in options.items() if name in kind.__annotations__}
        for kind in (SchemaOptions, ManagerOptions)
    )
    schema = CacheSchema.build(
        model if isinstance(model, ModelSpec) else ModelSpec.load(model),
        max_context=None if max_context is None else parse_tokens(max_context),
        entries_apart=options.get("host_memory") is not None,
        **cast(SchemaOptions, schema_options),
    )
    manager_options.setdefault("prefix", PrefixOptions())
    manager_options.setdefault("max_open_plans", 1 + schema.steps_ahead)
    return KVCacheManager.from_memory(
        schema,
        memory_bytes=parse_bytes(memory),
        max_requests=max_requests,
        context=None if context is None else parse_tokens(context),
        **cast(Any, manager_options),
    )
