"""What `dsv4 plan --gpus` prints."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.text import Text

from dsv4.cli.plan_text import print_tier
from dsv4.cli.tables import table_of
from dsv4.planning.deployment import Deployment, LayoutFit, Load
from dsv4.planning.gpus import Gpus
from dsv4.planning.words import answer, notes
from dsv4.units import format_like, format_tokens, parse_bytes


def load_of(
    *,
    step_tokens: int | None,
    snapshots: int | None,
    activations: str | None,
    host_memory: str | None,
    disk: str | None,
) -> Load:
    """What else is on the GPUs, from the options; its own defaults for what was not given."""
    counts = {"step_tokens": step_tokens, "snapshots": snapshots}
    return Load(
        **{name: count for name, count in counts.items() if count is not None},
        activations_bytes=0 if activations is None else parse_bytes(activations),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        disk_bytes=None if disk is None else parse_bytes(disk),
    )


def report(found: Deployment, gpus: Gpus, *, as_json: bool, disk: str | None = None) -> None:
    """Prints it, or one JSON object with its answer. `disk` as it was written."""
    if as_json:
        typer.echo(json.dumps({"answer": answer(found, gpus, disk), **found.to_dict()}, indent=2))
    else:
        print_deployment(found, gpus, disk)


def print_deployment(found: Deployment, gpus: Gpus, disk: str | None = None) -> None:
    """The answer, a GPU's memory, requests next to those of other caches, other layouts."""
    console = Console()
    console.print(Text(answer(found, gpus, disk), style="bold"), soft_wrap=True)
    if found.chosen.rank is not None:
        _print_rank(console, found, gpus)
    _print_requests(console, found)
    _print_layouts(console, found)
    if found.tier is not None:
        print_tier(found.tier)
    for note in notes(found):
        console.print(Text(note, style="dim"), soft_wrap=True)


def _print_rank(console: Console, found: Deployment, gpus: Gpus) -> None:
    rank = found.chosen.rank
    assert rank is not None
    table = table_of(f"each GPU, {found.chosen.layout}", "", "share")
    for what, size in (
        ("weights", rank.weights),
        ("activations", rank.activations),
        ("workspace, step buffers, snapshots", rank.workspace),
        ("left for requests", max(0, rank.left)),
    ):
        if size or what != "activations":
            table.add_row(what, format_like(size, gpus.unit), f"{size / rank.memory:.1%}")
    console.print(table)


def _print_requests(console: Console, found: Deployment) -> None:
    fits = found.chosen.fits
    hosted = any(fit.with_host_memory is not None for fit in fits)
    peers = list(dict.fromkeys(name for fit in fits for name in fit.peers))
    headers = ["dsv4", *(["with host memory"] if hosted else []), *peers]
    table = table_of("requests of … tokens at once", *headers)
    for fit in fits:
        row = [format_tokens(fit.context_tokens), f"{fit.requests:,}"]
        if hosted:
            row.append(f"{fit.with_host_memory or 0:,}")
        for low, high in fit.peers.values():
            row.append(f"{low:,}" if low == high else f"{low:,} to {high:,}")
        table.add_row(*row)
    console.print(table)


def _print_layouts(console: Console, found: Deployment) -> None:
    columns = [format_tokens(fit.context_tokens) for fit in found.chosen.fits]
    table = table_of("layout", "cache of a GPU", *columns)
    for each in (found.chosen, *found.others):
        table.add_row(each.layout, *_layout_row(each, len(columns)))
    if found.others:
        console.print(table)


def _layout_row(each: LayoutFit, columns: int) -> list[str]:
    if each.why_not:
        return ["cannot be divided so", *[""] * columns]
    return [each.cache, *(f"{fit.requests:,}" for fit in each.fits)]
