"""The end of a record in memory that is not the tier's own. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Lender(Protocol):
    """Who lends rows. What it says of an `owner` of records (`Label.owner`) counts in that one's
    limit in the tier. Both are asked in any thread."""

    def needed_bytes(self, owner: bytes) -> int:
        """What the owner needs of this memory, whatever the tier keeps: rows that records have too
        are among it."""

    def lent_bytes(self, owner: bytes) -> int:
        """What only records of the owner have of this memory."""


class Loan:
    """The last bytes of a payload, in a row that its owner lends. From `take` until it is
    given back that row belongs to the record. `is_needed`: its owner uses the row too, so a tier
    that gives it back makes no room."""

    __slots__ = ("_change", "_is_needed", "memory", "over", "record_owner", "row", "taken")

    def __init__(
        self,
        row: int,
        memory: memoryview,
        *,
        is_needed: Callable[[int], bool],
        change: Callable[[Loan], None],
    ) -> None:
        """`change` hears that it was taken or given back."""
        self.row, self.memory = row, memory
        self._is_needed, self._change = is_needed, change
        self.taken = self.over = False
        self.record_owner: bytes | None = None

    @property
    def is_needed(self) -> bool:
        return self._is_needed(self.row)

    @property
    def is_out(self) -> bool:
        """Whether a record has it."""
        return self.taken and not self.over

    def take(self, record_owner: bytes | None) -> None:
        """A record has it, which counts for this owner, or (None) for none."""
        self.record_owner, self.taken = record_owner, True
        self._change(self)

    def give_back(self) -> None:
        """The record is gone, and nothing reads or writes it. In any thread."""
        self.over = True
        self._change(self)
