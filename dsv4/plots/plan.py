"""Memory against context, drawn. Needs the extra `dsv4[plot]`; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput, is_whole
from dsv4.plots.style import INK, MUTED, dress_axes, new_figure, save_figure
from dsv4.units import format_bytes, format_tokens

DEFAULT_REQUESTS = (1, 4, 16, 64)
_SHORTEST_CONTEXT = 1024
_POINTS_PER_DOUBLING = 8
_LABELS_APART = 1.8
_LIMIT = "#c2410c"


def plot_plan(
    schema: CacheSchema,
    path: str | Path,
    *,
    memory_bytes: int | None = None,
    requests: Sequence[int] = DEFAULT_REQUESTS,
) -> None:
    """Draws what `requests` requests of equal context need, one curve per number, and saves it.

    The file's suffix chooses the kind (.png, .svg, .pdf). With `memory_bytes` a line marks the
    memory, and a dot on each curve the largest context that fits. Opens no window. Raises
    MissingExtra without matplotlib, and InvalidInput for counts below 1 and a file that cannot be
    written.
    """
    for count in (*requests, *(() if memory_bytes is None else (memory_bytes,))):
        if not is_whole(count) or count < 1:
            raise InvalidInput(f"cannot draw {count!r}: requests and memory must be at least 1")
    if not requests:
        raise InvalidInput("no number of requests to draw: give at least one")
    figure = new_figure(9, 5.4)
    _draw(figure.add_subplot(), schema, memory_bytes, sorted(set(requests)))
    save_figure(figure, path)


def requests_to_draw(asked: int | None) -> tuple[int, ...]:
    """The default curves and the requested one, without defaults whose label it would cover."""
    if asked is None:
        return DEFAULT_REQUESTS
    apart = (n for n in DEFAULT_REQUESTS if max(n, asked) >= _LABELS_APART * min(n, asked))
    return tuple(sorted({*apart, asked}))


def _draw(axes: Any, schema: CacheSchema, memory_bytes: int | None, counts: list[int]) -> None:
    contexts = _contexts(schema)
    for rank, count in enumerate(counts):
        needed = [count * schema.bytes.of_request(tokens) for tokens in contexts]
        color = _shade(rank, len(counts))
        axes.plot(contexts, needed, color=color, linewidth=2)
        axes.annotate(
            f"{count:,} request{'s' if count > 1 else ''}",
            (contexts[-1], needed[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontweight="bold",
        )
        if memory_bytes is not None:
            _mark_largest_context(axes, schema, memory_bytes, count, contexts, color)
    lowest = counts[0] * schema.bytes.of_request(contexts[0])
    highest = max(counts[-1] * schema.bytes.of_request(contexts[-1]), memory_bytes or 0)
    _dress(axes, schema, contexts, min(lowest, memory_bytes or lowest), highest)
    if memory_bytes is not None:
        axes.axhline(memory_bytes, color=_LIMIT, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(
            f"{format_bytes(memory_bytes)} of memory",
            (contexts[0], memory_bytes),
            xytext=(4, 4),
            textcoords="offset points",
            color=_LIMIT,
            fontweight="bold",
        )


def _mark_largest_context(
    axes: Any,
    schema: CacheSchema,
    memory_bytes: int,
    count: int,
    contexts: list[int],
    color: tuple[float, float, float],
) -> None:
    """A dot where the curve meets the memory, with the context it has there."""
    for_blocks = memory_bytes // count - schema.bytes.per_request
    if for_blocks < 0 or not schema.bytes.block:
        return
    tokens = for_blocks // schema.bytes.block * schema.block_tokens
    if not contexts[0] <= tokens < contexts[-1]:
        return
    axes.plot([tokens], [memory_bytes], "o", color=color, markersize=7, zorder=3)
    axes.annotate(
        _rounded_tokens(tokens),
        (tokens, memory_bytes),
        xytext=(5, -14),
        textcoords="offset points",
        color=color,
        fontsize=9,
    )


def _dress(axes: Any, schema: CacheSchema, contexts: list[int], lowest: int, highest: int) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = [1 << power for power in range(contexts[0].bit_length() - 1, 64)]
    ticks = [tick for tick in ticks if contexts[0] <= tick <= contexts[-1]]
    axes.set_xticks(ticks, [format_tokens(tick) for tick in ticks])
    axes.set_xlim(contexts[0], max(contexts[-1], 2 * contexts[0]))
    first, last = lowest.bit_length() - 1, highest.bit_length()
    # on a long axis each second doubling keeps the labels apart: 1, 4, 16, 64, 256 of a unit
    powers = [p for p in range(first, last + 1) if last - first <= 8 or p % 2 == 0]
    axes.set_yticks([1 << power for power in powers], [format_bytes(1 << p) for p in powers])
    axes.set_ylim(lowest / 1.6, highest * 1.6)
    dress_axes(axes)
    axes.set_xlabel("context of each request (tokens)", color=INK)
    axes.set_ylabel("KV cache memory", color=INK)
    axes.set_title(
        f"{schema.model.name}: {schema.bytes.per_token:,.0f} bytes per token "
        f"+ {format_bytes(schema.bytes.per_request)} per request",
        loc="left",
        color=INK,
        fontweight="bold",
        pad=26,
    )
    axes.text(
        0,
        1.025,
        f"entries {schema.entry_format.name}, index keys {schema.index_format.name}, "
        f"blocks of {schema.block_tokens} tokens, {schema.max_draft_tokens} draft tokens",
        transform=axes.transAxes,
        color=MUTED,
        fontsize=9,
    )


def _contexts(schema: CacheSchema) -> list[int]:
    """Contexts from about 1k to the schema's longest, evenly spaced on a log axis. Those between
    are whole blocks, so that the curve shows the trend and not the steps of the sampling."""
    longest = schema.max_context
    shortest = min(_SHORTEST_CONTEXT, longest)
    points = (longest // shortest).bit_length() * _POINTS_PER_DOUBLING
    spread = (shortest * (longest / shortest) ** (point / points) for point in range(points))
    whole_blocks = {schema.blocks_for(round(tokens)) * schema.block_tokens for tokens in spread}
    inner = sorted(tokens for tokens in whole_blocks if shortest < tokens < longest)
    return [shortest, *inner, longest]


def _rounded_tokens(tokens: int) -> str:
    if tokens < 1024:
        return f"{tokens}"
    if tokens < 1000 * 1024:
        return f"{tokens / 1024:.3g}k"
    return f"{tokens / 1024**2:.3g}M"


def _shade(rank: int, count: int) -> tuple[float, float, float]:
    """From light to dark blue: more requests, darker."""
    light, dark = (0.42, 0.68, 0.90), (0.05, 0.18, 0.42)
    share = rank / (count - 1) if count > 1 else 1.0
    red, green, blue = (a + (b - a) * share for a, b in zip(light, dark, strict=True))
    return red, green, blue
