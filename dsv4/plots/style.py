"""What all plots share: a figure without a window, its colours, axes without a frame, and saving.
Needs the extra `dsv4[plot]`; torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsv4.errors import InvalidInput
from dsv4.extras import needed_by

INK, MUTED, _GRID = "#1f2430", "#6b7280", "#e5e7eb"


def new_figure(width_inches: float, height_inches: float) -> Any:
    """An empty figure that no window shows. Raises MissingExtra without matplotlib."""
    with needed_by("a plot"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.14)
    figure = Figure(figsize=(width_inches, height_inches), dpi=150, layout=layout)
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: str | Path) -> None:
    """Raises InvalidInput for a suffix matplotlib does not know or a place it cannot write to."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot write the plot to {path}: {error}") from error


def dress_axes(axes: Any) -> None:
    """Light grid, no frame."""
    axes.minorticks_off()
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)
