"""The small kernels compiled for sm_90: nothing spills, conversions and wide accesses are there."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import Tensor

from dsv4.cache.pages import Page
from dsv4.cache.records import RecordFormat, bf16, fp8_ds, fp8_row, index_fp8, mxfp4, nvfp4
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource, WindowSource
from tests.kernels.sm90 import compiled, inexact_instructions, run_apart

RECORDS: dict[str, RecordFormat] = {
    "entries": fp8_ds(512, 64),
    "keys": mxfp4(128),
    "fp8_row": fp8_row(512, 64),
    "bf16": bf16(512, 64),
    "nvfp4": nvfp4(128),
    "fp8": index_fp8(128),
}
NAMES = (*(f"write {name}" for name in RECORDS), "gather entries", "gather all", "gather window")


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gather_launch(name: str, schema: CacheSchema) -> Launch:
    from dsv4.kernels import gather

    tokens = empty(8, 4)
    if name == "gather window":
        page = schema.page("window", 0)
        assert isinstance(page, Page)
        window = WindowSource(
            arena=empty(8, schema.slot_bytes, dtype=torch.uint8),
            page=page,
            window=schema.model.window,
            staged=False,
        )
        out = empty(8, window.window, 512, dtype=torch.bfloat16)
        return gather.gather_window_launch(
            window, tokens, tokens[:, 2], tokens[:, 1], out, empty(8)
        )
    page = schema.page("entries", 2)
    assert isinstance(page, Page)
    entries = EntrySource(
        arena=empty(8, schema.block_bytes, dtype=torch.uint8),
        page=page,
        block_table=empty(8, schema.max_blocks_per_request),
        ratio=4,
    )
    indices = None if name == "gather all" else empty(8, 512)
    out = empty(8, 512, 512, dtype=torch.bfloat16)
    return gather.gather_entries_launch(entries, tokens[:, 0], tokens[:, 1], indices, out, empty(8))


def small_launch(name: str) -> Launch:
    from dsv4.kernels import write_records
    from dsv4.kernels.record_store import record_constants

    schema = CacheSchema.build(ModelSpec.preset("v4-flash"))
    if not name.startswith("write"):
        return gather_launch(name, schema)
    u8, i64 = torch.zeros(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.int64)
    bf16 = torch.zeros(16, dtype=torch.bfloat16)
    record = RECORDS[name.split()[1]]
    return Launch(
        write_records._write_records_kernel,
        (1,),
        (u8, i64, i64, bf16, schema.block_bytes, record.width, 0, 18432),
        {"WIDTH": record.width, "RECORD": record_constants(record)},
        {"num_warps": 4, "enable_fp_fusion": False},
    )


def compile_case(name: str) -> dict[str, object]:
    made = compiled(small_launch(name))
    return {
        "spill_bytes": made.spill_bytes,
        "registers": made.registers,
        "e4m3_conversions": made.ptx.count("cvt.rn.satfinite.e4m3x2"),
        "wide_stores": made.ptx.count("st.global.v4"),
        "inexact": inexact_instructions(made.ptx),
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
