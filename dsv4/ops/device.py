"""Where launches go. torch runs an operation on the device of its tensors; Triton, events and
graphs use the current device, whatever tensors they are given."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_HERE: AbstractContextManager[Any] = nullcontext()


def is_current(device: torch.device) -> bool:
    """Whether kernels launched now go to this device; true where nothing is launched."""
    is_chosen = device.type == "cuda" and device.index is not None
    return not is_chosen or device.index == torch.cuda.current_device()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels are launched on a device, and events are recorded there."""
    return _HERE if is_current(device) else torch.cuda.device(device)


def total_bytes(device: torch.device) -> int | None:
    """All memory of a device, used or not; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "cpu" and hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
