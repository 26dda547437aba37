"""Layers that keep their adapters as PEFT's do (`BaseTunerLayer`), for test_accelerate_weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.numbers import Numbers

RANK = 4
ADAPTED = ("q_a_proj", "kv_proj")


class Lora(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        self.scaling: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._active_adapter: list[str] = []
        self._disable_adapters = False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x)
        for name in () if self._disable_adapters else self._active_adapter:
            out = out + self.scaling[name] * self.lora_B[name](self.lora_A[name](x))
        return out


def layers_of(model: Any) -> list[Lora]:
    return [module for module in model.modules() if isinstance(module, Lora)]


@torch.no_grad()
def add_adapter(model: Any, name: str, seed: int) -> None:
    """As get_peft_model and add_adapter do: a new one is active, and replaces one of its name."""
    for layer in model.model.layers:
        for child in ADAPTED:
            known = getattr(layer.self_attn, child)
            if not isinstance(known, Lora):
                setattr(layer.self_attn, child, Lora(known))
    for nth, lora in enumerate(layers_of(model)):
        numbers, base = Numbers(1000 * seed + nth), lora.base_layer
        for part, shape in (
            (lora.lora_A, (RANK, base.in_features)),
            (lora.lora_B, (base.out_features, RANK)),
        ):
            part[name] = nn.Linear(shape[1], shape[0], bias=False).requires_grad_(False)
            part[name].weight.copy_(0.3 * numbers.normal(*shape))
        lora.scaling[name] = 1.0
    set_adapter(model, name)


def set_adapter(model: Any, name: str) -> None:
    for lora in layers_of(model):
        lora._active_adapter = [name]


@contextmanager
def disable_adapter(model: Any) -> Iterator[None]:
    for lora in layers_of(model):
        lora._disable_adapters = True
    try:
        yield
    finally:
        for lora in layers_of(model):
            lora._disable_adapters = False
