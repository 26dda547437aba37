"""The table of what runs on which GPU is what its sources say."""

from __future__ import annotations

import json

import pytest

from dsv4.cache.records import ENTRY_FORMATS, INDEX_FORMATS
from tools.support_matrix import PAGE, ROOT, ROWS, Row, matrix, written


def test_the_page_has_the_table_of_now() -> None:
    """`python -m tools.support_matrix` puts it right."""
    page = PAGE.read_text("utf-8")
    assert page == written(page)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.operation} {row.format}")
def test_a_row_names_a_test_on_a_gpu_and_launches(row: Row) -> None:
    assert (ROOT / "tests" / "gpu" / f"test_{row.test}_gpu.py").exists()
    cells = next(
        line.split("|")[3:-1]
        for line in matrix().splitlines()
        if line.startswith(f"| {row.operation} | {row.format} |")
    )
    assert all(cell.strip() in ("compiled", "**run**") for cell in cells)


def test_every_format_of_the_kernels_has_a_row() -> None:
    named = " ".join(row.format for row in ROWS)
    for name in {*ENTRY_FORMATS, *INDEX_FORMATS} - {"fp32"}:
        assert name in named


def test_only_the_gpu_with_results_has_run_anything() -> None:
    rows = [line.split("|")[3:-1] for line in matrix().splitlines()[2:]]
    targets = [cell.strip() for cell in matrix().splitlines()[0].split("|")[3:-1]]
    ran = {targets[nth] for row in rows for nth, cell in enumerate(row) if "run" in cell}
    assert ran == {"sm_90"}
    assert set(json.loads((ROOT / "tests/kernels/instructions.json").read_text())) == set(targets)
