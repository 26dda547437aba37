"""A manager's statistics: bytes allocated, and what holds them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dsv4.cache.absent import NoHandoff, NoTiers
    from dsv4.cache.assembly import Parts
    from dsv4.cache.handoff.handoff import Handoff
    from dsv4.cache.transfers.tiers import Tiers
    from dsv4.tiers.tier import TierStats

HitKind = Literal["snapshot", "replay", "blocks_only", "state", "cut_replay"]
MissReason = Literal["too_short", "not_cached", "evicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBytes:
    """What the manager has allocated on its device: `block_arena` and `slot_arena`, the
    `block_table`, `step_buffers` with a step's index tensors, `workspace` for calls, `snapshots` of
    the prefix cache, and `entries` that are kept apart from blocks, with their tables."""

    block_arena: int
    slot_arena: int
    block_table: int
    step_buffers: int
    workspace: int
    snapshots: int = 0
    entries: int = 0  # that are kept apart, with hot rows and their tables (docs/residency.md)

    @property
    def total(self) -> int:
        """All of it."""
        cache = self.block_arena + self.slot_arena + self.block_table + self.snapshots
        return cache + self.entries + self.step_buffers + self.workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCounters:
    """Counts since the manager was made, of admissions with token ids.

    A hit on a "state" continues from a suspended request; one on "blocks_only" shares memory, but
    found no state and runs from the start; one on "cut_replay" is not exact. "evicted" is a miss of
    a prefix that was cached before.
    """

    hits: dict[HitKind, int] = field(
        default_factory=lambda: {
            "snapshot": 0,
            "replay": 0,
            "blocks_only": 0,
            "state": 0,
            "cut_replay": 0,
        }
    )
    misses: dict[MissReason, int] = field(
        default_factory=lambda: {"too_short": 0, "not_cached": 0, "evicted": 0}
    )
    tokens_asked: int = 0
    tokens_skipped: int = 0  # not computed at all
    tokens_shared: int = 0  # in blocks that existed


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How many values there were up to each of the `bounds` and above the one before it, in
    `counts`, whose last one is of those above all bounds; `total` is their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats(PrefixCounters):
    """The prefix cache: its counters, and what it keeps now.

    `hits` by where they continued and `misses` by reason count admissions; of `tokens_asked` for,
    `tokens_skipped` had not to be run, and `tokens_shared` are in blocks that existed.
    `block_evictions` and `snapshot_evictions` count what went for want of memory. `blocks_indexed`
    can be found; of `snapshots_total` rows `snapshots_used` are taken, of `snapshot_bytes` each.
    `cached_bytes_by_kind` splits the blocks that no request holds by what is in them.

    Of blocks that were evicted, `block_lifetime_s` says how many seconds they were cached, and
    `block_idle_s` for how many no request had used them; of blocks that an admission found,
    `block_gap_s` says how many had passed since the admission before."""

    block_evictions: int
    snapshot_evictions: int
    blocks_indexed: int
    snapshots_total: int
    snapshots_used: int
    snapshot_bytes: int
    block_lifetime_s: Histogram
    block_idle_s: Histogram
    block_gap_s: Histogram
    cached_bytes_by_kind: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """What was transferred between the device and its tiers since the manager was made. A record
    that was `dropped` is in no tier: no room, no time, an outage, or evicted from the device before
    its turn. `refused` counts records of a tier that were not what they said."""

    records_waiting: int  # to be copied, or on their way
    records_copied: int  # from the device to the host
    records_stored: int  # in one tier at least
    records_dropped: int
    records_refused: int
    records_fetched: int  # from the host to the device
    bytes_copied: int
    bytes_fetched: int
    tokens_fetched: int
    tokens_by_tier: dict[str, int]  # of these, by the tier that had them
    fetches: int
    fetches_cancelled: int
    fetches_open: int
    requests_suspended: int
    requests_resumed: int  # with the state that they were suspended with


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFetches:
    """Of a layer that owns entries which may be in host memory: how many of the selected ones that
    were not on the device had been fetched before (hits), and how many were fetched (misses)."""

    layer: int
    hits: int
    misses: int
    bytes_fetched: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyStats:
    """Where entries are, with the option `host_memory`. Of `host_bytes` in host memory,
    `host_bytes_used` belong to blocks that are not free and to records of a host tier; what counts
    for each salt is in `Quotas`. Rows are those of blocks on the device;
    `rows_total` and `blocks_in_host` count what is there now, all others since the manager was
    made. `blocks_left` counts how often a block has left the device. Fetches are counted on the
    device; on a GPU they are those of the previous call."""

    host_bytes: int
    host_bytes_used: int
    rows_total: int
    rows_free: int
    blocks_on_device: int
    blocks_in_host: int
    blocks_only_in_host: int
    blocks_copied: int
    blocks_left: int
    copies_failed: int
    hits: int
    misses: int
    bytes_fetched: int
    layers: tuple[LayerFetches, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStats:
    """What was transferred between this manager and others since it was made. An offer ends when it
    was `taken` as often as it was made for, `expired` or was `withdrawn`. `errors` counts failed
    arrivals, by the reason of their OfferError."""

    offers: int
    offers_standing: int
    offers_taken: int  # counted once per taker
    offers_expired: int
    offers_withdrawn: int
    arrivals: int
    arrivals_open: int  # whose memory is not released yet
    requests_arrived: int
    errors: dict[str, int]
    tokens_arrived: int
    bytes_read: int
    blocks_skipped: int  # were cached here


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What is held now: `blocks_` and `slots_` in total, free and live; `requests_live`, their
    `tokens_live`, and the bytes of these, `block_bytes_live` and `slot_bytes_live`. Of the
    `blocks_cached`, `blocks_evictable` could go now; `blocks_pinned` are never evicted.
    `prefix`, `transfers`, `tiers`, `handoff` and `residency` are of these parts, None or empty
    without them.

    For slots, free + live = total (except those promised to an arrival). For
    blocks, free + live + cached + in flight = total: cached ones are kept by the prefix index and
    held by no request, those in flight are being filled from a tier or another machine. Blocks that
    an offer holds are live."""

    blocks_total: int
    blocks_free: int
    blocks_live: int
    slots_total: int
    slots_free: int
    requests_live: int
    tokens_live: int
    block_bytes_live: int
    slot_bytes_live: int
    blocks_cached: int = 0
    blocks_in_flight: int = 0
    blocks_evictable: int = 0  # of the cached ones: could be evicted at once
    blocks_pinned: int = 0  # never evicted, held or not
    prefix: PrefixStats | None = None
    transfers: TransferStats | None = None
    tiers: tuple[TierStats, ...] = ()
    handoff: HandoffStats | None = None
    residency: ResidencyStats | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


def count_stats(parts: Parts, tiers: Tiers | NoTiers, handoff: Handoff | NoHandoff) -> Stats:
    """The statistics of a manager with these parts. Requests that the next call releases count as
    released."""
    table, prefix, leaving = parts.table, parts.prefix, parts.leaving
    allocator, live, going = table.allocator, leaving.staying(), leaving.going()
    free, idle = allocator.left_by([request.block_ids for request in going])
    pinned = prefix.pins.block_ids()
    evictable = prefix.blocks.evictable()
    return Stats(
        blocks_total=allocator.total,
        blocks_free=allocator.free + len(free),
        blocks_live=allocator.held - len(free) - len(idle),
        blocks_cached=allocator.idle + len(idle),
        blocks_in_flight=allocator.in_flight,
        blocks_evictable=evictable + sum(block_id not in pinned for block_id in idle),
        blocks_pinned=len(pinned),
        slots_total=table.max_requests,
        slots_free=len(table.free_slots) + len(going),
        requests_live=len(live),
        tokens_live=sum(request.length for request in live),
        block_bytes_live=(allocator.held - len(free) - len(idle)) * table.schema.bytes.block,
        slot_bytes_live=len(live) * table.schema.bytes.slot,
        prefix=prefix.stats(idle_blocks=allocator.idle + len(idle)),
        transfers=tiers.stats(),
        tiers=tiers.tier_stats(),
        handoff=handoff.stats(),
        residency=None if parts.residency is None else parts.residency.stats(),
    )
