"""The `dsv4` command. This file only registers commands; each lives in its own module and imports
what it needs when it runs, so that `dsv4 plan` works where torch is not installed."""

from __future__ import annotations

from typing import Annotated

import typer

from dsv4 import __version__
from dsv4.cli.bench import bench_command
from dsv4.cli.demo import demo_command
from dsv4.cli.explain import explain_command
from dsv4.cli.plan import plan_command
from dsv4.cli.serve import serve_command
from dsv4.cli.simulate import simulate_command
from dsv4.cli.store import store_app
from dsv4.cli.verify import verify_command

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("bench")(bench_command)
app.command("demo")(demo_command)
app.command("explain")(explain_command)
app.command("plan")(plan_command)
app.command("serve")(serve_command)
app.command("simulate")(simulate_command)
app.add_typer(store_app, name="store")
app.command("verify")(verify_command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dsv4 {__version__}")
        raise typer.Exit


@app.command("version")
def version_command() -> None:
    """Print the version."""
    typer.echo(f"dsv4 {__version__}")


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The KV cache for DeepSeek-V4 inference."""
