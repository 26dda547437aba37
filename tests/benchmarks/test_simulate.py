"""The simulator on whole recorded loads: the committed results, and the page that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib as mpl
import pytest

from benchmarks import simulate as benchmark
from benchmarks.simulate import PARTS, PLOTS, RESULTS, TABLES, main, read, results_of
from dsv4.plots.simulate import plot_simulated
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


def hits_of(part: str, trace: str) -> dict[tuple[int, int], float]:
    """Percent, by the memory of the device and of the host, in GB."""
    return {
        (row["memory_bytes"] // 10**9, row["host_bytes"] // 10**9): 100 * row["hit_rate"]
        for row in results_of(ROWS, part)
        if row["trace"] == trace and not row["residency"]
    }


@pytest.mark.parametrize("trace", benchmark.TRACES)
def test_what_the_page_says_of_host_memory(trace: str) -> None:
    found = hits_of("host", trace)
    assert len(found) == 12
    for device in (10, 20):  # less than the device has adds nothing
        assert found[device, 5] - found[device, 0] < 0.5
    assert found[5, 80] > found[20, 0]  # with enough of it 5 GB are as good as 20
    assert found[20, 80] - found[20, 0] < 1.0
    assert found[5, 80] > found[5, 0] + 10


def test_what_the_page_says_of_residency() -> None:
    found = {
        (row["trace"], row["memory_bytes"] // 10**9, row["hot_share"], row["host_bytes"] > 0): row
        for row in results_of(ROWS, "residency")
    }
    assert len(found) == 24
    for memory in (5, 10, 20):  # as recorded all fits: a tier finds as much, and no step fetches
        tier, apart = (found["as recorded", memory, hot, True] for hot in (None, 0.0))
        assert tier["hit_rate"] > apart["hit_rate"]
        assert tier["step"]["p50"] < apart["step"]["p50"] < 1.1 * tier["step"]["p50"]
    waits = {key: row["ttft"]["p99"] for key, row in found.items()}
    for hot in (0.0, 0.9):  # long: half the device's memory does as well
        assert waits["long", 10, None, False] > 5 * waits["long", 10, hot, True]
        assert waits["long", 10, hot, True] < waits["long", 20, None, False]
    assert min(waits["long", 5, hot, True] for hot in (0.0, 0.9)) > 1000  # too little both ways
    # where all fits, a tier is better
    assert waits["long", 20, None, True] < waits["long", 20, 0.0, True]


def test_a_plot_says_what_it_shows(tmp_path: Path) -> None:
    """An .svg keeps its texts."""
    rows = [row for row in results_of(ROWS, "host") if row["trace"] == "synthetic"]
    found = [benchmark.simulated_of(row) for row in rows]
    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_simulated(found, tmp_path / "plot.svg", title="host memory", waits=True)
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    for word in (
        "hit rate against memory",
        "prompt tokens cached, %",
        "latency against memory",
        "memory of a replica, GB",
        "time to the first token, p99, s",
        "80 GB host",
        "no host",
    ):
        assert word in text, word


def test_every_question_has_its_plots() -> None:
    for part in ("host", "residency", "routing"):
        for name in {row["trace"] for row in results_of(ROWS, part)}:
            assert (PLOTS / f"simulate_{part}_{name.replace(' ', '_')}.png").exists()


def test_longer_texts_begin_alike_as_far_as_they_did() -> None:
    trace = load(40)
    made = benchmark.longer(trace, prompts=8, answers=32, apart=16)
    asked = benchmark.setup(block_tokens=512, untimed=True)
    longer = benchmark.setup(block_tokens=4096, untimed=True)
    first, second = benchmark.simulate(trace, asked), benchmark.simulate(made, longer)
    assert second.tokens_asked == 8 * first.tokens_asked
    # the last token of a prompt always runs, and a block with it
    assert second.tokens_hit["device"] >= 8 * first.tokens_hit["device"] > 0
    assert [each.output_tokens for each in made] == [32 * each.output_tokens for each in trace]
    assert made[-1].at_s == 16 * trace[-1].at_s


def test_a_day_of_a_thousand_replicas_fits_and_grows_with_its_hours() -> None:
    found = {row["hours"]: row for row in results_of(ROWS, "day")}
    assert [*found] == [1, 6, 12, 24]
    for hours, row in found.items():
        assert row["replicas"] == 1000
        assert row["requests"] == hours * 12_031
    day = found[24]
    assert day["cpu_s"] <= 30 * 60
    assert day["peak_bytes"] <= 8e9
    assert day["wall_s"] <= 30 * 60
    # full replicas evict a block for each new one: then an hour takes longer, and all take the same
    assert day["cpu_s"] / 24 < 2 * found[1]["cpu_s"]
    late, before = day["cpu_s"] - found[12]["cpu_s"], found[12]["cpu_s"] - found[6]["cpu_s"]
    assert 1.5 < late / before < 2.5
    assert day["peak_bytes"] / 24 < found[6]["peak_bytes"] / 6 < found[1]["peak_bytes"]
