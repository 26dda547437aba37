"""Every error a public call raises. Each message says what was found, why it cannot work and
what to change; a call that raises has changed nothing."""

from __future__ import annotations

from numbers import Integral
from typing import TypeGuard


class Dsv4Error(Exception):
    """Base of all errors of this library."""


class InvalidInput(Dsv4Error, ValueError):
    """An argument is outside what the call accepts."""


class ConfigError(Dsv4Error, ValueError):
    """A model description cannot be read, or describes something this version does not hold."""


class SchemaError(Dsv4Error, ValueError):
    """A combination of cache parameters that has no layout."""


class SchemaMismatch(Dsv4Error, ValueError):
    """Bytes, a plane or a plan of one schema were used with another."""


class PoolTooSmall(Dsv4Error):
    """The memory given cannot hold even one request of the asked context."""

    def __init__(self, message: str, *, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class OutOfBlocks(Dsv4Error):
    """Blocks are missing. `never` tells whether waiting for other requests can help."""

    def __init__(self, *, needed: int, free: int, total: int, asker_blocks: int) -> None:
        """`asker_blocks` is what the request that asks (the largest of them) would hold at last."""
        self.needed, self.free, self.total = needed, free, total
        self.never = asker_blocks > total
        advice = (
            "it can never fit: give the pool more memory or ask for less context"
            if self.never
            else "wait for another request to end, or release one"
        )
        super().__init__(
            f"{needed} more blocks needed, for a request of {asker_blocks} blocks; {free} of "
            f"{total} are free: {advice}"
        )


class OutOfSlots(Dsv4Error):
    """State slots are missing."""

    def __init__(self, *, total: int, needed: int = 1, free: int = 0) -> None:
        self.total, self.needed, self.free = total, needed, free
        found = (
            f"{needed} state slots needed, {free} of {total} are free"
            if free
            else f"all {total} state slots are taken"
        )
        super().__init__(
            f"{found}: wait for a request to end, or build the manager with a larger max_requests"
        )


class ContextOverflow(Dsv4Error):
    """A request would grow past the context the schema was made for."""

    def __init__(self, *, asked_tokens: int, max_context_tokens: int) -> None:
        self.asked_tokens, self.max_context_tokens = asked_tokens, max_context_tokens
        super().__init__(
            f"{asked_tokens} tokens asked, but the schema was made for max_context="
            f"{max_context_tokens}: rebuild it with a larger max_context"
        )


class PlanError(Dsv4Error):
    """A forward plan that is over, foreign, or does not fit what is asked of it."""


class RequestError(Dsv4Error):
    """A request that is released, foreign, or not in the state the call needs."""


class UnsupportedGpu(Dsv4Error, RuntimeError):
    """The kernels are not made for this GPU; the message names it and what to use instead."""


class MissingExtra(Dsv4Error, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number. numpy's integers are; True is not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def require_count(name: str, value: object, *, at_least: int = 1) -> int:
    """The value, which must be a whole number of at least so much. Raises InvalidInput."""
    if not is_whole(value) or value < at_least:
        raise InvalidInput(f"{name}={value!r}: must be a whole number of at least {at_least}")
    return int(value)
