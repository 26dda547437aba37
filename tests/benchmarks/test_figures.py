"""Figures in README and docs: those with a mark are what the results say, the others say where they
come from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import figures, peers, report
from benchmarks.figures import ELSEWHERE, JOURNALS, PAGES, rewritten, undated, unsourced
from benchmarks.peers import SOURCES
from benchmarks.registry import SUITES
from dsv4.bench import BenchResult, read_results
from dsv4.errors import InvalidInput
from tests.support.results import BASE

RESULTS = read_results(report.RESULTS)


def text_of(page: str) -> str:
    return (figures.ROOT / page).read_text(encoding="utf-8")


# ---- the pages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_the_results_say(page: str) -> None:
    """`python -m benchmarks.report` puts it right."""
    assert report.page_text(page, text_of(page), RESULTS) == text_of(page)


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_of_a_page_has_a_source(page: str) -> None:
    """A mark, a day and a machine where it stands, or a reason in ELSEWHERE."""
    assert unsourced(text_of(page), RESULTS, page=page) == []


@pytest.mark.parametrize("page", PAGES)
def test_marks_do_not_show_where_a_page_is_rendered(page: str) -> None:
    """A comment that begins a line ends its paragraph, two dashes end it, a bar ends a cell."""
    for line in text_of(page).splitlines():
        assert not line.lstrip().startswith("<!--="), line
    for mark in re.findall("<!--=(.*?)-->", text_of(page), re.DOTALL):
        assert not re.search(r"--|[|\n]", mark), mark


@pytest.mark.parametrize("page", JOURNALS)
def test_sections_of_a_journal_name_day_machine_and_commit(page: str) -> None:
    assert undated(text_of(page), page=page) == []


def test_what_is_held_elsewhere_still_stands_there() -> None:
    for page, held in ELSEWHERE.items():
        text = re.sub(r"`[^`\n]+`", "code", re.sub(r"<!--.*?-->", "", text_of(page)))
        flat = " ".join(text.split())
        for words, reason in held.items():
            assert words in flat, (page, words)
            assert reason


# ---- others -------------------------------------------------------------------------------------


def test_whatever_a_case_is_held_against_has_a_source() -> None:
    named = {name for source in SOURCES.values() for name in source.names}
    cases = [case for listed in SUITES.values() for case in listed()]
    assert {name for case in cases for name in case.anchors_us} <= named
    for source in SOURCES.values():
        assert re.fullmatch(r"2026(-\d\d-\d\d)?", source.date)
        assert source.of
        assert source.version
        assert source.measured


def test_times_of_others_are_written_in_one_place() -> None:
    """vLLM's gather was kept as a rate, so its time is computed."""
    known = set(numbers_in([value for name, value in vars(peers).items() if name.endswith("_US")]))
    for listed in SUITES.values():
        for case in listed():
            if case.suite != "gather":
                assert known.issuperset(case.anchors_us.values()), case.name


def numbers_in(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(one)


def test_the_results_file_has_the_targets_and_others_of_the_registry() -> None:
    """They were not measured in the run; `python -m benchmarks.report` puts them right."""
    assert report.held_against(RESULTS) == RESULTS
    found = next(r for r in RESULTS if r.anchors_us)
    old = replace(found, anchors_us={"x": 1.0}, target_us=None, first_step_us=None)
    assert report.held_against([old]) == [found]
    elsewhere = replace(old, run=replace(old.run, gpu="NVIDIA B200"))
    assert report.held_against([elsewhere]) == [elsewhere]


# ---- marks --------------------------------------------------------------------------------------


def result(case: str, microseconds: float, **changes: object) -> BenchResult:
    return replace(BASE, case=case, microseconds=microseconds, **changes)  # type: ignore[arg-type]


MADE = [
    result("a 1", 3.26, anchors_us={"them": 3.0}),
    result("a 2", 1234.5, anchors_us={"them": 617.25}),
    result("b 1,5", 5.0),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('9.9 µs<!--= us("a 1") -->', "3.3 µs"),
        ('9.99<!--= us("a 1") -->', "3.26"),
        ('9 / 9.9 µs<!--= us("a {1,2}") -->', "3 / 1,234.5 µs"),
        ('| x 7 | 9.0 | 9 <!--= us("a 1"), us("a 2") --> |', "| x 7 | 3.3 | 1,234  |"),
        (
            '9.9 at batch 1, then 9.9<!--= us("a 1"), _, us("a 2") -->',
            "3.3 at batch 1, then 1,234.5",
        ),
        ('9 to 9 %<!--= span(longer("them", "a {1,2}")) -->', "9 to 100 %"),
        ('9.9<!--= us("b {1,5;1,5}") -->', None),
        ('9 9<!--= us("b {1,5;1,5}") -->', "5 5"),
        ("commit 1234567<!--= commit() -->", "commit abc1234"),
        ("128k, V4 and 9<!--= 2 + 2 -->", "128k, V4 and 4"),
        ('9<!--= us("a 3") -->', None),
        ("9<!--= nonsense -->", None),
        ("9<!--= __import__('os') -->", None),
        ('9\n\nnone<!--= us("a 1") -->', None),
        ('9<!--= us("a 1") --> none<!--= us("a 1") -->', None),
    ],
)
def test_a_mark_writes_the_numbers_in_front_of_it(before: str, after: str | None) -> None:
    if after is None:
        with pytest.raises(InvalidInput, match="mark"):
            rewritten(before, MADE)
        return
    written = rewritten(before, MADE)
    assert re.sub("<!--.*?-->", "", written) == after
    assert rewritten(written, MADE) == written
    assert re.findall("<!--.*?-->", written) == re.findall("<!--.*?-->", before)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It takes 8.5 µs.", ["8.5 µs"]),
        (
            "0.9 of theirs, 15 % more, 3 x, 2\u00d7, 4 GB/s.",
            ["0.9", "15 %", "3 x", "2\u00d7", "4 GB/s"],
        ),
        ("| a | 4.5 |\n| - | - |\n| b | 7 ms |", ["4.5", "7 ms"]),
        ('It takes 8.5 µs<!--= us("a 1") --> and 7 ms.', ["7 ms"]),
        ("`8.5 µs` and torch 2.13, Triton 3.6 and 3.9, Python 3.11+, V4.1, 64 x 32,768", []),
        ("```sh\n8.5 µs\n```\n\n    8.5 µs\n", []),
        ("[x](y-8.5) of 128 tokens, wanted 8.5", []),
        ("8.5 µs on an H200, 2026-11-16.", []),
        ("8.5 µs on 2026-11-16.", ["8.5 µs"]),
        ("One H200, 2026-11-16:\n\n| a | 8.5 |\n| - | - |", []),
        ("One H200, 2026-11-16:\n\nBut 8.5 µs.", ["8.5 µs"]),
        ("- One H200, 2026-11-16: 1 ms\n- 8.5 µs", ["8.5 µs"]),
    ],
)
def test_figures_without_a_source_are_found(text: str, found: list[str]) -> None:
    assert [re.findall("'(.*?)'", line)[0] for line in unsourced(text, MADE, page="x")] == found


def test_words_held_elsewhere_are_left_out_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ELSEWHERE, "x", {"takes 8.5 µs of": "a reason", "| a | 1 s |": "a table"})
    assert (
        unsourced("It takes\n8.5 µs of\nit.\n\n| a | 1 s |\n| - | - |\n| b | 2 s |", [], page="x")
        == []
    )
    assert unsourced("8.5 µs\n\n| c | 1 s |", [], page="x") != []


def test_a_section_of_a_journal_without_a_day_is_found() -> None:
    dated = "## a\nH200, 2026-11-16, abc1234: 8.5 µs\n"
    assert undated(f"{dated}\n## b\n7 ms\n### c\nwords", page="x") == ["x: '## b'"]
