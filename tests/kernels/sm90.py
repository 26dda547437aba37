"""Compiles launches for sm_90 without a GPU and reports what ptxas made of them.

Works in a process where TRITON_INTERPRET is unset: `run_apart` starts one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from dsv4.kernels.launch import Launch

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
}
_ARITHMETIC = re.compile(
    r"(add|sub|mul|div|sqrt|rcp|rsqrt|fma|mad|ex2|lg2|sin|cos|tanh)\.(.*\.)?f(32|64)(x2)?"
)
_EXACT = re.compile(r"(add|sub|mul|div|sqrt)\.rn\.f(32|64)(x2)?")
_ROOT = Path(__file__).parents[2]
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int
    spill_bytes: int
    shared_bytes: int
    dynamic_shared_bytes: int
    ptx: str
    sass: str
    opcodes: Counter[str]


def compile_launch(
    kernel: Any,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
    fp_fusion: bool,
    num_stages: int = 3,
    maxnreg: int | None = None,
) -> Compiled:
    """Compiles the kernel as launching it with these arguments would."""
    options = {
        "num_warps": num_warps,
        "enable_fp_fusion": fp_fusion,
        "num_stages": num_stages,
        "maxnreg": maxnreg,
    }
    return compiled(Launch(kernel, (1,), arguments, constants, options))


def compiled(launch: Launch) -> Compiled:
    """Compiles the kernel as running the launch would."""
    kernel, _, arguments, constants, options = launch
    names = list(kernel.arg_names)
    signature: dict[str, str] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    values: dict[tuple[int, ...], Any] = {}
    for i, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            values[(i,)] = constants[name]
            continue
        argument = arguments[i]
        if isinstance(argument, torch.Tensor):
            signature[name] = _POINTERS[argument.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(argument, float):
            signature[name] = "fp32"
        elif argument == 1:
            signature[name] = "constexpr"
            values[(i,)] = 1
        else:
            signature[name] = "i32" if -(2**31) <= argument < 2**31 else "i64"
            if argument % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    source = language(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        sass = _run("cuobjdump", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, _, shared, _ = map(int, found.groups())
    opcodes = Counter(
        m.group(1) for m in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", sass)
    )
    # STL and LDL are the stores to and loads from local memory, where spilled registers go
    return Compiled(
        registers=registers,
        spill_bytes=4 * (opcodes["STL"] + opcodes["LDL"]),
        shared_bytes=shared,
        dynamic_shared_bytes=binary.metadata.shared,
        ptx=binary.asm["ptx"],
        sass=sass,
        opcodes=opcodes,
    )


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
        return _run("ptxas", "-v", "--gpu-name", "sm_90a", "-o", os.devnull, file.name)


def run_apart(module: str, case: str) -> dict[str, Any]:
    """What `python -m module case` prints as its last line, in JSON, with kernels compiled."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", module, case],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _run(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr
