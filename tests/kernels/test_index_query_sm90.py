"""The kernel that prepares index queries, compiled for sm_90 with V4's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dsv4.cache import records
from dsv4.kernels.launch import Launch
from tests.kernels.sm90 import compiled, empty, inexact_instructions, run_apart
from tests.support.formats import BF16_INDEX_FORMATS

TOKENS, HEADS, WIDTH, ROPE, POSITIONS = 64, 64, 128, 64, 16


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_index_query_sm90")
    return found


@pytest.mark.parametrize("record", BF16_INDEX_FORMATS)
def test_it_stays_in_registers(made: dict[str, dict[str, Any]], record: str) -> None:
    assert made[record]["spill_bytes"] == 0


@pytest.mark.parametrize("record", BF16_INDEX_FORMATS)
def test_it_is_made_of_exact_operations(made: dict[str, dict[str, Any]], record: str) -> None:
    """The bits of queries are the reference's, as those of the keys are."""
    assert made[record]["inexact"] == []


def launch(record: str) -> Launch:
    from dsv4.kernels.index_query import index_query_launch

    q = empty(TOKENS, HEADS, WIDTH, dtype=torch.bfloat16)
    return index_query_launch(
        q,
        tokens=empty(TOKENS, 4, dtype=torch.int32),
        rope=empty(POSITIONS, ROPE),
        record=records.index_format(record, index_dim=WIDTH),
        out=q,
    )


def compile_case(record: str) -> dict[str, Any]:
    found = compiled(launch(record))
    return {"spill_bytes": found.spill_bytes, "inexact": inexact_instructions(found.ptx)}


if __name__ == "__main__":
    print(json.dumps({record: compile_case(record) for record in BF16_INDEX_FORMATS}))
