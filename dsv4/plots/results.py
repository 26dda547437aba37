"""Benchmark results, drawn: writes, attention, whole steps, decoding with transformers. Needs
`dsv4[plot]`; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dsv4.bench import BenchResult
from dsv4.errors import InvalidInput
from dsv4.plots.style import INK, MUTED, dress_axes, new_figure, save_figure
from dsv4.units import format_tokens

# drawn against the batch, a row of panels each; a column for each model
BY_BATCH = {
    "writes": "cache writes of one layer, a decode step",
    "attention": "attention of one layer, a decode step",
    "decode_step": "a whole decode step, all layers",
}
# drawn against the context, beside the peer of the same run: time and bytes
BY_CONTEXT = "transformers"
SUITES = (*BY_BATCH, BY_CONTEXT)
_COLORS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#be185d", "#0891b2")
_OTHERS = ((0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_PANEL_INCHES = (6.4, 4.4)
_BAR = 0.38

Lines = dict[str, list[BenchResult]]
Panel = Callable[[Any], None]


def plot_results(
    results: Sequence[BenchResult], path: str | Path, *, suites: Sequence[str] = SUITES
) -> None:
    """Draws a row of panels for each of `suites` that the results have, and saves it.

    Against the batch: µs, one line per series, others dashed beside it; series with a single batch
    (a prefill chunk) are left out. Raises MissingExtra without matplotlib, and InvalidInput for an
    unknown suite, where nothing can be drawn, or where the file cannot be written.
    """
    if unknown := [suite for suite in suites if suite not in SUITES]:
        raise InvalidInput(f"cannot draw suite {unknown[0]!r}: choose of {', '.join(SUITES)}")
    drawn = [result for result in results if result.suite in suites]
    models = [m for m in sorted({r.model for r in drawn}) if any(_panels(drawn, m).values())]
    by_batch = [_panels(drawn, model) for model in models]
    rows = [
        row
        for suite in suites
        if any(row := _by_context(drawn) if suite == BY_CONTEXT else [p[suite] for p in by_batch])
    ]
    if not rows:
        raise InvalidInput(
            f"nothing to draw: no series of {', '.join(suites)} has two points; run the whole "
            f"suite with python -m benchmarks.run"
        )
    columns = max(map(len, rows))
    figure = new_figure(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * len(rows))
    for nth, row in enumerate(rows):
        for column, panel in enumerate(row, start=1):
            if panel is not None:
                panel(figure.add_subplot(len(rows), columns, nth * columns + column))
    commits = ", ".join(sorted({r.commit for r in drawn}))
    gpus = ", ".join(sorted({r.gpu for r in drawn}))
    figure.suptitle(f"{gpus}, commit {commits}", color=MUTED, fontsize=9, x=0.01, ha="left")
    save_figure(figure, path)


# ---- against the batch ---------------------------------------------------------------------------


def _panels(results: Sequence[BenchResult], model: str) -> dict[str, Panel | None]:
    """By suite; None where the model has no line of it."""
    found = {suite: _lines(results, suite, model) for suite in BY_BATCH}
    return {
        suite: partial(_draw, suite=suite, model=model, lines=lines) if lines else None
        for suite, lines in found.items()
    }


def _lines(results: Sequence[BenchResult], suite: str, model: str) -> Lines:
    lines: Lines = {}
    for result in results:
        if result.suite == suite and result.model == model:
            lines.setdefault(result.series, []).append(result)
    ordered = {name: sorted(line, key=lambda r: r.batch) for name, line in lines.items()}
    return {name: line for name, line in ordered.items() if line[0].batch < line[-1].batch}


def _draw(axes: Any, *, suite: str, model: str, lines: Lines) -> None:
    batches = sorted({r.batch for line in lines.values() for r in line})
    styles: dict[str, Any] = {}
    for rank, (series, line) in enumerate(lines.items()):
        color = _COLORS[rank % len(_COLORS)]
        axes.plot(
            [r.batch for r in line],
            [r.microseconds for r in line],
            color=color,
            linewidth=2,
            marker="o",
            markersize=3.5,
            label=series,
        )
        for name, points in _others(line).items():
            style = styles.setdefault(name, _OTHERS[len(styles) % len(_OTHERS)])
            axes.plot(*zip(*points, strict=True), color=color, linewidth=1, linestyle=style)
    for name, style in styles.items():
        axes.plot([], [], color=MUTED, linewidth=1, linestyle=style, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    ticks = _ticks_us(*axes.get_ylim())
    axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
    dress_axes(axes)
    axes.set_xlabel("requests", color=INK)
    axes.set_ylabel("µs", color=INK)
    axes.set_title(f"{model}: {BY_BATCH[suite]}", loc="left", color=INK, fontsize=10)
    axes.legend(frameon=False, fontsize=7.5, labelcolor=INK)


def _others(line: list[BenchResult]) -> dict[str, list[tuple[int, float]]]:
    """Other libraries along a series: measured beside it, and as published."""
    points: dict[str, list[tuple[int, float]]] = {}
    for result in line:
        for name, time_us in result.peers_us.items():
            points.setdefault(name, []).append((result.batch, time_us))
        for name, time_us in result.anchors_us.items():
            points.setdefault(f"{name}, published", []).append((result.batch, time_us))
    return points


def _ticks_us(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … between two limits."""
    ladder = (step * 10.0**power for power in range(-2, 9) for step in (1, 2, 5))
    return [tick for tick in ladder if low <= tick <= high]


# ---- against the context -------------------------------------------------------------------------


def _by_context(results: Sequence[BenchResult]) -> list[Panel | None]:
    found = [r for r in results if r.suite == BY_CONTEXT and r.context is not None]
    found.sort(key=lambda r: r.context or 0)
    if len(found) < 2:
        return []
    labels = [format_tokens(r.context or 0) for r in found]
    times = [{"dsv4": r.microseconds / 1e3, **_milliseconds(r)} for r in found]
    sizes = [{name: count / 2**20 for name, count in r.cache_bytes.items()} for r in found]
    steps = [{name: count / 2**20 for name, count in r.step_bytes.items()} for r in found]
    what = found[0].note.partition(";")[0]
    return [
        partial(
            _bars, title=f"a decoded token, {what}", unit="ms", labels=labels, values=times, more=[]
        ),
        partial(
            _bars,
            title="cache, and hatched what a step allocates besides",
            unit="MiB",
            labels=labels,
            values=sizes,
            more=steps,
        ),
    ]


def _milliseconds(result: BenchResult) -> dict[str, float]:
    return {name: time_us / 1e3 for name, time_us in result.peers_us.items()}


def _bars(
    axes: Any,
    *,
    title: str,
    unit: str,
    labels: list[str],
    values: list[dict[str, float]],
    more: list[dict[str, float]],
) -> None:
    """A group of bars for each label, one bar per library; `more` is stacked on top."""
    for rank, name in enumerate(values[0]):
        places = [at + (rank - (len(values[0]) - 1) / 2) * _BAR for at in range(len(labels))]
        heights = [value[name] for value in values]
        tops = [value[name] for value in more] if more else [0.0] * len(labels)
        color = _COLORS[rank % len(_COLORS)]
        axes.bar(places, heights, _BAR, color=color, label=name)
        axes.bar(places, tops, _BAR, bottom=heights, color="none", edgecolor=color, hatch="////")
        for place, height, top in zip(places, heights, tops, strict=True):
            text = f"{height + top:.3g}"
            axes.annotate(text, (place, height + top), ha="center", va="bottom", fontsize=8)
    axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend
    axes.set_xticks(range(len(labels)), [f"{label} tokens" for label in labels])
    dress_axes(axes)
    axes.set_ylabel(unit, color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.legend(frameon=False, fontsize=8, labelcolor=INK, loc="upper left")
