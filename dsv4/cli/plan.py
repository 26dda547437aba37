"""`dsv4 plan`: what a cache costs and what fits, as tables or JSON. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS
from dsv4.cache.schema import CacheSchema
from dsv4.cache.schema import byte_map as map_of
from dsv4.cli.errors import reported_errors
from dsv4.cli.plan_gpus import load_of, report
from dsv4.cli.plan_options import check_partners, given
from dsv4.cli.plan_text import print_link, print_plan, print_tier
from dsv4.cli.residency import print_residency
from dsv4.errors import PoolTooSmall
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
from dsv4.planning.deployment import CONTEXTS
from dsv4.planning.gpus import is_counted
from dsv4.planning.question import plan_gpus, schema_maker
from dsv4.plots.plan import plot_plan, requests_to_draw
from dsv4.residency_planner import ResidencySizing, plan_residency
from dsv4.units import (
    parse_byte_rate,
    parse_bytes,
    parse_link,
    parse_tokens,
)

GPUS, CACHE, MANAGER = "GPUs", "The cache", "All that a manager allocates"
BELOW, PRINTED = "Memory below the device, links", "Output"
DOES_NOT_FIT = 3


def plan_command(
    invocation: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|CONFIG.JSON",
            help=f"A preset ({', '.join(PRESETS)}), its name at Hugging Face, or the path of a "
            "config.json or of its directory.",
        ),
    ],
    gpus: Annotated[
        str | None,
        typer.Option(
            help="What the whole model is to run on: 4x80GB, 8xH200, H100. Weights and workspace "
            "are counted.",
            rich_help_panel=GPUS,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(
            help="Tensor-parallel ranks, each with the whole cache. What is not divided by --tp "
            "and --pp has requests of its own.",
            rich_help_panel=GPUS,
        ),
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="Stages of a pipeline.", rich_help_panel=GPUS)
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Size of the checkpoint: 150GB. Default: derived from the config, in the formats "
            "that it names.",
            rich_help_panel=GPUS,
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            help="What else each GPU needs: 6GB. Default: not counted.", rich_help_panel=GPUS
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory: 80GiB, 80GB or bytes; for the cache alone, or with --step-tokens for "
            "everything that the manager allocates.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens of each request: 1M, 128k, 1_000_000; k is 1,024.", rich_help_panel=CACHE
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Live requests at a time.", rich_help_panel=CACHE)
    ] = None,
    draft: Annotated[
        int, typer.Option(help="Draft tokens per step that may be rejected.", rich_help_panel=CACHE)
    ] = 0,
    steps_ahead: Annotated[
        int,
        typer.Option(
            help="Steps that may be planned before the result of one is known.",
            rich_help_panel=CACHE,
        ),
    ] = 0,
    index_format: Annotated[
        str, typer.Option(help=f"Indexer keys: {', '.join(INDEX_FORMATS)}.", rich_help_panel=CACHE)
    ] = "mxfp4",
    record_format: Annotated[
        str | None,
        typer.Option(
            help=f"Entries and window: {', '.join(ENTRY_FORMATS)}. Default: as trained.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    hca_state: Annotated[
        str,
        typer.Option(help="Unfinished groups of HCA layers: raw or online.", rich_help_panel=CACHE),
    ] = "raw",
    page_form: Annotated[
        str,
        typer.Option(
            help="Records of a page: planes (data, then scales) or records (each whole; V4.1).",
            rich_help_panel=CACHE,
        ),
    ] = "planes",
    block_tokens: Annotated[
        int, typer.Option(help="Tokens per block.", rich_help_panel=CACHE)
    ] = 128,
    step_tokens: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a step. Counts everything that a manager allocates: workspace, "
            "step buffers and snapshots too. Loads torch.",
            rich_help_panel=MANAGER,
        ),
    ] = None,
    snapshots: Annotated[
        int,
        typer.Option(
            help="Snapshots of the prefix cache; with --step-tokens.", rich_help_panel=MANAGER
        ),
    ] = 0,
    open_plans: Annotated[
        int, typer.Option(help="Plans open at once; with --step-tokens.", rich_help_panel=MANAGER)
    ] = 1,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="The manager's option; with --step-tokens and --device.",
            rich_help_panel=MANAGER,
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="The manager's device: workspace sizes depend on the GPU.", rich_help_panel=MANAGER
        ),
    ] = "cpu",
    tier: Annotated[
        str | None,
        typer.Option(
            "--tier",
            "--disk",
            help="Memory of a tier below the device: 512GiB, 4TB.",
            rich_help_panel=BELOW,
        ),
    ] = None,
    snapshot_every: Annotated[
        str,
        typer.Option(
            help="Tokens between two snapshots in the tier; 0: none.", rich_help_panel=BELOW
        ),
    ] = "1024",
    link: Annotated[
        str | None,
        typer.Option(help="Rate of a link between machines: 400Gb, 25Gb/s.", rich_help_panel=BELOW),
    ] = None,
    answer: Annotated[
        str,
        typer.Option(
            help="Tokens per answer; with --link and the rates of both sides.",
            rich_help_panel=BELOW,
        ),
    ] = "1k",
    prefill_rate: Annotated[
        float | None,
        typer.Option(
            help="Tokens per second of a prefill GPU; with --link.", rich_help_panel=BELOW
        ),
    ] = None,
    decode_rate: Annotated[
        float | None,
        typer.Option(help="Tokens per second of a decode GPU; with --link.", rich_help_panel=BELOW),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory for entries that leave the device: 256GB; with --memory or --gpus.",
            rich_help_panel=BELOW,
        ),
    ] = None,
    hot_rows: Annotated[
        int | None,
        typer.Option(
            help="Entries of a request that a layer keeps on the device, at least; with "
            "--host-memory. Default: four times what a step selects.",
            rich_help_panel=BELOW,
        ),
    ] = None,
    link_host: Annotated[
        str,
        typer.Option(
            help="Rate between host and device, in bytes: 55GB/s; with --host-memory. The default "
            "is that of a copy over PCIe 5.",
            rich_help_panel=BELOW,
        ),
    ] = "55GB/s",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object.", rich_help_panel=PRINTED)
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw memory against context into this file.", rich_help_panel=PRINTED),
    ] = None,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also where the bytes of a block and a slot go.",
            rich_help_panel=PRINTED,
        ),
    ] = False,
    byte_map: Annotated[
        bool,
        typer.Option(
            "--map", help="Print the byte layout of a block and a slot.", rich_help_panel=PRINTED
        ),
    ] = False,
) -> None:
    """How many requests fit, what they need, what a token costs. The answer is the first line.

    With --gpus of a whole model: weights, workspace, and requests of 8k, 128k and 1M tokens, or of
    --context; with --host-memory and --disk of all GPUs together.

    Without, of one cache: give two of --memory, --context and --requests to get the third; give all
    three to see whether they fit. Without --context it is the longest of the model. The answer is
    about the cache alone, or with --step-tokens about everything that a manager allocates. With
    --tier it also says how many tokens a tier of that size keeps, with --link what a hand-off
    costs, and with the rates of both sides how many prefill GPUs feed one decode GPU. With --memory
    and --host-memory it says how many requests fit when their entries may live in host memory, and
    what a step then fetches.

    What does not fit ends with exit code 3.

        dsv4 plan v4-flash --gpus 4x80GB
        dsv4 plan deepseek-ai/DeepSeek-V4-Flash --gpus 8xH200 --tp 2 --host-memory 1TB
        dsv4 plan v4-flash --memory 80GiB --context 128k
    """
    with reported_errors(as_json=as_json, too_small=DOES_NOT_FIT):
        names = given(invocation)
        if gpus is None and memory is not None and is_counted(memory):
            gpus, memory = memory, None  # several GPUs hold a whole model
            names = names - {"memory"} | {"gpus"}
        check_partners(names)
        shape: dict[str, Any] = {
            "block_tokens": block_tokens,
            "max_draft_tokens": draft,
            "steps_ahead": steps_ahead,
            "entry_format": record_format,
            "index_format": index_format,
            "hca_state": hca_state,
            "page_form": page_form,
        }
        tokens = None if context is None else parse_tokens(context)
        if gpus is not None:
            deployed, written = plan_gpus(
                model,
                gpus,
                make_schema=schema_maker(**shape),
                tp=tp,
                pp=pp,
                weights=weights,
                drafts=draft > 0,
                contexts=CONTEXTS if tokens is None else (tokens,),
                requests=requests,
                load=load_of(
                    step_tokens=step_tokens,
                    snapshots=snapshots if "snapshots" in names else None,
                    activations=activations,
                    host_memory=host_memory,
                    disk=tier,
                ),
            )
            report(deployed, written, as_json=as_json, disk=tier)
            raise typer.Exit(0 if deployed.fits else DOES_NOT_FIT)
        schema = CacheSchema.build(ModelSpec.load(model), **shape)
        other_bytes = None
        if step_tokens is not None:
            other_bytes = _other_bytes(
                schema, step_tokens, snapshots, open_plans, device, batch_invariant
            )
        try:
            found = plan(
                schema,
                memory_bytes=None if memory is None else parse_bytes(memory),
                context_tokens=tokens,
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
                context_tokens=tokens,
                answer_tokens=parse_tokens(answer),
                prefill_rate=prefill_rate,
                decode_rate=decode_rate,
            )
        apart = None
        if host_memory is not None and memory is not None:
            apart = plan_residency(
                schema,
                memory_bytes=parse_bytes(memory),
                host_memory_bytes=parse_bytes(host_memory),
                link_bytes_per_second=parse_byte_rate(link_host),
                context_tokens=found.context_tokens if tokens is None else tokens,
                hot_rows=hot_rows,
                step_requests=requests,
                step_tokens=step_tokens or 0,
                open_plans=open_plans,
                other_bytes=other_bytes,
            )
        if as_json:
            typer.echo(json.dumps(_json(found, maps, plot, below, across, apart), indent=2))
        else:
            print_plan(
                found,
                maps=maps,
                plot=plot,
                written=memory,
                details=details,
                below=below,
                tier=tier,
            )
            if apart is not None:
                print_residency(apart, memory)
            if below is not None:
                print_tier(below)
            if across is not None:
                print_link(across)
        if found.fits is False and apart is None:
            raise typer.Exit(DOES_NOT_FIT)


def _other_bytes(
    schema: CacheSchema,
    step_tokens: int,
    snapshots: int,
    open_plans: int,
    device: str,
    batch_invariant: bool,
) -> OtherBytes:
    """What a manager with these options needs in addition. Loads torch."""
    from dsv4.cache import build
    from dsv4.cache.prefix.options import PrefixOptions

    prefix = PrefixOptions(snapshots=snapshots) if snapshots else None

    def other_bytes(requests: int) -> int:
        return build.other_bytes(
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
