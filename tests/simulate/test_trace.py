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


def test_three_formats(tmp_path: Path) -> None:
    trace = written(
        tmp_path / "t.jsonl",
        {"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [5, 6]},
        {"timestamp": 1000, "input_length": 10, "output_length": 1},
        {"message": "GET /health 200", "level": "info", "time": "2026-11-19T10:00:00.000Z"},
        {
            "time": "2026-11-19T10:00:00.000Z",
            "timestamp": 2000,
            "message": "…",
            "input_length": 130,
            "output_length": 200,
            "block_tokens": 128,
            "hash_ids": [7, 8],
            "session": "ab",
        },
    )
    found = load_trace(trace)
    assert [each.at_s for each in found] == [0, 1, 2]
    assert [each.input_tokens for each in found] == [10, 130, 700]
    assert [each.name_tokens for each in found] == [512, 128, 512]
    assert [each.has_answer for each in found] == [False, True, False]
    assert found[1].session == "ab"
    # the second name of the log's line ends in the answer
    assert block_names(found[1], 128) == [7, 8]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 1"),
        ('{"timestamp": 1}', "input_length"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "timestamp"),
        ('{"timestamp": 1, "input_length": -1, "output_length": 1}', "lengths"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": 3}', "hash_ids"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "block_tokens": 0}',
            "block_tokens",
        ),
        ("", "no request"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        load_trace(written(tmp_path / "t.jsonl", line))


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
