"""What handles check before they launch anything. Each raises InvalidInput with what it found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from dsv4.cache.pages import CompressorLayout
from dsv4.cache.schema import CacheSchema
from dsv4.errors import InvalidInput
from dsv4.ops.calls import LayerWeights

T = TypeVar("T")
Shape = tuple[int | str, ...]


# how a shape that the batch's rows need is reported
OF_ROWS = "the plan's tokens (padding included) need"


class TensorChecks:
    """What the tensors must be that a cache on `device` is given. In a shape a word stands for any
    length."""

    def __init__(self, schema: CacheSchema, device: torch.device) -> None:
        self._rope_dim, self._max_context = schema.model.rope_dim, schema.max_context
        self._device = device

    def rows(
        self, name: str, tensor: Tensor, shape: Shape, dtype: str, *, aligned: bool = True
    ) -> None:
        """A tensor of one row per token, contiguous rows that, if `aligned`, start on 16 bytes."""
        if not self._fits(tensor, shape, dtype):
            self._refuse(name, tensor, shape, dtype, OF_ROWS)
        row_bytes = tensor.stride(0) * tensor.element_size()
        is_odd = tensor.data_ptr() % 16 or (tensor.shape[0] > 1 and row_bytes % 16)
        if tensor.stride(-1) != 1 or (aligned and is_odd):
            _refuse_rows(name, tensor, row_bytes)

    def whole(
        self, name: str, tensor: Tensor, shape: Shape, dtype: str, needed: str = "expected"
    ) -> None:
        """A contiguous tensor."""
        if not self._fits(tensor, shape, dtype):
            self._refuse(name, tensor, shape, dtype, needed)
        if not tensor.is_contiguous():
            _refuse_strides(name)

    def result(self, name: str, given: Tensor, shape: Shape, dtype: str) -> None:
        """A contiguous tensor that a call writes to."""
        if not self._fits(given, shape, dtype):
            self._refuse_result(name, given, shape, dtype)
        if not given.is_contiguous():
            _refuse_strides(name)

    def rope_table(self, table: Tensor) -> None:
        """The table of dsv4.rope.rope_table, for every position that a request can reach."""
        self.whole("rope", table, ("positions", self._rope_dim), "float32")
        if table.shape[0] < self._max_context:
            self._refuse_rope(table)

    def _fits(self, tensor: Tensor, shape: Shape, dtype: str) -> bool:
        return (
            isinstance(tensor, Tensor)
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and (tensor.shape == shape or _matches(tensor.shape, shape))
            and tensor.dtype == getattr(torch, dtype)
            and tensor.device == self._device
        )

    def _refuse(self, name: str, tensor: Tensor, shape: Shape, dtype: str, needed: str) -> NoReturn:
        is_tensor(name, tensor)
        lengths = list(tensor.shape)
        if not _matches(lengths, shape):
            raise InvalidInput(
                f"{name} has shape {lengths}, {needed} [{', '.join(map(str, shape))}]"
            )
        if tensor.dtype != getattr(torch, dtype):
            raise InvalidInput(
                f"{name} is {tensor.dtype}, must be torch.{dtype}: convert it, .to(torch.{dtype}); "
                f"the schema's formats say what is taken"
            )
        raise InvalidInput(f"{name} is on {tensor.device}, the cache is on {self._device}")

    def _refuse_result(self, name: str, given: Tensor, shape: Shape, dtype: str) -> NoReturn:
        is_tensor(name, given)
        raise InvalidInput(
            f"{name} is {given.dtype} {list(given.shape)} on {given.device}, expected "
            f"torch.{dtype} {list(shape)} on {self._device}"
        )

    def _refuse_rope(self, table: Tensor) -> NoReturn:
        raise InvalidInput(
            f"rope has shape {list(table.shape)}, expected [positions, {self._rope_dim}] "
            f"(cos | sin) with at least max_context={self._max_context} positions"
        )


def _matches(lengths: Sequence[int], shape: Shape) -> bool:
    return len(lengths) == len(shape) and all(
        isinstance(needed, str) or needed == length
        for length, needed in zip(lengths, shape, strict=True)
    )


def _refuse_rows(name: str, tensor: Tensor, row_bytes: int) -> NoReturn:
    if tensor.stride(-1) != 1:
        raise InvalidInput(
            f"the last dimension of {name} has stride {tensor.stride(-1)}: make it contiguous"
        )
    raise InvalidInput(
        f"rows of {name} start at address {tensor.data_ptr()} and lie {row_bytes} bytes apart: "
        f"both must be multiples of 16 bytes, so that kernels can load 16 at a time"
    )


def _refuse_strides(name: str) -> NoReturn:
    raise InvalidInput(f"{name} is not contiguous: call .contiguous() once, at load time")


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
        raise InvalidInput(
            f"layer {layer} compresses, but {lacking} is missing: append takes c and z, "
            f"and index_c and index_z of a layer whose indexer compresses"
        )
    raise InvalidInput(
        f"layer {layer} makes an entry of every token, without a gate: leave {name}z out"
    )


def layer_weights(weights: object) -> None:
    if not isinstance(weights, LayerWeights):
        raise InvalidInput(f"weights are {type(weights).__name__}, must be LayerWeights")


def is_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise InvalidInput(f"{name} is {type(value).__name__}, must be a tensor")
    if value.layout is not torch.strided or value.is_nested:  # it has no strides
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise InvalidInput(f"{name} is a tensor of layout {kind}, must be a dense one")
