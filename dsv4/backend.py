"""Which implementation runs: plain PyTorch anywhere, or the Triton kernels.

Both offer the same functions on the same arguments and leave the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dsv4.cache.schema import Page
from dsv4.cache.writes import CompressorWrite, StepTensors, WindowWrite
from dsv4.errors import InvalidInput

BackendName = Literal["reference", "triton"]
Append = Callable[[StepTensors, WindowWrite | None, Sequence[CompressorWrite]], None]
WriteRecords = Callable[[Tensor, Page, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The operations of one implementation."""

    name: BackendName
    append: Append
    write_records: WriteRecords


def load_backend(name: BackendName | None, device: torch.device) -> Backend:
    """`None` takes Triton on a GPU and the reference elsewhere. On a CPU the Triton kernels run
    only under its interpreter (TRITON_INTERPRET=1 before the first import): for tests."""
    chosen = name or ("triton" if device.type == "cuda" else "reference")
    if chosen == "reference":
        from dsv4.reference.append import append, write_records

        return Backend(name="reference", append=append, write_records=write_records)
    if chosen != "triton":
        raise InvalidInput(f"unknown backend {chosen!r}: choose 'reference' or 'triton'")
    from dsv4.kernels import append as kernel
    from dsv4.kernels.numerics import INTERPRETED
    from dsv4.kernels.write_records import write_records as write_records_kernel

    if device.type != "cuda" and not INTERPRETED.value:
        raise InvalidInput(
            f"the Triton backend needs a GPU, the cache is on {device}: use backend='reference'"
        )
    return Backend(name="triton", append=kernel.append, write_records=write_records_kernel)
