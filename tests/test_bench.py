"""Results files and `dsv4 bench`: what a reader and a script see, and what broken files say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dsv4.bench import BenchResult, compare, read_results, write_results
from dsv4.cli import app
from dsv4.errors import InvalidInput
from dsv4.plots.results import plot_results

PNG = b"\x89PNG\r\n\x1a\n"
BASE = BenchResult(
    case="append flash csa flush batch 1",
    suite="writes",
    series="csa flush",
    model="v4-flash",
    batch=1,
    microseconds=4.0,
    launches=1,
    must_move_bytes=8_000_000,
    floor_us=3.0,
    copy_bytes_per_us=4e6,
    empty_launch_us=1.0,
    commit="abc1234",
    gpu="NVIDIA H200",
    torch="2.11.0",
    triton="3.6.0",
    python="3.12.3",
    anchors_us={"SGLang": 6.7},
)


def results(**times_us: float) -> list[BenchResult]:
    return [replace(BASE, case=name, microseconds=time_us) for name, time_us in times_us.items()]


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


# ---- results ------------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    full = replace(
        BASE,
        case="step",
        context=8192,
        target_us=3.5,
        first_step_us=5.0,
        peers_us={"FlashMLA": 12.5},
        parts_us={"append": 1.5},
        parts_launches={"append": 43},
        note="1 block, µ",
    )
    write_results(tmp_path / "r.jsonl", [BASE, full])
    assert read_results(tmp_path / "r.jsonl") == [BASE, full]


def test_figures_that_follow_from_a_measurement() -> None:
    assert BASE.gigabytes_per_second == 2000
    assert BASE.percent_of_floor == 75
    wanted = {(3.9, None): "miss", (4.0, None): "target", (3.0, 4.0): "first step",
              (3.0, 3.9): "miss", (None, None): "no target"}  # fmt: skip
    for (target, first), verdict in wanted.items():
        assert replace(BASE, target_us=target, first_step_us=first).verdict == verdict


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "holds no results"),
        (["{"], "line 1 of .*not JSON"),
        (["[1]"], "line 1 of .*JSON list"),
        (['{"case": "x"}'], "line 1 of .*has no 'suite'"),
        (["GOOD", "", 'GOOD|"launches": "one"'], "line 3 of .*launches='one'.*int"),
        (['GOOD|"launches": true'], "launches=True"),
        (['GOOD|"peers_us": {"x": "fast"}'], "peers_us=.*dict"),
        (['GOOD|"context": 1.5'], "context=1.5"),
        (['GOOD|"microseconds": 0'], "microseconds=0"),
        (["GOOD", "GOOD"], "'append flash csa flush batch 1' in lines 1 and 2"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    write_results(tmp_path / "good", [BASE])
    good = json.loads((tmp_path / "good").read_text())

    def line(text: str) -> str:
        if not text.startswith("GOOD"):
            return text
        change: dict[str, Any] = json.loads(f"{{{text[5:]}}}")
        return json.dumps({**good, **change})

    path = written(tmp_path / "broken.jsonl", *map(line, lines))
    with pytest.raises(InvalidInput, match=message):
        read_results(path)


def test_a_missing_file_a_folder_and_binary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(PNG)
    for name in ("nowhere.jsonl", ".", "binary"):
        with pytest.raises(InvalidInput, match="cannot read results"):
            read_results(tmp_path / name)


def test_cases_are_compared_by_name() -> None:
    found = compare(results(a=2.0, b=3.0, c=4.0), results(c=1.0, d=9.0, a=3.0))
    assert [(c.case, c.a_us, c.b_us, c.ratio) for c in found.cases] == [
        ("a", 2.0, 3.0, 1.5),
        ("c", 4.0, 1.0, 0.25),
    ]
    assert (found.only_a, found.only_b) == (("b",), ("d",))


# ---- dsv4 bench ---------------------------------------------------------------------------------


@pytest.fixture
def two_files(tmp_path: Path) -> tuple[Path, Path]:
    write_results(tmp_path / "a.jsonl", results(first=2.0, second=3.0, gone=1.0))
    after = [replace(r, commit="def5678") for r in results(first=3.0, second=1.5, new=7.0)]
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
    assert json.loads(result.stdout) == {
        "a": {"path": str(two_files[0]), "commits": ["abc1234"], "gpus": ["NVIDIA H200"]},
        "b": {"path": str(two_files[1]), "commits": ["def5678"], "gpus": ["NVIDIA H200"]},
        "cases": [
            {"case": "first", "a_us": 2.0, "b_us": 3.0, "ratio": 1.5},
            {"case": "second", "a_us": 3.0, "b_us": 1.5, "ratio": 0.5},
        ],
        "only_a": ["gone"],
        "only_b": ["new"],
    }


def test_errors_are_one_line(two_files: tuple[Path, Path], tmp_path: Path) -> None:
    good = two_files[0]
    for arguments, message in (
        ((), "either --compare A B or --plot"),
        (("--compare", good, good, "--plot", tmp_path / "x.png", good), "either --compare"),
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


def points(suite: str, model: str, batches: tuple[int, ...]) -> list[BenchResult]:
    return [
        replace(BASE, case=f"{suite} {model} {n}", suite=suite, model=model, batch=n,
                microseconds=3.0 * n, peers_us={"FlashMLA": 2.0 * n})
        for n in batches
    ]  # fmt: skip


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


def test_plot_shows_what_is_in_the_file(tmp_path: Path) -> None:
    """An .svg keeps its texts."""
    drawn = [*points("attention", "v4-pro", (1, 16)), *points("writes", "v4-flash", (1,))]
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_results(drawn, tmp_path / "r.svg")
    text = (tmp_path / "r.svg").read_text(encoding="utf-8")
    for word in ("v4-pro: attention", "csa flush", "FlashMLA", "SGLang, published", "abc1234"):
        assert word in text
    assert "v4-flash" not in text, "a single point is no line"


def test_plot_of_decoding_shows_time_and_bytes(tmp_path: Path) -> None:
    drawn = [
        replace(BASE, case=f"decode at {n}", suite="transformers", context=n, microseconds=5000.0,
                peers_us={"transformers": 27_000.0}, note="5 layers; more",
                cache_bytes={"dsv4": n << 7, "transformers": n << 8},
                step_bytes={"dsv4": 0, "transformers": n})
        for n in (65_536, 8192)
    ]  # fmt: skip
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        plot_results(
            [*drawn, *points("writes", "v4-flash", (1, 8))],
            tmp_path / "r.svg",
            suites=["transformers"],
        )
    text = (tmp_path / "r.svg").read_text(encoding="utf-8")
    for word in ("a decoded token, 5 layers", "8k tokens", "64k tokens", ">27<", ">16.1<", "MiB"):
        assert word in text
    assert text.index("8k tokens") < text.index("64k tokens")
    assert "cache writes" not in text


def test_nothing_to_draw_and_nowhere_to_write_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="nothing to draw"):
        plot_results(points("writes", "v4-flash", (1,)), tmp_path / "x.png")
    with pytest.raises(InvalidInput, match="cannot draw suite 'gather': choose of writes"):
        plot_results(points("writes", "v4-flash", (1, 8)), tmp_path / "x.png", suites=["gather"])
    with pytest.raises(InvalidInput, match="cannot write the plot"):
        plot_results(points("writes", "v4-flash", (1, 8)), tmp_path / "x.nonsense")


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
