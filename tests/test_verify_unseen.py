"""Golden files nobody has seen before: other seeds, lengths, heads, top-k. Nothing may be tuned to
the ones that are there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.verify import verify

TOOL = Path(__file__).parents[1] / "tools" / "make_golden.py"


def make(path: Path, *flags: str, **options: int) -> Path:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    subprocess.run([sys.executable, str(TOOL), str(path), *flags, *arguments], check=True)
    return path


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"seed": 11, "tokens": 263, "heads": 3, "index_heads": 5, "top_k": 20},
            marks=pytest.mark.nightly,
        ),
        {"seed": 12, "tokens": 133, "heads": 1, "index_heads": 16, "top_k": 64, "head_dim": 512},
        {"seed": 13, "tokens": 7, "heads": 2, "index_heads": 4, "top_k": 3},
    ],
    ids=lambda options: f"seed {options['seed']}",
)
def test_reference_reproduces_an_unseen_file(tmp_path: Path, options: dict[str, int]) -> None:
    reports = verify(make(tmp_path / "golden.npz", **options), backend="reference")
    assert len(reports) == 11
    assert not [report for report in reports if not report.passed]


@pytest.mark.parametrize("tokens", [13, pytest.param(18, marks=pytest.mark.nightly)])
def test_interpreted_triton_reproduces_an_unseen_file(tmp_path: Path, tokens: int) -> None:
    """Thirteen tokens have more entries than are selected."""
    golden = make(tmp_path / "golden.npz", seed=14, tokens=tokens, heads=2, index_heads=4, top_k=2)
    reports = verify(golden, backend="triton")
    assert len(reports) == 11
    assert not [report for report in reports if not report.passed]
