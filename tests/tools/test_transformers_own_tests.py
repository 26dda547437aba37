"""tools/transformers_own_tests.py: where the tests come from, and what counts as expected."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tools import transformers_own_tests as tool


def test_without_a_source_it_says_so_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    monkeypatch.setattr(tool.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("TRANSFORMERS_SOURCE", raising=False)
    monkeypatch.setattr(sys, "argv", ["transformers_own_tests.py"])
    assert tool.main() == 0
    assert "no route" in capsys.readouterr().out
    found = tool.find_source(tmp_path, tmp_path)
    assert isinstance(found, str)
    assert tool.TEST_FILE in found
    (tmp_path / tool.TEST_FILE).parent.mkdir(parents=True)
    (tmp_path / tool.TEST_FILE).touch()
    assert tool.find_source(tmp_path, tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("ours", "is_expected"),
    [
        ({"a": "passed", "b": "failed", "c": "failed"}, True),
        ({"a": "failed", "b": "failed", "c": "failed"}, False),
        ({"a": "passed", "b": "passed", "c": "failed"}, False),
    ],
)
def test_exactly_what_is_listed_fails(
    ours: dict[str, str], is_expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`c` fails without us too."""
    monkeypatch.setattr(tool, "EXPECTED", {"fast": {"b": "why"}})
    own = {"a": "passed", "b": "passed", "c": "failed"}
    assert tool.compare("fast", own, ours) == is_expected
