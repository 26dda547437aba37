"""What a `KVCacheManager` is built with: name, type, default and check of each option, once."""

# annotations are evaluated here: the defaults and checks are in them
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, TypeVar, cast

import torch

from dsv4.cache.prefix.options import PrefixOptions
from dsv4.errors import InvalidInput, require_count, require_flag, require_type
from dsv4.ops.backend import BackendName
from dsv4.units import parse_bytes

if TYPE_CHECKING:
    from dsv4.cache.handoff.options import HandoffOptions
    from dsv4.tiers.tier import Tier

T = TypeVar("T")


def _any(name: str, value: T) -> T:
    """What is checked where it is used."""
    return value


def _flag(name: str, value: bool) -> bool:
    require_flag(name, value)
    return value


def _count(name: str, value: int | None) -> int | None:
    return None if value is None else require_count(name, value)


def _bytes(name: str, value: int | str | None) -> int | None:
    return None if value is None else parse_bytes(value)


def _prefix(name: str, value: PrefixOptions | None) -> PrefixOptions | None:
    if value is not None:
        require_type(name, value, PrefixOptions)
    return value


def _list(name: str, value: object) -> object:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidInput(f"{name} are {type(value).__name__}: give a list, the fastest first")
    return value


class ManagerOptions(TypedDict, total=False):
    """Options of `KVCacheManager` and of what builds one: type, default, the check that returns a
    value as it is kept, and what it does (docs/reference/options.md is made of these)."""

    max_step_tokens: Annotated[
        int, 8192, require_count, "The most tokens of a step. It sizes buffers and workspace."
    ]
    device: Annotated[torch.device | str, "cpu", _any, 'Where the cache is: "cuda", "cuda:1".']
    backend: Annotated[
        BackendName | None,
        None,
        _any,
        "What runs the operations. None: the kernels where the device is a GPU, else the reference "
        "in plain PyTorch.",
    ]
    prefix: Annotated[
        PrefixOptions | None,
        None,
        _prefix,
        "Keeps prompts after their requests are released, and shares them. `Cache` gives "
        "PrefixOptions(); None: no prefix cache.",
    ]
    max_open_plans: Annotated[
        int,
        1,
        require_count,
        "Plans that may be open at once; each has step buffers. `Cache` gives 1 + steps_ahead.",
    ]
    tiers: Annotated[
        Sequence["Tier"], (), _list, "Keep what is cached below the device, the fastest first."
    ]
    handoff: Annotated[
        "HandoffOptions | None", None, _any, "Sends requests to other managers and takes theirs."
    ]
    batch_invariant: Annotated[
        bool,
        False,
        _flag,
        "No bit of what a token reads depends on what else is in its step (docs/exactness.md).",
    ]
    host_memory: Annotated[
        int | str | None,
        None,
        _bytes,
        'Bytes, or "256GB", of the host in which entries may be (docs/residency.md). A schema of '
        "your own needs entries_apart=True.",
    ]
    hot_rows: Annotated[
        int | None,
        None,
        _count,
        "With host_memory: entries of a layer that each request has on the device once it has "
        "fetched them. None: at most four times what a step selects.",
    ]
    entry_rows: Annotated[
        int | None,
        None,
        _count,
        "With host_memory: blocks whose entries have room on the device. None: the fewest that "
        "work; `Cache` and `manager_from_memory` compute it.",
    ]


def complete(options: ManagerOptions) -> ManagerOptions:
    """All options, checked, with defaults for what is left out. Raises InvalidInput for options
    that do not exist and for values that cannot be."""
    known = ManagerOptions.__annotations__
    refuse_unknown("KVCacheManager", options, known)
    found: dict[str, Any] = {}
    for name, annotation in known.items():
        check: Callable[[str, Any], Any]
        default, check, _ = annotation.__metadata__
        found[name] = check(name, options.get(name, default))
    for name in ("hot_rows", "entry_rows"):
        if found[name] is not None and found["host_memory"] is None:
            raise InvalidInput(f"{name} is for entries in host memory: give host_memory=... too")
    return cast(ManagerOptions, found)


def host_bytes(options: ManagerOptions) -> int | None:
    """The host memory of options that are complete."""
    memory = options["host_memory"]
    assert not isinstance(memory, str)
    return memory


def place(options: ManagerOptions) -> torch.device:
    """A device that memory can be taken on, with its number: the current one where "cuda" is named.
    Raises InvalidInput."""
    named: object = options["device"]
    if not isinstance(named, str | int | torch.device) or isinstance(named, bool):
        raise InvalidInput(f"device={named!r}: must be a torch.device or its name")
    try:
        return torch.empty(0, device=torch.device(named)).device
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
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
