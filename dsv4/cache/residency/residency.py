"""Entries in host memory: which blocks' entries are on the device, which leave it, and when.

A step writes only open blocks: those from a request's length on, and the one that the length is in.
They have rows on the device. When a commit has completed a block, its entries are copied to host
memory in the background, once (`host_copies.py`). From then on the block may give up its row, and
does when rows are short. Entries that a step reads and that have left are fetched by the step
(`Backend.resolve`, `stage`).

Only the call that is inside the manager calls this. Whatever may fail on the device is done before
the books change; only blocks that have left stay away after an error, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.batch import Batch
from dsv4.cache.memory import CacheMemory, Lane
from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.prepare_forward import ForwardPlan
from dsv4.cache.requests import LENGTH, PUBLISHED, REUSED, Request, RequestTable
from dsv4.cache.residency.host_copies import HostCopies
from dsv4.cache.residency.host_rows import NO_ROW
from dsv4.cache.residency.places import EntryPlaces
from dsv4.cache.residency.pool import EntryRows, HostPool
from dsv4.cache.residency.tables import EntryTables
from dsv4.cache.stats import LayerFetches, ResidencyStats
from dsv4.cache.step.shape import StepTokens
from dsv4.errors import Dsv4Error, OutOfBlocks


@dataclass(slots=True)
class StepEntries:
    """What a step that is being planned takes: `rows` for the blocks in `needing` (a request, the
    number of the block in it, and whether a part of it is written). The blocks in `spans` of
    requests may be written."""

    requests: Sequence[Request]
    published: NDArray[np.int64]  # blocks of each that the device's tables had before
    held: list[int] = field(init=False)
    needing: list[tuple[Request, int, bool]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    at: list[int] = field(default_factory=list)  # their places in the device's tables
    spans: list[tuple[Request, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held = [len(request.block_ids) for request in self.requests]

    @property
    def before(self) -> Iterator[tuple[Request, int, int]]:
        """Requests with how many blocks each had, and how many of these the device's tables had."""
        return zip(self.requests, self.held, self.published.tolist(), strict=True)


class Residency:
    """Which entries are on the device, and the copies in host memory of all that are complete."""

    def __init__(
        self,
        table: RequestTable,
        memory: CacheMemory,
        places: EntryPlaces,
        pool: HostPool,
        *,
        open_plans: Callable[[], Sequence[ForwardPlan]],
        before_reuse: Callable[[], None] | None,
        note_left: Callable[[Sequence[int]], None] | None,
    ) -> None:
        schema, entries = table.schema, memory.entries
        assert entries is not None
        self._table, self._memory, self._entries = table, memory, entries
        self._pool: EntryRows = pool  # all that is here asks no more of it
        self._open_plans = open_plans
        self._before_reuse = before_reuse  # makes what comes next wait for copies to tiers
        self._note_left = note_left  # which blocks' entries have left the device
        self._block_tokens = schema.block_tokens
        self.places, self._hosts = places, places.hosts
        self.copies = HostCopies(places, pool, entries.arena.bytes)
        self.tables = EntryTables(entries.tables, places)
        # of each slot's request: its blocks from one token to the other are open
        self._open_from = np.zeros(table.max_requests, dtype=np.int64)
        self._open_until = np.zeros(table.max_requests, dtype=np.int64)
        lanes = len(memory.lanes)
        step_rows = -(-memory.buffers.max_tokens // schema.block_tokens)
        # rows that a step leaves free for steps of other lanes: it cannot move their blocks
        self._spared_rows = (lanes - 1) * step_rows + table.max_requests if lanes > 1 else 0

    # ---- rows --------------------------------------------------------------------------------

    @contextmanager
    def lending(self, count: int, keep: Collection[int] = ()) -> Iterator[list[int]]:
        """Rows for the code inside; `settle` then gives them to blocks. They are given back if it
        raises. The blocks in `keep` do not leave. Raises OutOfBlocks."""
        self._make_room(count, keep=keep, before=None)
        self.tables.send()
        rows = self.places.take(count)
        try:
            yield rows
        except BaseException:
            self.places.give(rows)
            raise

    def settle(self, block_ids: Sequence[int], rows: Sequence[int], depth: int) -> None:
        """Gives new blocks, number `depth` of their requests, rows that were lent."""
        for block_id, row in zip(block_ids, rows, strict=True):
            self.places.place(block_id, row, depth)

    def _make_room(
        self,
        count: int,
        *,
        keep: Collection[int],
        before: ForwardPlan | None,
        spared: int = 0,
    ) -> None:
        """Frees `count` rows, and `spared` more if possible, by letting blocks leave the device.
        Raises OutOfBlocks. Blocks that have left stay away, even if the call fails later."""
        places = self.places
        short = count + spared - places.free
        if short <= 0:
            return
        self.copies.pump()
        guarding = self._guarding(before)
        references = self._table.allocator.references

        def may_leave(block_id: int) -> bool:
            return block_id not in keep and not self._is_among(block_id, guarding)

        def choose() -> list[int]:
            return places.choose(
                count + spared - places.free,
                may_leave=may_leave,
                is_used=lambda block_id: references(block_id) > 0,
            )

        victims = choose()
        if len(victims) < short and self.copies.hasten():
            victims = choose()
        if victims and self._before_reuse is not None:
            self._before_reuse()
        for block_id in victims:
            self._leave(block_id)
        if victims and self._note_left is not None:
            self._note_left(victims)
        if places.free < count:
            raise OutOfBlocks(
                needed=count,
                free=places.free,
                total=places.rows,
                asker_blocks=count,
                memory="entries",
            )

    def _guarding(self, before: ForwardPlan | None) -> list[Request]:
        """Requests of open plans whose blocks must stay where they are. Of `before` and the plans
        before it, which run on the stream of the plan that is being prepared, these are only the
        chunks: where a chunk reads was decided when it was planned."""
        chain, found = set(), list[Request]()
        while before is not None:
            chain.add(id(before))
            before = before.after
        for plan in self._open_plans():
            if id(plan) not in chain:
                found += plan.requests
            elif plan.prefill is not None:
                found += plan.prefill.requests
        return found

    def _is_among(self, block_id: int, requests: Sequence[Request]) -> bool:
        depth = int(self.places.depths[block_id])
        return any(request.block_ids[depth : depth + 1] == [block_id] for request in requests)

    def _leave(self, block_id: int) -> None:
        """The block leaves the device, and the tables of all requests that have it say so."""
        depth = int(self.places.depths[block_id])
        if self._table.allocator.references(block_id):
            for request in self._table.live.values():
                if request.block_ids[depth : depth + 1] == [block_id]:
                    self.tables.note_left(request.slot, depth, block_id)
        self.places.leave(block_id)
        self.places.left += 1

    # ---- requests ------------------------------------------------------------------------------

    def forget_hot(self, slot: int) -> None:
        """The tokens of a slot may be others from now on: what its hot rows hold is forgotten."""
        self._entries.forget_hot(slot)

    def begin(self, request: Request) -> None:
        """A request begins in its slot."""
        self._close(request)
        self.tables.forget_slot(request.slot)

    def go_back(self, request: Request) -> None:
        """The request has fewer tokens now, or other ones will follow them."""
        self._trim(request)
        self._close(request)

    def start_over(self, request: Request) -> None:
        """The request has no tokens any more: what its blocks held is not needed."""
        self.places.forget(request.block_ids)
        self._close(request)

    def _close(self, request: Request) -> None:
        """No block of the request is open any more, as far as is known."""
        self._open_from[request.slot] = self._open_until[request.slot] = 0

    def must_stay(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Whether a request cannot take these blocks in place of its own: entries of one of them
        have left the device, and a chunk of the request that is planned already may expect all of
        them there."""
        return bool((self.places.row_of[list(block_ids)] == NO_ROW).any()) and any(
            plan.after is not None and plan.prefill is not None and request in plan.prefill.requests
            for plan in self._open_plans()
        )

    def restore(self, request: Request, first: int, count: int) -> None:
        """The request keeps these blocks of its own, though the device's tables may have others by
        now."""
        self.tables.note(request.slot, first, request.block_ids[first : first + count])

    def copy_block(self, source: int, rows: Sequence[int]) -> None:
        """Copies the entries of a block into rows that were lent."""
        found, arena = self.entries_of(source), self._entries.arena.bytes
        for row in rows:
            arena[row].copy_(found, non_blocking=True)

    def put_block(self, row: int, entries: Tensor) -> None:
        """Copies entries from the host into a row that was lent."""
        self._entries.arena.bytes[row].copy_(entries)

    def entries_of(self, block_id: int) -> Tensor:
        """The entries of a block, on the device or in host memory."""
        row = int(self.places.row_of[block_id])
        if row != NO_ROW:
            return self._entries.arena.bytes[row]
        self.copies.hold_back()
        return self._pool.bytes[self._host_row(block_id)]

    def block_of(self, block_id: int) -> tuple[Tensor, Tensor]:
        """A block's bytes: those that stay on the device, and its entries, wherever they are."""
        return self._memory.block_arena.bytes[block_id], self.entries_of(block_id)

    def target_of(self, block_id: int) -> tuple[Tensor, Tensor]:
        """Where the bytes of a block in flight are put: those that stay on the device, and its
        entries, for which host memory is enough. If they do not arrive, the block is free again,
        and what is known of it is forgotten."""
        self.copies.wait()  # one may be of the block that it was before
        self.places.in_host[block_id] = True
        return self._memory.block_arena.bytes[block_id], self._pool.bytes[self._host_row(block_id)]

    # ---- a step ----------------------------------------------------------------------------------

    def take_step(self, step: StepTokens, before: ForwardPlan | None) -> StepEntries:
        """Takes rows for all blocks that a step may write and that have none; `place_step` or
        `cancel_step` follows. Raises OutOfBlocks."""
        self._entries.forget_lost()  # handles do it too, but not when a captured graph is replayed
        self.copies.hold_back_early()
        slots, block_tokens = step.shape.slots, self._block_tokens
        lengths, reused, published = self._table.numbers[[LENGTH, REUSED, PUBLISHED]].take(
            slots, axis=1
        )
        found = StepEntries(requests=step.shape.requests, published=published)
        written = np.maximum(lengths, reused)
        firsts, lasts = written // block_tokens, -(-step.ends // block_tokens)
        is_open = (firsts * block_tokens >= self._open_from.take(slots)) & (
            step.ends <= self._open_until.take(slots)
        )
        keep: set[int] = set()
        for nth in (~is_open & (step.ends > written)).nonzero()[0].tolist():
            request = step.shape.requests[nth]
            held, first, last = request.block_ids, int(firsts[nth]), int(lasts[nth])
            found.spans.append((request, first, last))
            keep.update(held[first:last])
            for depth in range(first, last):
                if depth >= len(held) or self.places.row_of[held[depth]] == NO_ROW:
                    is_begun = bool(written[nth] > depth * block_tokens)
                    found.needing.append((request, depth, is_begun))
        count = len(found.needing)
        spared = self._spared_rows if count else 0
        self._make_room(count, keep=keep, before=before, spared=spared)
        found.rows = self.places.take(count)
        return found

    def place_step(self, taken: StepEntries) -> None:
        """The step is planned, and its requests have all their blocks: gives these the rows, in the
        device's tables before the books."""
        updates = dict[int, tuple[int, int]]()
        for request, _, first in taken.before:
            if request.published_blocks > first:
                start = self.tables.at(request.slot, first)
                updates |= enumerate(map(self.tables.rows_of, request.block_ids[first:]), start)
        for (request, depth, is_begun), row in zip(taken.needing, taken.rows, strict=True):
            taken.at.append(self.tables.at(request.slot, depth))
            updates[taken.at[-1]] = (row, NO_ROW)
            if is_begun:  # the part that is written has left the device
                block_id = request.block_ids[depth]
                assert self.places.in_host[block_id], "written entries are nowhere"
                self.copies.hold_back()
                target = self._entries.arena.bytes[row]
                target.copy_(self._pool.bytes[self._host_row(block_id)], non_blocking=True)
        self.tables.note_rows(updates)
        self.tables.send()
        for (request, depth, _), row in zip(taken.needing, taken.rows, strict=True):
            self.places.place(request.block_ids[depth], row, depth)
        for request, first, last in taken.spans:
            for block_id in request.block_ids[first:last]:
                self.places.open(block_id)
            self._open_from[request.slot] = first * self._block_tokens
            self._open_until[request.slot] = last * self._block_tokens

    def cancel_step(self, taken: StepEntries) -> None:
        """Gives back everything that was taken for a step."""
        self.tables.note_rows(dict.fromkeys(taken.at, (NO_ROW, NO_ROW)))
        self.places.give(taken.rows)

    def stage(self, batch: Batch, lane: Lane) -> None:
        """Plans which entries a prefill batch stages, if some that it reads have left the
        device."""
        assert lane.entries is not None
        lengths, reused = self._table.numbers[[LENGTH, REUSED]].take(batch.shape.slots, axis=1)
        # a replay may end in the middle of a block that was complete before
        read = -(-batch.ends // self._block_tokens)
        whole = np.minimum(np.maximum(lengths, reused) // self._block_tokens, read)
        row_of = self.places.row_of
        is_away = any(
            bool((row_of[request.block_ids[:blocks]] == NO_ROW).any())
            for request, blocks in zip(batch.requests, whole.tolist(), strict=True)
        )
        if is_away:
            self.copies.hold_back()
            lane.entries.chunks.begin(batch, read.tolist())

    def note_commit(self, plan: ForwardPlan) -> None:
        """Asks for copies of the blocks that the step has completed; frees rows that were for
        rejected tokens."""
        block_tokens, places = self._block_tokens, self.places
        for request in plan.requests:
            first = int(self._open_from[request.slot]) // block_tokens
            last = max(request.length, request.reused_tokens) // block_tokens
            for block_id in request.block_ids[first:last]:
                if not places.in_host[block_id] and places.row_of[block_id] != NO_ROW:
                    self.copies.ask(block_id)
            if last > first and self._open_until[request.slot]:
                self._open_from[request.slot] = last * block_tokens
        self.copies.pump()
        self.note_end(plan)

    def note_end(self, plan: ForwardPlan) -> None:
        """A plan is over: what comes next waits for all that is on its way to its staging, because
        it may change what that reads. Gives back rows for tokens that were not kept."""
        lane = self._memory.lanes[plan.lane]
        assert lane.entries is not None
        lane.entries.chunks.end()
        for request in plan.requests:
            if not request.released:
                self._trim(request)

    def _trim(self, request: Request) -> None:
        """Gives back rows of blocks past the request's tokens, unless an open plan writes them."""
        written = max(request.length, request.reused_tokens)
        first = -(-written // self._block_tokens)
        last = int(self._open_until[request.slot]) // self._block_tokens
        if last <= first or any(request in plan.requests for plan in self._open_plans()):
            return
        for block_id in request.block_ids[first:last]:
            if self.places.row_of[block_id] != NO_ROW:
                self.places.forget([block_id])
        self._open_until[request.slot] = first * self._block_tokens

    def _host_row(self, block_id: int) -> int:
        return int(self._hosts.row_of[block_id])

    # ---- looking ---------------------------------------------------------------------------------

    def stats(self) -> ResidencyStats:
        places, allocator = self.places, self._table.allocator
        taken = allocator.total - allocator.free
        in_host = int(np.count_nonzero(places.in_host))
        only_host = int(np.count_nonzero(places.in_host & (places.row_of == NO_ROW)))
        fetched = [
            LayerFetches(layer=layer, hits=hits, misses=misses, bytes_fetched=count)
            for layer, (hits, misses, count) in zip(
                self._entries.hot, self._entries.read_counts(), strict=True
            )
        ]
        return ResidencyStats(
            host_bytes=self._pool.memory_bytes(),
            host_bytes_used=self._hosts.used(taken) * self._table.schema.bytes.entries,
            rows_total=places.rows,
            rows_free=places.free,
            blocks_on_device=places.on_device,
            blocks_in_host=in_host,
            blocks_only_in_host=only_host,
            blocks_copied=self.copies.copied,
            blocks_left=places.left,
            copies_failed=self.copies.failed,
            hits=sum(layer.hits for layer in fetched),
            misses=sum(layer.misses for layer in fetched),
            bytes_fetched=sum(layer.bytes_fetched for layer in fetched),
            layers=tuple(fetched),
        )

    # ---- after an interrupt ----------------------------------------------------------------------

    def recover(self, nodes: Iterable[PrefixNode], open_plans: Sequence[ForwardPlan]) -> None:
        """Derives rows and copies anew from live requests, open plans and cached blocks. Hot
        records are forgotten; copies begin again."""
        self.copies.forget()
        self.tables.forget()
        for lane in self._memory.lanes:
            assert lane.entries is not None
            lane.entries.chunks.forget_held()
        cached = [node.block_id for node in nodes]
        ends: dict[Request, int] = {}
        for plan in open_plans:
            for request, end in zip(plan.requests, plan.latest_ends.tolist(), strict=True):
                ends[request] = max(end, ends.get(request, 0))
        kept, complete = set(cached), set(cached)
        for request in self._table.live.values():
            written = max(request.length, request.reused_tokens)
            whole = written // self._block_tokens
            last = -(-max(written, ends.get(request, 0)) // self._block_tokens)
            kept.update(request.block_ids[:last])
            complete.update(request.block_ids[:whole])
            self._close(request)
            if request in ends:
                self._open_from[request.slot] = whole * self._block_tokens
                self._open_until[request.slot] = last * self._block_tokens
        for holding in self._table.holdings.values():  # others read them, or write to them
            kept.update(holding.block_ids, holding.landing)
            complete.update(holding.block_ids)
        self.places.rebuild(kept)
        for block_id in self.places.with_rows():
            if block_id in complete and not self.places.in_host[block_id]:
                self.copies.ask(block_id)
        for slot in range(self._table.max_requests):
            self._entries.forget_hot(slot)
        for request in self._table.live.values():
            if request.published_blocks:
                self.tables.publish(request.slot, 0, request.block_ids[: request.published_blocks])
        self.copies.pump()

    def check_invariants(self) -> None:
        """Every row has one owner, and every block whose entries are written has them somewhere.
        Raises Dsv4Error otherwise."""
        allocator, places = self._table.allocator, self.places
        places.check_invariants([b for b in range(allocator.total) if allocator.is_taken(b)])
        for request in self._table.live.values():
            written = max(request.length, request.reused_tokens)
            for block_id in request.block_ids[: -(-written // self._block_tokens)]:
                if places.row_of[block_id] == NO_ROW and not places.in_host[block_id]:
                    raise Dsv4Error(f"entries of block {block_id} are lost")
