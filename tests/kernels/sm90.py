"""Compiles kernels for sm_90 without a GPU and reports what ptxas made of them.

Run in a process of its own, with TRITON_INTERPRET unset.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

POINTERS = {"fp32": "*fp32", "bf16": "*bf16", "u8": "*u8", "i32": "*i32", "i64": "*i64"}


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int
    spill_bytes: int
    shared_bytes: int
    ptx: str


def compile_sm90(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    *,
    aligned: set[str],
    num_warps: int,
    fp_fusion: bool = True,
) -> Compiled:
    """`aligned` names the arguments that are multiples of 16 (Triton's own specialisation)."""
    names = list(kernel.arg_names)
    full = {n: signature.get(n, "constexpr") for n in names}
    attributes = {
        (names.index(n),): [["tt.divisibility", 16]] for n in names if n in aligned
    }
    source = ASTSource(
        fn=kernel,
        signature=full,
        constexprs={(names.index(n),): v for n, v in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": num_warps, "enable_fp_fusion": fp_fusion}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    ptx = binary.asm["ptx"]
    return Compiled(*_resources(binary.asm["cubin"]), ptx=ptx)


def _resources(cubin: bytes) -> tuple[int, int, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text.stdout + text.stderr)
    assert found, text.stdout
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack + local, shared
