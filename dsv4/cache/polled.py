"""What is under way and asked how far it is: what fetches and arrivals share. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dsv4.cache.changes import Uncopied


class Polled(Uncopied, ABC):
    """`poll` moves it on and says whether it is over. `cancel` ends it; memory that is still being
    written to is set aside until it is not. `advance` and `end` are its owner's calls for that."""

    def __init__(self, *, advance: Callable[[Any], None], end: Callable[[Any], None]) -> None:
        self._advance, self._end = advance, end

    @property
    @abstractmethod
    def done(self) -> bool: ...

    def poll(self) -> bool:
        """Moves it on as far as it goes; whether it is over. Never waits."""
        if not self.done:
            self._advance(self)
        return self.done

    def cancel(self) -> None:
        """Ends it, if it is not over."""
        if not self.done:
            self._end(self)
