"""What simulations found, drawn: hit rate against memory, latency against replicas. Needs the extra
`dsv4[plot]`; torch-free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsv4.errors import InvalidInput
from dsv4.plots.style import INK, MUTED, dress_axes, new_figure, save_figure
from dsv4.simulate.cluster import Setup
from dsv4.simulate.results import Simulated

COLORS = ("#1d4ed8", "#c2410c", "#047857", "#7c3aed", "#b45309", "#0e7490", "#be185d", "#4d7c0f")
MEMORY, TTFT = "memory of a replica, GB", "time to the first token, p99, s"
Point = Callable[[Simulated], float]


def require_plot(path: str | Path, asked: Sequence[Setup], *, tries_replicas: bool = False) -> None:
    """What `plot_simulated` would refuse of these setups, before they are simulated.
    `tries_replicas`: their number is looked for. Raises InvalidInput where neither memories nor
    replicas differ, for a file that cannot be written, MissingExtra without matplotlib."""
    if not tries_replicas and not any(_panels(asked)):
        raise InvalidInput(
            "one memory and one number of replicas make no curve: give several, like "
            "--memory 20GB,40GB,80GB or --replicas 1,2,4,8"
        )
    path, known = Path(path), new_figure(1, 1).canvas.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in known:
        raise InvalidInput(f"--plot {path}: the name must end in one of .{', .'.join(known)}")
    if not path.absolute().parent.is_dir():
        raise InvalidInput(f"--plot {path}: {path.absolute().parent} is not a folder")


def plot_simulated(
    found: Sequence[Simulated], path: str | Path, *, title: str, waits: bool = False
) -> None:
    """Draws the hit rate against memory where memories differ, and the time to the first token
    against replicas where their numbers do, or nothing does; one line for each setup that is
    otherwise the same. With `waits` the time to the first token against memory too. Raises
    InvalidInput for a file that cannot be written, MissingExtra without matplotlib."""
    memories, replicas = _panels(found)
    draw = [_memory, *([_waits] if waits else [])] if memories else []
    draw += [_replicas] if replicas or not memories else []
    figure = new_figure(6.4 * len(draw) + 0.6, 5.0)
    for axes, panel in zip(figure.subplots(1, len(draw), squeeze=False)[0], draw, strict=True):
        panel(axes, found)
    figure.suptitle(title, x=0.02, ha="left", color=INK, fontweight="bold", fontsize=11)
    save_figure(figure, path)


def _panels(setups: Sequence[Setup | Simulated]) -> tuple[bool, bool]:
    """Whether memories differ, and whether numbers of replicas do."""
    memories = {each.memory_bytes for each in setups if each.memory_bytes is not None}
    return len(memories) > 1, len({each.replicas for each in setups}) > 1


def _memory(axes: Any, found: Sequence[Simulated]) -> None:
    _against_memory(axes, found, lambda each: 100 * each.hit_rate)
    _dress(axes, "hit rate against memory", MEMORY, "prompt tokens cached, %")
    _from_zero(axes)


def _waits(axes: Any, found: Sequence[Simulated]) -> None:
    _against_memory(axes, found, lambda each: each.ttft.p99)
    _dress_seconds(axes)
    _dress(axes, "latency against memory", MEMORY, TTFT)


def _replicas(axes: Any, found: Sequence[Simulated]) -> None:
    _lines(axes, found, "replicas", lambda each: each.replicas, lambda each: each.ttft.p99)
    _dress_seconds(axes)
    _dress(axes, "latency against replicas", "replicas", TTFT)


def _against_memory(axes: Any, found: Sequence[Simulated], y: Point) -> None:
    bounded = [each for each in found if each.memory_bytes is not None]
    _lines(axes, bounded, "memory_bytes", lambda each: (each.memory_bytes or 0) / 1e9, y)


def _dress_seconds(axes: Any) -> None:
    """Powers of ten, or, where all lie within one, numbers from 0 on."""
    values = _heights(axes)
    if min(values) > 0 and max(values) > 10 * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain())
    else:
        _from_zero(axes)


def _from_zero(axes: Any) -> None:
    axes.set_ylim(0, 1.08 * max(_heights(axes)) or 1)


def _heights(axes: Any) -> list[float]:
    return [float(at) for line in axes.get_lines() for at in line.get_ydata()]


def _lines(axes: Any, found: Sequence[Simulated], varied: str, x: Point, y: Point) -> None:
    groups: dict[tuple[tuple[str, object], ...], list[Simulated]] = {}
    for each in found:
        groups.setdefault(_setup_of(each, varied), []).append(each)
    differing = {
        name for name, _ in {pair for key in groups for pair in key}
        if len({dict(key)[name] for key in groups}) > 1
    }  # fmt: skip
    for nth, (key, members) in enumerate(groups.items()):
        members.sort(key=x)
        label = ", ".join(_word(name, value) for name, value in key if name in differing)
        axes.plot(
            [x(each) for each in members],
            [y(each) for each in members],
            color=COLORS[nth % len(COLORS)],
            linestyle="-" if nth < len(COLORS) else "--",
            linewidth=2,
            marker="o",
            markersize=4,
            label=label or None,
        )
    if differing:
        axes.legend(frameon=False, fontsize=8, labelcolor=INK)


def _setup_of(each: Simulated, varied: str) -> tuple[tuple[str, object], ...]:
    names = ("replicas", "memory_bytes", "host_bytes", "disk_bytes", "routing", "policy")
    kept = [(name, getattr(each, name)) for name in (*names, "residency") if name != varied]
    return tuple(kept)


def _word(name: str, value: object) -> str:
    match name, value:
        case "replicas", _:
            return f"{value} replica{'s' if value != 1 else ''}"
        case "memory_bytes", None:
            return "any memory"
        case (("memory_bytes" | "host_bytes" | "disk_bytes"), int(count)):
            kind = {"memory_bytes": "", "host_bytes": " host", "disk_bytes": " disk"}[name]
            return f"{count / 1e9:g} GB{kind}" if count else f"no{kind}"
        case "residency", _:
            return "residency" if value else "no residency"
    return str(value)


def _dress(axes: Any, title: str, x_label: str, y_label: str) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    ticks = sorted({float(at) for line in axes.get_lines() for at in line.get_xdata()})
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(_plain())
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel(x_label, color=MUTED)
    axes.set_ylabel(y_label, color=MUTED)
    dress_axes(axes)


def _plain() -> Any:
    """Numbers on a logarithmic axis as they are."""
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda at, _: f"{at:g}")
