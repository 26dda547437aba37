"""The demo as a picture: bytes step by step, and what a cached prefix saves. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsv4.demo.events import PrefixResult, StepEvent
from dsv4.plots.style import INK, MUTED, dress_axes

_OURS, _TRAINED, _THEIRS = "#0b5cad", "#15803d", "#c2410c"


def draw_demo(figure: Any, steps: Sequence[StepEvent], prefix: PrefixResult | None) -> None:
    """Into an empty figure; `steps` are those of one part with this cache."""
    if prefix is None:
        _draw_bytes(figure.subplots(), steps)
        return
    bytes_axes, prefix_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_bytes(bytes_axes, steps)
    _draw_prefix(prefix_axes, prefix)


def _draw_bytes(axes: Any, steps: Sequence[StepEvent]) -> None:
    states = [(event, event.cache) for event in steps if event.cache is not None]
    at = [event.step for event, _ in states]
    series = {
        "dsv4, fp32": (_OURS, [cache.block_bytes + cache.slot_bytes for _, cache in states]),
        "dsv4, fp8 and fp4": (_TRAINED, [cache.trained_bytes for _, cache in states]),
    }
    theirs = [event.transformers_bytes for event, _ in states]
    if None not in theirs:
        series["transformers, fp32"] = (_THEIRS, [held or 0 for held in theirs])
    for name, (color, held) in series.items():
        axes.step(at, held, where="post", color=color, linewidth=2)
        axes.annotate(
            name,
            (at[-1], held[-1]),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            color=color,
            fontweight="bold",
        )
    for event, cache in states:
        if cache.closed.get("hca"):
            axes.axvline(event.step, color=MUTED, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} MB")
    axes.set_xlabel("tokens generated; dotted: an HCA group closes", color=MUTED)
    _title(axes, f"{len(states[0][0].lengths)} requests in one batch")
    dress_axes(axes)


def _draw_prefix(axes: Any, prefix: PrefixResult) -> None:
    labels = ("first prompt", "second prompt")
    seconds = (prefix.first_seconds, prefix.second_seconds)
    ran = (prefix.first_run_tokens, prefix.second_run_tokens)
    bars = axes.bar(labels, seconds, color=(MUTED, _OURS), width=0.55)
    axes.bar_label(bars, [f"{n} tokens run" for n in ran], padding=3, color=INK)
    axes.set_ylabel("seconds to the first token", color=MUTED)
    axes.margins(y=0.15)
    _title(axes, f"{prefix.shared_tokens} tokens in common")
    dress_axes(axes)


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", color=INK, fontweight="bold")
