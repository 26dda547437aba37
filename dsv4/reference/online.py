"""Groups that are kept folded: a ring of running softmax states, one a token.

The row of token p is the fold of its group's tokens up to p, in the order of their positions, so it
depends on the tokens alone and not on how steps cut them. A step goes on from the row of the token
before it; a rollback finds the row of the token that became the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.cache.pages import CompressorLayout
from dsv4.ops.calls import CompressorWrite, StepTensors
from dsv4.ops.columns import request_columns
from dsv4.reference.numerics import fold_token


def pool_groups(
    step: StepTensors,
    write: CompressorWrite,
    entry: Tensor,
    slot: Tensor,
    start: Tensor,
    first_row: Tensor,
) -> Tensor:
    """The pooled vectors fp32 [groups, width] of groups that the step closes."""
    ratio = write.layout.ratio
    end = (entry + 1) * ratio
    if write.c is None:
        state = _stored(step, write.layout, slot, end - 1)
    else:
        begin = torch.maximum(start, entry * ratio)
        folds = _folds(step, write, slot, start, first_row, begin, end)
        ((_, _, state),) = deque(folds, maxlen=1)
    return state[:, 2] / state[:, 1]


def write_states(step: StepTensors, write: CompressorWrite) -> None:
    """The states of the step's newest tokens into the ring."""
    layout = write.layout
    request = request_columns(step.batch)
    live = (request.slot >= 0) & (request.count > 0)
    if not live.any():
        return
    slot, start, count, first_row = request_columns(step.batch[live].long())
    end = start + count
    kept = torch.maximum(start, end - layout.state_rows)
    begin = torch.maximum(start, kept - kept % layout.ratio)
    ring = _ring(step, layout)
    for position, inside, state in _folds(step, write, slot, start, first_row, begin, end):
        keep = inside & (position >= kept)
        ring[slot[keep], position[keep] % layout.state_rows] = state[keep]


def _folds(
    step: StepTensors,
    write: CompressorWrite,
    slot: Tensor,
    start: Tensor,
    first_row: Tensor,
    begin: Tensor,
    end: Tensor,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Folds the tokens [begin, end) of each row, all rows at once: position, whether it is below
    `end`, and the state after it. What came before `begin` is in the ring."""
    c, z, ratio = write.c, write.z, write.layout.ratio
    assert c is not None
    assert z is not None
    state = _stored(step, write.layout, slot, begin - 1)
    for nth in range(int((end - begin).max())):
        position = begin + nth
        inside = position < end
        token = (first_row + position - start).clamp_max(c.shape[0] - 1)
        phase = position % ratio
        folded = fold_token(state, c[token], z[token] + write.ape[phase], phase == 0)
        state = torch.where(inside[:, None, None], folded, state)
        yield position, inside, state


def _stored(step: StepTensors, layout: CompressorLayout, slot: Tensor, position: Tensor) -> Tensor:
    return _ring(step, layout)[slot, position % layout.state_rows]


def _ring(step: StepTensors, layout: CompressorLayout) -> Tensor:
    arena, width = step.slot_arena, layout.width
    return arena.view(torch.float32).as_strided(
        (arena.shape[0], layout.state_rows, 3, width),
        (arena.stride(0) // 4, 3 * width, width, 1),
        layout.state_offset_bytes // 4,
    )
