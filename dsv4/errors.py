"""Every error a public call raises. Each message says what was found, why it cannot work and
what to change; a call that raises has changed nothing."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, ClassVar, Literal, TypeGuard

MOST_COUNTED = 10**40  # of bytes, tokens or anything else: far above all that there is


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

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.args, {"minimum_bytes": self.minimum_bytes})


class OutOfBlocks(Dsv4Error):
    """Blocks are missing. `never`: waiting for other requests cannot help."""

    def __init__(
        self,
        *,
        needed: int,
        free: int,
        total: int,
        asker_blocks: int,
        cached: int = 0,
        pinned: int = 0,
        memory: Literal["blocks", "entries"] = "blocks",
    ) -> None:
        """`asker_blocks` is what the request that asks (the largest of them) would hold in the end,
        `cached` how many blocks are cached but in use by no request, `pinned` how many stay until
        they are unpinned, without those that the request shares. With `memory="entries"` the
        numbers are those of the device's rows of entries (docs/residency.md)."""
        self.memory: Literal["blocks", "entries"] = memory
        self.needed, self.free, self.total = needed, free, total
        self.asker_blocks, self.cached, self.pinned = asker_blocks, cached, pinned
        self.never = asker_blocks > total - pinned
        if asker_blocks > total:
            advice = "it can never fit: give the pool more memory or ask for less context"
        elif self.never:
            advice = "it can never fit together with what is pinned: unpin something"
        else:
            advice = "wait for another request to end, or release one"
        kept = f", {cached} cached and idle" if cached else ""
        kept += f", {pinned} pinned" if pinned else ""
        if memory == "entries":
            advice = "give entry_rows more" if self.never else "commit the plans that are open"
            Dsv4Error.__init__(
                self,
                f"{needed} more rows for entries needed on the device; {free} of {total} are free, "
                f"and the others cannot leave: they are being written, or an open plan reads them, "
                f"or they could not be copied to host memory: {advice}",
            )
            return
        super().__init__(
            f"{needed} more blocks needed, for a request of {asker_blocks} blocks; {free} of "
            f"{total} are free{kept}: {advice}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("needed", "free", "total", "asker_blocks", "cached", "pinned", "memory")
        return _revive, (type(self), (), {name: getattr(self, name) for name in names})


class OverQuota(OutOfBlocks):
    """A prompt's salt has a quota of memory in a `place`, "device" or "host", and this would exceed
    it, though everything that is only cached for it were evicted. Counts are of the salt's blocks,
    bytes of what all these have in that place; what a host tier keeps for it gives way to blocks,
    and is not among them. `never`: waiting for its other requests cannot help. Nothing of other
    salts is evicted for it."""

    def __init__(
        self,
        *,
        salt: str | None,
        root: bytes,
        quota_bytes: int,
        block_bytes: int,
        total: int,
        used: int,
        needed: int,
        asker_blocks: int,
        cached: int = 0,
        pinned: int = 0,
        place: Literal["device", "host"] = "device",
    ) -> None:
        """`root` is where the digests of the salt's prompts begin, `total` how many blocks the
        quota has room for, `used` how many of them are not free, `cached` how many of these are in
        use by no request. The rest is as in `OutOfBlocks`."""
        self.salt, self.root = salt, root
        self.quota_bytes, self.block_bytes, self.place = quota_bytes, block_bytes, place
        self.memory = "blocks"
        self.needed, self.free, self.total = needed, max(0, total - used), total
        self.used, self.asker_blocks, self.cached, self.pinned = used, asker_blocks, cached, pinned
        self.used_bytes, self.needed_bytes = used * block_bytes, needed * block_bytes
        self.never = asker_blocks > total - pinned
        if asker_blocks > total:
            advice = "it can never fit: raise the quota or ask for less context"
        elif self.never:
            advice = "it can never fit together with what is pinned: unpin something"
        else:
            advice = "wait for another request of this salt to end, or raise the quota"
        kept = f", {cached * block_bytes:,} of them cached and idle" if cached else ""
        kept += f", {pinned * block_bytes:,} pinned" if pinned else ""
        where = "on the device" if place == "device" else "in host memory, for entries"
        whose = "prompts without a salt" if salt is None else f"salt {salt!r}"
        Dsv4Error.__init__(
            self,
            f"{self.needed_bytes:,} more bytes needed {where}, for a request of "
            f"{asker_blocks * block_bytes:,}; {whose}: {self.used_bytes:,} of {quota_bytes:,} "
            f"bytes are used{kept}: {advice}",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        figures = ("block_bytes", "total", "used", "needed", "asker_blocks", "cached", "pinned")
        names = ("salt", "root", "quota_bytes", "place", *figures)
        return _revive, (type(self), (), {name: getattr(self, name) for name in names})


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

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("total", "needed", "free")
        return _revive, (type(self), (), {name: getattr(self, name) for name in names})


class ContextOverflow(Dsv4Error):
    """A request would grow past the context the schema was made for. `note` says what to do."""

    def __init__(
        self,
        *,
        asked_tokens: int,
        max_context_tokens: int,
        note: str = "give Cache or the schema a larger max_context, or a shorter prompt",
    ) -> None:
        self.asked_tokens, self.max_context_tokens = asked_tokens, max_context_tokens
        self._note = note
        super().__init__(
            f"{asked_tokens} tokens asked, but a request has at most max_context="
            f"{max_context_tokens}: {note}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        names = ("asked_tokens", "max_context_tokens")
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        return _revive, (type(self), (), given | {"note": self._note})


class PlanError(Dsv4Error):
    """A forward plan that is over, foreign, incomplete, or does not fit what is asked of it."""


class RequestError(Dsv4Error):
    """A request that is released, foreign, or not in the state the call needs."""


class CopyError(Dsv4Error, TypeError):
    """Something that owns device memory was copied or pickled; the message names the right call."""


class ThreadError(Dsv4Error):
    """A call came while another one was running, usually in another thread: one at a time."""


class RecoveryNeeded(Dsv4Error):
    """An interrupt left a call half done: `manager.recover()` restores a consistent state."""


class OfferError(Dsv4Error):
    """An offer of another manager cannot be used, or its request did not arrive. The request can
    still be computed, or resumed from tiers. `reason` is one of

        "damaged"  not an offer, or not as it was made
        "version"  of another version of this library
        "untrusted"  its signature is not one that this manager accepts
        "schema"   the owner's blocks or states are not laid out like this manager's
        "model"    of other weights, or of another pipeline stage
        "busy"     too many offers or arrivals are open: ask again later
        "gone"     the offer no longer stands: expired, withdrawn, taken, or its owner restarted
        "refused"  the bytes that arrived are not those that were offered
        "late"     not read in time; the owner may be stopped or disconnected
        "failed"   the link or the device reported an error
        "cancelled"
    """

    reasons: ClassVar[tuple[str, ...]] = (
        *("damaged", "version", "untrusted", "schema", "model", "busy", "gone", "refused", "late"),
        *("failed", "cancelled"),
    )

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), (self.reason, *self.args), {})


class UnsupportedGpu(Dsv4Error, RuntimeError):
    """The kernels are not made for this GPU; the message names it and what to use instead."""


class MissingExtra(Dsv4Error, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


def _revive(kind: type[Dsv4Error], given: tuple[Any, ...], options: dict[str, Any]) -> Dsv4Error:
    """Unpickles an error that is made from more than its message."""
    return kind(*given, **options)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number. numpy's integers are; True is not."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_utf8(text: str) -> bool:
    """Whether a text can be written down: half a surrogate cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, numpy's included; True is not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value as Python writes it, cut where it is long. Python does not write ints of more than
    4,300 digits."""
    if is_whole(value) and abs(value) >= 10**40:
        return f"a number of {int(value).bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def require_count(name: str, value: object, *, at_least: int = 1) -> int:
    """Returns the value, which must be a whole number of at least `at_least` that a computer can
    count. Raises InvalidInput."""
    if not is_whole(value) or value < at_least:
        raise InvalidInput(f"{name}={shown(value)}: must be a whole number of at least {at_least}")
    if value > MOST_COUNTED:
        raise InvalidInput(f"{name}={shown(value)}: must be a whole number, at most 10^40")
    return int(value)


def require_flag(name: str, value: object) -> None:
    """Raises InvalidInput for a value that is neither True nor False."""
    if value is not True and value is not False:
        raise InvalidInput(f"{name}={shown(value)}: give True or False")


def require_timeout(timeout_s: object) -> float:
    """Seconds to wait at most; a negative number means not at all. Raises InvalidInput."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or timeout_s != timeout_s:
        raise InvalidInput(f"timeout_s={timeout_s!r}: must be a number of seconds")
    return float(timeout_s)


def require_type(name: str, value: object, kind: type) -> None:
    """Raises InvalidInput unless the value is an instance of `kind`."""
    if not isinstance(value, kind):
        found = f"{type(value).__name__} {shown(value)}"
        raise InvalidInput(f"{name} is {found}: must be a {kind.__name__}")
