"""The simulator on whole recorded loads: the committed results, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import simulate as benchmark
from benchmarks.simulate import PARTS, PLOTS, RESULTS, TABLES, main, read, results_of
from tests.simulate.loads import load, write

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"
ROWS = read(RESULTS)


def test_with_a_capacity_it_is_within_half_a_point_of_the_table() -> None:
    found = results_of(ROWS, "lru")
    assert len(found) == 10
    for row in found:
        assert row["percent"] == pytest.approx(row["published"], abs=0.5), row


def test_results_say_when_and_where() -> None:
    assert {row["part"] for row in ROWS} <= {*PARTS}
    assert all(row["date"] and row["machine"] for row in ROWS)


def test_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in benchmark.TRACES:
        write(load(60), tmp_path / f"{name}.jsonl")
    results = tmp_path / "results.jsonl"
    monkeypatch.setattr(benchmark, "HOST_GB", (0, 50))
    monkeypatch.setattr(benchmark, "DEVICE_GB", (10, 40))
    monkeypatch.setattr(benchmark, "REPLICAS", (2,))
    given = ["--traces", str(tmp_path), "--results", str(results)]
    for part in ("hits", "lru", "host", "routing"):
        given += ["--only", part]
    assert main(given) == 0
    found = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert {row["part"] for row in found} == {"hits", "lru", "host", "routing"}
    for row in results_of(found, "hits"):
        assert row["simulated_tokens"] == row["counted_tokens"] > 0
    assert benchmark.host_table(found).count("\n") == 2 + 8


@pytest.mark.parametrize(
    "part", [part for part in TABLES if results_of(ROWS, part) or part == "day"]
)
def test_the_page_shows_the_results(part: str) -> None:
    """`python -m benchmarks.simulate --table` prints them."""
    page = PAGE.read_text(encoding="utf-8")
    assert TABLES[part](ROWS) in page
    for path in PLOTS.glob(f"simulate_{part}_*.png"):
        assert f"plots/{path.name}" in page


def test_hits_of_unbounded_memory_are_those_that_one_counts() -> None:
    found = results_of(ROWS, "hits")
    assert len(found) == 4
    for row in found:
        assert row["simulated_tokens"] == row["counted_tokens"] > 0
        coarser = [each for each in found if each["trace"] == row["trace"]]
        assert row["simulated_tokens"] >= min(each["simulated_tokens"] for each in coarser)


def test_an_hour_takes_less_than_a_minute_of_a_core() -> None:
    found = results_of(ROWS, "hour")
    assert {row["policy"] for row in found} == {"lru", "retention"}
    for row in found:
        assert row["requests"] == 12_031
        assert row["cpu_s"] <= 60
