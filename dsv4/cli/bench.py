"""`dsv4 bench`: benchmark results side by side, or drawn. Torch-free; measuring is done by
`python -m benchmarks.run` in a checkout on a GPU machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4.bench import BenchResult, Comparison, read_results
from dsv4.bench import compare as compare_results
from dsv4.cli.errors import reported_errors
from dsv4.errors import InvalidInput
from dsv4.plots.results import SUITES, plot_results

# differences below this are not coloured
NOISE = 0.03
# of the names of cases at least, in columns of a narrow terminal
CASE_WIDTH = 16
WIDEST = 10_000


def bench_command(
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Two results files, side by side: ratio = B / A."),
    ] = None,
    plot: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="FILE RESULTS", help="Draw a results file into FILE (.png, .svg)."),
    ] = None,
    suites: Annotated[
        list[str] | None,
        typer.Option("--suite", help=f"Draw only this, of {', '.join(SUITES)}; may be repeated."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare two benchmark results files, or draw one."""
    with reported_errors(as_json=as_json):
        if (compare is None) == (plot is None):
            raise InvalidInput(
                "it measures nothing itself, it reads results: --compare A B puts two files next "
                "to each other, --plot FILE RESULTS draws one; `python -m benchmarks.run`, in a "
                "checkout on a GPU machine, writes them, and benchmarks/results/h200.jsonl is one"
            )
        if plot is not None:
            plot_results(read_results(plot[1]), plot[0], suites=suites or SUITES)
            typer.echo(json.dumps({"plot": str(plot[0])}) if as_json else f"written to {plot[0]}")
        if compare is not None:
            a, b = (read_results(path) for path in compare)
            found = compare_results(a, b)
            if not found.cases:
                raise InvalidInput(
                    f"no case is in both files: {compare[0]} has {_holds(a)}; {compare[1]} has "
                    f"{_holds(b)}: compare results of the same suites"
                )
            if as_json:
                files = {
                    name: {"path": str(path), **_origin(results)}
                    for name, path, results in zip("ab", compare, (a, b), strict=True)
                }
                typer.echo(json.dumps({**files, **found.to_dict()}, indent=2))
            else:
                _print(found, compare, a, b)


def _origin(results: list[BenchResult]) -> dict[str, list[str]]:
    return {
        "commits": sorted({r.run.commit for r in results}),
        "gpus": sorted({r.run.gpu for r in results}),
        "tritons": sorted({r.run.triton for r in results}),
    }


def _holds(results: list[BenchResult]) -> str:
    suites = ", ".join(dict.fromkeys(r.suite for r in results))
    return f"{len(results)} of {suites}, the first {results[0].case!r}"


def _print(
    found: Comparison, paths: tuple[Path, Path], a: list[BenchResult], b: list[BenchResult]
) -> None:
    console = Console()
    for name, path, results in zip("AB", paths, (a, b), strict=True):
        origin = _origin(results)
        text = f"{path}  {', '.join(origin['gpus'])}, Triton {', '.join(origin['tritons'])}, "
        text += f"commit {', '.join(origin['commits'])}"
        console.print(Text.assemble((f"{name}  ", "bold"), text), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("case", overflow="fold", min_width=CASE_WIDTH)
    for column in ("µs A", "µs B", "B / A"):
        table.add_column(column, justify="right", no_wrap=True)
    for case in found.cases:
        style = ""
        if case.ratio < 1 - NOISE:
            style = "green"
        elif case.ratio > 1 + NOISE:
            style = "red"
        ratio = Text(f"{case.ratio:.2f}", style=style)
        table.add_row(Text(case.case), f"{case.a_us:.2f}", f"{case.b_us:.2f}", ratio)
    width = console.measure(table, options=console.options.update(max_width=WIDEST))
    if console.is_terminal:  # names of cases are folded, numbers are not
        console.width = max(console.width, width.minimum)
    else:
        console.width = width.maximum
    console.print(table)
    for name, alone in (("A", found.only_a), ("B", found.only_b)):
        for missing in alone:
            console.print(Text(f"only in {name}: {missing}"), soft_wrap=True)
