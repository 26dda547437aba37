"""The small kernels compiled for sm_90: nothing spills, conversions and wide accesses are there."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from dsv4.cache.pages import Page
from dsv4.cache.records import RecordFormat, bf16, fp8_ds, fp8_row, index_fp8, mxfp4, nvfp4
from dsv4.cache.schema import CacheSchema
from dsv4.model import ModelSpec
from tests.kernels.sm90 import compile_launch, inexact_instructions, run_apart

RECORDS: dict[str, RecordFormat] = {
    "entries": fp8_ds(512, 64),
    "keys": mxfp4(128),
    "fp8_row": fp8_row(512, 64),
    "bf16": bf16(512, 64),
    "nvfp4": nvfp4(128),
    "fp8": index_fp8(128),
}
NAMES = (*(f"write {name}" for name in RECORDS), "gather entries", "gather all", "gather window")


def compile_case(name: str) -> dict[str, object]:
    from dsv4.kernels import gather, write_records
    from dsv4.kernels.record_store import record_constants

    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    page = schema.page("entries", 2)
    assert isinstance(page, Page)
    u8, i32 = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.int32)
    i64, bf16 = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.bfloat16)
    if name.startswith("write"):
        record = RECORDS[name.split()[1]]
        kernel = write_records._write_records_kernel
        arguments = (u8, i64, i64, bf16, schema.block_bytes, record.width, 0, 18432)
        constants = {"WIDTH": record.width, "RECORD": record_constants(record)}
        fusion = False
    elif name == "gather window":
        kernel = gather._gather_window_kernel
        arguments = (u8, i32, i32, i32, bf16, i32, schema.slot_bytes, 4, 4, 128 * 512, 0, 73728)
        constants = {
            "WINDOW": 128, "RING": 128, "CHUNK": False, "WIDTH": 512,
            "RECORD": record_constants(RECORDS["entries"]), "BLOCK": gather.BLOCK_KEYS,
        }  # fmt: skip
        fusion = True
    else:
        kernel = gather._gather_entries_kernel
        arguments = (
            u8, i32, i32, i32, i32, bf16, i32, schema.block_bytes, 8192, 4, 4, 512, 512 * 512, 512,
            page.offset_bytes, page.scale_offset_bytes,
        )  # fmt: skip
        constants = {
            "RATIO": 4, "PAGE_ROWS": 32, "ALL": name == "gather all", "WIDTH": 512,
            "RECORD": record_constants(RECORDS["entries"]), "BLOCK": gather.BLOCK_KEYS,
        }  # fmt: skip
        fusion = True
    compiled = compile_launch(kernel, arguments, constants, num_warps=4, fp_fusion=fusion)
    return {
        "spill_bytes": compiled.spill_bytes,
        "registers": compiled.registers,
        "e4m3_conversions": compiled.ptx.count("cvt.rn.satfinite.e4m3x2"),
        "wide_stores": compiled.ptx.count("st.global.v4"),
        "inexact": inexact_instructions(compiled.ptx),
    }


@pytest.mark.parametrize("name", NAMES)
def test_compiled(name: str) -> None:
    found = run_apart("tests.kernels.test_small_sm90", name)
    assert found["spill_bytes"] == 0
    assert found["registers"] <= 128
    if name.startswith("write"):
        assert found["inexact"] == []
    if name == "write entries":
        assert found["e4m3_conversions"] > 0
    if name.startswith("gather"):
        assert found["wide_stores"] > 0


if __name__ == "__main__":
    print(json.dumps(compile_case(sys.argv[1])))
