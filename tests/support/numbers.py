"""The one source of test numbers: integer arithmetic, so that every machine draws the same ones.

What torch.randn gives depends on the CPU. Here number i of a seed is a hash of both, and becomes a
float by IEEE operations alone. No test may hang on the numbers that its seed happens to give: run
with DSV4_TEST_SEED=1, 2, … all seeds become others.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SHIFT = int(os.environ.get("DSV4_TEST_SEED", "0"))
_STRIDE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_ODD = np.uint64(0x0000FFFF0000FFFF)
# the sum of four uniform 16-bit numbers: its middle and its standard deviation
_MIDDLE, _DEVIATION = 4 * 0xFFFF // 2, math.sqrt(4 * (2**32 - 1) / 12)


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64, in place: every bit of the result depends on every bit of the counter."""
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


class Numbers:
    """Draws from one seed, one after the other. `shift` is that of DSV4_TEST_SEED unless given."""

    def __init__(self, seed: int = 0, *, shift: int = SHIFT) -> None:
        start = (seed * 2 + 1) * 0x5851F42D4C957F2D + shift * 0x14057B7EF767814F
        self._key = int(_mixed(np.array([start & _MASK], dtype=np.uint64))[0])
        self._drawn = 0

    def words(self, count: int) -> NDArray[np.uint64]:
        """So many 64-bit words."""
        first = (self._key + self._drawn * _STRIDE) & _MASK
        self._drawn += count
        counters = np.arange(count, dtype=np.uint64)
        counters *= np.uint64(_STRIDE)
        counters += np.uint64(first)
        return _mixed(counters)

    def normal(self, *shape: int) -> Tensor:
        """fp32, of mean 0 and deviation 1, within ±3.5: nearly a normal distribution."""
        words = self.words(math.prod(shape))
        pairs = (words & _ODD) + ((words >> np.uint64(16)) & _ODD)  # two sums of two
        total = (pairs + (pairs >> np.uint64(32))).astype(np.uint32).view(np.int32).reshape(shape)
        return (torch.from_numpy(total) - _MIDDLE).float() * (1.0 / _DEVIATION)

    def heavy(self, *shape: int, spread: float = 1.0) -> Tensor:
        """fp32 normal numbers times powers of two: outliers of e^(3·spread) times their size."""
        power = (self.normal(*shape) * (spread / math.log(2))).round().int()
        return self.normal(*shape) * ((power + 127) << 23).view(torch.float32)

    def uniform(self, *shape: int) -> Tensor:
        """fp32 in [0, 1): multiples of 2^-24."""
        top = (self.words(math.prod(shape)) >> np.uint64(40)).astype(np.float32)
        return torch.from_numpy(top.reshape(shape)) * 2.0**-24

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 in [low, high), less than 2^32 apart."""
        top = self.words(math.prod(shape)) >> np.uint64(32)
        scaled = (top * np.uint64(high - low)) >> np.uint64(32)
        return torch.from_numpy(scaled.astype(np.int64).reshape(shape)) + low

    def bits(self, *shape: int) -> Tensor:
        """int32, every pattern as likely as any other."""
        low = (self.words(math.prod(shape)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        return torch.from_numpy(low.view(np.int32).reshape(shape))

    def permutation(self, count: int) -> Tensor:
        """int64: 0 … count-1 in some order."""
        return torch.from_numpy(np.argsort(self.words(count), kind="stable"))
