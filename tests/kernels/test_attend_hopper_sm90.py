"""What ptxas makes of the Hopper attention kernel at the shapes of V4 and V4.1, in a process that
compiles."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

from dsv4.cache.pages import PageForm
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.kernels.target import TRITON
from dsv4.model import ModelSpec
from dsv4.ops.calls import Attention, EntrySource, WindowSource
from tests.kernels.sm90 import compiled, empty, ptxas_messages, run_apart

CSA_LAYER, HCA_LAYER = 2, 3
PAIRS_LAYER, SINGLES_LAYER = 2, 20  # of V4.1: two tokens to an entry, and one
PROCESSORS = 132
MAX_SHARED_BYTES = 232_448
# name -> (model, heads, layer or None for a window alone, tokens, whether a chunk)
CASES: dict[str, tuple[str, int, int | None, int, bool]] = {
    "flash csa split": ("v4-flash", 64, CSA_LAYER, 16, False),
    "flash csa split and sliced": ("v4-flash", 64, CSA_LAYER, 1, False),
    "flash csa resolved and split": ("v4-flash", 64, CSA_LAYER, 16, False),
    "v41 resolved": ("v41-flash", 64, SINGLES_LAYER, 256, False),
    "flash hca whole": ("v4-flash", 64, HCA_LAYER, 256, False),
    "pro csa chunk": ("v4-pro", 128, CSA_LAYER, 1024, True),
    "pro window": ("v4-pro", 128, None, 1024, False),
    "16 heads, csa split and sliced": ("v4-flash", 16, CSA_LAYER, 1, False),
    "8 heads, hca whole": ("v4-flash", 8, HCA_LAYER, 256, False),
    "32 heads, csa chunk": ("v4-pro", 32, CSA_LAYER, 1024, True),
    "96 heads, csa split": ("v4-pro", 96, CSA_LAYER, 8, False),
    "v41 split": ("v41-flash", 64, SINGLES_LAYER, 16, False),
    "v41 split and sliced": ("v41-flash", 64, PAIRS_LAYER, 1, False),
    "v41 whole": ("v41-flash", 64, SINGLES_LAYER, 256, False),
    "v41 chunk": ("v41-flash", 64, PAIRS_LAYER, 1024, True),
    "v41 window": ("v41-flash", 64, None, 256, False),
    "v41, 8 heads split": ("v41-flash", 8, SINGLES_LAYER, 16, False),
}
# a register or two, stored and loaded at some places outside of loops: instructions × 4 bytes
SPILL_LIMIT = {"96 heads, csa split": 16, "v41 split": 32, "v41, 8 heads split": 32}
SPILL_LIMIT_OF_TRITON = {(3, 7, "v41 split"): 36}
LOOP_SPILL_LIMIT = {"96 heads, csa split": 2}  # where parts are added
NIGHTLY = {"8 heads, hca whole", "32 heads, csa chunk", "flash csa resolved and split"}
NIGHTLY |= {case for case in CASES if case.startswith("v41")} - {"v41 split"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[pytest.mark.nightly] if case in NIGHTLY else []) for case in CASES
    ],
)
def attend(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = run_apart("tests.kernels.test_attend_hopper_sm90", request.param)
    usual = SPILL_LIMIT.get(request.param, 0)
    return {
        "spill_limit": SPILL_LIMIT_OF_TRITON.get((*found["triton"], request.param), usual),
        "loop_spill_limit": LOOP_SPILL_LIMIT.get(request.param, 0),
        **found,
    }


def test_nothing_spills_and_products_overlap(attend: dict[str, Any]) -> None:
    assert attend["spill_bytes"] <= attend["spill_limit"]
    assert attend["spills_in_loops"] <= attend["loop_spill_limit"]
    found = re.findall(r"(\d+) bytes spill", attend["ptxas"])
    assert found
    assert sum(map(int, found)) <= attend["spill_limit"]
    # where the accumulator of one wgmma moves under another, ptxas warns that it runs them in turn
    assert "serialized" not in attend["ptxas"]
    assert "warning" not in attend["ptxas"].lower()


def test_it_fits_the_shared_memory(attend: dict[str, Any]) -> None:
    assert attend["dynamic_shared_bytes"] <= MAX_SHARED_BYTES


def test_products_run_on_wgmma_and_records_arrive_16_bytes_a_thread(attend: dict[str, Any]) -> None:
    assert attend["wgmma"] > 0
    assert attend["other_products"] == 0
    assert attend["async_copies"]
    # a word per row for scales, entries and block ids, which the next ones are fetched with
    assert set(attend["async_copies"]) == {"LDGSTS.E.BYPASS.128", "LDGSTS.E"}
    # and are decoded two at a time, not through the conversion unit
    assert attend["bf16x2_products"] > 0
    assert attend["fp8_conversions"] == 0


def test_each_role_sets_its_registers(attend: dict[str, Any]) -> None:
    """Two of the three roles ask for what `warp_specialize` was told, and left takes the rest."""
    from dsv4.kernels.hopper import attend as kernel

    asked = (kernel.RIGHT_REGISTERS.value, kernel.PRODUCER_REGISTERS.value)
    assert {str(count) for count in asked} <= set(attend["register_counts"])
    assert attend["registers"] * 3 * 32 * kernel.WARPS_PER_ROLE <= 65_536


def launch(case: str, *, form: PageForm = "planes") -> Launch:
    from dsv4.kernels.hopper import attend as kernel

    made = call(*CASES[case], resolved="resolved" in case, form=form)
    return kernel.attend_launch(made, programs=PROCESSORS)


def call(
    model: str,
    heads: int,
    layer: int | None,
    tokens: int,
    chunk: bool,
    *,
    max_context: int | None = None,
    resolved: bool = False,
    form: PageForm = "planes",
) -> Attention:
    from dsv4.kernels.hopper import attend as kernel

    schema = CacheSchema.build(
        ModelSpec.preset(model), max_context=max_context, entries_apart=resolved, page_form=form
    )
    width = schema.model.head_dim
    window_page = schema.layout.page("window", CSA_LAYER)
    assert window_page is not None
    entries = indices = None
    if layer is not None:
        entry_page = schema.layout.page("entries", layer)
        assert entry_page is not None
        entries = EntrySource(
            arena=empty(
                8, schema.bytes.entries if resolved else schema.bytes.block, dtype=torch.uint8
            ),
            page=entry_page,
            block_table=empty(8, schema.max_blocks_per_request, dtype=torch.int32),
            ratio=schema.layers[layer].spec.ratio,
            resolved=resolved,
        )
        if layer != HCA_LAYER:
            indices = empty(tokens, schema.model.index_topk, dtype=torch.int32)
    window = WindowSource(
        arena=empty(8, schema.bytes.slot, dtype=torch.uint8),
        page=window_page,
        window=schema.model.window,
        staged=chunk,
    )
    q = empty(tokens, heads, width, dtype=torch.bfloat16)
    made = Attention(
        q=q,
        sink=empty(heads),
        tokens=empty(tokens, 4, dtype=torch.int32),
        batch=empty(tokens, 4, dtype=torch.int32),
        window=window,
        entries=entries,
        indices=indices,
        out=empty(tokens, heads, width, dtype=torch.bfloat16),
        lse=empty(tokens, heads),
        inverse_rope=empty(schema.max_context, schema.model.rope_dim),
        workspace=empty(kernel.PARTS_START + PROCESSORS * kernel.PART_ELEMENTS),
    )
    assert kernel.supports(made)
    return made


def compile_attend(case: str) -> dict[str, Any]:
    found = launch(case)
    _, splits, slices = found.grid
    assert (splits > 1, slices > 1) == ("split" in case, "sliced" in case)
    made = compiled(found)
    return {
        "triton": TRITON,
        "registers": made.registers,
        "spill_bytes": made.spill_bytes,
        "dynamic_shared_bytes": made.dynamic_shared_bytes,
        "spills_in_loops": sum(loop.spills for loop in made.loops),
        "wgmma": made.opcodes["HGMMA"],
        "other_products": made.opcodes["HMMA"],
        "async_copies": re.findall(r"LDGSTS[.\w]*", made.sass),
        "register_counts": re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", made.ptx),
        "bf16x2_products": made.ptx.count("mul.rn.bf16x2"),
        "fp8_conversions": made.ptx.count("e4m3"),
        "ptxas": ptxas_messages(made.ptx),
    }


if __name__ == "__main__":
    print(json.dumps(compile_attend(sys.argv[1])))
