"""Other libraries that can do the same work, where they are installed."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.case import Call

# the same kernel and calling convention, as packaged by three projects
FLASH_MLA_MODULES = {
    "FlashMLA": "flash_mla.flash_mla_interface",
    "FlashMLA in vLLM": "vllm.v1.attention.ops.flashmla",
    "FlashMLA in SGLang": "sgl_kernel.flash_mla",
}


@cache
def flash_mla_modules() -> dict[str, ModuleType]:
    """Those that can be imported here."""
    found = {}
    for name, module in FLASH_MLA_MODULES.items():
        try:
            found[name] = import_module(module)
        except (ImportError, OSError, RuntimeError):
            continue
    return found


def flash_mla_call(module: ModuleType, arguments: dict[str, object]) -> Call:
    """A call with a schedule of its own, which FlashMLA makes when it first runs."""
    schedule, _ = module.get_mla_metadata()

    def call() -> None:
        module.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=schedule)

    return call


def torch_top_k_call(scores: Tensor, count: int) -> Call:
    def call() -> None:
        torch.topk(scores, count, dim=-1)

    return call
