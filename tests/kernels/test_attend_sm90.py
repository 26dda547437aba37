"""What ptxas makes of the attention kernel at the models' shapes, in a process that compiles."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from dsv4.cache.pages import PageForm
from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.model import ModelSpec
from dsv4.ops.calls import Attention, EntrySource, WindowSource
from tests.kernels import sm90
from tests.kernels.sm90 import empty, run_apart

WINDOW_LAYER, CSA_LAYER, HCA_LAYER = 0, 2, 3
# name -> (model, heads, layer, entries listed or None for all, whether a chunk)
CASES: dict[str, tuple[str, int, int, int | None, bool]] = {
    "flash csa": ("v4-flash", 64, CSA_LAYER, 512, False),
    "flash hca": ("v4-flash", 64, HCA_LAYER, None, False),
    "pro csa": ("v4-pro", 128, CSA_LAYER, 1024, False),
    "flash csa chunk": ("v4-flash", 64, CSA_LAYER, 512, True),
    "v41": ("v41-flash", 64, CSA_LAYER, 512, False),
    "v41 chunk": ("v41-flash", 64, CSA_LAYER, 512, True),
    "four heads": ("v4-flash", 4, CSA_LAYER, 32, False),
    "flash csa resolved": ("v4-flash", 64, CSA_LAYER, 512, False),
}
# Local memory is used between the loops over tiles only: instructions × 4 bytes.
SPILL_LIMIT = {"flash csa chunk": 384, "v41 chunk": 384}
SPILL_LIMIT_DECODE = 224


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = run_apart("tests.kernels.test_attend_sm90")
    return result


@pytest.mark.parametrize("case", CASES)
def test_it_stays_in_registers(case: str, compiled: dict[str, dict[str, Any]]) -> None:
    assert compiled[case]["spill_bytes"] <= SPILL_LIMIT.get(case, SPILL_LIMIT_DECODE)
    assert compiled[case]["spills_in_loops"] == 0


@pytest.mark.parametrize("case", [name for name, spec in CASES.items() if spec[1] >= 64])
def test_matrix_products_run_on_wgmma(case: str, compiled: dict[str, dict[str, Any]]) -> None:
    found = compiled[case]
    assert found["wgmma"] > 0
    # keys arrive while the tile before them is multiplied, 16 bytes per thread
    assert found["wide_async_copies"] > 0
    # and are decoded two at a time, not through the conversion unit; V4.1's scales are
    assert found["bf16x2_products"] > 0
    assert found["fp8_conversions"] == 0 or case.startswith("v41")


def attend_launch(
    model: str,
    heads: int,
    layer: int,
    listed: int | None,
    chunk: bool,
    *,
    cut: bool = False,
    joint: bool = False,
    max_context: int | None = None,
    entry_format: str | None = None,
    resolved: bool = False,
    form: PageForm = "planes",
) -> Launch:
    """A layer without entries attends to its window."""
    from dsv4.kernels import attend as kernel

    schema = CacheSchema.build(
        ModelSpec.preset(model),
        max_context=max_context,
        entry_format=entry_format,
        entries_apart=resolved,
        page_form=form,
    )
    tokens, width = 4, schema.model.head_dim

    window_page, entry_page = (
        schema.layout.page("window", layer),
        schema.layout.page("entries", layer),
    )
    assert window_page is not None
    blocks = schema.max_blocks_per_request
    entries = entry_page and EntrySource(
        arena=empty(8, schema.bytes.entries if resolved else schema.bytes.block, dtype=torch.uint8),
        page=entry_page,
        block_table=empty(8, blocks, dtype=torch.int32),
        ratio=schema.layers[layer].spec.ratio,
        resolved=resolved,
    )
    window = WindowSource(
        arena=empty(8, schema.bytes.slot, dtype=torch.uint8),
        page=window_page,
        window=schema.model.window,
        staged=chunk,
    )
    most = listed or (blocks * entry_page.rows if entry_page else 0)
    splits = kernel.split_count(window.window, most)
    return kernel.attend_launch(
        Attention(
            q=empty(tokens, heads, width, dtype=torch.bfloat16),
            sink=empty(heads),
            tokens=empty(tokens, 4, dtype=torch.int32),
            batch=empty(tokens, 4, dtype=torch.int32),
            window=window,
            entries=entries,
            indices=None if listed is None else empty(tokens, listed, dtype=torch.int32),
            out=empty(tokens, heads, width, dtype=torch.bfloat16),
            lse=empty(tokens, heads),
            inverse_rope=empty(schema.max_context, schema.model.rope_dim),
            workspace=empty(kernel.workspace_elements(tokens, heads, width, splits)),
            joint=joint,
            window_cut=cut,
        )
    )


def _report() -> dict[str, dict[str, Any]]:
    result = {}
    for case in CASES:
        launch = attend_launch(*CASES[case], resolved="resolved" in case)
        made = sm90.compiled(launch)
        result[case] = {
            "registers": made.registers,
            "spill_bytes": made.spill_bytes,
            "spills_in_loops": sum(loop.spills for loop in made.loops if loop.products),
            "wgmma": made.ptx.count("wgmma.mma_async"),
            "wide_async_copies": made.ptx.count("cp.async.cg.shared.global [ "),
            "bf16x2_products": made.ptx.count("mul.rn.bf16x2"),
            "fp8_conversions": made.ptx.count("e4m3"),
        }
    return result


if __name__ == "__main__":
    print(json.dumps(_report()))
