"""Options of the hand-off. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsv4.errors import InvalidInput, require_count

MOST_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOptions:
    """`name` is for people and logs; two processes may have the same. `model_id` names the weights,
    and in a pipeline the stage; by default it is that of the prefix cache.

    An offer stands for `lease_s` seconds of its owner's clock. A read that takes longer than
    `deadline_s` is given up. Up to `offers` offers and arrivals may be open at once; `states` of
    them have their states in host memory at once. With `sums` the owner computes checksums of
    blocks in host memory, and the taker checks them; blocks on a GPU have none.

    `sign` makes a signature of an offer's bytes, on the owner's side; `verify` decides from bytes
    and signature whether this side accepts the offer, before anything else in it is used. Without
    `verify` anyone who can hand an offer to this manager is trusted.
    """

    name: str
    model_id: str = ""
    lease_s: float = 30.0
    deadline_s: float = 10.0
    offers: int = 256
    states: int = 16
    sums: bool = True
    sign: Callable[[bytes], bytes] | None = None
    verify: Callable[[bytes, bytes], bool] | None = None

    def __post_init__(self) -> None:
        for field in ("name", "model_id"):
            if not isinstance(getattr(self, field), str):
                raise InvalidInput(f"{field}={getattr(self, field)!r}: must be a string")
        if not self.name:
            raise InvalidInput("name='': give one that people know this process by")
        if len(self.name) > MOST_NAME or not self.name.isprintable():
            raise InvalidInput(
                f"name={self.name[:MOST_NAME]!r}: must be printable and have at most {MOST_NAME} "
                f"characters, for it stands in logs"
            )
        for field in ("sign", "verify"):
            if getattr(self, field) is not None and not callable(getattr(self, field)):
                raise InvalidInput(f"{field}={getattr(self, field)!r}: must be a function or None")
        require_count("offers", self.offers)
        require_count("states", self.states)
        for field in ("lease_s", "deadline_s"):
            require_seconds(field, getattr(self, field))


def require_seconds(name: str, value: object) -> float:
    """The value, which must be more than 0. Raises InvalidInput."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise InvalidInput(f"{name}={value!r}: must be a number of seconds above 0")
    return float(value)
