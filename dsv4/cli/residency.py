"""What `dsv4 plan --host-memory` prints."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from dsv4.cli.tables import bytes_of, table_of
from dsv4.residency_planner import ResidencySizing
from dsv4.units import format_like, format_tokens


def print_residency(found: ResidencySizing, written: str | None = None) -> None:
    """The answer as a sentence, in the unit of `written`; both memories of a request, and what
    steps fetch."""
    console = Console()
    console.print(Text(_answer(found, written), style="bold"), soft_wrap=True)
    table = table_of("one request, entries in host memory", "bytes", "")
    table.add_row("on the device", *bytes_of(found.device_request_bytes))
    table.add_row(
        f"  of that, {found.hot_rows:,} hot entries per layer", *bytes_of(found.hot_bytes)
    )
    table.add_row("  of that, tables of where entries are", *bytes_of(found.table_bytes))
    table.add_row("in host memory", *bytes_of(found.host_request_bytes))
    table.add_row("without host memory", *bytes_of(found.request_bytes_without))
    table.add_section()
    table.add_row("of the manager: entries of chunks", *bytes_of(found.chunk_bytes))
    console.print(table)
    rate = f"{found.link_bytes_per_second / 1e9:g} GB/s"
    who = _requests(found.step_requests)
    table = table_of(f"hits in a decode step of {who}", "fetched bytes", "", f"at {rate}")
    for step in found.steps:
        size = bytes_of(step.fetched_bytes)
        table.add_row(f"{step.hit_rate:.0%}", *size, f"{step.seconds * 1e3:,.2f} ms")
    console.print(table)


def _answer(found: ResidencySizing, written: str | None) -> str:
    context = f"{format_tokens(found.context_tokens)} tokens"
    sizes = found.memory_bytes, found.host_memory_bytes
    both = " and ".join(format_like(each, written) for each in sizes)
    limit = "host memory" if found.limited_by == "host" else "the device's memory"
    answer = (
        f"{both} of host memory have room for {_requests(found.requests)} of {context} at once, "
        f"{found.requests_without:,} without host memory; {limit} is full first."
    )
    if found.pays:
        return answer
    if found.pays_from_tokens is None:
        return f"{answer} It does not pay: at no context does a request need less of the device."
    if found.context_tokens < found.pays_from_tokens:
        return (
            f"{answer} It does not pay: below {found.pays_from_tokens:,} tokens a request needs "
            f"more of the device than it saves."
        )
    return f"{answer} It does not pay: with this little host memory fewer fit."


def _requests(count: int) -> str:
    return f"{count:,} request{'' if count == 1 else 's'}"
