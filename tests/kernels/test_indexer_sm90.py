"""The indexer's kernels compiled for sm_90 with V4's shapes: registers, spills, instructions.

Compiling needs a process without TRITON_INTERPRET: this file, run as a script, is that process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsv4.kernels.launch import Launch

ROOT = Path(__file__).parents[2]
HEADS, WIDTH = 64, 128
FORMATS = ("mxfp4", "nvfp4", "fp8", "bf16")
BANDS = (1, 16)
TOP_K_SHAPES = ((1, 262_144, 1024), (8, 262_144, 512), (256, 8192, 512), (256, 2048, 512))


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return result


def test_nothing_spills(compiled: dict[str, dict[str, Any]]):
    assert {name: c["spill_bytes"] for name, c in compiled.items() if c["spill_bytes"]} == {}


def test_queries_are_made_of_exact_operations(compiled: dict[str, dict[str, Any]]):
    """Their bits are the reference's, as those of the keys are."""
    for record in FORMATS:
        assert compiled[f"query {record}"]["inexact"] == []


def test_scores_use_the_matrix_unit_and_leave_room_for_four_programs(
    compiled: dict[str, dict[str, Any]],
):
    for record in FORMATS:
        for band in BANDS:
            assert "HGMMA" in compiled[f"scores {record} band {band}"]["opcodes"]
    # 65,536 registers hold four programs of 128 threads with 128 each
    assert compiled["scores mxfp4 band 1"]["registers"] <= 128


def test_the_head_sum_is_a_tree_of_additions(compiled: dict[str, dict[str, Any]]):
    """63 additions per entry: 64 entries of a program are half a one for each of 128 threads. A
    copy through shared memory or a shuffle at every step would show."""
    opcodes = compiled["scores mxfp4 band 1"]["opcodes"]
    assert opcodes["FADD"] <= 40
    assert opcodes["HMUL2"] <= 90


def test_top_k_loads_16_bytes_a_thread_and_leaves_room_for_two_programs(
    compiled: dict[str, dict[str, Any]],
):
    launches = {name: c for name, c in compiled.items() if name.startswith("top-k")}
    assert len(launches) == 2 * (2 + 2 + 1 + 1)
    for name, c in launches.items():
        assert c["loads_of_16_bytes"] >= 2, name
        assert 2 * c["registers"] * c["threads"] <= 65_536, name


def launches() -> Iterator[tuple[str, Launch]]:
    """Every launch of the indexer, by name."""
    from dsv4.cache import records
    from dsv4.cache.pages import Page
    from dsv4.kernels import index_query, index_scores, top_k
    from dsv4.ops.calls import EntrySource, Scoring

    rows = 64
    tokens = torch.zeros(rows, 4, dtype=torch.int32)
    q = torch.zeros(rows, HEADS, WIDTH, dtype=torch.bfloat16)
    weights = torch.zeros(rows, HEADS, dtype=torch.bfloat16)
    for name in FORMATS:
        record = records.index_format(name, index_dim=WIDTH)
        yield (
            f"query {name}",
            index_query.index_query_launch(
                q, tokens=tokens, rope=torch.zeros(16, 64), record=record, out=q
            ),
        )
        keys = EntrySource(
            arena=torch.zeros(2, 449_824, dtype=torch.uint8),
            page=Page(kind="index_keys", layer=2, offset_bytes=1024, rows=32, format=record),
            block_table=torch.zeros(2, 8192, dtype=torch.int32),
            ratio=4,
        )
        scores = torch.zeros(rows, 4096)
        for band in BANDS:
            launch = index_scores.index_scores_launch(
                Scoring(
                    q=q, weights=weights, tokens=tokens, keys=keys, scores=scores,
                    skip_visible=512, tokens_per_request=band,
                )
            )  # fmt: skip
            # the most tokens of a launch, whose lengths every program holds
            constants = replace(launch.constants["S"], BANDS=index_scores.MAX_TOKENS // band)
            yield f"scores {name} band {band}", launch._replace(constants={"S": constants})
    for rows, columns, k in TOP_K_SHAPES:
        work = torch.zeros(16, dtype=torch.int32)
        out = torch.zeros(rows, k, dtype=torch.int32)
        for bf16_scores in (True, False):
            parts = top_k.top_k_launches(
                torch.zeros(rows, columns), tokens, work, out, 4, bf16_scores
            )
            kind = "bf16" if bf16_scores else "fp32"
            for nth, launch in enumerate(parts):
                yield f"top-k {rows} x {columns} {kind} launch {nth}", launch


def main() -> None:
    from tests.kernels import sm90

    found: dict[str, dict[str, Any]] = {}
    for name, launch in launches():
        c = sm90.compiled(launch)
        found[name] = {
            "threads": 32 * launch.options["num_warps"],
            "registers": c.registers,
            "spill_bytes": c.spill_bytes,
            "opcodes": dict(c.opcodes),
            "loads_of_16_bytes": c.ptx.count("ld.global.v4.b32"),
            "inexact": sm90.inexact_instructions(c.ptx),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
