"""One manager's side of the hand-off: what it offers, what is on its way to it."""

from __future__ import annotations

import hashlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.cache.changes import LOGGER
from dsv4.cache.handoff.arrival import Arrival, Landing
from dsv4.cache.handoff.lease import Lease, Leases, new_name, taken_note
from dsv4.cache.handoff.link import Link, Memory, Read, Spans, Where
from dsv4.cache.handoff.offer import PLEDGE_BYTES, Offer, model_hash
from dsv4.cache.handoff.options import HandoffOptions, require_seconds
from dsv4.cache.handoff.rows import Pledges, StateRow, StateRows
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request, RequestTable
from dsv4.cache.schema import CacheSchema
from dsv4.cache.state import copy_payload
from dsv4.cache.stats import HandoffStats
from dsv4.cache.transfers.copies import Copies
from dsv4.cache.transfers.labels import Labels
from dsv4.errors import InvalidInput, OfferError, require_count
from dsv4.tiers.record import (
    DIGEST_BYTES,
    Kind,
    Label,
    Parts,
    Record,
    address,
    check,
    payload_sum,
    seal,
)
from dsv4.tiers.sizes import HEADER_BYTES, padded

_ADDRESSES = 1 << 63  # with more the sums of NIXL's own check overflow, and it reads there


class Handoff:
    """Offers and arrivals of one manager. Its calls come from whoever is inside the manager, one at
    a time; the link's thread reads, checks and hears of takers meanwhile.

    `waiting` is told what the next call of the manager is to let go.
    """

    def __init__(
        self,
        options: HandoffOptions,
        *,
        schema: CacheSchema,
        table: RequestTable,
        block_arena: Tensor,
        slot_arena: Tensor,
        device: torch.device,
        prefix_model: str | None,
        waiting: Callable[[object], None],
    ) -> None:
        self.options, self._schema, self._table = options, schema, table
        self._block_arena, self._slot_arena, self._device = block_arena, slot_arena, device
        self._waiting = waiting
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
        self._model = model_hash(model_id)
        self.labels = Labels(schema)
        self.layout = self.labels.state
        state_bytes = padded(HEADER_BYTES + self.layout.payload_bytes)
        self.rows = StateRows(options.states, state_bytes)
        self._copies = Copies(device, self.rows.memory)
        self.pledges = Pledges(options.offers)
        self.leases = Leases(self.pledges, waiting)
        self._gpu = (device.index or 0) if device.type == "cuda" else None
        where: Where = "DRAM" if self._gpu is None else "VRAM"
        self._blocks_at = (where, self._gpu or 0)
        self.link = Link(
            f"{options.name}-{os.urandom(16).hex()}",
            [
                Memory(
                    address=block_arena.data_ptr(),
                    size_bytes=block_arena.numel(),
                    where=where,
                    gpu=self._gpu or 0,
                    keeper=block_arena,
                ),
                *(
                    Memory(address=address(memory), size_bytes=memory.nbytes, keeper=memory)
                    for memory in (self.rows.memory, self.pledges.memory)
                ),
            ],
            self.leases.serve,
        )
        weakref.finalize(self, self.link.close)
        self.open: list[Arrival] = []  # with memory that is not given back yet
        self._offers = self._arrived = self._begun = 0
        self._read_bytes = self._read_tokens = self._skipped_blocks = 0
        self._errors: dict[str, int] = {}

    # ---- an owner --------------------------------------------------------------------------------

    def offer(self, request: Request, *, written: int, lease_s: float | None, takers: int) -> bytes:
        """Holds the request's whole blocks, gathers its state, and says where all of it lies. Waits
        for the device: what is offered is there. The slot may hold tokens up to `written`."""
        seconds = self.options.lease_s if lease_s is None else require_seconds("lease_s", lease_s)
        takers, length = require_count("takers", takers), request.length
        trail = request.trail
        ids = None if trail is None or len(trail.ids) < length else trail.ids[:length].copy()
        name = new_name()
        label = self._state_label(None if ids is None else trail, length, name)
        cell = self.pledges.take()
        row = None
        try:
            row = self.rows.take(label)
            self._gather(request, row, length, written)
            whole = length // self._schema.block_tokens if self._schema.block_bytes else 0
            block_ids = request.block_ids[:whole]
            sums = None
            if self.options.sums and self._gpu is None:
                sums = tuple(payload_sum([self._block_bytes(b)]) for b in block_ids)
            generations = tuple(map(self._table.allocator.generation, block_ids))
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
                model=self._model,
                root=None if ids is None or trail is None else trail.root,
                state_digest=label.digest,
                state_parent=label.parent,
                state_bytes=label.payload_bytes,
                pledge=pledge,
                pledge_at=self.pledges.at(cell),
                block_bytes=self._schema.block_bytes,
                gpu=self._gpu,
                rows=tuple(map(self._block_at, block_ids)),
                generations=generations,
                sums=sums,
                state_pieces=tuple((address(p), p.nbytes) for p in row.parts.pieces),
                link=self.link.name,
                metadata=self.link.metadata,
                words=_words(self._schema),
                ids=ids,
            ).pack(self.options.sign)
            self.link.begin_serving()
            self.leases.held[name] = lease
        except BaseException:
            if name not in self.leases.held:
                if row is not None:
                    self.rows.give_back(row.number)
                self.pledges.give_back(cell)
            raise
        self._table.hold(lease, block_ids)
        self.leases.stand(lease, pledge)
        self.link.begin_serving()
        self._offers += 1
        return offer

    def withdraw(self, packed: bytes) -> bool:
        """Whether the offer stood until now."""
        return self.leases.withdraw(Offer.unpack(packed).name)

    def _gather(self, request: Request, row: StateRow, length: int, written: int) -> None:
        schema, layout = self._schema, self.layout
        slot = self._copies.host_bytes(schema.slot_bytes)
        block = self._copies.host_bytes(schema.block_bytes)
        rows = [(self._slot_arena[request.slot], slot)]
        if length % schema.block_tokens and schema.block_bytes:
            block_id = request.block_ids[length // schema.block_tokens]
            rows.append((self._block_arena[block_id], block))
        self._copies.down_into(rows).wait()
        payload = np.empty(layout.payload_bytes, dtype=np.uint8)
        layout.gather(slot.numpy(), block.numpy(), length, payload, written=written)
        copy_payload(payload, row.parts)
        seal(Record(label=row.label, parts=row.parts))

    # ---- a taker ---------------------------------------------------------------------------------

    def read_offer(self, packed: bytes) -> Offer:
        """An offer that this manager can take. Raises OfferError."""
        offer, schema = Offer.unpack(packed, self.options.verify), self._schema
        label = self.labels.make(Kind.STATE, offer.state_digest, offer.state_parent, 1)
        whole = offer.tokens // schema.block_tokens if schema.block_bytes else 0
        if offer.fingerprint != label.fingerprint:
            raise OfferError(
                "schema",
                f"the offer is of another schema ({offer.words}), this manager has "
                f"{_words(schema)}: nothing is converted, build both with the same model, formats, "
                f"block_tokens and hca_state",
            )
        if offer.model != self._model:
            raise OfferError(
                "model",
                "the offer is of other weights or of another pipeline stage: model_id differs",
            )
        sizes = (offer.block_bytes, offer.state_bytes, len(offer.rows))
        if sizes != (schema.block_bytes, label.payload_bytes, whole) or not offer.tokens:
            raise OfferError("damaged", f"the offer of {offer.tokens} tokens says sizes {sizes}")
        pieces = (start for start, _ in offer.state_pieces)
        if max((offer.pledge_at, *offer.rows, *pieces)) >= _ADDRESSES:
            raise OfferError("damaged", "the offer names an address that no process has")
        return offer

    def read_trail(self, offer: Offer) -> TokenTrail | None:
        """The trail of the offered tokens, if their ids are known. OfferError if they are not those
        that the digests are of."""
        if offer.ids is None or offer.root is None or offer.prompt_tokens is None:
            return None
        if offer.ids.min(initial=0) < 0:
            raise OfferError("damaged", "the offer has token ids below 0")
        trail = TokenTrail(offer.root, self._schema.block_tokens, offer.ids)
        label = self.labels.of_state(trail, offer.tokens)
        if (label.digest, label.parent) != (offer.state_digest, offer.state_parent):
            raise OfferError("damaged", "the ids of the offer are not those that were hashed")
        trail.prompt_tokens = offer.prompt_tokens
        return trail

    def begin(self, arrival: Arrival) -> None:
        """Takes the host memory that it needs. Raises OfferError, and has changed nothing."""
        offer = arrival.offer
        label = self.labels.make(
            Kind.STATE, offer.state_digest, offer.state_parent, tokens=offer.tokens
        )
        self.open.append(arrival)  # first: whoever interrupts finds what it has
        try:
            arrival.landing.cell = self.pledges.take()
            arrival.landing.row = self.rows.take(label)
        except Exception:
            self._let_go_host(arrival)
            raise

    def start(self, arrival: Arrival) -> None:
        """Reads what is not here."""
        offer, landing = arrival.offer, arrival.landing
        row, cell = landing.row, landing.cell
        assert row is not None
        assert cell is not None
        skipped = len(landing.shared)
        wanted = offer.rows[skipped:]
        own = [self._block_at(block_id) for block_id in landing.block_ids[: len(wanted)]]
        block_bytes, gpu = offer.block_bytes, offer.gpu
        blocks = Spans(
            rows=[(mine, theirs, block_bytes) for mine, theirs in zip(own, wanted, strict=True)],
            own=self._blocks_at,
            their=("DRAM", 0) if gpu is None else ("VRAM", gpu),
        )
        state = Spans(rows=self._state_spans(row.parts, offer))
        arrival.skipped_blocks = skipped
        arrival.read_bytes = sum(span for each in (blocks, state) for *_, span in each.rows)
        sums = None if offer.sums is None or self._gpu is not None else offer.sums[skipped:]
        mark = self._copies.mark()

        def wrong() -> str | None:
            """What of all that has come is not what was offered."""
            if self.pledges.get(cell) != offer.pledge:
                return "gone"
            refusal = check(Record(label=row.label, parts=row.parts))
            if refusal is not None:
                return f"state, {refusal}"
            for nth, total in enumerate(sums or ()):
                if payload_sum([self._block_bytes(landing.block_ids[nth])]) != total:
                    return f"block {skipped + nth}, its sum is wrong"
            return None

        def settled() -> None:
            if arrival.done:
                self._waiting(arrival)

        arrival.read = Read(
            peer=offer.link,
            metadata=offer.metadata,
            spans=(blocks, state),
            last=Spans(rows=[(self.pledges.at(cell), offer.pledge_at, PLEDGE_BYTES)]),
            note=taken_note(offer.name),
            check=wrong,
            ready=lambda: mark.passed,
            settling=settled,
        )
        try:
            self.link.read(arrival.read)
        except OfferError:  # closed: nothing was begun
            arrival.read = None
            raise
        self._begun += 1

    def _state_spans(self, parts: Parts, offer: Offer) -> list[tuple[int, int, int]]:
        """Header and payload of the state, but for what is zero there: it is zeroed here."""
        for piece in parts.payload:
            np.frombuffer(piece, np.uint8).fill(0)
        used = [(0, HEADER_BYTES)]
        spans = self.layout.used_spans(offer.tokens)
        used += [(HEADER_BYTES + start, HEADER_BYTES + end) for start, end in spans]
        rows, at = [], 0
        for mine, theirs, span in _paired(parts, offer.state_pieces):
            for start, end in used:
                first, last = max(start, at), min(end, at + span)
                if first < last:
                    rows.append((mine + first - at, theirs + first - at, last - first))
            at += span
        return rows

    def advance(self, arrival: Arrival) -> bool:
        """Whether all of it has come, confirmed and checked. Ends it where it cannot come."""
        read = arrival.read
        assert read is not None
        if not read.over:
            if time.monotonic() < arrival.deadline:
                return False
            self.fail(arrival, "late", f"{arrival.offer.link} has not been read in time")
            return False
        if read.error is None:
            return read.settled
        if not read.refused:
            self.fail(arrival, "failed", f"reading from {arrival.offer.link}: {read.error}")
        elif read.error == "gone":
            self.fail(
                arrival,
                "gone",
                f"the offer of {arrival.offer.link} no longer stands: it expired, was "
                f"withdrawn or taken by others",
            )
        else:
            self.fail(arrival, "refused", f"what {arrival.offer.link} sent is wrong: {read.error}")
        return False

    def state_of(self, arrival: Arrival) -> tuple[Tensor, Tensor]:
        """The state that has come as a slot of this schema and as the unfinished block."""
        assert arrival.landing.row is not None
        pieces = [np.frombuffer(each, np.uint8) for each in arrival.landing.row.parts.payload]
        payload = np.concatenate(pieces)
        slot = np.zeros(self._schema.slot_bytes, dtype=np.uint8)
        self.layout.scatter(payload, arrival.tokens, slot)
        return torch.from_numpy(slot), torch.from_numpy(self.layout.block_of(payload))

    def note_arrived(self, arrival: Arrival) -> None:
        """A request has what it had taken on the device; the rest is let go."""
        self._arrived += 1
        self._read_bytes += arrival.read_bytes
        self._read_tokens += arrival.tokens
        self._skipped_blocks += arrival.skipped_blocks
        self._let_go_host(arrival)

    def fail(self, arrival: Arrival, reason: str, why: str) -> None:
        """It does not come. What nobody writes to any more is free at once, the rest later."""
        if arrival.error is None:
            arrival.error = OfferError(reason, why)
        self._errors[reason] = self._errors.get(reason, 0) + 1
        LOGGER.info("a request of %d tokens does not come: %s", arrival.tokens, why)
        self.give_back(arrival)

    def give_back(self, arrival: Arrival) -> None:
        """Lets go of all that an arrival took, once nobody writes to it."""
        read = arrival.read
        if read is not None:
            read.given_up = True
            if not read.settled:
                return
        self._table.let_go(arrival)
        self._let_go_host(arrival)

    def _let_go_host(self, arrival: Arrival) -> None:
        landing = arrival.landing
        if arrival in self.open:
            self.open.remove(arrival)
        if landing.row is not None:
            row, landing.row = landing.row, None
            self.rows.give_back(row.number)
        if landing.cell is not None:
            cell, landing.cell = landing.cell, None
            self.pledges.give_back(cell)

    # ---- both ------------------------------------------------------------------------------------

    def let_go(self, item: object) -> None:
        """What `waiting` was told."""
        if isinstance(item, Lease):
            if item.name in self.leases.held:
                self._table.let_go(item)
                self.rows.give_back(item.row.number)
                self.leases.forget(item)
        elif isinstance(item, Arrival) and item in self.open:
            self.give_back(item)

    def end_arrivals(self) -> None:
        """After an interrupt: no arrival comes any more. Offers stand, but for one that was not
        handed out."""
        self._copies.finish()
        for arrival in tuple(self.open):
            if arrival.request is None and arrival.error is None:
                why = "a call was interrupted, and recover ended all arrivals"
                arrival.error = OfferError("cancelled", why)
            read = arrival.read
            if arrival.request is not None or read is None or read.settled:
                self._table.holdings.pop(arrival, None)
                self._let_go_host(arrival)
            else:
                read.given_up = True
                with suppress(OfferError):  # closed: the memory stays taken
                    self.link.read(read)  # should it not have been told
        for lease in tuple(self.leases.held.values()):
            if lease.name not in self.leases.standing:
                self.leases.finish(lease)

    def held_memory(self) -> tuple[set[int], set[int]]:
        """Numbers of the rows and of the cells that offers and arrivals have."""
        owners: list[Landing | Lease] = [
            *(each.landing for each in self.open),
            *self.leases.held.values(),
        ]
        rows = {each.row.number for each in owners if each.row is not None}
        return rows, {each.cell for each in owners if each.cell is not None}

    def check_invariants(self) -> None:
        """Offers that stand are of blocks that have not been free since."""
        generation = self._table.allocator.generation
        for lease in tuple(self.leases.standing.values()):
            assert tuple(map(generation, lease.block_ids)) == lease.generations, lease

    def stats(self) -> HandoffStats:
        leases = self.leases
        return HandoffStats(
            offers=self._offers,
            offers_standing=len(leases.standing),
            offers_taken=leases.taken,
            offers_expired=leases.expired,
            offers_withdrawn=leases.withdrawn,
            arrivals=self._begun,
            arrivals_open=len(self.open),
            requests_arrived=self._arrived,
            errors=dict(self._errors),
            tokens_arrived=self._read_tokens,
            bytes_read=self._read_bytes,
            blocks_skipped=self._skipped_blocks,
        )

    def close(self) -> None:
        """Ends all offers and reads no more, for good. Memory that is being written to stays taken.
        A manager that is no longer used closes by itself."""
        for lease in tuple(self.leases.standing.values()):
            self.leases.withdraw(lease.name)
        self.link.close()

    def _state_label(self, trail: TokenTrail | None, length: int, name: bytes) -> Label:
        if trail is not None:
            return self.labels.of_state(trail, length)
        unnamed = hashlib.blake2b(name, digest_size=DIGEST_BYTES).digest()
        return self.labels.make(Kind.STATE, unnamed, bytes(DIGEST_BYTES), length)

    def _block_bytes(self, block_id: int) -> memoryview:
        """A block in host memory."""
        row: NDArray[np.uint8] = self._block_arena[block_id].numpy()
        return row.data

    def _block_at(self, block_id: int) -> int:
        return self._block_arena.data_ptr() + block_id * self._schema.block_bytes


def _paired(parts: Parts, theirs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pieces of one record here and there, which may be cut elsewhere, as pieces of equal length.
    OfferError if they have not the same length in all."""
    own = [(address(piece), piece.nbytes) for piece in parts.pieces if piece.nbytes]
    left, rows = [(start, span) for start, span in theirs if span], []
    if sum(span for _, span in own) != sum(span for _, span in left):
        raise OfferError("damaged", "the state that is offered has another length than it says")
    own.reverse()
    left.reverse()
    while own and left:
        (mine, here), (other, there) = own.pop(), left.pop()
        span = min(here, there)
        rows.append((mine, other, span))
        if here > span:
            own.append((mine + span, here - span))
        if there > span:
            left.append((other + span, there - span))
    return rows


def _words(schema: CacheSchema) -> str:
    """What people need to see why two schemas differ."""
    formats = (schema.entry_format, schema.window_format, schema.index_format)
    return (
        f"{schema.model.name}, {len(schema.layers)} layers, block_tokens={schema.block_tokens}, "
        f"hca_state={schema.hca_state}, formats {' '.join(each.name for each in formats)}"
    )
