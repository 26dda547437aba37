"""Every kernel compiles for every GPU that is supported, and could run there.

CI takes what differs between targets: an attention kernel for each way to cut it, and the kernels
with forms of their own. Nightly (-m nightly) takes every launch on every target.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from dsv4.kernels.target import TARGETS, Target
from tests.kernels import every_launch
from tests.kernels.compiling import run_apart

SMALL = ["write entries", "gather entries", "query mxfp4", "scores mxfp4 band 1"]
ATTEND = "attend v4-flash csa 64"
CI = {
    "sm_80": [*SMALL, ATTEND],
    "sm_86": ["scores mxfp4 band 1"],  # sm_80's instructions with less shared memory
    "sm_89": SMALL,
    "sm_100": [*SMALL, ATTEND, "attend v4-flash window 64"],
    "sm_103": ["scores mxfp4 band 1"],
    "sm_120": [*SMALL, ATTEND],
    "gfx942": SMALL,  # attention takes its compiler minutes on a busy machine: nightly
    "gfx950": ["write entries", "scores mxfp4 band 1"],  # gfx942's with more shared memory
}
# What a kernel that does something has at least (a copy of bf16 rows on sm_80 has 56): one that
# cannot be lowered is a single trap, 16 with what fills its last line.
LEAST_INSTRUCTIONS = 40
# A processor's, and so what a program may have at most.
REGISTERS = 65_536
TENSOR_COLUMNS = 512
# Of a loop of over 600 instructions: lanes' offsets, which are loaded again where they are used.
LONG_LOOP, SPILLS_IN_LONG_LOOPS = 600, {("tcgen05", (3, 7)): 8}
SPILLS_OF_OTHER_TRITONS = {"tcgen05": 4}
# The same by parts of the names of launches: HCA of 64 heads where a block has one entry, and of
# Hopper's own kernels V4.1's splits, two kinds of V4-Flash's attention, and scores of a chunk.
NAMED_SPILLS = {
    ("tcgen05", (3, 7)): {"warmup v4-flash 64: attend": 15},
    ("tcgen05", (3, 8)): {"warmup v4-flash 64: attend": 17},
    ("tcgen05", (3, 9)): {"warmup v4-flash 64: attend": 18},
    ("wgmma", (3, 7)): {"warmup v4-flash 64: attend_hopper": 1},
    ("wgmma", (3, 9)): {
        "hopper attend v41 split": 1,
        "hopper attend v41, 8 heads split": 1,
        "warmup v41-flash 64: attend_hopper": 1,
        "hopper scores wide": 4,
        "score_wide": 4,
    },
}
# Loops may be this much longer than in the table, which is of another day's compiler flags.
MOST_GROWTH = 1.02


def compiled(target: str, names: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_apart("tests.kernels.every_launch", target, *names)
    assert sorted(found) == sorted(names)
    return found


def check(target: Target, found: dict[str, dict[str, Any]]) -> None:
    table = json.loads(every_launch.TABLE.read_text())[target.name]
    for name, row in found.items():
        told = f"{name} on {target.name}: {row}"
        assert row["instructions"] >= LEAST_INSTRUCTIONS, told
        assert row["shared_bytes"] <= target.shared_bytes, told
        assert row["tensor_columns"] <= TENSOR_COLUMNS, told
        assert row["registers"] <= target.registers, told
        if target.backend == "cuda":
            assert row["registers"] * row["threads"] <= REGISTERS, told
        if row["begins_early"]:
            assert row["before_begin"] == 0, told
        else:
            assert target.launches_early or row["before_begin"] is None, told
        compiler = target.products, tuple(row["triton"])  # its products and the Triton
        named = NAMED_SPILLS.get(compiler, {})
        most = max((spills for part, spills in named.items() if part in name), default=0)
        for spills, instructions in zip(row["spills_in_loops"], row["loops"], strict=True):
            usual = SPILLS_OF_OTHER_TRITONS.get(target.products, 0)
            long = SPILLS_IN_LONG_LOOPS.get(compiler, usual) if instructions > LONG_LOOP else 0
            assert spills <= max(most, long), told
        assert not any(row["spills_in_plain_loops"]), told
        if name.startswith(("attend", "scores")):
            assert row["products"] > 0, f"no matrix instructions: {told}"
        if compiler[1] == (3, 6) and not name.startswith("warmup"):
            counted = table[name]["loops"]
            assert len(row["loops"]) == len(counted), f"{told}; in the table {counted}"
            for now, before in zip(row["loops"], counted, strict=True):
                assert now <= MOST_GROWTH * before, f"{told}; in the table {counted}"


@pytest.mark.parametrize("name", CI)
def test_kernels_of_other_gpus_compile_and_fit(name: str):
    check(TARGETS[name], compiled(name, CI[name]))


def test_the_table_has_every_launch():
    table = json.loads(every_launch.TABLE.read_text())
    assert list(table) == sorted(TARGETS)
    for name, target in TARGETS.items():
        assert sorted(every_launch.names(target)) == list(table[name]), name


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", TARGETS)
def test_every_launch_compiles_and_fits(name: str):
    check(TARGETS[name], compiled(name, every_launch.names(TARGETS[name])))


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("heads", [64, 32, 16])
@pytest.mark.parametrize("model", ["v4-flash", "v41-flash"])
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_a_manager_can_launch_compiles_and_fits(name: str, model: str, heads: int):
    found = run_apart("tests.kernels.every_launch", "--warmup", name, model, str(heads))
    assert len(found) > 20
    check(TARGETS[name], found)
