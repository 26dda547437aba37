"""What `dsv4 plan` prints: the answer first, then what it is made of."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4.cache.schema import BlockBudget
from dsv4.cli.tables import bytes_of, table_of
from dsv4.planner import LinkSizing, Sizing, TierSizing
from dsv4.planning.words import tier_sentence
from dsv4.units import format_bytes, format_like, format_tokens


def print_plan(
    found: Sizing,
    *,
    maps: dict[str, str],
    plot: Path | None,
    written: str | None = None,
    details: bool = False,
    below: TierSizing | None = None,
    tier: str | None = None,
) -> None:
    """The answer, and what a tier `below` keeps; tables, and byte maps and the path of the plot
    where given. Memory is shown in the unit of `written`, the tier's in that of `tier`; `details`
    adds where the bytes of a block and a slot go."""
    console = Console()
    formats = found.formats
    console.print(Text(_answer(found, written), style="bold"), soft_wrap=True)
    if below is not None:
        console.print(Text(tier_sentence(below, tier), style="bold"), soft_wrap=True)
    console.print(
        Text.assemble(
            (found.model, "bold"),
            f"  entries {formats['entries']}, index keys {formats['index_keys']}, "
            f"HCA state {found.hca_state}, {found.max_draft_tokens} draft tokens, "
            + (f"{found.steps_ahead} steps ahead, " if found.steps_ahead else "")
            + ("records whole, " if formats["pages"] == "records" else "")
            + f"layout {found.fingerprint[:12]}",
        )
    )
    console.print(_sizes_table(found))
    if details:
        console.print(_kinds_table(found))
    if found.budget is not None:
        console.print(_budget_table(found.budget))
    if plot is not None:
        console.print(Text(f"plot written to {plot}"), soft_wrap=True)
    for text in maps.values():
        typer.echo(f"\n{text}")


def print_tier(below: TierSizing) -> None:
    """What its records take."""
    console = Console()
    table = table_of("record in a tier", "bytes", "")
    table.add_row("block", *bytes_of(below.block_record_bytes))
    table.add_row("snapshot", *bytes_of(below.snapshot_record_bytes))
    console.print(table)


def print_link(across: LinkSizing) -> None:
    """What requests that go over a link cost, as a table and a sentence."""
    console = Console()
    gigabits = f"{across.link_bits_per_second / 1e9:g} Gb/s"
    table = table_of("one request's hand-off", "bytes", "", f"at {gigabits}")
    for each in across.handoffs:
        size = bytes_of(each.handoff_bytes)
        table.add_row(
            f"{format_tokens(each.context_tokens)} tokens", *size, f"{each.seconds * 1e3:,.2f} ms"
        )
    table.add_row("of that, its state, at most", *bytes_of(across.state_bytes), "")
    console.print(table)
    answer = f"{gigabits} carry {across.tokens_per_second:,.0f} tokens of context per second."
    if across.prefill_per_decode is not None and across.link_share is not None:
        tokens = format_tokens(across.handoffs[0].context_tokens)
        answer += (
            f" With prompts of {tokens} and answers of {format_tokens(across.answer_tokens or 0)} "
            f"tokens you need {across.prefill_per_decode:,.2f} prefill GPUs per decode GPU, which "
            f"uses {across.link_share:.1%} of the link."
        )
    console.print(Text(answer, style="bold"), soft_wrap=True)


def _sizes_table(found: Sizing) -> Table:
    table = table_of("cost", "bytes", "")
    table.add_row("a token of context", f"{found.bytes_per_token:,.2f}", "")
    table.add_row(
        "a live request, at any length",
        f"{found.bytes_per_request:,}",
        format_bytes(found.bytes_per_request),
    )
    table.add_section()
    table.add_row(f"block of {found.block_tokens} tokens", *bytes_of(found.block_bytes))
    table.add_row("slot of a request", *bytes_of(found.slot_bytes))
    table.add_row("block table row of a request", *bytes_of(found.block_table_row_bytes))
    table.add_row("snapshot of the prefix cache", *bytes_of(found.snapshot_bytes))
    return table


def _kinds_table(found: Sizing) -> Table:
    """Where the bytes of a block and a slot go, one row per kind of plane."""
    table = table_of("plane", "in a block", "share", "in a slot", "share")
    in_block, in_slot = found.bytes_by_kind["block"], found.bytes_by_kind["slot"]
    kinds = [kind for kind in (*in_block, *in_slot) if kind != "padding"]
    for kind in (*dict.fromkeys(kinds), "padding"):
        table.add_row(
            kind,
            *_share(in_block.get(kind), found.block_bytes),
            *_share(in_slot.get(kind), found.slot_bytes),
        )
    return table


def _budget_table(budget: BlockBudget) -> Table:
    table = table_of("allocated", "bytes", "")
    for count, what, size in (
        (budget.num_blocks, "block", budget.block_arena_bytes),
        (budget.max_requests, "slot", budget.slot_arena_bytes),
    ):
        table.add_row(f"{count:,} {what}{'' if count == 1 else 's'}", *bytes_of(size))
    table.add_row("block table", *bytes_of(budget.block_table_bytes))
    if budget.other_bytes:
        table.add_row("step buffers, workspace, snapshots", *bytes_of(budget.other_bytes))
    table.add_section()
    table.add_row("total", *bytes_of(budget.total_bytes))
    if budget.unused_bytes:
        table.add_row("too small for a block, unused", *bytes_of(budget.unused_bytes))
    return table


def _answer(found: Sizing, written: str | None) -> str:
    """The answer as a sentence."""
    if found.question == "bytes":
        return (
            f"{found.model} keeps {found.bytes_per_token:,.10g} bytes for each token of context, "
            f"and {format_like(found.bytes_per_request, 'GB')} for each live request."
        )
    context = format_tokens(found.context_tokens or 0)
    who = f"{found.requests:,} request{'' if found.requests == 1 else 's'} of {context} tokens"
    needed = f"{format_like(found.needed_bytes or 0, written)} ({found.needed_bytes:,} bytes)"
    memory = format_like(found.memory_bytes or 0, written)
    match found.question:
        case "memory":
            return f"Memory for {who}: {needed}."
        case "requests" | "context":
            return f"{memory} has room for {who} at once: {needed}."
        case "fits" if found.fits:
            return f"{memory} has room for {who} at once: {needed}. They fit."
        case _:
            most = (found.memory_bytes or 0) - found.other_bytes
            room = most // (found.request_bytes or 1)
            return (
                f"{memory} has no room for {who} at once. The minimum is {needed}; "
                f"{room:,} would fit."
            )


def _share(part_bytes: int | None, total_bytes: int) -> tuple[str, str]:
    if not part_bytes:
        return "", ""
    return f"{part_bytes:,}", f"{part_bytes / total_bytes:.1%}"
