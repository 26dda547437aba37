"""Whether a tier, or the disk below it, still answers: judged by its last calls. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable


class Health:
    """The last `recent` calls of one sort. It is lost when `failures` different records failed
    among them, and half of the calls or more: a record that fails again and again is one failure.
    The caller has the lock."""

    def __init__(self, *, recent: int, failures: int) -> None:
        self._calls: deque[Hashable | None] = deque(maxlen=recent)
        self._failures = failures

    def note_success(self) -> None:
        self._calls.append(None)

    def note_failure(self, record: Hashable) -> None:
        self._calls.append(record)

    def is_lost(self) -> bool:
        failed = [each for each in self._calls if each is not None]
        return len(set(failed)) >= self._failures and 2 * len(failed) >= len(self._calls)
