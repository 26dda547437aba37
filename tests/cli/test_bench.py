"""`dsv4 bench` as users and scripts see it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dsv4.bench import write_results
from dsv4.cli import app
from tests.support.results import BASE, points, results

PNG = b"\x89PNG\r\n\x1a\n"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path]:
    write_results(tmp_path / "a.jsonl", results(first=2.0, second=3.0, gone=1.0))
    after = [
        replace(r, run=replace(r.run, commit="def5678"))
        for r in results(first=3.0, second=1.5, new=7.0)
    ]
    write_results(tmp_path / "b.jsonl", after)
    return tmp_path / "a.jsonl", tmp_path / "b.jsonl"


def test_compare_prints_both_times_and_the_ratio(two_files: tuple[Path, Path]) -> None:
    result = run("--compare", *two_files)
    assert result.exit_code == 0, result.output
    table = [line.split() for line in result.stdout.splitlines()]
    assert ["first", "2.00", "3.00", "1.50"] in table
    assert ["second", "3.00", "1.50", "0.50"] in table
    assert "only in A: gone" in result.stdout
    assert "only in B: new" in result.stdout
    assert "abc1234" in result.stdout
    assert "def5678" in result.stdout


def test_compare_as_json(two_files: tuple[Path, Path]) -> None:
    result = run("--compare", *two_files, "--json")
    origin = {"gpus": ["NVIDIA H200"], "tritons": ["3.6.0"]}
    assert json.loads(result.stdout) == {
        "a": {"path": str(two_files[0]), "commits": ["abc1234"], **origin},
        "b": {"path": str(two_files[1]), "commits": ["def5678"], **origin},
        "cases": [
            {"case": "first", "a_us": 2.0, "b_us": 3.0, "ratio": 1.5},
            {"case": "second", "a_us": 3.0, "b_us": 1.5, "ratio": 0.5},
        ],
        "only_a": ["gone"],
        "only_b": ["new"],
    }


def test_compare_names_the_gpus_and_tritons_of_both(tmp_path: Path) -> None:
    """A results file that somebody sends, beside ours."""
    ours, sent = tmp_path / "h200.jsonl", tmp_path / "b200.jsonl"
    write_results(ours, results(first=2.0, second=3.0))
    there = replace(BASE.run, gpu="NVIDIA B200", triton="3.9.0")
    of_b200 = [replace(r, run=there) for r in results(first=1.0, third=1.0)]
    write_results(sent, of_b200)
    result = run("--compare", ours, sent)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"A  {ours}  NVIDIA H200, Triton 3.6.0, commit abc1234"
    assert lines[1] == f"B  {sent}  NVIDIA B200, Triton 3.9.0, commit abc1234"
    assert ["first", "2.00", "1.00", "0.50"] in [line.split() for line in lines]
    found = json.loads(run("--compare", ours, sent, "--json").stdout)
    assert (found["a"]["gpus"], found["b"]["gpus"]) == (["NVIDIA H200"], ["NVIDIA B200"])
    assert (found["a"]["tritons"], found["b"]["tritons"]) == (["3.6.0"], ["3.9.0"])


LONG = "index scores v41-flash batch 64 at 1,048,576 tokens with candidates of two layers"


@pytest.mark.parametrize("columns", [None, 200, 80, 30, 1])
@pytest.mark.parametrize("terminal", [False, True])
def test_numbers_are_whole_at_any_width(
    tmp_path: Path, terminal: bool, columns: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(variable, raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm")
    files = tmp_path / "a", tmp_path / "b"
    for path, time_us in zip(files, (148_123.456, 296_246.912), strict=True):
        write_results(path, results(**{LONG: time_us, "short": 1.5}))
    result = run("--compare", *files)
    assert result.exit_code == 0, result.output
    plain = re.sub("\x1b\\[[0-9;]*m", "", result.stdout)
    assert ("\x1b" in result.stdout) == terminal
    table = [line.split() for line in plain.splitlines()]
    assert ["case", "µs", "A", "µs", "B", "B", "/", "A"] in table
    assert ["short", "1.50", "1.50", "1.00"] in table
    (first,) = (words for words in table if words[-1:] == ["2.00"])
    assert first[-3:] == ["148123.46", "296246.91", "2.00"]
    if not terminal:
        assert first[:-3] == LONG.split()
    else:  # the name goes on below
        rows = table[table.index(first) : table.index(["short", "1.50", "1.50", "1.00"])]
        assert [*first[:-3], *(word for row in rows[1:] for word in row)] == LONG.split()


def test_files_without_a_common_case_say_what_they_have(tmp_path: Path) -> None:
    files = tmp_path / "a", tmp_path / "b"
    write_results(files[0], points("writes", "v4-flash", (1, 64)))
    write_results(files[1], points("gather", "v4-pro", (1,)))
    result = run("--compare", *files)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"InvalidInput: no case is in both files: {files[0]} has 2 of writes, the first "
        f"'writes v4-flash 1'; {files[1]} has 1 of gather, the first 'gather v4-pro 1': compare "
        f"results of the same suites\n"
    )
    as_json = run("--compare", *files, "--json")
    assert as_json.exit_code == 2
    assert "no case is in both files" in json.loads(as_json.stdout)["error"]


def test_errors_are_one_line(two_files: tuple[Path, Path], tmp_path: Path) -> None:
    good = two_files[0]
    for arguments, message in (
        ((), "--compare A B puts two files"),
        (("--compare", good, good, "--plot", tmp_path / "x.png", good), "--compare A B"),
        (("--compare", good, tmp_path / "none"), "cannot read results"),
        (("--plot", tmp_path / "x.png", tmp_path / "none"), "cannot read results"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("InvalidInput: ")
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
        as_json = run(*arguments, "--json")
        assert as_json.exit_code == 2
        assert message in json.loads(as_json.stdout)["error"]
    assert not (tmp_path / "x.png").exists()


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    drawn = [
        *points("writes", "v4-flash", (1, 64)),
        *points("attention", "v4-pro", (1, 16, 256)),
        *points("decode_step", "v4-flash", (16, 1)),
        *points("gather", "v4-flash", (1, 16)),
    ]
    write_results(tmp_path / "r.jsonl", drawn)
    result = run("--plot", tmp_path / "r.png", tmp_path / "r.jsonl", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"plot": str(tmp_path / "r.png")}
    assert (tmp_path / "r.png").read_bytes().startswith(PNG)


def test_bench_runs_without_torch(two_files: tuple[Path, Path]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dsv4.cli import app\n"
        f"app(['bench', '--compare', {str(two_files[0])!r}, {str(two_files[1])!r}, '--json'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)["cases"]) == 2
