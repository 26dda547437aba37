"""Golden files of DeepSeek-V4.1: a cut of the official run, and files nobody has seen before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dsv4.errors import ConfigError, InvalidInput
from dsv4.verify import ArrayReport, verify
from tests.test_verify_unseen import make

GOLDEN = Path(__file__).parents[1] / "data" / "golden_v41_small.npz"
STORED = ("kv_quant", "kv_bytes", "entries", "entries_bytes", "index_keys", "index_bytes")
READ = ("index_scores", "indices (as sets)", "candidate_blocks")


def check(reports: list[ArrayReport], count: int) -> None:
    """Stored bytes, scores and selections are the file's; attention is within 3e-3."""
    assert len(reports) == count
    for report in reports:
        if report.array.endswith((*STORED, *READ)):
            assert report.differing == 0, report
        else:
            assert report.array.endswith(("/out", "/draft_out"))
            assert report.worst <= 3e-3, report
        assert report.passed


def test_the_official_run_is_reproduced() -> None:
    check(verify(GOLDEN, backend="reference"), 24)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"seed": 21, "tokens": 75, "heads": 3, "index_heads": 5, "top_k": 20},
            marks=pytest.mark.nightly,
        ),
        {"seed": 22, "tokens": 67, "heads": 1, "index_heads": 16, "top_k": 9, "head_dim": 512},
        # fewer than a draft has
        {"seed": 23, "tokens": 3, "heads": 2, "index_heads": 4, "top_k": 3},
    ],
    ids=lambda options: f"seed {options['seed']}",
)
def test_reference_reproduces_an_unseen_file(tmp_path: Path, options: dict[str, int]) -> None:
    golden = make(tmp_path / "golden.npz", "--v41", **options)
    check(verify(golden, backend="reference"), 44)


@pytest.mark.parametrize(
    ("array", "place"),
    [
        ("full2a/entries_bytes", (3, 5)),
        ("full1/index_bytes", (7, 66)),
        ("full1/candidate_blocks", (69, 0)),
        ("reindex1/indices", (69, 140)),
        ("reindex1/index_scores", (69, 3)),
    ],
)
def test_a_changed_expectation_is_seen(tmp_path: Path, array: str, place: tuple[int, int]) -> None:
    with np.load(GOLDEN) as file:
        arrays = {name: file[name].copy() for name in file.files}
    if array.endswith("indices"):
        row = arrays[array][place[0]]
        row[place[1]] = next(e for e in range(70, 140) if e not in row)
    else:
        arrays[array][place] ^= 16
    np.savez(tmp_path / "changed.npz", **arrays)
    missed = [r for r in verify(tmp_path / "changed.npz", backend="reference") if not r.passed]
    assert [report.array.split(" ")[0] for report in missed][:1] == [array]


@pytest.mark.parametrize("array", ["full2a/Z", "full1/index_wk"])
def test_changed_inputs_are_seen(tmp_path: Path, array: str) -> None:
    with np.load(GOLDEN) as file:
        arrays = {name: file[name].copy() for name in file.files}
    changed = arrays[array][7]
    arrays[array][7] = changed ^ 0x8000 if changed.dtype == np.uint16 else changed + 1
    np.savez(tmp_path / "changed.npz", **arrays)
    assert any(not report.passed for report in verify(tmp_path / "changed.npz"))


def test_too_few_candidates_are_refused(tmp_path: Path) -> None:
    with np.load(GOLDEN) as file:
        arrays = {name: file[name].copy() for name in file.files}
    arrays["meta"][7] = 4  # 25 entries for certain, of which 32 would be selected
    np.savez(tmp_path / "changed.npz", **arrays)
    with pytest.raises(ConfigError, match="fewer than index_topk=32"):
        verify(tmp_path / "changed.npz")


@pytest.mark.parametrize(
    ("array", "value", "message"),
    [
        ("meta", None, "has no .*meta"),
        ("meta", np.arange(6), "6 numbers in meta"),
        ("swa/kv", None, "has no .*swa/kv"),
        ("full2a/norm", None, "has no .*full2a/norm"),
        ("dspark/kv", None, "has no .*dspark/kv"),
        ("full2a/out", None, "has no .*full2a/out"),
        ("reindex1/index_weights", None, "has no .*reindex1/index_weights"),
        ("full1/C", np.array(3), "full1/C.* not arrays of numbers"),
        ("full1/C", np.array(["a"]), "full1/C.* not arrays of numbers"),
        ("full2a/Z", np.zeros((69, 512), np.float32), "full2a/Z .*must have 70 rows"),
        ("rows", np.array([0, 70], np.int32), "not positions of 70 tokens"),
        ("rows", None, "q has shape .*must have 70 rows"),
    ],
)
def test_a_file_whose_arrays_do_not_fit_is_refused(
    tmp_path: Path, array: str, value: np.ndarray | None, message: str
) -> None:
    with np.load(GOLDEN) as file:
        arrays = {name: file[name] for name in file.files if name != array}
    if value is not None:
        arrays[array] = value
    np.savez(tmp_path / "changed.npz", **arrays)
    with pytest.raises(InvalidInput, match=message):
        verify(tmp_path / "changed.npz")


@pytest.mark.parametrize("tokens", [5, pytest.param(20, marks=pytest.mark.nightly)])
def test_interpreted_triton_reproduces_an_unseen_file(tmp_path: Path, tokens: int) -> None:
    """Twenty tokens have more entries than candidates."""
    options = {"seed": 24, "tokens": tokens, "heads": 2, "index_heads": 4, "top_k": 2}
    golden = make(tmp_path / "golden.npz", "--v41", candidate_blocks=2, **options)
    check(verify(golden, backend="triton"), 44)
