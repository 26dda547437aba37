"""The table of docs/operations/metrics.md: `python -m tools.metric_table`.

Read from a manager and a server that have everything, so that no metric can be missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric

import dsv4
from dsv4 import KVCacheManager
from dsv4.metrics import ManagerCollector
from dsv4.serve.metrics import Metrics

PAGE = Path(__file__).parents[1] / "docs" / "operations" / "metrics.md"
BEGIN, END = "<!-- metrics -->\n", "<!-- end of metrics -->"


@contextmanager
def everything() -> Iterator[tuple[KVCacheManager, Metrics]]:
    """A manager with a prefix cache, a tier and a hand-off, and the metrics of a server over it."""
    tier = dsv4.HostTier(16 << 20)
    manager = dsv4.Cache(
        "tiny",
        memory="64MiB",
        max_context=4096,
        prefix=dsv4.PrefixOptions(model_id="metrics"),
        tiers=[tier],
        handoff=dsv4.HandoffOptions(name="metrics"),
    )
    try:
        quota = dsv4.Quota(device_bytes=1 << 20, host_bytes=1 << 20)
        dsv4.Quotas(manager).set("a tenant", quota)
        counters = SimpleNamespace(
            **dict.fromkeys(
                ("prompt_tokens", "generated_tokens", "cached_tokens", "preemptions", "failures"), 0
            ),
            finished={},
        )
        runner: Any = SimpleNamespace(
            manager=manager, engine=SimpleNamespace(jobs=[]), counters=counters, tokens_per_s=0.0
        )
        yield manager, Metrics(runner)
    finally:
        manager.handoff.close()
        manager.tiers.close(timeout_s=5)
        tier.close(timeout_s=5)


def families() -> Iterator[tuple[str, Metric]]:
    """All of them, each with who has it."""
    with everything() as (manager, server):
        for family in ManagerCollector(manager).collect():
            yield "manager", family
        for collector in (server.first, server.later, server.whole, server):
            for family in collector.collect():
                yield "server", family


def exported(family: Metric) -> str:
    """Counters are exported with a suffix."""
    return family.name + ("_total" if family.type == "counter" else "")


def table(found: Iterable[tuple[str, Metric]]) -> str:
    lines = ["| metric | of | kind | labels | what it counts |", "| --- | --- | --- | --- | --- |"]
    for owner, family in found:
        labels: dict[str, set[str]] = {}
        for sample in family.samples:
            for name, value in sample.labels.items():
                if name != "le":
                    labels.setdefault(name, set()).add(value)
        told = "; ".join(
            f"`{name}`" + ("" if name in ("tier", "salt") else ": " + ", ".join(sorted(values)))
            for name, values in sorted(labels.items())
        )
        lines.append(
            f"| `{exported(family)}` | {owner} | {family.type} | {told} | {family.documentation} |"
        )
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:begin] + table(families()) + text[end:]


def named(expression: str) -> set[str]:
    """The metrics that a Prometheus expression names."""
    return set(re.findall(r"\bdsv4_\w+", expression))


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
