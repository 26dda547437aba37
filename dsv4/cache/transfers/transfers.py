"""One manager's way to its tiers: what goes down after a step, what comes back for a prompt."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.changes import LOGGER
from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.observer import NewlyCached
from dsv4.cache.prefix.resume import PrefixMatch
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request, RequestTable
from dsv4.cache.state import StateLayout, copy_payload
from dsv4.cache.stats import TransferStats
from dsv4.cache.transfers.aside import Aside
from dsv4.cache.transfers.copies import Copies, Mark
from dsv4.cache.transfers.courier import Courier, Parcel
from dsv4.cache.transfers.fetch import Fetch, Fetches
from dsv4.cache.transfers.labels import Labels
from dsv4.cache.transfers.loading import Route
from dsv4.errors import InvalidInput
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Key, Kind, Label
from dsv4.tiers.sizes import HEADER_BYTES, padded
from dsv4.tiers.tier import Tier, TierStats

TIER_CALLS = ("register", "lookup", "load", "store", "poll", "cancel", "stats")
MOST_WAITING = 16_384  # records in the outbox; what comes on top is dropped
MOST_COPYING = 256  # copies on the way down: a full stream would hold up who launches
STAGED_BLOCKS = 64  # of host memory, where no tier keeps any
STAGED_SNAPSHOTS = 4


class Suspended:
    """A request that has left the device with so many tokens. `stored` says whether a tier has its
    state: None until they have answered, False if none could keep it; then it comes back all the
    same, and what is missing runs again."""

    __slots__ = ("_kept", "_parcel", "tokens")

    def __init__(self, *, tokens: int, parcel: Parcel | None, kept: bool) -> None:
        self.tokens, self._parcel, self._kept = tokens, parcel, kept

    @property
    def stored(self) -> bool | None:
        return self._kept if self._parcel is None else self._parcel.stored

    def __repr__(self) -> str:
        how = {None: "being stored", True: "stored", False: "not stored"}[self.stored]
        return f"Suspended({self.tokens} tokens, {how})"


@dataclass(slots=True, eq=False)
class CopyBatch:
    """Rows that are being copied to the host."""

    mark: Mark
    parcels: list[Parcel]


class Transfers:
    """Tiers, the fastest first. A host tier among them is where all copies end; without one there
    is a little host memory for that alone.

    Its calls come from whoever is inside the manager, one at a time. None waits for a tier or for
    the device, but for `drain`, and none raises for what happens there.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        prefix: PrefixCache | None,
        table: RequestTable,
        block_arena: Tensor,
        slot_arena: Tensor,
        device: torch.device,
    ) -> None:
        if prefix is None:
            raise InvalidInput("tiers keep prefixes: build the manager with prefix=PrefixOptions()")
        if not prefix.options.model_id:
            raise InvalidInput(
                "tiers outlive the process, so records must say which weights they are of: give "
                "PrefixOptions(model_id=...), for example a hash of the checkpoint's index"
            )
        for tier in tiers:
            if not all(callable(getattr(tier, call, None)) for call in TIER_CALLS):
                raise InvalidInput(
                    f"{tier!r} is no tier: give HostTier(...), DiskTier(...) or what has the calls "
                    f"{', '.join(TIER_CALLS)}"
                )
        if len({tier.name for tier in tiers}) != len(tiers):
            raise InvalidInput("two tiers have the same name: give each one its own")
        self.tiers, self._prefix = tuple(tiers), prefix
        self._block_arena, self._slot_arena = block_arena, slot_arena
        self.layout = StateLayout(prefix.schema)
        self.labels = Labels(prefix.schema, self.layout)
        hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
        if len(hosts) > 1:
            raise InvalidInput("two host tiers: one is enough, give it more memory")
        self.host = hosts[0] if hosts else self._staging()
        self.host_is_tier = bool(hosts)
        if device.type == "cuda":
            self.host.pin()
        below = [tier for tier in self.tiers if tier is not self.host]
        self._passes = bool(below)  # records that the host tier does not keep are wanted there
        for tier in below:
            tier.register(self.host.region)
        self.copies = Copies(device, self.host.region.memory)
        self.courier = Courier(self.host, below, host_is_tier=self.host_is_tier)
        # no call of the owner waits for one of these; host memory answers by itself
        self._asked: tuple[HostTier | Aside, ...] = tuple(
            tier if isinstance(tier, HostTier) else Aside(tier) for tier in self.tiers
        )
        self.fetches = Fetches(
            Route(
                tiers=self._asked,
                host=self.host,
                host_is_tier=self.host_is_tier,
                copies=self.copies,
                courier=self.courier,
            ),
            prefix=prefix,
            table=table,
            labels=self.labels,
            block_arena=block_arena,
        )
        self._outbox: deque[NewlyCached] = deque()
        self._gathering: list[Parcel] = []
        self._going: list[CopyBatch] = []
        self._copying = 0
        self._last_down: Mark | None = None
        self._copied = self._copied_bytes = self._stored = self._dropped = 0
        self.suspended = self.resumed = 0
        prefix.observe(self)

    def _staging(self) -> HostTier:
        """Host memory that records only pass through."""
        most = [(Kind.BLOCK, STAGED_BLOCKS), (Kind.SNAPSHOT, STAGED_SNAPSHOTS), (Kind.STATE, 1)]
        size_bytes = sum(
            rows * padded(HEADER_BYTES + self.labels.payload_bytes(kind)) for kind, rows in most
        )
        return HostTier(size_bytes, name="staging")

    # ---- down ------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Moves on what is on its way down. After each step, and whenever somebody is here."""
        self._note_stored()
        while self._going and self._going[0].mark.passed:
            self._copying -= len(self._going[0].parcels)
            self.courier.send(self._going.pop(0).parcels)
        self.fetches.clean()
        while len(self._outbox) > MOST_WAITING:  # the starts of prompts are worth most
            self._outbox.pop()
            self._dropped += 1
        if self._outbox and self._copying < MOST_COPYING:
            self._copy_down()

    def _copy_down(self) -> None:
        rows: list[tuple[Tensor, Parcel]] = []
        self._gathering = []
        while self._outbox and self._copying + len(rows) < MOST_COPYING:
            new = self._outbox[0]
            source = self._source(new)
            if source is None:  # evicted before its turn
                self._dropped += 1
            else:
                label = self._label(new)
                row = self.host.take(label, passing=self._passes)
                if row is not None:
                    self._gathering.append(Parcel(row))
                    rows.append((source, self._gathering[-1]))
                elif self.host_is_tier and self.host.holds(label.key):
                    if not new.is_snapshot:
                        new.node.stored = True
                elif not self._passes and self.host.is_lost(label):
                    self._dropped += 1  # nobody wants it, and nobody waits for it
                elif rows or self._copying or not self.courier.idle or self.fetches.open:
                    break  # there will be room
                else:
                    self._dropped += 1
            self._outbox.popleft()
        if rows:
            self.send_down([(source, parcel) for source, parcel in rows])

    def send_down(self, rows: Sequence[tuple[Tensor, Parcel]]) -> None:
        """Starts to copy rows of the device into parcels, which the courier gets afterwards."""
        parcels = [parcel for _, parcel in rows]
        try:
            mark = self.copies.down([(source, parcel.row.parts) for source, parcel in rows])
        except RuntimeError as error:
            LOGGER.warning("%d records are not kept: %s", len(parcels), error)
            self._gathering = []
            self._dropped += len(parcels)
            self.copies.finish()
            for parcel in parcels:
                parcel.stored = False
                self.host.release(parcel.row)
            return
        self._last_down = mark
        self._going.append(CopyBatch(mark, parcels))
        self._gathering = []
        self._copying += len(parcels)
        self._copied += len(parcels)
        self._copied_bytes += sum(parcel.row.label.payload_bytes for parcel in parcels)
        if mark.passed and len(self._going) == 1:
            self._copying -= len(parcels)
            self.courier.send(self._going.pop().parcels)

    def _source(self, new: NewlyCached) -> Tensor | None:
        node = new.node
        if self._prefix.index.get(node.digest) is not node:
            return None
        if not new.is_snapshot:
            return self._block_arena[node.block_id]
        return None if node.snapshot is None else self._prefix.pool.bytes[node.snapshot]

    def _label(self, new: NewlyCached) -> Label:
        kind = Kind.SNAPSHOT if new.is_snapshot else Kind.BLOCK
        return self.labels.make(kind, new.node.digest, new.parent, new.tokens)

    def _note_stored(self) -> None:
        stored = self.courier.stored
        while stored:
            key: Key = stored.popleft()
            self._stored += 1
            if key.kind is Kind.BLOCK:
                node = self._prefix.index.get(key.digest)
                if node is not None:
                    node.stored = True

    # ---- what the prefix cache tells its observer ------------------------------------------------

    def cached(self, new: NewlyCached) -> None:
        """It is copied down with the next `pump`."""
        self._outbox.append(new)

    def before_reuse(self) -> None:
        """Memory that is being copied is written to by what comes next on the current stream only
        after the copy."""
        if self._last_down is not None:
            self._last_down.hold_back()
            if self._last_down.passed:
                self._last_down = None

    def used(self, match: PrefixMatch, trail: TokenTrail) -> None:
        """What is used on the device is used below: else it would be the first to go there."""
        if not match.nodes:
            return
        blocks, snapshot = self.labels.of_blocks(trail, len(match.nodes)), None
        if match.snapshot is not None and self.labels.payload_bytes(Kind.SNAPSHOT):
            block = match.resume.start // self._prefix.schema.block_tokens - 1
            snapshot = self.labels.of_block(trail, block, Kind.SNAPSHOT)
        for tier in self._asked:
            tier.use(blocks, snapshot)

    # ---- the end ---------------------------------------------------------------------------------

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that was cached is kept below, or dropped; whether that is so."""
        until = time.monotonic() + timeout_s
        while True:
            self.pump()
            if not (self._outbox or self._going) and self.courier.idle:
                self._note_stored()
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.0005)

    # ---- a live request leaves and comes back ----------------------------------------------------

    def suspend(self, request: Request) -> Suspended:
        """Copies the state of a request and its unfinished block, before what comes next on the
        current stream can write there. The blocks before are cached like everybody's."""
        trail, length = request.trail, request.length
        assert trail is not None
        self.suspended += 1
        parcel = None
        if request.has_exact_state:
            label = self.labels.of_state(trail, length)
            row = self.host.take(label)
            if row is not None:
                parcel = self._gather(request, row, length)
            elif self.host_is_tier and self.host.holds(label.key):
                return Suspended(tokens=length, parcel=None, kept=True)
            else:
                self._dropped += 1
        self.pump()
        return Suspended(tokens=length, parcel=parcel, kept=False)

    def _gather(self, request: Request, row: HostRow, length: int) -> Parcel | None:
        schema, layout, written = self._prefix.schema, self.layout, request.written_tokens
        parcel = Parcel(row)
        self._gathering = [parcel]
        try:
            slot = self.copies.host_bytes(schema.slot_bytes)
            block = self.copies.host_bytes(schema.block_bytes)
            rows = [(self._slot_arena[request.slot], slot)]
            if length % schema.block_tokens:
                block_id = request.block_ids[length // schema.block_tokens]
                rows.append((self._block_arena[block_id], block))
            mark = self.copies.down_into(rows)
        except RuntimeError as error:
            LOGGER.warning("a state of %d tokens is not kept: %s", length, error)
            self._gathering = []
            self._dropped += 1
            self.copies.finish()
            self.host.release(row)
            return None

        def fill() -> None:
            payload = np.empty(layout.payload_bytes, dtype=np.uint8)
            layout.gather(slot.numpy(), block.numpy(), length, payload, written=written)
            copy_payload(payload, row.parts)

        parcel.fill = fill
        mark.hold_back()
        self._going.append(CopyBatch(mark, [parcel]))
        self._gathering = []
        self._copying += 1
        self._copied += 1
        self._copied_bytes += layout.payload_bytes
        return parcel

    def slot_of(self, row: HostRow, length: int) -> tuple[Tensor, Tensor]:
        """A state as a slot of this schema and as the unfinished block, on the host."""
        payload = np.concatenate([np.frombuffer(each, np.uint8) for each in row.parts.payload])
        slot = np.zeros(self._prefix.schema.slot_bytes, dtype=np.uint8)
        self.layout.scatter(payload, length, slot)
        return torch.from_numpy(slot), torch.from_numpy(self.layout.block_of(payload))

    # ---- up --------------------------------------------------------------------------------------

    def fetch(
        self,
        trail: TokenTrail,
        tokens: int,
        *,
        with_state: bool,
        poll: Callable[[Fetch], None],
        cancel: Callable[[Fetch], None],
        hand_out: Callable[[object], None],
    ) -> Fetch:
        self.pump()
        fetch = Fetch(trail, tokens, with_state=with_state, poll=poll, cancel=cancel)
        hand_out(fetch)
        self.fetches.start(fetch)
        return fetch

    def advance(self, fetch: Fetch) -> None:
        self.pump()
        self.fetches.advance(fetch)

    def let_go(self, item: object) -> bool:
        """Ends a fetch that nobody waits for any more; False if it is none."""
        if not isinstance(item, Fetch):
            return False
        self.fetches.let_go(item)
        return True

    # ---- afterwards ------------------------------------------------------------------------------

    def end_fetches(self) -> None:
        """After an interrupt: nothing is in flight any more."""
        self.copies.finish()
        sent = {id(parcel) for going in self._going for parcel in going.parcels}
        for parcel in self._gathering:
            if id(parcel) not in sent:
                self.host.release(parcel.row)
        self._gathering = []
        self._copying = sum(len(going.parcels) for going in self._going)
        self.fetches.abandon_all()

    def stats(self) -> TransferStats:
        fetches, route, courier = self.fetches, self.fetches.route, self.courier
        return TransferStats(
            records_waiting=len(self._outbox) + self._copying + courier.waiting,
            records_copied=self._copied,
            records_stored=self._stored + len(courier.stored),
            records_dropped=self._dropped + courier.dropped,
            records_refused=route.refused,
            records_fetched=route.records,
            bytes_copied=self._copied_bytes,
            bytes_fetched=route.bytes,
            tokens_fetched=fetches.tokens,
            fetches=fetches.started,
            fetches_cancelled=fetches.cancelled,
            fetches_open=len(fetches.open),
            requests_suspended=self.suspended,
            requests_resumed=self.resumed,
        )

    def tier_stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self.tiers)
