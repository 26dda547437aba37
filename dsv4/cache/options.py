"""What a `KVCacheManager` is built with, listed once: names and types for callers, and the checked
values with their defaults for the manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypedDict

import torch

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.errors import InvalidInput, require_count, require_flag, require_type
from dsv4.ops.backend import BackendName
from dsv4.units import parse_bytes

if TYPE_CHECKING:
    from dsv4.cache.handoff.options import HandoffOptions
    from dsv4.tiers.tier import Tier


class ManagerOptions(TypedDict, total=False):
    """Options of `KVCacheManager` and of what builds one. Defaults are those of `Settings`."""

    max_step_tokens: int
    device: torch.device | str
    backend: BackendName | None
    prefix: PrefixOptions | None
    max_open_plans: int
    tiers: Sequence[Tier]
    handoff: HandoffOptions | None
    batch_invariant: bool
    host_memory: int | str | None
    hot_rows: int | None
    entry_rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options that were checked.

    `max_step_tokens` and `max_open_plans` size the step buffers. `prefix` keeps prompts after their
    requests are released, `tiers` keep them below the device, the fastest first, `handoff` sends
    requests to other managers; without an option the manager does not do it. `batch_invariant`:
    docs/exactness.md. With `host_memory`, in bytes or as "256GB", entries may be there
    (docs/residency.md): `hot_rows` is how many of a layer each request has on the device once it
    has fetched them, `entry_rows` for how many blocks all of them have room there (default: the
    fewest that work; `from_memory` computes it). The schema must have been built with
    entries_apart=True.
    """

    max_step_tokens: int = 8192
    device: torch.device | str = "cpu"
    backend: BackendName | None = None
    prefix: PrefixOptions | None = None
    max_open_plans: int = 1
    tiers: Sequence[Tier] = ()
    handoff: HandoffOptions | None = None
    batch_invariant: bool = False
    host_memory: int | str | None = None
    hot_rows: int | None = None
    entry_rows: int | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None:
            require_type("prefix", self.prefix, PrefixOptions)
        for name in ("max_step_tokens", "max_open_plans"):  # ints, whatever type they were given as
            object.__setattr__(self, name, require_count(name, getattr(self, name)))
        require_flag("batch_invariant", self.batch_invariant)
        if self.host_memory is not None:
            object.__setattr__(self, "host_memory", parse_bytes(self.host_memory))
        for name in ("hot_rows", "entry_rows"):
            if getattr(self, name) is not None:
                if self.host_memory is None:
                    raise InvalidInput(
                        f"{name} is for entries in host memory: give host_memory=... too"
                    )
                object.__setattr__(self, name, require_count(name, getattr(self, name)))
        if not isinstance(self.tiers, Sequence) or isinstance(self.tiers, str | bytes):
            raise InvalidInput(
                f"tiers are {type(self.tiers).__name__}: give a list, the fastest first"
            )

    @classmethod
    def of(cls, options: ManagerOptions) -> Settings:
        """Raises InvalidInput for options that do not exist and for values that cannot be."""
        refuse_unknown("KVCacheManager", options, ManagerOptions.__annotations__)
        return cls(**options)

    @property
    def host_bytes(self) -> int | None:
        assert not isinstance(self.host_memory, str)
        return self.host_memory

    @property
    def place(self) -> torch.device:
        """A device that memory can be taken on, with its number: the current one where "cuda" is
        named. InvalidInput."""
        named: object = self.device
        if not isinstance(named, str | int | torch.device) or isinstance(named, bool):
            raise InvalidInput(f"device={named!r}: must be a torch.device or its name")
        try:
            return torch.empty(0, device=torch.device(named)).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InvalidInput(f"device={named!r} cannot be used: {error}") from error


def refuse_unknown(what: str, options: Mapping[str, object], known: Iterable[str]) -> None:
    """InvalidInput for an option that `what` does not have."""
    known = list(known)
    for name in options:
        if name not in known:
            nearest = get_close_matches(name, known, n=1)
            raise InvalidInput(
                f"{what} has no option {name!r}: "
                + (f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(known)}")
            )
