"""Benchmark results, drawn: what the picture says, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import pytest

from dsv4.errors import InvalidInput
from dsv4.plots.results import plot_results
from tests.support.results import BASE, points


def test_plot_shows_what_is_in_the_file(tmp_path: Path) -> None:
    """An .svg keeps its texts."""
    drawn = [*points("attention", "v4-pro", (1, 16)), *points("writes", "v4-flash", (1,))]
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_results(drawn, tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text(encoding="utf-8")
    for word in (
        "v4-pro: csa flush",
        "attention",
        "FlashMLA",
        "SGLang, measured separately",
        "abc1234",
    ):
        assert word in text
    assert "v4-flash" not in text, "a single point is no line"


def test_plot_of_decoding_shows_time_and_bytes(tmp_path: Path) -> None:
    drawn = [
        replace(BASE, case=f"decode at {n}", suite="transformers", context=n, microseconds=5000.0,
                peers_us={"transformers": 27_000.0}, note="5 layers; more",
                cache_bytes={"dsv4": n << 7, "transformers": n << 8},
                step_bytes={"dsv4": 0, "transformers": n})
        for n in (65_536, 8192)
    ]  # fmt: skip
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_results(
            [*drawn, *points("writes", "v4-flash", (1, 8))],
            tmp_path / "r.svg",
            suites=["transformers"],
        )
    text = (tmp_path / "r.svg").read_text(encoding="utf-8")
    for word in ("a decoded token, 5 layers", "8k tokens", "64k tokens", ">27<", ">16.1<", "MiB"):
        assert word in text
    assert text.index("8k tokens") < text.index("64k tokens")
    assert "cache writes" not in text


def test_nothing_to_draw_and_nowhere_to_write_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing to draw"):
        plot_results(points("writes", "v4-flash", (1,)), tmp_path / "x.png")
    with pytest.raises(InvalidInput, match="cannot draw suite 'gather': choose of writes"):
        plot_results(points("writes", "v4-flash", (1, 8)), tmp_path / "x.png", suites=["gather"])
    with pytest.raises(InvalidInput, match="cannot write the plot"):
        plot_results(points("writes", "v4-flash", (1, 8)), tmp_path / "x.nonsense")


def test_a_variant_stands_beside_its_series_and_others_stand_there_once(tmp_path: Path) -> None:
    lines = [
        replace(point, case=f"{series} {point.batch}", series=series)
        for series in ("hca flush", "hca online flush")
        for point in points("writes", "v4-flash", (1, 8))
    ]
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_results(lines, tmp_path / "r.svg", note="where from")
    text = (tmp_path / "r.svg").read_text(encoding="utf-8")
    for word in (
        "v4-flash: hca flush",
        "dsv4, online",
        "SGLang, measured separately",
        "where from",
    ):
        assert text.count(f">{word}<") == 1, word
    dashed = re.findall(r'<path d="[^"]*"[^>]*stroke-dasharray', text)
    assert len(dashed) == 2, "a line and its mark in the legend"


def test_whole_steps_are_in_ms_and_name_their_lines(tmp_path: Path) -> None:
    steps = [
        replace(
            point, case=f"{series} {point.batch}", series=series, microseconds=9e3 * point.batch
        )
        for series in ("at 8k", "at 1M")
        for point in points("decode_step", "v4-flash", (1, 8))
    ]
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_results(steps, tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text(encoding="utf-8")
    for word in ("at 8k", "at 1M", "ms", "50"):
        assert f">{word}<" in text, word
    assert ">µs<" not in text
