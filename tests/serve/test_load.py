"""Random load: nothing leaks, nothing is stuck, and every text is the model's. An hour of it runs
nightly, and a few seconds here; `python -m tests.serve.load` runs as long as one likes."""

from __future__ import annotations

import pytest

from tests.serve.load import MOST_GROWTH, play

NIGHTLY = [pytest.mark.nightly, pytest.mark.timeout(7200)]


@pytest.mark.parametrize(
    ("way", "seconds"),
    [
        ("plain", 2.0),
        ("tiers", 2.0),
        ("host_memory", 2.0),
        pytest.param("plain", 1200.0, marks=NIGHTLY),
        pytest.param("tiers", 2400.0, marks=NIGHTLY),
        pytest.param("host_memory", 600.0, marks=NIGHTLY),
    ],
)
def test_nothing_is_lost_under_random_load(way: str, seconds: float) -> None:
    found = play(seconds, seed=int(seconds), way=way)
    assert found.done["check: 200"] > 0
    assert found.done["leave: left"] > 0
    assert found.grown("files") <= 2
    assert found.grown("threads") <= 40  # which starlette's pool may have
    assert found.grown("bytes") < MOST_GROWTH
