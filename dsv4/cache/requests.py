"""A live request, as the manager's caller sees it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.prefix.resume import ResumePlan
from dsv4.cache.prefix.trail import TokenTrail

# rows of the manager's table, one column a slot; a step reads those of its requests at once
LENGTH, PUBLISHED, REUSED, WRITTEN = range(4)
REQUEST_NUMBERS = 4


class Request:
    """What one request holds. The manager changes it; callers read it.

    Token positions, as the last commit left them:
      [0, length)              computed: entries in blocks, the rest in the slot
      [length, reused_tokens)  replayed: entries are there already and are not written again
      [length, end of blocks)  paid for: blocks are there, nothing is written
    """

    __slots__ = (
        "__weakref__",
        "_row",
        "block_ids",
        "exact_from",
        "manager_key",
        "released",
        "resume",
        "serial",
        "slot",
        "trail",
    )

    def __init__(
        self,
        *,
        slot: int,
        serial: int,
        block_ids: list[int],
        row: NDArray[np.int64],
        manager_key: object,
        resume: ResumePlan,
    ) -> None:
        self.slot, self.serial = slot, serial
        self.manager_key = manager_key
        self.released = False
        self.resume = resume  # what the caller runs next to get where it wanted to be
        self.exact_from = 0  # below, a replay may have left rings that differ from a cold run's
        self.trail: TokenTrail | None = None
        self._row = row
        self._row[:] = 0
        self.block_ids = block_ids  # in the order of the tokens

    @property
    def length(self) -> int:
        return int(self._row[LENGTH])

    @length.setter
    def length(self, tokens: int) -> None:
        self._row[WRITTEN] = self.written_tokens
        self._row[LENGTH] = tokens

    @property
    def published_blocks(self) -> int:
        """Blocks that the device's table has."""
        return int(self._row[PUBLISHED])

    @published_blocks.setter
    def published_blocks(self, blocks: int) -> None:
        self._row[PUBLISHED] = blocks

    @property
    def reused_tokens(self) -> int:
        """Entries below this position came from somebody else; the rings cannot go below it."""
        return int(self._row[REUSED])

    @reused_tokens.setter
    def reused_tokens(self, tokens: int) -> None:
        self._row[REUSED] = tokens

    @property
    def written_tokens(self) -> int:
        """The end of what was ever written to the rings: rejected tokens count."""
        return max(int(self._row[WRITTEN]), self.length)

    @written_tokens.setter
    def written_tokens(self, tokens: int) -> None:
        self._row[WRITTEN] = tokens

    def detach(self) -> None:
        """The slot goes to another request; this one keeps its last values."""
        self.released = True
        self._row = self._row.copy()
        self.block_ids = []

    def __repr__(self) -> str:
        state = "released" if self.released else f"slot {self.slot}"
        return f"Request({self.serial}: {state}, {self.length} tokens)"
