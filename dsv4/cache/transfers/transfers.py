"""One manager's way to its tiers: what goes down after a step, what comes back for a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dsv4.cache.prefix.cache import PrefixCache
from dsv4.cache.prefix.trail import TokenTrail
from dsv4.cache.requests import Request, RequestTable
from dsv4.cache.stats import TransferStats
from dsv4.cache.transfers.aside import Aside
from dsv4.cache.transfers.copies import Copies
from dsv4.cache.transfers.fetch import Fetch, Fetches
from dsv4.cache.transfers.labels import Labels
from dsv4.cache.transfers.offload import Offload, Route, Suspended
from dsv4.cache.transfers.worker import Worker
from dsv4.errors import InvalidInput
from dsv4.tiers.host import HostRow, HostTier
from dsv4.tiers.record import Kind
from dsv4.tiers.sizes import HEADER_BYTES, padded
from dsv4.tiers.tier import Tier, TierStats

TIER_CALLS = ("register", "lookup", "load", "store", "poll", "cancel", "stats")
STAGED_BLOCKS = 64  # of host memory, where no tier keeps any
STAGED_SNAPSHOTS = 4


class Transfers:
    """Tiers, the fastest first. A host tier among them is where all copies end; without one there
    is a little host memory for that alone.

    Its calls come from whoever is inside the manager, one at a time. None waits for a tier or for
    the device, but for `drain` and `close`, and none raises for what happens there.
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
        _require_tiers(tiers, prefix.options.model_id)
        self.tiers, self._prefix = tuple(tiers), prefix
        self.labels = Labels(prefix.schema)
        hosts = [tier for tier in tiers if isinstance(tier, HostTier)]
        self.host = hosts[0] if hosts else _staging(self.labels)
        if device.type == "cuda":
            self.host.pin()
        below = [tier for tier in self.tiers if tier is not self.host]
        for tier in below:
            tier.register(self.host.region)
        self.route = Route(
            # no call of the owner waits for one of these; host memory answers by itself
            tiers=[tier if isinstance(tier, HostTier) else Aside(tier) for tier in self.tiers],
            host=self.host,
            host_is_tier=bool(hosts),
            has_below=bool(below),
            copies=Copies(device, self.host.region.memory),
            worker=Worker(self.host, below, host_is_tier=bool(hosts)),
        )
        self.offload = Offload(
            self.route,
            prefix=prefix,
            labels=self.labels,
            block_arena=block_arena,
            slot_arena=slot_arena,
        )
        self.fetches = Fetches(
            self.route, prefix=prefix, table=table, labels=self.labels, block_arena=block_arena
        )
        self.suspended = self.resumed = 0
        prefix.observe(self.offload)

    def pump(self) -> None:
        """Moves on what is on its way. After each step, and with each call of tiers."""
        self.offload.pump()
        self.fetches.clean()

    def drain(self, timeout_s: float) -> bool:
        """Waits until all that was cached is kept below, or dropped; whether that is so."""
        until = time.monotonic() + timeout_s
        while True:
            self.pump()
            if self.offload.is_idle:
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.0005)

    def close(self, timeout_s: float) -> None:
        """Cancels fetches, drains, and ends the thread. From now on nothing is kept and nothing
        comes. Closes no tier, but for host memory that no tier keeps."""
        until = time.monotonic() + timeout_s
        for fetch in tuple(self.route.open):
            self.fetches.cancel(fetch)
        self.drain(timeout_s)
        self.route.tiers = ()
        self.route.worker.close(max(0.0, until - time.monotonic()))
        if not self.route.host_is_tier:
            self.host.close(max(0.0, until - time.monotonic()))

    def suspend(self, request: Request) -> Suspended:
        self.suspended += 1
        suspended = self.offload.suspend(request)
        self.pump()
        return suspended

    def slot_of(self, row: HostRow, length: int) -> tuple[Tensor, Tensor]:
        """A state as a slot of this schema and as the unfinished block, on the host."""
        layout = self.labels.state
        payload = np.concatenate([np.frombuffer(each, np.uint8) for each in row.parts.payload])
        slot = np.zeros(self._prefix.schema.slot_bytes, dtype=np.uint8)
        layout.scatter(payload, length, slot)
        return torch.from_numpy(slot), torch.from_numpy(layout.block_of(payload))

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

    def end_fetches(self) -> None:
        """After an interrupt: nothing is in flight any more."""
        self.route.copies.finish()
        self.offload.release_begun()
        self.fetches.abandon_all()

    def stats(self) -> TransferStats:
        offload, fetches, route = self.offload, self.fetches, self.route
        return TransferStats(
            records_waiting=offload.waiting,
            records_copied=offload.copied,
            records_stored=offload.stored,
            records_dropped=offload.dropped,
            records_refused=route.refused,
            records_fetched=route.records,
            bytes_copied=offload.copied_bytes,
            bytes_fetched=route.bytes,
            tokens_fetched=fetches.tokens,
            fetches=fetches.started,
            fetches_cancelled=fetches.cancelled,
            fetches_open=len(route.open),
            requests_suspended=self.suspended,
            requests_resumed=self.resumed,
        )

    def tier_stats(self) -> tuple[TierStats, ...]:
        return tuple(tier.stats() for tier in self.tiers)


def _require_tiers(tiers: Sequence[Tier], model_id: str) -> None:
    """InvalidInput."""
    if not model_id:
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
    if sum(isinstance(tier, HostTier) for tier in tiers) > 1:
        raise InvalidInput("two host tiers: one is enough, give it more memory")


def _staging(labels: Labels) -> HostTier:
    """Host memory that records only pass through."""
    most = [(Kind.BLOCK, STAGED_BLOCKS), (Kind.SNAPSHOT, STAGED_SNAPSHOTS), (Kind.STATE, 1)]
    size_bytes = sum(
        rows * padded(HEADER_BYTES + labels.payload_bytes(kind)) for kind, rows in most
    )
    return HostTier(size_bytes, name="staging")
