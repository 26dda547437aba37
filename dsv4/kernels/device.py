"""What a launcher asks of the GPU that it launches on."""

from __future__ import annotations

from functools import cache

import torch

HOPPER = 9


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels in Gluon run there; without a GPU they do not."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER


@cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
