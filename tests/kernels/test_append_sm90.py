"""The append launches of real layers compiled for sm_90, without a GPU: no spills, exact
arithmetic, hardware conversions, wide loads.

Run as a program (TRITON_INTERPRET unset) this file compiles one case and prints what came out.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

from dsv4.cache.pages import PageForm
from dsv4.cache.schema import CacheSchema, HcaState
from dsv4.kernels.launch import Launch
from dsv4.kernels.target import TRITON
from dsv4.model import ModelSpec
from dsv4.reference.backend import ReferenceBackend
from tests.kernels.sm90 import compiled, inexact_instructions, run_apart
from tests.support.stack import Stack

SWA, CSA, HCA = 0, 2, 3
PAIRS, SINGLES = 2, 20  # of V4.1: its owners of ratio 2 and 1
WIDE = 8192
# a large batch has fewer programs than groups that could close
DECODE, LARGE, CHUNK = (1,) * 8, (1,) * 128, (WIDE,)
# name -> (preset, layer, tokens of each request, whether it is the second launch of a chunk, state)
CASES: dict[str, tuple[str, int, tuple[int, ...], bool, HcaState]] = {
    "flash csa decode": ("v4-flash", CSA, DECODE, False, "raw"),
    "flash csa chunk": ("v4-flash", CSA, CHUNK, False, "raw"),
    "pro hca decode": ("v4-pro", HCA, DECODE, False, "raw"),
    "flash hca large decode": ("v4-flash", HCA, LARGE, False, "raw"),
    "pro hca chunk": ("v4-pro", HCA, CHUNK, False, "raw"),
    "pro online hca decode": ("v4-pro", HCA, DECODE, False, "online"),
    "pro online hca chunk": ("v4-pro", HCA, CHUNK, False, "online"),
    "v41 pairs decode": ("v41-flash", PAIRS, DECODE, False, "raw"),
    "v41 pairs chunk": ("v41-flash", PAIRS, CHUNK, False, "raw"),
    "v41 singles decode": ("v41-flash", SINGLES, DECODE, False, "raw"),
    "v41 singles chunk": ("v41-flash", SINGLES, CHUNK, False, "raw"),
    "flash window decode": ("v4-flash", SWA, DECODE, False, "raw"),
    "flash window chunk": ("v4-flash", CSA, CHUNK, True, "raw"),
}
# outside of loops, by Triton and case; nothing else may spill
SPILLED = {(3, 7, "v41 pairs decode"): 32, (3, 7, "v41 singles decode"): 48}


def launch(
    preset: str,
    layer: int,
    counts: tuple[int, ...],
    second: bool = False,
    hca_state: HcaState = "raw",
    form: PageForm = "planes",
) -> Launch:
    """What handle.append would launch: decode steps at their padded size, as in a graph; one of
    the two launches of a chunk."""
    from dsv4.kernels.append import append_launch

    schema = CacheSchema.build(
        ModelSpec.preset(preset), max_context=2 * WIDE, hca_state=hca_state, page_form=form
    )
    tokens = sum(counts)
    stack = Stack(
        schema,
        layers=[layer],
        max_requests=len(counts),
        num_blocks=sum(map(schema.blocks_for, counts)),
        max_step_tokens=tokens,
        backend="reference",
    )
    manager, captured = stack.manager, []
    requests = [manager.admit_request() for _ in counts]
    plan = manager.prepare_forward(
        list(zip(requests, counts, strict=True)), pad_tokens=None if counts == CHUNK else tokens
    )
    handle = manager.acquire(layer, plan.batch)

    class Capturing(ReferenceBackend):
        def append(self, step, window, compressors):  # type: ignore[no-untyped-def]
            if second:
                captured.append(append_launch(step, window, ()))
            else:
                captured.append(append_launch(step, window, compressors, stage=counts == CHUNK))

    handle.backend = Capturing()
    kv = torch.empty(tokens, schema.model.head_dim, dtype=torch.bfloat16)
    projections = [
        torch.empty(tokens, layout.columns, dtype=None if layout.gated else torch.bfloat16)
        for layout in (handle.memory.compressor, handle.memory.index_compressor)
        if layout is not None
        for _ in range(2 if layout.gated else 1)
    ]
    handle.append(kv, *projections, weights=stack.weights[layer])
    (result,) = captured
    return result


def specialization(arguments: tuple[Any, ...]) -> list[object]:
    """What of the arguments decides which binary runs."""
    return [
        a.dtype if isinstance(a, torch.Tensor) else (type(a), a == 1, a % 16 == 0)
        for a in arguments
    ]


def compile_case(name: str) -> dict[str, Any]:
    made = compiled(launch(*CASES[name]))
    instructions = re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]+)", made.ptx, re.MULTILINE)
    return {
        "triton": TRITON,
        "registers": made.registers,
        "spill_bytes": made.spill_bytes,
        "instructions": sorted(set(instructions)),
        "inexact": inexact_instructions(made.ptx),
        "selects_minus_zero": bool(re.search(r"\bselp\b.*\b0f80000000\b", made.ptx)),
        "order": re.findall(r"\b(LDG\.E\.128|BAR|MEMBAR)\b", made.sass),
    }


@pytest.mark.parametrize("name", CASES)
def test_compiled_append(name: str):
    found = run_apart("tests.kernels.test_append_sm90", name)
    assert found["spill_bytes"] <= SPILLED.get((*found["triton"], name), 0)
    assert found["registers"] <= 255
    instructions = found["instructions"]
    assert any(i.startswith("cvt.rn.satfinite.e4m3x2") for i in instructions)
    assert found["inexact"] == []
    assert {"sqrt.rn.f32", "div.rn.f32"} <= set(instructions)
    assert found["selects_minus_zero"] == ("online" in name)  # what a token that is not there adds
    if "window" not in name:
        assert any(re.fullmatch(r"ld\.global(\.\w+)*\.v4\.b32", i) for i in instructions)


def test_all_rows_of_a_group_are_under_way_before_the_first_is_used():
    """Sixteen loads of logits and values and two of the bias stand in front of the first barrier;
    up to the fence that hands the channels over there are no more."""
    order = run_apart("tests.kernels.test_append_sm90", "pro hca decode")["order"]
    assert order[:19] == ["LDG.E.128"] * 18 + ["BAR"]
    assert "LDG.E.128" not in order[19 : order.index("MEMBAR")]


@pytest.mark.parametrize(("layer", "state"), [(CSA, "raw"), (HCA, "raw"), (HCA, "online")])
@pytest.mark.parametrize("counts", [DECODE, CHUNK], ids=["decode", "chunk"])
def test_flash_and_pro_run_the_same_binaries(layer: int, state: HcaState, counts: tuple[int, ...]):
    """So that a case of one stands for both."""
    flash = launch("v4-flash", layer, counts, hca_state=state)
    pro = launch("v4-pro", layer, counts, hca_state=state)
    assert (flash.constants, flash.options) == (pro.constants, pro.options)
    assert specialization(flash.arguments) == specialization(pro.arguments)


if __name__ == "__main__":
    print(json.dumps(compile_case(sys.argv[1])))
