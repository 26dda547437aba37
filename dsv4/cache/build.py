"""One call from a model's name and an amount of memory to a manager."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import torch

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.options import PrefixOptions
from dsv4.cache.records import RecordFormat
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec
from dsv4.ops.backend import BackendName
from dsv4.units import parse_bytes, parse_tokens

if TYPE_CHECKING:
    from dsv4.cache.handoff.options import HandoffOptions
    from dsv4.tiers.tier import Tier


class SchemaOptions(TypedDict, total=False):
    """Those of `CacheSchema.build` but for `max_context`."""

    block_tokens: int
    align_bytes: int
    ring_rows: int | None
    max_draft_tokens: int
    steps_ahead: int
    entry_format: str | RecordFormat | None
    window_format: str | RecordFormat | None
    index_format: str | RecordFormat
    hca_state: HcaState


class ManagerOptions(TypedDict, total=False):
    """Those of `KVCacheManager` but for `prefix`."""

    max_step_tokens: int
    device: torch.device | str
    backend: BackendName | None
    max_open_plans: int
    tiers: Sequence[Tier]
    handoff: HandoffOptions | None
    batch_invariant: bool


class CacheOptions(SchemaOptions, ManagerOptions, total=False):
    """What else `Cache` takes."""


def Cache(
    model: str | Path | ModelSpec,
    *,
    memory: int | str,
    max_requests: int = 32,
    max_context: int | str | None = None,
    context: int | str | None = None,
    prefix: PrefixOptions | None = PrefixOptions(),  # noqa: B008  (frozen)
    **options: Unpack[CacheOptions],
) -> KVCacheManager:
    """A cache for a model that allocates no more than `memory` on its device: its schema, and a
    `KVCacheManager` with as many blocks as fit.

    `model` is the name of a preset, the path of a config.json, or a ModelSpec; `memory` bytes or
    "40GiB". `max_requests` may be alive at once, each up to `max_context` tokens (default: all that
    the model has positions for); one of `context` tokens (default: `max_context`) must fit at
    least. Prompts that begin alike share their beginning; `prefix=None` switches that off. All
    other options are those of `CacheSchema.build` and `KVCacheManager`; with `steps_ahead` as many
    plans may be open as that needs. Raises ConfigError, SchemaError, PoolTooSmall (with the least
    memory that would do), InvalidInput.
    """
    known = CacheOptions.__annotations__
    for name in options:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            raise InvalidInput(
                f"Cache has no option {name!r}: "
                + (f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}")
            )
    schema_options, manager_options = (
        {name: value for name, value in options.items() if name in kind.__annotations__}
        for kind in (SchemaOptions, ManagerOptions)
    )
    schema = CacheSchema.build(
        model if isinstance(model, ModelSpec) else ModelSpec.load(model),
        max_context=None if max_context is None else parse_tokens(max_context),
        **cast(SchemaOptions, schema_options),
    )
    manager_options.setdefault("max_open_plans", 1 + schema.steps_ahead)
    return KVCacheManager.from_memory(
        schema,
        memory_bytes=parse_bytes(memory),
        max_requests=max_requests,
        context=None if context is None else parse_tokens(context),
        prefix=prefix,
        **cast(Any, manager_options),
    )
