"""What tiers have of a prompt, on its way to the device. Torch-free but for the rows it fills.

    look     which of the prompt's blocks a tier has, behind those that are cached
    load     blocks in flight are taken; records come into host memory and are checked there
    copy     from host memory into the blocks
    adopt    what is there, up to the first that is not, is indexed: `admit_request` finds it

Nothing is indexed before its bytes are checked and in place. A record that is missing or refused
ends the prompt there: what is behind it is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.cache.prefix.resume import replay_start
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import RequestTable
from dsv4.cache.transfers.aside import Aside, Asked
from dsv4.cache.transfers.copies import Copies, Mark
from dsv4.cache.transfers.courier import Checked, Courier, progress_of
from dsv4.cache.transfers.labels import Labels
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Kind, Label, Record
from dsv4.tiers.tier import DONE, State, Ticket

if TYPE_CHECKING:
    from torch import Tensor

LOGGER = logging.getLogger("dsv4.tiers")
Source = HostTier | Aside
CHECKED_AT_ONCE = 64  # rows: those that are checked go up while the next ones are


class _Stage(Enum):
    WAITING = auto()
    LOADING = auto()
    LOADED = auto()  # checked, in host memory
    COPYING = auto()
    HERE = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class _Item:
    """One record on its way. `target` is a row on the device; a state has none and stays on the
    host."""

    label: Label
    sources: list[Source]
    target: Tensor | None
    stage: _Stage = _Stage.WAITING
    row: HostRow | None = None


@dataclass(slots=True, eq=False)
class _Load:
    tier: Source
    ticket: Ticket | Asked
    items: list[_Item]
    rows: list[HostRow] = field(default_factory=list)  # to release when the tier is done with them


@dataclass(slots=True, eq=False)
class _Look:
    """Labels that tiers were asked for."""

    labels: Sequence[Label]
    tickets: list[tuple[Source, Ticket | Asked]]
    sources: list[list[Source]] | None = None  # of each label, once known


class Fetch:
    """A prompt's records on their way from tiers to the device. `poll` moves it on and says whether
    it is over; then `admit_request` finds what came. `cancel` ends it: memory that a tier or the
    device still writes to is kept apart until it does not."""

    def __init__(
        self,
        trail: TokenTrail,
        tokens: int,
        *,
        with_state: bool,
        poll: Callable[[Fetch], None],
        cancel: Callable[[Fetch], None],
    ) -> None:
        self._poll, self._cancel = poll, cancel
        self.trail, self.tokens = trail, tokens  # of the prompt that may be reused
        self.with_state = with_state
        self.cached_blocks = 0  # of them on the device when it began
        self.fetched_blocks = 0  # behind those: came, and are indexed
        self.fetched_bytes = 0
        self.done = False
        self.cancelled = False
        # ---- its owner's
        self.pin: PinnedPrefix | None = None
        self.look: _Look | None = None
        self.state_look: _Look | None = None
        self.candidates: list[_Item] = []  # states and snapshots, the best first
        self.block_ids: list[int] = []  # in flight
        self.items: list[_Item] = []  # blocks, in their order
        self.snapshot: _Item | None = None
        self.snapshot_row: int | None = None
        self.state: _Item | None = None
        self.loads: list[_Load] = []
        self.checks: list[tuple[Checked, list[_Item]]] = []
        self.copies: list[tuple[Mark, list[_Item]]] = []

    def poll(self) -> bool:
        """Moves on what can be moved on; whether it is over. Never waits."""
        if not self.done:
            self._poll(self)
        return self.done

    def cancel(self) -> None:
        """Ends it. Nothing of it is indexed that is not yet."""
        if not self.done:
            self._cancel(self)

    def __repr__(self) -> str:
        how = "cancelled" if self.cancelled else "done" if self.done else "on its way"
        return f"Fetch({how}, {self.fetched_blocks} blocks behind {self.cached_blocks})"

    @property
    def all_items(self) -> Iterable[_Item]:
        yield from self.items
        for item in (self.snapshot, self.state):
            if item is not None:
                yield item


class Fetches:
    """Everything that is on its way to one device."""

    def __init__(
        self,
        *,
        prefix: PrefixCache,
        table: RequestTable,
        labels: Labels,
        tiers: Sequence[Source],
        host: HostTier,
        keeps: bool,
        copies: Copies,
        courier: Courier,
        block_arena: Tensor,
    ) -> None:
        self._prefix, self._table, self._labels = prefix, table, labels
        self._tiers, self._host, self._keeps = tuple(tiers), host, keeps
        self._copies, self._courier = copies, courier
        self._block_arena = block_arena
        self._block_tokens = prefix.schema.block_tokens
        self.open: list[Fetch] = []  # with memory that is not given back yet
        self.refused = self.records = self.bytes = self.tokens = self.started = self.cancelled = 0

    def start(self, fetch: Fetch) -> None:
        """Asks the tiers."""
        trail, blocks = fetch.trail, fetch.tokens // self._block_tokens
        trail.hash_blocks(blocks)
        nodes = self._prefix.index.match(trail, blocks)
        fetch.cached_blocks = len(nodes)
        labels = [self._labels.of_block(trail, n) for n in range(len(nodes), blocks)]
        self.open.append(fetch)
        self.started += 1
        if nodes:
            fetch.pin = self._prefix.pins.pin(trail, lasting=False)
        fetch.look = self._ask(labels)
        self.advance(fetch)

    def advance(self, fetch: Fetch) -> None:
        """As far as it goes now."""
        if fetch.done:
            return
        if fetch.look is not None:
            if not self._answered(fetch.look):
                return
            self._take_blocks(fetch)
        self._move(fetch)
        if self._blocks_settled(fetch):
            self._settle_state(fetch)
            if fetch.done:
                self._move(fetch)

    # ---- look ------------------------------------------------------------------------------------

    def _ask(self, labels: Sequence[Label]) -> _Look:
        look = _Look(labels, [])
        for tier in self._tiers if labels else ():
            try:
                look.tickets.append((tier, tier.lookup(labels)))
            except Exception:
                LOGGER.exception("%s raised: a bug", tier.name)
        return look

    def _answered(self, look: _Look) -> bool:
        """Whether it is known where each record is. A tier that says nothing is not waited for
        where another one has the record."""
        count = len(look.labels)
        asked = [(tier, ticket, progress_of(tier, ticket, count)) for tier, ticket in look.tickets]
        progress = [(tier, each) for tier, _, each in asked if each is not None]
        sources = [
            [tier for tier, each in progress if each.outcomes[nth] is DONE]
            for nth in range(len(look.labels))
        ]
        if not all(sources) and not all(each.finished for _, each in progress):
            return False
        for tier, ticket, each in asked:
            if each is not None and not each.finished:
                _cancel(tier, ticket)
        look.sources = sources
        return True

    def _take_blocks(self, fetch: Fetch) -> None:
        """Blocks in flight for what tiers have, without a gap, as many as there are."""
        look = fetch.look
        assert look is not None
        assert look.sources is not None
        fetch.look = None
        found = 0
        while found < len(look.sources) and look.sources[found]:
            found += 1
        table, prefix = self._table, self._prefix
        count = min(found, table.allocator.free + prefix.evictable_blocks())
        if count:
            reserved = table.reserve(count)
            fetch.block_ids = reserved.block_ids
            fetch.block_ids = table.settle_in_flight(reserved)
        for nth, block_id in enumerate(fetch.block_ids):
            item = _Item(look.labels[nth], look.sources[nth], self._block_arena[block_id])
            fetch.items.append(item)

    # ---- load and copy ---------------------------------------------------------------------------

    def _move(self, fetch: Fetch) -> None:
        for load in tuple(fetch.loads):
            self._poll_load(fetch, load)
        for check, items in tuple(fetch.checks):
            if check.refusals is not None:
                fetch.checks.remove((check, items))
                self._end_check(check, items)
        self._end_copies(fetch)
        if not fetch.done:
            self._copy(fetch)
            self._start_loads(fetch)
        elif not any(item.stage is _Stage.COPYING for item in fetch.all_items):
            self._give_blocks_back(fetch)
        if fetch.done and not (fetch.loads or fetch.checks or fetch.copies):
            for item in fetch.all_items:
                if item is not fetch.state or fetch.cancelled:
                    self._release(item)
            if fetch in self.open:
                self.open.remove(fetch)

    def _poll_load(self, fetch: Fetch, load: _Load) -> None:
        progress = progress_of(load.tier, load.ticket, len(load.items))
        if progress is None:
            fetch.loads.remove(load)
            self._give_up(fetch, load.items)
            return
        for item, outcome in zip(load.items, progress.outcomes, strict=True):
            if item.stage is not _Stage.LOADING or outcome.state is State.PENDING:
                continue
            if outcome is DONE:
                item.stage = _Stage.LOADED
                continue
            assert item.row is not None
            load.rows.append(item.row)
            item.row = None
            if outcome.state is State.REFUSED:
                self.refused += 1
                item.sources = []
            item.stage = _Stage.WAITING if item.sources and not fetch.done else _Stage.LOST
        if progress.finished and progress.settled:
            fetch.loads.remove(load)
            for row in load.rows:
                self._host.release(row)

    def _give_up(self, fetch: Fetch, items: Sequence[_Item]) -> None:
        """Of a tier that broke its word. Rows stay held: it may have them."""
        for item in items:
            if item.stage is _Stage.LOADING:
                item.row = None
                item.stage = _Stage.WAITING if item.sources and not fetch.done else _Stage.LOST

    def _end_check(self, check: Checked, items: list[_Item]) -> None:
        assert check.refusals is not None
        self._host.note_loads([item.label for item in items], check.refusals)
        for item, refusal in zip(items, check.refusals, strict=True):
            if refusal is None:
                item.stage = _Stage.LOADED
                continue
            self.refused += 1
            item.stage = _Stage.LOST
            self._release(item)

    def _end_copies(self, fetch: Fetch) -> None:
        for mark, items in tuple(fetch.copies):
            if not mark.passed:
                continue
            fetch.copies.remove((mark, items))
            for item in items:
                item.stage = _Stage.HERE
                if self._keeps and item.row is not None:
                    self._host.publish(item.row)  # the next one finds it nearer
                self._release(item)

    def _copy(self, fetch: Fetch) -> None:
        ready = [item for item in fetch.all_items if item.stage is _Stage.LOADED]
        rows = [
            (item, item.target, item.row.parts)
            for item in ready
            if item.target is not None and item.row is not None
        ]
        if not rows:
            return
        items = [item for item, _, _ in rows]
        for item in items:
            item.stage = _Stage.COPYING
        try:
            mark = self._copies.up([(target, parts) for _, target, parts in rows])
        except RuntimeError as error:
            LOGGER.warning("%d records stay where they are: %s", len(items), error)
            self._copies.finish()  # some may be on their way
            for item in items:
                item.stage = _Stage.LOST
                self._release(item)
            return
        fetch.copies.append((mark, items))
        for item in items:
            self.records += 1
            self.bytes += item.label.payload_bytes
            fetch.fetched_bytes += item.label.payload_bytes
        self._end_copies(fetch)

    def _start_loads(self, fetch: Fetch) -> None:
        """Loads what waits, as far as host memory goes, up to the first record that is lost."""
        wanted: dict[int, list[_Item]] = {}
        lost = False
        self._hold_at_once(fetch)
        for item in fetch.all_items:
            is_block = item.label.kind is Kind.BLOCK
            if item.stage is _Stage.WAITING and is_block and lost:
                item.stage = _Stage.LOST
                self._release(item)
            if item.stage is _Stage.WAITING and not self._begin(fetch, item, wanted):
                break
            lost = lost or (is_block and item.stage is _Stage.LOST)
        for nth, items in wanted.items():
            if nth < 0:
                for first in range(0, len(items), CHECKED_AT_ONCE):
                    some = items[first : first + CHECKED_AT_ONCE]
                    rows = [item.row for item in some if item.row is not None]
                    fetch.checks.append((self._courier.check(rows), some))
                continue
            tier = self._tiers[nth]
            records = [
                Record(label=item.label, parts=item.row.parts)
                for item in items
                if item.row is not None
            ]
            try:
                fetch.loads.append(_Load(tier, tier.load(records), items))
            except Exception:
                LOGGER.exception("%s raised: a bug", tier.name)
                self._give_up(fetch, items)

    def _begin(self, fetch: Fetch, item: _Item, wanted: dict[int, list[_Item]]) -> bool:
        """Host memory for one record, and where it comes from. False if there is none now."""
        while item.sources:
            tier = item.sources[0]
            if tier is self._host:
                if item.row is None:
                    (item.row,) = self._host.hold([item.label])
                item.sources.pop(0)
                if item.row is None:
                    continue
                item.stage = _Stage.LOADING
                wanted.setdefault(-1, []).append(item)
                return True
            item.row = self._host.take(item.label)
            if item.row is None:
                if self._keeps and self._host.holds(item.label.key):
                    item.sources.insert(0, self._host)
                    continue
                if fetch.loads or fetch.checks or fetch.copies or wanted or self._is_busy(fetch):
                    return False
                break
            item.sources.pop(0)
            item.stage = _Stage.LOADING
            wanted.setdefault(self._tiers.index(tier), []).append(item)
            return True
        item.stage = _Stage.LOST
        return True

    def _hold_at_once(self, fetch: Fetch) -> None:
        """Rows of the host tier for all that wait for it: a use of a block is one of all before."""
        waiting = [
            item
            for item in fetch.all_items
            if item.stage is _Stage.WAITING
            and item.row is None
            and item.sources
            and item.sources[0] is self._host
        ]
        if len(waiting) > 1:
            rows = self._host.hold([item.label for item in waiting])
            for item, row in zip(waiting, rows, strict=True):
                item.row = row

    def _is_busy(self, fetch: Fetch) -> bool:
        """Whether somebody else may give host memory back."""
        return len(self.open) > 1 or not self._courier.idle

    def _release(self, item: _Item) -> None:
        if item.row is not None:
            row, item.row = item.row, None
            self._host.release(row)

    # ---- adopt -----------------------------------------------------------------------------------

    def _blocks_settled(self, fetch: Fetch) -> bool:
        for item in fetch.items:
            if item.stage is _Stage.LOST:
                return True
            if item.stage is not _Stage.HERE:
                return False
        return True

    def _settle_state(self, fetch: Fetch) -> None:
        """All blocks are there that will be: finds the best state behind them, then adopts all."""
        here = self._count_here(fetch)
        behind = fetch.cached_blocks + here
        if fetch.state_look is None:
            labels = [*self._wanted_states(fetch, behind), *self._wanted_snapshots(fetch, behind)]
            fetch.state_look = self._ask(labels)
        look = fetch.state_look
        if look.sources is None:
            if not self._answered(look):
                return
            assert look.sources is not None
            found = zip(look.labels, look.sources, strict=True)
            fetch.candidates = [_Item(label, sources, None) for label, sources in found if sources]
        while (item := fetch.state or fetch.snapshot) is None or item.stage is _Stage.LOST:
            fetch.state = fetch.snapshot = None
            if not fetch.candidates:
                break
            item = fetch.candidates.pop(0)
            if item.label.kind is Kind.STATE:
                fetch.state = item
            else:
                if fetch.snapshot_row is None:
                    fetch.snapshot_row = self._prefix.rows.take_in_flight()
                if fetch.snapshot_row is None:
                    break
                item.target = self._prefix.pool.bytes[fetch.snapshot_row]
                fetch.snapshot = item
            self._move(fetch)
        ready = (_Stage.LOADED,) if item is fetch.state else (_Stage.HERE, _Stage.LOST)
        if item is None or item.stage in ready:
            self._adopt(fetch, here)

    def _wanted_states(self, fetch: Fetch, behind: int) -> list[Label]:
        """States of requests that had these blocks and no further one, the longest first."""
        first = behind * self._block_tokens
        if not fetch.with_state:
            return []
        last = min(fetch.tokens, first + self._block_tokens - 1)
        lengths = range(last, max(first, 1) - 1, -1)
        return [self._labels.of_state(fetch.trail, tokens) for tokens in lengths]

    def _wanted_snapshots(self, fetch: Fetch, behind: int) -> list[Label]:
        """Of the boundaries that make a shorter way than a replay and than what is cached."""
        if not self._prefix.pool.rows or not self._prefix.has_state_bytes:
            return []
        trail, labels = fetch.trail, []
        first = replay_start(self._prefix.schema, behind * self._block_tokens)
        for block in range(behind - 1, -1, -1):
            if (block + 1) * self._block_tokens < first:
                break
            node = self._prefix.index.get(trail.digest(block))
            if node is not None and node.snapshot is not None:
                break
            labels.append(self._labels.of_block(trail, block, Kind.SNAPSHOT))
        return labels

    def _count_here(self, fetch: Fetch) -> int:
        here = 0
        while here < len(fetch.items) and fetch.items[here].stage is _Stage.HERE:
            here += 1
        return here

    def _adopt(self, fetch: Fetch, here: int) -> None:
        landed, fetch.block_ids = fetch.block_ids[:here], fetch.block_ids[here:]
        prefix = self._prefix
        unused = prefix.adopt(fetch.trail, fetch.cached_blocks, landed)
        fetch.block_ids = [*unused, *fetch.block_ids]
        fetch.fetched_blocks = here
        self.tokens += here * self._block_tokens
        if fetch.snapshot is not None and fetch.snapshot.stage is _Stage.HERE:
            assert fetch.snapshot_row is not None
            row, fetch.snapshot_row = fetch.snapshot_row, None
            prefix.adopt_snapshot(fetch.snapshot.label.digest, row)
        if here:
            node = prefix.index.get(fetch.trail.digest(fetch.cached_blocks + here - 1))
            if node is not None:
                prefix.index.touch(node)
        self._finish(fetch)

    def _finish(self, fetch: Fetch) -> None:
        fetch.done = True
        if fetch.pin is not None:
            pin, fetch.pin = fetch.pin, None
            self._prefix.pins.unpin(pin)
        for load in fetch.loads:
            _cancel(load.tier, load.ticket)

    def cancel(self, fetch: Fetch) -> None:
        if fetch.done:
            return
        fetch.cancelled = True
        self.cancelled += 1
        if fetch.look is not None:
            for tier, ticket in fetch.look.tickets:
                _cancel(tier, ticket)
            fetch.look = None
        self._finish(fetch)
        self._move(fetch)

    def _give_blocks_back(self, fetch: Fetch) -> None:
        if fetch.block_ids:
            block_ids, fetch.block_ids = fetch.block_ids, []
            self._table.allocator.give_back(block_ids)
        if fetch.snapshot_row is not None:
            row, fetch.snapshot_row = fetch.snapshot_row, None
            self._prefix.rows.give_back(row)

    def clean(self) -> None:
        """Takes back what ended fetches left behind, as far as it is free now."""
        for fetch in tuple(self.open):
            if fetch.done:
                self._move(fetch)

    def take_state(self, fetch: Fetch) -> HostRow | None:
        """The row of the state that came, held; the caller releases it."""
        item = fetch.state
        if item is None or item.stage is not _Stage.LOADED or not fetch.done:
            return None
        row, item.row = item.row, None
        return row

    def let_go(self, fetch: Fetch) -> None:
        """Ends it, with a state that came and that nobody took."""
        self.cancel(fetch)
        row = self.take_state(fetch)
        if row is not None:
            self._host.release(row)

    def abandon_all(self) -> None:
        """After an interrupt: all that is open ends, whatever was half done. Copies to the device
        are waited for, so that nothing is in flight. The prefix cache drops what fetches pinned."""
        for fetch in self.open:
            self._copies.finish()
            fetch.pin, fetch.block_ids, fetch.snapshot_row = None, [], None
            if not fetch.done:
                fetch.done = fetch.cancelled = True
                self.cancelled += 1
            for load in fetch.loads:
                _cancel(load.tier, load.ticket)
            for _, items in fetch.copies:
                for item in items:
                    item.stage = _Stage.HERE
            for item in fetch.all_items:
                if item.stage is _Stage.COPYING:
                    item.stage = _Stage.LOST


def _cancel(tier: Source, ticket: Any) -> None:
    try:
        tier.cancel(ticket)
    except Exception:
        LOGGER.exception("%s raised: a bug", tier.name)
