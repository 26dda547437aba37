"""The kernel that writes records, compiled for sm_90 in every format."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dsv4.cache.records import RecordFormat, bf16, fp8_ds, fp8_row, index_fp8, mxfp4, nvfp4
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.model import ModelSpec
from tests.kernels.sm90 import compiled, empty, inexact_instructions, run_apart

RECORDS: dict[str, RecordFormat] = {
    "entries": fp8_ds(512, 64),
    "keys": mxfp4(128),
    "fp8_row": fp8_row(512, 64),
    "bf16": bf16(512, 64),
    "nvfp4": nvfp4(128),
    "fp8": index_fp8(128),
}


@pytest.fixture(scope="module")
def made() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_write_records_sm90")
    return found


@pytest.mark.parametrize("record", RECORDS)
def test_it_is_small_and_exact(made: dict[str, dict[str, Any]], record: str) -> None:
    found = made[record]
    assert found["spill_bytes"] == 0
    assert found["registers"] <= 128
    assert found["inexact"] == []


def test_the_hardware_converts_to_e4m3(made: dict[str, dict[str, Any]]) -> None:
    assert made["entries"]["e4m3_conversions"] > 0


def launch(record: str) -> Launch:
    from dsv4.kernels.record_store import record_constants
    from dsv4.kernels.write_records import _write_records_kernel

    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    arena, rows = empty(16, dtype=torch.uint8), empty(16, dtype=torch.int64)
    values, width = empty(16, dtype=torch.bfloat16), RECORDS[record].width
    return Launch(
        _write_records_kernel,
        (1,),
        (arena, rows, rows, values, schema.bytes.block, width, 0, 18432),
        {"WIDTH": width, "RECORD": record_constants(RECORDS[record])},
        {"num_warps": 4, "enable_fp_fusion": False},
    )


def compile_case(record: str) -> dict[str, Any]:
    found = compiled(launch(record))
    return {
        "spill_bytes": found.spill_bytes,
        "registers": found.registers,
        "e4m3_conversions": found.ptx.count("cvt.rn.satfinite.e4m3x2"),
        "inexact": inexact_instructions(found.ptx),
    }


if __name__ == "__main__":
    print(json.dumps({record: compile_case(record) for record in RECORDS}))
