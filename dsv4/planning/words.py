"""An answer in words. Torch-free."""

from __future__ import annotations

from dsv4.planner import TierSizing
from dsv4.planning.deployment import Deployment, Fit
from dsv4.planning.gpus import Gpus
from dsv4.planning.peers import SOURCE
from dsv4.units import format_like, format_tokens


def answer(found: Deployment, gpus: Gpus, disk: str | None = None) -> str:
    """The answer as one line; the size of a `disk` as it was written."""
    said = [_fit_or_not(found, gpus)]
    if found.tier is not None:
        said.append(tier_sentence(found.tier, disk))
    if found.weights_formats and found.weights_formats[-1] in ("bf16", "fp32"):
        # what a plain `save_pretrained` says of a checkpoint that will be quantised
        said.append(
            f"Weights count as {_formats(found)}, because {found.weights_from}: give --weights "
            f"150GB, or the config.json of the checkpoint that will run, if they are smaller."
        )
    return " ".join(said)


def tier_sentence(below: TierSizing, written: str | None = None) -> str:
    """What a tier keeps, in the unit of `written`."""
    how = "without snapshots"
    if below.snapshot_period_tokens:
        how = f"with a snapshot every {below.snapshot_period_tokens:,}"
    return (
        f"A tier of {format_like(below.tier_bytes, written)} keeps {below.tokens:,} tokens {how}: "
        f"{below.bytes_per_token:,.2f} bytes per token."
    )


def _formats(found: Deployment) -> str:
    return " and ".join(map(_format_name, found.weights_formats))


def _format_name(name: str) -> str:
    return name.upper() if name.startswith("fp") else name


def _fit_or_not(found: Deployment, gpus: Gpus) -> str:
    weights = format_like(found.weights_bytes, gpus.unit)
    in_formats = f" in {_formats(found)}" if found.weights_formats else ", as given, split evenly"
    if found.fits:
        first, *more = _fits(found)
        counts = [f"{_count(first)} requests of {format_tokens(first.context_tokens)}"]
        counts += [f"{_count(fit)} of {format_tokens(fit.context_tokens)}" for fit in more]
        return (
            f"{found.gpus} hold {found.model} ({weights} of weights{in_formats}) and "
            f"{' or '.join(counts)} tokens at once, with {found.chosen.layout}."
        )
    first = _fits(found)[0]
    asked = found.asked_requests or 1
    what = f"{asked:,} request{'' if asked == 1 else 's'} of {format_tokens(first.context_tokens)}"
    room = f"there is room for {first.requests:,}" if first.requests else "not one fits"
    rank = found.chosen.rank
    if rank is not None and rank.left <= 0:
        share, extra, whole = (
            format_like(each, gpus.unit) for each in (rank.weights, rank.activations, rank.memory)
        )
        if rank.activations:
            share += f", and {extra} of activations"
        room = f"of {weights} of weights{in_formats} each GPU has to hold {share}, and has {whole}"
    advice = "no number of this GPU would"
    if found.needed_gpus is not None and found.needed_gpus > found.count:
        advice = f"{found.needed_gpus} x {gpus.gpu.name} would, with EP and data-parallel attention"
    elif found.needed_gpus is not None:
        advice = "with data-parallel attention (no --tp, no --pp) they would"
    return f"{found.model} with {what} tokens does not fit on {found.gpus}: {room}; {advice}."


def _count(fit: Fit) -> str:
    if fit.with_host_memory is None or fit.with_host_memory <= fit.requests:
        return f"{fit.requests:,}"
    return f"{fit.requests:,} ({fit.with_host_memory:,} with entries in host memory)"


def _fits(found: Deployment) -> tuple[Fit, ...]:
    return found.chosen.fits


def notes(found: Deployment) -> list[str]:
    """What the figures are of, and what is not in them."""
    formats = ", ".join(
        f"{_format_name(name)} {size / 1e9:,.1f} GB"
        for name, size in found.weights_by_format.items()
        if size >= 5e7
    )
    lines = []
    if formats:
        lines.append(
            f"Weights: {formats}; derived, not read from files: {found.weights_from}. --weights "
            f"150GB replaces them."
        )
    counted = (
        "The driver's memory and communication buffers are not counted"
        if found.chosen.rank is not None and found.chosen.rank.activations
        else "Activations (--activations), the driver's memory and communication buffers are not "
        "counted"
    )
    lines.append(
        f"{counted}. Steps of up to {found.step_tokens:,} tokens, {found.snapshots} snapshots, and "
        f"any request may grow to the longest context."
    )
    if any(fit.peers for fit in _fits(found)):
        lines.append(f"vLLM, SGLang: the same memory without workspace; {SOURCE}.")
    if any(fit.with_host_memory is not None for fit in _fits(found)):
        lines.append("With host memory: a computed capacity, see docs/residency.md.")
    return lines
