"""Random load: nothing leaks, nothing is stuck, and every text is the model's. An hour of it runs
nightly, and a few seconds here; `python -m tests.serve.load` runs as long as one likes."""

from __future__ import annotations

import pytest

from tests.serve.load import MOST_GROWTH, WAYS, play

HOUR = [pytest.mark.nightly, pytest.mark.timeout(7200)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seconds", [2.0, pytest.param(1200.0, marks=HOUR)])
def test_nothing_is_lost_under_random_load(seconds: float, way: str) -> None:
    done, grown = play(seconds, seed=int(seconds), way=way)
    assert done["check: 200"] > 0
    assert done["leave: left"] > 0
    assert grown["files"] <= 2
    assert grown["bytes"] < MOST_GROWTH
