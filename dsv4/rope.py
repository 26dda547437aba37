"""Rotation tables: cos and sin of every position, in fp32, as DeepSeek's code computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dsv4.model import ModelSpec


def rope_frequencies(model: ModelSpec, *, yarn: bool) -> Tensor:
    """fp32 [rope_dim / 2] angles a position. `yarn` is `LayerSpec.yarn` of the layer."""
    rope, dim = model.rope, model.rope_dim
    theta = rope.compress_theta if yarn else rope.theta
    frequencies = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if not yarn or rope.yarn_factor == 1.0:
        return frequencies

    def pair_of(rotations: float) -> float:
        turns = rope.yarn_original_tokens / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(pair_of(rope.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.yarn_beta_slow)), dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    keep = 1.0 - ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return frequencies / rope.yarn_factor * (1.0 - keep) + frequencies * keep


def rope_table(
    model: ModelSpec, *, yarn: bool, tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """fp32 [tokens, rope_dim]: cos of all pairs, then sin of all pairs, one row a position.

    Angles are fp32 position × fp32 frequency, as trained. 256 bytes a position: engines share one
    table with their queries.
    """
    positions = torch.arange(tokens, dtype=torch.float32)
    angles = torch.outer(positions, rope_frequencies(model, yarn=yarn))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
