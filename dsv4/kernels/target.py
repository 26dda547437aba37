"""What a GPU and a Triton can do: the one place that knows architectures and versions.

Launchers ask `target_of(device)` and choose tiles, stages and registers from its numbers. Bodies of
kernels ask the functions at the end, which Triton calls while it compiles for a GPU. Nothing else
tests for an architecture or a version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dsv4.errors import UnsupportedGpu
from dsv4.kernels.sizes import heads_per_program

TRITON = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
# Gluon's names for what the kernels of kernels/hopper need.
GLUON_REINTERPRET = "reinterpret" if TRITON >= (3, 9) else "_reinterpret"
GLUON_ASYNC_LOAD = "async_load" if TRITON >= (3, 9) else "async_copy_global_to_shared"
GLUON_BULK_LOAD = "async_load" if TRITON >= (3, 8) else "async_copy_global_to_shared"
GLUON_BARRIER = "barrier" if TRITON >= (3, 7) else "thread_barrier"
# Registers per thread with which loops do not spill: later Tritons keep more values in registers.
OVERLAPPING_CHUNK_REGISTERS = 168 if TRITON < (3, 7) else 232
LONG_ROW_REGISTERS = 128 if TRITON < (3, 9) else 136

# Whether Triton compiles a C function for each signature of a kernel, to launch it.
LAUNCHERS_ARE_COMPILED = TRITON < (3, 7)

KIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An architecture that kernels are compiled for.

    `shared_bytes` is what one program may have; `products` the instructions that multiply matrices,
    by the generation that brought them: mma (a warp's), wgmma (a warpgroup's, from shared memory),
    tcgen05 (into tensor memory) and mfma (AMD's). `converts_e4m3`: fp32 ↔ E4M3, exactly as
    dsv4/reference. `multiplies_bf16`: two bf16 at once; without it a fused multiply-add does.
    """

    name: str
    gpus: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    shared_bytes: int
    products: Literal["mma", "wgmma", "tcgen05", "mfma"]
    converts_e4m3: bool
    multiplies_bf16: bool
    wave: int = 32
    # a thread's: what the instruction set can name
    registers: int = 255

    @property
    def speaks_ptx(self) -> bool:
        return self.backend == "cuda"

    @property
    def is_hopper(self) -> bool:
        """Whether the kernels of dsv4/kernels/hopper run there."""
        return self.products == "wgmma"

    @property
    def launches_early(self) -> bool:
        """Whether a launch may begin before the previous one has ended. Later architectures
        can do this too; whether it pays was measured on an H200 only."""
        return self.is_hopper

    @property
    def triton_target(self) -> GPUTarget:
        return GPUTarget(self.backend, self.arch, self.wave)

    def options(self, *, enable_fp_fusion: bool, **asked: Any) -> dict[str, Any]:
        """Options of a launch, without those that Triton does not know for this target. A launch
        may begin early (kernels/overlap.py) unless it asks not to. Whether products and sums may be
        fused is always given explicitly: Triton's default is a setting, and changes in 3.10."""
        asked["enable_fp_fusion"] = enable_fp_fusion
        if self.launches_early:
            asked.setdefault("launch_pdl", True)
        else:
            asked.pop("launch_pdl", None)
        if self.backend == "hip":
            asked.pop("maxnreg", None)
        return asked


def _cuda(
    arch: int,
    gpus: str,
    shared: int,
    products: Literal["mma", "wgmma", "tcgen05"],
) -> Target:
    return Target(
        name=f"sm_{arch}",
        gpus=gpus,
        backend="cuda",
        arch=arch,
        shared_bytes=shared * KIB,
        products=products,
        converts_e4m3=arch >= 89,
        multiplies_bf16=arch >= 90,
    )


def _hip(arch: str, gpus: str, shared: int) -> Target:
    return Target(
        name=arch,
        gpus=gpus,
        backend="hip",
        arch=arch,
        shared_bytes=shared * KIB,
        products="mfma",
        # gfx942's FP8 is a different format, and gfx950's conversion does not saturate
        converts_e4m3=False,
        multiplies_bf16=False,
        wave=64,
        registers=512,
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _cuda(80, "A100, A30", 163, "mma"),
        _cuda(86, "A10, A40, RTX 3090", 99, "mma"),
        _cuda(89, "L4, L40S, RTX 4090", 99, "mma"),
        _cuda(90, "H100, H200", 227, "wgmma"),
        _cuda(100, "B200", 227, "tcgen05"),
        _cuda(103, "B300", 227, "tcgen05"),
        _cuda(120, "RTX 5090, RTX PRO 6000", 99, "mma"),
        _hip("gfx942", "MI300X, MI325X", 64),
        _hip("gfx950", "MI350X, MI355X", 160),
    )
}
# Where kernels are interpreted nothing is limited; the choices are those of the GPU of the tests.
INTERPRETER_LIKE = TARGETS["sm_90"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """How the portable attention kernel is cut: `keys` per tile, `heads` per program at most, spans
    of up to `span` channels (coded and bf16 ones together if `mixed_spans`), and tiles of stored
    keys being loaded: `coded_buffers`, or `bf16_buffers` where records are plain."""

    keys: int
    heads: int
    span: int
    mixed_spans: bool
    coded_buffers: int
    bf16_buffers: int
    warps: int


_WARPGROUP = AttentionTiles(
    keys=64, heads=64, span=256, mixed_spans=False, coded_buffers=2, bf16_buffers=1, warps=8
)
_TENSOR_MEMORY = AttentionTiles(
    keys=64, heads=64, span=512, mixed_spans=True, coded_buffers=1, bf16_buffers=1, warps=8
)
_WARP = AttentionTiles(
    keys=32, heads=32, span=128, mixed_spans=False, coded_buffers=2, bf16_buffers=1, warps=8
)
_WAVE = AttentionTiles(
    keys=32, heads=16, span=128, mixed_spans=False, coded_buffers=2, bf16_buffers=1, warps=4
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileRule:
    """Tiles for launches that meet all the given conditions: how the target multiplies, heads of a
    program (64 at most), kinds of records, whether the target has little shared memory, and Triton
    versions from `since` on and older than `before`.

    `why`: what was wrong with the tiles of the rules below. `was_run`: a GPU has run launches with
    these tiles; others were only compiled."""

    tiles: AttentionTiles
    why: str
    was_run: bool
    products: str | None = None
    heads: int | None = None
    crowded: bool | None = None
    fp32_scales: bool | None = None
    little_memory: bool | None = None
    since: tuple[int, ...] = (0,)
    before: tuple[int, ...] = (1_000,)

    def holds(self, **launch: object) -> bool:
        """Whether a launch meets all of these conditions, given by name."""
        given = {name: getattr(self, name) for name in launch}
        met = all(wanted in (None, launch[name]) for name, wanted in given.items())
        return met and self.since <= TRITON < self.before


# The first rule that holds is taken. Only an H200 with Triton 3.6 has run any of them.
ATTENTION_TILES = (
    # Hopper
    TileRule(
        products="wgmma",
        heads=64,
        since=(3, 7),
        tiles=replace(_WARPGROUP, span=64),
        why="more is in registers from Triton 3.7 on, and spans of 256 spilled in the loop",
        was_run=False,
    ),
    TileRule(
        products="wgmma",
        heads=32,
        since=(3, 7),
        tiles=_WARP,
        why="more is in registers from Triton 3.7 on, and 64 keys spilled in the loop",
        was_run=False,
    ),
    TileRule(
        products="wgmma",
        heads=32,
        tiles=replace(_WARPGROUP, span=128),
        why="fewer than 64 rows are not multiplied by a warp group, and sums of two spans of 256 "
        "spilled",
        was_run=True,
    ),
    TileRule(
        products="wgmma",
        fp32_scales=True,
        tiles=replace(_WARPGROUP, span=128),
        why="scales of fp32 take more registers to decode than powers of two",
        was_run=True,
    ),
    TileRule(
        products="wgmma",
        tiles=_WARPGROUP,
        why="64 KB of queries and 64 KB of decoded keys fit into shared memory with two tiles of "
        "stored keys being loaded, 37 KB each, or one in bf16, 64 KB",
        was_run=True,
    ),
    # 64 heads and more in tensor memory
    TileRule(
        products="tcgen05",
        heads=64,
        fp32_scales=True,
        tiles=replace(_TENSOR_MEMORY, keys=32),
        why="with 64 keys, scales of fp32 did not fit into shared memory",
        was_run=False,
    ),
    TileRule(
        products="tcgen05",
        heads=64,
        tiles=_TENSOR_MEMORY,
        why="the sums take the 512 columns of tensor memory; logits of several spans took more",
        was_run=False,
    ),
    # products of a warp or of a wave: sums are in registers
    TileRule(
        products="mfma",
        fp32_scales=True,
        tiles=replace(_WAVE, coded_buffers=1, span=64),
        why="scales of fp32 take more registers to decode than any others",
        was_run=False,
    ),
    TileRule(
        fp32_scales=True,
        tiles=replace(_WARP, coded_buffers=1, span=64),
        why="scales of fp32 take more registers to decode than any others",
        was_run=False,
    ),
    TileRule(
        products="tcgen05",
        heads=32,
        crowded=True,
        since=(3, 7),
        before=(3, 8),
        tiles=replace(_WARP, coded_buffers=1, span=64),
        why="spans of 256 spilled up to 10 of some 2,200 instructions of the loop with Triton 3.7",
        was_run=False,
    ),
    TileRule(
        products="tcgen05",
        heads=32,
        crowded=True,
        since=(3, 9),
        before=(3, 10),
        tiles=replace(_WARP, coded_buffers=1, keys=16, span=512),
        why="spans of 256 spilled up to 51 of some 2,200 instructions of the loop with Triton 3.9",
        was_run=False,
    ),
    TileRule(
        products="mfma",
        crowded=True,
        tiles=replace(_WAVE, coded_buffers=1),
        why="with two tiles being loaded such records spilled in the loop",
        was_run=False,
    ),
    TileRule(
        products="mfma",
        tiles=_WAVE,
        why="sums are in registers: a wave has twice a warp's threads, and half of its heads",
        was_run=False,
    ),
    TileRule(
        crowded=True,
        tiles=replace(_WARP, coded_buffers=1, span=256),
        why="with two tiles being loaded such records spilled in the loop, and with spans of 128 "
        "some kinds of launches all the same",
        was_run=False,
    ),
    TileRule(
        little_memory=True,
        tiles=replace(_WARP, coded_buffers=1),
        why="two loaded tiles do not fit into less than 128 KB",
        was_run=False,
    ),
    TileRule(
        tiles=_WARP,
        why="sums are in registers, 64 per thread: more heads or wider spans spilled in the loop",
        was_run=False,
    ),
)


def attention_rule(target: Target, heads: int, *, crowded: bool, fp32_scales: bool) -> TileRule:
    """The rule for queries with this many heads. `crowded`: some records have 4-bit codes, or more
    than one scale per 64 channels; `fp32_scales`: some have fp32 scales. Both take more registers
    to decode than FP8 codes with a power of two."""
    launch = {
        "products": target.products,
        "heads": heads_per_program(heads, 64),
        "crowded": crowded or fp32_scales,
        "fp32_scales": fp32_scales,
        "little_memory": target.shared_bytes < 128 * KIB,
    }
    return next(rule for rule in ATTENTION_TILES if rule.holds(**launch))


def attention_tiles(
    target: Target, heads: int, *, crowded: bool, fp32_scales: bool
) -> AttentionTiles:
    """The tiles of attention_rule."""
    return attention_rule(target, heads, crowded=crowded, fp32_scales=fp32_scales).tiles


def score_tile(target: Target, band: int) -> int:
    """Entries per tile of index scores, for bands of this many tokens. Without instructions of a
    warpgroup, keys and logits of a band are in registers, and 64 of them spill in the loop."""
    return 32 if band > 1 and target.products == "mma" else 64


def score_registers(target: Target, band: int, *, powers: bool) -> int | None:
    """The most registers per thread for index scores; None leaves it to the assembler. `powers`:
    scales are powers of two."""
    if band == 1 and powers:
        return 128  # four programs share a processor; other formats would spill
    if band > 1 and target.products == "mma":
        # without a bound it spills in the loop in order to fit one program more
        return target.registers
    return None


def bounded_registers(target: Target, bound: int) -> int:
    """The most registers per thread, for more programs on a processor. The bound was found on
    Hopper; other assemblers spill in loops under it, and get more."""
    return bound if target.is_hopper else max(bound, 168)


def row_warps(target: Target, scores: int) -> int:
    """Warps of a program that holds a row of this many scores in registers; with 4, later Tritons
    spill in loops where the row is long."""
    return 8 if scores > 4096 and TRITON >= (3, 8) and not target.is_hopper else 4


_asked_for: list[Target] = []


@contextmanager
def compiling_for(target: Target) -> Iterator[None]:
    """Inside, launchers and kernels choose for this target, whatever GPU is there. For compiling
    without that GPU: a launch on another one fails."""
    _asked_for.append(target)
    try:
        yield
    finally:
        _asked_for.pop()


def target_of(device: torch.device) -> Target:
    """The target of a device; without a GPU the one that the interpreter uses. Raises
    UnsupportedGpu."""
    if _asked_for:
        return _asked_for[-1]
    return _target_of(device)


@cache
def _target_of(device: torch.device) -> Target:
    if device.type != "cuda":
        return INTERPRETER_LIKE
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        name = str(properties.gcnArchName).partition(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    return named_target(name, gpu=properties.name)


def named_target(name: str, *, gpu: str) -> Target:
    """Raises UnsupportedGpu, whose message names the GPU."""
    if name not in TARGETS:
        known = ", ".join(f"{t.name} ({t.gpus})" for t in TARGETS.values())
        raise UnsupportedGpu(
            f"the Triton kernels are made for {known}; {gpu} is {name}: use backend='reference', "
            f"which runs on any device"
        )
    return TARGETS[name]


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors (compute units) of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def compiled_for() -> Target:
    """What Triton compiles for at this moment."""
    if _asked_for:
        return _asked_for[-1]
    if triton.knobs.runtime.interpret:
        return INTERPRETER_LIKE
    found = driver.active.get_current_target()
    name = f"sm_{found.arch}" if found.backend == "cuda" else str(found.arch).partition(":")[0]
    return named_target(name, gpu=f"{found.backend} {found.arch}")


def _bf16_products(ptx: str) -> str:
    if compiled_for().multiplies_bf16:
        return ptx
    fused = r"{.reg .b32 none; mov.b32 none, 0x80008000; fma\1, none;}"
    return re.sub(r"mul(\.rn\.bf16x2 [^;]*);", fused, ptx)


# Triton looks through the functions below for what a kernel depends on, but not through functions
# that it takes for its own. cache_key.py adds this file and the facts of all targets to the keys.
compiled_for.__triton_builtin__ = True  # type: ignore[attr-defined]
_bf16_products.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.constexpr_function
def speaks_ptx():
    """Whether kernels may contain PTX."""
    return compiled_for().speaks_ptx


@triton.constexpr_function
def launches_early():
    """Whether a kernel says when the next one may begin, and waits for the previous one."""
    return compiled_for().launches_early and not triton.knobs.runtime.interpret


@triton.constexpr_function
def converts_e4m3():
    """Whether fp32 ↔ E4M3 is one instruction with the reference's results."""
    return compiled_for().converts_e4m3


@triton.constexpr_function
def bf16_products(ptx):
    """PTX with products of bf16 pairs, `mul.rn.bf16x2 d, a, b;`, as the target can do them. Where
    it lacks the instruction, a fused multiply-add of -0 gives the same, signs of zeros included."""
    return _bf16_products(ptx)
