"""What ptxas makes of the Hopper scoring kernel at V4's shapes, and what it leaves to the other."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

from dsv4.cache.schema import CacheSchema
from dsv4.kernels.launch import Launch
from dsv4.kernels.target import TRITON
from dsv4.model import ModelSpec
from dsv4.ops.calls import EntrySource, Scoring
from tests.kernels import sm90
from tests.kernels.sm90 import empty, ptxas_messages, run_apart

CSA_LAYER = 2
PROCESSORS = 132
REGISTERS_OF_A_PROCESSOR, SHARED_BYTES = 65_536, 227 << 10


MODELS = {64: "v4-flash", 32: "v41-flash"}


@pytest.fixture(scope="module", params=[64, pytest.param(32, marks=pytest.mark.nightly)])
def compiled(request: pytest.FixtureRequest) -> dict[str, Any]:
    """By heads."""
    return run_apart("tests.kernels.test_index_scores_hopper_sm90", "256", str(request.param))


def test_the_programs_of_a_processor_fit_and_no_tile_spills(compiled: dict[str, Any]) -> None:
    """Two registers of a token's start may, and with Triton 3.7 half a third."""
    assert compiled["spill_bytes"] <= (20 if compiled["triton"] == [3, 7] else 16)
    assert "serialized" not in compiled["ptxas"]
    programs = compiled["programs_per_processor"]
    assert compiled["registers"] * 4 * 32 * programs <= REGISTERS_OF_A_PROCESSOR
    assert compiled["dynamic_shared_bytes"] * programs <= SHARED_BYTES


def test_keys_multiply_from_the_registers_they_arrive_in(compiled: dict[str, Any]) -> None:
    """Two tiles a turn; between their products no warp waits for another."""
    heads = compiled["heads"]
    assert compiled["multiplications"] == [f"QGMMA.64x{heads}x32.F32.E4M3.E4M3"] * 8
    assert compiled["shared_or_local_memory_in_loop"] == []


@pytest.mark.parametrize(
    ("index_format", "block_tokens", "heads", "rounded", "fits"),
    [
        ("mxfp4", 128, 64, True, True),
        ("mxfp4", 512, 64, True, True),
        ("mxfp4", 128, 64, False, False),
        ("mxfp4", 128, 32, True, True),
        ("mxfp4", 128, 16, True, False),
        ("nvfp4", 128, 64, True, False),
        ("fp8", 128, 64, True, False),
    ],
)
def test_what_it_does(
    index_format: str,
    block_tokens: int,
    heads: int,
    rounded: bool,
    fits: bool,
) -> None:
    from dsv4.kernels.hopper import index_scores as index_scores_hopper

    schema = CacheSchema.build(
        ModelSpec.preset("v4-flash"), index_format=index_format, block_tokens=block_tokens
    )
    call = scoring(schema, tokens=4, heads=heads, rounded=rounded)
    assert index_scores_hopper.supports(call) == fits


def key_source(schema: CacheSchema) -> EntrySource:
    page = schema.layout.page("index_keys", CSA_LAYER)
    assert page is not None
    ratio = schema.model.layers[CSA_LAYER].ratio
    return EntrySource(
        arena=empty(8, schema.bytes.block, dtype=torch.uint8),
        page=page,
        block_table=empty(8, schema.max_blocks_per_request, dtype=torch.int32),
        ratio=ratio,
    )


def scoring(schema: CacheSchema, *, tokens: int, heads: int = 64, rounded: bool = True) -> Scoring:
    return Scoring(
        q=empty(tokens, heads, 128, dtype=torch.bfloat16),
        weights=empty(tokens, heads, dtype=torch.bfloat16),
        tokens=empty(tokens, 4, dtype=torch.int32),
        keys=key_source(schema),
        scores=empty(tokens, 4096),
        round_bf16=rounded,
        skip_visible=512,
    )


def launch(tokens: int = 256, heads: int = 64) -> Launch:
    from dsv4.kernels.hopper import index_scores as index_scores_hopper

    schema = CacheSchema.build(ModelSpec.preset(MODELS[heads]))
    call = scoring(schema, tokens=tokens, heads=heads)
    return index_scores_hopper.index_scores_launch(call, PROCESSORS)


def compile_scores(tokens: int, heads: int) -> dict[str, Any]:
    from dsv4.kernels.hopper import index_scores as index_scores_hopper

    made = sm90.compiled(launch(tokens, heads))
    loop = made.sass[made.sass.find("GMMA") : made.sass.rfind("GMMA")]
    return {
        "heads": heads,
        "programs_per_processor": index_scores_hopper.PROGRAMS_PER_PROCESSOR,
        "triton": TRITON,
        "registers": made.registers,
        "spill_bytes": made.spill_bytes,
        "dynamic_shared_bytes": made.dynamic_shared_bytes,
        "multiplications": re.findall(r"[HQ]GMMA[.\w]*", made.sass),
        "shared_or_local_memory_in_loop": re.findall(r"LDS|STS|LDGSTS|BAR.SYNC|LDL|STL", loop),
        "ptxas": ptxas_messages(made.ptx),
    }


if __name__ == "__main__":
    print(json.dumps(compile_scores(*map(int, sys.argv[1:]))))
