"""A manager's statistics as Prometheus text. Needs the extra `dsv4[metrics]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dsv4.cache.manager import KVCacheManager
from dsv4.errors import MissingExtra


def prometheus_text(manager: KVCacheManager) -> str:
    """All statistics in Prometheus' exposition format: serve it as text/plain.

    Raises MissingExtra without prometheus_client.
    """
    try:
        from prometheus_client import generate_latest
    except ImportError as error:
        raise MissingExtra(
            f"metrics need prometheus_client ({error}): install it with pip install 'dsv4[metrics]'"
        ) from error
    text: bytes = generate_latest(ManagerCollector(manager))
    return text.decode()


class ManagerCollector:
    """Reads a manager whenever it is scraped: register it with a prometheus_client registry."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Any]:
        """One metric family after the other."""
        stats = self._manager.stats()
        yield _gauge(
            "dsv4_blocks",
            "Blocks of the pool: held by requests, cached and idle, free.",
            "state",
            {"live": stats.blocks_live, "cached": stats.blocks_cached, "free": stats.blocks_free},
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
        prefix = stats.prefix
        if prefix is None:
            return
        yield _gauge(
            "dsv4_prefix_cached_bytes",
            "Bytes in blocks that only the prefix cache keeps, by what is in them.",
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
            "dsv4_prefix_misses", "Prompts that found none, by reason.", "reason", prefix.misses
        )
        yield _counter(
            "dsv4_prefix_evictions",
            "What was let go for want of memory.",
            "what",
            {"block": prefix.block_evictions, "snapshot": prefix.snapshot_evictions},
        )
        yield _counter(
            "dsv4_prefix_tokens",
            "Prompt tokens: asked for, not run at all, in shared blocks.",
            "what",
            {
                "asked": prefix.tokens_asked,
                "skipped": prefix.tokens_skipped,
                "shared": prefix.tokens_shared,
            },
        )


def _gauge(name: str, text: str, label: str | None, values: dict[str, int] | int) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily, name, text, label, values)


def _counter(name: str, text: str, label: str, values: Any) -> Any:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily, name, text, label, values)


def _filled(kind: Any, name: str, text: str, label: str | None, values: Any) -> Any:
    family = kind(name, text, labels=[] if label is None else [label])
    for key, value in values.items() if label is not None else (("", values),):
        family.add_metric([] if label is None else [key], value)
    return family
