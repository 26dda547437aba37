"""`manager.handoff`: requests go from one manager to another."""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dsv4.cache.allocator import Asker
from dsv4.cache.changes import Uncopied, changes
from dsv4.cache.handoff.arrival import Arrival, Landing
from dsv4.cache.handoff.arrivals import Arrivals
from dsv4.cache.handoff.lease import Lease, Leases, new_name
from dsv4.cache.handoff.link import Link, Memory
from dsv4.cache.handoff.offer import PLEDGE_BYTES, Offer, model_hash
from dsv4.cache.handoff.options import HandoffOptions, require_seconds
from dsv4.cache.handoff.rows import Pledges, StateRow, StateRows
from dsv4.cache.handoff.side import Side, words
from dsv4.cache.prefix.hints import Hints
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request, require_context
from dsv4.cache.state import copy_payload
from dsv4.cache.stats import HandoffStats
from dsv4.cache.transfers.copies import Copies
from dsv4.cache.transfers.labels import Labels
from dsv4.errors import (
    InvalidInput,
    OfferError,
    OutOfBlocks,
    RequestError,
    require_count,
    require_type,
)
from dsv4.tiers.record import DIGEST_BYTES, Kind, Label, Record, address, seal
from dsv4.tiers.sizes import HEADER_BYTES, padded

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.residency.residency import Residency


class Handoff(Uncopied):
    """What one manager offers, and what is on its way to it. Its calls are calls of the manager:
    one at a time changes it, and a call that raises has changed nothing. The link's thread reads,
    checks and receives the takers' notes."""

    _instead = "build another manager"
    _internal: ClassVar[frozenset[str]] = frozenset(
        (
            *("arrivals", "check_invariants", "end_arrivals", "held_memory", "leases"),
            *("release_deferred", "side", "stats"),
        )
    )

    def __init__(self, manager: KVCacheManager, options: HandoffOptions) -> None:
        require_type("handoff", options, HandoffOptions)
        parts, memory = manager._parts, manager.memory
        self._manager, self._parts, self._guard = manager, parts, parts.guard
        prefix, device = parts.prefix, memory.device
        model = _model_of(options, prefix.options.model_id if prefix else None)
        secret = prefix.options.secret() if prefix else None
        labels = Labels(manager.schema, secret)
        rows = StateRows(options.states, padded(HEADER_BYTES + labels.state.payload_bytes))
        pledges = Pledges(options.offers)
        gpu = (device.index or 0) if device.type == "cuda" else None
        self.leases = Leases(pledges, self._guard.defer)
        arena = memory.block_arena.bytes
        blocks = Memory(
            address=arena.data_ptr(),
            size_bytes=arena.numel(),
            where="DRAM" if gpu is None else "VRAM",
            gpu=gpu or 0,
            keeper=arena,
        )
        residency = parts.residency
        pools = () if residency is None else (residency.copies.host.memory,)
        host = [
            Memory(address=address(memory), size_bytes=memory.nbytes, keeper=memory)
            for memory in (rows.memory, pledges.memory, *pools)
        ]
        link = Link(f"{options.name}-{os.urandom(16).hex()}", [blocks, *host], self.leases.serve)
        weakref.finalize(self, link.close)
        self.side = Side(
            options=options,
            schema=manager.schema,
            table=parts.table,
            block_arena=arena,
            slot_arena=memory.slot_arena.bytes,
            model=model,
            labels=labels,
            secret=secret,
            rows=rows,
            pledges=pledges,
            copies=Copies(device, rows.memory),
            link=link,
            gpu=gpu,
            residency=residency,
            can_sum=gpu is None,
            defer=self._guard.defer,
        )
        self.arrivals = Arrivals(self.side)
        self._offers = 0

    def __bool__(self) -> bool:
        """Whether the manager hands requests over."""
        return True

    # ---- calls -----------------------------------------------------------------------------------

    @changes
    def offer(self, request: Request, *, lease_s: float | None = None, takers: int = 1) -> bytes:
        """What another manager needs to `accept` a copy of a live request as it is now: bytes, for
        the engine to send there. The request continues here, or is released: what was offered is
        held until `takers` managers have it, for at most `lease_s` seconds of this process's clock
        (default: the options'), or until `withdraw`.

        It may be in an open plan with a few tokens, drafts too: the offer has the length that the
        last commit left. Waits for the device. Raises RequestError for one that is torn, in the
        middle of a replay, empty or in an open plan with a chunk; OfferError if too many offers are
        open; InvalidInput.
        """
        parts = self._parts
        parts.table.require_live(request)
        request.require("offer")
        most, written = self.side.schema.max_decode_tokens, request.written_tokens
        for plan in parts.steps.open:
            if request not in plan.requests:
                continue
            row = plan.requests.index(request)
            if plan.counts[row] > most:
                raise RequestError(
                    f"a chunk of request {request.serial} is running, and its rings hold no "
                    f"state: commit the plan, then offer it"
                )
            written = max(written, int(plan.latest_ends[row]))
        if not request.has_exact_state:
            raise RequestError(f"request {request.serial} has 0 tokens: run some, then offer it")
        return self._make_offer(request, written=written, lease_s=lease_s, takers=takers)

    @changes
    def withdraw(self, offer: bytes) -> bool:
        """Ends an offer of this manager early: it can no longer be taken. Returns whether it stood
        until now. Raises OfferError for something that is not an offer."""
        return self.leases.withdraw(Offer.unpack(offer).name)

    @changes
    def accept(
        self, offer: bytes, *, deadline_s: float | None = None, hints: Hints | None = None
    ) -> Arrival:
        """Starts to transfer the request of another manager's offer to this one, and returns at
        once: `poll` the arrival until it has finished, or `wait` for it; then its `request` is live
        at the length that it was offered with. Blocks that are cached here are not read again.

        Reading is given up after `deadline_s` seconds (default: the options'). An offer may be
        accepted by several managers, and several times. `hints` say what is worth keeping here: an
        offer brings none. Raises OfferError (another schema or model,
        damaged), OutOfSlots, OutOfBlocks, ContextOverflow; what happens later is in the arrival.
        """
        table, prefix, arrivals = self.side.table, self._parts.prefix, self.arrivals
        seconds = self.side.options.deadline_s
        if deadline_s is not None:
            seconds = require_seconds("deadline_s", deadline_s)
        if hints is not None:
            require_type("hints", hints, Hints)
        read = arrivals.read_offer(offer)
        require_context(self.side.schema, read.tokens)
        trail = arrivals.read_trail(read)
        if trail is not None:
            trail.hints = hints
        table.require_slots()
        shared: list[int] = []
        if prefix and trail is not None:
            nodes = prefix.index.match(trail, read.tokens // self.side.schema.block_tokens)
            shared = [node.block_id for node in nodes]
        arrival = Arrival(
            read,
            trail if prefix else None,
            deadline=time.monotonic() + seconds,
            poll=self._poll_arrival,
            cancel=self._cancel_arrival,
        )
        arrivals.begin(arrival)
        arrival.landing.shared = shared
        blocks = self.side.schema.blocks_for(read.tokens)
        try:
            table.holdings.hold(arrival, shared)
            asker = Asker(arrival.trail, blocks - len(shared))
            reserved = table.supply.reserve(
                asker.blocks, [asker], asker_blocks=blocks, shared=shared
            )
            arrival.landing.block_ids = table.holdings.promise(arrival, reserved)
            arrivals.start(arrival)
        except Exception:
            arrivals.give_back(arrival)
            raise
        return arrival

    def close(self) -> None:
        """Ends all offers and all reading, permanently. Memory that is being written to stays
        taken. A manager that is dropped closes by itself when it is collected."""
        for lease in tuple(self.leases.standing.values()):
            self.leases.withdraw(lease.name)
        self.side.link.close()

    # ---- a taker ---------------------------------------------------------------------------------

    @changes
    def _poll_arrival(self, arrival: Arrival) -> None:
        if arrival.done or not self.arrivals.advance(arrival):
            return
        try:
            arrival.request = self._settle(arrival)
        except (RuntimeError, OutOfBlocks) as error:  # of the device; no row for its entries
            self.arrivals.fail(arrival, "failed", f"the device failed: {error}")
            return
        self.arrivals.note_arrived(arrival)

    def _settle(self, arrival: Arrival) -> Request:
        prefix, admission = self._parts.prefix, self._parts.admission
        request = admission.arrived(arrival, *self.arrivals.state_of(arrival))
        if prefix and arrival.trail is not None:
            prefix.caching.note_arrival(request, arrival.trail, admission.exchange)
        return request

    @changes
    def _cancel_arrival(self, arrival: Arrival) -> None:
        if not arrival.done:
            self.arrivals.fail(arrival, "cancelled", "the arrival was cancelled")

    # ---- an owner --------------------------------------------------------------------------------

    def _make_offer(
        self, request: Request, *, written: int, lease_s: float | None, takers: int
    ) -> bytes:
        """Holds the request's whole blocks, gathers its state, and describes where all of it lies.
        Waits for the device, so that what is offered exists. The slot may hold tokens up to
        `written`."""
        side = self.side
        seconds = side.options.lease_s
        if lease_s is not None:
            seconds = require_seconds("lease_s", lease_s)
        takers, length = require_count("takers", takers), request.length
        trail = request.trail
        ids = None if trail is None or len(trail.ids) < length else trail.ids[:length].copy()
        name = new_name()
        label = self._state_label(None if ids is None else trail, length, name)
        cell = side.pledges.take()
        row = None
        try:
            row = side.rows.take(label)
            self._gather(request, row, length, written)
            whole = length // side.schema.block_tokens if side.schema.bytes.block else 0
            block_ids = request.block_ids[:whole]
            if side.residency is not None:
                require_in_host(side.residency, block_ids)
            sums = None
            if side.options.sums and side.can_sum:
                sums = tuple(map(side.sum_of, block_ids))
            generations = tuple(map(side.table.allocator.generation, block_ids))
            lease = Lease(
                name=name,
                cell=cell,
                row=row,
                block_ids=block_ids,
                generations=generations,
                expires=time.monotonic() + seconds,
                takers=takers,
            )
            pledge = os.urandom(PLEDGE_BYTES)  # that no other offer has
            offer = Offer(
                name=name,
                tokens=length,
                prompt_tokens=None if trail is None else trail.prompt_tokens,
                fingerprint=label.fingerprint,
                model=side.model,
                root=None if ids is None or trail is None else trail.root,
                state_digest=label.digest,
                state_parent=label.parent,
                state_bytes=label.payload_bytes,
                pledge=pledge,
                pledge_at=side.pledges.at(cell),
                block_bytes=side.schema.bytes.block,
                entries_bytes=side.schema.bytes.entries,
                gpu=side.gpu,
                rows=tuple(map(side.block_at, block_ids)),
                entries=tuple(map(side.entries_at, block_ids)) if side.residency else (),
                generations=generations,
                sums=sums,
                state_pieces=tuple((address(p), p.nbytes) for p in row.parts.pieces),
                link=side.link.name,
                metadata=side.link.metadata,
                words=words(side.schema),
                ids=ids,
            ).pack(side.sign)
            side.link.begin_serving()
            self.leases.held[name] = lease
        except BaseException:
            if name not in self.leases.held:
                if row is not None:
                    side.rows.give_back(row.number)
                side.pledges.give_back(cell)
            raise
        side.table.holdings.hold(lease, block_ids)
        self.leases.stand(lease, pledge)
        side.link.begin_serving()
        self._offers += 1
        return offer

    def _gather(self, request: Request, row: StateRow, length: int, written: int) -> None:
        side = self.side
        schema, layout = side.schema, side.labels.state
        slot = side.copies.host_bytes(schema.bytes.slot)
        block = side.copies.host_bytes(schema.bytes.block + schema.bytes.entries)
        rows = [(side.slot_arena[request.slot], slot)]
        if length % schema.block_tokens and schema.bytes.block:
            block_id = request.block_ids[length // schema.block_tokens]
            rows.append((side.block_arena[block_id], block[: schema.bytes.block]))
            if side.residency is not None:
                entries = side.residency.entries_of(block_id)
                rows.append((entries, block[schema.bytes.block :]))
        side.copies.down_into(rows).wait()
        payload = np.empty(layout.payload_bytes, dtype=np.uint8)
        layout.gather(slot.numpy(), block.numpy(), length, payload, written=written)
        copy_payload(payload, row.parts)
        seal(Record(label=row.label, parts=row.parts))

    def _state_label(self, trail: TokenTrail | None, length: int, name: bytes) -> Label:
        if trail is not None:
            return self.side.labels.of_state(trail, length)
        unnamed = hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
        return self.side.labels.make(Kind.STATE, unnamed, bytes(DIGEST_BYTES), length)

    # ---- for the manager -------------------------------------------------------------------------

    def _release_deferred(self) -> None:
        self._manager._release_deferred()

    def release_deferred(self, item: object) -> None:
        """Releases an offer that is over, or an arrival that is not written to any more."""
        if isinstance(item, Lease):
            if item.name in self.leases.held:
                self.side.table.holdings.release_within_quotas(item)
                self.side.rows.give_back(item.row.number)
                self.leases.forget(item)
        elif isinstance(item, Arrival) and item in self.arrivals.open:
            self.arrivals.give_back(item)

    def end_arrivals(self) -> None:
        """After an interrupt: ends all arrivals. Offers stand, except one that was not returned."""
        self.side.copies.finish()
        self.arrivals.end_all()
        for lease in tuple(self.leases.held.values()):
            if lease.name not in self.leases.standing:
                self.leases.finish(lease)

    def held_memory(self) -> tuple[set[int], set[int]]:
        """Numbers of the rows and of the cells that offers and arrivals have."""
        owners: list[Landing | Lease] = [
            *(each.landing for each in self.arrivals.open),
            *self.leases.held.values(),
        ]
        rows = {each.row.number for each in owners if each.row is not None}
        return rows, {each.cell for each in owners if each.cell is not None}

    def check_invariants(self) -> None:
        """Checks that the blocks of standing offers have not been free since."""
        generation = self.side.table.allocator.generation
        for lease in tuple(self.leases.standing.values()):
            assert tuple(map(generation, lease.block_ids)) == lease.generations, lease

    def stats(self) -> HandoffStats:
        leases, arrivals = self.leases, self.arrivals
        return HandoffStats(
            offers=self._offers,
            offers_standing=len(leases.standing),
            offers_taken=leases.taken,
            offers_expired=leases.expired,
            offers_withdrawn=leases.withdrawn,
            arrivals=arrivals.begun,
            arrivals_open=len(arrivals.open),
            requests_arrived=arrivals.arrived,
            errors=dict(arrivals.errors),
            tokens_arrived=arrivals.read_tokens,
            bytes_read=arrivals.read_bytes,
            blocks_skipped=arrivals.skipped_blocks,
        )


def require_in_host(residency: Residency, block_ids: Sequence[int]) -> None:
    """Waits until the entries of these blocks have reached host memory, from where others read
    them. Raises OfferError for those that do not."""
    missing = residency.copies.bring_down(block_ids)
    if missing:
        raise OfferError(
            "busy",
            f"entries of {len(missing)} of {len(block_ids)} blocks are not in host memory, because "
            f"their copies failed or no row is free there: offer the request again later",
        )


def _model_of(options: HandoffOptions, prefix_model: str | None) -> bytes:
    """A hash of what names the weights. InvalidInput."""
    if prefix_model and options.model_id and prefix_model != options.model_id:
        raise InvalidInput(
            f"the hand-off has model_id={options.model_id!r} and the prefix cache "
            f"{prefix_model!r}: give the same to both, or only to the prefix cache"
        )
    model_id = options.model_id or prefix_model
    if not model_id:
        raise InvalidInput(
            "an offer must say which weights it is of: give HandoffOptions(model_id=...) or "
            "PrefixOptions(model_id=...), for example a hash of the checkpoint's index"
        )
    return model_hash(model_id)
