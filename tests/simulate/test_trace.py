"""What traces may look like, and what is read of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsv4.errors import InvalidInput
from dsv4.simulate.names import NamedTrail, block_names, name_of
from dsv4.simulate.trace import TraceRequest, load_trace, repeated, with_sessions
from tests.simulate.loads import load


def written(path: Path, *lines: object) -> Path:
    path.write_text(
        "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    )
    return path


def test_mooncakes_format_and_lengths_only(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [5, -6]},
        "",
        {"timestamp": 1000, "input_length": 10, "output_length": 1},
        {"timestamp": 4000, "input_length": 600, "output_length": 0, "hash_ids": [5, 1 << 80]},
    )
    found = load_trace(trace)
    assert [each.at_s for each in found] == [0, 2, 3]
    assert [each.input_tokens for each in found] == [10, 700, 600]
    # whatever a trace calls them, names are numbers
    assert [each.names for each in found] == [[], [0, 1], [0, 2]]
    assert not any(each.has_answer for each in found)


def test_the_log_of_a_server(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "t.jsonl",
        {"message": "GET /health 200", "level": "info", "time": "2026-11-19T10:00:00.000Z"},
        {
            "time": "2026-11-19T10:00:00.000Z",
            "message": "…",
            "input_length": 130,
            "output_length": 200,
            "block_tokens": 128,
            "hash_ids": [7, 8],
            "session": "ab",
        },
        {"time": "2026-11-19T10:00:02.500Z", "input_length": 5, "output_length": 2},
    )
    first, second = load_trace(trace)
    assert (first.at_s, second.at_s) == (0, 2.5)
    assert (first.input_tokens, first.name_tokens, first.has_answer) == (130, 128, True)
    assert first.session == "ab"
    # the second name of the log's line ends in the answer
    assert block_names(first, 128) == [0, 1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1"),
        ("[" * 100_000, "line 1: RecursionError"),
        ('"message"', "found str"),
        ("null", "must be an object"),
        ("", "no request"),
    ],
)
def test_what_is_no_line_of_a_trace_is_said(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        load_trace(written(tmp_path / "t.jsonl", line))


SOUND = {"timestamp": 1, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_length": None}, "lengths"),
        ({"input_length": -1}, "lengths"),
        ({"input_length": 600.0}, "lengths"),
        ({"output_length": 10**30}, "lengths"),
        ({"timestamp": "x"}, "timestamp"),
        ({"timestamp": float("nan")}, "timestamp"),
        ({"timestamp": float("inf")}, "timestamp"),
        ({"timestamp": 1_763_000_000_000_000_000}, "in milliseconds"),  # of nanoseconds
        ({"hash_ids": 3}, "hash_ids"),
        ({"hash_ids": None}, "hash_ids"),
        ({"hash_ids": [True, False]}, "hash_ids"),
        ({"hash_ids": [1, 2, 3]}, "3 names, but its tokens make 2 blocks of 512"),
        ({"hash_ids": [1, 1]}, "after another name"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": 512}, "2 names, but its tokens make 1 blocks"),
        ({"session": ["a"]}, "session"),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, given: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInput, match=rf"line 2: .*{said}"):
        load_trace(written(tmp_path / "t.jsonl", SOUND, {**SOUND, **given}))
    assert len(load_trace(written(tmp_path / "t.jsonl", SOUND, SOUND))) == 2


def test_equal_names_mean_equal_prefixes(tmp_path: Path) -> None:
    """Names of blocks alone would make hits that no cache has."""
    asked = {"timestamp": 1, "input_length": 1536, "output_length": 1}
    lines = [{**asked, "hash_ids": names} for names in ([1, 2, 3], [4, 2, 3])]
    with pytest.raises(InvalidInput, match="line 2: hash_ids has 2 after another name"):
        load_trace(written(tmp_path / "t.jsonl", *lines))
    log = {**asked, "hash_ids": [9], "block_tokens": 128}
    with pytest.raises(InvalidInput, match="line 2: names of 128 tokens, after others of 512"):
        load_trace(written(tmp_path / "t.jsonl", lines[0], log))


def test_marks_and_ends_of_lines_of_other_systems(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(SOUND).encode() + b"\r\n")
    assert len(load_trace(path)) == 1
    path.write_text(json.dumps(SOUND), encoding="utf-16")
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_trace(path)


def request(tokens: int, names: list[int], **options: object) -> TraceRequest:
    return TraceRequest(at_s=0, input_tokens=tokens, output_tokens=1, names=names, **options)  # type: ignore[arg-type]


def test_names_of_smaller_and_larger_blocks() -> None:
    assert block_names(request(700, [5, 6]), 128) == [20, 21, 22, 23, 24]
    assert block_names(request(700, [5, 6]), 512) == [5]
    assert block_names(request(2100, [5, 6, 7, 8, 9]), 1024) == [6, 8]
    with pytest.raises(InvalidInput, match="multiple"):
        block_names(request(700, [5, 6]), 384)


def test_a_trail_has_the_names_and_then_its_own() -> None:
    trail = NamedTrail([3, 4], 128, 500, number=7)
    assert [name_of(digest) for digest in trail.chain[:2]] == [3, 4]
    other = NamedTrail([3, 4], 128, 500, number=8)
    assert trail.chain[2] != other.chain[2]
    assert len(trail.ids) == 500
    assert trail.copy().chain == trail.chain


def test_a_request_is_in_the_session_that_it_goes_on_from() -> None:
    first, second = request(1100, [0, 1, 2]), request(2000, [0, 1, 3, 4])
    other, log = request(1100, [0, 9, 10]), request(600, [20, 21], session="x")
    branch = request(1700, [0, 1, 7, 8])  # from a prompt that was gone on from already
    trace = [first, other, second, log, branch]
    assert [each.session for each in with_sessions(trace)] == ["#0", "#1", "#0", "x", "#4"]


def test_a_repeated_load_shares_nothing_with_itself() -> None:
    trace = load(20)
    again = [*repeated(trace, 3, period_s=100.0)]
    assert [each.at_s for each in again[20:40]] == [each.at_s + 100 for each in trace]
    names = [{name for each in again[n : n + 20] for name in each.names} for n in (0, 20, 40)]
    assert not names[0] & names[1]
    assert not names[1] & names[2]
