"""Host memory that a GPU can copy from and to in the background. The one file with torch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4.errors import InvalidInput
from dsv4.tiers.record import address


def pin(memory: memoryview) -> Callable[[], None]:
    """Registers memory with CUDA in its exact size, and returns the call that undoes it.

    torch's own pinned memory is rounded up to powers of two. Raises InvalidInput if the driver
    refuses, which it does for memory beyond the process's limit.
    """
    runtime = torch.cuda.cudart()
    where, size_bytes = address(memory), memory.nbytes
    code = int(runtime.cudaHostRegister(where, size_bytes, 0))
    if code:
        raise InvalidInput(
            f"CUDA does not register {size_bytes:,} bytes of host memory (error {code}): give the "
            f"host tier less, or raise the limit of locked memory (ulimit -l)"
        )

    def unpin() -> None:
        runtime.cudaHostUnregister(where)

    return unpin
