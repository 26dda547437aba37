"""Compiles launches for any target without its GPU, and reports what the assembler made of them.

Works in a process where TRITON_INTERPRET is unset: `run_apart` starts one. A Triton that is
unpacked in the folder $DSV4_COMPILING_TRITON compiles there: CI has that of the GPU machine.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
import triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dsv4.kernels.cache_key import cache_key
from dsv4.kernels.launch import Launch
from dsv4.kernels.target import Target, compiling_for

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int16: "*i16",
}
_ROOT = Path(__file__).parents[2]
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)([^;]*);")
_PRODUCT = re.compile("MMA|mfma|mma")
_BEGIN = {"ACQBULK", "griddepcontrol.wait"}
_GLOBAL = re.compile(r"LDG|STG|LD$|ST$|ATOM|RED|UBLK|UTMA|(ld|st|atom|red|cp)\.(?!param)")
_PTX = re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.:]*)[ ;]", re.MULTILINE)
_GCN_LABEL = re.compile(r"^(\.L\w+):")
_GCN = re.compile(r"^\s+([a-z]\w+)(.*)")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop without another in it: instructions, and those that go to or from local memory."""

    instructions: int
    spills: int
    products: int


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int
    spill_bytes: int
    shared_bytes: int
    dynamic_shared_bytes: int
    tensor_columns: int
    assembly: str  # PTX or AMD's
    sass: str
    opcodes: Counter[str]
    loops: tuple[Loop, ...]
    # instructions that touch memory before the one that waits for the launch in front; None: none
    # waits
    before_begin: int | None

    @property
    def ptx(self) -> str:
        return self.assembly

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def products(self) -> int:
        """Matrix instructions."""
        return sum(n for opcode, n in self.opcodes.items() if _PRODUCT.search(opcode))


def compiled(launch: Launch, target: Target) -> Compiled:
    """Compiles the kernel as running the launch on a GPU of this target would."""
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
        elif isinstance(argument, TensorDescriptor):
            element = _POINTERS[argument.base.dtype][1:]
            signature[name] = f"tensordesc<{element}{argument.block_shape},{argument.layout!r}>"
        elif isinstance(argument, float):
            signature[name] = "fp32"
        elif kernel.params[i].do_not_specialize:
            signature[name] = "i32" if -(2**31) <= argument < 2**31 else "i64"
        elif argument == 1:
            signature[name] = "constexpr"
            values[(i,)] = 1
        else:
            signature[name] = "i32" if -(2**31) <= argument < 2**31 else "i64"
            if argument % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    language = GluonASTSource if kernel.is_gluon() else ASTSource
    cache_key(kernel)  # before Triton makes it
    source = language(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    with compiling_for(target):
        binary = triton.compile(
            source, target=target.triton_target, options=target.options(**options)
        )
    return _of_amd(binary) if target.backend == "hip" else _of_nvidia(binary)


def _of_nvidia(binary: Any) -> Compiled:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = nvidia_tool("cuobjdump", "-res-usage", file.name)
        try:
            sass = nvidia_tool("cuobjdump", "-sass", file.name)
        except subprocess.CalledProcessError:  # Triton's own cannot read what its ptxas made
            sass = ""
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, _, shared, _ = map(int, found.groups())
    lines = [(int(at, 16), opcode, rest) for at, opcode, rest in _SASS.findall(sass)]
    opcodes = Counter(opcode for _, opcode, _ in lines)
    if not sass:  # PTX stands in: there is no more to be seen than that it does something
        opcodes = Counter(_PTX.findall(binary.asm["ptx"]))
    backward = []
    place = {at: nth for nth, (at, _, _) in enumerate(lines)}
    for nth, (at, opcode, rest) in enumerate(lines):
        goal = re.search(r"0x([0-9a-f]+)", rest) if opcode in ("BRA", "BRX") else None
        if goal and int(goal[1], 16) < at:
            backward.append((place[int(goal[1], 16)], nth))
    # STL and LDL are the stores to and loads from local memory, where spilled registers go
    return Compiled(
        registers=registers,
        spill_bytes=4 * (opcodes["STL"] + opcodes["LDL"]),
        shared_bytes=shared,
        dynamic_shared_bytes=binary.metadata.shared,
        tensor_columns=getattr(binary.metadata, "tmem_size", 0) or 0,
        assembly=binary.asm["ptx"],
        sass=sass,
        opcodes=opcodes,
        loops=_loops([opcode for _, opcode, _ in lines], backward),
        before_begin=_before_begin([o for _, o, _ in lines] or _PTX.findall(binary.asm["ptx"])),
    )


def _of_amd(binary: Any) -> Compiled:
    assembly = binary.asm["amdgcn"]
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := _GCN_LABEL.match(line):
            labels[label[1]] = len(lines)
        elif instruction := _GCN.match(line):
            lines.append((instruction[1], instruction[2]))
    backward = []
    for nth, (opcode, rest) in enumerate(lines):
        goal = re.search(r"\.L\w+", rest) if "branch" in opcode else None
        if goal and labels.get(goal[0], nth + 1) <= nth:
            backward.append((labels[goal[0]], nth))

    def told(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found, name
        return int(found[1])

    return Compiled(
        registers=told("vgpr_count"),
        spill_bytes=4 * told("vgpr_spill_count"),
        shared_bytes=told("group_segment_fixed_size"),
        dynamic_shared_bytes=binary.metadata.shared,
        tensor_columns=0,
        assembly=assembly,
        sass="",
        opcodes=Counter(opcode for opcode, _ in lines),
        loops=_loops([opcode for opcode, _ in lines], backward),
        before_begin=None,
    )


def _before_begin(opcodes: list[str]) -> int | None:
    begin = next((nth for nth, opcode in enumerate(opcodes) if opcode in _BEGIN), None)
    if begin is None:
        return None
    return sum(bool(_GLOBAL.match(opcode)) for opcode in opcodes[:begin])


def _loops(opcodes: list[str], backward: list[tuple[int, int]]) -> tuple[Loop, ...]:
    inner = [
        (first, last)
        for first, last in set(backward)
        if not any(
            (f, t) != (first, last) and first <= f and t <= last and t - f < last - first
            for f, t in backward
        )
    ]
    found = []
    for first, last in sorted(inner):
        counts = Counter(opcodes[first : last + 1])
        found.append(
            Loop(
                instructions=last + 1 - first,
                spills=sum(
                    n for o, n in counts.items() if o in ("STL", "LDL") or o.startswith("scratch_")
                ),
                products=sum(n for o, n in counts.items() if _PRODUCT.search(o)),
            )
        )
    return tuple(found)


def run_apart(module: str, *case: str) -> Any:
    """What `python -m module case` prints as its last line, in JSON, with kernels compiled."""
    code, printed, errors = _run_apart(module, *case)
    assert code == 0, errors
    return json.loads(printed.splitlines()[-1])


def environment() -> dict[str, str]:
    """Of a process that compiles."""
    # torch sets the last one itself, sooner or later
    left_out = ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    if other := kept.get("DSV4_COMPILING_TRITON"):
        kept["PYTHONPATH"] = os.pathsep.join([other, kept.get("PYTHONPATH", "")])
    return kept


def _run_apart(module: str, *case: str) -> tuple[int, str, str]:
    variables = environment()
    if "RECORD_PTX" in variables:  # tools/record_ptx.py runs in the place of `python`
        command = [sys.executable, "-m", module, *case]
        done = subprocess.run(
            command, cwd=_ROOT, env=variables, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr
    told, heard = _server(tuple(sorted(variables.items())))
    told.write(json.dumps([module, *case]) + "\n")
    told.flush()
    code, printed, errors = json.loads(heard.readline())
    return code, printed, errors


@cache
def _server(environment: tuple[tuple[str, str], ...]) -> tuple[IO[str], IO[str]]:
    """A process that has imported all and forks. It ends when its stdin is closed, as this one
    does at the latest when it ends."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.kernels.compile_server"],
        cwd=_ROOT,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    atexit.register(server.stdout.close)
    atexit.register(server.wait)
    atexit.register(server.stdin.close)  # before
    return server.stdin, server.stdout


def nvidia_tool(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [str(_TOOLS / tool), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr
