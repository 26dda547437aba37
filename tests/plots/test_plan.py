"""Memory against context, drawn: what the picture says, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.model import PRESETS
from dsv4.plots.plan import plot_plan, requests_to_draw

FLASH = CacheSchema.build(PRESETS["v4-flash"])
PNG = b"\x89PNG\r\n\x1a\n"


def test_plot_says_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text
        plot_plan(FLASH, path, memory_bytes=80 * 2**30, requests=(1, 64))
    drawn = path.read_text()
    for text in ("v4-flash", "3,518 bytes per token", "64 requests", "1 request", "80 GiB", "128k"):
        assert text in drawn
    for text in ("context of each request (tokens)", "KV cache memory", "1M", "64 GiB"):
        assert text in drawn


@pytest.mark.parametrize("max_context", [1, 100, 1024, 1025])
def test_short_contexts_can_be_drawn(tmp_path: Path, max_context: int) -> None:
    schema = CacheSchema.build(PRESETS["tiny"], max_context=max_context)
    path = tmp_path / "plot.png"
    plot_plan(schema, path, memory_bytes=1)
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("requests", [(), (0,), (-1,), (1.5,), (True,)])
def test_nothing_is_not_drawn(tmp_path: Path, requests: tuple[Any, ...]) -> None:
    path = tmp_path / "plot.png"
    with pytest.raises(InvalidInput):
        plot_plan(FLASH, path, requests=requests)
    assert not path.exists()


@pytest.mark.parametrize(
    ("asked", "curves"),
    [
        (None, (1, 4, 16, 64)),
        (16, (1, 4, 16, 64)),
        (23, (1, 4, 23, 64)),
        (256, (1, 4, 16, 64, 256)),
        (1, (1, 4, 16, 64)),
    ],
)
def test_the_asked_curve_replaces_its_neighbour(asked: int | None, curves: tuple[int, ...]) -> None:
    assert requests_to_draw(asked) == curves
