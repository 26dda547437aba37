"""V4.1's kernels compiled for sm_90 in both forms of pages: whole records are loaded and stored
with the instructions of planes, only their addresses differ.

Run as a program (TRITON_INTERPRET unset) this file compiles one case and prints what came out.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from dsv4.kernels.launch import Launch
from tests.kernels import (
    test_append_sm90,
    test_attend_hopper_sm90,
    test_attend_sm90,
    test_attend_whole_sm90,
)
from tests.kernels.sm90 import compiled, inexact_instructions, run_apart
from tests.support.stack import PAGE_FORMS

_MEMORY = re.compile(r"\b(LDGSTS|LDG|STG|UBLKCP|ATOMG|RED)\b([.\w]*)")

Make = Callable[..., Launch]
HOPPER = test_attend_hopper_sm90
CASES: dict[str, Make] = {
    **{
        f"hopper {name}": partial(HOPPER.launch, f"v41 {name}")
        for name in ("split", "split and sliced", "whole", "chunk", "window")
    },
    "hopper batch invariant": partial(test_attend_whole_sm90.launch, "v41"),
    "hopper batch invariant, weights": partial(test_attend_whole_sm90.launch, "v41 weights"),
    "portable": partial(test_attend_sm90.attend_launch, *test_attend_sm90.CASES["v41"]),
    "portable chunk": partial(test_attend_sm90.attend_launch, *test_attend_sm90.CASES["v41 chunk"]),
    **{
        f"append {name}": partial(test_append_sm90.launch, *test_append_sm90.CASES[f"v41 {name}"])
        for name in ("pairs decode", "pairs chunk", "singles decode", "singles chunk")
    },
}
CI = {"hopper split", "portable chunk", "append pairs decode"}
# registers that ptxas chooses differently: instructions × 4 bytes outside of loops
SPILL_SLACK = 32
MOST_GROWTH = 1.02  # of the instructions: offsets are other constants


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[] if name in CI else [pytest.mark.nightly]) for name in CASES],
)
def test_whole_records_compile_as_planes_do(case: str) -> None:
    made = run_apart("tests.kernels.test_page_form_sm90", case)
    planes, whole = (made[form] for form in PAGE_FORMS)
    assert planes["constants"] != whole["constants"], "both are the same kernel"
    assert whole["memory"] == planes["memory"]
    assert whole["products"] == planes["products"]
    assert whole["spills_in_loops"] <= planes["spills_in_loops"]
    assert whole["spill_bytes"] <= planes["spill_bytes"] + SPILL_SLACK
    assert whole["shared_bytes"] == planes["shared_bytes"]
    assert whole["instructions"] <= MOST_GROWTH * planes["instructions"]
    assert whole["inexact"] == planes["inexact"]


def compile_case(case: str) -> dict[str, Any]:
    found = {}
    for form in PAGE_FORMS:
        launch = CASES[case](form=form)
        made = compiled(launch)
        found[form] = {
            "constants": repr(launch.constants),
            "memory": dict(Counter("".join(each) for each in _MEMORY.findall(made.sass))),
            "products": made.products,
            "spill_bytes": made.spill_bytes,
            "spills_in_loops": sum(loop.spills for loop in made.loops if loop.products),
            "shared_bytes": made.dynamic_shared_bytes,
            "instructions": made.instructions,
            "inexact": inexact_instructions(made.ptx),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(compile_case(sys.argv[1])))
