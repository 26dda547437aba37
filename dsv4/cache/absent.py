"""What a manager without tiers or a hand-off has in their place. Torch-free."""

from __future__ import annotations

from typing import ClassVar, Literal, NoReturn

from dsv4.errors import InvalidInput


class NoTiers:
    """`manager.tiers` of a manager without tiers. It is false, `all` of them are none, and it
    refuses all calls of `Tiers`."""

    all: ClassVar[tuple[()]] = ()

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "NoTiers()"

    def fetch(self, *_: object, **__: object) -> NoReturn:
        """Raises InvalidInput."""
        raise InvalidInput("this manager has no tiers: build it with tiers=[HostTier(...), …]")

    admit = suspend = resume = drain = close = fetch

    # ---- for the manager -------------------------------------------------------------------------

    def pump(self) -> None: ...

    def before_release(self, request: object) -> None: ...

    def release_deferred(self, item: object) -> bool:
        return False

    def end_fetches(self) -> None: ...

    def stats(self) -> None: ...

    def tier_stats(self) -> tuple[()]:
        return ()


class NoHandoff:
    """`manager.handoff` of a manager without a hand-off. It is false, and refuses all calls of
    `Handoff`."""

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "NoHandoff()"

    def offer(self, *_: object, **__: object) -> NoReturn:
        """Raises InvalidInput."""
        raise InvalidInput(
            "this manager hands nothing over: build it with handoff=HandoffOptions(...)"
        )

    withdraw = accept = close = offer

    # ---- for the manager -------------------------------------------------------------------------

    def release_deferred(self, item: object) -> None: ...

    def check_invariants(self) -> None: ...

    def stats(self) -> None: ...
