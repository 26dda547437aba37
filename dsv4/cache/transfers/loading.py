"""Records of a fetch on their way: from tiers into host memory, checked there, and to the device.
Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import takewhile

from dsv4.cache.transfers.aside import Aside, Asked, cancel, progress_of
from dsv4.cache.transfers.copies import HasPayload, Landing, Mark, Rows
from dsv4.cache.transfers.offload import Route
from dsv4.cache.transfers.worker import Checked
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Label, Record
from dsv4.tiers.tier import DONE, State, Ticket

LOGGER = logging.getLogger("dsv4.tiers")
Source = HostTier | Aside
CHECKED_AT_ONCE = 64  # rows per piece: checked ones are copied up while the next ones are checked


class Stage(Enum):
    WAITING = auto()  # for host memory
    LOADING = auto()  # into host memory; or there already, and being checked
    LOADED = auto()  # checked, in host memory
    COPYING = auto()
    HERE = auto()  # where it is wanted
    LOST = auto()


@dataclass(slots=True, eq=False)
class Incoming:
    """One record on its way. `target` is a row on the device; a state has none, because it is
    needed on the host. With a `landing` the end of the record stays in host memory. `sources` have
    yet to be tried; `source` is the last that was."""

    label: Label
    sources: list[Source]
    target: Rows | None = None
    landing: Landing | None = None
    stage: Stage = Stage.WAITING
    row: HostRow | None = None
    source: Source | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """Records that a tier loads. Rows of those that did not arrive are free when it has settled."""

    tier: Source
    items: Sequence[Incoming]
    ticket: Ticket | Asked | None = None  # None while the tier is being called
    rows: list[HostRow] = field(default_factory=list)


class Loading:
    """The records of one fetch that are loaded, checked and copied."""

    def __init__(self, route: Route) -> None:
        self._route, self._host = route, route.host
        self._items: list[Incoming] = []
        self._loads: list[_Load] = []
        self._checks: list[tuple[Checked, Sequence[Incoming]]] = []
        self._copies: list[tuple[Mark, Sequence[Incoming]]] = []

    @property
    def is_copying(self) -> bool:
        """Whether rows of the device are being written to."""
        return bool(self._copies)

    @property
    def is_settled(self) -> bool:
        """Whether nothing else reads or writes its host memory."""
        return not (self._loads or self._checks or self._copies)

    def bring(self, items: Sequence[Incoming]) -> Iterator[None]:
        """Works until all of these are where they are needed, or all before the first that is
        lost."""
        self._items += items
        while True:
            self.advance()
            self._copy()
            found = list(takewhile(lambda item: item.stage is not Stage.LOST, items))
            self._start(found)
            found = list(takewhile(lambda item: item.stage is not Stage.LOST, found))
            if all(item.stage is Stage.HERE for item in found):
                break
            yield
        for item in items[len(found) :]:
            if item.stage is Stage.WAITING:
                self._lose(item)

    def advance(self) -> None:
        """Notes what has arrived. Starts nothing."""
        for load in tuple(self._loads):
            self._end_load(load)
        for check in tuple(self._checks):
            self._end_check(*check)
        for copy in tuple(self._copies):
            self._end_copy(*copy)

    def cancel(self) -> None:
        """Asks tiers not to begin what they have not begun yet."""
        for load in self._loads:
            cancel(load.tier, load.ticket)

    def release(self, kept: Incoming | None) -> None:
        """Releases host memory, except that of one record."""
        for item in self._items:
            if item is not kept:
                self._release(item)

    def abandon(self) -> None:
        """After an interrupt: a tier that was being called may have received the memory, so it
        stays taken."""
        for load in tuple(self._loads):
            if load.ticket is None:
                self._give_up(load)

    # ---- from tiers into host memory -------------------------------------------------------------

    def _start(self, items: Sequence[Incoming]) -> None:
        """Starts what waits, in order, as long as there is host memory and up to the first that no
        tier has any more."""
        waiting = [item for item in items if item.stage is Stage.WAITING]
        here = [item for item in waiting if item.sources[:1] == [self._host]]
        # all at once: using a block counts as using all before it
        for item, row in zip(here, self._host.hold([item.label for item in here]), strict=True):
            item.row = row
            item.sources.pop(0)
        begun: dict[Source, list[Incoming]] = {}
        for item in waiting:
            source = self._find(item)
            if source is None:
                waits = not self.is_settled or bool(begun) or self._route.is_shared
                waits = waits or (item.landing is not None and item.landing.waits)
                if not (item.sources and waits):
                    item.stage = Stage.LOST
                break
            item.stage, item.source = Stage.LOADING, source
            begun.setdefault(source, []).append(item)
        for source, some in begun.items():
            if source is self._host:
                self._check(some)
            else:
                self._load(source, some)

    def _find(self, item: Incoming) -> Source | None:
        """Host memory for a record and the tier that fills it (None if the host tier has it
        already). None if no tier is left, or no memory."""
        if item.row is None and item.sources:
            item.row = self._take(item)
            if item.row is not None:
                return item.sources.pop(0)
            if self._route.host_is_tier:  # it may have been put there meanwhile
                (item.row,) = self._host.hold([item.label])
        return None if item.row is None else self._host

    def _take(self, item: Incoming) -> HostRow | None:
        loan = None
        if item.landing is not None:
            loan = item.landing.lend()
            if loan is None:
                return None
        return self._host.take(item.label, loan=loan)

    def _load(self, tier: Source, items: Sequence[Incoming]) -> None:
        rows = [item.row for item in items if item.row is not None]
        load = _Load(tier, items)
        self._loads.append(load)  # first, so that an interrupt finds what the tier may have
        try:
            load.ticket = tier.load([Record(label=row.label, parts=row.parts) for row in rows])
        except Exception:
            LOGGER.exception("%s raised: a bug", tier.name)
            self._give_up(load)

    def _end_load(self, load: _Load) -> None:
        progress = progress_of(load.tier, load.ticket, len(load.items))
        if progress is None:
            self._give_up(load)
            return
        for item, outcome in zip(load.items, progress.outcomes, strict=True):
            if item.stage is not Stage.LOADING or outcome.state is State.PENDING:
                continue
            if outcome is DONE:
                self._note_checked(item)
            else:
                self._note_missing(load, item, is_refused=outcome.state is State.REFUSED)
        if progress.finished and progress.settled:
            self._loads.remove(load)
            for row in load.rows:
                self._host.release(row)

    def _note_missing(self, load: _Load, item: Incoming, *, is_refused: bool) -> None:
        """A record that the tier does not have, or whose bytes are wrong."""
        assert item.row is not None
        load.rows.append(item.row)
        item.row = None
        if is_refused:
            self._route.note_refusal(item.label.key, load.tier.name)
            item.sources = []
        item.stage = Stage.WAITING if item.sources else Stage.LOST

    def _give_up(self, load: _Load) -> None:
        """Gives up a load of a tier that broke its contract. Rows stay held: it may have them."""
        self._loads.remove(load)
        for item in load.items:
            if item.stage is Stage.LOADING:
                item.row = None
                item.stage = Stage.WAITING if item.sources else Stage.LOST

    # ---- in host memory, and from there to the device --------------------------------------------

    def _check(self, items: Sequence[Incoming]) -> None:
        """Records of the host tier are checked each time that they go up."""
        for first in range(0, len(items), CHECKED_AT_ONCE):
            some = items[first : first + CHECKED_AT_ONCE]
            rows = [item.row for item in some if item.row is not None]
            self._checks.append((self._route.worker.check(rows), some))

    def _end_check(self, check: Checked, items: Sequence[Incoming]) -> None:
        if check.refusals is None:
            return
        self._checks.remove((check, items))
        self._host.note_loads([item.label for item in items], check.refusals)
        for item, refusal in zip(items, check.refusals, strict=True):
            if refusal is None:
                self._note_checked(item)
            else:
                self._route.note_refusal(item.label.key, self._host.name)
                self._lose(item)

    def _note_checked(self, item: Incoming) -> None:
        item.stage = Stage.HERE if item.target is None else Stage.LOADED

    def _copy(self) -> None:
        items = [item for item in self._items if item.stage is Stage.LOADED]
        rows = list[tuple[Rows, HasPayload]]()
        for item in items:
            target = self._landed(item)
            if target is None:
                self._lose(item)
            elif item.row is not None:
                rows.append((target, item.row))
        items = [item for item in items if item.stage is not Stage.LOST]
        if not items:
            return
        try:
            mark = self._route.copies.up(rows)
        except RuntimeError as error:
            self._lose_uncopied(items, error)
            return
        for item in items:
            item.stage = Stage.COPYING
            self._route.records += 1
            self._route.bytes += 0 if item.row is None else item.row.own_bytes
        self._copies.append((mark, items))
        self._end_copy(mark, items)

    def _lose_uncopied(self, items: Sequence[Incoming], error: RuntimeError) -> None:
        LOGGER.warning("%d records stay where they are: %s", len(items), error)
        self._route.copies.finish()  # some may be running
        for item in items:
            self._lose(item)

    @staticmethod
    def _landed(item: Incoming) -> Rows | None:
        """Where what the tier itself has of a record goes."""
        if item.landing is None or item.row is None:
            return item.target
        if item.row.loan is None:
            return item.landing.whole()
        return item.target if item.landing.take_over(item.row.loan) else None

    def _end_copy(self, mark: Mark, items: Sequence[Incoming]) -> None:
        if not mark.passed:
            return
        self._copies.remove((mark, items))
        for item in items:
            item.stage = Stage.HERE
            if self._route.host_is_tier and item.row is not None:
                self._host.publish(item.row)  # the next fetch finds it in a faster tier
            self._release(item)

    def _lose(self, item: Incoming) -> None:
        item.stage = Stage.LOST
        self._release(item)

    def _release(self, item: Incoming) -> None:
        if item.row is not None:
            row, item.row = item.row, None
            self._host.release(row)
