"""The end of a record in memory that is not the tier's own. Torch-free."""

from __future__ import annotations

from collections.abc import Callable


class Loan:
    """The last bytes of a payload, in a row that its owner lends. From `taken` until it is
    given back that row belongs to the record. `is_needed`: its owner uses the row too, so a tier
    that gives it back makes no room."""

    __slots__ = ("_end", "_is_needed", "memory", "over", "row", "taken")

    def __init__(
        self,
        row: int,
        memory: memoryview,
        *,
        is_needed: Callable[[int], bool],
        end: Callable[[int], None],
    ) -> None:
        self.row, self.memory = row, memory
        self._is_needed, self._end = is_needed, end
        self.taken = self.over = False

    @property
    def is_needed(self) -> bool:
        return self._is_needed(self.row)

    @property
    def is_out(self) -> bool:
        """Whether a record has it."""
        return self.taken and not self.over

    def give_back(self) -> None:
        """The record is gone, and nothing reads or writes it. In any thread."""
        self.over = True
        self._end(self.row)
