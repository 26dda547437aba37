"""From a model's name, an amount of memory or a budget to a manager, each in one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypedDict, Unpack, cast

from dsv4.cache import assembly
from dsv4.cache.manager import KVCacheManager
from dsv4.cache.options import ManagerOptions, refuse_unknown
from dsv4.cache.pages import PageForm
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.records import RecordFormat
from dsv4.cache.schema import BlockBudget, CacheSchema, HcaState
from dsv4.model import ModelSpec
from dsv4.units import parse_bytes, parse_tokens


class SchemaOptions(TypedDict, total=False):
    """Options of `CacheSchema.build`, except `max_context`, an argument of `Cache`, and
    `entries_apart`, which `host_memory` implies: type, and what it does."""

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
    page_form: Annotated[
        PageForm,
        'Where a record of a page is: "planes", data apart from scales, or "records", each whole.',
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
    return manager_from_memory(
        schema,
        memory_bytes=parse_bytes(memory),
        max_requests=max_requests,
        context=None if context is None else parse_tokens(context),
        **cast(Any, manager_options),
    )


def manager_from_memory(
    schema: CacheSchema,
    *,
    memory_bytes: int,
    max_requests: int,
    context: int | None = None,
    **options: Unpack[ManagerOptions],
) -> KVCacheManager:
    """A manager of this `schema`, with these `options`, that allocates no more than `memory_bytes`
    on its device in total: slots of `max_requests`, the block table, step buffers, workspace and
    snapshots, and blocks with what is left. With `host_memory` entries take no more than that of
    the host, and of the device what blocks leave.

    Raises PoolTooSmall, with the minimum, if one request of `context` tokens would not fit, and
    InvalidInput.
    """
    refuse_unknown("manager_from_memory", options, ManagerOptions.__annotations__)
    budget = assembly.budget_of(
        schema,
        memory_bytes=memory_bytes,
        max_requests=max_requests,
        context=context,
        options=options,
    )
    return manager_from_budget(schema, budget, **options)


def manager_from_budget(
    schema: CacheSchema, budget: BlockBudget, **options: Unpack[ManagerOptions]
) -> KVCacheManager:
    """A manager of this `schema` that allocates exactly `budget.total_bytes`: a budget that does
    not include what else these `options` need is refused. `manager_from_memory` computes one that
    does; with other accounting, build a manager with `budget.num_blocks`. Raises InvalidInput."""
    refuse_unknown("manager_from_budget", options, ManagerOptions.__annotations__)
    assembly.require_same(schema, budget, options)
    if budget.entry_rows:
        options.setdefault("entry_rows", budget.entry_rows)
    return KVCacheManager(
        schema,
        num_blocks=budget.num_blocks,
        max_requests=budget.max_requests,
        **options,
    )


def other_bytes(
    schema: CacheSchema, *, max_requests: int, **options: Unpack[ManagerOptions]
) -> int:
    """Bytes that a manager of this `schema`, for `max_requests` and with these `options`, allocates
    in addition to blocks, slots and block table: step buffers, workspace, snapshots. Allocates
    nothing on the device. Raises InvalidInput."""
    refuse_unknown("other_bytes", options, ManagerOptions.__annotations__)
    return assembly.other_bytes(schema, max_requests=max_requests, options=options)
