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

# drawn against the batch size, a panel for each series, together with what others take
BY_SERIES = {
    "writes": "cache writes of one layer, a decode step",
    "attention": "attention of one layer, a decode step",
}
# drawn against the batch size, all series of a model in one panel
BY_MODEL = {"decode_step": "a whole decode step, all layers"}
# drawn against the context, with the peer of the same run: time and bytes
BY_CONTEXT = "transformers"
SUITES = (*BY_SERIES, *BY_MODEL, BY_CONTEXT)
# a series whose name has this word is drawn in the panel of the one without it
VARIANTS = ("online", "batch-invariant")
_COLORS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#be185d", "#0891b2")
_OTHERS_COLORS = ("#c2410c", "#15803d", "#be185d")
_VARIANT_COLORS = dict(zip(VARIANTS, ("#7e22ce", "#0891b2"), strict=True))
_APART = (0, (5, 2))
_PANEL_INCHES = (5.2, 3.7)
_BAR = 0.38
_MS_FROM_US = 10_000  # a panel that reaches this far is in ms

Lines = dict[str, list[BenchResult]]
Legend = dict[str, Any]
Panel = Callable[[Any, Legend], None]


def plot_results(
    results: Sequence[BenchResult],
    path: str | Path,
    *,
    suites: Sequence[str] = SUITES,
    note: str = "",
) -> None:
    """Draws panels for each of `suites` that the results have, and saves them.

    Against the batch size: ours solid, others thin, those that were not in this run dashed; series
    with a single batch size (a prefill chunk) are left out. A colour is a library. `note` is
    printed below the name of the GPU. Raises MissingExtra without matplotlib, and InvalidInput for
    an unknown suite, if nothing can be drawn, or if the file cannot be written.
    """
    if unknown := [suite for suite in suites if suite not in SUITES]:
        raise InvalidInput(f"cannot draw suite {unknown[0]!r}: choose of {', '.join(SUITES)}")
    drawn = [result for result in results if result.suite in suites]
    panels = [
        panel
        for suite in suites
        for panel in (_by_context(drawn) if suite == BY_CONTEXT else _by_batch(drawn, suite))
    ]
    if not panels:
        raise InvalidInput(
            f"nothing to draw: no series of {', '.join(suites)} has two points; run the whole "
            f"suite with python -m benchmarks.run"
        )
    columns = 2 if len(panels) in (2, 4) else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    figure = new_figure(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows + 0.6)
    legend: Legend = {}
    for nth, panel in enumerate(panels, start=1):
        panel(figure.add_subplot(rows, columns, nth), legend)
    if legend:
        ours_first = sorted(legend, key=lambda name: not name.startswith("dsv4"))
        figure.legend(
            [legend[name] for name in ours_first],
            ours_first,
            loc="outside lower center",
            ncols=len(legend) if columns > 1 else 1,
            frameon=False,
            fontsize=10,
            labelcolor=INK,
        )
    commits = ", ".join(sorted({r.run.commit for r in drawn}))
    gpus = ", ".join(sorted({r.run.gpu for r in drawn}))
    title = "\n".join(filter(None, (f"{gpus}, commit {commits}", note)))
    figure.suptitle(title, color=MUTED, fontsize=10, x=0.01, ha="left")
    save_figure(figure, path)


# ---- against the batch ---------------------------------------------------------------------------


def _by_batch(results: Sequence[BenchResult], suite: str) -> list[Panel]:
    panels: list[Panel] = []
    for model in sorted({r.model for r in results if r.suite == suite}):
        lines = _lines(results, suite, model)
        if suite in BY_MODEL:
            if lines:
                panels.append(
                    partial(_draw_model, title=f"{model}: {BY_MODEL[suite]}", lines=lines)
                )
            continue
        for family in dict.fromkeys(_family(series) for series in lines):
            title = f"{model}: {family.removeprefix(model.removeprefix('v4-') + ' ')}\n"
            own = {series: line for series, line in lines.items() if _family(series) == family}
            panels.append(partial(_draw_series, title=title + BY_SERIES[suite], lines=own))
    return panels


def _lines(results: Sequence[BenchResult], suite: str, model: str) -> Lines:
    lines: Lines = {}
    for result in results:
        if result.suite == suite and result.model == model:
            lines.setdefault(result.series, []).append(result)
    ordered = {name: sorted(line, key=lambda r: r.batch) for name, line in lines.items()}
    return {name: line for name, line in ordered.items() if line[0].batch < line[-1].batch}


def _variant(series: str) -> str | None:
    return next((word for word in VARIANTS if word in series.split()), None)


def _family(series: str) -> str:
    return " ".join(word for word in series.split() if word not in VARIANTS)


def _draw_series(axes: Any, legend: Legend, *, title: str, lines: Lines) -> None:
    """Ours and its variants, and others once: for each variant they would be the same again."""
    family = _family(next(iter(lines)))
    for series, line in lines.items():
        variant = _variant(series)
        name = "dsv4" if variant is None else f"dsv4, {variant}"
        color = _COLORS[0] if variant is None else _VARIANT_COLORS[variant]
        legend.setdefault(name, _own_line(axes, line, color))
        if variant is not None and family in lines:
            continue
        for other, (points, style) in _others(line).items():
            known = legend.get(other)
            others = sum(name.partition(",")[0] != "dsv4" for name in legend)
            color = known.get_color() if known else _OTHERS_COLORS[others % len(_OTHERS_COLORS)]
            (drawn,) = axes.plot(
                *zip(*points, strict=True), color=color, linewidth=1.3, linestyle=style, marker="o",
                markersize=2.5,
            )  # fmt: skip
            legend.setdefault(other, drawn)
    _dress(axes, title, lines)


def _draw_model(axes: Any, legend: Legend, *, title: str, lines: Lines) -> None:
    """A line for each series, named where it ends."""
    for rank, (series, line) in enumerate(lines.items()):
        color = _COLORS[rank % len(_COLORS)]
        _own_line(axes, line, color)
        end = (line[-1].batch, line[-1].microseconds)
        axes.annotate(
            series, end, xytext=(5, 0), textcoords="offset points", color=color, fontsize=9,
            va="center",
        )  # fmt: skip
    axes.margins(x=0.18)
    _dress(axes, title, lines)


def _own_line(axes: Any, line: list[BenchResult], color: str) -> Any:
    batches, times = [r.batch for r in line], [r.microseconds for r in line]
    (drawn,) = axes.plot(batches, times, color=color, linewidth=2.2, marker="o", markersize=4)
    return drawn


def _dress(axes: Any, title: str, lines: Lines) -> None:
    batches = sorted({r.batch for line in lines.values() for r in line})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(batches, [str(batch) for batch in batches])
    low, high = axes.get_ylim()
    unit, factor = ("ms", 1e3) if high >= _MS_FROM_US else ("µs", 1.0)
    ticks = _ticks_us(low, high)
    axes.set_yticks(ticks, [f"{tick / factor:,g}" for tick in ticks])
    dress_axes(axes)
    axes.set_xlabel("requests", color=INK)
    axes.set_ylabel(unit, color=INK)
    axes.set_title(title, loc="left", color=INK, fontsize=10)


def _others(line: list[BenchResult]) -> dict[str, tuple[list[tuple[int, float]], Any]]:
    """Other libraries along a series and how they are drawn: measured in the same run, or
    separately."""
    points: dict[str, tuple[list[tuple[int, float]], Any]] = {}
    for result in line:
        for name, time_us in result.peers_us.items():
            points.setdefault(name, ([], "-"))[0].append((result.batch, time_us))
        for name, time_us in result.anchors_us.items():
            apart = f"{name}, measured separately"
            points.setdefault(apart, ([], _APART))[0].append((result.batch, time_us))
    return points


def _ticks_us(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, … between two limits."""
    ladder = (step * 10.0**power for power in range(-2, 9) for step in (1, 2, 5))
    return [tick for tick in ladder if low <= tick <= high]


# ---- against the context -------------------------------------------------------------------------


def _by_context(results: Sequence[BenchResult]) -> list[Panel]:
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
            title="cache, and hatched what a step allocates in addition",
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
    legend: Legend,
    *,
    title: str,
    unit: str,
    labels: list[str],
    values: list[dict[str, float]],
    more: list[dict[str, float]],
) -> None:
    """A group of bars for each label, one bar per library; `more` is stacked on top. The panel has
    a legend of its own, because its colours differ."""
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
