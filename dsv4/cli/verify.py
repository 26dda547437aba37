"""`dsv4 verify`: does this cache store what DeepSeek's code computes?"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dsv4.cli.errors import reported_errors

if TYPE_CHECKING:
    from dsv4.verify import ArrayReport


class BackendChoice(StrEnum):
    REFERENCE = "reference"
    TRITON = "triton"


def verify_command(
    golden: Annotated[
        Path | None,
        typer.Option(help="Golden file (.npz). Default: the small one in the package."),
    ] = None,
    backend: Annotated[
        BackendChoice,
        typer.Option(help="Which implementation to check; without a GPU, Triton is interpreted."),
    ] = BackendChoice.REFERENCE,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Run a golden file through the cache and compare array by array. Exit code 1 on a miss."""
    from rich.console import Console
    from rich.table import Table

    with reported_errors(as_json=as_json):
        device = _device(backend)
        from dsv4.verify import verify

        reports = verify(golden, backend=backend.value, device=device)
    passed = all(report.passed for report in reports)
    if as_json:
        typer.echo(json.dumps({"passed": passed, "arrays": [asdict(r) for r in reports]}))
        raise typer.Exit(0 if passed else 1)
    table = Table(title=f"dsv4 verify · {golden or 'golden_small.npz'} · {backend} on {device}")
    for column in ("array", "elements", "differing", "worst", "unit", ""):
        justify: Literal["left", "right"] = "left" if column in ("array", "unit") else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != "unit")
    for r in reports:
        mark = "[green]ok[/green]" if r.passed else "[red]MISS[/red]"
        table.add_row(r.array, f"{r.elements:,}", f"{r.differing:,}", f"{r.worst:g}", r.unit, mark)
    console = Console()
    if not console.is_terminal:  # names are not cut where it goes into a file
        console.width = max(console.width, console.measure(table).maximum)
    console.print(table)
    console.print(sentence(reports), style="bold", soft_wrap=True, markup=False)
    raise typer.Exit(0 if passed else 1)


def sentence(reports: Sequence[ArrayReport]) -> str:
    """What the table comes to."""
    missed = [r for r in reports if not r.passed]
    if missed:
        which = ", ".join(f"{r.array} ({r.differing:,} of {r.elements:,})" for r in missed)
        return f"Failed: {len(missed)} of {len(reports)} arrays are not DeepSeek's run: {which}."
    outputs = [r for r in reports if r.unit.startswith("relative error")]
    bytes_ = [r for r in reports if r not in outputs and "indices" not in r.array]
    same = "are identical to"
    if moved := sum(r.differing for r in bytes_):
        same = f"differ by {moved:,} roundings, as they may, from"
    text = f"Passed: {len(reports)} arrays; stored bytes and scores {same} DeepSeek's run"
    if ties := sum(r.differing for r in reports if "indices" in r.array):
        text += f"; {ties:,} selected entries differ, with equal scores"
    if outputs:
        worst = max(r.worst for r in outputs)
        limit = outputs[0].unit.partition("(limit ")[2].rstrip(")")
        text += f"; attention is within {worst:.1g} of it (limit {limit})"
    return text + "."


def _device(backend: BackendChoice) -> str:
    """A GPU for Triton where there is one; else Triton's interpreter, which must be chosen before
    the kernels are imported."""
    import torch

    if backend is BackendChoice.REFERENCE:
        torch.set_num_threads(1)  # the tensors are small: threads would wait for each other
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"
