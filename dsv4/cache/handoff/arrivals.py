"""Requests on their way to one manager: what is taken, read, checked and returned for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.changes import LOGGER
from dsv4.cache.handoff.arrival import Arrival
from dsv4.cache.handoff.lease import taken_note
from dsv4.cache.handoff.link import Read, Spans
from dsv4.cache.handoff.offer import PLEDGE_BYTES, Offer
from dsv4.cache.handoff.side import Side, words
from dsv4.cache.prefix.trail import Tenant, TokenTrail
from dsv4.cache.residency.residency import Residency
from dsv4.cache.transfers.copies import Mark
from dsv4.errors import OfferError
from dsv4.tiers.record import Kind, Parts, Record, address, check
from dsv4.tiers.secret import same
from dsv4.tiers.sizes import HEADER_BYTES

_ADDRESSES = 1 << 63  # with more, the sums of NIXL's own check overflow, and it reads there


class Arrivals:
    """All arrivals of one manager. Its calls advance them; the link's thread reads and checks."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self.open: list[Arrival] = []  # whose memory is not released yet
        self.begun = self.arrived = 0
        self.read_bytes = self.read_tokens = self.skipped_blocks = 0
        self.errors: dict[str, int] = {}

    def read_offer(self, packed: bytes) -> Offer:
        """The offer, if this manager can take it. Raises OfferError; with a key, offers that are
        not trusted are counted."""
        schema = self._side.schema
        try:
            offer = Offer.unpack(packed, self._side.verify)
        except OfferError as error:
            if error.reason == "untrusted" and self._side.secret is not None:
                self.errors[error.reason] = self.errors.get(error.reason, 0) + 1
            raise
        label = self._side.labels.make(Kind.STATE, offer.state_digest, offer.state_parent, 1)
        whole = offer.tokens // schema.block_tokens if schema.bytes.block else 0
        if offer.fingerprint != label.fingerprint:
            raise OfferError(
                "schema",
                f"the offer is of another schema ({offer.words}), this manager has "
                f"{words(schema)}: nothing is converted, build both with the same model, formats, "
                f"block_tokens and hca_state",
            )
        if offer.model != self._side.model:
            raise OfferError(
                "model",
                "the offer is of other weights or of another pipeline stage: model_id differs",
            )
        blocks = (offer.block_bytes, offer.entries_bytes, len(offer.rows))
        sizes = (*blocks, offer.state_bytes)
        needed = (schema.bytes.block, schema.bytes.entries, whole, label.payload_bytes)
        if sizes != needed or not offer.tokens:
            raise OfferError("damaged", f"the offer of {offer.tokens} tokens says sizes {sizes}")
        pieces = (start for start, _ in offer.state_pieces)
        if max((offer.pledge_at, *offer.rows, *offer.entries, *pieces)) >= _ADDRESSES:
            raise OfferError("damaged", "the offer names an address that no process has")
        return offer

    def read_trail(self, offer: Offer) -> TokenTrail | None:
        """The trail of the offered tokens, if their ids are known. Raises OfferError if the digests
        are not those of the ids."""
        if offer.ids is None or offer.root is None or offer.prompt_tokens is None:
            return None
        if offer.ids.min(initial=0) < 0:
            raise OfferError("damaged", "the offer has token ids below 0")
        secret = self._side.secret
        tenant = Tenant() if secret is None else Tenant(None, secret, secret.link)
        trail = TokenTrail(offer.root, self._side.schema.block_tokens, offer.ids, tenant)
        label = self._side.labels.of_state(trail, offer.tokens)
        if (label.digest, label.parent) != (offer.state_digest, offer.state_parent):
            raise OfferError("damaged", "the ids of the offer are not those that were hashed")
        trail.prompt_tokens = offer.prompt_tokens
        return trail

    def begin(self, arrival: Arrival) -> None:
        """Takes the host memory that it needs. Raises OfferError, with nothing changed."""
        offer = arrival.offer
        label = self._side.labels.make(
            Kind.STATE, offer.state_digest, offer.state_parent, tokens=offer.tokens
        )
        self.open.append(arrival)  # first, so that an interrupt finds what it has
        try:
            arrival.landing.cell = self._side.pledges.take()
            arrival.landing.row = self._side.rows.take(label)
        except Exception:
            self._release_host(arrival)
            raise

    def start(self, arrival: Arrival) -> None:
        """Reads what this manager does not have."""
        side, offer, landing = self._side, arrival.offer, arrival.landing
        row, cell = landing.row, landing.cell
        assert row is not None
        assert cell is not None
        skipped = len(landing.shared)
        wanted = offer.rows[skipped:]
        whole = landing.block_ids[: len(wanted)]
        own = [side.block_at(block_id) for block_id in whole]
        block_bytes, gpu = offer.block_bytes, offer.gpu
        blocks = Spans(
            rows=[(mine, theirs, block_bytes) for mine, theirs in zip(own, wanted, strict=True)],
            own=side.blocks_at,
            their=("DRAM", 0) if gpu is None else ("VRAM", gpu),
        )
        state = Spans(rows=self._state_spans(row.parts, offer))
        entries, mark = Spans(rows=[]), side.copies.mark()
        if side.residency is not None:
            mark = self._take_host_rows(side.residency, whole)
            own = [side.entries_at(block_id) for block_id in whole]
            both = zip(own, offer.entries[skipped:], strict=True)
            entries = Spans(rows=[(*pair, offer.entries_bytes) for pair in both])
        arrival.skipped_blocks = skipped
        arrival.read_bytes = sum(
            span for each in (blocks, entries, state) for *_, span in each.rows
        )
        sums = offer.sums[skipped:] if offer.sums is not None and side.can_sum else None

        def wrong() -> str | None:
            """Describes what has arrived that is not what was offered; None if nothing."""
            if side.pledges.get(cell) != offer.pledge:
                return "gone"
            refusal = check(Record(label=row.label, parts=row.parts))
            if refusal is not None:
                return f"state, {refusal}"
            for nth, total in enumerate(sums or ()):
                if not same(side.sum_of(landing.block_ids[nth]), total):
                    return f"block {skipped + nth}, its sum is wrong"
            return None

        def settled() -> None:
            if arrival.done:
                side.defer(arrival)

        arrival.read = Read(
            peer=offer.link,
            metadata=offer.metadata,
            spans=(blocks, entries, state),
            last=Spans(rows=[(side.pledges.at(cell), offer.pledge_at, PLEDGE_BYTES)]),
            note=taken_note(offer.name),
            check=wrong,
            ready=lambda: mark.passed,
            settling=settled,
        )
        try:
            side.link.read(arrival.read)
        except OfferError:  # closed: nothing was begun
            arrival.read = None
            raise
        self.begun += 1

    @staticmethod
    def _take_host_rows(residency: Residency, block_ids: Sequence[int]) -> Mark:
        """For entries of blocks in flight; they are free when the mark has passed."""
        if not residency.copies.take_rows(block_ids):
            raise OfferError(
                "busy",
                f"host memory has no free rows for the entries of {len(block_ids)} blocks, because "
                f"tiers below are still reading some: accept the offer again later",
            )
        return residency.copies.make_mark()

    def _state_spans(self, parts: Parts, offer: Offer) -> list[tuple[int, int, int]]:
        """Header and payload of the state, except what is zero there: that is zeroed here."""
        for piece in parts.payload:
            np.frombuffer(piece, np.uint8).fill(0)
        used = [(0, HEADER_BYTES)]
        spans = self._side.labels.state.used_spans(offer.tokens)
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
        """Whether all of it has arrived, confirmed and checked. Ends it if it cannot arrive."""
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
        """The state that has arrived, as a slot of this schema and as the unfinished block."""
        assert arrival.landing.row is not None
        pieces = [np.frombuffer(each, np.uint8) for each in arrival.landing.row.parts.payload]
        payload = np.concatenate(pieces)
        slot = np.zeros(self._side.schema.bytes.slot, dtype=np.uint8)
        self._side.labels.state.scatter(payload, arrival.tokens, slot)
        return torch.from_numpy(slot), torch.from_numpy(self._side.labels.state.block_of(payload))

    def note_arrived(self, arrival: Arrival) -> None:
        """A request has what it had taken on the device; the rest is released."""
        self.arrived += 1
        self.read_bytes += arrival.read_bytes
        self.read_tokens += arrival.tokens
        self.skipped_blocks += arrival.skipped_blocks
        self._release_host(arrival)

    def fail(self, arrival: Arrival, reason: str, why: str) -> None:
        """Ends an arrival that failed. Memory to which nothing writes any more is free at once, the
        rest later."""
        if arrival.error is None:
            arrival.error = OfferError(reason, why)
        self.errors[reason] = self.errors.get(reason, 0) + 1
        LOGGER.info("a request of %d tokens does not come: %s", arrival.tokens, why)
        self.give_back(arrival)

    def give_back(self, arrival: Arrival) -> None:
        """Releases all that an arrival took, once nothing writes to it."""
        read = arrival.read
        if read is not None:
            read.given_up = True
            if not read.settled:
                return
        self._side.table.holdings.release(arrival)
        self._release_host(arrival)

    def _release_host(self, arrival: Arrival) -> None:
        landing = arrival.landing
        if arrival in self.open:
            self.open.remove(arrival)
        if landing.row is not None:
            row, landing.row = landing.row, None
            self._side.rows.give_back(row.number)
        if landing.cell is not None:
            cell, landing.cell = landing.cell, None
            self._side.pledges.give_back(cell)

    def end_all(self) -> None:
        """After an interrupt: none of them will arrive."""
        for arrival in tuple(self.open):
            if arrival.request is None and arrival.error is None:
                why = "a call was interrupted, and recover ended all arrivals"
                arrival.error = OfferError("cancelled", why)
            read = arrival.read
            if arrival.request is not None or read is None or read.settled:
                self._side.table.holdings.pop(arrival, None)
                self._release_host(arrival)
            else:
                read.given_up = True
                with suppress(OfferError):  # closed: the memory stays taken
                    self._side.link.read(read)  # in case it was not informed


def _paired(parts: Parts, theirs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """The pieces of one record, ours and theirs, which may be cut differently, as pieces of equal
    length. Raises OfferError if their total lengths differ."""
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
