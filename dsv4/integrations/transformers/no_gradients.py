"""Caches keep numbers and no graph: whoever asks for gradients through them is told so."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsv4.errors import InvalidInput


class _NoGradients(torch.autograd.Function):
    """Gives on what it is given, and refuses to go back."""

    @staticmethod
    def forward(context: Any, values: Tensor, wanted: Tensor, instead: str) -> Tensor:
        context.instead = instead
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        raise InvalidInput(
            f"backward reached a cache, which keeps numbers and no graph, so gradients behind it "
            f"would be wrong: {context.instead}"
        )


def no_gradients(values: Tensor, wanted: Tensor, instead: str) -> Tensor:
    """`values`, through which no gradient flows, as if they came of `wanted`, for which somebody
    may want one: `backward` raises InvalidInput. Where no graph is recorded, just `values`."""
    if not torch.is_grad_enabled() or not wanted.requires_grad:
        return values
    given: Tensor = _NoGradients.apply(values, wanted, instead)  # type: ignore[no-untyped-call]
    return given
