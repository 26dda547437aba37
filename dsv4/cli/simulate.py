"""`dsv4 simulate`: a recorded load on replicas that exist only as numbers. Torch-free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dsv4.cache.prefix.options import SnapshotPolicy, periodic, zero
from dsv4.cache.schema import CacheSchema
from dsv4.cli.errors import reported_errors
from dsv4.cli.tables import table_of
from dsv4.errors import InvalidInput
from dsv4.model import ModelSpec
from dsv4.plots.simulate import plot_simulated, require_plot
from dsv4.routing.router import ROUTINGS
from dsv4.simulate.cluster import POLICIES, Setup
from dsv4.simulate.results import Simulated
from dsv4.simulate.speeds import Speeds
from dsv4.simulate.sweep import Progress as Report
from dsv4.simulate.sweep import fewest_replicas, run_all, setups
from dsv4.simulate.trace import load_trace, repeated
from dsv4.units import parse_byte_rate, parse_bytes, parse_tokens

T = TypeVar("T")
_SECONDS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s)?", re.ASCII)
UNBOUNDED = "unbounded"


def simulate_command(
    trace: Annotated[
        Path,
        typer.Argument(
            help="A file of JSON lines: Mooncake's format, lengths only, or a log of dsv4 serve "
            "--json-logs."
        ),
    ],
    model: Annotated[str, typer.Option(help="A preset, or the path of a config.json.")] = (
        "v4-flash"
    ),
    replicas: Annotated[
        str, typer.Option(help="How many replicas; several with commas: 1,2,4.")
    ] = "1",
    memory: Annotated[
        str,
        typer.Option(
            help=f"A replica's device memory for the cache: 80GB, or {UNBOUNDED}. Several with "
            "commas."
        ),
    ] = "80GB",
    host_memory: Annotated[
        str, typer.Option(help="A replica's host memory: 512GB; several with commas.")
    ] = "0",
    disk: Annotated[str, typer.Option(help="A replica's disk: 4TB; several with commas.")] = "0",
    routing: Annotated[
        str,
        typer.Option(
            help=f"Which replica gets a request: {', '.join(ROUTINGS)}; several with commas."
        ),
    ] = "prefix",
    policy: Annotated[
        str, typer.Option(help=f"What is evicted first: {', '.join(POLICIES)}; or several.")
    ] = "retention",
    residency: Annotated[
        str, typer.Option(help="Entries in host memory: off, on, or off,on for both.")
    ] = "off",
    hot_share: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="With residency: the share of selected entries that a request's hot rows have.",
        ),
    ] = 0.0,
    ttft_p99: Annotated[
        str | None,
        typer.Option(help="Find the fewest replicas for this time to the first token: 2s, 500ms."),
    ] = None,
    prefill_rate: Annotated[
        float | None,
        typer.Option(help="Tokens of prompts that a replica computes per second, weights and all."),
    ] = None,
    decode_rate: Annotated[
        float | None, typer.Option(help="Steps per second of a replica that decodes.")
    ] = None,
    host_rate: Annotated[
        str | None, typer.Option(help="Rate at which prompts come back from host memory: 3GB/s.")
    ] = None,
    disk_rate: Annotated[
        str | None, typer.Option(help="Rate at which prompts come back from the disk.")
    ] = None,
    link_rate: Annotated[
        str | None, typer.Option(help="Rate at which steps fetch entries, with residency: 50GB/s.")
    ] = None,
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 128,
    max_requests: Annotated[int, typer.Option(help="Requests that a replica runs at once.")] = 64,
    step_tokens: Annotated[str, typer.Option(help="Most tokens of a step.")] = "8k",
    snapshot_every: Annotated[
        str, typer.Option(help="Tokens between two snapshots; 0: none, every hit replays.")
    ] = "1024",
    snapshots: Annotated[
        int | None, typer.Option(help="Snapshots on the device. [default: two for each request]")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait at a replica; others are refused.")
    ] = None,
    untimed: Annotated[
        bool,
        typer.Option("--untimed", help="One request after the other, without answers: hits alone."),
    ] = False,
    repeat: Annotated[
        int, typer.Option(min=1, help="The load this many times, each with other prompts.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw hit rate against memory, latency against replicas (.png, .svg)."),
    ] = None,
) -> None:
    """Replay a recorded load on replicas that exist only as numbers.

    The prefix index, the eviction policy, admission, the router and the books of tiers are the real
    ones; memory only counts bytes, and time comes from a cost model. Without --prefill-rate and
    --decode-rate a step takes what the cache's operations took on one H200, without any weights.
    """
    with reported_errors(as_json=as_json):
        spec = ModelSpec.load(model)
        speeds = Speeds.of(
            spec.name,
            prefill_rate=prefill_rate,
            decode_rate=decode_rate,
            host_rate=_rate(host_rate),
            disk_rate=_rate(disk_rate),
            link_rate=_rate(link_rate),
        )
        asked: list[Setup] = []
        flags = _many("--residency", residency, _flag)
        choices: dict[str, Sequence[Any]] = {
            "memory_bytes": _many("--memory", memory, _memory),
            "host_bytes": _many("--host-memory", host_memory, parse_bytes),
            "disk_bytes": _many("--disk", disk, parse_bytes),
            "routing": _many("--routing", routing, str),
            "policy": _many("--policy", policy, str),
            "replicas": _many("--replicas", replicas, _count),
        }
        for flag in flags:
            base = Setup(
                schema=CacheSchema.build(spec, block_tokens=block_tokens, entries_apart=flag),
                speeds=speeds,
                max_requests=max_requests,
                step_tokens=parse_tokens(step_tokens),
                snapshot_policy=_snapshots(snapshot_every),
                snapshots=snapshots,
                hot_share=hot_share if flag or len(flags) == 1 else 0.0,
                most_waiting=max_waiting,
                untimed=untimed,
            )
            some = {**choices, "residency": [flag]}
            if flag and len(flags) > 1:  # what is compared with `off` needs host memory
                some["host_bytes"] = [size for size in choices["host_bytes"] if size]
            asked += setups(base, some)
        if ttft_p99 is not None:
            _require_one(asked)
        if plot is not None:
            require_plot(plot, asked, tries_replicas=ttft_p99 is not None)
        requests = load_trace(trace)
        if repeat > 1:
            requests = [*repeated(requests, repeat)]
        fewest: int | None = None
        with _progress(len(requests), hidden=as_json) as report:
            if ttft_p99 is None:
                found = run_all(requests, asked, report)
            else:
                limit_s = _seconds(ttft_p99)
                fewest, found = fewest_replicas(
                    requests, asked[0], ttft_p99_s=limit_s, progress=report
                )
        if plot is not None:
            plot_simulated(found, plot, title=f"{trace.name}, {spec.name}")
        if as_json:
            result: dict[str, Any] = {"results": [each.to_dict() for each in found]}
            if ttft_p99 is not None:
                result["fewest_replicas"] = fewest
            if plot is not None:
                result["plot"] = str(plot)
            typer.echo(json.dumps(result, indent=2))
            return
        print_simulated(found)
        if ttft_p99 is not None:
            Console().print(Text(_answer(fewest, ttft_p99), style="bold"), soft_wrap=True)
        if plot is not None:
            Console().print(Text(f"plot written to {plot}"), soft_wrap=True)


def _require_one(asked: Sequence[Setup]) -> None:
    """Raises InvalidInput unless the fewest replicas can be looked for."""
    if len(asked) > 1:
        raise InvalidInput(
            f"--ttft-p99 looks for the number of replicas of one setup, but {len(asked)} are "
            f"given: leave out --replicas, and give one value of each other option"
        )
    if asked[0].untimed:
        raise InvalidInput("--untimed has no times, and --ttft-p99 asks for one: leave out either")


def _answer(fewest: int | None, ttft_p99: str) -> str:
    if fewest is None:
        return f"No number of replicas that was tried reaches a TTFT p99 of {ttft_p99}."
    plural = "s reach" if fewest > 1 else " reaches"
    return f"{fewest} replica{plural} a TTFT p99 of {ttft_p99}; fewer do not."


@contextmanager
def _progress(requests: int, *, hidden: bool) -> Iterator[Report]:
    """A bar on stderr for the setup that runs, if that is a terminal."""
    console = Console(stderr=True)
    off = hidden or not console.is_terminal
    with Progress(console=console, transient=True, disable=off) as bar:
        task = bar.add_task("", total=requests)

        def report(setup: Setup, count: int) -> None:
            what = f"{setup.replicas} replicas, {setup.routing}, {setup.policy}"
            bar.update(task, completed=count, description=what)

        yield report


# ---- what is printed ---------------------------------------------------------------------------


def print_simulated(found: Sequence[Simulated]) -> None:
    """Three tables with a row for each setup, and a line that says what the numbers mean."""
    console = Console()
    parts = [_parts(each) for each in found]
    if not any(each.replicas > 1 for each in found):  # routing makes no difference
        parts = [{**each, "routing": ""} for each in parts]
    common = [name for name in parts[0] if len({each[name] for each in parts}) == 1]
    console.print(Text(", ".join(filter(None, (parts[0][name] for name in common)))))
    hits = table_of("found cached", "hits", "host", "disk", "run", "evicted", "refused")
    times = table_of("time", "TTFT p50", "p90", "p99", "step p50", "p90", "p99")
    moved = table_of("GB", "down", "up", "device", "host", "disk")
    for each, own in zip(found, parts, strict=True):
        asked = max(1, each.tokens_asked)
        name = ", ".join(text for part, text in own.items() if part not in common and text)
        hits.add_row(
            name,
            f"{each.hit_rate:.1%}",
            *(f"{each.tokens_hit[tier] / asked:.1%}" for tier in ("host", "disk")),
            f"{each.tokens_run['all'] / 1e6:,.1f}M",
            f"{each.evictions:,}",
            f"{each.refused:,}",
        )
        waits = (each.ttft, each.step)
        times.add_row(name, *(_time(at) for of in waits for at in (of.p50, of.p90, of.p99)))
        moved.add_row(
            name,
            *map(_gigabytes, each.bytes_moved.values()),
            *(_gigabytes(each.peaks[where]) for where in ("device", "host", "disk")),
        )
    for table in (hits, times, moved):
        console.print(table)
    first = found[0]
    console.print(
        Text(
            f"{first.requests:,} requests with {first.tokens_asked:,} tokens of prompts. Hits are "
            f"in all, and by tier below the device; run are all tokens that ran, of answers too; "
            f"device, host and disk are the most that one replica had."
        ),
        soft_wrap=True,
    )
    if not first.has_weights:
        console.print(
            Text(
                "Times are those of the cache's operations alone, without weights: give "
                "--prefill-rate and --decode-rate of your engine."
            ),
            soft_wrap=True,
        )


def _parts(each: Simulated) -> dict[str, str]:
    """What a setup is, by option."""
    size = each.memory_bytes
    return {
        "replicas": f"{each.replicas} replica{'s' if each.replicas > 1 else ''}",
        "memory": f"{UNBOUNDED} memory" if size is None else f"{size / 1e9:g} GB",
        "host": f"{each.host_bytes / 1e9:g} GB host" if each.host_bytes else "",
        "disk": f"{each.disk_bytes / 1e9:g} GB disk" if each.disk_bytes else "",
        "routing": each.routing,
        "policy": each.policy,
        "residency": "residency" if each.residency else "",
    }


def _gigabytes(count_bytes: int) -> str:
    return f"{count_bytes / 1e9:,.1f}" if count_bytes else "0"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"


# ---- what is given -----------------------------------------------------------------------------


def _many(name: str, text: str, read: Callable[[str], T]) -> list[T]:
    found = [read(part.strip()) for part in text.split(",") if part.strip()]
    if not found:
        raise InvalidInput(f"{name} {text!r}: give a value, or several with commas")
    return [*dict.fromkeys(found)]


def _memory(text: str) -> int | None:
    return None if text == UNBOUNDED else parse_bytes(text)


def _rate(text: str | None) -> float | None:
    return None if text is None else float(parse_byte_rate(text))


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidInput(f"--replicas {text!r}: give whole numbers, like 1,2,4")
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("on", "off"):
        raise InvalidInput(f"--residency {text!r}: give on, off, or off,on")
    return text == "on"


def _snapshots(text: str) -> SnapshotPolicy:
    return zero() if text == "0" else periodic(parse_tokens(text))


def _seconds(text: str) -> float:
    found = _SECONDS.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"{text!r} is not a time: write 2s or 500ms")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)
