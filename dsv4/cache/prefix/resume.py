"""From where a request goes on: after a prefix hit, and after a rewind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsv4.cache.schema import CacheSchema

StateSource = Literal["nothing", "rings", "snapshot", "replay", "state", "cut_replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What the caller has to run so that a request reaches `end` tokens.

        [0, start)              nothing: entries and state are there
        [start, reused_tokens)  replay: entries are there and are not written; the rings fill
        [.., end)               compute, as ever

    `source` says where the state at `start` came from: "nothing" (start is 0), the request's own
    "rings", a "snapshot", the "state" of a request that was suspended, or "replay": the slot was
    zeroed, and what the replay leaves in it is exact from `reused_tokens` on. Outputs of replayed
    tokens are not to be used.

    `exact` says whether the request then is what a cold run of the same tokens is. After a
    "cut_replay" (PrefixOptions.replay) it is not: the replayed tokens see no window row in front of
    `start`, so the rows that they leave are others, and with them all that is computed from
    `reused_tokens` on: window rows, entries, index keys, outputs. Entries and index keys below are
    others' and exact. The replay runs in one step.
    """

    start: int
    reused_tokens: int
    end: int
    source: StateSource
    exact: bool = True

    @property
    def run(self) -> range:
        """Positions of the tokens to run."""
        return range(self.start, self.end)

    @property
    def replay(self) -> range:
        """Those of them whose entries exist."""
        return range(self.start, max(self.start, self.reused_tokens))


def cut_replay_start(schema: CacheSchema, reused_tokens: int) -> int:
    """Where a replay starts whose tokens see nothing in front of it, so that at `reused_tokens` the
    windows are full; 0 where all fits one window."""
    return max(0, reused_tokens - schema.model.window)


def replay_start(schema: CacheSchema, reused_tokens: int) -> int:
    """Where a replay from a zeroed slot must start so that the state at `reused_tokens` is exact.

    A layer is wrong for window - 1 tokens longer than the layer below it, so that many per layer
    are enough for the windows; a whole window per layer keeps the start on a block. Where groups
    overlap, the whole last group must be right in its layer too, which takes longer only if groups
    are longer than window and layers together.
    """
    window = schema.model.window
    back = window * len(schema.layers)
    for layer in schema.layers:
        if layer.spec.owns_entries and layer.spec.overlap:
            back = max(back, layer.spec.ratio + layer.spec.layer * (window - 1))
    return max(0, reused_tokens - back)
