"""What the simulator says of recorded loads, whether it is right, and what it costs.

    python -m benchmarks.simulate --traces DIRECTORY            # everything except the day
    python -m benchmarks.simulate --traces DIRECTORY --only day # 24 hours of a thousand replicas
    python -m benchmarks.simulate --table                       # the tables of docs/simulate.md
    python -m benchmarks.simulate --plots                       # its plots, into docs/plots/

DIRECTORY has conversation.jsonl and synthetic.jsonl of Mooncake's FAST25 release. Lines go to
benchmarks/results/simulate.jsonl; those of parts that are not measured stay.

    hits        unbounded memory, one request after the other, against ten lines that know nothing
                of this library
    lru         least recently used at some capacities, counted as the published table counts: a
                rest of a prompt is a whole block, and the rate is one of blocks
    host        question 1: how much host memory pays
    residency   question 2: when entries in host memory pay
    routing     question 3: prefix routing, sticky sessions and round robin
    hour, day   seconds and memory: one hour on a core; repetitions on a thousand replicas
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from dsv4.plots.simulate import plot_simulated
from dsv4.simulate.cluster import Setup, Simulation, simulate
from dsv4.simulate.results import Percentiles, Simulated
from dsv4.simulate.speeds import Speeds
from dsv4.simulate.trace import TraceRequest, load_trace, repeated

RESULTS = Path(__file__).parent / "results" / "simulate.jsonl"
PLOTS = Path(__file__).parents[1] / "docs" / "plots"
TRACES = ("conversation", "synthetic")
GB = 10**9
# rates of an engine that are assumed, not measured: they only place the questions
PREFILL_RATE, DECODE_RATE = 20_000.0, 40.0
# interfaces of the project, of the same traces: percent of blocks
TABLE_GB = (3.5, 10.6, 35.0, 106.0, 352.0)
TABLE = {
    "conversation": (5.3, 13.6, 28.5, 35.9, 36.6),
    "synthetic": (14.0, 30.9, 56.7, 64.0, 64.0),
}
HOST_GB = (0, 5, 20, 80)
DEVICE_GB = (5, 10, 20)
REPLICAS = (2, 4, 8, 16, 32, 64)
HOT_SHARES = (0.0, 0.9)
RESIDENCY_GB = (5, 10, 20)
RESIDENCY_HOST_GB = 200
# times as long as recorded: prompts, answers, the time between two requests
LOADS = {"as recorded": (1, 1, 1), "long": (8, 32, 32)}
LONG_S = 150.0  # of the record, which the long load makes 4,800 of
QUARTER_S = 900.0
HOURS = (1, 6, 12, 24)
Part = Callable[[Path], Iterator[dict[str, Any]]]


def counted(trace: Sequence[TraceRequest], block_tokens: int) -> int:
    """The hits of unbounded memory, without this library: whole blocks, and the last token of a
    prompt always runs."""
    seen, hit = set[int](), 0
    for request in trace:
        tokens = 0
        for nth, name in enumerate(request.names):
            if name not in seen:
                break
            tokens = min(request.input_tokens, 512 * (nth + 1))
        hit += min(tokens, request.input_tokens - 1) // block_tokens * block_tokens
        seen.update(request.names)
    return hit


@cache
def schema_of(block_tokens: int, *, apart: bool = False) -> CacheSchema:
    spec = ModelSpec.preset("v4-flash")
    return CacheSchema.build(spec, block_tokens=block_tokens, entries_apart=apart)


def setup(*, block_tokens: int = 128, apart: bool = False, **options: Any) -> Setup:
    speeds = Speeds.of("v4-flash", prefill_rate=PREFILL_RATE, decode_rate=DECODE_RATE)
    schema = schema_of(block_tokens, apart=apart)
    return Setup(schema=schema, speeds=speeds, residency=apart, **options)


@cache
def quarter_of(folder: Path, name: str) -> list[TraceRequest]:
    """The first quarter of an hour, for the questions."""
    return [each for each in trace_of(folder, name) if each.at_s < QUARTER_S]


def longer(
    trace: Sequence[TraceRequest], *, prompts: int, answers: int, apart: int
) -> list[TraceRequest]:
    """The same requests with longer prompts, which begin alike as far as they did in proportion,
    and longer answers, and more time between them."""
    return [
        replace(
            each,
            at_s=each.at_s * apart,
            input_tokens=each.input_tokens * prompts,
            name_tokens=each.name_tokens * prompts,
            output_tokens=each.output_tokens * answers,
        )
        for each in trace
    ]


@cache
def trace_of(folder: Path, name: str) -> list[TraceRequest]:
    return load_trace(folder / f"{name}.jsonl")


# ---- parts ---------------------------------------------------------------------------------------


def hits(folder: Path) -> Iterator[dict[str, Any]]:
    for name, block_tokens in product(TRACES, (512, 128)):
        trace = trace_of(folder, name)
        found = simulate(trace, setup(block_tokens=block_tokens, untimed=True))
        yield {
            "trace": name,
            "block_tokens": block_tokens,
            "simulated_tokens": sum(found.tokens_hit.values()),
            "counted_tokens": counted(trace, block_tokens),
            "tokens_asked": found.tokens_asked,
        }


def lru(folder: Path) -> Iterator[dict[str, Any]]:
    for name in TRACES:
        trace = trace_of(folder, name)
        blocks = sum(len(each.names) for each in trace)
        whole = [replace(each, input_tokens=512 * len(each.names) + 1) for each in trace]
        for gb, published in zip(TABLE_GB, TABLE[name], strict=True):
            # a block more, for the one that the additional token begins; no slots, no snapshots
            size = schema_of(512)
            memory = int(gb * GB) + size.bytes.per_request + size.bytes.block
            options: dict[str, Any] = {"memory_bytes": memory, "max_requests": 1, "snapshots": 0}
            asked = setup(block_tokens=512, untimed=True, policy="lru", **options)
            found = simulate(whole, asked)
            rate = 100 * sum(found.tokens_hit.values()) / 512 / blocks
            yield {"trace": name, "gb": gb, "percent": round(rate, 2), "published": published}


def host(folder: Path) -> Iterator[dict[str, Any]]:
    for name, gb, memory in product(TRACES, HOST_GB, DEVICE_GB):
        asked = setup(replicas=4, memory_bytes=memory * GB, host_bytes=gb * GB)
        yield {"trace": name, **simulate(quarter_of(folder, name), asked).to_dict()}


def residency(folder: Path) -> Iterator[dict[str, Any]]:
    for name in LOADS:
        trace, replicas = load_of(folder, name)
        for memory in RESIDENCY_GB:
            common: dict[str, Any] = {"replicas": replicas, "memory_bytes": memory * GB}
            host_bytes = RESIDENCY_HOST_GB * GB
            asked = [(None, setup(host_bytes=size, **common)) for size in (0, host_bytes)]
            asked += [
                (share, setup(apart=True, host_bytes=host_bytes, hot_share=share, **common))
                for share in HOT_SHARES
            ]
            for share, each in asked:
                found = simulate(trace, each)
                yield {"trace": name, "hot_share": share, **found.to_dict()}


def load_of(folder: Path, name: str) -> tuple[list[TraceRequest], int]:
    """A load of the residency question, and on how many replicas."""
    prompts, answers, apart = LOADS[name]
    if apart == 1:
        return quarter_of(folder, "conversation"), 4
    trace = [each for each in trace_of(folder, "conversation") if each.at_s < LONG_S]
    return longer(trace, prompts=prompts, answers=answers, apart=apart), 2


def routing(folder: Path) -> Iterator[dict[str, Any]]:
    for name, replicas, how in product(TRACES, REPLICAS, ("prefix", "sticky", "round-robin")):
        asked = setup(replicas=replicas, memory_bytes=20 * GB, routing=how)
        yield {"trace": name, **simulate(quarter_of(folder, name), asked).to_dict()}


def hour(folder: Path) -> Iterator[dict[str, Any]]:
    trace = trace_of(folder, "conversation")
    for policy in ("lru", "retention"):
        began = time.process_time()
        found = simulate(trace, setup(memory_bytes=80 * GB, replicas=4, policy=policy))
        yield {
            "trace": "conversation",
            **cost(found, time.process_time() - began),
            "policy": policy,
            "block_tokens": 128,
        }


def day(folder: Path, hours: Sequence[int] = HOURS) -> Iterator[dict[str, Any]]:
    """Each in a process of its own: memory is the most that it ever had."""
    for count in hours:
        arguments = [sys.executable, "-m", "benchmarks.simulate", "--traces", str(folder)]
        done = subprocess.run(
            [*arguments, "--hours", str(count)], check=True, capture_output=True, text=True
        )
        yield json.loads(done.stdout.splitlines()[-1])


def hours_of(folder: Path, hours: int) -> dict[str, Any]:
    trace = repeated(trace_of(folder, "conversation"), hours, period_s=3600.0)
    asked = setup(memory_bytes=80 * GB, replicas=1000)
    began = time.process_time()
    simulation = Simulation(asked)
    found = simulation.run(trace)
    cpu_s = time.process_time() - began
    return {
        "trace": "conversation",
        "hours": hours,
        **cost(found, cpu_s),
        "replicas_used": len(simulation.replicas),
        "evictions": found.evictions,
    }


def peak_bytes() -> int:
    """The most memory that this process had. What `getrusage` says on Linux may be its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (each for each in status.read_text().splitlines() if each.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def cost(found: Simulated, cpu_s: float) -> dict[str, Any]:
    return {
        "replicas": found.replicas,
        "requests": found.requests,
        "tokens_asked": found.tokens_asked,
        "tokens_hit": sum(found.tokens_hit.values()),
        "cpu_s": round(cpu_s, 1),
        "wall_s": round(found.wall_s, 1),
        "peak_bytes": peak_bytes(),
    }


PARTS: dict[str, Part] = {
    "hits": hits,
    "lru": lru,
    "hour": hour,
    "host": host,
    "routing": routing,
    "residency": residency,
    "day": day,
}


# ---- tables and plots ----------------------------------------------------------------------------


def results_of(rows: Sequence[dict[str, Any]], part: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["part"] == part]


def simulated_of(row: dict[str, Any]) -> Simulated:
    """A line of the file as what was simulated."""
    fields = {name: row[name] for name in Simulated.__dataclass_fields__}
    for name in ("ttft", "step"):
        fields[name] = Percentiles(**fields[name])
    return Simulated(**fields)


def percent(row: dict[str, Any]) -> str:
    return f"{100 * row['hit_rate']:.1f}"


def table_of(head: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)]) + "\n"


def hits_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("trace", "block", "simulated tokens", "counted tokens", "of all")
    return table_of(
        head,
        (
            (
                row["trace"],
                row["block_tokens"],
                f"{row['simulated_tokens']:,}",
                f"{row['counted_tokens']:,}",
                f"{100 * row['simulated_tokens'] / row['tokens_asked']:.2f} %",
            )
            for row in results_of(rows, "hits")
        ),
    )


def lru_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("trace", *(f"{gb:g} GB" for gb in TABLE_GB))
    found = results_of(rows, "lru")

    def lines() -> Iterator[Sequence[object]]:
        for name in TRACES:
            own = [row for row in found if row["trace"] == name]
            yield name, *(f"{row['percent']:.1f} ({row['published']})" for row in own)

    return table_of(head, lines())


def host_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("trace", "device", "host", "hits", "of that from host", "TTFT p50", "p99", "up")
    return table_of(
        head,
        (
            (
                row["trace"],
                f"{row['memory_bytes'] // GB} GB",
                f"{row['host_bytes'] // GB} GB",
                percent(row),
                f"{100 * row['tokens_hit']['host'] / row['tokens_asked']:.1f}",
                f"{row['ttft']['p50']:.2f} s",
                f"{row['ttft']['p99']:.2f} s",
                f"{row['bytes_moved']['up'] / GB:,.0f} GB",
            )
            for row in results_of(rows, "host")
        ),
    )


def residency_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("load", "device", "host memory for", "hits", "TTFT p50", "p99", "step p99", "up")

    def lines() -> Iterator[Sequence[object]]:
        for row in results_of(rows, "residency"):
            use = "nothing" if not row["host_bytes"] else "a tier"
            if row["residency"]:
                use = f"entries, {row['hot_share']:.0%} hot"
            yield (
                row["trace"],
                f"{row['memory_bytes'] // GB} GB",
                use,
                percent(row),
                f"{row['ttft']['p50']:.2f} s",
                f"{row['ttft']['p99']:.2f} s",
                f"{row['step']['p99'] * 1e3:,.0f} ms",
                f"{row['bytes_moved']['up'] / GB:,.0f} GB",
            )

    return table_of(head, lines())


def routing_table(rows: Sequence[dict[str, Any]]) -> str:
    kinds = ("prefix", "sticky", "round-robin")
    head = ("trace", "replicas", *(f"{k}: hits" for k in kinds), *(f"{k}: p99" for k in kinds))
    found = {
        (row["trace"], row["replicas"], row["routing"]): row for row in results_of(rows, "routing")
    }

    def lines() -> Iterator[Sequence[object]]:
        for name, replicas in product(TRACES, REPLICAS):
            own = [found[name, replicas, kind] for kind in kinds]
            yield name, replicas, *map(percent, own), *(f"{r['ttft']['p99']:.2f} s" for r in own)

    return table_of(head, lines())


def cost_table(rows: Sequence[dict[str, Any]]) -> str:
    head = (
        "load",
        "replicas",
        "that got requests",
        "requests",
        "tokens",
        "CPU seconds",
        "seconds",
        "most memory",
    )

    def lines() -> Iterator[Sequence[object]]:
        for row in (*results_of(rows, "hour"), *results_of(rows, "day")):
            what = f"an hour, {row['policy']}" if "policy" in row else f"{row['hours']} h"
            yield (
                what,
                f"{row['replicas']:,}",
                f"{row.get('replicas_used', row['replicas']):,}",
                f"{row['requests']:,}",
                f"{row['tokens_asked'] / 1e6:,.0f}M",
                f"{row['cpu_s']:.0f}",
                f"{row['wall_s']:.0f}",
                f"{row['peak_bytes'] / GB:.2f} GB",
            )

    return table_of(head, lines())


TABLES: dict[str, Callable[[Sequence[dict[str, Any]]], str]] = {
    "hits": hits_table,
    "lru": lru_table,
    "host": host_table,
    "residency": residency_table,
    "routing": routing_table,
    "day": cost_table,
}


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(row) for row in path.read_text(encoding="utf-8").splitlines()]


def plots(rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    made = []
    titles = {"host": "host memory", "residency": "residency, nothing hot", "routing": "routing"}
    for part, title in titles.items():
        found = results_of(rows, part)
        for name in dict.fromkeys(row["trace"] for row in found):
            # of residency the worst case: nothing of a selection is hot
            own = [row for row in found if row["trace"] == name]
            own = [row for row in own if row.get("hot_share") in (None, 0.0)]
            made.append(folder / f"simulate_{part}_{name.replace(' ', '_')}.png")
            drawn = [simulated_of(row) for row in own]
            plot_simulated(drawn, made[-1], title=f"{title}: {name}", waits=part != "routing")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulate", description=__doc__)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--note", default="", help="what else the machine did")
    parser.add_argument("--hours", type=int, help="this many on a thousand replicas; no result")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plots", action="store_true")
    given = parser.parse_args(arguments)
    rows = read(given.results)
    if given.table:
        print("\n".join(each(rows) for each in TABLES.values()))
        return 0
    if given.plots:
        print("\n".join(map(str, plots(rows, PLOTS))))
        return 0
    if given.traces is None:
        parser.error("--traces says where the traces are")
    if given.hours is not None:
        print(json.dumps(hours_of(given.traces, given.hours)))
        return 0
    for part in given.only or [part for part in PARTS if part != "day"]:
        new = []
        for row in PARTS[part](given.traces):
            date = datetime.now(UTC).strftime("%Y-%m-%d")
            machine = f"{platform.machine()}, Python {platform.python_version()}"
            new.append({"part": part, **row, "date": date, "machine": machine, "note": given.note})
            print(json.dumps(new[-1])[:200], flush=True)
            rows = [row for row in read(given.results) if row["part"] != part] + new
            text = "".join(json.dumps(row) + "\n" for row in rows)
            given.results.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
