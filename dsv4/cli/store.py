"""`dsv4 store`: lists, checks and prunes the directory of a disk tier.
Torch-free."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
from dsv4.cli.keys import given_key
from dsv4.errors import InvalidInput
from dsv4.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from dsv4.tiers.audit import Audit, Audited
    from dsv4.tiers.record import Label
    from dsv4.tiers.secret import Secret
    from dsv4.tiers.shelves import Found, Other

T = TypeVar("T")
store_app = typer.Typer(
    no_args_is_help=True, help="Look at, check and prune the directory of a disk tier."
)
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of a disk tier.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@store_app.command("ls")
def ls_command(directory: Directory, as_json: AsJson = False) -> None:
    """Show how many records of each kind there are, by the schema that they belong to."""
    with reported_errors(as_json=as_json), _audit(directory) as audit:
        groups: dict[tuple[str, str], list[Found | Other]] = {}
        tokens: dict[tuple[str, str], int] = {}
        for found in _shown(audit.headers(), len(audit.files), "reading headers", as_json):
            label = found.label if found.refusal is None else None
            name = ("", _no_record(found)) if label is None else _group(label)
            groups.setdefault(name, []).append(found.file)
            tokens[name] = max(tokens.get(name, 0), 0 if label is None else label.tokens)
        for other in audit.others:
            groups.setdefault(("", f"version {other.version}"), []).append(other)
        rows = [
            _summary(*name, files, tokens.get(name, 0)) for name, files in sorted(groups.items())
        ]
        unreadable = audit.unreadable
    if as_json:
        _print_json(
            {
                "directory": str(directory),
                "records": sum(row["records"] for row in rows),
                "bytes": sum(row["bytes"] for row in rows),
                "groups": rows,
                "unreadable": _as_dicts(unreadable),
            }
        )
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
    _say("cannot read", unreadable)


@store_app.command("check")
def check_command(
    directory: Directory,
    as_json: AsJson = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove refused records.")] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(help="Check the MACs of records with a key too. DSV4_KEY does the same."),
    ] = None,
) -> None:
    """Read every record and compare its sums; with the key also its MAC. Exit code 1 if one is not
    what it says, or cannot be read."""
    with reported_errors(as_json=as_json), _audit(directory, _secret(key_file)) as audit:
        good, refused = 0, []
        for found in _shown(audit.checked(), len(audit.files), "checking", as_json):
            if found.refusal is None:
                good += 1
            else:
                refused.append(found)
        stay = audit.remove(found.file for found in refused) if remove else []
        unreadable, others = audit.unreadable, len(audit.others)
    removed = len(refused) - len(stay) if remove else 0
    if as_json:
        _print_json(
            {
                "directory": str(directory),
                "good": good,
                "refused": [{"key": str(each.file.key), **_why(each)} for each in refused],
                "removed": removed,
                "not_removed": _as_dicts(stay),
                "unreadable": _as_dicts(unreadable),
                "other_versions": others,
            }
        )
    else:
        for each in refused:
            typer.echo(f"{each.file.key}  {each.refusal}")
        by_reason = Counter(_why(each)["reason"] for each in refused)
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(by_reason.items()))
        gone = f", {'' if removed == len(refused) else f'{removed:,} '}removed" if removed else ""
        old = f", {others:,} of other record versions not looked at" if others else ""
        reasons = f" ({reasons})" if reasons else ""
        typer.echo(f"{good:,} good, {len(refused):,} refused{reasons}{gone}{old}")
        _say("cannot remove", stay)
        _say("cannot read", unreadable)
    raise typer.Exit(1 if refused or unreadable else 0)


@store_app.command("prune")
def prune_command(
    directory: Directory,
    to: Annotated[
        str | None, typer.Option(help="Remove the longest unused until this much is left: 100GiB.")
    ] = None,
    unused_for: Annotated[
        str | None, typer.Option(help="Remove what was not used for this long: 7d, 12h, 30m.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="Remove what belongs to this schema (give its first digits).")
    ] = None,
    other_versions: Annotated[
        bool, typer.Option("--other-versions", help="Remove what another record version wrote.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove records by size, age, schema or record version. Temporary files without a writer are
    removed too. Exit code 1 if one cannot be removed."""
    with reported_errors(as_json=as_json), _audit(directory) as audit:
        if to is None and unused_for is None and fingerprint is None and not other_versions:
            raise InvalidInput(
                "say what to remove: --to, --unused-for, --fingerprint or --other-versions"
            )
        going = _going(audit, to, unused_for, fingerprint, other_versions, as_json)
        temporary, stay = 0, []
        if not dry_run:
            stay = audit.remove(_shown(going, len(going), "removing", as_json))
            temporary = audit.sweep()
        kept = {name for name, _ in stay}
        gone = [file for file in going if _name(file) not in kept]
        gone_bytes = sum(file.size_bytes for file in gone)
        left = len(audit.files) + len(audit.others) - len(gone)
        left_bytes = audit.total_bytes - gone_bytes
        unreadable = audit.unreadable
    if as_json:
        _print_json(
            {
                "directory": str(directory),
                "dry_run": dry_run,
                "removed": {"records": len(gone), "bytes": gone_bytes, "temporary": temporary},
                "left": {"records": left, "bytes": left_bytes},
                "not_removed": _as_dicts(stay),
                "unreadable": _as_dicts(unreadable),
            }
        )
    else:
        verb = "would go" if dry_run else "removed"
        typer.echo(
            f"{len(gone):,} records, {format_bytes(gone_bytes)} {verb}; "
            f"{left:,} records, {format_bytes(left_bytes)} left"
        )
        _say("cannot remove", stay)
        _say("cannot read", unreadable)
    raise typer.Exit(1 if stay or unreadable else 0)


def _going(
    audit: Audit,
    to: str | None,
    unused_for: str | None,
    fingerprint: str | None,
    other_versions: bool,
    as_json: bool,
) -> list[Found | Other]:
    """The files that the options name, each once, in the order in which a tier evicts them."""
    if fingerprint is not None and not re.fullmatch(r"[0-9a-f]{4,64}", fingerprint):
        raise InvalidInput(f"--fingerprint {fingerprint}: give 4 to 64 hexadecimal digits")
    before_ns = None if unused_for is None else time.time_ns() - _parse_age(unused_for) * 10**9
    most_bytes = None if to is None else parse_bytes(to)
    headers = []
    if fingerprint is not None or unused_for is not None or to is not None:
        shown = _shown(audit.headers(), len(audit.files), "reading headers", as_json)
        headers = list(shown)
    going: dict[str, Found | Other] = {}
    if other_versions:
        going |= {_name(other): other for other in audit.others}
    if fingerprint is not None:
        for found in headers:
            label = found.label
            if label is not None and label.fingerprint.hex().startswith(fingerprint):
                going[_name(found.file)] = found.file
    if before_ns is None and most_bytes is None:
        return list(going.values())
    oldest: list[Found | Other] = [*audit.others, *audit.by_use(headers)]
    if before_ns is not None:
        going |= {_name(file): file for file in oldest if file.used_ns < before_ns}
    if most_bytes is not None:
        left_bytes = audit.total_bytes - sum(file.size_bytes for file in going.values())
        for file in oldest:
            if left_bytes <= most_bytes:
                break
            if _name(file) not in going:
                going[_name(file)] = file
                left_bytes -= file.size_bytes
    return list(going.values())


def _parse_age(text: str) -> int:
    """Seconds of "7d", "12h", "30m", "45s"."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None:
        raise InvalidInput(f"--unused-for {text}: give a number and s, m, h or d, as in 7d")
    return int(found[1]) * _SECONDS[found[2]]


def _secret(key_file: Path | None) -> Secret | None:
    """Of the key in a file, or in DSV4_KEY; None without either. Raises InvalidInput."""
    from dsv4.tiers.secret import Secret

    key = given_key(key_file)
    return None if key is None else Secret(key)


@contextmanager
def _audit(directory: Path, secret: Secret | None = None) -> Iterator[Audit]:
    from dsv4.tiers.audit import Audit

    audit = Audit(directory, secret)
    try:
        yield audit
    finally:
        audit.close()


def _shown(each: Iterable[T], total: int, what: str, as_json: bool) -> Iterable[T]:
    """With a progress bar on stderr, if that is a terminal."""
    console = Console(stderr=True)
    quiet = as_json or not console.is_terminal
    return track(each, what, total=total, console=console, transient=True, disable=quiet)


def _group(label: Label) -> tuple[str, str]:
    return label.fingerprint.hex(), label.kind.name.lower()


def _no_record(found: Audited) -> str:
    from dsv4.tiers.record import Reason

    assert found.refusal is not None
    return "unreadable" if found.refusal.reason is Reason.UNREADABLE else "no record"


def _summary(
    fingerprint: str, kind: str, files: Sequence[Found | Other], tokens: int
) -> dict[str, Any]:
    last_ns = max(file.used_ns for file in files)
    return {
        "fingerprint": fingerprint,
        "kind": kind,
        "records": len(files),
        "bytes": sum(file.size_bytes for file in files),
        "tokens": tokens,
        "last_used": datetime.fromtimestamp(last_ns / 1e9).isoformat(" ", "seconds"),
    }


def _name(file: Found | Other) -> str:
    from dsv4.tiers.shelves import Other

    return file.path if isinstance(file, Other) else str(file.key)


def _as_dicts(troubles: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"name": name, "error": error} for name, error in troubles]


def _say(what: str, troubles: Iterable[tuple[str, str]]) -> None:
    for name, error in troubles:
        typer.echo(f"{what} {name}: {error}", err=True)


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
