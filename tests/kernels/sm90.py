"""Compiles launches for sm_90 without a GPU and reports what ptxas made of them.

Works in a process where TRITON_INTERPRET is unset: `run_apart` starts one.
"""

from __future__ import annotations

import os
import re
import tempfile

import torch

from dsv4.kernels.launch import Launch
from dsv4.kernels.target import TARGETS
from tests.kernels import compiling
from tests.kernels.compiling import Compiled, nvidia_tool, run_apart

__all__ = ["compiled", "empty", "inexact_instructions", "ptxas_messages", "run_apart"]

_ARITHMETIC = re.compile(
    r"(add|sub|mul|div|sqrt|rcp|rsqrt|fma|mad|ex2|lg2|sin|cos|tanh)\.(.*\.)?f(32|64)(x2)?"
)
_EXACT = re.compile(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)(x2)?")


def compiled(launch: Launch) -> Compiled:
    """Compiles the kernel as running the launch would."""
    return compiling.compiled(launch, TARGETS["sm_90"])


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without memory: launches that are only compiled need no more."""
    return torch.empty(shape, dtype=dtype, device="meta")


def inexact_instructions(ptx: str) -> list[str]:
    """Arithmetic on fp32 and fp64 that is not one IEEE operation rounded once: approximations,
    fused multiply-adds, and sums and products that ptxas may fuse because they do not say .rn."""
    found = set(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]+)", ptx, re.MULTILINE))
    return sorted(i for i in found if _ARITHMETIC.fullmatch(i) and not _EXACT.fullmatch(i))


def ptxas_messages(ptx: str) -> str:
    """What ptxas has to say about a kernel: its registers, spills and warnings."""
    with tempfile.NamedTemporaryFile(mode="w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        return nvidia_tool("ptxas", "-v", "--gpu-name", "sm_90a", "-o", os.devnull, file.name)
