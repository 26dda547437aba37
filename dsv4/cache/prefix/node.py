"""One cached block in the tree of prefixes. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4.cache.prefix.hints import Hints


class PrefixNode:
    """The block is number `depth` of every prompt that it is in, from 0. `children` counts the
    cached blocks that come right after it, `pins` those pins that name it. `snapshot` is the row of
    the state at its end, if that is kept; `stored`: a tier has its bytes, as far as is known.
    `hints` are those of the request that has used it last. `root`, where the chain of digests
    begins, stands for the salt. Since when it is cached, and when it was found and used last, in
    seconds, is what `Ages` counts with. The rest belongs to the eviction policy
    (`Retention` says what it means)."""

    __slots__ = (
        "block_id",
        "cached_s",
        "children",
        "depth",
        "digest",
        "found_s",
        "hints",
        "is_cached",
        "is_first_child",
        "is_superseded",
        "is_turn_end",
        "keep_until",
        "last_use",
        "offered_use",
        "parent",
        "pins",
        "queued",
        "root",
        "snapshot",
        "stored",
        "turns",
        "used_s",
    )

    def __init__(
        self,
        digest: bytes,
        block_id: int,
        parent: PrefixNode | None,
        hints: Hints | None = None,
        root: bytes = b"",
    ) -> None:
        self.root: bytes = root if parent is None else parent.root
        self.digest, self.block_id, self.parent, self.hints = digest, block_id, parent, hints
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children = self.pins = self.last_use = 0
        self.snapshot: int | None = None
        self.is_cached = True  # it is in the index
        self.is_first_child = parent is not None and not parent.children
        self.stored = self.is_superseded = self.is_turn_end = False
        self.queued = self.offered_use = self.turns = 0
        self.keep_until = self.cached_s = self.found_s = self.used_s = 0.0

    @property
    def priority(self) -> int:
        return 0 if self.hints is None else self.hints.priority
