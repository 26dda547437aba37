"""One cached block in the tree of prefixes. Torch-free."""

from __future__ import annotations


class PrefixNode:
    """The block is number `depth` of every prompt that it is in, from 0. `children` counts the
    cached blocks that come right after it, `pins` those pins that name it. `snapshot` is the row of
    the state at its end, if that is kept; `stored`: a tier has its bytes, as far as is known.
    `last_use` and `queued` belong to the eviction policy."""

    __slots__ = (
        "block_id",
        "children",
        "depth",
        "digest",
        "last_use",
        "parent",
        "pins",
        "queued",
        "snapshot",
        "stored",
    )

    def __init__(self, digest: bytes, block_id: int, parent: PrefixNode | None) -> None:
        self.digest, self.block_id, self.parent = digest, block_id, parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children = self.pins = self.last_use = 0
        self.snapshot: int | None = None
        self.queued = self.stored = False
