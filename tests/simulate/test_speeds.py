"""Where times come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4.errors import InvalidInput
from dsv4.simulate import speeds as module
from dsv4.simulate.speeds import CHUNKS, DECODES, Speeds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200.jsonl"
CASES = {row["case"]: row for row in map(json.loads, RESULTS.read_text("utf-8").splitlines())}


def test_the_points_are_those_of_the_results() -> None:
    points = [*DECODES.values(), *CHUNKS.values(), module.BACK, module.LINK]
    for case, us in (each for group in points for each in group.items()):
        assert us == pytest.approx(CASES[case]["microseconds"], abs=0.06), case
    for group, size in ((module.BACK, module.BACK_BYTES), (module.LINK, module.LINK_BYTES)):
        assert {CASES[case]["must_move_bytes"] for case in group} == {size}


@pytest.mark.parametrize("model", DECODES)
def test_measured_steps_are_met(model: str) -> None:
    speeds = Speeds.of(model)
    for batch in module.BATCHES:
        own = 1e6 * speeds.step_s(batch, batch * 8192)
        assert own == pytest.approx(
            CASES[f"step {model} at 8k batch {batch}"]["microseconds"], rel=1e-3
        )
    chunks = {"8192 from 0": (8192, 0), "8192 from 120k": (8192, 120 * 1024)}
    for name, chunk in chunks.items():
        own = 1e6 * speeds.step_s(0, 0, [chunk])
        assert own == pytest.approx(CASES[f"chunk {model} {name}"]["microseconds"], rel=1e-3)


@pytest.mark.parametrize(
    ("case", "decodes", "context", "chunks"),
    [
        ("step v4-flash at 128k batch 64", 64, 64 * 131_072, ()),
        ("step v4-flash at 128k batch 256", 256, 256 * 131_072, ()),
        ("step v4-flash at 1M batch 16", 16, 16 << 20, ()),
        ("chunk v4-flash 2048 from 126k", 0, 0, [(2048, 126 * 1024)]),
        ("chunk v4-flash 2048 beside 64 decodes", 64, 64 * 131_072, [(2048, 126 * 1024)]),
    ],
)
def test_other_measured_steps_are_met_within_a_fifth(
    case: str, decodes: int, context: int, chunks: list[tuple[int, int]]
) -> None:
    """Points that the model was not made from."""
    own = 1e6 * Speeds.of("v4-flash").step_s(decodes, context, chunks)
    assert own == pytest.approx(CASES[case]["microseconds"], rel=0.2)


def test_given_rates_take_their_place() -> None:
    speeds = Speeds.of("v4-flash", prefill_rate=1000.0, decode_rate=50.0)
    assert speeds.has_weights
    assert speeds.step_s(3, 10, [(500, 0)]) == pytest.approx(0.52)
    assert not Speeds.of("v4-flash", prefill_rate=1.0).has_weights
    with pytest.raises(InvalidInput, match="v41-flash was not measured"):
        Speeds.of("v41-flash")
    with pytest.raises(InvalidInput, match="above 0"):
        Speeds.of("v4-flash", host_rate=-1.0)
