"""The prefix benchmark runs, at a size for a CPU, and measures what it says."""

from __future__ import annotations

from benchmarks import prefix


def test_a_small_admission_and_the_hashing(monkeypatch):
    monkeypatch.setattr(prefix, "REPEATS", 2)
    monkeypatch.setattr(prefix, "HASHED_BLOCKS", 16)
    found = prefix.measure_admission(2000, "cpu")  # asserts a full hit from a snapshot itself
    assert found.microseconds > 0
    assert found.must_move_bytes == 2000 * 8
    assert prefix.measure_hashing().must_move_bytes == 128 * 4
    assert {case.context for case in prefix.cases("cpu")} == {131_072, 1_048_576, None}
