"""`dsv4 verify`: does this cache store what DeepSeek's code computes?"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from dsv4.cli.errors import reported_errors


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
        table.add_column(column, justify="left" if column in ("array", "unit") else "right")
    for r in reports:
        mark = "[green]ok[/green]" if r.passed else "[red]MISS[/red]"
        table.add_row(r.array, f"{r.elements:,}", f"{r.differing:,}", f"{r.worst:g}", r.unit, mark)
    Console().print(table)
    raise typer.Exit(0 if passed else 1)


def _device(backend: BackendChoice) -> str:
    """A GPU for Triton where there is one; else Triton's interpreter, which must be chosen before
    the kernels are imported."""
    if backend is BackendChoice.REFERENCE:
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    os.environ["TRITON_INTERPRET"] = "1"
    return "cpu"
