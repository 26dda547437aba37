"""`dsv4 demo`: the rendering of dsv4/demo.py."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4.cli_errors import reported_errors

if TYPE_CHECKING:
    from dsv4.demo import DemoEvent


def demo_command(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Watch requests live and end on this machine, then see what the real V4-Flash costs."""
    from rich.console import Console

    from dsv4.cache.schema import CacheSchema
    from dsv4.cli_plan import print_plan
    from dsv4.demo import run_demo
    from dsv4.model import ModelSpec
    from dsv4.planner import plan

    console = Console()
    events: list[DemoEvent] = []

    def show(event: DemoEvent) -> None:
        events.append(event)
        if as_json:
            return
        used = "█" * event.blocks_live + "░" * (event.blocks_total - event.blocks_live)
        lengths = "  ".join(f"{name}:{length}" for name, length in event.lengths.items())
        console.print(f"[bold]{event.what}[/bold]")
        console.print(
            f"  blocks [cyan]{used}[/cyan] {event.blocks_live}/{event.blocks_total}   "
            f"{event.entries} entries, {event.bytes_live:,} bytes",
            highlight=False,
        )
        console.print(f"  tokens {lengths}", highlight=False)

    with reported_errors(as_json=as_json):
        if not as_json:
            console.rule("a tiny V4 with every layer kind, on this CPU")
        summary = run_demo(show)
        flash = plan(
            CacheSchema.build(ModelSpec.preset("v4-flash")),
            memory_bytes=80 << 30,
            context_tokens=None,
            requests=None,
        )
    good = all(summary["identical_to_single_prefill"].values())  # type: ignore[attr-defined]
    good = good and not summary["leaked_blocks"] and not summary["leaked_slots"]
    if as_json:
        report = {
            "passed": good,
            **summary,
            "events": [event.to_dict() for event in events],
            "plan": flash.to_dict(),
        }
        typer.echo(json.dumps(report))
    else:
        mark = "[green]yes[/green]" if good else "[red]NO[/red]"
        console.print(
            f"\nbytes of every survivor equal to one single prefill, nothing leaked: {mark}\n"
        )
        console.rule("the real V4-Flash on 80 GiB")
        print_plan(flash, {}, None)
    raise typer.Exit(0 if good else 1)
