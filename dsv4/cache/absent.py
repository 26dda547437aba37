"""What a manager without tiers, a hand-off or host memory has in their place. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NoReturn

from dsv4.errors import InvalidInput


class NoTiers:
    """`manager.tiers` of a manager without tiers. It is false, and refuses all calls of `Tiers`."""

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

    def let_go(self, item: object) -> bool:
        return False

    def end_fetches(self) -> None: ...

    def stats(self) -> None: ...

    def tier_stats(self) -> tuple[()]:
        return ()


class NoResidency:
    """What a manager has where all entries stay on the device. It is false, and does nothing."""

    def __bool__(self) -> Literal[False]:
        return False

    @contextmanager
    def lending(self, count: int, keep: Collection[int] = ()) -> Iterator[list[int]]:
        yield []

    def settle(self, block_ids: Sequence[int], rows: Sequence[int], depth: int) -> None: ...

    def publish(
        self, slot: int, first: int, block_ids: Sequence[int], rows: Sequence[int] = ()
    ) -> None: ...

    def forget_hot(self, slot: int) -> None: ...

    def begin(self, request: object) -> None: ...

    def use(self, block_ids: Sequence[int]) -> None: ...

    def go_back(self, request: object) -> None: ...

    def start_over(self, request: object) -> None: ...

    def restore(self, request: object, first: int, count: int) -> None: ...

    def copy_block(self, source: int, rows: Sequence[int]) -> None: ...

    def put_block(self, row: int, entries: object) -> None: ...

    def begin_step(self, step: object, growth: object, before: object) -> None: ...

    def settle_step(self, taken: NoReturn) -> None: ...

    def cancel_step(self, taken: NoReturn) -> None: ...

    def stage(self, batch: object, lane: object) -> None: ...

    def note_commit(self, plan: object) -> None: ...

    def note_end(self, plan: object) -> None: ...

    def recover(self, cached: Collection[int], open_plans: Sequence[object]) -> None: ...

    def check_invariants(self) -> None: ...

    def stats(self) -> None: ...


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

    def let_go(self, item: object) -> None: ...

    def check_invariants(self) -> None: ...

    def stats(self) -> None: ...
