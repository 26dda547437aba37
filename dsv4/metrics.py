"""A manager's statistics as Prometheus text. Needs the extra `dsv4[metrics]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dsv4.cache.quotas import Quotas
from dsv4.errors import OfferError
from dsv4.extras import needed_by

if TYPE_CHECKING:
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.stats import HandoffStats, Histogram, PrefixStats, TransferStats
    from dsv4.tiers.tier import TierStats


def prometheus_text(manager: KVCacheManager) -> str:
    """All statistics of a `manager` in Prometheus' exposition format: serve it as text/plain.

    Raises MissingExtra without prometheus_client.
    """
    with needed_by("a manager's metrics"):
        from prometheus_client import generate_latest
    text: bytes = generate_latest(ManagerCollector(manager))
    return text.decode()


class ManagerCollector:
    """Reads a manager whenever it is scraped: register it with a prometheus_client registry."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Any]:
        """Yields one metric family after the other."""
        stats = self._manager.stats()
        yield _gauge(
            "dsv4_blocks",
            "Blocks of the pool: held by requests, cached and idle, in flight, free.",
            "state",
            {
                "live": stats.blocks_live,
                "cached": stats.blocks_cached,
                "in_flight": stats.blocks_in_flight,
                "free": stats.blocks_free,
            },
        )
        yield _gauge(
            "dsv4_slots",
            "State slots.",
            "state",
            {"live": stats.requests_live, "free": stats.slots_free},
        )
        yield _gauge("dsv4_live_tokens", "Tokens of all live requests.", None, stats.tokens_live)
        yield _gauge(
            "dsv4_live_bytes",
            "Bytes that live requests hold.",
            "arena",
            {"block": stats.block_bytes_live, "slot": stats.slot_bytes_live},
        )
        if stats.prefix is not None:
            yield from _prefix_families(stats.prefix)
            yield _quota_family(self._manager)
        if stats.transfers is not None:
            yield from _transfer_families(stats.transfers, stats.tiers)
        if stats.handoff is not None:
            yield from _handoff_families(stats.handoff)


def _prefix_families(prefix: PrefixStats) -> Iterator[Any]:
    yield _gauge(
        "dsv4_prefix_cached_bytes",
        "Bytes in blocks that only the prefix cache keeps, by content.",
        "kind",
        prefix.cached_bytes_by_kind,
    )
    yield _gauge(
        "dsv4_prefix_snapshots",
        "Snapshots of the prefix cache.",
        "state",
        {
            "used": prefix.snapshots_used,
            "free": prefix.snapshots_total - prefix.snapshots_used,
        },
    )
    yield _counter(
        "dsv4_prefix_hits", "Prompts that found a prefix, by its state.", "state", prefix.hits
    )
    yield _counter(
        "dsv4_prefix_misses", "Prompts that found no prefix, by reason.", "reason", prefix.misses
    )
    yield _counter(
        "dsv4_prefix_evictions",
        "Blocks and snapshots evicted for lack of memory.",
        "what",
        {"block": prefix.block_evictions, "snapshot": prefix.snapshot_evictions},
    )
    yield _counter(
        "dsv4_prefix_tokens",
        "Tokens of prompts: asked; skipped are not computed; shared are in blocks others have too.",
        "what",
        {
            "asked": prefix.tokens_asked,
            "skipped": prefix.tokens_skipped,
            "shared": prefix.tokens_shared,
        },
    )

    for name, text, found in (
        ("lifetime", "Of evicted blocks: how long they were cached.", prefix.block_lifetime_s),
        ("idle_before_evict", "Of evicted blocks: how long none used them.", prefix.block_idle_s),
        ("reuse_gap", "Time between two uses of a block.", prefix.block_gap_s),
    ):
        yield _histogram(f"dsv4_kv_block_{name}_seconds", text, found)


def _quota_family(manager: KVCacheManager) -> Any:
    """Of salts with a quota, where they have one. Prompts without a salt have an empty label."""
    family = _classes()[1](
        "dsv4_quota_bytes",
        "What salts with a quota have in each place, and the most that they may have.",
        labels=["salt", "place", "what"],
    )
    for use in Quotas(manager).all():
        salt = "" if use.salt is None else use.salt or '""'
        for place in ("device", "host", "disk"):
            used, most = (getattr(each, f"{place}_bytes") for each in (use, use.quota))
            for what, value in (("used", used), ("limit", most)):
                if value is not None and most is not None:
                    family.add_metric([salt, place, what], value)
    return family


def _transfer_families(transfers: TransferStats, tiers: Sequence[TierStats]) -> Iterator[Any]:
    yield _counter(
        "dsv4_transfer_records",
        "Records between the device and its tiers.",
        "what",
        {
            "copied": transfers.records_copied,
            "stored": transfers.records_stored,
            "dropped": transfers.records_dropped,
            "refused": transfers.records_refused,
            "fetched": transfers.records_fetched,
        },
    )
    yield _counter(
        "dsv4_transfer_bytes",
        "Bytes from the device to the host and back.",
        "what",
        {"copied": transfers.bytes_copied, "fetched": transfers.bytes_fetched},
    )
    yield _counter(
        "dsv4_transfer_tokens",
        "Tokens whose blocks came from a tier.",
        "tier",
        transfers.tokens_by_tier,
    )
    yield _counter(
        "dsv4_transfer_requests",
        "Requests suspended, and requests resumed with their state.",
        "what",
        {"suspended": transfers.requests_suspended, "resumed": transfers.requests_resumed},
    )
    counter, gauge = _classes()
    for kind, name, text, label, read in (
        (counter, "records", "Records: found, not found, stored, dropped.", "what", _records),
        (counter, "refused", "Records that are not what they say.", "reason", _refused),
        (counter, "bytes", "Bytes loaded and stored.", "what", _bytes),
        (
            counter,
            "seconds",
            "Seconds from call to outcome, summed over records.",
            "what",
            _seconds,
        ),
        (
            gauge,
            "worst_seconds",
            "The longest time that a record took, in seconds.",
            "what",
            _worst_seconds,
        ),
        (counter, "troubles", "Outages and missed deadlines.", "what", _troubles),
        (gauge, "held_bytes", "Bytes held, capacity, and bytes waiting.", "what", _held),
    ):
        family = kind(f"dsv4_tier_{name}", text, labels=["tier", label])
        for tier in tiers:
            for key, value in read(tier).items():
                family.add_metric([tier.name, key], value)
        yield family


def _handoff_families(handoff: HandoffStats) -> Iterator[Any]:
    yield _counter(
        "dsv4_handoff_offers",
        "Offers to other managers: made, taken (per taker), expired, withdrawn.",
        "what",
        {
            "made": handoff.offers,
            "taken": handoff.offers_taken,
            "expired": handoff.offers_expired,
            "withdrawn": handoff.offers_withdrawn,
        },
    )
    yield _counter(
        "dsv4_handoff_requests",
        "Requests of other managers that were accepted, and that arrived.",
        "what",
        {"accepted": handoff.arrivals, "arrived": handoff.requests_arrived},
    )
    yield _counter(
        "dsv4_handoff_errors",
        "Failed arrivals, by reason.",
        "reason",
        {**dict.fromkeys(OfferError.reasons, 0), **handoff.errors},
    )
    yield _counter(
        "dsv4_handoff_bytes",
        "Bytes read from other managers.",
        "what",
        {"read": handoff.bytes_read},
    )
    yield _gauge(
        "dsv4_handoff_open",
        "Standing offers, and arrivals that have memory.",
        "what",
        {"offers": handoff.offers_standing, "arrivals": handoff.arrivals_open},
    )


def _records(tier: TierStats) -> dict[str, float]:
    return {"hit": tier.hits, "missed": tier.misses, "stored": tier.stored, "dropped": tier.dropped}


def _refused(tier: TierStats) -> dict[str, float]:
    from dsv4.tiers.record import Reason  # needs the extra of tiers, which is there with one

    # from 0 on: the rate of a series that begins with 1 is 0
    return {str(reason): tier.refused.get(reason, 0) for reason in Reason}


def _bytes(tier: TierStats) -> dict[str, float]:
    return {"loaded": tier.loaded_bytes, "stored": tier.stored_bytes}


def _seconds(tier: TierStats) -> dict[str, float]:
    return {"load": tier.load.total_s, "store": tier.store.total_s}


def _worst_seconds(tier: TierStats) -> dict[str, float]:
    return {"load": tier.load.worst_s, "store": tier.store.worst_s}


def _troubles(tier: TierStats) -> dict[str, float]:
    return {"outage": tier.outages, "late": tier.late}


def _held(tier: TierStats) -> dict[str, float]:
    held = {"held": tier.held_bytes, "capacity": tier.capacity_bytes, "queued": tier.queued_bytes}
    return {what: count for what, count in held.items() if count is not None}


def _classes() -> tuple[Any, Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    return CounterMetricFamily, GaugeMetricFamily


def _histogram(name: str, text: str, found: Histogram) -> Any:
    from prometheus_client.core import HistogramMetricFamily

    bounds = [*(f"{bound:g}" for bound in found.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(found.counts), strict=True))
    family = HistogramMetricFamily(name, text)
    family.add_metric([], buckets=buckets, sum_value=found.total)
    return family


def _gauge(name: str, text: str, label: str | None, values: dict[str, int] | int) -> Any:
    return _filled(_classes()[1], name, text, label, values)


def _counter(name: str, text: str, label: str, values: Any) -> Any:
    return _filled(_classes()[0], name, text, label, values)


def _filled(kind: Any, name: str, text: str, label: str | None, values: Any) -> Any:
    family = kind(name, text, labels=[] if label is None else [label])
    for key, value in values.items() if label is not None else (("", values),):
        family.add_metric([] if label is None else [key], value)
    return family
