"""Where a request continues: after a prefix hit, and after a rewind. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsv4.cache.prefix.node import PrefixNode
from dsv4.cache.schema import CacheSchema

StateSource = Literal["nothing", "rings", "snapshot", "replay", "state", "cut_replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """What the caller has to run so that a request reaches `end` tokens.

        [0, start)              nothing: entries and state are there
        [start, reused_tokens)  replay: entries are there and are not written; the rings fill
        [.., end)               compute, as usual

    `source` says where the state at `start` came from: "nothing" (start is 0), the request's own
    "rings", a "snapshot", the "state" of a request that was suspended, or "replay": the slot was
    zeroed, and what the replay leaves in it is exact from `reused_tokens` on. Outputs of replayed
    tokens must not be used.

    `exact` says whether the request then is what a cold run of the same tokens is. After a
    "cut_replay" (PrefixOptions.replay) it is not: the replayed tokens see no window row before
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


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Cached blocks that a prompt starts with, and how to continue after them."""

    nodes: list[PrefixNode]
    resume: Resume
    snapshot: PrefixNode | None


def resume_after(
    schema: CacheSchema, nodes: Sequence[PrefixNode | None], blocks: int, tokens: int, *, cut: bool
) -> PrefixMatch:
    """How a prompt of `tokens` tokens continues, of which `blocks` blocks are there: from the last
    snapshot or with a replay (a `cut` one) up to the end of the last block, whichever starts later.
    `nodes` are those blocks, or None before the start of the replay, where snapshots are of no use.
    """
    block_tokens = schema.block_tokens
    reused = blocks * block_tokens
    start = replay_start(schema, reused)
    cut_start = cut_replay_start(schema, reused) if cut else 0
    is_cut, start = cut_start > start, max(start, cut_start)
    cached = [node for node in nodes if node]
    for nth in range(len(nodes) - 1, -1, -1):
        at = (nth + 1) * block_tokens
        if at < start:
            break
        node = nodes[nth]
        if node is not None and node.snapshot is not None:
            resume = Resume(start=at, reused_tokens=reused, end=tokens, source="snapshot")
            return PrefixMatch(cached, resume, node)
    source: StateSource = "cut_replay" if is_cut else "replay" if start else "nothing"
    resume = Resume(start=start, reused_tokens=reused, end=tokens, source=source, exact=not is_cut)
    return PrefixMatch(cached, resume, None)


def cut_replay_start(schema: CacheSchema, reused_tokens: int) -> int:
    """Where a replay starts whose tokens see nothing before it, so that at `reused_tokens` the
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
