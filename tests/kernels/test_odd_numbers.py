"""Interpreted kernels on odd numbers against the reference: arenas and selections."""

from __future__ import annotations

import pytest
import torch

from tests.support.odd import odd_life, odd_stack


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (2, 3))]
)
def test_odd_numbers(seed: int):
    stacks = [odd_stack(seed, backend=backend) for backend in ("reference", "triton")]
    for expected, found in zip(*odd_life(seed, stacks), strict=True):
        assert torch.equal(expected, found)
