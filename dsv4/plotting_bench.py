"""Benchmark results, drawn: writes, attention and whole steps. Needs `dsv4[plot]`; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4.bench import BenchResult
from dsv4.errors import InvalidInput
from dsv4.plotting import INK, MUTED, dress_axes, new_figure, save_figure

# what is drawn, a row of panels each; a column for each model
SUITES = {
    "writes": "cache writes of one layer, a decode step",
    "attention": "attention of one layer, a decode step",
    "decode_step": "a whole decode step, all layers",
}
_COLORS = ("#0b5cad", "#c2410c", "#15803d", "#7e22ce", "#b45309", "#0f766e")
_OTHERS = ((0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_PANEL_INCHES = (6.4, 4.4)

Lines = dict[str, list[BenchResult]]


def plot_results(results: Sequence[BenchResult], path: str | Path) -> None:
    """Draws µs against batch, one line a series, others dashed beside it, and saves it.

    Series with a single batch (a prefill chunk) are left out. Raises MissingExtra without
    matplotlib, and InvalidInput where nothing can be drawn or the file cannot be written.
    """
    panels = {
        (suite, model): lines
        for suite in SUITES
        for model in sorted({r.model for r in results})
        if (lines := _lines(results, suite, model))
    }
    if not panels:
        raise InvalidInput(
            f"nothing to draw: no series of {', '.join(SUITES)} has two batches; run the whole "
            f"suite with python -m benchmarks.run"
        )
    models = sorted({model for _, model in panels})
    suites = [suite for suite in SUITES if any(suite == s for s, _ in panels)]
    figure = new_figure(_PANEL_INCHES[0] * len(models), _PANEL_INCHES[1] * len(suites))
    for (suite, model), lines in panels.items():
        place = suites.index(suite) * len(models) + models.index(model) + 1
        _draw(figure.add_subplot(len(suites), len(models), place), suite, model, lines)
    commits = ", ".join(sorted({r.commit for r in results}))
    gpus = ", ".join(sorted({r.gpu for r in results}))
    figure.suptitle(f"{gpus}, commit {commits}", color=MUTED, fontsize=9, x=0.01, ha="left")
    save_figure(figure, path)


def _lines(results: Sequence[BenchResult], suite: str, model: str) -> Lines:
    lines: Lines = {}
    for result in results:
        if result.suite == suite and result.model == model:
            lines.setdefault(result.series, []).append(result)
    ordered = {name: sorted(line, key=lambda r: r.batch) for name, line in lines.items()}
    return {name: line for name, line in ordered.items() if line[0].batch < line[-1].batch}


def _draw(axes: Any, suite: str, model: str, lines: Lines) -> None:
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
    axes.set_title(f"{model}: {SUITES[suite]}", loc="left", color=INK, fontsize=10)
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
