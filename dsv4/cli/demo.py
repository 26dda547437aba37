"""`dsv4 demo`: a tiny V4 on transformers' cache and on this one, then what the real model costs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4.cli.errors import reported_errors

if TYPE_CHECKING:
    from dsv4.demo.events import DemoEvent, StepEvent


def demo_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bytes and time into this file (.png, .svg).")
    ] = None,
) -> None:
    """Generate with a tiny V4, with transformers' own cache and with this one, side by side.

    Exit code 1 if the tokens differ from those of transformers.
    """
    with reported_errors(as_json=as_json):
        passed = _run(as_json=as_json, plot=plot)
    raise typer.Exit(0 if passed else 1)


def _run(*, as_json: bool, plot: Path | None) -> bool:
    from rich.console import Console

    from dsv4.demo.bill import flash_bill
    from dsv4.demo.model import tiny_v4
    from dsv4.demo.screen import demo_view, print_report
    from dsv4.plots.style import new_figure, save_figure

    figure = None if plot is None else new_figure(11, 4.6)
    model = tiny_v4()  # reports what is missing if transformers is not installed

    from dsv4.demo.events import StepEvent
    from dsv4.demo.story import run_demo

    steps: list[StepEvent] = []
    console = Console(quiet=as_json)
    with demo_view(console) as view:

        def see(event: DemoEvent) -> None:
            view(event)
            if isinstance(event, StepEvent):
                steps.append(event)

        report = run_demo(model, see)
    bill = flash_bill()
    print_report(console, report, bill)
    if figure is not None and plot is not None:
        from dsv4.demo.picture import draw_demo

        draw_demo(figure, [step for step in steps if step.part == "batch"], report.prefix)
        save_figure(figure, plot)
        console.print(f"plot written to {plot}", soft_wrap=True, markup=False)
    if as_json:
        found = {
            **report.to_dict(),
            "steps": [asdict(step) for step in steps],
            "v4_flash": bill.to_dict(),
            "plot": None if plot is None else str(plot),
        }
        typer.echo(json.dumps(found))
    return report.passed
