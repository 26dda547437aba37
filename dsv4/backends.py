"""Which implementation of dsv4.ops.backend runs: plain PyTorch anywhere, or the Triton kernels."""

from __future__ import annotations

from importlib.util import find_spec
from typing import get_args

from dsv4.extras import needed_by

with needed_by("dsv4.backends"):
    import torch

from dsv4.errors import InvalidInput, MissingExtra
from dsv4.ops.backend import Backend, BackendName


def load_backend(
    name: BackendName | None, device: torch.device, *, batch_invariant: bool = False
) -> Backend:
    """`None` takes Triton on a GPU and the reference elsewhere. On a CPU the Triton kernels run
    only under its interpreter (TRITON_INTERPRET=1 before the first import): for tests. The
    reference is `batch_invariant` whether it is asked to be or not.
    Raises InvalidInput, MissingExtra."""
    default: BackendName = "triton" if device.type == "cuda" else "reference"
    chosen = default if name is None else name
    if not isinstance(chosen, str) or chosen not in get_args(BackendName):
        raise InvalidInput(f"unknown backend {chosen!r}: choose 'reference' or 'triton'")
    if chosen == "reference":
        from dsv4.reference.backend import ReferenceBackend

        return ReferenceBackend()
    if find_spec("triton") is None:
        raise MissingExtra(
            "the Triton backend needs the package triton, which is not installed: pip install "
            "'dsv4[torch]' brings it on Linux; elsewhere use backend='reference'"
        )
    from dsv4.kernels.backend import TritonBackend
    from dsv4.kernels.numerics import INTERPRETED

    if device.type != "cuda" and not INTERPRETED.value:
        raise InvalidInput(
            f"the Triton backend needs a GPU, the cache is on {device}: use backend='reference'"
        )
    return TritonBackend(device, batch_invariant=batch_invariant)
