"""Background work that is polled: what fetches and arrivals share. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dsv4.cache.changes import Uncopied


class Polled(Uncopied, ABC):
    """`poll` advances it and says whether it has finished. `cancel` ends it; memory that is still
    being written to is set aside until that has ended. `advance` and `end` are its owner's calls
    for that."""

    def __init__(self, *, advance: Callable[[Any], None], end: Callable[[Any], None]) -> None:
        self._advance, self._end = advance, end

    @property
    @abstractmethod
    def done(self) -> bool: ...

    def poll(self) -> bool:
        """Advances it as far as possible without waiting; returns whether it has finished."""
        if not self.done:
            self._advance(self)
        return self.done

    def cancel(self) -> None:
        """Ends it, unless it has finished."""
        if not self.done:
            self._end(self)
