"""What a quota is, and what a salt has of it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dsv4.errors import require_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The most bytes that the prompts of one salt may have in each place; None: no limit there.

    `device_bytes` counts blocks on the device: those that requests hold and those that are only
    cached. `host_bytes` counts what a HostTier keeps, `disk_bytes` what a DiskTier keeps: blocks,
    snapshots and suspended requests, in whole units of 4 KiB. With `host_memory`, `host_bytes`
    counts the entries of the blocks on the device too, each once: a record that shares them adds
    only the rest of it.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                object.__setattr__(self, each.name, require_count(each.name, value, at_least=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaUse:
    """What a salt has now, `device_bytes`, `host_bytes` and `disk_bytes`, and may have, its
    `quota`. `cached_bytes` of those on the device are in use by no request, `pinned_bytes` of them
    stay until they are unpinned. Where the manager keeps nothing, the bytes are 0; None: the disk's
    index does not answer now."""

    salt: str | None
    quota: Quota
    device_bytes: int
    cached_bytes: int
    pinned_bytes: int
    host_bytes: int
    disk_bytes: int | None
