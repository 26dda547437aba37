"""The digests of digests.json on this machine: whatever its CPU can do, however many threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from tests.known_answers.cases import CASES, known_digests

# what ATen asks of a CPU before it takes these loops
NEEDED = {
    "default": (),
    "avx2": ("avx2", "fma3"),
    "avx512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3"),
}


def run_apart(*arguments: str, **environment: str) -> dict[str, Any]:
    """In a process of its own: torch and Triton read their settings once."""
    settings = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    settings["OMP_WAIT_POLICY"] = "passive"  # a thread that waits leaves the core to others
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.known_answers.cases", *arguments],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("capability", NEEDED)
def test_the_reference_with_one_thread_and_with_two(capability: str):
    able = torch.cpu.get_capabilities()
    missing = [name for name in NEEDED[capability] if not able.get(name)]
    if missing:
        pytest.skip(f"this CPU has no {', '.join(missing)}")
    report = run_apart("reference", "1", "2", ATEN_CPU_CAPABILITY=capability)
    assert report["capability"] == capability.upper()
    assert report["found"] == {"1": known_digests(), "2": known_digests()}


@pytest.mark.parametrize("fusion", ["0", "1"])
def test_interpreted_kernels(fusion: str):
    settings = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": fusion}
    found = run_apart("triton", "1", **settings)["found"]["1"]
    names = {name for name, case in CASES.items() if case.interpreted}
    assert found == {name: known_digests()[name] for name in names}


def test_every_case_is_known():
    assert known_digests().keys() == {*CASES, "rope"}
