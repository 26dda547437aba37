"""The gathers compiled for sm_90 with V4's shapes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource, WindowSource
from tests.kernels.sm90 import compiled, empty, run_apart

TOKENS, LISTED = 8, 512
CASES = ("entries", "all", "window")


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_gather_sm90")
    return found


@pytest.mark.parametrize("case", CASES)
def test_it_is_small_and_stores_16_bytes_per_thread(
    made: dict[str, dict[str, Any]], case: str
) -> None:
    found = made[case]
    assert found["spill_bytes"] == 0
    assert found["registers"] <= 128
    assert found["wide_stores"] > 0


def launch(case: str) -> Launch:
    from dsv4.kernels import gather

    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    tokens, count = empty(TOKENS, 4, dtype=torch.int32), empty(TOKENS, dtype=torch.int32)
    if case == "window":
        page = schema.layout.page("window", 0)
        assert page is not None
        window = WindowSource(
            arena=empty(8, schema.bytes.slot, dtype=torch.uint8),
            page=page,
            window=schema.model.window,
            staged=False,
        )
        out = empty(TOKENS, window.window, 512, dtype=torch.bfloat16)
        return gather.gather_window_launch(window, tokens, tokens[:, 2], tokens[:, 1], out, count)
    page = schema.layout.page("entries", 2)
    assert page is not None
    entries = EntrySource(
        arena=empty(8, schema.bytes.block, dtype=torch.uint8),
        page=page,
        block_table=empty(8, schema.max_blocks_per_request, dtype=torch.int32),
        ratio=4,
    )
    indices = None if case == "all" else empty(TOKENS, LISTED, dtype=torch.int32)
    out = empty(TOKENS, LISTED, 512, dtype=torch.bfloat16)
    return gather.gather_entries_launch(entries, tokens[:, 0], tokens[:, 1], indices, out, count)


def compile_case(case: str) -> dict[str, Any]:
    found = compiled(launch(case))
    return {
        "spill_bytes": found.spill_bytes,
        "registers": found.registers,
        "wide_stores": found.ptx.count("st.global.v4"),
    }


if __name__ == "__main__":
    print(json.dumps({case: compile_case(case) for case in CASES}))
