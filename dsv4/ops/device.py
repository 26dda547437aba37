"""Where launches go. torch sends an operation to the device of its tensors; Triton, events and
graphs go to the device that is current, whatever tensors they are given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_HERE: AbstractContextManager[Any] = nullcontext()


def is_current(device: torch.device) -> bool:
    """Whether kernels that are launched now go to a device; where nothing is launched they do."""
    return device.type != "cuda" or device.index in (None, torch.cuda.current_device())


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels are launched on a device, and events are recorded there."""
    return _HERE if is_current(device) else torch.cuda.device(device)
