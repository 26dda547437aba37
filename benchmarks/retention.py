"""Hit rates of eviction policies on recorded loads, and what they cost the host.

    python -m benchmarks.retention --trace conversation=TRACE.jsonl --trace synthetic=TRACE.jsonl

Traces are in Mooncake's format, with names of 512 tokens each; the index and the policies are the
real ones, blocks have the bytes of V4-Flash, and memory only counts them (dsv4.simulate). Writes a
line for each trace, capacity and policy to benchmarks/results/retention.jsonl.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dsv4.cache.prefix.eviction import EvictionPolicy, LeastRecentlyUsed
from dsv4.cache.prefix.retention import Retention
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.simulate.replay import Replayed, replay
from dsv4.simulate.trace import TraceRequest, read_trace

RESULTS = Path(__file__).parent / "results" / "retention.jsonl"
NAME_TOKENS = 512
CAPACITIES_GB = (3.5, 5.0, 7.0, 10.6, 15.0, 20.0, 28.0, 35.0, 50.0, 70.0, 106.0, 200.0, 350.0)
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "least recently used": LeastRecentlyUsed,
    "retention": Retention,
}


def line(trace: str, capacity_gb: float, policy: str, found: Replayed) -> dict[str, Any]:
    return {
        "trace": trace,
        "capacity_gb": capacity_gb,
        "policy": policy,
        "requests": found.requests,
        "tokens_asked": found.tokens_asked,
        "tokens_hit": found.tokens_hit,
        "evictions": found.evictions,
        "us_per_admission": round(1e6 * found.index_s / found.requests, 1),
        "us_per_eviction": round(1e6 * found.evict_s / max(1, found.evictions), 2),
        "model": "v4-flash",
        "block_tokens": NAME_TOKENS,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def measured(
    traces: dict[str, Sequence[TraceRequest]], capacities_gb: Sequence[float]
) -> Iterator[dict[str, Any]]:
    schema = CacheSchema.build(ModelSpec.preset("v4-flash"), block_tokens=NAME_TOKENS)
    for trace, requests in traces.items():
        for gb in capacities_gb:
            for name, policy in POLICIES.items():
                found = replay(requests, schema, policy, capacity_bytes=int(gb * 1e9))
                yield line(trace, gb, name, found)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The hit rates as a table of docs/retention.md."""
    rates = {
        (row["trace"], row["capacity_gb"], row["policy"]): row["tokens_hit"] / row["tokens_asked"]
        for row in rows
    }
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    sizes = sorted({row["capacity_gb"] for row in rows})
    lines = ["| capacity | " + " | ".join(f"{t}, {p}" for t in traces for p in POLICIES) + " |"]
    lines.append("|---" * (1 + len(traces) * len(POLICIES)) + "|")
    for gb in sizes:
        found = [rates.get((t, gb, p)) for t in traces for p in POLICIES]
        cells = ["" if rate is None else f"{100 * rate:.1f}" for rate in found]
        lines.append(f"| {gb:g} GB | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def costs(rows: Sequence[dict[str, Any]]) -> str:
    """A table of what the host needed, over all traces and capacities; an eviction where there were
    any."""
    lines = ["| µs of the host | " + " | ".join(POLICIES) + " |", "|---|---|---|"]
    for name in ("us_per_admission", "us_per_eviction"):
        spans = []
        for policy in POLICIES:
            found = [row[name] for row in rows if row["policy"] == policy and row["evictions"]]
            spans.append(f"{min(found):.1f} to {max(found):.1f}")
        lines.append(f"| {name.removeprefix('us_per_')} | {' | '.join(spans)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.retention")
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--table", action="store_true", help="print the results as a table")
    parser.add_argument("--capacity-gb", action="append", type=float)
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    if given.table:
        rows = given.results.read_text(encoding="utf-8").splitlines()
        found = [json.loads(row) for row in rows]
        print(table(found), costs(found), sep="\n", end="")
        return 0
    traces = dict(each.split("=", 1) for each in given.trace)
    read = {name: list(read_trace(file)) for name, file in traces.items()}
    with given.results.open("w", encoding="utf-8") as out:
        for each in measured(read, given.capacity_gb or CAPACITIES_GB):
            out.write(json.dumps(each) + "\n")
            out.flush()
            print(
                f"{each['trace']} {each['capacity_gb']} GB, {each['policy']}: "
                f"{each['tokens_hit'] / each['tokens_asked']:.2%}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
