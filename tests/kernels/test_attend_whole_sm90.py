"""What ptxas makes of Hopper's attention of whole queries at V4's shapes: one launch for many, two
for few."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from dsv4.cache.pages import PageForm
from dsv4.kernels.launch import Launch
from dsv4.ops.calls import Attention
from tests.kernels import test_attend_hopper_sm90 as hopper
from tests.kernels.sm90 import compiled, empty, ptxas_messages, run_apart

CSA_LAYER, HCA_LAYER, SINGLES_LAYER = hopper.CSA_LAYER, hopper.HCA_LAYER, hopper.SINGLES_LAYER
PROCESSORS, MAX_SHARED_BYTES = hopper.PROCESSORS, hopper.MAX_SHARED_BYTES
MAX_CONTEXT = 131_072
# what is launched, and (model, heads, layer, tokens, chunk)
CASES: dict[str, tuple[str, tuple[str, int, int, int, bool]]] = {
    "flash csa": ("one", ("v4-flash", 64, CSA_LAYER, 64, False)),
    "flash csa weights": ("weights", ("v4-flash", 64, CSA_LAYER, 1, False)),
    "flash csa sums": ("sums", ("v4-flash", 64, CSA_LAYER, 1, False)),
    "flash csa sums of 16": ("sums", ("v4-flash", 64, CSA_LAYER, 16, False)),
    "flash csa sums of 32": ("sums", ("v4-flash", 64, CSA_LAYER, 32, False)),
    "flash hca weights": ("weights", ("v4-flash", 64, HCA_LAYER, 4, False)),
    "flash hca sums": ("sums", ("v4-flash", 64, HCA_LAYER, 4, False)),
    "pro csa weights": ("weights", ("v4-pro", 128, CSA_LAYER, 1, False)),
    "16 heads, csa chunk weights": ("weights", ("v4-flash", 16, CSA_LAYER, 8, True)),
    "16 heads, csa sums": ("sums", ("v4-flash", 16, CSA_LAYER, 8, False)),
    "v41": ("one", ("v41-flash", 64, SINGLES_LAYER, 64, False)),
    "v41 weights": ("weights", ("v41-flash", 64, SINGLES_LAYER, 1, False)),
    "v41 sums": ("sums", ("v41-flash", 64, SINGLES_LAYER, 1, False)),
}
CI = {"flash csa weights", "flash csa sums of 32", "v41 weights"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, marks=[] if case in CI else [pytest.mark.nightly]) for case in CASES
    ],
)
def attend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_apart("tests.kernels.test_attend_whole_sm90", request.param)


def test_nothing_spills_and_it_fits(attend: dict[str, Any]) -> None:
    assert attend["spill_bytes"] == 0
    assert attend["dynamic_shared_bytes"] <= MAX_SHARED_BYTES
    assert "serialized" not in attend["ptxas"]
    assert "warning" not in attend["ptxas"].lower()


def test_products_run_on_wgmma_and_what_is_copied_is_16_bytes_a_thread(
    attend: dict[str, Any],
) -> None:
    """But for scales, entries, block ids, highest logits and sums: a word per row."""
    assert attend["wgmma"] > 0
    assert attend["other_products"] == 0
    assert set(attend["async_copies"]) == {"LDGSTS.E.BYPASS.128", "LDGSTS.E"}


def call(
    model: str,
    heads: int,
    layer: int,
    tokens: int,
    chunk: bool,
    *,
    form: PageForm = "planes",
) -> Attention:
    from dsv4.kernels.hopper import attend_whole as kernel

    made = hopper.call(model, heads, layer, tokens, chunk, max_context=MAX_CONTEXT, form=form)
    shape = tokens, heads, made.window.window, made.max_entries
    workspace = empty(kernel.workspace_elements(*shape, PROCESSORS))
    return replace(made, batch_invariant=True, workspace=workspace)


def launch(case: str, *, form: PageForm = "planes") -> Launch:
    from dsv4.kernels.hopper import attend, attend_whole

    which, shape = CASES[case]
    if which == "one":
        return attend.attend_launch(call(*shape, form=form), programs=PROCESSORS)
    weights, sums = attend_whole.attend_launches(call(*shape, form=form), programs=PROCESSORS)
    assert weights.grid[1] > 1
    return weights if which == "weights" else sums


def compile_attend(case: str) -> dict[str, Any]:
    made = compiled(launch(case))
    return {
        "spill_bytes": made.spill_bytes,
        "dynamic_shared_bytes": made.dynamic_shared_bytes,
        "ptxas": ptxas_messages(made.ptx),
        "wgmma": made.opcodes["HGMMA"],
        "other_products": made.opcodes["HMMA"],
        "async_copies": re.findall(r"LDGSTS[.\w]*", made.sass),
    }


if __name__ == "__main__":
    print(json.dumps(compile_attend(sys.argv[1])))
