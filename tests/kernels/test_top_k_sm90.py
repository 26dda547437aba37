"""The launches of top-k, and of the scores of blocks, compiled for sm_90, at the lengths that they
are cut for."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dsv4.kernels.launch import Launch
from tests.kernels.sm90 import compiled, empty, run_apart

# rows, scores per row, k, launches that it takes
SHAPES = (
    (1, 262_144, 1024, 2),
    (8, 262_144, 512, 2),
    (1, 131_072, 2048, 2),
    (256, 8192, 512, 1),
    (256, 2048, 512, 1),
    (64, 4096, 2048, 1),
    (8192, 32_768, 512, 1),
)
# name -> (rows, scores per row, k, whether scores are bf16, which launch)
CASES = {
    f"{rows} x {columns} {kind} launch {nth}": (rows, columns, k, kind == "bf16", nth)
    for rows, columns, k, launches in SHAPES
    for kind in (("bf16", "fp32") if k < 2048 else ("bf16",))  # candidates' are bf16 numbers
    for nth in range(launches)
} | {"blocks": (1, 1_048_576, 2048, True, None)}
CANDIDATES, SPAN = 1024, 8  # of V4.1


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_top_k_sm90")
    return found


def launches(rows: int, columns: int, k: int, bf16_scores: bool) -> tuple[Launch, ...]:
    from dsv4.kernels.top_k import top_k_launches

    return tuple(
        top_k_launches(
            empty(rows, columns),
            empty(rows, 4, dtype=torch.int32),
            empty(16, dtype=torch.int32),
            empty(rows, k, dtype=torch.int32),
            4,
            bf16_scores,
        )
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_short_rows_take_one_launch_and_long_ones_two(shape: tuple[int, int, int, int]) -> None:
    rows, columns, k, wanted = shape
    for bf16_scores in (True, False):
        assert len(launches(rows, columns, k, bf16_scores)) == wanted


@pytest.mark.parametrize("case", CASES)
def test_it_stays_in_registers(made: dict[str, dict[str, Any]], case: str) -> None:
    assert made[case]["spill_bytes"] == 0


@pytest.mark.parametrize("case", CASES)
def test_it_loads_16_bytes_per_thread_and_leaves_room_for_two_programs(
    made: dict[str, dict[str, Any]], case: str
) -> None:
    found = made[case]
    assert found["loads_of_16_bytes"] >= 2
    assert 2 * found["registers"] * found["threads"] <= 65_536


def launch(rows: int, columns: int, k: int, bf16_scores: bool, nth: int | None) -> Launch:
    """The nth launch of top-k, or that of the scores of blocks."""
    from dsv4.kernels.candidates import block_scores_launch

    if nth is not None:
        return launches(rows, columns, k, bf16_scores)[nth]
    scores, tokens = empty(rows, columns), empty(rows, 4, dtype=torch.int32)
    return block_scores_launch(
        scores, tokens=tokens, ratio=1, span=SPAN, out=empty(rows, columns // SPAN)
    )


def columns_launch() -> Launch:
    """From columns of candidate blocks back to entries."""
    from dsv4.kernels.candidates import entries_of_columns_launch

    return entries_of_columns_launch(
        empty(64, 512, dtype=torch.int32),
        tokens=empty(64, 4, dtype=torch.int32),
        blocks=empty(64, CANDIDATES, dtype=torch.int32),
        span=SPAN,
    )


def compile_case(case: str) -> dict[str, Any]:
    one = launch(*CASES[case])
    found = compiled(one)
    return {
        "threads": 32 * one.options["num_warps"],
        "registers": found.registers,
        "spill_bytes": found.spill_bytes,
        "loads_of_16_bytes": found.ptx.count("ld.global.v4.b32"),
    }


if __name__ == "__main__":
    print(json.dumps({case: compile_case(case) for case in CASES}))
