"""Folded groups: a ring of running softmax states, one per token.

The row of token p is the fold of its group's tokens up to p, in the order of their positions, so it
depends on the tokens alone and not on how steps divide them. A step continues from the row of the
token before it; a rollback finds the row of the token that is the last one again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from dsv4.cache.pages import CompressorLayout
from dsv4.ops.calls import CompressorWrite, StepTensors
from dsv4.ops.columns import request_columns
from dsv4.reference.groups import ClosedGroups
from dsv4.reference.numerics import fold_token
from dsv4.reference.pages import ring_rows


def pool_groups(step: StepTensors, write: CompressorWrite, groups: ClosedGroups) -> Tensor:
    """The pooled vectors fp32 [groups, width] of groups that the step closes."""
    ratio = write.layout.ratio
    end = (groups.entry + 1) * ratio
    if write.c is None:
        state = _stored(step, write.layout, groups.slot, end - 1)
    else:
        begin = torch.maximum(groups.start, groups.entry * ratio)
        folds = _folds(step, write, groups.slot, groups.start, groups.first_row, begin, end)
        ((_, _, state),) = deque(folds, maxlen=1)
    _, weight, product = state.unbind(-2)
    return product / weight


def write_states(step: StepTensors, write: CompressorWrite) -> None:
    """The states of the step's newest tokens into the ring."""
    layout = write.layout
    request = request_columns(step.batch)
    live = (request.slot >= 0) & (request.count > 0)
    if not live.any():
        return
    slot, start, count, first_row = request_columns(step.batch[live].long())
    end = start + count
    states = _states(step, layout)  # [slots, ring rows, 3, width]
    kept = torch.maximum(start, end - states.shape[1])
    begin = torch.maximum(start, kept - kept % layout.ratio)
    for position, inside, state in _folds(step, write, slot, start, first_row, begin, end):
        keep = inside & (position >= kept)
        states[slot[keep], position[keep] % states.shape[1]] = state[keep]


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
    ape = write.ape
    assert ape is not None
    state = _stored(step, write.layout, slot, begin - 1)
    for nth in range(int((end - begin).max())):
        position = begin + nth
        inside = position < end
        token = (first_row + position - start).clamp_max(c.shape[0] - 1)
        phase = position % ratio
        folded = fold_token(state, c[token], z[token] + ape[phase], phase == 0)
        state = torch.where(inside[:, None, None], folded, state)
        yield position, inside, state


def _stored(step: StepTensors, layout: CompressorLayout, slot: Tensor, position: Tensor) -> Tensor:
    states = _states(step, layout)
    return states[slot, position % states.shape[1]]


def _states(step: StepTensors, layout: CompressorLayout) -> Tensor:
    assert layout.state is not None
    return ring_rows(step.slot_arena, layout.state, 3, layout.width)
