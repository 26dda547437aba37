"""What handles check before they launch anything. Each raises InvalidInput with what it found."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from dsv4.cache.pages import CompressorLayout
from dsv4.errors import InvalidInput
from dsv4.ops.calls import LayerWeights

T = TypeVar("T")


def rows(
    name: str,
    tensor: Tensor,
    count: int,
    width: int,
    dtype: str,
    device: torch.device,
    *,
    aligned: bool = True,
) -> None:
    """A [count, width] tensor whose rows are contiguous and, if `aligned`, start on 16 bytes."""
    is_tensor(name, tensor)
    shape = (count, width)
    if tuple(tensor.shape) != shape:
        raise InvalidInput(
            f"{name} has shape {list(tensor.shape)}, the plan's tokens (padding included) need "
            f"{list(shape)}"
        )
    _dtype_and_device(name, tensor, dtype, device)
    if tensor.stride(-1) != 1:
        raise InvalidInput(
            f"the last dimension of {name} has stride {tensor.stride(-1)}: make it contiguous"
        )
    row_bytes = tensor.stride(0) * tensor.element_size()
    if aligned and (tensor.data_ptr() % 16 or (count > 1 and row_bytes % 16)):
        raise InvalidInput(
            f"rows of {name} start at address {tensor.data_ptr()} and lie {row_bytes} bytes apart: "
            f"both must be multiples of 16 bytes, so that kernels can load 16 at a time"
        )


def vector(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """A contiguous fp32 weight."""
    weight(name, tensor, shape, "float32", device)


def weight(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: str, device: torch.device
) -> None:
    """A contiguous weight."""
    is_tensor(name, tensor)
    if tuple(tensor.shape) != shape:
        raise InvalidInput(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    _dtype_and_device(name, tensor, dtype, device)
    contiguous(name, tensor)


def contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise InvalidInput(f"{name} is not contiguous: call .contiguous() once, at load time")


def rope_table(table: Tensor, rope_dim: int, max_context: int, device: torch.device) -> None:
    """The table of dsv4.rope.rope_table, for every position that a request can reach."""
    is_tensor("rope", table)
    if table.dim() != 2 or table.shape[1] != rope_dim or table.shape[0] < max_context:
        raise InvalidInput(
            f"rope has shape {list(table.shape)}, expected [positions, {rope_dim}] (cos | sin) "
            f"with at least max_context={max_context} positions"
        )
    vector("rope", table, tuple(table.shape), device)


def heads(
    name: str, tensor: Tensor, tokens: int, width: int, dtype: str, device: torch.device
) -> None:
    """A contiguous [tokens, heads, width] tensor."""
    is_tensor(name, tensor)
    if tensor.dim() != 3 or tensor.shape[0] != tokens or tensor.shape[2] != width:
        raise InvalidInput(
            f"{name} has shape {list(tensor.shape)}, the plan's tokens (padding included) need "
            f"[{tokens}, heads, {width}]"
        )
    _dtype_and_device(name, tensor, dtype, device)
    contiguous(name, tensor)


def index_rows(name: str, tensor: Tensor, tokens: int, device: torch.device) -> None:
    """A contiguous int32 [tokens, k] tensor of entry numbers."""
    is_tensor(name, tensor)
    if tensor.dim() != 2 or tensor.shape[0] != tokens:
        raise InvalidInput(
            f"{name} has shape {list(tensor.shape)}, the plan's tokens (padding included) need "
            f"[{tokens}, k]"
        )
    _dtype_and_device(name, tensor, "int32", device)
    contiguous(name, tensor)


def given(name: str, value: T | None, layer: int) -> T:
    if value is None:
        raise InvalidInput(f"layer {layer} needs {name}, got None")
    return value


def wanted(
    layout: CompressorLayout | None,
    c_name: str,
    c: Tensor | None,
    z_name: str,
    z: Tensor | None,
    layer: int,
) -> bool:
    """Whether a compressor's projections are written: exactly where the layer has it."""
    if layout is None:
        if c is not None or z is not None:
            raise InvalidInput(f"layer {layer} has no compressor for {c_name}: leave it out")
        return False
    for name, tensor, needed in ((c_name, c, True), (z_name, z, layout.gated)):
        if needed and tensor is None:
            raise InvalidInput(f"layer {layer} compresses, but {name} is missing")
    if z is not None and not layout.gated:
        raise InvalidInput(
            f"layer {layer} makes an entry of every token, without a gate: leave {z_name} out"
        )
    return True


def layer_weights(weights: object) -> None:
    if not isinstance(weights, LayerWeights):
        raise InvalidInput(f"weights are {type(weights).__name__}, must be LayerWeights")


def is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{name} is {type(value).__name__}, must be a tensor")


def _dtype_and_device(name: str, tensor: Tensor, dtype: str, device: torch.device) -> None:
    if tensor.dtype != getattr(torch, dtype):
        raise InvalidInput(f"{name} is {tensor.dtype}, must be torch.{dtype}")
    if tensor.device != device:
        raise InvalidInput(f"{name} is on {tensor.device}, the cache is on {device}")
