"""`dsv4 demo`: a tiny trained V4 on this cache and on transformers', then the real one's bill."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsv4.cli.errors import reported_errors
from dsv4.errors import MissingExtra

if TYPE_CHECKING:
    from dsv4.demo.events import DemoEvent, StepEvent


def demo_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw bytes and time into this file (.png, .svg).")
    ] = None,
) -> None:
    """A tiny trained V4 answers questions about this cache: on this cache alone and, with
    transformers, on both caches side by side.

    Exit code 1 if tokens differ from those without a cache or from those of transformers.
    """
    with reported_errors(as_json=as_json):
        passed = _run(as_json=as_json, plot=plot)
    raise typer.Exit(0 if passed else 1)


def _run(*, as_json: bool, plot: Path | None) -> bool:
    from rich.console import Console

    from dsv4.demo.bill import flash_bill
    from dsv4.demo.events import StepEvent
    from dsv4.demo.model import speaking_v4
    from dsv4.demo.run import run_demo
    from dsv4.demo.screen import demo_view, print_report
    from dsv4.demo_model.checkpoint import Checkpoint
    from dsv4.plots.style import new_figure, save_figure

    figure = None if plot is None else new_figure(11, 4.6)
    checkpoint = Checkpoint.load()
    model = None
    with suppress(MissingExtra):  # the report says what to install
        model = speaking_v4(checkpoint)
    steps: list[StepEvent] = []
    console = Console(quiet=as_json)
    with demo_view(console) as view:

        def see(event: DemoEvent) -> None:
            view(event)
            if isinstance(event, StepEvent):
                steps.append(event)

        report = run_demo(checkpoint, model, see)
    bill = flash_bill()
    print_report(console, report, bill)
    if figure is not None and plot is not None:
        from dsv4.demo.picture import draw_demo

        drawn = "engine" if model is None else "batch"
        draw_demo(figure, [step for step in steps if step.part == drawn], report.prefix)
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
