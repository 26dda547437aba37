"""Calls each tier from a thread of its own, so that no caller waits for a slow call. Torch-free.

The thread survives whatever a tier raises: a library's panic need not be an Exception.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from dsv4.tiers.record import Label, Record
from dsv4.tiers.tier import MISSING, PENDING, Progress, Ticket, Tier

LOGGER = logging.getLogger("dsv4.tiers")
_POLL_S = 0.0005
MOST_ASKED = 1_024  # calls that wait for a tier; further ones are answered as if it had nothing


@dataclass(slots=True, eq=False)
class Asked:
    """A call that was or will be made, and the last known progress of its ticket."""

    call: Callable[[], Ticket]
    progress: Progress
    ticket: Ticket | None = None
    is_cancelled: bool = False
    error: Exception | None = None  # the tier broke its contract


class Aside:
    """A tier as a fetch sees it. Calls return at once, even if the tier's do not."""

    def __init__(self, tier: Tier) -> None:
        self.name, self._tier = tier.name, tier
        self._jobs: SimpleQueue[Callable[[], Asked | None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def lookup(self, labels: Sequence[Label]) -> Asked:
        tier = self._tier  # waiting calls do not keep their callers alive
        return self._ask(lambda: tier.lookup(labels), len(labels))

    def load(self, records: Sequence[Record]) -> Asked:
        tier = self._tier
        return self._ask(lambda: tier.load(records), len(records))

    def poll(self, asked: Asked) -> Progress:
        """The last known progress. Raises what the tier raised."""
        if asked.error is not None:
            raise asked.error
        return asked.progress

    def cancel(self, asked: Asked) -> None:
        asked.is_cancelled = True
        tier = self._tier
        self._send(lambda: _cancel(tier, asked))

    def use(self, blocks: Sequence[Label], snapshot: Label | None) -> None:
        """Reports a use above to a tier that wants to know. If too many calls wait, it is
        dropped."""
        use = getattr(self._tier, "use", None)
        if use is not None and self._jobs.qsize() < MOST_ASKED:
            self._send(lambda: use(blocks, snapshot))

    def _ask(self, call: Callable[[], Ticket], count: int) -> Asked:
        if self._jobs.qsize() >= MOST_ASKED:
            return Asked(call, Progress(outcomes=(MISSING,) * count, settled=True))
        asked = Asked(call, Progress(outcomes=(PENDING,) * count, settled=False))
        self._send(lambda: _begin(asked))
        return asked

    def _send(self, job: Callable[[], Asked | None]) -> None:
        self._jobs.put(job)
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(
                target=_work, args=(self._tier, self._jobs), name=f"dsv4-{self.name}", daemon=True
            )
            thread.start()
            self._thread = thread


def _begin(asked: Asked) -> Asked | None:
    if asked.is_cancelled:
        count = len(asked.progress.outcomes)
        asked.progress = Progress(outcomes=(MISSING,) * count, settled=True)
        return None
    try:
        asked.ticket = asked.call()
    except BaseException as error:
        asked.error = _for_caller(error)
        return None
    return asked


def _for_caller(error: BaseException) -> Exception:
    """What may be raised in the thread that asks."""
    return error if isinstance(error, Exception) else RuntimeError(repr(error))


def _cancel(tier: Tier, asked: Asked) -> None:
    if asked.ticket is not None:
        tier.cancel(asked.ticket)


def _work(tier: Tier, jobs: SimpleQueue[Callable[[], Asked | None] | None]) -> None:
    """Works until the queue says that no more callers will come."""
    under_way: list[Asked] = []
    while True:
        with suppress(Empty):
            job = jobs.get(timeout=_POLL_S if under_way else None)
            if job is None:
                return
            try:
                begun = job()
            except BaseException:
                LOGGER.exception("%s raised: a bug", tier.name)
            else:
                under_way += [] if begun is None else [begun]
                del begun
            del job
        under_way = [asked for asked in under_way if not _is_over(tier, asked)]


def _is_over(tier: Tier, asked: Asked) -> bool:
    assert asked.ticket is not None
    try:
        asked.progress = progress = tier.poll(asked.ticket)
        return progress.finished and progress.settled
    except BaseException as error:
        asked.error = _for_caller(error)
        return True


def progress_of(
    tier: Any, ticket: Any, count: int, *, survives: type[BaseException] = Exception
) -> Progress | None:
    """The progress of a ticket for `count` records; None, and a line in the log, from a tier that
    breaks its contract: it raises, or answers for other records."""
    try:
        progress: Progress = tier.poll(ticket)
        if len(progress.outcomes) == count:
            return progress
    except survives:
        LOGGER.exception("%s raised: a bug", tier.name)
        return None
    LOGGER.error("%s has %d answers for %d: a bug", tier.name, len(progress.outcomes), count)
    return None


def cancel(tier: Any, ticket: Any) -> None:
    """Cancels; a tier that raises is only logged."""
    try:
        tier.cancel(ticket)
    except Exception:
        LOGGER.exception("%s raised: a bug", tier.name)
