"""The kernels as one object: dsv4.ops.backend says what each operation promises. The one place that
decides which kernel runs on which GPU."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Literal, TypeVar

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

from dsv4.cache.records import RecordFormat
from dsv4.errors import SchemaError
from dsv4.kernels import (
    append,
    attend,
    follow,
    gather,
    host_entries,
    index_query,
    index_scores,
    select,
    write_records,
)
from dsv4.kernels.launch import Repetition, repeatable
from dsv4.kernels.numerics import INTERPRETED
from dsv4.kernels.sizes import WIDE_MIN_TOKENS, attend_elements, split_count, wide_score_bytes
from dsv4.kernels.target import processors, target_of
from dsv4.kernels.warmup import warm_up
from dsv4.model import ModelSpec
from dsv4.ops.backend import BackendName
from dsv4.ops.calls import Attention, EntrySource, Scoring, Selection

LOGGER = logging.getLogger("dsv4")
Call = TypeVar("Call", Attention, Scoring)
Variant = Literal["wide", "whole"]
_STEPS: dict[Variant, str] = {"wide": "in chunks", "whole": "of few batch-invariant queries"}


class TritonBackend:
    """Raises UnsupportedGpu."""

    name: BackendName = "triton"

    follow = staticmethod(follow.follow)
    append = staticmethod(append.append)
    write_records = staticmethod(write_records.write_records)
    gather_entries = staticmethod(gather.gather_entries)
    gather_all_entries = staticmethod(gather.gather_all_entries)
    gather_window = staticmethod(gather.gather_window)
    prepare_index_queries = staticmethod(index_query.prepare_index_queries)
    resolve = staticmethod(host_entries.resolve)
    stage = staticmethod(host_entries.stage)

    def __init__(self, device: torch.device, *, batch_invariant: bool = False) -> None:
        self._device, self._batch_invariant = device, batch_invariant
        hopper = target_of(device).is_hopper and device.type == "cuda" and not INTERPRETED.value
        self._attend = _SpecialKernel("attend") if hopper else None
        self._wide_attend = _variant_of(self._attend, "wide")
        self._whole_attend = _variant_of(self._attend, "whole")
        self._index_scores = _SpecialKernel("index_scores") if hopper else None
        self._wide_scores = _variant_of(self._index_scores, "wide")

    def warm_up(
        self, calls: Callable[[], None], *, workers: int, progress: Callable[[int, int], None]
    ) -> int:
        if INTERPRETED.value:
            return 0
        return warm_up(calls, self._device, workers=workers, progress=progress)

    def check_format(self, record: RecordFormat) -> None:
        if record.value_dtype != "bfloat16":
            raise SchemaError(
                f"the Triton kernels compute from bfloat16 values, the format {record.name} keeps "
                f"{record.value_dtype}: use backend='reference' or another format"
            )

    def check_ratio(self, layer: int, ratio: int) -> None:
        if ratio & (ratio - 1):
            raise SchemaError(
                f"layer {layer} makes one entry of {ratio} tokens, and a tile of the Triton "
                f"kernels holds a power of two of them: use backend='reference'"
            )

    def check_apart(self) -> None:
        """They are written and read."""

    def repeatable(
        self, calls: Sequence[partial[None]], tensors: Sequence[Tensor], fixed: Sequence[Tensor]
    ) -> Repetition | None:
        def make() -> None:
            for call in calls:
                call()

        return repeatable(make, tensors, fixed)

    def index_scores(self, call: Scoring) -> None:
        _run(call, self._wide_scores, self._narrow_scores)

    def _narrow_scores(self, call: Scoring) -> None:
        _run(call, self._index_scores, index_scores.index_scores)

    def select(self, call: Selection) -> None:
        many = call.tokens_per_request
        select.select(
            call,
            score=self.index_scores,
            score_bytes=lambda rows: self._score_bytes(rows, tokens_per_request=many),
        )

    def select_workspace_bytes(
        self, rows: int, *, keys: EntrySource, top_k: int, block_entries: int = 0
    ) -> int:
        return select.select_workspace_bytes(
            rows,
            keys=keys,
            top_k=top_k,
            block_entries=block_entries,
            score_bytes=lambda rows: self._score_bytes(rows, tokens_per_request=rows),
        )

    def _score_bytes(self, rows: int, *, tokens_per_request: int) -> int:
        own = self._wide_scores.module if self._wide_scores else None
        if own is None or tokens_per_request < WIDE_MIN_TOKENS:
            return 0
        return wide_score_bytes(rows)

    def attend(self, call: Attention) -> None:
        if self._batch_invariant:
            call = replace(call, batch_invariant=True)
        _run(call, self._wide_attend, self._narrow_attend)

    def _narrow_attend(self, call: Attention) -> None:
        # few batch-invariant queries have the bits of many only if both kernels are Hopper's
        alike = self._attend is not None and self._attend.module is not None
        _run(call, self._whole_attend if alike else None, self._single_attend)

    def _single_attend(self, call: Attention) -> None:
        _run(call, self._attend, attend.attend)

    def attend_workspace_bytes(self, tokens: int, *, model: ModelSpec, max_entries: int) -> int:
        splits = split_count(model.window, max_entries)
        elements = attend_elements(tokens, model.heads, model.head_dim, splits)
        own = self._attend.module if self._attend else None
        if own is not None:
            elements = max(elements, own.workspace_elements(self._device))
        whole = self._whole_attend.module if self._whole_attend else None
        if whole is not None and self._batch_invariant:
            shape = tokens, model.heads, model.window, max_entries
            elements = max(elements, whole.workspace_elements(*shape, processors(self._device)))
        return 4 * elements


class _SpecialKernel:
    """An operation's kernel for one architecture, or a variant of it: `wide` for chunks, `whole`
    for few batch-invariant queries. It is written in Gluon, which changes with every Triton:
    `module` is None once it could not be imported or compiled."""

    def __init__(self, operation: str, variant: Variant | None = None) -> None:
        self.operation, self.variant = operation, variant
        self.module: ModuleType | None = None
        try:
            name = f"{operation}_{variant}" if variant else operation
            self.module = import_module(f"dsv4.kernels.hopper.{name}")
        except Exception as error:  # whatever a new Gluon raises in its decorators
            self.disable(error)

    def disable(self, error: Exception) -> None:
        """From now on another kernel runs. It computes the same result but is slower on this
        GPU."""
        self.module = None
        LOGGER.info("Hopper's kernel of %s cannot be compiled", self.operation, exc_info=error)
        what, instead = self.operation, "the portable one"
        if self.variant:
            what, instead = (
                f"{what} {_STEPS[self.variant]}",
                "the one of other steps, or the portable one,",
            )
        warnings.warn(
            f"Triton {triton.__version__} cannot compile Hopper's kernel of {what} "
            f"({type(error).__name__}): {instead} runs instead, which is slower. Hopper's "
            f"kernels are made for Triton 3.6 to 3.9 (docs/gpus.md); the logger dsv4 has the whole "
            f"error at INFO",
            RuntimeWarning,
            stacklevel=2,
        )


def _variant_of(kernel: _SpecialKernel | None, variant: Variant) -> _SpecialKernel | None:
    """A variant of an operation's kernel. It is not attempted where the base kernel could not be
    imported, because it imports that one."""
    if kernel is None or kernel.module is None:
        return None
    return _SpecialKernel(kernel.operation, variant)


def _run(call: Call, kernel: _SpecialKernel | None, portable: Callable[[Call], None]) -> None:
    """Tries a special kernel. A kernel is compiled before it is launched, so one that cannot be
    compiled has written no output; an earlier launch of the same call may have written
    workspace."""
    if kernel is not None and kernel.module is not None and kernel.module.supports(call):
        try:
            getattr(kernel.module, kernel.operation)(call)
        except TritonError as error:
            kernel.disable(error)
        else:
            return
    portable(call)
