"""Prefixes that clients asked to keep for a time (`cache_control`): pinned, with limits.

A later turn of the same session replaces an earlier one, and each use starts the time anew. When a
request would not fit without it, what is kept is given up, and it never takes more than half of the
pool.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.engine import Job
from dsv4.errors import InvalidInput
from dsv4.serve.scheduler import Scheduler

MOST_KEPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    pin: PinnedPrefix
    until_s: float


class Keeper:
    """Called in the thread that steps."""

    def __init__(self, engine: Scheduler) -> None:
        self._engine = engine
        self._kept: dict[tuple[str | None, str], Kept] = {}
        self.clock = time.monotonic

    @property
    def next_s(self) -> float | None:
        """Seconds until the first may go; None if there is none."""
        ends = [kept.until_s for kept in self._kept.values()]
        return max(0.0, min(ends) - self.clock()) if ends else None

    def keep(self, job: Job) -> None:
        """Keeps what an ended job has in the cache, if its client asked for that. Raises
        InvalidInput if nothing of it is cached."""
        data = job.data
        if data.terms.keep_s is None:
            return
        manager = self._engine.manager
        name = data.terms.session or str(hash(tuple(job.tokens[: manager.schema.block_tokens])))
        old = self._kept.get((job.salt, name))
        if old is not None:
            self._drop(old.pin)
            del self._kept[job.salt, name]
        if data.terms.keep_s <= 0:
            return
        blocks = len(job.tokens) // manager.schema.block_tokens
        stats = manager.stats()
        if len(self._kept) >= MOST_KEPT or 2 * (stats.blocks_pinned + blocks) > stats.blocks_total:
            return
        pin = manager.prefix.pin(job.tokens, job.salt)
        self._engine.pins.append(pin)
        self._kept[job.salt, name] = Kept(pin=pin, until_s=self.clock() + data.terms.keep_s)

    def expire(self) -> None:
        """Unpins what has been kept long enough, and forgets what had to be given up."""
        if not self._kept:
            return
        now = self.clock()
        for name, kept in tuple(self._kept.items()):
            if kept.until_s <= now or kept.pin not in self._engine.pins:
                self._drop(kept.pin)
                del self._kept[name]

    def _drop(self, pin: PinnedPrefix) -> None:
        """If that fails, the pin is still known and can be dropped later."""
        if pin in self._engine.pins:
            with suppress(InvalidInput):
                self._engine.manager.prefix.unpin(pin)
            self._engine.pins.remove(pin)
