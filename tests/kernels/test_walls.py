"""The walls around the tensors of interpreted launches (tests/support/walled.py) stand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from dsv4.kernels.launch import Launch
from tests.support.walled import wall_launches

ROOT = Path(__file__).parents[2]
NUMBERS = 65  # 260 bytes: the last ones are not at a multiple of the alignment


@triton.jit
def _copy_kernel(source, target, AT: tl.constexpr):
    tl.store(target, tl.load(source + AT))


def copy(at: int) -> int:
    source, target = torch.arange(NUMBERS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    Launch(_copy_kernel, (1,), (source, target), {"AT": at}, {"num_warps": 1}).run()
    return int(target)


def test_what_is_written_arrives() -> None:
    assert [copy(at) for at in (0, NUMBERS - 1, 7)] == [0, NUMBERS - 1, 7]


@pytest.mark.skipif(sys.platform != "linux", reason="walls are Linux's")
@pytest.mark.parametrize("place", ["behind", "before"])
def test_a_kernel_that_leaves_its_tensor_ends_the_process(place: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_walls", place],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.stdout == "within\n"
    assert done.returncode == -signal.SIGSEGV


if __name__ == "__main__":
    wall_launches(pytest.MonkeyPatch())
    copy(NUMBERS - 1)
    if sys.argv[1] == "before":
        copy(0)  # walls stand behind tensors and before them, launch by launch
        copy(0)
    else:
        copy(0)
    print("within", flush=True)
    # tensors begin at multiples of 16 bytes, so up to 12 bytes lie between their end and the wall
    copy(-1 if sys.argv[1] == "before" else NUMBERS + 3)
