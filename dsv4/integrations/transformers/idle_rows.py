"""Rows whose cache is gone, kept for the next turn of their conversation."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsv4.cache.manager import KVCacheManager
from dsv4.cache.prefix.prompt import Prompt
from dsv4.cache.requests import Request
from dsv4.integrations.transformers.history import UNKNOWN_ID, History

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KnownRow:
    """A request between two calls, and the ids of its tokens."""

    request: Request
    ids: Ids

    def common(self, manager: KVCacheManager, prompt: Ids) -> int:
        """How many tokens of a prompt the row has and can go on behind. The last one always runs,
        for its logits; rings reach no further back than they do."""
        request, most = self.request, min(self.request.length, len(prompt) - 1)
        differs = np.flatnonzero(self.ids[:most] != prompt[:most])
        same = int(differs[0]) if len(differs) else most
        reach = request.written_tokens - manager.schema.max_rollback_tokens
        is_held = same == request.length or same >= max(reach, request.reused_tokens)
        return same if is_held else 0

    def is_kin(self, prompt: Prompt) -> bool:
        """Whether model and salt are the prompt's."""
        mine, asked = self.request.trail, prompt.trail
        return mine is not None and asked is not None and mine.root == asked.root

    def tell(self, manager: KVCacheManager) -> None:
        """What was generated becomes known, and its blocks are cached."""
        trail = self.request.trail
        known = 0 if trail is None else len(trail.ids)
        if known < self.request.length:
            manager.supply_ids(self.request, self.ids[known:])


def known_rows(requests: Sequence[Request], history: History) -> Iterator[KnownRow]:
    """The rows of a batch that another prompt may go on from: whole ones that were admitted with
    ids, and whose later tokens came as ids too."""
    if not requests:
        return
    ids, mask = np.asarray(history.ids.cpu()), np.asarray(history.mask.cpu())
    for row, request in enumerate(requests):
        tokens = ids[row][mask[row]]
        if request.released or request.trail is None or request.incomplete_from is not None:
            continue
        if request.is_torn or len(tokens) != request.length or (tokens == UNKNOWN_ID).any():
            continue
        yield KnownRow(request=request, ids=tokens)


class IdleRows:
    """Rows stay, with all that they hold, until somebody needs their place: a prompt that begins
    with the tokens of one goes on behind them, to the token. Who lives longest without goes first.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._arrived: deque[tuple[list[Request], History]] = deque()
        self._rows: list[KnownRow] = []  # the oldest first

    def keep(self, row: KnownRow) -> None:
        """A row that nobody needs any more, by whoever has the turn."""
        self._collect()
        self._rows.append(row)

    def park(self, requests: list[Request], history: History) -> None:
        """Rows that nobody holds any more. Safe at any time and from any thread."""
        self._arrived.append((requests, history))

    @property
    def rows(self) -> list[KnownRow]:
        """Those that are kept, the oldest first."""
        self._collect()
        return self._rows

    @property
    def count(self) -> int:
        return len(self.rows)

    def evict(self, rows: int) -> None:
        """Gives the oldest back until so many rows of the manager are free, or none is left."""
        self._collect()
        while self._rows and self._manager.stats().slots_free < rows:
            self._release(self._rows.pop(0))

    def evict_oldest(self) -> bool:
        """Gives one row back; whether there was one."""
        self._collect()
        if self._rows:
            self._release(self._rows.pop(0))
            return True
        return False

    def admit(
        self, prompts: Sequence[Ids], lent: Sequence[KnownRow] = (), *, salt: str | None = None
    ) -> list[Request]:
        """A request per prompt: one of the rows here that goes on, a fork of a row that somebody
        lends, or a new one. Rows of another salt are never used. Raises OutOfSlots, OutOfBlocks,
        and nothing has changed but that older rows are gone."""
        self._collect()
        manager = self._manager
        read = [manager.prompt(prompt, salt) for prompt in prompts]
        takers: dict[KnownRow, list[int]] = {}
        starts = [0] * len(prompts)
        for nth, prompt in enumerate(prompts):
            donor, starts[nth] = self._best(prompt, read[nth], lent)
            if donor is not None and starts[nth] > manager.look_up(read[nth]).start:
                takers.setdefault(donor, []).append(nth)
        taken = [row for row in self._rows if row in takers]
        self._rows = [row for row in self._rows if row not in takers]
        admitted: dict[int, Request] = {}
        try:
            self.evict(len(prompts) - len(taken))
            for donor, nths in takers.items():
                donor.tell(manager)
                own = [donor.request] if donor in taken else []
                requests = [*manager.fork(donor.request, len(nths) - len(own)), *own]
                admitted.update(zip(nths, requests, strict=True))
                for nth, request in zip(nths, requests, strict=True):
                    self._continue(request, starts[nth], read[nth])
            for nth, waiting in enumerate(read):
                if nth not in admitted:
                    admitted[nth] = manager.admit_request(waiting)
        except BaseException:
            for request in {*admitted.values(), *(row.request for row in taken)}:
                manager.release_later(request)
            raise
        return [admitted[nth] for nth in range(len(prompts))]

    def _best(
        self, ids: Ids, prompt: Prompt, lent: Sequence[KnownRow]
    ) -> tuple[KnownRow | None, int]:
        """Who has most of a prompt, and how much; rows that nobody holds before those that are
        lent, the newest first."""
        best: tuple[KnownRow | None, int] = None, 0
        for row in (*reversed(self._rows), *lent):
            if row.request.released or row.request.is_torn:
                continue  # interrupted
            common = row.common(self._manager, ids)
            if common > best[1] and row.is_kin(prompt):
                best = row, common
        return best

    def _continue(self, request: Request, start: int, prompt: Prompt) -> None:
        if request.length > start:
            self._manager.rewind(request, start)
        self._manager.continue_request(request, prompt)

    def _release(self, row: KnownRow) -> None:
        if not row.request.released:
            if not row.request.is_torn:
                row.tell(self._manager)
            self._manager.release_request(row.request)

    def _collect(self) -> None:
        """Takes in what has arrived; rows that no prompt could go on from are released."""
        while self._arrived:
            requests, history = self._arrived[0]
            known = list(known_rows(requests, history))
            self._rows.extend(known)
            kept = {row.request for row in known}
            for request in requests:
                if request not in kept and not request.released:
                    self._manager.release_request(request)
            self._arrived.popleft()
