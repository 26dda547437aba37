"""`dsv4 store`: what is in the directory of a disk tier, whether it is whole, and less of it.
Torch-free."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dsv4.cli.errors import reported_errors
from dsv4.errors import InvalidInput
from dsv4.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from dsv4.tiers.audit import Audit, Audited
    from dsv4.tiers.record import Key, Label
    from dsv4.tiers.shelves import Found

T = TypeVar("T")
store_app = typer.Typer(
    no_args_is_help=True, help="Look at, check and prune the directory of a disk tier."
)
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a disk tier.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@store_app.command("ls")
def ls_command(directory: Directory, as_json: AsJson = False) -> None:
    """Say how many records of which kind there are, by the schema that they belong to."""
    with reported_errors(as_json=as_json), _audit(directory) as audit:
        groups: dict[tuple[str, str], list[Audited]] = {}
        for found in _shown(audit.headers(), len(audit.files), "reading headers", as_json):
            label = found.label if found.refusal is None else None
            name = ("", "no record") if label is None else _group(label)
            groups.setdefault(name, []).append(found)
        rows = [_summary(*name, files) for name, files in sorted(groups.items())]
    if as_json:
        total = sum(row["bytes"] for row in rows)
        count = sum(row["records"] for row in rows)
        _print_json({"directory": str(directory), "records": count, "bytes": total, "groups": rows})
        return
    table = _table("schema", "kind", "records", "size", "longest prefix", "last used")
    for row in rows:
        table.add_row(
            row["fingerprint"][:12],
            row["kind"],
            f"{row['records']:,}",
            format_bytes(row["bytes"]),
            f"{row['tokens']:,}",
            row["last_used"],
        )
    Console().print(table)


@store_app.command("check")
def check_command(
    directory: Directory,
    as_json: AsJson = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what is refused.")] = False,
) -> None:
    """Read every record and compare its sums. Exit code 1 if one is not what it says."""
    with reported_errors(as_json=as_json), _audit(directory) as audit:
        good, refused = 0, []
        for found in _shown(audit.checked(), len(audit.files), "checking", as_json):
            if found.refusal is None:
                good += 1
            else:
                refused.append(found)
        if remove:
            audit.remove(found.file.key for found in refused)
    if as_json:
        _print_json(
            {
                "directory": str(directory),
                "good": good,
                "refused": [{"key": str(each.file.key), **_why(each)} for each in refused],
                "removed": len(refused) if remove else 0,
            }
        )
    else:
        for each in refused:
            typer.echo(f"{each.file.key}  {each.refusal}")
        by_reason = Counter(_why(each)["reason"] for each in refused)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(by_reason.items()))
        gone = ", removed" if remove and refused else ""
        typer.echo(
            f"{good:,} good, {len(refused):,} refused{f' ({reasons})' if reasons else ''}{gone}"
        )
    raise typer.Exit(1 if refused else 0)


@store_app.command("prune")
def prune_command(
    directory: Directory,
    to: Annotated[
        str | None, typer.Option(help="Remove the longest unused until so much is left: 100GiB.")
    ] = None,
    unused_for: Annotated[
        str | None, typer.Option(help="Remove what was not used for so long: 7d, 12h, 30m.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Remove what belongs to this schema (its first digits).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove records by size, age or schema. Temporary files without a writer go too."""
    with reported_errors(as_json=as_json), _audit(directory) as audit:
        if to is None and unused_for is None and fingerprint is None:
            raise InvalidInput("say what is to go: --to, --unused-for or --fingerprint")
        going = _going(audit, to, unused_for, fingerprint, as_json)
        temporary = 0
        if not dry_run:
            keys = (found.key for found in going)
            for key in _shown(keys, len(going), "removing", as_json):
                audit.remove((key,))
            temporary = audit.sweep()
        gone_bytes = sum(found.size_bytes for found in going)
        left = len(audit.files) - len(going)
        left_bytes = audit.total_bytes - gone_bytes
    if as_json:
        _print_json(
            {
                "directory": str(directory),
                "dry_run": dry_run,
                "removed": {"records": len(going), "bytes": gone_bytes, "temporary": temporary},
                "left": {"records": left, "bytes": left_bytes},
            }
        )
        return
    verb = "would go" if dry_run else "removed"
    typer.echo(
        f"{len(going):,} records, {format_bytes(gone_bytes)} {verb}; "
        f"{left:,} records, {format_bytes(left_bytes)} left"
    )


def _going(
    audit: Audit, to: str | None, unused_for: str | None, fingerprint: str | None, as_json: bool
) -> list[Found]:
    """The files that the options name, each once."""
    going: dict[Key, Found] = {}
    if fingerprint is not None:
        if not re.fullmatch(r"[0-9a-f]{4,64}", fingerprint):
            raise InvalidInput(f"--fingerprint {fingerprint}: give 4 to 64 hexadecimal digits")
        for found in _shown(audit.headers(), len(audit.files), "reading headers", as_json):
            label = found.label
            if label is not None and label.fingerprint.hex().startswith(fingerprint):
                going[found.file.key] = found.file
    if unused_for is not None:
        before_ns = time.time_ns() - _parse_age(unused_for) * 10**9
        going |= {file.key: file for file in audit.files if file.used_ns < before_ns}
    if to is not None:
        left_bytes = audit.total_bytes - sum(file.size_bytes for file in going.values())
        most_bytes = parse_bytes(to)
        for file in audit.files:
            if left_bytes <= most_bytes:
                break
            if file.key not in going:
                going[file.key] = file
                left_bytes -= file.size_bytes
    return list(going.values())


def _parse_age(text: str) -> int:
    """Seconds of "7d", "12h", "30m", "45s"."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None:
        raise InvalidInput(f"--unused-for {text}: give a number and s, m, h or d, as in 7d")
    return int(found[1]) * _SECONDS[found[2]]


@contextmanager
def _audit(directory: Path) -> Iterator[Audit]:
    from dsv4.tiers.audit import Audit

    audit = Audit(directory)
    try:
        yield audit
    finally:
        audit.close()


def _shown(each: Iterable[T], total: int, what: str, as_json: bool) -> Iterable[T]:
    """With a bar on stderr, if somebody looks."""
    console = Console(stderr=True)
    quiet = as_json or not console.is_terminal
    return track(each, what, total=total, console=console, transient=True, disable=quiet)


def _group(label: Label) -> tuple[str, str]:
    return label.fingerprint.hex(), label.kind.name.lower()


def _summary(fingerprint: str, kind: str, files: list[Audited]) -> dict[str, Any]:
    last_ns = max(found.file.used_ns for found in files)
    return {
        "fingerprint": fingerprint,
        "kind": kind,
        "records": len(files),
        "bytes": sum(found.file.size_bytes for found in files),
        "tokens": max((found.label.tokens for found in files if found.label), default=0),
        "last_used": datetime.fromtimestamp(last_ns / 1e9).isoformat(" ", "seconds"),
    }


def _why(found: Audited) -> dict[str, str]:
    assert found.refusal is not None
    return {
        "reason": str(found.refusal.reason),
        "found": found.refusal.found,
        "asked": found.refusal.asked,
    }


def _print_json(result: dict[str, Any]) -> None:
    typer.echo(json.dumps(result, indent=2))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        text = column in ("schema", "kind", "last used")
        table.add_column(column, justify="left" if text else "right")
    return table
