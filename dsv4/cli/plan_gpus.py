"""`dsv4 plan --gpus`: the question is put, and its answer printed."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.text import Text

from dsv4.cache.schema import CacheSchema
from dsv4.cli.plan_text import print_tier
from dsv4.cli.tables import table_of
from dsv4.errors import ConfigError
from dsv4.model import ModelSpec, config_path, preset_name, read_config
from dsv4.planning.deployment import (
    CONTEXTS,
    Deployment,
    Fit,
    LayoutFit,
    Load,
    MakeSchema,
    Weights,
    deploy,
)
from dsv4.planning.gpus import Gpus, parse_gpus
from dsv4.planning.layouts import layout_of
from dsv4.planning.peers import SOURCE
from dsv4.planning.weights import PRESET_WEIGHTS, weight_shapes
from dsv4.units import format_like, format_tokens, parse_bytes


def plan_gpus(
    name: str,
    gpus: str,
    *,
    make_schema: MakeSchema,
    tp: int | None,
    pp: int | None,
    weights: str | None,
    drafts: bool,
    context_tokens: int | None,
    requests: int | None,
    load: Load,
) -> tuple[Deployment, Gpus]:
    """The answer, and the GPUs as they were written. Raises InvalidInput, ConfigError."""
    model, found = ModelSpec.load(name), parse_gpus(gpus)
    return (
        deploy(
            model,
            found,
            weights_of(name, model, weights, drafts=drafts),
            layout=layout_of(found.count, tp=tp, pp=pp),
            make_schema=make_schema,
            contexts=CONTEXTS if context_tokens is None else (context_tokens,),
            requests=requests,
            load=load,
        ),
        found,
    )


def weights_of(name: str, model: ModelSpec, size: str | None, *, drafts: bool) -> Weights:
    """As given, or derived from the preset or the config. Raises ConfigError."""
    if size is not None:
        return Weights.given(parse_bytes(size))
    path = config_path(name)
    if path is None:
        shapes = PRESET_WEIGHTS.get(preset_name(name) or "")
    else:
        shapes = weight_shapes(read_config(path))
    if shapes is None:
        raise ConfigError(
            f"the weights of {model.name} cannot be derived from what is known of it: give their "
            f"size, --weights 150GB"
        )
    return Weights.derived(model, shapes, drafts=drafts)


def load_of(
    *,
    step_tokens: int | None,
    snapshots: int | None,
    activations: str | None,
    host_memory: str | None,
    disk: str | None,
) -> Load:
    """What else is on the GPUs, from the options; its own defaults for what was not given."""
    counts = {"step_tokens": step_tokens, "snapshots": snapshots}
    return Load(
        **{name: count for name, count in counts.items() if count is not None},
        activations_bytes=0 if activations is None else parse_bytes(activations),
        host_memory_bytes=None if host_memory is None else parse_bytes(host_memory),
        disk_bytes=None if disk is None else parse_bytes(disk),
    )


def schema_maker(**options: object) -> MakeSchema:
    def make(model: ModelSpec) -> CacheSchema:
        return CacheSchema.build(model, **options)  # type: ignore[arg-type]

    return make


def answer(found: Deployment, gpus: Gpus) -> str:
    """The answer as one line."""
    weights = format_like(found.weights_bytes, gpus.unit)
    if found.fits:
        first, *more = _fits(found)
        counts = [f"{first.requests:,} requests of {format_tokens(first.context_tokens)}"]
        counts += [f"{fit.requests:,} of {format_tokens(fit.context_tokens)}" for fit in more]
        return (
            f"{found.gpus} hold {found.model} ({weights} of weights) and {' or '.join(counts)} "
            f"tokens at once, with {found.chosen.layout}."
        )
    first = _fits(found)[0]
    asked = found.asked_requests or 1
    what = f"{asked:,} request{'' if asked == 1 else 's'} of {format_tokens(first.context_tokens)}"
    room = f"there is room for {first.requests:,}" if first.requests else "not one fits"
    rank = found.chosen.rank
    if rank is not None and rank.left <= 0:
        share = format_like(rank.weights, gpus.unit)
        room = f"the weights are {weights}, {share} of them on each GPU"
    advice = "no number of this GPU would"
    if found.needed_gpus is not None and found.needed_gpus > found.count:
        advice = f"{found.needed_gpus} x {gpus.gpu.name} would, with EP and data-parallel attention"
    elif found.needed_gpus is not None:
        advice = "with data-parallel attention (no --tp, no --pp) they would"
    return f"{found.model} with {what} tokens does not fit on {found.gpus}: {room}; {advice}."


def _fits(found: Deployment) -> tuple[Fit, ...]:
    return found.chosen.fits


def report(found: Deployment, gpus: Gpus, *, as_json: bool) -> None:
    """Prints it, or one JSON object with its answer."""
    if as_json:
        typer.echo(json.dumps({"answer": answer(found, gpus), **found.to_dict()}, indent=2))
    else:
        print_deployment(found, gpus)


def print_deployment(found: Deployment, gpus: Gpus) -> None:
    """The answer, a GPU's memory, requests next to those of other caches, other layouts."""
    console = Console()
    console.print(Text(answer(found, gpus), style="bold"), soft_wrap=True)
    if found.chosen.rank is not None:
        _print_rank(console, found, gpus)
    _print_requests(console, found)
    _print_layouts(console, found)
    if found.tier is not None:
        print_tier(found.tier)
    for note in notes(found):
        console.print(Text(note, style="dim"), soft_wrap=True)


def _print_rank(console: Console, found: Deployment, gpus: Gpus) -> None:
    rank = found.chosen.rank
    assert rank is not None
    table = table_of(f"each GPU, {found.chosen.layout}", "", "share")
    for what, size in (
        ("weights", rank.weights),
        ("activations", rank.activations),
        ("workspace, step buffers, snapshots", rank.workspace),
        ("left for requests", max(0, rank.left)),
    ):
        if size or what != "activations":
            table.add_row(what, format_like(size, gpus.unit), f"{size / rank.memory:.1%}")
    console.print(table)


def _print_requests(console: Console, found: Deployment) -> None:
    fits = _fits(found)
    hosted = any(fit.with_host_memory is not None for fit in fits)
    peers = list(dict.fromkeys(name for fit in fits for name in fit.peers))
    headers = ["dsv4", *(["with host memory"] if hosted else []), *peers]
    table = table_of("requests of … tokens at once", *headers)
    for fit in fits:
        row = [format_tokens(fit.context_tokens), f"{fit.requests:,}"]
        if hosted:
            row.append(f"{fit.with_host_memory or 0:,}")
        for low, high in fit.peers.values():
            row.append(f"{low:,}" if low == high else f"{low:,} to {high:,}")
        table.add_row(*row)
    console.print(table)


def _print_layouts(console: Console, found: Deployment) -> None:
    columns = [format_tokens(fit.context_tokens) for fit in _fits(found)]
    table = table_of("layout", "cache of a GPU", *columns)
    for each in (found.chosen, *found.others):
        table.add_row(each.layout, *_layout_row(each, len(columns)))
    if found.others:
        console.print(table)


def _layout_row(each: LayoutFit, columns: int) -> list[str]:
    if each.why_not:
        return ["cannot be divided so", *[""] * columns]
    return [each.cache, *(f"{fit.requests:,}" for fit in each.fits)]


def notes(found: Deployment) -> list[str]:
    """What the figures are of, and what is not in them."""
    formats = ", ".join(
        f"{name.upper() if name[0] == 'f' else name} {size / 1e9:,.1f} GB"
        for name, size in found.weights_by_format.items()
        if size >= 5e7
    )
    said = []
    if formats:
        said.append(f"Weights: {formats}; derived from the config, not from files.")
    counted = (
        "The driver's memory and communication buffers are not counted"
        if found.chosen.rank is not None and found.chosen.rank.activations
        else "Activations (--activations), the driver's memory and communication buffers are not "
        "counted"
    )
    said.append(
        f"{counted}. Steps of up to {found.step_tokens:,} tokens, {found.snapshots} snapshots, and "
        f"any request may grow to the longest context."
    )
    if any(fit.peers for fit in _fits(found)):
        said.append(f"vLLM, SGLang: the same memory without workspace; {SOURCE}.")
    if any(fit.with_host_memory is not None for fit in _fits(found)):
        said.append("With host memory: a computed capacity, see docs/residency.md.")
    return said
