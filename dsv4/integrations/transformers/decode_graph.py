"""Decode steps captured once a padded batch size and replayed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsv4.cache.batch import Batch

_KEPT_WEIGHTS = 4
_Step = tuple[Tensor, Tensor, Callable[[], None]]  # ids, hidden states, replay
Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]


class DecodeGraphs:
    """Steps of one token per row, at sizes that are powers of two.

    `run(ids, batch)` is the model on static ids int64 [1, size] and a batch padded to that size. It
    reads nothing else that changes between steps, so its graph serves every later batch: the index
    tensors never move. A graph belongs to the weights and adapters that it was captured with; of
    several, those are kept that were used last.
    """

    def __init__(
        self,
        run: Callable[[Tensor, Batch], Tensor],
        *,
        max_rows: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._run, self._max_rows, self._device = run, max_rows, device
        self._capture = capture or CudaCapture()
        self._steps: OrderedDict[str | None, dict[int, _Step]] = OrderedDict()

    @property
    def sizes(self) -> list[int]:
        """Batch sizes that have been captured."""
        return sorted({size for steps in self._steps.values() for size in steps})

    def padded(self, rows: int) -> int:
        """The captured size that `rows` rows run at."""
        return min(1 << (rows - 1).bit_length(), self._max_rows)

    def __call__(self, ids: Tensor, batch: Batch, weights: str | None = None) -> Tensor:
        """[1, rows, hidden] of int64 `ids` [1, rows]; the batch is padded to `padded(rows)`.
        `weights` names what the model computes with now (weights.py)."""
        size, rows = batch.padded_tokens, ids.shape[1]
        steps = self._steps.get(weights)
        if steps is None or size not in steps:
            static = torch.zeros((1, size), dtype=torch.int64, device=self._device)
            static[:, :rows] = ids
            step = (static, *self._capture(lambda: self._run(static, batch)))
            steps = self._steps.setdefault(weights, {})
            steps[size] = step
            self._steps.move_to_end(weights)
            while len(self._steps) > _KEPT_WEIGHTS:  # not before: all share one pool of memory
                self._steps.popitem(last=False)
        elif len(self._steps) > 1:
            self._steps.move_to_end(weights)
        static, hidden, replay = steps[size]
        static[:, :rows] = ids
        replay()
        return hidden[:, :rows].clone()


class CudaCapture:
    """Runs a step once, so that its kernels are compiled, and captures it. It is a decode step, so
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
