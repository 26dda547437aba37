"""Metrics of an ingress, with the names of `dsv4 serve`, and of replicas as announced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily

from dsv4.integrations.ray.remote import RemoteRunner
from dsv4.serve.metrics import counted, latencies
from dsv4.serve.runner import Timing


class RemoteMetrics:
    """Counts of one ingress."""

    def __init__(self, remote: RemoteRunner) -> None:
        self._remote, self._registry = remote, CollectorRegistry()
        self._heard: Mapping[str, Any] = {}
        first, later, whole = latencies(self._registry)
        remote.timing = Timing(first=first.observe, later=later.observe, end=whole.observe)
        self._registry.register(self)

    def text(self, heard: Mapping[str, Any]) -> bytes:
        """In Prometheus' exposition format."""
        self._heard = heard
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        remote, counters, mishaps = self._remote, self._remote.counters, self._remote.mishaps
        yield GaugeMetricFamily(
            "dsv4_num_requests_running", "Requests that run or wait.", value=remote.running
        )
        yield from counted(
            counters,
            ("lost_legs", "Answers that went on at another replica.", mishaps.lost_legs),
            ("lost_prefills", "Prompts that were lost with a replica.", mishaps.lost_prefills),
            (
                "unrouted_requests",
                "Requests whose replica Ray Serve chose, without the router.",
                mishaps.unrouted,
            ),
            (
                "stood_still_seconds",
                "Seconds that answers stood still because a replica was lost.",
                sum(mishaps.stood_still_s),
            ),
        )
        yield GaugeMetricFamily(
            "dsv4_longest_stood_still_seconds",
            "The longest time that an answer stood still.",
            value=max(mishaps.stood_still_s, default=0.0),
        )
        yield from self._replicas()

    def _replicas(self) -> Iterator[Any]:
        for name, text in (
            ("jobs", "Requests on a replica."),
            ("load", "Prompt tokens that a replica has yet to run."),
            ("blocks", "Blocks that a replica has, as far as the router knows."),
        ):
            family = GaugeMetricFamily(f"dsv4_replica_{name}", text, labels=["replica", "role"])
            for replica, about in self._heard.get("replicas", {}).items():
                family.add_metric([replica, about["role"]], about[name])
            yield family
