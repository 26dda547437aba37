"""The server's own Prometheus metrics, with the names that engines share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from dsv4.metrics import ManagerCollector
from dsv4.serve.generation import FinishReason

if TYPE_CHECKING:
    from dsv4.serve.runner import Counters, Runner

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts of one server. Reading them costs a step nothing."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._registry = runner, CollectorRegistry()
        self.first, self.later, self.whole = latencies(self._registry)
        for collector in (self, ManagerCollector(runner.manager)):
            self._registry.register(collector)

    def text(self) -> bytes:
        """In Prometheus' exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Any]:
        runner, counters = self._runner, self._runner.counters
        jobs = tuple(runner.engine.jobs)
        running = sum(job.request is not None for job in jobs)
        stats = runner.manager.stats()
        for name, text, value in (
            ("num_requests_running", "Requests that run.", running),
            ("num_requests_waiting", "Requests that wait.", len(jobs) - running),
            (
                "kv_cache_usage_perc",
                "Share of the blocks that requests hold, from 0 to 1.",
                stats.blocks_live / stats.blocks_total,
            ),
            (
                "tokens_per_second",
                "Tokens generated per second, over the last steps.",
                runner.tokens_per_s,
            ),
        ):
            yield GaugeMetricFamily(f"dsv4_{name}", text, value=value)
        yield from counted(
            counters,
            (
                "num_preemptions",
                "Requests that had to give their memory back.",
                counters.preemptions,
            ),
            ("step_failures", "Steps that failed again and again.", counters.failures),
        )


def latencies(registry: CollectorRegistry) -> tuple[Histogram, ...]:
    """Times to the first token of an answer, to a later one, and to its end."""
    return tuple(
        Histogram(f"dsv4_{name}_seconds", text, buckets=SECONDS, registry=registry)
        for name, text in (
            ("time_to_first_token", "From a request's arrival to its first token."),
            ("inter_token_latency", "Between two tokens of an answer."),
            ("e2e_request_latency", "From a request's arrival to its end."),
        )
    )


def counted(counters: Counters, *others: tuple[str, str, float]) -> Iterator[Any]:
    """Tokens of answers and their prompts, `others` (name, text, value), and how requests ended."""
    looked_up, found = counters.prompt_tokens, counters.cached_tokens
    for name, text, value in (
        ("prompt_tokens", "Tokens of prompts.", counters.prompt_tokens),
        ("generation_tokens", "Generated tokens.", counters.generated_tokens),
        ("prefix_cache_queries", "Prompt tokens that were looked up in the cache.", looked_up),
        ("prefix_cache_hits", "Prompt tokens that were found in the cache.", found),
        *others,
    ):
        yield CounterMetricFamily(f"dsv4_{name}", text, value=value)
    ended = CounterMetricFamily(
        "dsv4_request_success", "Requests that ended, by reason.", labels=["finished_reason"]
    )
    for reason in get_args(FinishReason):
        ended.add_metric([reason], counters.finished.get(reason, 0))
    yield ended
