"""The index tensor "tokens" of a step, made by hand: for benchmarks of one kernel."""

from __future__ import annotations

import torch


def step_tokens(
    *, requests: int, position: int, tokens_per_request: int = 1, device: str = "cuda"
) -> torch.Tensor:
    """int32 [tokens, 4] of a step whose requests all end at `position`."""
    request = torch.arange(requests).repeat_interleave(tokens_per_request)
    nth = torch.arange(tokens_per_request).repeat(requests)
    columns = (request, position - (tokens_per_request - 1) + nth, request, request)
    return torch.stack(columns, dim=1).to(device=device, dtype=torch.int32)
