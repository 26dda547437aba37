"""`dsv4 plan`: what a cache costs and what fits, as tables or JSON. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS
from dsv4.cache.schema import BlockBudget, CacheSchema
from dsv4.cache.schema import byte_map as map_of
from dsv4.cli.errors import reported_errors
from dsv4.cli.residency import print_residency
from dsv4.cli.tables import bytes_of, table_of
from dsv4.errors import InvalidInput, PoolTooSmall
from dsv4.model import PRESETS, ModelSpec
from dsv4.planner import (
    LinkSizing,
    OtherBytes,
    Sizing,
    TierSizing,
    plan,
    plan_link,
    plan_tier,
)
from dsv4.plots.plan import plot_plan, requests_to_draw
from dsv4.residency_planner import ResidencySizing, plan_residency
from dsv4.units import (
    format_bytes,
    format_tokens,
    parse_byte_rate,
    parse_bytes,
    parse_link,
    parse_tokens,
)


def plan_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CONFIG.JSON",
            help=f"A preset ({', '.join(PRESETS)}) or the path of a config.json.",
        ),
    ],
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory: 80GiB, 80GB or bytes; for the cache alone, or with --step-tokens for "
            "everything that the manager allocates."
        ),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Tokens of each request: 1M, 128k, 1_000_000.")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Live requests at a time.")] = None,
    draft: Annotated[int, typer.Option(help="Draft tokens per step that may be rejected.")] = 0,
    steps_ahead: Annotated[
        int, typer.Option(help="Steps that may be planned before the result of one is known.")
    ] = 0,
    index_format: Annotated[
        str, typer.Option(help=f"Indexer keys: {', '.join(INDEX_FORMATS)}.")
    ] = "mxfp4",
    record_format: Annotated[
        str | None,
        typer.Option(help=f"Entries and window: {', '.join(ENTRY_FORMATS)}. Default: as trained."),
    ] = None,
    hca_state: Annotated[
        str, typer.Option(help="Unfinished groups of HCA layers: raw or online.")
    ] = "raw",
    block_tokens: Annotated[int, typer.Option(help="Tokens per block.")] = 128,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a step. Counts everything that a manager allocates: workspace, "
            "step buffers and snapshots too. Loads torch."
        ),
    ] = None,
    snapshots: Annotated[
        int, typer.Option(help="Snapshots of the prefix cache; with --step-tokens.")
    ] = 0,
    open_plans: Annotated[int, typer.Option(help="Plans open at once; with --step-tokens.")] = 1,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="The manager's option; with --step-tokens and --device."
        ),
    ] = False,
    device: Annotated[
        str, typer.Option(help="The manager's device: workspace sizes depend on the GPU.")
    ] = "cpu",
    tier: Annotated[
        str | None, typer.Option(help="Memory of a tier below the device: 512GiB, 4TB.")
    ] = None,
    snapshot_every: Annotated[
        str, typer.Option(help="Tokens between two snapshots in the tier; 0: none.")
    ] = "1024",
    link: Annotated[
        str | None, typer.Option(help="Rate of a link between machines: 400Gb, 25Gb/s.")
    ] = None,
    answer: Annotated[
        str, typer.Option(help="Tokens per answer; with --link and the rates of both sides.")
    ] = "1k",
    prefill_rate: Annotated[
        float | None, typer.Option(help="Tokens per second of a prefill GPU; with --link.")
    ] = None,
    decode_rate: Annotated[
        float | None, typer.Option(help="Tokens per second of a decode GPU; with --link.")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(help="Host memory for entries that leave the device: 256GB; with --memory."),
    ] = None,
    hot_rows: Annotated[
        int | None,
        typer.Option(
            help="Entries of a request that a layer keeps on the device, at least; with "
            "--host-memory. Default: four times what a step selects."
        ),
    ] = None,
    link_host: Annotated[
        str,
        typer.Option(
            help="Rate between host and device, in bytes: 55GB/s; with --host-memory. The default "
            "is that of a copy over PCIe 5."
        ),
    ] = "55GB/s",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory against context into this file.")
    ] = None,
    byte_map: Annotated[
        bool, typer.Option("--map", help="Print the byte layout of a block and a slot.")
    ] = False,
) -> None:
    """Show what a cache costs per token and per request, and what fits.

    Give two of --memory, --context and --requests to get the third; give all three to see whether
    they fit. Without --context it is the longest of the model. The answer is about the cache alone,
    or with --step-tokens about everything that a manager allocates. With --tier it also says how
    many tokens a tier of that size keeps, with --link what a hand-off costs, and with the rates of
    both sides how many prefill GPUs feed one decode GPU. With --memory and --host-memory it says
    how many requests fit when their entries may live in host memory, and what a step then fetches.
    """
    with reported_errors(as_json=as_json):
        schema = CacheSchema.build(
            ModelSpec.load(model),
            block_tokens=block_tokens,
            max_draft_tokens=draft,
            steps_ahead=steps_ahead,
            entry_format=record_format,
            index_format=index_format,
            hca_state=hca_state,  # type: ignore[arg-type]
        )
        other_bytes = None
        if step_tokens is not None:
            other_bytes = _other_bytes(
                schema, step_tokens, snapshots, open_plans, device, batch_invariant
            )
        try:
            found = plan(
                schema,
                memory_bytes=None if memory is None else parse_bytes(memory),
                context_tokens=None if context is None else parse_tokens(context),
                requests=requests,
                other_bytes=other_bytes,
            )
        except PoolTooSmall:
            if host_memory is None:
                raise
            found = plan(schema)  # with host memory less is needed
        if plot is not None:
            curves = requests_to_draw(found.requests)
            plot_plan(schema, plot, memory_bytes=found.memory_bytes, requests=curves)
        maps = {arena: map_of(schema, arena) for arena in ("block", "slot")} if byte_map else {}
        below = None
        if tier is not None:
            every = 0 if snapshot_every == "0" else parse_tokens(snapshot_every)
            below = plan_tier(schema, tier_bytes=parse_bytes(tier), snapshot_period_tokens=every)
        across = None
        if link is not None:
            across = plan_link(
                schema,
                link_bits_per_second=parse_link(link),
                context_tokens=None if context is None else parse_tokens(context),
                answer_tokens=parse_tokens(answer),
                prefill_rate=prefill_rate,
                decode_rate=decode_rate,
            )
        apart = None
        if host_memory is not None:
            if memory is None:
                raise InvalidInput("--host-memory is in addition to the device's: give --memory")
            apart = plan_residency(
                schema,
                memory_bytes=parse_bytes(memory),
                host_memory_bytes=parse_bytes(host_memory),
                link_bytes_per_second=parse_byte_rate(link_host),
                context_tokens=found.context_tokens if context is None else parse_tokens(context),
                hot_rows=hot_rows,
                step_requests=requests,
                step_tokens=step_tokens or 0,
                open_plans=open_plans,
                other_bytes=other_bytes,
            )
        if as_json:
            typer.echo(json.dumps(_json(found, maps, plot, below, across, apart), indent=2))
        else:
            print_plan(found, maps, plot)
            if apart is not None:
                print_residency(apart)
            if below is not None:
                print_tier(below)
            if across is not None:
                print_link(across)


def _other_bytes(
    schema: CacheSchema,
    step_tokens: int,
    snapshots: int,
    open_plans: int,
    device: str,
    batch_invariant: bool,
) -> OtherBytes:
    """What a manager with these options needs in addition. Loads torch."""
    from dsv4.cache.manager import KVCacheManager
    from dsv4.cache.prefix.options import PrefixOptions

    prefix = PrefixOptions(snapshots=snapshots) if snapshots else None

    def other_bytes(requests: int) -> int:
        return KVCacheManager.other_bytes(
            schema,
            max_requests=requests,
            max_step_tokens=step_tokens,
            device=device,
            prefix=prefix,
            max_open_plans=open_plans,
            batch_invariant=batch_invariant,
        )

    return other_bytes


def _json(
    found: Sizing,
    maps: dict[str, str],
    plot: Path | None,
    below: TierSizing | None,
    across: LinkSizing | None,
    apart: ResidencySizing | None,
) -> dict[str, Any]:
    result = found.to_dict()
    if apart is not None:
        result["residency"] = apart.to_dict()
    if across is not None:
        result["link"] = across.to_dict()
    if below is not None:
        result["tier"] = below.to_dict()
    if maps:
        result["byte_map"] = {arena: text.splitlines() for arena, text in maps.items()}
    if plot is not None:
        result["plot"] = str(plot)
    return result


def print_plan(found: Sizing, maps: dict[str, str], plot: Path | None) -> None:
    """The answer as tables; with byte maps and the path of the plot where given."""
    console = Console()
    formats = found.formats
    console.print(
        Text.assemble(
            (found.model, "bold"),
            f"  entries {formats['entries']}, index keys {formats['index_keys']}, "
            f"HCA state {found.hca_state}, {found.max_draft_tokens} draft tokens, "
            + (f"{found.steps_ahead} steps ahead, " if found.steps_ahead else "")
            + f"layout {found.fingerprint[:12]}",
        )
    )
    console.print(_sizes_table(found))
    console.print(_kinds_table(found))
    if found.budget is not None:
        console.print(_budget_table(found.budget))
    if found.question != "bytes":
        console.print(Text(_answer(found), style="bold"), soft_wrap=True)
    if plot is not None:
        console.print(Text(f"plot written to {plot}"), soft_wrap=True)
    for text in maps.values():
        typer.echo(f"\n{text}")


def print_tier(below: TierSizing) -> None:
    """What a tier keeps, as a table and a sentence."""
    console = Console()
    table = table_of("record in a tier", "bytes", "")
    table.add_row("block", *bytes_of(below.block_record_bytes))
    table.add_row("snapshot", *bytes_of(below.snapshot_record_bytes))
    console.print(table)
    how = "without snapshots"
    if below.snapshot_period_tokens:
        how = f"with a snapshot every {below.snapshot_period_tokens:,}"
    answer = (
        f"A tier of {format_bytes(below.tier_bytes)} keeps {below.tokens:,} tokens {how}: "
        f"{below.bytes_per_token:,.2f} bytes per token."
    )
    console.print(Text(answer, style="bold"), soft_wrap=True)


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
    table.add_row(f"{budget.num_blocks:,} blocks", *bytes_of(budget.block_arena_bytes))
    table.add_row(f"{budget.max_requests:,} slots", *bytes_of(budget.slot_arena_bytes))
    table.add_row("block table", *bytes_of(budget.block_table_bytes))
    if budget.other_bytes:
        table.add_row("step buffers, workspace, snapshots", *bytes_of(budget.other_bytes))
    table.add_section()
    table.add_row("total", *bytes_of(budget.total_bytes))
    if budget.unused_bytes:
        table.add_row("too small for a block, unused", *bytes_of(budget.unused_bytes))
    return table


def _answer(found: Sizing) -> str:
    """The answer as a sentence."""
    context = format_tokens(found.context_tokens or 0)
    who = f"{found.requests:,} request{'' if found.requests == 1 else 's'} of {context} tokens"
    needed = f"{format_bytes(found.needed_bytes or 0)} ({found.needed_bytes:,} bytes)"
    memory = format_bytes(found.memory_bytes or 0)
    match found.question:
        case "memory":
            return f"Memory for {who}: {needed}."
        case "requests" | "context":
            return f"{memory} has room for {who} at once: {needed}."
        case "fits" if found.fits:
            return f"{memory} has room for {who} at once: {needed}. They fit."
        case _:
            return f"{memory} has no room for {who} at once. The minimum is {needed}."


def _share(part_bytes: int | None, total_bytes: int) -> tuple[str, str]:
    if not part_bytes:
        return "", ""
    return f"{part_bytes:,}", f"{part_bytes / total_bytes:.1%}"
