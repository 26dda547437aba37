"""What handles check before they launch anything. Each raises InvalidInput with what it found."""

from __future__ import annotations

from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from dsv4.cache.pages import CompressorLayout
from dsv4.errors import InvalidInput
from dsv4.ops.calls import LayerWeights

T = TypeVar("T")
Shape = tuple[int | str, ...]


# how a shape that the batch's rows need is reported
OF_ROWS = "the plan's tokens (padding included) need"


def rows(
    name: str,
    tensor: Tensor,
    shape: tuple[int, int],
    dtype: str,
    device: torch.device,
    *,
    aligned: bool = True,
) -> None:
    """A tensor whose rows are contiguous and, if `aligned`, start on 16 bytes."""
    _form(name, tensor, shape, dtype, device, OF_ROWS)
    row_bytes = tensor.stride(0) * tensor.element_size()
    is_odd = tensor.data_ptr() % 16 or (shape[0] > 1 and row_bytes % 16)
    if tensor.stride(-1) != 1 or (aligned and is_odd):
        _refuse_rows(name, tensor, row_bytes)


def _refuse_rows(name: str, tensor: Tensor, row_bytes: int) -> NoReturn:
    if tensor.stride(-1) != 1:
        raise InvalidInput(
            f"the last dimension of {name} has stride {tensor.stride(-1)}: make it contiguous"
        )
    raise InvalidInput(
        f"rows of {name} start at address {tensor.data_ptr()} and lie {row_bytes} bytes apart: "
        f"both must be multiples of 16 bytes, so that kernels can load 16 at a time"
    )


def whole(
    name: str,
    tensor: Tensor,
    shape: Shape,
    dtype: str,
    device: torch.device,
    needed: str = "expected",
) -> None:
    """A contiguous tensor. In its shape a word stands for any length."""
    _form(name, tensor, shape, dtype, device, needed)
    _contiguous(name, tensor)


def result(
    name: str, given: Tensor, shape: tuple[int, ...], dtype_name: str, device: torch.device
) -> None:
    """A contiguous tensor that a call writes to."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    is_tensor(name, given)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        _refuse_result(name, given, f"{dtype} {list(shape)} on {device}")
    _contiguous(name, given)


def _refuse_result(name: str, given: Tensor, expected: str) -> NoReturn:
    raise InvalidInput(
        f"{name} is {given.dtype} {list(given.shape)} on {given.device}, expected {expected}"
    )


def _contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InvalidInput(f"{name} is not contiguous: call .contiguous() once, at load time")


def rope_table(table: Tensor, rope_dim: int, max_context: int, device: torch.device) -> None:
    """The table of dsv4.rope.rope_table, for every position that a request can reach."""
    whole("rope", table, ("positions", rope_dim), "float32", device)
    if table.shape[0] < max_context:
        raise InvalidInput(
            f"rope has shape {list(table.shape)}, expected [positions, {rope_dim}] (cos | sin) "
            f"with at least max_context={max_context} positions"
        )


def _form(
    name: str, tensor: Tensor, shape: Shape, dtype: str, device: torch.device, needed: str
) -> None:
    is_tensor(name, tensor)
    lengths = tuple(tensor.shape)
    if lengths != shape and not _matches(lengths, shape):
        raise InvalidInput(
            f"{name} has shape {list(lengths)}, {needed} [{', '.join(map(str, shape))}]"
        )
    if tensor.dtype != getattr(torch, dtype):
        raise InvalidInput(f"{name} is {tensor.dtype}, must be torch.{dtype}")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, the cache is on {device}")


def _matches(lengths: tuple[int, ...], shape: Shape) -> bool:
    return len(lengths) == len(shape) and all(
        isinstance(needed, str) or needed == length
        for length, needed in zip(lengths, shape, strict=True)
    )


def given(name: str, value: T | None, layer: int) -> T:
    if value is None:
        raise InvalidInput(f"layer {layer} needs {name}, got None")
    return value


def wanted(
    layout: CompressorLayout | None, name: str, c: Tensor | None, z: Tensor | None, layer: int
) -> bool:
    """Whether a compressor's projections are written: exactly where the layer has it."""
    needs = (False, False) if layout is None else (True, layout.gated)
    if (c is not None, z is not None) != needs:
        _refuse_projections(layout, name, c, layer)
    return layout is not None


def _refuse_projections(
    layout: CompressorLayout | None, name: str, c: Tensor | None, layer: int
) -> NoReturn:
    if layout is None:
        raise InvalidInput(f"layer {layer} has no compressor for {name}c: leave it out")
    if c is None or layout.gated:
        lacking = f"{name}c" if c is None else f"{name}z"
        raise InvalidInput(f"layer {layer} compresses, but {lacking} is missing")
    raise InvalidInput(
        f"layer {layer} makes an entry of every token, without a gate: leave {name}z out"
    )


def layer_weights(weights: object) -> None:
    if not isinstance(weights, LayerWeights):
        raise InvalidInput(f"weights are {type(weights).__name__}, must be LayerWeights")


def is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{name} is {type(value).__name__}, must be a tensor")
