"""`dsv4 simulate` as users and scripts see it: tables, JSON, errors, plots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsv4.cli import app
from tests.simulate.loads import load, write

PNG = b"\x89PNG\r\n\x1a\n"
RATES = ("--prefill-rate", "20000", "--decode-rate", "40")
SMALL = ("--memory", "2GB", "--max-requests", "8", "--snapshots", "16")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(load(120), tmp_path_factory.mktemp("traces") / "load.jsonl")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_every_combination_is_a_result(trace: Path) -> None:
    found = run_json(trace, *RATES, *SMALL, "--replicas", "1,3", "--routing", "prefix,round-robin")
    results = found["results"]
    assert [(each["routing"], each["replicas"]) for each in results] == [
        ("prefix", 1),
        ("prefix", 3),
        ("round-robin", 1),
        ("round-robin", 3),
    ]
    assert all(0 < each["hit_rate"] < 1 for each in results)
    assert all(each["requests"] == 120 and each["refused"] == 0 for each in results)
    assert results[1]["hit_rate"] > results[3]["hit_rate"]


def test_rows_of_one_replica_say_their_routing_too(trace: Path) -> None:
    routings = ("--replicas", "1,2", "--routing", "prefix,round-robin", "--policy", "lru")
    text = run(trace, *RATES, *SMALL, *routings).output
    assert text.startswith("2 GB, lru")
    for name in ("1 replica, prefix", "1 replica, round-robin"):
        assert name in text


def test_the_table_says_what_differs_and_what_is_common(trace: Path) -> None:
    text = run(trace, *SMALL, "--host-memory", "0,4GB", "--policy", "lru").output
    assert text.startswith("1 replica, 2 GB, lru")
    assert "4 GB host" in text
    assert "without weights" in text
    assert "120 requests" in text
    assert "without weights" not in run(trace, *RATES, *SMALL).output


def test_the_fewest_replicas_is_one_flag(trace: Path) -> None:
    asked = (trace, *RATES, *SMALL, "--ttft-p99", "1500ms")
    found = run_json(*asked)
    fewest = found["fewest_replicas"]
    waits = {each["replicas"]: each["ttft"]["p99"] for each in found["results"]}
    assert waits[fewest] <= 1.5
    assert fewest == 1 or waits[fewest - 1] > 1.5
    assert f"{fewest} replica" in run(*asked).output
    assert run_json(*asked[:-1], "1ms")["fewest_replicas"] is None


def test_a_plot(trace: Path, tmp_path: Path) -> None:
    sizes = ("--memory", "1.5GB,2GB,3GB", "--replicas", "1,2", *SMALL[2:])
    for given in (sizes, sizes[:2], sizes[2:]):
        path = tmp_path / f"{len(given)}{given[0]}.png"
        assert run_json(trace, *RATES, *given, "--plot", path)["plot"] == str(path)
        assert path.read_bytes().startswith(PNG)
    path = tmp_path / "fewest.svg"  # one number of replicas is enough
    assert run_json(trace, *RATES, *SMALL, "--ttft-p99", "3600s", "--plot", path)["plot"] == str(
        path
    )
    assert b"<svg" in path.read_bytes()


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("none.png", (), "make no curve"),
        ("none.txt", ("--replicas", "1,2"), "must end in one of"),
        ("none", ("--replicas", "1,2"), "must end in one of"),
        ("none/none.png", ("--replicas", "1,2"), "is not a folder"),
    ],
)
def test_a_plot_that_cannot_be_is_refused_before_anything_runs(
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    given: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.setattr("dsv4.cli.simulate.run_all", None)
    result = run(trace, *RATES, *SMALL, *given, "--plot", tmp_path / name)
    assert result.exit_code == 2
    assert said in result.output


def test_residency_on_and_off(trace: Path) -> None:
    asked = ("--memory", "4GB", *SMALL[2:], "--residency", "off,on", "--host-memory", "0,40GB")
    results = run_json(trace, *RATES, *asked)["results"]
    assert [(each["residency"], each["host_bytes"]) for each in results] == [
        (False, 0),
        (False, 40 * 10**9),
        (True, 40 * 10**9),
    ]
    assert results[2]["blocks"] > 3 * results[0]["blocks"]


def test_hits_alone_and_repeated(trace: Path) -> None:
    alone = run_json(trace, "--memory", "unbounded", "--untimed")["results"][0]
    assert alone["evictions"] == 0
    assert alone["blocks"] > 1 << 30
    twice = run_json(trace, "--memory", "unbounded", "--untimed", "--repeat", "2")["results"][0]
    assert twice["tokens_asked"] == 2 * alone["tokens_asked"]
    assert twice["hit_rate"] == pytest.approx(alone["hit_rate"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--replicas", "one"), "whole numbers"),
        (("--replicas", ","), "give a value"),
        (("--memory", "80X"), "80GB"),
        (("--routing", "best"), "round-robin"),
        (("--policy", "best"), "lru"),
        (("--residency", "yes"), "on, off"),
        (("--residency", "on"), "host memory"),
        (("--ttft-p99", "soon"), "not a time"),
        (("--ttft-p99", "2s", "--replicas", "1,2"), "one setup"),
        (("--ttft-p99", "2s", "--untimed"), "has no times"),
        (("--max-waiting", "-1"), "most_waiting"),
        (("--hot-share", "0.5"), "which is off"),
        (("--residency", "off,on", "--host-memory", "9GB", "--disk", "9GB"), "leave out the disk"),
        (("--model", "v41-flash"), "not measured"),
        (("--block-tokens", "384"), "multiple"),
        (("--link-rate", "400Gb"), "bytes"),
    ],
)
def test_what_cannot_be_is_said(trace: Path, arguments: tuple[str, ...], said: str) -> None:
    result = run(trace, *arguments)
    assert result.exit_code != 0
    assert said in " ".join(result.output.split()), result.output


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    assert "cannot be read" in run(tmp_path / "none.jsonl").output
