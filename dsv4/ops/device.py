"""Where launches go. torch sends an operation to the device of its tensors; Triton, events and
graphs go to the device that is current, whatever tensors they are given."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_HERE: AbstractContextManager[Any] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels are launched on a device, and events are recorded there."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(device)
