"""Quotas: how many bytes of the cache a tenant may have. A tenant is a salt. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from dsv4.cache.allocator import BlockLimit, BlockSupply
from dsv4.cache.changes import changes
from dsv4.cache.prefix.eviction import KeepsApart
from dsv4.cache.prefix.quota import Quota, QuotaUse
from dsv4.cache.prefix.trail import token_ids
from dsv4.errors import InvalidInput, require_type

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.prefix.cache import PrefixCache


class LimitedTier(Protocol):
    """A tier that keeps quotas."""

    def limit(self, owner: bytes, most_bytes: int | None) -> None: ...

    def bytes_of(self, owner: bytes) -> int | None: ...


class Quotas:
    """The quotas of one manager, by salt; None stands for prompts without one. Any number of these
    objects show the same quotas.

    A salt that would have more than its quota gives up its own least valuable cached blocks first,
    and nothing of others; what its requests hold and what is pinned counts too. If that is not
    enough, the call that needs more raises OverQuota and has changed nothing. In a tier it gives up
    its own records that were used longest ago, and what still finds no room is not kept there.
    Where entries are in host memory, blocks count there too, and records give way to them.
    Requests without token ids have no salt, and count for none. The calls count as calls of the
    manager.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        parts = manager._parts
        self._prefix: PrefixCache = parts.prefix.required()
        self._manager, self._guard = manager, parts.guard
        self._supply: BlockSupply = parts.table.supply
        self._residency = parts.residency
        self._tiers: dict[str, list[LimitedTier]] = {}
        if manager.tiers:
            from dsv4.tiers.disk import DiskTier
            from dsv4.tiers.host import HostTier

            for name, kind in (("host_bytes", HostTier), ("disk_bytes", DiskTier)):
                self._tiers[name] = [each for each in manager.tiers.all if isinstance(each, kind)]

    def __repr__(self) -> str:
        return f"Quotas({len(self._supply.quotas)} salts)"

    @changes
    def set(self, salt: str | None, quota: Quota) -> QuotaUse:
        """From now on this is the quota of a salt. What it has above that and no request holds is
        evicted at once; the rest follows when its requests end. A tier on disk follows in a
        moment. Raises InvalidInput, also for a quota of a place where the manager keeps nothing, or
        of two tiers of a kind."""
        require_type("quota", quota, Quota)
        root = self._root(salt)
        self._require_tiers(quota)
        limit, limits = self._limit(salt, quota), self._supply.limits
        if limit is not None and root not in limits:
            self._keep_apart([*limits, root])
        self._supply.quotas[root] = salt, quota
        if limit is not None:
            limits[root] = limit
            self._supply.trim(root)
        elif limits.pop(root, None):
            self._keep_apart(limits)
        self._limit_tiers(root, quota)
        return self._use(root, salt)

    def get(self, salt: str | None) -> QuotaUse:
        """Its quota, and what it has. A salt without a quota has no limits."""
        return self._use(self._root(salt), salt)

    @changes
    def remove(self, salt: str | None) -> bool:
        """The salt has no quota any more. Returns whether it had one."""
        root = self._root(salt)
        if self._supply.limits.pop(root, None):
            self._keep_apart(self._supply.limits)
        self._limit_tiers(root, Quota())
        return self._supply.quotas.pop(root, None) is not None

    def all(self) -> tuple[QuotaUse, ...]:
        """Of each salt that has a quota, in the order in which they were set first."""
        known = tuple(self._supply.quotas.items())
        return tuple(self._use(root, salt) for root, (salt, _) in known)

    def _root(self, salt: str | None) -> bytes:
        """Where the digests of its prompts begin. Raises InvalidInput."""
        return self._prefix.trail(token_ids(()), salt).root

    def _limit(self, salt: str | None, quota: Quota) -> BlockLimit | None:
        """The tighter of the two that bound blocks."""
        schema, limits = self._manager.schema, list[BlockLimit]()
        if (most := quota.device_bytes) is not None:
            limits.append(BlockLimit(most // schema.bytes.block, salt, most, schema.bytes.block))
        if (most := quota.host_bytes) is not None and self._residency is not None:
            each = schema.bytes.entries
            limits.append(BlockLimit(most // each, salt, most, each, "host"))
        return min(limits, key=lambda limit: limit.blocks, default=None)

    def _require_tiers(self, quota: Quota) -> None:
        for name, word in (("host_bytes", "HostTier"), ("disk_bytes", "DiskTier")):
            count = len(self._tiers.get(name, ()))
            if name == "host_bytes" and self._residency is not None and not count:
                continue
            if getattr(quota, name) is not None and count != 1:
                raise InvalidInput(
                    f"{name}={getattr(quota, name):,}: the manager has {count} tiers of the kind "
                    f"{word}, and such a quota is for exactly one: build it with one, or leave "
                    f"this out"
                )

    def _limit_tiers(self, root: bytes, quota: Quota) -> None:
        for name, tiers in self._tiers.items():
            for tier in tiers:
                tier.limit(root, getattr(quota, name))

    def _bytes_in(self, name: str, root: bytes) -> int | None:
        found = [tier.bytes_of(root) for tier in self._tiers.get(name, ())]
        known = [each for each in found if each is not None]
        return sum(known) if len(known) == len(found) else None

    def _use(self, root: bytes, salt: str | None) -> QuotaUse:
        _, quota = self._supply.quotas.get(root, (salt, Quota()))
        schema, allocator = self._manager.schema, self._supply.allocator
        owners, block_bytes = allocator.owners, schema.bytes.block
        pinned = self._prefix.blocks.pinned_blocks(root=root)
        entries_bytes = allocator.host_rows_of(root) * schema.bytes.entries
        return QuotaUse(
            salt=salt,
            quota=quota,
            device_bytes=owners.used.get(root, 0) * block_bytes,
            cached_bytes=owners.idle.get(root, 0) * block_bytes,
            pinned_bytes=pinned * block_bytes,
            host_bytes=(self._bytes_in("host_bytes", root) or 0) + entries_bytes,
            disk_bytes=self._bytes_in("disk_bytes", root),
        )

    def _keep_apart(self, roots: Collection[bytes]) -> None:
        policy = self._prefix.index.policy
        if isinstance(policy, KeepsApart):
            policy.keep_apart(roots, self._prefix.index.nodes())

    def _release_deferred(self) -> None:
        self._manager._release_deferred()
