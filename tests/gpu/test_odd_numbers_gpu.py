"""Compiled kernels on odd numbers against the reference: arenas and selections."""

from __future__ import annotations

import pytest
import torch

from tests.support.odd import odd_life, odd_stack

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(12))
def test_odd_numbers(seed: int) -> None:
    stacks = [
        odd_stack(seed, device=device, backend=backend)
        for device, backend in (("cpu", "reference"), ("cuda", "triton"))
    ]
    for expected, found in zip(*odd_life(seed, stacks), strict=True):
        assert torch.equal(expected, found)
