"""dsv4: the KV cache for DeepSeek-V4 inference.

Everything an engine needs has its name here. Importing the package loads no torch: sizing and
planning work without it. A name loads its module when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.cache.batch import Batch
    from dsv4.cache.build import Cache, manager_from_budget, manager_from_memory, other_bytes
    from dsv4.cache.handle import LayerCacheHandle
    from dsv4.cache.handoff.arrival import Arrival
    from dsv4.cache.handoff.options import HandoffOptions
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.prefix.explain import Explainer, Explanation
    from dsv4.cache.prefix.hints import Hints
    from dsv4.cache.prefix.index import BlockEvent
    from dsv4.cache.prefix.options import PrefixOptions, SnapshotPolicy, full, periodic, zero
    from dsv4.cache.prefix.pins import PinnedPrefix
    from dsv4.cache.prefix.prefixes import Prompt
    from dsv4.cache.prefix.quota import Quota, QuotaUse
    from dsv4.cache.prefix.resume import Resume
    from dsv4.cache.prepare_forward import ForwardPlan
    from dsv4.cache.quotas import Quotas
    from dsv4.cache.requests import Request
    from dsv4.cache.schema import BlockBudget, CacheSchema, compute_block_budget
    from dsv4.cache.stats import MemoryBytes, PrefixStats, Stats
    from dsv4.errors import (
        ConfigError,
        ContextOverflow,
        CopyError,
        Dsv4Error,
        InvalidInput,
        MissingExtra,
        OfferError,
        OutOfBlocks,
        OutOfSlots,
        OverQuota,
        PlanError,
        PoolTooSmall,
        RecoveryNeeded,
        RequestError,
        SchemaError,
        SchemaMismatch,
        ThreadError,
        UnsupportedGpu,
    )
    from dsv4.events.publisher import EventPublisher
    from dsv4.metrics import ManagerCollector, prometheus_text
    from dsv4.model import AttentionType, LayerSpec, ModelSpec
    from dsv4.ops.calls import CompressorWeights, KeyProjection, LayerWeights
    from dsv4.rope import apply_rope, rope_table
    from dsv4.tiers.disk import DiskTier
    from dsv4.tiers.host import HostTier
    from dsv4.tiers.mooncake import MooncakeTier
    from dsv4.tiers.object import ObjectTier
    from dsv4.tiers.secret import read_key
    from dsv4.tiers.tier import Limits

__version__ = "0.3.0"

__all__ = [
    "Arrival",
    "AttentionType",
    "Batch",
    "BlockBudget",
    "BlockEvent",
    "Cache",
    "CacheSchema",
    "CompressorWeights",
    "ConfigError",
    "ContextOverflow",
    "CopyError",
    "DiskTier",
    "Dsv4Error",
    "EventPublisher",
    "Explainer",
    "Explanation",
    "ForwardPlan",
    "HandoffOptions",
    "Hints",
    "HostTier",
    "InvalidInput",
    "KVCacheManager",
    "KeyProjection",
    "LayerCacheHandle",
    "LayerSpec",
    "LayerWeights",
    "Limits",
    "ManagerCollector",
    "MemoryBytes",
    "MissingExtra",
    "ModelSpec",
    "MooncakeTier",
    "ObjectTier",
    "OfferError",
    "OutOfBlocks",
    "OutOfSlots",
    "OverQuota",
    "PinnedPrefix",
    "PlanError",
    "PoolTooSmall",
    "PrefixOptions",
    "PrefixStats",
    "Prompt",
    "Quota",
    "QuotaUse",
    "Quotas",
    "RecoveryNeeded",
    "Request",
    "RequestError",
    "Resume",
    "SchemaError",
    "SchemaMismatch",
    "SnapshotPolicy",
    "Stats",
    "ThreadError",
    "UnsupportedGpu",
    "__version__",
    "apply_rope",
    "compute_block_budget",
    "full",
    "manager_from_budget",
    "manager_from_memory",
    "other_bytes",
    "periodic",
    "prometheus_text",
    "read_key",
    "rope_table",
    "zero",
]

# what `from dsv4 import name` loads; the imports above declare the same names to type checkers
_HOMES = {
    "dsv4.cache.batch": ("Batch",),
    "dsv4.cache.build": ("Cache", "manager_from_budget", "manager_from_memory", "other_bytes"),
    "dsv4.cache.handle": ("LayerCacheHandle",),
    "dsv4.cache.handoff.arrival": ("Arrival",),
    "dsv4.cache.handoff.options": ("HandoffOptions",),
    "dsv4.cache.manager": ("KVCacheManager",),
    "dsv4.cache.prefix.explain": ("Explainer", "Explanation"),
    "dsv4.cache.prefix.index": ("BlockEvent",),
    "dsv4.cache.prefix.hints": ("Hints",),
    "dsv4.cache.prefix.options": ("PrefixOptions", "SnapshotPolicy", "full", "periodic", "zero"),
    "dsv4.cache.prefix.pins": ("PinnedPrefix",),
    "dsv4.cache.prefix.prefixes": ("Prompt",),
    "dsv4.cache.prefix.quota": ("Quota", "QuotaUse"),
    "dsv4.cache.prefix.resume": ("Resume",),
    "dsv4.cache.prepare_forward": ("ForwardPlan",),
    "dsv4.cache.quotas": ("Quotas",),
    "dsv4.cache.requests": ("Request",),
    "dsv4.cache.schema": ("BlockBudget", "CacheSchema", "compute_block_budget"),
    "dsv4.cache.stats": ("MemoryBytes", "PrefixStats", "Stats"),
    "dsv4.errors": (
        "ConfigError",
        "ContextOverflow",
        "CopyError",
        "Dsv4Error",
        "InvalidInput",
        "MissingExtra",
        "OfferError",
        "OutOfBlocks",
        "OutOfSlots",
        "OverQuota",
        "PlanError",
        "PoolTooSmall",
        "RecoveryNeeded",
        "RequestError",
        "SchemaError",
        "SchemaMismatch",
        "ThreadError",
        "UnsupportedGpu",
    ),
    "dsv4.events.publisher": ("EventPublisher",),
    "dsv4.metrics": ("ManagerCollector", "prometheus_text"),
    "dsv4.model": ("AttentionType", "LayerSpec", "ModelSpec"),
    "dsv4.ops.calls": ("CompressorWeights", "KeyProjection", "LayerWeights"),
    "dsv4.rope": ("apply_rope", "rope_table"),
    "dsv4.tiers.disk": ("DiskTier",),
    "dsv4.tiers.host": ("HostTier",),
    "dsv4.tiers.mooncake": ("MooncakeTier",),
    "dsv4.tiers.object": ("ObjectTier",),
    "dsv4.tiers.secret": ("read_key",),
    "dsv4.tiers.tier": ("Limits",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


# type checkers see only the declared names, so that a misspelt one is an error
if not TYPE_CHECKING:

    def __getattr__(name):
        if name not in _HOME_OF:
            raise AttributeError(f"module 'dsv4' has no attribute {name!r}")
        from importlib import import_module

        from dsv4.extras import needed_by

        with needed_by(f"dsv4.{name}"):
            value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value  # from now on found without this function
        return value


def __dir__() -> list[str]:
    return __all__
