"""What ptxas makes of the Hopper kernels that score many tokens, at V4's shapes."""

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
from tests.kernels import sm90
from tests.kernels.sm90 import empty, ptxas_messages, run_apart
from tests.kernels.test_index_scores_hopper_sm90 import scoring

TOKENS = 8_192
SHARED_BYTES = 227 << 10
CASES = ("prepare", "wide", "prepare v41", "wide v41")


@pytest.fixture(
    scope="module", params=["wide", pytest.param("wide v41", marks=pytest.mark.nightly)]
)
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run_apart("tests.kernels.test_index_scores_wide_sm90", request.param)


def test_no_loop_of_one_sum_spills_and_no_product_waits_for_another(
    compiled: dict[str, Any],
) -> None:
    """Three warpgroups have two loops each: one sum, and four sums for keys that need them."""
    assert "serialized" not in compiled["ptxas"]
    assert len(compiled["loops"]) == 6
    assert [spills for _, spills, _ in compiled["loops"]] == [0] * 6
    assert sorted(products for _, _, products in compiled["loops"]) == [4] * 3 + [16] * 3
    assert max(instructions for instructions, _, _ in compiled["loops"]) <= 576
    assert compiled["dynamic_shared_bytes"] <= SHARED_BYTES


def test_while_a_token_multiplies_another_is_added_up(compiled: dict[str, Any]) -> None:
    """Waits that leave a product running, four per group of tokens less the last."""
    assert compiled["waits"].count("0x1") == 3 * 3
    heads = compiled["heads"]
    assert set(compiled["multiplications"]) == {f"QGMMA.64x{heads}x32.F32.E4M3.E4M3"}


@pytest.mark.parametrize(
    ("tokens_per_request", "given", "fits"),
    [(64, 0, True), (63, 0, False), (8_192, 0, True), (64, -1, False)],
)
def test_what_it_does(tokens_per_request: int, given: int, fits: bool) -> None:
    from dsv4.kernels.hopper import index_scores_wide as wide

    call = scoring(CacheSchema.build(ModelSpec.preset("v4-flash")), tokens=256)
    workspace = empty(wide.workspace_bytes(256) + given, dtype=torch.uint8)
    call = replace(call, tokens_per_request=tokens_per_request, workspace=workspace)
    assert wide.supports(call) == fits
    assert not wide.supports(replace(call, round_bf16=False))


def launch(case: str = "wide") -> Launch:
    from dsv4.kernels.hopper import index_scores_wide as wide

    model, heads = ("v41-flash", 32) if "v41" in case else ("v4-flash", 64)
    call = scoring(CacheSchema.build(ModelSpec.preset(model)), tokens=TOKENS, heads=heads)
    space = wide.prepared(empty(wide.workspace_bytes(TOKENS), dtype=torch.uint8), TOKENS)
    return (wide.prepare_launch if "prepare" in case else wide.score_launch)(call, *space)


def compile_scores(case: str) -> dict[str, Any]:
    asked = launch(case)
    made = sm90.compiled(asked)
    return {
        "heads": asked.constants["HEADS"],
        "loops": [(x.instructions, x.spills, x.products) for x in made.loops if x.products],
        "dynamic_shared_bytes": made.dynamic_shared_bytes,
        "multiplications": re.findall(r"[HQ]GMMA[.\w]*", made.sass),
        "waits": re.findall(r"WARPGROUP.DEPBAR.LE gsb0, (0x\d)", made.sass),
        "ptxas": ptxas_messages(made.ptx),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(compile_scores(sys.argv[1])) + "\n")
