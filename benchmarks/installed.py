"""Kernels of other libraries that do the same work, where they are installed: timed in the same run
as ours (`python -m benchmarks.run --peers`). benchmarks/peers.md says how to get them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.case import Call

# What a peer raises whose build does not fit to this machine, besides missing modules
CANNOT_LOAD = (ImportError, OSError, RuntimeError, AttributeError)
PAGE_TOKENS = 64  # of DeepGEMM's paged keys
WORKSPACE_BYTES = 1 << 20  # of vLLM's top-k


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library's kernel: the module that has it, the names of the packages that may bring this
    module, and the suites in which it is timed."""

    name: str
    module: str
    packages: tuple[str, ...]
    suites: tuple[str, ...]


_FLASH_MLA = ("attention",)
PEERS = (
    Peer(
        name="FlashMLA",
        module="flash_mla.flash_mla_interface",
        packages=("flash_mla", "flash-mla"),
        suites=_FLASH_MLA,
    ),
    # the same kernel and calling convention, as packaged by two projects
    Peer(
        name="FlashMLA in vLLM",
        module="vllm.v1.attention.ops.flashmla",
        packages=("vllm",),
        suites=_FLASH_MLA,
    ),
    Peer(
        name="FlashMLA in SGLang",
        module="sgl_kernel.flash_mla",
        packages=("sgl-kernel", "sglang-kernel"),
        suites=_FLASH_MLA,
    ),
    Peer(
        name="DeepGEMM fp8",
        module="deep_gemm",
        packages=("deep_gemm", "deep-gemm", "sgl-deep-gemm"),
        suites=("indexer",),
    ),
    Peer(name="vLLM top-k", module="vllm._C", packages=("vllm",), suites=("indexer",)),
    Peer(
        name="SGLang top-k",
        module="sgl_kernel",
        packages=("sgl-kernel", "sglang-kernel"),
        suites=("indexer",),
    ),
)
SUITES = tuple(dict.fromkeys(suite for peer in PEERS for suite in peer.suites))


# ---- which are there ----------------------------------------------------------------------------


@cache
def _found() -> tuple[dict[str, ModuleType], dict[str, str]]:
    modules, missing = {}, {}
    for peer in PEERS:
        try:
            modules[peer.name] = import_module(peer.module)
        except CANNOT_LOAD as error:
            missing[peer.name] = f"{type(error).__name__}: {error}"
    return modules, missing


def modules() -> dict[str, ModuleType]:
    """Of the peers that can be imported here, by name."""
    return _found()[0]


def missing() -> dict[str, str]:
    """Why the others cannot be."""
    return _found()[1]


def flash_mla_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in modules().items() if name.startswith("FlashMLA")}


def version_of(name: str) -> str:
    """The version of a peer, by its package or by the module itself."""
    peer = next(peer for peer in PEERS if peer.name == name)
    for package in peer.packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    root = sys.modules.get(peer.module.partition(".")[0])
    return str(getattr(root, "__version__", "unknown version"))


def versions(names: Sequence[str]) -> str:
    """For the note of a result: what was timed in its run."""
    known = {peer.name for peer in PEERS}
    return ", ".join(f"{name} {version_of(name)}" for name in names if name in known)


def working(makers: Mapping[str, Callable[[], list[Call]]]) -> dict[str, list[Call]]:
    """Calls of peers that can be made and run; the others are left out, with the reason. An error
    of the device is raised: nothing can run after it."""
    found = {}
    for name, make in makers.items():
        try:
            calls = make()
            calls[0]()
        except (torch.AcceleratorError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            print(f"left out: {name} ({type(error).__name__}: {reason})", flush=True)
        else:
            found[name] = calls
    return found


# ---- their calls --------------------------------------------------------------------------------


def flash_mla_call(module: ModuleType, arguments: dict[str, object]) -> Call:
    """A call with a schedule of its own, which FlashMLA makes when it first runs."""
    schedule, _ = module.get_mla_metadata()

    def call() -> None:
        module.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=schedule)

    return call


def index_score_peers(
    requests: int, entries: int, *, heads: int, width: int, sets: int, device: str = "cuda"
) -> dict[str, list[Call]]:
    """The scores of decode steps of one token each, with keys of FP8."""
    if "DeepGEMM fp8" not in modules():
        return {}

    def make() -> list[Call]:
        return deep_gemm_calls(
            modules()["DeepGEMM fp8"],
            requests,
            entries,
            heads=heads,
            width=width,
            sets=sets,
            device=device,
        )

    return working({"DeepGEMM fp8": make})


def deep_gemm_calls(
    module: ModuleType,
    requests: int,
    entries: int,
    *,
    heads: int,
    width: int,
    sets: int,
    device: str,
) -> list[Call]:
    """Calls with keys of their own each, of `width` bytes and a scale of 4; the schedule is made
    once, as an engine makes it once for all layers."""
    pages = -(-entries // PAGE_TOKENS)
    keys = torch.randint(
        0, 120, (sets * requests * pages, PAGE_TOKENS, 1, width + 4), dtype=torch.uint8,
        device=device,
    )  # fmt: skip
    keys[..., width:] = torch.tensor([0, 0, 128, 63], dtype=torch.uint8, device=device)  # 1.0
    q = torch.randn(requests, 1, heads, width, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(requests, heads, device=device)
    lengths = torch.full((requests,), entries, dtype=torch.int32, device=device)
    schedule = module.get_paged_mqa_logits_metadata(lengths, PAGE_TOKENS, module.get_num_sms())
    shuffled = torch.randperm(len(keys), device=device).int().view(sets, requests, pages)

    def make(table: Tensor) -> Call:
        def call() -> None:
            module.fp8_paged_mqa_logits(
                q, keys, weights, lengths, table, schedule, entries, clean_logits=False
            )

        return call

    return [make(table) for table in shuffled]


def top_k_peers(scores: Tensor, count: int) -> dict[str, list[Call]]:
    """Of rows that are all visible. torch's is always there."""
    lengths = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device)
    makers: dict[str, Callable[[], list[Call]]] = {
        "torch.topk": lambda: [torch_top_k_call(scores, count)]
    }
    if "vLLM top-k" in modules():
        makers["vLLM top-k"] = lambda: [vllm_top_k_call(scores, lengths, count)]
    if "SGLang top-k" in modules():
        module = modules()["SGLang top-k"]
        makers["SGLang top-k"] = lambda: [sglang_top_k_call(module, scores, lengths, count)]
    return working(makers)


def torch_top_k_call(scores: Tensor, count: int) -> Call:
    def call() -> None:
        torch.topk(scores, count, dim=-1)

    return call


def vllm_top_k_call(scores: Tensor, lengths: Tensor, count: int) -> Call:
    """The one that vLLM takes for V4 on NVIDIA's GPUs."""
    out = torch.empty(len(scores), count, dtype=torch.int32, device=scores.device)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=scores.device)
    columns = scores.shape[1]

    def call() -> None:
        torch.ops._C.persistent_topk(scores, lengths, out, workspace, count, columns)

    return call


def sglang_top_k_call(module: ModuleType, scores: Tensor, lengths: Tensor, count: int) -> Call:
    def call() -> None:
        module.fast_topk_v2(scores, lengths, count)

    return call
