"""What the columns of a batch were: token ids, and which are padding."""

from __future__ import annotations

import torch
from torch import Tensor

UNKNOWN_ID = -1
_FIRST_COLUMNS = 256


class History:
    """`ids` int64 (-1 where embeddings were given) and `mask` bool (False: padding), both
    [rows, columns]. Room grows by doubling, so a column costs the same at any length. Made outside
    of inference mode, so that it can be written in every mode."""

    @torch.inference_mode(False)
    def __init__(self, rows: int) -> None:
        self.columns = 0
        self._ids = torch.empty((rows, 0), dtype=torch.int64)
        self._mask = torch.empty((rows, 0), dtype=torch.bool)

    @property
    def ids(self) -> Tensor:
        return self._ids[:, : self.columns]

    @property
    def mask(self) -> Tensor:
        return self._mask[:, : self.columns]

    def add(self, ids: Tensor | None, mask: Tensor) -> None:
        """Columns [rows, n]: their ids, if known, and which are real."""
        first, self.columns = self.columns, self.columns + mask.shape[1]
        device = mask.device if ids is None else ids.device
        if self.columns > self._ids.shape[1] or self._ids.device != device:
            self._grow(device)
        span = slice(first, self.columns)
        self._mask[:, span] = mask.to(self._mask.device)
        if ids is None:
            self._ids[:, span] = UNKNOWN_ID
        else:
            self._ids[:, span] = ids

    def cut(self, columns: int) -> None:
        self.columns = columns

    @torch.inference_mode(False)
    def take(self, rows: list[int]) -> History:
        """Row i is what row rows[i] was here."""
        taken = History(len(rows))
        chosen = torch.tensor(rows, dtype=torch.int64, device=self._ids.device)
        taken._ids, taken._mask, taken.columns = self._ids[chosen], self._mask[chosen], self.columns
        return taken

    @torch.inference_mode(False)
    def _grow(self, device: torch.device) -> None:
        rows, room = self._ids.shape
        room = max(room, _FIRST_COLUMNS)
        while room < self.columns:
            room *= 2
        grown = []
        for old in (self._ids, self._mask):
            new = torch.zeros((rows, room), dtype=old.dtype, device=device)
            new[:, : old.shape[1]] = old.to(device)
            grown.append(new)
        self._ids, self._mask = grown
