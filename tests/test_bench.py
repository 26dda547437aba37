"""Results files: what is read and compared, and what broken files say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsv4.bench import compare, read_results, write_results
from dsv4.errors import InvalidInput
from tests.support.results import BASE, results

PNG = b"\x89PNG\r\n\x1a\n"


def written(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


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
        note="1 block, µ, \u2028 \x85",
    )
    path = tmp_path / "r.jsonl"
    write_results(path, [BASE, full])
    assert read_results(path) == [BASE, full]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))  # by an editor
    assert read_results(path) == [BASE, full]


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
        (['GOOD|"microseconds": NaN'], "line 1 of .*microseconds=nan.*finite"),
        (['GOOD|"microseconds": Infinity'], "microseconds=inf.*finite"),
        (['GOOD|"microseconds": -Infinity'], "microseconds=-inf.*finite"),
        (['GOOD|"microseconds": 5e-324'], "microseconds=5e-324: no time is that"),
        (['GOOD|"microseconds": 1e300'], r"microseconds=1e\+300: no time is that"),
        ([f'GOOD|"microseconds": 1{"0" * 400}'], "microseconds=1000.*0000, expected float"),
        ([f'{{"microseconds": 1{"0" * 5_000}}}'], "line 1 of .*not JSON"),
        (["[" * 100_000], "line 1 of .*not JSON"),
        (['GOOD|"floor_us": NaN'], "floor_us=nan.*finite"),
        (['GOOD|"peers_us": {"x": Infinity}'], "peers_us={'x': inf}.*finite"),
        (['GOOD|"target_us": NaN'], "target_us=nan.*finite"),
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
