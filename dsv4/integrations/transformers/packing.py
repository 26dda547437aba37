"""Which columns of a padded batch are tokens, and how they are packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsv4.errors import InvalidInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The tokens of a [batch, columns] step in row-major order, `counts[row]` of each row.

    `mask` marks tokens (as opposed to padding), on the host; `where` int64 [tokens] are their
    places in the flattened batch, on the device, or None without padding.
    """

    mask: NDArray[np.bool_]
    counts: tuple[int, ...]
    where: Tensor | None

    @property
    def batch(self) -> int:
        return len(self.counts)

    @property
    def columns(self) -> int:
        return int(self.mask.shape[1])

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def pack(self, batched: Tensor) -> Tensor:
        """[batch, columns, …] → [1, tokens, …]"""
        flat = batched.flatten(0, 1)
        return (flat if self.where is None else flat[self.where]).unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """[tokens, …] → [batch · columns, …], zeros where there is padding."""
        if self.where is None:
            return packed
        flat = packed.new_zeros((self.batch * self.columns, *packed.shape[1:]))
        flat[indices_for(packed, self.where)] = packed
        return flat

    def rows_of(self, batched: Tensor) -> list[NDArray[np.int64]]:
        """The tokens of each row of a [batch, columns] tensor, on the host."""
        host = np.asarray(batched.cpu())
        return [host[row][self.mask[row]] for row in range(self.batch)]

    def after(self, starts: Sequence[int], device: torch.device) -> Packing:
        """Without the first `starts[row]` tokens of each row."""
        nth = np.cumsum(self.mask, axis=1)
        return make_packing(self.mask & (nth > np.asarray(starts)[:, None]), device)

    def pieces(self, max_tokens: int) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
        """The packed tokens in runs of at most `max_tokens`, each with its (row, count) pairs."""
        if (tokens := self.tokens) <= max_tokens and min(self.counts) > 0:
            yield slice(0, tokens), [*enumerate(self.counts)]
            return
        ends = np.cumsum(self.counts)
        for first in range(0, self.tokens, max_tokens):
            last = min(first + max_tokens, self.tokens)
            inside = np.minimum(ends, last) - np.maximum(ends - self.counts, first)
            rows = np.flatnonzero(inside > 0).tolist()
            yield slice(first, last), [(row, int(inside[row])) for row in rows]


def read_packing(
    *,
    batch: int,
    columns: int,
    past_columns: int,
    past_mask: Tensor | None,
    lengths: Sequence[int],
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    device: torch.device,
) -> Packing:
    """The packing of a step after `past_columns` columns, in which row r has `lengths[r]` tokens.

    `attention_mask` is transformers' 2D mask over past and new columns; for the past ones it must
    agree with `past_mask`, if that is given. Positions count only tokens, so `position_ids`, if
    given, must do so too at every token. Raises InvalidInput.
    """
    mask = _new_columns(attention_mask, batch, columns, past_columns)
    if past_mask is not None and attention_mask is not None:
        _check_past(attention_mask, past_mask)
    if not mask.any():
        raise InvalidInput("attention_mask hides every new column, so no token is left to run")
    if position_ids is not None:
        given = _positions(position_ids, batch, columns)
        expected = np.cumsum(mask, axis=1) - 1 + np.asarray(lengths)[:, None]
        wrong = np.argwhere(mask & (given != expected))
        if len(wrong):
            row, column = wrong[0].tolist()
            raise InvalidInput(
                f"position_ids of row {row}, column {column} is {given[row, column]}, not "
                f"{expected[row, column]}: positions count the tokens that attention_mask shows, "
                f"from 0 in each row; leave position_ids out, and pad on the left for generate"
            )
    return make_packing(mask, device)


def make_packing(mask: NDArray[np.bool_], device: torch.device) -> Packing:
    """The packing of a batch whose tokens `mask` [batch, columns] shows."""
    where = None
    if not mask.all():
        where = torch.from_numpy(np.flatnonzero(mask)).to(device)
    return Packing(mask=mask, counts=tuple(mask.sum(axis=1).tolist()), where=where)


def indices_for(tensor: Tensor, indices: Tensor) -> Tensor:
    """A copy of indices as int64, on a tensor's device: layers may be on several devices."""
    return tensor.new_empty(indices.shape, dtype=torch.int64).copy_(indices)


def _new_columns(
    mask: Tensor | None, batch: int, columns: int, past_columns: int
) -> NDArray[np.bool_]:
    """Which of the new columns are tokens."""
    if mask is None:
        return np.ones((batch, columns), dtype=bool)
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        found = f"{mask.dim()} dimensions" if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidInput(
            f"attention_mask with {found}: the fast path builds no dense mask, so give the 2D one "
            f"[batch, columns], 1 for a token and 0 for padding"
        )
    if mask.shape != (batch, past_columns + columns):
        raise InvalidInput(
            f"attention_mask is {list(mask.shape)}, expected [{batch}, {past_columns + columns}]: "
            f"one column for each of the {past_columns} processed and {columns} new ones"
        )
    return np.asarray(mask[:, past_columns:].bool().cpu())


def _check_past(mask: Tensor, past: Tensor) -> None:
    wrong = mask[:, : past.shape[1]].to(past.device).bool() != past
    if not bool(wrong.any()):
        return
    row, column = wrong.nonzero()[0].tolist()
    back = f"crop({column})" if column else "reset()"
    was, shown = ("a token", "hides") if past[row, column] else ("padding", "shows")
    raise InvalidInput(
        f"attention_mask {shown} row {row}, column {column}, which was {was} when it ran: what the "
        f"cache holds stays as it is; cache.{back} and run the columns after it again"
    )


def _positions(position_ids: Tensor, batch: int, columns: int) -> NDArray[np.int64]:
    is_tensor = isinstance(position_ids, Tensor)
    if not is_tensor or tuple(position_ids.shape) not in ((1, columns), (batch, columns)):
        found = list(position_ids.shape) if is_tensor else type(position_ids).__name__
        raise InvalidInput(
            f"position_ids is {found}, expected [{batch}, {columns}]: one position for each new "
            f"column"
        )
    return np.asarray(position_ids.expand(batch, columns).cpu())
