"""Brings what tiers have of a prompt to the device. Torch-free except for the rows that it fills.

    look     which of the prompt's blocks tiers have, after those that are cached
    take     blocks in flight for them
    load     records into host memory
    check    them there
    copy     them from host memory into the blocks
    adopt    index what has arrived, up to the first gap: `admit_request` finds it

`Fetches.steps` is this list as a generator, which yields where a tier or the device is at work;
`Load` does load, check and copy, of many records at once.

Nothing is indexed before its bytes are checked and in place. A record that is missing or refused
ends the prompt there: later records are not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import takewhile

from dsv4.cache.allocator import Asker
from dsv4.cache.polled import Polled
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.pins import PinnedPrefix
from dsv4.cache.prefix.resume import replay_start
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import RequestTable
from dsv4.cache.transfers.aside import Asked, cancel, progress_of
from dsv4.cache.transfers.copies import BlockMemory
from dsv4.cache.transfers.labels import Labels
from dsv4.cache.transfers.loading import Incoming, Loading, Source, Stage
from dsv4.cache.transfers.offload import Route
from dsv4.tiers.host import HostRow
from dsv4.tiers.record import Kind, Label
from dsv4.tiers.tier import DONE, Ticket

LOGGER = logging.getLogger("dsv4.tiers")


class Fetch(Polled):
    """A prompt's records on their way from tiers to the device. `poll` advances it and says whether
    it has finished; then `admit_request` finds what arrived. `cancel` ends it: nothing more of it
    is indexed."""

    _instead = "fetch the prompt once more"

    def __init__(
        self,
        trail: TokenTrail,
        tokens: int,
        *,
        with_state: bool,
        poll: Callable[[Fetch], None],
        cancel: Callable[[Fetch], None],
    ) -> None:
        super().__init__(advance=poll, end=cancel)
        self.trail, self.tokens = trail, tokens  # of the prompt that may be reused
        self.with_state = with_state
        self.cached_blocks = self.fetched_blocks = 0  # at the start; then arrived and indexed
        self.sources: list[str] = []  # of each of these, the name of the tier that had it
        self.cancelled = self.is_over = False
        # ---- for its owner: where it is, and what has been taken for it
        self.steps: Iterator[None] = iter(())
        self.loading: Loading
        self.asked: list[tuple[Source, Ticket | Asked]] = []  # running lookups
        self.pin: PinnedPrefix | None = None
        self.block_ids: list[int] = []  # in flight
        self.snapshot_row: int | None = None
        self.state: Incoming | None = None  # in host memory

    @property
    def done(self) -> bool:
        return self.is_over

    def __repr__(self) -> str:
        how = "cancelled" if self.cancelled else "done" if self.done else "on its way"
        return f"Fetch({how}, {self.fetched_blocks} blocks after {self.cached_blocks})"


class Fetches:
    """All fetches of one manager."""

    def __init__(
        self,
        route: Route,
        *,
        prefix: PrefixCache,
        table: RequestTable,
        labels: Labels,
        blocks: BlockMemory,
    ) -> None:
        self.route, self.open = route, route.open
        self._prefix, self._table, self._labels = prefix, table, labels
        self._blocks = blocks
        self._block_tokens = prefix.schema.block_tokens
        self.tokens = self.started = self.cancelled = 0
        self.tokens_by_tier = {tier.name: 0 for tier in route.tiers}

    def start(self, fetch: Fetch) -> None:
        fetch.loading, fetch.steps = Loading(self.route), self.steps(fetch)
        self.open.append(fetch)
        self.started += 1
        self.advance(fetch)

    def advance(self, fetch: Fetch) -> None:
        """Advances it as far as possible now."""
        if fetch.done:
            return
        try:
            is_over = next(fetch.steps, self) is self
        except Exception:
            self.cancel(fetch)
            raise
        if is_over:
            self._end(fetch)
            self._table.supply.trim_for(fetch.trail)

    def steps(self, fetch: Fetch) -> Iterator[None]:
        """All of a fetch. It may stop at any yield: what it has taken is recorded in the fetch, and
        `_end` gives that back."""
        trail, labels, prefix = fetch.trail, self._labels, self._prefix
        trail.hash_blocks(blocks := fetch.tokens // self._block_tokens)
        cached = fetch.cached_blocks = len(prefix.index.match(trail, blocks))
        if cached:
            fetch.pin = prefix.pins.pin(trail, lasting=False)
        wanted = [labels.of_block(trail, block) for block in range(cached, blocks)]
        items = self._take_blocks(fetch, (yield from self._look(fetch, wanted)))
        yield from fetch.loading.bring(items)
        here = len(list(takewhile(lambda item: item.stage is Stage.HERE, items)))
        fetch.sources = [item.source.name for item in items[:here] if item.source is not None]
        wanted = [*self._states(fetch, cached + here), *self._snapshots(fetch, cached + here)]
        snapshot = None
        for item in (yield from self._look(fetch, wanted)):
            is_state = item.label.kind is Kind.STATE
            if not item.sources or not (is_state or self._take_row(fetch, item)):
                continue
            yield from fetch.loading.bring([item])
            if item.stage is Stage.HERE:
                fetch.state, snapshot = (item, None) if is_state else (None, item)
                break
        self._adopt(fetch, here, snapshot)

    def _look(self, fetch: Fetch, labels: Sequence[Label]) -> Generator[None, None, list[Incoming]]:
        """Asks which tiers have these records. It does not wait for a tier that does not answer if
        another one has the record."""
        for tier in self.route.tiers if labels else ():
            try:
                fetch.asked.append((tier, tier.lookup(labels)))
            except Exception:
                LOGGER.exception("%s raised: a bug", tier.name)
        while True:
            answers = [(*asked, progress_of(*asked, len(labels))) for asked in fetch.asked]
            known = [(tier, answer) for tier, _, answer in answers if answer is not None]
            items = [
                Incoming(label, [tier for tier, answer in known if answer.outcomes[nth] is DONE])
                for nth, label in enumerate(labels)
            ]
            if all(item.sources for item in items) or all(each.finished for _, each in known):
                break
            yield
        fetch.asked = []
        for tier, ticket, answer in answers:
            if answer is not None and not answer.finished:
                cancel(tier, ticket)
        return items

    def _take_blocks(self, fetch: Fetch, items: Sequence[Incoming]) -> list[Incoming]:
        """Takes blocks in flight for what tiers have, up to the first gap, as many as there are."""
        found = list(takewhile(lambda item: item.sources, items))
        count = min(len(found), self._table.allocator.free + self._prefix.blocks.evictable())
        supply, root = self._table.supply, fetch.trail.root
        if supply.limits:
            room = supply.room(root)
            count = count if room is None else min(count, room)
        if count:
            reserved = supply.reserve(count, [Asker(fetch.trail, count)])
            fetch.block_ids = reserved.block_ids
            fetch.block_ids = supply.settle_in_flight(reserved)
        for item, block_id in zip(found, fetch.block_ids, strict=False):
            item.landing = self._blocks.landing(block_id, fetch.trail.root)
            item.target = self._blocks.target(block_id)
        return found[:count]

    def _take_row(self, fetch: Fetch, item: Incoming) -> bool:
        """Whether there is a row for a snapshot; the same row serves all that are tried, one after
        another."""
        if fetch.snapshot_row is None:
            fetch.snapshot_row = self._prefix.rows.take_in_flight()
        if fetch.snapshot_row is not None:
            item.target = self._prefix.pool.bytes[fetch.snapshot_row]
        return fetch.snapshot_row is not None

    def _states(self, fetch: Fetch, blocks: int) -> Iterator[Label]:
        """States of requests that had these blocks and no further one, the longest first."""
        first = blocks * self._block_tokens
        last = min(fetch.tokens, first + self._block_tokens - 1)
        for tokens in range(last, max(first, 1) - 1, -1) if fetch.with_state else ():
            yield self._labels.of_state(fetch.trail, tokens)

    def _snapshots(self, fetch: Fetch, blocks: int) -> Iterator[Label]:
        """Snapshots later than the start of a replay and than those on the device, the latest
        first."""
        prefix = self._prefix
        if not prefix.pool.rows or not prefix.pool.layout.row_bytes:
            return
        replay = replay_start(prefix.schema, blocks * self._block_tokens)
        for block in range(blocks - 1, -1, -1):
            node = prefix.index.get(fetch.trail.digest(block))
            is_cached = node is not None and node.snapshot is not None
            if is_cached or (block + 1) * self._block_tokens < replay:
                return
            yield self._labels.of_block(fetch.trail, block, Kind.SNAPSHOT)

    def _adopt(self, fetch: Fetch, here: int, snapshot: Incoming | None) -> None:
        """Indexes what has arrived."""
        prefix, first = self._prefix, fetch.cached_blocks
        landed, fetch.block_ids = fetch.block_ids[:here], fetch.block_ids[here:]
        unused = prefix.index.land(fetch.trail, first, landed, prefix.notices.landed)
        fetch.block_ids = [*unused, *fetch.block_ids]
        fetch.fetched_blocks = here
        self.tokens += here * self._block_tokens
        for name in fetch.sources:
            self.tokens_by_tier[name] += self._block_tokens
        if snapshot is not None and fetch.snapshot_row is not None:
            row, fetch.snapshot_row = fetch.snapshot_row, None
            prefix.adopt_snapshot(snapshot.label.digest, row)
        if here:
            node = prefix.index.get(fetch.trail.digest(first + here - 1))
            if node is not None:
                prefix.index.touch(node)

    # ---- the end ---------------------------------------------------------------------------------

    def cancel(self, fetch: Fetch) -> None:
        if not fetch.done:
            fetch.cancelled = True
            self.cancelled += 1
            self._end(fetch)

    def _end(self, fetch: Fetch) -> None:
        fetch.is_over = True
        fetch.steps = iter(())
        if fetch.pin is not None:
            pin, fetch.pin = fetch.pin, None
            self._prefix.pins.unpin(pin)
        asked, fetch.asked = fetch.asked, []
        for tier, ticket in asked:
            cancel(tier, ticket)
        fetch.loading.cancel()
        self._give_back(fetch)

    def _give_back(self, fetch: Fetch) -> None:
        """Gives back what an ended fetch had, as far as nothing writes to it any more."""
        loading = fetch.loading
        loading.advance()
        if not loading.is_copying:
            block_ids, fetch.block_ids = fetch.block_ids, []
            self._table.allocator.give_back(block_ids)
            row, fetch.snapshot_row = fetch.snapshot_row, None
            if row is not None:
                self._prefix.rows.give_back(row)
        if loading.is_settled:
            loading.release(None if fetch.cancelled else fetch.state)
            if fetch in self.open:
                self.open.remove(fetch)

    def clean(self) -> None:
        """Returns what ended fetches had, as far as it has become free."""
        for fetch in tuple(self.open):
            if fetch.done:
                self._give_back(fetch)

    def take_state(self, fetch: Fetch) -> HostRow | None:
        """The row of the state that arrived, held; the caller releases it."""
        if fetch.state is None or fetch.cancelled or not fetch.done:
            return None
        row, fetch.state.row = fetch.state.row, None
        return row

    def release(self, fetch: Fetch) -> None:
        """Ends it, and releases a state that arrived but was not taken."""
        self.cancel(fetch)
        row = self.take_state(fetch)
        if row is not None:
            self.route.host.release(row)

    def cancel_now(self, fetch: Fetch) -> None:
        """`cancel`; what it alone kept and is above a quota goes."""
        self.cancel(fetch)
        self._table.supply.trim_for(fetch.trail)

    def abandon_all(self) -> None:
        """After an interrupt: ends everything that is open, whatever was half done. Copies to the
        device are waited for, so nothing is in flight; `recover` finds blocks, rows and pins by
        itself."""
        self.route.copies.finish()
        for fetch in tuple(self.open):
            fetch.pin, fetch.block_ids, fetch.snapshot_row = None, [], None
            fetch.loading.abandon()
            if fetch.done:
                self._give_back(fetch)
            else:
                self.cancel(fetch)
