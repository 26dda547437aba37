"""What ptxas makes of Hopper's attention of wide steps at V4's shapes."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.model import ModelSpec
from dsv4.ops.calls import Attention, EntrySource, WindowSource
from tests.kernels.sm90 import compiled, empty, ptxas_messages, run_apart

CSA_LAYER, HCA_LAYER = 2, 3
PROCESSORS = 132
TOKENS, REQUESTS = 1024, 2
MAX_SHARED_BYTES = 232_448
# name -> (model, heads, layer or None for a window alone)
CASES: dict[str, tuple[str, int, int | None]] = {
    "flash csa": ("v4-flash", 64, CSA_LAYER),
    "flash hca": ("v4-flash", 64, HCA_LAYER),
    "pro csa": ("v4-pro", 128, CSA_LAYER),
    "16 heads, hca": ("v4-flash", 16, HCA_LAYER),
    "window": ("v4-flash", 64, None),
}
NIGHTLY = {"pro csa", "16 heads, hca", "window"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[pytest.mark.nightly] if case in NIGHTLY else []) for case in CASES
    ],
)
def attend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_apart("tests.kernels.test_attend_wide_sm90", request.param)


def test_nothing_spills_and_products_overlap(attend: dict[str, Any]) -> None:
    assert attend["spill_bytes"] == 0
    # where the accumulator of one wgmma moves under another, ptxas warns that it runs them in turn
    assert "serialized" not in attend["ptxas"]
    assert "warning" not in attend["ptxas"].lower()


def test_it_fits_the_shared_memory(attend: dict[str, Any]) -> None:
    assert attend["dynamic_shared_bytes"] <= MAX_SHARED_BYTES


def test_keys_arrive_in_bulk_or_16_bytes_a_thread(attend: dict[str, Any]) -> None:
    assert attend["wgmma"] > 0
    assert attend["other_products"] == 0
    assert attend["bulk_copies"] > 0
    assert set(attend["async_copies"]) == {"LDGSTS.E.BYPASS.128"}


def call(case: str) -> Attention:
    model, heads, layer = CASES[case]
    schema = CacheSchema.build(ModelSpec.preset(model))
    width, window_page = schema.model.head_dim, schema.layout.page("window", CSA_LAYER)
    assert window_page is not None
    entries = indices = None
    ratio = 1
    if layer is not None:
        page, ratio = schema.layout.page("entries", layer), schema.layers[layer].spec.ratio
        assert page is not None
        entries = EntrySource(
            arena=empty(8, schema.bytes.block, dtype=torch.uint8),
            page=page,
            block_table=empty(8, schema.max_blocks_per_request, dtype=torch.int32),
            ratio=ratio,
        )
        if layer == CSA_LAYER:
            indices = empty(TOKENS, schema.model.index_topk, dtype=torch.int32)
    return Attention(
        q=empty(TOKENS, heads, width, dtype=torch.bfloat16),
        sink=empty(heads),
        tokens=empty(TOKENS, 4, dtype=torch.int32),
        batch=empty(REQUESTS, 4, dtype=torch.int32),
        window=WindowSource(
            arena=empty(8, schema.bytes.slot, dtype=torch.uint8),
            page=replace(window_page, rows=2 * TOKENS),
            window=schema.model.window,
            staged=True,
        ),
        entries=entries,
        indices=indices,
        out=empty(TOKENS, heads, width, dtype=torch.bfloat16),
        lse=empty(TOKENS, heads),
        inverse_rope=empty(schema.max_context, schema.model.rope_dim),
        tokens_per_request=TOKENS // REQUESTS,
        max_visible=8192 // ratio,
        decoded=empty(64 << 20, dtype=torch.uint8),
    )


def launch(case: str) -> Launch:
    from dsv4.kernels.hopper import attend_wide

    assert attend_wide.supports(call(case))
    assert not attend_wide.supports(replace(call(case), window_cut=True))
    return attend_wide.attend_launch(call(case), programs=PROCESSORS)


def decode_launch(case: str) -> Launch:
    """What it reads is decoded by."""
    from dsv4.kernels import decode

    return decode.decode_launch(call(case))


def compile_attend(case: str) -> dict[str, Any]:
    made = compiled(launch(case))
    return {
        "spill_bytes": made.spill_bytes,
        "dynamic_shared_bytes": made.dynamic_shared_bytes,
        "wgmma": made.opcodes["HGMMA"],
        "other_products": made.opcodes["HMMA"],
        "async_copies": re.findall(r"LDGSTS\.[.\w]*", made.sass),
        "bulk_copies": made.opcodes["UTMALDG"],
        "ptxas": ptxas_messages(made.ptx),
    }


if __name__ == "__main__":
    print(json.dumps(compile_attend(sys.argv[1])))
