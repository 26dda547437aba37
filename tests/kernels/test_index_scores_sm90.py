"""The portable scoring kernel compiled for sm_90 with V4's shapes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.cache import records
from dsv4.cache.pages import Page
from dsv4.kernels.launch import Launch
from dsv4.ops.calls import EntrySource, Scoring
from tests.kernels.sm90 import compiled, empty, run_apart
from tests.support.formats import BF16_INDEX_FORMATS

TOKENS, HEADS, WIDTH = 64, 64, 128
# name -> (format of the keys, tokens per request)
CASES = {
    f"{record} band {band}": (record, band) for record in BF16_INDEX_FORMATS for band in (1, 16)
}


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_index_scores_sm90")
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_stays_in_registers(made: dict[str, dict[str, Any]], case: str) -> None:
    assert made[case]["spill_bytes"] == 0


@pytest.mark.parametrize("case", CASES)
def test_it_uses_the_matrix_unit(made: dict[str, dict[str, Any]], case: str) -> None:
    assert "HGMMA" in made[case]["opcodes"]


def test_four_programs_fit_a_processor(made: dict[str, dict[str, Any]]) -> None:
    """65,536 registers hold four programs of 128 threads with 128 each."""
    assert made["mxfp4 band 1"]["registers"] <= 128


def test_the_head_sum_is_a_tree_of_additions(made: dict[str, dict[str, Any]]) -> None:
    """63 additions per entry: 64 entries of a program are half a one for each of 128 threads. A
    copy through shared memory or a shuffle at every step would show."""
    opcodes = made["mxfp4 band 1"]["opcodes"]
    assert opcodes["FADD"] <= 40
    assert opcodes["HMUL2"] <= 90


def launch(record: str, band: int) -> Launch:
    from dsv4.kernels.index_scores import MAX_TOKENS, index_scores_launch

    keys = EntrySource(
        arena=empty(2, 449_824, dtype=torch.uint8),
        page=Page(
            kind="index_keys",
            layer=2,
            offset_bytes=1024,
            rows=32,
            format=records.index_format(record, index_dim=WIDTH),
        ),
        block_table=empty(2, 8192, dtype=torch.int32),
        ratio=4,
    )
    made = index_scores_launch(
        Scoring(
            q=empty(TOKENS, HEADS, WIDTH, dtype=torch.bfloat16),
            weights=empty(TOKENS, HEADS, dtype=torch.bfloat16),
            tokens=empty(TOKENS, 4, dtype=torch.int32),
            keys=keys,
            scores=empty(TOKENS, 4096),
            skip_visible=512,
            tokens_per_request=band,
        )
    )
    # the most tokens of a launch, whose lengths every program holds
    constants = replace(made.constants["S"], BANDS=MAX_TOKENS // band)
    return made._replace(constants={"S": constants})


def compile_case(record: str, band: int) -> dict[str, Any]:
    found = compiled(launch(record, band))
    return {
        "registers": found.registers,
        "spill_bytes": found.spill_bytes,
        "opcodes": dict(found.opcodes),
    }


if __name__ == "__main__":
    print(json.dumps({case: compile_case(*CASES[case]) for case in CASES}))
