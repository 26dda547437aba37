"""What a server may be asked to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dsv4.errors import InvalidInput, is_number, is_whole, require_count


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions:
    """Where KV events are published, for routers (docs/events.md)."""

    endpoint: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Limits and places. `memory_bytes` is for the cache on the device; without it all running
    requests fit with the longest context. With `host_memory_bytes` entries of running requests may
    be in host memory (docs/residency.md); `host_tier_bytes` and `disk` keep what leaves the device.
    Raises InvalidInput."""

    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    host_tier_bytes: int | None = None
    disk: Path | None = None
    disk_bytes: int = 1 << 36
    cache_key: bytes | None = field(default=None, repr=False)  # of names and records
    encrypt: bool = False  # what goes to the disk
    events: EventOptions | None = None
    explain: bool = False  # answers say why a prompt was not cached, with ids of the cached one
    quotas: bool = False  # all who have the API key may see and set those of all salts
    api_key: str | None = field(default=None, repr=False)
    allow_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ("*",)
    max_requests: int = 8  # that run at once
    max_context: int | None = None  # of a request; None: as the model allows
    max_step_tokens: int = 512
    max_new_tokens: int | None = None  # of an answer whose request says nothing
    max_waiting: int = 256
    max_body_bytes: int = 8 << 20
    max_connections: int = 1024
    request_timeout_s: float = 600.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_step_tokens", "max_body_bytes", "max_connections"):
            require_count(name, getattr(self, name))
        require_count("max_waiting", self.max_waiting, at_least=0)
        optional = ("memory_bytes", "host_memory_bytes", "host_tier_bytes")
        for name in (*optional, "max_context", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and (not is_whole(value) or value < 1):
                raise InvalidInput(f"{name}={value!r}: must be a whole number of at least 1")
        for name in ("request_timeout_s", "drain_s"):
            value = getattr(self, name)
            if not is_number(value) or not value > 0:
                raise InvalidInput(f"{name}={value!r}: must be a number of seconds above 0")
        if self.api_key is not None and not self.api_key.strip():
            raise InvalidInput("the API key is empty: give one, or none at all")
