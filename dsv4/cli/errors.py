"""How every command reports an error: one line, exit code 2, no traceback. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dsv4.errors import Dsv4Error, PoolTooSmall
from dsv4.extras import needed_by

EXIT_CODE = 2


@contextmanager
def reported_errors(*, as_json: bool, too_small: int = EXIT_CODE) -> Iterator[None]:
    """Turns a Dsv4Error into a line on stderr (or a JSON object on stdout) and exit code 2;
    `too_small` where memory is what is missing.

    An import that an extra would satisfy is a MissingExtra. Any other exception is a bug and passes
    through with its traceback.
    """
    try:
        with needed_by("this command"):
            yield
    except Dsv4Error as error:
        kind = type(error).__name__
        if as_json:
            report: dict[str, str | int] = {"error": str(error), "type": kind}
            if isinstance(error, PoolTooSmall):
                report["minimum_bytes"] = error.minimum_bytes
            typer.echo(json.dumps(report))
        else:
            typer.echo(f"{kind}: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(too_small if isinstance(error, PoolTooSmall) else EXIT_CODE) from error
