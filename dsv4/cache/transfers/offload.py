"""Offloading: what was cached is copied to host memory, and from there a worker stores it in the
tiers."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from dsv4.cache.changes import LOGGER
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.observer import NewlyCached, Notices, Observer
from dsv4.cache.prefix.resume import PrefixMatch
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request
from dsv4.cache.state import copy_payload
from dsv4.cache.transfers.aside import Aside
from dsv4.cache.transfers.copies import BlockMemory, Copies, Mark, Rows
from dsv4.cache.transfers.labels import Labels
from dsv4.cache.transfers.worker import CopyBatch, Outgoing, Worker
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Key, Kind

if TYPE_CHECKING:
    from dsv4.cache.transfers.fetch import Fetch

MOST_WAITING = 16_384  # records in the outbox; beyond that the newest ones are dropped
MOST_COPYING = 256  # copies on the way down: a full stream would block launches


@dataclass(slots=True, kw_only=True)
class Route:
    """What all records of a manager pass through, down and up, and the counts on the way up."""

    tiers: Sequence[HostTier | Aside]  # the fastest first
    host: HostTier
    host_is_tier: bool  # otherwise records only pass through it
    has_below: bool  # whether there are other tiers
    copies: Copies
    worker: Worker
    notices: Notices
    open: list[Fetch] = field(default_factory=list)  # whose memory is not released yet
    refused: int = 0
    records: int = 0
    bytes: int = 0

    @property
    def is_shared(self) -> bool:
        """Whether anything other than the asking fetch may release host memory."""
        return len(self.open) > 1 or not self.worker.idle

    def note_refusal(self, key: Key, tier: str) -> None:
        """A tier had a record, but its bytes are not what it says."""
        self.refused += 1
        if key.kind is Kind.BLOCK:
            self.notices.refused(key.digest, tier)


class Offload(Observer):
    """The outbox, and copies that are running. Nothing here waits, and a record that fails raises
    nothing: it is dropped and counted."""

    def __init__(
        self,
        route: Route,
        *,
        prefix: PrefixCache,
        labels: Labels,
        blocks: BlockMemory,
        slot_arena: Tensor,
    ) -> None:
        self._route, self._host, self._worker = route, route.host, route.worker
        self._prefix, self._labels = prefix, labels
        self._blocks, self._slot_arena = blocks, slot_arena
        self.outbox: deque[NewlyCached] = deque()
        self._begun: list[Outgoing] = []  # host rows that no batch has yet
        self._batches: list[CopyBatch] = []  # the oldest first
        self._copying = 0
        self._newest: Mark | None = None
        self.copied = self.copied_bytes = self._stored = self._dropped = 0
        weakref.finalize(self, self._worker.adopt, self._batches).atexit = False

    @property
    def waiting(self) -> int:
        """Records that are neither stored nor dropped."""
        return len(self.outbox) + self._copying + self._worker.waiting

    @property
    def stored(self) -> int:
        return self._stored + len(self._worker.stored)

    @property
    def dropped(self) -> int:
        return self._dropped + self._worker.dropped

    def pump(self) -> None:
        """Advances what is on its way down: after each step, and with each call of tiers."""
        self._note_stored()
        self._blocks.pump()
        while self._batches and self._batches[0].mark.passed:
            self._send(self._batches.pop(0))
        most = MOST_WAITING if self._worker.takes_more else 0
        while len(self.outbox) > most:  # the beginnings of prompts are worth most
            self.outbox.pop()
            self._dropped += 1
        if self.outbox and self._copying < MOST_COPYING:
            self._copy_down()

    def _copy_down(self) -> None:
        """Begins to copy what is in the outbox, as long as there is host memory."""
        rows: list[tuple[Rows, Outgoing]] = []
        self._begun = []
        while self.outbox and self._copying + len(rows) < MOST_COPYING:
            if not self._is_there(self.outbox[0]):  # evicted before its turn
                self._dropped += 1
            elif (source := self._source(self.outbox[0])) is None:
                break
            elif (record := self._take_row(self.outbox[0])) is not None:
                rows.append((source, record))
            elif self._will_have_room(self.outbox[0], is_first=not rows):
                break
            self.outbox.popleft()
        if rows:
            self.copy(rows)

    def _take_row(self, new: NewlyCached) -> Outgoing | None:
        """Host memory for a record; None if there is none now, or the record exists already."""
        row, loan = None, None
        if self._blocks.shares and not new.is_snapshot:
            loan = self._blocks.loan(new.node.block_id)
        if loan is not None or not self._blocks.shares or new.is_snapshot:
            label = self._labels.of_cached(new)
            row = self._host.take(label, passing=self._route.has_below, loan=loan)
        if row is None:
            return None
        self._begun.append(Outgoing(row))
        return self._begun[-1]

    def _will_have_room(self, new: NewlyCached, *, is_first: bool) -> bool:
        """Whether a record that got no host memory should wait for some. If not, it exists already
        or is dropped."""
        route, label = self._route, self._labels.of_cached(new)
        if route.host_is_tier and self._host.holds(label.key):
            new.node.stored = new.node.stored or not new.is_snapshot
            if self._blocks.shares and not new.is_snapshot:
                loan = self._blocks.loan(new.node.block_id)
                if loan is not None:  # computed again: one of two equal rows is enough
                    self._host.take_loan(label, loan)
            return False
        loan_bytes = 0 if new.is_snapshot else self._blocks.loan_bytes
        is_full = self._host.is_full(label, loan_bytes=loan_bytes)
        is_wanted = route.has_below or not (is_full or self._host.is_lost(label))
        is_busy = not is_first or self._copying > 0 or not self._worker.idle or bool(route.open)
        if is_wanted and is_busy:
            return True
        self._dropped += 1
        return False

    def copy(self, rows: Sequence[tuple[Rows, Outgoing]]) -> None:
        """Starts to copy rows of the device into host rows, which the worker gets afterwards."""
        records = [record for _, record in rows]
        try:
            mark = self._route.copies.down([(source, each.row) for source, each in rows])
        except RuntimeError as error:
            LOGGER.warning("%d records are not kept: %s", len(records), error)
            self._fail(records)
            return
        self._newest = mark
        payload_bytes = sum(record.row.own_bytes for record in records)
        self._note_copying(CopyBatch(mark, records), payload_bytes)
        if mark.passed and len(self._batches) == 1:
            self._send(self._batches.pop())

    def _note_copying(self, batch: CopyBatch, payload_bytes: int) -> None:
        self._batches.append(batch)
        self._begun = []
        self._copying += len(batch.records)
        self.copied += len(batch.records)
        self.copied_bytes += payload_bytes
        if not batch.mark.passed:
            self._worker.start()  # in case the owner is gone before it can send it

    def _fail(self, records: Sequence[Outgoing]) -> None:
        """Ends copies that the device refused; some may be running."""
        self._begun = []
        self._dropped += len(records)
        self._route.copies.finish()
        for record in records:
            record.stored = False
            self._host.release(record.row)

    def _send(self, batch: CopyBatch) -> None:
        self._copying -= len(batch.records)
        self._worker.send(batch.records)

    def _is_there(self, new: NewlyCached) -> bool:
        """Whether a record's bytes are still cached."""
        if self._prefix.index.get(new.node.digest) is not new.node:
            return False
        return new.node.snapshot is not None or not new.is_snapshot

    def _source(self, new: NewlyCached) -> Rows | None:
        """What is to be copied for a record; None if it has to wait."""
        if not new.is_snapshot:
            return self._blocks.source(new.node.block_id)
        assert new.node.snapshot is not None
        return self._prefix.pool.bytes[new.node.snapshot]

    def _note_stored(self) -> None:
        stored = self._worker.stored
        while stored:
            key = stored.popleft()
            self._stored += 1
            if key.kind is Kind.BLOCK:
                node = self._prefix.index.get(key.digest)
                if node is not None:
                    node.stored = True

    # ---- what the prefix cache reports to its observer -------------------------------------------

    def cached(self, new: NewlyCached, trail: TokenTrail) -> None:
        """Queues it, to be copied with the next `pump`."""
        self.outbox.append(new)

    def before_reuse(self) -> None:
        """Makes what comes next on the current stream wait until the copy of this memory has
        finished."""
        if self._newest is not None:
            self._newest.hold_back()
            if self._newest.passed:
                self._newest = None

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """What is used on the device counts as used below; otherwise it would be evicted first
        there."""
        if not match.nodes or not self._worker.takes_more:
            return
        blocks, snapshot = self._labels.of_blocks(trail, len(match.nodes)), None
        if match.snapshot is not None and self._labels.payload_bytes(Kind.SNAPSHOT):
            block = match.resume.start // self._prefix.schema.block_tokens - 1
            snapshot = self._labels.of_block(trail, block, Kind.SNAPSHOT)
        for tier in self._route.tiers:
            tier.use(blocks, snapshot)

    # ---- the end ---------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether everything that was cached is stored below, or dropped."""
        if self.outbox or self._batches or not self._worker.idle:
            return False
        self._note_stored()
        return True

    def release_begun(self) -> None:
        """After an interrupt: rows of records whose copies were not begun go back."""
        in_batches = {id(record) for batch in self._batches for record in batch.records}
        for record in self._begun:
            if id(record) not in in_batches:
                self._host.release(record.row)
        self._begun = []
        self._copying = sum(len(batch.records) for batch in self._batches)

    # ---- the state of a request ------------------------------------------------------------------

    def suspend(self, request: Request) -> Suspended:
        """Copies the state of a request and its unfinished block, before what comes next on the
        current stream can write there. Its whole blocks are cached as usual."""
        trail, length = request.trail, request.length
        assert trail is not None
        record = None
        if request.has_exact_state:
            label = self._labels.of_state(trail, length)
            row = self._host.take(label)
            if row is not None:
                record = self._copy_state(request, row, length)
            elif self._route.host_is_tier and self._host.holds(label.key):
                return Suspended(tokens=length, record=None, kept=True)
            else:
                self._dropped += 1
        return Suspended(tokens=length, record=record, kept=False)

    def _copy_state(self, request: Request, row: HostRow, length: int) -> Outgoing | None:
        schema, layout, copies = self._prefix.schema, self._labels.state, self._route.copies
        written, record = request.written_tokens, Outgoing(row)
        self._begun = [record]
        try:
            slot = copies.host_bytes(schema.bytes.slot)
            block = copies.host_bytes(schema.bytes.block + schema.bytes.entries)
            rows = [(self._slot_arena[request.slot], slot)]
            if length % schema.block_tokens:
                block_id = request.block_ids[length // schema.block_tokens]
                found, at = self._blocks.whole(block_id), 0
                for part in found if isinstance(found, tuple) else (found,):
                    rows.append((part, block[at : at + part.numel()]))
                    at += part.numel()
            mark = copies.down_into(rows)
        except RuntimeError as error:
            LOGGER.warning("a state of %d tokens is not kept: %s", length, error)
            self._fail([record])
            return None

        def fill() -> None:
            payload = np.empty(layout.payload_bytes, dtype=np.uint8)
            layout.gather(slot.numpy(), block.numpy(), length, payload, written=written)
            copy_payload(payload, row.parts)

        record.fill = fill
        mark.hold_back()
        self._note_copying(CopyBatch(mark, [record]), layout.payload_bytes)
        return record


class Suspended:
    """A request that has left the device with `tokens` tokens. `stored`: whether a tier has its
    state. None until they have answered, False if none could keep it; then the request can still be
    resumed, and what is missing is computed again."""

    __slots__ = ("_kept", "_record", "tokens")

    def __init__(self, *, tokens: int, record: Outgoing | None, kept: bool) -> None:
        self.tokens, self._record, self._kept = tokens, record, kept

    @property
    def stored(self) -> bool | None:
        return self._kept if self._record is None else self._record.stored

    def __repr__(self) -> str:
        how = {None: "being stored", True: "stored", False: "not stored"}[self.stored]
        return f"Suspended({self.tokens} tokens, {how})"
