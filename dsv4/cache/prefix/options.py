"""How prefixes are cached: which boundaries get a snapshot, how many, where."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dsv4.cache.prefix.eviction import EvictionPolicy
from dsv4.cache.prefix.retention import Retention
from dsv4.errors import InvalidInput, require_count, require_flag
from dsv4.tiers.secret import Secret, require_key


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    """At which block boundaries a snapshot is taken, made by `full()`, `periodic(tokens)` or
    `zero()`: their `kind`, and the `period_tokens` between two.

    Without a snapshot, a hit replays window · layers tokens (docs/lifecycle.md).
    """

    kind: Literal["full", "periodic", "zero"]
    period_tokens: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "periodic", "zero"):
            raise InvalidInput(f"policy {self.kind!r}: use full(), periodic(tokens) or zero()")
        least = 1 if self.kind == "periodic" else 0
        require_count("tokens of periodic()", self.period_tokens, at_least=least)

    def wants(self, boundary: int, prompt_tokens: int, block_tokens: int) -> bool:
        """Periodic: every `period_tokens` tokens, and the last boundaries of the prompt: one for
        the same prompt again, of which a token must run, and one for prompts that continue it."""
        if self.kind == "periodic":
            last = prompt_tokens // block_tokens, (prompt_tokens - 1) // block_tokens
            return boundary % self.period_tokens == 0 or boundary // block_tokens in last
        return self.kind == "full"


def full() -> SnapshotPolicy:
    """A snapshot at every block boundary."""
    return SnapshotPolicy("full")


def periodic(tokens: int) -> SnapshotPolicy:
    """A snapshot every `tokens` tokens (a multiple of block_tokens) and at the end of a prompt."""
    return SnapshotPolicy("periodic", require_count("tokens of periodic()", tokens))


def zero() -> SnapshotPolicy:
    """No snapshots: the least memory, the longest replay."""
    return SnapshotPolicy("zero")


ReplayPolicy = Literal["exact", "cut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixOptions:
    """`snapshots` rows of `SnapshotLayout(schema).row_bytes` each are kept `where` it says, on the
    device or in pinned host memory, of the places that `policy` names. `model_id` names the
    weights: prefixes of different models never match. With `events` `manager.prefix.take_events`
    says which blocks were stored and removed.

    `replay` says how a hit without a snapshot continues. "exact" runs window · layers tokens again,
    and what follows is a cold run's. "cut" is how DeepSeek serves V4.1: it runs one window of
    tokens, which see nothing before them. That is an approximation: `Resume.exact` is false,
    and nothing that such a request computes is cached, kept by tiers, suspended or handed over
    (docs/v41.md).

    With a `key` (16 to 64 random bytes; `dsv4.read_key`) no name can be computed without it: no
    other tenant learns from names which prompts are kept. Records and offers carry proofs that are
    checked before anything in them is used; those with a wrong one, or without, are refused
    (docs/security.md). Managers that share a store or hand requests over have the same key.
    With `encrypt`, records are encrypted before a disk or an object store gets them (AES-256-GCM;
    the extra `encrypt`).

    `eviction` makes the policy that chooses what is evicted first when memory is short, one object
    for each manager: `Retention` weighs what a block is worth (docs/retention.md),
    `LeastRecentlyUsed` goes by the last use, others are in `dsv4.cache.prefix.eviction`.
    """

    policy: SnapshotPolicy = field(default_factory=lambda: periodic(1024))
    snapshots: int = 64
    where: Literal["device", "host"] = "device"
    model_id: str = ""
    events: bool = False
    replay: ReplayPolicy = "exact"
    key: bytes | None = field(default=None, repr=False)
    encrypt: bool = False
    eviction: Callable[[], EvictionPolicy] = Retention

    @property
    def rows(self) -> int:
        """The most snapshots that are kept."""
        return 0 if self.policy.kind == "zero" else self.snapshots

    def secret(self) -> Secret | None:
        """What the key makes, if there is one."""
        return None if self.key is None else Secret(self.key, encrypts=self.encrypt)

    def __post_init__(self) -> None:
        if self.key is not None:
            require_key(self.key)
        require_flag("encrypt", self.encrypt)
        if self.encrypt and self.key is None:
            raise InvalidInput("encrypt=True: records are encrypted with a key: give key=... too")
        if not isinstance(self.policy, SnapshotPolicy):
            raise InvalidInput(
                f"policy={self.policy!r}: must be full(), periodic(tokens) or zero() of dsv4"
            )
        require_count("snapshots", self.snapshots, at_least=0)
        if not isinstance(self.where, str) or self.where not in ("device", "host"):
            raise InvalidInput(
                f"snapshots cannot be kept in {self.where!r}: use 'device' or 'host'"
            )
        if not isinstance(self.model_id, str):
            raise InvalidInput(f"model_id={self.model_id!r}: must be a string")
        if not isinstance(self.replay, str) or self.replay not in ("exact", "cut"):
            raise InvalidInput(f"replay={self.replay!r}: use 'exact' or 'cut'")
        if not callable(self.eviction):
            raise InvalidInput(
                f"eviction={self.eviction!r}: give what makes a policy when it is called, for "
                f"instance the class LeastRecentlyUsed"
            )
