"""What docs/serve.md says of times, and that the benchmark measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import serve, serve_watch
from benchmarks.serve import DSV4, TRANSFORMERS, in_turns, read, served, shown
from dsv4.demo_model.checkpoint import Checkpoint
from dsv4.serve.demo import ServedDemo
from tests.serve.serving import running

PAGE = Path(__file__).parents[2] / "docs" / "serve.md"


def test_the_page_shows_the_newest_results() -> None:
    """`python -m benchmarks.serve --table` prints them."""
    rows = read()
    assert shown(rows) in PAGE.read_text(encoding="utf-8")


def test_a_run_writes_its_figures_into_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, rows = tmp_path / "serve.md", read()
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(serve, "PAGE", page)
    newer = [{**row, "tokens_per_s": 1234.0} for row in rows]
    serve.write_page(shown(rows), shown(newer))
    assert shown(newer) in page.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="the figures of the last run"):
        serve.write_page(shown(rows), shown(newer))  # they are not there any more


def test_one_run_has_both_servers_with_as_many_clients() -> None:
    rows = read()
    last = [row for row in rows if row["run"] == rows[-1]["run"]]
    clients = {name: [r["clients"] for r in last if r["system"] == name] for name in SERVERS}
    assert clients == {key: [1, 8, 32] for key in SERVERS}
    assert all(row["right"] == row["questions"] for row in last if row["system"] == DSV4)


SERVERS = (DSV4, TRANSFORMERS)


def test_a_page_that_watches_costs_a_fiftieth_of_a_step_at_most() -> None:
    """As measured, and as the page says; the measurement counts what it says it does."""
    newest = serve_watch.read()[-1]
    assert serve_watch.sentence(newest) in PAGE.read_text(encoding="utf-8")
    assert newest["percent"] <= 2
    found = serve_watch.counted(steps=12, sends=3)
    assert found["steps"] == 12
    assert 1 <= found["events"] <= 12
    assert 0 < found["event_us"] < found["step_us"]
    assert found["percent"] > 0


def test_of_several_rounds_the_median_counts() -> None:
    rates = iter([5.0, 1.0, 9.0, 2.0, 7.0, 3.0])
    runs = {(name, 1): lambda: {"tokens_per_s": next(rates)} for name in SERVERS}
    found = [*in_turns(runs)]
    assert [row["tokens_per_s"] for row in found] == [7.0, 2.0]
    assert [row["system"] for row in found] == [*SERVERS]


def test_a_server_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are the model's, whatever their pieces are."""
    monkeypatch.setattr(serve, "ALONE", 4)
    demo = Checkpoint.load()
    with running(ServedDemo()) as server:
        found = served(server.url, "dsv4-demo", 2, demo)
    assert (found["questions"], found["right"]) == (4, 4)
    assert found["tokens_per_s"] > 0
    assert 0 < found["first_ms_p50"] <= found["first_ms_p99"]
    assert 0 < found["between_ms_p50"] <= found["between_ms_p99"]
