"""Decode steps captured once a padded batch size and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.prepare_forward import ForwardPlan

Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class DecodeGraphs:
    """Steps of one token per row, at sizes that are powers of two.

    `run(ids, plan)` is the model on static ids int64 [1, size] and a plan padded to that size. It
    reads nothing else that changes between steps, so its graph serves every later plan: a plan's
    tensors never move.
    """

    def __init__(
        self,
        run: Callable[[Tensor, ForwardPlan], Tensor],
        *,
        max_rows: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._run, self._max_rows, self._device = run, max_rows, device
        self._capture = capture or CudaCapture()
        self._steps: dict[int, tuple[Tensor, Tensor, Callable[[], None]]] = {}

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that have been captured."""
        return sorted(self._steps)

    def padded(self, rows: int) -> int:
        """The captured size that `rows` rows run at."""
        return min(1 << (rows - 1).bit_length(), self._max_rows)

    def __call__(self, ids: Tensor, plan: ForwardPlan) -> Tensor:
        """[1, rows, hidden] of int64 `ids` [1, rows]; the plan is padded to `padded(rows)`."""
        size, rows = plan.padded_tokens, ids.shape[1]
        if size not in self._steps:
            static = torch.zeros((1, size), dtype=torch.int64, device=self._device)
            static[:, :rows] = ids
            self._steps[size] = (static, *self._capture(lambda: self._run(static, plan)))
        static, hidden, replay = self._steps[size]
        static[:, :rows] = ids
        replay()
        return hidden[:, :rows].clone()


class CudaCapture:
    """Runs a step once, so that its kernels are compiled, and captures it. The step is narrow, so
    running it again changes nothing. All graphs share one memory pool: they never overlap. The
    device is the current one, in every call the same. torch's own stream for captures is of
    whichever device was the first to capture in this process, and would make that one current."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, step: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        self._stream = self._stream or torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            hidden = step()
        self._pool = graph.pool()
        return hidden, graph.replay


def can_capture(model: Any) -> bool:
    """Whether transformers runs the experts of this model without looking at the device's values:
    "batched_mm" always does, "grouped_mm" in bf16; "eager" loops over the experts that were hit."""
    experts: str = model.config._experts_implementation
    if model.device.type != "cuda":
        return False
    return experts == "batched_mm" or (experts == "grouped_mm" and model.dtype == torch.bfloat16)
