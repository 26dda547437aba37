"""The simulator on whole recorded loads: the committed results, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import simulate as benchmark
from benchmarks.simulate import PARTS, RESULTS, TABLES, main, plots, read, results_of
from tests.simulate.loads import load, write

PAGE = Path(__file__).parents[2] / "docs" / "simulate.md"
ROWS = read(RESULTS)


def test_unbounded_hits_are_those_counted_token_for_token() -> None:
    found = results_of(ROWS, "hits")
    assert len(found) == 4
    for row in found:
        assert row["simulated_tokens"] == row["counted_tokens"]
    rates = {
        (row["trace"], row["block_tokens"]): row["simulated_tokens"] / row["tokens_asked"]
        for row in found
    }
    for trace, published in (("conversation", 0.366), ("synthetic", 0.640)):
        assert rates[trace, 128] >= rates[trace, 512] >= published


def test_with_a_capacity_it_is_within_half_a_point_of_the_table() -> None:
    found = results_of(ROWS, "lru")
    assert len(found) == 10
    for row in found:
        assert row["percent"] == pytest.approx(row["published"], abs=0.5), row


def test_the_hour_takes_less_than_a_minute() -> None:
    for row in results_of(ROWS, "hour"):
        assert row["requests"] == 12_031
        assert row["tokens_asked"] > 144e6
        assert row["cpu_s"] <= 60


def test_results_say_when_and_where() -> None:
    assert {row["part"] for row in ROWS} <= {*PARTS}
    assert all(row["date"] and row["machine"] for row in ROWS)


@pytest.mark.parametrize("part", TABLES)
def test_the_page_shows_the_results(part: str) -> None:
    """`python -m benchmarks.simulate --table` prints them."""
    assert TABLES[part](ROWS) in PAGE.read_text(encoding="utf-8")


def test_plots_are_drawn_from_the_results(tmp_path: Path) -> None:
    made = plots(ROWS, tmp_path)
    assert made
    for path in made:
        assert path.stat().st_size > 10_000
        committed = PAGE.parent / "plots" / path.name
        assert committed.exists(), "python -m benchmarks.simulate --plots draws it"


def test_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in benchmark.TRACES:
        write(load(60), tmp_path / f"{name}.jsonl")
    results = tmp_path / "results.jsonl"
    monkeypatch.setattr(benchmark, "HOST_GB", (0, 50))
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
