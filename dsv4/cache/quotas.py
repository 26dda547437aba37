"""Quotas: how many bytes of the cache a tenant may have. A tenant is a salt. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dsv4.cache.allocator import BlockLimit, BlockSupply
from dsv4.cache.changes import changes
from dsv4.cache.prefix.eviction import KeepsApart
from dsv4.cache.prefix.quota import Quota, QuotaUse
from dsv4.cache.prefix.trail import token_ids
from dsv4.errors import require_type

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.prefix.cache import PrefixCache


class Quotas:
    """The quotas of one manager, by salt; None stands for prompts without one. Any number of these
    objects show the same quotas.

    A salt that would have more than its quota gives up its own least valuable cached blocks first,
    and nothing of others; what its requests hold and what is pinned counts too. If that is not
    enough, the call that needs more raises OverQuota and has changed nothing. Requests without
    token ids have no salt, and count for none. The calls count as calls of the manager.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._prefix: PrefixCache = manager.prefix.required()
        self._manager, self.guard = manager, manager.guard
        self._supply: BlockSupply = manager.table.supply

    def __repr__(self) -> str:
        return f"Quotas({len(self._supply.quotas)} salts)"

    @changes
    def set(self, salt: str | None, quota: Quota) -> QuotaUse:
        """From now on this is the quota of a salt. What it has above that and no request holds is
        evicted at once; the rest follows when its requests end. Raises InvalidInput."""
        require_type("quota", quota, Quota)
        root = self._root(salt)
        limit, limits = self._limit(salt, quota), self._supply.limits
        if limit is not None and root not in limits:
            self._keep_apart([*limits, root])
        self._supply.quotas[root] = salt, quota
        if limit is not None:
            limits[root] = limit
            self._supply.trim(root)
        elif limits.pop(root, None):
            self._keep_apart(limits)
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
        return self._supply.quotas.pop(root, None) is not None

    def all(self) -> tuple[QuotaUse, ...]:
        """Of each salt that has a quota, in the order in which they were set first."""
        known = tuple(self._supply.quotas.items())
        return tuple(self._use(root, salt) for root, (salt, _) in known)

    def _root(self, salt: str | None) -> bytes:
        """Where the digests of its prompts begin. Raises InvalidInput."""
        return self._prefix.trail(token_ids(()), salt).root

    def _limit(self, salt: str | None, quota: Quota) -> BlockLimit | None:
        block_bytes = self._manager.schema.block_bytes
        if quota.device_bytes is None:
            return None
        return BlockLimit(quota.device_bytes // block_bytes, salt, quota.device_bytes, block_bytes)

    def _use(self, root: bytes, salt: str | None) -> QuotaUse:
        _, quota = self._supply.quotas.get(root, (salt, Quota()))
        owners, block_bytes = self._supply.allocator.owners, self._manager.schema.block_bytes
        pinned = self._prefix.blocks.pinned_blocks(root=root)
        return QuotaUse(
            salt=salt,
            quota=quota,
            device_bytes=owners.used.get(root, 0) * block_bytes,
            cached_bytes=owners.idle.get(root, 0) * block_bytes,
            pinned_bytes=pinned * block_bytes,
        )

    def _keep_apart(self, roots: Collection[bytes]) -> None:
        policy = self._prefix.index.policy
        if isinstance(policy, KeepsApart):
            policy.keep_apart(roots, self._prefix.index.nodes())

    def _release_deferred(self) -> None:
        self._manager._release_deferred()
